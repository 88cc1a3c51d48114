"""A site: a place in a model, and the identity layer that would go there."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from torch import nn

from sensli.errors import UnknownSite, one_of
from sensli.modules.arguments import Slot
from sensli.modules.chain import Chain
from sensli.moves.layers import Layer
from sensli.moves.lists import ListPlace
from sensli.text.html_tables import html_table

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

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_module": None}


def _named(model: nn.Module, path: str) -> tuple[str, nn.Module] | None:
    """The module of that name, and its path today: a chain that stands around a module since hands its names on."""
    module, today = model, ""
    for name in path.split(".") if path else ():
        while isinstance(module, Chain) and name not in module._modules:
            module, today = module.get_submodule("anchor"), f"{today}.anchor"
        parts = module._modules  # that of a scripted module is no dict, and has no get
        child = parts[name] if name in parts else None  # noqa: SIM401
        if child is None:
            return None
        module, today = child, f"{today}.{name}"
    return today.removeprefix("."), module


@dataclass(frozen=True)
class Site:
    """A place, "after" or "before" a module, and the layer that would go there. Prints as one unique line.

    Attributes:
        anchor: The module that names the place.
        side: ``"after"`` or ``"before"``.
        layer: The layer that would be inserted.
        shape: The shape of the activation there, for one sample of the example.
        neighbours: The nearest modules with parameters; new parameters join their optimizer groups.
        chained: Whether the layer goes into an ``nn.Sequential`` that is called as a whole.
        overwritten: Whether a later operation overwrites the activation in place.
        slot: Which argument of the anchor the value is, for a site before it and for twins.
        first_part: Whether the value is the first element of a tuple that the anchor returns.
        place: Where in an ``nn.ModuleList`` the layer goes, and what must follow; None elsewhere.
    """

    anchor: Ref
    side: str  # "after" or "before"
    layer: Layer
    shape: tuple[int, ...]  # of one sample's activation, as the example had it
    neighbours: tuple[Ref, ...] = ()  # modules whose parameters are nearest, whose optimizer groups the new ones join
    chained: bool = False  # the container is an nn.Sequential that is called as a whole: the layer goes into it
    overwritten: bool = False  # a later operation works in place on the activation: a measurement must copy it
    slot: Slot = 0  # the argument of the anchor that the value is, for a site before it and for twins
    first_part: bool = False  # the value is the first part of a tuple that the anchor returns
    place: ListPlace | None = None  # the container is an nn.ModuleList that takes the layer, and what must follow

    def __str__(self) -> str:
        return f"{self.layer} {self.side} {self.path or 'the model'}"

    @property
    def path(self) -> str:
        """The path of the module that names the place."""
        return self.anchor.path

    @property
    def kind(self) -> str:
        """What would be inserted: "linear", "conv" or "block"."""
        return self.layer.kind

    @property
    def parameters(self) -> int:
        """How many parameters the layer would add."""
        return self.layer.parameters

    @property
    def flops(self) -> int:
        """How many FLOPs per sample the layer would add to a forward pass."""
        positions = self.shape[1:] if self.kind == "conv" else self.shape[:-1]
        return self.layer.flops(math.prod(positions))

    def find(self, model: nn.Module) -> tuple[str, nn.Module]:
        """Find the anchor in a model.

        Args:
            model: The network.

        Returns:
            The anchor's path and module.

        Raises:
            UnknownSite: If the anchor is not part of this model.
        """
        found = self.anchor.find(model)
        if found is None:
            raise UnknownSite(
                f"'{self}' is not a site of this {type(model).__name__}: the module that names it is not part of the model. "
                "It belongs to another model or was removed or replaced since. Call find_sites on this model again."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "path": self.path,
            "side": self.side,
            "layer": self.layer.to_dict(),
            "shape": list(self.shape),
            "neighbours": [ref.path for ref in self.neighbours],
            "chained": self.chained,
            "overwritten": self.overwritten,
            "slot": self.slot,
            "first_part": self.first_part,
            "place": self.place.to_dict() if self.place else None,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Site:
        """The inverse of `to_dict`; the place is then known by its path alone."""
        if data["side"] not in SIDES:
            raise ValueError(one_of("side", data["side"], SIDES))
        return cls(
            anchor=Ref(data["path"]),
            side=data["side"],
            layer=Layer.from_dict(data["layer"]),
            shape=tuple(data["shape"]),
            neighbours=tuple(Ref(path) for path in data["neighbours"]),
            chained=data["chained"],
            overwritten=data["overwritten"],
            slot=data.get("slot", 0),
            first_part=data.get("first_part", False),
            place=ListPlace.from_dict(data["place"]) if data.get("place") else None,
        )


@dataclass(frozen=True)
class Skipped:
    """A place that cannot grow, and why."""

    path: str
    reason: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.path, self.reason))


class Sites(Sequence[Site]):
    """The sites of a model in the order of the data flow, and the places that were skipped.

    Attributes:
        skipped: The places where no layer can go, each with its path and the reason.
        model_name: The name of the model's class.
    """

    def __init__(self, sites: Sequence[Site], skipped: Sequence[Skipped] = (), *, model_name: str = "model") -> None:
        self._sites = tuple(sites)
        self.skipped = tuple(skipped)
        self._model_name = model_name

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Site, ...]: ...
    def __getitem__(self, index: int | slice) -> Site | tuple[Site, ...]:
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        return f"Sites({len(self)} in {self._model_name}, {len(self.skipped)} places skipped)"

    def __str__(self) -> str:
        return "\n".join(str(site) for site in self) or "no sites"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the sites with their costs, and the places skipped with their reasons."""
        return {
            "model": self._model_name,
            "sites": [
                {"site": str(s), "path": s.path, "side": s.side, "kind": s.kind, "parameters": s.parameters, "flops": s.flops}
                for s in self
            ],
            "skipped": [{"path": path, "reason": reason} for path, reason in self.skipped],
        }  # fmt: skip

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = [[str(site), f"{site.parameters:,}", f"{site.flops:,}"] for site in self]
        rows += [[f"{path or 'the model'}: skipped, {reason}", "", ""] for path, reason in self.skipped]
        return html_table(["site", "+parameters", "+FLOPs"], rows, caption=repr(self))

    def explain(self) -> str:
        """Every place in words: what could go there and what it would cost, or why it was skipped."""
        lines = [f"{self._model_name}: {_count(len(self), 'site')}, {_count(len(self.skipped), 'place')} skipped"]
        lines += [f"  {site}   (+{site.parameters:,} parameters, +{site.flops:,} FLOPs)" for site in self]
        if self.skipped:
            lines.append("skipped:")
            lines += [f"  {path or 'the model'}: {reason}" for path, reason in self.skipped]
        return "\n".join(lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
