"""The scikit-learn estimators against a search over the depth of scikit-learn's own networks, on its own data sets."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from typing import Any

import torch

from benchmarks.figure import Figure

WIDTH, FOLDS = 100, 5
SEEDS = (0, 1, 2)  # one sample more or less of the smaller data sets is most of a standard error


def growing_estimators() -> list[Figure]:
    """Cross-validated score and time, against the best of one to four hidden layers of the same width."""
    try:
        from sklearn import datasets
    except ImportError:
        missing = "needs scikit-learn: pip install 'sensli[sklearn]'"
        return [Figure("score below the best depth, in standard errors", None, 1.0, missing)]
    names = {"digits": True, "wine": True, "breast_cancer": True, "diabetes": False}
    shortfalls, ours_seconds, search_seconds, details = [], 0.0, 0.0, []
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # both on one thread: small matrices gain nothing from more, and on a busy machine lose much
    limits = threadpool_limits(1)
    try:
        for name, classify in names.items():
            x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
            scores, seconds = _scores([_ours(classify, seed) for seed in SEEDS], x, y, classify)
            searched = [
                _scores([_theirs(depth, classify, seed) for seed in SEEDS], x, y, classify) for depth in (1, 2, 3, 4)
            ]
            best = max((its for its, _ in searched), key=statistics.mean)
            error = statistics.stdev(best) / math.sqrt(FOLDS)
            shortfalls.append((statistics.mean(best) - statistics.mean(scores)) / error)
            ours_seconds += seconds
            search_seconds += sum(its for _, its in searched)
            details.append(f"{name} {statistics.mean(scores):.3f} against {statistics.mean(best):.3f} +- {error:.3f}")
    finally:
        limits.restore_original_limits()
        torch.set_num_threads(threads)
    how = f"{ours_seconds:.0f} s / {search_seconds:.0f} s, {FOLDS}-fold, {len(SEEDS)} seeds, width {WIDTH}, four data sets"
    return [
        Figure("score below the best depth, in standard errors, worst of 4", max(shortfalls), 1.0, "; ".join(details)),
        Figure("time of one growing fit / search over four depths", ours_seconds / search_seconds, 0.5, how),
    ]


def _ours(classify: bool, seed: int) -> Any:
    from sensli.integrations.sklearn import GrowingClassifier, GrowingRegressor

    return (GrowingClassifier if classify else GrowingRegressor)(width=WIDTH, random_state=seed)


def _theirs(depth: int, classify: bool, seed: int) -> Any:
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if classify:
        return make_pipeline(StandardScaler(), MLPClassifier(hidden_layer_sizes=(WIDTH,) * depth, random_state=seed))
    scaled = TransformedTargetRegressor(
        MLPRegressor(hidden_layer_sizes=(WIDTH,) * depth, random_state=seed), transformer=StandardScaler()
    )
    return make_pipeline(StandardScaler(), scaled)


def _scores(estimators: list[Any], x: Any, y: Any, classify: bool) -> tuple[list[float], float]:
    """The score on each fold, mean over the estimators, which differ in their seeds; and the time of all."""
    from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score

    folds = (StratifiedKFold if classify else KFold)(FOLDS, shuffle=True, random_state=0)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's networks do not converge in their default number of epochs
        scores = [cross_val_score(estimator, x, y, cv=folds, error_score="raise") for estimator in estimators]
    return [float(sum(fold)) / len(scores) for fold in zip(*scores, strict=True)], time.perf_counter() - start
