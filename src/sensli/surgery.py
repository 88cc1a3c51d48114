"""`insert`, `undo`, `replay`: the only functions that change a model. All checks come before the first change."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sensli.chain import Chain
from sensli.distributed import Changing
from sensli.errors import FunctionChanged, HistoryError, SensliError
from sensli.history import Growth, History
from sensli.optim import Newcomer, Optimizers, as_optimizers, leave, plan_joining
from sensli.outline import GROWTH
from sensli.rates import Schedulers, plan_rate_scaling
from sensli.running import device_of, run, tensors, to_device, untouched
from sensli.sites import Ref, Site
from sensli.wrappers import bare

_NUMBER = GROWTH  # attribute of an inserted module: which growth of the model it was
_GROWN = re.compile(r"grown\d+")


@dataclass(frozen=True)
class _Cut:
    """Where exactly a layer goes: into a container that runs its children in order, or around the anchor."""

    parent: str
    key: str  # the anchor's key in its parent
    side: str
    wrap: bool
    new: str  # key of the new layer

    @property
    def path(self) -> str:
        """The path of the new module."""
        place = _join(self.parent, self.key) if self.wrap else self.parent
        return _join(place, self.new)


def insert(
    model: nn.Module,
    site: Site,
    *,
    optimizer: Optimizers = None,
    scheduler: Schedulers = None,
    lr_scale: float = 1.0,
    check: Any = None,
    group: int | dict[str, Any] | None = None,
) -> Growth:
    """Insert the site's layer into the model in place; the function does not change, and training goes on.

    The new parameters join the optimizer's groups of their neighbours (``group`` decides where those are in none); moments and
    schedule stay. ``lr_scale`` multiplies all learning rates from then on. ``check`` is a batch, ``(input, target)`` or an input, on
    which the output must not move; if it does, everything is put back and `FunctionChanged` is raised.
    """
    with Changing(model, f"insert {site}") as together:
        return _insert(bare(model), site, together, optimizer, scheduler, lr_scale, check, group)


def _insert(
    model: nn.Module,
    site: Site,
    together: Changing,
    optimizer: Optimizers,
    scheduler: Schedulers,
    lr_scale: float,
    check: Any,
    group: int | dict[str, Any] | None,
) -> Growth:
    path, anchor = site.find(model)
    cut = _plan_cut(model, site, path)
    around = [found for found in (ref.find(model) for ref in site.neighbours) if found is not None]
    neighbours = [module for _, module in around]
    beside = {
        _join(place, name): tuple(p.shape)
        for place, module in around
        for name, p in module.named_parameters(recurse=False)
    }
    like = _example_parameter(model, [*neighbours, anchor])
    layer = site.layer.build(
        dtype=like.dtype if like is not None else None, device=like.device if like is not None else None
    )
    layer.train(anchor.training)
    together.prepare(layer, path)
    renames = _renames(model, path) if cut.wrap else {}
    newcomers = [
        Newcomer(_join(cut.path, name), parameter, _near(parameter, neighbours), beside=_near_paths(site))
        for name, parameter in layer.named_parameters()
    ]
    joining = plan_joining(optimizer, newcomers, group=group, renames=renames)
    rates = plan_rate_scaling(optimizer, scheduler, lr_scale)
    number = 1 + max((n for n, _, _ in _grown(model)), default=0)
    before = _outputs(model, check) if check is not None else None

    setattr(layer, _NUMBER, number)
    _apply_cut(model, cut, layer)
    try:
        if before is not None:
            _compare(site, before, _outputs(model, check))
        together.agree_on(f"growth {number}: {site}, as {cut.path}")
    except BaseException:
        _remove(model, cut.path)
        raise
    joining.apply()
    rates.apply(optimizer, scheduler)
    return Growth(
        site=replace(site, anchor=Ref.to(path, anchor), neighbours=tuple(Ref.to(*found) for found in around)),
        number=number,
        name=cut.path,
        parameters=tuple(newcomer.name for newcomer in newcomers),
        renames=renames,
        beside=beside,
        rates=rates if rates.changes else None,
    )


def undo(model: nn.Module, growth: Growth, *, optimizer: Optimizers = None, scheduler: Schedulers = None) -> None:
    """Take the layer of the last growth out again, and its parameters out of the optimizer.

    If no step was taken since, model and optimizer are to the bit what they were. Otherwise the function changes as it must.
    """
    with Changing(model, f"undo {growth.name}") as together:
        _undo(bare(model), growth, together, optimizer, scheduler)


def _undo(model: nn.Module, growth: Growth, together: Changing, optimizer: Optimizers, scheduler: Schedulers) -> None:
    grown = list(_grown(model))
    last = max(grown, key=lambda entry: entry[0], default=None)
    if last is None:
        raise HistoryError(
            f"nothing to undo: this {type(model).__name__} has no inserted layer. Give the model that was grown."
        )
    number, path, layer = last
    if number != growth.number or path != growth.name:
        raise HistoryError(
            f"cannot undo growth {growth.number} ({growth.name}): the last growth of this {type(model).__name__} is number "
            f"{number} ({path}), and later layers stand on earlier ones. Undo in reverse order."
        )
    as_optimizers(optimizer)  # refuses what is none, before anything changes
    together.agree_on(f"growth {number}")
    if growth.rates is not None and optimizer is not None:
        growth.rates.revert(optimizer, scheduler)
    gone = list(layer.parameters())
    _remove(model, path)
    leave(optimizer, gone, renames={new: old for old, new in growth.renames.items()})


def replay(model: nn.Module, history: History) -> nn.Module:
    """Grow a fresh model through the same insertions, so that the grown model's state dict fits. Returns the model."""
    with Changing(model, "replay a history") as together:
        together.agree_on(f"{len(history)} growths")
        _replay(bare(model), history)
    return model


