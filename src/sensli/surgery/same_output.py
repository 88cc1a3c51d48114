"""The output of a model must not move when a layer goes in: compared on a batch of the user's, with the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import BadExample, FunctionChanged
from sensli.modules import random_state
from sensli.modules.dropout import NoDropout
from sensli.modules.failing import let_memory_through
from sensli.modules.nearness import moved
from sensli.modules.running import describe, device_of, run, taken_by, tensors, to_device, undrawn, untouched
from sensli.moves.sites import Site


def given_of(batch: Any) -> Any:
    """What of the user's batch the model is called with: of a pair the first part."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


@dataclass(frozen=True)
class Run:
    """One run of a model: what came out, and where the random numbers ended."""

    tensors: list[Tensor]
    drawn: dict[str, Any]


@dataclass(frozen=True)
class Outputs:
    """What a model gives for a batch before a layer goes in, in the mode it is in."""

    given: Any
    plain: Run
    without_dropout: Run | None  # where random numbers were drawn

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> Outputs:
        given = given_of(batch)
        given = (
            taken_by(model, given) if isinstance(given, dict) else given
        )  # as in `measure`: the others are for the loss
        start = random_state.capture()
        try:
            plain = _run(model, given)
            random = not random_state.same(plain.drawn, start)
            return cls(given, plain, _run(model, given, dropout=False) if random else None)
        except Exception as error:
            let_memory_through(error)
            raise BadExample(
                f"check does not run through {type(model).__name__}: {type(error).__name__}: {error}. It must be an input, an (input, "
                f"target) pair or a dict of keyword arguments, and the model was called with {describe(given)}. For several arguments give "
                "check=((x, mask), None)."
            ) from error

    def check(self, model: nn.Module, layers: Sequence[nn.Module], site: Site) -> None:
        """Raise `FunctionChanged` if the model, with the new layers in it, gives something else."""
        allowed = site.move.tolerance
        try:
            now = _run(model, self.given, layers)
            distance = _moved(self.plain, now, allowed)
            # A model that draws in a loop over its blocks (LayerDrop) draws once more now, and every later mask is another one. Only where
            # the numbers drawn were the same is a difference the layer's doing.
            other_masks = not random_state.same(self.plain.drawn, now.drawn)
            if distance and other_masks and self.without_dropout is not None:
                distance = _moved(self.without_dropout, _run(model, self.given, layers, dropout=False), allowed)
        except Exception as error:
            let_memory_through(error)
            raise FunctionChanged(
                f"after inserting {site} the model fails on check ({type(error).__name__}: {error}), so everything was put back. "
                "Choose another site."
            ) from error
        if distance:
            noise = (
                " Or it draws different random numbers with one more layer: call model.eval() before insert to avoid them."
                if other_masks
                else ""
            )
            raise FunctionChanged(
                f"inserting {site} changed the output by {distance:.1e} relative to its size, so everything was put back. The place is not "
                f"what find_sites saw (another input, another branch), or the arithmetic is not exact there; choose another site.{noise}"
            )


def _run(model: nn.Module, given: Any, layers: Sequence[nn.Module] = (), *, dropout: bool = True) -> Run:
    """Run the model; what the new layers draw is drawn aside, so that everything else draws what it drew without them."""
    mode = nullcontext() if dropout else NoDropout()
    handles = [handle for layer in layers for handle in undrawn(layer)]
    try:
        with untouched(model), torch.no_grad(), mode:
            output = run(model, to_device(given, device_of(model)))
            return Run([t.detach().clone() for t in tensors(output)], random_state.capture())
    finally:
        for handle in handles:
            handle.remove()


def _moved(before: Run, after: Run, allowed: float | None) -> float:
    """By how much the outputs differ, relative to their size; 0 within what is allowed: rounding, in double precision not even that."""
    if [t.shape for t in before.tensors] != [t.shape for t in after.tensors]:
        return float("inf")
    exact = (torch.float64, torch.complex128) if allowed is None else ()
    pairs = zip(before.tensors, after.tensors, strict=True)
    distance = max((moved(old, new, exact=old.dtype in exact) for old, new in pairs), default=0.0)
    return distance if distance > (allowed or 0.0) else 0.0
