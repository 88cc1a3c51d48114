"""How a weight acts on what it is given: what the operator norms need to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """How a weight acts: as a matrix, or as a convolution on a feature map.

    Attributes:
        size: The spatial size of the convolution's input, 1 to 3 numbers; empty for a matrix.
        stride: The stride for each axis; empty for 1 everywhere.
        dilation: The dilation for each axis; empty for 1 everywhere.
        groups: The number of groups.
        transposed: Whether the weight is that of a transposed convolution (c_in x c_out/groups x k...).
    """

    size: tuple[int, ...] = ()  # spatial size of the convolution's input; 1, 2 or 3 entries
    stride: tuple[int, ...] = ()  # empty: 1 everywhere
    dilation: tuple[int, ...] = ()  # empty: 1 everywhere
    groups: int = 1
    transposed: bool = False  # the weight is c_in x c_out/groups x k..., as that of a ConvTranspose
