"""What the methods of other papers look at: of every width that one layer makes and one layer reads, the input of the one, the input
and the cotangent of the other.

All statistics are means over samples (and positions, where a layer has them), in float64. Kernels, strides and borders of convolutions
are exact, since inputs are unfolded; pooling on the way is taken for a mean, and what else is on the way for the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli.errors import MeasurementError, ZeroMerits
from sensli.growing.strategy import OptionalLoss
from sensli.merits.measuring import EMPTY
from sensli.merits.merits import Merit, Merits
from sensli.modules.running import first_tensor, untouched
from sensli.modules.wrappers import bare
from sensli.moves.roles import map_of
from sensli.moves.sites import Site, Sites, Skipped
from sensli.moves.width.confirming import width_of
from sensli.moves.width.width import Axis, Entries, Width, by_unit, existing_entries, laid_out
from sensli_lab.methods.searching import UnitMethod, batch_loss, by_one, loss_after

SMALLEST = 1e-6  # of the largest eigenvalue of a second moment: what is below is not a direction of the data


def moment(x: Tensor) -> Tensor:
    """The second moment of features: [samples, features] to [features, features]."""
    return x.T @ x / len(x)


def inverse_root(matrix: Tensor) -> Tensor:
    """The inverse square root of a second moment, on the directions that the data have."""
    return _by_eigenvalues(matrix, -0.5)


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """The inverse of a second moment, on the directions that the data have."""
    return _by_eigenvalues(matrix, -1.0)


def _by_eigenvalues(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > SMALLEST * values.max().clamp_min(1e-300)
    scaled = torch.where(kept, values.clamp_min(1e-300) ** power, values.new_zeros(()))
    found: Tensor = (vectors * scaled) @ vectors.T
    return found


@dataclass
class Pair:
    """One layer that makes units and one that reads them, with what passed through them."""

    site: Site
    width: Width  # bound to its modules
    maker: nn.Module
    reader: nn.Module
    column: Axis  # of the reader
    inputs: list[Tensor] = field(default_factory=list)  # of the maker, one for each batch
    reads: list[Tensor] = field(default_factory=list)  # inputs of the reader
    # of the reader's output: the gradient of each sample's own loss
    cotangents: list[Tensor] = field(default_factory=list)

    @property
    def meets(self) -> bool:
        """Whether a reader of tokens has as many of them as the layer that makes its units, or their mean: others cannot be told apart."""
        if not isinstance(self.maker, nn.Linear) or self.inputs[0].dim() > self.reads[0].dim():
            return True
        return all(x.shape[:-1] == read.shape[:-1] for x, read in zip(self.inputs, self.reads, strict=True))

    # --- statistics ---

    @cached_property
    def h(self) -> Tensor:
        """What the weights of a unit are multiplied with, a one for its bias last: [samples and positions, weights of a unit]."""
        return torch.cat([features(self.maker, map_of(self.maker).unfold(x)) for x in self.inputs])

    @cached_property
    def a(self) -> Tensor:
        """What the reader's weights are multiplied with: [samples and positions, weights of one of its outputs]."""
        return torch.cat([features(self.reader, map_of(self.reader).unfold(x)) for x in self.reads])

    @cached_property
    def g(self) -> Tensor:
        """Cotangents of the reader's output: [samples and positions, its outputs]."""
        return torch.cat([features(self.reader, x) for x in self.cotangents])

    @cached_property
    def samples(self) -> int:
        return sum(len(x) for x in self.inputs)

    @cached_property
    def explained(self) -> Tensor:
        """R = A^+ G of the reader: its own least-squares step is -R."""
        return pseudo_inverse(moment(self.a)) @ (self.a.T @ self.g) / len(self.a)

    def bypass(self, *, residual: bool = False) -> Tensor:
        """The gradient of a bypass from the maker's input to the reader's output: [weights of a unit, its columns].

        ``residual``: of the part of the cotangents that the reader's own weights cannot serve.
        """
        left = self.g - self.a @ self.explained if residual else self.g
        total, begin = torch.zeros((), dtype=torch.float64, device="cpu"), 0
        for x, read, cotangent in zip(self.inputs, self.reads, self.cotangents, strict=True):
            rows = cotangent.numel() // left.shape[1]
            own = _unfeatured(self.reader, left[begin : begin + rows], cotangent)
            begin += rows
            moved = _carried(map_of(self.maker).unfold(x), read, self.column, tokens=isinstance(self.maker, nn.Linear))
            total = total + by_unit(map_of(self.reader).column_gradient(moved, own).flatten(1), self.column)
        return total / self.samples

    @cached_property
    def activations(self) -> Tensor:
        """The units as they are read: [samples and positions, units]."""
        axis, units = self.column, self.width.units
        length = axis.outer * units * axis.inner
        parts = []
        for read in self.reads:
            x = read if isinstance(self.reader, nn.Linear) else read.movedim(1, -1)
            own = x.narrow(-1, axis.start, length).unflatten(-1, (axis.outer, units, axis.inner))
            parts.append(own.movedim(-2, -1).reshape(-1, units))
        return torch.cat(parts)

    def by_output(self, bypass: Tensor) -> Tensor:
        """The columns of a bypass as [weights of a unit, positions, outputs of the reader]."""
        outputs = self.g.shape[1]
        if isinstance(self.reader, nn.Linear):
            found: Tensor = bypass.unflatten(1, (-1, outputs))
        else:
            found = bypass.unflatten(1, (outputs, -1)).transpose(1, 2)
        return found

    # --- starts ---

    def rows(self, vectors: Tensor) -> list[Tensor | None]:
        """[units, weights of a unit] as entries of the maker: the weight, and the bias if there is one."""
        found: list[Tensor | None] = []
        for axis in self.width.axes:
            like = existing_entries(self.width, axis)
            if axis.fill != "row":
                found.append(None)
            elif axis.name == "bias":
                found.append(vectors[:, -1].to(like))
            else:
                weights = vectors[:, : like[0].numel()]
                found.append(weights.reshape(len(vectors), *like.shape[1:]).to(like))
        return found

    def start(self, rows: Tensor, columns: Tensor | None = None) -> Site:
        """The site with these rows, and these columns [units, columns of one] or zero ones."""
        values = self.rows(rows)
        if columns is not None:
            index = self.width.axes.index(self.column)
            like = existing_entries(self.width, self.column)
            values[index] = laid_out(columns.to(like), self.column, like)
        return replace(self.site, move=replace(width_of(self.site), more=len(rows), _entries=Entries(tuple(values))))

    @property
    def existing_rows(self) -> Tensor:
        """[units, weights of one], with the bias last where there is one."""
        parts = [existing_entries(self.width, axis).flatten(1) if axis.name != "bias" else existing_entries(self.width, axis)[:, None]
                 for axis in self.width.axes if axis.fill == "row"]  # fmt: skip
        return torch.cat(parts, 1).cpu().double()

    def as_long(self, rows: Tensor) -> Tensor:
        """Rows as long as those that are there are on average; of length 1 if all of these are zero."""
        length = float(self.existing_rows.norm(dim=1).mean()) or 1.0
        scaled: Tensor = rows * (length / rows.norm(dim=1, keepdim=True).clamp_min(1e-12))
        return scaled

    @property
    def existing_columns(self) -> Tensor:
        """[units, columns of one]."""
        own = existing_entries(self.width, self.column)
        return by_unit(own.movedim(self.column.dim, 0).flatten(1), self.column).cpu().double()


