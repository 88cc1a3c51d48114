"""What new units would be worth: the squared norm of the gradient of the columns that would read them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from sensli.modules.attention import holder_of
from sensli.modules.engines.fsdp import is_sharded
from sensli.modules.running import widened
from sensli.moves.factors import Factored, Outer
from sensli.moves.geometry import Geometry
from sensli.moves.move import Caught, Gauge
from sensli.moves.point import Point, Ref
from sensli.moves.width.entries import Entries, by_unit
from sensli.moves.width.layers import column_gradient
from sensli.moves.width.moments import chosen_part, moments
from sensli.moves.width.replica import Replica
from sensli.moves.width.width import Axis, Width

if TYPE_CHECKING:
    from sensli.moves.sites import Site

_ROUNDS = 8  # in which candidates are chosen
_SAMPLES = 8  # values of each candidate, for each candidate: more do not tell better how alike two of them are
_COLUMNS = 4  # of each candidate, for each candidate: as many tell which gradients are large (a flattened channel has thousands)

# The replica that all widths measured together in a model share, while they are.
_REPLICAS: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()


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
        known = _REPLICAS.get(model)
        replica = self._replica = Replica(model) if known is None else known
        replica.ask(self, self._width, self._candidates())
        if known is not None:
            yield
            return
        _REPLICAS[model] = replica
        try:
            with replica.beside():
                yield
        finally:
            del _REPLICAS[model]

    def _candidates(self) -> Entries | float:
        """What the replica runs, as it understands it."""
        raise NotImplementedError

    def catching(self, index: int, x: Tensor) -> Caught:
        assert self._replica is not None
        call = self._replica.call(self._readers[index].module.path, x)
        return lambda x, cotangent, args, kwargs: self._sums(index, widened(call.read_by(self)), cotangent)

    def _sums(self, index: int, read: Tensor, cotangent: Tensor) -> Mapping[str, Tensor | Outer]:
        """What one call of a reader adds: what candidates would give it to read, and the cotangent of what it gave."""
        raise NotImplementedError

    def _columns(self, index: int, read: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient of the columns that would read it: [units, columns of one]."""
        axis = self._readers[index]
        return by_unit(column_gradient(axis.module.find_module(), read, cotangent).flatten(1), axis)

    def _summed(self, sums: Mapping[str, Tensor], name: str) -> list[Tensor]:
        """The sums of this name, by reader: zeros for one that no gradient reaches."""
        rows = len(next(total for key, total in sums.items() if key.startswith(name)))
        found = []
        for index, axis in enumerate(self._readers):
            shape = getattr(axis.module.find_module(), axis.name).shape
            columns = math.prod(shape) // shape[axis.dim] * axis.outer * axis.inner
            held = sums.get(f"{name}{index}")
            found.append(next(iter(sums.values())).new_zeros(rows, columns) if held is None else held)
        return found

    def _likeness(self, index: int, read: Tensor) -> Tensor:
        """The inner products of what is read of each unit, over as many samples as are needed to tell units apart."""
        axis = self._readers[index]
        channel = 1 if isinstance(axis.module.find_module(), nn.modules.conv._ConvNd) else read.dim() - 1
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
        sums = {f"columns{index}": self._columns(index, read, cotangent)}
        if self._chooses:
            sums["likeness"] = self._likeness(index, read)
        if self.natural:
            sums.update(moments(index, self._readers[index].module.find_module(), read, cotangent))
        return sums

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        chosen = self._chosen(sums)
        return [(columns[chosen], Geometry()) for columns in self._summed(sums, "columns")]

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
            self._known = seen, columns, greedy(torch.cat(columns, 1), sums["likeness"], self._width.more)
        return self._known[2]


def greedy(gradients: Tensor, likeness: Tensor, count: int) -> list[int]:
    """So many candidates, each time the one whose gradient is largest after what those before it explain is taken out of all.

    ``gradients``: [candidates, columns of one]; ``likeness``: the inner products of the candidates' activations. Of very many a few are
    taken at a time, as they stand.
    """
    gradients, likeness = _tamed(gradients), _tamed(likeness)
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


def _tamed(values: Tensor) -> Tensor:
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


def _after(axis: Axis, model: nn.Module) -> tuple[Point, nn.Module]:
    """Where the cotangent of what a reader gives is caught."""
    held = holder_of(model, axis.module.path)
    path, module = (axis.module.path, axis.module.find_module()) if held is None else held
    copied = axis.overwritten or is_sharded(model)  # fully_shard warns of views that a sharded module returns
    return Point(Ref.to(path, module), "after", (), first_part=held is not None, overwritten=copied), module
