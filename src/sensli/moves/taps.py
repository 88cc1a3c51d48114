"""Where a value is caught as it passes a point: what the module gave or will be given is handed on as a separate view.

Only what goes through that view counts. The same tensor may be read elsewhere too (an in-place activation returns its input, a skip
connection reads it again), and what is sent back from there would not come to a layer at the point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sensli.errors import MeasurementError
from sensli.modules.arguments import first_tensor, value_at, with_first, with_value
from sensli.moves.point import Point

# From a value and the arguments of the module's call to the tensor that is handed on in its place.
Watch = Callable[[Tensor, tuple[Any, ...], dict[str, Any]], Tensor]


def tap(point: Point, module: nn.Module, watch: Watch, *, raw: bool = False) -> Any:
    """Catch the value of a point at its module in every pass with gradients; returns the handle that ends it.

    ``raw``: what the module itself gives, before hooks of the user change it; a layer after it would come after them.
    """
    if point.side == "after":
        return module.register_forward_hook(_after(point, watch), prepend=raw, with_kwargs=True)
    # before the user's own hooks, as the layer would be
    return module.register_forward_pre_hook(_before(point, watch), prepend=True, with_kwargs=True)


def handed_on(value: Tensor, point: Point) -> tuple[Tensor, Tensor]:
    """The value, asking for a gradient, and what is handed on instead of it: a view, or a copy where somebody will work in place on it.

    In place a view would be written through, and lose its gradient; a layer's output would not be, so a copy is what a layer would give.
    """
    asking = value if value.requires_grad else value.detach().requires_grad_()
    return asking, asking.clone() if point.overwritten else asking.view_as(asking)


def is_transformed(value: Tensor | None = None) -> bool:
    """Whether a pass runs inside of torch.func (grad, vmap, jvp), or a value carries a derivative of forward mode.

    Hooks on tensors see nothing of what such a derivative does to a loss.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return value is not None and forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None


def is_transformed_from(model: nn.Module) -> bool:
    """Whether such a pass takes the model's parameters: it does not where `functional_call` gives it values without a gradient."""
    return any(isinstance(each, nn.Parameter) or _inner(each).requires_grad for each in model.parameters())


def _inner(value: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def _after(point: Point, watch: Watch) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        value = first_tensor(output)
        if value is None or isinstance(output, Tensor) == point.first_part:
            raise MeasurementError(
                f"'{point.path}' returned {type(output).__name__} instead of the tensor that find_sites saw, so its merit "
                "cannot be measured. Find the sites with an example like the training data."
            )
        return with_first(output, watch(value, args, kwargs))

    return hook


def _before(point: Point, watch: Watch) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        value = value_at(args, kwargs, point.slot)
        if not isinstance(value, Tensor):
            raise MeasurementError(
                f"'{point.path}' was not called with a tensor as its {_named(point)}, as find_sites saw it, so its merit "
                "cannot be measured. Find the sites with an example like the training data."
            )
        return with_value(args, kwargs, point.slot, watch(value, args, kwargs))

    return hook


def _named(point: Point) -> str:
    if isinstance(point.slot, str):
        return f"argument {point.slot!r}"
    return f"argument {point.slot + 1}" if point.slot else "first argument"
