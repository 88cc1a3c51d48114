"""A byte-level transformer on the help topics that come with Python: windows of 64 bytes, the next byte at each place."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sensli_lab.compare.task import Task, TaskData, TaskPart, sizes_of

BYTES, WINDOW, WIDTH, HEADS, HEAD = 256, 64, 64, 4, 16
START = 0.02  # standard deviation of all weights
HIDDEN = 4 * WIDTH  # units of a feed-forward part


class Attention(nn.Module):
    """Each place sees itself and those before it. Heads are of one size, whatever their number, so that there may be more of them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.all = nn.Linear(width, 3 * heads * HEAD)
        self.out = nn.Linear(heads * HEAD, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.all(x).unflatten(-1, (3, self.heads, HEAD)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return y


class TextBlock(nn.Module):
    """Attention and a feed-forward part, both normalised before and added to the stream."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(self.activation(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    """A stack of equal blocks on embedded bytes. Weights begin as is usual for language models: normal, and small."""

    def __init__(self, blocks: int, heads: int = HEADS, hidden: int = HIDDEN, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.places = nn.Parameter(START * torch.randn(WINDOW, width, device="cpu"))
        self.blocks = nn.Sequential(*(TextBlock(width, heads, hidden) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=START)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.blocks(self.embedding(x.long()) + self.places)))
        return y


def next_byte(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy over all places."""
    return cross_entropy(output.flatten(0, 1), target.flatten().long())


@lru_cache(maxsize=1)
def _windows() -> Tensor:
    """All topics one after another, cut into windows, in an order drawn once."""
    from pydoc_data.topics import topics  # most of a megabyte, which other commands need not read

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return cut(text).long()


def cut(text: bytes) -> Tensor:
    """A text as windows of bytes, each with the byte after it, in an order drawn once."""
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    count = (len(codes) - 1) // WINDOW
    windows = codes[: count * WINDOW + 1].unfold(0, WINDOW + 1, WINDOW)
    return windows[torch.randperm(count, generator=torch.Generator().manual_seed(0), device="cpu")]


def load_topics(folder: Path | None, seed: int) -> TaskData:
    """Nine tenths of the windows to train on, the rest in halves; the same for all seeds."""
    return split_windows(_windows(), len(_windows()) // 20)


def split_windows(windows: Tensor, held: int, digest: str = "") -> TaskData:
    """So many windows to decide by, as many to test with, the rest to train on."""

    def part(some: Tensor) -> TaskPart:
        return TaskPart(some[:, :-1].contiguous(), some[:, 1:].contiguous())

    return TaskData(part(windows[2 * held :]), part(windows[:held]), part(windows[held : 2 * held]), digest)


TEXT = Task(
    name="text",
    title="the help topics of Python, byte by byte, transformers of width 64",
    sizes=sizes_of(Transformer, small=(2,), middle=(4,), wide=(2, 2 * HEADS, 2 * HIDDEN), large=(6,)),
    load=load_topics,
    example=((WINDOW,), torch.long),
    loss=next_byte,
    optimizer=partial(torch.optim.AdamW, lr=2e-3),
    recipe=f"AdamW 0.002, weights from N(0, {START})",
    batch=16,
    steps=1000,
    looks=(0.2, 0.2, 0.4, 0.4),  # two growths at each of two moments, the second of them after another look
    looked_at=64,
    warmup=0.05,
    points=25,
    counts_errors=False,
)
