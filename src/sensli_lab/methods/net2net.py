"""Net2Net and NetMorph, wider and deeper: copies of units, identity layers, one place after the other, nothing measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.growing.looking import RememberedSites
from sensli.growing.strategy import OptionalLoss, Strategy
from sensli.growing.triggers import TriggerContext
from sensli.merits.measuring import EMPTY
from sensli.merits.merits import Merits
from sensli.modules.running import to_capable, untouched
from sensli.modules.wrappers import bare
from sensli.moves.layers import Layer
from sensli.moves.point import tap
from sensli.moves.sites import Site, Sites
from sensli_lab.methods.pairs import Pair, Rival
from sensli_lab.methods.searching import PaperMethod, UnitMethod, by_one, by_turn, equal_merits, run_batch

if TYPE_CHECKING:
    from sensli.growing.options import Options

_INSERTED = re.compile(r"(^|\.)grown\d+(\.|$)")


class InTurn(PaperMethod):
    """Layers of one form at the places of the model as it was at first, in the order of the data flow, again and again.

    Args:
        where: Which sites to consider, as in `find_sites`.
        kernel_size: The kernel size of new convolutions, as in `find_sites`.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"where", "kernel_size"})
    form: ClassVar[str]  # as in `find_sites(form=...)`

    def __init__(self, *, where: Any = None, kernel_size: int | None = None) -> None:
        self._search = RememberedSites(form=self.form, where=where, kernel_size=kernel_size)
        self.last: str | None = None  # the place that grew last

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(where=options.where, kernel_size=options.kernel_size)

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found = super().propose(model, example)
        original = [site for site in found if not _INSERTED.search(site.path)]
        return Sites(original, found.skipped, model_name=type(model).__name__)

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        places = [_place(merit.site) for merit in merits]
        turns = by_turn(self.last, places)
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


# ---- Net2Net (Chen, Goodfellow, Shlens 2016), wider: every new unit is a copy of one that is there, and both share what
# read the one.
#
# How is `init="net2net"`; where is left to the user, so the widths are taken in turn. The paper widens all layers at
# once, once, on a trained network (``count`` large enough does that), and begins again with a tenth of the learning
# rate. Its way deeper is `"net2net-deeper"`. The function is kept.


class Net2Net(UnitMethod):
    """One width after the other; nothing is measured."""

    start_of_sites: ClassVar[str] = "net2net"
    in_turn: ClassVar[bool] = True


# ---- Net2Net (Chen, Goodfellow, Shlens 2016), deeper: identity layers after ReLUs, with a batch norm where the network
# has them.
#
# A new layer is relu(W x + b) with W = I (for a convolution the kernel that is one at its centre), b = 0; it fits
# only where the activation is idempotent, that is after a ReLU. After a batch norm it is relu(norm(W x + b)), and the
# norm has to undo itself: its weight is the standard deviation of what arrives there and its bias the mean, both of
# one pass over the batches, as in the released code; its running statistics are those of the same pass. The function
# is kept to the bit where there is no norm. With one it is kept up to rounding in eval mode, and in training mode
# only as far as a batch has the statistics of the pass, so the log says that it is not kept.
#
# Where and when are left to the user: the paper deepens a trained network once, at all places that one likes
# (``count`` says at how many, in turn), and trains on with a tenth of the learning rate (``lr_scale=0.1``). SensLI's
# own layers after a batch norm have the residual form instead.


class Net2NetDeeper(InTurn):
    """Identity layers, one place after the other."""

    form: ClassVar[str] = "relu"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._keeps = True  # as of the last look

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        self._keeps = not any(_norm_beside(bare(model), site) for site in sites)
        return equal_merits(sites) if self._keeps else self._with_norms(model, sites, batches, loss_fn)

    @by_one
    def _with_norms(
        self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss
    ) -> Merits:
        network = bare(model)
        normed = [site for site in sites if _norm_beside(network, site)]
        found, count = _statistics(network, normed, batches, loss_fn)
        return equal_merits([found.get(site, site) for site in sites], count)

    def keeps_function(self) -> bool:
        return self._keeps


