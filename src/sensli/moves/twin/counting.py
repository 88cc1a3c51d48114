"""What counts and numbers the blocks of a list, found by trial on a copy, so that an insertion can make it true.

A model that is built from a configuration object is the strictest judge: rebuilt from the changed configuration it must have exactly
the parameters, and inside its modules the numbers and names, of the model that has grown. Other lists are judged by a run of the example:
the new block is called once and the output stays.

Configurations do not say it by one name: of the models of transformers in our tests eight count in `n_layer`, `num_layers`,
`encoder_layers`, `decoder_layers` or one entry of `depths`, T5 in three configurations at once, some keep `attention_layers` or
`no_rope_layers` beside `layer_types`, and four build another kind of block at the place in question. So it is found out, not looked up.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sensli.modules import random_state
from sensli.modules.configs import COUNTS, build_again, differences, find_counts, is_number, nested_objects, shapes
from sensli.modules.grown import Chain
from sensli.modules.running import count_samples, first_samples, note, relative_change, run, tensors
from sensli.moves.inserting import join_path
from sensli.moves.point import Fact, Index, ListPlace, first_number, grown_list, unwrap_block
from sensli.moves.trace.flow import Flow
from sensli.moves.trace.stacks import ancestors
from sensli.moves.twin.twins import Bypass, Twin

# ---- Numbers that blocks carry inside, such as ``layer_idx``: by them a cache, a table or a schedule tells the blocks
# apart.


# How people call such a number; needed where the values alone do not tell.
_NAMES = ("idx", "index", "layer_id", "layer_number", "layer_num", "block_id")


def find_indices(blocks: Sequence[nn.Module]) -> tuple[Index, ...]:
    """Attributes that are the block's position, plus the same offset, in all blocks that have them.

    An attribute that some blocks lack (a model of attention and recurrent blocks numbers both) or that is alone must have a telling name.
    """
    found: list[Index] = []
    for (path, name), values in _numbers(blocks).items():
        offsets = {value - position for position, value in values.items()}
        if len(offsets) == 1 and (_is_telling(name) or 1 < len(values) == len(blocks)):
            found.append(Index(path, name, offsets.pop()))
    return tuple(found)


def own_numbers(blocks: Sequence[nn.Module]) -> list[list[tuple[str, str]]]:
    """For each block the numbers that tell it from the others, so that no copy of it may have the same: path within the block, name."""
    # Without an offset, which a key into a list of all blocks' states would not have: dilations of 1, 2, 3 are not numbers of blocks.
    counted = {(index.module, index.name) for index in find_indices(blocks) if index.offset == 0}
    found: list[list[tuple[str, str]]] = [[] for _ in blocks]
    for key, values in _numbers(blocks).items():
        if key in counted or (_is_telling(key[1]) and len(set(values.values())) == len(values)):
            for position in values:
                found[position].append(key)
    return found


def equal_blocks(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """For each block the first and the last that are built like it: classes, shapes, numbers and words inside but for their own number."""
    indices = {(index.module, index.name) for index in find_indices(blocks)}
    looks = [_looks(unwrap_block(block), indices) for block in blocks]
    first = {look: position for position, look in reversed(list(enumerate(looks)))}
    last = {look: position for position, look in enumerate(looks)}
    return [(first[look], last[look]) for look in looks]


def _looks(block: nn.Module, indices: set[tuple[str, str]]) -> tuple[object, ...]:
    found: list[object] = [(name, tuple(p.shape)) for name, p in block.named_parameters()]
    for path, module in block.named_modules():
        plain = ((k, v) for k, v in vars(module).items() if isinstance(v, (int, str)) and not k.startswith("sensli_"))
        found.append((path, type(module), *sorted(pair for pair in plain if (path, pair[0]) not in indices)))
    return tuple(found)


def _numbers(blocks: Sequence[nn.Module]) -> dict[tuple[str, str], dict[int, int]]:
    """Path within the block and name of every whole number in any of the blocks, with its value by the block's position."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for position, block in enumerate(blocks):
        for path, module in unwrap_block(block).named_modules():
            if type(module).__module__.startswith("torch."):
                continue  # sizes, and the padding_idx of a table
            for name, value in vars(module).items():
                if is_number(value) and not name.startswith("sensli_"):
                    found.setdefault((path, name), {})[position] = value
    return found


