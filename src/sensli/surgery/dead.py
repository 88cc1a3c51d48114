"""`recycle` and `remove_dead`: units that are zero on all data get new rows, or go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn

from sensli.errors import MeasurementError
from sensli.merits.catching import split_batch
from sensli.merits.measuring import EMPTY
from sensli.modules import checks, random_state
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Together
from sensli.modules.running import untouched, without_autocast, without_inference_mode
from sensli.modules.wrappers import bare
from sensli.moves.dead import Narrow, Recycle, Spotting
from sensli.moves.finding import find_sites
from sensli.moves.sites import Site
from sensli.moves.width.confirming import in_order
from sensli.moves.width.width import Width
from sensli.surgery.growth import grow, undo
from sensli.surgery.history import Growth
from sensli.surgery.optimizers import Optimizers, as_optimizers

_Data: TypeAlias = Iterable[Any] | None
_Move: TypeAlias = type[Recycle] | type[Narrow]  # what becomes of dead units


def recycle(
    model: nn.Module, example: Any, batches: Iterable[Any] | None = None, *, optimizer: Optimizers = None
) -> list[Growth]:
    """Give dead units a new start: random rows as large as those of the living units, and zero in everything that reads them.

    A unit is dead if it is exactly zero wherever it is read, on all the data, in the mode the model is in, without dropout (for
    example after a ReLU) and, on the first batch, with it. The output on the data stays to the bit. What the optimizer keeps of these
    units starts again too. All widths that ``find_sites(model, example, what="units")`` offers are looked at. Rows that would give a
    dead unit again, as seen on the first batch, are replaced by their opposite. A refused or failed call changes nothing.

    Args:
        model: The network, or its DistributedDataParallel wrapper.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        batches: The data that tell which units are dead, as in `measure`. None takes the example alone.
        optimizer: The optimizer or optimizers that train the model.

    Returns:
        The records, one for each width that had dead units, which `undo` (the last one first) and `replay` take.

    Raises:
        OptimizerError: If the optimizer cannot follow.
        FunctionChanged: If the output on the first batch changed. Everything was put back.
    """
    return _exchange(model, example, batches, optimizer, Recycle, "recycle dead units")


def remove_dead(
    model: nn.Module, example: Any, batches: Iterable[Any] | None = None, *, optimizer: Optimizers = None
) -> list[Growth]:
    """Make the model narrower by the units that are dead, as in `recycle`; at least one unit of each layer stays.

    The output on the data stays, up to rounding: its sums have fewer terms. The parameters stay the same objects, and the optimizer
    keeps what belongs to the other units. A refused or failed call changes nothing.

    Args:
        model: The network, or its DistributedDataParallel wrapper.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        batches: The data that tell which units are dead, as in `measure`. None takes the example alone.
        optimizer: The optimizer or optimizers that train the model.

    Returns:
        The records, one for each width that had dead units, which `undo` (the last one first) and `replay` take.

    Raises:
        OptimizerError: If the optimizer cannot follow.
        FunctionChanged: If the output on the first batch changed. Everything was put back.
    """
    return _exchange(model, example, batches, optimizer, Narrow, "remove dead units")


@dataclass(frozen=True)
class Found:
    """Dead units of a model: where they are, and an input on which the output must not change."""

    sites: list[Site]
    check: Any


@without_autocast()
def find_dead(
    model: nn.Module, widths: Iterable[Site], example: Any, batches: _Data, together: Together, move: _Move = Recycle
) -> Found:
    """What to do with the units of these widths that are zero on all data; with several processes, on those of all of them."""
    network, ordered = bare(model), in_order(list(widths))
    spotting, first = Spotting(network, ordered), None
    start = random_state.capture()
    with untouched(network), random_state.kept_of_loader(batches):
        for index, batch in enumerate([(example, None)] if batches is None else batches):
            given = example if batches is None else split_batch(batch, index, network)[0]
            spotting.watch(given)
            if first is None:
                first = given, None
                random_state.restore(start)  # the masks with which the output will be compared
                spotting.watch(given, dropout=True)
    if first is None:
        raise MeasurementError(EMPTY)
    told = [[set(units) for units in each] for each in together.agree(spotting.dead(), last=False)]
    sites = []
    for number, site in enumerate(ordered):
        assert isinstance(site.move, Width)
        dead = sorted(set.intersection(*(each[number] for each in told)))
        if move is Narrow and len(dead) == site.move.units:
            dead = dead[1:]
        if dead:
            sites.append(replace(site, move=move(site.move, tuple(dead))))
    return Found(sites, first)


def renew(model: nn.Module, site: Site, *, optimizer: Optimizers, check: Any, warmup: int | None = None) -> Growth:
    """Recycle or remove the dead units of one width. The output on ``check`` must stay.

    Recycled units that are dead there again get the opposite rows: a ReLU that is zero for some rows everywhere is not for these.
    """
    with AllOrNothing() as change:
        change.keep(model, *as_optimizers(optimizer))
        growth = grow(model, site, optimizer=optimizer, check=check, warmup=warmup)
        move = growth.site.move
        if not isinstance(move, Recycle):
            return growth
        with Together(model, f"look for {site} once more") as together:
            again = find_dead(model, [replace(site, move=move.width)], check[0], None, together)
            together.agree()
        still = {unit for each in again.sites if isinstance(each.move, Recycle) for unit in each.move.which}
        turned = tuple(sorted(still.intersection(move.which)))
        if not turned:
            return growth
        undo(model, growth, optimizer=optimizer)
        again_site = replace(site, move=replace(move, _turned=turned))
        return grow(model, again_site, optimizer=optimizer, check=check, warmup=warmup)


@without_inference_mode()
def _exchange(
    model: nn.Module, example: Any, batches: Iterable[Any] | None, optimizer: Optimizers, move: _Move, what: str
) -> list[Growth]:
    with AllOrNothing() as change, Together(model, what) as together:
        bare(model)
        checks.example("example", example)
        if batches is not None:
            checks.batches("batches", batches)
        change.keep(model, *as_optimizers(optimizer))
        widths = find_sites(model, example, what="units", units=1)
        found = find_dead(model, widths, example, batches, together, move)
        growths = [renew(model, site, optimizer=optimizer, check=found.check) for site in found.sites]
        together.agree()
    return growths
