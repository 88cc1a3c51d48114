"""What the natural merit costs beside the Frobenius norm, on the paper's CNN and on a transformer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.figure import Figure
from benchmarks.language import BYTES, LanguageModel, next_byte_loss
from benchmarks.measuring import interleaved
from benchmarks.networks import paper_cnn
from sensli.merits.measuring import measure
from sensli.moves.finding import find_sites

BATCHES = 10
ROUNDS = 3


def natural_cost() -> list[Figure]:
    """Measurements of ten batches, existing weights included."""
    torch.manual_seed(0)
    images = torch.randn(128, 3, 32, 32).to(memory_format=torch.channels_last), torch.randint(0, 10, (128,))
    tokens = torch.randint(0, BYTES, (8, 128)), torch.randint(0, BYTES, (8, 128))
    language = LanguageModel(blocks=12, width=256, heads=4, length=128)
    return [
        _figure("paper's CNN, batches of 128", paper_cnn(), images, cross_entropy),
        _figure("transformer of 12 blocks, width 256, batches of 8 x 128", language, tokens, next_byte_loss),
    ]


def _figure(
    name: str, model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor]
) -> Figure:
    sites = find_sites(model, batch[0][:1])

    def measured(norm: str) -> Callable[[], object]:
        return lambda: measure(model, sites, [batch] * BATCHES, loss, norm=norm)

    # Work, not waiting: seconds of the processor on one thread, which other programs on the machine hardly change.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        works = {norm: measured(norm) for norm in ("frobenius", "natural")}
        seconds = interleaved(works, ROUNDS, clock=time.process_time)
    finally:
        torch.set_num_threads(threads)
    how = f"{len(sites)} sites, {BATCHES} batches with ratio, processor seconds on one thread, median of {ROUNDS} interleaved rounds"
    return Figure(f"natural / frobenius, {name}", seconds["natural"] / seconds["frobenius"], 1.5, how)
