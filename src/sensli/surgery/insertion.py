"""`insert` and `undo`: a layer goes in, or out again. All checks come before the first change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sensli.errors import HistoryError
from sensli.merits.merits import Merit, as_site
from sensli.modules import checks
from sensli.modules.chain import GROWTH
from sensli.modules.engines.distributed import Changing
from sensli.modules.engines.fsdp import readable_part
from sensli.modules.wrappers import bare
from sensli.moves.building import build_layer
from sensli.moves.cutting import apply_cut, inserted, join, plan_cut, renames_of, take_out
from sensli.moves.sites import Ref, Site
from sensli.surgery.history.history import Growth
from sensli.surgery.same_output import Outputs
from sensli.surgery.state.optim import Newcomer, Optimizers, as_optimizers, check_needed, leave, plan_joining
from sensli.surgery.state.own_rate import plan_own_rate
from sensli.surgery.state.rates import Schedulers, as_schedulers, check_factor, plan_rate_scaling


def insert(
    model: nn.Module,
    site: Site | Merit,
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

    The new parameters join the optimizer's groups of their neighbours; moments and schedule are kept. A refused or failed
    insertion leaves the model, the optimizer and the scheduler as they were.

    Args:
        model: The network, or its DistributedDataParallel wrapper.
        site: The site to grow at, or a merit, which stands for its site.
        optimizer: The optimizer or optimizers that train the model.
        scheduler: The learning-rate scheduler or schedulers of the optimizer.
        lr_scale: Multiplies all learning rates from now on (default: 1.0).
        check: A batch on which the output must not change, in the mode the model is in and with the same random numbers. As in
            `measure` a pair is ``(input, target)``, of which the input is used; for a model with several arguments give
            ``((x, mask), None)`` or a dict of keyword arguments.
        group: The parameter group (its index or the group itself) that the new parameters join if their neighbours are in none.
        freeze_rest: Whether only the new layer trains from now on (default: False).
        own_rate: A factor: the new layer gets separate parameter groups with this many times its neighbours' learning rate.

    Returns:
        The record of the insertion, which `undo` and `replay` take.

    Raises:
        UnknownSite: If the site belongs to another model, or its place is gone.
        UnsupportedSite: If the layer cannot be inserted there without changing the function.
        OptimizerError: If the optimizer or the scheduler cannot follow.
        FunctionChanged: If the output on ``check`` changed. Everything was put back.
    """
    with Changing(model, f"insert {site}") as together:
        network, site = bare(model), as_site("site", site)
        checks.flag("freeze_rest", freeze_rest)
        lr_scale = check_factor(lr_scale)
        check_needed(optimizer, lr_scale=lr_scale != 1, group=group is not None)
        if check is not None:
            checks.batch("check", check)
        return _insert(network, site, together, optimizer, scheduler, lr_scale, check, group, freeze_rest, own_rate)


def _insert(
    model: nn.Module,
    site: Site,
    together: Changing,
    optimizer: Optimizers,
    scheduler: Schedulers,
    lr_scale: float,
    check: Any,
    group: int | dict[str, Any] | None,
    freeze_rest: bool,
    own_rate: float | None,
) -> Growth:
    path, anchor = site.find(model)
    cut = plan_cut(model, site, path)
    # Before a copy of a sharded block is made, for which all ranks are needed.
    together.agree_on({"the place": cut.path}, last=False)
    around = [found for found in (ref.find(model) for ref in site.neighbours) if found is not None]
    neighbours = [module for _, module in around]
    beside = {
        join(place, name): tuple(p.shape)
        for place, module in around
        for name, p in module.named_parameters(recurse=False)
    }
    whole, source = readable_part(model, anchor) if site.layer.twin is not None else (model, anchor)
    layer = build_layer(model, site, anchor, neighbours, source=source, outside=whole)
    together.prepare(layer, path)
    renames = renames_of(model, cut)
    # The nearest relative of a twin's parameter is the one it is a copy of.
    originals = dict(anchor.named_parameters()) if cut.twin else {}
    newcomers = [
        _newcomer(site, join(cut.path, name), parameter, originals.get(name), neighbours)
        for name, parameter in layer.named_parameters()
    ]
    joining = plan_joining(optimizer, newcomers, group=group, renames=renames)
    rates = plan_rate_scaling(optimizer, scheduler, lr_scale)
    own = plan_own_rate(optimizer, scheduler, joining, own_rate) if own_rate is not None else None
    number = 1 + max((n for n, _, _ in inserted(model)), default=0)
    before = Outputs.of(model, check) if check is not None else None

    setattr(layer, GROWTH, number)
    apply_cut(model, cut, layer)
    try:
        if before is not None:
            before.check(model, layer, site)
        together.agree_on({"the growth": f"number {number}: {site}, as {cut.path}"})
    except BaseException:
        take_out(model, cut.path, cut.place)
        raise
    if own is None:
        joining.apply()
    rates.apply(optimizer, scheduler)
    groups = own.apply() if own is not None else None  # after the factor, so that both hold for the new layer
    return Growth(
        site=replace(site, anchor=Ref.to(path, anchor), neighbours=tuple(Ref.to(*found) for found in around)),
        number=number,
        name=cut.path,
        parameters=tuple(newcomer.name for newcomer in newcomers),
        renames=renames,
        beside=beside,
        rates=rates if rates.changes else None,
        own_rate=groups,
        frozen=_freeze(model, layer) if freeze_rest else (),
    )


