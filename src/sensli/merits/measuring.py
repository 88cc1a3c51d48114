"""`measure`: the merit of every site from one ordinary forward and backward pass of the unmodified model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from sensli.errors import MeasurementError
from sensli.merits.affording import affordable
from sensli.merits.ahead import look_ahead
from sensli.merits.backward import LossFunction, backward
from sensli.merits.confidence import GROUPS, is_clear, next_look
from sensli.merits.estimates import as_merits, compared, estimate_of, mean_of_weights, share_remaining, value_of
from sensli.merits.joining import Caught, joined, same_values
from sensli.merits.merits import Merit, Merits, as_sites
from sensli.merits.natural import NATURAL
from sensli.merits.norms import choose
from sensli.merits.sensitivity import Catch
from sensli.modules import checks, random_state
from sensli.modules.autocast import autocast_of_now, without_autocast
from sensli.modules.engines.distributed import Together, numbered
from sensli.modules.engines.fsdp import is_sharded, unsharded
from sensli.modules.running import device_of, gradients_kept, untouched
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site

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
        max_batches = None if max_batches is None else checks.whole("max_batches", max_batches, 10)
        confidence, tolerance = check_level(confidence, tolerance)
        asked, norm = norm, choose(norm, [site.kind for site in sites])
        request = {"norm": norm, "ratio": ratio, "confidence": confidence, "tolerance": tolerance}
        ranks = len(together.agree_on({**request, **numbered("site", sites)}, last=False))
        model, places = _readable(model, sites)
        groups = 1 if confidence is None else GROUPS
        catch = Catch(model, places, weights=ratio, groups=groups, natural=norm == NATURAL)
        # Without weights that train, only the activations at the sites are asked for.
        catch.keeps_activations, catch.around = not catch.weights, around
        clear, remaining = None, 0.0
        kept = random_state.kept_of_loader(batches)
        with untouched(model), gradients_kept(model), kept, torch.inference_mode(False), torch.enable_grad():
            taken = _Taken(model, catch, batches, loss_fn, max_batches)
            look_ahead(together, model, catch, taken.first(), taken.expected, loss_fn)
            with catch.hooked():
                if confidence is None:
                    taken.up_to(None)
                else:
                    clear, remaining, norm = _until_clear(together, taken, (asked, norm), confidence, tolerance)
            caught = joined(together, taken.caught(), device_of(model), last=False)
        if caught.count == 0:
            raise MeasurementError(EMPTY)
        sizes = _filled(caught)
        if remaining == 0:  # with confidence the first look has settled it, unless the data ended before
            norm = affordable(asked, norm, caught.sites, caught.weights, caught.count / ranks)
        values = [value_of(site, norm, sizes, remaining) for site in caught.sites]
        mean = mean_of_weights(caught.weights, norm, sizes, remaining)
        values, mean = same_values(together, values, mean)
        return as_merits(
            sites, caught.sites, values, mean, len(compared(caught.weights, norm)),
            norm=norm, batches=caught.count, samples=round(sum(sizes) * caught.unit),
            loss=caught.loss / sum(sizes), confidence=confidence, tolerance=tolerance, clear=clear,
        )  # fmt: skip


class _Taken:
    """The batches that this process has taken so far, and what they gave."""

    def __init__(
        self, model: nn.Module, catch: Catch, batches: Iterable[Any], loss_fn: LossFunction | None, most: int | None
    ) -> None:
        self.model, self.catch, self.loss_fn, self.most = model, catch, loss_fn, most
        self.known = _length(batches)
        self.unit, self.count, self.exhausted, self.loss = 0.0, 0, False, 0.0
        self._sizes = [0.0] * catch.groups
        self._rest: Iterator[Any] = iter(batches)

    def first(self) -> Any:
        """The first batch, which will be taken nevertheless; None if there is none."""
        found = list(islice(self._rest, 1))
        self._rest = chain(found, self._rest)
        return found[0] if found else None

    @property
    def expected(self) -> int:
        """How many batches there will be, or one if nobody knows."""
        return min(self.known or 1, self.most or self.known or 1)

    def up_to(self, count: int | None) -> None:
        """Take batches until there are so many in all, or as many as there are or may be."""
        most = min((limit for limit in (count, self.most) if limit is not None), default=None)
        for batch in islice(self._rest, None if most is None else max(most - self.count, 0)):
            size, loss = backward(self.model, self.catch, batch, self.loss_fn, self.count, self.unit)
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
        remaining = share_remaining(sum(counts), whole)
        own = replace(taken.caught(), weights=[])
        seen = joined(together, own, device_of(taken.model), last=False)
        sizes = _filled(seen)
        if look == 1:
            norm = affordable(asked, norm, seen.sites, [], seen.count / len(states), groups=True)
        estimates = [estimate_of(site, norm, sizes, remaining) for site in seen.sites]
        clear = is_clear(estimates, sizes, look=look, confidence=confidence, remaining=remaining, tolerance=tolerance)
        if together.agree(clear, last=False)[0]:  # the first rank's word: machines may differ in the last bit
            return True, remaining, norm
        if all(finished):
            return False, remaining, norm


def _filled(caught: Caught) -> list[float]:
    """The sizes of the groups that hold something: they are filled in order."""
    return [size for size in caught.sizes if size]


def _readable(model: nn.Module, sites: Sequence[Site]) -> tuple[nn.Module, Sequence[Site]]:
    """The model and its sites, or, where it is sharded, an unsharded copy and the same sites on it."""
    if not is_sharded(model):
        return model, sites
    places = []
    for site in sites:
        places.append(replace(site.by_path(), point=site.point.by_path(site.find(model)[0])))
    return unsharded(model), places


def check_level(confidence: float | None, tolerance: float) -> tuple[float | None, float]:
    """The level and the tolerance as numbers; those that mean nothing are refused."""
    confidence = None if confidence is None else checks.share("confidence", confidence, 0.99)
    tolerance = checks.share("tolerance", tolerance, 0.1, zero=True)
    if tolerance and confidence is None:
        raise ValueError(f"tolerance={tolerance} needs confidence= (for example confidence=0.99).")
    return confidence, tolerance


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
