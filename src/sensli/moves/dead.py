"""Dead units of a width: `Recycle` gives them new rows, `Narrow` removes them.

Nothing comes from a dead unit on the data, so what its readers do with it can be set to zero or taken away without a trace. A recycled
unit starts as a new one does: with random rows, as large as those of the living units, and zero columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedModel, UnsupportedSite
from sensli.modules.copies import NoDropout
from sensli.modules.grown import count_growths
from sensli.modules.running import capable, device_of, first_tensor, put, run, to_device
from sensli.modules.wrappers import eager, is_sharded
from sensli.moves.inserting import forget, recall, remember
from sensli.moves.point import Bind, Point, Ref
from sensli.moves.roles import role_of
from sensli.moves.sites import Cost, Edit, Kind, New, Site
from sensli.moves.stretching import Exchange, Resize, like_layout
from sensli.moves.width.widening import change_sizes, resizes
from sensli.moves.width.width import TOLERANCE, Axis, Width, found
from sensli.text.records import Plain

if TYPE_CHECKING:
    from typing_extensions import Self

_VALUE = "value"  # what a tensor calls its own lost entries


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
        return f"{len(self.which)} dead unit{'' if len(self.which) == 1 else 's'}"

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
        return _Exchanged(model, site, module, path)

    def joining(self, model: nn.Module, site: Site) -> Sequence[New]:
        return ()

    def bound(self, bind: Bind) -> Self:
        return replace(self, width=self.width.bound(bind))

    def on(self, model: nn.Module) -> Self:
        """The same bound to the modules of a model, with their paths of today."""
        return replace(self, width=self.width.on(model))

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
    """Units of a width go, wherever they lie; new ones come in their place or not. The parameters and buffers stay the same objects."""

    def __init__(self, model: nn.Module, site: Site) -> None:
        if is_sharded(model):
            raise UnsupportedModel(
                "dead units cannot be recycled or removed in a model sharded by fully_shard: its parameters are parts of tensors whose "
                "shape is fixed. Do it before the model is sharded."
            )
        move = site.move
        assert isinstance(move, _Dead)
        self._move = move = move.on(model)
        self.name, self.module = site.find(model)
        resizes(model, move.width)  # refuses a model that has changed
        self._parts = _parts(model, move, made=False)
        self.resized = [part.resize for part in self._parts]
        shapes = [(each.new_shape, each.old_shape) for each in self.resized if each.is_parameter]
        done = replace(move, added=sum(math.prod(new) - math.prod(old) for new, old in shapes))
        self.site = replace(site, point=replace(site.point, anchor=Ref.to(self.name, self.module)), move=done)
        self.renames = {}
        self.beside = {each.name: tuple(each.old_shape) for each in self.resized}
        self._generator = _generator(model, move)

    def build(self) -> None:
        self._new = []
        for part in self._parts:
            value = part.resize.tensor.detach()
            turned = self._move._turned if isinstance(self._move, Recycle) else ()
            self._new.append(like_layout(part.filled(value, self._generator, turned), value))
            part.resize.lost[_VALUE] = part.resize.taken(value)

    def apply(self) -> None:
        for each, value in zip(self.resized, self._new, strict=True):
            put(each.tensor, value)
        change_sizes(self._move.width, self._move.units - self._move.width.units)
        remember(self.module, self.resized)


class _Exchanged(Edit):
    """An exchange that was made before. What it took comes back if that is known, otherwise units that nothing reads."""

    def __init__(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> None:
        move = site.move
        assert isinstance(move, _Dead)
        self.name, self.module, self.site = path, module, site
        self._move = move = move.on(model)
        resizes(model, replace(move.width, units=move.units))
        self._parts = _parts(model, move, made=True)
        self.resized = recall(module, [part.resize for part in self._parts])
        self.renames, self.beside = {}, {}
        self._generator = _generator(model, move)

    def settled(self) -> None:
        forget(self.module, self.resized)
        remember(self.module, self.resized)

    def revert(self) -> None:
        forget(self.module, self.resized)
        for part, each in zip(self._parts, self.resized, strict=True):
            value, lost = each.tensor.detach(), each.lost.get(_VALUE)
            old = part.unread(value, self._generator) if lost is None else each.shrunk(value, back=lost)
            put(each.tensor, like_layout(old, value))
        change_sizes(self._move.width, self._move.width.units - self._move.units)


@dataclass(frozen=True, eq=False)
class _Part:
    """One tensor of a width, and what each of its exchanges is filled with."""

    resize: Resize
    fills: tuple[str, ...]
    makes: bool  # whether it is of a layer that makes units, not of one that passes them on

    def filled(self, value: Tensor, generator: torch.Generator, turned: tuple[int, ...]) -> Tensor:
        """The tensor after the exchange. Rows come first: columns are zero in them too."""
        for exchange, fill in self._steps:
            new = 0.0 if exchange.removed else _entries(exchange, fill, value, generator)
            value = exchange.applied(value, new)
            if turned and self.makes and fill == "row":
                opposite = replace(exchange, which=turned)
                value = opposite.applied(value, -opposite.taken(value))
        return value

    def unread(self, value: Tensor, generator: torch.Generator) -> Tensor:
        """The tensor on the way back if nobody knows what was there: removed units start as new ones do, and nothing reads them."""
        removed = any(exchange.removed for exchange, _ in self._steps)
        value = self.resize.shrunk(value) if removed else value
        for exchange, fill in self._steps:
            if removed or fill == "column":
                there = replace(exchange, removed=False)
                value = there.applied(value, _entries(there, fill, value, generator))
        return value

    @property
    def _steps(self) -> list[tuple[Exchange, str]]:
        exchanges = [each for each in self.resize.stretches if isinstance(each, Exchange)]
        return list(zip(exchanges, self.fills, strict=True))


def _parts(model: nn.Module, move: _Dead, *, made: bool) -> list[_Part]:
    """The parameters and buffers that change, each once, with all their axes that do. ``made``: they have changed already."""
    by_tensor: dict[int, tuple[str, Tensor, dict[Exchange, str], bool]] = {}
    for axis in move.width.axes:
        path, module = found(model, axis.module)
        tensor: Tensor = getattr(module, axis.name)
        role = role_of(module)
        makes = role is not None and bool(role.makes)
        _, _, exchanges, _ = by_tensor.setdefault(id(tensor), (f"{path}.{axis.name}", tensor, {}, makes))
        exchanges[_exchange(move, axis)] = axis.fill
    parts = []
    for name, tensor, exchanges, makes in by_tensor.values():
        # Rows before columns, and each from the end of its axis: what comes before keeps its position.
        ordered = sorted(exchanges, key=lambda each: (exchanges[each] == "column", each.dim, -each.start))
        old = list(tensor.shape)
        for exchange in ordered if made else ():
            old[exchange.dim] -= exchange.change
        resize, fills = Resize(name, tensor, tuple(ordered), tuple(old)), tuple(exchanges[each] for each in ordered)
        parts.append(_Part(resize, fills, makes))
    return parts


def _exchange(move: _Dead, axis: Axis) -> Exchange:
    return Exchange(axis.dim, move.width.units, move.which, move.removes, axis.start, axis.outer, axis.inner)


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
    spread = float(capable(there).double().std(correction=0)) or (value.numel() / value.shape[exchange.dim]) ** -0.5
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).mul(spread).to(value)


def _generator(model: nn.Module, move: _Dead) -> torch.Generator:
    """Other numbers at every change of a model, since those of the last time may have given dead units again; the same on all ranks."""
    return torch.Generator().manual_seed(move.width.units + 1_000_003 * count_growths(model))


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
        # By width, and by its readers in their order: whether each unit was ever alive; None for a reader that was never called.
        self._alive: list[list[Tensor | None]] = [[None] * len(_readers(width)) for width in self._widths]

    def watch(self, given: Any, *, dropout: bool = False) -> None:
        """Run an input through the model. Buffers and random numbers are the caller's to keep.

        With ``dropout`` some units may come to life that are dead without: those are not dead either.
        """
        handles = []
        try:
            for number, width in enumerate(self._widths):
                for place, axis in enumerate(_readers(width)):
                    module = found(self._model, axis.module)[1]
                    hook = self._hook(number, place, axis, width.units)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            with torch.no_grad(), eager(), nullcontext() if dropout else NoDropout():
                run(self._model, to_device(given, device_of(self._model)))
        finally:
            for handle in handles:
                handle.remove()

    def dead(self) -> list[tuple[int, ...]]:
        """The dead units of each width."""
        result: list[tuple[int, ...]] = []
        for seen in self._alive:
            masks = [mask for mask in seen if mask is not None]
            if not masks or len(masks) < len(seen):  # what is read unseen may be alive
                result.append(())
            else:
                result.append(tuple(torch.stack(masks).any(0).logical_not().nonzero().flatten().tolist()))
        return result

    def _hook(self, number: int, place: int, axis: Axis, units: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x, role = first_tensor(args) if args else first_tensor(tuple(kwargs.values())), role_of(module)
            if x is None or role is None:
                return
            entries = x.detach().movedim(role.channel, 0).flatten(1).ne(0).any(1)
            own = entries.narrow(0, axis.start, axis.outer * units * axis.inner)
            alive = own.unflatten(0, (axis.outer, units, axis.inner)).any(2).any(0).cpu()
            known = self._alive[number][place]
            self._alive[number][place] = alive if known is None else known | alive

        return hook


def _readers(width: Width) -> list[Axis]:
    return [axis for axis in width.axes if axis.fill == "column"]
