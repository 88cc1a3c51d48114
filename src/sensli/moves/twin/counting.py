"""What counts and numbers the blocks of a list, found by trial on a copy, so that an insertion can make it true.

A model that is built from a configuration object is the strictest judge: built anew from the changed configuration it must have exactly
the parameters, and inside its modules the numbers and names, of the model that has grown. Other lists are judged by a run of the example:
the new block is called once and the output stays.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sensli.modules.copies import copied_model
from sensli.modules.running import device_of, forked_random_state, run, tensors, to_device
from sensli.moves.lists import Fact, Index, ListPlace, put_into_list, take_from_list, unwrapped
from sensli.moves.twin.numbering import find_indices, is_number, own_numbers
from sensli.moves.twin.rebuilding import COUNTS, build_again, differences, is_large, shapes
from sensli.moves.twin.twins import Twin


def plan_list(model: nn.Module, example: Any, container: str, sources: tuple[int, int], twin: Twin) -> ListPlace | None:
    """What must follow when the list takes a twin beside a block; None where no trial confirms any plan.

    ``sources`` are the first and the last of the equal blocks that a twin may go beside. What holds at both holds between them: unless the
    configuration lists the blocks one by one, a block more at either end can give the same list only if all between are equal.
    """
    try:
        trial = copied_model(model)
    except Exception:
        return None
    # Never chained: somebody's eval() returns None.
    trial.eval()
    blocks = list(trial.get_submodule(container).children())
    source, last = sources
    count, position = len(blocks), source + 1
    indices = find_indices(blocks)
    if not {*own_numbers(blocks)[source]} <= {(index.module, index.name) for index in indices}:
        return None  # nothing tells which number a twin should have
    before = _made_general(trial, example)
    layer = twin.build(unwrapped(blocks[source]), trial)
    layer.eval()

    def holds(place: ListPlace) -> bool:
        """Whether the grown copy runs the new block once and gives the same output; the copy is put back."""
        put_into_list(trial, container, place, position, source, layer)
        try:
            after, calls = _outputs(trial, example, layer)
        except Exception:
            return False
        finally:
            take_from_list(trial, container, place, position)
        return calls == 1 and len(after) == len(before) and all(map(torch.equal, before, after))

    built = _built_from(trial, container)
    if built is not None:
        owner, name = built
        anew = _Anew(trial, owner, name, container, indices)
        at_last = twin.build(unwrapped(blocks[last]), trial)
        for facts in anew.facts(position, source, layer):
            place = ListPlace(facts, indices)
            if holds(place) and anew.matches(facts, last + 1, last, at_last):
                put_into_list(trial, container, place, position, source, layer)
                if _runs_alike(trial, owner, name, example, before):
                    return place
                take_from_list(trial, container, place, position)
        return None
    named = tuple(fact for fact in _numbers(trial, container, count) if fact.name in COUNTS)
    for guess in (named, *((*named, fact) for fact in _numbers(trial, container, count) if fact not in named)):
        if holds(ListPlace(guess, indices)):
            return ListPlace(guess, indices)
    return None


def _outputs(model: nn.Module, example: Any, watched: nn.Module | None) -> tuple[list[Tensor], int]:
    """The outputs on the example, and how often a module was called."""
    calls: list[None] = []
    handle = watched.register_forward_pre_hook(lambda *_: calls.append(None)) if watched is not None else None
    try:
        with forked_random_state(model), torch.no_grad():
            output = run(model, copy.deepcopy(to_device(example, device_of(model))))
            return [t for t in tensors(_comparable(output)) if t.dim() > 0], len(calls)
    finally:
        if handle is not None:
            handle.remove()


def _comparable(output: Any) -> Any:
    """The parts of an output that do not grow with the number of blocks: a record without its lists of all blocks' states."""
    if isinstance(output, dict):
        return {key: value for key, value in output.items() if isinstance(value, Tensor)}
    return output


def _made_general(trial: nn.Module, example: Any) -> list[Tensor]:
    """Move the copy's weights away from their small beginnings, where a block hardly shows in the output; its outputs then."""
    kept = [parameter.detach().clone() for parameter in trial.parameters()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trial.parameters():
            if parameter.is_floating_point():
                noise = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.device, parameter.dtype))
        outputs = _outputs(trial, example, None)[0]
        if not all(torch.isfinite(output).all() for output in outputs):
            for parameter, value in zip(trial.parameters(), kept, strict=True):
                parameter.copy_(value)
            outputs = _outputs(trial, example, None)[0]
    return outputs


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


