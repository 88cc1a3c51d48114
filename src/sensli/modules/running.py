"""Calling a user's model: its arguments, devices, shards, precision and random numbers, and putting back what a run would change."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from sensli.modules import random_state

HALF = (torch.float16, torch.bfloat16)


def run(model: nn.Module, example: Any) -> Any:
    """Call the model: a tensor is its only argument, a tuple its arguments, a dict its keyword arguments.

    Keys that ``forward`` does not take, such as labels, are left out: a batch of the training data can be the example.
    """
    if isinstance(example, dict):
        return model(**(taken_by(model, example) or example))  # with none of them, torch says what is missing
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(example)


def taken_by(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that ``forward`` takes; all of them where it takes any."""
    try:
        known = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # written in C, or says nothing of its arguments
        return given
    if any(each.kind is each.VAR_KEYWORD for each in known):
        return given
    names = {each.name for each in known if each.kind is not each.VAR_POSITIONAL}
    return {name: value for name, value in given.items() if name in names}


def describe(example: Any) -> str:
    """The shapes of an example, for error texts."""
    if isinstance(example, Tensor):
        return f"{str(example.dtype).removeprefix('torch.')} tensor of shape {tuple(example.shape)}"
    if isinstance(example, (tuple, list)):
        return "(" + ", ".join(describe(part) for part in example) + ")"
    if isinstance(example, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in example.items()) + "}"
    return type(example).__name__


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors(getattr(value, entry.name, None))


def map_tensors(
    value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The same nest of tuples, lists and dicts with every tensor changed; other values as they are, or as ``other`` makes them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change, other) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(part, change, other) for part in value)
    if isinstance(value, dict):
        return {key: map_tensors(part, change, other) for key, part in value.items()}
    return other(value)


def to_device(value: Any, device: torch.device | None) -> Any:
    """The same nest of tensors on a device. Those that were made in inference mode become ordinary ones, which autograd takes."""
    value = map_tensors(value, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)
    if device is None:
        return value
    # What comes to the host is waited for: until a copy has arrived, anybody would read what was there before.
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def is_capable(device: torch.device) -> bool:
    """Whether it surely has double precision, complex numbers and eigenvalues; MPS has none of them."""
    return device.type in ("cpu", "cuda")


def to_capable(tensor: Tensor) -> Tensor:
    """The tensor where all of these can be computed: there, or on the CPU."""
    return tensor if is_capable(tensor.device) else tensor.cpu()


def upcast(value: Any) -> Any:
    """The same nest with half precision turned into single."""
    return map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)


def decompose(function: Callable[[Tensor], Any], matrix: Tensor) -> Any:
    """What a function of torch.linalg finds: in double precision where it does not converge in single.

    LAPACK fails so on ordinary matrices of low rank, rarely: with an error or, on the CPU, with results that are not numbers.
    """
    try:
        found = function(matrix)
        if not matrix.is_cpu or not matrix.isfinite().all() or all(part.isfinite().all() for part in tensors(found)):
            return found
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass
    found = function(matrix.to("cpu", torch.promote_types(matrix.dtype, torch.float64)))
    parts = [
        part.to(matrix.device, matrix.dtype if part.is_complex() else matrix.dtype.to_real()) for part in tensors(found)
    ]
    return parts[0] if isinstance(found, Tensor) else tuple(parts)


def device_of(model: nn.Module) -> torch.device | None:
    """The device of the model's first parameter or buffer."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return None if first is None else first.device


LITTLE = 2e8  # operations below which threads wait for each other longer than they compute
_alone: dict[int, int] = {}  # threads that compute alone now; how many there were before the first of them
_one_at_a_time = threading.Lock()


@contextmanager
def fit_threads(operations: float = 0.0) -> Iterator[None]:
    """Compute with one thread where there is so little to do, and afterwards with as many as before."""
    me = threading.get_ident()
    if operations > LITTLE or me in _alone or not torch.backends.openmp.is_available():
        yield
        return
    with _one_at_a_time:
        before = torch.get_num_threads()  # asked first: a thread that was not has the number that was set last anywhere
        _alone[me] = next(iter(_alone.values()), before)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _one_at_a_time:
            torch.set_num_threads(_alone.pop(me))


def undraw_hooks(module: nn.Module) -> list[Any]:
    """Hooks after which the random numbers that a module draws are given back: nobody after it gets others than without it."""
    states: list[dict[str, Any]] = []

    def before(*_: Any) -> None:
        states.append(random_state.of_torch())

    def after(*_: Any) -> None:
        random_state.restore_torch(states.pop())

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and random state are put back when the context ends."""
    kept = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    with random_state.kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, values in kept:
                    module._buffers[name] = buffer  # a forward may bind the name to another tensor
                    # Written only where it moved: a graph that the user holds may have saved the buffer.
                    if buffer is not None and values is not None and not equal_tensors(buffer, values, fast=False):
                        buffer.copy_(values)


