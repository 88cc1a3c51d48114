"""A trial at a look: each network trains on the model itself, from the same state, and everything is put back before the next one.

Nothing is copied but values: the user's step gets the user's own model and optimizer, wrappers included, and whoever holds a parameter
still holds it afterwards. When the winner is known, the Grower makes its growth once more, and the values that it ended with go in.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import MeasurementError
from sensli.growing.following import Followers
from sensli.growing.options import EXTRAS, Options, Trial, named_arguments
from sensli.merits.catching import LossFunction, scalar_loss, split_batch
from sensli.merits.merits import Merit
from sensli.modules import checks, random_state
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Together
from sensli.modules.running import count_samples, device_of, run, to_device
from sensli.modules.wrappers import bare, wrappers_around
from sensli.surgery.history import History
from sensli.surgery.optimizers import as_list, memberships
from sensli.surgery.record import NO_GROWTH, Tried, TriedArm


class TrialSteps:
    """Takes steps with what the Grower was given, and tells the loss of each."""

    def __init__(self, trial: Trial, model: nn.Module, followers: Followers, loss_fn: LossFunction | None) -> None:
        self._trial, self._model, self._followers, self._loss_fn = trial, model, followers, loss_fn
        names = [] if trial.step is None else named_arguments(trial.step, EXTRAS)
        self._extras = {name: getattr(followers, name) for name in names}
        if trial.step is None and not model.training:
            model.train()  # a loop that has just evaluated would do so before its next step

    def __call__(self, batch: Any, index: int) -> float:
        # What autocast has cast of the weights it keeps until its context ends, which may be around all of the trial.
        torch.clear_autocast_cache()
        if self._trial.step is None:
            return self._plain(batch, index)
        loss = self._trial.step(self._model, self._followers.optimizer, batch, **self._extras)
        if self._trial.metric is not None:
            return 0.0  # nobody asks for it
        return checks.number("what step(model, optimizer, batch) returns", loss, "the loss of the batch, a number")

    def _plain(self, batch: Any, index: int) -> float:
        own = None if self._loss_fn is None else bare(self._model)  # without a loss all keys of a batch go to the model
        given, target = split_batch(batch, index, own)
        device = device_of(self._model)
        for optimizer in self._followers.optimizers:
            optimizer.zero_grad()
        output = run(self._model, to_device(given, device))
        loss = scalar_loss(output, to_device(target, device), self._loss_fn, index)
        if not loss.requires_grad:
            raise MeasurementError(
                f"the loss of batch {index} of the trial has no gradient, so no step can be taken. Check that loss_fn uses the model's "
                "output and that nothing detaches it."
            )
        loss.backward()
        for optimizer in self._followers.optimizers:
            optimizer.step()
        return float(loss.detach())


# ---- All that training changes, at one context: taken by value, and put back in place, so that whoever holds a parameter
# still holds it.

_PLAIN = (bool, int, float, str, type(None))
_MEMBERS = ("params", "param_names")  # of a group: which parameters it has follows from the growths


class Snapshot:
    """Values of a model, its averages, optimizers, schedulers and other objects with a state, and of the random states.

    Everything is known by its name or position: the values also fit the same model after the same growths were made again.
    """

    def __init__(self, model: nn.Module, followers: Followers, stateful: Sequence[Any] = ()) -> None:
        self._modes = [(wrapper, wrapper.training) for wrapper in wrappers_around(model)[:-1]]
        self._roots: list[nn.Module] = [bare(model), *as_list(followers.averaged)]
        self._modules = [{path: _Module(module) for path, module in root.named_modules()} for root in self._roots]
        self._optimizers = [(each, _Optimizer(each)) for each in followers.optimizers]
        holders = [*as_list(followers.scheduler), *stateful]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in holders]
        self._random = random_state.capture()

    def restore(self) -> None:
        """Put all values back. The model must have the growths that it had."""
        for wrapper, mode in self._modes:
            wrapper.training = mode
        with torch.no_grad():
            for root, saved in zip(self._roots, self._modules, strict=True):
                for path, module in root.named_modules():
                    saved[path].restore(module)
            for optimizer, state in self._optimizers:
                state.restore(optimizer)
        for holder, values in self._states:
            holder.load_state_dict(copy.deepcopy(values))
        random_state.restore(self._random)


class _Module:
    """Parameters with their gradients, buffers, and plain attributes (the mode, counters) of one module, without those in it."""

    def __init__(self, module: nn.Module) -> None:
        known = _present(module._parameters)
        self._parameters = {name: (_clone(p), _clone(p.grad), p.requires_grad) for name, p in known}
        # A forward pass may bind the name to another tensor, so the tensor itself is kept too.
        self._buffers = {name: (buffer, _clone(buffer)) for name, buffer in module._buffers.items()}
        self._plain = _Plain(module)

    def restore(self, module: nn.Module) -> None:
        for name, parameter in _present(module._parameters):
            value, gradient, trains = self._parameters[name]
            parameter.copy_(value)
            if isinstance(parameter.grad, Tensor) and gradient is not None and _alike(parameter.grad, gradient):
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = _clone(gradient)
            parameter.requires_grad_(trains)
        for name, (buffer, values) in self._buffers.items():
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.copy_(values)
        self._plain.restore(module)


class _Optimizer:
    """Settings of the groups and states of the parameters of one optimizer, by position."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key not in _MEMBERS}
            for group in optimizer.param_groups
        ]
        known = [parameter for _, _, parameter in memberships([optimizer])]
        self._states = [copy.deepcopy(optimizer.state[p]) if p in optimizer.state else None for p in known]
        # Some optimizers keep more than the states of parameters there.
        members = {id(parameter) for parameter in known}
        self._others = {key: copy.deepcopy(v) for key, v in optimizer.state.items() if id(key) not in members}
        self._plain = _Plain(optimizer)

    def restore(self, optimizer: Optimizer) -> None:
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            _put(group, saved, keep=_MEMBERS)
        known = [parameter for _, _, parameter in memberships([optimizer])]
        for parameter, state in zip(known, self._states, strict=True):
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                _put(optimizer.state[parameter], state)
        members = {id(parameter) for parameter in known}
        for key in [key for key in optimizer.state if id(key) not in members]:
            del optimizer.state[key]
        optimizer.state.update(copy.deepcopy(self._others))
        self._plain.restore(optimizer)


