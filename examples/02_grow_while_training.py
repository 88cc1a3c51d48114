"""Algorithm 1 of the paper: train, check every 20 epochs, add a layer where the merit passes the threshold, continue."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower, triggers

torch.manual_seed(0)
x = torch.randn(512, 2)
y = (torch.sin(3 * x[:, 0]) > x[:, 1]).long()
batches = list(zip(x.split(64), y.split(64), strict=True))

model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
trigger = triggers.Every(20) & triggers.Limit(growths=2)
grower = Grower(model, optimizer, preset="paper", trigger=trigger, scheduler=scheduler)
for _ in range(100):
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    scheduler.step()
    growth = grower.step(batches, cross_entropy)
    if growth:
        print(growth)
print(f"loss {cross_entropy(model(x), y).item():.3f} with {sum(p.numel() for p in model.parameters())} parameters")
