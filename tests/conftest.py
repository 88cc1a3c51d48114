"""Tiny tensors are many times faster on one thread, and the machine may be shared."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
