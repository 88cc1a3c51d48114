"""A model of the table of architectures, ready to be compared: nothing in it is an identity by accident."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import GENERATORS, HANDWRITTEN, TRANSFORMERS
from sensli.modules.running import run, tensors

TABLE = {**HANDWRITTEN, **TRANSFORMERS}


def marked(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test; those of a library carry its mark."""
    return [pytest.param(name, marks=[pytest.mark.library] * (name not in HANDWRITTEN), id=name) for name in names]


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """The model with all constants moved (nothing may be an identity by accident of its initialisation), and its batch."""
    if name not in HANDWRITTEN:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = {**TABLE, **GENERATORS}[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.add_(0.3 * torch.randn_like(buffer))
            if key.endswith("running_var"):
                buffer.mul_(1 + torch.rand_like(buffer))
    return model.to(dtype), _cast(batch, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    return tuple(_cast(part, dtype) for part in value)


def example_of(batch: Any) -> Any:
    return batch if isinstance(batch, dict) else batch[0]


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        output = run(model, example_of(batch))
    value = (output.logits, output.loss) if isinstance(batch, dict) else output
    return list(tensors(value))


def assert_same(before: list[Tensor], after: list[Tensor], tolerance: float) -> None:
    for old, new in zip(before, after, strict=True):
        size = old.abs().max().clamp(min=1e-30)
        assert ((new - old).abs().max() / size).item() <= tolerance
