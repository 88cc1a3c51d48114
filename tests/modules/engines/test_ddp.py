"""DistributedDataParallel: real processes, gloo. The run equals one process on the joined batches; nobody waits for the dead."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ranks
from parallel import TRAINED, compare, data, make_model, raised, result, same_on_all_ranks, steps_that_fail, train
from sensli import Grower, Probe, find_sites, insert, load_checkpoint, measure, save_checkpoint, triggers, undo

pytestmark = pytest.mark.process


def grow(**options: Any) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(), **options)
    called: list[int] = []
    model.register_forward_hook(lambda *_: called.append(1))
    grower, merits = train(model, data(rank, world), epochs=6, select="random" if options else "largest")
    assert grower.model is model and len(grower.history) == 3
    assert len(called) == 6 * TRAINED  # the user's hook on the wrapper is still there
    assert model.find_unused_parameters == options.get("find_unused_parameters", False)
    assert model.gradient_as_bucket_view == options.get("gradient_as_bucket_view", False)
    assert model.static_graph == options.get("static_graph", False)
    same_on_all_ranks(model.module)
    return result(model.module, grower, merits)


def grow_plainly() -> Any:
    return {"largest": grow()}


def all_at_once() -> Any:
    """All that two processes are started for: a start costs more than the work."""
    options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1}
    runs = {"largest": grow(), "random": grow(**options, broadcast_buffers=False)}
    grow(static_graph=True)
    ranks_that_differ()
    early_stops()
    resumed()
    steps_that_fail()
    return runs


@pytest.mark.parametrize(
    ("function", "processes"), [(all_at_once, 2), pytest.param(grow_plainly, 4, marks=pytest.mark.thorough)]
)
def test_the_run_equals_one_process_on_the_joined_batches(function: Any, processes: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for select, found in ranks.run(function, processes, tmp_path).items():
        model = make_model()
        grower, merits = train(model, data(0, 1), 6, select=select)
        compare(found, result(model, grower, merits))


def resumed() -> None:
    """Saved by all ranks, loaded and wrapped by all ranks: the run goes on to the bit, each rank with its own random state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data(rank, world)

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def make_grower(model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
        return Grower(model, optimizer, preset="paper", example=batches[0][0], trigger=triggers.Every(1), tau=0.0)

    def epoch(model: Any, optimizer: Any, grower: Grower) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()  # the noise is each rank's own
            optimizer.step()
        grower.step(batches, cross_entropy)

    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, None)
    torch.manual_seed(rank)
    epoch(model, optimizer, grower)
    save_checkpoint("ddp.ckpt", model, optimizer=optimizer, grower=grower)
    epoch(model, optimizer, grower)
    found = load_checkpoint(
        "ddp.ckpt", make_model, make_optimizer, make_grower=make_grower, wrap=DistributedDataParallel
    )
    assert found.grower is not None and found.grower.model is found.model
    epoch(found.model, found.optimizer, found.grower)
    assert [g.name for g in grower.history] == [g.name for g in found.grower.history]
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, found.model.module.state_dict()[name]), name


