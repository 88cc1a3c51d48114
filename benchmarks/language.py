"""A small language model of pre-norm blocks, and text to train it on that is shipped with Python."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

BYTES = 256


class Block(nn.Module):
    """Causal attention and a two-layer network, each behind a norm and beside a skip connection."""

    causal = True

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Predicts the next byte: (n, length) to (n, length, 256)."""

    def __init__(self, blocks: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def text_of_python() -> tuple[Tensor, Tensor]:
    """The help texts that come with Python, as bytes: training and validation part (nine tenths and the rest of every chapter)."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    training, validation = bytearray(), bytearray()
    for _, text in sorted(topics.items()):
        data = inspect.cleandoc(text).encode()
        cut = len(data) * 9 // 10
        training += data[:cut]
        validation += data[cut:]
    return torch.frombuffer(training, dtype=torch.uint8).long(), torch.frombuffer(validation, dtype=torch.uint8).long()


def batches(text: Tensor, length: int, size: int, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows: (size, length) bytes and the bytes that follow each."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(text) - length - 1, (size,), generator=generator)
        windows = text[starts[:, None] + torch.arange(length + 1)]
        yield windows[:, :-1], windows[:, 1:]
