"""Save a run that grows, and resume from the file in a new process as if nothing had happened.

Run it twice: the second run resumes where the first one stopped.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from sensli import Grower, load_checkpoint, save_checkpoint, triggers

file = Path("resume.ckpt")
x = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
y = (x.prod(1) > 0).long()


def make_model():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def make_grower(model, optimizer=None, scheduler=None):
    return Grower(model, optimizer, trigger=triggers.Every(10))


if not file.exists():
    model = make_model()
    save_checkpoint(file, model, optimizer=AdamW(model.parameters(), lr=0.02), grower=make_grower(model))
run = load_checkpoint(file, make_model, lambda model: AdamW(model.parameters()), make_grower=make_grower)
print(f"from call {run.grower.calls}, {len(run.history)} growths")
for _ in range(30):
    run.optimizer.zero_grad()
    (loss := cross_entropy(run.model(x), y)).backward()
    run.optimizer.step()
    run.grower.step([(x, y)], cross_entropy)
save_checkpoint(file, run.model, optimizer=run.optimizer, grower=run.grower)
print(f"to call {run.grower.calls}, loss {loss.item():.3f}\n{run.grower.history}")
