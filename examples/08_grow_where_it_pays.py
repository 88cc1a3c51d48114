"""Grow while units add more to the gradient than to the FLOPs: a narrow network does, a wide one does not."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower, triggers

torch.manual_seed(0)
x = torch.randn(512, 2)
y = (torch.sin(3 * x[:, 0]) > x[:, 1]).long()
batches = list(zip(x.split(64), y.split(64), strict=True))


def train(width):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trigger = triggers.Pays() & triggers.Limit(parameters=20_000)
    grower = Grower(model, optimizer, trigger=trigger, units=0.5, max_factor=None)
    for _ in range(30):
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        grower.step(batches, cross_entropy)
    for decision in grower.history.record.decisions:
        print(f"epoch {decision.call}:", "grown" if decision.growths else decision.reason)
    widths = [layer.out_features for layer in model if isinstance(layer, nn.Linear)][:-1]
    print(f"began with {width} units a layer, ended with {widths}: loss {cross_entropy(model(x), y).item():.3f}\n")


train(3)
train(64)
