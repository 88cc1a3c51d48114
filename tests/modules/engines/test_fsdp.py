"""FSDP2 (`fully_shard`): real processes, gloo. A new layer is sharded like its neighbours; the run equals one process."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
from parallel import TRAINED, compare, data, raised, result, steps_that_fail, train
from sensli import Grower, Probe, find_sites, insert, load_checkpoint, measure, save_checkpoint, triggers, undo
from sensli.errors import CheckpointError
from sensli.page.files import read_history


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
    return nn.Sequential(*head, Block(), nn.Linear(8, 2)).double()


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
    assert len(grower.history) == 3 and len(called) >= 6 * TRAINED
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
    found["model"] = ranks.wholes(found["model"])
    return found


def resumed() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data(rank, world)

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def make_grower(model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
        return Grower(model, optimizer, preset="paper", example=batches[0][0], trigger=triggers.Every(1), tau=0.0)

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
    sites = find_sites(model, batches[0][0], form="residual")
    plain = make_model()
    whole = data(0, 1)[:1]
    level: dict[str, Any] = {"confidence": 0.9, "tolerance": 0.5}
    expected = measure(plain, find_sites(plain, whole[0][0], form="residual"), data(0, 1, 30), cross_entropy, **level)
    found = measure(model, sites, data(rank, world, 30), cross_entropy, **level)
    assert (found.clear, found.samples) == (True, expected.samples) and expected.batches < 30
    assert all(abs(a.value / b.value - 1) < 1e-9 for a, b in zip(found, expected, strict=True))
    assert "norm='natural'" in raised(lambda: Probe(model, sites, norm="natural"))
    parts = make_model()
    fully_shard(parts[4])
    assert "Call fully_shard(model) too" in raised(lambda: find_sites(parts, batches[0][0]))


class Numbered(Block):
    """A block that knows its number."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id


class ByNumber(nn.Module):
    """Numbered blocks in a dict, as torchtitan has them; by other names nothing tells which number a new one should have."""

    def __init__(self, names: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"{names}{number}": Numbered(number) for number in range(2)})
        self.head = nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def numbered() -> None:
    """Sharded blocks are of a class of torch's, and are numbered all the same."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)
    for names in ("", "block"):
        torch.manual_seed(1)
        plain = ByNumber(names).double()
        model = shard(copy.deepcopy(plain))
        sites = find_sites(model, x)
        assert [str(site) for site in sites] == [str(site) for site in find_sites(plain, x)]
        assert {site.kind for site in sites} == ({"linear"} if names else {"block"})
        with torch.no_grad():
            before = model(x)
        growth = insert(model, sites[1])
        with torch.no_grad():
            assert torch.equal(model(x), before)
        if not names:
            assert list(model.layers) == list("012") and [b.layer_id for b in model.layers.values()] == [0, 1, 2]
            assert isinstance(model.layers["1"], FSDPModule)
        model(x).sum().backward()
        undo(model, growth)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def all_at_once() -> Any:
    found = grow()
    resumed()
    refused()
    numbered()
    steps_that_fail(shard, make_model)
    return found


@pytest.mark.parametrize(
    ("processes", "work"), [(2, all_at_once), pytest.param(4, grow, marks=pytest.mark.thorough)], ids=["two", "four"]
)
def test_a_sharded_run_grows_resumes_and_equals_one_process_on_the_joined_batches(
    tmp_path: Path, processes: int, work: Any
) -> None:
    torch.set_num_threads(1)
    found = ranks.run(work, processes, tmp_path)
    model = make_model()
    grower, merits = train(model, data(0, 1), 6)
    compare(found, result(model, grower, merits))


# --- checkpoints: each process writes its own shards ---


class Stack(nn.Module):
    """Numbered blocks: what a growth in front of a block inserts renames its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def make_stack() -> nn.Module:
    torch.manual_seed(1)
    return Stack().double()


