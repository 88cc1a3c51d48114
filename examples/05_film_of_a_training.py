"""Monitor training: one line per decision, then all of it as a film in one HTML file."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower, triggers
from sensli.page import page_data, write_page

torch.manual_seed(0)
x = torch.randn(512, 2)
y = (torch.sin(3 * x[:, 0]) > x[:, 1]).long()
model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
# log= takes any callable, or a TensorBoard SummaryWriter
grower = Grower(model, optimizer, example=x[:1], trigger=triggers.Every(25), tau=0.5, log=print)
for _ in range(100):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    grower.step([(x, y)], cross_entropy, metric=loss.item())

grower.history.save("history.json")  # later: sensli report history.json
print("film:", write_page("growth.html", page_data(grower.history, title="My network grows", measure="training loss")))
