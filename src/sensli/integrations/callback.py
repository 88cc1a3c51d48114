"""What the `GrowthCallback` of every trainer begins with: its arguments, checked when it is made, and the Grower made of them later."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedModel
from sensli.growing.grower import Grower
from sensli.growing.options import Options, Trial
from sensli.growing.strategy import strategy_class
from sensli.growing.triggers import Trigger
from sensli.growing.watching import Watch, check_watchable
from sensli.merits.catching import LossFunction
from sensli.merits.merits import Merits
from sensli.modules import checks
from sensli.modules.flops import count_flops
from sensli.modules.wrappers import bare, is_average, own_parameters
from sensli.surgery.averaging import Copies, as_averages, averaged_parts, check_alike, network_of, same_values
from sensli.text.commands import UNMEASURED

# ---- What the callbacks of different trainers do at a look: a loss step in place of forward, and what is logged.


class LossStandIn:
    """A module's forward for as long as it is looked at: a step of the training, inside of which forward is the user's own.

    An object and no closure: a copy of the module gets a copy of it that belongs to the copy. ``step`` must be a function, which copies
    share.
    """

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        self.module, self.step = module, step
        self.own = module.__dict__.get("forward")  # set on the module itself, as accelerate does for mixed precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.module.__dict__
        mine = own.pop("forward")
        if self.own is not None:
            own["forward"] = self.own
        try:
            return self.step(self.module, *args, **kwargs)
        finally:
            own["forward"] = mine


@contextmanager
def standing_in(module: nn.Module, step: Callable[..., Any], **others: Any) -> Iterator[None]:
    """Calling the module runs ``step(module, ...)``; ``others`` are methods that are replaced meanwhile."""
    own = module.__dict__
    kept = {name: own[name] for name in ("forward", *others) if name in own}
    try:
        own.update(forward=LossStandIn(module, step), **others)
        yield
    finally:
        for name in ("forward", *others):
            own.pop(name, None)
        own.update(kept)


@contextmanager
def itself(module: nn.Module) -> Iterator[None]:
    """The module with its own forward, not the one that stands in for it during a look."""
    own = module.__dict__
    standing = own.pop("forward")
    if standing.own is not None:
        own["forward"] = standing.own
    try:
        yield
    finally:
        own["forward"] = standing


class LookFacts:
    """What is logged at the end of an epoch: the size of the model and, after a look, the best merit."""

    def __init__(self) -> None:
        self._flops: tuple[Any, int] = (None, 0)  # what has grown, and the count for that
        self._seen: Merits | None = None

    def of(self, grower: Grower, example: Any) -> dict[str, float]:
        """Numbers by name; FLOPs are counted only after a growth."""
        network = bare(grower.model)
        grown = [(growth.number, growth.name, growth.resized) for growth in grower.history]
        if self._flops[0] != grown:
            self._flops = (grown, int(count_flops(network, example)))
        facts: dict[str, float | None] = {
            "growths": grower.history.additions,
            "parameters": sum(parameter.numel() for parameter in own_parameters(network)),
            "flops": self._flops[1],
        }
        merits = grower.last_merits
        if merits is not None and merits is not self._seen and merits.norm != UNMEASURED:
            facts.update(merit=merits.best.value, ratio=merits.best.ratio)
        self._seen = merits
        return {f"sensli/{name}": float(value) for name, value in facts.items() if value is not None}


# ---- What the callbacks of different trainers share when they try growths: the trial with the trainer's own steps, and
# what is refused.


class Update:
    """The batches of one update of a trainer: several where it accumulates gradients; and the number of items in them, if it is counted."""

    def __init__(self, batches: list[Any], items: Any = None) -> None:
        self.batches, self.items = batches, items

    def counted(self, samples: int) -> tuple[Tensor, Update]:
        """As a `Trial` takes it: its FLOPs are counted by the length of the first tensor."""
        return torch.empty(1, dtype=torch.int8, device="cpu").expand(samples), self


def check_trial(trial: Trial) -> None:
    """Refuse what the trainer decides."""
    for name in ("step", "batches"):
        if getattr(trial, name) is not None:
            raise UnsupportedModel(
                f"Trial({name}=) is not an option in GrowthCallback: a trial trains with the trainer's own training step, optimizer and "
                "training batches. Leave it out."
            )


def refuse_trial(reason: str) -> UnsupportedModel:
    """For a training whose steps cannot be taken outside of the trainer's loop."""
    return UnsupportedModel(
        f"trial= cannot be used in this training: {reason}, which the steps of a trial would not follow. Leave trial= out, or use "
        "sensli.Grower in your own loop, with Trial(step=)."
    )


