"""Steps of training: ordinary ones, and in between as many as possible that are replayed, which give the same numbers to the bit.

After each change of the model the first step is an ordinary one. The passes are recorded beside it, and replayed from then on if loss and
gradients were equal to the bit; so is the update, compared at the second step. What cannot be replayed is done as always.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from sensli.surgery.warmup import watch_steps
from sensli_lab.compare.task import Loss

# ---- A step's forward and backward pass, recorded once and replayed: the same operations on the same memory, without
# Python's modules and autograd's graph, which take several times as long as the products of networks this small.
#
# Every operation of one real pass is seen below autograd. Views and constants stay as they are, since all results are
# written again to where they were; what is left is called in order, with the recorded tensors. The kernels are those
# of an ordinary pass, so the results are, to the bit. What is not known to be replayable (random numbers, decisions
# by values, changes in place, buffers, hooks) is not recorded.

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_aten = torch.ops.aten


def _relu(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out)  # which is how torch computes it


# What writes to a given result, and the names of its results. Others are computed and copied.
_WRITING: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    _aten.addmm.default: (torch.addmm, ("out",)),
    _aten.mm.default: (torch.mm, ("out",)),
    _aten.relu.default: (_relu, ("out",)),
    _aten.add.Tensor: (torch.add, ("out",)),
    _aten.sub.Tensor: (torch.sub, ("out",)),
    _aten.mul.Tensor: (torch.mul, ("out",)),
    _aten.threshold_backward.default: (_aten.threshold_backward.grad_input, ("grad_input",)),
    _aten.sum.dim_IntList: (_aten.sum.IntList_out, ("out",)),
    _aten.mse_loss_backward.default: (_aten.mse_loss_backward.grad_input, ("grad_input",)),
    _aten._log_softmax.default: (_aten._log_softmax.out, ("out",)),
    _aten._log_softmax_backward_data.default: (_aten._log_softmax_backward_data.out, ("out",)),
    _aten.nll_loss_forward.default: (_aten.nll_loss_forward.output, ("output", "total_weight")),
    _aten.nll_loss_backward.default: (_aten.nll_loss_backward.grad_input, ("grad_input",)),
}
_COPIED = {_aten.sum.default, _aten.mse_loss.default}  # with a given result the loss changes the size of that
_CONSTANT = {_aten.ones_like.default}  # the gradient of the loss by itself


class Unknown(Exception):
    """An operation that is not known to do the same again."""


@dataclass
class Recorded:
    """The passes of one batch through a model as it is; its values may change, its parameters and modules may not."""

    _calls: list[Call]
    _batch: tuple[Tensor, Tensor]
    parameters: list[Tensor]  # those that have a gradient
    gradients: list[Tensor]  # of these; written by every replay
    loss: Tensor  # of the batch; written by every replay

    @torch.no_grad()
    def replay(self, x: Tensor, y: Tensor) -> None:
        """Loss and gradients of this batch, which has the shape of the recorded one."""
        for own, given in zip(self._batch, (x, y), strict=True):
            if own is not given:
                own.copy_(given)
        for call, args, named in self._calls:
            call(*args, **named)


def record_passes(model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], *, constant: bool) -> Recorded | None:
    """The passes of this batch, or None if they cannot be replayed. ``constant``: all batches are this one."""
    if any(True for _ in model.buffers()) or any(_hooked(module) for module in model.modules()):
        return None
    parameters: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
    if any(one._backward_hooks for one in parameters) or batch[0].device.type != "cpu":
        return None
    x, y = batch if constant else (batch[0].clone(), batch[1].clone())
    recorder = _Recorder()
    try:
        with torch.enable_grad(), recorder:
            value = loss(model(x), y)
            found = torch.autograd.grad(value, parameters, allow_unused=True)
    except Unknown:
        return None
    known = [(one, gradient) for one, gradient in zip(parameters, found, strict=True) if gradient is not None]
    if any(one.stride() != gradient.stride() for one, gradient in known):
        return None  # an optimizer would get a copy
    with_gradient, gradients = [one for one, _ in known], [gradient for _, gradient in known]
    return Recorded(recorder.calls, (x, y), with_gradient, gradients, value.detach())


class _Recorder(TorchDispatchMode):
    """Keeps every operation with its arguments and its results, without what autograd hangs on them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _CONSTANT or _is_view(func):
            return out
        if func not in _WRITING and func not in _COPIED and not _elementwise(func):
            raise Unknown(str(func))
        given, named, results = tree_map_only(Tensor, Tensor.detach, (args, kwargs, out))
        if func in _WRITING:
            call, names = _WRITING[func]
            kept = results if isinstance(results, tuple) else (results,)
            self.calls.append((call, given, {**named, **dict(zip(names, kept, strict=True))}))
        else:
            self.calls.append((_copying(func, results), given, named))
        return out


def _copying(func: Any, result: Tensor) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> None:
        result.copy_(func(*args, **named))

    return call


def _is_view(func: Any) -> bool:
    results = func._schema.returns
    return bool(results) and all(one.alias_info is not None and not one.alias_info.is_write for one in results)


def _elementwise(func: Any) -> bool:
    """A function of its arguments, entry by entry, that changes none of them."""
    tags = func.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not func._schema.is_mutable


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


# ---- The steps of plain SGD and Adam on all parameters at once, as torch's optimizers compute them, without what these
# ask at every step.
#
# The kernels are those of ``torch.optim`` and so are the results, to the bit: `steps` compares them before it relies
# on them. States stay the optimizer's, so that growths, checkpoints and averages find what they expect.


