"""Widths made by hand, for what follows a growth: two linear maps with units between them, as a site."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sensli.moves.point import Point, Ref
from sensli.moves.sites import Site
from sensli.moves.width.width import Axis, Entries, Size, Width


def width_site(
    model: nn.Module,
    maker: str,
    reader: str,
    more: int,
    *,
    norm: str | None = None,
    rows: tuple[Tensor, ...] | None = None,
    start: str = "sensitive",
) -> Site:
    """More units in one map, read by another; ``norm`` stands between them. Without ``rows`` they are drawn."""
    first, last = model.get_submodule(maker), model.get_submodule(reader)
    one, two = Ref.to(maker, first), Ref.to(reader, last)
    convolution = isinstance(first, nn.Conv2d)
    units = first.weight.shape[0]
    axes = [Axis(one, "weight", 0, "row"), Axis(one, "bias", 0, "row"), Axis(two, "weight", 1, "column")]
    sizes = [
        Size(one, "out_channels" if convolution else "out_features"),
        Size(two, "in_channels" if convolution else "in_features"),
    ]
    if norm is not None:
        between = Ref.to(norm, model.get_submodule(norm))
        fills = {"weight": "one", "bias": "zero", "running_mean": "zero", "running_var": "one"}
        axes += [Axis(between, name, 0, fill) for name, fill in fills.items()]
        sizes.append(Size(between, "num_features"))
    added = more * (first.weight[0].numel() + 1 + last.weight[:, 0].numel())
    entries = None if rows is None else Entries((*rows, *[None] * (len(axes) - len(rows))))
    move = Width(
        units, more, type(first).__name__, tuple(axes), tuple(sizes), (reader,), added, start=start, _entries=entries
    )
    return Site(Point(one, "after", (units,)), move)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers in double precision that do not touch the global state."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
