"""The module that a site's layer becomes: type, device, memory layout and mode of what stands around its place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sensli.errors import UnsupportedModel
from sensli.moves.sites import Site


def build_layer(
    model: nn.Module,
    site: Site,
    anchor: nn.Module,
    neighbours: list[nn.Module],
    *,
    source: nn.Module,
    outside: nn.Module,
) -> nn.Module:
    """The layer, ready to go in. A twin is a copy of ``source`` (the anchor, readable) in the model ``outside``."""
    like = _example_parameter(model, [*neighbours, anchor])
    if like is not None and like.is_meta:
        raise UnsupportedModel(
            f"{type(model).__name__} is on the meta device: it has shapes but no values, so an identity layer would have none either. "
            "Load the weights first, then insert."
        )
    if site.layer.twin is not None:
        return site.layer.build(source=source, outside=outside)  # a copy has all of that already
    layer = site.layer.build(
        dtype=like.dtype if like is not None else None, device=like.device if like is not None else None
    )
    layer.train(anchor.training)
    weights = [p for module in neighbours for p in module.parameters(recurse=False) if p.ndim in (4, 5)]
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if any(w.ndim == dims and w.is_contiguous(memory_format=layout) and not w.is_contiguous() for w in weights):
            layer.to(memory_format=layout)  # type: ignore[call-overload]
    return layer


def _example_parameter(model: nn.Module, nearby: list[nn.Module]) -> Tensor | None:
    """A floating-point parameter whose type and device the new ones take."""
    for module in (*nearby, model):
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter
    return None
