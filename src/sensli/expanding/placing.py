"""Places by measurement: after which blocks new ones would bring most, or which blocks matter least, on data of the user's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sensli.cli.inputs import loss_for, read_batches, text_batches
from sensli.errors import ExpansionError
from sensli.expanding.checking import free_memory
from sensli.expanding.sibling import Described
from sensli.merits.catching import LossFunction
from sensli.merits.importance import measure_importance
from sensli.merits.measuring import measure
from sensli.modules.running import count_samples
from sensli.moves.finding import find_sites
from sensli.text.commands import MEASURED_PLACES
from sensli.text.tables import text_table

BEFORE_ALL = -1  # the place before the first block
_MEANING = {
    "merit": ("merit", "the squared norm of the gradient that a new block would get there; the largest are taken"),
    "least": (
        "importance",
        "the sum of |weight * gradient| over the block's own weights, a first-order estimate of what the loss would lose with them; "
        "the smallest are taken",
    ),
}
# Measured by benchmarks/expansion_study.py.
_LARGE = "note: merits are large where activations are small, as before the first block; in our study these places were the worst"


@dataclass(frozen=True)
class MeasuredPlaces:
    """How places were chosen by measurement."""

    by: str  # "merit" or "least"
    file: str  # the name of the file that the data are from
    batches: int  # how many batches were measured
    samples: int  # how many samples they have
    # the merit of each place, or the importance of each block; a place is the number of the block before it
    values: Mapping[int, float]
    places: tuple[int, ...]  # those that were chosen, in ascending order

    def to_dict(self) -> dict[str, Any]:
        """As it is in expansion.json."""
        name, meaning = _MEANING[self.by]
        rows = [
            {"after": place, name: value, "chosen": place in self.places}
            for place, value in sorted(self.values.items())
        ]
        return {
            "by": self.by,
            "value": f"{name}: {meaning}",
            "file": self.file,
            "batches": self.batches,
            "samples": self.samples,
            "places": rows,
        }


def placing_lines(data: Mapping[str, Any]) -> str:
    """What expansion.json says of the choice, as a table for people."""
    name = _MEANING[data["by"]][0]
    rows = [
        [
            "before block 0" if row["after"] == BEFORE_ALL else f"after block {row['after']}",
            f"{row[name]:.3e}",
            "new block" if row["chosen"] else "",
        ]
        for row in data["places"]
    ]
    table = text_table(["place", name, "chosen"], rows, left=(0, 2))
    note = f"\n{_LARGE}" if any(row["chosen"] and row["after"] == BEFORE_ALL for row in data["places"]) else ""
    return f"{table}{note}\n{data['value']}\nmeasured on {data['file']}: {data['batches']} batches, {data['samples']} samples"


def measurement_for(
    place: object, blocks: int | None, text: str | Path | None, batch: str | Path | None, *, stream: bool
) -> Measurement | None:
    """The measurement that a place needs; None if it needs none. Raises if data are missing, or given for nothing."""
    measured = isinstance(place, str) and place in MEASURED_PLACES
    if measured and text is None and batch is None:
        raise ExpansionError(
            f"place={place!r} measures on data: give a text (--text FILE) or saved batches (--batch FILE)."
        )
    if text is not None and batch is not None:
        raise ExpansionError("give either --text or --batch, not both.")
    if not measured and (text is not None or batch is not None):
        shown = repr(place) if isinstance(place, str) else "places that are given"
        raise ExpansionError(
            f"--text and --batch are for {' and '.join(f'--place {name}' for name in MEASURED_PLACES)}, which measure, got {shown}."
        )
    if not measured:
        return None
    if blocks is None:
        raise ExpansionError("blocks must say how many blocks to add (for example 8), got None.")
    if stream:
        raise ExpansionError(f"place={place!r} measures on the loaded model, which --stream (stream=True) never loads.")
    return Measurement(str(place), blocks, None if text is None else Path(text), None if batch is None else Path(batch))


@dataclass
class Measurement:
    """Places that are to be measured, and what was found."""

    by: str  # "merit" or "least"
    blocks: int  # how many places to take
    text: Path | None  # a text to measure on
    batch: Path | None  # saved batches to measure on instead
    found: MeasuredPlaces | None = None  # how the places were chosen

    @property
    def placing(self) -> MeasuredPlaces:
        """How the places were chosen."""
        assert self.found is not None
        return self.found

    def choose(self, described: Described, stack: str, copied: Sequence[int]) -> list[int]:
        """Load the model, measure in the list of blocks with this path, and take the best places; only some blocks can be copied."""
        file = self.batch or self.text
        assert file is not None
        model = load_to_measure(described)
        batches = read_batches(file) if self.batch else text_batches(file, model, described.folder, length=128)
        loss_fn = loss_for(batches)
        if self.by == "merit":
            values = merits_of_places(model, stack, batches, loss_fn)
            places = pick_places(values, self.blocks, largest=True)
        else:
            values = importance_of_blocks(model, stack, batches, loss_fn)
            places = pick_places({number: values[number] for number in copied}, self.blocks, largest=False)
        self.found = MeasuredPlaces(self.by, file.name, len(batches), sum(map(_samples, batches)), values, places)
        return list(places)


def load_to_measure(described: Described) -> Any:
    """The model, in float32 if it is stored in less and there is room: small gradients vanish in float16."""
    model = described.model_class.from_pretrained(described.folder, dtype="auto").eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    room = 12 * count < free_memory()  # weights, gradients and a copy to try on
    return model.float() if model.dtype in (torch.float16, torch.bfloat16) and room else model


def pick_places(values: Mapping[int, float], blocks: int, *, largest: bool) -> tuple[int, ...]:
    """The places with the largest or the smallest values, each once; of equal ones the first."""
    if blocks > len(values):
        raise ExpansionError(
            f"blocks must be at most {len(values)}, the number of places that can take one, got {blocks}. Use place='even', or name the "
            "places."
        )
    unfit = [place for place, value in values.items() if not math.isfinite(value)]
    if unfit:
        raise ExpansionError(f"the value of place {unfit[0]} is not a finite number. Use other data.")
    ranked = sorted(values, key=lambda place: (-values[place] if largest else values[place], place))
    return tuple(sorted(ranked[:blocks]))


def merits_of_places(
    model: torch.nn.Module, stack: str, batches: Sequence[Any], loss_fn: LossFunction | None = None
) -> dict[int, float]:
    """What a new block would be worth by the number of the block that it would follow (-1: before the first): the merits of twins."""
    first = batches[0]
    found = find_sites(model, first if isinstance(first, dict) else first[0], form="twin")
    places = {}
    for site in found:
        path, _, number = site.path.rpartition(".")
        if path == stack and number.isdigit():
            places[int(number) - (site.side == "before")] = site
    if not places:
        raise ExpansionError(f"no place for a new block was found in {stack}: {found.explain()}")
    merits = measure(model, list(places.values()), batches, loss_fn, ratio=False)
    return dict(zip(places, (merit.value for merit in merits), strict=True))


def importance_of_blocks(
    model: torch.nn.Module, stack: str, batches: Sequence[Any], loss_fn: LossFunction | None = None
) -> dict[int, float]:
    """How much the weights of each block matter, as `measure_importance` says, by the number of the block."""
    blocks = list(model.get_submodule(stack).children())
    return dict(enumerate(measure_importance(model, blocks, batches, loss_fn)))


def _samples(batch: Any) -> int:
    return count_samples(batch if isinstance(batch, dict) else batch[0])
