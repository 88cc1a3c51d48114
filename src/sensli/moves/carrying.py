"""Sites that were found on a small sibling, in the model that it stands for: bound by path, and sized by one run of the example.

The trial on the sibling is the proof that a site keeps the function. Of the large model nothing is copied: classes and paths are compared,
and shapes and numbers are read off it. What does not fit is skipped with the reason.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import BadExample, SensliError, UnsupportedModel, WrongType
from sensli.modules import checks, random_state, running
from sensli.modules.engines.distributed import Together, number_facts
from sensli.modules.engines.fsdp import check_resized, reshard
from sensli.modules.flops import FlopCounter, unchanged
from sensli.modules.grown import Chain
from sensli.modules.siblings import Sibling
from sensli.modules.wrappers import class_of, is_sharded, run_eagerly
from sensli.moves.inserting import join_path
from sensli.moves.layers import Layer, fit_activation, windows_like
from sensli.moves.point import ListPlace, Ref, attribute
from sensli.moves.roles import units_made
from sensli.moves.search import Refused, Request
from sensli.moves.sites import Move, Site, Skipped
from sensli.moves.twin.twins import Twin
from sensli.moves.width.confirming import is_valid
from sensli.moves.width.finding import cost_of, more_units
from sensli.moves.width.widening import check_hooks, layers_in, resizes
from sensli.moves.width.width import Axis, Size, Width

Found = tuple[list[Site], list[Skipped], list[str]]  # sites, places that were skipped, and notes
_GROWN = re.compile(r"grown\d+")
_LEAST = 3  # blocks of a stack that stands for one of another length: a first, a last and one between
_RETURNS = "a small model of the same class, or a pair of it and an example for it (for example lambda: Model(depth=3))"


def made_sibling(make: Any, model: nn.Module, example: Any) -> Sibling:
    """What the user's function makes, checked to be a model of its own. The global random state stays as it was."""
    checks.factory("sibling", make, _RETURNS)
    try:
        with random_state.kept():
            made = make()
    except Exception as error:
        running.let_memory_through(error)
        raise UnsupportedModel(
            f"sibling={checks.show_value(make)} makes no model, it raises {type(error).__name__}: {error}. Give a function that can be "
            "called without arguments."
        ) from error
    small, its = made if isinstance(made, tuple) and len(made) == 2 else (made, example)
    if not isinstance(small, nn.Module):
        checks.refuse("sibling", f"a function that returns {_RETURNS}", made, WrongType, "That is what it returned.")
    own = {_memory(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, tensor in (*small.named_parameters(), *small.named_buffers()):
        if _memory(tensor) in own and tensor.numel():
            raise UnsupportedModel(
                f"sibling must make a separate model, but its '{name}' shares memory with '{own[_memory(tensor)]}' of the model. Build it "
                "again, with fewer blocks and smaller widths."
            )
    return Sibling(small, its)


def _memory(tensor: Tensor) -> tuple[Any, int]:
    local = getattr(tensor, "_local_tensor", tensor)
    return (tensor.device, id(tensor)) if local.is_meta else (local.device, local.untyped_storage().data_ptr())


class Likeness:
    """For every module of a model the one of its sibling that it is like.

    Containers have the same parts. Only a list of numbered blocks may have another length: the first and the last block are like the first
    and the last, and those between like the first one between that is of the same kind.
    """

    def __init__(self, model: nn.Module, small: nn.Module) -> None:
        self.model, self.small = model, small
        self.like: dict[str, str] = {}  # paths of the model to those of the sibling
        self.images: dict[str, list[str]] = {}  # and back
        self.unlike: dict[str, str] = {}  # what was inserted since, which no sibling has, and the reason
        self._walk(model, small, "", "")
        for path, its in self.like.items():
            self.images.setdefault(its, []).append(path)

    def _walk(self, large: nn.Module, small: nn.Module, path: str, its: str) -> None:
        large, path = self._inside(large, small, path)
        if _named(large) != _named(small):
            raise _differs(f"'{path}' is {_shown(large)} in the model and {_shown(small)} in the sibling")
        for name, parameter in large._parameters.items():
            other = small._parameters.get(name)
            if (parameter is None) != (other is None) or (
                parameter is not None and other is not None and parameter.dim() != other.dim()
            ):
                raise _differs(
                    f"'{join_path(path, name)}' is {_form(parameter)} in the model and {_form(other)} in the sibling"
                )
        self.like[path] = its
        own, theirs = self._parts(large, small, path), _parts(small)
        if own.keys() != theirs.keys() and _is_numbered(own) and _is_numbered(theirs):
            pairs = self._matched(list(own.values()), list(theirs.values()), path)
        else:
            missing = next((name for name in (*own, *theirs) if name not in own or name not in theirs), None)
            if missing is not None:
                has, lacks = ("the model", "the sibling") if missing in own else ("the sibling", "the model")
                raise _differs(f"{has} has a module '{join_path(path, missing)}' and {lacks} has none")
            pairs = [(name, name) for name in own]
        for key, like in pairs:
            self._walk(own[key], theirs[like], join_path(path, key), join_path(its, like))

    def _inside(self, large: nn.Module, small: nn.Module, path: str) -> tuple[nn.Module, str]:
        """The module itself, where layers were inserted around it."""
        while isinstance(large, Chain) and not isinstance(small, Chain):
            self._say_inserted(path, (name for name in large._modules if name != "anchor"))
            large, path = large.get_submodule("anchor"), join_path(path, "anchor")
        return large, path

    def _parts(self, large: nn.Module, small: nn.Module, path: str) -> dict[str, nn.Module]:
        parts = _parts(large)
        inserted = [name for name in parts if _GROWN.fullmatch(name) and name not in small._modules]
        self._say_inserted(path, inserted)
        return {name: part for name, part in parts.items() if name not in inserted}

    def _say_inserted(self, path: str, names: Any) -> None:
        self.unlike.update(
            {join_path(path, name): "was inserted into the model, and the sibling has none like it" for name in names}
        )

    def _matched(self, own: Sequence[nn.Module], theirs: Sequence[nn.Module], path: str) -> list[tuple[str, str]]:
        """Numbers of blocks, and of those that they are like."""
        if len(theirs) < _LEAST:
            raise _differs(
                f"'{path}' has {len(own)} blocks in the model and {len(theirs)} in the sibling; as many, or at least {_LEAST}, show what "
                "is at its ends and between"
            )
        kinds, mine, last = list(map(_kind, theirs)), list(map(_kind, own)), len(own) - 1
        other = next((number for number, kind in enumerate(kinds) if kind not in mine), None)
        if other is not None:
            raise _differs(
                f"block {other} of '{path}' in the sibling ({_shown(theirs[other])}) is like none of the model"
            )
        order = [*range(1, len(theirs) - 1), 0, len(theirs) - 1]  # those between first
        pairs = []
        for number, block in enumerate(own):
            ends = [0] if number == 0 else [len(theirs) - 1] if number == last else []
            found = next((each for each in (*ends, *order) if kinds[each] == mine[number]), None)
            if found is not None:
                pairs.append((str(number), str(found)))
            elif any(type(part).__module__.startswith("sensli.") for part in block.modules()):
                self.unlike[join_path(path, str(number))] = "has grown, and no block of the sibling is like it"
            else:
                raise _differs(
                    f"'{join_path(path, str(number))}' ({_shown(block)}) is like no block of '{path}' in the sibling"
                )
        return pairs

    def freeze(self) -> None:
        """What the model does not train the sibling does not train either."""
        for its, paths in self.images.items():
            own = self.model.get_submodule(paths[0])._parameters
            for name, parameter in self.small.get_submodule(its)._parameters.items():
                like = own.get(name)
                if parameter is not None and like is not None and parameter.is_floating_point():
                    parameter.requires_grad_(like.requires_grad)

    def follows_alike(self, its: str, path: str) -> bool:
        """Whether what comes before two blocks in their lists is alike."""
        blocks = []
        for model, own in ((self.small, its), (self.model, path.removesuffix(".anchor"))):
            parent, _, number = own.rpartition(".")
            before = str(int(number) - 1) if number.isdigit() else ""
            blocks.append(model.get_submodule(parent)._modules.get(before))
        return (None if blocks[0] is None else _kind(blocks[0])) == (None if blocks[1] is None else _kind(blocks[1]))

    def translated(self, its: str, home: str, near: str) -> str | None:
        """The path in the model of a module of the sibling, seen from ``home`` there, which stands for ``near`` in the model.

        In a list that both are in, so many blocks before or after; in another one only its ends are known.
        """
        numbers = _paired(home, near)
        large, small, path = self.model, self.small, ""
        together, parts = True, home.split(".")
        for depth, name in enumerate(its.split(".") if its else ()):
            while isinstance(large, Chain) and not isinstance(small, Chain):
                large, path = large.get_submodule("anchor"), join_path(path, "anchor")
            own, theirs = self._numbered(large), self._numbered(small)
            small = small.get_submodule(name)
            if own and theirs and own != theirs:
                if together and depth < len(parts) and parts[depth].isdigit():
                    name = str(int(numbers[depth]) + int(name) - int(parts[depth]))
                    together = name == numbers[depth]
                elif name == str(theirs - 1):
                    name = str(own - 1)
                elif name != "0":
                    return None
            else:
                together = together and depth < len(parts) and parts[depth] == name
            if name not in large._modules:
                return None
            large, path = large.get_submodule(name), join_path(path, name)
        while isinstance(large, Chain) and not isinstance(small, Chain):
            large, path = large.get_submodule("anchor"), join_path(path, "anchor")
        return path if _named(large) == _named(small) else None

    def _numbered(self, module: nn.Module) -> int:
        parts = [name for name in module._modules if not _GROWN.fullmatch(name)]
        return len(parts) if parts and all(name.isdigit() for name in parts) else 0


def _paired(home: str, near: str) -> list[str]:
    """The names on the way to a module of the model, one for each on the way to that of the sibling: without chains."""
    names = near.split(".")
    return [name for name in names if name != "anchor"] if len(names) != len(home.split(".")) else names


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in module._modules.items() if part is not None}


def _is_numbered(parts: Mapping[str, nn.Module]) -> bool:
    return bool(parts) and list(parts) == [str(number) for number in range(len(parts))]


def _named(module: nn.Module) -> tuple[str, str]:
    kind = class_of(module)  # by name: a factory that defines its class inside makes another class at every call
    return kind.__module__, kind.__qualname__


def _shown(module: nn.Module) -> str:
    return class_of(module).__name__


def _form(parameter: Tensor | None) -> str:
    return "missing" if parameter is None else f"of {parameter.dim()} axes"


def _kind(block: nn.Module) -> frozenset[object]:
    """What blocks of one kind have in common, whatever their sizes: classes, names of parameters, words (a kind of attention)."""
    found: set[object] = set()
    for path, part in block.named_modules():
        names = tuple(name for name, parameter in part._parameters.items() if parameter is not None)
        words = sorted((k, v) for k, v in vars(part).items() if isinstance(v, str) and not k.startswith("_"))
        found.add((re.sub(r"\d+", "*", path), _named(part), names, tuple(words)))
    return frozenset(found)


def _differs(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"sibling must make a model with the same paths and classes, but {what}. Build it as the model is built, with fewer blocks and "
        "smaller widths."
    )


@dataclass
class _Called:
    """What was seen of the last call of a module."""

    began: int
    calls: int
    ended: int = -1
    given: dict[running.Slot, tuple[int, ...]] = field(default_factory=dict)
    output: tuple[int, ...] | None = None  # of a single tensor
    first: tuple[int, ...] | None = None  # or of the first part of what was returned
    flops: int = 0


def _surveyed(model: nn.Module, example: Any) -> dict[str, _Called]:
    """Run the example once without gradients, in eval mode; the model is left as it was."""
    calls: dict[str, _Called] = {}
    clock, counter, handles = count(), FlopCounter(), []

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            known = calls.get(path)
            call = calls[path] = _Called(next(clock), 1 + (0 if known is None else known.calls), flops=-counter.total)
            for slot, value in (*enumerate(args), *kwargs.items()):
                if isinstance(value, Tensor):
                    call.given[slot] = tuple(value.shape)

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            call, value = calls[path], running.first_tensor(output)
            call.ended, call.flops = next(clock), call.flops + counter.total
            call.first = None if value is None else tuple(value.shape)
            call.output = call.first if isinstance(output, Tensor) else None

        return hook

    with unchanged(model), torch.no_grad(), run_eagerly():
        try:
            for path, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(after(path)))
            with counter:
                running.run(model, running.to_device(example, running.device_of(model)))
        except Exception as error:
            running.let_memory_through(error)
            raise BadExample(
                f"the example ({running.describe(example)}) does not run through {_shown(model)}: {type(error).__name__}: {error}. Give "
                "one shaped like a batch of the training data."
            ) from error
        finally:
            for handle in handles:
                handle.remove()
            if is_sharded(model):
                reshard(model)  # the root keeps its parameters whole after a run without gradients
    return calls


