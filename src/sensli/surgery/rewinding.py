"""`rewind`: bring a grown model to another point of its history, back or forth, as loading an earlier checkpoint needs it."""

from __future__ import annotations

import json

from torch import nn

from sensli.errors import HistoryError
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.grown import count_growths
from sensli.modules.running import without_inference_mode
from sensli.surgery.averaging import Averaged, check_alike, follow, kept_of, unfollow
from sensli.surgery.growth import carried_growths, repeat, undo
from sensli.surgery.history import Growth, History
from sensli.surgery.optimizers import Optimizers, as_optimizers
from sensli.surgery.rates import Schedulers, as_schedulers


@without_inference_mode()
def rewind(
    model: nn.Module,
    now: History,
    wanted: History,
    *,
    optimizer: Optimizers = None,
    scheduler: Schedulers = None,
    averaged: Averaged = None,
) -> None:
    """Take the layers out that the wanted history does not have, and insert those that the model lacks.

    ``now`` are the growths of the model, and becomes the wanted history. Weights are not brought back: load them afterwards.
    """
    shared = 0
    while shared < min(len(now), len(wanted)) and _alike(now[shared], wanted[shared]):
        shared += 1
    if shared == len(now) == len(wanted):
        return
    gone, new = now[shared:], wanted[shared:]
    check_alike(model, averaged)
    with AllOrNothing() as change:
        change.keep(model, now, *as_optimizers(optimizer), *as_schedulers(scheduler), *kept_of(averaged))
        for growth in reversed(gone):
            unfollow(averaged, growth, model)
            undo(model, growth, optimizer=optimizer, scheduler=scheduler)
            now.pop()
        for growth in new:
            follow(averaged, repeat(model, growth, optimizer=optimizer, scheduler=scheduler), model)
            now.append(growth)


def carried_history(model: nn.Module) -> History:
    """The growths of a model, from the records that it carries itself."""
    found, count = carried_growths(model), count_growths(model)
    if len(found) != count:
        raise HistoryError(
            f"this {type(model).__name__} has grown {count} times, but carries {len(found)} records. Give the small model "
            "that growing began with."
        )
    return History(found)


def _alike(one: Growth, other: Growth) -> bool:
    # As text: one of them may have been in a file, where a tuple comes back as a list.
    return json.dumps(one.to_dict(), sort_keys=True) == json.dumps(other.to_dict(), sort_keys=True)