def _is_telling(name: str) -> bool:
    return name.endswith(_NAMES)


# ---- Numbers around a list of blocks that may count them: in the modules that contain it and in the configurations that
# these hold.


def _around(model: nn.Module, container: str) -> list[tuple[str, nn.Module]]:
    """The modules around a list with their paths, the outermost first."""
    paths = [*ancestors(container)][::-1] or [""]
    return [(path, model.get_submodule(path)) for path in paths]


def _counts(path: str, through: tuple[str, ...], holder: Any, count: int) -> list[Fact]:
    """Numbers of a module, or of an object that it holds, that equal the number of blocks."""
    return [Fact(path, through, *found) for found in find_counts(holder, count)]


def _counts_around(model: nn.Module, container: str, count: int) -> list[Fact]:
    """Numbers around a list that equal its length: of the modules that contain it, and of objects that they hold."""
    found: list[Fact] = []
    seen: set[int] = set()
    for path, module in _around(model, container):
        for through, holder in [((), module), *nested_objects(module)]:
            if id(holder) not in seen:
                seen.add(id(holder))
                found += _counts(path, through, holder, count)
    return found


def _configured(model: nn.Module, container: str, count: int) -> Iterator[tuple[str, str]]:
    """Modules around the list that hold an object with the number of its blocks, the outermost first: the path, the object's name."""
    for path, module in _around(model, container):
        counting = (through[0] for through, holder in nested_objects(module) if _counts(path, through, holder, count))
        yield from ((path, name) for name in dict.fromkeys(counting))


@contextmanager
def grown_alike(built: nn.Module, like: nn.Module) -> Iterator[None]:
    """What no configuration says, as long as the context lasts: chains around modules, and what a twin lacks of its block."""
    changed: list[tuple[nn.Module, str, nn.Module]] = []
    for path, module in like.named_modules():
        if not path or not isinstance(module, (Chain, Bypass)):
            continue
        parent, _, key = path.rpartition(".")
        try:
            holder, inside = built.get_submodule(parent), built.get_submodule(path)
        except AttributeError:
            continue  # built from another number of blocks, which a comparison of the names will tell
        changed.append((holder, key, inside))
        if isinstance(module, Chain):
            chain = copy.copy(module)
            chain._modules = {**module._modules, "anchor": inside}
            holder._modules[key] = chain
        else:
            holder._modules[key] = Bypass()
    try:
        yield
    finally:
        for holder, key, inside in reversed(changed):
            holder._modules[key] = inside


# ---- What a model with one more block in a list should give on the example, and whether another one gives it.


def _output(model: nn.Module, example: Any) -> Any:
    """What a model gives for a copy of the example; None if it fails."""
    try:
        with random_state.kept(), torch.no_grad():
            return run(model, copy.deepcopy(example))
    except Exception as error:
        note(error)
        return None


class Known:
    """The example, and the outputs that a list with one more block should give on it, as the model without that block does."""

    def __init__(self, model: nn.Module, example: Any, output: Any) -> None:
        self._example, self._count = example, count_samples(example)
        self._outputs = [t.detach() for t in _comparable(output)]
        self._few = min(1, self._count)
        if self._count > 1 and not self.is_given_by(model):
            self._few = self._count  # it mixes its samples, so one of them does not tell what all do

    def with_output(self, output: Any) -> Known:
        """The same example with another output."""
        other = copy.copy(self)
        other._outputs = [t.detach() for t in _comparable(output)]
        return other

    def is_given_by(self, model: nn.Module, watched: nn.Module | None = None) -> bool:
        """Whether a model gives these outputs too and calls the watched module once."""
        if not self._outputs:
            return False
        calls: list[None] = []
        handle = (model if watched is None else watched).register_forward_pre_hook(lambda *_: calls.append(None))
        try:
            after = list(_comparable(_output(model, first_samples(self._example, self._few, self._count))))
        finally:
            handle.remove()
        before = first_samples(self._outputs, self._few, self._count)
        same = [
            one.shape == other.shape and not relative_change(one, other)
            for one, other in zip(before, after, strict=False)
        ]
        return len(after) == len(before) and all(same) and (watched is None or len(calls) == 1)


def _comparable(output: Any) -> Iterator[Tensor]:
    """The parts of an output that do not grow with the number of blocks: a record without its lists of all blocks' states."""
    if isinstance(output, dict):
        output = [value for value in output.values() if isinstance(value, Tensor)]
    return (tensor for tensor in tensors(output) if tensor.dim() > 0)


