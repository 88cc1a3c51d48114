"""A point: where in the data flow something could change, in a list of blocks too, and how the value that passes it is caught."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sensli.errors import MeasurementError, unknown_choice
from sensli.modules.engines.all_or_nothing import about_to_change
from sensli.modules.grown import Chain
from sensli.modules.running import Slot, first_tensor, value_at, with_first, with_value
from sensli.text.records import Plain

# ---- Insertion into a list of blocks: the blocks after it are renumbered, and what counts or numbers the blocks stays
# true.
#
# A list is an nn.ModuleList, or an nn.ModuleDict with the keys "0", "1" and so on, or from another number on.
#
# Which attributes those are is found by trial in `counting`; here they are plain data, so that `undo` and `replay`
# need no trial.


def attribute(holder: Any, names: Iterable[str], *otherwise: object) -> Any:
    """The attribute that several names lead to, one after the other; ``otherwise``: what stands for one that is not there."""
    for name in names:
        holder = getattr(holder, name, *otherwise)
    return holder


@dataclass(frozen=True)
class Fact(Plain):
    """An attribute that follows the number of blocks: of a module, or of an object that a module holds, such as a configuration."""

    module: str  # path of the module; "blocks.*.attention" is one in every block of a list
    through: tuple[str, ...]  # attributes from the module to the object that has it; empty if the module itself does
    name: str
    kind: str  # "count": a number of blocks; "list": one entry per block; "item": one entry of it counts these blocks
    item: int = 0

    def holders(self, model: nn.Module) -> list[Any]:
        """The objects that have the attribute, each once."""
        path, every, inner = self.module.partition(".*")
        if not every:
            return [attribute(model.get_submodule(path), self.through, None)]
        parts = (_submodule(block, inner.removeprefix(".")) for block in model.get_submodule(path).children())
        found = (attribute(part, self.through, None) for part in parts if part is not None)
        return list({id(holder): holder for holder in found if hasattr(holder, self.name)}.values())

    def follow(self, holder: Any, position: int, source: int | None) -> None:
        """One block more at a position, alike the block that stood at ``source``; None: it goes again."""
        value, more = getattr(holder, self.name), -1 if source is None else 1
        about_to_change(holder, self.name)
        if self.kind == "count":
            setattr(holder, self.name, value + more)
            return
        entries = list(value)
        if self.kind == "item":
            entries[self.item] += more
        elif source is None:
            del entries[position]
        else:
            entries.insert(position, entries[source])
        setattr(holder, self.name, type(value)(entries))


@dataclass(frozen=True)
class Index(Plain):
    """An attribute inside the blocks that is the block's position in the list, plus an offset."""

    module: str  # path within the block
    name: str
    offset: int = 0


@dataclass(frozen=True)
class ListPlace(Plain):
    """What has to follow when a list takes a block."""

    _needed = None

    facts: tuple[Fact, ...] = ()
    indices: tuple[Index, ...] = ()

    def moved(self, before: str, now: str) -> ListPlace:
        """The same after the list has another path: a list around it may have taken a block since."""
        old, new = before.split("."), now.split(".")
        if old == new or len(old) != len(new):
            return self

        def path_of(fact: Fact) -> str:
            parts = fact.module.split(".")
            pairs = list(zip(parts, old, strict=False))
            shared = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
            return ".".join([*new[:shared], *parts[shared:]])

        return replace(self, facts=tuple(replace(fact, module=path_of(fact)) for fact in self.facts))


def put_into_list(
    model: nn.Module, container: str, place: ListPlace, position: int, source: int, layer: nn.Module
) -> None:
    """Put a layer that is alike the block at ``source`` at a position; all later blocks move up by one."""
    blocks = list(model.get_submodule(container).children())
    blocks.insert(position, layer)
    _fill(model.get_submodule(container), blocks)
    for fact in place.facts:
        for holder in fact.holders(model):
            fact.follow(holder, position, source)
    _number(blocks, place.indices)


def take_from_list(model: nn.Module, container: str, place: ListPlace, position: int) -> None:
    """The inverse of `put_into_list`."""
    for fact in place.facts:
        for holder in fact.holders(model):
            fact.follow(holder, position, None)
    blocks = list(model.get_submodule(container).children())
    del blocks[position]
    _fill(model.get_submodule(container), blocks)
    _number(blocks, place.indices)


def number_after(number: int, positions: Iterable[int]) -> int:
    """The number of a block after others have come at these positions of its list, one after the other."""
    for position in positions:
        number += number >= position
    return number


def list_renames(model: nn.Module, container: str, *positions: int) -> dict[str, str]:
    """Names that change when a list takes blocks at these positions, one after the other: those of all blocks from there on."""
    prefix = f"{container}." if container else ""
    renames: dict[str, str] = {}
    for key, block in model.get_submodule(container).named_children():
        number = number_after(int(key), positions)
        if number != int(key):
            names = [name for name, _ in (*block.named_parameters(), *block.named_buffers())]
            renames.update({f"{prefix}{key}.{name}": f"{prefix}{number}.{name}" for name in names})
    return renames


def first_number(container: nn.Module) -> int:
    """The number that the first block of a list has as its key: 0, or another one in a dict."""
    return int(next(iter(container._modules)))


def _fill(container: nn.Module, blocks: list[nn.Module]) -> None:
    first = first_number(container)
    # In place: the container's dictionary may be held elsewhere.
    container._modules.clear()
    container._modules.update({str(number): block for number, block in enumerate(blocks, first)})


