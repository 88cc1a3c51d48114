"""What counts and numbers the blocks of a list, found by trial on a copy, so that an insertion can make it true.

A model that is built from a configuration object is the strictest judge: rebuilt from the changed configuration it must have exactly
the parameters, and inside its modules the numbers and names, of the model that has grown. Other lists are judged by a run of the example:
the new block is called once and the output stays.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sensli.modules.chain import Chain
from sensli.modules.nearness import moved
from sensli.modules.running import device_of, forked_random_state, run, tensors, to_device
from sensli.modules.samples import count_samples, first_samples
from sensli.moves.lists import Fact, Index, ListPlace, put_into_list, take_from_list, unwrapped
from sensli.moves.trace.flow import Flow
from sensli.moves.twin.numbering import find_indices, is_number, own_numbers
from sensli.moves.twin.rebuilding import COUNTS, build_again, differences, grown_alike, is_large, shapes
from sensli.moves.twin.twins import Twin


def plan_list(flow: Flow, example: Any, container: str, sources: tuple[int, int], twin: Twin) -> ListPlace | None:
    """What must follow when the list takes a twin beside a block; None where no trial confirms any plan.

    ``sources`` are the first and the last of the equal blocks that a twin may go beside. What holds at both holds between them: unless the
    configuration lists the blocks one by one, a block more at either end can give the same list only if all between are equal.
    The copy that the example ran through takes the twin, and is put back.
    """
    trial = flow.model
    blocks = list(trial.get_submodule(container).children())
    source, last = sources
    position = source + 1
    indices = find_indices(blocks)
    if not {*own_numbers(blocks)[source]} <= {(index.module, index.name) for index in indices}:
        return None  # nothing tells which number a twin should have
    layer = twin.build(unwrapped(blocks[source]), trial)
    # Never chained: somebody's eval() returns None.
    layer.eval()
    identity = bool(twin.zeroed)
    known = _Known(example, trial, flow.output if identity else _beside(flow, container, source, layer, example))

    def holds(place: ListPlace) -> bool:
        """Whether the grown copy runs the new block once and gives the same output; the copy is put back."""
        with _grown(trial, container, place, position, source, layer):
            return known.is_given_by(trial, layer)

    for owner, name in _configured(trial, container):
        remade = _Rebuilt(trial, owner, name, container, indices)
        for facts, built in remade.plans(position, source, layer):
            place = ListPlace(facts, indices)
            if remade.matches(facts, last + 1, last, layer):
                with _grown(trial, container, place, position, source, layer):
                    alike = remade.runs_alike(built, known)
                if alike if alike is not None else holds(place):
                    return place
        if remade.is_faithful:
            return None
    named = tuple(fact for fact in _numbers(trial, container, len(blocks)) if fact.name in COUNTS)
    for guess in (named, *((*named, fact) for fact in _numbers(trial, container, len(blocks)) if fact not in named)):
        if holds(ListPlace(guess, indices)):
            return ListPlace(guess, indices)
    return None


@contextmanager
def _grown(
    trial: nn.Module, container: str, place: ListPlace, position: int, source: int, layer: nn.Module
) -> Iterator[None]:
    """The copy with the layer in its list."""
    put_into_list(trial, container, place, position, source, layer)
    try:
        yield
    finally:
        take_from_list(trial, container, place, position)


def _beside(flow: Flow, container: str, source: int, layer: nn.Module, example: Any) -> Any:
    """What the copy gives if a block that is not an identity runs directly after the one at ``source``; None if that fails."""
    trial = flow.model
    blocks, key = trial.get_submodule(container), str(source)
    anchor = blocks.get_submodule(key)
    calls = flow.calls_of(f"{container}.{key}" if container else key)
    if len(calls) != 1 or calls[0].slot is None:
        return None
    chain = Chain(anchor, calls[0].slot)
    chain.add_module("grown1", layer)
    chain.takes_call.add("grown1")
    chain.eval()
    blocks._modules[key] = chain
    try:
        with forked_random_state(trial), torch.no_grad():
            return run(trial, copy.deepcopy(to_device(example, device_of(trial))))
    except Exception:
        return None
    finally:
        blocks._modules[key] = anchor


class _Known:
    """The example, and the outputs that a list with one more block should give on it."""

    def __init__(self, example: Any, trial: nn.Module, output: Any) -> None:
        self._example = to_device(example, device_of(trial))
        self._count = count_samples(self._example)
        self._outputs = [t.detach() for t in _comparable(output)]

    def is_given_by(self, model: nn.Module, watched: nn.Module | None = None) -> bool:
        """Whether a model gives these outputs too and calls the watched module once; one sample that shows it is enough."""
        if not self._outputs:
            return False
        return (self._count > 1 and self._is_given(model, watched, 1)) or self._is_given(model, watched, self._count)

    def _is_given(self, model: nn.Module, watched: nn.Module | None, few: int) -> bool:
        calls: list[None] = []
        handle = watched.register_forward_pre_hook(lambda *_: calls.append(None)) if watched is not None else None
        try:
            with forked_random_state(model), torch.no_grad():
                given = copy.deepcopy(first_samples(self._example, few, self._count))
                after = list(_comparable(run(model, given)))
        except Exception:
            return False
        finally:
            if handle is not None:
                handle.remove()
        before = first_samples(self._outputs, few, self._count)
        same = [one.shape == other.shape and not moved(one, other) for one, other in zip(before, after, strict=False)]
        return len(after) == len(before) and all(same) and (watched is None or len(calls) == 1)


def _comparable(output: Any) -> Iterator[Tensor]:
    """The parts of an output that do not grow with the number of blocks: a record without its lists of all blocks' states."""
    if isinstance(output, dict):
        output = [value for value in output.values() if isinstance(value, Tensor)]
    return (tensor for tensor in tensors(output) if tensor.dim() > 0)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