class _Plain:
    """The attributes of an object that are plain numbers, strings or None."""

    def __init__(self, thing: object) -> None:
        self._names = set(vars(thing))
        self._values = dict(self._of(thing))

    @staticmethod
    def _of(thing: object) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in vars(thing).items() if isinstance(value, _PLAIN))

    def restore(self, thing: object) -> None:
        for name in [name for name, _ in self._of(thing) if name not in self._names]:
            del vars(thing)[name]
        vars(thing).update(self._values)


def _put(holder: MutableMapping[str, Any], saved: MutableMapping[str, Any], keep: Sequence[str] = ()) -> None:
    """Give a mapping its values back; tensors in place where they can be, because a captured graph reads these very tensors."""
    for key in [key for key in holder if key not in saved and key not in keep]:
        del holder[key]
    for key, value in saved.items():
        now = holder.get(key)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and _alike(now, value):
            now.copy_(value)
        else:
            holder[key] = copy.deepcopy(value)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _present(parameters: Any) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in parameters.items() if parameter is not None)


def _clone(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone()


PASSES = 3  # a backward pass costs about two forward passes


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: the growth that won, if any, and the values that its network ended with."""

    tried: Tried
    winner: Merit | None
    _end: Snapshot

    def take_over(self) -> None:
        """Give the model, which has the winner's growth by now, and all that follows it the values that the winner ended with."""
        self._end.restore()


@dataclass(frozen=True)
class Trying:
    """One trial of a Grower: the model, what follows it, and how to try."""

    trial: Trial
    model: nn.Module
    followers: Followers
    history: History
    options: Options
    flops: int  # of the model as it is, per sample
    together: Together

    def run(
        self, candidates: Sequence[Merit], batches: Iterable[Any], loss_fn: LossFunction | None, change: AllOrNothing
    ) -> Outcome:
        """Train every network and put everything back. What to do if this step fails, now or later, is told to the ``change``."""
        source = batches if self.trial.batches is None else self.trial.batches
        change.on_failure(partial(random_state.restore, random_state.capture()))
        change.on_failure(random_state.capture_of_loader(source))
        drawn = _drawn(source, self.trial.steps)
        start = self._snapshot()
        # First which tensors there are, then their values.
        change.on_failure(start.restore)
        kept = self.followers.keep(change, self.model, self.history)
        flops = [self.flops]
        flops += [flops[0] + merit.site.flops for merit in candidates]
        # Those of the first process for all: examples may differ.
        steps = self.together.agree([_equal_steps(len(drawn), flops[0], each) for each in flops], last=False)[0]
        compared = max(1, math.floor(self.trial.last * min(steps)))
        arms, best = list[TriedArm](), None
        for merit, number, each in zip((None, *candidates), steps, flops, strict=True):
            if merit is not None:
                # Only tried: when it was says nothing, and is not kept.
                self.followers.insert(self.model, merit, self.history, self.options, when={}, first=True)
            losses = self._train(drawn[-number:], loss_fn)
            end = self._snapshot()  # before the metric, which is only asked
            spent = PASSES * each * sum(map(count_samples, drawn[-number:]))
            arms.append(self._arm(merit, losses[-compared:], number, spent))
            if best is None or self._better(arms[-1], arms[best[0]]):
                best = len(arms) - 1, merit, end
            kept.put_back()
            start.restore()
        assert best is not None
        score = "mean loss" if self.trial.metric is None else "metric"
        return Outcome(Tried(tuple(arms), best[0], score), best[1], best[2])

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.model, self.followers, self.trial.stateful)

    def _train(self, batches: Sequence[Any], loss_fn: LossFunction | None) -> list[float]:
        """Train on the batches, in the modes that the model has in training; it gets those back that it had."""
        modes = [(module, module.training) for module in self.model.modules()]
        step = TrialSteps(self.trial, self.model, self.followers, loss_fn)
        losses = [step(batch, index) for index, batch in enumerate(batches)]
        for module, mode in modes:  # one by one: a model's own train() may do more
            module.training = mode
        return losses

    def _arm(self, merit: Merit | None, losses: Sequence[float], steps: int, flops: int) -> TriedArm:
        """The score of a network, the mean over all processes, and what it cost."""
        if self.trial.metric is None:
            score = sum(losses) / len(losses)
        else:
            score = checks.number("what metric(model) returns", self.trial.metric(self.model))
        told = self.together.agree((score, flops), last=False)
        mean = sum(score for score, _ in told) / len(told)
        name = NO_GROWTH if merit is None else str(merit.site)
        return TriedArm(name, steps, sum(flops for _, flops in told), mean if math.isfinite(mean) else None)

    def _better(self, arm: TriedArm, than: TriedArm) -> bool:
        """Whether a network is better than another one; equal is not better."""
        if arm.score is None or than.score is None:
            return arm.score is not None
        larger = self.trial.metric is not None and self.trial.mode == "max"
        return arm.score > than.score if larger else arm.score < than.score


def _equal_steps(steps: int, flops: int, larger: int) -> int:
    """How many steps of a larger network cost at most what so many of the model cost; at least one."""
    return max(1, steps * flops // larger) if larger > flops else steps


def _drawn(batches: Iterable[Any], steps: int) -> list[Any]:
    """So many batches, from the beginning again when they end."""
    found: list[Any] = []
    while len(found) < steps:
        before = len(found)
        found += itertools.islice(batches, steps - before)
        if len(found) == before:
            raise MeasurementError(
                f"the batches of the trial ended after {before} of {steps} steps and cannot be taken again. Give a DataLoader or a list as "
                "Trial(batches=), or an iterator that does not end."
            )
    return found
