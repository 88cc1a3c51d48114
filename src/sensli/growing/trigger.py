"""What a trigger is: a small object with one question, and how two of them are combined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sensli.merits.merits import Merit
from sensli.moves.sites import Site


@dataclass(frozen=True)
class Moment:
    """What a trigger can ask about: the call, the metric, and the model as it is.

    Attributes:
        call: The number of this call of `Grower.step`, counted from 1.
        metric: The metric given to `Grower.step`, or None.
        growths: How many growths there have been.
        sizes: ``"parameters"``, ``"flops"`` (of one forward pass, per sample) and ``"depth"`` (layers with weights); counted only
            when asked for.
        grow: What grows: ``"layers"``, ``"units"`` or ``"both"``.
        merit: What was measured of the site that a trigger is asked about. None before the measurement.
    """

    call: int  # 1 at the first `Grower.step`
    metric: float | None = None
    growths: int = 0
    # "parameters", "flops" (one forward pass, per sample) and "depth" (layers with weights), counted only when asked for
    sizes: Mapping[str, int] = field(default_factory=dict)
    grow: str = "layers"
    merit: Merit | None = None


class Trigger:
    """The base of all triggers: `fires` says whether to look now, `allows` whether a site may be taken.

    Combine triggers with ``&`` and ``|``. To write one, define `fires`, and `state_dict` and `load_state_dict` if it has a state.
    """

    @property
    def needs_metric(self) -> bool:
        """Whether every call must bring a metric. Callbacks refuse such a trigger without ``monitor=``."""
        return False

    def fires(self, moment: Moment) -> bool:
        """Whether to look on this call. Asked exactly once per call.

        Args:
            moment: The call, the metric and the model as it is.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define fires(self, moment): whether to look on this call."
        )

    def made_for(self, *, grow: str, shares: bool) -> None:
        """Called when a Grower is made, before anything trains.

        Args:
            grow: What grows: ``"layers"``, ``"units"`` or ``"both"``.
            shares: Whether merits have a `share`.

        Raises:
            ValueError: If the trigger would mean nothing there, or could not decide.
        """

    def allows(self, site: Site, moment: Moment) -> bool:
        """Whether the limits leave room for this site's layer.

        Args:
            site: The site that might be taken.
            moment: The call, the metric and the model as it is.
        """
        return True

    def refusal(self, moment: Moment) -> str:
        """Why `allows` refuses the site of ``moment.merit``, as a clause for the history; empty if there is nothing to say.

        Args:
            moment: The call, the metric, the model as it is and the merit.
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
        # `Every(2) and AtMost(2)` would silently be the second one.
        raise TypeError(
            "a trigger has no truth value. Combine triggers with & and | instead of `and` and `or`: Every(2) & AtMost(2)."
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

    def made_for(self, *, grow: str, shares: bool) -> None:
        self.left.made_for(grow=grow, shares=shares)
        self.right.made_for(grow=grow, shares=shares)

    @property
    def needs_metric(self) -> bool:
        return self.left.needs_metric or self.right.needs_metric

    def looked(self) -> None:
        self.left.looked()
        self.right.looked()

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

    def fires(self, moment: Moment) -> bool:
        # Both are asked, always: a plateau has to see every metric.
        left, right = self.left.fires(moment), self.right.fires(moment)
        return left and right

    def allows(self, site: Site, moment: Moment) -> bool:
        return self.left.allows(site, moment) and self.right.allows(site, moment)

    def refusal(self, moment: Moment) -> str:
        return self.left.refusal(moment) or self.right.refusal(moment)


class _Either(_Pair):
    word = "|"

    def __init__(self, left: Trigger, right: Trigger) -> None:
        super().__init__(left, right)
        self._fired = (True, True)

    def fires(self, moment: Moment) -> bool:
        self._fired = (self.left.fires(moment), self.right.fires(moment))
        return any(self._fired)

    def looked(self) -> None:
        # The side that did not fire continues to count.
        for side in self._sides:
            side.looked()

    def allows(self, site: Site, moment: Moment) -> bool:
        # A limit binds the side it was combined with: only the side that fired may let a site through.
        return any(side.allows(site, moment) for side in self._sides)

    def refusal(self, moment: Moment) -> str:
        return next((words for side in self._sides if (words := side.refusal(moment))), "")

    @property
    def _sides(self) -> list[Trigger]:
        """Those that fired."""
        return [side for fired, side in zip(self._fired, (self.left, self.right), strict=True) if fired]
