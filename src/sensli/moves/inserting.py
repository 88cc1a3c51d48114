"""How a new module goes into a model and comes out again: the only code that touches a model's containers."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from sensli.errors import HistoryError, MovedSite, UnsupportedModel
from sensli.modules.engines.all_or_nothing import about_to_change
from sensli.modules.grown import Chain
from sensli.modules.running import Slot, to_capable, whole_tensor
from sensli.moves.point import Bind, ListPlace, Point, Ref, first_number, list_renames, put_into_list, take_from_list
from sensli.moves.roles import units_made
from sensli.moves.sites import Edit, New, Site
from sensli.moves.stretching import Resize
from sensli.text.records import Plain

_GROWN_NAME = re.compile(r"grown\d+")


@dataclass(frozen=True)
class Cut:
    """Where exactly a layer goes: into a container that runs its children in order, into a list, or around the anchor."""

    parent: str
    key: str  # the anchor's key in its parent
    side: str
    way: str  # "sequence", "list" or "wrap"
    new: str  # key of the new layer
    slot: Slot = 0
    takes_call: bool = False  # the layer takes all arguments of the anchor's call
    place: ListPlace | None = None

    @property
    def path(self) -> str:
        """The path of the new module."""
        return join_path(join_path(self.parent, self.key) if self.way == "wrap" else self.parent, self.new)


def plan_cut(model: nn.Module, point: Point, path: str, *, takes_call: bool = False) -> Cut:
    if path == "":
        raise HistoryError(
            "a layer cannot wrap the whole model, because the caller holds the model itself. Use a site inside it."
        )
    parent_path, _, key = path.rpartition(".")
    chained = point.chained
    # After the last module of an inserted layer means after that layer, and before the first one before it: however often a place
    # grows, its layers are siblings.
    while _GROWN_NAME.fullmatch(parent_path.rpartition(".")[2]) and _is_end(
        model.get_submodule(parent_path), key, point.side
    ):
        parent_path, _, key = parent_path.rpartition(".")
        chained = True
    if point.place is not None:
        # A block that has been wrapped since is a chain in its list; the list takes the twin next to that chain.
        while isinstance(model.get_submodule(parent_path), Chain):
            parent_path, _, key = parent_path.rpartition(".")
        number = int(key) + (point.side == "after")
        place = point.place.moved(point.path.rpartition(".")[0], parent_path)
        return Cut(parent_path, key, point.side, "list", str(number), point.slot, takes_call, place)
    parent = model.get_submodule(parent_path)
    into = isinstance(parent, Chain) or (chained and isinstance(parent, nn.Sequential))
    number = 1
    while into and f"grown{number}" in parent._modules:
        number += 1
    return Cut(parent_path, key, point.side, "sequence" if into else "wrap", f"grown{number}", point.slot, takes_call)


def apply_cut(model: nn.Module, cut: Cut, layer: nn.Module) -> None:
    container = model.get_submodule(cut.parent)
    key = cut.key
    if cut.way == "list":
        assert cut.place is not None
        first = first_number(container)
        put_into_list(model, cut.parent, cut.place, int(cut.new) - first, int(cut.key) - first, layer)
        return
    if cut.way == "wrap":
        anchor = container._modules[cut.key]
        assert anchor is not None
        chain = Chain(anchor, cut.slot)
        chain.training = anchor.training
        container._modules[cut.key] = chain
        container, key = chain, "anchor"
    entries = list(container._modules.items())
    entries.insert(list(container._modules).index(key) + (cut.side == "after"), (cut.new, layer))
    # In place: the container's dictionary may be held elsewhere.
    container._modules.clear()
    container._modules.update(entries)
    if isinstance(container, Chain) and cut.takes_call:
        container.takes_call.add(cut.new)


def take_out(model: nn.Module, path: str, place: ListPlace | None) -> None:
    """Take a module out; a chain that is left with its anchor alone goes too."""
    parent_path, _, key = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if place is not None:
        take_from_list(model, parent_path, place, int(key) - first_number(parent))
        return
    del parent._modules[key]
    if isinstance(parent, Chain):
        parent.takes_call.discard(key)
        if len(parent._modules) == 1:
            above, _, place_key = parent_path.rpartition(".")
            model.get_submodule(above)._modules[place_key] = parent._modules["anchor"]


def renames_of(model: nn.Module, cut: Cut) -> dict[str, str]:
    """Names that change: a wrapped module's parameters and buffers move one level down, the later blocks of a list move up by one."""
    if cut.way == "list":
        return list_renames(model, cut.parent, int(cut.new))
    if cut.way == "sequence":
        return {}
    path = join_path(cut.parent, cut.key)
    anchor = model.get_submodule(path)
    names = [name for name, _ in (*anchor.named_parameters(), *anchor.named_buffers())]
    return {join_path(path, name): join_path(path, f"anchor.{name}") for name in names}


