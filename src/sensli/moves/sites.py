"""A site: a point of a model and the move that could be made there; what a move is, its edit and its gauge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from sensli.errors import UnknownSite, WrongType
from sensli.modules import checks
from sensli.modules.copies import first_difference
from sensli.modules.wrappers import bare
from sensli.moves.factors import Factored, Outer, factored_maps
from sensli.moves.point import Bind, Point, Ref
from sensli.moves.roles import Geometry
from sensli.moves.stretching import Resize
from sensli.text.commands import KINDS
from sensli.text.records import Plain
from sensli.text.tables import html_table

if TYPE_CHECKING:
    from typing_extensions import Self

    from sensli.moves.search import Search
    from sensli.moves.trace.flow import ModuleCall, SeenTensor

# ---- The protocol that every way to grow follows: a `Move` says what could be done at a point, an `Edit` does it, a
# `Gauge` measures it.
#
# Whoever follows a growth (the optimizer, schedulers, averages, distributed wrappers, checkpoints, the history) sees
# the `Edit` alone: what is new, what is resized, what is renamed. A new kind of growth is one folder with its move
# and its `Kind`, and one line in `kinds`.

# From an activation, its cotangent and the arguments of the module's call to what goes to the sums.
Caught = Callable[[Tensor, Tensor, tuple[Any, ...], dict[str, Any]], Mapping[str, Tensor | Outer]]


@dataclass(frozen=True)
class Cost:
    """What a growth adds to the model."""

    parameters: int
    flops: int  # of one forward pass, per sample
    depth: int = 0  # layers with weights, one after the other


@dataclass(frozen=True, eq=False)
class New:
    """A parameter that appears, and the existing parameters whose optimizer group it should share, the preferred one first."""

    name: str  # in the grown model: "features.grown1.conv.weight"
    parameter: nn.Parameter
    relatives: tuple[nn.Parameter, ...]
    beside: str = ""  # the module that the relatives belong to, for the text of an error


class Move(Protocol):
    """What could be done at a point, as frozen data."""

    tag: ClassVar[str]  # of this kind of growth, in JSON and in the registry
    # None: the output stays to the bit; otherwise by how much it may move, relative to its size
    tolerance: ClassVar[float | None]

    @property
    def kind(self) -> str:
        """What a person filters by: "linear", "conv", "block", ..."""

    def line(self, point: Point) -> str:
        """The move at a point in one line, different for every site of a model."""

    def cost(self, point: Point) -> Cost:
        """What it adds to the model."""

    def gauge(self, site: Site, model: nn.Module) -> Gauge:
        """What measures its worth, for one measurement."""

    def plan(self, model: nn.Module, site: Site) -> Edit:
        """The change, checked and not yet made. Raises before anything changes; allocates nothing yet."""

    def made(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> Edit:
        """The change as it was made, to be reverted; ``module``, at ``path``, bears its number."""

    def joining(self, model: nn.Module, site: Site) -> Sequence[New]:
        """The new parameters with shapes alone, to see which optimizer groups they would join. Builds nothing."""

    def bound(self, bind: Bind) -> Move:
        """The same, measured values included, with every module that it names taken from elsewhere."""

    def by_path(self) -> Move:
        """The same, with all modules that it names known by their paths alone."""

    def check(self, point: Point) -> None:
        """Refuse values that do not fit the point: a file may have been altered."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""


class Edit:
    """A checked change of one model: one that is planned, with `build`, `prepared` and `apply` in this order, or one that was made, with
    `revert`. One that is also tried in a copy of a model has both."""

    site: Site  # with the paths of today
    name: str  # the path, in the grown model, of the module that bears the number of the growth
    module: nn.Module  # that module
    added: Sequence[nn.Module] = ()  # modules that were not there before, in the order in which they run
    new: Sequence[New] = ()  # parameters that appear
    resized: Sequence[Resize] = ()  # parameters and buffers that change their shape; the objects stay
    copies: bool = False  # what is new is copied from what is there, in an average from its own
    renames: Mapping[str, str]  # old to new names of parameters and buffers
    beside: Mapping[str, tuple[int, ...]]  # shapes of the parameters nearby, by name: a replay must find the same

    def build(self) -> None:
        """Allocate what is new; with sharded models all ranks come here."""

    def prepared(self) -> None:
        """What was added is now like what is around it: sharding has replaced its parameters by parts of them."""

    def apply(self) -> None:
        """Make the change."""
        raise NotImplementedError

    def revert(self) -> None:
        """Take the change back."""
        raise NotImplementedError

    def settled(self) -> None:
        """Told of a change that was made, when its new entries were given other values before any step."""

    @property
    def gone(self) -> list[nn.Parameter]:
        """The parameters that `revert` takes away."""
        return [each.parameter for each in self.new]


