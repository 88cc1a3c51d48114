"""The loss of a copy of a model that grew at a site: for methods whose step is found by a search along a line."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sensli.merits.backward import LossFunction, scalar_loss, split
from sensli.modules.running import device_of, run, to_device, untouched
from sensli.modules.samples import count_samples
from sensli.moves.sites import Site


def loss_after(model: nn.Module, site: Site, batches: Sequence[Any], loss_fn: LossFunction | None) -> float:
    """The mean loss over the batches after a growth that is made in a copy alone."""
    grown = copy.deepcopy(model)
    here = site.on(grown)
    edit = here.move.plan(grown, here)
    edit.build()
    edit.apply()
    total, samples = 0.0, 0
    with torch.no_grad(), untouched(grown):
        for index, batch in enumerate(batches):
            given, target = split(batch, index, grown if loss_fn is not None else None)
            device = device_of(grown)
            loss = scalar_loss(run(grown, to_device(given, device)), to_device(target, device), loss_fn, index)
            size = count_samples(batch)
            total, samples = total + float(loss) * size, samples + size
    return total / samples
