"""What the natural merit of new units needs: moments of what a reader would read from them, and of what comes back to its output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sensli.moves.factors import Factored, Rows, Windows, of_channels, of_features, of_windows, sums_of
from sensli.moves.width.width import Axis


def moments(index: int, reader: nn.Module, read: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """Of one pass, for all candidates; their gradients are summed elsewhere."""
    inputs, outputs = _sides(reader, read.to(cotangent.dtype), cotangent)
    sums = sums_of(index, cotangent.new_empty(0), inputs, outputs, len(cotangent))
    return {name: value for name, value in sums.items() if not name.startswith("map")}


def _sides(reader: nn.Module, read: Tensor, cotangent: Tensor) -> tuple[Rows, Rows]:
    if not isinstance(reader, nn.modules.conv._ConvNd):
        return of_features(read), of_features(cotangent)
    none = (0,) * (read.dim() - 2)
    if isinstance(reader, nn.modules.conv._ConvTransposeNd):
        padding = [int(side) for side in reader.padding]
        windows = Windows(reader.kernel_size, reader.stride, padding, reader.dilation)
        return of_channels(read), of_windows(cotangent, windows, read.shape[2:])
    mode = "constant" if reader.padding_mode == "zeros" else reader.padding_mode
    windows = Windows(reader.kernel_size, reader.stride, none, reader.dilation)
    read = pad(read, reader._reversed_padding_repeated_twice, mode=mode)
    return of_windows(read, windows, cotangent.shape[2:]), of_channels(cotangent)


def chosen_part(sums: Mapping[str, Tensor], index: int, chosen: list[int], axis: Axis) -> Factored:
    """The gradient and the moments of the candidates that were chosen, for one reader."""
    columns, inputs, outputs, counts = (sums[f"{name}{index}"] for name in ("columns", "inputs", "outputs", "counts"))
    per_unit, rows = axis.outer * axis.inner, outputs.shape[-1]
    taps = inputs.shape[-1] // (len(columns) * per_unit)
    # along the reader's axis: [outer, candidates, inner], and its taps for each entry
    places = torch.arange(inputs.shape[-1], device=inputs.device).view(axis.outer, len(columns), axis.inner * taps)
    kept = places[:, chosen].transpose(0, 1).flatten()
    gradient = columns[chosen].view(len(chosen) * per_unit, rows, taps).transpose(0, 1).reshape(1, rows, -1)
    return Factored(gradient, inputs[:, kept][:, :, kept], outputs, counts)
