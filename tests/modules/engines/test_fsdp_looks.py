"""Looks at a sharded model (FSDP2) in its own passes: merits are those of one process, and nothing is gathered but blocks in their turn."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, relu

import ranks
from parallel import data, raised
from sensli import Grower, Merits, Probe, find_sites, insert, measure, triggers
from sensli.merits import catching, norms
from sensli.merits.norms import Sketcher

pytestmark = pytest.mark.process


class Block(nn.Module):
    """A block of two parts, of which one may be sharded inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x)).tanh()
        return x + self.second(relu(self.first(x), inplace=True))


class Stack(nn.Module):
    """A stack of blocks between two layers."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(depth))
        self.act, self.mid, self.last = nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.act(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Adding(Stack):
    """The loop adds what the blocks give: a twin there has to be in the list to be measured."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.act(self.first(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def make(kind: Any = Stack, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    return kind().to(dtype)


def shard(model: Any, *, inside: bool = False, **options: Any) -> Any:
    for block in model.blocks:
        if inside:
            fully_shard(block.second, **options)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def same(found: Merits, expected: Merits, near: float = 1e-9) -> None:
    assert len(found) == len(expected) and max(merit.value for merit in expected) > 0
    assert (found.samples, found.norm) == (expected.samples, expected.norm)
    for a, b in zip(found, expected, strict=True):
        assert str(a.site) == str(b.site)
        assert a.value == pytest.approx(b.value, rel=near)
        assert a.ratio == pytest.approx(b.ratio, rel=near)


@contextmanager
def nothing_gathered() -> Iterator[None]:
    given, DTensor.full_tensor = DTensor.full_tensor, None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DTensor.full_tensor = given  # type: ignore[method-assign]


def gradients_of(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]


@contextmanager
def all_large() -> Iterator[None]:
    """Rows of units are rounded, and mixtures of two columns are summed."""
    given, room = catching.sketcher_for, norms.ROOM
    catching.sketcher_for, norms.ROOM = lambda entries, groups: Sketcher(2), 0
    try:
        yield
    finally:
        catching.sketcher_for, norms.ROOM = given, room


def equals_one_process() -> None:
    """Twins, layers and units; existing weights; after a pass without gradients; whatever the user's gradients are."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, near in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        batches, joined = ([(x.to(dtype), y) for x, y in data(*who)] for who in ((rank, world), (0, 1)))
        rows = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
        options: dict[str, Any] = {"mesh": rows} if dtype == torch.float64 else {"inside": True}
        model, plain = shard(make(dtype=dtype), **options), make(dtype=dtype)
        cross_entropy(model(batches[0][0]), batches[0][1]).backward()
        before = gradients_of(model)
        with torch.no_grad():
            model(batches[0][0])
        # Rows of units are made for the first batch of the first process, which of four is too small to have what one would see.
        for what, gathers in (("layers", False), ("units", True))[: 2 if world == 2 else 1]:
            sites, own = (find_sites(m, joined[0][0][:3], what=what) for m in (model, plain))
            expected = measure(plain, own, joined, cross_entropy)
            if gathers:
                same(measure(model, sites, batches, cross_entropy), expected, near)
                with all_large():
                    expected = measure(plain, own, joined, cross_entropy)
                    assert expected.spread > 0
                    same(measure(model, sites, batches, cross_entropy), expected, near)
            else:
                assert {"block", "linear"} == {site.kind for site in sites}
                with nothing_gathered():
                    same(measure(model, sites, batches, cross_entropy), expected, near)
                    same(measure(model, sites, batches, cross_entropy, norm="mean_square"),
                         measure(plain, own, joined, cross_entropy, norm="mean_square"), near)  # fmt: skip
        assert all(
            (a is None and b is None) or torch.equal(a, b) for a, b in zip(before, gradients_of(model), strict=True)
        )


def other_ways() -> None:
    """Other norms, other numbers of batches, samples that end early, and what is measured on a copy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches, joined = data(rank, world), data(0, 1)
    model, plain = shard(make()), make()
    what = "both" if world == 2 else "layers"
    sites, own = (find_sites(m, joined[0][0][:3], what=what) for m in (model, plain))
    one = partial(measure, plain, own, loss_fn=cross_entropy)
    several = partial(measure, model, sites, loss_fn=cross_entropy)
    for norm in ("operator", "natural"):
        same(several(batches, norm=norm), one(joined, norm=norm))
    for blocks in ([site for site in sites if site.kind == "block"], [site for site in sites if site.kind != "block"]):
        places = [str(site) for site in blocks]
        mine = [site for site in own if str(site) in places]
        found = measure(model, blocks, batches, cross_entropy, ratio=False)
        for a, b in zip(found, measure(plain, mine, joined, cross_entropy, ratio=False), strict=True):
            assert a.value == pytest.approx(b.value, rel=1e-9) and a.ratio is None
    x, y = (torch.cat(parts) for parts in zip(*joined, strict=True))
    whole = [(x[:40], y[:40]), (x[40:60], y[40:60]), (x[60:67], y[60:67]), (x[67:], y[67:])]
    uneven = whole[:3] if rank == 0 else whole[3:] if rank == 1 else []  # a process may have nothing at all
    layers = [site for site in sites if site.kind != "units"]
    theirs = [site for site in own if site.kind != "units"]
    same(measure(model, layers, uneven, cross_entropy), measure(plain, theirs, whole, cross_entropy))
    nothing = joined if rank == world - 1 else []
    same(measure(model, layers, nothing, cross_entropy), measure(plain, theirs, joined, cross_entropy))
    level: dict[str, Any] = {"confidence": 0.9, "tolerance": 0.5}
    expected = measure(plain, theirs, data(0, 1, 30), cross_entropy, **level)
    found = measure(model, layers, data(rank, world, 30), cross_entropy, **level)
    assert found.clear == expected.clear and expected.batches < 30
    same(found, expected)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cast = shard(make(dtype=torch.float32), mp_policy=half)
    cast.set_gradient_divide_factor(3.0)
    cast.set_force_sum_reduction_for_comms(True)  # gloo divides in no other way
    few = [(x.float(), y) for x, y in batches]
    rough = measure(cast, find_sites(cast, few[0][0][:3]), few, cross_entropy)
    for a, b in zip(rough, measure(plain, theirs, joined, cross_entropy), strict=True):
        assert a.value == pytest.approx(b.value, rel=0.1) and a.ratio == pytest.approx(b.ratio, rel=0.1)
    added, plain = shard(make(Adding)), make(Adding)
    sites, own = (find_sites(m, joined[0][0][:3]) for m in (added, plain))
    assert "block" in {site.kind for site in sites}
    same(measure(added, sites, batches, cross_entropy), measure(plain, own, joined, cross_entropy))
    added.set_requires_gradient_sync(False)  # gradients are being accumulated
    cross_entropy(added(batches[0][0]), batches[0][1]).backward()
    same(measure(added, sites, batches, cross_entropy), measure(plain, own, joined, cross_entropy))
    assert "summed over the processes" in raised(lambda: Probe(added, sites))


