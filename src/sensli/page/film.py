"""Pictures of a small network while it learns on the plane: where it decides, and what its weights are."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SIDE = 52  # pixels of a picture in each direction; the page smooths it
EXTENT = 1.75  # of the plane shown, from -EXTENT to EXTENT


class Film:
    """Takes one picture per call of `take`; a byte per pixel and a few digits per weight, so that many fit into a page."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[int] = []
        self._pictures: list[str] = []
        self._weights: list[list[dict[str, Any]]] = []
        ticks = torch.linspace(-EXTENT, EXTENT, SIDE, device="cpu")
        rows, columns = torch.meshgrid(ticks.flip(0), ticks, indexing="ij")  # the first row of a picture is its top
        self._grid = torch.stack([columns, rows], dim=-1).view(-1, 2)

    @torch.no_grad()
    def take(self, call: int, model: nn.Module) -> None:
        """Keep the probability of class 1 over the plane, and the weights of all linear layers."""
        share = model(self._grid).softmax(dim=1)[:, 1]
        pixels = (share.clamp(0, 1) * 255).round().to(torch.uint8)
        self.calls.append(call)
        self._pictures.append(base64.b64encode(bytes(pixels.tolist())).decode())
        self._weights.append([{"path": path, "weight": _digits(weight)} for path, weight in _weights(model)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "side": SIDE,
            "extent": EXTENT,
            "calls": self.calls,
            "pictures": self._pictures,
            "weights": self._weights,
        }


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path, module.weight


def _digits(weight: Tensor) -> list[list[float]]:
    return [[round(value, 2) for value in row] for row in weight.tolist()]