def _number(blocks: list[nn.Module], indices: tuple[Index, ...]) -> None:
    for index in indices:
        for position, block in enumerate(blocks):
            module = _submodule(block, index.module)
            if module is not None and index.name in vars(module):
                setattr(module, index.name, position + index.offset)


def unwrap_block(block: nn.Module) -> nn.Module:
    """The block itself, where its list holds a chain around it."""
    while isinstance(block, Chain):
        block = block.get_submodule("anchor")
    return block


def _submodule(block: nn.Module, path: str) -> nn.Module | None:
    try:
        return unwrap_block(block).get_submodule(path)
    except AttributeError:
        return None


@contextmanager
def grown_list(
    model: nn.Module, container: str, place: ListPlace, position: int, source: int, layer: nn.Module
) -> Iterator[None]:
    """The model with the layer in its list, until the end."""
    put_into_list(model, container, place, position, source, layer)
    try:
        yield
    finally:
        take_from_list(model, container, place, position)


SIDES = ("after", "before")


@dataclass(frozen=True)
class Ref(Plain):
    """A module of a model by its path, and by the module itself, so that it is found again after others were inserted."""

    _alone = "path"

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
class Point(Plain):
    """Where in the data flow: "after" or "before" a module."""

    _needed = None

    anchor: Ref = field(metadata={"key": "path"})  # the module that names the point
    side: str  # "after" or "before"
    shape: tuple[int, ...]  # the shape of the activation there, for one sample of the example
    neighbours: tuple[Ref, ...] = ()  # the nearest modules with parameters; new parameters join their optimizer groups
    # whether the container is an `nn.Sequential` that is called as a whole, so that a layer goes into it
    chained: bool = False
    # whether a later operation overwrites the activation in place, so that a measurement must copy it
    overwritten: bool = False
    slot: Slot = 0  # which argument of the anchor the value is, for a point before it and for twins
    first_part: bool = False  # whether the value is the first element of a tuple that the anchor returns
    # where in a list of blocks (`nn.ModuleList`, or a numbered dict) a layer goes, and what must follow
    place: ListPlace | None = None
    makes: tuple[int, ...] = ()  # how many units each neighbour made when the point was found, 0 if that is not known

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

    def in_model(self, model: nn.Module) -> Point:
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

    def _verify(self) -> None:
        if self.side not in SIDES:
            raise ValueError(unknown_choice("side", self.side, SIDES))


# ---- Where a value is caught as it passes a point: what the module gave or will be given is handed on as a separate view.
#
# Only what goes through that view counts. The same tensor may be read elsewhere too (an in-place activation returns
# its input, a skip connection reads it again), and what is sent back from there would not come to a layer at the
# point.

# From a value and the arguments of the module's call to the tensor that is handed on in its place.
Watch = Callable[[Tensor, tuple[Any, ...], dict[str, Any]], Tensor]


def tap(point: Point, module: nn.Module, watch: Watch, *, raw: bool = False) -> Any:
    """Catch the value of a point at its module in every pass with gradients; returns the handle that ends it.

    ``raw``: what the module itself gives, before hooks of the user change it; a layer after it would come after them.
    """
    if point.side == "after":
        return module.register_forward_hook(_after(point, watch), prepend=raw, with_kwargs=True)
    # before the user's own hooks, as the layer would be
    return module.register_forward_pre_hook(_before(point, watch), prepend=True, with_kwargs=True)


def handed_on(value: Tensor, point: Point) -> tuple[Tensor, Tensor]:
    """The value, asking for a gradient, and what is handed on instead of it: a view, or a copy where somebody will work in place on it.

    In place a view would be written through, and lose its gradient; a layer's output would not be, so a copy is what a layer would give.
    """
    asking = value if value.requires_grad else value.detach().requires_grad_()
    return asking, asking.clone() if point.overwritten else asking.view_as(asking)


def is_transformed(value: Tensor | None = None) -> bool:
    """Whether a pass runs inside of torch.func (grad, vmap, jvp), or a value carries a derivative of forward mode.

    Hooks on tensors see nothing of what such a derivative does to a loss.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return value is not None and forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None


def is_transformed_from(model: nn.Module) -> bool:
    """Whether such a pass takes the model's parameters: it does not where `functional_call` gives it values without a gradient."""
    return any(isinstance(each, nn.Parameter) or _inner(each).requires_grad for each in model.parameters())


def _inner(value: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def _after(point: Point, watch: Watch) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        value = first_tensor(output)
        if value is None or isinstance(output, Tensor) == point.first_part:
            raise MeasurementError(
                f"'{point.path}' returned {type(output).__name__} instead of the tensor that find_sites saw, so its merit "
                "cannot be measured. Find the sites with an example like the training data."
            )
        return with_first(output, watch(value, args, kwargs))

    return hook


def _before(point: Point, watch: Watch) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        value = value_at(args, kwargs, point.slot)
        if not isinstance(value, Tensor):
            raise MeasurementError(
                f"'{point.path}' was not called with a tensor as its {_argument_name(point)}, as find_sites saw it, so its merit "
                "cannot be measured. Find the sites with an example like the training data."
            )
        return with_value(args, kwargs, point.slot, watch(value, args, kwargs))

    return hook


def _argument_name(point: Point) -> str:
    if isinstance(point.slot, str):
        return f"argument {point.slot!r}"
    return f"argument {point.slot + 1}" if point.slot else "first argument"
