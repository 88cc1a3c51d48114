"""Averages of a model (`torch.optim.swa_utils.AveragedModel`) grow with it.

An average pairs its parameters with the model's one by one. Left behind, it fails at its next update, or pairs the wrong ones where
shapes agree. The new layer is an identity in the average too, so the averaged function does not change either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn

from sensli.errors import UnsupportedModel
from sensli.modules.marks import grown
from sensli.modules.wrappers import bare
from sensli.surgery.history.history import Growth
from sensli.surgery.insertion import undo
from sensli.surgery.replaying import repeat

Averaged: TypeAlias = nn.Module | Sequence[nn.Module] | None


def follow(averaged: Averaged, growth: Growth) -> None:
    """Insert the layer of a growth into each average, at the same place."""
    for network in networks(averaged):
        repeat(network, growth)


def unfollow(averaged: Averaged, growth: Growth) -> None:
    """Take the layer of the last growth out of each average that has it."""
    for network in networks(averaged):
        if any(number == growth.number and path == growth.name for number, path, _ in grown(network)):
            undo(network, growth)


def check_alike(model: nn.Module, averaged: Averaged) -> None:
    """Refuse an average that is not one of this model, before anything changes."""
    expected = [(name, p.shape) for name, p in bare(model).named_parameters()]
    for network in networks(averaged):
        if [(name, p.shape) for name, p in network.named_parameters()] != expected:
            raise UnsupportedModel(
                f"averaged= holds a {type(network).__name__} whose parameters are not those of the model, so it cannot grow with it. Make "
                "the average of the model as it is now (after replay or load_checkpoint, not before)."
            )


def networks(averaged: Averaged) -> list[nn.Module]:
    """The averaged networks themselves; what is none is refused."""
    several = isinstance(averaged, Sequence) and not isinstance(averaged, str)
    given: Any = averaged if several else [] if averaged is None else [averaged]
    return [bare(getattr(each, "module", each), "averaged") for each in given]
