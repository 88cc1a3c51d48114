"""Small experiments on two spirals, as a file has them and as settings: seconds to train."""

from __future__ import annotations

from typing import Any

from sensli_lab.paper.planning import Plan, RunOptions, parse, plan
from sensli_lab.paper.settings import DataSettings, Network, Optimizer, Settings

GOOD: dict[str, Any] = {
    "name": "mine",
    "title": "a test",
    "shows": "nothing",
    "runs": 3,
    "settings": {
        "network": {"kind": "fnn", "widths": [4, 4]},
        "optimizer": {"lr": 0.1},
        "batch": 450,
        "epochs": 20,
    },
    "arms": {"LI": {"insert_at": [5]}, "small": {}},
    "recipes": {"stated": {}, "run": {"settings": {"optimizer": {"lr": 0.2}}}},
}

# what pages call a task of `sensli compare`, and what it is called there
COMPARED = {
    "two spirals": "spirals",
    "Fashion-MNIST": "fashion",
    "CIFAR-10": "vgg",
    "transformer": "text",
    "student-teacher": "teacher",
}


def make_plan(recipe: str = "stated", **options: Any) -> Plan:
    return plan(parse(GOOD, "mine.json"), recipe, RunOptions(**options))


def settings(**changes: Any) -> Settings:
    base: dict[str, Any] = {
        "network": Network("fnn", (4, 4)),
        "optimizer": Optimizer(lr=0.2),
        "batch": 90,
        "epochs": 24,
        "data": DataSettings(train=90),
        "insert_at": (6, 15),
        "dtype": "float64",
    }
    return Settings(**{**base, **changes})
