"""`Pays`: grow where the new weights add more to the gradient than to the FLOPs."""

from __future__ import annotations

from typing import Any

from sensli.growing.trigger import Moment, Trigger
from sensli.merits.merits import Merit
from sensli.modules import checks
from sensli.moves.sites import Site


class Pays(Trigger):
    """Fires at once, and lets through what pays: ``Pays(2)`` growths that add twice as much to the gradient as to the FLOPs.

    A small step of training lowers the loss by the squared norm G of its gradient, for the FLOPs F of the network. With a growth of merit M
    it would be G + M for F + f. So, to first order, training is worth more per FLOP with the growth if ``(M / G) / (f / F)``, the
    `payoff`, is above 1. The merit of a new weight is largest before its first step, while its FLOPs are there to stay: hence the factor.

    After a look in vain it waits twice as many calls as before, until the next growth. It says nothing about a network that has learnt
    what it can, whose G is small: ``Pays() | Diminishing()`` grows in both cases. It needs merits with a `share`, as ``strategy="sensli"``
    measures them.

    Args:
        factor: The least payoff (default: 2.0).
    """

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = checks.positive("factor", factor, 2.0)
        self._waited = 0  # calls since the last look
        self._vain = 0  # looks in a row without a growth

    def made_for(self, *, grow: str, shares: bool) -> None:
        if not shares:
            raise ValueError(
                f"{self!r} needs merits that are compared with the existing weights, which this strategy does not measure. Use "
                "strategy='sensli', or another trigger."
            )

    def fires(self, moment: Moment) -> bool:
        self._waited += 1
        return self._waited >= 1 << self._vain

    def allows(self, site: Site, moment: Moment) -> bool:
        return moment.merit is None or payoff(moment.merit, moment.sizes["flops"]) >= self.factor

    def refusal(self, moment: Moment) -> str:
        merit = moment.merit
        if merit is None or self.allows(merit.site, moment):
            return ""
        flops = moment.sizes["flops"]
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
        counts = [state.get("waited"), state.get("vain")]
        if (
            set(state) != {"waited", "vain"}
            or any(type(count) is not int or count < 0 for count in counts)
            or state["vain"] > 63
        ):
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
