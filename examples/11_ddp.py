"""Grow under DistributedDataParallel: every process calls `grower.step` with its own data, and all make the same growth.

torchrun --standalone --nproc-per-node 2 examples/11_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from sensli import Grower, save_checkpoint, triggers

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
y = (torch.sin(3 * x[:, 0]) > x[:, 1]).long()
batches = [(a.chunk(world)[rank], b.chunk(world)[rank]) for a, b in zip(x.split(64), y.split(64), strict=True)]

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
grower = Grower(model, optimizer, trigger=triggers.Every(10) & triggers.Limit(growths=2))
for _ in range(30):
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    growth = grower.step(batches, cross_entropy)
    if growth and rank == 0:
        print(f"all {world} processes: {growth}")
save_checkpoint("ddp.ckpt", model, optimizer=optimizer, grower=grower)
with torch.no_grad():
    digest = torch.stack([p.double().sum() for p in model.parameters()]).sum()
digests = [torch.zeros_like(digest) for _ in range(world)]
dist.all_gather(digests, digest)
if rank == 0:
    print(f"weights the same on all ranks: {all(d == digest for d in digests)}")
dist.destroy_process_group()