@dataclass
class UpdatePart:
    """Parameters of one group, with their gradients, that take equal steps; of Adam, those that have taken equally many."""

    group: dict[str, Any]  # alive: the learning rate changes
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    # what Adam keeps of each parameter; empty for SGD
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def step(self) -> None:
        """One step with the gradients as they are."""
        rate = float(self.group["lr"])
        if not self.steps:
            torch._foreach_add_(self.parameters, self.gradients, alpha=-rate)
            return
        beta1, beta2 = self.group["betas"]
        torch._foreach_add_(self.steps, 1)
        taken = self.steps[0].item()
        torch._foreach_lerp_(self.first, self.gradients, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, self.gradients, self.gradients, value=1 - beta2)
        size = torch._foreach_sqrt(self.second)
        torch._foreach_div_(size, (1 - beta2**taken) ** 0.5)
        torch._foreach_add_(size, self.group["eps"])
        torch._foreach_addcdiv_(self.parameters, self.first, size, value=-(rate / (1 - beta1**taken)))

    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        return [*self.parameters, *self.first, *self.second, *self.steps]


# Options that must have these values: everything that makes a step another one.
_PLAIN: dict[type[Optimizer], dict[str, Any]] = {
    SGD: {"momentum": 0, "weight_decay": 0, "nesterov": False, "maximize": False, "differentiable": False, "fused": None},
    Adam: {
        "weight_decay": 0, "amsgrad": False, "maximize": False, "capturable": False, "differentiable": False, "fused": None,
    },
}  # fmt: skip


def parts(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[UpdatePart] | None:
    """What is stepped together, or None if the optimizer is not one of these two.

    The parameters are all that have a gradient, and have taken a step with the optimizer already.
    """
    plain = _PLAIN.get(type(optimizer))
    if plain is None:
        return None
    gradient = {id(one): own for one, own in zip(parameters, gradients, strict=True)}
    found: dict[tuple[int, float], UpdatePart] = {}
    for number, group in enumerate(optimizer.param_groups):
        if any(group.get(name, value) != value for name, value in plain.items()) or isinstance(group["lr"], Tensor):
            return None
        for one in (each for each in group["params"] if id(each) in gradient):
            state = optimizer.state.get(one, {})
            if isinstance(optimizer, Adam) and "step" not in state:
                return None
            part = found.setdefault((number, float(state.get("step", 0))), UpdatePart(group))
            part.parameters.append(one)
            part.gradients.append(gradient.pop(id(one)))
            if "step" in state:
                part.first.append(state["exp_avg"])
                part.second.append(state["exp_avg_sq"])
                part.steps.append(state["step"])
    return None if gradient else list(found.values())


def step(optimizer: Optimizer, parts: Sequence[UpdatePart]) -> None:
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


PLAIN_EVERY = 64  # steps; the others in between are replayed


class ReplayedSteps:
    """The steps of a model that stays as it is but for its values; when it grows, begin another one.

    Args:
        model: The network.
        optimizer: Of all its parameters.
        loss: Of an output and a target.
        constant: Whether all batches are the same tensors.

    Attributes:
        plain: Seconds of an ordinary step, the quickest so far.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss, *, constant: bool) -> None:
        self.model, self.optimizer, self.loss, self.constant = model, optimizer, loss, constant
        self.plain = float("inf")
        self._taken = 0
        self._passes: Recorded | None = None
        self._parts: list[UpdatePart] | None = None

    def take(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; its loss."""
        number, self._taken = self._taken, self._taken + 1
        if number == 0:
            self.model.train()
            passes = record_passes(self.model, self.loss, (x, y), constant=self.constant)
            if passes is not None:
                passes.replay(x, y)
            return self._ordinary(x, y, passes)
        if self._passes is None or number % PLAIN_EVERY == 0:
            return self._ordinary(x, y)
        self._passes.replay(x, y)
        if self._parts is not None:
            step(self.optimizer, self._parts)
        else:
            self._update(self._passes, compared=number == 1)
        return self._passes.loss.clone()  # the next one is written over it

    def _ordinary(self, x: Tensor, y: Tensor, compared: Recorded | None = None) -> Tensor:
        """A step as everybody does it; passes that gave the same loss and gradients are replayed from then on."""
        began = time.perf_counter()
        self.model.train()
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        if compared is not None:
            known = [each for each in self.model.parameters() if each.grad is not None]
            found = [loss, *(each.grad for each in known)]
            same = [id(each) for each in known] == [id(each) for each in compared.parameters]
            if same and _equal(found, [compared.loss, *compared.gradients]):
                self._passes = compared
        self.optimizer.step()
        self.plain = min(self.plain, time.perf_counter() - began)
        return loss.detach()

    def _update(self, passes: Recorded, *, compared: bool) -> None:
        """The optimizer's step, and whether it can do without the optimizer from now on."""
        quick = parts(self.optimizer, passes.parameters, passes.gradients) if compared else None
        changing = [tensor for part in quick or () for tensor in part.tensors()]
        before = _copies(changing)
        states = {} if quick is None else {key: dict(state) for key, state in self.optimizer.state.items()}
        if quick is not None:
            step(self.optimizer, quick)
        after = _copies(changing)
        with torch.no_grad():
            for tensor, value in zip(changing, before, strict=True):
                tensor.copy_(value)
        for key, content in states.items():  # a warm-up has counted the step
            self.optimizer.state[key].clear()
            self.optimizer.state[key].update(content)
        watch_steps(self.optimizer)
        for parameter, gradient in zip(passes.parameters, passes.gradients, strict=True):
            parameter.grad = gradient  # a hook may have put another one there
        self.optimizer.step()
        self._parts = quick if quick is not None and _equal(changing, after) else None


@torch.no_grad()
def _equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]
