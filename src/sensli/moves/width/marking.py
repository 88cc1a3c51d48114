"""Who reads a unit: it is marked, and the marks are looked for.

A mark is NaN, which passes everything that works on each unit alone (activations, norms over the batch, pooling, flattening, gates) and
spreads over all units where they are mixed. Every sample of one batch carries the mark of another unit, so that a single run tells of all
layers at once. A layer that reads is given clean values, so that a mark goes no further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sensli.modules.arguments import first_tensor
from sensli.modules.running import mapped, run, tensors, untouched
from sensli.modules.wrappers import eager
from sensli.moves.roles import Role, role_of, why_unknown

_SAMPLES = 48  # marked at once: bounds the memory


@dataclass(frozen=True)
class Layout:
    """Where the units lie along an axis."""

    start: int
    outer: int
    inner: int


@dataclass
class Seen:
    """Where the marks of one layer were seen, by the unit that was marked."""

    path: str
    units: int  # rows of the layer
    reads: dict[str, dict[int, frozenset[int]]] = field(default_factory=dict)
    passes: dict[str, dict[int, frozenset[int]]] = field(default_factory=dict)
    mixed_by: str = ""  # a module that spread a mark over all units
    leaves: bool = False  # a mark reached what the model returns

    def span(self, reader: str) -> tuple[int, int]:
        """Where the columns of a reader that were marked begin and end."""
        places = frozenset().union(*self.reads[reader].values())
        return min(places), max(places) + 1


def watch(model: nn.Module, example: Any, makers: Sequence[tuple[str, nn.Module]]) -> dict[str, Seen]:
    """Mark units of all makers, and tell where they are read. The model is a copy in eval mode."""
    seen = {path: Seen(path, _rows(module)) for path, module in makers}
    # Enough to tell how units are laid out, in one group or, as fused gates are, in two.
    _mark(model, example, seen, [(path, unit) for path, each in seen.items() for unit in _at_ends(each.units, 2)])
    return seen


def watch_fused(model: nn.Module, example: Any, seen: Sequence[Seen]) -> None:
    """Mark also the units where queries, keys and values may meet that lie in a layer one after the other.

    They meet at the thirds of the layer or, where several queries share keys and values, after as many queries as there are columns.
    """
    marks = []
    for each in seen:
        units = {*_at_ends(each.units, 3), *(unit for _, end in map(each.span, each.reads) for unit in (end - 1, end))}
        marks += [(each.path, unit) for unit in sorted(units) if unit < each.units]
    _mark(model, example, {each.path: each for each in seen}, marks)


def _mark(model: nn.Module, example: Any, seen: dict[str, Seen], marks: list[tuple[str, int]]) -> None:
    for start in range(0, len(marks), _SAMPLES):
        _Run(model, marks[start : start + _SAMPLES], seen).of(example)


def _at_ends(rows: int, parts: int) -> list[int]:
    """The units at both ends of equal parts of a layer, and the second one."""
    ends = [rows * part // parts for part in range(parts + 1)]
    return sorted(unit for unit in {1, *ends, *(end - 1 for end in ends)} if 0 <= unit < rows)


def layout(units: int, seen: dict[int, frozenset[int]]) -> Layout | None:
    """How the units lie along the axis of a reader; None if it is not known how."""
    first = sorted(seen.get(0, ()))
    if not first:
        return None
    inner = next((i for i in range(1, len(first)) if first[i] != first[0] + i), len(first))
    outer, rest = divmod(len(first), inner)
    if rest:
        return None
    found = Layout(first[0], outer, inner)
    return found if all(places == columns(found, units, unit) for unit, places in seen.items()) else None


def columns(where: Layout, units: int, unit: int) -> frozenset[int]:
    """The entries along an axis that belong to a unit."""
    starts = (where.start + group * units * where.inner + unit * where.inner for group in range(where.outer))
    return frozenset(start + i for start in starts for i in range(where.inner))


class _Run:
    """One run with a mark in every sample."""

    def __init__(self, model: nn.Module, marks: list[tuple[str, int]], seen: dict[str, Seen]) -> None:
        self.model, self.marks, self.seen = model, marks, seen

    def of(self, example: Any) -> None:
        handles = list(self._hooks())
        try:
            # torch's fused attention takes NaN for a masked value; the plain one passes it on.
            with untouched(self.model), torch.no_grad(), eager(), sdpa_kernel(SDPBackend.MATH):
                output = run(self.model, _repeated(example, len(self.marks)))
        finally:
            for handle in handles:
                handle.remove()
        for tensor in tensors(output):
            each = _by_sample(tensor, len(self.marks))  # a mean over all samples, such as a loss, tells of nobody
            if each is not None and each.is_floating_point():
                for sample in each.flatten(1).isnan().any(1).nonzero().flatten().tolist() if each.dim() > 1 else ():
                    self.seen[self.marks[sample][0]].leaves = True

    def _hooks(self) -> Iterator[Any]:
        for path, module in self.model.named_modules():
            role = role_of(module)
            if role is not None:
                yield module.register_forward_pre_hook(self._before(path, role), with_kwargs=True)
                if role.makes:
                    yield module.register_forward_hook(self._after(path, role))
            elif why_unknown(module) or not any(True for _ in module.children()):
                yield module.register_forward_hook(self._other(path))

    def _before(self, path: str, role: Role) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            x = first_tensor(args) if args else first_tensor(tuple(kwargs.values()))
            if x is None or not x.is_floating_point():
                return None
            found = self._marked(x, role.channel)
            for sample, places in found.items():
                maker, unit = self.marks[sample]
                into = self.seen[maker].reads if role.reads else self.seen[maker].passes
                held = into.setdefault(path, {})
                held[unit] = held.get(unit, frozenset()) | places
            if not role.reads or not found:
                return None
            clean = torch.where(x.isnan(), torch.zeros_like(x), x)
            if args:
                return (clean, *args[1:]), kwargs
            name = next(name for name, value in kwargs.items() if value is x)
            return args, {**kwargs, name: clean}

        return hook

    def _after(self, path: str, role: Role) -> Any:
        own = [(sample, unit) for sample, (maker, unit) in enumerate(self.marks) if maker == path]

        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            if not own or not isinstance(output, Tensor):
                return None
            each = _by_sample(output, len(self.marks))
            if each is None:
                self.seen[path].mixed_by = path
                return None
            marked = each.clone()
            for sample, unit in own:
                marked[sample].select(_of_sample(marked, output, role.channel), unit).fill_(torch.nan)
            return marked.reshape(output.shape)

        return hook

    def _other(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            before, after = self._share(first_tensor(args)), self._share(first_tensor(output))
            if before is None or after is None:
                return
            for sample in ((before > 0) & (after > before)).nonzero().flatten().tolist():
                known = self.seen[self.marks[sample][0]]
                known.mixed_by = known.mixed_by or f"{path} ({type(module).__name__})"

        return hook

    def _share(self, x: Tensor | None) -> Tensor | None:
        """For every sample the share of values that are marked."""
        each = None if x is None or not x.is_floating_point() else _by_sample(x, len(self.marks))
        return None if each is None or each.dim() < 2 else each.flatten(1).isnan().float().mean(1)

    def _marked(self, x: Tensor, channel: int) -> dict[int, frozenset[int]]:
        """For every sample with marks the places along the channels that have one."""
        each = _by_sample(x, len(self.marks))
        if not x.is_floating_point() or not bool(x.isnan().any()):
            return {}
        if each is None:  # nobody knows whose marks these are: everybody's
            return {sample: frozenset(range(x.shape[-1] if x.dim() else 1)) for sample in range(len(self.marks))}
        nan = each.isnan()
        dim = _of_sample(each, x, channel) + 1
        places = nan.movedim(dim, 1).flatten(2).any(2) if nan.dim() > 2 else nan
        found: dict[int, set[int]] = {}
        for sample, place in places.nonzero().tolist():  # all at once: on a device each question is a wait
            found.setdefault(sample, set()).add(place)
        return {sample: frozenset(marked) for sample, marked in found.items()}


def _rows(module: nn.Module) -> int:
    role = role_of(module)
    assert role is not None
    name, dim = role.makes[0]
    return int(getattr(module, name).shape[dim])


def _by_sample(x: Tensor, samples: int) -> Tensor | None:
    """The values sample by sample; those of one sample may lie in several entries of the first dimension, one after the other."""
    if x.dim() < 1 or x.shape[0] % samples or not x.shape[0]:
        return None
    return x if x.shape[0] == samples else x.unflatten(0, (samples, -1))


def _of_sample(each: Tensor, x: Tensor, channel: int) -> int:
    """The dimension of the channels in the values of one sample."""
    return (channel % x.dim()) - 1 + (each.dim() - x.dim())


def _repeated(example: Any, samples: int) -> Any:
    """The first sample of an example, so many times."""
    batch = next((t.shape[0] for t in tensors(example) if t.dim() > 0), 0)

    def each(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != batch:
            return tensor
        return tensor[:1].expand(samples, *tensor.shape[1:]).clone()

    return mapped(example, each)
