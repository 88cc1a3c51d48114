"""When to look for a new layer. A trigger is a small object with one question; combine triggers with ``&`` and ``|``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sensli.growing.diminishing import Diminishing
from sensli.growing.pays import Pays
from sensli.growing.trigger import Moment, Trigger
from sensli.modules import checks
from sensli.moves.sites import Site

__all__ = ["At", "AtMost", "Budget", "Diminishing", "Every", "Moment", "Pays", "Plateau", "Trigger"]


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

    def fires(self, moment: Moment) -> bool:
        return moment.call in self.calls

    def __repr__(self) -> str:
        return f"At({', '.join(map(str, sorted(self.calls)))})"


class Every(Trigger):
    """Fires on every n-th call: ``Every(50)`` on 50, 100, ...

    Args:
        calls: The number of calls from one look to the next.
    """

    def __init__(self, calls: int) -> None:
        self.calls = checks.whole("calls in Every(calls)", calls, 10)

    def fires(self, moment: Moment) -> bool:
        return moment.call % self.calls == 0

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

    def fires(self, moment: Moment) -> bool:
        if moment.metric is None:
            raise ValueError("Plateau needs a metric: call grower.step(batches, loss_fn, metric=validation_loss).")
        value = moment.metric if self.mode == "min" else -moment.metric
        margin = max(self.threshold * abs(self.best), self.min_delta) if self.best is not None else 0.0
        if math.isfinite(value) and (self.best is None or value < self.best - margin):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def looked(self) -> None:
        self.waited = 0

    def grown(self) -> None:
        self.waited = 0  # a new layer gets the same patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        best, waited = state["best"], state["waited"]
        known = best is None or (isinstance(best, (int, float)) and math.isfinite(best))
        if not known or type(waited) is not int or waited < 0 or set(state) != {"best", "waited"}:
            raise ValueError(f"{self!r} needs a number or None as best and a count as waited, got {state!r}.")
        self.best, self.waited = best, waited

    def __repr__(self) -> str:
        delta = f", min_delta={self.min_delta:g}" if self.min_delta else ""
        return f"Plateau(patience={self.patience}, mode={self.mode!r}{delta})"


class AtMost(Trigger):
    """Fires while there have been fewer growths than this: a limit to combine with others, ``Every(10) & AtMost(3)``.

    Args:
        growths: The largest number of growths.
    """

    def __init__(self, growths: int) -> None:
        self.growths = checks.whole("growths in AtMost(growths)", growths, 3)

    def fires(self, moment: Moment) -> bool:
        return moment.growths < self.growths

    def allows(self, site: Site, moment: Moment) -> bool:
        return moment.growths < self.growths

    def __repr__(self) -> str:
        return f"AtMost({self.growths})"


class Budget(Trigger):
    """Fires while the model is below its limits, and allows only layers that fit: ``Budget(parameters=1_000_000)``.

    At least one limit is needed; a limit of None is not checked.

    Args:
        parameters: The largest number of parameters.
        flops: The largest number of FLOPs of one forward pass, per sample.
        depth: The largest number of layers with weights.
    """

    def __init__(self, *, parameters: int | None = None, flops: int | None = None, depth: int | None = None) -> None:
        # Sizes are whole, so a limit such as 1e6 or 10.5 is the whole number below it.
        limits = {"parameters": (parameters, 1_000_000), "flops": (flops, 1_000_000), "depth": (depth, 20)}
        self.limits = {
            name: int(checks.at_least(name, limit, 1, example))
            for name, (limit, example) in limits.items()
            if limit is not None
        }
        if not self.limits:
            raise ValueError(
                "Budget needs a limit: parameters, flops (per sample) or depth (for example Budget(parameters=1_000_000)), got none."
            )

    def made_for(self, *, grow: str, shares: bool) -> None:
        if "depth" in self.limits and grow == "units":
            raise ValueError(
                f"depth in {self!r} must be left out where only units grow, got {self.limits['depth']}: they make nothing deeper. Limit "
                "parameters or flops instead."
            )

    def fires(self, moment: Moment) -> bool:
        # units make nothing deeper, so the limit of the depth does not end them
        binding = {name: limit for name, limit in self.limits.items() if name != "depth" or moment.grow == "layers"}
        return all(moment.sizes[name] < limit for name, limit in binding.items())

    def allows(self, site: Site, moment: Moment) -> bool:
        added = {"parameters": site.parameters, "flops": site.flops, "depth": site.cost.depth}
        return all(moment.sizes[name] + added[name] <= limit for name, limit in self.limits.items())

    def __repr__(self) -> str:
        return f"Budget({', '.join(f'{name}={limit:,}' for name, limit in self.limits.items())})"
