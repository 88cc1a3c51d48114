"""Attention heads as a width: found in attention however it is written, the function kept, the merit a gradient, configurations saved."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sensli
from sensli import find_sites, measure
from widening import column_gradients, redrawn, widened


class Attention(nn.Module):
    """Queries, keys and values from maps of their own, or from one; heads counted by the module."""

    def __init__(self, size: int = 12, heads: int = 3, dim: int = 4, fused: str = "", shared: int = 1) -> None:
        super().__init__()
        self.heads, self.dim_head, self.fused, self.shared, self.scale = heads, dim, fused, shared, dim**-0.5
        if fused:
            self.qkv = nn.Linear(size, 3 * heads * dim)
        else:
            self.q, self.k = nn.Linear(size, heads * dim), nn.Linear(size, heads // shared * dim, bias=False)
            self.v = nn.Linear(size, heads // shared * dim)
        self.out = nn.Linear(heads * dim, size)

    def maps(self, x: Tensor) -> list[Tensor]:
        b, n, _ = x.shape
        if not self.fused:
            maps = [self.q(x), self.k(x), self.v(x)]
            return [each.view(b, n, -1, self.dim_head).transpose(1, 2) for each in maps]
        order = {"3hd": (3, self.heads, -1), "h3d": (self.heads, 3, -1), "hd3": (self.heads, -1, 3)}[self.fused]
        each = self.qkv(x).view(b, n, *order).movedim(2 + self.fused.index("3"), 0)
        return list(each.transpose(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x)
        k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(*x.shape[:2], self.heads * self.dim_head))


class Inferred(Attention):
    """No number of heads anywhere: the size of a head decides. Norms over each head, a gate, torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        del self.heads
        self.norm, self.gate = nn.LayerNorm(4), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x)
        mixed = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2) * self.gate(x).sigmoid())


class Configured(nn.Module):
    """The number of heads is in an object that the module holds; another number has the same value and must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.shift = SimpleNamespace(n_head=3, layers=3, split=12), 3
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        parts = self.qkv(x).split(self.config.split, -1)
        q, k, v = (part.view(b, n, self.config.n_head, -1).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).roll(self.shift, 1)


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], count: int = 2) -> None:
        super().__init__()
        self.attention = nn.ModuleList([make() for _ in range(count)])
        self.norms = nn.ModuleList([nn.LayerNorm(12) for _ in range(count)])
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return self.out(x.mean(1))


WRITTEN: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "separate": (Attention, "q", "+1 head"),
    "fused": (lambda: Attention(fused="3hd"), "qkv", "+1 head"),
    "fused by heads": (lambda: Attention(fused="h3d"), "qkv", "+1 head"),
    "fused by entries": (lambda: Attention(fused="hd3"), "qkv", "+1 head"),
    "as many heads as entries": (lambda: Attention(heads=4, fused="3hd"), "qkv", "+1 head"),
    "grouped": (lambda: Attention(heads=4, shared=2), "q", "+1 group of 2 heads"),
    "one head": (lambda: Attention(heads=1), "q", "+1 head"),
    "inferred": (Inferred, "q", "+1 head"),
    "configured": (Configured, "qkv", "+1 head"),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Blocks(WRITTEN[name][0]).double(), torch.randn(4, 5, 12, dtype=torch.float64)
    return model, x, torch.arange(4) % 3


def check_exact(model: nn.Module, sites: Any, run: Callable[[nn.Module], Tensor], merits: Any) -> None:
    """The merit is the gradient in the wider network, whose output is the same and does not hang on the new rows at all."""
    output = run(model)
    assert len(merits) == len(sites)
    for merit in merits:
        wider, edit = widened(model, merit.site)
        assert torch.allclose(run(wider), output, rtol=1e-12, atol=1e-12)
        run(wider).backward()
        assert merit.value == pytest.approx(column_gradients(edit), rel=1e-10) and merit.value > 0
        with torch.no_grad():
            redrawn(edit, 1)
            first = run(wider)
            redrawn(edit, 2)
            assert torch.equal(run(wider), first)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_merit_of_heads_is_the_gradient_in_the_network_that_really_has_them(name: str, training: bool) -> None:
    model, x, y = made(name)
    model.train(training)
    sites = find_sites(model, x, grow="units")
    _, maker, text = WRITTEN[name]
    assert [site.path for site in sites] == [f"attention.{block}.{maker}" for block in range(2)]
    assert all(str(site).startswith(f"{text} in ") and site.kind == "units" for site in sites)
    merits = measure(model, sites, [(x, y)], F.cross_entropy, norm="frobenius")
    check_exact(model, sites, lambda m: F.cross_entropy(m(x), y), merits)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_heads_cost_is_what_they_add(name: str) -> None:
    model, x, _ = made(name)
    for site in find_sites(model, x, grow="units", units=2):
        wider, _ = widened(model, site)
        assert site.parameters == sum(p.numel() for p in wider.parameters()) - sum(
            p.numel() for p in model.parameters()
        )
        assert site.flops == sensli.count_flops(wider, x) - sensli.count_flops(model, x)
