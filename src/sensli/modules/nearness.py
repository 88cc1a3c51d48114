"""How far a tensor moved: to the bit, where not a number equals not a number, and beyond what kernels round differently."""

from __future__ import annotations

import torch
from torch import Tensor

from sensli.modules.running import capable

_HALF = (torch.float16, torch.bfloat16)


def equal(one: Tensor, other: Tensor) -> bool:
    """To the bit, where nan equals nan."""
    if one.shape != other.shape:
        return False
    return bool(torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all())


def moved(old: Tensor, new: Tensor, *, exact: bool = False) -> float:
    """The largest change relative to the largest value; 0 within rounding, or with ``exact`` in double precision to the bit."""
    if equal(old, new):
        return 0.0
    if not (old.is_floating_point() or old.is_complex()):
        return float("inf")
    old, new = capable(old), capable(new)
    same = (old == new) | ((old != old) & (new != new))  # infinite or not a number before and after is not a change
    wide = torch.complex128 if old.is_complex() else torch.float64
    difference = torch.nan_to_num((new.to(wide) - old.to(wide))[~same].abs(), nan=float("inf")).max().item()
    size = torch.nan_to_num(old.to(wide).abs(), nan=0.0, posinf=0.0).max().item()
    found = difference / max(size, 1e-30)
    return 0.0 if found <= (0.0 if exact else rounding(old.dtype)) else found


def rounding(dtype: torch.dtype) -> float:
    """What two runs of one function may differ by where memory lies otherwise. Half precision is coarse enough as it is."""
    return (2 if dtype in _HALF else 100) * torch.finfo(dtype).eps