def ranks_that_differ() -> None:
    """Ranks that differ or fail are told, and nothing changes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches, whole = data(rank, world), data(0, 1)
    plain = make_model()
    expected = measure(plain, find_sites(plain, whole[0][0]), whole, cross_entropy)
    model = DistributedDataParallel(make_model())
    sites = find_sites(model, batches[0][0])

    # uneven: rank 0 has all batches of both, in other sizes; rank 1 has none
    uneven = [(torch.cat([x, x2]), torch.cat([y, y2])) for (x, y), (x2, y2) in zip(whole[:2], whole[2:], strict=True)]
    found = measure(model, sites, uneven if rank == 0 else [], cross_entropy)
    assert [abs(a.value / b.value - 1) < 1e-12 for a, b in zip(found, expected, strict=True)] == [True] * len(sites)
    assert found.samples == expected.samples

    # a probe in the user's own step sees the mean gradient, as the step does
    with Probe(model, sites) as probe:
        cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    first = measure(plain, find_sites(plain, whole[0][0]), whole[:1], cross_entropy)
    for _ in range(2):  # asking does not change what was caught
        assert all(abs(a.value / b.value - 1) < 1e-12 for a, b in zip(probe.merits(), first, strict=True))

    # one rank's bad batch is everybody's error, and nobody waits
    bad = [(batches[0][0] * float("nan"), batches[0][1])] if rank == 1 else batches
    message = raised(lambda: measure(model, sites, bad, cross_entropy))
    assert ("nan" in message) if rank == 1 else ("rank 1 failed: MeasurementError" in message), message

    # ranks that want different layers are stopped before anything changes
    before = [name for name, _ in model.named_parameters()]
    message = raised(lambda: insert(model, sites[0 if rank == 0 else 1]))
    assert "Ranks disagree: rank 0 is about to insert" in message, message
    assert [name for name, _ in model.named_parameters()] == before
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(1))] if rank == 1 else model.parameters(), lr=0.1)
    message = raised(lambda: insert(model, sites[0], optimizer=foreign))
    assert (
        ("contains no parameter of this" in message) if rank == 1 else ("rank 1 failed: OptimizerError" in message)
    ), message
    assert [name for name, _ in model.named_parameters()] == before

    # in and out again, still one synchronised model
    growth = insert(model, sites[0])
    undo(model, growth)
    cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    copies = [torch.empty_like(gradients) for _ in range(world)]
    dist.all_gather(copies, gradients)
    assert all(torch.equal(copy, gradients) for copy in copies)
    with model.no_sync():
        assert "no_sync" in raised(lambda: insert(model, sites[0]))

    # the trigger sees one metric
    metrics = []
    grower = Grower(model, preset="paper", example=batches[0][0], trigger=Seen(metrics), tau=0.0)
    grower.step(batches, cross_entropy, metric=float(rank))
    assert metrics == [0.5]
    message = raised(lambda: grower.step(batches, cross_entropy, metric=None if rank else 1.0))
    assert "metric= is given on rank 0 and not given on rank 1" in message, message


def early_stops() -> None:
    """All ranks stop at the same look, the one at which a single process stops that has the joined batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches, whole = data(rank, world, 60), data(0, 1, 60)
    plain = make_model()
    model = DistributedDataParallel(make_model())
    sites, own = find_sites(model, batches[0][0]), find_sites(plain, whole[0][0])
    level: dict[str, Any] = {"confidence": 0.9, "tolerance": 0.2}
    for given in (list, iter):  # of known length, and of unknown
        expected = measure(plain, own, given(whole), cross_entropy, **level)
        found = measure(model, sites, given(batches), cross_entropy, **level)
        assert expected.clear and expected.batches < 60
        assert (found.clear, found.samples, found.batches) == (True, expected.samples, world * expected.batches)
        assert all(abs(a.value / b.value - 1) < 1e-9 for a, b in zip(found, expected, strict=True))

    # never clear: exact, also where one rank's data ends long before the other's
    level = {"confidence": 1 - 1e-12}
    uneven = batches if rank == 0 else batches[:5]
    found = measure(model, sites, uneven, cross_entropy, **level)
    joined = [(x.chunk(world)[0], y.chunk(world)[0]) for x, y in whole]
    joined += [(x.chunk(world)[1], y.chunk(world)[1]) for x, y in whole[:5]]
    exact = measure(plain, own, joined, cross_entropy)
    assert found.clear is False and found.batches == 65
    assert all(abs(a.value / b.value - 1) < 1e-12 for a, b in zip(found, exact, strict=True))
    assert all(abs(a.ratio / b.ratio - 1) < 1e-12 for a, b in zip(found, exact, strict=True))

    # a failure after some looks is everybody's error, and nobody waits
    bad = [*batches[:10], (batches[0][0] * float("nan"), batches[0][1])] if rank == 1 else batches
    message = raised(lambda: measure(model, sites, bad, cross_entropy, **level))
    assert ("nan" in message) if rank == 1 else ("rank 1 failed: MeasurementError" in message), message

    # a rank without data knows the others' maps: the norm of a convolution hangs on them
    torch.manual_seed(0)
    images = torch.randn(8, 3, 6, 6), torch.arange(8) % 2
    small = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    exact = measure(small, find_sites(small, images[0], where="conv"), [images], cross_entropy)
    wrapped = DistributedDataParallel(small)
    sites = find_sites(wrapped, images[0], where="conv")
    found = measure(wrapped, sites, [images] if rank else [], cross_entropy)
    assert found.norm == "operator" and abs(found.best.ratio / exact.best.ratio - 1) < 1e-5


class Seen(triggers.Trigger):
    def __init__(self, metrics: list[Any]) -> None:
        self.metrics = metrics

    def fires(self, moment: triggers.TriggerContext) -> bool:
        self.metrics.append(moment.metric)
        return False


def die() -> Any:
    model = DistributedDataParallel(make_model())
    batches = data(dist.get_rank(), 2)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    measure(model, find_sites(model, batches[0][0]), batches, cross_entropy)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="torchrun would stop the others before they notice")
def test_a_rank_that_dies_stops_the_others_with_a_message(tmp_path: Path) -> None:
    (code, said), dead = ranks.unwatched(die, 2, tmp_path)
    assert (code, dead) == (1, (-signal.SIGKILL, ""))
    assert "DistributedError: could not measure the merits, because another process of the job has ended" in said
