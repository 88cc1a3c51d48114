"""Try before you keep: at a check, candidates and "no growth" train from the same state; the best at equal FLOPs stays."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower, Trial, triggers

torch.manual_seed(0)
x = torch.randn(512, 2)
y = (torch.sin(3 * x[:, 0]) > x[:, 1]).long()
batches = list(zip(x.split(64), y.split(64), strict=True))

model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def step(model, optimizer, batch):
    """The training step of this loop; a trial takes the same one."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


grower = Grower(
    model, optimizer, trigger=triggers.Diminishing(), what="both", units=4, trial=Trial(steps=80, step=step), log=print,
)  # fmt: skip
for _ in range(60):
    losses = [step(model, optimizer, batch) for batch in batches]
    grower.step(batches, cross_entropy, metric=sum(losses) / len(losses))
tried = [decision.tried for decision in grower.history.record.decisions if decision.tried]
print(f"{sum(each.grew for each in tried)} of {len(tried)} trials ended with a growth, loss {losses[-1]:.3f}")
