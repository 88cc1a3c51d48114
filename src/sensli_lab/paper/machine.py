"""What a training runs on, and every seed of it: the machine decides none of the numbers, the seeds all of them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensli_lab.errors import BadExperiment

# ---- Every random number of an experiment depends on (seed, run, purpose), so a run does not depend on its neighbours.

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


# ---- What a training runs on: where the images are, which device, compiled or not. None of it decides what is computed.

_BF16_TRIAL = """
import torch
x = torch.randn(4, 3, 8, 8, device="{device}").to(memory_format=torch.channels_last)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1024, 2))
net = net.to("{device}", memory_format=torch.channels_last)
with torch.autocast("{device}", dtype=torch.bfloat16):
    loss = net(x).float().square().mean()
loss.backward()
assert torch.isfinite(net[0].weight.grad).all()
"""


@dataclass(frozen=True)
class Machine:
    data: Path | None = None
    device: str = "auto"
    compile: bool = False

    def __str__(self) -> str:
        threads = torch.get_num_threads()
        words = f"{self.chosen().type}, {threads} thread{'s' if threads > 1 else ''}"
        return words + (", compiled" if self.compile else "")

    def chosen(self) -> torch.device:
        """The device, or an error of one line that says why it is not available."""
        there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if self.device == "auto":
            return torch.device(next(name for name in ("cuda", "mps", "cpu") if there[name]))
        if not there.get(self.device, False):
            found = ", ".join(name for name, is_there in there.items() if is_there)
            raise BadExperiment(f"--device {self.device} is not available here. Available: {found}.")
        return torch.device(self.device)


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 on a GPU as long as the context lasts: rounded so, a convolution is no exact identity, and other layers would be offered."""
    parts: Any = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [each.allow_tf32 for each in parts]
    try:
        for each in parts:
            each.allow_tf32 = False
        yield
    finally:
        for each, was in zip(parts, before, strict=True):
            each.allow_tf32 = was


@lru_cache
def has_bf16(device: str) -> bool:
    """Whether a bfloat16 training step works: tried in a separate process, since it ends with a signal on some CPUs."""
    call = [sys.executable, "-c", _BF16_TRIAL.format(device=device)]
    try:
        return subprocess.run(call, capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
