"""What an experiment is: frozen records, read strictly from a file, resolved into one Settings per arm.

A file holds `settings` (what all arms share), `arms` (name -> the settings that differ) and `recipes` (name -> the
settings that differ from the file's). A Plan is what remains when recipe, arm and command-line options are applied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sensli.merits.ranking import SELECTIONS
from sensli.paper.errors import BadExperiment
from sensli.paper.plans import presets
from sensli.paper.plans.reading import check_keys, merged, read, unknown

RESULT_FORMAT = 1  # part of every digest: results of another format are never mixed in

NETWORKS = ("fnn", "resnet", "cnn")
DTYPES = ("float32", "float64", "bfloat16")  # the last one: autocast over float32 weights
METRICS = ("validation", "test")
FIGURES = ("curves", "times", "gradients", "heatmaps", "cost", "norms")
MOST_RUNS = 100_000  # each is listed, stored and shown


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def _need_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(unknown(what, name, known))


@dataclass(frozen=True)
class Data:
    """The data set; the split is drawn once from `split_seed` and shared by all runs.

    Images: `validation` of the official training images are held out for the schedule, `train` others are trained on,
    and `test` of the official test images are used (0: all of them).
    """

    name: str = "spirals"
    train: int = 450
    split_seed: int = 0
    validation: int = 0
    test: int = 0

    def __post_init__(self) -> None:
        _need(self.train > 0, f"train must be at least 1, got {self.train}.")
        for name in ("validation", "test"):
            _need(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Network:
    """`widths` lists the hidden layers; a resnet of L hidden layers is a first map and L - 1 residual blocks.

    A cnn has one stage per entry of `channels` (3 x 3 convolutions with ReLU, then 2 x 2 max-pooling), `repeats` says how
    many convolutions each stage has (empty: one), and `widths` lists the fully connected layers after them.
    """

    kind: str
    widths: tuple[int, ...]
    end_bias: bool = False  # resnet only: biases in the first and the last map
    first_activation: bool = False  # resnet only: tanh after the first map
    channels: tuple[int, ...] = ()  # cnn only
    repeats: tuple[int, ...] = ()  # cnn only

    def __post_init__(self) -> None:
        _need_known("kind", self.kind, NETWORKS)
        _need(len(self.widths) > 0, "widths is empty: name at least one hidden layer, for example [5].")
        _need(all(width > 0 for width in self.widths), f"widths must be positive, got {list(self.widths)}.")
        fixed = self.kind != "resnet" and (self.end_bias or self.first_activation)
        _need(not fixed, f"end_bias and first_activation are settings of kind 'resnet'; {self.kind} always has both.")
        if self.kind == "cnn":
            self._check_stages()
            return
        _need(
            not self.channels and not self.repeats,
            f"channels and repeats are settings of kind 'cnn', got kind {self.kind!r}.",
        )
        _need(
            len(set(self.widths)) == 1,
            f"widths {list(self.widths)} differ. The runs of an arm grow at different places and are trained as one "
            "stack, so all hidden layers need the same width.",
        )

    def _check_stages(self) -> None:
        _need(len(self.channels) > 0, "channels is empty: name at least one stage, for example [64, 128, 256].")
        positive = all(number > 0 for number in (*self.channels, *self.repeats))
        _need(positive, f"channels and repeats must be positive, got {list(self.channels)} and {list(self.repeats)}.")
        fits = len(self.repeats) in (0, len(self.channels))
        _need(fits, f"repeats {list(self.repeats)} needs one number for each of the {len(self.channels)} stages.")


@dataclass(frozen=True)
class Optimizer:
    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _need(self.lr > 0, f"lr must be positive, got {self.lr}.")
        _need(0 <= self.momentum < 1, f"momentum must be at least 0 and below 1, got {self.momentum}.")
        _need(self.weight_decay >= 0, f"weight_decay must be at least 0, got {self.weight_decay}.")


@dataclass(frozen=True)
class Schedule:
    """The learning rate times `factor` when the error has not fallen for more than `patience` epochs."""

    patience: int = 10
    factor: float = 0.5
    metric: str = "validation"  # or "test", which decides about training by what it is later judged with

    def __post_init__(self) -> None:
        _need(self.patience >= 0, f"patience must be at least 0, got {self.patience}.")
        _need(0 < self.factor < 1, f"factor must be between 0 and 1, got {self.factor}.")
        _need_known("metric", self.metric, METRICS)


@dataclass(frozen=True)
class Settings:
    """Everything that decides what one arm computes, except the seeds."""

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
    recycle_at: tuple[
        int, ...
    ] = ()  # after how many epochs dead ReLU units get new rows, after an insertion there (not in the paper)
    wake: bool = False  # give the dead units of a new ReLU layer random incoming weights (not in the paper)
    dtype: str = "float32"
    record_gradients: bool = False
    # for the engine "cnn" only
    schedule: Schedule | None = None
    confidence: float | None = None  # stop measuring when the best place is clear at this level
    tolerance: float = 0.0  # of the best merit, that such a place may miss
    fresh_optimizer: bool = False  # optimizer and schedule are rebuilt at each insertion
    from_start: bool = False  # the network that the same arm without this setting grew into, trained from scratch
    record_norms: bool = False  # all five norms at every place
    preset: str = "paper"

    def __post_init__(self) -> None:
        _need(self.epochs > 0, f"epochs must be at least 1, got {self.epochs}.")
        _need(0 < self.batch <= self.data.train, f"batch must be between 1 and {self.data.train}, got {self.batch}.")
        _need_known("select", self.select, SELECTIONS)
        _need_known("dtype", self.dtype, DTYPES)
        _need(self.lr_scale > 0, f"lr_scale must be positive, got {self.lr_scale}.")
        _need(self.tau >= 0, f"tau must be at least 0, got {self.tau}.")
        for name in ("insert_at", "recycle_at"):
            times = list(getattr(self, name))
            _need(times == sorted(set(times)), f"{name} must increase, got {times}.")
            inside = all(0 < time < self.epochs for time in times)
            _need(inside, f"{name} must be between 1 and {self.epochs - 1} (epochs - 1), got {times}.")
        level = self.confidence is None or 0 < self.confidence < 1
        _need(level, f"confidence must be between 0 and 1 (for example 0.99), got {self.confidence}.")
        largest = self.confidence is None or self.select == "largest"
        _need(largest, f"confidence needs select = 'largest', got {self.select!r}.")
        _need(0 <= self.tolerance < 1, f"tolerance must be at least 0 and below 1, got {self.tolerance}.")
        _need(self.tolerance == 0 or self.confidence is not None, "tolerance needs a confidence (for example 0.99).")
        held_out = self.schedule is None or self.schedule.metric == "test" or self.data.validation > 0
        _need(held_out, "the schedule needs validation images: set data.validation to at least 1.")


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
        _need(self.runs > 0, f"runs must be at least 1, got {self.runs}.")
        _need(self.smoothing > 0, f"smoothing must be at least 1, got {self.smoothing}.")
        _need(len(self.arms) > 0, "arms is empty: name at least one.")
        _need(len(self.recipes) > 0, "recipes is empty: leave the key out, or name at least one.")
        for figure in self.figures:
            _need_known("figure", figure, FIGURES)
        for name in (*self.arms, *self.recipes, self.name):
            fine = name != "" and all(letter.isalnum() or letter in " @._+-" for letter in name) and name[0] != "."
            _need(fine, f"the name {name!r} becomes a folder: use letters, digits, spaces and @ . _ + - only.")


@dataclass(frozen=True)
class Options:
    """What the command line may change; part of what is stored through the settings it changes."""

    runs: int | None = None
    epochs_scale: float = 1.0
    seed: int = 0
    preset: str = "paper"
    bf16: bool = False


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
    def preset(self) -> str:
        return next(iter(self.arms.values())).preset

    @property
    def key(self) -> str:
        return f"{self.experiment.name}-{self.recipe}" + ("" if self.preset == "paper" else f"-{self.preset}")

    @property
    def words(self) -> str:
        """The recipe, and the preset where it is not the paper's."""
        return self.recipe if self.preset == "paper" else f"{self.recipe}, {self.preset} preset"

    def grown(self, arm: str) -> str:
        """The arm whose grown networks this arm (`from_start`) trains from scratch."""
        wanted = dataclasses.replace(self.arms[arm], from_start=False, record_gradients=False, record_norms=False)
        for name, settings in self.arms.items():
            if name == arm:
                break
            if dataclasses.replace(settings, record_gradients=False, record_norms=False) == wanted:
                return name
        raise BadExperiment(
            f"experiment {self.experiment.name}, arm {arm!r}: from_start needs an arm above it with the same settings "
            "except from_start, whose networks it takes over."
        )


