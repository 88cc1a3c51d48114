"""Every random number of an experiment depends on (seed, run, purpose), so a run does not depend on its neighbours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

ORDER_BLOCK = 25  # epochs whose sample order comes from one generator


def run_seed(seed: int, run: int, purpose: str) -> int:
    """A 63-bit seed that is the same on every machine and in every process."""
    content = f"{seed}/{run}/{purpose}".encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def generator(seed: int, run: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(run_seed(seed, run, purpose))


def order_block(seed: int, runs: Sequence[int], block: int, samples: int) -> Tensor:
    """The order of the samples in epochs `block * ORDER_BLOCK` and following: [ORDER_BLOCK, runs, samples].

    Drawn afresh for each block, so that a resumed run needs no generator state.
    """
    order = torch.empty(ORDER_BLOCK, len(runs), samples, dtype=torch.long, device="cpu")
    for i, run in enumerate(runs):
        source = generator(seed, run, f"order {block}")
        for epoch in range(ORDER_BLOCK):
            torch.randperm(samples, generator=source, out=order[epoch, i], device=source.device)
    return order
