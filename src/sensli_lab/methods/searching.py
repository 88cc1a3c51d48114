"""What methods share that search for their step: one process decides for all, and a copy that grew tells its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sensli.errors import UnsupportedModel, ZeroMerits
from sensli.growing.strategy import Strategy
from sensli.merits.catching import LossFunction, scalar_loss, split
from sensli.merits.merits import Merits
from sensli.modules.engines.distributed import Together
from sensli.modules.running import count_samples, device_of, run, to_device, untouched
from sensli.modules.wrappers import bare, is_sharded
from sensli.moves.sites import Site

# ---- Decisions of several processes by a method that searches: one of them gets the batches of all, and the others what
# it has found.
#
# Sums over processes would do for a gradient, not for a search along a line, a short training or a model that is
# tried. So the first process scores as if it were alone with the data of all, each batch of a look in turn from every
# process, and sends sites, scores and what the strategy remembers.


Score = Callable[[nn.Module, Sequence[Site], Iterable[Any], LossFunction | None], Merits]


def by_one(
    score: Score,
    strategy: Strategy,
    model: nn.Module,
    sites: Sequence[Site],
    batches: Iterable[Any],
    loss_fn: LossFunction | None,
) -> Merits:
    """What ``score`` says in one process with the batches of all, the same on every process."""
    network = bare(model)
    with Together(model, f"score sites by {type(strategy).__name__}") as together:
        refuse_sharded(network, strategy)
        if together.group is None:
            return score(model, sites, batches, loss_fn)
        mine = [to_device(batch, torch.device("cpu")) for batch in batches]
        together.agree(last=False)
        joined = _gathered(mine, together)
        answer: Any = None
        if together.rank == 0:
            try:
                found = score(model, sites, joined, loss_fn)
                answer = _plain(found), strategy.state_dict()
            except ZeroMerits as nothing:
                answer = str(nothing), strategy.state_dict()
        found_by_one, state = together.agree(answer)[0]
        if together.rank != 0:
            strategy.load_state_dict(state)
        if isinstance(found_by_one, str):
            raise ZeroMerits(found_by_one)
        if together.rank == 0:
            return found
        merits = [replace(merit, site=merit.site.on(network)) for merit in found_by_one]
        return Merits(merits, norm=found_by_one.norm, batches=found_by_one.batches, samples=found_by_one.samples)


def refuse_sharded(network: nn.Module, strategy: Strategy) -> None:
    """Raise if no process has whole parameters."""
    if is_sharded(network):
        raise UnsupportedModel(
            f"{type(strategy).__name__} needs whole parameters, but the model is sharded (fully_shard). Use strategy='sensli', or "
            "DistributedDataParallel."
        )


def _gathered(mine: list[Any], together: Together) -> list[Any]:
    """The batches of all processes: the first of each, then the second of each. On the first process; the others get none."""
    group: Any = together.group
    every: list[Any] | None = [None] * dist.get_world_size(group) if together.rank == 0 else None
    dist.gather_object(mine, every, dst=dist.get_global_rank(group, 0), group=group)
    missing = object()
    rounds = zip_longest(*(every or ()), fillvalue=missing)
    return [batch for each in rounds for batch in each if batch is not missing]


def _plain(merits: Merits) -> Merits:
    """The same with sites known by their paths, which other processes can read."""
    known = [replace(merit, site=merit.site.by_path()) for merit in merits]
    return Merits(known, norm=merits.norm, batches=merits.batches, samples=merits.samples)


# ---- The loss of a copy of a model that grew at a site: for methods whose step is found by a search along a line.


def loss_after(model: nn.Module, site: Site, batches: Sequence[Any], loss_fn: LossFunction | None) -> float:
    """The mean loss over the batches after a growth that is made in a copy alone."""
    grown = copy.deepcopy(model)
    here = site.on(grown)
    edit = here.move.plan(grown, here)
    edit.build()
    edit.apply()
    total, samples = 0.0, 0
    with torch.no_grad(), untouched(grown):
        for index, batch in enumerate(batches):
            given, target = split(batch, index, grown if loss_fn is not None else None)
            device = device_of(grown)
            loss = scalar_loss(run(grown, to_device(given, device)), to_device(target, device), loss_fn, index)
            size = count_samples(batch)
            total, samples = total + float(loss) * size, samples + size
    return total / samples
