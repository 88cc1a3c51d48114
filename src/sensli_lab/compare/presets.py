"""The size of a comparison: seeds, FLOPs and methods of each task, as asked for one by one or under one name. No torch: for the help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT = ("fixed", "sensli", "control")  # methods; so many seeds and FLOPs are in `Size`
_COMMON = (*DEFAULT, "rival")  # all under the common schedule that spend what the others spend


@dataclass(frozen=True)
class CompareSize:
    """How much of one task is computed.

    Args:
        seeds: Seeds 0 to this minus 1.
        budgets: Factors on the FLOPs of the task.
        methods: Names or kinds.
    """

    seeds: int = 5
    budgets: tuple[float, ...] = (1.0,)
    methods: tuple[str, ...] = DEFAULT


_SMALL, _LARGE = CompareSize(10, methods=(*_COMMON, "own")), CompareSize(1, (0.25,), _COMMON)
PRESETS = {
    "laptop": {
        "teacher": _SMALL,
        "spirals": _SMALL,
        "fashion": CompareSize(3, methods=_COMMON),
        "vgg": _LARGE,
        "resnet": _LARGE,
        "text": _LARGE,
    }
}


def size_of(
    task: str,
    preset: str | None = None,
    seeds: int | None = None,
    budgets: Sequence[float] | None = None,
    methods: Sequence[str] | None = None,
) -> CompareSize:
    """What a preset says of a task, or what holds without one; what is asked for expressly comes first."""
    found = PRESETS[preset][task] if preset is not None else CompareSize()
    return CompareSize(
        found.seeds if seeds is None else seeds,
        found.budgets if budgets is None else tuple(sorted(set(budgets))),
        found.methods if methods is None else tuple(methods),
    )