@contextmanager
def gradients_kept(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Gradients are put back when the context ends: the user's code may call ``backward()``. Inside there are none: nothing is copied."""
    kept = [(leaf, leaf.grad) for leaf in leaves]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in kept:
            leaf.grad = gradient


def nothing_like(gradient: Tensor) -> Tensor | None:
    """What a hook gives back that has taken a gradient: zeros without memory, so that autograd does not hold it to the end of its pass.

    None, which leaves it as it is, where autograd expects something else in its place.
    """
    plain = gradient.layout == torch.strided and not torch.is_grad_enabled()
    return gradient.new_zeros(()).expand_as(gradient) if plain else None


# ---- The arguments of a block's call: which of them is the value that flows through the stack, and how to call the block
# again.

Slot = int | str  # a position among the arguments or a keyword

_PLAIN = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice)


def value_slot(args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Tensor) -> Slot | None:
    """Where the value is that a block maps into its own space: the first tensor shaped and typed like what it returns."""
    slots: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
    for slot, value in slots:
        if isinstance(value, Tensor) and value.shape == like.shape and value.dtype == like.dtype:
            return slot
    return None


def value_at(args: tuple[Any, ...], kwargs: Mapping[str, Any], slot: Slot) -> Any:
    """The argument in a slot, or None if the call has no such argument."""
    if isinstance(slot, str):
        return kwargs.get(slot)
    return args[slot] if slot < len(args) else None


def with_value(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], slot: Slot, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another value in the slot."""
    if isinstance(slot, str):
        return args, {**kwargs, slot: value}
    return (*args[:slot], value, *args[slot + 1 :]), dict(kwargs)


def first_tensor(output: Any) -> Tensor | None:
    """What a block hands on: its output, or the first part of a tuple."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def with_first(output: Any, value: Any) -> Any:
    """The same output with another first tensor."""
    if isinstance(output, Tensor):
        return value
    if hasattr(output, "_fields"):
        return type(output)(value, *output[1:])
    return type(output)((value, *output[1:]))


def is_plain(value: Any) -> bool:
    """Whether an argument is data without a memory: a second call with it is like the first."""
    if isinstance(value, (tuple, list)):
        return all(is_plain(part) for part in value)
    if isinstance(value, dict):
        return all(is_plain(part) for part in value.values())
    return isinstance(value, _PLAIN)


def without_memory(value: Any) -> Any:
    """The arguments without objects that a call may have changed, such as a cache; and nothing in them carries a graph."""
    return map_tensors(value, Tensor.detach, lambda other: other if isinstance(other, _PLAIN) else None)


# ---- Tensors that may be sharded by `fully_shard`, which each of them knows of itself.


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (all processes must call together), or the tensor itself."""
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach() if full is None else full().detach()


def distributed_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor of the shape of a parameter, sharded as the parameter is; anything else as it is."""
    return tensor if tensor.shape != parameter.shape else sharded_like(tensor, parameter)


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor of any shape, sharded as another one is, with the values of the first process; whole if the other is."""
    if not hasattr(other, "full_tensor") or hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.detach().to(other.device), other.device_mesh, other.placements)  # type: ignore[attr-defined]


def put(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor, whole or sharded, other values of another shape; whoever holds it sees them. A gradient of the old shape goes."""
    tensor.grad = None
    tensor.data = value
    if hasattr(tensor, "full_tensor"):  # torch changes the outside of a sharded tensor only
        tensor._local_tensor, tensor._spec = value._local_tensor, value._spec  # type: ignore[attr-defined]


def empty_like(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    """Room for a tensor that belongs to a parameter: sharded as the parameter is if it has its shape, else whole."""
    if parameter is not None and tensor.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=None if parameter is None else parameter.device)


# ---- A batch cut down to its first samples: enough to see what a model does, at a fraction of the cost.


def count_samples(value: Any) -> int:
    """How many samples a nest of tensors holds: the leading dimension of the first; 0 where it has none."""
    first = next(tensors(value), None)
    return first.shape[0] if first is not None and first.dim() else 0


def first_samples(value: Any, few: int, count: int) -> Any:
    """The first few of so many samples; a tensor with another leading dimension belongs to all of them and stays whole."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:few] if tensor.dim() and tensor.shape[0] == count else tensor

    return map_tensors(value, cut)


def with_another(value: Any) -> Any:
    """A nest of one sample, and one more like it: statistics of a batch need two. Unlike it too, or their spread would be zero."""

    def twice(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != 1:
            return tensor
        return torch.cat([tensor, tensor / 2 if tensor.is_floating_point() else tensor])

    return map_tensors(value, twice) if count_samples(value) == 1 else value


# ---- How far a tensor moved: to the bit, where not a number equals not a number, and beyond what kernels round
# differently.


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Entry by entry, where nan equals nan."""
    return (one == other) | ((one != one) & (other != other))


def equal_tensors(one: Tensor, other: Tensor, *, fast: bool = True) -> bool:
    """To the bit, where nan equals nan. ``fast``: quicker where they are equal, but a device is waited for twice where they are not."""
    return one.shape == other.shape and bool((fast and torch.equal(one, other)) or _same(one, other).all())