def _replay(model: nn.Module, history: History) -> None:
    if any(True for _ in _grown(model)):
        raise HistoryError(f"this {type(model).__name__} has grown already; replay starts from a fresh model.")
    trial = copy.deepcopy(model)  # a history that does not fit must leave the model as it was
    for target in (trial, model):
        for growth in history:
            repeat(target, growth)


def repeat(model: nn.Module, growth: Growth) -> None:
    """Insert the same layer at the same place of another model, found by its path."""
    site = replace(
        growth.site,
        anchor=Ref(growth.site.path),
        neighbours=tuple(Ref(ref.path) for ref in growth.site.neighbours),
    )
    try:
        again = insert(model, site)
    except (SensliError, ValueError, TypeError, RuntimeError) as error:
        raise HistoryError(
            f"growth {growth.number} ({growth.site}) does not fit this {type(model).__name__}: {error} "
            "The factory must build the architecture that the history began with."
        ) from error
    if (again.number, again.name, again.parameters) != (growth.number, growth.name, growth.parameters):
        raise HistoryError(
            f"growth {growth.number} comes out as {again} {list(again.parameters)} instead of {growth.name} "
            f"{list(growth.parameters)}: the factory builds another architecture than the history began with, or a growth is "
            "missing from the history."
        )
    for name, shape in growth.beside.items():
        if again.beside.get(name) != shape:
            raise HistoryError(
                f"growth {growth.number} ({growth.site}) does not fit this {type(model).__name__}: beside it {name} had the "
                f"shape {shape}, here {again.beside.get(name, 'there is none')}. The factory must build the architecture that "
                "the history began with."
            )


def count_growths(model: nn.Module) -> int:
    """How many inserted layers the model has."""
    return sum(1 for _ in _grown(model))


# --- the cut ---


def _plan_cut(model: nn.Module, site: Site, path: str) -> _Cut:
    parent_path, _, key = path.rpartition(".")
    chained = site.chained
    if site.side == "after":
        # Behind the last module of an inserted layer means behind that layer: names stay short however often a place grows.
        while _GROWN.fullmatch(parent_path.rpartition(".")[2]) and _is_last(model.get_submodule(parent_path), key):
            parent_path, _, key = parent_path.rpartition(".")
            chained = True
    parent = model.get_submodule(parent_path)
    wrap = not (chained and isinstance(parent, nn.Sequential)) and not isinstance(parent, Chain)
    if path == "":
        raise HistoryError(
            "a layer cannot go around the whole model, because the caller holds it; use a site inside it."
        )
    taken = set() if wrap else set(parent._modules)
    number = 1
    while f"grown{number}" in taken:
        number += 1
    return _Cut(parent_path, key, site.side, wrap, f"grown{number}")


