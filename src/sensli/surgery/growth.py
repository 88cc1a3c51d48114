"""`grow`, `undo`, `replay`: a model gets a layer or more units, loses the last ones, or is as before. All checks come first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import (
    BadExample,
    FunctionChanged,
    HistoryError,
    OptimizerError,
    SensliError,
    UnknownSite,
    UnsupportedSite,
)
from sensli.merits.measuring import fit_to_batch
from sensli.merits.merits import Merit, as_site
from sensli.modules import checks, random_state, running
from sensli.modules.copies import NoDropout
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Changing
from sensli.modules.grown import attach_record, attached_record, grown_modules, mark, unmark
from sensli.modules.wrappers import averages_in, bare, own_parameters
from sensli.moves.inserting import is_nested
from sensli.moves.sites import Edit, Site, site_named
from sensli.moves.width.width import Width
from sensli.surgery.history import Growth, History, Resized, as_growths, current_names
from sensli.surgery.optimizers import (
    Optimizers,
    as_optimizers,
    check_needed,
    check_own,
    leave_groups,
    plan_joining,
    plan_resizing,
    plan_shrinking,
)
from sensli.surgery.rates import (
    Schedulers,
    as_schedulers,
    check_driven,
    check_factor,
    check_own_factor,
    check_power,
    depth_factor,
    plan_own_rate,
    plan_rate_scaling,
)
from sensli.surgery.warmup import check_warmup, forget_growth, plan_warmup, watch_steps

# ---- The output of a model must not move when a layer goes in: compared on a batch of the user's, with the same random
# numbers.


def given_of(batch: Any) -> Any:
    """What of the user's batch the model is called with: of a pair the first part."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


@dataclass(frozen=True)
class OutputRun:
    """One run of a model: what came out, and where the random numbers ended."""

    tensors: list[Tensor]
    drawn: dict[str, Any]


@dataclass(frozen=True)
class Outputs:
    """What a model gives for a batch before a layer goes in, in the mode it is in."""

    given: Any
    plain: OutputRun
    without_dropout: OutputRun | None  # where random numbers were drawn

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> Outputs:
        given = given_of(batch)
        if isinstance(given, dict):
            given = running.taken_by(model, given)  # as in `measure`: the others are for the loss
        start = random_state.capture()
        try:
            plain = _run(model, given)
            random = not random_state.equal_states(plain.drawn, start)
            return cls(given, plain, _run(model, given, dropout=False) if random else None)
        except Exception as error:
            running.let_memory_through(error)
            raise BadExample(
                f"check does not run through {type(model).__name__}: {type(error).__name__}: {error}. It must be an input, an (input, "
                f"target) pair or a dict of keyword arguments, and the model was called with {running.describe(given)}. For several "
                "arguments give check=((x, mask), None)."
            ) from error

    def check(self, model: nn.Module, layers: Sequence[nn.Module], site: Site) -> None:
        """Raise `FunctionChanged` if the model, with the new layers in it, gives something else."""
        allowed = site.move.tolerance
        try:
            now = _run(model, self.given, layers)
            distance = _distance(self.plain, now, allowed)
            # A model that draws in a loop over its blocks (LayerDrop) draws once more now, and every later mask is another one. Only where
            # the numbers drawn were the same is a difference the layer's doing.
            other_masks = not random_state.equal_states(self.plain.drawn, now.drawn)
            if distance and other_masks and self.without_dropout is not None:
                distance = _distance(self.without_dropout, _run(model, self.given, layers, dropout=False), allowed)
        except Exception as error:
            running.let_memory_through(error)
            raise FunctionChanged(
                f"after inserting {site} the model fails on check ({type(error).__name__}: {error}), so everything was put back. "
                "Choose another site."
            ) from error
        if distance:
            noise = ""
            if other_masks:
                noise = " Or it draws different random numbers with one more layer: call model.eval() before insert to avoid them."
            raise FunctionChanged(
                f"inserting {site} changed the output by {distance:.1e} relative to its size, so everything was put back. The place is not "
                f"what find_sites saw (another input, another branch), or the arithmetic is not exact there; choose another site.{noise}"
            )


def _run(model: nn.Module, given: Any, layers: Sequence[nn.Module] = (), *, dropout: bool = True) -> OutputRun:
    """Run the model; what the new layers draw is drawn aside, so that everything else draws what it drew without them."""
    mode = nullcontext() if dropout else NoDropout()
    handles = [handle for layer in layers for handle in running.undraw_hooks(layer)]
    try:
        with running.untouched(model), torch.no_grad(), mode:
            output = running.run(model, running.to_device(given, running.device_of(model)))
            return OutputRun([t.detach().clone() for t in running.tensors(output)], random_state.capture())
    finally:
        for handle in handles:
            handle.remove()


