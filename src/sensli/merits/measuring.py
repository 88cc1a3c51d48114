"""`measure`: the merit of every site from one ordinary forward and backward pass of the unmodified model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sensli.errors import MeasurementError, UnsupportedSite
from sensli.merits.catching import Catch, LossFunction, backward, samples_of
from sensli.merits.confidence import GROUPS, estimate_of, is_clear, mean_of_weights, next_look, value_of
from sensli.merits.merits import Merit, Merits, as_sites
from sensli.merits.norms import NATURAL, SKETCHABLE, choose_norm, is_beyond_room, operator_work
from sensli.merits.sums import Catches, MomentSum, SiteCatch, Sum, WeightCatch
from sensli.modules import checks, random_state
from sensli.modules.engines.distributed import Together, number_facts
from sensli.modules.engines.fsdp import check_sharded, forget_pass, is_synchronised, measured_passes, unsharded_copy
from sensli.modules.running import (
    autocast_of_now,
    device_of,
    forgiven,
    gradients_kept,
    map_tensors,
    run,
    tensors,
    to_device,
    untouched,
    without_autocast,
)
from sensli.modules.wrappers import bare
from sensli.moves.factors import power_of
from sensli.moves.sites import Ahead, Site

# ---- A look at a few samples before a measurement or a growth: what is measured may be made for the data, such as the
# rows of new units.
#
# A part of the first batch passes, forward and backward, and what is then measured on all batches is exactly what
# came of it. Where nothing is measured a forward pass of the user's batch says at least how large things are. Of
# several processes the first one with data decides, so that all measure the same to the bit.


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
    size = 0 if catch.idle else samples_of(first)
    samples = sum(together.agree(size * batches, last=False))
    least = LEAST if any(len(catch.sites[index].site.shape) == 1 for index, _ in wanting) else 1
    found: Found | None = None
    if size or catch.idle:
        found = _seen(model, catch, wanting, first_of_batch(first, max(least, samples // SHARE)), loss_fn)
    found = None if catch.idle else found
    shared = of_the_first(together, found, device_of(model))
    entries = sum(value.numel() for sums in shared or () for value in sums.values())
    for (index, gauge), sums in zip(wanting, shared or (), strict=shared is not None):
        gauge.compact = is_beyond_room(entries)
        site = gauge.settled(catch.sites[index].site, sums)
        catch.sites[index] = again = SiteCatch(site, catch.groups, model, catch.natural)
        again.sketch_by(catch.sketcher)


def _seen(
    model: nn.Module, catch: Catch, wanting: list[tuple[int, Ahead]], batch: Any, loss_fn: LossFunction | None
) -> Found | None:
    """What comes of a few samples; None where they do not pass alone, and the measurement does without."""
    look = Catch(
        model, [catch.sites[index].site for index, _ in wanting], weights=False, gauges=[gauge for _, gauge in wanting]
    )
    look.keeps_activations, look.around, look.ranks, look.sharded = True, catch.around, catch.ranks, catch.sharded
    passed = False
    # What fails for another reason than that they are few fails again in the measurement, and is reported there.
    with forgiven(), untouched(model), look.hooked():
        backward(model, look, batch, loss_fn, 0, 0.0)
        passed = True
    with torch.no_grad():
        return [gauge.found() for _, gauge in wanting] if passed else None


def fit_to_batch(together: Together, model: nn.Module, site: Site, batch: Any) -> Site:
    """A site that was never measured with what fits a batch of inputs, of which a few pass; without one, or measured, it is as it was."""
    # Before the gauge, for which a block is copied: a sharded one cannot be, and without a batch it would be for nothing.
    if together.sharded or (together.group is None and batch is None):
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
        with forgiven(), untouched(model), ExitStack() as hooks:
            for handle in gauge.hooks(lambda sums: None, lambda gradient: gradient):
                hooks.callback(handle.remove)
            with torch.enable_grad():
                run(model, to_device(first_of_batch(batch, MANY), device_of(model)))
            with torch.no_grad():
                found = [gauge.found()]
    shared = of_the_first(together, found, device_of(model))
    return site if shared is None else gauge.settled(site, shared[0])


def first_of_batch(batch: Any, count: int) -> Any:
    """The first samples of a batch whose tensors all have one entry for each of them; otherwise all of it."""
    size = samples_of(batch)
    if any(tensor.dim() and len(tensor) != size for tensor in tensors(batch)):
        return batch
    return map_tensors(batch, lambda tensor: tensor[:count] if tensor.dim() else tensor)


def of_the_first(together: Together, found: Found | None, device: Any) -> Found | None:
    """What the first process that has seen something found, on all of them."""
    own_forms = None if found is None else [{name: _form(value) for name, value in each.items()} for each in found]
    forms = together.agree(own_forms, last=False)
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


def _form(value: Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    return None if value is None else (tuple(value.shape), value.dtype)


# ---- What several processes have caught, as one: gradients are added up before any norm is taken.


@dataclass(frozen=True)
class Caught:
    """What one process has caught, or all of them together. Sizes are in units of the first batch, and so are the losses' weights."""

    sites: list[SiteCatch]
    weights: list[WeightCatch]
    sizes: list[float]
    unit: float
    count: int
    loss: float = 0.0  # the sum over the batches, each times its size

    @property
    def filled(self) -> list[float]:
        """The sizes of the groups that hold something: they are filled in order."""
        return [size for size in self.sizes if size]