def is_nested(path: str) -> bool:
    """Whether a module was inserted into one that was inserted too."""
    return sum(1 for name in path.split(".") if _GROWN_NAME.fullmatch(name)) > 1


def _is_end(container: nn.Module, key: str, side: str) -> bool:
    """Whether what comes after this module of a layer comes after the layer, or what comes before it before the layer."""
    if not isinstance(container, nn.Sequential):
        return side == "before" and key == getattr(container, "begins_with", None)
    keys = list(container._modules)
    return key == (keys[-1] if side == "after" else keys[0])


def join_path(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


# ---- Moves that put a new module at a point: what they have in common, and the edit that puts it there and takes it out.

_Same = TypeVar("_Same")


class Inserts(Plain):
    """A move that puts a module there which starts as the identity; what differs from that is said by its kind."""

    tolerance: ClassVar[float | None] = None
    # whether the module takes all arguments of the anchor's call, and is a copy of the anchor
    takes_call: ClassVar[bool] = False

    def line(self, point: Point) -> str:
        return f"{self} {point}"

    @property
    def caught_at_site(self) -> bool:
        """Whether its gradient comes of what a measurement catches at the site, and not of the new module itself."""
        return True

    def gives(self, value: Tensor) -> Tensor:
        """What the new module gives for this value at its start."""
        return value

    @property
    def family(self) -> object:
        """Moves of one family hold or fall together in a container."""
        return type(self).__name__

    def fixed(self, point: Point) -> bool:
        """Whether there is no other way to put the module there."""
        return False

    def ways(self, site: Site) -> Iterator[Site]:
        """The same move, where possible in the container itself, otherwise around its neighbour."""
        yield site
        if (site.point.chained or site.point.place is not None) and not self.fixed(site.point):
            yield replace(site, point=replace(site.point, chained=False, place=None))

    def module_at(self, model: nn.Module, site: Site, anchor: nn.Module) -> nn.Module:
        """The new module, ready to go in."""
        raise NotImplementedError

    def stand_in(self, model: nn.Module, site: Site, anchor: nn.Module, *, real: bool) -> nn.Module:
        """What goes in during a trial: does what the new module does at its start, at less cost unless it must be ``real``."""
        raise NotImplementedError

    def relatives(self, anchor: nn.Module) -> dict[str, nn.Parameter]:
        """The nearest relative of a new parameter, by its name within the new module, where it is not simply a neighbour's."""
        return {}

    def outline(self, anchor: nn.Module) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the new parameters that decide which optimizer groups they join."""
        raise NotImplementedError

    def bound(self: _Same, bind: Bind) -> _Same:
        return self  # it names no module

    def by_path(self: _Same) -> _Same:
        return self

    def plan(self, model: nn.Module, site: Site) -> Insertion:
        return Insertion(model, site)

    def made(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> Edit:
        return Insertion(model, site, (path, module))

    def joining(self, model: nn.Module, site: Site) -> list[New]:
        anchor = site.find(model)[1]
        shapes = self.outline(anchor)
        parameters = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
        return new_parameters(
            self.relatives(anchor), site, parameters, [module for _, module in site.point.around(model)]
        )


class Insertion(Edit):
    """A module goes into a container that runs its children in order, into a list, or around the anchor."""

    def __init__(self, model: nn.Module, site: Site, made: tuple[str, nn.Module] | None = None) -> None:
        assert isinstance(site.move, Inserts)
        self._model, self._move = model, site.move
        if made is not None:
            self.site, (self.name, self.module) = site, made
            self.added, self.renames, self.beside = (self.module,), {}, {}
            return
        self.path, self._anchor = site.find(model)
        self._cut = plan_cut(model, site.point, self.path, takes_call=self._move.takes_call)
        self._around = site.point.around(model)
        _check_units(model, site)
        bound = tuple(Ref.to(*found) for found in self._around)
        place = self._cut.place if site.point.place is not None else None
        point = replace(site.point, anchor=Ref.to(self.path, self._anchor), neighbours=bound, place=place)
        self.site = replace(site, point=point)
        self.name = self._cut.path
        self.renames = renames_of(model, self._cut)
        self.beside = {
            join_path(place, name): tuple(p.shape)
            for place, module in self._around
            for name, p in module.named_parameters(recurse=False)
        }

    def build(self) -> None:
        self.module = self._move.module_at(self._model, self.site, self._anchor)
        self.added = (self.module,)
        self.prepared()

    def prepared(self) -> None:
        near = [module for _, module in self._around]
        found = dict(self.module.named_parameters())
        relatives = self._move.relatives(self._anchor)
        self.new = new_parameters(relatives, self.site, found, near, prefix=self.name)

    def apply(self) -> None:
        apply_cut(self._model, self._cut, self.module)

    def revert(self) -> None:
        take_out(self._model, self.name, self.site.point.place)

    @property
    def gone(self) -> list[nn.Parameter]:
        return list(self.module.parameters())


def _check_units(model: nn.Module, site: Site) -> None:
    """Refuse a site beside a layer that was widened since: what would go in has the old width."""
    for ref, made in zip(site.point.neighbours, site.point.makes, strict=False):
        found = ref.find(model)
        if found is not None and made and units_made(found[1]) != made:
            raise MovedSite(
                f"'{site}' was found when {found[0]} made {made} units, and now it makes {units_made(found[1])}. Call find_sites again."
            )


def new_parameters(
    relatives: Mapping[str, nn.Parameter],
    site: Site,
    parameters: dict[str, nn.Parameter],
    neighbours: list[nn.Module],
    prefix: str = "",
) -> list[New]:
    """The parameters of a new module, each with those whose optimizer group it should share: its relative of the same name first."""
    beside = ", ".join(f"'{ref.path}'" for ref in site.point.neighbours[:2])
    return [
        New(
            join_path(prefix, name),
            each,
            (*([relatives[name]] if name in relatives else []), *_near(each, neighbours)),
            beside,
        )
        for name, each in parameters.items()
    ]


def _near(parameter: nn.Parameter, neighbours: list[nn.Module]) -> tuple[nn.Parameter, ...]:
    """Existing parameters in order of preference: weights for a weight, biases for a bias, then the others."""
    nearby = [p for module in neighbours for p in module.parameters(recurse=False)]
    alike = [p for p in nearby if (p.ndim >= 2) == (parameter.ndim >= 2)]
    return tuple(alike + [p for p in nearby if all(p is not other for other in alike)])


def example_parameter(model: nn.Module, nearby: list[nn.Module]) -> Tensor | None:
    """A floating-point parameter whose type and device the new ones take; refused where it has no values."""
    for module in (*nearby, model):
        for parameter in module.parameters():
            if parameter.is_floating_point():
                if parameter.is_meta:
                    raise UnsupportedModel(
                        f"{type(model).__name__} is on the meta device: it has shapes but no values, so an identity layer would have "
                        "none either. Load the weights first, then insert."
                    )
                return parameter
    return None


# ---- What edits took out of a model, for the way back: kept beside the modules, not in the record, which is plain data.

_DEEP = 8  # edits of one module: in a long training nobody takes more of them back without a step in between


@dataclass(frozen=True, eq=False)
class _Kept:
    resized: Sequence[Resize]
    sizes: list[float]


_KEPT: weakref.WeakKeyDictionary[nn.Module, tuple[_Kept, ...]] = weakref.WeakKeyDictionary()


def remember_lost(module: nn.Module, resized: Sequence[Resize]) -> None:
    """After an edit of this module: what it took is in `Resize.lost`."""
    about_to_change(_KEPT)
    _KEPT[module] = (*_KEPT.get(module, ()), _Kept(resized, _sizes(resized)))[-_DEEP:]


def recall(module: nn.Module, resized: Sequence[Resize]) -> Sequence[Resize]:
    """The same changes with what they took, if no step was taken since; otherwise as they are given."""
    last = _last(module, resized)
    return resized if last is None or last.sizes != _sizes(resized) else last.resized


def forget(module: nn.Module, resized: Sequence[Resize]) -> None:
    """After the edit was taken back."""
    if _last(module, resized) is not None:
        about_to_change(_KEPT)
        _KEPT[module] = _KEPT[module][:-1]


def _last(module: nn.Module, resized: Sequence[Resize]) -> _Kept | None:
    """The last edit of a module, if it is the one that made these changes."""
    known = _KEPT.get(module)
    same = known and [_change(each) for each in known[-1].resized] == [_change(each) for each in resized]
    return known[-1] if known and same else None


def _change(each: Resize) -> tuple[object, ...]:
    return id(each.tensor), each.stretches, each.old_shape


def _sizes(resized: Sequence[Resize]) -> list[float]:
    """How large the parameters are, which a step changes."""
    return [
        float(to_capable(whole_tensor(each.tensor).detach()).abs().double().sum())
        for each in resized
        if each.is_parameter
    ]
