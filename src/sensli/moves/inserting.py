"""Moves that put a new module at a point: what they have in common, and the edit that puts it there and takes it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from sensli.errors import MovedSite, UnsupportedModel
from sensli.moves.cutting import apply_cut, join, plan_cut, renames_of, take_out
from sensli.moves.move import Edit, New
from sensli.moves.point import Bind, Point, Ref
from sensli.moves.roles import units_made

if TYPE_CHECKING:
    from sensli.moves.sites import Site


_Same = TypeVar("_Same")


class Inserts:
    """A move that puts a module there which starts as the identity; what differs from that is said by its kind."""

    tolerance: ClassVar[float | None] = None
    takes_call: ClassVar[bool] = (
        False  # the module takes all arguments of the anchor's call, and is a copy of the anchor
    )

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
        return _Inserted(model, site, module, path)

    def joining(self, model: nn.Module, site: Site) -> list[New]:
        anchor = site.find(model)[1]
        shapes = self.outline(anchor)
        parameters = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
        return new_parameters(
            self.relatives(anchor), site, parameters, [module for _, module in site.point.around(model)]
        )


class Insertion(Edit):
    """A module goes into a container that runs its children in order, into a list, or around the anchor."""

    def __init__(self, model: nn.Module, site: Site) -> None:
        self._model, self._move = model, site.move
        self.path, self._anchor = site.find(model)
        self._cut = plan_cut(model, site.point, self.path, takes_call=_inserts(site.move).takes_call)
        self._around = site.point.around(model)
        _check_units(model, site)
        bound = tuple(Ref.to(*found) for found in self._around)
        place = self._cut.place if site.point.place is not None else None
        point = replace(site.point, anchor=Ref.to(self.path, self._anchor), neighbours=bound, place=place)
        self.site = replace(site, point=point)
        self.name = self._cut.path
        self.renames = renames_of(model, self._cut)
        self.beside = {
            join(place, name): tuple(p.shape)
            for place, module in self._around
            for name, p in module.named_parameters(recurse=False)
        }

    def build(self) -> None:
        self.module = _inserts(self._move).module_at(self._model, self.site, self._anchor)
        self.added = (self.module,)
        self.prepared()

    def prepared(self) -> None:
        near = [module for _, module in self._around]
        found = dict(self.module.named_parameters())
        relatives = _inserts(self._move).relatives(self._anchor)
        self.new = new_parameters(relatives, self.site, found, near, prefix=self.name)

    def apply(self) -> None:
        apply_cut(self._model, self._cut, self.module)


def _check_units(model: nn.Module, site: Site) -> None:
    """Refuse a site beside a layer that was widened since: what would go in has the old width."""
    for ref, made in zip(site.point.neighbours, site.point.makes, strict=False):
        found = ref.find(model)
        if found is not None and made and units_made(found[1]) != made:
            raise MovedSite(
                f"'{site}' was found when {found[0]} made {made} units, and now it makes {units_made(found[1])}. Call find_sites again."
            )


class _Inserted(Edit):
    """An insertion that was made before."""

    def __init__(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> None:
        self._model, self.site, self.name = model, site, path
        self.module, self.added = module, (module,)
        self.renames, self.beside = {}, {}

    def revert(self) -> None:
        take_out(self._model, self.name, self.site.point.place)

    @property
    def gone(self) -> list[nn.Parameter]:
        return list(self.module.parameters())


def _inserts(move: Any) -> Inserts:
    assert isinstance(move, Inserts)
    return move


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
            join(prefix, name),
            parameter,
            (*([relatives[name]] if name in relatives else []), *_near(parameter, neighbours)),
            beside,
        )
        for name, parameter in parameters.items()
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
