"""The output of a model must not move when a layer goes in: compared on a batch of the user's, with the same random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sensli import random_state
from sensli.errors import BadExample, FunctionChanged
from sensli.running import describe, device_of, run, tensors, to_device, untouched
from sensli.sites import Site


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
        given = _input(batch)
        start = random_state.capture()
        try:
            plain = _run(model, given)
            random = not random_state.same(plain.drawn, start)
            return cls(given, plain, _run(model, given, dropout=False) if random else None)
        except Exception as error:
            raise BadExample(
                f"check does not run through {type(model).__name__}: {type(error).__name__}: {error}. It must be an input, an (input, "
                f"target) pair or a dict of keyword arguments, and the model was called with {describe(given)}. For several arguments give "
                "check=((x, mask), None)."
            ) from error

    def check(self, model: nn.Module, layer: nn.Module, site: Site) -> None:
        """Raise `FunctionChanged` if the model, with the new layer in it, gives something else."""
        try:
            now = _run(model, self.given, layer)
            moved = _moved(self.plain, now)
            # A model that draws in a loop over its blocks (LayerDrop) draws once more now, and every mask behind is another one. Only where
            # the numbers drawn were the same is a difference the layer's doing.
            other_masks = not random_state.same(self.plain.drawn, now.drawn)
            if moved and other_masks and self.without_dropout is not None:
                moved = _moved(self.without_dropout, _run(model, self.given, layer, dropout=False))
        except Exception as error:
            raise FunctionChanged(
                f"after inserting {site} the model fails on check ({type(error).__name__}: {error}), so nothing was kept. "
                "Choose another site."
            ) from error
        if moved:
            noise = (
                " Or it draws other random numbers with one more layer: model.eval() before insert leaves them out."
                if other_masks
                else ""
            )
            raise FunctionChanged(
                f"inserting {site} moved the output by {moved:.1e} relative to its size, so nothing was kept. The place is not what "
                f"find_sites saw (another input, another branch), or the arithmetic is not exact there; choose another site.{noise}"
            )


def _input(batch: Any) -> Any:
    if not isinstance(batch, (tuple, list)):
        return batch
    if len(batch) not in (1, 2):
        raise ValueError(
            f"check must be an input, an (input, target) pair or a dict of keyword arguments, got {len(batch)} parts. For several "
            "arguments give check=((x, mask), None)."
        )
    return batch[0]


def _run(model: nn.Module, given: Any, layer: nn.Module | None = None, *, dropout: bool = True) -> Run:
    """Run the model; what the new layer draws is drawn aside, so that everything else draws what it drew without it."""
    mode = nullcontext() if dropout else _NoDropout()
    with untouched(model), torch.no_grad(), _drawing_aside(layer), mode:
        output = run(model, to_device(given, device_of(model)))
        return Run([t.detach().clone() for t in tensors(output)], random_state.capture())


@contextmanager
def _drawing_aside(layer: nn.Module | None) -> Iterator[None]:
    if layer is None:
        yield
        return
    states: list[dict[str, Any]] = []
    before = layer.register_forward_pre_hook(lambda *_: states.append(random_state.capture()))
    after = layer.register_forward_hook(lambda *_: random_state.restore(states.pop()))
    try:
        yield
    finally:
        before.remove()
        after.remove()


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.multi_head_attention_forward,
}  # fmt: skip


class _NoDropout(TorchFunctionMode):
    """Dropout as in eval mode, and everything else as it is; also where it is called as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        if func is F.scaled_dot_product_attention:  # query, key, value, mask, dropout_p
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _moved(before: Run, after: Run) -> float:
    """By how much the outputs differ, relative to their size; 0 within rounding."""
    if [t.shape for t in before.tensors] != [t.shape for t in after.tensors]:
        return float("inf")
    moved = 0.0
    for old, new in zip(before.tensors, after.tensors, strict=True):
        exact = old.dtype in (torch.float64, torch.complex128) or not (old.is_floating_point() or old.is_complex())
        same = (old == new) | ((old != old) & (new != new))  # infinite or not a number before and after is no change
        if same.all():
            continue
        wide = torch.complex128 if old.is_complex() else torch.float64
        difference = (new.to(wide) - old.to(wide))[~same].abs().max().item()
        size = torch.nan_to_num(old.to(wide).abs(), nan=0.0, posinf=0.0).max().item()
        relative = difference / max(size, 1e-30)
        if not relative <= (0.0 if exact else 100 * torch.finfo(old.dtype).eps):
            moved = relative if relative != relative else max(moved, relative)
    return moved
