"""Attention heads as units: a mark in a row of the queries or keys fills all columns of its head, one of the values stays in it.

So layers that are read together have heads if every mark lies in the block of columns of one unit. The unit is the smallest that does:
a head, or where queries share keys and values, a whole group of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from sensli.moves.roles import role_of
from sensli.moves.width.group import Group
from sensli.moves.width.marking import Layout, Seen, columns

_FUSED = (1, 2, 3)  # maps that may lie one after the other in one layer: queries, keys, values


def heads_of(seen: Sequence[Seen]) -> Group | None:
    """The heads that layers make together; None where marks leave the block of one unit."""
    spans = {path: _span(path, seen) for each in seen for path in each.reads}
    longest = max((end - start for start, end in spans.values()), default=0)
    filled = min((len(p) for each in seen for m in each.reads.values() for p in m.values() if _is_run(p)), default=0)
    if not filled or any(each.leaves or not each.reads for each in seen):
        return None
    for units in range(longest // filled, 0, -1):
        if any((end - start) % units for start, end in spans.values()):
            continue
        reads = {path: Layout(start, 1, (end - start) // units) for path, (start, end) in spans.items()}
        makers = {each.path: _layouts(each, units, reads) for each in seen}
        if all(makers.values()) and all(map(_passes_rows, seen)):
            found = None
            # One head fills everything, whatever the order in a fused layer: a trial will tell.
            for layouts in reversed(list(zip(*makers.values(), strict=False))):
                chosen = dict(zip(makers, layouts, strict=True))
                passes = {path: chosen[each.path][0] for each in seen for path in each.passes}
                found = Group(units, chosen, reads, passes, max(1, longest // units // filled), found)
            return found
    return None


def may_be_fused(seen: Seen) -> bool:
    """Whether a layer that nothing else is read with may have queries, keys and values one after the other."""
    places = [each for marks in seen.reads.values() for each in marks.values()]
    return any(_is_run(each) for each in places) and len(set(places)) > 1


def _span(reader: str, seen: Sequence[Seen]) -> tuple[int, int]:
    """The columns of a reader that the marks of all layers fill; first and last rows were marked."""
    spans = [each.span(reader) for each in seen if each.reads.get(reader)]
    return min(start for start, _ in spans), max(end for _, end in spans)


def _is_run(places: frozenset[int]) -> bool:
    return len(places) > 1 and max(places) - min(places) + 1 == len(places)


def _layouts(seen: Seen, units: int, reads: dict[str, Layout]) -> list[tuple[Layout, ...]]:
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


def _orders(seen: Seen, units: int, reads: dict[str, Layout]) -> Iterator[tuple[Layout, ...]]:
    """Maps of one size, one after the other; or queries, of which several share keys and values, before those."""
    for outer in _FUSED:
        inner, rest = divmod(seen.units, outer * units)
        if inner and not rest:
            yield (Layout(0, outer, inner),)
    queries = max((reads[path].inner for path in seen.reads), default=0)
    others, rest = divmod(seen.units - units * queries, 2 * units)
    if 0 < others < queries and not rest and not seen.passes:
        yield Layout(0, 1, queries), Layout(units * queries, 2, others)


def _passes_rows(seen: Seen) -> bool:
    """Whether what the rows pass on their way (a depthwise convolution) has them in their order."""
    return all(places == {row} for marks in seen.passes.values() for row, places in marks.items())


# --- what counts heads ---


@dataclass(frozen=True)
class Count:
    """A whole number in or around an attention that may count its heads: of a module, or of an object that it holds."""

    path: str
    through: tuple[str, ...]
    name: str
    per_unit: int
    likely: bool  # by its name


def counts(model: nn.Module, group: Group) -> list[Count]:
    """Numbers of the smallest module around a group, and of those inside, that are a multiple of its units as heads are."""
    around = common_path([*group.makers, *group.reads])
    block = model.get_submodule(around)
    inside = {id(module) for module in block.modules()}
    shared = {id(held) for module in model.modules() if id(module) not in inside for _, held in held_objects(module)}
    width = max(where.inner for where in group.reads.values())
    found: list[Count] = []
    known: set[int] = set()
    for path, module in block.named_modules():
        if role_of(module) is not None:
            continue  # its own sizes are known
        full = ".".join(part for part in (around, path) if part)
        for through, holder in (((), module), *(((name,), held) for name, held in held_objects(module))):
            if id(holder) not in known:
                known.add(id(holder))
                found += _counting(full, through, holder, group, width, own=id(holder) not in shared)
    return found


def _counting(
    path: str, through: tuple[str, ...], holder: Any, group: Group, width: int, *, own: bool
) -> Iterator[Count]:
    allowed = {
        1,
        group.heads,
        width,
        *(n for parts in group.makers.values() for where in parts for n in (where.inner, where.inner * where.outer)),
        *(sum(where.inner * where.outer for where in parts) for parts in group.makers.values()),
    }
    for name, value in vars(holder).items():
        if type(value) is not int or value % group.units or value // group.units not in allowed:
            continue
        per_unit = value // group.units
        size = any(word in name for word in ("dim", "size"))
        all_of_them = size and per_unit == width and group.units > 1
        likely = own and "head" in name and (all_of_them or (not size and per_unit in (1, group.heads)))
        yield Count(path, through, name, per_unit, likely)


def guesses(found: Sequence[Count], limit: int) -> Iterator[tuple[Count, ...]]:
    """Which of the numbers follow, the likeliest first: those named after heads, with as few others as possible."""
    likely = tuple(count for count in found if count.likely)
    others = [count for count in found if not count.likely]
    several = [
        (*start, *some) for start in dict.fromkeys((likely, ())) for n in range(4) for some in combinations(others, n)
    ]
    yield from several[:limit]


def held_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Configuration-like objects that a module holds, by name."""
    skipped = (nn.Module, Tensor, type, dict, list, tuple, set, torch.device, torch.dtype, torch.Generator)
    for name, value in vars(module).items():
        if hasattr(value, "__dict__") and not isinstance(value, skipped) and not callable(value):
            yield name, value


def common_path(paths: Sequence[str]) -> str:
    """The path of the smallest module that holds all of these."""
    parts = [path.split(".")[:-1] for path in paths]
    same = 0
    while all(len(each) > same and each[same] == parts[0][same] for each in parts):
        same += 1
    return ".".join(parts[0][:same])
