"""Widths of models sharded by FSDP2: real processes, gloo. Everything is as in one process that holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy

import ranks
from parallel import data, raised
from sensli import (
    Grower,
    History,
    Probe,
    Rates,
    find_sites,
    grow,
    load_checkpoint,
    measure,
    replay,
    save_checkpoint,
    triggers,
    undo,
)
from sensli.surgery.optimizers import WARMING


class Gated(nn.Module):
    """A block sharded as a unit: two makers and one reader, a norm over the batch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.norm, self.down = nn.Linear(8, 5), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.gate(x)).relu() * self.up(x))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 8), Gated(), nn.Linear(8, 2)).double()
    for module in model.modules():  # one process sees a larger batch than each of two
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
            module.train = lambda mode=True: None  # type: ignore[assignment, method-assign, misc]
    return model


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for module in model:  # type: ignore[attr-defined]
        if isinstance(module, Gated):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights, buffers, moments and gradients, whole."""
    found: dict[str, Any] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items() if torch.is_tensor(value)}
        if parameter.grad is not None:
            found[f"{name} gradient"] = parameter.grad
    return ranks.wholes(found)


def same(one: dict[str, Tensor], other: dict[str, Tensor], near: float = 0.0) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[key], other[key], rtol=near, atol=near) for key in one)


def step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def verbs() -> None:
    """Measured, grown, trained, taken back and replayed as in one process on the joined batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches, joined = data(rank, world), data(0, 1)
    for name, make in OPTIMIZERS.items():
        model, plain = shard(make_model()), make_model()
        optimizer, other = make(model.parameters()), make(plain.parameters())
        step(model, optimizer, batches[0])
        step(plain, other, joined[0])
        sites, theirs = (find_sites(m, joined[0][0][:3], what="units", units=3) for m in (model, plain))
        assert [str(site) for site in sites] == [str(site) for site in theirs] and len(sites) == 3
        merits, expected = measure(model, sites, batches, cross_entropy), measure(plain, theirs, joined, cross_entropy)
        assert all(abs(a.value / b.value - 1) < 1e-9 for a, b in zip(merits, expected, strict=True))
        before, growths, output = everything(model, optimizer), [], model(joined[0][0])
        for mine, its in zip(merits, expected, strict=True):
            growths.append(grow(model, mine, optimizer=optimizer, check=(joined[0][0], None)))
            grow(plain, its, optimizer=other)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert torch.allclose(model(joined[0][0]), output, rtol=1e-12, atol=1e-12)
        assert same(everything(model, optimizer), everything(plain, other), 1e-11), name
        grown = everything(model, optimizer)
        for x, y in ((0, 0), (1, 1)):
            step(model, optimizer, batches[x])
            step(plain, other, joined[y])
        assert same(everything(model, optimizer), everything(plain, other), 1e-10), name
        again = shard(replay(make_model(), History.from_json(History(growths).to_json())))
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(joined[0][0]), model(joined[0][0]))
        if name == "AdamW":
            back(growths, before, grown)


def back(growths: list[Any], before: dict[str, Tensor], grown: dict[str, Tensor]) -> None:
    """Without a step in between, taken back to the bit; and the same growths once more."""
    batches = data(dist.get_rank(), dist.get_world_size())
    model = shard(make_model())
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    step(model, optimizer, batches[0])
    assert same(everything(model, optimizer), before)
    merits = measure(model, find_sites(model, batches[0][0], what="units", units=3), batches, cross_entropy)
    for _ in range(2):
        made = [grow(model, merit, optimizer=optimizer) for merit in merits]
        assert same(everything(model, optimizer), grown)
        for growth in reversed(made):
            undo(model, growth, optimizer=optimizer)
        assert same(everything(model, optimizer), before)
    assert [growth.resized for growth in made] == [growth.resized for growth in growths]


def make_optimizer(model: nn.Module) -> Any:
    return OPTIMIZERS["AdamW"](model.parameters())


def make_grower(model: nn.Module, optimizer: Any, scheduler: Any, rates: Rates | None = None) -> Grower:
    options: dict[str, Any] = {
        "what": "both",
        "units": 2,
        "per": "parameters",
        "tau": 0.0,
        "form": "residual",
        "rates": rates,
    }
    return Grower(model, optimizer, preset="paper", example=data(0, 1)[0][0][:3], trigger=triggers.Every(1), **options)


def epoch(model: Any, optimizer: Any, grower: Grower, batches: list[Any]) -> None:
    for batch in batches[:2]:
        step(model, optimizer, batch)
    assert grower.step(batches, cross_entropy) is not None