def with_more(width: Width, more: int, **changes: Any) -> Width:
    """A width that gets so many units, and what they cost."""
    added, flops = (cost * more // width.more for cost in (width.added, width.flops))
    return replace(width, more=more, added=added, flops=flops, **changes)


def pair_of(site: Site, model: nn.Module) -> Pair | str:
    """The pair of a site, or why it has none."""
    width = site.move
    if not isinstance(width, Width):
        return "it is not a width"
    width = width.in_model(model)
    rows, columns = ([axis for axis in width.axes if axis.fill == fill] for fill in ("row", "column"))
    if len({axis.module.path for axis in rows}) != 1 or len(columns) != 1 or width.heads or width.blocks:
        return "it takes units that one layer makes and one layer reads"
    maker, reader = rows[0].module.find_module(), columns[0].module.find_module()
    known = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if not isinstance(maker, known) or not isinstance(reader, known):
        return f"it does not know {type(maker).__name__} -> {type(reader).__name__}"
    side = round(columns[0].inner ** 0.5)
    if isinstance(reader, nn.Linear) and isinstance(maker, nn.Conv2d) and side * side != columns[0].inner:
        return "the image that is flattened is not a square"
    return Pair(site, width, maker, reader, columns[0])


def pairs_of(network: nn.Module, sites: Iterable[Site]) -> list[Pair]:
    """The pairs of the sites that have one, with nothing that passed through them yet."""
    return [pair for site in sites if isinstance(pair := pair_of(site, network), Pair)]


def look(
    model: nn.Module,
    sites: Iterable[Site],
    batches: Iterable[Any],
    loss_fn: OptionalLoss,
    most: int | None = None,
) -> list[Pair]:
    """One ordinary pass over the batches, at most ``most`` of them: the pairs of the sites with all that passed through them."""
    network, batches = bare(model), list(islice(batches, most))
    if not batches:
        raise MeasurementError(EMPTY)
    pairs = pairs_of(network, sites)
    with ExitStack() as hooks, untouched(network), torch.inference_mode(False), torch.enable_grad():
        for pair in pairs:
            for handle in _watched(pair):
                hooks.callback(handle.remove)
        for index, batch in enumerate(batches):
            loss = batch_loss(network, batch, index, loss_fn)
            outputs = [pair.cotangents[-1] for pair in pairs]  # until their gradients are here
            gradients = torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)
            for pair, gradient in zip(pairs, gradients, strict=True):
                pair.cotangents[-1] = as_double(gradient) * len(pair.inputs[-1])
    return [pair for pair in pairs if pair.meets]


