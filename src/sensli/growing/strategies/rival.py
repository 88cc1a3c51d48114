"""What the widening methods of other papers have in common: widths of one maker and one reader, scored by what passes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from sensli.errors import ZeroMerits
from sensli.growing.searching import Search
from sensli.growing.strategies import generators
from sensli.growing.strategies.by_one import by_one
from sensli.growing.strategies.pairs import Pair, look, order, pair_of
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.triggers import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.modules.wrappers import bare
from sensli.moves.finding import check_units
from sensli.moves.sites import Site, Sites, Skipped

if TYPE_CHECKING:
    from sensli.growing.options import Options


class Rival(Strategy):
    """A method that adds units: `start` says how they begin at one width, and what that is worth by the method's own score.

    Args:
        units: How many units a layer gets at once, as in `find_sites`.
        where: Which sites to consider, as in `find_sites`.
        seed: The random seed.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"units", "where"})
    grows: ClassVar[tuple[str, ...]] = ("units",)
    shares: ClassVar[bool] = False
    start_of_sites: ClassVar[str] = "random"
    keeps: ClassVar[bool] = True  # the function
    batches: ClassVar[int | None] = None  # how many it looks at; None: all
    in_turn: ClassVar[bool] = False  # takes one width after the other, whatever they are worth

    def __init__(self, *, units: int | float = 0.25, where: Any = None, seed: int = 0) -> None:
        units = check_units(units)
        seed = checks.whole("seed", seed, 0, least=0, below=2**64)
        self._search = Search(layer="auto", where=where, grow="units", units=units, start=self.start_of_sites)
        self.generator = torch.Generator().manual_seed(seed)
        self.turn = 0

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(units=options.units, where=options.where, seed=options.seed)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found = self._search.sites(model, example)
        reasons = {site: pair_of(site, bare(model)) for site in found}
        kept = [site for site, pair in reasons.items() if isinstance(pair, Pair)]
        name = type(self).__name__
        left = [
            Skipped(site.path, f"{name} leaves it out: {why}") for site, why in reasons.items() if isinstance(why, str)
        ]
        return Sites(kept, [*found.skipped, *left], model_name=type(bare(model)).__name__)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return by_one(self.score_alone, self, model, sites, batches, loss_fn)

    def score_alone(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        """As `score`, in one process."""
        batches = list(batches)
        pairs = look(model, sites, batches, loss_fn, self.batches)
        started = [self.start(pair, self._trying(model, batches, loss_fn)) for pair in pairs]
        merits = [Merit(site, float(value)) for site, value in started]
        used = len(pairs[0].inputs) if pairs else 0
        if not any(merit.value > 0 for merit in merits):
            raise ZeroMerits(f"{type(self).__name__} finds that no more units would help.")
        return Merits(merits, norm=type(self).__name__, batches=used, samples=pairs[0].samples)

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        """The site with what its units begin with, and its score. ``try_out`` tells the mean loss of a copy that grew there."""
        raise NotImplementedError

    def keeps_function(self) -> bool:
        return self.keeps

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        worth = [merit for merit in merits if merit.value > 0]
        if self.in_turn:
            first = self.turn % len(worth)
            self.turn += 1
            return [merit.site for merit in (*worth[first:], *worth[:first])]
        return [worth[index].site for index in order([merit.value for merit in worth])]

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn, "rival_generator": generators.saved(self.generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        turn = state["turn"]
        if type(turn) is not int or turn < 0:
            raise ValueError(f"turn is {turn!r}")
        self.generator.set_state(generators.read(state["rival_generator"]))
        self.turn = turn

    @staticmethod
    def _trying(model: nn.Module, batches: Sequence[Any], loss_fn: LossFunction | None) -> Callable[[Site], float]:
        from sensli.growing.strategies.trying import loss_after

        return lambda site: loss_after(bare(model), site, batches, loss_fn)
