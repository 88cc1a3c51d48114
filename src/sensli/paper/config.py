"""What an experiment is: frozen records, read strictly from a file, resolved into one Settings per arm.

A file holds `settings` (what all arms share), `arms` (name -> the settings that differ) and `recipes` (name -> the
settings that differ from the file's). A Plan is what remains when recipe, arm and command-line options are applied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sensli.paper.errors import BadExperiment
from sensli.paper.reading import check_keys, merged, nearest, read

RESULT_FORMAT = 1  # part of every digest: results of another format are never mixed in

SELECTIONS = ("largest", "smallest", "random")
NETWORKS = ("fnn", "resnet")
DTYPES = ("float32", "float64")
FIGURES = ("curves", "times", "gradients", "heatmaps")


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


@dataclass(frozen=True)
class Data:
    """The data set; the split is drawn once from `split_seed` and shared by all runs."""

    name: str = "spirals"
    train: int = 450
    split_seed: int = 0

    def __post_init__(self) -> None:
        _need(self.train > 0, f"train must be at least 1, not {self.train}.")


@dataclass(frozen=True)
class Network:
    """`widths` lists the hidden layers; a resnet of L hidden layers is a first map and L - 1 residual blocks."""

    kind: str
    widths: tuple[int, ...]
    end_bias: bool = False  # resnet only: biases in the first and the last map
    first_activation: bool = False  # resnet only: tanh behind the first map

    def __post_init__(self) -> None:
        _need(self.kind in NETWORKS, f"unknown kind {self.kind!r}. {nearest(self.kind, NETWORKS)}")
        _need(len(self.widths) > 0, "widths is empty: name at least one hidden layer, for example [5].")
        _need(all(width > 0 for width in self.widths), f"widths must be positive, not {list(self.widths)}.")
        _need(
            len(set(self.widths)) == 1,
            f"widths {list(self.widths)} differ. The runs of an arm grow at different places and are trained as one "
            "stack, so all hidden layers need the same width.",
        )
        fixed = self.kind == "fnn" and (self.end_bias or self.first_activation)
        _need(not fixed, "end_bias and first_activation belong to kind 'resnet'; an fnn always has both.")


@dataclass(frozen=True)
class Optimizer:
    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _need(self.lr > 0, f"lr must be positive, not {self.lr}.")
        _need(0 <= self.momentum < 1, f"momentum must be in [0, 1), not {self.momentum}.")
        _need(self.weight_decay >= 0, f"weight_decay must not be negative, not {self.weight_decay}.")


@dataclass(frozen=True)
class Settings:
    """Everything that decides what one arm computes, but for the seeds."""

    network: Network
    optimizer: Optimizer
    batch: int
    epochs: int
    data: Data = field(default_factory=Data)
    engine: str = "stacked"
    insert_at: tuple[int, ...] = ()  # after how many epochs a layer is inserted; empty: never
    select: str = "largest"
    lr_scale: float = 1.0  # factor on the learning rate at each insertion
    tau: float = 0.0
    wake: bool = False  # give the dead units of a new ReLU layer random incoming weights (not in the paper)
    dtype: str = "float32"
    record_gradients: bool = False

    def __post_init__(self) -> None:
        _need(self.epochs > 0, f"epochs must be at least 1, not {self.epochs}.")
        _need(0 < self.batch <= self.data.train, f"batch must be between 1 and {self.data.train}, not {self.batch}.")
        _need(self.select in SELECTIONS, f"unknown select {self.select!r}. {nearest(self.select, SELECTIONS)}")
        _need(self.dtype in DTYPES, f"unknown dtype {self.dtype!r}. {nearest(self.dtype, DTYPES)}")
        _need(self.lr_scale > 0, f"lr_scale must be positive, not {self.lr_scale}.")
        _need(self.tau >= 0, f"tau must not be negative, not {self.tau}.")
        times = list(self.insert_at)
        _need(times == sorted(set(times)), f"insert_at must increase, not {times}.")
        inside = all(0 < time < self.epochs for time in times)
        _need(inside, f"insert_at must lie between 1 and {self.epochs - 1} (epochs - 1), not {times}.")


@dataclass(frozen=True)
class Recipe:
    """One reading of an experiment: as stated in the paper, as its scripts ran it, or a variation of ours."""

    note: str = ""
    runs: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One experiment file."""

    name: str
    title: str
    shows: str
    runs: int
    settings: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    recipes: dict[str, Recipe] = field(default_factory=lambda: {"stated": Recipe()})
    figures: tuple[str, ...] = ("curves",)
    smoothing: int = 1  # window of the moving average in the figures
    note: str = ""

    def __post_init__(self) -> None:
        _need(self.runs > 0, f"runs must be at least 1, not {self.runs}.")
        _need(self.smoothing > 0, f"smoothing must be at least 1, not {self.smoothing}.")
        _need(len(self.arms) > 0, "arms is empty: name at least one.")
        _need(len(self.recipes) > 0, "recipes is empty: leave the key out, or name at least one.")
        for figure in self.figures:
            _need(figure in FIGURES, f"unknown figure {figure!r}. {nearest(figure, FIGURES)}")
        for name in (*self.arms, *self.recipes, self.name):
            fine = name != "" and all(letter.isalnum() or letter in " @._+-" for letter in name) and name[0] != "."
            _need(fine, f"the name {name!r} becomes a folder: use letters, digits, spaces and @ . _ + - only.")