def _freeze(model: nn.Module, layer: nn.Module) -> tuple[str, ...]:
    """Let only the new layer train; the names of those that did before."""
    own = {id(parameter) for parameter in layer.parameters()}
    frozen: list[str] = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in own and parameter.requires_grad:
            parameter.requires_grad_(False)
            parameter.grad = None  # an optimizer would go on stepping, and decaying, by what is left of it
            frozen.append(name)
    return tuple(frozen)


def undo(model: nn.Module, growth: Growth, *, optimizer: Optimizers = None, scheduler: Schedulers = None) -> None:
    """Remove the layer of the last growth, and its parameters from the optimizer.

    If no training step was taken since, the model and the optimizer are to the bit what they were. Otherwise the function
    changes, because the layer is no longer an identity.

    Args:
        model: The network that has grown, or its DistributedDataParallel wrapper.
        growth: The last growth of the model.
        optimizer: The optimizer or optimizers that followed the growth.
        scheduler: The scheduler or schedulers that followed the growth.

    Raises:
        HistoryError: If it is not the last growth of this model.
    """
    with Changing(model, f"undo {getattr(growth, 'name', 'a growth')}") as together:
        network = bare(model)
        checks.instance("growth", growth, Growth, "the Growth that insert returned (for example grower.history[-1])")
        _undo(network, growth, together, optimizer, scheduler)


def _undo(model: nn.Module, growth: Growth, together: Changing, optimizer: Optimizers, scheduler: Schedulers) -> None:
    grown = list(inserted(model))
    last = max(grown, key=lambda entry: entry[0], default=None)
    if last is None:
        raise HistoryError(
            f"nothing to undo: this {type(model).__name__} has no inserted layer. Give the model that was grown."
        )
    number, path, layer = last
    if number != growth.number or path != growth.name:
        raise HistoryError(
            f"cannot undo growth {growth.number} ({growth.name}): the last growth of this {type(model).__name__} is number "
            f"{number} ({path}), and later layers build on earlier ones. Undo in reverse order."
        )
    as_optimizers(optimizer)  # refuses what is none, before anything changes
    as_schedulers(scheduler)
    gone = list(layer.parameters())
    if growth.own_rate is not None and optimizer is not None:
        growth.own_rate.check(optimizer, scheduler, gone)
    trained = [parameter for name, parameter in model.named_parameters() if name in growth.frozen]
    together.agree_on({"the last growth": f"number {number}, {path}"})
    if growth.rates is not None and optimizer is not None:
        growth.rates.revert(optimizer, scheduler)
    take_out(model, path, growth.site.place)
    for parameter in trained:
        parameter.requires_grad_(True)
    leave(optimizer, gone, renames={new: old for old, new in growth.renames.items()})
    if growth.own_rate is not None and optimizer is not None:
        growth.own_rate.remove(optimizer, scheduler)


# --- who stands nearby ---


def check_joining(
    model: nn.Module, site: Site, optimizer: Optimizers, group: int | dict[str, Any] | None = None
) -> None:
    """Raise `OptimizerError` if the parameters of a layer at the site would find no group to join. Builds no layer."""
    if optimizer is None:
        return
    _, anchor = site.find(model)
    neighbours = [found[1] for found in (ref.find(model) for ref in site.neighbours) if found is not None]
    if site.layer.twin is None:
        originals: dict[str, nn.Parameter] = {}
        shapes = {"weight": site.layer.weight_shape, "bias": (site.layer.width,)}
    else:
        gone = tuple(f"{path}." for path in site.layer.twin.replaced)
        originals = {name: p for name, p in anchor.named_parameters() if not name.startswith(gone)}
        shapes = {name: tuple(p.shape) for name, p in originals.items()}
    plan_joining(
        optimizer,
        [
            _newcomer(site, name, nn.Parameter(torch.empty(shape, device="meta")), originals.get(name), neighbours)
            for name, shape in shapes.items()
        ],
        group=group,
    )


def _newcomer(
    site: Site, name: str, parameter: nn.Parameter, original: nn.Parameter | None, neighbours: list[nn.Module]
) -> Newcomer:
    relatives = (*(() if original is None else (original,)), *_near(parameter, neighbours))
    return Newcomer(name, parameter, relatives, beside=_near_paths(site))


def _near(parameter: nn.Parameter, neighbours: list[nn.Module]) -> tuple[nn.Parameter, ...]:
    """Existing parameters in order of preference: weights for a weight, biases for a bias, then the others."""
    nearby = [p for module in neighbours for p in module.parameters(recurse=False)]
    alike = [p for p in nearby if (p.ndim >= 2) == (parameter.ndim >= 2)]
    return tuple(alike + [p for p in nearby if all(p is not other for other in alike)])


def _near_paths(site: Site) -> str:
    return ", ".join(f"'{ref.path}'" for ref in site.neighbours[:2])
