"""How units are found: from marks to the site with every axis that changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from sensli.errors import MovedSite, UnsupportedSite
from sensli.modules.engines.fsdp import check_resized
from sensli.modules.grown import WideAttention, holder_of
from sensli.modules.running import brief_error, note
from sensli.modules.wrappers import is_sharded
from sensli.moves.point import Ref
from sensli.moves.roles import role_of
from sensli.moves.search import Search
from sensli.moves.sites import Kind, Site
from sensli.moves.stretching import Resize
from sensli.moves.width.confirming import WidthRehearsal, as_configured, confirm, width_of
from sensli.moves.width.marking import Group, Grouping, Layout, NoWidth, counts, guesses
from sensli.moves.width.widening import check_hooks, layers_in, resizes
from sensli.moves.width.width import Axis, Size, Width, family

# ---- The site of a group of layers: every axis and number that changes, what more units cost, and what counts heads.


# What makes the heads of torch's `nn.MultiheadAttention`, its axis, and how many maps lie one after the other along it.
_MAKES = (
    ("in_proj_weight", 0, 3), ("q_proj_weight", 0, 1), ("k_proj_weight", 0, 1), ("v_proj_weight", 0, 1), ("in_proj_bias", 0, 3),
    ("bias_k", 2, 1), ("bias_v", 2, 1),
)  # fmt: skip
_ADAPTERS = ("BaseTunerLayer", "AuxiliaryTrainingWrapper", "ModulesToSaveWrapper")  # classes of peft
_GUESSES = 24  # of what counts heads: more would cost more than they find


@dataclass(frozen=True)
class _Learned:
    """What must follow the number of heads, with paths within the attention, and what more heads cost; or why there are none."""

    sizes: tuple[Size, ...] = ()
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
        """The site of layers that make the same units, as marks have shown."""
        first = min(group.makers, key=lambda path: self.calls[path].began)
        try:
            site = self._site(group, first)
            if not group.heads:
                return site
            alike = family(site.path), group.units, *group.makers.values()
            return self._count_heads(site, alike, group)
        except NoWidth:
            if group.other is None:
                raise
            return self.of(group.other)

    def of_attention(self, path: str, module: nn.MultiheadAttention) -> Site:
        """More heads for torch's own attention. One call holds all of them, so no mark shows them: its weights are known by name."""
        out, size = module.out_proj, module.head_dim
        if is_parametrized(module) or is_parametrized(out):
            raise NoWidth(
                "its weights come from a parametrization (weight_norm, spectral_norm, ...), which has their shape too"
            )
        if type(module) not in (nn.MultiheadAttention, WideAttention):
            raise NoWidth(
                f"is a {type(module).__name__}, not torch's own nn.MultiheadAttention, so its class cannot be exchanged"
            )
        own, reader = Ref.to(path, module), Ref.to(f"{path}.out_proj".removeprefix("."), out)
        axes = [
            Axis(own, name, dim, "row", outer=maps, inner=size, length=int(getattr(module, name).shape[dim]))
            for name, dim, maps in _MAKES
            if getattr(module, name, None) is not None
        ]
        axes.append(Axis(reader, "weight", 1, "column", inner=size, length=out.in_features))
        # The size of what it takes and returns stays.
        sizes = Size(own, "num_heads"), Size(reader, "in_features", size)
        move = Width(module.num_heads, 1, "MultiheadAttention", tuple(axes), sizes, (reader.path,), heads=1)
        alike = family(path), *(replace(axis, module=Ref("")) for axis in axes)
        return self._count_heads(self._complete(move, path), alike)

    def _site(self, group: Group, first: str) -> Site:
        axes: list[Axis] = []
        sizes: list[Size] = []

        def add(path: str, does: str, parts: Sequence[Layout]) -> None:
            module = self.model.get_submodule(path)
            ref, role = Ref.to(path, module), role_of(module)
            assert role is not None
            named = {
                "makes": [(name, dim, "row") for name, dim in role.makes],
                "passes": role.passes,
                "reads": [(name, dim, "column") for name, dim in role.reads],
            }
            axes.extend(
                Axis(ref, name, dim, fill, where.start, where.outer, where.inner, int(getattr(module, name).shape[dim]))
                for where in parts
                for name, dim, fill in named[does]
                if getattr(module, name, None) is not None
            )
            per_unit = sum(where.outer * where.inner for where in parts)
            counted = role.out_size if does == "makes" else role.in_size
            sizes.extend(Size(ref, name, per_unit) for name in counted if hasattr(module, name))

        for path, parts in group.makers.items():
            add(path, "makes", parts)
        for path, where in group.passes.items():
            add(path, "passes", [where])
        for path, where in group.reads.items():
            add(path, "reads", [where])
        layer = type(self.copy.get_submodule(first)).__name__  # its own name also where the model is sharded
        move = Width(group.units, 1, layer, tuple(axes), tuple(sizes), tuple(group.reads), heads=group.heads)
        return self._complete(move, first)

    def _complete(self, move: Width, first: str) -> Site:
        """The site of a width whose axes are known, with as many units as were asked for."""
        for path in move.readers:
            if not any(p.requires_grad for p in self.model.get_submodule(path).parameters(recurse=False)):
                raise NoWidth(f"{path}, which reads its units, does not train")
        request = self.search.request
        more = more_units(request.units, move.units)
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
        move = replace(move, more=more, axes=axes, start=request.unit_init, layers=layers_in(self.model))
        try:
            resized = resizes(self.model, move)
            if is_sharded(self.model):
                check_resized(self.model, {id(each.tensor): each.new_shape for each in resized})
            check_hooks(resized)
        except MovedSite:  # as far as marks tell
            raise NoWidth(
                "its units lie at other places where they are read than where they are made, as after a shift by padding"
            ) from None
        except UnsupportedSite as reason:
            raise NoWidth(str(reason)) from None
        call = self.calls[first]
        seen = call.output or call.result
        if seen is None:
            raise NoWidth(f"returns {call.returned}, not a tensor")
        if not self.search.flow.reaches(seen):
            raise NoWidth("no gradient arrives there")
        added, flops = cost_of(self.model, move, resized, self._shape)
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
        seen = None if call is None else call.output or call.result
        return axis.fill == "column" and seen is not None and seen.overwritten

    def _count_heads(self, site: Site, alike: object, group: Group | None = None) -> Site:
        """The site of heads with all numbers that must follow, found by trial, and with what the heads cost.

        ``alike``: the same for the heads of equal blocks, which are tried once. ``group``: where it is not known what counts them.
        """
        around = "" if group is None else group.around
        if alike not in self.learned:
            guessed = [()] if group is None else guesses(*counts(self.model, group), _GUESSES)
            self.learned[alike] = self._learn(site, guessed, around)
        known = self.learned[alike]
        if known.problem:
            raise NoWidth(known.problem)
        return self._with_sizes(site, around, known.sizes, known.flops)

    def _learn(self, site: Site, guessed: Iterable[tuple[Size, ...]], around: str) -> _Learned:
        problems = []
        for guess in guessed:
            counted = self._with_sizes(site, around, guess)
            problems.append(self.trial.of([counted], modes=(False,)))
            if not problems[-1]:
                return _Learned(guess, self.trial.flops(counted))
        return _Learned(problem=problems[0])

    def _with_sizes(self, site: Site, around: str, sizes: Sequence[Size], flops: int = 0) -> Site:
        """The site with further numbers that follow its units, of modules within the one ``around`` them, and with its cost."""
        move = width_of(site)
        paths = [f"{around}.{size.module.path}".strip(".") for size in sizes]
        refs = [Ref.to(path, self.model.get_submodule(path)) for path in paths]
        bound = (replace(size, module=ref) for size, ref in zip(sizes, refs, strict=True))
        return replace(site, move=replace(move, sizes=(*move.sizes, *bound), flops=flops))

    def _shape(self, path: str, given: bool) -> tuple[int, ...] | None:
        """The shape of what a layer was given or gave."""
        call = self.calls.get(path)
        seen = None if call is None else call.inputs[0] if given and call.inputs else call.output
        return None if seen is None else tuple(seen.tensor.shape)


