"""The output of a model must not move when a layer goes in: compared on a batch of the user's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import FunctionChanged
from sensli.running import device_of, run, tensors, to_device, untouched
from sensli.sites import Site


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The model's output tensors on a batch, in the mode the model is in."""
    given = batch[0] if isinstance(batch, (tuple, list)) else batch
    with untouched(model), torch.no_grad():
        return [t.detach().clone() for t in tensors(run(model, to_device(given, device_of(model))))]


def check_same(site: Site, before: list[Tensor], after: list[Tensor]) -> None:
    for old, new in zip(before, after, strict=True):
        exact = old.dtype in (torch.float64, torch.complex128) or not (old.is_floating_point() or old.is_complex())
        same = (old == new) | ((old != old) & (new != new))  # infinite or not a number before and after is no change
        if same.all():
            continue
        wide = torch.complex128 if old.is_complex() else torch.float64
        difference = (new.to(wide) - old.to(wide))[~same].abs().max().item()
        size = torch.nan_to_num(old.to(wide).abs(), nan=0.0, posinf=0.0).max().item()
        moved = difference / max(size, 1e-30)
        tolerance = 0.0 if exact else 100 * torch.finfo(old.dtype).eps
        if not moved <= tolerance:
            raise FunctionChanged(
                f"inserting {site} moved the output by {moved:.1e} relative to its size, so nothing was kept. The place is not what "
                "find_sites saw (another input, another branch), or the arithmetic is not exact there; choose another site."
            )