# ---- Models that are built from a configuration: rebuilt from a changed one, they tell what a list with one more block
# must look like.


class Rebuilt:
    """A module around the list that its class may build again from its configuration, to be compared with what the list becomes."""

    def __init__(
        self,
        trial: nn.Module,
        owner: str,
        name: str,
        container: str,
        indices: tuple[Index, ...],
        built: dict[object, nn.Module | None],
    ) -> None:
        """``built``: what was built of the same model for other places."""
        self._trial, self._owner, self._name, self._container = trial, owner, name, container
        self._module = trial.get_submodule(owner)
        self._configuration = getattr(self._module, name)
        self._place = ListPlace((), indices)
        self._count = self._blocks_in(self._module)
        self._built = built  # by what was changed in which configuration

    @cached_property
    def _as_it_is(self) -> nn.Module | None:
        key = self._owner, self._name
        if key not in self._built:
            self._built[key] = build_again(self._module, self._configuration)
        return self._built[key]

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

    def matches(self, position: int, source: int, layer: nn.Module, facts: Iterable[Fact]) -> nn.Module | None:
        """What the class builds from the configuration with these changes, if it is what the list has become."""
        changed = copy.deepcopy(self._configuration)
        values: list[object] = []
        for fact in facts:
            if fact.module == self._owner and fact.through[:1] == (self._name,):
                holder = changed
                for step in fact.through[1:]:
                    holder = getattr(holder, step)
                fact.follow(holder, position, source)
                values.append((fact, repr(getattr(holder, fact.name))))
        built = self._build((self._owner, self._name, *values), changed)
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
            built = build_again(self._module, configuration, values=True)
            self._built[key] = built if built is not None else build_again(self._module, configuration)
        return self._built[key]

    def _blocks_in(self, module: nn.Module) -> int:
        try:
            return len(list(module.get_submodule(_path_within(self._owner, self._container)).children()))
        except AttributeError:
            return 0

    def runs_alike(self, built: nn.Module, known: Known) -> bool | None:
        """Whether what was built, loaded with the weights of the grown list, gives the same output: what saving relies on.

        None where that cannot be told: another copy might not fit, or the module holds others that the configuration knows nothing of, so
        that nobody can load it from there.
        """
        module = self._module
        parent, _, key = self._owner.rpartition(".")
        with grown_alike(built, module):
            if shapes(built) != shapes(module):
                return None
            try:
                built.load_state_dict(module.state_dict(), assign=True)
                if any(tensor.is_meta for tensor in (*built.parameters(), *built.buffers())):
                    return None
                _cast_alike(built, module)
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
                _unload(built)

    def plans(self, position: int, source: int, layer: nn.Module) -> Iterator[tuple[tuple[Fact, ...], nn.Module]]:
        """Changes of the configuration from which the class builds what the list becomes, the simplest that do; and what it builds."""
        matches = partial(self.matches, position, source, layer)
        holders = [(through, holder) for through, holder in nested_objects(self._module) if through[0] == self._name]
        for through, holder in holders:
            counts = _counts(self._owner, through, holder, self._count)
            per_block = [
                Fact(self._owner, through, name, "list")
                for name, value in vars(holder).items()
                if _is_list(value) and len(value) == self._count
            ]
            for counted in sorted(counts, key=lambda fact: fact.name not in COUNTS):
                lists = [fact for fact in per_block if fact.name != counted.name]
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
                        yield (*guess, *self._copies(found, {id(holder) for _, holder in holders})), found

    def _copies(self, built: nn.Module, known: set[int]) -> list[Fact]:
        """Further configurations and counts inside the model, as the newly built one has them; each once, if all blocks have it."""
        there = dict(built.named_modules())
        said: set[Fact] = set()
        for path, part in self._module.named_modules():
            if path not in there:
                continue
            full = join_path(self._owner, path) if path else self._owner
            if full.startswith(f"{self._container}."):
                inner = _path_within(self._container, full).partition(".")[2]
                full = f"{self._container}.*.{inner}" if inner else f"{self._container}.*"
            for through, holder in [((), part), *nested_objects(part)]:
                if id(holder) in known:
                    continue
                known.add(id(holder))
                other: Any = there[path]
                for step in through:
                    other = getattr(other, step, None)
                for name, value in vars(holder).items():
                    target = getattr(other, name, None)
                    if is_number(value) and is_number(target) and target == value + 1 and (through or name in COUNTS):
                        said.add(Fact(full, through, name, "count"))
                    elif through and _is_list(value) and _is_list(target) and len(target) == len(value) + 1:
                        said.add(Fact(full, through, name, "list"))
        return sorted(said, key=str)


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def _path_within(owner: str, path: str) -> str:
    """A path as seen from a module that contains it."""
    return path[len(owner) + 1 :] if owner else path