def join_ranks(together: Together, caught: Caught, device: Any, *, last: bool = True) -> Caught:
    """What all ranks have caught: gradients added up (never their norms), sizes, counts, units alive. What each holds stays as it is.

    Sizes are brought to the unit of the first rank that has any. Unless it is the `last` time, the ranks will meet again.
    """
    own: list[Catches] = [*caught.sites, *(weight for weight in caught.weights if not weight.joined)]
    forms = [
        ({name: list(map(_form, each.groups)) for name, each in catch.sums.items()}, catch.shape, catch.sketched)
        for catch in own
    ]
    told = together.agree((caught.unit, caught.sizes, caught.count, forms, caught.loss), last=last)
    if together.group is None:
        return caught
    common, shapes = next(((unit, forms) for unit, _, _, forms, _ in told if unit), (0.0, told[0][3]))
    copies: list[Any] = [copy(each) for each in own]
    for index, each in enumerate(copies):
        _, each.shape, each.sketched = shapes[index]  # a rank without data has not seen it
        each.sums = {}
        for name in dict.fromkeys(name for _, _, _, forms, _ in told for name in forms[index][0]):
            its = [forms[index][0][name] for _, _, _, forms, _ in told if name in forms[index][0]]
            factor = (caught.unit / common) ** power_of(name) if caught.unit else 0.0
            each.sums[name] = _joined_sum(own[index].sums.get(name), its, factor, device, together.group)
    sites, others = copies[: len(caught.sites)], iter(copies[len(caught.sites) :])
    weights = [weight if weight.joined else next(others) for weight in caught.weights]
    totals = [sum(sizes[j] * unit / (common or 1.0) for unit, sizes, *_ in told) for j in range(len(caught.sizes))]
    loss = sum(its * unit / (common or 1.0) for unit, *_, its in told)
    return Caught(sites, weights, totals, common, sum(count for _, _, count, _, _ in told), loss)


def _joined_sum(own: Sum | MomentSum | None, forms: list[list[Any]], factor: float, device: Any, group: Any) -> Sum:
    """One sum over all ranks; ``forms`` tells what each rank that has any holds in its groups."""
    joint = Sum(max(len(forms[0]) - 1, 1))
    for j in range(len(forms[0])):
        form = next((its[j] for its in forms if its[j]), None)
        if form is not None:
            part, (shape, dtype) = None if own is None else own.groups[j], form
            # A copy: what was caught may be somebody's gradient, and may be expanded.
            total = torch.zeros(shape, dtype=dtype, device=device) if part is None else (part * factor).contiguous()
            dist.all_reduce(total, group=group)
            joint.groups[j] = total
    return joint


def conclude(
    together: Together,
    sites: Sequence[Site],
    caught: Caught,
    norm: str,
    remaining: float = 0.0,
    *,
    check: Callable[[list[float]], None] = lambda values: None,
    **facts: Any,
) -> Merits:
    """The merits of the sites, from what all processes have caught; ``check`` may refuse their values."""
    sizes = caught.filled
    values = [value_of(site, norm, sizes, remaining) for site in caught.sites]
    check(values)
    weights = [weight for weight in caught.weights if norm != NATURAL or weight.factored]
    mean = mean_of_weights(weights, norm, sizes, remaining)
    # Rank 0's numbers on all ranks: machines of different make may differ in the last bit, and a decision depends on it.
    values, mean = together.agree((values, mean))[0]
    if mean is not None and not math.isfinite(mean):
        raise MeasurementError(
            f"the mean over the existing weights is {mean}: one of their gradients is not finite although the loss is. "
            "Lower the learning rate, clip gradients, or measure with ratio=False."
        )
    merits = []
    for site, its, value in zip(sites, caught.sites, values, strict=True):
        ratio = None if mean is None else (value / mean if mean > 0 else math.inf)
        share = None if ratio is None else ratio / len(weights)
        merits.append(Merit(its.measured_site(site), value, ratio, its.dead, share))
    spread = max((its.spread for its in caught.sites), default=0.0)
    return Merits(merits, norm=norm, batches=caught.count, spread=spread, **facts).check()


