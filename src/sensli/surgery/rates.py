"""Learning rates at a growth: a factor for all, or a rate of its own for what is new; schedulers follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sensli.errors import OptimizerError
from sensli.modules import checks
from sensli.modules.wrappers import own_modules
from sensli.moves.sites import Edit
from sensli.surgery.optimizers import Group, Joining, Optimizers, as_list, as_optimizers, class_name, unwrap_optimizer
from sensli.text.records import Plain

if TYPE_CHECKING:
    from typing_extensions import Self

# ---- A learning-rate factor at an insertion: optimizer and scheduler together, first checked, then applied.
#
# The factor scales all that is measured in units of a learning rate: the rates of the groups, the base and peak rates
# of the schedulers, and their floors (`eta_min`, `min_lr`, and `eps`, the smallest change ReduceLROnPlateau makes).
# From then on every schedule of torch is the factor times what it would have been; a floor left in place would bend
# it. What a scheduler of one's own keeps under names that torch does not use is not known here and stays.

Schedulers: TypeAlias = LRScheduler | Sequence[LRScheduler] | None
_Drivers: TypeAlias = Sequence[LRScheduler]

GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # the last three come from OneCycleLR and SWALR
_RATES = ("base_lrs", "_last_lr", "max_lrs", "min_lrs")  # of schedulers: one per group, in units of a learning rate
_FLOORS = ("default_min_lr", "eta_min")
_OTHERS = ("lr_lambdas", "base_momentums", "max_momentums")  # one per group, in other units


@dataclass(frozen=True)
class RateChange(Plain):
    """One rate, where it is kept, before and after: plain data, so that another process can revert it."""

    holder: str  # "optimizer" or "scheduler"
    index: int  # which of them; schedulers are counted with those nested in them, the outer one first
    key: str  # a key of the group, or an attribute of the scheduler
    group: int | None  # None where the scheduler keeps one value for all groups
    old: float
    new: float


@dataclass(frozen=True)
class RateScaling(Plain):
    """All learning rates times a factor; values and no references, so it can be stored as JSON and reverted later."""

    _needed = None

    factor: float
    changes: tuple[RateChange, ...] = ()

    def apply(self, optimizers: Optimizers, schedulers: Schedulers = None) -> None:
        holders = self._holders(optimizers, schedulers)
        for change in self.changes:
            _write(holders, change, change.new)

    def revert(self, optimizers: Optimizers, schedulers: Schedulers = None) -> None:
        """Where a rate still is what `apply` set, the old value to the bit; where a schedule moved it, divided."""
        holders = self._holders(optimizers, schedulers)
        # All are read before the first is written: one tensor may be the rate of several groups.
        now = [_number(_read(holders, change)) for change in self.changes]
        for change, value in zip(self.changes, now, strict=True):
            _write(holders, change, change.old if value == change.new else value / self.factor)

    def _holders(self, optimizers: Optimizers, schedulers: Schedulers) -> Holders:
        holders: Holders = {"optimizer": as_optimizers(optimizers), "scheduler": as_schedulers(schedulers)}
        for change in self.changes:
            try:
                _read(holders, change)
            except (AttributeError, IndexError, KeyError, TypeError):
                raise OptimizerError(
                    f"{change.key} of {change.holder} {change.index} is missing, but it was scaled by {self.factor} "
                    "with the other learning rates. Pass the same optimizers and schedulers, in the same order."
                ) from None
        return holders


Holders: TypeAlias = dict[str, tuple[Any, ...]]


def check_factor(factor: float) -> float:
    """The factor as a number; one that means nothing is refused."""
    return checks.positive("lr_factor", factor, 0.5, error=OptimizerError)


def check_power(power: float) -> float:
    """The power as a number; one that means nothing is refused."""
    return checks.at_least("depth_power", power, 0, 1.5, error=OptimizerError)


def count_layers(model: nn.Module) -> int:
    """How many layers with weights a model has."""
    return sum(any(p.ndim >= 2 for p in module.parameters(recurse=False)) for _, module in own_modules(model))


def depth_factor(model: nn.Module, edit: Edit, power: float) -> float:
    """By what rates change if the model gets deeper: by its number of blocks like the new ones, or of layers with weights."""
    more = edit.site.cost.depth
    if power == 0 or more <= 0:
        return 1.0
    if edit.site.kind == "block":
        kind = type(edit.site.find(model)[1])
        before = sum(type(module) is kind for _, module in own_modules(model))
    else:
        before = count_layers(model)
    return float((before / (before + more)) ** power)


def plan_rate_scaling(optimizers: Optimizers, schedulers: Schedulers, factor: float) -> RateScaling:
    """Check that the factor reaches every rate, and list what it changes; nothing has changed before `apply`."""
    factor = check_factor(factor)
    known, drivers = as_optimizers(optimizers), as_schedulers(schedulers)
    check_driven(known, drivers)
    if factor == 1:
        return RateScaling(1.0)
    for optimizer in _undriven(known, drivers):
        raise OptimizerError(
            f"the rates of {class_name(optimizer)} cannot be scaled by {factor} without its scheduler: its groups "
            "carry initial_lr, so a scheduler drives them, and many recompute each rate from their own base "
            "rates and would silently drop the factor. Pass scheduler=; if it is no longer used, delete "
            "initial_lr from the groups."
        )
    return RateScaling(float(factor), tuple(_rate_changes(known, drivers, factor)))


def check_driven(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> None:
    """Refuse schedulers that drive other optimizers than those given."""
    for scheduler in schedulers:
        optimizer = unwrap_optimizer(scheduler.optimizer)
        if not any(optimizer is each for each in optimizers):
            raise OptimizerError(
                f"the {class_name(scheduler)} drives an optimizer ({class_name(optimizer)}) other than those given, so it "
                "could not follow. Pass the optimizer that the scheduler was made for."
            )


def _undriven(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> list[Optimizer]:
    """The optimizers that a scheduler drives which was not given: their groups carry initial_lr."""
    driven = {id(unwrap_optimizer(scheduler.optimizer)) for scheduler in schedulers}
    scheduled = [each for each in optimizers if any("initial_lr" in group for group in each.param_groups)]
    return [each for each in scheduled if id(each) not in driven]


def _rate_changes(optimizers: Sequence[Optimizer], schedulers: _Drivers, factor: float) -> Iterator[RateChange]:
    rates: list[tuple[str, int, str, int | None, Any]] = []
    for index, optimizer in enumerate(optimizers):
        for i, group in enumerate(optimizer.param_groups):
            rates += [("optimizer", index, key, i, group.get(key)) for key in GROUP_RATES]
    for index, scheduler in enumerate(schedulers):
        for key in (*_RATES, *_FLOORS, *(["eps"] if isinstance(scheduler, ReduceLROnPlateau) else [])):
            value = getattr(scheduler, key, None)
            if isinstance(value, list):
                rates += [("scheduler", index, key, i, each) for i, each in enumerate(value)]
            else:
                rates.append(("scheduler", index, key, None, value))
    for holder, index, key, its_group, value in rates:
        if value is not None:
            new = _number(value) * factor
            if isinstance(value, Tensor):  # what it will hold in its own precision: `revert` compares with that
                new = _number(torch.tensor(new, dtype=value.dtype, device="cpu"))
            yield RateChange(holder, index, key, its_group, _number(value), new)


def as_schedulers(given: Schedulers) -> tuple[LRScheduler, ...]:
    """One scheduler, several, or none, each followed by those nested in it (SequentialLR, ChainedScheduler)."""
    flat: list[LRScheduler] = []
    for each in as_list(given):
        scheduler = each
        while not isinstance(scheduler, LRScheduler):
            if not hasattr(scheduler, "scheduler"):
                what = "a scheduler of torch.optim.lr_scheduler or a list of them"
                checks.refuse("scheduler", what, each, OptimizerError)
            scheduler = scheduler.scheduler
        flat += [scheduler, *as_schedulers(getattr(scheduler, "_schedulers", None))]
    return tuple(flat)


def _number(value: Any) -> float:
    # An int stays one, so that what comes back is what was there.
    return value if type(value) in (int, float) else float(value)


def _read(holders: Holders, change: RateChange) -> Any:
    holder = holders[change.holder][change.index]
    if change.holder == "optimizer":
        return holder.param_groups[change.group][change.key]
    value = getattr(holder, change.key)
    return value if change.group is None else value[change.group]


def _write(holders: Holders, change: RateChange, number: float) -> None:
    holder, before = holders[change.holder][change.index], _read(holders, change)
    if change.holder == "optimizer" and isinstance(before, Tensor):
        with torch.no_grad():
            before.fill_(number)  # in place: a captured graph reads this very tensor
        return
    value = torch.full_like(before, number) if isinstance(before, Tensor) else number
    if change.holder == "optimizer":
        holder.param_groups[change.group][change.key] = value
    elif change.group is None:
        setattr(holder, change.key, value)
    else:
        # A new list: torch hands the old one out in state_dict() without a copy, and the user may have kept it.
        values = list(getattr(holder, change.key))
        values[change.group] = value
        setattr(holder, change.key, values)


# ---- A separate learning rate for a new layer: a new group in the optimizer, and one more entry in everything a scheduler
# keeps per group.
#
# The new group is its neighbour's, with all rates times a factor, so it follows the neighbour's schedule at its own
# height. A floor that a scheduler keeps once for all groups (`eta_min`) stays the floor of all. First a plan that
# checks everything, then the change.


@dataclass(frozen=True)
class OwnRate(Plain):
    """The groups that a growth has added, by the number of their optimizer and their own; plain data, so that `undo` can follow."""

    factor: float
    groups: tuple[tuple[int, int], ...]
    sources: tuple[int, ...]  # the neighbours' groups that these are like

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        # older files do not say the sources
        return super().from_dict({**data, "sources": data.get("sources") or [0] * len(data["groups"])})

    def check(self, optimizers: Optimizers, schedulers: Schedulers, own: list[Any]) -> None:
        """Raise unless the groups are there and hold nothing but the growth's parameters."""
        known, drivers = as_optimizers(optimizers), as_schedulers(schedulers)
        _refuse_undriven(known, drivers, "its separate group cannot be removed")
        for number, index in self.groups:
            groups = known[number].param_groups if number < len(known) else []
            held = groups[index]["params"] if index < len(groups) else None
            if held is None or any(all(p is not each for each in own) for p in held):
                raise OptimizerError(
                    f"group {index} of optimizer {number} is not the one that the growth added for its own learning rate, or other "
                    "parameters joined it since. Pass the same optimizers, in the same order, and remove what was added later."
                )

    def add(self, optimizers: Optimizers, schedulers: Schedulers) -> None:
        """Add the groups, empty, to rebuilt optimizers, and to their schedulers; where they are already, do nothing."""
        known, drivers = as_optimizers(optimizers), as_schedulers(schedulers)
        for (number, index), source in zip(self.groups, self.sources, strict=True):
            if number < len(known) and index == len(known[number].param_groups):
                _add_group(known[number], drivers, source, self.factor)

    def remove(self, optimizers: Optimizers, schedulers: Schedulers) -> None:
        """Take the groups out again, and the schedulers' entries for them."""
        known, drivers = as_optimizers(optimizers), as_schedulers(schedulers)
        for number, index in reversed(self.groups):
            keep_groups(known[number], drivers, [i for i in range(len(known[number].param_groups)) if i != index])

    def redirect(self, joining: Joining, optimizers: Optimizers) -> Joining:
        """The newcomers join the growth's own groups, which are there, and not those of their neighbours."""
        known, own = as_optimizers(optimizers), dict[int, Group]()
        for (number, index), source in zip(self.groups, self.sources, strict=True):
            groups = known[number].param_groups
            own[id(groups[source])] = groups[index]
        return replace(joining, places=tuple((new, its, own[id(group)]) for new, its, group in joining.places))


