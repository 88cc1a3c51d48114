"""The scikit-learn estimators against a grid of scikit-learn's own networks, on real tables that did not choose their defaults.

`SENSLI_TABLES=DIR python -m benchmarks --only tables` prints one line for each table as it is done, then the figures.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.figure import Figure
from benchmarks.tables import REPORTED, Table

DEPTHS, WIDTHS = (1, 2, 3, 4), (50, 100, 200)
ONE = (1, 100)  # the one of the grid that ours is compared with when it may not grow
FOLDS, MOST = 3, 800  # folds, and rows of a table
AGAIN = (1, 2, 3)  # seeds from which the best of the grid is trained again


@dataclass(frozen=True)
class Outcome:
    """What came of one table: scores on each fold, and seconds of one core."""

    table: str
    ours: list[float]
    ours_one: list[float]  # with one layer of a hundred units
    grid: dict[tuple[int, int], list[float]]
    again: list[float]  # the best of the grid, trained from other random numbers
    seconds: tuple[float, float]  # of ours, of the whole grid
    shape: str

    @property
    def best(self) -> tuple[int, int]:
        return max(self.grid, key=lambda size: statistics.mean(self.grid[size]))

    @property
    def error(self) -> float:
        """The standard error of the best of the grid, over the folds."""
        return statistics.stdev(self.grid[self.best]) / math.sqrt(len(self.ours))

    @property
    def difference(self) -> float:
        return statistics.mean(self.ours) - statistics.mean(self.grid[self.best])

    @property
    def difference_again(self) -> float:
        """Of the best of the grid itself, trained again: what it owes to having been the luckiest of twelve."""
        return statistics.mean(self.again) - statistics.mean(self.grid[self.best])

    @property
    def difference_chosen(self) -> float:
        """Against the size that was best on the other folds: the best of twelve on the test folds is partly the luckiest."""
        return statistics.mean(score - self._chosen(fold)[fold] for fold, score in enumerate(self.ours))

    def _chosen(self, fold: int) -> list[float]:
        return max(self.grid.values(), key=lambda scores: sum(scores) - scores[fold])

    @property
    def difference_one(self) -> float:
        return statistics.mean(self.ours_one) - statistics.mean(self.grid[ONE])

    def __str__(self) -> str:
        depth, width = self.best
        return (
            f"{self.table:14} {self.shape:>10} ours {statistics.mean(self.ours):.4f}  grid {statistics.mean(self.grid[self.best]):.4f} "
            f"({depth} x {width}) +- {self.error:.4f}  difference {self.difference:+.4f} ({self.difference / self.error:+.2f} errors, "
            f"{self.difference_chosen:+.4f} if the other folds choose)  again {self.difference_again:+.4f} "
            f"({self.difference_again / self.error:+.2f} errors)  "
            f"time {self.seconds[0] / self.seconds[1]:.2f}  one layer {self.difference_one:+.4f}"
        )


def outcomes(tables: Sequence[Table], folder: Path | None, rows: int = MOST, folds: int = FOLDS) -> Iterator[Outcome]:
    """One table after another; on each fold ours and all of the grid, so that both meet the same load of the machine."""
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # both on one thread: small matrices gain nothing from more
    try:
        with threadpool_limits(1), warnings.catch_warnings():
            # scikit-learn's networks often do not converge in their default number of epochs
            warnings.simplefilter("ignore")
            for table in tables:
                yield _outcome(table, folder, rows, folds)
    finally:
        torch.set_num_threads(threads)


def _outcome(table: Table, folder: Path | None, rows: int, count: int) -> Outcome:
    from sklearn.model_selection import KFold, StratifiedKFold

    x, y = table.load(folder, rows)
    ours, ours_one, seconds = list[float](), list[float](), [0.0, 0.0]
    grid: dict[tuple[int, int], list[float]] = {(depth, width): [] for depth in DEPTHS for width in WIDTHS}
    folds = (StratifiedKFold if table.classify else KFold)(count, shuffle=True, random_state=0)

    def run(estimator: Any, train: Any, test: Any) -> tuple[float, float]:
        start = time.process_time()
        estimator.fit(x[train], y[train])
        return float(estimator.score(x[test], y[test])), time.process_time() - start

    for fold in folds.split(x, y):
        score, took = run(_ours(table.classify), *fold)
        ours.append(score)
        seconds[0] += took
        ours_one.append(run(_ours(table.classify, layers=1, max_layers=1, max_width=ONE[1]), *fold)[0])
        for size, scores in grid.items():
            score, took = run(_theirs(*size, table.classify), *fold)
            scores.append(score)
            seconds[1] += took
    best = max(grid, key=lambda size: statistics.mean(grid[size]))
    again = [run(_theirs(*best, table.classify, seed), *fold)[0] for fold in folds.split(x, y) for seed in AGAIN]
    return Outcome(table.name, ours, ours_one, grid, again, (seconds[0], seconds[1]), f"{x.shape[0]} x {x.shape[1]}")


def _ours(classify: bool, **settings: Any) -> Any:
    from sensli.integrations.sklearn import GrowingClassifier, GrowingRegressor

    return (GrowingClassifier if classify else GrowingRegressor)(random_state=0, **settings)


def _theirs(depth: int, width: int, classify: bool, seed: int = 0) -> Any:
    """Standardised as ours does it inside, the targets too."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    sizes = (width,) * depth
    if classify:
        return make_pipeline(StandardScaler(), MLPClassifier(hidden_layer_sizes=sizes, random_state=seed))
    network = MLPRegressor(hidden_layer_sizes=sizes, random_state=seed)
    return make_pipeline(StandardScaler(), TransformedTargetRegressor(network, transformer=StandardScaler()))


