"""`insert`, `undo`, `replay`: the only functions that change a model. All checks come before the first change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sensli.arguments import Slot
from sensli.chain import Chain
from sensli.copies import copied_model
from sensli.distributed import Changing
from sensli.errors import FunctionChanged, HistoryError, SensliError, UnsupportedModel
from sensli.fsdp import readable_part
from sensli.history import Growth, History
from sensli.lists import ListPlace, list_renames, put_into_list, take_from_list
from sensli.optim import Newcomer, Optimizers, as_optimizers, leave, plan_joining
from sensli.outline import GROWTH
from sensli.own_rate import plan_own_rate
from sensli.rates import Schedulers, plan_rate_scaling
from sensli.running import device_of, run, tensors, to_device, untouched
from sensli.sites import Ref, Site
from sensli.wrappers import bare

_NUMBER = GROWTH  # attribute of an inserted module: which growth of the model it was
_GROWN = re.compile(r"grown\d+")


@dataclass(frozen=True)
class _Cut:
    """Where exactly a layer goes: into a container that runs its children in order, into a list, or around the anchor."""

    parent: str
    key: str  # the anchor's key in its parent
    side: str
    way: str  # "sequence", "list" or "wrap"
    new: str  # key of the new layer
    slot: Slot = 0
    twin: bool = False
    place: ListPlace | None = None

    @property
    def path(self) -> str:
        """The path of the new module."""
        return _join(_join(self.parent, self.key) if self.way == "wrap" else self.parent, self.new)


def insert(
    model: nn.Module,
    site: Site,
    *,
    optimizer: Optimizers = None,
    scheduler: Schedulers = None,
    lr_scale: float = 1.0,
    check: Any = None,
    group: int | dict[str, Any] | None = None,
    freeze_rest: bool = False,
    own_rate: float | None = None,
) -> Growth:
    """Insert the site's layer into the model in place; the function does not change, and training goes on.

    The new parameters join the optimizer's groups of their neighbours (``group`` decides where those are in none); moments and
    schedule stay. ``lr_scale`` multiplies all learning rates from then on. ``check`` is a batch, ``(input, target)`` or an input, on
    which the output must not move; if it does, everything is put back and `FunctionChanged` is raised. ``freeze_rest`` lets only the new
    layer train from then on. ``own_rate`` is a factor to the neighbours' learning rate for the new layer, which then has its own groups.
    """
    with Changing(model, f"insert {site}") as together:
        return _insert(bare(model), site, together, optimizer, scheduler, lr_scale, check, group, freeze_rest, own_rate)


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
    cut = _plan_cut(model, site, path)
    around = [found for found in (ref.find(model) for ref in site.neighbours) if found is not None]
    neighbours = [module for _, module in around]
    beside = {
        _join(place, name): tuple(p.shape)
        for place, module in around
        for name, p in module.named_parameters(recurse=False)
    }
    like = _example_parameter(model, [*neighbours, anchor])
    layer = _built(model, site, anchor, like, neighbours)
    together.prepare(layer, path)
    renames = _renames(model, cut)
    # The nearest relative of a twin's parameter is the one it is a copy of.
    originals = dict(anchor.named_parameters()) if cut.twin else {}
    newcomers = [
        Newcomer(
            _join(cut.path, name),
            parameter,
            (*((originals[name],) if name in originals else ()), *_near(parameter, neighbours)),
            beside=_near_paths(site),
        )
        for name, parameter in layer.named_parameters()
    ]
    joining = plan_joining(optimizer, newcomers, group=group, renames=renames)
    rates = plan_rate_scaling(optimizer, scheduler, lr_scale)
    own = plan_own_rate(optimizer, scheduler, joining, own_rate) if own_rate is not None else None
    number = 1 + max((n for n, _, _ in _grown(model)), default=0)
    before = _outputs(model, check) if check is not None else None

    setattr(layer, _NUMBER, number)
    _apply_cut(model, cut, layer)
    try:
        if before is not None:
            _compare(site, before, _outputs(model, check))
        together.agree_on(f"growth {number}: {site}, as {cut.path}")
    except BaseException:
        _remove(model, cut.path, cut.place)
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
    gone = list(layer.parameters())
    if growth.own_rate is not None and optimizer is not None:
        growth.own_rate.check(optimizer, scheduler, gone)
    trained = [parameter for name, parameter in model.named_parameters() if name in growth.frozen]
    together.agree_on(f"growth {number}")
    if growth.rates is not None and optimizer is not None:
        growth.rates.revert(optimizer, scheduler)
    _remove(model, path, growth.site.place)
    for parameter in trained:
        parameter.requires_grad_(True)
    leave(optimizer, gone, renames={new: old for old, new in growth.renames.items()})
    if growth.own_rate is not None and optimizer is not None:
        growth.own_rate.remove(optimizer, scheduler)


def replay(model: nn.Module, history: History) -> nn.Module:
    """Grow a fresh model through the same insertions, so that the grown model's state dict fits. Returns the model."""
    with Changing(model, "replay a history") as together:
        together.agree_on(f"{len(history)} growths")
        _replay(bare(model), history)
    return model