def more_units(asked: int | float, units: int) -> int:
    """How many units come to so many: a number, or a share of them."""
    return asked if isinstance(asked, int) else max(1, round(asked * units))


def cost_of(
    model: nn.Module, move: Width, resized: Sequence[Resize], shape_of: Callable[[str, bool], tuple[int, ...] | None]
) -> tuple[int, int]:
    """Parameters and FLOPs that come with the units. ``shape_of``: of what a layer gives, or is given."""
    added = flops = 0
    positions = {}
    for axis in move.axes:
        module = model.get_submodule(axis.module.path)
        role = role_of(module)
        # Without a role it is torch's own attention: a trial counts it.
        shape = None if role is None else shape_of(axis.module.path, getattr(module, "transposed", False))
        if role is not None and shape is not None and isinstance(getattr(module, axis.name), nn.Parameter):
            others = [size for dim, size in enumerate(shape[1:], 1) if dim != role.channel % len(shape)]
            positions[id(getattr(module, axis.name))] = math.prod(others)
    for each in resized:
        if each.is_parameter:
            more = math.prod(each.new_shape) - math.prod(each.old_shape)
            added += more
            flops += 2 * more * positions.get(id(each.tensor), 0) if each.tensor.dim() > 1 else 0
    return added, flops


def _adapter_around(model: nn.Module, path: str) -> str:
    """The class of the layer of peft that a module lies in: around a layer of the model, or around a copy of one that is saved."""
    parts = path.split(".")
    for length in range(len(parts) + 1):
        kind = type(model.get_submodule(".".join(parts[:length])))
        if any(base.__name__ in _ADAPTERS and base.__module__.startswith("peft.") for base in kind.__mro__):
            return kind.__name__
    return ""


