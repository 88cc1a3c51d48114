"""One run of the example on a copy of the model: which module was called when, with what, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import BadExample, UnsupportedModel
from sensli.modules import random_state
from sensli.modules.copies import copied_model, made_general
from sensli.modules.engines.fsdp import unsharded_copy
from sensli.modules.running import (
    Slot,
    brief_error,
    describe,
    device_of,
    first_tensor,
    is_plain,
    let_memory_through,
    map_tensors,
    run,
    tensors,
    to_device,
    value_at,
    value_slot,
    with_first,
)
from sensli.modules.wrappers import check_whole, is_sharded, run_eagerly
from sensli.moves.trace.graph import all_before


@dataclass
class SeenTensor:
    """A tensor as it was when it passed: later in-place operations move its graph node and its version."""

    tensor: Tensor
    node: Any
    version: int
    negative: bool  # whether any of its values was below zero

    @classmethod
    def of(cls, tensor: Tensor) -> SeenTensor:
        known = tensor.is_floating_point() and tensor.numel() > 0 and tensor.device.type != "meta"
        return cls(tensor, tensor.grad_fn, tensor._version, known and bool(tensor.detach().amin() < 0))

    @property
    def overwritten(self) -> bool:
        """Whether somebody worked in place on it afterwards."""
        return self.tensor._version != self.version


@dataclass
class ModuleCall:
    """One call of one module: its inputs and outputs, and when it began and ended among all calls."""

    path: str
    module: nn.Module
    began: int
    inputs: list[SeenTensor]
    positional: bool  # the first of the inputs is the first argument itself, so that a layer can go before the module
    ended: int = -1
    output: SeenTensor | None = None  # None if it did not return a single tensor
    returned: Any = None
    shell: Any = (
        None  # what it returned beside its first tensor, with None for that one; only where no other tensor is in it
    )
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # For a module that maps a space into itself, possibly as the first part of a tuple: where the value came in, and both its ends.
    slot: Slot | None = None
    given: SeenTensor | None = None
    result: SeenTensor | None = None
    hidden: bool = False  # its output is a view that nobody else sees


@dataclass
class Flow:
    """All calls of a run in the order of their beginning, on a copy of the model whose parameters all take gradients."""

    model: nn.Module
    calls: list[ModuleCall] = field(default_factory=list)
    parameter_names: dict[int, str] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)
    nodes: set[Any] = field(default_factory=set)  # all graph nodes that the model's output depends on
    output: Any = None
    takes_gradients: bool = True  # whether the model takes an example that asks for a gradient
    # Layers whose output is copied, because it is a view that somebody works in place on: autograd then writes its graph again, without
    # the nodes that were there and without the name of what was done.
    apart: set[str] = field(default_factory=set)
    frozen: frozenset[str] = frozenset()  # names of the parameters that the model itself does not train
    notes: list[str] = field(default_factory=list)  # what could not be tried, for `Sites.explain`
    _by_path: dict[str, list[ModuleCall]] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Something that a user should know of the search as a whole, said once."""
        if text not in self.notes:
            self.notes.append(text)

    def note_untrained(self, error: Exception) -> None:
        """The model does not run its example in training mode: a batch too small for its norms, or a loss that wants labels."""
        self.note(
            f"training mode was not tried: the model does not run its example in training mode ({brief_error(error)}). "
            "Give an example like a batch of the training data, of two samples or more"
        )

    def forget(self) -> None:
        """Let go of the run and its graph: sites are plain data, and what refers to itself would stay until it is collected."""
        self.calls.clear()
        self._by_path.clear()
        self.nodes.clear()
        self.output = None

    def calls_of(self, path: str) -> list[ModuleCall]:
        return self._by_path.get(path, [])

    def reaches(self, seen: SeenTensor) -> bool:
        """Whether a gradient of the model's output comes back to these values."""
        return seen.node is not None and seen.node in self.nodes

    def finish(self, output: Any) -> None:
        """The run is over: sort its calls by module, and walk once through the graph that led to the output."""
        self.output = output
        for call in self.calls:
            self._by_path.setdefault(call.path, []).append(call)
        self.nodes = all_before(t.grad_fn for t in tensors(output) if t.is_floating_point() or t.is_complex())


def record(model: nn.Module, example: Any, *, share: bool = False) -> Flow:
    """Run the example once, in eval mode, through a copy whose weights are a little moved; the model itself is only read.

    ``share``: the copy shares large parameters with the model, and the caller sees to it that nobody writes to them.
    """
    _check(model)
    if not is_sharded(model):
        check_whole(model)
    flow = Flow(_copy_to_run(model, share))
    flow.frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    flow.parameter_names = {id(p): name for name, p in flow.model.named_parameters()}
    given = to_device(example, device_of(model))
    put_back: Callable[[], None] | None = made_general(flow.model)
    while True:
        try:
            with random_state.kept(), torch.inference_mode(False), torch.enable_grad(), run_eagerly(), _watched(flow):
                output = run(flow.model, copy_example(given, nodes=flow.takes_gradients))
        except UnsupportedModel:
            raise
        except Exception as error:
            let_memory_through(error)
            if not flow.takes_gradients and put_back is None:
                given_as = describe(example) if isinstance(example, (tuple, list)) else f"({describe(example)})"
                raise BadExample(
                    f"the example {given_as} does not run through {type(model).__name__}: {type(error).__name__}: {error}. "
                    "Give a tensor, a tuple of arguments or a dict of keyword arguments, shaped like one batch of the training data."
                ) from error
            if put_back is None:
                # Some models refuse an input that asks for a gradient, and train all the same.
                flow.takes_gradients = False
        else:
            if put_back is None or _is_finite(output):
                hidden = {call.path for call in flow.calls if call.hidden and call.output and call.output.overwritten}
                if not hidden:
                    break
                flow.apart |= hidden
                continue
        if put_back is not None:  # once more with the weights as they are: not every model can take others
            put_back()
            put_back = None
    flow.finish(output)
    return flow


