"""What decides the numbers of an experiment: strict records, every seed, and the machine, which decides none of them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import subprocess
import sys
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, Union

import torch
from torch import Tensor

from sensli.merits.merits import SELECTIONS
from sensli_lab.errors import BadExperiment

# ---- Strict reading: a plain dict becomes a frozen dataclass, or one line says which key is wrong and why.


T = TypeVar("T")

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list",
    dict: "a table of keys and values",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: the closest known one, and all of them."""
    names = sorted(known, key=lambda one: (not one.isdigit(), int(one) if one.isdigit() else 0, one))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}."


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The text for a name that is not one of those known."""
    return f"unknown {what} {name!r}. {nearest(name, known)}"


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            raise BadExperiment(f"{where}: {unknown('key', key, known)}")


def read(cls: type[T], data: object, where: str) -> T:
    """Read `data` into the dataclass `cls`; `where` names the file and the place in it for the error text."""
    if not isinstance(data, Mapping):
        raise BadExperiment(f"{where} must be {_WORDS[dict]}, got {_shown(data)}.")
    fields = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_keys(data, fields, where)
    hints = _hints(cls)  # type: ignore[arg-type]
    values = {key: _value(hints[key], data[key], f"{where}, {key}") for key in fields if key in data}
    for name, one in fields.items():
        needed = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise BadExperiment(f"{where}: the key {name!r} is missing.")
    try:
        return cls(**values)
    except ValueError as error:  # raised by the dataclass's own checks, which do not know where they are
        raise BadExperiment(f"{where}: {error}") from None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over` laid on top, tables merged key by key."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _value(kind: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return read(typing.cast(type, kind), value, where)
    origin = typing.get_origin(kind)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise BadExperiment(f"{where} must be {_WORDS[tuple]}, got {_shown(value)}.")
        item = typing.get_args(kind)[0]
        return tuple(_value(item, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise BadExperiment(f"{where} must be {_WORDS[dict]}, got {_shown(value)}.")
        item = typing.get_args(kind)[1]
        return {str(key): _value(item, entry, f"{where}, {key!r}") for key, entry in value.items()}
    if origin in (Union, types.UnionType):
        inner = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else _value(inner[0], value, where)
    if kind is Any:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is a subclass of int in Python, but `epochs: true` is a mistake
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise BadExperiment(f"{where} must be {_WORDS[kind]}, got {_shown(value)}.")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- What decides the numbers of one arm: frozen records that check themselves, and a name for all of it.


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
        raise ValueError(unknown(what, name, known))


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


# ---- Every random number of an experiment depends on (seed, run, purpose), so a run does not depend on its neighbours.


ORDER_BLOCK = 25  # epochs whose sample order comes from one generator


def run_seed(seed: int, run: int, purpose: str) -> int:
    """A 63-bit seed that is the same on every machine and in every process."""
    content = f"{seed}/{run}/{purpose}".encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def generator(seed: int, run: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(run_seed(seed, run, purpose))


def order_block(seed: int, runs: Sequence[int], block: int, samples: int) -> Tensor:
    """The order of the samples in epochs `block * ORDER_BLOCK` and following: [ORDER_BLOCK, runs, samples].

    Drawn afresh for each block, so that a resumed run needs no generator state.
    """
    order = torch.empty(ORDER_BLOCK, len(runs), samples, dtype=torch.long, device="cpu")
    for i, run in enumerate(runs):
        source = generator(seed, run, f"order {block}")
        for epoch in range(ORDER_BLOCK):
            torch.randperm(samples, generator=source, out=order[epoch, i], device=source.device)
    return order


# ---- What a training runs on: where the images are, which device, compiled or not. None of it decides what is computed.


_BF16_TRIAL = """
import torch
x = torch.randn(4, 3, 8, 8, device="{device}").to(memory_format=torch.channels_last)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1024, 2))
net = net.to("{device}", memory_format=torch.channels_last)
with torch.autocast("{device}", dtype=torch.bfloat16):
    loss = net(x).float().square().mean()
loss.backward()
assert torch.isfinite(net[0].weight.grad).all()
"""


@dataclass(frozen=True)
class Machine:
    data: Path | None = None
    device: str = "auto"
    compile: bool = False

    def __str__(self) -> str:
        threads = torch.get_num_threads()
        words = f"{self.chosen().type}, {threads} thread{'s' if threads > 1 else ''}"
        return words + (", compiled" if self.compile else "")

    def chosen(self) -> torch.device:
        """The device, or an error of one line that says why it is not available."""
        there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if self.device == "auto":
            return torch.device(next(name for name in ("cuda", "mps", "cpu") if there[name]))
        if not there.get(self.device, False):
            found = ", ".join(name for name, is_there in there.items() if is_there)
            raise BadExperiment(f"--device {self.device} is not available here. Available: {found}.")
        return torch.device(self.device)


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 on a GPU as long as the context lasts: rounded so, a convolution is no exact identity, and other layers would be offered."""
    parts: Any = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [each.allow_tf32 for each in parts]
    try:
        for each in parts:
            each.allow_tf32 = False
        yield
    finally:
        for each, was in zip(parts, before, strict=True):
            each.allow_tf32 = was


@lru_cache
def has_bf16(device: str) -> bool:
    """Whether a bfloat16 training step works: tried in a separate process, since it ends with a signal on some CPUs."""
    call = [sys.executable, "-c", _BF16_TRIAL.format(device=device)]
    try:
        return subprocess.run(call, capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