def growing_estimators() -> list[Figure]:
    """The figures of all reported tables; the folder with the files is named by ``SENSLI_TABLES``."""
    folder = os.environ.get("SENSLI_TABLES")
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return [
            Figure(
                "tables: score below the grid, in errors",
                None,
                1.0,
                "needs scikit-learn: pip install 'sensli[sklearn]'",
            )
        ]
    if folder is None:
        return [
            Figure(
                "tables: score below the grid, in errors", None, 1.0, "needs SENSLI_TABLES, see benchmarks/tables.py"
            )
        ]
    return figures(list(printed(outcomes(REPORTED, Path(folder)))))


def figures(found: Sequence[Outcome]) -> list[Figure]:
    """What is promised, from all outcomes."""
    worst = min(found, key=lambda each: each.difference / each.error)
    luck = min(found, key=lambda each: each.difference_again / each.error)
    worst_one = min(found, key=lambda each: each.difference_one)
    ours, grid = (sum(each.seconds[side] for each in found) for side in (0, 1))
    how = f"{len(found)} tables, {len(found[0].ours)} folds"
    return [
        Figure("score below the best of the grid, in standard errors, worst", -worst.difference / worst.error, 1.0, worst.table),
        Figure("the same of the best of the grid itself, trained again", -luck.difference_again / luck.error, 1.0, luck.table),
        Figure("score minus that of the best of the grid, mean", statistics.mean(each.difference for each in found), 0.0, how, False),
        Figure("time of one growing fit / the grid of 12", ours / grid, 0.25, f"{ours:.0f} s / {grid:.0f} s"),
        Figure("one layer: score minus scikit-learn's, mean", statistics.mean(each.difference_one for each in found), 0.0, how, False),
        Figure("one layer: score minus scikit-learn's, worst", worst_one.difference_one, 0.0, worst_one.table, False),
    ]  # fmt: skip


def printed(found: Iterator[Outcome]) -> Iterator[Outcome]:
    for outcome in found:
        print(outcome, flush=True)
        yield outcome