# --- numbers around the blocks ---


def _objects(model: nn.Module, path: str, module: nn.Module) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Configuration-like objects that a module holds, and those that they hold."""
    for name, value in vars(module).items():
        if _is_object(value):
            yield path, (name,), value
            for inner, part in vars(value).items():
                if _is_object(part):
                    yield path, (name, inner), part


def _is_object(value: Any) -> bool:
    skipped = (nn.Module, Tensor, type, dict, list, tuple, set, torch.device, torch.dtype, torch.Generator)
    return hasattr(value, "__dict__") and not isinstance(value, skipped) and not callable(value)


def _ancestors(model: nn.Module, container: str) -> Iterator[tuple[str, nn.Module]]:
    parts = container.split(".")
    for length in range(len(parts)):
        path = ".".join(parts[:length])
        yield path, model.get_submodule(path)


def _numbers(model: nn.Module, container: str, count: int) -> list[Fact]:
    """Numbers around a list that equal its length: of the modules that contain it, and of objects that they hold."""
    found: list[Fact] = []
    seen: set[int] = set()
    for path, module in _ancestors(model, container):
        for where, through, holder in [(path, (), module), *_objects(model, path, module)]:
            if id(holder) not in seen:
                seen.add(id(holder))
                found += _counting(Fact(where, through, "", "count"), holder, count)
    return found


def _counting(like: Fact, holder: Any, count: int) -> Iterator[Fact]:
    for name, value in vars(holder).items():
        if is_number(value) and value == count:
            yield replace(like, name=name, kind="count")
        elif isinstance(value, (list, tuple)):
            for item, entry in enumerate(value):
                if is_number(entry) and entry == count:
                    yield replace(like, name=name, kind="item", item=item)


# --- models that are built from a configuration ---


def _configured(model: nn.Module, container: str) -> Iterator[tuple[str, str]]:
    """Modules around the list that hold an object with the number of its blocks, the outermost first: the path, the object's name."""
    count = len(list(model.get_submodule(container).children()))
    for path, module in _ancestors(model, container):
        for name, value in vars(module).items():
            held = [value, *(part for part in vars(value).values() if _is_object(part))] if _is_object(value) else []
            if any(True for holder in held for _ in _counting(Fact(path, (name,), "", "count"), holder, count)):
                yield path, name


def _within(owner: str, path: str) -> str:
    """A path as seen from a module that contains it."""
    return path[len(owner) + 1 :] if owner else path


def _blocks_in(module: nn.Module, path: str) -> int:
    try:
        return len(list(module.get_submodule(path).children()))
    except AttributeError:
        return 0


class _Rebuilt:
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
            _grown(self._trial, self._container, self._place, position, source, layer),
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

    def runs_alike(self, built: nn.Module, known: _Known) -> bool | None:
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
                built.to(
                    like.device, like.dtype
                )  # before the weights, or those of double precision would lose some of it
                built.load_state_dict(module.state_dict(), assign=True)
                built.eval()
                if self._owner:
                    self._trial.get_submodule(parent)._modules[key] = built
                return known.is_given_by(self._trial if self._owner else built)
            except Exception:
                return False
            finally:
                if self._owner:
                    self._trial.get_submodule(parent)._modules[key] = module

    def plans(self, position: int, source: int, layer: nn.Module) -> Iterator[tuple[tuple[Fact, ...], nn.Module]]:
        """Changes of the configuration from which the class builds what the list becomes, the simplest that do; and what it builds."""

        def matches(facts: Iterable[Fact]) -> nn.Module | None:
            return self.matches(facts, position, source, layer)

        objects = _objects(self._trial, self._owner, self._module)
        holders = [(through, holder) for _, through, holder in objects if through[0] == self._name]
        for through, holder in holders:
            counts = _counting(Fact(self._owner, through, "", "count"), holder, self._count)
            for counted in sorted(counts, key=lambda fact: fact.name not in COUNTS):
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
        own = [((), part), *((through, holder) for _, through, holder in _objects(trial, path, part))]
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
