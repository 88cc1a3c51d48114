"""Stacks of blocks: modules in a row, each of which maps a space into itself. Layers go between them, not into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from sensli.modules.grown import Chain
from sensli.modules.wrappers import block_inside
from sensli.moves.trace.flow import Flow, ModuleCall, SeenTensor
from sensli.moves.trace.graph import nearest_parameters, operation, origin, reaches
from sensli.text.records import Plain

# ---- The activations that can be told from others, as modules and as nodes of the autograd graph.


# Elementwise activations of torch and the constructor arguments that shape them (a copy must be the same function).
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "ReLU": (), "ReLU6": (), "LeakyReLU": ("negative_slope",), "ELU": ("alpha",), "CELU": ("alpha",), "SELU": (),
    "GELU": ("approximate",), "SiLU": (), "Mish": (), "Tanh": (), "Sigmoid": (), "LogSigmoid": (), "Softplus": ("beta", "threshold"),
    "Softsign": (), "Softshrink": ("lambd",), "Hardshrink": ("lambd",), "Tanhshrink": (), "Hardtanh": ("min_val", "max_val"),
    "Hardsigmoid": (), "Hardswish": (), "Threshold": ("threshold", "value"), "RReLU": ("lower", "upper"), "PReLU": ("num_parameters",),
}  # fmt: skip


@dataclass(frozen=True)
class Activation(Plain):
    """An elementwise activation by name and arguments, so that it can be written to JSON and built again."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Activation | None:
        """The activation that a module is, or None if it is not one we know."""
        name = type(module).__name__
        if type(module) is not getattr(nn, name, None) or name not in ACTIVATIONS:
            return None
        return cls(name, tuple((key, getattr(module, key)) for key in ACTIVATIONS[name]))

    def build(self) -> nn.Module:
        """A fresh module; never in place, because the residual form still needs its input."""
        module: nn.Module = getattr(nn, self.name)(**dict(self.arguments))
        return module


TANH = Activation("Tanh")
RELU = Activation("ReLU")


# Graph nodes of functional activations, and the module that is the same function.
_FUNCTIONAL = {
    "Relu": "ReLU", "Tanh": "Tanh", "Sigmoid": "Sigmoid", "Gelu": "GELU", "Silu": "SiLU", "Mish": "Mish", "Softplus": "Softplus",
    "LeakyRelu": "LeakyReLU", "Elu": "ELU", "Hardswish": "Hardswish", "Hardsigmoid": "Hardsigmoid", "Hardtanh": "Hardtanh",
    "LogSigmoid": "LogSigmoid",
}  # fmt: skip


def activation_of(node: Any) -> Activation | None:
    """The activation that a graph node is, if it is one."""
    name = operation(node) if node is not None else ""
    return Activation(_FUNCTIONAL[name]) if name in _FUNCTIONAL else None


# A path along these operations alone, from a block's output to its input, is a skip connection.
_SKIP = frozenset({
    "Add", "View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "Clone", "Alias", "ToCopy", "Relu", "NativeDropout",
    "NativeLayerNorm", "FusedRmsNorm", "NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm",
})  # fmt: skip

# What a loop does to a block's output before it adds it, all of it zero at zero but for some, which a trial tells.
_ELEMENTWISE = frozenset({
    "View", "Alias", "Clone", "ToCopy", "Mul", "Div", "Neg", "NativeDropout", "Tanh", "Relu", "Gelu", "Silu", "Mish", "Elu", "Celu",
    "LeakyRelu", "Hardswish", "Hardtanh", "Softsign", "Sigmoid", "Softplus", "Sin", "PreluKernel",
})  # fmt: skip


def is_list(container: nn.Module | None) -> bool:
    """Whether a container has its blocks by number and leaves it to the model to call them."""
    if isinstance(container, nn.ModuleDict):
        keys = list(container._modules)
        first = int(keys[0]) if keys and keys[0].isdecimal() else None
        return first is not None and keys == [str(number) for number in range(first, first + len(keys))]
    return isinstance(container, nn.ModuleList)


def _is_container(module: nn.Module | None) -> bool:
    return isinstance(module, (nn.Sequential, Chain)) or is_list(module)