def step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def accumulated() -> None:
    """Passes whose gradients are summed over the processes only at the last of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches, joined = data(rank, world), data(0, 1)
    model, plain = shard(make()), make()
    sites, own = (find_sites(m, joined[0][0][:3]) for m in (model, plain))
    with Probe(model, sites) as probe, Probe(plain, own) as expected:
        for number in (0, 1):
            model.set_requires_gradient_sync(number == 1)
            cross_entropy(model(batches[number][0]), batches[number][1]).backward()
            cross_entropy(plain(joined[number][0]), joined[number][1]).backward()
    for a, b in zip(probe.merits(), expected.merits(), strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-8) and a.ratio == pytest.approx(b.ratio, rel=1e-8)
    probe = Probe(model, sites)
    model.set_requires_gradient_sync(False)
    cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    assert "earlier passes wait to be summed" in raised(probe.__enter__)


def probed() -> None:
    """Twins, layers, units and the ratio from steps of the user's, which change nothing; gradients may be accumulated."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches, joined = data(rank, world), data(0, 1)
    model, plain, alone = shard(make(), inside=True), make(), shard(make(), inside=True)
    mine, its, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain, alone))
    for what in ("layers", "units"):
        sites, own = (find_sites(m, joined[0][0][:3], what=what) for m in (model, plain))
        for number in range(2):
            with Probe(model, sites) as probe, Probe(plain, own) as expected:
                for each in (0, 1):
                    step(model, mine, batches[each])
                    step(plain, its, joined[each])
                if number:
                    mine.zero_grad()
                    its.zero_grad()
            step(alone, other, batches[0])
            step(alone, other, batches[1])
            if number:
                other.zero_grad()
            for _ in range(2):  # asking does not change what was caught
                for a, b in zip(probe.merits(), expected.merits(), strict=True):
                    assert a.value == pytest.approx(b.value, rel=1e-8) and a.ratio == pytest.approx(b.ratio, rel=1e-8)
    ours, theirs = ranks.wholes(dict(model.named_parameters())), ranks.wholes(dict(alone.named_parameters()))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def fails_together() -> None:
    """What fails on one rank fails on all with one text; the model is as it was, and trains."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data(rank, world)
    model, alone = shard(make()), shard(make())
    sites = find_sites(model, batches[0][0][:3], what="both")
    calls: list[int] = []

    def breaks(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if rank == 1 and len(calls) > 2:
            raise ZeroDivisionError("at the third batch")
        return cross_entropy(output, target)

    def check(text: str, own: str, call: Any) -> None:
        message = raised(call)
        assert (own if rank == 1 else text) in message, message
        assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
        for each in (model, alone):
            cross_entropy(each(batches[0][0]), batches[0][1]).backward()
        gradients = zip(gradients_of(model), gradients_of(alone), strict=True)
        assert all(torch.equal(a, b) for a, b in gradients)
        for each in (model, alone):
            each.zero_grad()

    failed = "because rank 1 failed: "
    check(
        f"{failed}ZeroDivisionError: at the third batch", "third batch", lambda: measure(model, sites, batches, breaks)
    )
    wrong = [batches[0], (batches[1][0][:, :2], batches[1][1])] if rank == 1 else batches
    check(f"{failed}RuntimeError", "RuntimeError", lambda: measure(model, sites, wrong, cross_entropy))

    def broken() -> Iterator[Any]:
        yield batches[0]
        if rank == 1:
            raise OSError("the disk is gone")
        yield batches[1]

    check(f"{failed}OSError: the disk", "the disk is gone", lambda: measure(model, sites, broken(), cross_entropy))
    check("the loss of batch 1 is nan", "the loss of batch 1 is nan", lambda: measure(
        model, sites, [batches[0], (batches[1][0] * (torch.nan if rank == 1 else 1), batches[1][1])], cross_entropy))  # fmt: skip
    make_small: Any = (lambda: make(Adding)) if rank == 1 else make
    found = partial(find_sites, model, batches[0][0][:3], what="both")
    check(f"{failed}UnsupportedModel", "the same paths and classes", lambda: found(sibling=make_small))
    raises: Any = (lambda: 1 / 0) if rank == 1 else make
    check(f"{failed}UnsupportedModel", "makes no model", lambda: found(sibling=raises))
    assert [str(site) for site in found(sibling=make)] == [str(site) for site in sites]


def watched() -> None:
    """Steps that train are watched, and decide as one process does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chosen = []
    for model, batches in ((shard(make()), data(rank, world)), (make(), data(0, 1))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        grower = Grower(model, optimizer, preset="paper", what="layers", example=data(0, 1)[0][0][:3], tau=0.0,
                        trigger=triggers.Every(1))  # fmt: skip
        for x, y in batches:
            with grower.watch():
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        growth = grower.step()
        assert growth is not None and grower.last_merits is not None
        chosen.append((growth, grower.last_merits))
    (mine, merits), (its, expected) = chosen
    assert str(mine.site) == str(its.site)
    for a, b in zip(merits, expected, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-8) and a.ratio == pytest.approx(b.ratio, rel=1e-8)


def all_at_once() -> None:
    equals_one_process()
    other_ways()
    probed()
    accumulated()
    fails_together()
    watched()


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_looks_at_a_sharded_model_are_those_of_one_process(tmp_path: Path, processes: int) -> None:
    ranks.run(all_at_once, processes, tmp_path)


def by_configuration() -> None:
    """A model with a configuration is searched on a small one; a decision about it gathers the one block that is copied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rank, world = dist.get_rank(), dist.get_world_size()
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48, vocab_size=64
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    ids = torch.randint(64, (3, 8, 6), generator=torch.Generator().manual_seed(0))
    own, joined = ([{"input_ids": x, "labels": x} for x in each] for each in (ids.chunk(world, 1)[rank], ids))
    with nothing_gathered():
        sites = find_sites(model, joined[0], where="block")
        found = measure(model, sites, own)
    theirs = find_sites(plain, joined[0], where="block")
    same(found, measure(plain, theirs, joined), 1e-5)
    with torch.no_grad():
        before = model(ids[0]).logits
    growth = insert(model, found.best)
    assert isinstance(model.get_submodule(growth.name), FSDPModule) and model.config.num_hidden_layers == 5
    assert model.get_submodule(growth.name).self_attn.config is model.config
    with torch.no_grad():
        assert torch.equal(model(ids[0]).logits, before)


@pytest.mark.library
def test_a_sharded_model_with_a_configuration_is_never_gathered(tmp_path: Path) -> None:
    ranks.run(by_configuration, 2, tmp_path, ["transformers.models.llama.modeling_llama"])


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_the_backward_pass(module: Any, args: Any, output: torch.Tensor) -> None:
    output.register_hook(killed)


def die(hook: Any = killed) -> None:
    model, batches = shard(make()), data(dist.get_rank(), 2)
    sites = find_sites(model, batches[0][0][:3])
    if dist.get_rank() == 1:
        model.blocks[1].register_forward_hook(hook)
    measure(model, sites, batches, cross_entropy)


def die_later() -> None:
    die(killed_in_the_backward_pass)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="torchrun would stop the others before they notice")
@pytest.mark.parametrize("death", [die, die_later])
def test_a_rank_that_dies_in_a_look_stops_the_others_with_a_message(tmp_path: Path, death: Any) -> None:
    (code, said), dead = ranks.unwatched(death, 2, tmp_path)
    assert (code, dead) == (1, (-signal.SIGKILL, ""))
    assert "DistributedError: could not run the model, because another process of the job has ended" in said