def complete_trial(
    trial: Trial, module: nn.Module, batches: Iterable[Any], step: Callable[[Any, Any, Any], float]
) -> Trial:
    """The trial with the trainer's step and batches; its metric is given the module with its own forward."""
    metric = trial.metric

    def measured(model: Any) -> Any:
        assert metric is not None
        with itself(module):
            return metric(module)

    return Trial(
        trial.steps, candidates=trial.candidates, batches=batches, step=step, last=trial.last, mode=trial.mode,
        metric=None if metric is None else measured, stateful=trial.stateful,
    )  # fmt: skip


# ---- Averages and other copies of the model that callbacks of a trainer keep: those that can follow a growth are found,
# others refused.


def kept_by(callbacks: Iterable[Any], model: nn.Module, cure: str) -> list[nn.Module]:
    """What the callbacks keep that follows a growth: averages of torch, and whole copies of the model, which are paired one by one.

    Values of the parameters that are kept in another way would be out of step after a growth: refused, with a ``cure``.
    """
    own = bare(model)
    mine = {id(parameter) for parameter in own.parameters()}
    found: list[nn.Module] = []
    for callback in callbacks:
        for name, value in vars(callback).items():
            place = f"{type(callback).__name__}.{name}"
            for each in _modules(value):
                if any(id(parameter) in mine for parameter in each.parameters()) or any(each is one for one in found):
                    continue  # the model itself, or a part of it
                if is_average(each) and not averaged_parts(own, network_of(each)):
                    raise UnsupportedModel(
                        f"{place} is an average whose parameters are not those of this {type(own).__name__} or of one of its parts, so it "
                        f"cannot follow a growth. {cure}"
                    )
                inner = getattr(each, "module", None)
                if is_average(each) or _is_copy(inner, own) or (_is_copy(each, own) and type(each) is type(own)):
                    found.append(each)
                elif any(_is_copy(one, own) for one in (each, *each.children())):
                    raise _refused(place, cure)
            if any(_are_values(each, own) for each in (value, *_inner(value))):
                raise _refused(place, cure)
    return found


def _refused(place: str, cure: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{place} keeps the values of the model's parameters in a way that cannot follow a growth. {cure}"
    )


def _modules(value: Any) -> Iterator[nn.Module]:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
    return (each for each in parts if isinstance(each, nn.Module))


def _is_copy(value: Any, own: nn.Module) -> bool:
    """Whether this is a copy of the model, or of a part of it, of which it still has the values."""
    if not isinstance(value, nn.Module) or len(list(value.parameters())) < 2:
        return False
    parts = averaged_parts(own, value)
    return any(type(part) is type(value) and (part is own or same_values(part, value)) for _, part in parts)


def _inner(value: Any) -> list[Any]:
    """What an object of another library holds: an average that keeps a list of tensors."""
    if (
        isinstance(value, (nn.Module, Tensor, type))
        or hasattr(value, "callback_handler")
        or hasattr(value, "callbacks")
    ):
        return []
    return [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, (list, tuple, dict))]


def _are_values(value: Any, own: nn.Module) -> bool:
    """Whether these are other tensors for all parameters of the model, by name or in their order."""
    given = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(given, (list, tuple)) or not given or not isinstance(given[0], Tensor):
        return False
    named = dict(own.named_parameters())
    mine = {id(parameter) for parameter in named.values()}
    if any(id(each) in mine or not isinstance(each, Tensor) for each in given):
        return False
    if isinstance(value, Mapping):
        return all(name in value and value[name].shape == parameter.shape for name, parameter in named.items())
    trained = [parameter.shape for parameter in named.values() if parameter.requires_grad]
    return [each.shape for each in given] in ([parameter.shape for parameter in named.values()], trained)


_OF_THE_TRAINER = ("model", "optimizer", "scheduler", "step_name")  # a trainer's callback counts epochs
_OF_THE_MODEL = ("example", "averaged")  # options of a Grower that are not among `Options`


