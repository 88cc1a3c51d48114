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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sensli.errors import MeasurementError, ZeroMerits
from sensli.growing.looking import RememberedSites
from sensli.growing.strategy import OptionalLoss, Strategy, read_generator, save_generator
from sensli.growing.triggers import TriggerContext
from sensli.merits.catching import scalar_loss, split_batch
from sensli.merits.measuring import EMPTY
from sensli.merits.merits import Merit, Merits
from sensli.modules import checks
from sensli.modules.running import count_samples, device_of, map_tensors, run, tensors, to_capable, to_device, untouched
from sensli.modules.wrappers import bare
from sensli.moves.finding import check_units
from sensli.moves.sites import Site
from sensli.moves.width.width import Axis, Entries, Width
from sensli_lab.methods.searching import PaperMethod, by_one, by_value, check_seed, grown_copy

if TYPE_CHECKING:
    from sensli.growing.options import Options

# ---- The natural gradient by the diagonal of the empirical Fisher matrix, which needs the gradient of every single
# sample.

AT_ONCE = 128  # samples whose gradients are in memory together
Gradients = dict[str, Tensor]  # by the name of the weight, the samples first


def natural_gradient(model: nn.Module, batches: Sequence[Any], loss_fn: OptionalLoss) -> float:
    """The sum over all weights of (mean gradient)^2 / (mean squared gradient) over single samples. The model is put into eval mode."""
    model.eval()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    first, second = ({name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    samples = 0
    with untouched(model), torch.inference_mode(False), torch.enable_grad():
        for index, batch in enumerate(batches):
            size = count_samples(batch)
            for gradients in _Samples(model, weights, loss_fn).gradients(batch, size, index):
                for name, gradient in gradients.items():
                    first[name] += gradient.sum(0)
                    second[name] += gradient.square().sum(0)
            samples += size
    if not samples:
        raise MeasurementError(EMPTY)
    values = [
        to_capable(torch.where(second[name] > 0, first[name].square() / (samples * second[name]), 0.0)).double().sum()
        for name in weights
    ]
    return float(torch.stack(values).sum()) if values else 0.0


class _Samples(nn.Module):
    """A model with its loss, called with one sample."""

    def __init__(self, model: nn.Module, weights: dict[str, nn.Parameter], loss_fn: OptionalLoss) -> None:
        super().__init__()
        self.model, self._loss_fn = model, loss_fn
        self._weights = {name: weight.detach() for name, weight in weights.items()}

    def forward(self, given: Any, target: Any, index: int) -> Tensor:
        return scalar_loss(run(self.model, given), target, self._loss_fn, index)

    def gradients(self, batch: Any, size: int, index: int) -> Iterator[Gradients]:
        """The gradients of all samples of a batch: many at once, or, where the model allows only that, one after the other."""
        nest = split_batch(batch, index, self.model if self._loss_fn is not None else None)
        nest = to_device(nest, device_of(self.model))
        leaves = [x for x in tensors(nest) if _by_sample(x, size)]

        def loss(weights: Gradients, *samples: Tensor) -> Tensor:
            left = iter(samples)
            given, target = map_tensors(nest, lambda x: next(left).unsqueeze(0) if _by_sample(x, size) else x)
            named = {f"model.{name}": weight for name, weight in weights.items()}
            found: Tensor = functional_call(self, named, (given, target, index))
            return found

        each = grad(loss)
        together = vmap(each, (None, *(0 for _ in leaves)), randomness="different")
        for some in zip(*(leaf.split(AT_ONCE) for leaf in leaves), strict=True):
            try:
                yield together(self._weights, *some)
            except RuntimeError:  # of vmap: what depends on values, or changes something in place
                rows = [each(self._weights, *one) for one in zip(*some, strict=True)]
                yield {name: torch.stack([row[name] for row in rows]) for name in self._weights}


def _by_sample(x: Tensor, size: int) -> bool:
    """Whether a tensor has one entry for each sample."""
    return x.dim() > 0 and len(x) == size


TAU = 2.0
SPREAD = 1e-4  # of new channels


class ConvSenn(PaperMethod):
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

    def __init__(
        self, *, tau: float = TAU, price: float = 0.0, units: int | float = 2, where: Any = None, seed: int = 0
    ) -> None:
        self.tau, self.price = checks.at_least("tau", tau, 0, TAU), checks.at_least("price", price, 0, 1e-9)
        self._search = RememberedSites(form="auto", where=where, what="both", units=check_units(units), init="random")
        self.generator = torch.Generator().manual_seed(check_seed(seed))

    @classmethod
    def made(cls, options: Options) -> Strategy:
        return cls(tau=options.tau, units=options.units, where=options.where, seed=options.seed)

    @by_one
    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
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

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        return by_value(merit for merit in merits if merit.ratio is not None and merit.ratio >= self.tau)

    def reason(self, merits: Merits, taken: Sequence[Merit]) -> str:
        return f"the best candidate has {merits.best.ratio:.3g} times the value of the network as it is; tau = {self.tau:g}"

    def keeps_function(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"convsenn_generator": save_generator(self.generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(read_generator(state["convsenn_generator"]))

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
