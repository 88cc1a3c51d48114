"""Insertion into a list of blocks: the blocks after it are renumbered, and what counts or numbers the blocks stays true.

A list is an nn.ModuleList, or an nn.ModuleDict with the keys "0", "1" and so on.

Which attributes those are is found by trial in `counting`; here they are plain data, so that `undo` and `replay` need no trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from sensli.modules.chain import Chain
from sensli.modules.engines.all_or_nothing import about_to_change


@dataclass(frozen=True)
class Fact:
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
            return [self._through(model.get_submodule(path))]
        parts = (_submodule(block, inner.removeprefix(".")) for block in model.get_submodule(path).children())
        found = (self._through(part) for part in parts if part is not None)
        return list({id(holder): holder for holder in found if hasattr(holder, self.name)}.values())

    def _through(self, module: nn.Module) -> Any:
        found: Any = module
        for name in self.through:
            found = getattr(found, name, None)
        return found

    def inserted(self, holder: Any, position: int, source: int) -> None:
        """One block more, at a position, alike the block that stood at ``source``."""
        value = getattr(holder, self.name)
        about_to_change(holder, self.name)
        if self.kind == "count":
            setattr(holder, self.name, value + 1)
            return
        entries = list(value)
        if self.kind == "list":
            entries.insert(position, entries[source])
        else:
            entries[self.item] += 1
        setattr(holder, self.name, type(value)(entries))

    def removed(self, holder: Any, position: int) -> None:
        """The inverse of `inserted`."""
        value = getattr(holder, self.name)
        about_to_change(holder, self.name)
        if self.kind == "count":
            setattr(holder, self.name, value - 1)
            return
        entries = list(value)
        if self.kind == "list":
            del entries[position]
        else:
            entries[self.item] -= 1
        setattr(holder, self.name, type(value)(entries))


@dataclass(frozen=True)
class Index:
    """An attribute inside the blocks that is the block's position in the list, plus an offset."""

    module: str  # path within the block
    name: str
    offset: int = 0


@dataclass(frozen=True)
class ListPlace:
    """What has to follow when a list takes a block."""

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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ListPlace:
        """The inverse of `to_dict`."""
        facts = tuple(Fact(**{**fact, "through": tuple(fact["through"])}) for fact in data["facts"])
        return cls(facts, tuple(Index(**index) for index in data["indices"]))


def put_into_list(
    model: nn.Module, container: str, place: ListPlace, position: int, source: int, layer: nn.Module
) -> None:
    """Put a layer that is alike the block at ``source`` at a position; all later blocks move up by one."""
    blocks = list(model.get_submodule(container).children())
    blocks.insert(position, layer)
    _fill(model.get_submodule(container), blocks)
    for fact in place.facts:
        for holder in fact.holders(model):
            fact.inserted(holder, position, source)
    _number(blocks, place.indices)


def take_from_list(model: nn.Module, container: str, place: ListPlace, position: int) -> None:
    """The inverse of `put_into_list`."""
    for fact in place.facts:
        for holder in fact.holders(model):
            fact.removed(holder, position)
    blocks = list(model.get_submodule(container).children())
    del blocks[position]
    _fill(model.get_submodule(container), blocks)
    _number(blocks, place.indices)


def list_renames(model: nn.Module, container: str, position: int, more: int = 1) -> dict[str, str]:
    """Names that change when a list takes a block, or several, at a position: those of all blocks from there on."""
    prefix = f"{container}." if container else ""
    renames: dict[str, str] = {}
    for key, block in model.get_submodule(container).named_children():
        if int(key) >= position:
            names = [name for name, _ in (*block.named_parameters(), *block.named_buffers())]
            renames.update({f"{prefix}{key}.{name}": f"{prefix}{int(key) + more}.{name}" for name in names})
    return renames


def _fill(container: nn.Module, blocks: list[nn.Module]) -> None:
    # In place: the container's dictionary may be held elsewhere.
    container._modules.clear()
    container._modules.update({str(number): block for number, block in enumerate(blocks)})


def _number(blocks: list[nn.Module], indices: tuple[Index, ...]) -> None:
    for index in indices:
        for position, block in enumerate(blocks):
            module = _submodule(block, index.module)
            if module is not None and index.name in vars(module):
                setattr(module, index.name, position + index.offset)


def unwrapped(block: nn.Module) -> nn.Module:
    """The block itself, where its list holds a chain around it."""
    while isinstance(block, Chain):
        block = block.get_submodule("anchor")
    return block


def _submodule(block: nn.Module, path: str) -> nn.Module | None:
    try:
        return unwrapped(block).get_submodule(path)
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