# ---- What ``norm="auto"`` may cost: norms that would take longer than the passes themselves give way to one that costs
# nothing.
#
# Work is counted from shapes, never timed, so that every run and every rank decides alike.


_FREE = 2**28  # operations, less than a tenth of a second: not worth another norm
# With groups of batches: norms of all sites for every batch, over the looks after 4, 6, 8, 12 and 16 batches.
_SETS = 51 / 16


def affordable_norm(
    asked: str,
    norm: str,
    sites: Sequence[SiteCatch],
    weights: Sequence[WeightCatch],
    batches: float,
    *,
    groups: bool = False,
) -> str:
    """The norm to take: the one that was chosen, or Frobenius where "auto" was asked for and operator norms cost more than the passes.

    ``batches``: how many this process has passed through the model; ``groups``: whether norms are taken without each group of them too.
    """
    if asked != "auto" or norm != "operator":
        return norm
    costs = products = 0.0
    for site in sites:
        work, entries = _work(site)
        costs += work * (_SETS * batches if groups else 1)
        products += math.prod(site.shape[2:]) * entries
    for weight in weights:
        work, entries = _work(weight)
        costs += work
        products += (
            3 * math.prod(weight.shape) * entries
        )  # of the forward pass, and for both gradients of the backward pass
    samples = sites[0].shape[0] if sites else 0
    return norm if costs <= max(_FREE, batches * samples * products) else "frobenius"


def _work(caught: Catches) -> tuple[int, int]:
    """What the operator norms of its gradients cost, and how many entries these have."""
    forms = [(tuple(total.shape), geometry) for total, geometry in caught.parts()]
    return sum(operator_work(*form) for form in forms), sum(math.prod(shape) for shape, _ in forms)


EMPTY = "the batches are empty: a loader without data, or an iterator that is already used up. Give a new one."