def keep_groups(optimizer: Optimizer, schedulers: Sequence[LRScheduler], order: Sequence[int]) -> None:
    """Keep the groups of these numbers, in this order, and the schedulers' entries for them."""
    groups = optimizer.param_groups
    for scheduler, name, values in _kept_per_group(optimizer, schedulers):
        if len(values) == len(groups):
            setattr(scheduler, name, [values[index] for index in order])
    groups[:] = [groups[index] for index in order]  # the same list: a wrapper may hold it too


def check_own_factor(factor: float) -> float:
    """The factor as a number; one that means nothing is refused."""
    return checks.positive("new_lr_factor", factor, 0.1, error=OptimizerError)


def check_own_rate(optimizers: Optimizers, factor: float) -> float:
    """The factor as a number; one that means nothing, or that there is no rate for, is refused."""
    factor = check_own_factor(factor)
    if not as_optimizers(optimizers):
        raise OptimizerError("new_lr_factor= needs optimizer=: the rate belongs to the optimizer, and none was given.")
    return factor


def plan_own_rate(optimizers: Optimizers, schedulers: Schedulers, joining: Joining, factor: float) -> OwnRate:
    """Check that every scheduler can follow new groups, and say which there will be; nothing has changed before `OwnRate.add`.

    ``joining`` is into the groups of the neighbours, as it would be without.
    """
    factor = check_own_rate(optimizers, factor)
    known, drivers = as_optimizers(optimizers), as_schedulers(schedulers)
    _refuse_undriven(known, drivers, "the new layer cannot have a separate learning rate")
    for scheduler in drivers:
        groups = len(unwrap_optimizer(scheduler.optimizer).param_groups)
        for name, value in vars(scheduler).items():
            ours = type(scheduler).__module__.startswith("torch.")
            if not ours and isinstance(value, list) and len(value) == groups and name not in (*_RATES, *_OTHERS):
                raise OptimizerError(
                    f"{class_name(scheduler)}.{name} is as long a list as the optimizer has groups ({groups}); if it holds one entry each, "
                    "a new group would break it, and what the new entry should be is not known here. Leave out new_lr_factor=, so that the "
                    "layer joins its neighbour's group, or use a scheduler of torch."
                )
    added: dict[tuple[int, int], tuple[int, int]] = {}  # from the neighbours' groups to the new ones
    for _, optimizer, source in joining.places:
        number = next(i for i, each in enumerate(known) if each is optimizer)
        index = next(i for i, group in enumerate(optimizer.param_groups) if group is source)
        more = sum(its == number for its, _ in added)
        added.setdefault((number, index), (number, len(optimizer.param_groups) + more))
    return OwnRate(factor, tuple(added.values()), tuple(source for _, source in added))


