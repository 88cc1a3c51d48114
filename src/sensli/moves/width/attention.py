"""Heads of torch's `nn.MultiheadAttention`, whose weights are known by their names: one call holds all of them, so no mark shows them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from sensli.modules.attention import WideAttention
from sensli.moves.point import Ref
from sensli.moves.width.width import Axis, Size

# What makes heads, its axis, and how many maps lie one after the other along it.
_MAKES = (
    ("in_proj_weight", 0, 3), ("q_proj_weight", 0, 1), ("k_proj_weight", 0, 1), ("v_proj_weight", 0, 1), ("in_proj_bias", 0, 3),
    ("bias_k", 2, 1), ("bias_v", 2, 1),
)  # fmt: skip


def why_not(module: nn.MultiheadAttention) -> str:
    """Why an attention gets no more heads; empty if it may."""
    if is_parametrized(module) or is_parametrized(module.out_proj):
        return "its weights come from a parametrization (weight_norm, spectral_norm, ...), which has their shape too"
    if type(module) not in (nn.MultiheadAttention, WideAttention):
        return f"is a {type(module).__name__}, not torch's own nn.MultiheadAttention, so its class cannot be exchanged"
    return ""


def axes_of(path: str, module: nn.MultiheadAttention) -> Iterator[Axis]:
    """The axes of an attention that hold its heads."""
    size, own = module.head_dim, Ref.to(path, module)
    for name, dim, maps in _MAKES:
        tensor = getattr(module, name, None)
        if tensor is not None:
            yield Axis(own, name, dim, "row", outer=maps, inner=size, length=int(tensor.shape[dim]))
    out = module.out_proj
    yield Axis(
        Ref.to(f"{path}.out_proj".removeprefix("."), out), "weight", 1, "column", inner=size, length=out.in_features
    )


def sizes_of(path: str, module: nn.MultiheadAttention) -> Iterator[Size]:
    """The attributes of an attention that count its heads; the size of what it takes and returns stays."""
    yield Size(Ref.to(path, module), "num_heads")
    yield Size(Ref.to(f"{path}.out_proj".removeprefix("."), module.out_proj), "in_features", module.head_dim)