def _unload(built: nn.Module) -> None:
    """Let go of loaded weights, a new block's among them: what is built is kept for its shapes."""
    for part in built.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _cast_alike(built: nn.Module, like: nn.Module) -> None:
    """Buffers that are not saved as the other module has them: a table of frequencies may be more precise than the weights."""
    built.to(next(like.parameters()).device)
    kept = dict(like.named_buffers())
    for path, part in built.named_modules():
        for name, buffer in part._buffers.items():
            other = kept.get(join_path(path, name))
            if buffer is not None and other is not None:
                part._buffers[name] = buffer.to(other.dtype)


class ListPlanner:
    """Plans what must follow when lists of one model take twins. What is learned on one list is used for the next."""

    def __init__(self, flow: Flow, example: Any) -> None:
        self._flow, self._example = flow, example
        self._built: dict[object, nn.Module | None] = {}  # models from changed configurations

    @cached_property
    def _known(self) -> Known:
        return Known(self._flow.model, self._example, self._flow.output)

    def plan(self, container: str, sources: tuple[int, int], twin: Twin) -> ListPlace | None:
        """What must follow when the list takes a twin beside a block; None where no trial confirms any plan.

        ``sources`` are the first and the last of the equal blocks that a twin may go beside. What holds at both holds between them: unless
        the configuration lists the blocks one by one, a block more at either end can give the same list only if all between are equal.
        The copy that the example ran through takes the twin, and is put back.
        """
        trial = self._flow.model
        blocks = list(trial.get_submodule(container).children())
        source, last = sources
        position = source + 1
        indices = find_indices(blocks)
        if not {*own_numbers(blocks)[source]} <= {(index.module, index.name) for index in indices}:
            return None  # nothing tells which number a twin should have
        layer = twin.build(unwrap_block(blocks[source]), trial)
        layer.eval()
        known = self._known
        if not twin.zeroed:  # it is no identity
            known = known.with_output(_output_beside(self._flow, container, source, layer, self._example))

        def holds(place: ListPlace) -> bool:
            """Whether the grown copy runs the new block once and gives the same output; the copy is put back."""
            with grown_list(trial, container, place, position, source, layer):
                return known.is_given_by(trial, layer)

        for owner, name in _configured(trial, container, len(blocks)):
            remade = Rebuilt(trial, owner, name, container, indices, self._built)
            for facts, again in remade.plans(position, source, layer):
                place = ListPlace(facts, indices)
                if remade.matches(last + 1, last, layer, facts):
                    with grown_list(trial, container, place, position, source, layer):
                        alike = remade.runs_alike(again, known)
                    if alike if alike is not None else holds(place):
                        return place
            if remade.is_faithful:
                return None
        counts = _counts_around(trial, container, len(blocks))
        named = tuple(fact for fact in counts if fact.name in COUNTS)
        for guess in (named, *((*named, fact) for fact in counts if fact not in named)):
            if holds(ListPlace(guess, indices)):
                return ListPlace(guess, indices)
        return None


def _output_beside(flow: Flow, container: str, source: int, layer: nn.Module, example: Any) -> Any:
    """What the copy gives if a block that is not an identity runs directly after the one at ``source``; None if that fails."""
    blocks = flow.model.get_submodule(container)
    key = str(source + first_number(blocks))
    anchor = blocks.get_submodule(key)
    calls = flow.calls_of(join_path(container, key))
    if len(calls) != 1 or calls[0].slot is None:
        return None
    chain = Chain(anchor, calls[0].slot)
    chain.add_module("grown1", layer)
    chain.takes_call.add("grown1")
    chain.eval()
    blocks._modules[key] = chain
    try:
        return _output(flow.model, example)
    finally:
        blocks._modules[key] = anchor
