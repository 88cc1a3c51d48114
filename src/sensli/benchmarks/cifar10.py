"""CIFAR-10 for the benchmarks, from the folder that SENSLI_DATA names, in its original binary layout."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1)
_STD = torch.tensor([0.2023, 0.1994, 0.2010]).view(1, 3, 1, 1)


def training_data() -> tuple[Tensor, Tensor] | None:
    """The 50,000 training images, normalised, and their labels; None where the data is not there."""
    folder = Path(os.environ.get("SENSLI_DATA", "")) / "cifar-10-batches-bin"
    files = [folder / f"data_batch_{number}.bin" for number in range(1, 6)]
    if not os.environ.get("SENSLI_DATA") or not all(file.exists() for file in files):
        return None
    records = torch.cat([torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]).view(
        -1, 3073
    )
    images = (records[:, 1:].view(-1, 3, 32, 32).float() / 255 - _MEAN) / _STD
    return images.to(memory_format=torch.channels_last), records[:, 0].long()