@dataclass(frozen=True)
class Stack:
    """Blocks of one container in the order of the data flow, the output of each the input of the next."""

    container: str
    blocks: tuple[ModuleCall, ...]
    residual: bool  # the blocks have skip connections
    row: int  # how many blocks of the same class are in a row there, equal or not
    added: bool = False  # not the blocks but the loop around them adds what came in: x = x + block(x)

    def boundaries(self) -> Iterator[tuple[ModuleCall, str, SeenTensor]]:
        """The points before the first block and after each, in the order of the data flow."""
        first = self.blocks[0]
        assert first.given is not None
        # In a plain chain of equal blocks the first one's input is a place only if it is an activation's output.
        if not self.added and (self.residual or activation_of(first.given.node) is not None):
            yield first, "before", first.given
        for block in self.blocks:
            assert block.result is not None
            yield block, "after", block.result


def find_stacks(flow: Flow, *, added: bool) -> list[Stack]:
    """Runs of equal blocks in `nn.Sequential` and in lists; a single block counts if it has a skip connection.

    ``added``: also runs whose loop adds the skip.

    Where a stack is inside a block of another, one of the two counts: see `_inner_counts`. Blocks that are in no container come last.
    """
    found: list[Stack] = _find_added(flow) if added else []
    modules = dict(flow.model.named_modules())
    for path, container in modules.items():
        inner = path != "" and _is_container(modules.get(parent_of(path)))
        # The parts of a chain in a container were seen as members of that one.
        if _is_container(container) and not (inner and isinstance(container, Chain)):
            calls = [_as_block(flow, member) for member in members(path, container)]
            for row in _runs(calls, lambda module: type(block_inside(module))):
                for run in _runs(row, signature):
                    if len(run) > 1 or _has_skip(run[0]):
                        found.append(Stack(path, tuple(run), _has_skip(run[0]), len(row)))
    stacks = _without_nested(found)
    blocks = Paths(block.path for stack in stacks for block in stack.blocks)
    # The smallest first: what contains a block is not one.
    for path, module in reversed(modules.items()):
        if path == "" or _is_container(modules.get(parent_of(path))) or not any(True for _ in module.children()):
            continue
        call = _as_block(flow, path) if not blocks.around(path) and not blocks.below(path) else None
        if call is not None and call.given is not None and _has_skip(call):
            stacks.append(Stack(parent_of(path), (call,), True, 1))
            blocks.add(path)
    return stacks


def _find_added(flow: Flow) -> list[Stack]:
    """Runs of equal modules whose loop adds the skip itself: ``for block in blocks: x = x + block(x)``, scaled or bent on the way."""
    addends = _addends(flow.nodes)
    stacks: list[Stack] = []
    for path, container in flow.model.named_modules():
        if not (isinstance(container, nn.Sequential) or is_list(container)) or flow.calls_of(path):
            continue
        run: list[ModuleCall] = []
        for name, child in container.named_children():
            calls = flow.calls_of(f"{path}.{name}" if path else name)
            equal = not run or signature(child) == signature(run[0].module)
            good = len(calls) == 1 and any(True for _ in child.parameters()) and not isinstance(child, Chain)
            if not (good and equal and calls[0].result is not None and _is_added(calls[0], addends)):
                run = []
                break
            run.append(calls[0])
        if run:
            stacks.append(Stack(path, tuple(run), True, len(run), added=True))
    return stacks


def _addends(nodes: set[Any]) -> dict[Any, list[Any]]:
    """The additions of a run: what is added to a value, by the node of the value, so that looking one up costs nothing."""
    found: dict[Any, list[Any]] = {}
    for node in nodes:
        if operation(node) in ("Add", "Sub") and len(node.next_functions) == 2:
            (one, _), (other, _) = node.next_functions
            found.setdefault(_before_views(one), []).append(other)
            found.setdefault(_before_views(other), []).append(one)
    return found


def _is_added(call: ModuleCall, addends: dict[Any, list[Any]]) -> bool:
    """Whether what a module gives is added to what it was given."""
    assert call.given is not None and call.result is not None
    given = _before_views(call.given.node)
    return given is not None and any(_follows_by_itself(end, call.result.node) for end in addends.get(given, []))


