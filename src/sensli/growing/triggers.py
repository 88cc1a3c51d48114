"""When to look: triggers, small objects with one question, and how two of them are combined."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sensli.merits.merits import Merit
from sensli.modules import checks
from sensli.moves.sites import Site
from sensli.text.commands import UNIFORM


@dataclass(frozen=True)
class TriggerContext:
    """What a trigger can ask about: the call, the metric, and the model as it is.

    Attributes:
        call: The number of this call of `Grower.step`, counted from 1.
        metric: The metric given to `Grower.step`, or None.
        growths: How many growths there have been.
        sizes: ``"parameters"``, ``"flops"`` (of one forward pass, per sample) and ``"depth"`` (layers with weights); counted only
            when asked for.
        what: What grows: ``"layers"``, ``"units"``, ``"both"`` or ``"uniform"``.
        merit: What was measured of the site that a trigger is asked about. None before the measurement.
        steps: How many steps the optimizer has taken since the Grower was made. None where it tells nobody of them.
    """

    call: int
    metric: float | None = None
    growths: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    what: str = "layers"
    merit: Merit | None = None
    steps: int | None = None


class Trigger:
    """The base of all triggers: `fires` says whether to look now, `allows` whether a site may be taken.

    Combine triggers with ``&`` and ``|``. To write one, define `fires`, and `state_dict` and `load_state_dict` if it has a state.
    """

    @property
    def needs_metric(self) -> bool:
        """Whether every call must bring a metric. Callbacks refuse such a trigger without ``monitor=``."""
        return False

    def fires(self, context: TriggerContext) -> bool:
        """Whether to look on this call. Asked exactly once per call.

        Args:
            context: The call, the metric and the model as it is.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define fires(self, context): whether to look on this call."
        )

    def may_fire(self, context: TriggerContext) -> bool:
        """Whether `fires` could say yes on this call, whatever the metric will be. Where it could not, `Grower.watch` costs nothing.

        Asked any number of times before the call, so it must change nothing; the metric is not known yet.

        Args:
            context: The next call and the model as it is.
        """
        return True

    def made_for(self, *, what: str, shares: bool) -> None:
        """Called when a Grower is made, before anything trains.

        Args:
            what: What grows: ``"layers"``, ``"units"``, ``"both"`` or ``"uniform"``.
            shares: Whether merits have a `share`.

        Raises:
            ValueError: If the trigger would mean nothing there, or could not decide.
        """

    def allows(self, site: Site, context: TriggerContext) -> bool:
        """Whether the limits leave room for this site's layer.

        Args:
            site: The site that might be taken.
            context: The call, the metric and the model as it is.
        """
        return True

    def refusal(self, context: TriggerContext) -> str:
        """Why `allows` refuses the site of ``context.merit``, as a clause for the history; empty if there is nothing to say.

        Args:
            context: The call, the metric, the model as it is and the merit.
        """
        return ""

    def looked(self) -> None:
        """Called when the combined trigger has fired and a look follows."""

    def grown(self) -> None:
        """Called after an insertion."""

    def judged(self, grew: bool) -> None:
        """Called after a trial.

        Args:
            grew: Whether a growth won against training on without one.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to resume, and restored when a step fails."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: If the state is not one of this trigger. Nothing was changed.
        """
        if state:
            raise ValueError(f"{self!r} has no state, got {state!r}.")

    def __bool__(self) -> bool:
        # `Every(2) and Limit(growths=2)` would silently be the second one.
        raise TypeError(
            "a trigger has no truth value. Combine triggers with & and | instead of `and` and `or`: Every(2) & Limit(growths=2)."
        )

    def __and__(self, other: Trigger) -> Trigger:
        return _Both(self, other)

    def __or__(self, other: Trigger) -> Trigger:
        return _Either(self, other)


