"""The widths of a search: layers whose units are read by others that are known, as far as a trial confirms it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from sensli.errors import UnsupportedSite
from sensli.modules.attention import holder_of
from sensli.modules.engines.fsdp import check_resized
from sensli.moves.point import Ref
from sensli.moves.roles import Role, role_of, why_unknown
from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.trace.flow import Call
from sensli.moves.trace.flow import Seen as Given
from sensli.moves.width.attention import axes_of, sizes_of, why_not
from sensli.moves.width.configured import as_configured
from sensli.moves.width.confirming import Trial, confirm
from sensli.moves.width.group import Group
from sensli.moves.width.heads import Count, common_path, counts, guesses, heads_of, may_be_fused
from sensli.moves.width.marking import Layout, Seen, layout, watch, watch_fused
from sensli.moves.width.widening import layers_in, resizes
from sensli.moves.width.width import Axis, Size, Width, family

_GUESSES = 24  # of what counts heads: more would cost more than they find


class WidthKind:
    """More units, channels, hidden features or heads."""

    move: ClassVar[type[Width]] = Width
    grows: ClassVar[str] = "units"

    def propose(self, search: Search) -> None:
        _Widths(search).offer()

    def at(self, search: Search, call: Call, side: str, seen: Any) -> Iterator[Site]:
        return iter(())

    def otherwise(self, search: Search) -> None:
        """Nothing else could be widened."""


class _Refused(Exception):
    """Why a layer gets no more units."""


@dataclass(frozen=True)
class _Learned:
    """What must follow the number of heads, with paths within the attention, and what more heads cost; or why there are none."""

    counts: tuple[Count, ...] = ()
    flops: int = 0
    problem: str = ""


class _Widths:
    def __init__(self, search: Search) -> None:
        self.search, self.model, self.copy = search, search.model, search.flow.model
        self.calls = {call.path: call for call in search.flow.calls}
        self.trial = Trial(search)
        # How often parameters are read in the run, and by calls of the layers that have them.
        edges = (edge for node in search.flow.nodes for edge, _ in node.next_functions if hasattr(edge, "variable"))
        self.uses = Counter(id(edge.variable) for edge in edges)
        self.called = Counter(
            id(parameter)
            for path, module in self.copy.named_modules()
            for parameter in module._parameters.values()
            for _ in search.flow.calls_of(path)
        )
        self.refused: dict[str, str] = {}  # every layer that stays as it is, and why
        self.mixed: dict[str, str] = {}  # layers whose units a module mixes, as it seems without looking for heads
        self.learned: dict[object, _Learned] = {}  # of the heads of one block, for its equals

    def offer(self) -> None:
        sites = self._attentions()
        for group in self._groups():
            try:
                sites.append(self._found(group))
            except _Refused as reason:
                # A single layer whose units are mixed may look like an attention; unless something counts heads, that is a guess.
                guess = len(group.makers) == 1 and not any(count.likely for count in counts(self.model, group))
                if group.heads and group.makers.keys() <= self.mixed.keys():  # a norm over channels looks like one head
                    for path in group.makers:
                        self._refuse([path], self.mixed[path])
                elif group.heads and guess:
                    self._refuse(group.makers, "its units are mixed with each other before they are read")
                else:
                    self._refuse(group.makers, str(reason), "heads" if group.heads else "units")
        sites.sort(key=lambda site: self.calls[site.path].ended)
        good, wrong = confirm(self.trial, sites)
        for site, problem in wrong:
            assert isinstance(site.move, Width)
            makers = {axis.module.path for axis in site.move.axes if axis.fill == "row"}
            self._refuse(makers, problem, "heads" if site.move.heads else "units")
        for site in as_configured(self.trial, self.model, good):
            self.search.keep(self.calls[site.path], self.calls[site.path].ended, site)
        for path, why in self.refused.items():
            if self.search.request.grow == "units":  # what was said of layers is of no use there
                self.search.skipped[path] = why
            else:
                self.search.skipped.setdefault(path, why)

    def _refuse(self, paths: Iterable[str], reason: str, what: str = "units") -> None:
        self.refused.update(dict.fromkeys(paths, f"no more {what}: {reason}"))

    # --- who belongs together ---

    def _groups(self) -> list[Group]:
        makers = []
        for path, module in self.copy.named_modules():
            role = role_of(module)
            if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                self._refuse([path], "a recurrent layer keeps its units in one call, where none can be added alone")
            if why_unknown(module):
                self._refuse([path], why_unknown(module))
            if role is None or not role.makes:
                continue
            if holder_of(self.copy, path) is not None:
                self._refuse([path], "nn.MultiheadAttention reads its weights without calling it")
            elif self._called_once(path):
                makers.append((path, module))
        if not makers:
            return []
        try:
            seen = watch(self.copy, self.search.example, makers)
        except Exception as error:
            self._refuse((path for path, _ in makers), f"the model fails on marked values ({type(error).__name__})")
            return []
        plain: dict[str, Group] = {}
        reasons: dict[str, str] = {}
        for each in seen.values():
            try:
                plain[each.path] = self._of(each)
            except _Refused as reason:
                reasons[each.path] = str(reason)
                if each.mixed_by:
                    self.mixed[each.path] = str(reason)
        heads = []
        clusters = [each for each in _read_together(list(seen.values())) if not _is_plain(each, plain)]
        fused = [cluster[0] for cluster in clusters if len(cluster) == 1 and may_be_fused(cluster[0])]
        with suppress(Exception):  # what marks do not tell the trial will
            watch_fused(self.copy, self.search.example, fused)
        for cluster in clusters:
            group = self._heads(cluster)
            if group is not None:
                heads.append(group)
                for path in group.makers:
                    plain.pop(path, None)
                    reasons.pop(path, None)
        for path, why in reasons.items():
            self._refuse([path], why)
        return [*heads, *self._joined(list(plain.values()))]

    def _called_once(self, path: str, what: str = "units") -> bool:
        calls = len(self.search.flow.calls_of(path))
        if calls != 1:
            times = f"is called {calls} times in one forward pass" if calls else "the forward pass does not call it"
            self._refuse([path], times, what)
        return calls == 1

    def _heads(self, cluster: list[Seen]) -> Group | None:
        """The heads of an attention, if the layers that are read together are one."""
        group = heads_of(cluster)
        if group is None:
            return None
        mixed = any(each.mixed_by for each in cluster)
        alone = len(cluster) == 1 and sum(where.outer for where in group.makers[cluster[0].path]) == 1
        if group.heads > 1 or (group.units > 1 and not (alone and mixed)):
            return group
        # A norm over channels leaves the same marks, but nothing around it is called a number of heads.
        named = any(count.likely for count in counts(self.model, group))
        return group if named and (group.units > 1 or not mixed) else None

    def _of(self, seen: Seen) -> Group:
        if not seen.reads:
            if seen.mixed_by:
                raise _Refused(f"its units go into {seen.mixed_by}, which cannot take more of them")
            raise _Refused(
                "its output is what the model returns" if seen.leaves else "nothing that is known reads its units"
            )
        if seen.leaves:
            raise _Refused("its units are part of what the model returns")
        for groups in (1, 2):
            if seen.units % groups or seen.units // groups < 2:
                continue
            units = seen.units // groups
            reads = {path: layout(units, _by_unit(marks, units)) for path, marks in seen.reads.items()}
            passes = {path: layout(units, _by_unit(marks, units)) for path, marks in seen.passes.items()}
            if all(reads.values()) and all(passes.values()):
                known = Group(units, {seen.path: (Layout(0, groups, 1),)})
                known.reads = {path: where for path, where in reads.items() if where}
                known.passes = {path: where for path, where in passes.items() if where}
                return known
        by = f" by {seen.mixed_by}" if seen.mixed_by else ""
        raise _Refused(f"its units are mixed with each other{by} before they are read")

    def _joined(self, groups: list[Group]) -> list[Group]:
        """Layers whose units are added to or multiplied with each other are one width."""
        joined: list[Group] = []
        for group in groups:
            others = [other for other in joined if group.touches(other)]
            if any(not group.agrees(other) for other in others):
                self._refuse(group.makers, "its units are read together with others in a different order")
                for other in others:
                    self._refuse(other.makers, "its units are read together with others in a different order")
                    joined.remove(other)
                continue
            for other in others:
                joined.remove(other)
                group.take(other)
            joined.append(group)
        return joined

    def _attentions(self) -> list[Site]:
        """More heads for torch's own attention."""
        found = []
        for path, module in self.model.named_modules():
            if isinstance(module, nn.MultiheadAttention) and self._called_once(path, "heads"):
                try:
                    found.append(self._attention(path, module))
                except _Refused as reason:
                    self._refuse([path], str(reason), "heads")
        return found

    def _attention(self, path: str, module: nn.MultiheadAttention) -> Site:
        if why_not(module):
            raise _Refused(why_not(module))
        axes, sizes = tuple(axes_of(path, module)), tuple(sizes_of(path, module))
        move = Width(module.num_heads, 1, "MultiheadAttention", axes, sizes, (axes[-1].module.path,), heads=1)
        site = self._complete(move, path)
        alike = family(path), *(replace(axis, module=Ref("")) for axis in axes)
        known = self.learned.get(alike)
        if known is None:
            problem = self.trial.of([site], modes=(False,))
            known = _Learned(problem=problem) if problem else _Learned(flops=self.trial.flops(site))
            self.learned[alike] = known
        if known.problem:
            raise _Refused(known.problem)
        return _with_counts(site, self.model, (), known.flops)

    # --- the site ---

    def _found(self, group: Group) -> Site:
        first = min(group.makers, key=lambda path: self.calls[path].began)
        try:
            site = self._site(group, first)
            return self._counted(group, site) if group.heads else site
        except _Refused:
            if group.other is None:
                raise
            return self._found(group.other)

    def _site(self, group: Group, first: str) -> Site:
        axes: list[Axis] = []
        sizes: list[Size] = []
        for path, parts in group.makers.items():
            role = self._role(path)
            for where in parts:
                axes += self._axes(path, [(name, dim, "row") for name, dim in role.makes], where)
            sizes += self._sizes(path, role.out_size, sum(where.outer * where.inner for where in parts))
        for path, where in group.passes.items():
            role = self._role(path)
            axes += self._axes(path, list(role.passes), where)
            sizes += self._sizes(path, role.in_size, where.outer * where.inner)
        for path, where in group.reads.items():
            role = self._role(path)
            axes += self._axes(path, [(name, dim, "column") for name, dim in role.reads], where)
            sizes += self._sizes(path, role.in_size, where.outer * where.inner)
        layer = type(self.copy.get_submodule(first)).__name__  # its own name also where the model is sharded
        move = Width(group.units, 1, layer, tuple(axes), tuple(sizes), tuple(group.reads), heads=group.heads)
        return self._complete(move, first)

    def _complete(self, move: Width, first: str) -> Site:
        """The site of a width whose axes are known, with as many units as were asked for."""
        for path in move.readers:
            if not any(p.requires_grad for p in self.model.get_submodule(path).parameters(recurse=False)):
                raise _Refused(f"{path}, which reads its units, does not train")
        request = self.search.request
        more = request.units if isinstance(request.units, int) else max(1, round(request.units * move.units))
        for axis in move.axes:
            if self._is_read_elsewhere(axis):
                raise _Refused(f"other code reads {axis.module.path}.{axis.name} too, and would see the new entries")
        axes = tuple(replace(axis, overwritten=self._is_overwritten(axis)) for axis in move.axes)
        move = replace(move, more=more, axes=axes, start=request.start, layers=layers_in(self.model))
        try:
            check_resized(self.model, {id(each.tensor): each.new_shape for each in resizes(self.model, move)})
        except UnsupportedSite as reason:
            raise _Refused(str(reason)) from None
        call = self.calls[first]
        seen = _given(call)
        if seen is None:
            raise _Refused(f"returns {call.returned}, not a tensor")
        if not self.search.flow.reaches(seen):
            raise _Refused("no gradient arrives there")
        added, flops = self._cost(move)
        point = self.search.point(call, "after", seen)
        return Site(replace(point, chained=False), replace(move, added=added, flops=flops))

    def _is_read_elsewhere(self, axis: Axis) -> bool:
        """Whether more than the calls of the layers that have a parameter lead to it in the graph of the run."""
        module = self.copy.get_submodule(axis.module.path)
        parameter = getattr(module, axis.name)
        of_attention = role_of(module) is None or holder_of(self.copy, axis.module.path) is not None
        return not of_attention and self.uses[id(parameter)] > self.called[id(parameter)]

    def _is_overwritten(self, axis: Axis) -> bool:
        """Whether somebody works in place on what a reader gives."""
        held = holder_of(self.model, axis.module.path)
        call = self.calls.get(axis.module.path if held is None else held[0])
        seen = None if call is None else _given(call)
        return axis.fill == "column" and seen is not None and seen.overwritten

    def _counted(self, group: Group, site: Site) -> Site:
        """The site of heads with all numbers that must follow, found by trial, and with what the heads cost."""
        around = common_path([*group.makers, *group.reads])
        alike = family(site.path), group.units, *group.makers.values()
        known = self.learned.get(alike)
        if known is None:
            known = self.learned[alike] = self._learn(group, site, around)
        if known.problem:
            raise _Refused(known.problem)
        found = [replace(count, path=around + count.path) for count in known.counts]
        return _with_counts(site, self.model, found, known.flops)

    def _learn(self, group: Group, site: Site, around: str) -> _Learned:
        problems = []
        for guess in guesses(counts(self.model, group), _GUESSES):
            counted = _with_counts(site, self.model, guess)
            problems.append(self.trial.of([counted], modes=(False,)))
            if not problems[-1]:
                within = tuple(replace(count, path=count.path.removeprefix(around)) for count in guess)
                return _Learned(within, self.trial.flops(counted))
        return _Learned(problem=problems[0])

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
            module = self.model.get_submodule(axis.module.path)
            role, call = role_of(module), self.calls.get(axis.module.path)
            if role is None or call is None:
                continue  # torch's own attention: a trial counts it
            seen = call.inputs[0] if getattr(module, "transposed", False) and call.inputs else call.output
            tensor = None if seen is None else seen.tensor
            if tensor is not None and isinstance(getattr(module, axis.name), nn.Parameter):
                shape = [size for dim, size in enumerate(tensor.shape[1:], 1) if dim != role.channel % tensor.dim()]
                positions[id(getattr(module, axis.name))] = math.prod(shape)
        for each in resizes(self.model, move):
            if each.is_parameter:
                more = math.prod(each.new_shape) - math.prod(each.old_shape)
                added += more
                flops += 2 * more * positions.get(id(each.tensor), 0) if each.tensor.dim() > 1 else 0
        return added, flops