def _replay(model: nn.Module, history: History) -> None:
    if any(True for _ in _grown(model)):
        raise HistoryError(f"this {type(model).__name__} has grown already; replay starts from a fresh model.")
    trial = copied_model(model)  # a history that does not fit must leave the model as it was
    for target in (trial, model):
        for growth in history:
            repeat(target, growth)


def repeat(model: nn.Module, growth: Growth, *, optimizer: Optimizers = None) -> Growth:
    """Insert the same layer at the same place of another model, found by its path."""
    site = replace(
        growth.site,
        anchor=Ref(growth.site.path),
        neighbours=tuple(Ref(ref.path) for ref in growth.site.neighbours),
    )
    try:
        again = insert(model, site, optimizer=optimizer)
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
    return again


def count_growths(model: nn.Module) -> int:
    """How many inserted layers the model has."""
    return sum(1 for _ in _grown(model))


# --- the cut ---


def _plan_cut(model: nn.Module, site: Site, path: str) -> _Cut:
    if path == "":
        raise HistoryError(
            "a layer cannot go around the whole model, because the caller holds it; use a site inside it."
        )
    parent_path, _, key = path.rpartition(".")
    chained, twin = site.chained, site.layer.twin is not None
    if site.side == "after":
        # Behind the last module of an inserted layer means behind that layer: names stay short however often a place grows.
        while _GROWN.fullmatch(parent_path.rpartition(".")[2]) and _is_last(model.get_submodule(parent_path), key):
            parent_path, _, key = parent_path.rpartition(".")
            chained = True
    if site.place is not None:
        # A block that was wrapped since stands in its list as a chain; the list takes the twin beside that.
        while isinstance(model.get_submodule(parent_path), Chain):
            parent_path, _, key = parent_path.rpartition(".")
        number = int(key) + (site.side == "after")
        return _Cut(parent_path, key, site.side, "list", str(number), site.slot, twin, site.place)
    parent = model.get_submodule(parent_path)
    into = isinstance(parent, Chain) or (chained and isinstance(parent, nn.Sequential))
    number = 1
    while into and f"grown{number}" in parent._modules:
        number += 1
    return _Cut(parent_path, key, site.side, "sequence" if into else "wrap", f"grown{number}", site.slot, twin)


def _apply_cut(model: nn.Module, cut: _Cut, layer: nn.Module) -> None:
    container = model.get_submodule(cut.parent)
    key = cut.key
    if cut.way == "list":
        assert cut.place is not None
        put_into_list(model, cut.parent, cut.place, int(cut.new), int(cut.key), layer)
        return
    if cut.way == "wrap":
        anchor = container._modules[cut.key]
        assert anchor is not None
        chain = Chain(anchor, cut.slot)
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
    if isinstance(container, Chain) and cut.twin:
        container.twins.add(cut.new)


def _remove(model: nn.Module, path: str, place: ListPlace | None) -> None:
    """Take a module out; a chain that is left with its anchor alone goes too."""
    parent_path, _, key = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if place is not None:
        take_from_list(model, parent_path, place, int(key))
        return
    _reorder(parent, [(name, module) for name, module in parent._modules.items() if name != key])
    if isinstance(parent, Chain):
        parent.twins.discard(key)
        if len(parent._modules) == 1:
            above, _, place_key = parent_path.rpartition(".")
            model.get_submodule(above)._modules[place_key] = parent._modules["anchor"]


def _reorder(container: nn.Module, entries: list[tuple[str, nn.Module | None]]) -> None:
    # In place: the container's dictionary may be held elsewhere.
    container._modules.clear()
    container._modules.update(entries)


def _renames(model: nn.Module, cut: _Cut) -> dict[str, str]:
    """Names that change: a wrapped module's parameters and buffers move one level down, a list's blocks behind move on by one."""
    if cut.way == "list":
        return list_renames(model, cut.parent, int(cut.new))
    if cut.way == "sequence":
        return {}
    path = _join(cut.parent, cut.key)
    anchor = model.get_submodule(path)
    names = [name for name, _ in (*anchor.named_parameters(), *anchor.named_buffers())]
    return {_join(path, name): _join(path, f"anchor.{name}") for name in names}


def _built(
    model: nn.Module, site: Site, anchor: nn.Module, like: Tensor | None, neighbours: list[nn.Module]
) -> nn.Module:
    """The site's layer, ready to go in: type, device, memory layout and mode of what stands around it."""
    if like is not None and like.is_meta:
        raise UnsupportedModel(
            f"{type(model).__name__} is on the meta device: it has shapes and no values, so an identity layer would have none either. "
            "Load the weights first, then insert."
        )
    if site.layer.twin is not None:
        whole, source = readable_part(model, anchor)
        return site.layer.build(source=source, outside=whole)  # a copy has all of that already
    layer = site.layer.build(
        dtype=like.dtype if like is not None else None, device=like.device if like is not None else None
    )
    layer.train(anchor.training)
    weights = [p for module in neighbours for p in module.parameters(recurse=False) if p.ndim in (4, 5)]
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if any(w.ndim == dims and w.is_contiguous(memory_format=layout) and not w.is_contiguous() for w in weights):
            layer.to(memory_format=layout)  # type: ignore[call-overload]
    return layer


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
