"""What follows a model when a Grower inserts a layer: optimizers, schedulers, averages, the history."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sensli.errors import MeasurementError
from sensli.growing.looking import RememberedSites, trainable_sites
from sensli.growing.options import Options
from sensli.growing.uniform import parts_of_decision, site_after
from sensli.merits.catching import LossFunction, scalar_loss, split_batch
from sensli.merits.measuring import EMPTY
from sensli.merits.merits import Merit
from sensli.modules import random_state
from sensli.modules.engines.all_or_nothing import AllOrNothing, Kept
from sensli.modules.engines.distributed import Together, number_facts
from sensli.modules.grown import grown_modules
from sensli.modules.running import count_samples, device_of, first_samples, run, to_device, untouched
from sensli.modules.wrappers import bare
from sensli.moves.dead import Recycle
from sensli.moves.sites import Site
from sensli.moves.width.width import Width
from sensli.surgery.averaging import Averaged, Copies, check_alike, follow, kept_of
from sensli.surgery.dead import find_dead, renew
from sensli.surgery.growth import grow
from sensli.surgery.history import Growth, History
from sensli.surgery.optimizers import Optimizers, as_optimizers
from sensli.surgery.rates import Schedulers, as_schedulers
from sensli.surgery.warmup import steps_of_warmup


@dataclass
class Followers:
    """The optimizers, schedulers and averages of one model."""

    optimizer: Optimizers
    scheduler: Schedulers
    averaged: Averaged
    copies: Copies | None = None  # that the model had when the Grower was made

    def check(self, model: nn.Module, options: Options) -> None:
        """Refuse those that could never follow a growth with these options, before any training."""
        options.check_followers(bare(model), self.optimizer, self.scheduler)
        check_alike(model, self.averaged)
        self.copies = Copies(model)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers, without wrappers of other libraries."""
        return as_optimizers(self.optimizer)

    def insert(
        self,
        model: nn.Module,
        merit: Merit,
        history: History,
        options: Options,
        *,
        when: Mapping[str, int],
        first: bool,
        measured: bool = True,
    ) -> list[Growth]:
        """Insert the layer, or all parts of one decision, and let everything follow. What concerns the rest of the model is done once
        per look, with the ``first``."""
        rates = options.rates
        check_alike(model, self.averaged)
        if self.copies is not None and not history:
            self.copies.check(self.optimizers)
        grown: list[Growth] = []
        with AllOrNothing() as change:
            self.keep(change, model, history)
            for part in parts_of_decision(merit):
                site = site_after(part.site, [growth.site for growth in grown]) if grown else part.site
                growth = grow(
                    model, site, optimizer=self.optimizer, scheduler=self.scheduler,
                    lr_factor=rates.lr_factor if first and not grown else 1.0,
                    new_lr_factor=rates.new_lr_factor, group=rates.group, freeze_rest=rates.freeze_rest,
                    warmup=steps_of_warmup(rates.warmup, self.optimizer), depth_power=rates.depth_power,
                )  # fmt: skip
                found = {"merit": part.value, "ratio": part.ratio} if measured else {}
                of_group = {"group": (*grown, growth)[0].number} if part is not merit else {}
                growth = replace(growth, details={**when, **found, **of_group})
                history.append(growth)
                follow(self.averaged, growth, model)
                grown.append(growth)
        return grown

    def keep(self, change: AllOrNothing, model: nn.Module, history: History) -> Kept:
        """Let a change keep the model, all that follows it, and the history."""
        return change.keep(model, *self.optimizers, *as_schedulers(self.scheduler), *kept_of(self.averaged), history)


class Recycling:
    """Finds the widths of a model, again only after a change, and recycles their dead units."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._search = RememberedSites(where=None, what="units", units=1)

    def recycle(
        self,
        model: nn.Module,
        example: Any,
        batches: Iterable[Any],
        together: Together,
        history: History,
        *,
        when: Mapping[str, int],
        inside: Collection[int] | None,
        warmup: int | None,
    ) -> int:
        """Recycle the units that are zero on all batches; how many they were. ``inside``: only in the layers of these growths."""
        network, followers = bare(model), self._followers
        widths = trainable_sites(network, self._search.sites(model, example), followers.optimizer, None)
        kept = list(widths) if inside is None else _made_by(network, widths, inside)
        together.agree_on(number_facts("width", kept), last=False)
        if not kept:
            return 0
        found = find_dead(model, kept, example, batches, together)
        for site in found.sites:
            check_alike(model, followers.averaged)
            with AllOrNothing() as change:
                followers.keep(change, model, history)
                growth = renew(model, site, optimizer=followers.optimizer, check=found.check, warmup=warmup)
                history.append(replace(growth, details=dict(when)))
                follow(followers.averaged, history[-1], model)
        return sum(len(site.move.which) for site in found.sites if isinstance(site.move, Recycle))


def reusable_batches(batches: Iterable[Any]) -> Iterable[Any]:
    """Batches that can be taken more than once."""
    return list(batches) if hasattr(batches, "__next__") else batches


def first_input(model: nn.Module, batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """What a model is called with for the first two samples of the first batch, in the memory of the host; and all of the batches.

    Two, because batch statistics need them. No random number is drawn for it, and the order of the next epoch stays.
    """
    once = hasattr(batches, "__next__")
    with random_state.kept(), random_state.kept_of_loader(batches):
        found = list(islice(iter(batches), 1))
    if not found:
        raise MeasurementError(EMPTY)
    given, _ = split_batch(found[0], 0, bare(model))
    example = to_device(first_samples(given, 2, count_samples(given)), torch.device("cpu"))
    return example, chain(found, batches) if once else batches


def _made_by(network: nn.Module, widths: Iterable[Site], numbers: Collection[int]) -> list[Site]:
    """The widths whose units a layer of these growths makes."""
    layers = [path for number, path, _ in grown_modules(network) if number in numbers]

    def is_made(site: Site) -> bool:
        rows = [axis for axis in site.move.axes if axis.fill == "row"] if isinstance(site.move, Width) else []
        return any(f"{axis.module.path}.".startswith(f"{layer}.") for axis in rows for layer in layers)

    return list(filter(is_made, widths))


def loss_of_some(model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction | None, most: int) -> float:
    """The mean loss of the first batches, at most so many. Nothing else changes: no random number, no buffer, no order of a loader."""
    network, total, samples = bare(model), 0.0, 0
    device = device_of(network)
    with random_state.kept(), random_state.kept_of_loader(batches), untouched(network), torch.no_grad():
        for index, batch in enumerate(islice(iter(batches), most)):
            given, target = split_batch(batch, index, network)
            loss = scalar_loss(run(network, to_device(given, device)), to_device(target, device), loss_fn, index)
            size = count_samples(batch if isinstance(batch, dict) else batch[0])
            total, samples = total + loss.item() * size, samples + size
    if not samples:
        raise MeasurementError(EMPTY)
    return total / samples
