"""Whether a merit is worth a layer: compared with the existing weights (``tau``), and with a loss that is gone already (``floor``)."""

from __future__ import annotations

import math

from sensli.merits.merits import Merit, Merits

SOLVED = 1e-3  # the share of the largest loss below which the floor holds


class Threshold:
    """Lets the merits through that reach it. Remembers the largest loss that a look has seen: the scale of the floor."""

    def __init__(self, tau: float, floor: float) -> None:
        self.tau, self.floor = tau, floor
        self.largest_loss = 0.0

    def worth(self, merits: Merits) -> list[Merit]:
        """The merits that reach it, the largest first."""
        least = self.least_gain(merits)
        return [
            merit
            for merit in merits.ranked
            if (merit.ratio is None or merit.ratio >= self.tau) and math.sqrt(merit.value) >= least
        ]

    def least_gain(self, merits: Merits) -> float:
        """The least first-order decrease of the loss, per unit change of the new weights, that a layer must promise now.

        Only where most of the loss is gone: a network whose outputs are far too small for its targets has small gradients too.
        """
        loss = abs(merits.loss or 0.0)
        self.largest_loss = max(self.largest_loss, loss)
        return self.floor * (self.largest_loss or 1.0) if loss <= SOLVED * self.largest_loss else 0.0
