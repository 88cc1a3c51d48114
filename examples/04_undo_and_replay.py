"""A growth is a record: it can be undone, saved as JSON, and replayed on a fresh model."""

import torch
from torch import nn

from sensli import History, find_sites, grow, replay, undo


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


torch.manual_seed(0)
model, x = make_model(), torch.randn(16, 4)
before = model(x)
sites = find_sites(model, x)
history = History(grow(model, site) for site in sites)
print(history)
print("same output:", torch.equal(model(x), before))

again = replay(make_model(), History.from_json(history.to_json()))
again.load_state_dict(model.state_dict())
print("same again:", torch.equal(again(x), before))

for growth in reversed(history):
    undo(model, growth)
print("back to", model)