def _norm_beside(network: nn.Module, site: Site) -> bool:
    """Whether what arrives at a site was normalised: the nearest module with parameters is a batch norm of its channels."""
    assert isinstance(site.move, Layer)
    near = next((module for _, module in site.point.around(network)), None)
    known = isinstance(near, nn.modules.batchnorm._BatchNorm) and near.num_features == site.move.width
    return known and (site.move.kind == "conv" or len(site.shape) == 1)


def _statistics(
    network: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss
) -> tuple[dict[Site, Site], int]:
    """The sites with norms that undo themselves, by the mean and the variance of each channel over one pass; and the batches of it."""
    sums: dict[Site, list[Tensor]] = {}
    with ExitStack() as hooks, untouched(network), torch.inference_mode(False), torch.enable_grad():
        for site in sites:
            hooks.callback(tap(site.point, site.find(network)[1], _adding(site, sums)).remove)
        count = 0
        for count, batch in enumerate(batches, 1):
            run_batch(network, batch, count - 1, loss_fn)
    if not count:
        raise MeasurementError(EMPTY)
    found: dict[Site, Site] = {}
    for site, (number, total, squares) in sums.items():
        assert isinstance(site.move, Layer)
        mean = total / number
        variance = (squares / number - mean.square()).clamp_min(0.0)
        dims = max(1, len(site.move.kernel))
        found[site] = replace(site, move=replace(site.move, norm=dims, _undone=(mean.cpu(), variance.cpu())))
    return found, count


def _adding(site: Site, sums: dict[Site, list[Tensor]]) -> Any:
    assert isinstance(site.move, Layer)
    leading = site.move.leading

    def watch(value: Tensor, args: Any, kwargs: Any) -> Tensor:
        x = to_capable(value.detach()).double()
        x = (x.relu() if leading else x).transpose(0, 1).flatten(1)
        own = [torch.tensor(float(x.shape[1]), device="cpu").to(x), x.sum(1), x.square().sum(1)]
        sums[site] = own if site not in sums else [a + b for a, b in zip(sums[site], own, strict=True)]
        return value

    return watch


# ---- NetMorph (Wei, Wang, Rui, Chen 2016), wider: random weights on one side of the new units, zeros on the side that has
# fewer of them.
#
# Its way deeper is `"netmorph-deeper"`. There is no released code. Where and when are left to the user, so the widths
# are taken in turn. The function is kept; after a torch ReLU, zero rows never learn.


class NetMorph(Rival):
    """One width after the other, with zeros on one side of the new units; nothing is measured."""

    batches: ClassVar[int | None] = 1  # it looks at shapes alone
    in_turn: ClassVar[bool] = True

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        rows, columns = pair.existing_rows, pair.existing_columns
        zero_rows = rows.shape[1] < columns.shape[1]
        drawn = [
            torch.randn(pair.width.more, old.shape[1], generator=self.generator, dtype=torch.float64, device="cpu")
            * old.std(correction=0)
            for old in (rows, columns)
        ]
        return pair.start(drawn[0] * (not zero_rows), drawn[1] * zero_rows), 1.0


# ---- NetMorph (Wei, Wang, Rui, Chen 2016), deeper: an identity map with a parametric activation that begins as the
# identity.
#
# A new layer is z + a (s(z) - z) with z = W x + b, W = I, b = 0 and a = 0, so that it fits after any activation s,
# which Net2Net's identity layers do not; a learns from then on (the paper writes a x + (1 - a) s(x) and begins with a
# = 1, which is the same). Where and when are left to the user, so the places are taken in turn. The function is kept.
#
# There is no released code. The paper's other way, to factorise an old filter G into two by G = F2 * F1 so that the
# new layer has few zeros, is not here: it exists only where the kernel of G is at least k1 + k2 - 1 wide (for two
# kernels of 3 the old one must have 5), it keeps the function only up to what the alternating least squares leave
# over, for which the paper states neither iterations nor a tolerance, and it overwrites weights that are trained.
# Without it this is the paper's IdMorph with the paper's activation.


class NetMorphDeeper(InTurn):
    """Parametric layers, one place after the other."""

    form: ClassVar[str] = "parametric"
