"""Random rows with the spread of those that are there. Their columns are zero, so the function does not depend on the choice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sensli.modules.engines.fsdp import whole
from sensli.moves.move import Gauge
from sensli.moves.width.entries import Entries
from sensli.moves.width.gauge import ColumnGauge
from sensli.moves.width.starts.start import Start
from sensli.moves.width.width import Axis, Width


class Random(Start):
    """Rows are drawn, measured or not."""

    def entries(self, width: Width) -> Entries:
        return drawn_rows(width, torch.Generator().manual_seed(width.units))

    def gauge(self, width: Width, model: nn.Module) -> Gauge:
        return ColumnGauge(width, lambda: self.entries(width))


def drawn_rows(width: Width, generator: torch.Generator) -> Entries:
    """Random rows for the units that would come."""
    return Entries(tuple(_drawn(axis, width.more, generator) if axis.fill == "row" else None for axis in width.axes))


def _drawn(axis: Axis, units: int, generator: torch.Generator) -> Tensor:
    """Entries for so many units: matrices drawn with the spread of the old ones, biases zero."""
    tensor = whole(getattr(axis.module.find_module(), axis.name))
    shape = list(tensor.shape)
    shape[axis.dim] = axis.outer * units * axis.inner
    if tensor.dim() < 2:
        return tensor.new_zeros(shape)
    # In single precision, which is drawn several times as fast.
    return torch.randn(shape, generator=generator, device=generator.device).to(tensor) * tensor.std(correction=0)
