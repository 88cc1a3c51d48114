"""What stands for a new layer in a trial: it does what the layer does as long as it is an identity, at hardly any cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sensli.modules.arguments import value_at
from sensli.modules.nearness import equal
from sensli.moves.sites import Site


def is_null(site: Site) -> bool:
    """Whether the layer gives zero instead of its input: a twin for a loop that adds what its blocks give."""
    return site.layer.twin is not None and site.layer.twin.null


class StandIn(nn.Module):
    """What a new layer does as long as it is an identity, at hardly any cost; on a small piece of the values the layer itself shows it."""

    def __init__(self, site: Site, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._relu, self._conv = site.layer.form == "relu", site.layer.kind == "conv"
        self._leading = site.layer.leading
        self._piece = tuple(slice(0, k + 1) for k in site.layer.kernel)

    def forward(self, x: Tensor) -> Tensor:
        where = (slice(0, 2), slice(None), *self._piece) if self._conv else (slice(0, 2),) * (x.dim() - 1)
        piece = x[where]
        with torch.no_grad():
            shown = self.layer(piece.detach())
        wanted = piece.relu() if self._leading else piece
        result = x.relu() if self._relu else x.clone()
        return result if equal(shown, wanted.detach()) else torch.full_like(result, torch.nan)


class TwinStandIn(nn.Module):
    """The same for a twin: it takes what the block takes."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = value_at(args, kwargs, self._site.slot)
        return value * 0 if is_null(self._site) else value.clone()