def make_adam(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def make_stack_grower(model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
    return Grower(model, optimizer, preset="paper", example=data(0, 1)[0][0][:1], trigger=triggers.Every(1), tau=0.0)


def epochs(model: Any, optimizer: Any, grower: Grower, number: int) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    batches = data(dist.get_rank() if dist.is_initialized() else 0, world)
    for _ in range(number):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        grower.step(batches, cross_entropy)


def begun() -> tuple[Any, Any, Grower]:
    model = shard(make_stack())
    optimizer = make_adam(model)
    grower = make_stack_grower(model, optimizer, None)
    epochs(model, optimizer, grower, 2)
    assert any(growth.renames for growth in grower.history)
    return model, optimizer, grower


def loaded(path: str, wrap: Any = shard) -> tuple[Any, Any, Any]:
    found = load_checkpoint(path, make_stack, make_adam, make_grower=make_stack_grower, wrap=wrap)
    return found.model, found.optimizer, found.grower


def wholes(model: nn.Module, optimizer: Any) -> list[Any]:
    """Weights and moments, whole."""
    found = {name: model.state_dict()[name] for name in sorted(model.state_dict())}
    for name, parameter in sorted(model.named_parameters()):
        found |= {f"{name} {key}": value for key, value in sorted(optimizer.state[parameter].items())}
    gathered = ranks.wholes(found)
    return [gathered[name] for name in found]


@contextmanager
def nothing_gathered() -> Iterator[None]:
    given, DTensor.full_tensor = DTensor.full_tensor, None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DTensor.full_tensor = given  # type: ignore[method-assign]


class Evil:
    """What a pickle would do if it were loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def damaged(name: str, change: Any) -> str:
    """What all ranks raise for a copy of the checkpoint in which one file is changed."""
    if dist.get_rank() == 0:
        shutil.rmtree("damaged", ignore_errors=True)
        shutil.copytree("two.ckpt", "damaged")
        change(next(Path("damaged").glob(name)))
    dist.barrier()
    return raised(lambda: loaded("damaged"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def checkpoints() -> Any:
    rank = dist.get_rank()
    # saved by one process, goes on with two
    one, optimizer, grower = loaded("one.ckpt")
    expected = torch.load("one.pt", weights_only=True)
    assert all(map(torch.equal, wholes(one, optimizer), expected["saved"]))
    epochs(one, optimizer, grower, 1)
    for mine, its in zip(wholes(one, optimizer), expected["end"], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-11)
    # saved by two: no process gathers anything, and the run goes on to the bit
    model, optimizer, grower = begun()
    with nothing_gathered():
        save_checkpoint("two.ckpt", model, optimizer=optimizer, grower=grower, extra={"note": 1})
    assert len(list(Path("two.ckpt").glob("shards-*/*.distcp"))) == 2
    saved = wholes(model, optimizer)
    again = loaded("two.ckpt")
    assert all(isinstance(parameter, DTensor) for parameter in again[0].parameters())
    assert all(map(torch.equal, wholes(again[0], again[1]), saved))
    epochs(model, optimizer, grower, 1)
    epochs(*again, 1)
    end = wholes(model, optimizer)
    assert all(map(torch.equal, wholes(again[0], again[1]), end))
    # a save that fails on one rank fails on all, and the earlier checkpoint is as it was
    assert "extra" in raised(lambda: save_checkpoint("two.ckpt", model, optimizer=optimizer, grower=grower,
                                                     extra=object() if rank == 1 else None))  # fmt: skip
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full disk
    text = raised(lambda: save_checkpoint("two.ckpt", model, optimizer=optimizer, grower=grower))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "CheckpointError: two.ckpt cannot be written" in text and "rank 1" in text, text
    dist.barrier()
    assert len(list(Path("two.ckpt").iterdir())) == 2
    assert all(map(torch.equal, wholes(*loaded("two.ckpt")[:2]), saved))
    # a save in the same place replaces it
    for _ in range(2):
        save_checkpoint("again.ckpt", model, optimizer=optimizer, grower=grower)
    assert len(list(Path("again.ckpt").iterdir())) == 2
    assert all(map(torch.equal, wholes(*loaded("again.ckpt")[:2]), end))
    # damage is refused on all ranks, and nothing is unpickled
    assert "was altered" in damaged("shards-*/__1_0.distcp", flip)
    assert "cut short" in damaged("shards-*/__0_0.distcp", lambda file: file.write_bytes(file.read_bytes()[:-9]))
    assert "cannot read __1_0.distcp" in damaged("shards-*/__1_0.distcp", Path.unlink)
    assert "was altered" in damaged("checkpoint", flip)
    assert "cannot read the checkpoint" in damaged("checkpoint", Path.unlink)
    if rank == 0:
        (file,) = Path("two.ckpt").glob("shards-*/.metadata")
        file.write_bytes(pickle.dumps(Evil()))
    dist.barrier()
    assert all(map(torch.equal, wholes(*loaded("two.ckpt")[:2]), saved)) and not Path("evil").exists()
    if rank == 0:
        Path("file").touch()
    dist.barrier()
    assert "it is a file" in raised(lambda: save_checkpoint("file", model, optimizer=optimizer, grower=grower))
    return {"saved": saved, "end": end}


def test_a_sharded_checkpoint_is_written_in_shards_and_read_by_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer, grower = begun()
        save_checkpoint("one.ckpt", model, optimizer=optimizer, grower=grower)
        saved = wholes(model, optimizer)
        epochs(model, optimizer, grower, 1)
        torch.save({"saved": saved, "end": wholes(model, optimizer)}, "one.pt")
    finally:
        dist.destroy_process_group()
    found = ranks.run(checkpoints, 2, tmp_path)
    # saved by two, goes on with one that is not sharded
    plain, optimizer, its = loaded("two.ckpt", None)
    assert len(read_history("two.ckpt")) == len(its.history) == 2
    assert all(map(torch.equal, wholes(plain, optimizer), found["saved"]))
    epochs(plain, optimizer, its, 1)
    for mine, theirs in zip(wholes(plain, optimizer), found["end"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    # another network is refused by the shapes of what lies in shards
    other = make_stack()
    other.last = nn.Linear(8, 3).double()
    with pytest.raises(CheckpointError, match=r"(?s)do not fit the Stack .*size mismatch for last.weight"):
        load_checkpoint("two.ckpt", lambda: other)
