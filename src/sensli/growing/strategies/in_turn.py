"""What the methods of other papers that insert layers have in common: one form of layer, one place after the other, nothing measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from sensli.growing.searching import Search
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.triggers import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.moves.sites import Site, Sites
from sensli.text.names import UNMEASURED

if TYPE_CHECKING:
    from sensli.growing.options import Options

_INSERTED = re.compile(r"(^|\.)grown\d+(\.|$)")


class InTurn(Strategy):
    """Layers of one form at the places of the model as it was at first, in the order of the data flow, again and again.

    Args:
        where: Which sites to consider, as in `find_sites`.
        kernel_size: The kernel size of new convolutions, as in `find_sites`.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"where", "kernel_size"})
    grows: ClassVar[tuple[str, ...]] = ("layers",)
    shares: ClassVar[bool] = False
    form: ClassVar[str]  # as in `find_sites(layer=...)`

    def __init__(self, *, where: Any = None, kernel_size: int | None = None) -> None:
        self._search = Search(layer=self.form, where=where, kernel_size=kernel_size)
        self.last: str | None = None  # the place that grew last

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(where=options.where, kernel_size=options.kernel_size)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found = self._search.sites(model, example)
        original = [site for site in found if not _INSERTED.search(site.path)]
        return Sites(original, found.skipped, model_name=type(model).__name__)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return Merits([Merit(site, 1.0) for site in sites], norm=UNMEASURED, batches=0)

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        places = [_place(merit.site) for merit in merits]
        after = places.index(self.last) + 1 if self.last in places else 0
        turns = [*range(after, len(places)), *range(after)]
        self.last = places[turns[0]]
        return [merits[index].site for index in turns]

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        last = state["last"]
        if last is not None and not isinstance(last, str):
            raise ValueError(f"last is {last!r}")
        self.last = last


def _place(site: Site) -> str:
    """The name of a place that stays when layers are put around its module."""
    return f"{site.side} {'.'.join(part for part in site.path.split('.') if part != 'anchor')}"
