"""Deeper or wider: layers and units compete by their merit per added parameter, within a budget."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower, find_sites, measure, triggers

torch.manual_seed(0)
x = torch.randn(512, 2)
y = (torch.sin(3 * x[:, 0]) > x[:, 1]).long()
batches = list(zip(x.split(64), y.split(64), strict=True))

model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
sites = find_sites(model, x[:1], what="both", units=2)
print(measure(model, sites, batches, cross_entropy).per("parameters"))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
trigger = triggers.Every(15) & triggers.Limit(parameters=120)
grower = Grower(model, optimizer, trigger=trigger, what="both", units=2, per="parameters", log=print)
for _ in range(90):
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    grower.step(batches, cross_entropy)
print(f"loss {cross_entropy(model(x), y).item():.3f} with {sum(p.numel() for p in model.parameters())} parameters")
print(model)
