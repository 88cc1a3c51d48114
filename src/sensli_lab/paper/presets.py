"""Presets: the CNN experiments at a size that a GPU, a laptop or a test can afford.

A preset is part of an arm's settings, so of its digest, and of every figure's title. The spirals train in seconds and
have no presets: for them every preset is the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sensli_lab.errors import BadExperiment
from sensli_lab.paper.reading import unknown_name

if TYPE_CHECKING:
    from sensli_lab.paper.settings import Settings

SHORTEST_PATIENCE = 2  # of a schedule, in epochs: the error of a small test set moves up and down by itself


@dataclass(frozen=True)
class Preset:
    words: str
    scale: float = 1.0  # of epochs, insertion times and the schedule's patience together
    train: int | None = None  # images at most
    validation: int | None = None
    test: int | None = None
    runs: int | None = None  # at most
    batch: int | None = None  # at most: few images in large batches would give too few steps to learn anything
    confidence: float | None = None  # how measuring stops early, where the largest merit is looked for
    tolerance: float = 0.0


PRESETS = {
    "paper": Preset("everything as stated"),
    "day": Preset(
        "all images, half the epochs, at most three runs: a GPU-day or less for all five",
        0.5, runs=3, confidence=0.99, tolerance=0.1,
    ),
    "laptop": Preset(
        "2,000 images in batches of 32, a tenth of the epochs, at most three runs",
        0.1, 2_000, 500, 1_000, runs=3, batch=32, confidence=0.99, tolerance=0.1,
    ),
    "smoke": Preset(
        "256 images, a fiftieth of the epochs, one run: shows that it works, nothing more", 0.02, 256, 64, 128, 1
    ),
}  # fmt: skip


def apply_to(settings: Settings) -> bool:
    return settings.engine == "cnn"


def apply(name: str, settings: Settings, where: str) -> Settings:
    """The settings at the size of a preset."""
    if name not in PRESETS:
        raise BadExperiment(f"{where}: {unknown_name('preset', name, PRESETS)}")
    if not apply_to(settings) or name == "paper":
        return settings
    preset, data = PRESETS[name], settings.data
    train, validation = _at_most(data.train, preset.train), _at_most(data.validation, preset.validation)
    test = _at_most(data.test or 10**9, preset.test) if preset.test else data.test
    changes: dict[str, Any] = {
        "data": replace(data, train=train, validation=validation, test=test),
        "batch": min(_at_most(settings.batch, preset.batch), train),
        "preset": name,
    }
    if settings.insert_at and settings.select == "largest" and preset.confidence is not None:
        changes |= {"confidence": preset.confidence, "tolerance": preset.tolerance}
    try:
        return shorten_settings(replace(settings, **changes), preset.scale)
    except ValueError as error:
        raise BadExperiment(f"{where}: the preset {name!r} is too short: {error}") from None


def shorten_settings(settings: Settings, scale: float) -> Settings:
    """Epochs, insertion times and patience shortened (or lengthened) together."""
    if scale == 1.0:
        return settings
    epochs = max(1, round(settings.epochs * scale))
    times = tuple(max(1, round(time * scale)) for time in settings.insert_at)
    schedule = settings.schedule
    if schedule is not None:
        patience = max(min(schedule.patience, SHORTEST_PATIENCE), round(schedule.patience * scale))
        schedule = replace(schedule, patience=patience)
    return replace(settings, epochs=epochs, insert_at=times, schedule=schedule)


def runs(name: str, arms: Mapping[str, Settings], asked: int) -> int:
    """How many runs: as many as the experiment asks for, at most those of the preset."""
    return _at_most(asked, PRESETS[name].runs) if any(apply_to(settings) for settings in arms.values()) else asked


def _at_most(number: int, limit: int | None) -> int:
    return number if limit is None else min(number, limit)