class Carrying:
    """Carries sites over from a sibling to the model."""

    def __init__(self, likeness: Likeness, example: Any, request: Request) -> None:
        self._likeness, self._model, self._request = likeness, likeness.model, request
        self._calls = _surveyed(self._model, example)
        self._samples = max(1, running.count_samples(example))

    def carried(self, found: Found) -> Found:
        """All that was found on the sibling, in the model: what cannot be there is skipped with the reason."""
        sites, skipped, notes = found
        images = self._likeness.images
        reasons = dict(self._likeness.unlike)
        for path, reason in skipped:
            reasons.update(dict.fromkeys(images.get(path, ()), reason))
        carried: list[Site] = []
        for site in sites:
            homes = images.get(site.path, [])
            for near in homes[:1] if self._spreads(site.move) else homes:
                if site.side == "before" and not self._likeness.follows_alike(site.path, near):
                    continue  # a site after the block that it follows says it
                try:
                    carried.append(self._site(site, near))
                except Refused as refusal:
                    reasons[near] = f"was found on the sibling, but {refusal}"
        carried.sort(key=self._moment)
        taken = {site.path for site in carried}
        return carried, [Skipped(path, reason) for path, reason in reasons.items() if path not in taken], notes

    def _moment(self, site: Site) -> int:
        call = self._calls[site.path]
        return call.began if site.side == "before" else call.ended

    def _site(self, site: Site, near: str) -> Site:
        call = self._calls.get(near)
        if call is None or call.calls != 1:
            raise Refused(f"is called {0 if call is None else call.calls} times in the model")
        point = site.point
        shape = (
            call.given.get(point.slot) if point.side == "before" else call.first if point.first_part else call.output
        )
        if shape is None or len(shape) != len(point.shape) + 1:
            raise Refused(
                f"its values have the shape {shape} in the model and {len(point.shape) + 1} axes in the sibling"
            )

        def to(its: str) -> str | None:
            return self._likeness.translated(its, point.path, near)

        around = [path for path in map(to, (ref.path for ref in point.neighbours)) if path is not None]
        modules = [self._model.get_submodule(path) for path in around]
        place = None if point.place is None else self._place(point.place, point.path, near, to)
        bound = replace(
            point,
            anchor=Ref.to(near, self._model.get_submodule(near)),
            shape=shape[1:],
            neighbours=tuple(map(Ref.to, around, modules)),
            makes=tuple(map(units_made, modules)),
            place=place,
        )
        container = None if site._container is None else to(site._container)
        carried = Site(bound, self._move(site.move, near, shape, modules, to), _container=container)
        try:
            carried.move.plan(self._model, carried)
        except SensliError as error:
            raise Refused(f"it does not fit the model: {error}") from error
        return carried

    def _place(self, place: ListPlace, home: str, near: str, to: Callable[[str], str | None]) -> ListPlace:
        """What must follow a block in the list, if it is true in the model as it is now."""
        blocks = _parts(self._model.get_submodule(near.rpartition(".")[0]))
        facts = []
        for fact in place.facts:
            path, every, inner = fact.module.partition(".*")
            own = to(path)
            if own is None:
                raise Refused(f"'{path}' of the sibling, which counts the blocks, has no counterpart in the model")
            facts.append(replace(fact, module=f"{own}{every}{inner}"))
            for holder in facts[-1].holders(self._model):
                value = getattr(holder, fact.name, None)
                with suppress(TypeError, IndexError):
                    known = value if fact.kind == "count" else len(value) if fact.kind == "list" else value[fact.item]  # type: ignore[arg-type, index]
                    if known == len(blocks):
                        continue
                raise Refused(
                    f"{'.'.join((*fact.through, fact.name))} does not count its {len(blocks)} blocks in the model"
                )
        for index in place.indices:
            for number, block in enumerate(blocks.values()):
                with suppress(AttributeError):
                    part = block.get_submodule(index.module)
                    if vars(part).get(index.name, number + index.offset) != number + index.offset:
                        raise Refused(f"{index.name} of block {number} is not its place in the list")
        return replace(place, facts=tuple(facts))

    def _move(
        self, move: Move, near: str, shape: tuple[int, ...], modules: list[nn.Module], to: Callable[[str], str | None]
    ) -> Move:
        if isinstance(move, Twin):
            block = self._model.get_submodule(near)
            missing = {*move.zeroed} - dict(block.named_parameters()).keys()
            if missing:
                raise Refused(f"it has no parameter {min(missing)!r} in the model")
            parameters = sum(map(prod, move.outline(block).values()))
            return replace(move, parameters=parameters, flops=self._calls[near].flops // self._samples)
        if isinstance(move, Layer):
            if move.kind == "linear":
                width = shape[-1] if len(shape) == 2 else 1
                return replace(move, width=shape[-1], activation=fit_activation(move.activation, width))
            kernel, groups = windows_like(modules, shape, self._request.kernel_size)
            return replace(
                move, width=shape[1], kernel=kernel, groups=groups, activation=fit_activation(move.activation, shape[1])
            )
        if isinstance(move, Width):
            return self._width(self._bound(move, to))
        raise Refused(f"a {type(move).__name__} cannot be carried over from a sibling")

    # --- units ---

    def _spreads(self, move: Move) -> bool:
        """Whether a width is that of all blocks of a stack, so that it is one width in the model too."""
        if not isinstance(move, Width):
            return False
        stacks: dict[str, set[str]] = {}
        for axis in move.axes:
            parts = axis.module.path.split(".")
            for depth, name in enumerate(parts):
                if name.isdigit():
                    stacks.setdefault(".".join(parts[:depth]), set()).add(name)
        return move.blocks > 0 or any(
            len(numbers) > 1 and len(numbers) == len(_parts(self._likeness.small.get_submodule(path)))
            for path, numbers in stacks.items()
            if len(self._likeness.images.get(path, ())) == 1
        )

    def _bound(self, move: Width, to: Callable[[str], str | None]) -> Width:
        """The width with the modules of the model, and still with the numbers of the sibling."""
        spreads = self._spreads(move)

        def paths(its: str) -> list[str]:
            if spreads:
                return self._likeness.images.get(its, [])
            own = to(its)
            return [] if own is None else [own]

        def bound(parts: Sequence[Axis] | Sequence[Size]) -> Iterator[Any]:
            pairs = [(part, path) for part in parts for path in paths(part.module.path)]
            known, bound_ones = ({part.module.path for part in each} for each in (parts, [part for part, _ in pairs]))
            if not bound_ones if spreads else bound_ones != known:  # of blocks of one kind one may stand for all
                raise Refused("a part of its units in the sibling has no counterpart in the model")
            order = dict.fromkeys(_block_of(path)[0] for _, path in pairs)  # of lists, as they are met
            numbered = {name: number for number, name in enumerate(order)}
            if spreads:
                pairs.sort(key=lambda pair: (numbered[_block_of(pair[1])[0]], _block_of(pair[1])[1]))
            for part, path in pairs:
                yield replace(part, module=Ref.to(path, self._model.get_submodule(path)))

        axes = tuple(bound(move.axes))
        read = {axis.module.path for axis in move.axes if axis.fill == "column"} & {*move.readers}
        readers = tuple(dict.fromkeys(a.module.path for a in axes if self._likeness.like[a.module.path] in read))
        sizes = {(id(size.holder(size.module.find_module())), size.name): size for size in bound(move.sizes)}
        return replace(
            move,
            axes=axes,
            sizes=tuple(sizes.values()),
            readers=readers,
            blocks=move.blocks * len(readers) // len(move.readers),
            layers=layers_in(self._model),
        )

    def _width(self, move: Width) -> Width:
        """The width with the numbers of the model."""
        if any(axis.tensor.dim() <= axis.dim for axis in move.axes):
            raise Refused("its weights have other axes in the model")
        for path in move.readers:
            if not any(p.requires_grad for p in self._model.get_submodule(path).parameters(recurse=False)):
                raise Refused(f"{path}, which reads its units, does not train")
        move = self._resized(move)
        move = replace(move, more=more_units(self._request.units, move.units))
        try:
            resized = resizes(self._model, move)
            if is_sharded(self._model):
                check_resized(self._model, {id(each.tensor): each.new_shape for each in resized})
            check_hooks(resized)
        except SensliError as error:
            raise Refused(f"it does not fit the model: {error}") from error
        self._check_configuration(move)
        added, flops = cost_of(self._model, move, resized, self._shape)
        return replace(move, added=added, flops=self._flops_of_heads(move) if move.heads else flops)

    def _check_configuration(self, move: Width) -> None:
        """Refuse numbers that the library of the configuration would not read back."""
        changed: dict[int, Any] = {}
        for size in move.sizes:
            if size.through:
                held = getattr(size.module.find_module(), size.through[0])
                copied = changed.setdefault(id(held), copy.deepcopy(held))
                setattr(attribute(copied, size.through[1:]), size.name, (move.units + move.more) * size.per_unit)
        if not all(map(is_valid, changed.values())):
            raise Refused(f"the configuration of the model does not take {move.units + move.more} of them")

    def _resized(self, move: Width) -> Width:
        """The numbers of another size: how many units there are, and how many entries each has along every axis."""
        lengths = [int(axis.tensor.shape[axis.dim]) for axis in move.axes]
        values = [getattr(size.holder(size.module.find_module()), size.name, None) for size in move.sizes]
        single = self._entries_of_one(move)
        if (
            lengths == [axis.length for axis in move.axes]
            and all(
                not value or size.per_unit * move.units == value for size, value in zip(move.sizes, values, strict=True)
            )
            and all(old == new for old, new in single.items())
        ):
            return move  # as large as the sibling
        for axis in move.axes:
            if axis.start or axis.outer * axis.inner * move.units != axis.length:
                raise Refused(
                    f"{axis.module.path}.{axis.name} holds more than these units, and nothing tells in which proportion in the model"
                )
        counted = [value for value, size in zip(values, move.sizes, strict=True) if size.per_unit == 1 and value]
        counted += [
            length // (axis.outer * single[axis.inner])
            for axis, length in zip(move.axes, lengths, strict=True)
            if axis.inner in single
        ]
        if len(set(counted)) != 1:
            raise Refused(
                f"nothing tells how many units there are in the model ({sorted(set(counted)) or 'no number'})"
            )
        units, heads = counted[0], move.heads
        axes = [
            replace(axis, inner=length // (axis.outer * units), length=length)
            for axis, length in zip(move.axes, lengths, strict=True)
        ]
        sizes = [
            replace(size, per_unit=value // units) if value else size
            for size, value in zip(move.sizes, values, strict=True)
        ]
        whole = all(axis.outer * axis.inner * units == axis.length for axis in axes) and all(
            not value or size.per_unit * units == value for size, value in zip(sizes, values, strict=True)
        )
        if heads:  # as wide as each other in the sibling, as wide as each other in the model
            pairs = {(old.inner, new.inner) for old, new in zip(move.axes, axes, strict=True)}
            least, most = min(pairs), max(pairs)
            whole = whole and len(pairs) == len({old for old, _ in pairs}) and most[0] == heads * least[0]
            heads = most[1] // least[1]
        if not whole:
            raise Refused(f"its weights do not hold {units} units as those of the sibling hold theirs")
        return replace(move, units=units, heads=heads, axes=tuple(axes), sizes=tuple(sizes))

    def _entries_of_one(self, move: Width) -> dict[int, int]:
        """Entries of a unit that are known: one stays one, and a head is as wide as the attention says that it is in both."""
        known = {1: 1}
        if move.heads:
            parent = move.axes[0].module.path.rpartition(".")[0]
            small = self._likeness.small.get_submodule(self._likeness.like[parent])
            old, new = getattr(small, "head_dim", None), getattr(self._model.get_submodule(parent), "head_dim", None)
            if isinstance(old, int) and isinstance(new, int):
                known[old] = new
        return known

    def _shape(self, path: str, given: bool) -> tuple[int, ...] | None:
        call = self._calls.get(path)
        return None if call is None else call.given.get(0) if given else call.output

    def _flops_of_heads(self, move: Width) -> int:
        """Heads are equal: each costs its share of the attention that they are in."""
        blocks: dict[object, list[list[str]]] = {}
        for axis in move.axes:
            key = _block_of(axis.module.path) if move.blocks else None
            blocks.setdefault(key, []).append(axis.module.path.split("."))
        total = 0
        for paths in blocks.values():
            shared = 0
            while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
                shared += 1
            call = self._calls.get(".".join(paths[0][:shared]))
            total += 0 if call is None else call.flops // self._samples
        return total * move.more // move.units


def _block_of(path: str) -> tuple[str, int]:
    """The list that a module is in, and the number of its block there: of the first list on its way."""
    found = re.match(r"(.*?)\.(\d+)(\.|$)", path)
    return (found[1], int(found[2])) if found else ("", -1)


def carry_over(
    model: nn.Module, example: Any, make: Callable[..., Sibling], request: Request, search: Callable[..., Found]
) -> Found:
    """What a search of the sibling finds, in the model. Of several processes that share a sharded model all come here."""
    with Together(model if is_sharded(model) else None, "find sites") as together:
        sibling = make(model, example)
        likeness = Likeness(model, sibling.model)
        likeness.freeze()
        try:
            found = search(sibling.model, sibling.example, request)
        except BadExample as error:
            raise BadExample(
                f"{error} That was the sibling, which may take another example than the model: return a pair from sibling=, the small "
                "model and an example for it."
            ) from error
        together.agree_on(number_facts("site of the sibling", found[0]), last=False)
        return Carrying(likeness, example, request).carried(found)
