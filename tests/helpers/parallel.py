"""A training in several processes, to compare with one process; and what may fail on one rank, whatever wraps the model."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from sensli import Grower, Rates, find_sites, load_checkpoint, measure, save_checkpoint, triggers

BATCH, STEPS, TRAINED = 8, 4, 2  # per rank and epoch; of the steps so many train


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
    grower = Grower(model, optimizer, preset="paper", trigger=trigger, **settings)
    merits = []
    for _ in range(epochs):
        for x, y in batches[:TRAINED]:
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


def compare(found: Any, expected: Any) -> None:
    assert found["names"] == expected["names"]
    torch.testing.assert_close(found["merits"], expected["merits"], rtol=1e-10, atol=0)
    for name, tensor in expected["model"].items():
        torch.testing.assert_close(found["model"][name], tensor, rtol=1e-9, atol=1e-11)


class Wayward(triggers.Trigger):
    """Does what it is told, on rank 1 only."""

    def __init__(self) -> None:
        self.where, self.asked = "", 0

    def _at(self, where: str) -> bool:
        self.asked += 1
        if dist.get_rank() == 1 and self.where == f"{where} raises":
            raise ZeroDivisionError(where)
        return dist.get_rank() == 1 and self.where == f"{where} differs"

    def fires(self, moment: triggers.TriggerContext) -> bool:
        return not self._at("fires")

    def allows(self, site: Any, moment: triggers.TriggerContext) -> bool:
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
            "example": batches[0][0][:1], "tau": 0.0, "max_growths": 2, "rates": Rates(lr_factor=0.5), "scheduler": scheduler,
            "max_factor": None, **options,
        }  # fmt: skip
        grower = Grower(model, optimizer, preset="paper", trigger=wayward, **settings)
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
    case("lr_factor is 0.5 on rank 0 and 0.7 on rank 1", rates=Rates(0.7 if one else 0.5))
    case(f"{failed}BadExample", "does not run through", example=batches[0][0][:1, :2] if one else batches[0][0][:1])
    case("Ranks disagree", where=lambda site: not (one and site.path == "1"), form="residual")
    case(f"{failed}WrongType: metric must be", "metric must be", metric="low" if one else 1.0)
    case("metric= is given on rank 0 and not given on rank 1", metric=None if one else 1.0)
    case(f"{failed}WrongType: batches must be", "batches must be", given=3 if one else batches)
    case(
        f"{failed}ZeroDivisionError", "ZeroDivisionError", loss=(lambda output, target: 1 / 0) if one else cross_entropy
    )
    case(
        f"{failed}TypeError: select must return",
        "select must return",
        select=lambda merits: "the best" if one else merits[0],
        max_growths=1,
    )
    case("choice 1 is", select=lambda merits: merits[rank], max_growths=1)
    case("choice 1 is", select="random", seed=7 + 2 * rank)
    good = torch.optim.swa_utils.AveragedModel(make())
    bad = torch.optim.swa_utils.AveragedModel(make())
    if one:  # parameters of the same names, and no place for the layer
        bad.module = Loose(bad.module)
    case(f"{failed}HistoryError", "does not fit", averaged=[good, bad])
    other = torch.optim.SGD(network.parameters(), lr=0.1)
    case("Ranks disagree", scheduler=None if one else scheduler, rates=Rates(new_lr_factor=None if one else 0.5))
    assert other is not None

    # checkpoints
    grower = Grower(
        model, optimizer, preset="paper", example=batches[0][0][:1], trigger=triggers.Every(1), tau=0.0, max_factor=None
    )
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


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")
