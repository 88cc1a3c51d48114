"""Whether a merit is worth a layer: compared with the existing weights (``tau``), and with a loss that is gone already (``floor``)."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules.engines.distributed import Together
from sensli.modules.running import mapped, untouched
from sensli.modules.wrappers import bare

SOLVED = 1e-3  # the share of the largest loss below which the floor holds


class Threshold:
    """Lets the merits through that reach it. Remembers the largest loss that is known of: the scale of the floor."""

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
        # A loss of exactly zero leaves nothing to gain, whatever its scale was.
        scale = max(self.largest_loss, 1.0) if loss == 0 else self.largest_loss
        return self.floor * scale if loss <= SOLVED * scale else 0.0

    def learn_scale(self, model: nn.Module, blind: Blind | None, merits: Merits) -> None:
        """Take the loss of a blind output into account: the first look may come when the problem is solved. All ranks call it."""
        with Together(model, "compare the loss with that of a constant output") as together:
            told = together.agree(None if blind is None else blind.loss(bare(model), above=merits.loss or 0.0))
        known = [loss for loss in told if loss is not None]
        if known:
            self.largest_loss = max(self.largest_loss, abs(sum(known) / len(known)))


class Blind:
    """A loss function that remembers one batch, to tell the loss of an output that does not depend on the input."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._seen: tuple[Any, Any] | None = None  # the mean output in the form of the output, and the target

    def __call__(self, output: Any, target: Any) -> Tensor:
        if self._seen is None:
            self._seen = mapped(output, _mean), target
        return self._loss_fn(output, target)

    def loss(self, network: nn.Module, above: float) -> float | None:
        """The loss of the mean output of a batch for all its samples, or of zeros, whichever is smaller.

        None if neither is a number above the loss of the network: then it says nothing about what can be learnt.
        """
        means, target = self._seen or (None, None)
        found = []
        for factor in (1.0, 0.0) if self._seen is not None else ():
            # Only a limit depends on it, so a loss function may fail on such an output.
            with suppress(Exception), torch.no_grad(), untouched(network):
                value = float(self._loss_fn(mapped(means, partial(_times, factor=factor)), target))
                found += [value] if above < value < math.inf else []
        return min(found, default=None)


def _mean(output: Tensor) -> Tensor:
    """The mean over the samples, for each of them; it takes no more memory than one of them."""
    if not output.is_floating_point() or output.dim() == 0 or len(output) == 0:
        return output.detach()
    return output.detach().float().mean(0, keepdim=True).to(output.dtype).expand_as(output)


def _times(output: Tensor, factor: float) -> Tensor:
    return (output * factor).contiguous() if output.is_floating_point() else output
