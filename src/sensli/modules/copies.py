"""Copies of a user's modules, to try things on or to be a twin, and where two models differ."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sensli.modules import grown
from sensli.modules.configs import is_configuration

T = TypeVar("T")

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip

_TABLES = (OrderedDict, dict, set)
_PLAIN = (type(None), bool, int, float, str)
_SHOWS = 2  # times larger than it is: a large map that is nearer to its size than that is seen well enough
_LARGE = 2**16  # entries of a parameter: smaller ones are copied, which costs nothing


def copied_model(
    model: nn.Module, instead: Mapping[int, Any] = MappingProxyType({}), *, share: bool = False
) -> nn.Module:
    """A deep copy; tensors that a module has cached together with their graph, which torch refuses to copy, lose the graph.

    ``instead``: what the copy has in place of objects of the model, by their id. ``share``: large parameters lie in the memory of the
    model's own, so that the copy costs next to nothing. Only inside of `OnlyRead` is it safe to run it.
    """
    shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in _shareable(model)} if share else {}
    return copy.deepcopy(model, {**_prepared(model), **shared, **instead})


def is_large(tensor: Tensor) -> bool:
    """Whether a tensor is so large that a search should not copy it."""
    return tensor.numel() >= _LARGE


def _shareable(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that a copy may share: not those of another class, such as what a lazy module fills when it first runs."""
    plain = (p for p in model.parameters() if type(p) is nn.Parameter and p.layout == torch.strided)
    return (p for p in plain if is_large(p) and not p.is_meta and not p.is_inference())


class SharedMemoryWritten(BaseException):
    """Somebody was about to write into memory that a copy shares with the model.

    Not an `Exception`: the model's code may catch those and go on.
    """


class OnlyRead(TorchDispatchMode):
    """Inside, nothing can be written into the memory of a model's large parameters: what tries to is stopped before it does."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = [parameter.untyped_storage() for parameter in _shareable(model)]
        self._memory = {storage._cdata for storage in self._held}

    def __bool__(self) -> bool:
        return bool(self._memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable and self._is_written(schema, args, kwargs or {}):
            raise SharedMemoryWritten
        return func(*args, **(kwargs or {}))

    def _is_written(self, schema: Any, args: Any, kwargs: Any) -> bool:
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._memory:
                        return True
        return False


def made_general(module: nn.Module) -> Callable[[], None]:
    """Move what is so by chance of its initialisation in a copy: constant parameters, and maps so small that they hardly show.

    Otherwise a block whose attention is divided by its number, say, would give what all the others give, but for rounding. What is
    returned puts everything back, to the bit.
    """
    kept: list[tuple[nn.Parameter, Tensor]] = []
    scaled: list[tuple[nn.Parameter, float]] = []
    apart: list[tuple[nn.Parameter, Tensor]] = []
    generator = torch.Generator().manual_seed(0)

    def put_back() -> None:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
            for parameter, factor in scaled:
                parameter.mul_(1 / factor)
            for parameter, value in apart:
                parameter.data = value

    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            low, high = parameter.detach().aminmax()
            if is_large(parameter):  # it may lie in the memory of somebody else's, and gets memory of its own
                if low == high:
                    apart.append((parameter, parameter.data))
                    noise = 0.1 * torch.randn(parameter.shape, generator=generator, device=generator.device)
                    parameter.data = parameter.data + noise.to(parameter.device, parameter.dtype)
                elif parameter.ndim >= 2 and (factor := _enlargement(parameter)) > _SHOWS:
                    apart.append((parameter, parameter.data))
                    parameter.data = parameter.data * factor
            elif low == high:
                kept.append((parameter, parameter.detach().clone()))
                noise = 0.1 * torch.randn(parameter.shape, generator=generator, device=generator.device)
                parameter.add_(noise.to(parameter.device, parameter.dtype))
            elif parameter.ndim >= 2 and (factor := _enlargement(parameter)) > 1:
                scaled.append((parameter, factor))
                parameter.mul_(factor)
    return put_back


def _enlargement(weight: Tensor) -> float:
    """The power of two, for exactness, that brings a map near the size at which values keep theirs on the way through it."""
    wanted = math.sqrt(len(weight))  # the norm of a matrix of orthonormal rows
    norm = torch.linalg.vector_norm(weight, dtype=torch.promote_types(weight.dtype, torch.float32)).item()
    return 2.0 ** math.floor(math.log2(wanted / norm)) if 0 < norm < wanted else 1.0


def copied_block(
    block: nn.Module,
    outside: nn.Module | None = None,
    *,
    share: bool = False,
    recorders: bool = False,
    instead: Mapping[int, Any] = MappingProxyType({}),
) -> nn.Module:
    """A copy of one block that carries none of the user's hooks and no mark of a growth.

    What the block has in common with modules around it in the model ``outside`` (a configuration, a table) it keeps having in common.
    ``share``: the parameters too are the block's own, not copies of them: a twin to be measured costs no memory. ``recorders``: hooks of
    transformers come along, by which its models collect what they return. ``instead``: as for `copied_model`.
    """
    memo = {**_prepared(block), **instead}
    parts = list(block.modules())
    held = {id(v): v for module in parts for v in vars(module).values() if is_configuration(v)}
    if outside is not None and held:
        inner = {id(module) for module in parts}
        around = {id(v) for module in outside.modules() if id(module) not in inner for v in vars(module).values()}
        memo.update({key: value for key, value in held.items() if key in around})
    for module in parts:
        for name in _HOOKS:
            hooks = getattr(module, name, None)
            if hooks is not None:
                memo[id(hooks)] = _own_hooks(module, name, recorders)
    if share:
        memo.update({id(p): p for p in block.parameters()})
    twin = copy.deepcopy(block, memo)
    for module in twin.modules():
        for name in grown.ALL:
            module.__dict__.pop(name, None)
    return twin


def _prepared(module: nn.Module) -> dict[int, Any]:
    """What a deep copy is told beforehand, by the id of what is copied.

    Every tensor with a graph that a module has cached, in an attribute or in a nest of them, comes without it. Most of what a module
    holds are empty tables of hooks, which `copy` takes its time over: they are made here.
    """
    found: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            kind = type(value)
            if kind in _TABLES and not value:
                found[id(value)] = kind()
            elif kind not in _PLAIN:
                found.update({id(t): t.detach().clone() for t in _cached(value) if not t.is_leaf})
    return found


def _cached(value: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (dict, list, tuple, set)):
        for part in value.values() if isinstance(value, dict) else value:
            if not isinstance(part, nn.Module):
                yield from _cached(part, depth - 1)


def made_by(hook: Any) -> str:
    """The package that the function of a hook comes from; a method, a partial or an object counts as what is behind it."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or "").partition(".")[0]


