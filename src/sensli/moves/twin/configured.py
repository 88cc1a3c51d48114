"""Models that are built from a configuration: rebuilt from a changed one, they tell what a list with one more block must look like."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import nn

from sensli.modules.failing import note
from sensli.moves.lists import Fact, Index, ListPlace, grown_list
from sensli.moves.twin.around import ancestors, counts, held_objects, is_object
from sensli.moves.twin.known import Known
from sensli.moves.twin.numbering import is_number
from sensli.moves.twin.rebuilding import COUNTS, build_again, differences, grown_alike, is_large, shapes


def configured(model: nn.Module, container: str) -> Iterator[tuple[str, str]]:
    """Modules around the list that hold an object with the number of its blocks, the outermost first: the path, the object's name."""
    count = len(list(model.get_submodule(container).children()))
    for path, module in ancestors(model, container):
        for name, value in vars(module).items():
            held = [value, *(part for part in vars(value).values() if is_object(part))] if is_object(value) else []
            if any(True for holder in held for _ in counts(Fact(path, (name,), "", "count"), holder, count)):
                yield path, name


def _within(owner: str, path: str) -> str:
    """A path as seen from a module that contains it."""
    return path[len(owner) + 1 :] if owner else path


class Rebuilt:
    """A module around the list that its class may build again from its configuration, to be compared with what the list becomes."""

    def __init__(self, trial: nn.Module, owner: str, name: str, container: str, indices: tuple[Index, ...]) -> None:
        self._trial, self._owner, self._name, self._container = trial, owner, name, container
        self._module = trial.get_submodule(owner)
        self._configuration = getattr(self._module, name)
        self._place = ListPlace((), indices)
        self._count = len(list(trial.get_submodule(container).children()))
        self._with_values = not is_large(self._module)
        self._built: dict[object, nn.Module | None] = {}  # by what was changed in the configuration

    @cached_property
    def _as_it_is(self) -> nn.Module | None:
        return build_again(self._module, self._configuration)

    @property
    def is_faithful(self) -> bool:
        """Whether the class builds the list as it is.

        What is built may differ where somebody has put other modules in (adapters, another head), but for the number of blocks.
        """
        return self._as_it_is is not None and self._blocks_in(self._as_it_is) == self._count

    @cached_property
    def _quiet(self) -> set[tuple[str, str]]:
        """Differences that are there anyway."""
        if self._as_it_is is None:
            return set()
        with grown_alike(self._as_it_is, self._module):
            return differences(self._module, self._as_it_is)

    def matches(self, facts: Iterable[Fact], position: int, source: int, layer: nn.Module) -> nn.Module | None:
        """What the class builds from the configuration with these changes, if it is what the list has become."""
        changed = copy.deepcopy(self._configuration)
        values: list[object] = []
        for fact in facts:
            if fact.module == self._owner and fact.through[:1] == (self._name,):
                holder = changed
                for step in fact.through[1:]:
                    holder = getattr(holder, step)
                fact.inserted(holder, position, source)
                values.append((fact, repr(getattr(holder, fact.name))))
        built = self._build(tuple(values), changed)
        if built is None or self._blocks_in(built) != self._count + 1:
            return None
        with (
            grown_list(self._trial, self._container, self._place, position, source, layer),
            grown_alike(built, self._module),
        ):
            found = differences(self._module, built)
        # Without any, those that are there anyway need not be known.
        return built if not found or found <= self._quiet else None

    def _build(self, key: object, configuration: Any) -> nn.Module | None:
        if key not in self._built:
            built = build_again(self._module, configuration, values=True) if self._with_values else None
            self._built[key] = built if built is not None else build_again(self._module, configuration)
        return self._built[key]

    def _blocks_in(self, module: nn.Module) -> int:
        try:
            return len(list(module.get_submodule(_within(self._owner, self._container)).children()))
        except AttributeError:
            return 0

    def runs_alike(self, built: nn.Module, known: Known) -> bool | None:
        """Whether what was built, loaded with the weights of the grown list, gives the same output: what saving relies on.

        None where that cannot be told: another copy might not fit, or the module holds others that the configuration knows nothing of, so
        that nobody can load it from there.
        """
        module = self._module
        if not self._with_values:
            return None
        parent, _, key = self._owner.rpartition(".")
        like = next(module.parameters())
        with grown_alike(built, module):
            if shapes(built) != shapes(module):
                return None
            try:
                _cast_alike(built, module, like.device)
                built.load_state_dict(module.state_dict(), assign=True)
                built.eval()
                if self._owner:
                    self._trial.get_submodule(parent)._modules[key] = built
                return known.is_given_by(self._trial if self._owner else built)
            except Exception as error:
                note(error)
                return False
            finally:
                if self._owner:
                    self._trial.get_submodule(parent)._modules[key] = module

    def plans(self, position: int, source: int, layer: nn.Module) -> Iterator[tuple[tuple[Fact, ...], nn.Module]]:
        """Changes of the configuration from which the class builds what the list becomes, the simplest that do; and what it builds."""

        def matches(facts: Iterable[Fact]) -> nn.Module | None:
            return self.matches(facts, position, source, layer)

        objects = held_objects(self._trial, self._owner, self._module)
        holders = [(through, holder) for _, through, holder in objects if through[0] == self._name]
        for through, holder in holders:
            counted_by = counts(Fact(self._owner, through, "", "count"), holder, self._count)
            for counted in sorted(counted_by, key=lambda fact: fact.name not in COUNTS):
                lists = [f for f in _per_block(self._owner, through, holder, self._count) if f.name != counted.name]
                facts: list[Fact] = [counted, *lists]
                built = matches(facts)
                if built is None and lists:
                    facts = [counted]
                    built = matches(facts)
                if built is None:
                    continue
                # A list that is as long by chance should stay as it is. One that is named after the blocks is not: a cache may read it.
                needed = [
                    fact
                    for fact in facts
                    if fact is counted
                    or any(word in fact.name for word in ("layer", "block"))
                    or matches([other for other in facts if other is not fact]) is None
                ]
                fewer = matches(needed) if len(needed) < len(facts) else None
                for guess, found in ((needed, fewer), (facts, built)):
                    if found is not None:
                        known = {id(holder) for _, holder in holders}
                        copies = _copies(self._trial, self._owner, self._module, found, self._container, known)
                        yield (*guess, *copies), found