def _distance(before: OutputRun, after: OutputRun, allowed: float | None) -> float:
    """By how much the outputs differ, relative to their size; 0 within what is allowed: rounding, in double precision not even that."""
    if [t.shape for t in before.tensors] != [t.shape for t in after.tensors]:
        return float("inf")
    exact = (torch.float64, torch.complex128) if allowed is None else ()
    pairs = zip(before.tensors, after.tensors, strict=True)
    distance = max((running.relative_change(old, new, exact=old.dtype in exact) for old, new in pairs), default=0.0)
    return distance if distance > (allowed or 0.0) else 0.0


@running.without_autocast()
def grow(
    model: nn.Module,
    site: Site | Merit | str,
    *,
    optimizer: Optimizers = None,
    scheduler: Schedulers = None,
    lr_factor: float = 1.0,
    check: Any = None,
    group: int | dict[str, Any] | None = None,
    freeze_rest: bool = False,
    new_lr_factor: float | None = None,
    warmup: int | None = None,
    depth_power: float = 0.0,
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
        lr_factor: Multiplies all learning rates from now on (default: 1.0).
        check: A batch on which the output must not change, in the mode the model is in and with the same random numbers. As in
            `measure` a pair is ``(input, target)``, of which the input is used; for a model with several arguments give
            ``((x, mask), None)`` or a dict of keyword arguments. New units that were never measured get random rows that fit it.
        group: The parameter group (its index or the group itself) that new parameters join if their neighbours are in none. New entries
            of existing parameters stay in the group of their parameter.
        freeze_rest: Whether only what is new trains from now on (default: False): the new layer, those that came with ``freeze_rest``
            before, and those that have not trained yet. Refused where existing parameters get new entries.
        new_lr_factor: A factor: the new layer gets separate parameter groups with this many times its neighbours' learning rate. Refused
            where existing parameters get new entries.
        warmup: A number of steps: the k-th update of everything that is new, also of new entries of existing parameters, is multiplied
            by ``k / warmup`` until it is 1. All old entries move as without it.
        depth_power: A growth that makes the model deeper, from a to b blocks of this kind or layers with weights, multiplies all
            learning rates by ``(a / b) ** depth_power``, besides ``lr_factor`` (default: 0.0).

    Returns:
        The record of the growth, which `undo` and `replay` take.

    Raises:
        UnknownSite: If the site belongs to another model, its place is gone, or no single site has this name.
        UnsupportedSite: If the model cannot grow there without changing the function.
        OptimizerError: If the optimizer or the scheduler cannot follow.
        FunctionChanged: If the output on ``check`` changed. Everything was put back.
    """
    from sensli.surgery import averaging  # here, because an average grows by this function too

    with AllOrNothing() as change, Changing(model, f"insert {site}") as together:
        network = bare(model)
        site = site_named(network, site) if isinstance(site, str) else as_site("site", site)
        checks.flag("freeze_rest", freeze_rest)
        lr_factor, warmup, depth_power = check_factor(lr_factor), check_warmup(warmup), check_power(depth_power)
        check_needed(
            optimizer, lr_factor=lr_factor != 1, group=group is not None, warmup=warmup is not None,
            depth_power=depth_power != 0,
        )  # fmt: skip
        if check is not None:
            checks.batch("check", check)
        watch_steps(optimizer)
        change.keep(model, *as_optimizers(optimizer), *as_schedulers(scheduler))

        # Plan and check: everything that can be refused is refused here, and nothing changes.
        site = fit_to_batch(together, network, site, None if check is None else given_of(check))
        edit = site.move.plan(network, site)
        averaging.check_alike(network, None)
        # Before a copy of a sharded block is made, for which all ranks are needed.
        together.agree_on({"the place": edit.name}, last=False)
        edit.build()
        for module in edit.added:
            together.prepare(module, edit.site.path)
        if edit.added:
            edit.prepared()
        _refuse_parts(edit, freeze_rest, new_lr_factor)
        if group is None:
            check_own(network, as_optimizers(optimizer))
        joining = plan_joining(optimizer, edit.new, group=group, renames=edit.renames)
        resizing = plan_resizing(optimizer, edit.resized)
        rates = plan_rate_scaling(optimizer, scheduler, lr_factor * depth_factor(network, edit, depth_power))
        newborn = None if warmup is None else plan_warmup(optimizer, warmup, joining, edit.resized)
        own = None if new_lr_factor is None else plan_own_rate(optimizer, scheduler, joining, new_lr_factor)
        together.agree(last=False)  # before sharded parameters and states are gathered, for which all ranks are needed
        resting = _to_freeze(network) if freeze_rest else []
        resizing.build()
        if newborn is not None:
            newborn.build()
        number = 1 + max((number for number, _, _ in grown_modules(network)), default=0)
        before = Outputs.of(network, check) if check is not None else None

        # Cut: the model changes, then everything that belongs to it follows.
        change.wait()
        edit.apply()
        for module in edit.added or [edit.module]:
            mark(module, number, new=bool(edit.added))
        if before is not None:
            before.check(network, edit.added, site)
        resizing.apply()
        rates.apply(optimizer, scheduler)
        if own is not None:  # after the factor, so that both hold for the new layer
            own.add(optimizer, scheduler)
            joining = own.redirect(joining, optimizer)
        joining.apply()
        if newborn is not None:
            newborn.apply(number)
        resized = tuple(Resized(each.name, each.old_shape, each.new_shape) for each in edit.resized)
        growth = Growth(
            site=edit.site, number=number, name=edit.name, parameters=tuple(new.name for new in edit.new), resized=resized,
            renames=dict(edit.renames), beside=dict(edit.beside), rates=rates if rates.changes else None, own_rate=own,
            frozen=_freeze(network, resting), freeze_rest=freeze_rest,
        )  # fmt: skip
        attach_record(edit.module, number, growth)
        averaging.follow(list(averages_in(network).values()), growth, network)
        together.agree_on({"the growth": f"number {number}: {site}, as {edit.name}"})
        resizing.settle()
        return growth


insert = grow
"""The name of `grow` for layers: both take sites of every kind and do the same."""


def _refuse_parts(edit: Edit, freeze_rest: bool, new_lr_factor: float | None) -> None:
    """Refuse what is meant for new parameters where there are none, or where it would divide a parameter."""
    divided = [each.name for each in edit.resized if each.is_parameter]
    if edit.new and not divided:
        return
    why = "adds no parameters, and those that exist"
    if divided:
        why = f"gives {divided[0]} new entries beside the old ones, and a part of a parameter"
    if freeze_rest:
        raise UnsupportedSite(
            f"freeze_rest must be False here, got True: '{edit.site}' {why} cannot train alone. Leave it out, or grow a layer."
        )
    if new_lr_factor is not None:
        check_own_factor(new_lr_factor)
        raise OptimizerError(
            f"new_lr_factor must be None here, got {new_lr_factor}: '{edit.site}' {why} cannot have a separate learning rate. Leave it "
            "out, or grow a layer."
        )


def carried_growths(model: nn.Module) -> list[Growth]:
    """The records of its growths that a model carries itself, oldest first. One growth may have made several modules."""
    found = [(number, attached_record(module, number)) for number, _, module in grown_modules(model)]
    records = {number: record for number, record in found if record}
    return [records[number] for number in sorted(records)]


def _to_freeze(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train now and will not beside a new layer: all but those of layers that came to train alone, or not at all yet.

    Every new layer has parameters that begin at zero. One that rests before it has trained would have no effect for ever.
    """
    growths = carried_growths(model)
    named = dict(model.named_parameters())
    of = {id(named[name]): growth.number for name, growth in current_names(growths).items() if name in named}
    training = [parameter for parameter in own_parameters(model) if parameter.requires_grad]
    kept = {growth.number for growth in growths if growth.freeze_rest}
    kept |= {of[id(each)] for each in training if id(each) in of and not running.whole_tensor(each).any()}
    for growth in growths:
        _refuse_resting_units(model, growth)
    return [each for each in training if of.get(id(each)) not in kept]


def _refuse_resting_units(model: nn.Module, growth: Growth) -> None:
    """Raise if units that came with an earlier growth have no effect yet: frozen now, they would never have one."""
    move = growth.site.move
    if not isinstance(move, Width):
        return
    with suppress(UnknownSite):  # a later growth has taken the place apart
        width = move.in_model(model)
        for fill in ("row", "column"):
            parts = []
            for axis in width.axes:
                tensor, stretch = getattr(axis.module.find_module(), axis.name), width.stretch(axis)
                ends = axis.start + axis.outer * (width.units + width.more) * axis.inner
                if axis.fill == fill and tensor.dim() > 1 and tensor.requires_grad and tensor.shape[axis.dim] >= ends:
                    parts.append(stretch.entries(running.whole_tensor(tensor)))
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


@running.without_autocast()
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
    from sensli.surgery import averaging  # here, because an average is taken back by this function too

    with AllOrNothing() as change, Changing(model, f"undo {getattr(growth, 'name', 'the last growth')}") as together:
        network = bare(model)
        if growth is not None:
            what = "the Growth that grow or insert returned (for example grower.history[-1]), or None"
            checks.instance("growth", growth, Growth, what)
        known, drivers = as_optimizers(optimizer), as_schedulers(scheduler)
        check_own(network, known)
        if known:
            check_driven(known, drivers)
        watch_steps(known)
        change.keep(model, *known, *drivers)

        last = max(grown_modules(network), key=lambda entry: entry[0], default=None)
        if last is None:
            kind = type(network).__name__
            raise HistoryError(f"nothing to undo: this {kind} has not grown. Give the model that was grown.")
        number, path, module = last
        growth = attached_record(module, number) if growth is None else growth
        if not isinstance(growth, Growth):
            raise HistoryError(
                f"growth is missing, and this {type(network).__name__} carries no record of its last growth (number {number}). Give the "
                "Growth that grow or insert returned."
            )
        if number != growth.number or path != growth.name:
            raise HistoryError(
                f"cannot undo growth {growth.number} ({growth.name}): the last growth of this {type(network).__name__} is number "
                f"{number} ({path}), and later growths build on earlier ones. Undo in reverse order."
            )
        # By its paths: the growth may be that of another model, of which this one is a copy or an average.
        site = growth.site.by_path()
        edit = site.move.made(network, site, module, path)
        gone = edit.gone
        shrinking = plan_shrinking(optimizer, edit.resized)
        rates, own = (growth.rates, growth.own_rate) if optimizer is not None else (None, None)
        if own is not None:
            own.check(optimizer, scheduler, gone)
        trained = [parameter for name, parameter in network.named_parameters() if name in growth.frozen]
        together.agree_on({"the last growth": f"number {number}, {path}"})
        shrinking.build()

        change.wait()
        averaging.unfollow(list(averages_in(network).values()), growth, network)
        if rates is not None:
            rates.revert(optimizer, scheduler)
        unmark(module, number)
        edit.revert()
        shrinking.apply()
        for parameter in trained:
            parameter.requires_grad_(True)
        leave_groups(optimizer, gone, renames={new: old for old, new in growth.renames.items()})
        if own is not None:
            own.remove(optimizer, scheduler)
        forget_growth(optimizer, number)
        shrinking.settle()
        return growth


@running.without_inference_mode()
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
        if any(True for _ in grown_modules(network)):
            raise HistoryError(f"this {type(network).__name__} has grown already; replay needs a fresh model.")
        for growth in growths:
            repeat(network, growth)
    return model


def repeat(model: nn.Module, growth: Growth, *, optimizer: Optimizers = None, scheduler: Schedulers = None) -> Growth:
    """Make the same growth at the same place of another model, found by its path. An optimizer follows: its rates stay, and groups of
    the growth's own come with it."""
    own = growth.own_rate.factor if growth.own_rate is not None and optimizer is not None else None
    with AllOrNothing() as change:
        try:
            change.keep(model, *as_optimizers(optimizer), *as_schedulers(scheduler))
            again = grow(model, growth.site.by_path(), optimizer=optimizer, scheduler=scheduler, new_lr_factor=own)
        except (SensliError, ValueError, TypeError, RuntimeError) as error:
            running.let_memory_through(error)
            raise _misfit(model, growth, str(error)) from error
        _check_same_growth(model, growth, again)
        # What followed the growth the first time (rates, groups, frozen parameters) is known to the record of then alone.
        attach_record(bare(model).get_submodule(again.name), again.number, growth)
    return again


def _check_same_growth(model: nn.Module, growth: Growth, again: Growth) -> None:
    if again.resized != growth.resized:
        then, now = (", ".join(map(str, each.resized)) or "nothing" for each in (growth, again))
        raise _misfit(model, growth, f"it resized {then}, here {now}.")
    if again.name != growth.name and is_nested(growth.name) and not is_nested(again.name):
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
            here = again.beside.get(name, "it is missing")
            raise _misfit(model, growth, f"beside it {name} had the shape {shape}, here {here}.")


def _misfit(model: nn.Module, growth: Growth, why: str) -> HistoryError:
    return HistoryError(
        f"growth {growth.number} ({growth.site}) does not fit this {type(model).__name__}: {why} "
        "The factory must build the architecture that the history began with."
    )