# ---- The widths of a search: layers whose units are read by others that are known, as far as a trial confirms it.


class WidthKind(Kind):
    """More units, channels, hidden features or heads."""

    move: ClassVar[type[Width]] = Width
    grows: ClassVar[str] = "units"

    def propose(self, search: Search) -> None:
        grouping, trial = Grouping(search), WidthRehearsal(search)
        siting = Siting(search, trial)
        sites = _attentions(search, grouping, siting)
        for group in grouping.groups():
            try:
                sites.append(_plan(siting.of, group))
            except NoWidth as reason:
                grouping.give_up(group, str(reason))
        sites.sort(key=lambda site: siting.calls[site.path].ended)
        good, wrong = confirm(trial, sites)
        for site, problem in wrong:
            width = width_of(site)
            makers = {axis.module.path for axis in width.axes if axis.fill == "row"}
            grouping.refuse(makers, problem, "heads" if width.heads else "units")
        for site in as_configured(trial, search.model, good):
            search.keep(siting.calls[site.path], siting.calls[site.path].ended, site)
        for path, why in grouping.refused.items():
            if search.request.what == "units":  # what was said of layers is of no use there
                search.skipped[path] = why
            else:
                search.skipped.setdefault(path, why)


def _attentions(search: Search, grouping: Grouping, siting: Siting) -> list[Site]:
    """More heads for torch's own attention."""
    found = []
    for path, module in search.model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and grouping.called_once(path, "heads"):
            try:
                found.append(_plan(siting.of_attention, path, module))
            except NoWidth as reason:
                grouping.refuse([path], str(reason), "heads")
    return found


def _plan(plan: Callable[..., Site], *given: Any) -> Site:
    """A site, or why there is none: one width that fails is no reason to lose all others."""
    try:
        return plan(*given)
    except NoWidth:
        raise
    except Exception as error:
        note(error)
        raise NoWidth(f"this width cannot be planned ({brief_error(error)})") from error
