"""Who makes and who reads the units of a width: marks pass through a copy of the model, and are looked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sensli.modules.configs import held_objects
from sensli.modules.grown import holder_of
from sensli.modules.running import brief_error, first_tensor, map_tensors, note, run, tensors, untouched
from sensli.modules.wrappers import run_eagerly
from sensli.moves.point import Ref
from sensli.moves.roles import Role, entries_read, role_of, units_made, why_unknown
from sensli.moves.search import Search
from sensli.moves.width.width import Size

# ---- Who reads a unit: it is marked, and the marks are looked for.
#
# A mark is NaN, which passes everything that works on each unit alone (activations, norms over the batch, pooling,
# flattening, gates) and spreads over all units where they are mixed. Every sample of one batch carries other marks, so
# that a single run tells of many layers. A layer that reads is given clean values, so that a mark goes no further: once it
# is known of one unit of each layer where it is read, layers that have no reader in common share a sample.


_SAMPLES = 48  # marked at once, at most
_LEAST = 4
_ROOM = 2**20  # entries of the largest tensor that a layer gives for all of them: bounds the memory

Mark = tuple[str, int]  # a layer, and the unit of it that is marked


@dataclass(frozen=True)
class Layout:
    """Where the units lie along an axis."""

    start: int
    outer: int
    inner: int


@dataclass
class SeenMarks:
    """Where the marks of one layer were seen, by the unit that was marked."""

    path: str
    units: int  # rows of the layer
    reads: dict[str, dict[int, frozenset[int]]] = field(default_factory=dict)
    passes: dict[str, dict[int, frozenset[int]]] = field(default_factory=dict)
    mixed_by: str = ""  # a module that spread a mark over all units
    leaves: bool = False  # a mark reached what the model returns
    expected: frozenset[str] = frozenset()  # where marks of a layer like it went, in a block like its own

    @property
    def touched(self) -> set[str]:
        """The layers that its marks have reached or, before the first one, should."""
        return {*self.reads, *self.passes} or set(self.expected)

    def knows(self, unit: int) -> bool:
        """Whether this unit was marked, and seen somewhere."""
        return any(unit in marks for seen in (self.reads, self.passes) for marks in seen.values())

    def span(self, reader: str) -> tuple[int, int]:
        """Where the columns of a reader that were marked begin and end."""
        places = frozenset().union(*self.reads[reader].values())
        return min(places), max(places) + 1


class Marking:
    """Marks units of layers, and tells where they are read. The model is a copy in eval mode."""

    def __init__(self, model: nn.Module, example: Any, makers: Sequence[tuple[str, nn.Module]], largest: int) -> None:
        """``largest``: the entries of the largest tensor that a layer gives for one sample."""
        self.seen = {path: SeenMarks(path, units_made(module)) for path, module in makers}
        self._model, self._example = model, example
        self._most = min(_SAMPLES, max(_LEAST, _ROOM // max(largest, 1)))

    def mark(self) -> None:
        """Enough units to tell how they are laid out, in one group or, as fused gates are, in two."""
        units = {path: _at_ends(each.units, 2) for path, each in self.seen.items()}
        if sum(map(len, units.values())) <= self._most:  # one run tells all
            self._run([[(path, unit)] for path, some in units.items() for unit in some])
            return
        alike = _in_equal_blocks(self._model, self.seen)
        between = {path for paths in alike for path in paths[1:-1]}
        self._mark_first({path: some for path, some in units.items() if path not in between})
        # Between the first and the last of equal blocks all is as in these, or it is marked as they were.
        unlike = {path for paths in alike if not self._expect(paths) for path in paths[1:-1]}
        self._mark_first({path: units[path] for path in units if path in unlike})
        # What leaves the model gets no more units, wherever the other ones are read. Nor does what is spread.
        rest = {path: some for path, some in units.items() if not self.seen[path].leaves and not self._is_spread(path)}
        self._share({path: [unit for unit in some if not self.seen[path].knows(unit)] for path, some in rest.items()})

    def _mark_first(self, units: dict[str, list[int]]) -> None:
        """Mark the first unit of each layer, and the last one where a module spreads it, as a norm does with what comes by the skips."""
        self._run([[(path, some[0])] for path, some in units.items() if some])
        self._run([[(path, some[-1])] for path, some in units.items() if len(some) > 1 and self._is_spread(path)])

    def _expect(self, paths: Sequence[str]) -> bool:
        """Expect of the same layer in equal blocks what the first and the last of them have shown; False if that is not the same."""
        first, last = self.seen[paths[0]], self.seen[paths[-1]]
        ends = [(each.leaves, self._is_spread(each.path)) for each in (first, last)]
        if ends[0] != ends[1]:
            return False
        told = any(ends[0])
        if not told and (
            first.mixed_by or last.mixed_by or _moved(first.touched, first.path, last.path) != last.touched
        ):
            return False
        for each in (self.seen[path] for path in paths[1:-1]):
            if not told:
                each.expected = frozenset(_moved(first.touched, first.path, each.path) or ())
            else:  # it stays as it is, for the same reason
                each.leaves, each.reads = first.leaves, {path: dict(marks) for path, marks in first.reads.items()}
                each.mixed_by = next(iter(_moved([first.mixed_by], first.path, each.path) or [first.mixed_by]))
        return True

    def _is_spread(self, path: str) -> bool:
        """Whether a module has spread every mark of a layer so far over all that one of its readers reads."""
        each = self.seen[path]
        whole = (
            all(len(places) == entries_read(self._model.get_submodule(reader)) for places in marks.values())
            for reader, marks in each.reads.items()
        )
        return bool(each.mixed_by) and any(whole)

    def mark_fused(self, seen: Sequence[SeenMarks]) -> None:
        """Mark also the units where queries, keys and values may meet that lie in a layer one after the other.

        They meet at the thirds of the layer or, where several queries share keys and values, after as many queries as there are columns.
        """
        marks = {}
        for each in seen:
            ends = (unit for _, end in map(each.span, each.reads) for unit in (end - 1, end))
            marks[each.path] = sorted(unit for unit in {*_at_ends(each.units, 3), *ends} if unit < each.units)
        self._share(marks)

    def _share(self, units: dict[str, list[int]]) -> None:
        """Mark these units, those of layers that have no reader in common in the same samples."""
        lanes: list[tuple[set[str], list[str]]] = []  # what is touched, and by marks of which layers
        for path in units:
            touched = {path, *self.seen[path].touched}
            known = bool(self.seen[path].touched) and not self.seen[path].mixed_by
            lane = next((lane for lane in lanes if known and lane[0].isdisjoint(touched)), None)
            if lane is None:
                lanes.append((touched if known else set(self.seen), [path]))
            else:
                lane[0].update(touched)
                lane[1].append(path)
        self._run(
            [
                [(path, units[path][number]) for path in paths if number < len(units[path])]
                for _, paths in lanes
                for number in range(max(len(units[path]) for path in paths))
            ]
        )

    def _run(self, samples: list[list[Mark]]) -> None:
        again: list[
            list[Mark]
        ] = []  # those that share a sample and were read elsewhere than the first ones: each alone
        for start in range(0, len(samples), self._most):
            again += _Run(self._model, samples[start : start + self._most], self.seen).look(self._example)
        if again:
            self._run(again)


def _in_equal_blocks(model: nn.Module, paths: Iterable[str]) -> list[list[str]]:
    """The same layers of the blocks of one list, where there are more than the first and the last and one between."""
    found: dict[object, list[str]] = {}
    for path in paths:
        parts = path.split(".")
        number = next((place for place in reversed(range(len(parts))) if parts[place].isdigit()), None)
        if number is not None and number + 1 < len(parts):
            module = model.get_submodule(path)
            shapes = tuple(tuple(parameter.shape) for parameter in module.parameters(recurse=False))
            key = ".".join(parts[:number]), ".".join(parts[number + 1 :]), type(module), shapes
            found.setdefault(key, []).append(path)
    return [alike for alike in found.values() if len(alike) > 3]


def _moved(paths: Iterable[str], here: str, there: str) -> set[str] | None:
    """Paths near the block of one layer as those near the block of another; None if one of them lies outside of the list."""
    place = next(
        i for i, (one, other) in enumerate(zip(here.split("."), there.split("."), strict=True)) if one != other
    )
    before, step = here.split(".")[:place], int(there.split(".")[place]) - int(here.split(".")[place])
    found = set()
    for parts in (path.split(".") for path in paths):
        if parts[:place] != before or not "".join(parts[place : place + 1]).isdigit():
            return None
        found.add(".".join([*before, str(int(parts[place]) + step), *parts[place + 1 :]]))
    return found


def _at_ends(rows: int, parts: int) -> list[int]:
    """The units at both ends of equal parts of a layer, and the second one."""
    ends = [rows * part // parts for part in range(parts + 1)]
    return sorted(unit for unit in {1, *ends, *(end - 1 for end in ends)} if 0 <= unit < rows)


def layout(units: int, marks: dict[int, frozenset[int]]) -> Layout | None:
    """How the units lie along the axis of a reader, where several rows of a layer may make one; None if it is not known how."""
    first = next((sorted(places) for row, places in marks.items() if row % units == 0), [])
    if not first:
        return None
    inner = next((i for i in range(1, len(first)) if first[i] != first[0] + i), len(first))
    found = Layout(first[0], len(first) // inner, inner)
    return found if all(places == columns(found, units, row % units) for row, places in marks.items()) else None


def all_layouts(units: int, seen: dict[str, dict[int, frozenset[int]]]) -> dict[str, Layout] | None:
    """The same for all readers; None if it is not known of one of them."""
    found = {path: layout(units, marks) for path, marks in seen.items()}
    known = {path: where for path, where in found.items() if where is not None}
    return known if len(known) == len(found) else None


def columns(where: Layout, units: int, unit: int) -> frozenset[int]:
    """The entries along an axis that belong to a unit."""
    starts = (where.start + group * units * where.inner + unit * where.inner for group in range(where.outer))
    return frozenset(start + i for start in starts for i in range(where.inner))


def all_columns(where: Layout, units: int) -> frozenset[int]:
    """The entries along an axis that belong to any unit."""
    return frozenset().union(*(columns(where, units, unit) for unit in range(units)))


@dataclass
class _Arrived:
    """What one sample has shown: where its marks were read or passed, which module has spread them, and whether they left the model."""

    reads: dict[str, frozenset[int]] = field(default_factory=dict)
    passes: dict[str, frozenset[int]] = field(default_factory=dict)
    mixed_by: str = ""
    leaves: bool = False


class _Run:
    """One run with marks in every sample."""

    def __init__(self, model: nn.Module, samples: list[list[Mark]], seen: dict[str, SeenMarks]) -> None:
        self.model, self.samples, self.seen = model, samples, seen
        self.arrived = [_Arrived() for _ in samples]

    def look(self, example: Any) -> list[list[Mark]]:
        """Note what the marks show; those that have to be looked at alone are returned."""
        handles = list(self._hooks())
        try:
            # torch's fused attention takes NaN for a masked value; the plain one passes it on.
            with untouched(self.model), torch.no_grad(), run_eagerly(), sdpa_kernel(SDPBackend.MATH):
                output = run(self.model, _repeat_first(example, len(self.samples)))
        finally:
            for handle in handles:
                handle.remove()
        for tensor in tensors(output):
            share = self._share(tensor)  # a mean over all samples, such as a loss, tells of nobody
            for sample in (share > 0).nonzero().flatten().tolist() if share is not None else ():
                self.arrived[sample].leaves = True
        return [
            [mark] for marks, arrived in zip(self.samples, self.arrived, strict=True)
            for mark in (() if self._note(marks, arrived) else marks)
        ]  # fmt: skip

    def _note(self, marks: Sequence[Mark], arrived: _Arrived) -> bool:
        """Whose the marks of a sample are; False if that is not known, because they were not read where others of their layers were."""
        there = {*arrived.reads, *arrived.passes}
        of = {marks[0][0]: there} if len(marks) == 1 else {path: self.seen[path].touched for path, _ in marks}
        if len(marks) > 1 and (arrived.mixed_by or arrived.leaves or set().union(*of.values()) != there):
            return False
        for path, unit in marks:
            known = self.seen[path]
            known.leaves |= arrived.leaves
            known.mixed_by = known.mixed_by or arrived.mixed_by
            for into, found in ((known.reads, arrived.reads), (known.passes, arrived.passes)):
                for reader in (each for each in found if each in of[path]):  # in the order of the calls, on every rank
                    held = into.setdefault(reader, {})
                    held[unit] = held.get(unit, frozenset()) | found[reader]
        return True

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
            x = first_tensor(args or tuple(kwargs.values()))
            found = {} if x is None or not x.is_floating_point() else self._find_marks(x, role.channel)
            for sample, places in found.items():
                into = self.arrived[sample].reads if role.reads else self.arrived[sample].passes
                into[path] = into.get(path, frozenset()) | places
            if not role.reads or not found or x is None:
                return None
            clean = torch.where(x.isnan(), torch.zeros_like(x), x)
            if args:
                return (clean, *args[1:]), kwargs
            name = next(name for name, value in kwargs.items() if value is x)
            return args, {**kwargs, name: clean}

        return hook

    def _after(self, path: str, role: Role) -> Any:
        own = [(sample, unit) for sample, marks in enumerate(self.samples) for maker, unit in marks if maker == path]

        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            if not own or not isinstance(output, Tensor):
                return None
            each = _by_sample(output, len(self.samples))
            if each is None:
                for sample, _ in own:
                    self.arrived[sample].mixed_by = path
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
                arrived = self.arrived[sample]
                arrived.mixed_by = arrived.mixed_by or f"{path} ({type(module).__name__})"

        return hook

    def _share(self, x: Tensor | None) -> Tensor | None:
        """For every sample the share of values that are marked."""
        each = None if x is None or not x.is_floating_point() else _by_sample(x, len(self.samples))
        return None if each is None or each.dim() < 2 else each.flatten(1).isnan().sum(1) / max(each[0].numel(), 1)

    def _find_marks(self, x: Tensor, channel: int) -> dict[int, frozenset[int]]:
        """For every sample with marks the places along the channels that have one."""
        each = _by_sample(x, len(self.samples))
        if not bool(x.isnan().any()):
            return {}
        if each is None:  # nobody knows whose marks these are: everybody's
            return {sample: frozenset(range(x.shape[-1] if x.dim() else 1)) for sample in range(len(self.samples))}
        nan = each.isnan()
        dim = _of_sample(each, x, channel) + 1
        places = nan.movedim(dim, 1).flatten(2).any(2) if nan.dim() > 2 else nan
        found: dict[int, set[int]] = {}
        for sample, place in places.nonzero().tolist():  # all at once: on a device each question is a wait
            found.setdefault(sample, set()).add(place)
        return {sample: frozenset(marked) for sample, marked in found.items()}


def _by_sample(x: Tensor, samples: int) -> Tensor | None:
    """The values sample by sample; those of one sample may lie in several entries of the first dimension, one after the other."""
    if x.dim() < 1 or x.shape[0] % samples or not x.shape[0]:
        return None
    return x if x.shape[0] == samples else x.unflatten(0, (samples, -1))


def _of_sample(each: Tensor, x: Tensor, channel: int) -> int:
    """The dimension of the channels in the values of one sample."""
    return (channel % x.dim()) - 1 + (each.dim() - x.dim())


def _repeat_first(example: Any, samples: int) -> Any:
    """The first sample of an example, so many times."""
    batch = next((t.shape[0] for t in tensors(example) if t.dim() > 0), 0)

    def each(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != batch:
            return tensor
        return tensor[:1].expand(samples, *tensor.shape[1:]).clone()

    return map_tensors(example, each)


# ---- A group: the layers that make the same units, and all that reads or passes them on the way.


@dataclass
class Group:
    """Layers that make the same units, with the layout of the units in each of them and in all that reads or passes them."""

    units: int
    makers: dict[str, tuple[Layout, ...]]  # several where keys and values are fewer than the queries before them
    reads: dict[str, Layout]
    passes: dict[str, Layout]
    # of an attention that make one unit: several queries' where they share keys and values; 0: single units
    heads: int = 0
    other: Group | None = None  # what it may be instead, if the trial refuses it

    @property
    def around(self) -> str:
        """The path of the smallest module that holds all of them."""
        return common_path([*self.makers, *self.reads])

    def touches(self, other: Group) -> bool:
        """Whether two groups have entries of some axis in common."""
        return bool(self._in_common(other))

    def agrees(self, other: Group) -> bool:
        """Whether the units of two groups are the same units."""
        same = all(here == there for here, there in self._in_common(other))
        return self.units == other.units and self.heads == other.heads and same

    def take(self, other: Group) -> None:
        """Become one group with another one."""
        self.makers.update(other.makers)
        self.reads.update(other.reads)
        self.passes.update(other.passes)

    def _in_common(self, other: Group) -> list[tuple[Layout, Layout]]:
        """How the units of both groups lie along the axes where they share entries."""
        pairs = [
            (these[path], those[path])
            for these, those in ((self.reads, other.reads), (self.passes, other.passes))
            for path in these.keys() & those.keys()
        ]
        return [
            (here, there)
            for here, there in pairs
            if not all_columns(here, self.units).isdisjoint(all_columns(there, other.units))
        ]


# ---- Attention heads as units: a mark in a row of the queries or keys fills all columns of its head, one of the values
# stays in it.
#
# So layers that are read together have heads if every mark lies in the block of columns of one unit. The unit is the
# smallest that does: a head, or where queries share keys and values, a whole group of them.


_FUSED = (1, 2, 3)  # maps that may lie one after the other in one layer: queries, keys, values


def heads_of(seen: Sequence[SeenMarks]) -> Group | None:
    """The heads that layers make together; None where marks leave the block of one unit."""
    spans: dict[str, tuple[int, int]] = {}  # the columns of a reader that the marks of all layers fill
    for each in seen:
        for path in each.reads:
            start, end = each.span(path)
            first, last = spans.get(path, (start, end))
            spans[path] = min(first, start), max(last, end)
    longest = max((end - start for start, end in spans.values()), default=0)
    filled = min((len(p) for each in seen for m in each.reads.values() for p in m.values() if _is_run(p)), default=0)
    if not filled or any(each.leaves or not each.reads for each in seen):
        return None
    for units in range(longest // filled, 0, -1):
        if any((end - start) % units for start, end in spans.values()):
            continue
        reads = {path: Layout(start, 1, (end - start) // units) for path, (start, end) in spans.items()}
        makers = {each.path: _maker_layouts(each, units, reads) for each in seen}
        # what the rows pass on their way (a depthwise convolution) must have them in their order
        passed = (marks for each in seen for marks in each.passes.values())
        if all(makers.values()) and all(places == {row} for marks in passed for row, places in marks.items()):
            found = None
            # One head fills everything, whatever the order in a fused layer: a trial will tell.
            for layouts in reversed(list(zip(*makers.values(), strict=False))):
                chosen = dict(zip(makers, layouts, strict=True))
                passes = {path: chosen[each.path][0] for each in seen for path in each.passes}
                found = Group(units, chosen, reads, passes, max(1, longest // units // filled), found)
            return found
    return None


def may_be_fused(seen: SeenMarks) -> bool:
    """Whether a layer that nothing else is read with may have queries, keys and values one after the other."""
    places = [each for marks in seen.reads.values() for each in marks.values()]
    return any(_is_run(each) for each in places) and len(set(places)) > 1


def _is_run(places: frozenset[int]) -> bool:
    return len(places) > 1 and max(places) - min(places) + 1 == len(places)


def _maker_layouts(seen: SeenMarks, units: int, reads: dict[str, Layout]) -> list[tuple[Layout, ...]]:
    """How the rows of a layer may lie, so that every mark stays in the block of its unit."""
    found = []
    for parts in _orders(seen, units, reads):
        unit_of = {row: unit for part in parts for unit in range(units) for row in columns(part, units, unit)}
        if all(
            (place - reads[path].start) // reads[path].inner == unit_of[row]
            for path, marks in seen.reads.items()
            for row, places in marks.items()
            for place in (min(places), max(places))
        ):
            found.append(parts)
    return found


def _orders(seen: SeenMarks, units: int, reads: dict[str, Layout]) -> Iterator[tuple[Layout, ...]]:
    """Maps of one size, one after the other; or queries, of which several share keys and values, before those."""
    for outer in _FUSED:
        inner, rest = divmod(seen.units, outer * units)
        if inner and not rest:
            yield (Layout(0, outer, inner),)
    queries = max((reads[path].inner for path in seen.reads), default=0)
    others, rest = divmod(seen.units - units * queries, 2 * units)
    if 0 < others < queries and not rest and not seen.passes:
        yield Layout(0, 1, queries), Layout(units * queries, 2, others)


# --- what counts heads ---


def counts(model: nn.Module, group: Group) -> tuple[list[Size], list[Size]]:
    """Whole numbers in or around an attention that may count its heads: those that do by their names, and the others.

    They are a multiple of its units as heads are, and belong to the smallest module around a group, to those inside, or to objects that
    these hold. Paths begin at that module.
    """
    block = model.get_submodule(group.around)
    inside = {id(module) for module in block.modules()}
    shared = {id(held) for module in model.modules() if id(module) not in inside for _, held in held_objects(module)}
    width = max(where.inner for where in group.reads.values())
    layouts = [where for parts in group.makers.values() for where in parts]
    multiples = {1, group.heads, width, *(n for at in layouts for n in (at.inner, at.inner * at.outer))}
    multiples.update(sum(where.inner * where.outer for where in parts) for parts in group.makers.values())
    likely: list[Size] = []
    others: list[Size] = []
    known: set[int] = set()
    for path, module in block.named_modules():
        if role_of(module) is not None:
            continue  # its own sizes are known
        for through, holder in (((), module), *(((name,), held) for name, held in held_objects(module))):
            for name, value in vars(holder).items() if id(holder) not in known else ():
                if type(value) is int and not value % group.units and value // group.units in multiples:
                    per_unit = value // group.units
                    size = any(word in name for word in ("dim", "size"))
                    all_of_them = size and per_unit == width and group.units > 1
                    counting = all_of_them or (not size and per_unit in (1, group.heads))
                    named = counting and "head" in name and id(holder) not in shared
                    (likely if named else others).append(Size(Ref(path), name, per_unit, through))
            known.add(id(holder))
    return likely, others


def guesses(likely: Sequence[Size], others: Sequence[Size], limit: int) -> list[tuple[Size, ...]]:
    """Which of the numbers follow, the likeliest first: those named after heads, with as few others as possible."""
    starts = dict.fromkeys((tuple(likely), ()))
    several = ((*start, *some) for start in starts for n in range(4) for some in combinations(others, n))
    return list(islice(several, limit))


def common_path(paths: Sequence[str]) -> str:
    """The path of the smallest module that holds all of these."""
    parts = [path.split(".")[:-1] for path in paths]
    same = 0
    while all(len(each) > same and each[same] == parts[0][same] for each in parts):
        same += 1
    return ".".join(parts[0][:same])


# ---- Who makes the units of a width and who reads them: found by marks that pass through a copy of the model.


class NoWidth(Exception):
    """Why a layer gets no more units."""


class Grouping:
    """The layers of a search in groups that make the same units; those that stay as they are, and why."""

    def __init__(self, search: Search) -> None:
        self.search, self.model, self.copy = search, search.model, search.flow.model
        self.refused: dict[str, str] = {}  # every layer that stays as it is, and why
        self.mixed: dict[str, str] = {}  # layers whose units a module mixes, as it seems without looking for heads

    def refuse(self, paths: Iterable[str], reason: str, what: str = "units") -> None:
        self.refused.update(dict.fromkeys(paths, f"no more {what}: {reason}"))

    def give_up(self, group: Group, reason: str) -> None:
        """Refuse all that make a group, which looked like units or heads and is not known to be."""
        # A single layer whose units are mixed may look like an attention; unless something counts heads, that is a guess.
        guess = len(group.makers) == 1 and not counts(self.model, group)[0]
        if group.heads and group.makers.keys() <= self.mixed.keys():  # a norm over channels looks like one head
            for path in group.makers:
                self.refuse([path], self.mixed[path])
        elif group.heads and guess:
            self.refuse(group.makers, "its units are mixed with each other before they are read")
        else:
            self.refuse(group.makers, reason, "heads" if group.heads else "units")

    def groups(self) -> list[Group]:
        makers = []
        for path, module in self.copy.named_modules():
            role = role_of(module)
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.refuse([path], "a recurrent layer keeps its units in one call, where none can be added alone")
            if why_unknown(module):
                self.refuse([path], why_unknown(module))
            if role is None or not role.makes:
                continue
            if holder_of(self.copy, path) is not None:
                self.refuse([path], "nn.MultiheadAttention reads its weights without calling it")
            elif self.called_once(path):
                makers.append((path, module))
        if not makers:
            return []
        marking = Marking(self.copy, self.search.example, makers, self._largest())
        try:
            marking.mark()
        except Exception as error:
            note(error)
            self.refuse((path for path, _ in makers), f"the model fails on marked values ({brief_error(error)})")
            return []
        plain: dict[str, Group] = {}
        reasons: dict[str, str] = {}
        for each in marking.seen.values():
            try:
                plain[each.path] = self._plain_group(each)
            except NoWidth as reason:
                reasons[each.path] = str(reason)
                if each.mixed_by:
                    self.mixed[each.path] = str(reason)
        heads = []
        clusters = [each for each in _read_together(list(marking.seen.values())) if not _is_plain(each, plain)]
        fused = [cluster[0] for cluster in clusters if len(cluster) == 1 and may_be_fused(cluster[0])]
        try:
            marking.mark_fused(fused)
        except Exception as error:
            note(error)  # what marks do not tell the trial will
        for cluster in clusters:
            group = self._heads(cluster)
            if group is not None:
                heads.append(group)
                for path in group.makers:
                    plain.pop(path, None)
                    reasons.pop(path, None)
        for path, why in reasons.items():
            self.refuse([path], why)
        return [*heads, *self._join(list(plain.values()))]

    def _largest(self) -> int:
        """The entries of the largest tensor that a layer gives for one sample."""
        found = (call.output or call.result for call in self.search.flow.calls)
        return max((each.tensor[:1].numel() for each in found if each is not None and each.tensor.dim()), default=1)

    def called_once(self, path: str, what: str = "units") -> bool:
        calls = len(self.search.flow.calls_of(path))
        if calls != 1:
            times = f"is called {calls} times in one forward pass" if calls else "the forward pass does not call it"
            self.refuse([path], times, what)
        return calls == 1

    def _heads(self, cluster: list[SeenMarks]) -> Group | None:
        """The heads of an attention, if the layers that are read together are one."""
        group = heads_of(cluster)
        if group is None:
            return None
        mixed = any(each.mixed_by for each in cluster)
        alone = len(cluster) == 1 and sum(where.outer for where in group.makers[cluster[0].path]) == 1
        if group.heads > 1 or (group.units > 1 and not (alone and mixed)):
            return group
        # A norm over channels leaves the same marks, but nothing around it is called a number of heads.
        named = bool(counts(self.model, group)[0])
        return group if named and (group.units > 1 or not mixed) else None

    def _plain_group(self, seen: SeenMarks) -> Group:
        """The single units that a layer makes, or two maps of it together."""
        if not seen.reads:
            if seen.mixed_by:
                raise NoWidth(f"its units go into {seen.mixed_by}, which cannot take more of them")
            raise NoWidth(
                "its output is what the model returns" if seen.leaves else "nothing that is known reads its units"
            )
        if seen.leaves:
            raise NoWidth("its units are part of what the model returns")
        for groups in (1, 2):
            if seen.units % groups or seen.units // groups < 2:
                continue
            units = seen.units // groups
            reads, passes = all_layouts(units, seen.reads), all_layouts(units, seen.passes)
            if reads is not None and passes is not None:
                return Group(units, {seen.path: (Layout(0, groups, 1),)}, reads, passes)
        by = f" by {seen.mixed_by}" if seen.mixed_by else ""
        raise NoWidth(f"its units are mixed with each other{by} before they are read")

    def _join(self, groups: list[Group]) -> list[Group]:
        """Layers whose units are added to or multiplied with each other are one width."""
        joined: list[Group] = []
        for group in groups:
            others = [other for other in joined if group.touches(other)]
            joined = [other for other in joined if other not in others]
            if all(group.agrees(other) for other in others):
                for other in others:
                    group.take(other)
                joined.append(group)
            else:
                for each in (group, *others):
                    self.refuse(each.makers, "its units are read together with others in a different order")
        return joined


def _is_plain(cluster: list[SeenMarks], plain: dict[str, Group]) -> bool:
    """Whether layers that are read together make the same single units."""
    groups = [plain[each.path] for each in cluster if each.path in plain]
    return len(groups) == len(cluster) and all(groups[0].agrees(other) for other in groups)


def _read_together(seen: list[SeenMarks]) -> list[list[SeenMarks]]:
    """Layers in clusters whose marks arrive at the same columns."""
    clusters: list[list[SeenMarks]] = []
    for each in seen:
        with_it = [cluster for cluster in clusters if any(_meet(each, other) for other in cluster)]
        clusters = [cluster for cluster in clusters if cluster not in with_it]
        clusters.append([member for cluster in with_it for member in cluster] + [each])
    return clusters


def _meet(one: SeenMarks, other: SeenMarks) -> bool:
    spans = ((one.span(path), other.span(path)) for path in one.reads.keys() & other.reads.keys())
    return any(max(here[0], there[0]) < min(here[1], there[1]) for here, there in spans)