def parse(data: Mapping[str, Any], where: str) -> Experiment:
    """Read one experiment and check every recipe of every arm, so that a mistake shows before anything runs."""
    experiment = read(Experiment, data, where)
    for recipe in experiment.recipes:
        plan(experiment, recipe, Options(), where)
    return experiment


def plan(experiment: Experiment, recipe: str, options: Options, where: str | None = None) -> Plan:
    where = where or f"experiment {experiment.name}"
    if recipe not in experiment.recipes:
        raise BadExperiment(f"{where}: {unknown('recipe', recipe, experiment.recipes)}")
    if options.runs is not None and not 1 <= options.runs <= MOST_RUNS:
        raise BadExperiment(f"{where}: --runs must be between 1 and {MOST_RUNS:,}, got {options.runs}.")
    if not 0 < options.epochs_scale <= 100:
        raise BadExperiment(f"{where}: --epochs-scale must be positive and at most 100, got {options.epochs_scale}.")
    chosen = experiment.recipes[recipe]
    base = merged(experiment.settings, chosen.settings)
    check_keys(base, [f.name for f in dataclasses.fields(Settings)], f"{where}, recipe {recipe!r}")
    arms = {}
    for name, changes in experiment.arms.items():
        spot = f"{where}, arm {name!r} ({recipe})"
        settings = presets.apply(options.preset, read(Settings, merged(base, changes), spot), spot)
        settings = _scaled(settings, options.epochs_scale, spot)
        arms[name] = (
            dataclasses.replace(settings, dtype="bfloat16") if options.bf16 and presets.apply_to(settings) else settings
        )
    _check_figures(experiment, arms, where)
    runs = options.runs or presets.runs(options.preset, arms, chosen.runs or experiment.runs)
    result = Plan(experiment, recipe, chosen.note, runs, options.seed, arms)
    for name, settings in arms.items():
        if settings.from_start:
            result.grown(name)
    return result


def _check_figures(experiment: Experiment, arms: dict[str, Settings], where: str) -> None:
    """A figure needs something to draw; better said before the training than after it."""
    if "heatmaps" in experiment.figures and not any(arm.insert_at for arm in arms.values()):
        raise BadExperiment(f"{where}: the figure 'heatmaps' needs an arm that grows (insert_at).")
    recorded = any(arm.record_gradients and len(arm.insert_at) == 1 for arm in arms.values())
    if "norms" in experiment.figures and not any(arm.record_norms and arm.insert_at for arm in arms.values()):
        raise BadExperiment(f"{where}: the figure 'norms' needs an arm that grows with record_norms.")
    if "cost" in experiment.figures and not all(presets.apply_to(arm) for arm in arms.values()):
        raise BadExperiment(f"{where}: the figure 'cost' needs the engine 'cnn', which keeps the time.")
    if "gradients" in experiment.figures and not recorded:
        raise BadExperiment(f"{where}: the figure 'gradients' needs an arm with record_gradients and one insertion.")


def _scaled(settings: Settings, scale: float, where: str) -> Settings:
    try:
        return presets.shortened(settings, scale)
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
