"""DistributedDataParallel: real processes, gloo. The run equals one process on the joined batches; nobody waits for the dead."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ranks
from sensli import Grower, Probe, find_sites, insert, load_checkpoint, measure, save_checkpoint, triggers, undo

pytestmark = pytest.mark.process

BATCH, STEPS = 8, 4  # per rank and epoch


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


def data(rank: int, world: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of each joined batch; the joined batches are the same for any number of ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps, 4 * BATCH, 4, dtype=torch.float64, generator=generator)
    y = (x[..., 0] * x[..., 1] > 0).long()
    return [(a.chunk(world)[rank], b.chunk(world)[rank]) for a, b in zip(x, y, strict=True)]


def train(model: Any, batches: list[tuple[Tensor, Tensor]], epochs: int, **options: Any) -> tuple[Grower, list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    trigger = triggers.At(2, 3, 5)
    settings: dict[str, Any] = {"example": batches[0][0][:1], "tau": 0.0, "scheduler": scheduler, **options}
    grower = Grower(model, optimizer, trigger=trigger, **settings)
    merits = []
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()
        if grower.step(batches, cross_entropy, metric=1.0):
            assert grower.last_merits is not None
            merits += [merit.value for merit in grower.last_merits]
    return grower, merits


def result(model: nn.Module, grower: Grower, merits: list[float]) -> dict[str, Any]:
    names = [growth.name for growth in grower.history]
    return {"model": dict(model.state_dict()), "names": names, "merits": torch.tensor(merits, dtype=torch.float64)}


def same_on_all_ranks(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.contiguous())
        assert all(torch.equal(copy, tensor) for copy in copies), name


def grow(**options: Any) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(), **options)
    called: list[int] = []
    model.register_forward_hook(lambda *_: called.append(1))
    grower, merits = train(model, data(rank, world), epochs=6, select="random" if options else "largest")
    assert grower.model is model and len(grower.history) == 3
    assert len(called) == 6 * STEPS  # the user's hook on the wrapper is still there
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


@pytest.mark.parametrize(("function", "processes"), [(all_at_once, 2), (grow_plainly, 4)])
def test_the_run_equals_one_process_on_the_joined_batches(function: Any, processes: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for select, found in ranks.run(function, processes, tmp_path).items():
        model = make_model()
        grower, merits = train(model, data(0, 1), 6, select=select)
        compare(found, result(model, grower, merits))


def compare(found: Any, expected: Any) -> None:
    assert found["names"] == expected["names"]
    torch.testing.assert_close(found["merits"], expected["merits"], rtol=1e-10, atol=0)
    for name, tensor in expected["model"].items():
        torch.testing.assert_close(found["model"][name], tensor, rtol=1e-9, atol=1e-11)


def resumed() -> None:
    """Saved by all ranks, loaded and wrapped by all ranks: the run goes on to the bit, each rank with its own random state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data(rank, world)

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def make_grower(model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
        return Grower(model, optimizer, example=batches[0][0], trigger=triggers.Every(1), tau=0.0)

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
    assert ("has no group" in message) if rank == 1 else ("rank 1 failed: OptimizerError" in message), message
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
    grower = Grower(model, example=batches[0][0], trigger=Seen(metrics), tau=0.0)
    grower.step(batches, cross_entropy, metric=float(rank))
    assert metrics == [0.5]
    message = raised(lambda: grower.step(batches, cross_entropy, metric=None if rank else 1.0))
    assert "metric= is given on rank 0 and not given on rank 1" in message, message


class Wayward(triggers.Trigger):
    """Does what it is told, on rank 1 only."""

    def __init__(self) -> None:
        self.where, self.asked = "", 0

    def _at(self, where: str) -> bool:
        self.asked += 1
        if dist.get_rank() == 1 and self.where == f"{where} raises":
            raise ZeroDivisionError(where)
        return dist.get_rank() == 1 and self.where == f"{where} differs"

    def fires(self, moment: triggers.Moment) -> bool:
        return not self._at("fires")

    def allows(self, site: Any, moment: triggers.Moment) -> bool:
        late = moment.growths > 0
        return not self._at("allows second" if late else "allows")

    def grown(self) -> None:
        self._at("grown")

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def steps_that_fail(wrap: Any = DistributedDataParallel, make: Any = make_model) -> None:
    """Whatever fails or differs on one rank is one error on all of them, and nothing has changed on any."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = data(rank, world)
    model = wrap(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for x, y in batches:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    network = getattr(model, "module", model)
    average = torch.optim.swa_utils.AveragedModel(make())

    def seen(grower: Grower) -> Any:
        tensors = [(name, id(p), p.detach().clone()) for name, p in network.named_parameters()]
        groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        rates = [group["lr"] for group in optimizer.param_groups], list(scheduler.base_lrs)
        averaged = [name for name, _ in average.named_parameters()]
        return tensors, (groups, rates, averaged, grower.state_dict(), id(grower.last_merits))

    def case(
        text: str, own: str = "", *, trigger: str = "", given: Any = batches, loss: Any = cross_entropy, metric: Any = 1.0,
        **options: Any,
    ) -> None:  # fmt: skip
        wayward = Wayward()
        settings: dict[str, Any] = {
            "example": batches[0][0][:1], "tau": 0.0, "count": 2, "lr_scale": 0.5, "scheduler": scheduler, "max_factor": None, **options,
        }  # fmt: skip
        grower = Grower(model, optimizer, trigger=wayward, **settings)
        wayward.where = trigger
        before = seen(grower)
        message = raised(lambda: grower.step(given, loss, metric=metric))
        expected = own if own and rank == 1 else text
        assert expected in message, (expected, message)
        after = seen(grower)
        assert before[1] == after[1], (text, before[1], after[1])
        assert all(a[:2] == b[:2] and bool((a[2] == b[2]).all()) for a, b in zip(before[0], after[0], strict=True)), (
            text
        )
        cross_entropy(model(batches[0][0]), batches[0][1]).backward()  # still one model that trains
        optimizer.zero_grad()

    failed = "because rank 1 failed: "
    one = rank == 1
    for where in ("fires", "allows", "allows second", "grown"):
        case(f"{failed}ZeroDivisionError: {where}", "ZeroDivisionError", trigger=f"{where} raises")
    case("whether the trigger fires is True on rank 0 and False on rank 1", trigger="fires differs")
    case("Ranks disagree", trigger="allows differs")
    case("Ranks disagree", trigger="allows second differs")
    case("tau is 0.0 on rank 0 and 1.0 on rank 1", tau=float(rank))
    case("lr_scale is 0.5 on rank 0 and 0.7 on rank 1", lr_scale=0.7 if one else 0.5)
    case(f"{failed}BadExample", "does not run through", example=batches[0][0][:1, :2] if one else batches[0][0][:1])
    case("Ranks disagree", where=lambda site: not (one and site.path == "1"), layer="residual")
    case(f"{failed}WrongType: metric must be", "metric must be", metric="low" if one else 1.0)
    case("metric= is given on rank 0 and not given on rank 1", metric=None if one else 1.0)
    case(f"{failed}WrongType: batches must be", "batches must be", given=None if one else batches)
    case(
        f"{failed}ZeroDivisionError", "ZeroDivisionError", loss=(lambda output, target: 1 / 0) if one else cross_entropy
    )
    case(
        f"{failed}TypeError: select must return",
        "select must return",
        select=lambda merits: "the best" if one else merits[0],
        count=1,
    )
    case("choice 1 is", select=lambda merits: merits[rank], count=1)
    case("choice 1 is", select="random", seed=7 + 2 * rank)
    good = torch.optim.swa_utils.AveragedModel(make())
    bad = torch.optim.swa_utils.AveragedModel(make())
    if one:  # parameters of the same names, and no place for the layer
        bad.module = Loose(bad.module)
    case(f"{failed}HistoryError", "does not fit", averaged=[good, bad])
    other = torch.optim.SGD(network.parameters(), lr=0.1)
    case("Ranks disagree", scheduler=None if one else scheduler, lr_scale=1.0, own_rate=None if one else 0.5)
    assert other is not None

    # checkpoints
    grower = Grower(model, optimizer, example=batches[0][0][:1], trigger=triggers.Every(1), tau=0.0, max_factor=None)
    grower.step(batches, cross_entropy)
    message = raised(
        lambda: save_checkpoint("failing.ckpt", model, optimizer=optimizer, grower=None if one else grower)
    )
    assert ("has grown" if one else f"{failed}CheckpointError") in message, message
    assert not os.path.exists("failing.ckpt")
    message = raised(
        lambda: save_checkpoint("failing.ckpt", model, optimizer=None if one else optimizer, grower=grower)
    )
    assert "the number of tensors is" in message, message
    save_checkpoint("failing.ckpt", model, optimizer=optimizer, grower=grower)

    def load(path: str = "failing.ckpt", **options: Any) -> Any:
        makes: dict[str, Any] = {
            "make_model": make, "make_optimizer": lambda model: torch.optim.AdamW(model.parameters()), "wrap": wrap, **options
        }  # fmt: skip
        return load_checkpoint(path, **makes)

    message = raised(lambda: load("missing.ckpt" if one else "failing.ckpt"))
    assert ("cannot read" if one else f"{failed}CheckpointError: cannot read") in message, message
    message = raised(lambda: load(make_model=(lambda: nn.Linear(4, 2)) if one else make))
    assert ("does not fit" if one else f"{failed}HistoryError") in message, message
    message = raised(
        lambda: load(
            make_optimizer=(lambda model: 1 / 0) if one else (lambda model: torch.optim.AdamW(model.parameters()))
        )
    )
    assert ("ZeroDivision" if one else f"{failed}ZeroDivisionError") in message, message
    load()

    # without a Grower: what fails before the first agreement
    sites = find_sites(model, batches[0][0][:1])
    message = raised(lambda: measure(model, [] if one else sites, batches, cross_entropy))
    assert ("no sites" if one else f"{failed}MeasurementError") in message, message
    message = raised(lambda: measure(model, sites[:1] if one else sites, batches, cross_entropy))
    assert "site 2 is" in message and "None on rank 1" in message, message
    message = raised(lambda: measure(model, sites, batches, cross_entropy, confidence=0.9 if one else None))
    assert "confidence is None on rank 0 and 0.9 on rank 1" in message, message


class Loose(nn.Module):
    """The layers of another module under the same names, without what holds them."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        for name, module in other.named_children():
            if any(True for _ in module.parameters()):
                self.add_module(name, module)


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

    def fires(self, moment: triggers.Moment) -> bool:
        self.metrics.append(moment.metric)
        return False


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def die() -> Any:
    model = DistributedDataParallel(make_model())
    batches = data(dist.get_rank(), 2)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    measure(model, find_sites(model, batches[0][0]), batches, cross_entropy)


def test_a_rank_that_dies_stops_the_others_with_a_message(tmp_path: Path) -> None:
    ended = ranks.without_torchrun(die, 2, tmp_path)  # which would stop the others before they notice
    assert ended[1].returncode == -signal.SIGKILL
    assert ended[0].returncode == 1
    assert (
        "DistributedError: could not measure the merits, because another process of the job has ended"
        in ended[0].stderr
    )