def _cast_alike(built: nn.Module, like: nn.Module, device: torch.device) -> None:
    """Buffers that are not saved as the other module has them: a table of frequencies may be more precise than the weights."""
    built.to(device)
    kept = dict(like.named_buffers())
    for path, part in built.named_modules():
        for name, buffer in part._buffers.items():
            other = kept.get(f"{path}.{name}" if path else name)
            if buffer is not None and other is not None:
                part._buffers[name] = buffer.to(other.dtype)


def _per_block(owner: str, through: tuple[str, ...], holder: Any, count: int) -> Iterator[Fact]:
    for name, value in vars(holder).items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            yield Fact(owner, through, name, "list")


def _copies(
    trial: nn.Module, owner: str, module: nn.Module, built: nn.Module, container: str, known: set[int]
) -> Iterator[Fact]:
    """Further configuration objects and counts inside the model, as the newly built one has them; each once, if all blocks have it."""
    there = dict(built.named_modules())
    said: set[Fact] = set()
    for path, part in module.named_modules():
        full = f"{owner}.{path}" if owner and path else owner or path
        if path not in there:
            continue
        if full.startswith(f"{container}."):
            inner = _within(container, full).partition(".")[2]
            full = f"{container}.*.{inner}" if inner else f"{container}.*"
        own = [((), part), *((through, holder) for _, through, holder in held_objects(trial, path, part))]
        for through, holder in own:
            if id(holder) in known:
                continue
            known.add(id(holder))
            other: Any = there[path]
            for step in through:
                other = getattr(other, step, None)
            for name, value in vars(holder).items():
                target = getattr(other, name, None)
                if is_number(value) and is_number(target) and target == value + 1 and (through or name in COUNTS):
                    said.add(Fact(full, tuple(through), name, "count"))
                elif through and _is_list(value) and _is_list(target) and len(target) == len(value) + 1:
                    said.add(Fact(full, tuple(through), name, "list"))
    yield from sorted(said, key=str)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))
