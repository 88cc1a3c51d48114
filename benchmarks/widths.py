"""What measuring widths costs beside layers, and what a widened network costs beside one that was built at that size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.figure import Figure
from benchmarks.language import BYTES, LanguageModel, next_byte_loss
from benchmarks.measuring import interleaved, peak
from benchmarks.networks import paper_cnn
from sensli.merits.measuring import measure
from sensli.moves.finding import find_sites
from sensli.surgery.growth import grow


def widths() -> list[Figure]:
    """Measuring widths and layers together against layers alone; a step of AdamW after a widening against the same size from scratch."""
    return [*_measuring("paper's CNN", *_images()), *_measuring("transformer", *_bytes()), *_stepping(), *_memory()]


def _memory() -> list[Figure]:
    step, look = peak("step"), peak("widths")
    detail = f"resident peak {look / 2**20:.0f} MiB / {step / 2**20:.0f} MiB, paper's CNN, batch 128, each in a fresh process"
    return [Figure("peak memory of measure with widths / training step", look / step, 1.2, detail)]


def _images() -> tuple[nn.Module, torch.Tensor, torch.Tensor, object]:
    torch.manual_seed(0)
    return paper_cnn(), torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)), cross_entropy


def _bytes() -> tuple[nn.Module, torch.Tensor, torch.Tensor, object]:
    torch.manual_seed(0)
    model = LanguageModel(blocks=6, width=128, heads=4, length=128)
    return model, torch.randint(0, BYTES, (8, 128)), torch.randint(0, BYTES, (8, 128)), next_byte_loss


def _measuring(name: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: object) -> list[Figure]:
    layers, both = find_sites(model, x[:2]), find_sites(model, x[:2], what="both")
    figures = []
    for count, rounds in ((8, 3), (1, 7)):  # what is done once for all batches weighs most with a single one
        data = [(x, y)] * count
        works: dict[str, Callable[[], Any]] = {
            kind: partial(measure, model, sites, data, loss, norm="frobenius")  # type: ignore[arg-type]
            for kind, sites in (("layers", layers), ("both", both))
        }
        seconds = interleaved(works, rounds)
        batches = "one batch" if count == 1 else f"{count} batches"
        how = (
            f"{len(layers)} layers and {len(both) - len(layers)} widths, a quarter more units each, "
            f"median of {rounds} interleaved rounds"
        )
        ratio = seconds["both"] / seconds["layers"]
        figures.append(Figure(f"{name}, {batches}: measure widths and layers / layers", ratio, 1.3, how))
    return figures


def _stepping() -> list[Figure]:
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    x, y = torch.randn(128, 256), torch.randint(0, 10, (128,))
    optimizer = torch.optim.AdamW(small.parameters())
    for _ in range(2):
        for site in find_sites(small, x[:2], what="units", units=128)[:1]:
            grow(small, site, optimizer=optimizer)
    large = nn.Sequential(nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 10))
    other = torch.optim.AdamW(large.parameters())
    assert [p.shape for p in small.parameters()] == [p.shape for p in large.parameters()]

    def step(model: nn.Module, by: torch.optim.Optimizer) -> None:
        by.zero_grad()
        cross_entropy(model(x), y).backward()
        by.step()

    seconds = interleaved({"grown": lambda: step(small, optimizer), "built": lambda: step(large, other)}, rounds=60)
    how = "256-512-512-10 widened twice by 128 units, batch 128, median of 60 interleaved rounds"
    return [Figure("AdamW step after widening / built at that size", seconds["grown"] / seconds["built"], 1.03, how)]
