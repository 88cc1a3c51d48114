"""Dead units of a width: `Recycle` gives them new rows, `Narrow` removes them.

Nothing comes from a dead unit on the data, so what its readers do with it can be set to zero or taken away without a trace. A recycled
unit starts as a new one does: with random rows, as large as those of the living units, and zero columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedModel, UnsupportedSite
from sensli.modules.copies import NoDropout
from sensli.modules.grown import count_growths
from sensli.modules.running import device_of, first_tensor, put, run, to_capable, to_device
from sensli.modules.wrappers import is_sharded, run_eagerly
from sensli.moves.inserting import forget, recall, remember_lost
from sensli.moves.point import Bind, Point, Ref
from sensli.moves.roles import role_of
from sensli.moves.sites import Cost, Edit, Kind, New, Site, plural
from sensli.moves.stretching import OWN, Exchange, Resize, like_layout
from sensli.moves.width.widening import change_sizes, resizes
from sensli.moves.width.width import TOLERANCE, Axis, Width, find_part
from sensli.text.records import Plain

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class _Dead(Plain):
    """What could be done with dead units of a width."""

    kind: ClassVar[str] = "units"
    removes: ClassVar[bool]
    _needed = None

    width: Width  # with as many units as there are before
    which: tuple[int, ...]
    added: int = 0  # parameters, in the model where it was done; not above zero

    @property
    def units(self) -> int:
        """How many units are there afterwards."""
        return self.width.units - len(self.which) * self.removes

    def __str__(self) -> str:
        return plural(len(self.which), "dead unit")

    def line(self, point: Point) -> str:
        readers = self.width.readers
        others = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
        change = f" -> {self.units}" if self.removes else ""
        return f"{self} in {point.path} ({self.width.layer} {self.width.units}{change}), read by {readers[0]}{others}"

    def cost(self, point: Point) -> Cost:
        """What it saves, below zero. FLOPs are as many for each parameter as in a layer that gets wider there."""
        return Cost(self.added, round(self.width.flops * self.added / max(1, self.width.added)))

    def gauge(self, site: Site, model: nn.Module) -> NoReturn:
        raise UnsupportedSite(f"'{site}' cannot be measured: it adds nothing to the model.")

    def plan(self, model: nn.Module, site: Site) -> Edit:
        return Exchanging(model, site)

    def made(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> Edit:
        return Exchanging(model, site, (path, module))

    def exchange(self, axis: Axis) -> Exchange:
        """What becomes of one of the axes."""
        return Exchange(axis.dim, self.width.units, self.which, self.removes, axis.start, axis.outer, axis.inner)

    def joining(self, model: nn.Module, site: Site) -> Sequence[New]:
        return ()

    def bound(self, bind: Bind) -> Self:
        return replace(self, width=self.width.bound(bind))

    def in_model(self, model: nn.Module) -> Self:
        """The same bound to the modules of a model, with their paths of today."""
        return replace(self, width=self.width.in_model(model))

    def by_path(self) -> Self:
        """The same known by paths alone, as another model of the same architecture has it."""
        return replace(self, width=self.width.by_path())

    def check(self, point: Point) -> None:
        self.width.check(point)
        in_order = self.which == tuple(sorted(set(self.which)))
        if not self.which or not in_order or not 0 <= self.which[0] <= self.which[-1] < self.width.units:
            raise ValueError(f"{self.which} are not units of a width of {self.width.units}")
        if self.units < 1:
            raise ValueError(f"{self.which} are all units, and one must stay")


@dataclass(frozen=True)
class Recycle(_Dead):
    """New rows and zero columns for dead units."""

    tag: ClassVar[str] = "recycle"
    tolerance: ClassVar[float | None] = None
    removes: ClassVar[bool] = False

    # Units that get the opposite of the rows that are drawn: those would leave them dead. Values are in a state dict, not in JSON.
    _turned: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        return f"new rows for {super().__str__()}"


@dataclass(frozen=True)
class Narrow(_Dead):
    """A width without its dead units."""

    tag: ClassVar[str] = "narrow"
    tolerance: ClassVar[float | None] = TOLERANCE
    removes: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"-{super().__str__()}"


class Exchanging(Edit):
    """Units of a width go, wherever they lie; new ones come in their place or not. The parameters and buffers stay the same objects.

    On the way back what went comes back if that is known, otherwise units that nothing reads.
    """

    def __init__(self, model: nn.Module, site: Site, made: tuple[str, nn.Module] | None = None) -> None:
        if made is None and is_sharded(model):
            raise UnsupportedModel(
                "dead units cannot be recycled or removed in a model sharded by fully_shard: its parameters are parts of tensors whose "
                "shape is fixed. Do it before the model is sharded."
            )
        assert isinstance(site.move, _Dead)
        self._move = move = site.move.in_model(model)
        self.name, self.module = made or site.find(model)
        self.renames, self.beside = {}, {}
        # Other numbers at every change of a model, since those of the last time may have given dead units again; the same on all ranks.
        self._generator = torch.Generator().manual_seed(move.width.units + 1_000_003 * count_growths(model))
        if made is not None:
            self.site, now = site, replace(move.width, units=move.units)
            self.resized = recall(self.module, resizes(model, now, made=True, change=move.exchange))
            return
        self.resized = resizes(model, move.width, change=move.exchange)
        shapes = [(each.new_shape, each.old_shape) for each in self.resized if each.is_parameter]
        done = replace(move, added=sum(math.prod(new) - math.prod(old) for new, old in shapes))
        self.site = replace(site, point=replace(site.point, anchor=Ref.to(self.name, self.module)), move=done)
        self.beside = {each.name: tuple(each.old_shape) for each in self.resized}

    def build(self) -> None:
        self._new = []
        for each in self.resized:
            value = each.tensor.detach()
            self._new.append(like_layout(self._fill(each, value), value))
            each.lost[OWN] = each.taken(value)

    def apply(self) -> None:
        for each, value in zip(self.resized, self._new, strict=True):
            put(each.tensor, value)
        change_sizes(self._move.width, self._move.units - self._move.width.units)
        remember_lost(self.module, self.resized)

    def settled(self) -> None:
        forget(self.module, self.resized)
        remember_lost(self.module, self.resized)

    def revert(self) -> None:
        forget(self.module, self.resized)
        for each in self.resized:
            value, lost = each.tensor.detach(), each.lost.get(OWN)
            old = self._fill_unread(each, value) if lost is None else each.shrunk(value, back=lost)
            put(each.tensor, like_layout(old, value))
        change_sizes(self._move.width, self._move.width.units - self._move.units)

    def _fill(self, resize: Resize, value: Tensor) -> Tensor:
        """A tensor after the exchange."""
        turned = self._move._turned if isinstance(self._move, Recycle) else ()
        for exchange, axis in self._steps(resize):
            new = 0.0 if exchange.removed else _entries(exchange, axis.fill, value, self._generator)
            value = exchange.applied(value, new)
            role = role_of(axis.module.find_module())
            if turned and axis.fill == "row" and role is not None and role.makes:
                opposite = replace(exchange, which=turned)
                value = opposite.applied(value, -opposite.taken(value))
        return value

    def _fill_unread(self, resize: Resize, value: Tensor) -> Tensor:
        """A tensor on the way back if nobody knows what was there: removed units start as new ones do, and nothing reads them."""
        value = resize.shrunk(value) if self._move.removes else value
        for exchange, axis in self._steps(resize):
            if self._move.removes or axis.fill == "column":
                there = replace(exchange, removed=False)
                value = there.applied(value, _entries(there, axis.fill, value, self._generator))
        return value

    def _steps(self, resize: Resize) -> list[tuple[Exchange, Axis]]:
        """The exchanges of a tensor with their axes: rows before columns, which are zero in them too."""
        own = [axis for axis in self._move.width.axes if axis.tensor is resize.tensor]
        axes = {self._move.exchange(axis): axis for axis in own}
        return [(each, axes[each]) for each in resize.stretches if isinstance(each, Exchange)]


def _entries(exchange: Exchange, fill: str, value: Tensor, generator: torch.Generator) -> Tensor | float:
    """What the units of an exchange start with."""
    if fill in ("column", "zero", "one"):
        return float(fill == "one")
    living = replace(exchange, which=exchange.others or exchange.which)
    there = living.taken(value)
    if fill == "mean":
        return float(there.float().mean())
    if value.dim() < 2:  # a bias is that of some unit that is alive
        picked = torch.randint(len(living.which), (len(exchange.which),), generator=generator, device="cpu").tolist()
        return replace(exchange, which=tuple(living.which[index] for index in picked)).taken(value)
    shape = list(value.shape)
    shape[exchange.dim] = exchange.fresh
    # Rows of zeros would never come alive.
    spread = float(to_capable(there).double().std(correction=0)) or (value.numel() / value.shape[exchange.dim]) ** -0.5
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).mul(spread).to(value)


# ---- The kinds of what becomes of dead units. They are not found by a search, which sees an example: data tell which
# units are dead.


class RecycleKind(Kind):
    """New rows for dead units."""

    move: ClassVar[type[Recycle]] = Recycle


class NarrowKind(Kind):
    """Dead units removed."""

    move: ClassVar[type[Narrow]] = Narrow


# ---- Which units of a width are dead: exactly zero wherever they are read, on all data.


class Spotting:
    """Watches the readers of widths, in the mode the model is in. Without dropout, since that would make every unit look dead at times."""

    def __init__(self, model: nn.Module, sites: Sequence[Site]) -> None:
        self._model = model
        self._widths = [site.move for site in sites if isinstance(site.move, Width)]
        # By the number of a width and the place of a reader among its own: whether each unit was ever alive.
        self._alive: dict[tuple[int, int], Tensor] = {}

    def watch(self, given: Any, *, dropout: bool = False) -> None:
        """Run an input through the model. Buffers and random numbers are the caller's to keep.

        With ``dropout`` some units may come to life that are dead without: those are not dead either.
        """
        handles = []
        try:
            for number, width in enumerate(self._widths):
                for place, axis in enumerate(width.filled_with("column")):
                    module = find_part(self._model, axis.module)[1]
                    hook = partial(self._see, (number, place), axis, width.units)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            with torch.no_grad(), run_eagerly(), nullcontext() if dropout else NoDropout():
                run(self._model, to_device(given, device_of(self._model)))
        finally:
            for handle in handles:
                handle.remove()

    def dead(self) -> list[tuple[int, ...]]:
        """The dead units of each width."""
        result: list[tuple[int, ...]] = []
        for number, width in enumerate(self._widths):
            readers = len(width.filled_with("column"))
            masks = [self._alive[number, place] for place in range(readers) if (number, place) in self._alive]
            if not masks or len(masks) < readers:  # what is read unseen may be alive
                result.append(())
            else:
                result.append(tuple(torch.stack(masks).any(0).logical_not().nonzero().flatten().tolist()))
        return result

    def _see(
        self, place: tuple[int, int], axis: Axis, units: int, module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        x, role = first_tensor(args or tuple(kwargs.values())), role_of(module)
        if x is None or role is None:
            return
        entries = x.detach().movedim(role.channel, 0).flatten(1).ne(0).any(1)
        own = entries.narrow(0, axis.start, axis.outer * units * axis.inner)
        alive = own.unflatten(0, (axis.outer, units, axis.inner)).any(2).any(0).cpu()
        self._alive[place] = self._alive.get(place, torch.zeros_like(alive)) | alive
