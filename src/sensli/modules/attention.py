"""torch's `nn.MultiheadAttention` with more heads than its size divides into.

torch takes the size of a head from ``embed_dim // num_heads``, so it cannot run a module that has got another head of the same size. Such
a module, the same object with the same parameters, becomes a `WideAttention`, which computes the same from the size of a head. With as
many heads as at first it is torch's own class again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WideAttention(nn.MultiheadAttention):
    """As `nn.MultiheadAttention`, whatever ``num_heads * head_dim`` is; called in the same way, with the same names of parameters."""

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether torch's fused kernels may read the weights, instead of calling this module: they expect other shapes."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As that of `nn.MultiheadAttention`; ``is_causal`` is a hint there, and the mask that it needs says it all."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        if query.is_nested:
            return self._of_nested(query), None
        batched = query.dim() == 3
        q, k, v = self._heads(*(self._turned(x, batched) for x in (query, key, value)))
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        return self.project(self._turned(mixed.transpose(1, 2).flatten(2), batched, back=True)), weights

    def project(self, heads: Tensor) -> Tensor:
        """What the module returns, from what its heads give."""
        return F.linear(heads, self.out_proj.weight, self.out_proj.bias)

    def _turned(self, x: Tensor, batched: bool, *, back: bool = False) -> Tensor:
        """As [batch, positions, entries], or back to the order of the module."""
        if not batched:
            return x.squeeze(0) if back else x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, *given: Tensor) -> list[Tensor]:
        """Queries, keys and values as [batch, heads, positions, entries of a head]."""
        fused: Any = self.in_proj_weight
        maps = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if fused is None else fused.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        found: list[Tensor] = []
        for x, weight, bias, more in zip(given, maps, biases, (None, self.bias_k, self.bias_v), strict=True):
            made = F.linear(x, weight, bias)
            if more is not None:
                made = torch.cat([made, more.expand(len(made), 1, -1)], dim=1)
            if self.add_zero_attn and found:
                made = F.pad(made, (0, 0, 0, 1))
            found.append(made.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2))
        return found

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Both masks as one that is added; the positions that the module appends are never masked."""
        batch, heads, _, _ = q.shape
        parts = []
        if mask is not None:
            parts.append(mask if mask.dim() == 2 else mask.unflatten(0, (batch, heads)))
        if padding is not None:
            parts.append(padding.reshape(batch, 1, 1, -1))
        total: Tensor | None = None
        for part in parts:
            added = (
                torch.zeros_like(part, dtype=q.dtype).masked_fill(part, -torch.inf)
                if part.dtype == torch.bool
                else part
            )
            total = added if total is None else total + added
        return None if total is None else F.pad(total, (0, k.shape[2] - total.shape[-1]))

    def _of_nested(self, x: Tensor) -> Tensor:
        """Self-attention of a nested tensor, into which torch's encoder may have turned a padded one."""
        lengths = torch.tensor([len(each) for each in x.unbind()], device=x.device)
        padded = x.to_padded_tensor(0.0)
        padding = torch.arange(padded.shape[1], device=x.device) >= lengths.unsqueeze(1)
        output = self(padded, padded, padded, key_padding_mask=padding, need_weights=False)[0]
        return torch.nested.as_nested_tensor(
            [each[:length] for each, length in zip(output, lengths.tolist(), strict=True)]
        )


def fit_class(module: Any) -> None:
    """Let an attention of torch be of the class that can run its heads; anything else stays as it is."""
    if type(module) in (nn.MultiheadAttention, WideAttention):
        plain = module.num_heads * module.head_dim == module.embed_dim
        module.__class__ = nn.MultiheadAttention if plain else WideAttention


def holder_of(model: nn.Module, path: str) -> tuple[str, nn.MultiheadAttention] | None:
    """The attention whose last map has this path, and its own path: torch reads the map without calling it."""
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent) if name == "out_proj" else None
    return (parent, module) if isinstance(module, nn.MultiheadAttention) else None