class _Pair(Trigger):
    word = ""

    def __init__(self, left: Trigger, right: Trigger) -> None:
        for side in (left, right):
            if not isinstance(side, Trigger):
                raise TypeError(f"a trigger can only be combined with another trigger, got {side!r}.")
        self.left, self.right = left, right

    def made_for(self, *, what: str, shares: bool) -> None:
        self.left.made_for(what=what, shares=shares)
        self.right.made_for(what=what, shares=shares)

    @property
    def needs_metric(self) -> bool:
        return self.left.needs_metric or self.right.needs_metric

    @property
    def _sides(self) -> list[Trigger]:
        """Those that a look is due to."""
        return [self.left, self.right]

    def looked(self) -> None:
        for side in self._sides:
            side.looked()

    def refusal(self, context: TriggerContext) -> str:
        return next((words for side in self._sides if (words := side.refusal(context))), "")

    def grown(self) -> None:
        self.left.grown()
        self.right.grown()

    def judged(self, grew: bool) -> None:
        self.left.judged(grew)
        self.right.judged(grew)

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left.state_dict(), "right": self.right.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"left", "right"}:
            raise ValueError(f"{self!r} needs the states of its two parts, got {state!r}.")
        before = self.left.state_dict()
        self.left.load_state_dict(state["left"])
        try:
            self.right.load_state_dict(state["right"])
        except BaseException:
            self.left.load_state_dict(before)
            raise

    def __repr__(self) -> str:
        return f"({self.left!r} {self.word} {self.right!r})"


class _Both(_Pair):
    word = "&"

    def fires(self, context: TriggerContext) -> bool:
        # Both are asked, always: a plateau has to see every metric.
        left, right = self.left.fires(context), self.right.fires(context)
        return left and right

    def may_fire(self, context: TriggerContext) -> bool:
        return self.left.may_fire(context) and self.right.may_fire(context)

    def allows(self, site: Site, context: TriggerContext) -> bool:
        return self.left.allows(site, context) and self.right.allows(site, context)


class _Either(_Pair):
    word = "|"

    def __init__(self, left: Trigger, right: Trigger) -> None:
        super().__init__(left, right)
        self._fired = (True, True)

    def fires(self, context: TriggerContext) -> bool:
        self._fired = (self.left.fires(context), self.right.fires(context))
        return any(self._fired)

    def may_fire(self, context: TriggerContext) -> bool:
        return self.left.may_fire(context) or self.right.may_fire(context)

    def allows(self, site: Site, context: TriggerContext) -> bool:
        # A limit binds the side it was combined with: only the side that fired may let a site through.
        return any(side.allows(site, context) for side in self._sides)

    @property
    def _sides(self) -> list[Trigger]:
        """Those that fired: the other one continues to count."""
        return [side for fired, side in zip(self._fired, (self.left, self.right), strict=True) if fired]


# ---- `Pays`: grow where the new weights add more to the gradient than to the FLOPs.


