"""AutoGrow's AdamInit: the last norm of a new block is trained alone, in a copy of the model, before the block comes.

From their code: the norm begins as it initialises itself; Adam with a rate of 1e-3 and a weight decay of 5e-4 trains its weight and bias
and nothing else, in training mode, for at most ten passes over the training data; it ends after a pass whose accuracy is above that of
the model without the block less 0.5 points. A strategy sees losses and not accuracies, so here the mean loss of a pass must fall below
that of the model without the block, plus one part in two hundred; a pass is one over the batches of the look. What the passes do to running
statistics stays in the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import MeasurementError
from sensli.merits.backward import LossFunction, scalar_loss, split
from sensli.merits.measuring import EMPTY
from sensli.modules import random_state
from sensli.modules.running import device_of, run, to_device
from sensli.modules.samples import count_samples
from sensli.moves.sites import Site
from sensli.moves.twin.twins import Twin

RATE, DECAY, PASSES = 1e-3, 5e-4, 10
NEAR = 0.005  # their 0.5 points, as a share of the loss


def adam_init(model: nn.Module, site: Site, batches: Sequence[Any], loss_fn: LossFunction | None) -> Site:
    """The site of a new block with what its last norm has learnt; as it is if the block does not end with a norm."""
    assert isinstance(site.move, Twin)
    if not batches:
        raise MeasurementError(EMPTY)
    grown = copy.deepcopy(model)
    here = site.on(grown)
    edit = here.move.plan(grown, here)
    edit.build()
    edit.apply()
    block = grown.get_submodule(edit.name)
    names = site.move.last_norm(block)
    if not names:
        return site
    known = dict(block.named_parameters())
    grown.requires_grad_(False)
    trained = {name: known[name].requires_grad_() for name in names}
    optimizer = torch.optim.Adam(trained.values(), lr=RATE, weight_decay=DECAY)
    with random_state.kept(), torch.inference_mode(False), torch.enable_grad():
        with torch.no_grad():
            before = _pass(copy.deepcopy(model), batches, loss_fn, None)
        for _ in range(PASSES):
            if _pass(grown, batches, loss_fn, optimizer) < before + NEAR * abs(before):
                break
    values: dict[str, Tensor] = {name: value.detach().cpu().clone() for name, value in trained.items()}
    return replace(site, move=site.move.trained(values))


def _pass(
    model: nn.Module, batches: Sequence[Any], loss_fn: LossFunction | None, optimizer: torch.optim.Optimizer | None
) -> float:
    """The mean loss of a pass in training mode, with a step after each batch if there is an optimizer."""
    model.train()
    total, samples = 0.0, 0
    for index, batch in enumerate(batches):
        given, target = split(batch, index, model if loss_fn is not None else None)
        device = device_of(model)
        loss = scalar_loss(run(model, to_device(given, device)), to_device(target, device), loss_fn, index)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        size = count_samples(batch)
        total, samples = total + float(loss.detach()) * size, samples + size
    return total / samples