def always() -> bool:
    """Every backward pass is measured."""
    return True


MIXED = "mixed"  # the sum of mixtures of columns


def as_it_is(cotangent: Tensor) -> Tensor:
    """A cotangent that nobody marks."""
    return cotangent


@dataclass
class Gauge:
    """Measures one site during ordinary passes: values and cotangents are caught at points, and sums come of them.

    Sums are additive over batches and processes. The norm of the gradients that follow from the sums is the merit.
    """

    factors: ClassVar[bool] = False  # whether it can catch the moments of the natural merit
    raw: ClassVar[bool] = False  # whether it wants what modules give before hooks of the user change it
    # whether `inside` puts something into the model, which moves what comes after it in a list
    enters: ClassVar[bool] = False

    points: Sequence[tuple[Point, nn.Module]] = ()  # where an activation and its cotangent are caught
    weights: Sequence[nn.Parameter] = ()  # parameters put into the model for the time of the measurement
    shape: tuple[int, ...] = ()  # of the activation, with its batch; the geometry of a convolution needs it
    entries: int = (
        0  # of all gradients that are summed under names that begin with "gradient": each one a matrix or a kernel
    )
    # Of the gradients of one unit, where those of single units are summed under "columns" and some of the units are taken.
    columns: int = 0
    # From the number of a reader and such columns to mixtures of them, whose sums over the readers stand for their norm; None
    # where the columns themselves are summed.
    mix: Callable[[int, Tensor], Tensor] | None = field(default=None, repr=False)
    natural: bool = False  # whether the moments of the natural merit are wanted, with the gradients as matrices
    rectified: bool = False  # whether it wants cotangents with zeros wherever the activation is not positive
    # Whether the backward pass in progress is measured: the user's code may take others.
    counts: Callable[[], bool] = field(default=always, repr=False)
    # From a cotangent to the same; the site is refused if the loss depends on it, being a gradient that the user's code takes.
    marked: Callable[[Tensor], Tensor] = field(default=as_it_is, repr=False)

    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[str, Tensor | Outer]:
        """What one pass adds to the sums: an activation, the cotangent that came back to it, the arguments of the module's call."""
        raise NotImplementedError

    def catching(self, index: int, x: Tensor) -> Caught:
        """`caught` for the call of the module at a point that is being made: its cotangent comes later, perhaps twice, or never."""
        return partial(self.caught, index)

    def hooks(
        self, add: Callable[[Mapping[str, Tensor | Outer]], None], unscaled: Callable[[Tensor], Tensor]
    ) -> list[Any]:
        """Set further hooks, and return their handles.

        ``add`` takes what goes to the sums; ``unscaled`` turns a gradient into that of the loss itself.
        """
        return []

    def ahead(self) -> Ahead | None:
        """What sees a few samples before the measurement, and says what is to be measured; None if nothing need be seen."""
        return None

    def inside(self, model: nn.Module) -> AbstractContextManager[None]:
        """What the measurement needs around its passes; those that put something into the model come after all others."""
        return nullcontext()

    def gradients(self, sums: Mapping[str, Tensor], shape: tuple[int, ...]) -> Iterable[tuple[Tensor, Geometry]]:
        """The summed gradients of all measured weights, and how each weight acts."""
        raise NotImplementedError

    def factored(self, sums: Mapping[str, Tensor]) -> list[Factored]:
        """The same for the natural merit: gradients as matrices, with the moments of both sides."""
        return factored_maps(sums)

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        """The site with what was measured: growing there makes exactly the network whose gradient it was."""
        return site

    def dead(self, sums: Mapping[str, Tensor]) -> float | None:
        """The share of units that were zero on all the data; None where it has no meaning."""
        return None


class Ahead(Gauge):
    """Sees a few samples before a measurement. Its `settled` makes of what was `found` the site that is measured."""

    compact: bool = False  # whether what is measured should take little memory: there is much of it

    def found(self) -> dict[str, Tensor]:
        """What came of the samples; of several processes one decides for all."""
        raise NotImplementedError


class Kind:
    """A way to grow: finds its moves in a model, and reads them from JSON. One that only reads them says nothing else."""

    move: ClassVar[type[Any]]  # its Move, with the tag and from_dict
    grows: ClassVar[str] = "nothing"  # what `find_sites(what=...)` calls it

    def propose(self, search: Search) -> None:
        """Visit the points of the model that this kind cares for, and offer a site or a reason at each."""

    def at(self, search: Search, call: ModuleCall, side: str, seen: SeenTensor) -> Iterator[Site]:
        """What this kind could do at the boundary of a block, where another kind was refused by the trial."""
        return iter(())

    def otherwise(self, search: Search) -> None:
        """Asked once more if nothing was found anywhere."""