def measure(
    model: nn.Module,
    sites: Sequence[Site | Merit],
    batches: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    norm: str = "auto",
    ratio: bool = True,
    max_batches: int | None = None,
    confidence: float | None = None,
    tolerance: float = 0.0,
    exact: bool = False,
) -> Merits:
    """Measure the merit of every site over the data: the squared norm of the gradient of the mean loss.

    The model runs in the mode it is in (train or eval). Its buffers, gradients and the random state are restored afterwards.

    Args:
        model: The network the sites were found in.
        sites: The sites to measure, or merits, which stand for their sites.
        batches: Yields ``(input, target)`` pairs or dicts of keyword arguments. Each batch is weighted by its size.
        loss_fn: ``loss_fn(output, target)``, the mean loss of a batch; for dicts ``loss_fn(output, batch)``. None uses
            ``output.loss``.
        norm: The norm of the gradient: ``"frobenius"``, ``"mean_square"``, ``"operator"``, ``"operator_l2"``,
            ``"operator_l1"``, ``"natural"`` (measured by the noise of the gradient and by the inputs, so that no scale of activations
            counts), or ``"auto"``: operator if every site is a convolution and the norms cost no more than the passes,
            otherwise Frobenius (default: "auto").
        ratio: Whether to compare each merit with the mean over the existing weights. False saves computing their gradients
            (default: True).
        max_batches: The largest number of batches to use. None uses all of them.
        confidence: Stop as soon as the best site is clear at this level, between 0 and 1. None measures all batches exactly.
        tolerance: With ``confidence``: it is enough that the best site is at least ``1 - tolerance`` times as good as every
            other. Where several sites are worth about the same, a value such as 0.1 saves batches (default: 0.0).
        exact: Whether to hold the whole gradients of all sites, however large they are. Otherwise, where they would take more than
            32 MiB in all, the Frobenius norms of large ones come from sketches, and ``Merits.spread`` says how far they may be off
            (default: False).

    Returns:
        The merits in the order of the sites; they print as a table, best first.

    Raises:
        MeasurementError: If there are no data, no gradient reaches the sites, the loss is not a finite number, or it depends on a
            gradient that it takes itself.
        ZeroMerits: If all merits are zero.
    """
    together, around = Together(model, "measure the merits"), autocast_of_now()
    with together, without_autocast():
        model = bare(model)
        sites = as_sites("sites", sites)
        if not sites:
            raise MeasurementError(
                "there are no sites to measure. find_sites(...).explain() says which places were skipped and why."
            )
        checks.batches("batches", batches)
        checks.loss("loss_fn", loss_fn)
        checks.flag("ratio", ratio)
        checks.flag("exact", exact)
        max_batches = None if max_batches is None else checks.whole("max_batches", max_batches, 10)
        confidence, tolerance = check_level(confidence, tolerance)
        asked, norm = norm, choose_norm(norm, [site.kind for site in sites])
        request = {"norm": norm, "ratio": ratio, "confidence": confidence, "tolerance": tolerance, "exact": exact}
        ranks = len(together.agree_on({**request, **number_facts("site", sites)}, last=False))
        places: Sequence[Site] = sites
        sharded = together.sharded and can_run_in_shards(model, sites, norm, ratio=ratio)
        if together.sharded and not sharded:
            places = [replace(site.by_path(), point=site.point.by_path(site.find(model)[0])) for site in sites]
            model = unsharded_copy(model)
        elif sharded:
            forget_pass(model)  # the root keeps its parameters whole after a run without gradients
        groups = 1 if confidence is None else GROUPS
        sketched = norm == SKETCHABLE and not exact
        catch = Catch(
            model, places, weights=ratio, groups=groups, natural=norm == NATURAL, sketched=sketched, sharded=sharded
        )
        # Without weights that train, only the activations at the sites are asked for.
        catch.keeps_activations, catch.around = not catch.weights, around
        catch.ranks = together if sharded else None
        clear, remaining = None, 0.0
        kept, gradients = random_state.kept_of_loader(batches), gradients_kept(model.parameters())
        passes = measured_passes(model) if sharded else nullcontext()
        with passes, untouched(model), gradients, kept, torch.inference_mode(False), torch.enable_grad():
            taken = _Taken(model, catch, batches, loss_fn, max_batches)
            look_ahead(together, model, catch, taken.first(), taken.expected, loss_fn)
            with catch.hooked():
                if confidence is None:
                    taken.up_to(None)
                else:
                    clear, remaining, norm = _until_clear(together, taken, (asked, norm), confidence, tolerance)
            caught = join_ranks(together, taken.caught(), device_of(model), last=False)
        if caught.count == 0:
            raise MeasurementError(EMPTY)
        if remaining == 0:  # with confidence the first look has settled it, unless the data ended before
            norm = affordable_norm(asked, norm, caught.sites, caught.weights, caught.count / ranks)
        size = sum(caught.filled)
        return conclude(
            together, sites, caught, norm, remaining, samples=round(size * caught.unit),
            loss=caught.loss / size, confidence=confidence, tolerance=tolerance, clear=clear,
        )  # fmt: skip


def can_run_in_shards(model: nn.Module, sites: Iterable[Site], norm: str, *, ratio: bool) -> bool:
    """Whether a sharded model can be measured in its own passes. All else is measured on an unsharded copy.

    That is a twin that has to be in the model while it runs, the moments of existing weights, and a model whose gradients are not summed
    over the processes at once.
    """
    check_sharded(model)
    caught = all(getattr(site.move, "caught_at_site", True) for site in sites)
    return caught and not (norm == NATURAL and ratio) and is_synchronised(model)