def _own_hooks(module: nn.Module, name: str, recorders: bool) -> Any:
    """The hooks that are part of how the module works (weight norm of the old kind); the user's stay with the user's module."""
    hooks = getattr(module, name)
    base = getattr(module, name.replace("_with_kwargs", "").replace("_always_called", ""))
    kept = type(hooks)()
    for key, value in hooks.items():
        hook = base.get(key)
        if type(hook).__module__.startswith("torch.") or (recorders and made_by(hook) == "transformers"):
            kept[key] = value
    return kept


# ---- Whether two models have the same architecture, and if not, where they first differ.

Named: TypeAlias = tuple[str, nn.Module]


def first_difference(one: nn.Module, other: nn.Module) -> str:
    """The first difference, in words; empty if there is none. Values, types of numbers, devices and modes may differ."""
    pairs = zip_longest(one.named_modules(remove_duplicate=False), other.named_modules(remove_duplicate=False))
    for own, its in pairs:
        if own is None or its is None or own[0] != its[0]:
            return _named_otherwise(one, other, own, its)
        (path, module), (_, again) = own, its
        place = f"'{path}'" if path else "the model"
        if _kind(module) != _kind(again):
            return f"{place} is {_shown(module)} there and {_shown(again)} in other"
        if _settings(module) != _settings(again):
            return f"{place} is {_shown(module)}({_settings(module)}) there and {_shown(again)}({_settings(again)}) in other"
        shapes, its_shapes = _shapes(module), _shapes(again)
        for name in {**shapes, **its_shapes}:
            if shapes.get(name) != its_shapes.get(name):
                whole = f"{path}.{name}" if path else name
                return f"{whole} is {_shape(shapes, name)} there and {_shape(its_shapes, name)} in other"
    return ""


def _named_otherwise(one: nn.Module, other: nn.Module, own: Named | None, its: Named | None) -> str:
    """Two modules in the same position that have different paths, or only one of them."""
    for named, model, text in ((own, other, "other has no module '{}'"), (its, one, "only other has a module '{}'")):
        if named is not None and named[0] not in dict(model.named_modules(remove_duplicate=False)):
            return text.format(named[0])
    return f"the modules of other come in another order, beginning with '{own[0] if own else ''}'"


def _kind(module: nn.Module) -> tuple[str, str]:
    # By name: a factory that defines its class inside makes another class at every call.
    return type(module).__module__, type(module).__qualname__


def _shown(module: nn.Module) -> str:
    return type(module).__name__


def _settings(module: nn.Module) -> str:
    """What torch prints of the layers that it has; what a user's module prints may be values."""
    return module.extra_repr() if type(module).__module__.startswith("torch.") else ""


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    # Not those buffers that are not saved: a cache is as large as what was computed last.
    saved = ((name, value) for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set)
    named = (*module._parameters.items(), *saved)
    return {name: None if tensor is None else tuple(tensor.shape) for name, tensor in named}


def _shape(shapes: dict[str, tuple[int, ...] | None], name: str) -> str:
    return f"of shape {shapes[name]}" if shapes.get(name) is not None else "missing"


# ---- A model without its dropout, whatever mode it is in.

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.multi_head_attention_forward,
}  # fmt: skip


class NoDropout(TorchFunctionMode):
    """Dropout as in eval mode, and everything else as it is; also where it is called as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        if func is F.scaled_dot_product_attention:  # query, key, value, mask, dropout_p
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


# ---- A pass whose graph nobody goes back through.


def without_saving(work: Callable[[], T], *, unless: bool = False) -> T:
    """What some work gives whose graph nobody goes back through: nothing is saved for that, ``unless`` the work needs it.

    Work that takes a gradient all the same is done again, and saves. Its own hooks of saved tensors count, those around it do not.
    """
    asked = False

    def missing(nothing: Any) -> Tensor:
        nonlocal asked
        asked = True
        raise RuntimeError("nothing was saved for a gradient")

    if not unless:
        try:
            with saved_tensors_hooks(lambda value: None, missing):
                done = work()
            if not asked:
                return done
        except Exception:
            if not asked:
                raise
    with saved_tensors_hooks(lambda value: value, lambda value: value):
        return work()


def hold_buffers(model: nn.Module) -> Callable[[], None]:
    """How to put back what a pass of a copy changes in its buffers."""
    held = [
        (module, {name: None if one is None else one.detach().clone() for name, one in module._buffers.items()})
        for module in model.modules()
    ]

    def put_back() -> None:
        for module, buffers in held:
            module._buffers.update({name: None if one is None else one.clone() for name, one in buffers.items()})

    return put_back
