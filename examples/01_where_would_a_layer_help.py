"""Find the sites where a layer could go, measure what it would be worth there, grow the best one, continue training."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import find_sites, grow, measure

torch.manual_seed(0)
x = torch.randn(512, 2)
y = (x.norm(dim=1) > 1.2).long()
model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

sites = find_sites(model, x[:1])
merits = measure(model, sites, [(x, y)], cross_entropy)
print(merits)
growth = grow(model, merits.best.site, optimizer=optimizer, check=x)
print(growth)
