"""`undo`: the last growth of a model is taken back, to the bit if nothing has trained since. All checks come before the first change."""

from __future__ import annotations

from torch import nn

from sensli.errors import HistoryError
from sensli.modules import checks
from sensli.modules.autocast import without_autocast
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Changing
from sensli.modules.marks import grown, told, unmark
from sensli.modules.wrappers import averages_in, bare
from sensli.surgery.history.growth import Growth
from sensli.surgery.state.optim import Optimizers, as_optimizers, check_own, leave
from sensli.surgery.state.rates import Schedulers, as_schedulers, check_driven
from sensli.surgery.state.resizing import plan_shrinking


@without_autocast()
def undo(
    model: nn.Module, growth: Growth | None = None, *, optimizer: Optimizers = None, scheduler: Schedulers = None
) -> Growth:
    """Take the last growth back: remove its layer or its units, and what the optimizer keeps of them.

    If no training step was taken since, the model and the optimizer are to the bit what they were. Otherwise the function
    changes, because the layer is no longer an identity, or the units have an effect; units that were recycled or removed are then
    given back as units that nothing reads.

    Args:
        model: The network that has grown, or its DistributedDataParallel wrapper.
        growth: The last growth of the model. None takes the record that the model carries itself.
        optimizer: The optimizer or optimizers that followed the growth.
        scheduler: The scheduler or schedulers that followed the growth.

    Returns:
        The growth that was taken back. Remove it from the history that has it (``history.pop()``).

    Raises:
        HistoryError: If it is not the last growth of this model.
        OptimizerError: If the optimizer is that of another model, or the scheduler that of another optimizer.
    """
    with AllOrNothing() as change, Changing(model, f"undo {getattr(growth, 'name', 'the last growth')}") as together:
        network = bare(model)
        if growth is not None:
            checks.instance(
                "growth",
                growth,
                Growth,
                "the Growth that grow or insert returned (for example grower.history[-1]), or None",
            )
        known, drivers = as_optimizers(optimizer), as_schedulers(scheduler)
        check_own(network, known)
        if known:
            check_driven(known, drivers)
        change.keep(model, *known, *drivers)
        return _undo(network, growth, together, optimizer, scheduler, change)


def _undo(
    model: nn.Module,
    growth: Growth | None,
    together: Changing,
    optimizer: Optimizers,
    scheduler: Schedulers,
    change: AllOrNothing,
) -> Growth:
    last = max(grown(model), key=lambda entry: entry[0], default=None)
    if last is None:
        raise HistoryError(
            f"nothing to undo: this {type(model).__name__} has not grown. Give the model that was grown."
        )
    number, path, module = last
    growth = _told(model, module, number) if growth is None else growth
    if number != growth.number or path != growth.name:
        raise HistoryError(
            f"cannot undo growth {growth.number} ({growth.name}): the last growth of this {type(model).__name__} is number "
            f"{number} ({path}), and later growths build on earlier ones. Undo in reverse order."
        )
    # By its paths: the growth may be that of another model, of which this one is a copy or an average.
    site = growth.site.by_path()
    edit = site.move.made(model, site, module, path)
    gone = edit.gone
    shrinking = plan_shrinking(optimizer, edit.resized)
    if growth.own_rate is not None and optimizer is not None:
        growth.own_rate.check(optimizer, scheduler, gone)
    trained = [parameter for name, parameter in model.named_parameters() if name in growth.frozen]
    together.agree_on({"the last growth": f"number {number}, {path}"})
    shrinking.build()
    change.wait()
    from sensli.surgery.averaging import unfollow  # here, because an average is taken back by this function too

    unfollow(list(averages_in(model).values()), growth, model)
    if growth.rates is not None and optimizer is not None:
        growth.rates.revert(optimizer, scheduler)
    unmark(module, number)
    edit.revert()
    shrinking.apply()
    for parameter in trained:
        parameter.requires_grad_(True)
    leave(optimizer, gone, renames={new: old for old, new in growth.renames.items()})
    if growth.own_rate is not None and optimizer is not None:
        growth.own_rate.remove(optimizer, scheduler)
    shrinking.settle()
    return growth


def _told(model: nn.Module, module: nn.Module, number: int) -> Growth:
    """The record of a growth that the model carries."""
    record = told(module, number)
    if not isinstance(record, Growth):
        raise HistoryError(
            f"growth is missing, and this {type(model).__name__} carries no record of its last growth (number {number}). Give the "
            "Growth that grow or insert returned."
        )
    return record
