"""FSDP2 (`fully_shard`): real processes, gloo. A new layer is sharded like its neighbours; the run equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import ranks
from sensli import Grower, Probe, find_sites, insert, load_checkpoint, measure, save_checkpoint, triggers, undo
from test_ddp import compare, data, raised, result, steps_that_fail, train


class Block(nn.Module):
    """A block of a residual stack, sharded as a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Any) -> Any:
        return x + self.second(torch.relu(self.first(x)))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    head = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*head, Block(), Block(), nn.Linear(8, 2)).double()


def shard(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def grow() -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(make_model())
    called: list[int] = []
    model.register_forward_hook(lambda *_: called.append(1))
    grower, merits = train(model, data(rank, world), epochs=6)
    assert len(grower.history) == 3 and len(called) >= 6 * 4
    for growth in grower.history:
        assert isinstance(model.get_submodule(growth.name), FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with torch.no_grad():  # leaves the root unsharded
        before = model(data(rank, world)[0][0])
    growth = insert(model, find_sites(model, data(rank, world)[0][0])[0])
    assert torch.equal(model(data(rank, world)[0][0]), before)
    undo(model, growth)
    assert torch.equal(model(data(rank, world)[0][0]), before)
    found = result(model, grower, merits)
    found["model"] = {name: value.full_tensor() for name, value in found["model"].items()}
    return found


def resumed() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data(rank, world)

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def make_grower(model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
        return Grower(model, optimizer, example=batches[0][0], trigger=triggers.Every(1), tau=0.0)

    def epoch(model: Any, optimizer: Any, grower: Grower) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        grower.step(batches, cross_entropy)

    model = shard(make_model())
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, None)
    epoch(model, optimizer, grower)
    save_checkpoint("fsdp.ckpt", model, optimizer=optimizer, grower=grower)
    epoch(model, optimizer, grower)
    found = load_checkpoint("fsdp.ckpt", make_model, make_optimizer, make_grower=make_grower, wrap=shard)
    assert found.grower is not None
    epoch(found.model, found.optimizer, found.grower)
    theirs = dict(found.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), theirs[name].full_tensor()), name  # type: ignore[attr-defined]


def refused() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data(rank, world)
    model = shard(make_model())
    assert "use measure" in raised(lambda: Probe(model, find_sites(model, batches[0][0]))).lower()
    sites = find_sites(model, batches[0][0], layer="residual")
    with Probe(model, sites, ratio=False) as probe:
        cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    plain = make_model()
    whole = data(0, 1)[:1]
    expected = measure(plain, find_sites(plain, whole[0][0], layer="residual"), whole, cross_entropy)
    assert all(abs(a.value / b.value - 1) < 1e-9 for a, b in zip(probe.merits(), expected, strict=True))
    level: dict[str, Any] = {"confidence": 0.9, "tolerance": 0.5}
    expected = measure(plain, find_sites(plain, whole[0][0], layer="residual"), data(0, 1, 30), cross_entropy, **level)
    found = measure(model, sites, data(rank, world, 30), cross_entropy, **level)
    assert (found.clear, found.samples) == (True, expected.samples) and expected.batches < 30
    assert all(abs(a.value / b.value - 1) < 1e-9 for a, b in zip(found, expected, strict=True))
    assert "ratio=False" in raised(lambda: Probe(model, sites))
    parts = make_model()
    fully_shard(parts[4])
    assert "Call fully_shard(model) too" in raised(lambda: find_sites(parts, batches[0][0]))
    mesh = dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(make_model(), mesh=mesh)
    assert "one-dimensional" in raised(lambda: find_sites(hybrid, batches[0][0]))


def all_at_once() -> Any:
    found = grow()
    resumed()
    refused()
    steps_that_fail(shard, make_model)
    return found


@pytest.mark.parametrize(("processes", "work"), [(2, all_at_once), (4, grow)], ids=["two", "four"])
def test_a_sharded_run_grows_resumes_and_equals_one_process_on_the_joined_batches(
    tmp_path: Path, processes: int, work: Any
) -> None:
    torch.set_num_threads(1)
    found = ranks.run(work, processes, tmp_path)
    model = make_model()
    grower, merits = train(model, data(0, 1), 6)
    compare(found, result(model, grower, merits))