def _built_from(model: nn.Module, container: str) -> tuple[str, str] | None:
    """The outermost module around the list that its class can build again from an object that it holds: its path, the object's name.

    What is built may differ where somebody has put other modules in (adapters, another head), but for the number of blocks.
    """
    count = len(list(model.get_submodule(container).children()))
    for path, module in _ancestors(model, container):
        for name, value in vars(module).items():
            held = [value, *(part for part in vars(value).values() if _is_object(part))] if _is_object(value) else []
            if any(True for holder in held for _ in _counting(Fact(path, (name,), "", "count"), holder, count)):
                again = build_again(module, value)
                if again is not None and _blocks_in(again, _within(path, container)) == count:
                    return path, name
    return None


def _within(owner: str, path: str) -> str:
    """A path as seen from a module that contains it."""
    return path[len(owner) + 1 :] if owner else path


def _blocks_in(module: nn.Module, path: str) -> int:
    try:
        return len(list(module.get_submodule(path).children()))
    except AttributeError:
        return 0


def _runs_alike(trial: nn.Module, owner: str, name: str, example: Any, before: list[Tensor]) -> bool:
    """Whether what the class builds from the configuration now, loaded with the weights, gives the same output: what saving relies on."""
    module = trial.get_submodule(owner)
    if is_large(module):
        return True  # the numbers and words inside were compared, and another copy might not fit
    built = build_again(module, getattr(module, name), devices=("cpu",))
    if built is None:
        return False
    if shapes(built) != shapes(module):
        return True  # it holds modules that the configuration knows nothing of, so nobody can load it from there
    parent, _, key = owner.rpartition(".")
    like = next(module.parameters())
    try:
        built.to(like.device, like.dtype)  # before the weights, or those of double precision would lose some of it
        built.load_state_dict(module.state_dict())
        built.eval()
        if owner:
            trial.get_submodule(parent)._modules[key] = built
        after = _outputs(trial if owner else built, example, None)[0]
    except Exception:
        return False
    finally:
        if owner:
            trial.get_submodule(parent)._modules[key] = module
    return len(after) == len(before) and all(map(torch.equal, before, after))


class _Anew:
    """A module around the list that can be built again from its configuration, to be compared with what the list becomes."""

    def __init__(self, trial: nn.Module, owner: str, name: str, container: str, indices: tuple[Index, ...]) -> None:
        self._trial, self._owner, self._name, self._container = trial, owner, name, container
        self._module = trial.get_submodule(owner)
        self._configuration = getattr(self._module, name)
        self._place = ListPlace((), indices)
        self._count = len(list(trial.get_submodule(container).children()))
        self._quiet = differences(self._module, build_again(self._module, self._configuration))

    def matches(self, facts: Iterable[Fact], position: int, source: int, layer: nn.Module) -> nn.Module | None:
        """What the class builds from the configuration with these changes, if it is what the list has become."""
        changed = copy.deepcopy(self._configuration)
        for fact in facts:
            if fact.module == self._owner and fact.through[:1] == (self._name,):
                holder = changed
                for step in fact.through[1:]:
                    holder = getattr(holder, step)
                fact.inserted(holder, position, source)
        put_into_list(self._trial, self._container, self._place, position, source, layer)
        try:
            built = build_again(self._module, changed)
            if built is None or _blocks_in(built, _within(self._owner, self._container)) != self._count + 1:
                return None
            return built if differences(self._module, built) <= self._quiet else None
        finally:
            take_from_list(self._trial, self._container, self._place, position)

    def facts(self, position: int, source: int, layer: nn.Module) -> Iterator[tuple[Fact, ...]]:
        """Changes of the configuration from which the class builds what the list becomes, the simplest that do."""

        def matches(facts: Iterable[Fact]) -> nn.Module | None:
            return self.matches(facts, position, source, layer)

        objects = _objects(self._trial, self._owner, self._module)
        holders = [(through, holder) for _, through, holder in objects if through[0] == self._name]
        for through, holder in holders:
            for counted in _counting(Fact(self._owner, through, "", "count"), holder, self._count):
                lists = [f for f in _per_block(self._owner, through, holder, self._count) if f.name != counted.name]
                facts: list[Fact] = [counted, *lists]
                if matches(facts) is None:
                    facts = [counted]
                    if matches(facts) is None:
                        continue
                # A list that is as long by chance should stay as it is. One that is named after the blocks is not: a cache may read it.
                needed = [
                    fact
                    for fact in facts
                    if fact is counted
                    or any(word in fact.name for word in ("layer", "block"))
                    or matches([other for other in facts if other is not fact]) is None
                ]
                for guess in (needed, facts) if len(needed) < len(facts) else (facts,):
                    built = matches(guess)
                    if built is not None:
                        known = {id(holder) for _, holder in holders}
                        yield (*guess, *_copies(self._trial, self._owner, self._module, built, self._container, known))


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