@dataclass(frozen=True)
class Site(Plain):
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
        # what makes nothing deeper is in the module itself
        return f"{self.side if self.cost.depth else 'in'} {self.path}"

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
                "the model that the site was found in, site.in_model(model) is the same place in it."
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

    def in_model(self, other: nn.Module) -> Site:
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
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; the place is then known by its path alone."""
        from sensli.moves.finding import move_from_dict  # here, because the kinds make sites

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
        lines = [f"{self._model_name}: {plural(len(self), 'site')}, {plural(len(self.skipped), 'place')} skipped"]
        lines += [f"  {site}   (+{site.parameters:,} parameters, +{site.flops:,} FLOPs)" for site in self]
        if self.skipped:
            lines.append("skipped:")
            lines += [f"  {path or 'the model'}: {reason}" for path, reason in self.skipped]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def plural(number: int, word: str) -> str:
    """So many of something."""
    return f"{number} {word}" + ("" if number == 1 else "s")


# ---- Sites by name: a person may type what a site of the last search prints, instead of handing the site itself on.

_MOST = 12  # names in an error text
# Sites refer to modules weakly, so what is remembered of a model goes with it.
_found: WeakKeyDictionary[nn.Module, tuple[Site, ...]] = WeakKeyDictionary()


def remember_sites(model: nn.Module, sites: Iterable[Site]) -> None:
    """What the last search of the model found."""
    _found[model] = tuple(sites)


def site_named(model: nn.Module, name: str) -> Site:
    """The site with this line, this place (``"after features.1"``) or this path; the most exact of the three decides."""
    own = type(model).__name__
    if model not in _found:
        raise UnknownSite(
            f"site={name!r} is a name, but no sites of this {own} are known yet. Call find_sites(model, example) first, or give a Site."
        )
    sites = _found[model]
    for names in (map(str, sites), (site.place for site in sites), (site.path for site in sites)):
        matching = [site for site, known in zip(sites, names, strict=True) if known == name]
        if len(matching) > 1:
            lines = _listed(f"'{site}'" for site in matching)
            raise UnknownSite(
                f"site={name!r} is ambiguous: {len(matching)} sites of this {own} match. Give one of {lines}."
            )
        if matching:
            return matching[0]
    places = _listed(f"'{site.place}'" for site in sites) or "none"
    raise UnknownSite(
        f"site must be one that the last find_sites on this {own} found, got {name!r}. It found: {places}."
    )


def _listed(names: Iterable[str]) -> str:
    known = list(dict.fromkeys(names))
    return ", ".join(known[:_MOST]) + (f" and {len(known) - _MOST} more" if len(known) > _MOST else "")


# ---- Which sites to keep: by kind, by path, or as a function says.

Where = str | Sequence[str] | Callable[[Site], bool] | None
_WHAT = (
    f"a kind ({', '.join(map(repr, KINDS))}), a path or a pattern of paths (for example 'head.*'), a list of these, or a function "
    "of a Site that returns True or False"
)


def check_where(where: Where, model: nn.Module | None = None) -> None:
    """Raise if ``where`` cannot choose sites; with the model also if it names a path that this model does not have."""
    if where is None or callable(where):
        return
    names = _names(where)
    if not names or not all(isinstance(name, str) for name in names):
        checks.refuse("where", _WHAT, where, WrongType)
    for name in names:
        if not name:
            checks.refuse("where", _WHAT, where, ValueError)
        if model is not None and name not in KINDS and not any(_is_in(path, name) for path, _ in model.named_modules()):
            parts = ", ".join(repr(part) for part, _ in list(model.named_children())[:8]) or "none"
            hint = f"No module of this {type(model).__name__} has the path {name!r}. The first ones at the top are: {parts}."
            checks.refuse("where", _WHAT, where, ValueError, hint)


def filter_sites(sites: Sequence[Site], where: Where) -> list[Site]:
    """The sites that ``where`` keeps."""
    if where is None:
        return list(sites)
    if callable(where):
        return [site for site in sites if where(site)]
    return [site for site in sites if any(_keeps(name, site) for name in _names(where))]


def _names(where: object) -> list[str]:
    if isinstance(where, str):
        return [where]
    return list(where) if isinstance(where, (list, tuple, set, frozenset)) else []


def _keeps(name: str, site: Site) -> bool:
    return site.kind == name if name in KINDS else _is_in(site.path, name)


def _is_in(path: str, name: str) -> bool:
    """Whether a path is the named one, lies below it, or has the pattern."""
    return bool(path) and (path == name or path.startswith(f"{name}.") or fnmatchcase(path, name))
