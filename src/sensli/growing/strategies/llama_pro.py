"""LLaMA-Pro (Wu et al. 2024): copies of blocks whose outputs begin at zero, evenly spaced among the others. Which places, nothing measures.

Of L blocks, each (L / new)-th gets a copy of itself right after it: 32 blocks become 40 by a copy after each fourth, the last one
included, as in the released code. There the zeros are those of ``o_proj`` and ``down_proj``; here they are found by trial, which gives the
same two in such a block.
`Grower(strategy="llama-pro", count=8, freeze_rest=True)` is the published recipe for eight new blocks: the old weights do not train. The
function is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from sensli.growing.searching import Search
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.triggers import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.moves.sites import Site, Sites
from sensli.text.names import UNMEASURED

if TYPE_CHECKING:
    from sensli.growing.options import Options


class LlamaPro(Strategy):
    """Twins at fixed places: a control for the question where.

    Args:
        count: How many blocks come at one look.
        where: Which sites to consider, as in `find_sites`.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"where"})
    grows: ClassVar[tuple[str, ...]] = ("layers",)
    shares: ClassVar[bool] = False

    def __init__(self, *, count: int = 1, where: Any = None) -> None:
        self.count = checks.whole("count", count, 1)
        self._search = Search(layer="twin", where=where)

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(count=options.count, where=options.where)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        return self._search.sites(model, example)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return Merits([Merit(site, 1.0) for site in sites], norm=UNMEASURED, batches=0)

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        ends = [merit.site for merit in merits if merit.site.side == "after"] or [merit.site for merit in merits]
        apart = max(1, len(ends) // self.count)
        return ends[apart - 1 :: apart][: self.count]
