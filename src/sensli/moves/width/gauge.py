"""What new units would be worth: the squared norm of the gradient of the columns that would read them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from sensli.modules.grown import holder_of
from sensli.modules.running import decompose, upcast
from sensli.modules.wrappers import is_sharded
from sensli.moves.factors import Factored, Outer, sums_of
from sensli.moves.point import Point, Ref
from sensli.moves.roles import Geometry, map_of
from sensli.moves.sites import MIXED, Caught, Gauge
from sensli.moves.width.replica import ReaderCall, Replica
from sensli.moves.width.width import Axis, Entries, Width, by_unit, existing_entries

if TYPE_CHECKING:
    from sensli.moves.sites import Site

# ---- What the natural merit of new units needs: moments of what a reader would read from them, and of what comes back to
# its output.


def reader_moments(index: int, reader: nn.Module, read: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """Of one pass, for all candidates; their gradients are summed elsewhere."""
    inputs, outputs = map_of(reader).sides(read.to(cotangent.dtype), cotangent)
    sums = sums_of(index, cotangent.new_empty(0), inputs, outputs, len(cotangent))
    return {name: value for name, value in sums.items() if not name.startswith("map")}


def chosen_part(sums: Mapping[str, Tensor], index: int, chosen: list[int], axis: Axis) -> Factored:
    """The gradient and the moments of the candidates that were chosen, for one reader."""
    columns, inputs, outputs, counts = (sums[f"{name}{index}"] for name in ("columns", "inputs", "outputs", "counts"))
    per_unit, rows = axis.outer * axis.inner, outputs.shape[-1]
    taps = inputs.shape[-1] // (len(columns) * per_unit)
    # along the reader's axis: [outer, candidates, inner], and its taps for each entry
    places = torch.arange(inputs.shape[-1], device=inputs.device).view(axis.outer, len(columns), axis.inner * taps)
    kept = places[:, chosen].transpose(0, 1).flatten()
    gradient = columns[chosen].view(len(chosen) * per_unit, rows, taps).transpose(0, 1).reshape(1, rows, -1)
    return Factored(gradient, inputs[:, kept][:, :, kept], outputs, counts)


_SAMPLE = 512  # columns of one unit by which candidates are chosen where not all are held
_ROUNDS = 8  # in which candidates are chosen
_SAMPLES = 8  # values of each candidate, for each candidate: more do not tell better how alike two of them are
_COLUMNS = 4  # of each candidate, for each candidate: as many tell which gradients are large (a flattened channel has thousands)

# The replica that all widths measured together in a model share, while they are.
_REPLICAS: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()


@contextmanager
def shared_replica(model: nn.Module) -> Iterator[Replica]:
    """The replica of a model, beside its passes; whoever comes first makes it."""
    known = _REPLICAS.get(model)
    if known is not None:
        yield known
        return
    replica = _REPLICAS[model] = Replica(model)
    try:
        with replica.beside():
            yield replica
    finally:
        del _REPLICAS[model]


class ReaderGauge(Gauge):
    """Catches the cotangents of the layers that read a width, and what the replica would give them to read."""

    raw: ClassVar[bool] = True

    def __init__(self, width: Width) -> None:
        self._width = width
        self._readers = [axis for axis in width.axes if axis.fill == "column"]
        super().__init__()
        self._replica: Replica | None = None

    def watch(self, model: nn.Module) -> None:
        """Catch what comes back to the readers in this model."""
        self.points = [_after(axis, model) for axis in self._readers]

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Beside the passes of the model the replica runs, once for all widths."""
        with shared_replica(model) as replica:
            self.join(replica)
            yield

    def join(self, replica: Replica) -> None:
        """Have the replica run the candidates of this width too."""
        self._replica = replica
        replica.ask(self, self._width, self._candidates())

    def _candidates(self) -> Entries | float:
        """What the replica runs, as it understands it."""
        raise NotImplementedError

    def catching(self, index: int, x: Tensor) -> Caught:
        assert self._replica is not None
        call = self._replica.call(self._readers[index].module.path, x)
        return lambda x, cotangent, args, kwargs: self.sums_of_call(index, call, cotangent)

    def sums_of_call(self, index: int, call: ReaderCall, cotangent: Tensor) -> Mapping[str, Tensor | Outer]:
        """What one call of a reader adds, when the cotangent of what it gave is known."""
        return self._sums(index, upcast(call.read_by(self)), cotangent)

    def _sums(self, index: int, read: Tensor, cotangent: Tensor) -> Mapping[str, Tensor | Outer]:
        """What one call of a reader adds: what candidates would give it to read, and the cotangent of what it gave."""
        raise NotImplementedError

    def _columns(self, index: int, read: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient of the columns that would read it: [units, columns of one]."""
        axis = self._readers[index]
        return by_unit(map_of(axis.module.find_module()).column_gradient(read, cotangent).flatten(1), axis)

    def _summed(self, sums: Mapping[str, Tensor], name: str) -> list[Tensor]:
        """The sums of this name, by reader: zeros for one that no gradient reaches."""
        rows = len(next(total for key, total in sums.items() if key.startswith(name)))
        found = []
        for index, axis in enumerate(self._readers):
            held = sums.get(f"{name}{index}")
            found.append(next(iter(sums.values())).new_zeros(rows, _columns_of(axis)) if held is None else held)
        return found

    def _likeness(self, index: int, read: Tensor) -> Tensor:
        """The inner products of what is read of each unit, over as many samples as are needed to tell units apart."""
        axis = self._readers[index]
        channel = map_of(axis.module.find_module()).channel % read.dim()
        if channel:
            enough = _SAMPLES * read.shape[channel] ** 2
            read = read[:: max(1, read.numel() // enough)]
        values = by_unit(read.movedim(channel, 0).flatten(1), axis)
        return values @ values.T


class ColumnGauge(ReaderGauge):
    """Sums the gradients of the columns for all candidates and, if not all will be taken, how much the candidates resemble each other."""

    factors: ClassVar[bool] = True

    def __init__(self, width: Width, candidates: Callable[[], Entries]) -> None:
        super().__init__(width)
        self.columns = sum(map(_columns_of, self._readers))
        self.entries = 2 * width.more * self.columns  # at most: candidates are counted when they are made
        self._made = candidates  # only if they are needed
        # What was chosen by last, which is held so that no other tensor gets its number; and what was chosen.
        self._known: tuple[list[tuple[int, int]], list[Tensor], list[int]] | None = None

    @cached_property
    def _entries(self) -> Entries:
        return self._made() if self._width._entries is None else self._width._entries

    @cached_property
    def _chooses(self) -> bool:
        return self._entries.count(self._width) > self._width.more

    def _candidates(self) -> Entries:
        return self._entries

    def _sums(self, index: int, read: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        columns = self._columns(index, read, cotangent)
        if self.mix is None:
            sums = {f"columns{index}": columns}
        else:  # a sample of the columns tells which candidates to take, and mixtures of all of them what they are worth
            sums = {
                f"columns{index}": columns[:, :: max(1, self.columns // _SAMPLE)].clone(),
                MIXED: self.mix(index, columns),
            }
        if self._chooses:
            sums["likeness"] = self._likeness(index, read)
        if self.natural:
            sums.update(reader_moments(index, self._readers[index].module.find_module(), read, cotangent))
        return sums

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        chosen = self._chosen(sums)
        found = [sums[MIXED]] if MIXED in sums else self._summed(sums, "columns")
        return [(columns[chosen], Geometry()) for columns in found]

    def factored(self, sums: Mapping[str, Tensor]) -> list[Factored]:
        readers = [(index, axis) for index, axis in enumerate(self._readers) if f"columns{index}" in sums]
        return [chosen_part(sums, index, self._chosen(sums), axis) for index, axis in readers]

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        assert isinstance(site.move, Width)
        entries = self._entries.taken(self._width, self._chosen(sums)) if sums else None
        return replace(site, move=replace(site.move, _entries=entries))

    def _chosen(self, sums: Mapping[str, Tensor]) -> list[int]:
        """The candidates to take, one after the other: what earlier ones can do does not count for the next."""
        columns = self._summed(sums, "columns")
        if not self._chooses:
            return list(range(len(columns[0])))
        seen = [(id(each), each._version) for each in columns]  # sums are added to in place
        if self._known is None or self._known[0] != seen:
            self._known = seen, columns, choose_greedily(torch.cat(columns, 1), sums["likeness"], self._width.more)
        return self._known[2]


def choose_greedily(gradients: Tensor, likeness: Tensor, count: int) -> list[int]:
    """So many candidates, each time the one whose gradient is largest after what those before it explain is taken out of all.

    ``gradients``: [candidates, columns of one]; ``likeness``: the inner products of the candidates' activations. Of very many a few are
    taken at a time, as they stand.
    """
    gradients, likeness = _scale_down(gradients), _scale_down(likeness)
    if not bool(gradients.isfinite().all() and likeness.isfinite().all()):
        return list(range(count))  # training has diverged: none is better than another, and their merits say so
    # Sums in single precision are not quite those of vectors: so little is added that it changes nothing.
    finest = torch.finfo(likeness.dtype)
    least = finest.eps * len(likeness) * float(likeness.diagonal().max()) + finest.tiny
    some = gradients[:, :: max(1, gradients.shape[1] // (_COLUMNS * len(gradients)))].to(likeness)
    # All that is asked of gradients and activations is their inner products, which are fewer than their entries.
    left, likeness = some @ some.T, likeness.clone()
    chosen: list[int] = []
    while True:
        worth = left.diagonal().clone()
        worth[chosen] = -torch.inf
        best = worth.topk(min(math.ceil(count / _ROUNDS), count - len(chosen))).indices
        chosen += best.tolist()
        if len(chosen) == count:
            return sorted(chosen)
        # An orthonormal basis of what is taken: how long all others are along it, and the gradients of the basis with all others.
        # (By the inverse, which is small: to solve for all others takes several times as long.)
        basis = _basis(likeness[best][:, best], least)
        along, shared = basis @ likeness[best], basis @ left[best]
        within = basis @ shared[:, best].T
        half = shared - 0.5 * within @ along
        left.addmm_(along.T, half, alpha=-1).addmm_(half.T, along, alpha=-1)
        likeness.addmm_(along.T, along, alpha=-1)


def _scale_down(values: Tensor) -> Tensor:
    """The same, divided by a power of four where squares might overflow: only sizes beside each other matter."""
    largest = float(values.abs().max())
    return values / 4.0 ** math.floor(math.log(largest, 4)) if 2**16 < largest < math.inf else values


def _basis(products: Tensor, least: float) -> Tensor:
    """The inverse Cholesky factor of a few inner products, where candidates may be dead or equal."""
    one = torch.eye(len(products), dtype=products.dtype, device=products.device)
    while True:
        factor, failed = torch.linalg.cholesky_ex(products + least * one)
        if not failed:
            found: Tensor = torch.linalg.solve_triangular(factor, one, upper=False)
            return found
        least *= 100


def _columns_of(axis: Axis) -> int:
    """How many entries of a reader belong to one unit."""
    shape = axis.tensor.shape
    return math.prod(shape) // shape[axis.dim] * axis.outer * axis.inner


def _after(axis: Axis, model: nn.Module) -> tuple[Point, nn.Module]:
    """Where the cotangent of what a reader gives is caught."""
    held = holder_of(model, axis.module.path)
    path, module = (axis.module.path, axis.module.find_module()) if held is None else held
    copied = axis.overwritten or is_sharded(model)  # fully_shard warns of views that a sharded module returns
    return Point(Ref.to(path, module), "after", (), first_part=held is not None, overwritten=copied), module


# ---- Rows of new units that are made for the data: units as large as those that are there, in the directions that the
# loss asks for.


_LEAST = 4  # places: fewer do not tell how large a unit is
_MOST = 32  # directions: what is beyond them is noise
_CUT = 0.05  # of the squares of what is read, below zero: GELU and SiLU leave less than that, tanh as much as is above
_SMALLEST = 1e-3  # of the largest, where the gradient of a bypass has fewer directions than were asked for
_EXACT = 64  # entries of a cotangent: of so many the leading directions are found exactly
_DIRECTION_ROUNDS = 2  # of more, in so many rounds


@dataclass(frozen=True)
class Making:
    """The weights and biases of one layer that make units: the numbers of their axes in the width."""

    axis: Axis
    weight: int
    bias: int | None


def makings(width: Width) -> Iterator[Making]:
    """What makes units, layer by layer."""
    rows = [(index, axis) for index, axis in enumerate(width.axes) if axis.fill == "row"]
    biases = {(axis.module.path, axis.start): index for index, axis in rows if axis.name == "bias"}
    for index, axis in rows:
        if axis.name == "weight":
            # a bias lies along its layer's units as the weights do
            yield Making(axis, index, biases.get((axis.module.path, axis.start)))


def calibrate(width: Width, entries: Entries, inputs: Mapping[str, Tensor], *, cut: bool) -> Entries:
    """The same with other lengths and biases: what each row makes of the inputs has the mean zero and is as large as what is there.

    ``inputs``: of each layer that is known what its weights are multiplied with, [places, inputs]. Without a bias the mean stays. ``cut``:
    whether what is below zero hardly arrives at the readers, as with ReLU.
    """
    values = list(entries.values)
    for making in makings(width):
        rows, axis = values[making.weight], making.axis
        if axis.module.path not in inputs or rows is None:
            continue
        given = inputs[axis.module.path].to(rows)
        if len(given) < _LEAST:
            continue
        bias = None if making.bias is None else values[making.bias]
        old_bias = None if making.bias is None else existing_entries(width, width.axes[making.bias])
        made = _units_made(given, rows, bias, axis)  # [places, outer, units, inner]
        mean = made.mean(0, keepdim=True) if bias is not None else torch.zeros_like(made[:1])
        there = _units_made(given, existing_entries(width, axis), old_bias, axis)
        centred = there - there.mean(0, keepdim=True) if bias is not None else there
        wanted = centred.square().mean(0, keepdim=True)
        if cut:
            # A unit that is nearly always off varies far more than what its readers get of it; of one with the mean zero they get half.
            wanted = torch.minimum(wanted, 2 * there.relu().square().mean(0, keepdim=True))
        size = (made - mean).square().mean(0, keepdim=True)
        factor = (wanted.mean((2, 3), keepdim=True) / size).sqrt()
        # nothing to compare with where all that is there is dead, or a unit that does not move on these samples, which stays as it was
        factor = torch.where((factor > 0) & factor.isfinite(), factor, 1.0).flatten()
        mean = torch.where((size > 0) & size.isfinite(), mean, 0.0).flatten()
        along = [-1 if dim == axis.dim else 1 for dim in range(rows.dim())]
        values[making.weight] = rows * factor.view(along)
        if making.bias is not None and bias is not None:
            values[making.bias] = (bias - mean) * factor
    return Entries(tuple(values))


def is_cut(read: Tensor) -> bool:
    """Whether of what a layer reads nearly all is above zero."""
    return bool((-read).relu().square().sum() < _CUT * read.square().sum())


def directions(given: Tensor, back: Tensor, count: int) -> Tensor:
    """Up to ``count`` rows that follow the cotangent: [rows, inputs].

    ``given`` is [places, inputs], ``back`` the cotangents of all readers, [places, outputs]. Rows are the left singular vectors of the
    gradient of a bypass between them, the largest first, each with the sign for which what is above zero is worth more. They are not
    divided by the spread of the inputs: that points to where inputs hardly move, and units overfit. There are none where values are so
    large that their products overflow.
    """
    if not bool((given.square().sum() * back.square().sum()).square().isfinite()):  # no product here is larger
        return given.new_zeros(0, given.shape[1])
    given = given - given.mean(0)
    lead = _leading(given, back, min(count, _MOST, *back.shape, given.shape[1]))
    rows = (given.T @ (back @ lead)).T
    sizes = rows.norm(dim=1)
    rows = rows[sizes > _SMALLEST * sizes.max()]  # the others are rounding errors
    made = given @ rows.T
    above, below = (part.T @ back for part in (made.relu(), (-made).relu()))
    turned = above.square().sum(1) < below.square().sum(1)
    return torch.where(turned[:, None], -rows, rows)


def _leading(given: Tensor, back: Tensor, count: int) -> Tensor:
    """The leading right singular vectors of the gradient of a bypass, [outputs, count]."""
    if back.shape[1] <= _EXACT:
        bypass = given.T @ back
        _, vectors = decompose(torch.linalg.eigh, bypass.T @ bypass)  # the smallest first
        found: Tensor = vectors.flip(1)[:, :count]
        return found
    drawn = torch.randn(back.shape[1], count, generator=torch.Generator().manual_seed(count), device="cpu").to(back)
    for _ in range(_DIRECTION_ROUNDS):
        drawn = torch.linalg.qr(back.T @ (given @ (given.T @ (back @ drawn)))).Q
    return drawn


def _units_made(given: Tensor, rows: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    """What rows make of inputs: [places, outer, units, inner]."""
    made = given @ rows.movedim(axis.dim, 0).flatten(1).T.to(given)
    made = made if bias is None else made + bias.to(made)
    parts: Tensor = made.unflatten(1, (axis.outer, -1, axis.inner))
    return parts


# ---- Rows that a measurement tries where no data were seen before it: random ones, and those that are there, perturbed.
#
# Their spread is that of the rows that are there, so that their activations are about as large as those of the other
# units.


MANY = 64  # new units: among so many random directions hardly one lacks something like its opposite


def candidates(width: Width) -> Entries:
    """Entries of all axes that make a unit, for more units than will be taken.

    For each that would come: a random direction, unless there are many its opposite, and a unit that is there, perturbed.
    """
    generator = torch.Generator().manual_seed(width.units)
    near = torch.randint(width.units, (width.more,), generator=generator, device=generator.device)
    return Entries(tuple(_rows(axis, width, near, generator) if axis.fill == "row" else None for axis in width.axes))


def _rows(axis: Axis, width: Width, near: Tensor, generator: torch.Generator) -> Tensor:
    own = existing_entries(width, axis)
    units, dim = width.units, axis.dim + 1
    old = own.unflatten(axis.dim, (axis.outer, units, axis.inner))
    moved = old.index_select(dim, near.to(own.device))
    if own.dim() < 2:  # a bias is that of some unit that is there
        picked = torch.randint(units, (width.more,), generator=generator, device=generator.device)
        drawn = opposite = old.index_select(dim, picked.to(own.device))
    else:
        shape = list(old.shape)
        shape[dim] = width.more
        spread = own.std(correction=0)
        drawn = torch.randn(shape, generator=generator, device=generator.device).to(own) * spread
        opposite = -drawn  # after a ReLU the one may be dead where the other is alive
        moved = moved + torch.randn(moved.shape, generator=generator, device=generator.device).to(own) * (0.5 * spread)
    tried = [drawn, moved] if width.more >= MANY else [drawn, opposite, moved]
    rows: Tensor = torch.cat(tried, dim=dim).flatten(axis.dim, axis.dim + 2)
    return rows