class _Taken:
    """The batches that this process has taken so far, and what they gave.

    Where a model is sharded, a process without a batch runs along with another one, which does not count.
    """

    def __init__(
        self, model: nn.Module, catch: Catch, batches: Iterable[Any], loss_fn: LossFunction | None, most: int | None
    ) -> None:
        self.model, self.catch, self.loss_fn, self.most = model, catch, loss_fn, most
        self.known: int | None = None
        with suppress(TypeError):
            self.known = len(batches)  # type: ignore[arg-type]
        self.unit, self.count, self.exhausted, self.loss = 0.0, 0, False, 0.0
        self._sizes = [0.0] * catch.groups
        self._rest: Iterator[Any] = iter(batches)
        self._substitute: Any = None  # for a batch

    def first(self) -> Any:
        """The first batch, which will be taken nevertheless; None if there is none."""
        found = list(islice(self._rest, 1))
        self._rest = chain(found, self._rest)
        first = found[0] if found else None
        if self.catch.ranks is not None:
            first = self._substitute = self._share_first(self.catch.ranks, first)
        return first

    def _share_first(self, together: Together, first: Any) -> Any:
        """The first batch, or where there is none another process's; all weight their losses by the size of one of them."""
        sizes = together.agree(None if first is None else samples_of(first), last=False)
        leader = next((rank for rank, size in enumerate(sizes) if size is not None), None)
        if leader is None:
            raise MeasurementError(EMPTY)
        self.unit, self.catch.idle = float(sizes[leader] or 1), first is None
        if None in sizes:
            own = map_tensors(first, lambda tensor: tensor.cpu()) if leader == together.rank else None
            shared = together.agree(own, last=False)[leader]
            return shared if first is None else first
        return first

    def _in_step(self, own: Iterator[Any]) -> Iterator[Any]:
        """As many batches as the process has that has the most of them."""
        if self.catch.ranks is None:
            yield from own
            return
        for batch in chain(own, repeat(None)):
            if not any(self.catch.ranks.agree(batch is not None, last=False)):
                return
            self.catch.idle = batch is None
            yield self._substitute if batch is None else batch

    @property
    def expected(self) -> int:
        """How many batches there will be, or one if nobody knows."""
        return min(self.known or 1, self.most or self.known or 1)

    def up_to(self, count: int | None) -> None:
        """Take batches until there are so many in all, or as many as there are or may be."""
        most = min((limit for limit in (count, self.most) if limit is not None), default=None)
        for batch in self._in_step(islice(self._rest, None if most is None else max(most - self.count, 0))):
            size, loss = backward(self.model, self.catch, batch, self.loss_fn, self.count, self.unit)
            if self.catch.idle:
                continue
            self.unit = self.unit or size
            self.loss += loss * size / self.unit
            self._sizes[self.catch.group] += size / self.unit
            self.count += 1
            self.catch.group = self.count % len(self._sizes)
        self.exhausted = most is None or self.count < most or self.count == self.known

    @property
    def finished(self) -> bool:
        return self.exhausted or self.count == self.most

    def caught(self) -> Caught:
        return Caught(self.catch.sites, self.catch.weights, self._sizes, self.unit, self.count, self.loss)


def _until_clear(
    together: Together, taken: _Taken, norms: tuple[str, str], confidence: float, tolerance: float
) -> tuple[bool, float, str]:
    """Take batches until the best site is clear or nothing is left: whether it is, which share of the data was not seen, and the norm.

    ``norms``: the one that was asked for, and the one that it stands for.
    """
    goal, look = 0, 0
    asked, norm = norms
    while True:
        goal, look = next_look(goal), look + 1
        taken.up_to(goal)
        # All ranks come here equally often; one whose data has ended waits for the others.
        states = together.agree((taken.finished, taken.exhausted, taken.count, taken.known), last=False)
        finished, exhausted, counts, known = zip(*states, strict=True)
        whole = None if None in known else sum(known)
        if all(exhausted):
            return False, 0.0, norm
        remaining = max(0.0, 1 - sum(counts) / whole) if whole else 1.0  # without a known end there is always more
        own = replace(taken.caught(), weights=[])
        seen = join_ranks(together, own, device_of(taken.model), last=False)
        sizes = seen.filled
        if look == 1:
            norm = affordable_norm(asked, norm, seen.sites, [], seen.count / len(states), groups=True)
        estimates = [estimate_of(site, norm, sizes, remaining) for site in seen.sites]
        clear = is_clear(estimates, sizes, look=look, confidence=confidence, remaining=remaining, tolerance=tolerance)
        if together.agree(clear, last=False)[0]:  # the first rank's word: machines may differ in the last bit
            return True, remaining, norm
        if all(finished):
            return False, remaining, norm


def check_level(confidence: float | None, tolerance: float) -> tuple[float | None, float]:
    """The level and the tolerance as numbers; those that mean nothing are refused."""
    confidence = None if confidence is None else checks.share("confidence", confidence, 0.99)
    tolerance = checks.share("tolerance", tolerance, 0.1, zero=True)
    if tolerance and confidence is None:
        raise ValueError(f"tolerance={tolerance} needs confidence= (for example confidence=0.99).")
    return confidence, tolerance
