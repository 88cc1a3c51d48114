"""Variance transfer with learning-rate adaptation (Yuan, Savarese, Maire 2023): pairs of units that cancel, and rescaled weights.

New units come in pairs with the same rows (V, V) and opposite columns (Z, -Z), so they cancel whatever is between. V is normal with
variance 1 / fan-in; Z with 1 / fan-in of the wider reader, and 1 / fan-in^2 if the reader is the output of the model. The reader's old
columns are multiplied by c = sqrt(m / m') where it has m inputs and then m', and by m / m' at the output; of a batch norm that reads it,
the running mean by c and the variance by c^2, so that with one the function stays. Weights that came with growth k learn with the rate of
the first ones times |W_k| / |W_0|, per layer and with the norms as they are at each step (see `generations`).

There is no released code. Two descriptions disagree about the roots, and we take the square root for hidden layers and the ratio at the
output, which is how variances stay. All layers are widened at a look; the paper adds a fifth of the units, eight times (`units=0.2`).
Rows that are new do not read columns that are new at the same look; the paper draws this block too. The function is not kept without a
batch norm.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import MeasurementError, SensliError
from sensli.growing.strategy import OptionalLoss
from sensli.merits.measuring import EMPTY
from sensli.merits.merits import Merits
from sensli.modules.running import first_tensor, tensors, untouched
from sensli.modules.wrappers import bare
from sensli.moves.point import Ref
from sensli.moves.sites import Site
from sensli.moves.stretching import Resize
from sensli.moves.width.confirming import width_of
from sensli.moves.width.widening import resizes
from sensli.moves.width.width import Factor, Width
from sensli.surgery.history import History
from sensli_lab.methods.pairs import Pair, Rival, pairs_of, with_more
from sensli_lab.methods.searching import equal_merits, refuse_sharded, run_batch

# ---- Separate learning rates for the weights of each growth, although they are parts of one parameter.
#
# An optimizer knows one rate for a parameter. What a step did to it is therefore scaled entry by entry after the
# step, which is the same as a separate rate for every optimizer whose step is proportional to its rate: SGD with
# momentum, Adam, AdamW with its decay.


class GenerationRates:
    """Of the weights of generation k the rate is that of the first ones times |W_k| / |W_0|, of each layer and as the norms are now."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._seen: Any = None
        self._maps: list[tuple[nn.Parameter, Tensor]] = []
        self._before: dict[int, Tensor] = {}

    def attend(self, model: nn.Module, optimizers: Sequence[Optimizer], history: History) -> None:
        """Follow the steps of these optimizers from now on, and of no others."""
        for handle in self._handles:
            handle.remove()
        self._model, self._history, self._seen = weakref.ref(model), history, None
        self._handles = [optimizer.register_step_pre_hook(self._remember) for optimizer in optimizers]
        self._handles += [optimizer.register_step_post_hook(self._scale) for optimizer in optimizers]

    def maps(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The weights that have grown, with the generation of each entry."""
        model = self._model()
        # Shapes too: after `undo` another growth may have the same number and name, or the history still the growth.
        now = [(growth.number, growth.name, growth.resized) for growth in self._history]
        if now != self._seen or any(parameter.shape != its.shape for parameter, its in self._maps):
            self._maps = [] if model is None else generations(model, self._history)
            self._seen = now
        return self._maps

    def _remember(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, _ in self.maps():
            if id(parameter) in own:
                self._before[id(parameter)] = parameter.detach().clone()

    @torch.no_grad()
    def _scale(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, generation in self.maps():
            before = self._before.pop(id(parameter), None)
            if before is not None:
                parameter.copy_(before + rates(before, generation) * (parameter - before))


def generations(model: nn.Module, history: History) -> list[tuple[nn.Parameter, Tensor]]:
    """Of every weight matrix or kernel that has got units the growth that each entry came with; 0 for the first ones."""
    made: dict[int, tuple[nn.Parameter, list[tuple[int, Resize]]]] = {}
    for number, growth in enumerate(history, 1):
        if not isinstance(growth.site.move, Width):
            continue
        try:
            changed = resizes(model, growth.site.move.by_path().in_model(model), made=True)
        except SensliError:
            continue  # its layers are called otherwise by now, after a growth of another kind: they keep one rate
        for each in changed:
            if isinstance(each.tensor, nn.Parameter) and each.tensor.dim() > 1:
                made.setdefault(id(each.tensor), (each.tensor, []))[1].append((number, each))
    found = []
    for parameter, changes in made.values():
        shape = list(parameter.shape)
        for stretch in (stretch for _, each in changes for stretch in each.stretches):
            shape[stretch.dim] -= stretch.change
        generation = torch.zeros(shape, device=parameter.device)
        for number, each in changes:
            generation = each.stretched(generation, float(number), along=range(generation.dim()))
        if generation.shape == parameter.shape:
            found.append((parameter, generation.long()))
    return found


def rates(weight: Tensor, generation: Tensor) -> Tensor:
    """The factor of each entry: the norm of its generation over that of the first; 1 where that is zero."""
    place = generation.flatten()
    squares = weight.new_zeros(int(place.max()) + 1).index_add(0, place, weight.detach().flatten().square())
    first = squares[0]
    ratios = (squares / first).sqrt() if first > 0 else torch.ones_like(squares)
    return ratios[generation]


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class VarianceTransfer(Rival):
    """All widths at once; nothing is measured, but one batch runs to see what reads what."""

    keeps: ClassVar[bool] = False
    all_at_once: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rates = GenerationRates()

    def attend(self, model: nn.Module, optimizers: Sequence[Optimizer], history: History) -> None:
        self.rates.attend(model, optimizers, history)

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        network = bare(model)
        refuse_sharded(network, self)
        pairs = pairs_of(network, sites)
        reads = surroundings(network, [pair.reader for pair in pairs], batches, loss_fn)
        return equal_merits(self.widened(pair, *read) for pair, read in zip(pairs, reads, strict=True))

    def widened(self, pair: Pair, is_output: bool, norm: tuple[str, nn.Module] | None) -> Site:
        """The site with pairs of units that cancel, and what is rescaled."""
        half = -(-pair.width.more // 2)
        rows, old = pair.existing_rows.shape[1], pair.existing_columns
        maker, reader = pair.maker.weight, pair.reader.weight
        assert isinstance(maker, Tensor) and isinstance(reader, Tensor)
        inputs, fan_in = maker[0].numel(), reader[0].numel()
        wider = fan_in + 2 * half * old.shape[1] // len(reader)
        v = torch.randn(half, rows, generator=self.generator, dtype=torch.float64, device="cpu") / inputs**0.5
        v[:, inputs:] = 0.0  # biases
        z = torch.randn(half, old.shape[1], generator=self.generator, dtype=torch.float64, device="cpu")
        z = z / wider if is_output else z / wider**0.5
        site = pair.start(torch.cat([v, v]), torch.cat([z, -z]))
        share: float = fan_in / wider
        factors = _factors(pair, share if is_output else math.sqrt(share), norm)
        move = with_more(width_of(pair.site), 2 * half, factors=factors, _entries=width_of(site)._entries)
        return replace(site, move=move)


def _factors(pair: Pair, by: float, norm: tuple[str, nn.Module] | None) -> tuple[Factor, ...]:
    reader = pair.column.module
    found = [Factor(reader, "weight", by)]
    if norm is not None:
        if pair.reader.bias is not None:  # the norm takes it out again
            found.append(Factor(reader, "bias", by))
        found += [Factor(Ref.to(*norm), "running_mean", by), Factor(Ref.to(*norm), "running_var", by**2)]
    return tuple(found)


def surroundings(
    network: nn.Module, readers: Sequence[nn.Module], batches: Iterable[Any], loss_fn: OptionalLoss
) -> list[tuple[bool, tuple[str, nn.Module] | None]]:
    """Of each reader whether its output is that of the model, and the batch norm that reads it, as one batch tells."""
    made: dict[int, Tensor] = {}
    norms: dict[int, tuple[str, nn.Module]] = {}
    with ExitStack() as hooks, untouched(network), torch.no_grad():
        for reader in readers:
            handle = reader.register_forward_hook(lambda module, _, output: made.update({id(module): output}))
            hooks.callback(handle.remove)
        for path, module in network.named_modules():
            if isinstance(module, NORMS) and module.running_mean is not None:

                def before(module: nn.Module, args: Any, path: str = path) -> None:
                    found = first_tensor(args)
                    for maker, output in made.items():
                        if found is output:
                            norms[maker] = path, module

                hooks.callback(module.register_forward_pre_hook(before).remove)
        batch = next(iter(batches), None)
        if batch is None:
            raise MeasurementError(EMPTY)
        outputs = list(tensors(run_batch(network, batch, 0, loss_fn)[0]))
    return [(any(made.get(id(reader)) is output for output in outputs), norms.get(id(reader))) for reader in readers]
