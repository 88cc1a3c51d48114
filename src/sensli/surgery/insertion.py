"""`grow`: a model gets a layer or more units, or is as before. All checks come before the first change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import nn

from sensli.errors import OptimizerError, UnknownSite, UnsupportedSite
from sensli.merits.ahead import made_for
from sensli.merits.merits import Merit, as_site
from sensli.modules import checks
from sensli.modules.autocast import without_autocast
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Changing
from sensli.modules.engines.fsdp import whole
from sensli.modules.marks import grown, mark, tell, told
from sensli.modules.wrappers import averages_in, bare, own_parameters
from sensli.moves.move import Edit
from sensli.moves.naming import named
from sensli.moves.sites import Site
from sensli.moves.width.width import Width
from sensli.surgery.history.growth import Growth, Resized, names_of_today
from sensli.surgery.same_output import Outputs, given_of
from sensli.surgery.state.optim import Joining, Optimizers, as_optimizers, check_needed, plan_joining
from sensli.surgery.state.own_rate import OwnRate, check_own_factor, plan_own_rate
from sensli.surgery.state.rates import RateScaling, Schedulers, as_schedulers, check_factor, plan_rate_scaling
from sensli.surgery.state.resizing import Resizing, plan_resizing


@without_autocast()
def grow(
    model: nn.Module,
    site: Site | Merit | str,
    *,
    optimizer: Optimizers = None,
    scheduler: Schedulers = None,
    lr_scale: float = 1.0,
    check: Any = None,
    group: int | dict[str, Any] | None = None,
    freeze_rest: bool = False,
    own_rate: float | None = None,
) -> Growth:
    """Grow the model in place at a site of any kind; the function does not change, and training can continue.

    New parameters join the optimizer's groups of their neighbours. A parameter that gets new entries stays the same object, in its
    group; the moments of its old entries are kept, and those of the new ones begin at zero. A refused or failed growth leaves the
    model, the optimizer and the scheduler as they were.

    Args:
        model: The network, or its DistributedDataParallel wrapper.
        site: The site to grow at; a merit, which stands for its site; or the name of a site that the last `find_sites` on this model
            found: its line, its place (``"after features.1"``) or its path, if that is clear.
        optimizer: The optimizer or optimizers that train the model.
        scheduler: The learning-rate scheduler or schedulers of the optimizer.
        lr_scale: Multiplies all learning rates from now on (default: 1.0).
        check: A batch on which the output must not change, in the mode the model is in and with the same random numbers. As in
            `measure` a pair is ``(input, target)``, of which the input is used; for a model with several arguments give
            ``((x, mask), None)`` or a dict of keyword arguments. New units that were never measured get random rows that fit it.
        group: The parameter group (its index or the group itself) that new parameters join if their neighbours are in none. New entries
            of existing parameters stay in the group of their parameter.
        freeze_rest: Whether only what is new trains from now on (default: False): the new layer, those that came with ``freeze_rest``
            before, and those that have not trained yet. Refused where existing parameters get new entries.
        own_rate: A factor: the new layer gets separate parameter groups with this many times its neighbours' learning rate. Refused
            where existing parameters get new entries.

    Returns:
        The record of the growth, which `undo` and `replay` take.

    Raises:
        UnknownSite: If the site belongs to another model, its place is gone, or no single site has this name.
        UnsupportedSite: If the model cannot grow there without changing the function.
        OptimizerError: If the optimizer or the scheduler cannot follow.
        FunctionChanged: If the output on ``check`` changed. Everything was put back.
    """
    with AllOrNothing() as change, Changing(model, f"insert {site}") as together:
        network = bare(model)
        site = named(network, site) if isinstance(site, str) else as_site("site", site)
        checks.flag("freeze_rest", freeze_rest)
        lr_scale = check_factor(lr_scale)
        check_needed(optimizer, lr_scale=lr_scale != 1, group=group is not None)
        if check is not None:
            checks.batch("check", check)
        options = _Options(optimizer, scheduler, lr_scale, check, group, freeze_rest, own_rate)
        change.keep(model, *as_optimizers(optimizer), *as_schedulers(scheduler))
        return _grow(network, site, together, options, change)


def insert(
    model: nn.Module,
    site: Site | Merit | str,
    *,
    optimizer: Optimizers = None,
    scheduler: Schedulers = None,
    lr_scale: float = 1.0,
    check: Any = None,
    group: int | dict[str, Any] | None = None,
    freeze_rest: bool = False,
    own_rate: float | None = None,
) -> Growth:
    """Insert the site's layer into the model in place; the function does not change, and training can continue.

    The name of `grow` for layers: both take sites of every kind and do the same.

    Args:
        model: The network, or its DistributedDataParallel wrapper.
        site: The site to grow at; a merit, which stands for its site; or the name of a site that the last `find_sites` on this model
            found: its line, its place (``"after features.1"``) or its path, if that is clear.
        optimizer: The optimizer or optimizers that train the model.
        scheduler: The learning-rate scheduler or schedulers of the optimizer.
        lr_scale: Multiplies all learning rates from now on (default: 1.0).
        check: A batch on which the output must not change, as in `grow`.
        group: The parameter group (its index or the group itself) that the new parameters join if their neighbours are in none.
        freeze_rest: Whether only what is new trains from now on (default: False): the new layer, those that came with ``freeze_rest``
            before, and those that have not trained yet.
        own_rate: A factor: the new layer gets separate parameter groups with this many times its neighbours' learning rate.

    Returns:
        The record of the insertion, which `undo` and `replay` take.

    Raises:
        UnknownSite: If the site belongs to another model, its place is gone, or no single site has this name.
        UnsupportedSite: If the layer cannot be inserted there without changing the function.
        OptimizerError: If the optimizer or the scheduler cannot follow.
        FunctionChanged: If the output on ``check`` changed. Everything was put back.
    """
    return grow(
        model, site, optimizer=optimizer, scheduler=scheduler, lr_scale=lr_scale, check=check, group=group, freeze_rest=freeze_rest,
        own_rate=own_rate,
    )  # fmt: skip


@dataclass(frozen=True)
class _Options:
    """What follows the change of a model, and how."""

    optimizer: Optimizers
    scheduler: Schedulers
    lr_scale: float
    check: Any
    group: int | dict[str, Any] | None
    freeze_rest: bool
    own_rate: float | None


def _grow(model: nn.Module, site: Site, together: Changing, options: _Options, change: AllOrNothing) -> Growth:
    """Plan and check everything, then make the change, then let everybody follow."""
    site = made_for(together, model, site, None if options.check is None else given_of(options.check))
    edit = site.move.plan(model, site)
    from sensli.surgery import averaging  # here, because an average grows by this function too

    averaging.check_alike(model, None)
    # Before a copy of a sharded block is made, for which all ranks are needed.
    together.agree_on({"the place": edit.name}, last=False)
    edit.build()
    for module in edit.added:
        together.prepare(module, edit.site.path)
    if edit.added:
        edit.prepared()
    follow = _Follow.plan(edit, options)
    together.agree(last=False)  # before sharded parameters and states are gathered, for which all ranks are needed
    resting = _resting(model) if options.freeze_rest else []
    follow.resizing.build()
    number = 1 + max((number for number, _, _ in grown(model)), default=0)
    before = Outputs.of(model, options.check) if options.check is not None else None

    change.wait()
    edit.apply()
    for module in edit.added or [edit.module]:
        mark(module, number, new=bool(edit.added))
    if before is not None:
        before.check(model, edit.added, site)
    groups = follow.apply()
    growth = Growth(
        site=edit.site,
        number=number,
        name=edit.name,
        parameters=tuple(new.name for new in edit.new),
        resized=tuple(Resized(each.name, each.old_shape, each.new_shape) for each in edit.resized),
        renames=edit.renames,
        beside=edit.beside,
        rates=follow.rates if follow.rates.changes else None,
        own_rate=groups,
        frozen=_freeze(model, resting),
        freeze_rest=options.freeze_rest,
    )
    tell(edit.module, number, growth)
    averaging.follow(list(averages_in(model).values()), growth, model)
    together.agree_on({"the growth": f"number {number}: {site}, as {edit.name}"})
    follow.resizing.settle()
    return growth


@dataclass(frozen=True)
class _Follow:
    """The optimizers and schedulers follow an edit: planned before it is made, applied after it."""

    options: _Options
    joining: Joining
    resizing: Resizing
    rates: RateScaling
    own: Any

    @classmethod
    def plan(cls, edit: Edit, options: _Options) -> _Follow:
        optimizer, scheduler = options.optimizer, options.scheduler
        _refuse_parts(edit, options)
        joining = plan_joining(optimizer, edit.new, group=options.group, renames=edit.renames)
        resizing = plan_resizing(optimizer, edit.resized)
        rates = plan_rate_scaling(optimizer, scheduler, options.lr_scale)
        own = None if options.own_rate is None else plan_own_rate(optimizer, scheduler, joining, options.own_rate)
        return cls(options, joining, resizing, rates, own)

    def apply(self) -> OwnRate | None:
        self.resizing.apply()
        if self.own is None:
            self.joining.apply()
        self.rates.apply(self.options.optimizer, self.options.scheduler)
        # After the factor, so that both hold for the new layer.
        return self.own.apply() if self.own is not None else None


def _refuse_parts(edit: Edit, options: _Options) -> None:
    """Refuse what is meant for new parameters where there are none, or where it would divide a parameter."""
    divided = [each.name for each in edit.resized if each.is_parameter]
    if edit.new and not divided:
        return
    why = "adds no parameters, and those that exist"
    if divided:
        why = f"gives {divided[0]} new entries beside the old ones, and a part of a parameter"
    if options.freeze_rest:
        raise UnsupportedSite(
            f"freeze_rest must be False here, got True: '{edit.site}' {why} cannot train alone. Leave it out, or grow a layer."
        )
    if options.own_rate is not None:
        check_own_factor(options.own_rate)
        raise OptimizerError(
            f"own_rate must be None here, got {options.own_rate}: '{edit.site}' {why} cannot have a separate learning rate. Leave it out, "
            "or grow a layer."
        )


def _resting(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train now and will not beside a new layer: all but those of layers that came to train alone, or not at all yet.

    Every new layer has parameters that begin at zero. One that rests before it has trained would have no effect for ever.
    """
    records = sorted((number, told(module, number)) for number, _, module in grown(model))
    growths = [growth for _, growth in records if growth is not None]
    named = dict(model.named_parameters())
    of = {id(named[name]): growth.number for name, growth in names_of_today(growths).items() if name in named}
    training = [parameter for parameter in own_parameters(model) if parameter.requires_grad]
    kept = {growth.number for growth in growths if growth.freeze_rest}
    kept |= {of[id(each)] for each in training if id(each) in of and not whole(each).any()}
    for growth in growths:
        _refuse_resting_units(model, growth)
    return [each for each in training if of.get(id(each)) not in kept]


