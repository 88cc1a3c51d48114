"""`measure`: the merit of every site from one ordinary forward and backward pass of the unmodified model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from sensli.backward import LossFunction, backward
from sensli.confidence import GROUPS, is_clear, next_look
from sensli.distributed import Together, reduce_sums, same_values
from sensli.errors import MeasurementError
from sensli.estimates import as_merits, estimate_of, mean_of_weights, share_remaining, value_of
from sensli.fsdp import readable
from sensli.merits import Merits
from sensli.norms import choose
from sensli.running import untouched
from sensli.sensitivity import Catch
from sensli.sites import Site
from sensli.wrappers import bare


def measure(
    model: nn.Module,
    sites: Sequence[Site],
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

    ``batches`` yields ``(input, target)`` pairs, or dicts of keyword arguments; ``loss_fn(output, target)`` is the mean loss of a batch
    (for dicts ``loss_fn(output, batch)``, by default ``output.loss``). Every batch counts with its size. The model runs in the mode it
    is in; its buffers, gradients and the random state are put back. ``ratio=False`` saves the gradients of the existing weights.
    ``confidence`` stops as soon as the best site is clear at that level: better than every other one, or with ``tolerance`` at least
    ``1 - tolerance`` times as good. Where several places are worth about the same, a tolerance such as 0.1 spares the search for the best.
    """
    together = Together(model, "measure the merits")
    model = bare(model)
    if confidence is not None and together.group is not None:
        raise ValueError(
            "confidence= looks at the sums while they grow, which several processes do not share before the end. Use max_batches=, or "
            "leave both out for the exact merits."
        )
    if not sites:
        raise MeasurementError(
            "there are no sites to measure. find_sites(...).explain() says which places were skipped and why."
        )
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches={max_batches}: at least one batch is needed.")
    check_level(confidence, tolerance)
    norm = choose(norm, [site.kind for site in sites])
    model, places = readable(model, sites)
    catch = Catch(model, places, weights=ratio, groups=1 if confidence is None else GROUPS)
    # Without weights that train, only the activations at the sites are asked for.
    catch.keeps_activations = not catch.weights
    sizes = [0.0] * (1 if confidence is None else GROUPS)
    unit, count, look, clear = 0.0, 0, 0, False
    known = _length(batches)
    exhausted = False

    with together, untouched(model), torch.inference_mode(False), torch.enable_grad(), catch.hooked():
        for batch in batches:
            size = backward(model, catch, batch, loss_fn, count, unit)
            unit = unit or size
            sizes[catch.group] += size / unit
            count += 1
            catch.group = count % len(sizes)
            if confidence is not None and count >= 4 and next_look(count - 1) == count and count != known:
                look += 1
                remaining = share_remaining(count, known)
                seen = sizes[:count]
                estimates = [estimate_of(site, norm, seen, remaining) for site in catch.sites]
                clear = is_clear(
                    estimates, seen, look=look, confidence=confidence, remaining=remaining, tolerance=tolerance
                )
                if clear:
                    break
            if count == max_batches:
                break
        else:
            exhausted = True
        sizes, unit, count = reduce_sums(together, catch, sizes, unit, count)
    if count == 0:
        raise MeasurementError(
            "the batches are empty: a loader without data, or an iterator that was used up before. Give a fresh one."
        )
    whole = confidence is None or exhausted or count == known
    remaining = 0.0 if whole else share_remaining(count, known)
    values = [value_of(site, norm, sizes[:count], remaining) for site in catch.sites]
    mean = mean_of_weights(catch, norm, sizes[:count], remaining)
    values, mean = same_values(together, values, mean)
    return as_merits(
        sites, catch, values, mean, norm=norm, batches=count, samples=round(sum(sizes) * unit), confidence=confidence,
        tolerance=tolerance, clear=clear if confidence is not None else None,
    )  # fmt: skip


def check_level(confidence: float | None, tolerance: float) -> None:
    """Refuse a level or a tolerance that means nothing."""
    if confidence is not None and not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: a level between 0 and 1, such as 0.99.")
    if not 0 <= tolerance < 1:
        raise ValueError(
            f"tolerance={tolerance}: the share of the best merit that may be missed, such as 0.1; below 1."
        )
    if tolerance and confidence is None:
        raise ValueError(f"tolerance={tolerance} means something with confidence= only, such as confidence=0.99.")


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