def _apply_cut(model: nn.Module, cut: _Cut, layer: nn.Module) -> None:
    container = model.get_submodule(cut.parent)
    key = cut.key
    if cut.wrap:
        anchor = container._modules[cut.key]
        assert anchor is not None
        chain = Chain(anchor)
        chain.training = anchor.training
        container._modules[cut.key] = chain
        container, key = chain, "anchor"
    entries: list[tuple[str, nn.Module | None]] = []
    for name, module in container._modules.items():
        pair = [(name, module)]
        if name == key:
            pair.insert(0 if cut.side == "before" else 1, (cut.new, layer))
        entries += pair
    _reorder(container, entries)


def _remove(model: nn.Module, path: str) -> None:
    """Take a module out; a chain that is left with its anchor alone goes too."""
    parent_path, _, key = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    _reorder(parent, [(name, module) for name, module in parent._modules.items() if name != key])
    if isinstance(parent, Chain) and len(parent._modules) == 1:
        above, _, place = parent_path.rpartition(".")
        model.get_submodule(above)._modules[place] = parent._modules["anchor"]


def _reorder(container: nn.Module, entries: list[tuple[str, nn.Module | None]]) -> None:
    # In place: the container's dictionary may be held elsewhere.
    container._modules.clear()
    container._modules.update(entries)


def _renames(model: nn.Module, path: str) -> dict[str, str]:
    """Names that change when the module at a path goes into a chain: its parameters and buffers move one level down."""
    anchor = model.get_submodule(path)
    names = [name for name, _ in (*anchor.named_parameters(), *anchor.named_buffers())]
    return {_join(path, name): _join(path, f"anchor.{name}") for name in names}


def _grown(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    for path, module in model.named_modules():
        number = module.__dict__.get(_NUMBER)
        if number is not None:
            yield number, path, module


def _is_last(container: nn.Module, key: str) -> bool:
    return isinstance(container, nn.Sequential) and next(reversed(container._modules)) == key


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


# --- who stands nearby ---


def _near(parameter: nn.Parameter, neighbours: list[nn.Module]) -> tuple[nn.Parameter, ...]:
    """Existing parameters in order of preference: weights for a weight, biases for a bias, then the others."""
    nearby = [p for module in neighbours for p in module.parameters(recurse=False)]
    alike = [p for p in nearby if (p.ndim >= 2) == (parameter.ndim >= 2)]
    return tuple(alike + [p for p in nearby if all(p is not other for other in alike)])


def _near_paths(site: Site) -> str:
    return ", ".join(f"'{ref.path}'" for ref in site.neighbours[:2])


def _example_parameter(model: nn.Module, nearby: list[nn.Module]) -> Tensor | None:
    """A floating-point parameter whose type and device the new ones take."""
    for module in (*nearby, model):
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter
    return None


# --- the output must not move ---


def _outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The model's output tensors on a batch, in the mode the model is in."""
    given = batch[0] if isinstance(batch, (tuple, list)) else batch
    with untouched(model), torch.no_grad():
        return [t.detach().clone() for t in tensors(run(model, to_device(given, device_of(model))))]


def _compare(site: Site, before: list[Tensor], after: list[Tensor]) -> None:
    for old, new in zip(before, after, strict=True):
        exact = old.dtype in (torch.float64, torch.complex128) or not (old.is_floating_point() or old.is_complex())
        same = (old == new) | ((old != old) & (new != new))  # infinite or not a number before and after is no change
        if same.all():
            continue
        wide = torch.complex128 if old.is_complex() else torch.float64
        difference = (new.to(wide) - old.to(wide))[~same].abs().max().item()
        size = torch.nan_to_num(old.to(wide).abs(), nan=0.0, posinf=0.0).max().item()
        moved = difference / max(size, 1e-30)
        tolerance = 0.0 if exact else 100 * torch.finfo(old.dtype).eps
        if not moved <= tolerance:
            raise FunctionChanged(
                f"inserting {site} moved the output by {moved:.1e} relative to its size, so nothing was kept. The place is not what "
                "find_sites saw (another input, another branch), or the arithmetic is not exact there; choose another site."
            )
