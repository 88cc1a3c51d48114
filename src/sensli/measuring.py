"""`measure` and `Probe`: the merit of every site from one ordinary forward and backward pass of the unmodified model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sensli.confidence import GROUPS, Estimate, estimate, is_clear, next_look
from sensli.distributed import Together, reduce_sums, same_values
from sensli.errors import MeasurementError
from sensli.fsdp import is_sharded, readable
from sensli.graph import leaves
from sensli.merits import Merit, Merits
from sensli.norms import choose
from sensli.running import describe, device_of, run, tensors, to_device, untouched
from sensli.sensitivity import Catch, SiteCatch, WeightCatch
from sensli.sites import Site
from sensli.wrappers import bare

LossFunction = Callable[[Any, Any], Tensor]


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
            size = _backward(model, catch, batch, loss_fn, count, unit)
            unit = unit or size
            sizes[catch.group] += size / unit
            count += 1
            catch.group = count % len(sizes)
            if confidence is not None and count >= 4 and next_look(count - 1) == count and count != known:
                look += 1
                remaining = _remaining(count, known)
                seen = sizes[:count]
                estimates = [_estimate(site, norm, seen, remaining) for site in catch.sites]
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
    remaining = 0.0 if whole else _remaining(count, known)
    values = [_value(site, norm, sizes[:count], remaining) for site in catch.sites]
    mean = _mean_of_weights(catch, norm, sizes[:count], remaining)
    values, mean = same_values(together, values, mean)
    return _merits(
        sites, catch, values, mean, norm=norm, batches=count, samples=round(sum(sizes) * unit), confidence=confidence,
        tolerance=tolerance, clear=clear if confidence is not None else None,
    )  # fmt: skip


class Probe:
    """The same from the user's own step, without a pass of its own.

    Inside the context every backward pass of the model adds to the merits what it adds to the gradients, so accumulation over
    several batches means the same as for ``.grad``. Nothing of the step changes. ``scaler`` is the `torch.amp.GradScaler` that scales the
    loss of the step: the merits are those of the loss itself. ::

        with Probe(model, sites) as probe:
            loss_fn(model(x), y).backward()
        merits = probe.merits()
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        *,
        norm: str = "auto",
        ratio: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._together = Together(model, "read the probe")
        self._model = bare(model)
        if not sites:
            raise MeasurementError(
                "there are no sites to probe. find_sites(...).explain() says which places were skipped and why."
            )
        self._norm = choose(norm, [site.kind for site in sites])
        if is_sharded(self._model) and any(site.layer.twin is not None for site in sites):
            raise MeasurementError(
                "a probe cannot run the twin of a sharded block, whose parameters are whole only inside of its own pass. Use measure(...), "
                "which works on an unsharded copy."
            )
        if ratio and is_sharded(self._model):
            raise MeasurementError(
                "the gradients of sharded weights pass by where a probe could see them, so there is no ratio. Give ratio=False, or use "
                "measure(...)."
            )
        self._sites = sites
        self._catch = Catch(self._model, sites, weights=ratio)
        self._open: ExitStack | None = None
        self._scaler = scaler
        if scaler is not None:
            self._catch.scale = scaler.get_scale

    def __enter__(self) -> Probe:
        if self._open is not None:
            raise MeasurementError("this probe is open already. Leave its `with` block first, or make another Probe.")
        with ExitStack() as stack:  # what fails half-way leaves no hook either
            stack.enter_context(self._catch.hooked())
            stack.callback(self._catch.forget_pass)
            for index, weight in enumerate(self._catch.weights):
                if weight.parameter.requires_grad:  # it may have been frozen since
                    stack.callback(weight.parameter.register_hook(self._arrived(index)).remove)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._open = self._open, None
        if stack is not None:
            stack.__exit__(kind, value, trace)

    def _arrived(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            # A copy: the tensor becomes the user's .grad, which the next backward pass or step may overwrite.
            self._catch.weights[index].sum.add(self._catch.unscaled(gradient.clone()), 0)

        return hook

    def merits(self) -> Merits:
        """The merits of all backward passes since the probe was made; with several processes, all of them must ask for it."""
        with self._together as together:
            if self._catch.caught == 0:
                raise MeasurementError(
                    "the probe saw no backward pass. Call loss.backward() inside `with Probe(...)`, on the output of the model "
                    "it was made for."
                )
            passes = max(1, self._catch.caught // len(self._catch.sites))
            # As DistributedDataParallel does with the gradients: the mean over the processes.
            sizes, _, passes = reduce_sums(together, self._catch, [1.0], 1.0, passes)
        values = [site.merit(self._norm, sum(sizes)) for site in self._catch.sites]
        if self._scaler is not None and not all(map(math.isfinite, values)):
            raise MeasurementError(
                f"the scaled gradients of the probed pass overflowed at the scale {self._scaler.get_scale():g}; the scaler skips such a "
                "step and lowers its scale. Probe the next step."
            )
        mean = _mean_of_weights(self._catch, self._norm, sizes, 0.0)
        values, mean = same_values(together, values, mean)
        return _merits(self._sites, self._catch, values, mean, norm=self._norm, batches=passes)


def _merits(sites: Sequence[Site], catch: Catch, values: Sequence[float], mean: float | None, **facts: Any) -> Merits:
    if mean is not None and not math.isfinite(mean):
        raise MeasurementError(
            f"the mean over the existing weights is {mean}: one of their gradients is not finite although the loss is. "
            "Lower the learning rate, clip gradients, or measure with ratio=False."
        )
    records = []
    for site, caught, value in zip(sites, catch.sites, values, strict=True):
        quotient = None if mean is None else (value / mean if mean > 0 else math.inf)
        records.append(Merit(site, value, quotient, caught.dead))
    return Merits(records, **facts).check()


def _backward(model: nn.Module, catch: Catch, batch: Any, loss_fn: LossFunction | None, index: int, unit: float) -> int:
    """One batch: its loss, weighted by its size, back through the model. Returns the size."""
    given, target = _split(batch, index)
    device = device_of(model)
    given, target = to_device(given, device), to_device(target, device)
    size = _size(given, batch)
    # A dict is keyword arguments; a tuple inside a batch is several arguments.
    output = run(model, given)
    loss = _loss(output, target, loss_fn, index)
    trained = [p for p in model.parameters() if p.requires_grad] if catch.weights else []
    # Without the ratio only the activations at the sites are asked for, which leaves out the existing weights' gradients.
    wanted = trained + catch.leaves if catch.weights else list(catch.watched)
    if catch.weights and loss.grad_fn is not None and (index == 0 or catch.others):
        # A model or its input may hold tensors that ask for a gradient and are no parameters. Unless they are asked for too,
        # autograd leaves out the way to them, and the sites on that way would seem worthless.
        known = {id(tensor) for tensor in wanted}
        others = [leaf for leaf in leaves(loss.grad_fn) if id(leaf) not in known]
        catch.others, wanted = bool(others), wanted + others
    if not wanted or not loss.requires_grad:
        raise MeasurementError(
            f"the loss of batch {index} does not depend on any site: no gradient comes back. Check that loss_fn uses the model's output "
            "and that nothing detaches it."
        )
    try:
        gradients = torch.autograd.grad(loss * (size / (unit or size)), wanted, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise MeasurementError(
            "the model checkpoints activations with use_reentrant=True, which allows no gradients but by loss.backward(). Set "
            "use_reentrant=False, or use Probe around your own step."
        ) from error
    by_parameter = {id(p): g for p, g in zip(wanted, gradients, strict=True)}
    catch.add_weight_gradients(by_parameter[id(weight.parameter)] for weight in catch.weights)
    catch.forget_pass()
    return size


def _split(batch: Any, index: int) -> tuple[Any, Any]:
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return dict(batch), batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise MeasurementError(
        f"batch {index} is {describe(batch)}, but batches must yield (input, target) pairs or dicts. To measure on a single batch "
        "give [(x, y)]."
    )


def _size(given: Any, batch: Any) -> int:
    for tensor in tensors((given, batch)):
        if tensor.dim() > 0:
            if tensor.shape[0] == 0:
                break
            return int(tensor.shape[0])
    raise MeasurementError(
        f"a batch ({describe(batch)}) holds no samples: its first tensor with a dimension has none, or there is no such tensor. "
        "Leave it out."
    )


def _loss(output: Any, target: Any, loss_fn: LossFunction | None, index: int) -> Tensor:
    """The mean loss of a batch, checked to be a finite scalar."""
    loss = loss_fn(output, target) if loss_fn is not None else getattr(output, "loss", None)
    if loss is None and loss_fn is None:
        raise MeasurementError(
            "loss_fn is missing, and the model's output has no .loss. Give loss_fn(output, target) -> mean loss."
        )
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise MeasurementError(
            f"the loss of batch {index} has {what}, not a scalar tensor. loss_fn must return the mean over the batch "
            "(for torch losses reduction='mean')."
        )
    if not torch.isfinite(loss):
        raise MeasurementError(
            f"the loss of batch {index} is {loss.item()}: training has diverged or the batch holds bad values, "
            "so merits mean nothing. Lower the learning rate or look at the data."
        )
    return loss


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


# --- estimates from a sample ---


def _remaining(count: int, known: int | None) -> float:
    """The share of the data that was not seen; without a known end there is always more."""
    return 1.0 if not known else max(0.0, 1 - count / known)


def _estimate(caught: SiteCatch | WeightCatch, norm: str, sizes: Sequence[float], remaining: float) -> Estimate:
    total = sum(sizes)
    return estimate(
        lambda without: caught.merit(norm, total - (0 if without is None else sizes[without]), without),
        sizes,
        remaining,
    )


def _value(caught: SiteCatch | WeightCatch, norm: str, sizes: Sequence[float], remaining: float) -> float:
    """Exact where nothing remains, else without the share of the noise."""
    if remaining == 0:
        return caught.merit(norm, sum(sizes))
    return max(0.0, _estimate(caught, norm, sizes, remaining).value)


def _mean_of_weights(catch: Catch, norm: str, sizes: Sequence[float], remaining: float) -> float | None:
    """The mean over the existing weights of the squared norm of their gradient: the denominator of the threshold."""
    if not catch.weights:
        return None
    halves = [sum(sizes[0::2]), sum(sizes[1::2])]
    parts = halves if halves[1] else sizes
    return sum(_value(weight, norm, parts, remaining) for weight in catch.weights) / len(catch.weights)
