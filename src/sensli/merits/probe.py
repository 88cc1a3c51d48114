"""`Probe`: the merits from the user's own training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sensli.errors import MeasurementError, WrongType
from sensli.merits.catching import Catch, samples_of
from sensli.merits.measuring import Caught, affordable_norm, can_run_in_shards, conclude, join_ranks, of_the_first
from sensli.merits.merits import Merit, Merits, as_sites
from sensli.merits.norms import NATURAL, choose_norm
from sensli.merits.sums import ShardCatch, SiteCatch, Sum, WeightCatch
from sensli.modules import checks
from sensli.modules.engines.distributed import Together, number_facts
from sensli.modules.engines.fsdp import has_waiting, reshard
from sensli.modules.running import device_of, tensors, without_autocast
from sensli.modules.wrappers import bare
from sensli.moves.factors import power_of
from sensli.moves.sites import Gauge, Site
from sensli.moves.width.late import LateGauge, late_gauges, settle


def check_scaler(scaler: object) -> None:
    """Refuse what does not scale a loss."""
    if scaler is not None and (isinstance(scaler, type) or not hasattr(scaler, "get_scale")):
        checks.refuse("scaler", "a torch.amp.GradScaler", scaler, WrongType)


class Probe:
    """Measures the same merits as `measure` during your own training step, without an extra pass.

    Inside the context every backward pass of the model adds to the merits what it adds to the gradients, so accumulating over
    several batches means the same as for ``.grad``. ``torch.autograd.grad`` counts only where nobody calls ``backward()``, and if it is
    asked for gradients of the model's parameters. The step itself does not change. New units that were never measured have
    other rows than in `measure`, which sees a few samples beforehand: give measured merits for the same rows.

        with Probe(model, sites) as probe:
            loss_fn(model(x), y).backward()
        merits = probe.merits()

    Args:
        model: The network the sites were found in. If it is sharded, all processes must make the probe together.
        sites: The sites to measure, or merits, which stand for their sites.
        norm: The norm of the gradient, as in `measure` (default: "auto").
        ratio: Whether to compare each merit with the mean over the existing weights (default: True).
        scaler: The `torch.amp.GradScaler` that scales the loss of the step, so that the merits are those of the unscaled loss.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site | Merit],
        *,
        norm: str = "auto",
        ratio: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._together = Together(model, "read the probe")
        self._model = bare(model)
        sites = as_sites("sites", sites)
        checks.flag("ratio", ratio)
        check_scaler(scaler)
        if not sites:
            raise MeasurementError(
                "there are no sites to probe. find_sites(...).explain() says which places were skipped and why."
            )
        self._asked, self._norm = norm, choose_norm(norm, [site.kind for site in sites])
        sharded = self._together.sharded
        if sharded:
            with Together(model, "probe") as together:
                self._check_shards(sites, ratio)
                together.agree_on(number_facts("site", sites))
            reshard(self._model)  # the root keeps its parameters whole after a run without gradients
        self._sites = sites
        natural = self._norm == NATURAL
        self._catch = Catch(
            self._model, sites, weights=ratio, natural=natural, gauges=self._gauges(sites), sharded=sharded
        )
        self._shards = [weight for weight in self._catch.weights if isinstance(weight, ShardCatch)]
        self._shapes = self._shapes_now()
        self._open: ExitStack | None = None
        self._scaler = scaler
        if scaler is not None:
            self._catch.scale = scaler.get_scale

    def _check_shards(self, sites: Sequence[Site], ratio: bool) -> None:
        """Refuse what cannot be seen in the steps of a sharded model."""
        if not can_run_in_shards(self._model, sites, self._norm, ratio=ratio):
            raise MeasurementError(
                "a probe of a sharded model needs gradients that are summed over the processes at every step. It knows neither ratios for "
                "norm='natural' nor twins in a list whose loop adds what its blocks give. Use measure(...), which takes a copy for these."
            )

    def _gauges(self, sites: Sequence[Site]) -> Sequence[Gauge] | None:
        """What measures the sites; None is what each of them has."""
        return None

    def __enter__(self) -> Probe:
        if self._open is not None:
            raise MeasurementError("this probe is open already. Leave its `with` block first, or make another Probe.")
        if self.is_outdated:
            raise MeasurementError(
                "the model has grown or shrunk since this probe was made. Call find_sites again, and make another Probe."
            )
        if self._shards and has_waiting(self._model):
            raise MeasurementError(
                "gradients of earlier passes wait to be summed over the processes, and would count as those of this probe. Open it before "
                "the first of these passes, or after optimizer.step()."
            )
        with ExitStack() as stack:  # what fails half-way leaves no hook either
            stack.enter_context(self._catch.hooked())
            stack.callback(self._catch.forget_pass)
            for weight in self._catch.weights:
                if weight.parameter.requires_grad:  # it may have been frozen since
                    stack.callback(weight.watch(self._taker(weight), drop=False).remove)
            if self._shards:
                stack.callback(self._model.register_forward_hook(self._watch_output).remove)
            self._open = stack.pop_all()
        return self

    @property
    def is_outdated(self) -> bool:
        """Whether the model has grown or shrunk since the probe was made."""
        return self._shapes != self._shapes_now()

    def _shapes_now(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._model.named_parameters()}

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._open = self._open, None
        if stack is not None:
            stack.__exit__(kind, value, trace)

    def _taker(self, weight: WeightCatch) -> Callable[[Tensor], bool]:
        def take(gradient: Tensor) -> bool:
            if isinstance(weight, ShardCatch):
                weight.replace_gradient(self._catch.unscaled(gradient))
            elif self._catch.counts():
                # A copy: the tensor becomes the user's .grad, which the next backward pass or step may overwrite.
                weight.add_gradient(self._catch.unscaled(gradient.clone()), 0)
            return True

        return take

    def _watch_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Have sharded weights know what their gradients are before a backward pass adds to them."""
        for tensor in tensors(output) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(self._begin_pass)

    def _begin_pass(self, *_: Any) -> None:
        for weight in self._shards:
            weight.begin_pass()

    def _end_pass(self) -> None:
        for weight in self._shards:
            weight.end_pass()

    @without_autocast()
    def merits(self) -> Merits:
        """The merits of all backward passes since the probe was made; with several processes, all of them must call this.

        Returns:
            The merits in the order of the sites.

        Raises:
            MeasurementError: If no backward pass of the model was seen, or the loss depends on a gradient that the step takes itself.
        """
        with self._together as together:
            if self._catch.caught == 0:
                raise MeasurementError(
                    "the probe saw no backward pass. Call loss.backward() inside `with Probe(...)`, on the output of the model "
                    "it was made for."
                )
            self._catch.check_order()
            self._end_pass()
            if self._shards and not any(weight.sums for weight in self._shards):
                raise MeasurementError(
                    "no gradient of a sharded weight was seen, so there is no ratio. Call loss.backward() inside `with Probe(...)`, or "
                    "give ratio=False."
                )
            passes = max(1, self._catch.caught // len(self._catch.sites))
            # As DistributedDataParallel does with the gradients: the mean over the processes.
            own = Caught(self._catch.sites, self._catch.weights, [1.0], 1.0, passes)
            caught = join_ranks(together, own, device_of(self._model))
        norm = self._affordable(together, self._norm, caught)
        return conclude(together, self._sites, caught, norm, check=self._check_scale)

    def _affordable(self, together: Together, norm: str, caught: Caught) -> str:
        ranks = 1 if together.group is None else dist.get_world_size(together.group)
        return affordable_norm(self._asked, norm, caught.sites, caught.weights, caught.count / ranks)

    def _check_scale(self, values: list[float]) -> None:
        if self._scaler is not None and not all(map(math.isfinite, values)):
            raise MeasurementError(
                f"the scaled gradients of the probed pass overflowed at the scale {self._scaler.get_scale():g}; the scaler skips such a "
                "step and lowers its scale. Probe the next step."
            )


# ---- The same over several steps of a training, between which the weights move.


class MeanProbe(Probe):
    """A probe of several steps, each in a context of its own: the merits are those of the mean gradient over them.

    Steps are weighted by their samples, as `measure` weights batches. One that raises, or whose scaled gradients overflowed, is left out.
    Rows of new units are made for the first batch, as in a measurement of eight batches or more.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site | Merit], *, norm: str = "auto") -> None:
        self._group_of = model
        super().__init__(model, sites, norm=norm)
        self._sums: list[dict[str, Sum]] = [{} for _ in (*self._catch.sites, *self._catch.weights)]
        self._unit = self._size = self._loss = 0.0
        self._step_sizes: list[float] = []
        self._samples, self._updates, self._depth = 0, 0, 0
        self._losses: list[float | Tensor] = []
        self.steps = 0  # that count
        self.spoilt = 0  # whose gradients were not finite

    def watch(self, scaler: torch.amp.GradScaler | None) -> None:
        """Say which scaler scales the loss of the next step."""
        self._scaler = scaler
        self._catch.scale = (lambda: 1.0) if scaler is None else scaler.get_scale

    def __enter__(self) -> MeanProbe:
        self._catch.begin_again()
        self._samples, self._updates, self._depth, self._losses = 0, 0, 0, []
        super().__enter__()
        assert self._open is not None
        hooks = (
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end, always_call=True),
        )
        for handle in hooks:
            self._open.callback(handle.remove)
        return self

    def _gauges(self, sites: Sequence[Site]) -> Sequence[Gauge] | None:
        return late_gauges(sites, self._model)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._depth == 0 and torch.is_grad_enabled():
            if any(gauge.has_seen for _, gauge in self._unsettled):
                self.settle()  # gradients are accumulated: this is another batch of the same step
            self._samples += samples_of((args, kwargs))
        self._depth += 1

    @property
    def _unsettled(self) -> list[tuple[SiteCatch, LateGauge]]:
        found = [(each, each.gauge) for each in self._catch.sites if isinstance(each.gauge, LateGauge)]
        return [(each, gauge) for each, gauge in found if not gauge.is_settled]

    def settle(self) -> None:
        """Choose what new units are by the first backward pass, that of the first process on all of them; before any weight moves."""
        late = self._unsettled
        if not late:
            return
        seen = any(gauge.has_seen for _, gauge in late)
        with Together(self._group_of, "watch the first step") as together, torch.no_grad(), without_autocast():
            found = [gauge.found() for _, gauge in late] if seen else None
            shared = of_the_first(together, found, device_of(self._model))
        if shared is None:
            return
        with torch.no_grad():
            for (each, _), added in zip(late, settle([gauge for _, gauge in late], shared), strict=True):
                for sums in added:
                    each.add(sums, 0)

    def _end(self, *_: Any) -> None:
        self._depth -= 1

    def count_update(self) -> None:
        """An optimizer has made a step."""
        self._updates += 1

    def add_loss(self, loss: float | Tensor) -> None:
        """The loss of a batch of this step."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if kind is None and self._open is not None:
                    self.settle()
            finally:
                super().__exit__(kind, value, trace)
            if kind is None and self._catch.caught:
                self._keep()
        finally:
            self._catch.begin_again()

    def _keep(self) -> None:
        """Add what this step has caught to what the steps before it have."""
        self._end_pass()
        caught = [*self._catch.sites, *self._catch.weights]
        parts = [{name: total} for each in caught for name, total in each.totals().items()]
        if self._scaler is not None and not all(
            bool(total.isfinite().all()) for part in parts for total in part.values()
        ):
            self.spoilt += 1  # the scaler skips such a step, and so do the merits
            return
        size, updates = float(self._samples or 1), max(1, self._updates)
        self._unit = self._unit or size
        factor = size / self._unit / updates
        for held, each in zip(self._sums, caught, strict=True):
            for name, total in each.totals().items():
                scale = factor ** power_of(name)
                held.setdefault(name, Sum()).add(total if scale == 1.0 else total * scale, 0)
        self._size += size / self._unit
        self._step_sizes.append(size)
        self.steps += updates
        mean = sum(map(float, self._losses)) / len(self._losses) if self._losses else math.nan
        self._loss += mean * size / self._unit

    def merits_of(self, sites: Sequence[Site]) -> Merits:
        """The merits of some of the sites; with several processes, all of them must call this.

        Args:
            sites: Those of the sites that are in question.

        Returns:
            Their merits, in this order.

        Raises:
            MeasurementError: If no step counts.
        """
        with self._together as together, without_autocast():
            self._catch.check_order()
            if not any(together.agree(self.steps, last=False)):
                raise MeasurementError(self._why_none())
            if self._shards and len(set(map(tuple, together.agree(self._step_sizes, last=False)))) > 1:
                raise MeasurementError(
                    "the batches of the watched steps differ in size from process to process. FSDP2 sums gradients whatever their batches "
                    "are, so there is no ratio. Give grower.step(batches, loss_fn) instead."
                )
            kept = [copy(each) for each in (*self._catch.sites, *self._catch.weights)]
            for each, sums in zip(kept, self._sums, strict=True):
                each.sums = dict(sums)
            number = len(self._catch.sites)
            by_site = {id(site): each for site, each in zip(self._sites, kept[:number], strict=True)}
            chosen: list[Any] = [by_site[id(site)] for site in sites]
            weights: list[Any] = kept[number:]
            own = Caught(chosen, weights, [self._size], self._unit, self.steps, self._loss)
            caught = join_ranks(together, own, device_of(self._model), last=False)
            norm = self._affordable(together, choose_norm(self._asked, [site.kind for site in sites]), caught)
            size = sum(caught.filled)
            loss = caught.loss / size if math.isfinite(caught.loss) else None
            return conclude(together, sites, caught, norm, samples=round(size * caught.unit), loss=loss)

    def _why_none(self) -> str:
        if self.spoilt:
            return (
                "the scaled gradients of all watched steps overflowed; the scaler skips such a step and lowers its scale. Watch more "
                "steps."
            )
        return (
            "no backward pass was seen in the watched steps. Call loss.backward() inside `with grower.watch()`, on the output of the model "
            "that the Grower was made for."
        )