class Pays(Trigger):
    """Fires at once, and lets through what pays: ``Pays(2)`` growths that add twice as much to the gradient as to the FLOPs.

    A small step of training lowers the loss by the squared norm G of its gradient, for the FLOPs F of the network. With a growth of merit M
    it would be G + M for F + f. So, to first order, training is worth more per FLOP with the growth if ``(M / G) / (f / F)``, the
    `payoff`, is above 1. The merit of a new weight is largest before its first step, while its FLOPs are there to stay: hence the factor.

    After a look in vain it waits twice as many calls as before, until the next growth. It says nothing about a network that has learnt
    what it can, whose G is small: ``Pays() | Diminishing()`` fires in both cases. It needs merits with a `share`, as ``strategy="sensli"``
    measures them.

    Args:
        factor: The least payoff (default: 2.0).
    """

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = checks.positive("factor", factor, 2.0)
        self._waited = 0  # calls since the last look
        self._vain = 0  # looks in a row without a growth

    def made_for(self, *, what: str, shares: bool) -> None:
        if not shares:
            raise ValueError(
                f"{self!r} needs merits that are compared with the existing weights, which this strategy does not measure. Use "
                "strategy='sensli', or another trigger."
            )

    def fires(self, context: TriggerContext) -> bool:
        self._waited += 1
        return self._waited >= 1 << self._vain

    def may_fire(self, context: TriggerContext) -> bool:
        return self._waited + 1 >= 1 << self._vain

    def allows(self, site: Site, context: TriggerContext) -> bool:
        return context.merit is None or payoff(context.merit, context.sizes["flops"]) >= self.factor

    def refusal(self, context: TriggerContext) -> str:
        merit = context.merit
        if merit is None or self.allows(merit.site, context):
            return ""
        flops = context.sizes["flops"]
        return (
            f"{merit.site} would add {merit.share:.1%} to the gradient and {merit.site.flops / flops:.1%} to the FLOPs: a payoff of "
            f"{payoff(merit, flops):.2g}, below {self.factor:g}"
        )

    def looked(self) -> None:
        self._waited, self._vain = 0, min(self._vain + 1, 63)  # no training is longer

    def grown(self) -> None:
        self._waited = self._vain = 0

    def state_dict(self) -> dict[str, Any]:
        return {"waited": self._waited, "vain": self._vain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not is_form(state, {"waited": is_count, "vain": is_doublings}):
            raise ValueError(f"{self!r} needs two counts, waited and vain, got {state!r}.")
        self._waited, self._vain = state["waited"], state["vain"]

    def __repr__(self) -> str:
        return f"Pays({self.factor:g})"


def payoff(merit: Merit, flops: int) -> float:
    """What a growth adds to the squared gradient, divided by what it adds to the FLOPs, each as a share of what is there."""
    if merit.share is None:
        raise ValueError(
            f"Pays needs merits that are compared with the existing weights, but that of '{merit.site}' is not. Use strategy='sensli', or "
            "another trigger."
        )
    return merit.share / (max(merit.site.flops, 1) / flops)


# ---- `Diminishing`: look when training on brings little for its FLOPs, compared with what it has brought since the last
# growth.


_MODES = {"min": 1.0, "max": -1.0}


class Diminishing(Trigger):
    """Fires when the metric improves per FLOP by less than a share of its mean since the last growth: ``Diminishing(0.25)``.

    The rate of now is the median of the slopes between all pairs of the last calls, so that single values count for little. Each
    call is taken to train on as many samples; the FLOPs of a call are those of the model as it is. Where a `Trial` decides, each
    time in a row that the model without a growth wins doubles the number of calls until the next look.

    Args:
        share: The share of the mean rate below which it fires (default: 0.25).
        window: The number of calls that the rate of now is taken from, and the least number of calls between two looks
            (default: 5).
        mode: Whether a smaller metric is better (``"min"``) or a larger one (``"max"``) (default: "min").
    """

    def __init__(self, share: float = 0.25, *, window: int = 5, mode: str = "min") -> None:
        self.share = checks.share("share", share, 0.25)
        self.window = checks.whole("window", window, 5, least=2)
        self.mode = checks.one_of("mode", mode, _MODES)
        self._spent = 0.0  # FLOPs since the last growth, of one sample
        self._first: list[float] | None = None  # FLOPs and value with which that time began
        self._recent: list[list[float]] = []  # those of the last calls
        self._waited = 0  # calls since the last look
        self._declined = 0  # times in a row that the model without a growth has won

    @property
    def needs_metric(self) -> bool:
        return True

    def fires(self, context: TriggerContext) -> bool:
        if context.metric is None:
            raise ValueError("Diminishing needs a metric: call grower.step(loader, loss_fn, metric=loss).")
        self._spent += context.sizes["flops"]
        self._waited += 1
        value = _MODES[self.mode] * context.metric
        if math.isfinite(value):
            point = [self._spent, value]
            if self._first is None:
                self._first = point
            else:
                self._recent = [*self._recent, point][-self.window :]
        return self._waited >= self.window * 2**self._declined and self._flat

    def may_fire(self, context: TriggerContext) -> bool:
        return self._waited + 1 >= self.window * 2**self._declined and len(self._recent) + 1 >= self.window

    @property
    def _flat(self) -> bool:
        """Whether the rate of the last calls is a small share of the mean rate."""
        if self._first is None or len(self._recent) < self.window:
            return False
        now = -statistics.median(_slope(*pair) for pair in itertools.combinations(self._recent, 2))
        middle = [statistics.median(column) for column in zip(*self._recent, strict=True)]
        return now <= self.share * max(0.0, -_slope(self._first, middle))

    def looked(self) -> None:
        self._waited = 0

    def grown(self) -> None:
        # The function is the same, so the time after a growth begins where the time before it ended.
        self._first = self._recent[-1] if self._recent else self._first
        self._recent, self._waited, self._declined = [], 0, 0

    def judged(self, grew: bool) -> None:
        self._declined = 0 if grew else min(self._declined + 1, 63)  # no training is longer

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, f"_{name}") for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not is_form(state, _STATE):
            raise ValueError(f"{self!r} needs FLOPs, pairs of FLOPs and values, and two counts, got {state!r}.")
        for name in _STATE:
            setattr(self, f"_{name}", state[name])

    def __repr__(self) -> str:
        return f"Diminishing({self.share:g}, window={self.window}, mode={self.mode!r})"