def _refuse_resting_units(model: nn.Module, growth: Growth) -> None:
    """Raise if units that came with an earlier growth have no effect yet: frozen now, they would never have one."""
    move = growth.site.move
    if not isinstance(move, Width):
        return
    with suppress(UnknownSite):  # a later growth has taken the place apart
        for fill, width in product(("row", "column"), [move.on(model)]):
            parts = []
            for axis in width.axes:
                tensor, stretch = getattr(axis.module.find_module(), axis.name), width.stretch(axis)
                ends = axis.start + axis.outer * (width.units + width.more) * axis.inner
                if axis.fill == fill and tensor.dim() > 1 and tensor.requires_grad and tensor.shape[axis.dim] >= ends:
                    parts.append(stretch.entries(whole(tensor)))
            if parts and not any(bool(part.any()) for part in parts):
                raise UnsupportedSite(
                    f"freeze_rest must be False here, got True: the units of growth {growth.number} ({growth.site}) have no effect yet, "
                    "and a part of a parameter cannot train alone. Train before, or undo that growth."
                )


def _freeze(model: nn.Module, resting: Sequence[nn.Parameter]) -> tuple[str, ...]:
    """Let these parameters rest; their names."""
    found = {id(parameter) for parameter in resting}
    for parameter in resting:
        parameter.requires_grad_(False)
        parameter.grad = None  # an optimizer would go on stepping, and decaying, by what is left of it
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in found)


def check_joining(
    model: nn.Module, site: Site, optimizer: Optimizers, group: int | dict[str, Any] | None = None
) -> None:
    """Raise `OptimizerError` if the optimizer would not train what is new at a site. Builds no layer."""
    if optimizer is not None:
        new = site.move.joining(model, site)
        plan_joining(optimizer, new, group=group)
        if not new:
            plan_resizing(optimizer, site.move.plan(model, site).resized)