def _refuse_undriven(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler], what: str) -> None:
    for optimizer in _undriven(optimizers, schedulers):
        raise OptimizerError(
            f"{what} without the scheduler of {class_name(optimizer)}: its groups carry initial_lr, so a scheduler drives them, and it "
            "keeps one entry per group. Pass scheduler=; if it is no longer used, delete initial_lr from the groups."
        )


def _add_group(optimizer: Optimizer, schedulers: Sequence[LRScheduler], index: int, factor: float) -> None:
    """An empty group like the one of this number, with all rates times a factor, and the schedulers' entries for it."""
    source = optimizer.param_groups[index]
    group = {key: value for key, value in source.items() if key not in ("params", "param_names")}
    for key in GROUP_RATES:
        if group.get(key) is not None:
            group[key] = _times(group[key], factor)
    group["params"] = []
    if "param_names" in source:
        group["param_names"] = []
    for scheduler, name, values in _kept_per_group(optimizer, schedulers):
        if index < len(values):
            entry = values[index] if name in _OTHERS else _times(values[index], factor)
            setattr(scheduler, name, [*values, entry])
    optimizer.param_groups.append(group)


def _kept_per_group(optimizer: Optimizer, schedulers: _Drivers) -> Iterator[tuple[LRScheduler, str, list[Any]]]:
    """The lists that schedulers of an optimizer keep, with one entry per group.

    Whoever changes one makes a new list: torch hands the old one out in state_dict() without a copy, and the user may have kept it.
    """
    for scheduler in schedulers:
        if unwrap_optimizer(scheduler.optimizer) is optimizer:
            for name in (*_RATES, *_OTHERS):
                values = getattr(scheduler, name, None)
                if isinstance(values, list):
                    yield scheduler, name, values


def _times(rate: Any, factor: float) -> Any:
    return rate.detach() * factor if isinstance(rate, Tensor) else rate * factor
