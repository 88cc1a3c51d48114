"""Autocast, a gradient scaler, clipping, torch.compile and an averaged model continue to work when a network grows."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sensli import Grower, triggers

torch.manual_seed(0)
x = torch.randn(1024, 2)
y = (torch.sin(3 * x[:, 0]) > x[:, 1]).long()
batches = list(zip(x.split(128), y.split(128), strict=True))

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
compiled = torch.compile(model, backend="eager")  # leave backend= out for speed; compiled once more after each growth
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
trigger = triggers.Every(5) & triggers.Limit(growths=2)
grower = Grower(model, optimizer, trigger=trigger, averaged=average, log=print)

for _ in range(15):
    for inputs, labels in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(compiled(inputs), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
    grower.step(batches, cross_entropy)

accuracy = (average(x).argmax(1) == y).float().mean()
print(f"{len(grower.history)} growths, the averaged model is right on {accuracy:.0%}")
