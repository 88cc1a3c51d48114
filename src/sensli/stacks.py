"""Stacks of blocks: modules in a row, each of which maps a space into itself. Layers go between them, not into them."""

from __future__ import annotations

from collections.abc import Iterator
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


@dataclass(frozen=True)
class Stack:
    """Blocks of one container in the order of the data flow, the output of each the input of the next."""

    container: str
    blocks: tuple[Call, ...]
    residual: bool  # the blocks have skip connections


def find_stacks(flow: Flow) -> list[Stack]:
    """Runs of equal blocks in `nn.Sequential` and `nn.ModuleList`; a single block counts if it has a skip connection."""
    stacks: list[Stack] = []
    for path, container in flow.model.named_modules():
        if not isinstance(container, (nn.Sequential, nn.ModuleList, Chain)) or _inside(path, stacks):
            continue
        if isinstance(container, Chain) and isinstance(_parent(flow, path), (nn.Sequential, nn.ModuleList, Chain)):
            continue  # its parts were seen as members of that one
        for run in _runs(flow, path, container):
            residual = _has_skip(run[0])
            if len(run) > 1 or (residual and not _holds_stack(flow, run[0])):
                stacks.append(Stack(path, tuple(run), residual))
    return stacks


def _runs(flow: Flow, path: str, container: nn.Module) -> Iterator[list[Call]]:
    """The longest rows of equal blocks among the members of a container; many have a single one."""
    run: list[Call] = []
    for member in _members(path, container):
        call = _as_block(flow, member)
        if run and (call is None or not _continues(run[-1], call)):
            yield run
            run = []
        if call is not None:
            run.append(call)
    if run:
        yield run


def _holds_stack(flow: Flow, call: Call) -> bool:
    """Whether a block is the body of a network rather than a block: residual blocks stand in a row inside it."""
    return any(
        len(run) > 1 and _has_skip(run[0])
        for path, inner in call.module.named_modules(prefix=call.path)
        if isinstance(inner, (nn.Sequential, nn.ModuleList))
        for run in _runs(flow, path, inner)
    )


def _parent(flow: Flow, path: str) -> nn.Module:
    return flow.model.get_submodule(path.rpartition(".")[0])


def _members(path: str, container: nn.Module) -> Iterator[str]:
    """Paths of the children in order; a chain that stands for one of them gives its parts."""
    for name, child in container.named_children():
        member = f"{path}.{name}" if path else name
        if isinstance(child, Chain):
            yield from _members(member, child)
        else:
            yield member


def _inside(path: str, stacks: list[Stack]) -> bool:
    return any(path == block.path or path.startswith(block.path + ".") for stack in stacks for block in stack.blocks)


def _as_block(flow: Flow, path: str) -> Call | None:
    """The call of a child that could be a block: called once, with parameters, tensor to tensor of the same shape."""
    calls = flow.calls_of(path)
    if len(calls) != 1 or calls[0].output is None or not calls[0].inputs:
        return None
    module, output, given = calls[0].module, calls[0].output.tensor, calls[0].inputs[0].tensor
    plain_layer = not any(True for _ in module.children()) and type(module).__module__.startswith("torch.nn")
    if plain_layer or not any(True for _ in module.parameters()) or output.shape != given.shape:
        return None
    return calls[0] if output.is_floating_point() and given.is_floating_point() else None


def _continues(last: Call, call: Call) -> bool:
    assert last.output is not None
    same_value = call.inputs[0].tensor is last.output.tensor or (
        call.inputs[0].node is not None and call.inputs[0].node is last.output.node
    )
    return same_value and _signature(last.module) == _signature(call.module)


def _signature(module: nn.Module) -> tuple[object, ...]:
    return (type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters()))


def _has_skip(call: Call) -> bool:
    assert call.output is not None
    return call.inputs[0].node is not None and reaches(call.output.node, call.inputs[0].node, _SKIP)