def _watched(pair: Pair) -> Iterator[Any]:
    def before_maker(module: nn.Module, args: Any) -> None:
        pair.inputs.append(as_double(args[0]))

    def after_reader(module: nn.Module, args: Any, output: Any) -> Tensor:
        pair.reads.append(as_double(args[0]))
        kept = first_tensor(output)
        assert kept is not None
        kept = kept.clone()  # what comes next may overwrite it
        pair.cotangents.append(kept)
        return kept

    yield pair.maker.register_forward_pre_hook(before_maker)
    yield pair.reader.register_forward_hook(after_reader)


def as_double(x: Tensor) -> Tensor:
    """What passed through a model, for statistics."""
    return x.detach().cpu().double()


def features(module: nn.Module, x: Tensor) -> Tensor:
    """Features last, everything else first: [n, features]."""
    channel = map_of(module).channel
    return x.movedim(channel, -1).reshape(-1, x.shape[channel])


def _unfeatured(module: nn.Module, flat: Tensor, like: Tensor) -> Tensor:
    """The inverse of `features`."""
    channel = map_of(module).channel
    return flat.reshape(like.movedim(channel, -1).shape).movedim(-1, channel)


def _carried(x: Tensor, read: Tensor, column: Axis, *, tokens: bool) -> Tensor:
    """What the maker is given as the reader would get it: a map is pooled by the mean, and flattened where the units are.

    ``tokens``: of a linear layer, whose features come last; the reader has as many of them, or fewer dimensions for their mean.
    """
    if tokens:
        return x.mean(tuple(range(1, 1 + x.dim() - read.dim()))) if x.dim() > read.dim() else x
    if x.dim() == 2 or x.shape[2:] == read.shape[2:]:
        return x
    dims = x.dim() - 2
    flat = read.dim() != x.dim()
    size = (round(math.pow(column.inner, 1 / dims)),) * dims if flat else tuple(read.shape[2:])
    pool: Any = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[dims]
    pooled: Tensor = pool(x, size)
    return pooled.flatten(1) if flat else pooled


class Rival(UnitMethod):
    """A method that adds units: `start` says how they begin at one width, and what that is worth by the method's own score."""

    batches: ClassVar[int | None] = None  # how many it looks at; None: all

    def propose(self, model: nn.Module, example: Any) -> Sites:
        found, network = super().propose(model, example), bare(model)
        kept, left = [], list(found.skipped)
        for site in found:
            pair = pair_of(site, network)
            if isinstance(pair, Pair):
                kept.append(site)
            else:
                left.append(Skipped(site.path, f"{type(self).__name__} leaves it out: {pair}"))
        return Sites(kept, left, model_name=type(network).__name__)

    @by_one
    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: OptionalLoss) -> Merits:
        batches = list(batches)
        pairs = look(model, sites, batches, loss_fn, self.batches)
        started = [self.start(pair, lambda site: loss_after(bare(model), site, batches, loss_fn)) for pair in pairs]
        merits = [Merit(site, float(value)) for site, value in started]
        if not any(merit.value > 0 for merit in merits):
            raise ZeroMerits(f"{type(self).__name__} finds that no more units would help.")
        return Merits(merits, norm=type(self).__name__, batches=len(pairs[0].inputs), samples=pairs[0].samples)

    def start(self, pair: Pair, try_out: Callable[[Site], float]) -> tuple[Site, float]:
        """The site with what its units begin with, and its score. ``try_out`` tells the mean loss of a copy that grew there."""
        raise NotImplementedError
