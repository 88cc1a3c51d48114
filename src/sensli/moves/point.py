"""A point: where in the data flow something could change. An address, found by tracing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import nn

from sensli.errors import one_of
from sensli.modules.arguments import Slot
from sensli.modules.chain import Chain
from sensli.moves.lists import ListPlace

SIDES = ("after", "before")


@dataclass(frozen=True)
class Ref:
    """A module of a model by its path, and by the module itself, so that it is found again after others were inserted."""

    path: str
    _module: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def to(cls, path: str, module: nn.Module) -> Ref:
        return cls(path, weakref.ref(module))

    def find(self, model: nn.Module) -> tuple[str, nn.Module] | None:
        """The module and its path today. Without the module itself (after loading from JSON) the path decides."""
        named = _named(model, self.path)
        if self._module is None:
            if named is None:
                return None
            path, anchor = named
            while isinstance(anchor, Chain):  # layers inserted since stand around the module of that name
                path, anchor = f"{path}.anchor", anchor.get_submodule("anchor")
            return path, anchor
        module = self._module()
        if module is None:
            return None
        if named is not None and named[1] is module:  # nearly always, and then nothing has to be searched
            return named
        for path, candidate in model.named_modules():
            if candidate is module:
                return path, module
        return None

    def find_module(self) -> nn.Module:
        """The module itself, of a reference that is bound to one."""
        module = self.module
        assert module is not None
        return module

    @property
    def module(self) -> nn.Module | None:
        """The module itself; None if it is known by its path alone, or is gone."""
        return None if self._module is None else self._module()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_module": None}


Bind: TypeAlias = Callable[[Ref], Ref]  # the same module of another model, or known in another way


def _named(model: nn.Module, path: str) -> tuple[str, nn.Module] | None:
    """The module of that name, and its path today: a chain that was put around a module passes its names on."""
    module, today = model, ""
    for name in path.split(".") if path else ():
        while isinstance(module, Chain) and name not in module._modules:
            module, today = module.get_submodule("anchor"), f"{today}.anchor"
        parts = module._modules  # that of a scripted module is not a dict, and has no get
        child = parts[name] if name in parts else None  # noqa: SIM401
        if child is None:
            return None
        module, today = child, f"{today}.{name}"
    return today.removeprefix("."), module


@dataclass(frozen=True)
class Point:
    """Where in the data flow: "after" or "before" a module.

    Attributes:
        anchor: The module that names the point.
        side: ``"after"`` or ``"before"``.
        shape: The shape of the activation there, for one sample of the example.
        neighbours: The nearest modules with parameters; new parameters join their optimizer groups.
        chained: Whether the container is an ``nn.Sequential`` that is called as a whole, so that a layer goes into it.
        overwritten: Whether a later operation overwrites the activation in place, so that a measurement must copy it.
        slot: Which argument of the anchor the value is, for a point before it and for twins.
        first_part: Whether the value is the first element of a tuple that the anchor returns.
        place: Where in a list of blocks (``nn.ModuleList``, or a numbered dict) a layer goes, and what must follow; None elsewhere.
        makes: How many units each neighbour made when the point was found, 0 if that is not known.
    """

    anchor: Ref
    side: str
    shape: tuple[int, ...]
    neighbours: tuple[Ref, ...] = ()
    chained: bool = False
    overwritten: bool = False
    slot: Slot = 0
    first_part: bool = False
    place: ListPlace | None = None
    makes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.side} {self.path or 'the model'}"

    @property
    def path(self) -> str:
        """The path of the module that names the point."""
        return self.anchor.path

    def around(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The neighbours that are still there, with their paths today."""
        return [found for found in (ref.find(model) for ref in self.neighbours) if found is not None]

    def by_path(self, path: str | None = None) -> Point:
        """The same point known by its path alone, as another model of the same architecture has it, of whatever sizes."""
        by_path = tuple(Ref(ref.path) for ref in self.neighbours)
        return replace(self, anchor=Ref(self.path if path is None else path), neighbours=by_path, makes=())

    def bound(self, bind: Bind) -> Point:
        """The same point with every module that it names taken from elsewhere."""
        return replace(self, anchor=bind(self.anchor), neighbours=tuple(map(bind, self.neighbours)))

    def on(self, model: nn.Module) -> Point:
        """The same point of another model, bound to its modules; the paths must be there."""
        return self.bound(lambda ref: Ref.to(ref.path, model.get_submodule(ref.path)))

    def check(self) -> None:
        """Refuse values that no point has: a file may have been altered."""
        if min(self.shape, default=0) < 0:
            raise ValueError(f"the shape {self.shape} cannot be negative")
        for facts in (self.place.facts, self.place.indices) if self.place else ():
            for fact in facts:  # these names are read and set when the growth is replayed
                names = (fact.name, *getattr(fact, "through", ()))
                if any(name.startswith("__") or not name.isidentifier() for name in names):
                    raise ValueError(f"{names} are not names of attributes that follow the number of blocks")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "path": self.path,
            "side": self.side,
            "shape": list(self.shape),
            "neighbours": [ref.path for ref in self.neighbours],
            "chained": self.chained,
            "overwritten": self.overwritten,
            "slot": self.slot,
            "first_part": self.first_part,
            "place": self.place.to_dict() if self.place else None,
            "makes": list(self.makes),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Point:
        """The inverse of `to_dict`; the point is then known by its path alone."""
        if data["side"] not in SIDES:
            raise ValueError(one_of("side", data["side"], SIDES))
        return cls(
            anchor=Ref(data["path"]),
            side=data["side"],
            shape=tuple(data["shape"]),
            neighbours=tuple(Ref(path) for path in data["neighbours"]),
            chained=data["chained"],
            overwritten=data["overwritten"],
            slot=data["slot"],
            first_part=data["first_part"],
            place=ListPlace.from_dict(data["place"]) if data["place"] else None,
            makes=tuple(data["makes"]),
        )
