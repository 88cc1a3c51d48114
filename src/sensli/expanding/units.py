"""More hidden units for the feed-forward parts of a saved model: found on a sibling, written tensor by tensor.

A configuration states one width for all blocks, so all of them get the same number. New units are drawn with the spread of those that are
there, and nothing reads them yet: the maps after them have zeros for them.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sensli.errors import ExpansionError, SensliError
from sensli.expanding.sibling import Described, changed_fields, generic_name, save_sibling
from sensli.expanding.weights import Content, Drawn, Longer, Shorter, Stored, Zeros, load_tensor, seed_of
from sensli.modules.siblings import Sibling
from sensli.moves.finding import find_sites
from sensli.moves.width.width import Width
from sensli.surgery.growth import grow

_MORE = 8  # units that a sibling gets


@dataclass(frozen=True)
class Lengthening:
    """How a tensor gets longer."""

    axis: int  # along which axis
    parts: int  # how many equal parts the axis has, each of which gets its own new entries at its end
    zero: bool  # whether they are zero
    more: int = 0  # how many each part gets

    def apply(self, name: str, tensor: Stored, seed: int) -> Content:
        """The longer tensor."""
        shape, added = list(tensor.shape), list(tensor.shape)
        shape[self.axis] += self.parts * self.more
        added[self.axis] = self.parts * self.more
        new: Content = Zeros(tensor.dtype, tuple(added))
        if not self.zero:
            new = Drawn(tensor.dtype, tuple(added), tensor, seed_of(name, seed))
        return Longer(tensor.dtype, tuple(shape), tensor, self.axis, self.parts, new)

    def revert(self, tensor: Stored) -> Content:
        """The tensor as it was before."""
        shape = list(tensor.shape)
        shape[self.axis] -= self.parts * self.more
        return Shorter(tensor.dtype, tuple(shape), tensor, self.axis, self.parts)


@dataclass(frozen=True)
class UnitRule:
    """How one width grows in files: by the names of tensors, with ``*`` for numbers, and by fields of the configuration."""

    longer: dict[str, Lengthening]
    fields: tuple[str, ...]


def find_unit_rules(described: Described, sibling: Sibling) -> list[UnitRule]:
    """The rules for every width of feed-forward parts that the configuration states. Raises if there is none."""
    name, model = described.model_class.__name__, sibling.model
    try:
        sites = find_sites(model, sibling.example, what="units", units=_MORE, init="random")
    except SensliError as error:
        raise ExpansionError(f"no units can be added to a {name}: {error}") from error
    rules = []
    with tempfile.TemporaryDirectory() as folder:
        before = save_sibling(model, Path(folder) / "before")
        for number, site in enumerate(sites):
            if isinstance(site.move, Width) and site.move.blocks and not site.move.heads:
                grown = copy.deepcopy(model)
                grow(grown, site.in_model(grown))
                after = save_sibling(grown, Path(folder) / f"after{number}")
                changed = dict(changed_fields(model.config.to_dict(), grown.config.to_dict()))
                rules.append(UnitRule(dict(_lengthenings(before, after)), tuple(changed)))
    if not rules:
        raise ExpansionError(
            f"units cannot be added to a {name}: its configuration states no width of the feed-forward parts of all blocks that could be "
            "another one. Add blocks instead."
        )
    return rules


def _lengthenings(before: Mapping[str, Stored], after: Mapping[str, Stored]) -> Iterator[tuple[str, Lengthening]]:
    for name, tensor in before.items():
        longer = after[name]
        axes = [axis for axis, length in enumerate(tensor.shape) if longer.shape[axis] != length]
        if not axes:
            continue
        parts = (longer.shape[axes[0]] - tensor.shape[axes[0]]) // _MORE
        old, new = load_tensor(tensor), load_tensor(longer)
        pieces = [piece.split((piece.shape[axes[0]] - _MORE, _MORE), axes[0]) for piece in new.chunk(parts, axes[0])]
        if len(axes) > 1 or not torch.equal(torch.cat([piece[0] for piece in pieces], axes[0]), old):
            raise ExpansionError(
                f"{generic_name(name)} gets its new units at places that are not known for other widths."
            )
        yield generic_name(name), Lengthening(axes[0], parts, not any(bool(piece[1].any()) for piece in pieces))


@dataclass(frozen=True)
class UnitPlan:
    """Which tensors get longer, and what the fields of the configuration become."""

    longer: dict[str, Lengthening]
    fields: dict[str, int]

    def apply(self, tensors: Mapping[str, Stored], seed: int) -> dict[str, Content]:
        """All tensors, some of them longer."""
        return {
            name: self.longer[name].apply(name, tensor, seed) if name in self.longer else tensor
            for name, tensor in tensors.items()
        }


def plan_units(
    described: Described, tensors: Mapping[str, Stored], rules: list[UnitRule], units: int | float
) -> UnitPlan:
    """Bind what was found on a sibling to the tensors of the folder. ``units``: a number, or a share of those that are there."""
    longer: dict[str, Lengthening] = {}
    fields: dict[str, int] = {}
    named = {generic_name(name): name for name in tensors}
    for rule in rules:
        # A model and its base are saved with and without the name of the base.
        short = {name.partition(".")[2]: each for name, each in rule.longer.items()}
        known = rule.longer if any(name in named for name in rule.longer) else short
        own = {name: known[generic_name(name)] for name in tensors if generic_name(name) in known}
        if {generic_name(name) for name in own} != set(known):
            raise ExpansionError(
                f"the tensors of {described.folder} are called differently than those of a {described.model_class.__name__}. Load the "
                "model with from_pretrained and save_pretrained it again."
            )
        widths = {tensors[name].shape[each.axis] / each.parts for name, each in own.items()}
        if len(widths) != 1:
            raise ExpansionError("the feed-forward parts of the blocks have different widths, but get the same one.")
        width = int(widths.pop())
        more = units if isinstance(units, int) else max(1, round(units * width))
        longer |= {name: replace(each, more=more) for name, each in own.items()}
        fields |= dict.fromkeys(rule.fields, width + more)
    return UnitPlan(longer, fields)
