"""Arithmetic on a GPU that rounds more than the type of its numbers says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sensli.modules.running import device_of


def tf32_note(device: torch.device | None, convolutions: bool, products: bool) -> str | None:
    """What to say of a model on this device where TF32 is on for its convolutions, or for its matrix products."""
    found = [what for what, on in (("convolutions", convolutions), ("matrix products", products)) if on]
    if device is None or device.type != "cuda" or not found:
        return None
    return (
        f"TF32 is on for {' and '.join(found)}, so identities are not exact on {device}: other layers may be offered than on a CPU. To "
        "avoid it, set torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32 to False"
    )


def tf32_note_of(model: nn.Module) -> str | None:
    """The same for a model with the flags as they are; None where it has nothing in single precision that TF32 would change."""
    device = device_of(model)
    if device is None or device.type != "cuda" or not torch.cuda.is_tf32_supported():
        return None
    shapes = {p.dim() for p in model.parameters() if p.dtype == torch.float32}
    backends = torch.backends
    return tf32_note(
        device,
        max(shapes, default=0) > 2
        and _flag(lambda: backends.cudnn.allow_tf32, lambda: backends.cudnn.conv.fp32_precision),  # type: ignore[attr-defined]
        2 in shapes and _flag(lambda: backends.cuda.matmul.allow_tf32, lambda: backends.cuda.matmul.fp32_precision),
    )


def _flag(old: Callable[[], bool], new: Callable[[], str]) -> bool:
    try:
        return old()
    except RuntimeError:  # somebody has set the newer flags, and the older one no longer says it
        return new() == "tf32"
