"""A look at a few samples before a measurement or a growth: what is measured may be made for the data, such as the rows of new units.

A part of the first batch passes, forward and backward, and what is then measured on all batches is exactly what came of it. Where nothing
is measured a forward pass of the user's batch says at least how large things are. Of several processes the first one with data decides, so
that all measure the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sensli.errors import UnsupportedSite
from sensli.merits.backward import LossFunction, backward
from sensli.merits.caught import SiteCatch
from sensli.merits.sensitivity import Catch
from sensli.modules.engines.distributed import Together
from sensli.modules.engines.fsdp import is_sharded
from sensli.modules.failing import forgiven
from sensli.modules.running import device_of, mapped, run, tensors, to_device, untouched
from sensli.moves.move import Ahead
from sensli.moves.sites import Site

SHARE = 8  # one in so many of the samples that will be measured, and not more than the first batch has
MANY = 128  # samples of the batch that a growth without a measurement is given: more tell hardly better how large things are
LEAST = 8  # samples, where each is a single vector rather than a picture or a sequence

Found = list[dict[str, Tensor]]  # by site


def look_ahead(
    together: Together, model: nn.Module, catch: Catch, first: Any, batches: int, loss_fn: LossFunction | None
) -> None:
    """Have the sites that want it see a part of the first of so many batches; it is None where a process has no data."""
    wanting = [(index, gauge) for index, each in enumerate(catch.sites) if (gauge := each.gauge.ahead()) is not None]
    if not wanting:
        return
    size = samples_of(first)
    samples = sum(together.agree(size * batches, last=False))
    least = LEAST if any(len(catch.sites[index].site.shape) == 1 for index, _ in wanting) else 1
    found: Found | None = None
    if size:
        found = _seen(model, catch, wanting, few(first, max(least, samples // SHARE)), loss_fn)
    shared = _of_the_first(together, found, device_of(model))
    for (index, gauge), sums in zip(wanting, shared or (), strict=shared is not None):
        site = gauge.settled(catch.sites[index].site, sums)
        catch.sites[index] = SiteCatch(site, catch.groups, model, catch.natural)


def _seen(
    model: nn.Module, catch: Catch, wanting: list[tuple[int, Ahead]], batch: Any, loss_fn: LossFunction | None
) -> Found | None:
    """What comes of a few samples; None where they do not pass alone, and the measurement does without."""
    look = Catch(
        model, [catch.sites[index].site for index, _ in wanting], weights=False, gauges=[gauge for _, gauge in wanting]
    )
    look.keeps_activations, look.around = True, catch.around
    passed = False
    # What fails for another reason than that they are few fails again in the measurement, and is reported there.
    with forgiven(), untouched(model), look.hooked():
        backward(model, look, batch, loss_fn, 0, 0.0)
        passed = True
    with torch.no_grad():
        return [gauge.found() for _, gauge in wanting] if passed else None


def made_for(together: Together, model: nn.Module, site: Site, batch: Any) -> Site:
    """A site that was never measured with what fits a batch of inputs, of which a few pass; without one, or measured, it is as it was."""
    # Before the gauge, for which a block is copied: a sharded one cannot be, and without a batch it would be for nothing.
    if is_sharded(model) or (together.group is None and batch is None):
        return site
    try:
        gauge = site.move.gauge(site, model).ahead()
    except UnsupportedSite:  # what cannot be measured is the same whatever the data are
        return site
    if gauge is None or not any(together.agree(batch is not None, last=False)):
        return site
    found = None
    if batch is not None:
        # A batch that does not pass is reported where the outputs are compared.
        with forgiven(), untouched(model), _hooked(gauge):
            with torch.enable_grad():
                run(model, to_device(few(batch, MANY), device_of(model)))
            with torch.no_grad():
                found = [gauge.found()]
    shared = _of_the_first(together, found, device_of(model))
    return site if shared is None else gauge.settled(site, shared[0])


@contextmanager
def _hooked(gauge: Ahead) -> Iterator[None]:
    handles = gauge.hooks(lambda sums: None, lambda gradient: gradient)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def samples_of(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 0)


def few(batch: Any, count: int) -> Any:
    """The first samples of a batch whose tensors all have one entry for each of them; otherwise all of it."""
    size = samples_of(batch)
    if any(tensor.dim() and len(tensor) != size for tensor in tensors(batch)):
        return batch
    return mapped(batch, lambda tensor: tensor[:count] if tensor.dim() else tensor)


def _of_the_first(together: Together, found: Found | None, device: Any) -> Found | None:
    """What the first process that has seen something found, on all of them."""
    forms = together.agree(None if found is None else [_forms(each) for each in found], last=False)
    if together.group is None:
        return found
    leader = next((rank for rank, form in enumerate(forms) if form is not None), None)
    if leader is None:
        return None
    own = found if leader == together.rank else None
    source = dist.get_global_rank(together.group, leader)
    shared: Found = []
    for index, form in enumerate(forms[leader]):
        shared.append({})
        for name, (shape, dtype) in form.items():
            value = torch.empty(shape, dtype=dtype, device=device) if own is None else own[index][name].contiguous()
            dist.broadcast(value, source, group=together.group)
            shared[-1][name] = value
    return shared


def _forms(found: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(value.shape), value.dtype) for name, value in found.items()}