@dataclass(frozen=True)
class Options:
    """What the command line may change; part of what is stored through the settings it changes."""

    runs: int | None = None
    epochs_scale: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """One recipe of one experiment, ready to run."""

    experiment: Experiment
    recipe: str
    note: str
    runs: int
    seed: int
    arms: dict[str, Settings]

    @property
    def key(self) -> str:
        return f"{self.experiment.name}-{self.recipe}"


def parse(data: Mapping[str, Any], where: str) -> Experiment:
    """Read one experiment and check every recipe of every arm, so that a mistake shows before anything runs."""
    experiment = read(Experiment, data, where)
    for recipe in experiment.recipes:
        plan(experiment, recipe, Options(), where)
    return experiment


def plan(experiment: Experiment, recipe: str, options: Options, where: str | None = None) -> Plan:
    where = where or f"experiment {experiment.name}"
    if recipe not in experiment.recipes:
        raise BadExperiment(f"{where}: no recipe {recipe!r}. {nearest(recipe, experiment.recipes)}")
    if options.runs is not None and options.runs < 1:
        raise BadExperiment(f"{where}: --runs must be at least 1, not {options.runs}.")
    if not 0 < options.epochs_scale <= 100:
        raise BadExperiment(f"{where}: --epochs-scale must be positive (1 is the paper's), not {options.epochs_scale}.")
    chosen = experiment.recipes[recipe]
    base = merged(experiment.settings, chosen.settings)
    check_keys(base, [f.name for f in dataclasses.fields(Settings)], f"{where}, recipe {recipe!r}")
    arms = {}
    for name, changes in experiment.arms.items():
        spot = f"{where}, arm {name!r} ({recipe})"
        arms[name] = _scaled(read(Settings, merged(base, changes), spot), options.epochs_scale, spot)
    _check_figures(experiment, arms, where)
    runs = options.runs or chosen.runs or experiment.runs
    return Plan(experiment, recipe, chosen.note, runs, options.seed, arms)


def _check_figures(experiment: Experiment, arms: dict[str, Settings], where: str) -> None:
    """A figure needs something to draw; better said before the training than after it."""
    if "heatmaps" in experiment.figures and not any(arm.insert_at for arm in arms.values()):
        raise BadExperiment(f"{where}: the figure 'heatmaps' needs an arm that grows (insert_at).")
    recorded = any(arm.record_gradients and len(arm.insert_at) == 1 for arm in arms.values())
    if "gradients" in experiment.figures and not recorded:
        raise BadExperiment(f"{where}: the figure 'gradients' needs an arm with record_gradients and one insertion.")


def _scaled(settings: Settings, scale: float, where: str) -> Settings:
    """Epochs and insertion times shortened (or lengthened) together."""
    if scale == 1.0:
        return settings
    epochs = max(1, round(settings.epochs * scale))
    times = tuple(max(1, round(time * scale)) for time in settings.insert_at)
    try:
        return dataclasses.replace(settings, epochs=epochs, insert_at=times)
    except ValueError as error:
        raise BadExperiment(f"{where}: --epochs-scale {scale} is too small: {error}") from None


def digest(settings: Settings, seed: int) -> str:
    """A name for all that decides an arm's numbers: equal digests may share results, different ones never do."""
    content = {"settings": _spoken(settings), "seed": seed, "format": RESULT_FORMAT}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _spoken(record: Any) -> dict[str, Any]:
    """The fields that differ from their defaults: a setting added later, at its default, leaves old results valid."""
    said = {}
    for one in dataclasses.fields(record):
        value = getattr(record, one.name)
        if dataclasses.is_dataclass(value):
            said[one.name] = _spoken(value)
        elif value != one.default:
            said[one.name] = value
    return said
