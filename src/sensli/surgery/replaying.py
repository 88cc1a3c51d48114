"""`replay`: a fresh model through the growths of a history; `repeat`: one of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sensli.errors import HistoryError, SensliError
from sensli.modules.autocast import without_inference_mode
from sensli.modules.copies import copied_model
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Changing
from sensli.modules.failing import let_memory_through
from sensli.modules.marks import grown, tell
from sensli.modules.wrappers import bare
from sensli.moves.cutting import nested
from sensli.surgery.history.growth import Growth, Resized, as_growths
from sensli.surgery.history.history import History
from sensli.surgery.insertion import grow
from sensli.surgery.state.optim import Optimizers, as_optimizers
from sensli.surgery.state.rates import Schedulers, as_schedulers


@without_inference_mode()
def replay(model: nn.Module, history: History) -> nn.Module:
    """Grow a fresh model in the same way, so that the grown model's state dict fits. Values of new units come with that state dict.

    Args:
        model: A model as it was before its first growth. It is changed in place.
        history: The growths to repeat.

    Returns:
        The same model, grown.

    Raises:
        HistoryError: If the model has grown already, or is not the one that the history began with.
    """
    with AllOrNothing() as change, Changing(model, "replay a history") as together:
        network, growths = bare(model), as_growths("history", history)
        change.keep(model)
        together.agree_on({"the number of growths": len(growths)})
        _replay(network, growths)
    return model


def _replay(model: nn.Module, history: Sequence[Growth]) -> None:
    if any(True for _ in grown(model)):
        raise HistoryError(f"this {type(model).__name__} has grown already; replay needs a fresh model.")
    trial = copied_model(model)  # a history that does not fit must leave the model as it was
    for target in (trial, model):
        for growth in history:
            repeat(target, growth)


def repeat(model: nn.Module, growth: Growth, *, optimizer: Optimizers = None, scheduler: Schedulers = None) -> Growth:
    """Make the same growth at the same place of another model, found by its path. An optimizer follows: its rates stay, and groups of
    the growth's own come with it."""
    own = growth.own_rate.factor if growth.own_rate is not None and optimizer is not None else None
    with AllOrNothing() as change:
        try:
            change.keep(model, *as_optimizers(optimizer), *as_schedulers(scheduler))
            again = grow(model, growth.site.by_path(), optimizer=optimizer, scheduler=scheduler, own_rate=own)
        except (SensliError, ValueError, TypeError, RuntimeError) as error:
            let_memory_through(error)
            raise HistoryError(
                f"growth {growth.number} ({growth.site}) does not fit this {type(model).__name__}: {error} "
                "The factory must build the architecture that the history began with."
            ) from error
        _check_same_growth(model, growth, again)
        # What followed the growth the first time (rates, groups, frozen parameters) is known to the record of then alone.
        tell(bare(model).get_submodule(again.name), again.number, growth)
    return again


def _check_same_growth(model: nn.Module, growth: Growth, again: Growth) -> None:
    if again.resized != growth.resized:
        raise HistoryError(
            f"growth {growth.number} ({growth.site}) does not fit this {type(model).__name__}: it resized {_shown(growth.resized)}, here "
            f"{_shown(again.resized)}. The factory must build the architecture that the history began with."
        )
    if again.name != growth.name and nested(growth.name) and not nested(again.name):
        raise HistoryError(
            f"growth {growth.number} is called {growth.name} in this history, and {again.name} now: an earlier version of sensli wrote it, "
            "which put layers of one place into each other. Saved weights would not fit. Load it with the version that wrote it."
        )
    if (again.number, again.name, again.parameters) != (growth.number, growth.name, growth.parameters):
        raise HistoryError(
            f"growth {growth.number} became {again} {list(again.parameters)} instead of {growth.name} "
            f"{list(growth.parameters)}: the factory builds a different architecture from the one the history began with, or a growth is "
            "missing from the history."
        )
    for name, shape in growth.beside.items():
        if again.beside.get(name) != shape:
            raise HistoryError(
                f"growth {growth.number} ({growth.site}) does not fit this {type(model).__name__}: beside it {name} had the "
                f"shape {shape}, here {again.beside.get(name, 'it is missing')}. The factory must build the architecture that "
                "the history began with."
            )


def _shown(resized: Sequence[Resized]) -> str:
    return ", ".join(map(str, resized)) or "nothing"
