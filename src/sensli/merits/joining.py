"""What several processes have caught, as one: gradients are added up before any norm is taken."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sensli.merits.caught import SiteCatch, WeightCatch
from sensli.merits.sums import Moment, Sum
from sensli.modules.engines.distributed import Together
from sensli.moves.factors import power_of


@dataclass(frozen=True)
class Caught:
    """What one process has caught, or all of them together. Sizes are in units of the first batch, and so are the losses' weights."""

    sites: list[SiteCatch]
    weights: list[WeightCatch]
    sizes: list[float]
    unit: float
    count: int
    loss: float = 0.0  # the sum over the batches, each times its size


def joined(together: Together, caught: Caught, device: Any, *, last: bool = True) -> Caught:
    """What all ranks have caught: gradients added up (never their norms), sizes, counts, units alive. What each holds stays as it is.

    Sizes are brought to the unit of the first rank that has any. Unless it is the `last` time, the ranks will meet again.
    """
    own: list[SiteCatch | WeightCatch] = [*caught.sites, *caught.weights]
    forms = [({name: _forms(each) for name, each in catch.sums.items()}, catch.shape) for catch in own]
    told = together.agree((caught.unit, caught.sizes, caught.count, forms, caught.loss), last=last)
    if together.group is None:
        return caught
    common, shapes = next(((unit, forms) for unit, _, _, forms, _ in told if unit), (0.0, told[0][3]))
    copies: list[Any] = [copy(each) for each in own]
    for index, each in enumerate(copies):
        each.shape = shapes[index][1]  # a rank without data has not seen it
        each.sums = {}
        for name in dict.fromkeys(name for _, _, _, forms, _ in told for name in forms[index][0]):
            its = [forms[index][0][name] for _, _, _, forms, _ in told if name in forms[index][0]]
            factor = (caught.unit / common) ** power_of(name) if caught.unit else 0.0
            each.sums[name] = _joined_sum(own[index].sums.get(name), its, factor, device, together.group)
    sites = copies[: len(caught.sites)]
    totals = [sum(sizes[j] * unit / (common or 1.0) for unit, sizes, *_ in told) for j in range(len(caught.sizes))]
    loss = sum(its * unit / (common or 1.0) for unit, *_, its in told)
    return Caught(sites, copies[len(sites) :], totals, common, sum(count for _, _, count, _, _ in told), loss)


def same_values(together: Together, values: list[float], mean: float | None) -> tuple[list[float], float | None]:
    """Rank 0's numbers on all ranks: machines of different make may differ in the last bit, and a decision depends on it."""
    first: tuple[list[float], float | None] = together.agree((values, mean))[0]
    return first


def _forms(each: Sum | Moment) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
    return [None if part is None else (tuple(part.shape), part.dtype) for part in each.groups]


def _joined_sum(own: Sum | Moment | None, forms: list[list[Any]], factor: float, device: Any, group: Any) -> Sum:
    """One sum over all ranks; ``forms`` tells what each rank that has any holds in its groups."""
    groups = len(forms[0])
    joint = Sum(max(groups - 1, 1))
    for j in range(groups):
        form = next((its[j] for its in forms if its[j]), None)
        if form is not None:
            joint.groups[j] = _summed(None if own is None else own.groups[j], form, factor, device, group)
    return joint


def _summed(
    part: Tensor | None, form: tuple[tuple[int, ...], torch.dtype], factor: float, device: Any, group: Any
) -> Tensor:
    shape, dtype = form
    # A copy: what was caught may be somebody's gradient, and may be expanded.
    total = torch.zeros(shape, dtype=dtype, device=device) if part is None else (part * factor).contiguous()
    dist.all_reduce(total, group=group)
    return total