def relative_change(old: Tensor, new: Tensor, *, exact: bool = False) -> float:
    """The largest change relative to the largest value; 0 within rounding, or with ``exact`` in double precision to the bit."""
    if equal_tensors(old, new):
        return 0.0
    if not (old.is_floating_point() or old.is_complex()):
        return float("inf")
    old, new = to_capable(old), to_capable(new)
    same = _same(old, new)  # infinite or not a number before and after is not a change
    wide = torch.complex128 if old.is_complex() else torch.float64
    difference = torch.nan_to_num((new.to(wide) - old.to(wide))[~same].abs(), nan=float("inf")).max().item()
    size = torch.nan_to_num(old.to(wide).abs(), nan=0.0, posinf=0.0).max().item()
    found = difference / max(size, 1e-30)
    return 0.0 if found <= (0.0 if exact else rounding(old.dtype)) else found


def rounding(dtype: torch.dtype) -> float:
    """What two runs of one function may differ by where memory lies otherwise. Half precision is coarse enough as it is."""
    return (2 if dtype in HALF else 100) * torch.finfo(dtype).eps


# ---- Mixed precision or inference mode around a call of ours: what we compute about a model is computed as if they were
# not there.
#
# In half precision a layer that is not exact looks exact, products of ours would lose their digits, and the graph of
# a run is full of casts. What is made in inference mode can never be trained.

_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "privateuseone")


@contextmanager
def without_autocast() -> Iterator[None]:
    """No autocast as long as the context lasts, even inside of somebody's `torch.autocast`, and no inference mode; also a decorator.

    Weights may have changed meanwhile, so what was cast of them before is forgotten.
    """
    devices = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    try:
        with ExitStack() as stack:
            stack.enter_context(without_inference_mode())
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        if devices:
            torch.clear_autocast_cache()


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """No inference mode as long as the context lasts; also a decorator."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # it turns gradients on
        yield


def autocast_of_now() -> Callable[[], AbstractContextManager[None]]:
    """The autocast that is around this call, to run the user's own code with it inside of `without_autocast`."""
    dtypes = {device: torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)}
    cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for device, dtype in dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cached))
            yield

    return again


# ---- What a model's code raises while something is tried: memory that ran out goes through, other failures are noted.

_failures: ContextVar[list[str] | None] = ContextVar("failures", default=None)

# How torch says it without a class of its own: on the CPU, on MPS, in a library of CUDA.
_TEXTS = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which says nothing of the model: with more of it the same would have run."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def brief_error(error: BaseException) -> str:
    """An error as a part of a sentence: its class, and the beginning of what it says."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:120]}"


def let_memory_through(error: BaseException) -> None:
    """For whoever goes on without what raised: raise the error again if memory ran out."""
    if is_out_of_memory(error):
        raise error


@contextmanager
def forgiven() -> Iterator[None]:
    """Failures end the context and are forgotten, unless memory ran out."""
    try:
        yield
    except Exception as error:
        let_memory_through(error)


def note(error: Exception) -> None:
    """Raise an error again if memory ran out; others of a model's code are noted: they may pass, and what they led to with them."""
    let_memory_through(error)
    failures = _failures.get()
    if failures is not None:
        failures.append(f"{type(error).__name__}: {error}")  # not the error, which holds all that ran


@contextmanager
def noting() -> Iterator[list[str]]:
    """What is noted as long as the context lasts."""
    failures: list[str] = []
    token = _failures.set(failures)
    try:
        yield failures
    finally:
        _failures.reset(token)


def tf32_note(device: torch.device | None, convolutions: bool, products: bool) -> str | None:
    """What to say of a model on this device where TF32 is on for its convolutions, or for its matrix products."""
    found = [what for what, on in (("convolutions", convolutions), ("matrix products", products)) if on]
    if device is None or device.type != "cuda" or not found:
        return None
    return (
        f"TF32 is on for {' and '.join(found)}, so identities are not exact on {device}: other layers may be offered than on a CPU. To "
        "avoid it, set torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32 to False"
    )


def tf32_note_of(model: nn.Module) -> str | None:
    """The same for a model with the flags as they are; None where it has nothing in single precision that TF32 would change."""
    device = device_of(model)
    if device is None or device.type != "cuda" or not torch.cuda.is_tf32_supported():
        return None
    shapes = {p.dim() for p in model.parameters() if p.dtype == torch.float32}
    backends = torch.backends
    return tf32_note(
        device,
        max(shapes, default=0) > 2
        and _flag(lambda: backends.cudnn.allow_tf32, lambda: backends.cudnn.conv.fp32_precision),  # type: ignore[attr-defined]
        2 in shapes and _flag(lambda: backends.cuda.matmul.allow_tf32, lambda: backends.cuda.matmul.fp32_precision),
    )


def _flag(old: Callable[[], bool], new: Callable[[], str]) -> bool:
    try:
        return old()
    except RuntimeError:  # somebody has set the newer flags, and the older one no longer says it
        return new() == "tf32"