def resumed(rates: Rates | None = None) -> None:
    """A Grower decides as one process does; each process reads its shards of the wider tensors, and continues to the bit."""
    batches, joined = data(dist.get_rank(), dist.get_world_size()), data(0, 1)
    model, plain = shard(make_model()), make_model()
    making = partial(make_grower, rates=rates)
    mine, its = ((m, o, making(m, o, None)) for m in (model, plain) for o in [make_optimizer(m)])
    for _ in range(2):
        epoch(*mine, batches)
        epoch(*its, joined)
    assert "units" in [growth.site.kind for growth in mine[2].history]
    assert [str(growth.site) for growth in mine[2].history] == [str(growth.site) for growth in its[2].history]
    assert same(everything(*mine[:2]), everything(*its[:2]), 1e-10)
    save_checkpoint("widths.ckpt", model, optimizer=mine[1], grower=mine[2])
    found = load_checkpoint("widths.ckpt", make_model, make_optimizer, make_grower=making, wrap=shard)
    mine[1].zero_grad()
    assert same(everything(found.model, found.optimizer), everything(*mine[:2]))
    assert found.grower is not None
    warming = sum(WARMING[0] in state for state in found.optimizer.state.values())
    assert bool(warming) == (rates is not None)
    epoch(*mine, batches)
    epoch(found.model, found.optimizer, found.grower, batches)
    assert same(everything(*mine[:2]), everything(found.model, found.optimizer))


def probed() -> None:
    """A probe measures from the step itself what `measure` does, also after a growth and after a step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches, joined = data(rank, world), data(0, 1)
    model, plain = shard(make_model()), make_model()
    optimizer, other = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["AdamW"](plain.parameters())
    for number in range(2):
        sites, theirs = (find_sites(m, joined[0][0][:3], what="units", units=2) for m in (model, plain))
        with Probe(model, sites, ratio=False) as probe, Probe(plain, theirs, ratio=False) as expected:
            step(model, optimizer, batches[number])
            step(plain, other, joined[number])
            step(model, optimizer, batches[2])
            step(plain, other, joined[2])
        assert same(everything(model, optimizer), everything(plain, other), 1e-10)
        merits, wanted = probe.merits(), expected.merits()
        assert all(abs(a.value / b.value - 1) < 1e-9 for a, b in zip(merits, wanted, strict=True))
        grow(model, merits[1], optimizer=optimizer)
        grow(plain, wanted[1], optimizer=other)
        assert same(everything(model, optimizer), everything(plain, other), 1e-10)


def refused() -> None:
    """What one rank refuses no rank does, and nothing has changed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data(rank, world)
    model = shard(make_model())
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    step(model, optimizer, batches[0])
    site = find_sites(model, batches[0][0], what="units")[1]
    before = everything(model, optimizer)
    odd = optimizer.state[model[3].up.weight]  # type: ignore[index, union-attr]
    if rank == 1:
        odd["memory"] = [torch.zeros(2)]
    assert "'memory' is a list of tensors" in raised(lambda: grow(model, site, optimizer=optimizer))
    odd.pop("memory", None)
    calls = iter(range(9))
    hook = model.register_forward_hook(lambda module, args, output: output + rank * next(calls))
    text = raised(lambda: grow(model, site, optimizer=optimizer, check=(batches[0][0], None)))
    assert "the output" in text and ("rank 1" in text or rank == 1), text
    hook.remove()
    assert same(everything(model, optimizer), before)
    step(model, optimizer, batches[1])
    odd_columns, rows = ((lambda p: Shard(1) if tuple(p.shape) == (1, 6) else None), None)
    for place in (odd_columns, rows):
        torch.manual_seed(0)
        small = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).double()  # one row: a rank has none
        small = fully_shard(small, shard_placement_fn=place)
        if place is not None:
            sites = find_sites(small, batches[0][0], what="units", units=1)
            assert len(sites) == 0 and "2.weight is sharded along axis 1" in dict(sites.skipped)["0"]
        output = small(batches[0][0])
        (site,) = find_sites(small, batches[0][0], what="units", units=2)
        grow(small, site)
        assert torch.allclose(small(batches[0][0]), output, rtol=1e-12, atol=1e-12)
        small(batches[0][0]).sum().backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in small.parameters())  # type: ignore[union-attr]


def all_at_once() -> None:
    verbs()
    probed()
    resumed()
    resumed(Rates(warmup=5))
    refused()


def test_widths_of_a_sharded_model_are_those_of_a_whole_one(tmp_path: Path) -> None:
    ranks.run(all_at_once, 2, tmp_path)
