"""Optimizers that keep copies of their parameters, as those of other libraries do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class Ranger(SGD):
    """Every second step goes half of the way back to slow weights, which begin at the second step."""

    key = "slow_buffer"

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault(self.key, p.detach().clone())
                    slow.lerp_(p.detach(), 0.5)
                    p.data.copy_(slow)


class Unnamed(Ranger):
    """The same under a name that nobody knows."""

    key = "anchor"


class ScheduleFree(Optimizer):
    """Gradients at y, between the point z, which steps, and its mean x; the model has y."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "taken": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["taken"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["taken"])
                p.sub_(group["lr"] * p.grad, alpha=0.1)
                z.sub_(group["lr"] * p.grad)


class Lookahead(Optimizer):
    """Slow weights around another optimizer, in a state of its own, made when it is built."""

    inner = "optimizer"

    def __init__(self, optimizer: Optimizer) -> None:
        setattr(self, self.inner, optimizer)
        self.base, self.param_groups, self.defaults = optimizer, optimizer.param_groups, optimizer.defaults
        self.state = defaultdict(dict)
        self.taken = 0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow_params"] = p.detach().clone()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step(closure)
        self.taken += 1
        for group in self.param_groups if self.taken % 2 == 0 else ():
            for p in group["params"]:
                slow = self.state[p]["slow_params"]
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


class BaseLookahead(Lookahead):
    """The same with the optimizer where timm and SAM have theirs."""

    inner = "base_optimizer"


def ranger(parameters: Any) -> Optimizer:
    return Ranger(parameters, lr=0.1, momentum=0.9)


KEEPING_COPIES: dict[str, Callable[[Any], Optimizer]] = {
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1, t0=1.0),
    "Ranger": ranger,
    "a name that nobody knows": lambda parameters: Unnamed(parameters, lr=0.1, momentum=0.9),
    "schedule-free": lambda parameters: ScheduleFree(parameters, lr=0.1),
    "Lookahead": lambda parameters: Lookahead(SGD(parameters, lr=0.1, momentum=0.9)),
    "Lookahead around base_optimizer": lambda parameters: BaseLookahead(SGD(parameters, lr=0.1, momentum=0.9)),
}
