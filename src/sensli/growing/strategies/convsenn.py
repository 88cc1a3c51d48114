"""ConvSENN (Deaconu, Appolinary, Yang, Li 2024): the layer or the channels whose network has the largest natural gradient.

Every candidate is built as a temporary network. Its value is n = g' F^-1 g with the diagonal of the empirical Fisher matrix, which is the
sum over all weights of (mean of g)^2 / (mean of g^2) over the gradients g of single samples, times exp(-price p^2) for p added parameters.
The best candidate is taken if its value is at least ``tau`` times that of the network as it is.

There is no released code, and the text does not give the price, so it is 0 here unless you say otherwise. The text has tau = 2. Every
weight adds between 0 and 1, so a candidate with few new weights hardly reaches twice the value; by name the strategy takes `Grower`'s
``tau``. Channels begin as in the text, normal with deviation 1e-4 on both sides, so the function is not kept, if nearly; layers are the
identity without the text's noise. The text looks at every epoch with a pause of ten after a growth: that is for the trigger. Norms and
dropout are in evaluation mode, because a gradient is that of one sample.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import ZeroMerits
from sensli.growing.searching import Search
from sensli.growing.strategies import generators
from sensli.growing.strategies.by_one import by_one
from sensli.growing.strategies.fisher import natural_gradient
from sensli.growing.strategies.pairs import order
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.trigger import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.modules.samples import count_samples
from sensli.modules.wrappers import bare
from sensli.moves.finding import check_units
from sensli.moves.sites import Site, Sites
from sensli.moves.width.entries import Entries
from sensli.moves.width.width import Axis, Width

if TYPE_CHECKING:
    from sensli.growing.options import Options

TAU = 2.0
SPREAD = 1e-4  # of new channels


class ConvSenn(Strategy):
    """Layers and units by the value of the network that has them.

    Args:
        tau: How many times the value of the network as it is the best candidate must have.
        price: The factor of the squared number of added parameters in the exponent.
        units: How many units a layer gets at once, as in `find_sites`.
        where: Which sites to consider, as in `find_sites`.
        seed: The random seed.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"tau", "units", "where"})
    grows: ClassVar[tuple[str, ...]] = ("both",)
    shares: ClassVar[bool] = False

    def __init__(
        self, *, tau: float = TAU, price: float = 0.0, units: int | float = 2, where: Any = None, seed: int = 0
    ) -> None:
        self.tau, self.price = checks.at_least("tau", tau, 0, TAU), checks.at_least("price", price, 0, 1e-9)
        seed = checks.whole("seed", seed, 0, least=0, below=2**64)
        self._search = Search(layer="auto", where=where, grow="both", units=check_units(units), start="random")
        self.generator = torch.Generator().manual_seed(seed)

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(tau=options.tau, units=options.units, where=options.where, seed=options.seed)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        return self._search.sites(model, example)

    def score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        return by_one(self._score, self, model, sites, batches, loss_fn)

    def _score(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> Merits:
        batches, network = list(batches), bare(model)
        now = natural_gradient(copy.deepcopy(network), batches, loss_fn)
        if not now:
            raise ZeroMerits("all gradients are zero: the loss does not depend on the weights.")
        merits = []
        for site in map(self._started, sites):
            value = natural_gradient(grown_copy(network, site), batches, loss_fn)
            price = math.exp(-self.price * site.parameters**2)
            merits.append(Merit(site, value * price, ratio=value * price / now))
        return Merits(merits, norm="ConvSENN", batches=len(batches), samples=sum(map(count_samples, batches)))

    def choose(self, merits: Merits, moment: Moment) -> list[Site]:
        worth = [merit for merit in merits if merit.ratio is not None and merit.ratio >= self.tau]
        return [worth[index].site for index in order([merit.value for merit in worth])]

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        return f"the best candidate has {merits.best.ratio:.3g} times the value of the network as it is; tau = {self.tau:g}"

    def keeps_function(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"convsenn_generator": generators.saved(self.generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(generators.read(state["convsenn_generator"]))

    def _started(self, site: Site) -> Site:
        """A site whose units begin with small random entries on both sides; a layer as it is."""
        if not isinstance(site.move, Width):
            return site
        values = tuple(self._small(axis, site.move) for axis in site.move.axes)
        return replace(site, move=replace(site.move, _entries=Entries(values)))

    def _small(self, axis: Axis, width: Width) -> Tensor | None:
        if axis.fill not in ("row", "column"):
            return None
        like: Tensor = getattr(axis.module.find_module(), axis.name)
        shape = list(like.shape)
        shape[axis.dim] = axis.outer * width.more * axis.inner
        return SPREAD * torch.randn(shape, generator=self.generator, device=self.generator.device).to(like)


def grown_copy(model: nn.Module, site: Site) -> nn.Module:
    """A copy of a model that grew at a site."""
    grown = copy.deepcopy(model)
    here = site.on(grown)
    edit = here.move.plan(grown, here)
    edit.build()
    edit.apply()
    return grown
