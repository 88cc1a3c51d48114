"""Averages of a model (`torch.optim.swa_utils.AveragedModel`) grow with it.

An average pairs its parameters with the model's one by one. If it does not follow, its next update fails, or pairs the wrong ones where
shapes agree. A new layer is an identity in the average too, and nothing reads new units, so the averaged function does not change either;
unless units that are dead in the model are still alive in the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from sensli.errors import UnsupportedModel
from sensli.modules.engines.fsdp import sharded_like, whole
from sensli.modules.wrappers import bare
from sensli.moves.copying import is_own
from sensli.surgery.history.growth import Growth
from sensli.surgery.replaying import repeat

Averaged: TypeAlias = nn.Module | Sequence[nn.Module] | None


def follow(averaged: Averaged, growth: Growth, model: nn.Module) -> None:
    """Make the growth of the model in each average, at the same place; new units begin as the model's."""
    for network in networks(averaged):
        again = repeat(network, growth)
        if again.resized:
            _take_units(network, again, bare(model))


def check_alike(model: nn.Module, averaged: Averaged) -> None:
    """Refuse an average that is not one of this model, before anything changes."""
    expected = [(name, p.shape) for name, p in bare(model).named_parameters()]
    for network in networks(averaged):
        if [(name, p.shape) for name, p in network.named_parameters()] != expected:
            raise UnsupportedModel(
                f"averaged= holds a {type(network).__name__} whose parameters are not those of the model, so it cannot grow with it. Make "
                "the average of the model as it is now (after replay or load_checkpoint, not before)."
            )


def _take_units(network: nn.Module, growth: Growth, model: nn.Module) -> None:
    """Give the new entries of an average the values that they have in the model: it is from there that they are averaged.

    Copies are of units as they are in the average.
    """
    path, module = growth.site.find(network)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    edit = growth.site.move.made(network, growth.site, module, path)
    with torch.no_grad():
        for each in edit.resized:
            old, value = whole(each.tensor), whole(values[each.name])
            each.tensor.copy_(sharded_like(torch.where(is_own(each), old, value.to(old)), each.tensor))
    edit.settled()


def networks(averaged: Averaged) -> list[nn.Module]:
    """The averaged networks themselves; what is none is refused."""
    several = isinstance(averaged, Sequence) and not isinstance(averaged, str)
    given: Any = averaged if several else [] if averaged is None else [averaged]
    return [bare(getattr(each, "module", each), "averaged") for each in given]