def _before_views(node: Any) -> Any:
    """The node that views and copies, which change nothing, lead back to."""
    while node is not None and operation(node) in ("View", "Alias", "Clone", "ToCopy"):
        node = node.next_functions[0][0]
    return node


def _follows_by_itself(node: Any, target: Any, limit: int = 16) -> bool:
    """Whether a value is made of another one alone, element by element: scaled, bent, dropped out."""
    for _ in range(limit):
        if node is target:
            return node is not None
        if node is None or operation(node) not in _ELEMENTWISE:
            return False
        sources = [s for s, _ in node.next_functions if s is not None and operation(s) != "AccumulateGrad"]
        if len(sources) != 1:
            return False
        node = sources[0]
    return False


class Paths:
    """A set of module paths that knows quickly what lies around and below another one."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths: set[str] = set()
        self._above: set[str] = set()
        for path in paths:
            self.add(path)

    def add(self, path: str) -> None:
        self._paths.add(path)
        self._above.update(ancestors(path))

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def around(self, path: str) -> bool:
        """Whether one of them is this module or contains it."""
        return path in self._paths or any(above in self._paths for above in ancestors(path))

    def below(self, path: str) -> bool:
        """Whether this module contains one of them."""
        return path in self._above


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def ancestors(path: str) -> Iterator[str]:
    """The paths of the modules around a module, the nearest first; the model itself comes last."""
    while path:
        path = parent_of(path)
        yield path


def _without_nested(found: list[Stack]) -> list[Stack]:
    owners: dict[str, list[Stack]] = {}
    for stack in found:
        for block in stack.blocks:
            owners.setdefault(block.path, []).append(stack)
    beaten: set[int] = set()
    for stack in found:
        first = stack.blocks[0].path
        for path in (first, *ancestors(first)):
            for outer in owners.get(path, ()):
                if outer is not stack:
                    beaten.add(id(outer if _inner_counts(stack, outer) else stack))
    return [stack for stack in found if id(stack) not in beaten]


def _inner_counts(inner: Stack, outer: Stack) -> bool:
    """Blocks with skip connections are the units people think in: the innermost row of them counts, and nothing inside its blocks."""
    return inner.residual and (inner.row > 1 or outer.row == 1 or not outer.residual)


def members(path: str, container: nn.Module) -> Iterator[str]:
    """Paths of the children in order; a chain in the place of one of them gives its parts."""
    for name, child in container.named_children():
        member = f"{path}.{name}" if path else name
        if isinstance(child, Chain):
            yield from members(member, child)
        else:
            yield member


def _runs(calls: Sequence[ModuleCall | None], kind: Callable[[nn.Module], object]) -> list[list[ModuleCall]]:
    """Blocks of one kind in a row, the output of each the input of the next."""
    runs: list[list[ModuleCall]] = []
    last: ModuleCall | None = None
    for call in calls:
        if call is not None:
            if last is not None and _follows(last, call) and kind(last.module) == kind(call.module):
                runs[-1].append(call)
            else:
                runs.append([call])
        last = call
    return runs


def _as_block(flow: Flow, path: str) -> ModuleCall | None:
    """The call of a child that could be a block: called once, with parameters, from a value to one of the same shape."""
    calls = flow.calls_of(path)
    if len(calls) != 1 or calls[0].result is None:
        return None
    module, output = calls[0].module, calls[0].result.tensor
    block = block_inside(module)
    plain_layer = not any(True for _ in block.children()) and type(block).__module__.startswith("torch.nn")
    if plain_layer or not any(True for _ in module.parameters()) or not output.is_floating_point():
        return None
    return calls[0]


def _follows(last: ModuleCall, call: ModuleCall) -> bool:
    assert last.result is not None and call.given is not None
    same_node = call.given.node is not None and call.given.node is last.result.node
    return same_node or call.given.tensor is last.result.tensor


def signature(module: nn.Module) -> tuple[object, ...]:
    """What makes two blocks equal: class, and names and shapes of parameters."""
    return (
        type(module),
        type(block_inside(module)),
        tuple((name, tuple(p.shape)) for name, p in module.named_parameters()),
    )


def likeness(module: nn.Module) -> tuple[object, ...]:
    """What two blocks share that differ in size alone: the classes of all their parts, and the names of their parameters."""
    parts = tuple((name, type(part)) for name, part in module.named_modules())
    return (parts, tuple(name for name, _ in module.named_parameters()))


def _has_skip(call: ModuleCall) -> bool:
    assert call.result is not None and call.given is not None
    return call.given.node is not None and reaches(call.result.node, call.given.node, _SKIP, "Add")


def manner(module: nn.Module) -> tuple[object, ...]:
    """The plain settings of a block that are not numbers of a layer: blocks of one class may still compute different things.

    Of a rate of dropout only whether it is zero: many models give every block another one.
    """
    plain = (str, bool, float, type(None), FunctionType, BuiltinFunctionType)
    dropout = nn.modules.dropout._DropoutNd
    return tuple(
        (path, name, bool(value) if type(value) is float and ("drop" in name or isinstance(part, dropout)) else value)
        for path, part in module.named_modules()
        if "_orig_mod" not in part._modules  # torch.compile holds code of each block by itself
        for name, value in vars(part).items()
        if name != "training" and isinstance(value, plain)
    )


# ---- What is around a place in the data flow: its neighbours, the activation it comes from, who else works on its values.


class Surroundings:
    """The run of an example, and the blocks in it that are units of their own."""

    def __init__(self, flow: Flow, stacks: list[Stack]) -> None:
        self.flow = flow
        self.blocks = Paths(block.path for stack in stacks for block in stack.blocks)
        # What is among blocks is a block too, if not an equal one: a stage begins with one that changes the size.
        for stack in stacks:
            container = flow.model.get_submodule(stack.container)
            if stack.residual and stack.container and (isinstance(container, nn.Sequential) or is_list(container)):
                for name, child in container.named_children():
                    path = f"{stack.container}.{name}"
                    if len(list(block_inside(child).children())) > 1 and not self.blocks.below(path):
                        self.blocks.add(path)
        self._names = Counter(id(module) for _, module in flow.model.named_modules(remove_duplicate=False))
        owners = [call.began for call in flow.calls if any(True for _ in call.module.parameters(recurse=False))]
        self._last_weights = max(owners, default=-1)
        # Memory that a module with ``inplace=True`` gets, and when it last does.
        self._written: dict[int, int] = {}
        for call in flow.calls:
            if getattr(call.module, "inplace", False) is True:
                self._written.update({_memory(given): call.began for given in call.inputs})

    def in_block(self, path: str) -> bool:
        return self.blocks.around(path)

    def has_other_names(self, call: ModuleCall) -> bool:
        return self._names[id(call.module)] > 1

    def in_encoder_layer(self, path: str) -> bool:
        return any(isinstance(self.flow.model.get_submodule(p), nn.TransformerEncoderLayer) for p in ancestors(path))

    def weights_follow(self, call: ModuleCall) -> bool:
        return self._last_weights > call.ended

    def chained(self, path: str) -> bool:
        """Whether the anchor's container is an nn.Sequential that passes the data through its children itself."""
        parent = self.flow.model.get_submodule(parent_of(path))
        own_forward = isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
        return path != "" and own_forward and len(self.flow.calls_of(parent_of(path))) == 1

    def neighbours(self, call: ModuleCall, seen: SeenTensor) -> list[str]:
        """Paths of the modules that own the nearest parameters: those the values come from, else the anchor's own."""
        near = nearest_parameters(self.flow.parameter_names, seen.node)
        own = (name for name, _ in call.module.named_parameters(prefix=call.path))
        owners: list[str] = []
        for name in chain(near, own):
            if len(owners) == 4:
                break
            if parent_of(name) not in owners:
                owners.append(parent_of(name))
        return owners

    def overwritten_in_training(self, seen: SeenTensor, since: int) -> bool:
        """Whether a module that rests in eval mode (a dropout with ``inplace=True``) will work in place on these values."""
        return self._written.get(_memory(seen), -1) > since


def _memory(seen: SeenTensor) -> int:
    return seen.tensor.untyped_storage().data_ptr()


def never_negative(seen: SeenTensor) -> bool:
    """Whether it is proven that values are never below zero: they come from a ReLU. Only they tell what a padding was filled with."""
    source = origin(seen.node) if seen.node is not None else None
    return source is not None and operation(source) == "Relu" and not seen.negative
