"""The steps of plain SGD and Adam on all parameters at once, as torch's optimizers compute them, without what these ask at every step.

The kernels are those of ``torch.optim`` and so are the results, to the bit: `steps` compares them before it relies on them. States stay
the optimizer's, so that growths, checkpoints and averages find what they expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

Group = dict[str, Any]


@dataclass(frozen=True)
class Moments:
    """What Adam keeps of parameters that have taken equally many steps."""

    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


@dataclass
class Part:
    """Parameters of one group, with their gradients, that take equal steps."""

    group: Group  # alive: the learning rate changes
    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: Moments | None = None

    @torch.no_grad()
    def step(self) -> None:
        """One step with the gradients as they are."""
        rate = float(self.group["lr"])
        if self.moments is None:
            torch._foreach_add_(self.parameters, self.gradients, alpha=-rate)
            return
        (beta1, beta2), own = self.group["betas"], self.moments
        torch._foreach_add_(own.steps, 1)
        taken = own.steps[0].item()
        torch._foreach_lerp_(own.first, self.gradients, 1 - beta1)
        torch._foreach_mul_(own.second, beta2)
        torch._foreach_addcmul_(own.second, self.gradients, self.gradients, value=1 - beta2)
        size = torch._foreach_sqrt(own.second)
        torch._foreach_div_(size, (1 - beta2**taken) ** 0.5)
        torch._foreach_add_(size, self.group["eps"])
        torch._foreach_addcdiv_(self.parameters, own.first, size, value=-(rate / (1 - beta1**taken)))

    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        own = self.moments
        return [*self.parameters, *([] if own is None else [*own.first, *own.second, *own.steps])]


# Options that must have these values: everything that makes a step another one.
_PLAIN: dict[type[Optimizer], dict[str, Any]] = {
    SGD: {"momentum": 0, "weight_decay": 0, "nesterov": False, "maximize": False, "differentiable": False, "fused": None},
    Adam: {
        "weight_decay": 0, "amsgrad": False, "maximize": False, "capturable": False, "differentiable": False, "fused": None,
    },
}  # fmt: skip


def parts(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Part] | None:
    """What is stepped together, or None if the optimizer is not one of these two.

    The parameters are all that have a gradient, and have taken a step with the optimizer already.
    """
    plain = _PLAIN.get(type(optimizer))
    if plain is None:
        return None
    gradient = {id(one): own for one, own in zip(parameters, gradients, strict=True)}
    found: list[Part] = []
    for group in optimizer.param_groups:
        if any(group.get(name, value) != value for name, value in plain.items()) or isinstance(group["lr"], Tensor):
            return None
        known = [one for one in group["params"] if id(one) in gradient]
        for one in known:
            state = optimizer.state.get(one, {})
            if isinstance(optimizer, Adam) and "step" not in state:
                return None
            part = _part_for(found, group, state.get("step"))
            part.parameters.append(one)
            part.gradients.append(gradient.pop(id(one)))
            if part.moments is not None:
                part.moments.first.append(state["exp_avg"])
                part.moments.second.append(state["exp_avg_sq"])
                part.moments.steps.append(state["step"])
    return None if gradient else found


def step(optimizer: Optimizer, parts: Sequence[Part]) -> None:
    """One step of all parts, between what hangs on the steps of the optimizer."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if before:
        for part in parts:
            for one, gradient in zip(part.parameters, part.gradients, strict=True):
                one.grad = gradient
        for hook in before.values():
            hook(optimizer, (optimizer,), {})
        parts = [replace(part, gradients=[one.grad for one in part.parameters]) for part in parts]  # type: ignore[misc]
    for part in parts:
        part.step()
    for hook in after.values():
        hook(optimizer, (optimizer,), {})


def _part_for(found: list[Part], group: Group, step: Tensor | None) -> Part:
    for part in found:
        if part.group is group and (step is None or part.moments is None or bool(part.moments.steps[0] == step)):
            return part
    found.append(Part(group, [], [], None if step is None else Moments([], [], [])))
    return found[-1]
