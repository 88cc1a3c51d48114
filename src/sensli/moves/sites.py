"""A site: a point of a model, and the move that could be made there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from torch import nn

from sensli.errors import UnknownSite
from sensli.modules.equality import first_difference
from sensli.modules.wrappers import bare
from sensli.moves.move import Cost, Move
from sensli.moves.point import Point, Ref
from sensli.text.html_tables import html_table


@dataclass(frozen=True)
class Site:
    """A point of the data flow and what could be done there. Prints as one unique line.

    Attributes:
        point: Where: the module that names the place, the side, the shape of the activation, the neighbours.
        move: What: the layer that would be inserted, the block that would get a twin, or the units that would be added.
    """

    point: Point
    move: Move
    _root: Ref | None = field(default=None, repr=False, compare=False)  # the model that it was found in
    _container: str | None = field(default=None, repr=False, compare=False)  # of the blocks that it is between

    def __str__(self) -> str:
        return self.move.line(self.point)

    def __repr__(self) -> str:
        return f"Site({self})"

    @property
    def path(self) -> str:
        """The path of the module that names the place."""
        return self.point.path

    @property
    def side(self) -> str:
        """``"after"`` or ``"before"`` that module."""
        return self.point.side

    @property
    def place(self) -> str:
        """Where the growth would be, in a few words: ``"after features.1"``, ``"in features.3"``."""
        return (
            f"{self.side if self.cost.depth else 'in'} {self.path}"  # what makes nothing deeper is in the module itself
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the activation there, for one sample of the example."""
        return self.point.shape

    @property
    def kind(self) -> str:
        """What would be added: "linear", "conv", "block" or "units"."""
        return self.move.kind

    @property
    def stack(self) -> tuple[str, tuple[int, ...]] | None:
        """What the places between the blocks of one stack have in common: the container and the shape. None for all other places."""
        return None if self._container is None else (self._container, self.shape)

    @property
    def cost(self) -> Cost:
        """What the growth would add to the model: parameters, FLOPs, depth."""
        return self.move.cost(self.point)

    @property
    def parameters(self) -> int:
        """How many parameters the growth would add."""
        return self.cost.parameters

    @property
    def flops(self) -> int:
        """How many FLOPs per sample the growth would add to a forward pass."""
        return self.cost.flops

    def find(self, model: nn.Module) -> tuple[str, nn.Module]:
        """Find the anchor in a model.

        Args:
            model: The network.

        Returns:
            The anchor's path and module.

        Raises:
            UnknownSite: If the anchor is not part of this model.
        """
        found = self.point.anchor.find(model)
        if found is None:
            raise UnknownSite(
                f"'{self}' is not a site of this {type(model).__name__}: the module that names it is not part of the model. "
                "It belongs to another model or was removed or replaced since. Call find_sites on this model again; if this is a copy of "
                "the model that the site was found in, site.on(model) is the same place in it."
            )
        return found

    def describe(self, model: nn.Module) -> str:
        """The site in full: what it adds, and every tensor that would change, with its old and new shape. Changes nothing.

        Args:
            model: The model that the site belongs to, or its wrapper.

        Returns:
            The site's line with its costs, then a line for each tensor that changes its shape, or for the module that is new.

        Raises:
            UnknownSite: If the site does not belong to the model.
        """
        network = bare(model)
        edit = self.move.plan(network, self)
        lines = [f"{self} (+{self.parameters:,} parameters, +{self.flops:,} FLOPs)"]
        lines += [f"  {each.name}: {tuple(each.old_shape)} -> {tuple(each.new_shape)}" for each in edit.resized]
        if self.move.joining(network, self):
            lines.append(f"  {edit.name}: new")
        return "\n".join(lines)

    def on(self, other: nn.Module) -> Site:
        """The same site of an equal model: of a deep copy, or of one that was built and grown in the same way.

        What was measured stays with the site: new units of a width start with the same rows. If the model that the site was found
        in is gone, or the site comes from a file, only the modules that it names are looked for.

        Args:
            other: The equal model, or its wrapper. Its values, types of numbers and devices may differ.

        Returns:
            The site of the other model.

        Raises:
            UnknownSite: If the other model is not equal; the message names the first difference.
        """
        network, own = bare(other, "other"), None if self._root is None else self._root.module
        if own is not None:
            self.find(own)  # refuses a place that is gone
            difference = first_difference(own, network)
            if difference:
                raise UnknownSite(
                    f"other must be equal to the {type(own).__name__} that '{self}' was found in, but {difference}. Give a deep copy, "
                    "or a model that was built and grown in the same way."
                )

        def bind(ref: Ref) -> Ref:
            place = Ref(ref.path).find(network) if own is None else ref.find(own)
            return ref if place is None else Ref.to(place[0], network.get_submodule(place[0]))

        site = Site(self.point.bound(bind), self.move.bound(bind), Ref.to("", network), self._container)
        site.find(network)
        return site

    def by_path(self) -> Site:
        """The same site known by paths alone, as another model of the same architecture has it."""
        return Site(self.point.by_path(), self.move.by_path())

    def check(self) -> None:
        """Refuse values that no site has: a file may have been altered."""
        self.point.check()
        self.move.check(self.point)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"point": self.point.to_dict(), "move": {"tag": self.move.tag, **self.move.to_dict()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Site:
        """The inverse of `to_dict`; the place is then known by its path alone."""
        from sensli.moves.kinds import move_from_dict  # here, because the kinds make sites

        return cls(Point.from_dict(data["point"]), move_from_dict(data["move"]))


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
        notes: What could not be tried, in sentences; nearly always there is none.
        model_name: The name of the model's class.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        skipped: Sequence[Skipped] = (),
        *,
        notes: Sequence[str] = (),
        model_name: str = "model",
    ) -> None:
        self._sites = tuple(sites)
        self.skipped = tuple(skipped)
        self.notes = tuple(notes)
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
            "notes": list(self.notes),
        }  # fmt: skip

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = [[str(site), f"{site.parameters:,}", f"{site.flops:,}"] for site in self]
        rows += [[f"{path or 'the model'}: skipped, {reason}", "", ""] for path, reason in self.skipped]
        rows += [[f"note: {note}", "", ""] for note in self.notes]
        return html_table(["site", "+parameters", "+FLOPs"], rows, caption=repr(self))

    def explain(self) -> str:
        """Every place in words: what could go there and what it would cost, or why it was skipped."""
        lines = [f"{self._model_name}: {_count(len(self), 'site')}, {_count(len(self.skipped), 'place')} skipped"]
        lines += [f"  {site}   (+{site.parameters:,} parameters, +{site.flops:,} FLOPs)" for site in self]
        if self.skipped:
            lines.append("skipped:")
            lines += [f"  {path or 'the model'}: {reason}" for path, reason in self.skipped]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
