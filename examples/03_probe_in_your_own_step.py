"""Merits from the training step you run anyway: no extra pass over the data."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Probe, find_sites

torch.manual_seed(0)
x, y = torch.randn(64, 3, 16, 16), torch.randint(0, 10, (64,))
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters())
sites = find_sites(model, x[:1], where="conv")

with Probe(model, sites) as probe:
    cross_entropy(model(x), y).backward()
optimizer.step()
print(probe.merits())