def check_values(example: Any) -> None:
    """Refuse an example without values."""
    if any(tensor.is_meta for tensor in tensors(example)):
        raise BadExample(
            f"the example ({describe(example)}) is on the meta device: it has shapes but no values, so nothing can be tried with it. "
            "Give a few samples of the training data."
        )


def _check(model: nn.Module) -> None:
    on_meta = next(
        (name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta), None
    )
    if on_meta is not None:
        raise UnsupportedModel(
            f"'{on_meta}' of {type(model).__name__} is on the meta device: it has a shape but no values, so there is nothing to run or "
            "to measure. Load the weights first (model.to_empty(device='cpu') allocates memory, load_state_dict fills it)."
        )


def _copy_to_run(model: nn.Module, share: bool) -> nn.Module:
    """A copy to run things on, in eval mode, all of its parameters asking for gradients."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            copied = unsharded_copy(model) if is_sharded(model) else copied_model(model, share=share)
    except UnsupportedModel:
        raise
    except Exception as error:
        let_memory_through(error)
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and sites are looked for on a copy so "
            "that the model stays as it is. Remove what cannot be copied (open files, locks, handles of other processes)."
        ) from error
    # Never chained: somebody's eval() returns None.
    copied.eval()
    for parameter in copied.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)
    return copied


@contextmanager
def _watched(flow: Flow) -> Iterator[None]:
    """Every call of every module is noted as long as the context lasts."""
    clock = count()
    open_calls: list[ModuleCall] = []

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if any(map(_is_batched, tensors((args, kwargs)))):
                raise UnsupportedModel(
                    f"{type(flow.model).__name__} calls {path or 'itself'} inside torch.vmap, where the values of a sample cannot be "
                    "looked at, so no place can be tried. Call the module on the whole batch instead, as most of torch's layers can be."
                )
            seen = [SeenTensor.of(t) for t in tensors((args, kwargs))]
            first = bool(args) and isinstance(args[0], Tensor)
            call = ModuleCall(path, module, next(clock), seen, first, args=args, kwargs=kwargs)
            flow.calls.append(call)
            open_calls.append(call)

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        call = open_calls.pop()
        while call.module is not module:  # that one raised, and the model's own code went on without it
            call = open_calls.pop()
        call.ended = next(clock)
        if apart := call.path in flow.apart:
            output = output.clone()
        _note_output(call, output)
        call.hidden = not apart and _is_own_view(module, call, output)
        return output

    handles: list[Any] = []
    flow.calls.clear()
    flow.opaque.clear()
    try:
        for path, module in flow.model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                flow.opaque.append(path)
                continue
            # Before the user's own hooks, as a layer in front of the module would be.
            handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for one sample of many inside `torch.vmap`, perhaps below another transform."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _is_own_view(module: nn.Module, call: ModuleCall, output: Any) -> bool:
    """Whether a layer gave a view of something that nobody else sees, as `nn.Linear` does for more than two dimensions."""
    if not isinstance(output, Tensor) or output._base is None or not module._parameters or module._modules:
        return False
    memory = output.untyped_storage().data_ptr()
    given = [seen.tensor for seen in call.inputs]
    held = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    return all(tensor.untyped_storage().data_ptr() != memory for tensor in (*given, *held))


def _note_output(call: ModuleCall, output: Any) -> None:
    call.returned = type(output).__name__
    value = first_tensor(output)
    if isinstance(output, Tensor):
        call.output = SeenTensor.of(output)
    elif value is not None and is_plain(output[1:]) and next(tensors(output[1:]), None) is None:
        call.shell = with_first(output, None)
    call.slot = None if value is None else value_slot(call.args, call.kwargs, value)
    if value is not None and call.slot is not None:
        given = value_at(call.args, call.kwargs, call.slot)
        call.given = next(seen for seen in call.inputs if seen.tensor is given)
        call.result = call.output or SeenTensor.of(value)


def copy_example(example: Any, *, nodes: bool = False) -> Any:
    """A copy of an example that does not share memory with the user's, and has separate graph nodes where they are wanted."""

    def copied(tensor: Tensor) -> Tensor:
        new = tensor.detach().clone()
        return new.requires_grad_().clone() if nodes and new.is_floating_point() else new

    return map_tensors(example, copied)


def _is_finite(output: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors(output) if t.is_floating_point() or t.is_complex())
