"""The widths of a search: layers whose units are read by others that are known, as far as a trial confirms it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from sensli.moves.point import Ref
from sensli.moves.roles import Role, role_of
from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.trace.flow import Call
from sensli.moves.width.confirming import confirm
from sensli.moves.width.marking import Layout, Seen, columns, layout, watch
from sensli.moves.width.width import Axis, Size, Width, layers_in, resizes


class WidthKind:
    """More units, channels or hidden features."""

    move: ClassVar[type[Width]] = Width
    grows: ClassVar[str] = "units"

    def propose(self, search: Search) -> None:
        _Widths(search).offer()

    def at(self, search: Search, call: Call, side: str, seen: Any) -> Iterator[Site]:
        return iter(())

    def otherwise(self, search: Search) -> None:
        """Nothing else could be widened."""


@dataclass
class _Group:
    """Layers that make the same units, and all that reads or passes them."""

    units: int
    makers: dict[str, int] = field(default_factory=dict)  # and in how many groups each has them
    reads: dict[str, Layout] = field(default_factory=dict)
    passes: dict[str, Layout] = field(default_factory=dict)


class _Refused(Exception):
    """Why a layer gets no more units."""


class _Widths:
    def __init__(self, search: Search) -> None:
        self.search, self.model, self.copy = search, search.model, search.flow.model
        self.calls = {call.path: call for call in search.flow.calls}
        self.refused: dict[str, str] = {}

    def offer(self) -> None:
        sites = []
        for group in self._groups():
            first = min(group.makers, key=lambda path: self.calls[path].began)
            try:
                sites.append(self._site(group, first))
            except _Refused as reason:
                self._refuse(group.makers, str(reason))
        sites.sort(key=lambda site: self.calls[site.path].ended)
        good, wrong = confirm(self.search, sites)
        self.refused.update({site.path: problem for site, problem in wrong})
        for site in good:
            self.search.keep(self.calls[site.path], self.calls[site.path].ended, site)
        for path, why in self.refused.items():
            self.search.skipped.setdefault(path, f"no more units: {why}")

    def _refuse(self, paths: Any, reason: str) -> None:
        self.refused.update(dict.fromkeys(paths, reason))

    # --- who belongs together ---

    def _groups(self) -> list[_Group]:
        makers = []
        for path, module in self.copy.named_modules():
            role = role_of(module)
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self.refused[path] = "a recurrent layer keeps its units in one call, where none can be added alone"
            if role is None or not role.makes:
                continue
            calls = len(self.search.flow.calls_of(path))
            if calls != 1:
                self.refused[path] = f"is called {calls} times in one forward pass"
            else:
                makers.append((path, module))
        if not makers:
            return []
        try:
            seen = watch(self.copy, self.search.example, makers)
        except Exception as error:
            self._refuse((path for path, _ in makers), f"the model fails on marked values ({type(error).__name__})")
            return []
        groups: list[_Group] = []
        for each in seen.values():
            try:
                groups.append(self._of(each))
            except _Refused as reason:
                self.refused[each.path] = str(reason)
        return self._joined(groups)

    def _of(self, seen: Seen) -> _Group:
        if not seen.reads:
            why = "its output is what the model returns" if seen.leaves else "nothing that is known reads its units"
            raise _Refused(why)
        if seen.leaves:
            raise _Refused("its units are part of what the model returns")
        for groups in (1, 2):
            if seen.units % groups or seen.units // groups < 2:
                continue
            units = seen.units // groups
            reads = {path: layout(units, _by_unit(marks, units)) for path, marks in seen.reads.items()}
            passes = {path: layout(units, _by_unit(marks, units)) for path, marks in seen.passes.items()}
            if all(reads.values()) and all(passes.values()):
                known = _Group(units, {seen.path: groups})
                known.reads = {path: where for path, where in reads.items() if where}
                known.passes = {path: where for path, where in passes.items() if where}
                return known
        by = f" by {seen.mixed_by}" if seen.mixed_by else ""
        raise _Refused(f"its units are mixed with each other{by} before they are read")

    def _joined(self, groups: list[_Group]) -> list[_Group]:
        """Layers whose units are added to or multiplied with each other are one width."""
        joined: list[_Group] = []
        for group in groups:
            others = [other for other in joined if _touch(group, other)]
            if any(not _agree(group, other) for other in others):
                self._refuse(group.makers, "its units are read together with others in a different order")
                for other in others:
                    self._refuse(other.makers, "its units are read together with others in a different order")
                    joined.remove(other)
                continue
            for other in others:
                joined.remove(other)
                group.makers.update(other.makers)
                group.reads.update(other.reads)
                group.passes.update(other.passes)
            joined.append(group)
        return joined

    # --- the site ---

    def _site(self, group: _Group, first: str) -> Site:
        axes: list[Axis] = []
        sizes: list[Size] = []
        for path, outer in group.makers.items():
            role = self._role(path)
            axes += self._axes(path, [(name, dim, "row") for name, dim in role.makes], Layout(0, outer, 1))
            sizes += self._sizes(path, role.out_size, outer)
        for path, where in group.passes.items():
            role = self._role(path)
            axes += self._axes(path, list(role.passes), where)
            sizes += self._sizes(path, role.in_size, where.outer * where.inner)
        for path, where in group.reads.items():
            role = self._role(path)
            axes += self._axes(path, [(name, dim, "column") for name, dim in role.reads], where)
            sizes += self._sizes(path, role.in_size, where.outer * where.inner)
        for path in group.reads:
            if not any(p.requires_grad for p in self.model.get_submodule(path).parameters(recurse=False)):
                raise _Refused(f"{path}, which reads its units, does not train")
        request = self.search.request
        more = request.units if isinstance(request.units, int) else max(1, round(request.units * group.units))
        layer = type(self.model.get_submodule(first)).__name__
        move = Width(group.units, more, layer, tuple(axes), tuple(sizes), tuple(group.reads), start=request.start)
        move = replace(move, layers=layers_in(self.model))
        call = self.calls[first]
        if call.output is None:
            raise _Refused(f"returns {call.returned}, not a tensor")
        if not self.search.flow.reaches(call.output):
            raise _Refused("no gradient arrives there")
        added, flops = self._cost(move)
        point = self.search.point(call, "after", call.output)
        return Site(replace(point, chained=False), replace(move, added=added, flops=flops))

    def _role(self, path: str) -> Role:
        role = role_of(self.model.get_submodule(path))
        assert role is not None
        return role

    def _axes(self, path: str, named: list[tuple[str, int, str]], where: Layout) -> list[Axis]:
        module = self.model.get_submodule(path)
        ref = Ref.to(path, module)
        return [
            Axis(ref, name, dim, fill, where.start, where.outer, where.inner, int(getattr(module, name).shape[dim]))
            for name, dim, fill in named
            if getattr(module, name, None) is not None
        ]

    def _sizes(self, path: str, names: tuple[str, ...], per_unit: int) -> list[Size]:
        module = self.model.get_submodule(path)
        return [Size(Ref.to(path, module), name, per_unit) for name in names if hasattr(module, name)]

    def _cost(self, move: Width) -> tuple[int, int]:
        added = flops = 0
        positions = {}
        for axis in move.axes:
            output = self.calls[axis.module.path].output
            given = self.calls[axis.module.path].inputs
            module = self.model.get_submodule(axis.module.path)
            seen = given[0] if getattr(module, "transposed", False) and given else output
            tensor = None if seen is None else seen.tensor
            role = self._role(axis.module.path)
            if tensor is not None and isinstance(getattr(module, axis.name), nn.Parameter):
                shape = [size for dim, size in enumerate(tensor.shape[1:], 1) if dim != role.channel % tensor.dim()]
                positions[id(getattr(module, axis.name))] = math.prod(shape)
        for each in resizes(self.model, move):
            if each.is_parameter:
                more = each.stretched(each.tensor.detach()).numel() - each.tensor.numel()
                added += more
                flops += 2 * more * positions.get(id(each.tensor), 0) if each.tensor.dim() > 1 else 0
        return added, flops


def _by_unit(marks: dict[int, frozenset[int]], units: int) -> dict[int, frozenset[int]]:
    """Marks by unit, where several rows of a layer make one; rows that disagree leave no unit at all."""
    found: dict[int, frozenset[int]] = {}
    for row, places in marks.items():
        if found.setdefault(row % units, places) != places:
            return {}
    return found


def _touch(one: _Group, other: _Group) -> bool:
    """Whether two groups have entries of some axis in common."""
    for these, those in ((one.reads, other.reads), (one.passes, other.passes)):
        for path in these.keys() & those.keys():
            if _all(these[path], one.units) & _all(those[path], other.units):
                return True
    return False


def _agree(one: _Group, other: _Group) -> bool:
    same = one.units == other.units
    for these, those in ((one.reads, other.reads), (one.passes, other.passes)):
        for path in these.keys() & those.keys():
            overlap = _all(these[path], one.units) & _all(those[path], other.units)
            same = same and (not overlap or these[path] == those[path])
    return same


def _all(where: Layout, units: int) -> set[int]:
    return {place for unit in range(units) for place in columns(where, units, unit)}
