"""What methods have in common that split units: a unit becomes two, which share what read the one, and all layers compete for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import ZeroMerits
from sensli.growing.searching import Search
from sensli.growing.strategies.pairs import Pair
from sensli.growing.strategies.rival import Rival
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.moves.copying import FRESH
from sensli.moves.sites import Site
from sensli.moves.width.entries import Entries, existing, laid_out
from sensli.moves.width.width import Width


@dataclass(frozen=True, eq=False)
class Candidates:
    """What could come at one width, each with its gain: splits of the units that are there first, then new units."""

    pair: Pair
    gains: Tensor  # what each would lower the loss by, in the method's own measure
    moved: Tensor  # of each unit that is there how its halves part: row + moved and row - moved
    rows: Tensor  # of new units
    columns: Tensor  # of new units

    def site(self, chosen: Sequence[int]) -> Site:
        """The site with these of them."""
        units = self.pair.width.units
        split = [index for index in chosen if index < units]
        new = [index - units for index in chosen if index >= units]
        return split_site(self.pair, split, self.moved[split], self.rows[new], self.columns[new])


class Competing(Rival):
    """The best candidates of all layers together, as many as ``units`` says: a number, or a share of all units."""

    start_of_sites: ClassVar[str] = "net2net"
    keeps: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = True

    def __init__(self, *, units: int | float = 0.25, where: Any = None, seed: int = 0) -> None:
        super().__init__(units=units, where=where, seed=seed)
        self.units = units
        # One unit at each width: how many it is in the end, all layers decide together.
        self._search = Search(layer="auto", where=where, grow="units", units=1, start=self.start_of_sites)

    def score_alone(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        batches = list(batches)
        found = self.candidates(model, sites, batches, loss_fn)
        every = [
            (float(gain), number, index) for number, each in enumerate(found) for index, gain in enumerate(each.gains)
        ]
        wanted = count_of(self.units, sum(each.pair.width.units for each in found))
        best = sorted((-gain, number, index) for gain, number, index in every if gain > 0)[:wanted]
        if not best:
            raise ZeroMerits(f"{self.name} finds that no more units would help.")
        taken: Mapping[int, list[int]] = {
            number: [i for _, n, i in best if n == number] for number in range(len(found))
        }
        merits = [
            Merit(each.site(taken[number]), float(each.gains[taken[number]].sum()))
            if taken[number]
            else Merit(each.pair.site, 0.0)
            for number, each in enumerate(found)
        ]
        return Merits(merits, norm=self.name, batches=len(batches), samples=found[0].pair.samples)

    @property
    def name(self) -> str:
        """For people."""
        return type(self).__name__

    def candidates(
        self, model: nn.Module, sites: Sequence[Site], batches: Sequence[Any], loss_fn: LossFunction | None
    ) -> list[Candidates]:
        """What could come at each of the sites."""
        raise NotImplementedError


def count_of(units: int | float, there: int) -> int:
    """How many units of all layers come: a number, or a share of those that are there; at least one."""
    return units if isinstance(units, int) else max(1, int(units * there))


def split_site(pair: Pair, units: Sequence[int], moved: Tensor, rows: Tensor, columns: Tensor) -> Site:
    """The site where these units part (row + moved stays, row - moved comes), and new ones come with these rows and columns."""
    move = pair.site.move
    assert isinstance(move, Width)
    more = len(units) + len(rows)
    shift = torch.zeros(pair.width.units, moved.shape[1], dtype=moved.dtype, device="cpu")
    shift = shift.index_copy(0, torch.tensor(units, dtype=torch.long, device="cpu"), moved)
    like = existing(pair.width, pair.column)
    none = torch.zeros(len(units), columns.shape[1], dtype=columns.dtype, device="cpu")
    values, index = pair.rows(torch.cat([-moved, rows])), pair.width.axes.index(pair.column)
    values[index] = laid_out(torch.cat([none, columns]).to(like), pair.column, like)
    sources = (*units, *(FRESH for _ in rows))
    grown = replace(
        move, more=more, sources=tuple(sources), added=move.added * more // move.more, flops=move.flops * more // move.more,
        _entries=Entries(tuple(values), tuple(pair.rows(shift))),
    )  # fmt: skip
    return replace(pair.site, move=grown)
