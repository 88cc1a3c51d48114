"""Stacks of blocks: modules in a row, each of which maps a space into itself. Layers go between them, not into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from sensli.chain import Chain
from sensli.flow import Call, Flow
from sensli.graph import reaches

# A path along these operations alone, from a block's output to its input, is a skip connection.
_SKIP = frozenset({
    "Add", "View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "Clone", "Alias", "ToCopy", "Relu", "NativeDropout",
    "NativeLayerNorm", "FusedRmsNorm", "NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm",
})  # fmt: skip


_CONTAINERS = (nn.Sequential, nn.ModuleList, Chain)


@dataclass(frozen=True)
class Stack:
    """Blocks of one container in the order of the data flow, the output of each the input of the next."""

    container: str
    blocks: tuple[Call, ...]
    residual: bool  # the blocks have skip connections
    row: int  # how many blocks of the same class stand in a row there, equal or not


def find_stacks(flow: Flow) -> list[Stack]:
    """Runs of equal blocks in `nn.Sequential` and `nn.ModuleList`; a single block counts if it has a skip connection.

    Where a stack stands inside a block of another, one of the two counts: see `_beats`. Blocks that stand in no container come last.
    """
    found: list[Stack] = []
    for path, container in flow.model.named_modules():
        inner = isinstance(flow.model.get_submodule(path.rpartition(".")[0]), _CONTAINERS) and path != ""
        # The parts of a chain that stands in a container were seen as members of that one.
        if isinstance(container, _CONTAINERS) and not (inner and isinstance(container, Chain)):
            calls = [_as_block(flow, member) for member in _members(path, container)]
            for row in _runs(calls, lambda module: type(module)):
                for run in _runs(row, signature):
                    if len(run) > 1 or _has_skip(run[0]):
                        found.append(Stack(path, tuple(run), _has_skip(run[0]), len(row)))
    stacks = [s for s in found if not any(_beats(other, s) for other in found if other is not s)]
    # The smallest first: what contains a block is not one.
    for path, module in reversed(list(flow.model.named_modules())):
        parent = flow.model.get_submodule(path.rpartition(".")[0])
        if path and not isinstance(parent, _CONTAINERS) and any(True for _ in module.children()):
            call = _as_block(flow, path)
            alone = not any(_within(path, s) or _within(block.path, path) for s in stacks for block in s.blocks)
            if call is not None and alone and call.given is not None and _has_skip(call):
                stacks.append(Stack(path.rpartition(".")[0], (call,), True, 1))
    return stacks


def _within(path: str, of: Stack | str) -> bool:
    if isinstance(of, Stack):
        return any(_within(path, block.path) for block in of.blocks)
    return path == of or path.startswith(f"{of}.")


def _beats(one: Stack, other: Stack) -> bool:
    """Blocks with skip connections are the units people think in: the innermost row of them counts, and nothing inside its blocks."""
    if _within(one.blocks[0].path, other):  # it stands inside a block of the other
        return one.residual and (one.row > 1 or other.row == 1 or not other.residual)
    return _within(other.blocks[0].path, one) and not _beats(other, one)


def _members(path: str, container: nn.Module) -> Iterator[str]:
    """Paths of the children in order; a chain that stands for one of them gives its parts."""
    for name, child in container.named_children():
        member = f"{path}.{name}" if path else name
        if isinstance(child, Chain):
            yield from _members(member, child)
        else:
            yield member


def _runs(calls: Sequence[Call | None], kind: Callable[[nn.Module], object]) -> list[list[Call]]:
    """Blocks of one kind in a row, the output of each the input of the next."""
    runs: list[list[Call]] = []
    last: Call | None = None
    for call in calls:
        if call is not None:
            if last is not None and _follows(last, call) and kind(last.module) == kind(call.module):
                runs[-1].append(call)
            else:
                runs.append([call])
        last = call
    return runs


def _as_block(flow: Flow, path: str) -> Call | None:
    """The call of a child that could be a block: called once, with parameters, from a value to one of the same shape."""
    calls = flow.calls_of(path)
    if len(calls) != 1 or calls[0].result is None:
        return None
    module, output = calls[0].module, calls[0].result.tensor
    plain_layer = not any(True for _ in module.children()) and type(module).__module__.startswith("torch.nn")
    if plain_layer or not any(True for _ in module.parameters()) or not output.is_floating_point():
        return None
    return calls[0]


def _follows(last: Call, call: Call) -> bool:
    assert last.result is not None and call.given is not None
    same_node = call.given.node is not None and call.given.node is last.result.node
    return same_node or call.given.tensor is last.result.tensor


def signature(module: nn.Module) -> tuple[object, ...]:
    """What makes two blocks equal: class, and names and shapes of parameters."""
    return (type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters()))


def _has_skip(call: Call) -> bool:
    assert call.result is not None and call.given is not None
    return call.given.node is not None and reaches(call.result.node, call.given.node, _SKIP, "Add")
