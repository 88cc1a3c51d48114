"""What measuring all places of a transformer costs."""

from __future__ import annotations

import torch

from benchmarks.figure import Figure
from benchmarks.language import BYTES, LanguageModel, next_byte_loss
from benchmarks.measuring import interleaved
from sensli.merits.measuring import measure
from sensli.moves.finding import find_sites


def transformer_cost() -> list[Figure]:
    """All 13 places of a 12-block transformer, twins of its blocks, against one training step, per batch."""
    torch.manual_seed(0)
    model = LanguageModel(blocks=12, width=256, heads=4, length=128)
    x, y = torch.randint(0, BYTES, (8, 128)), torch.randint(0, BYTES, (8, 128))
    sites = find_sites(model, x[:1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        next_byte_loss(model(x), y).backward()
        optimizer.step()

    seconds = interleaved(
        {
            "step": step,
            "ratio": lambda: measure(model, sites, [(x, y)], next_byte_loss),
            "plain": lambda: measure(model, sites, [(x, y)], next_byte_loss, ratio=False),
        },
        rounds=7,
    )
    how = f"{len(sites)} twins in 12 blocks, width 256, sequence 128, batch 8, AdamW, median of 7 interleaved rounds"
    return [
        Figure("transformer: measure with ratio / training step", seconds["ratio"] / seconds["step"], 2.0, how),
        Figure("transformer: measure without ratio / training step", seconds["plain"] / seconds["step"], 2.0, how),
    ]
