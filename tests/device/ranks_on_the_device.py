"""Two ranks whose group takes tensors of the device alone, as NCCL does: what growing says to other ranks must lie there."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

LIMIT = datetime.timedelta(seconds=200)


class Done(dist._Work):
    """What has been carried already."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.future: Any = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self.future


class LikeNCCL(dist.ProcessGroup):
    """Gloo carries what is on the device; all else is refused."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("carried", store), rank, size, timeout)

    def getBackendName(self) -> str:
        return "simccl"

    def _on_host(self, tensors: Any) -> list[Any]:
        for each in tensors:
            if each.device.type != "sim":
                raise RuntimeError(f"No backend type associated with device type {each.device.type}")
        return [each.cpu() for each in tensors]

    def _carried(self, verb: str, tensors: Any, options: Any) -> Done:
        host = self._on_host(tensors)
        getattr(self.gloo, verb)(host, options).wait()
        for to, value in zip(tensors, host, strict=True):
            to.detach().copy_(value)
        return Done(list(tensors))

    def allreduce(self, tensors: Any, options: Any) -> Done:
        return self._carried("allreduce", tensors, options)

    def broadcast(self, tensors: Any, options: Any) -> Done:
        return self._carried("broadcast", tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Done:
        return self._collected(outputs, lambda host: self.gloo.allgather(host, self._on_host(inputs)))

    def gather(self, outputs: Any, inputs: Any, options: Any) -> Done:
        return self._collected(outputs, lambda host: self.gloo.gather(host, self._on_host(inputs), options))

    def _collected(self, outputs: Any, carry: Any) -> Done:
        host = [[torch.empty_like(each, device="cpu") for each in some] for some in outputs]
        carry(host).wait()
        for some, values in zip(outputs, host, strict=True):
            for to, value in zip(some, values, strict=True):
                to.copy_(value)
        return Done(outputs)

    def barrier(self, opts: Any = None) -> Done:
        self.gloo.barrier().wait()
        return Done([])


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)]
    return nn.Sequential(*layers)


def begin() -> torch.device:
    """The group of gloo, which every rank starts with, gives way to the strict one."""
    import sim_device

    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    # Objects travel on the current device: for NCCL torch knows that itself.
    dist.distributed_c10d._get_object_coll_device = lambda group=None: "sim"  # type: ignore[attr-defined]
    dist.Backend.register_backend("simccl", LikeNCCL, devices=["sim"])
    dist.init_process_group(
        "simccl", store=dist.PrefixStore("strict", store), rank=rank, world_size=size, timeout=LIMIT
    )
    torch.sim.set_device(rank)
    assert sim_device.NAME == "sim"
    return torch.device("sim", rank)


def work() -> dict[str, Any]:
    """Growers, measurements, checkpoints; and what a rank on the CPU is told."""
    from sensli import Grower, Trial, find_sites, load_checkpoint, measure, save_checkpoint, triggers

    device = begin()
    try:
        dist.all_reduce(torch.ones(1))
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(64, 2, device=device)
    y = (x[:, 0] * x[:, 1] > 0).long()
    batches = list(zip(x.split(16), y.split(16), strict=True))
    model: Any = DistributedDataParallel(make().to(device))
    natural = measure(model, find_sites(model, x[:2].cpu(), what="both"), batches, cross_entropy, norm="natural")
    sure = measure(model, find_sites(model, x[:2], what="units"), batches, cross_entropy, confidence=0.9)

    def grown(**options: Any) -> tuple[Any, Any, Grower]:
        model = DistributedDataParallel(make().to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        grower = Grower(model, optimizer, preset="paper", example=x[:2], trigger=triggers.Every(1), **options)
        for _ in range(2):
            for given, target in batches:
                optimizer.zero_grad()
                cross_entropy(model(given), target).backward()
                optimizer.step()
            grower.step(batches, cross_entropy)
        return model, optimizer, grower

    histories = {}
    for strategy in ("tiny", "splitting"):
        histories[strategy] = len(grown(what="units", strategy=strategy)[2].history)
    model, optimizer, grower = grown(tau=0, what="both", trial=Trial(steps=2), recycle=True)
    histories["sensli"] = len(grower.history)
    path = Path("checkpoint").absolute()
    save_checkpoint(path, model, optimizer=optimizer, grower=grower)
    again = load_checkpoint(
        path,
        lambda: make().to(device),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        wrap=DistributedDataParallel,
    )
    equal = all(map(torch.equal, model.parameters(), again.model.parameters()))
    sums = torch.stack([p.detach().sum() for p in again.model.parameters()])
    alike = [torch.empty_like(sums) for _ in range(2)]
    dist.all_gather(alike, sums)
    return {
        "refused": refused,
        "natural": len(natural),
        "sure": len(sure),
        "histories": histories,
        "resumed": equal and torch.equal(*(each.cpu() for each in alike)),
    }