def _slope(one: list[float], other: list[float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else 0.0


def is_finite_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_point(value: Any, size: int = 2) -> bool:
    return isinstance(value, list) and len(value) == size and all(map(is_finite_number, value))


def is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def is_doublings(value: Any) -> bool:
    return is_count(value) and value < 64


SavedForm = dict[str, Callable[[Any], bool]]  # what is saved, and what it must look like
_STATE: SavedForm = {
    "spent": is_finite_number,
    "first": lambda value: value is None or is_point(value),
    "recent": lambda value: isinstance(value, list) and all(map(is_point, value)),
    "waited": is_count,
    "declined": is_doublings,
}


def is_form(state: dict[str, Any], form: SavedForm) -> bool:
    return set(state) == set(form) and all(fine(state[name]) for name, fine in form.items())


# ---- `Spaced`: growths apart from each other, by the compute that they need to pay.


class Spaced(Trigger):
    """Keeps growths apart: ``Pays() & Spaced()``. Fires once the training has taken enough FLOPs for a network of this size.

    The best size of a network grows like the root of the compute. So after a growth that made a step k times as expensive it waits until
    the training has taken k^2 times the FLOPs that it had taken by then. Until the first growth it always fires. Each call is taken to
    train on as many samples; the FLOPs of a call are those of the model as it is.

    Args:
        power: Of k (default: 2.0). 0 does not wait.
    """

    def __init__(self, power: float = 2.0) -> None:
        self.power = checks.at_least("power", power, 0, 2.0)
        self._spent = 0.0  # FLOPs of one sample, over all calls
        self._grown = 0.0  # what was spent at the last growth
        self._due = 0.0  # what must have been spent for the next
        self._flops = 0.0  # of the last call

    def fires(self, context: TriggerContext) -> bool:
        now = float(context.sizes["flops"])
        if 0 < self._flops < now:
            # Several growths at one call, or some by hand, add up.
            self._due = max(self._grown, self._due) * (now / self._flops) ** self.power
        self._flops = now
        self._spent += now
        return self._spent >= self._due

    def may_fire(self, context: TriggerContext) -> bool:
        return copy.copy(self).fires(context)

    def grown(self) -> None:
        self._grown = self._spent

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, f"_{name}") for name in _SPACED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not is_form(state, _SPACED):
            raise ValueError(f"{self!r} needs four counts of FLOPs, got {state!r}.")
        for name in _SPACED:
            setattr(self, f"_{name}", state[name])

    def __repr__(self) -> str:
        return f"Spaced({self.power:g})" if self.power != 2 else "Spaced()"


_SPACED: SavedForm = dict.fromkeys(("spent", "grown", "due", "flops"), is_finite_number)


# ---- When to look for a new layer. A trigger is a small object with one question; combine triggers with ``&`` and ``|``.


__all__ = ["At", "Diminishing", "Every", "Limit", "Pays", "Plateau", "Spaced", "Trigger", "TriggerContext"]


class At(Trigger):
    """Fires on the given calls: ``At(50, 100)`` or ``At([50, 100])``.

    Args:
        *calls: The calls of `Grower.step`, counted from 1, or one sequence of them.
    """

    def __init__(self, *calls: int | Iterable[int]) -> None:
        given = calls[0] if len(calls) == 1 and isinstance(calls[0], (list, tuple, range, set, frozenset)) else calls
        self.calls = frozenset(checks.whole("every call in At(...)", call, 50) for call in given)
        if not self.calls:
            raise ValueError("At needs at least one call of Grower.step (for example At(50, 100)), got none.")

    def fires(self, context: TriggerContext) -> bool:
        return context.call in self.calls

    def may_fire(self, context: TriggerContext) -> bool:
        return self.fires(context)

    def __repr__(self) -> str:
        return f"At({', '.join(map(str, sorted(self.calls)))})"


class Every(Trigger):
    """Fires on every n-th call: ``Every(50)`` on 50, 100, ...

    Args:
        calls: The number of calls from one look to the next.
    """

    def __init__(self, calls: int) -> None:
        self.calls = checks.whole("calls in Every(calls)", calls, 10)

    def fires(self, context: TriggerContext) -> bool:
        return context.call % self.calls == 0

    def may_fire(self, context: TriggerContext) -> bool:
        return self.fires(context)

    def __repr__(self) -> str:
        return f"Every({self.calls})"


class Plateau(Trigger):
    """Fires when the metric has not improved for some calls; starts counting again after a look.

    Args:
        patience: The number of calls without an improvement (default: 10).
        mode: Whether a smaller metric is better (``"min"``) or a larger one (``"max"``) (default: "min").
        threshold: The smallest relative change that counts as an improvement (default: 1e-4).
        min_delta: The smallest change that counts as an improvement, in units of the metric (default: 0.0). A change must be large
            enough by both measures.
    """

    def __init__(
        self, patience: int = 10, *, mode: str = "min", threshold: float = 1e-4, min_delta: float = 0.0
    ) -> None:
        self.patience = checks.whole("patience", patience, 10)
        self.mode = checks.one_of("mode", mode, ("min", "max"))
        self.threshold = checks.at_least("threshold", threshold, 0, 1e-4)
        self.min_delta = checks.at_least("min_delta", min_delta, 0, 0.01)
        self.best: float | None = None
        self.waited = 0

    @property
    def needs_metric(self) -> bool:
        return True

    def fires(self, context: TriggerContext) -> bool:
        if context.metric is None:
            raise ValueError("Plateau needs a metric: call grower.step(loader, loss_fn, metric=loss).")
        value = context.metric if self.mode == "min" else -context.metric
        margin = max(self.threshold * abs(self.best), self.min_delta) if self.best is not None else 0.0
        if math.isfinite(value) and (self.best is None or value < self.best - margin):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def may_fire(self, context: TriggerContext) -> bool:
        return self.waited + 1 >= self.patience

    def looked(self) -> None:
        self.waited = 0

    def grown(self) -> None:
        self.waited = 0  # a new layer gets the same patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not is_form(state, {"best": lambda value: value is None or is_finite_number(value), "waited": is_count}):
            raise ValueError(f"{self!r} needs a number or None as best and a count as waited, got {state!r}.")
        self.best, self.waited = state["best"], state["waited"]

    def __repr__(self) -> str:
        delta = f", min_delta={self.min_delta:g}" if self.min_delta else ""
        return f"Plateau(patience={self.patience}, mode={self.mode!r}{delta})"


class Limit(Trigger):
    """Ends growth at a limit, and allows only growths that fit: ``Every(10) & Limit(growths=3, parameters=1_000_000)``.

    Fires while the model is below its limits, so it is combined with others. At least one limit is needed; one of None is not checked.

    Args:
        growths: The largest number of growths.
        parameters: The largest number of parameters.
        flops: The largest number of FLOPs of one forward pass, per sample.
        depth: The largest number of layers with weights.
        factor: The largest number of parameters as a multiple of those at the first call.
    """

    def __init__(
        self,
        *,
        growths: int | None = None,
        parameters: int | None = None,
        flops: int | None = None,
        depth: int | None = None,
        factor: float | None = None,
    ) -> None:
        # Sizes are whole, so a limit such as 1e6 or 10.5 is the whole number below it.
        limits = {"parameters": (parameters, 1_000_000), "flops": (flops, 1_000_000), "depth": (depth, 20)}
        self.growths = None if growths is None else checks.whole("growths", growths, 3)
        self.factor = None if factor is None else checks.at_least("factor", factor, 1, 10.0)
        self._first: int | None = None  # parameters at the first call
        self.limits = {
            name: int(checks.at_least(name, limit, 1, example))
            for name, (limit, example) in limits.items()
            if limit is not None
        }
        if not self.limits and self.growths is None and self.factor is None:
            raise ValueError(
                "Limit needs a limit: growths, parameters, flops (per sample), depth or factor (for example Limit(growths=3)), got none."
            )

    def made_for(self, *, what: str, shares: bool) -> None:
        if "depth" in self.limits and what in ("units", UNIFORM):
            raise ValueError(
                f"depth in {self!r} must be left out where only units grow, got {self.limits['depth']}: they make nothing deeper. Limit "
                "parameters or flops instead."
            )

    def fires(self, context: TriggerContext) -> bool:
        if self.factor is not None and self._first is None:
            self._first = context.sizes["parameters"]
        return self.may_fire(context)

    def may_fire(self, context: TriggerContext) -> bool:
        # units make nothing deeper, so the limit of the depth does not end them
        binding = {name: limit for name, limit in self.limits.items() if name != "depth" or context.what == "layers"}
        below = all(context.sizes[name] < limit for name, limit in binding.items())
        return self._leaves_growths(context) and below and self._is_within(context, 1)

    def allows(self, site: Site, context: TriggerContext) -> bool:
        added = {"parameters": site.parameters, "flops": site.flops, "depth": site.cost.depth}
        fits = (context.sizes[name] + added[name] <= limit for name, limit in self.limits.items())
        return self._leaves_growths(context) and all(fits) and self._is_within(context, site.parameters)

    def _is_within(self, context: TriggerContext, added: int) -> bool:
        if self.factor is None or self._first is None:
            return True
        return context.sizes["parameters"] + added <= self.factor * self._first

    def _leaves_growths(self, context: TriggerContext) -> bool:
        return self.growths is None or context.growths < self.growths

    def __repr__(self) -> str:
        growths = {} if self.growths is None else {"growths": self.growths}
        told = [f"{name}={limit:,}" for name, limit in (growths | self.limits).items()]
        return f"Limit({', '.join([*told, *([] if self.factor is None else [f'factor={self.factor:g}'])])})"

    def state_dict(self) -> dict[str, Any]:
        return {} if self.factor is None else {"first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first = state.get("first")
        if set(state) != set(self.state_dict()) or not (first is None or is_count(first)):
            raise ValueError(f"{self!r} needs the number of parameters at the first call, got {state!r}.")
        self._first = first
