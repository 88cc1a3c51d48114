"""The protocol that every way to grow follows: a `Move` says what could be done at a point, an `Edit` does it, a `Gauge` measures it.

Whoever follows a growth (the optimizer, schedulers, averages, distributed wrappers, checkpoints, the history) sees the `Edit` alone: what
is new, what is resized, what is renamed. A new kind of growth is one folder with its move and its `Kind`, and one line in `kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from sensli.moves.factors import Factored, Outer, factored
from sensli.moves.geometry import Geometry
from sensli.moves.point import Bind, Point
from sensli.moves.stretching import Resize

if TYPE_CHECKING:
    from sensli.moves.search import Search
    from sensli.moves.sites import Site
    from sensli.moves.trace.flow import Call, Seen

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
    enters: ClassVar[bool] = (
        False  # whether `inside` puts something into the model, which moves what comes after it in a list
    )

    points: Sequence[tuple[Point, nn.Module]] = ()  # where an activation and its cotangent are caught
    weights: Sequence[nn.Parameter] = ()  # parameters put into the model for the time of the measurement
    shape: tuple[int, ...] = field(
        default=()
    )  # of the activation, with its batch; the geometry of a convolution needs it
    natural: bool = False  # whether the moments of the natural merit are wanted, with the gradients as matrices
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
        return factored(sums)

    def settled(self, site: Site, sums: Mapping[str, Tensor]) -> Site:
        """The site with what was measured: growing there makes exactly the network whose gradient it was."""
        return site

    def dead(self, sums: Mapping[str, Tensor]) -> float | None:
        """The share of units that were zero on all the data; None where it has no meaning."""
        return None


class Ahead(Gauge):
    """Sees a few samples before a measurement. Its `settled` makes of what was `found` the site that is measured."""

    def found(self) -> dict[str, Tensor]:
        """What came of the samples; of several processes one decides for all."""
        raise NotImplementedError


class Kind(Protocol):
    """A way to grow: finds its moves in a model, and reads them from JSON."""

    move: ClassVar[type[Any]]  # its Move, with the tag and from_dict
    grows: ClassVar[str]  # what `find_sites(grow=...)` calls it

    def propose(self, search: Search) -> None:
        """Visit the points of the model that this kind cares for, and offer a site or a reason at each."""

    def at(self, search: Search, call: Call, side: str, seen: Seen) -> Iterator[Site]:
        """What this kind could do at the boundary of a block, where another kind was refused by the trial."""

    def otherwise(self, search: Search) -> None:
        """Asked once more if nothing was found anywhere."""