class GrowingCallback:
    """The constructor of the callbacks. Wrong arguments are refused here, not after the first epoch."""

    _metric_name = "val_loss"  # what a metric is called with this trainer

    def __init__(
        self,
        trigger: Trigger | None = None,
        *,
        preset: str = "auto",
        monitor: str | None = None,
        batches: int | None = None,
        watch: int | None = None,
        metrics: bool = True,
        **options: Any,
    ) -> None:
        if monitor is not None:
            checks.instance("monitor", monitor, str, "the name of a metric (for example 'val_loss')")
        self._monitor = monitor
        self._batches = None if batches is None else checks.whole("batches", batches, 10)
        self._steps_watched = None if watch is None else checks.whole("watch", watch, 8)
        if watch is not None and batches is not None:
            raise ValueError(
                f"batches must be left out with watch={watch}, got {batches}: checks decide by the watched steps, and measure nothing."
            )
        self._metrics = checks.flag("metrics", metrics)
        _check_names(options)
        self._given = {name: options.pop(name) for name in _OF_THE_MODEL if name in options}
        if "example" in self._given:
            checks.example("example", self._given["example"])
        self._arguments = options
        self.options = Options.of(preset, trigger=trigger, **options)
        self._default_trigger = trigger is None
        if trigger is not None and trigger.needs_metric and monitor is None:
            raise ValueError(
                f"monitor must be the name of a metric (for example {self._metric_name!r}) with trigger={trigger!r}, which watches one. "
                "Got None."
            )
        if self.options.trial is not None:
            check_trial(self.options.trial)
        if watch is not None:
            strategy = self.options.strategy
            # A trial will have the trainer's batches and step.
            check_watchable(
                strategy_class(strategy) if isinstance(strategy, str) else strategy, replace(self.options, trial=None)
            )
        self._watch: Watch | None = None  # that is open
        self.grower: Grower | None = None  # made when there is a batch
        # Those that are given and those that other callbacks keep. The Grower has this list itself: one may come later.
        self._averages = as_averages(self._given.pop("averaged", None))
        self._given_averages = tuple(self._averages)
        self._copies: Copies | None = None  # those that the model had before its first step
        self._loaded: dict[str, Any] | None = None  # the state from a checkpoint, until the grower has it
        self._facts = LookFacts()
        self._prepare()

    def _prepare(self) -> None:
        """Set what only this trainer's callback has."""

    def _make_grower(
        self, model: nn.Module, optimizer: Any, scheduler: Any, example: Any, trial: Trial | None = None
    ) -> Grower:
        """The Grower for what the trainer has by now; an example of the user's own comes first."""
        given = {"example": example, **self._given, **self._arguments, "trial": trial}
        trigger = None if self._default_trigger else self.options.trigger
        return Grower(
            model, optimizer, preset=self.options.preset, trigger=trigger, scheduler=scheduler, averaged=self._averages, **given
        )  # fmt: skip

    def _forget_averages(self) -> None:
        """Those of another training."""
        self._averages[:] = self._given_averages
        self._copies = None

    def _look_for_averages(self, callbacks: Iterable[Any], model: nn.Module, cure: str) -> None:
        """What the other callbacks of the trainer keep of the model follows too, or is refused."""
        others = (each for each in callbacks if each is not self)
        for average in kept_by(others, model, cure):
            if not any(average is each for each in self._averages):
                self._averages.append(average)

    def _check_averages(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        """Before the first step and after it: all that follows belongs to the model, and the model has no average made by hand."""
        if self._copies is None:
            check_alike(model, self._averages)
            self._copies = Copies(model)
        elif self.grower is None or not self.grower.history:
            self._copies.check(optimizers)

    def _step(self, batches: Iterable[Any], loss_fn: LossFunction, metric: float | None) -> None:
        """One call of the Grower, by what was watched if anything was; its record learns what the metric is called."""
        assert self.grower is not None
        self.grower.history.record.metric = self._monitor
        watched = self.grower.has_watched  # not so if a training was resumed after the last steps of the epoch
        self.grower.step(None if watched else batches, loss_fn, metric=metric)

    def _is_watched(self, left: float) -> bool:
        """Whether the next update is to be watched: with it so many are left in the epoch."""
        if self._steps_watched is None or self._watch is not None:
            return False
        if left == math.inf:
            raise UnsupportedModel(
                f"watch={self._steps_watched} watches the last steps of an epoch, and this training loader has no length. Leave watch= "
                "out: then checks measure on batches."
            )
        return left <= self._steps_watched

    def _close_watch(self, failed: BaseException | None = None) -> None:
        """The update is over; one that failed is left out."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None if failed is None else type(failed), failed, None)


def _check_names(options: dict[str, Any]) -> None:
    known = [*_OF_THE_MODEL, *(each.name for each in fields(Options) if each.name not in ("trigger", *_OF_THE_TRAINER))]
    for name in options:
        if name in _OF_THE_TRAINER:
            raise TypeError(f"{name}= belongs to the trainer: leave it out, the callback takes it from there.")
        if name not in known:
            raise TypeError(f"{name}= is not an option of GrowthCallback. Its options are {', '.join(sorted(known))}.")
