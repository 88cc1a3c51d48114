"""Monitor training: one line per decision, then all of it as a film in one HTML file."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower
from sensli.page import page_data, write_page

torch.manual_seed(0)
x = torch.randn(512, 2)
y = (torch.sin(3 * x[:, 0]) > x[:, 1]).long()
batches = list(zip(x.split(64), y.split(64), strict=True))
model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
# log= takes any callable, or a TensorBoard SummaryWriter
grower = Grower(model, optimizer, log=print)
for _ in range(12):
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    grower.step(batches, cross_entropy, metric=loss.item())

grower.history.save("history.json")  # later: sensli report history.json
print("film:", write_page("growth.html", page_data(grower.history, title="My network grows", measure="training loss")))
