"""How units are found: from marks to the site with every axis that changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from sensli.errors import MovedSite, UnsupportedSite
from sensli.modules.engines.fsdp import check_resized
from sensli.modules.grown import WideAttention, holder_of
from sensli.modules.running import brief_error, note
from sensli.moves.point import Ref
from sensli.moves.roles import Role, role_of
from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.trace.flow import ModuleCall, SeenTensor
from sensli.moves.width.confirming import WidthRehearsal, as_configured, confirm
from sensli.moves.width.marking import Count, Group, Grouping, Layout, NoWidth, common_path, counts, guesses
from sensli.moves.width.widening import check_hooks, layers_in, resizes
from sensli.moves.width.width import Axis, Size, Width, family

# ---- Heads of torch's `nn.MultiheadAttention`, whose weights are known by their names: one call holds all of them, so no
# mark shows them.


# What makes heads, its axis, and how many maps lie one after the other along it.
_MAKES = (
    ("in_proj_weight", 0, 3), ("q_proj_weight", 0, 1), ("k_proj_weight", 0, 1), ("v_proj_weight", 0, 1), ("in_proj_bias", 0, 3),
    ("bias_k", 2, 1), ("bias_v", 2, 1),
)  # fmt: skip


def why_not(module: nn.MultiheadAttention) -> str:
    """Why an attention gets no more heads; empty if it may."""
    if is_parametrized(module) or is_parametrized(module.out_proj):
        return "its weights come from a parametrization (weight_norm, spectral_norm, ...), which has their shape too"
    if type(module) not in (nn.MultiheadAttention, WideAttention):
        return f"is a {type(module).__name__}, not torch's own nn.MultiheadAttention, so its class cannot be exchanged"
    return ""


def axes_of(path: str, module: nn.MultiheadAttention) -> Iterator[Axis]:
    """The axes of an attention that hold its heads."""
    size, own = module.head_dim, Ref.to(path, module)
    for name, dim, maps in _MAKES:
        tensor = getattr(module, name, None)
        if tensor is not None:
            yield Axis(own, name, dim, "row", outer=maps, inner=size, length=int(tensor.shape[dim]))
    out = module.out_proj
    yield Axis(
        Ref.to(f"{path}.out_proj".removeprefix("."), out), "weight", 1, "column", inner=size, length=out.in_features
    )


def sizes_of(path: str, module: nn.MultiheadAttention) -> Iterator[Size]:
    """The attributes of an attention that count its heads; the size of what it takes and returns stays."""
    yield Size(Ref.to(path, module), "num_heads")
    yield Size(Ref.to(f"{path}.out_proj".removeprefix("."), module.out_proj), "in_features", module.head_dim)


# ---- The site of a group of layers: every axis and number that changes, what more units cost, and what counts heads.


_ADAPTERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper")  # classes of peft
_GUESSES = 24  # of what counts heads: more would cost more than they find


@dataclass(frozen=True)
class _Learned:
    """What must follow the number of heads, with paths within the attention, and what more heads cost; or why there are none."""

    counts: tuple[Count, ...] = ()
    flops: int = 0
    problem: str = ""


class Siting:
    """Makes the sites of a search, with as many units as were asked for."""

    def __init__(self, search: Search, trial: WidthRehearsal) -> None:
        self.search, self.trial, self.model, self.copy = search, trial, search.model, search.flow.model
        self.calls = {call.path: call for call in search.flow.calls}
        # How often parameters are read in the run, and by calls of the layers that have them.
        edges = (edge for node in search.flow.nodes for edge, _ in node.next_functions if hasattr(edge, "variable"))
        self.uses = Counter(id(edge.variable) for edge in edges)
        self.called = Counter(
            id(parameter)
            for path, module in self.copy.named_modules()
            for parameter in module._parameters.values()
            for _ in search.flow.calls_of(path)
        )
        self.learned: dict[object, _Learned] = {}  # of the heads of one block, for its equals

    def of(self, group: Group) -> Site:
        first = min(group.makers, key=lambda path: self.calls[path].began)
        try:
            site = self._site(group, first)
            return self._counted(group, site) if group.heads else site
        except NoWidth:
            if group.other is None:
                raise
            return self.of(group.other)

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
                raise NoWidth(f"{path}, which reads its units, does not train")
        request = self.search.request
        more = request.units if isinstance(request.units, int) else max(1, round(request.units * move.units))
        for axis in move.axes:
            adapter = _adapter_around(self.model, axis.module.path)
            if adapter:
                raise NoWidth(
                    f"{axis.module.path} is part of an adapter of peft ({adapter}), which keeps its size elsewhere and would not load "
                    "again. Choose a larger r in its configuration, or merge the adapter before you grow"
                )
            if self._is_read_elsewhere(axis):
                raise NoWidth(f"other code reads {axis.module.path}.{axis.name} too, and would see the new entries")
        axes = tuple(replace(axis, overwritten=self._is_overwritten(axis)) for axis in move.axes)
        move = replace(move, more=more, axes=axes, start=request.start, layers=layers_in(self.model))
        try:
            resized = resizes(self.model, move)
            check_resized(self.model, {id(each.tensor): each.new_shape for each in resized})
            check_hooks(resized)
        except MovedSite:  # as far as marks tell
            raise NoWidth(
                "its units lie at other places where they are read than where they are made, as after a shift by padding"
            ) from None
        except UnsupportedSite as reason:
            raise NoWidth(str(reason)) from None
        call = self.calls[first]
        seen = _given(call)
        if seen is None:
            raise NoWidth(f"returns {call.returned}, not a tensor")
        if not self.search.flow.reaches(seen):
            raise NoWidth("no gradient arrives there")
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
            raise NoWidth(known.problem)
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

    def of_attention(self, path: str, module: nn.MultiheadAttention) -> Site:
        if why_not(module):
            raise NoWidth(why_not(module))
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
            raise NoWidth(known.problem)
        return _with_counts(site, self.model, (), known.flops)


def _adapter_around(model: nn.Module, path: str) -> str:
    """The class of the layer of peft that a module lies in: around a layer of the model, or around a copy of one that is saved."""
    parts = path.split(".")
    for length in range(len(parts) + 1):
        kind = type(model.get_submodule(".".join(parts[:length])))
        if any(base.__name__ in _ADAPTERS and base.__module__.startswith("peft.") for base in kind.__mro__):
            return kind.__name__
    return ""


def _given(call: ModuleCall) -> SeenTensor | None:
    """What a module gave, or the first part of it."""
    return call.output or call.result


def _with_counts(site: Site, model: nn.Module, found: Sequence[Count], flops: int = 0) -> Site:
    """The site with further numbers that follow its units, and with its cost."""
    assert isinstance(site.move, Width)
    sizes = [Size(Ref.to(c.path, model.get_submodule(c.path)), c.name, c.per_unit, c.through) for c in found]
    return replace(site, move=replace(site.move, sizes=(*site.move.sizes, *sizes), flops=flops))


# ---- The widths of a search: layers whose units are read by others that are known, as far as a trial confirms it.


class WidthKind:
    """More units, channels, hidden features or heads."""

    move: ClassVar[type[Width]] = Width
    grows: ClassVar[str] = "units"

    def propose(self, search: Search) -> None:
        grouping, trial = Grouping(search), WidthRehearsal(search)
        siting = Siting(search, trial)
        sites = _attentions(search, grouping, siting)
        for group in grouping.groups():
            try:
                sites.append(_planned(siting.of, group))
            except NoWidth as reason:
                grouping.give_up(group, str(reason))
        sites.sort(key=lambda site: siting.calls[site.path].ended)
        good, wrong = confirm(trial, sites)
        for site, problem in wrong:
            assert isinstance(site.move, Width)
            makers = {axis.module.path for axis in site.move.axes if axis.fill == "row"}
            grouping.refuse(makers, problem, "heads" if site.move.heads else "units")
        for site in as_configured(trial, search.model, good):
            search.keep(siting.calls[site.path], siting.calls[site.path].ended, site)
        for path, why in grouping.refused.items():
            if search.request.grow == "units":  # what was said of layers is of no use there
                search.skipped[path] = why
            else:
                search.skipped.setdefault(path, why)

    def at(self, search: Search, call: ModuleCall, side: str, seen: Any) -> Iterator[Site]:
        return iter(())

    def otherwise(self, search: Search) -> None:
        """Nothing else could be widened."""


def _attentions(search: Search, grouping: Grouping, siting: Siting) -> list[Site]:
    """More heads for torch's own attention."""
    found = []
    for path, module in search.model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and grouping.called_once(path, "heads"):
            try:
                found.append(_planned(siting.of_attention, path, module))
            except NoWidth as reason:
                grouping.refuse([path], str(reason), "heads")
    return found


def _planned(plan: Callable[..., Site], *given: Any) -> Site:
    """A site, or why there is none: one width that fails is no reason to lose all others."""
    try:
        return plan(*given)
    except NoWidth:
        raise
    except Exception as error:
        note(error)
        raise NoWidth(f"this width cannot be planned ({brief_error(error)})") from error
