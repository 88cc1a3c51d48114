"""What a grown model holds of ours: modules that torch has none of, and the marks of its growths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli.modules.running import Slot, first_tensor, value_at, with_first, with_value
from sensli.modules.wrappers import own_modules

# ---- Which growths of a model a module bears: set by surgery, so that a grown model knows by itself what has grown, and
# in which order.

NEW = "sensli_growth"  # on a module that was not there before: the number of its growth
CHANGED = "sensli_changes"  # on a module that was: the numbers of the growths that changed it
RECORDS = "sensli_records"  # on either: the records of these growths, by number
ALL = (NEW, CHANGED, RECORDS)


def mark(module: nn.Module, number: int, *, new: bool) -> None:
    """The growth of this number made the module, or changed it."""
    # Into its own dict: a compiled module hands attributes on to the one inside.
    if new:
        module.__dict__[NEW] = number
    else:
        module.__dict__[CHANGED] = (*module.__dict__.get(CHANGED, ()), number)


def unmark(module: nn.Module, number: int) -> None:
    """The inverse of `mark` and `attach_record`."""
    _set(module, RECORDS, {key: value for key, value in module.__dict__.get(RECORDS, {}).items() if key != number})
    if module.__dict__.get(NEW) == number:
        del module.__dict__[NEW]
        return
    _set(module, CHANGED, tuple(each for each in module.__dict__.get(CHANGED, ()) if each != number))


def attach_record(module: nn.Module, number: int, record: Any) -> None:
    """The record of a growth that the module is marked with: what takes it back."""
    module.__dict__[RECORDS] = {**module.__dict__.get(RECORDS, {}), number: record}


def attached_record(module: nn.Module, number: int) -> Any:
    """What `attach_record` was given for this growth, or None."""
    return module.__dict__.get(RECORDS, {}).get(number)


def _set(module: nn.Module, name: str, value: Any) -> None:
    if value:
        module.__dict__[name] = value
    else:
        module.__dict__.pop(name, None)


def new_in(module: nn.Module) -> int | None:
    """The number of the growth that made this module, or None."""
    number: int | None = module.__dict__.get(NEW)
    return number


def grown_modules(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """All growths of a model: the number, and the path and the module that bear it. Averages in the model have the same once more."""
    for path, module in own_modules(model):
        number = new_in(module)
        if number is not None:
            yield number, path, module
        for changed in module.__dict__.get(CHANGED, ()):
            yield changed, path, module


def count_growths(model: nn.Module) -> int:
    """How often the model has grown: one growth may have made several modules."""
    return len({number for number, _, _ in grown_modules(model)})


# ---- A stand-in for a module whose container does not run its children itself.

_OWN = frozenset({"slot", "takes_call", "training", *ALL})  # of the chain itself; torch's own start with an underscore


class Chain(nn.Module):
    """Takes the place of a module and runs it, with the inserted layers before or after it; other attributes are the module's.

    A layer takes the value alone (the argument in ``slot``, or the output or its first part); a block takes the other arguments too.
    """

    def __init__(self, anchor: nn.Module, slot: Slot = 0) -> None:
        super().__init__()
        self.add_module("anchor", anchor)
        self.slot = slot
        self.takes_call: set[str] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        after = False
        value: Any = None
        for name, part in self._modules.items():
            assert part is not None
            if name == "anchor":
                value, after = part(*args, **kwargs), True
                continue
            given = first_tensor(value) if after else value_at(args, kwargs, self.slot)
            if name in self.takes_call:
                own, named = with_value(args, kwargs, self.slot, given)
                output = part(*own, **named)
            else:
                output = with_first(value, part(given)) if after else part(given)
            if after:
                value = output
            else:
                args, kwargs = with_value(args, kwargs, self.slot, first_tensor(output))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """What belongs to the module is set there: a temperature that is annealed from outside must reach it."""
        anchor = self.__dict__.get("_modules", {}).get("anchor")
        # Torch's own, set on any module.
        private = anchor is not None and name.startswith("_") and name not in vars(anchor)
        if anchor is None or private or name in _OWN or name in self.__dict__ or name in self._modules:
            super().__setattr__(name, value)
        else:
            setattr(anchor, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in self._modules:
            super().__delattr__(name)
        else:
            delattr(self._modules["anchor"], name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # how the anchor is copied or stored is not how its chain is
                raise
            return getattr(super().__getattr__("anchor"), name)


# ---- torch's `nn.MultiheadAttention` with more heads than its size divides into.
#
# torch takes the size of a head from ``embed_dim // num_heads``, so it cannot run a module that has got another head
# of the same size. Such a module, the same object with the same parameters, becomes a `WideAttention`, which computes
# the same from the size of a head. With as many heads as at first it is torch's own class again.


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
            if part.dtype == torch.bool:
                part = torch.zeros_like(part, dtype=q.dtype).masked_fill(part, -torch.inf)
            total = part if total is None else total + part
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


# ---- The modules that are inserted where torch has none of the kind, and torch's own without their default values.

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

# The same modules without their default initialisation.
_UNDRAWN = {
    kind: type(kind.__name__, (kind,), {"reset_parameters": lambda self: None}) for kind in (nn.Linear, *CONVS.values())
}


def empty_module(kind: type[nn.Module], *arguments: Any, **options: Any) -> nn.Module:
    """A module with empty parameters: their default initialisation would move the global random state."""
    module: nn.Module = _UNDRAWN[kind](*arguments, **options)
    module.__class__ = kind
    return module


class ResidualLayer(nn.Module):
    """``x + W2 s(W1 x + b)``: an identity as long as ``W2 = 0``."""

    def __init__(
        self, first: nn.Module, activation: nn.Module, second: nn.Module, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.first = first
        self.norm = norm
        self.activation = activation
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        if self.norm is not None:
            z = self.norm(z)
        update: Tensor = self.second(self.activation(z))
        return x + update


class ParametricLayer(nn.Module):
    """``(1 - a) z + a s(z)`` with ``z = W x + b``: linear at ``a = 0``, the network's own activation at ``a = 1``."""

    def __init__(self, kind: str, weight: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.begins_with = kind  # what comes before that module comes before the whole layer
        self.add_module(kind, weight)
        self.activation = activation
        self.a = nn.Parameter(torch.zeros((), device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.get_submodule(self.begins_with)(x)
        bent: Tensor = self.activation(z)
        # z + a (s(z) - z) rather than the two products: at a = 0 it is z to the last bit.
        return z + self.a * (bent - z)