def _given(call: Call) -> Given | None:
    """What a module gave, or the first part of it."""
    return call.output or call.result


def _by_unit(marks: dict[int, frozenset[int]], units: int) -> dict[int, frozenset[int]]:
    """Marks by unit, where several rows of a layer make one; rows that disagree leave no unit at all."""
    found: dict[int, frozenset[int]] = {}
    for row, places in marks.items():
        if found.setdefault(row % units, places) != places:
            return {}
    return found


def _with_counts(site: Site, model: nn.Module, found: Sequence[Count], flops: int = 0) -> Site:
    """The site with further numbers that follow its units, and with its cost."""
    assert isinstance(site.move, Width)
    sizes = [Size(Ref.to(c.path, model.get_submodule(c.path)), c.name, c.per_unit, c.through) for c in found]
    return replace(site, move=replace(site.move, sizes=(*site.move.sizes, *sizes), flops=flops))


def _is_plain(cluster: list[Seen], plain: dict[str, Group]) -> bool:
    """Whether layers that are read together make the same single units."""
    groups = [plain[each.path] for each in cluster if each.path in plain]
    return len(groups) == len(cluster) and all(groups[0].agrees(other) for other in groups)


def _read_together(seen: list[Seen]) -> list[list[Seen]]:
    """Layers in clusters whose marks arrive at the same columns."""
    clusters: list[list[Seen]] = []
    for each in seen:
        with_it = [cluster for cluster in clusters if any(_meet(each, other) for other in cluster)]
        clusters = [cluster for cluster in clusters if cluster not in with_it]
        clusters.append([member for cluster in with_it for member in cluster] + [each])
    return clusters


def _meet(one: Seen, other: Seen) -> bool:
    return any(
        max(min(here), min(there)) <= min(max(here), max(there))
        for path in one.reads.keys() & other.reads.keys()
        if (here := set().union(*one.reads[path].values())) and (there := set().union(*other.reads[path].values()))
    )
