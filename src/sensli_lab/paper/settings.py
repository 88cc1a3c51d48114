"""What decides the numbers of an experiment: strict records that check themselves, and how they are read from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from sensli.merits.merits import SELECTIONS
from sensli_lab.paper.reading import unknown_name
from sensli_lab.work.store import digest_of

RESULT_FORMAT = 1  # part of every digest: results of another format are never mixed in

NETWORKS = ("fnn", "resnet", "cnn")
DTYPES = ("float32", "float64", "bfloat16")  # the last one: autocast over float32 weights
METRICS = ("validation", "test")


def need(condition: bool, text: str) -> None:
    """The check of a record: what reads it says where the record is."""
    if not condition:
        raise ValueError(text)


def need_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(unknown_name(what, name, known))


@dataclass(frozen=True)
class DataSettings:
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
        need(self.train > 0, f"train must be at least 1, got {self.train}.")
        for name in ("validation", "test"):
            need(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}.")


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
        need_known("kind", self.kind, NETWORKS)
        need(len(self.widths) > 0, "widths is empty: name at least one hidden layer, for example [5].")
        need(all(width > 0 for width in self.widths), f"widths must be positive, got {list(self.widths)}.")
        fixed = self.kind != "resnet" and (self.end_bias or self.first_activation)
        need(not fixed, f"end_bias and first_activation are settings of kind 'resnet'; {self.kind} always has both.")
        if self.kind == "cnn":
            self._check_stages()
            return
        need(
            not self.channels and not self.repeats,
            f"channels and repeats are settings of kind 'cnn', got kind {self.kind!r}.",
        )
        need(
            len(set(self.widths)) == 1,
            f"widths {list(self.widths)} differ. The runs of an arm grow at different places and are trained as one "
            "stack, so all hidden layers need the same width.",
        )

    def _check_stages(self) -> None:
        need(len(self.channels) > 0, "channels is empty: name at least one stage, for example [64, 128, 256].")
        positive = all(number > 0 for number in (*self.channels, *self.repeats))
        need(positive, f"channels and repeats must be positive, got {list(self.channels)} and {list(self.repeats)}.")
        fits = len(self.repeats) in (0, len(self.channels))
        need(fits, f"repeats {list(self.repeats)} needs one number for each of the {len(self.channels)} stages.")


@dataclass(frozen=True)
class Optimizer:
    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        need(self.lr > 0, f"lr must be positive, got {self.lr}.")
        need(0 <= self.momentum < 1, f"momentum must be at least 0 and below 1, got {self.momentum}.")
        need(self.weight_decay >= 0, f"weight_decay must be at least 0, got {self.weight_decay}.")


@dataclass(frozen=True)
class Schedule:
    """The learning rate times `factor` when the error has not fallen for more than `patience` epochs."""

    patience: int = 10
    factor: float = 0.5
    metric: str = "validation"  # or "test", which decides about training by what it is later judged with

    def __post_init__(self) -> None:
        need(self.patience >= 0, f"patience must be at least 0, got {self.patience}.")
        need(0 < self.factor < 1, f"factor must be between 0 and 1, got {self.factor}.")
        need_known("metric", self.metric, METRICS)


@dataclass(frozen=True)
class Settings:
    """Everything that decides what one arm computes, except the seeds."""

    network: Network
    optimizer: Optimizer
    batch: int
    epochs: int
    data: DataSettings = field(default_factory=DataSettings)
    engine: str = "stacked"
    insert_at: tuple[int, ...] = ()  # after how many epochs a layer is inserted; empty: never
    select: str = "largest"
    lr_scale: float = 1.0  # factor on the learning rate at each insertion
    tau: float = 0.0
    # after how many epochs dead ReLU units get new rows, after an insertion there (not in the paper)
    recycle_at: tuple[int, ...] = ()
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
        need(self.epochs > 0, f"epochs must be at least 1, got {self.epochs}.")
        need(0 < self.batch <= self.data.train, f"batch must be between 1 and {self.data.train}, got {self.batch}.")
        need_known("select", self.select, SELECTIONS)
        need_known("dtype", self.dtype, DTYPES)
        need(self.lr_scale > 0, f"lr_scale must be positive, got {self.lr_scale}.")
        need(self.tau >= 0, f"tau must be at least 0, got {self.tau}.")
        for name in ("insert_at", "recycle_at"):
            times = list(getattr(self, name))
            need(times == sorted(set(times)), f"{name} must increase, got {times}.")
            inside = all(0 < time < self.epochs for time in times)
            need(inside, f"{name} must be between 1 and {self.epochs - 1} (epochs - 1), got {times}.")
        level = self.confidence is None or 0 < self.confidence < 1
        need(level, f"confidence must be between 0 and 1 (for example 0.99), got {self.confidence}.")
        largest = self.confidence is None or self.select == "largest"
        need(largest, f"confidence needs select = 'largest', got {self.select!r}.")
        need(0 <= self.tolerance < 1, f"tolerance must be at least 0 and below 1, got {self.tolerance}.")
        need(self.tolerance == 0 or self.confidence is not None, "tolerance needs a confidence (for example 0.99).")
        held_out = self.schedule is None or self.schedule.metric == "test" or self.data.validation > 0
        need(held_out, "the schedule needs validation images: set data.validation to at least 1.")


def digest(settings: Settings, seed: int) -> str:
    """A name for all that decides an arm's numbers."""
    return digest_of({"settings": _spoken(settings), "seed": seed, "format": RESULT_FORMAT})


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
