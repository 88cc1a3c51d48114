"""`Probe`: the merits from the user's own training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sensli.errors import MeasurementError, WrongType
from sensli.merits.catching import Catch
from sensli.merits.measuring import Caught, affordable, conclude, join_ranks
from sensli.merits.merits import Merit, Merits, as_sites
from sensli.merits.norms import NATURAL, choose
from sensli.modules import checks
from sensli.modules.engines.distributed import Together, numbered
from sensli.modules.running import device_of, without_autocast
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site


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
        if scaler is not None and (isinstance(scaler, type) or not hasattr(scaler, "get_scale")):
            checks.refuse("scaler", "a torch.amp.GradScaler", scaler, WrongType)
        if not sites:
            raise MeasurementError(
                "there are no sites to probe. find_sites(...).explain() says which places were skipped and why."
            )
        self._asked, self._norm = norm, choose(norm, [site.kind for site in sites])
        sharded = self._together.sharded
        if sharded and any(site.move.kind == "block" for site in sites):
            raise MeasurementError(
                "a probe cannot run the twin of a sharded block, whose parameters are whole only during its own pass. Use measure(...), "
                "which works on an unsharded copy."
            )
        if sharded and ratio:
            raise MeasurementError(
                "a probe cannot see the gradients of sharded weights, so there is no ratio. Give ratio=False, or use "
                "measure(...)."
            )
        if sharded:  # gathers weights near the sites, for which all ranks are needed
            with Together(model, "probe") as together:
                together.agree_on(numbered("site", sites))
        self._sites = sites
        self._catch = Catch(self._model, sites, weights=ratio, natural=self._norm == NATURAL)
        self._shapes = self._shapes_now()
        self._open: ExitStack | None = None
        self._scaler = scaler
        if scaler is not None:
            self._catch.scale = scaler.get_scale

    def __enter__(self) -> Probe:
        if self._open is not None:
            raise MeasurementError("this probe is open already. Leave its `with` block first, or make another Probe.")
        if self._shapes != self._shapes_now():
            raise MeasurementError(
                "the model has grown or shrunk since this probe was made. Call find_sites again, and make another Probe."
            )
        with ExitStack() as stack:  # what fails half-way leaves no hook either
            stack.enter_context(self._catch.hooked())
            stack.callback(self._catch.forget_pass)
            for index, weight in enumerate(self._catch.weights):
                if weight.parameter.requires_grad:  # it may have been frozen since
                    stack.callback(weight.parameter.register_hook(self._arrived(index)).remove)
            self._open = stack.pop_all()
        return self

    def _shapes_now(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._model.named_parameters()}

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._open = self._open, None
        if stack is not None:
            stack.__exit__(kind, value, trace)

    def _arrived(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            # A copy: the tensor becomes the user's .grad, which the next backward pass or step may overwrite.
            if self._catch.counts():
                self._catch.weights[index].add_gradient(self._catch.unscaled(gradient.clone()), 0)

        return hook

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
            passes = max(1, self._catch.caught // len(self._catch.sites))
            # As DistributedDataParallel does with the gradients: the mean over the processes.
            own = Caught(self._catch.sites, self._catch.weights, [1.0], 1.0, passes)
            caught = join_ranks(together, own, device_of(self._model))
        ranks = 1 if together.group is None else dist.get_world_size(together.group)
        norm = affordable(self._asked, self._norm, caught.sites, caught.weights, caught.count / ranks)
        return conclude(together, self._sites, caught, norm, check=self._check_scale)

    def _check_scale(self, values: list[float]) -> None:
        if self._scaler is not None and not all(map(math.isfinite, values)):
            raise MeasurementError(
                f"the scaled gradients of the probed pass overflowed at the scale {self._scaler.get_scale():g}; the scaler skips such a "
                "step and lowers its scale. Probe the next step."
            )
