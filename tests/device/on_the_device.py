"""What a user does on an accelerator, done on the one of device.cpp. `test_device.py` runs this in a process of its own.

By hand: `PYTHONPATH=src:tests/device python -m pytest -p sim_device tests/device/on_the_device.py`
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import sim_device
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sensli import (
    Grower,
    Probe,
    Trial,
    find_sites,
    grow,
    load_checkpoint,
    measure,
    recycle,
    save_checkpoint,
    triggers,
    undo,
)
from sensli.modules import random_state
from sensli.modules.running import to_device

SIM, OTHER = torch.device("sim", 0), torch.device("sim", 1)


def mlp(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(2, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 12), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(12, 2))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


class Block(nn.Module):
    """Of a transformer, as people write it: attention, then two layers, each added to what came."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(8), nn.LayerNorm(8)
        self.heads, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.before(x)).unflatten(-1, (3, 2, 4)).movedim(-2, 1).unbind(-2)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).movedim(1, -2).flatten(-2))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.between(x)))))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Linear(3, 8), nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


MODELS: dict[Any, tuple[int, ...]] = {mlp: (2,), cnn: (3, 6, 6), Transformer: (5, 3)}


def data(make: Any, count: int = 32, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    x = torch.randn(count, *MODELS[make])
    return x.to(device), (x.flatten(1).sum(1) > 0).long().to(device)


def states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.sim.get_rng_state(index) for index in range(2))]


def same(some: Any, others: Any) -> bool:
    return all(map(torch.equal, some, others))


def trained(model: nn.Module, x: Tensor, y: Tensor, optimizer: Any) -> None:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


# --- the device is as strict as a real one: otherwise the tests below could not fail ---


def test_the_device_refuses_what_cuda_refuses() -> None:
    x = torch.randn(3, 4, device=SIM)
    mixed = [
        lambda: x + torch.ones(3, 4),
        lambda: x @ torch.ones(4, 4),
        lambda: torch.cat([x, torch.ones(1, 4)]),
        lambda: x + torch.ones(3, 4, device=OTHER),
        lambda: nn.functional.conv1d(x, torch.ones(3, 3, 1)),
        lambda: nn.Linear(4, 4)(x),
    ]
    for wrong in mixed:
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=SIM, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="RNG state"):
        torch.sim.set_rng_state(torch.get_rng_state())
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert (x + torch.tensor(1.0)).device == SIM  # a number is welcome, as on CUDA
    assert torch.empty(5, device=SIM).isnan().all()


def test_each_device_draws_its_own_numbers() -> None:
    for device, moved in ((SIM, [False, True, False]), (OTHER, [False, False, True])):
        before = states()
        nn.functional.dropout(torch.ones(100, device=device), 0.5)
        assert [not torch.equal(one, other) for one, other in zip(before, states(), strict=True)] == moved
    torch.manual_seed(5)
    here = torch.rand(3)
    assert same([here], [torch.rand(3, device=OTHER).cpu()])  # the numbers of the CPU, so that results compare


def test_a_copy_to_the_host_arrives_when_somebody_waits() -> None:
    x = torch.ones(3, device=SIM)
    sim_device.reset_counts()
    early = x.to("cpu", non_blocking=True)
    assert early.isnan().all() and sim_device.waits() == 0
    torch.sim.synchronize()
    assert (early == 1).all() and sim_device.waits() == 1
    x.sum().item()
    x.nonzero()
    assert sim_device.waits() == 3 and sim_device.uploads() == 0
    torch.ones(3).to(SIM)
    assert sim_device.uploads() == 1


def test_backward_runs_in_a_thread_of_the_device() -> None:
    x, names = torch.ones(3, device=SIM, requires_grad=True), list[str]()
    x.register_hook(lambda _: names.append(threading.current_thread().name))
    x.sum().backward()
    assert names != [threading.current_thread().name]


# --- the same as on the CPU ---


@pytest.mark.parametrize(
    "make, what, norm",
    [
        (mlp, "both", "frobenius"), (mlp, "both", "operator"), (mlp, "both", "natural"), (cnn, "both", "natural"),
        (cnn, "both", "operator"), (Transformer, "both", "frobenius"), (Transformer, "both", "natural"),
    ],
)  # fmt: skip
def test_merits_are_those_of_the_cpu(make: Any, what: str, norm: str) -> None:
    model, (x, y) = make(), data(make, 256)  # with few samples all natural merits are zero
    there = copy.deepcopy(model).to(SIM)

    def merits(model: nn.Module) -> dict[str, float]:
        sites = find_sites(model, x[:2], what=what)  # on the CPU: an example and batches are moved
        return {str(merit.site): merit.value for merit in measure(model, sites, [(x, y)], cross_entropy, norm=norm)}

    expected, found = merits(model), merits(there)
    assert found == pytest.approx(expected, rel=1e-4) and any("units" in name for name in found)


@pytest.mark.parametrize("make, what", [(mlp, "layers"), (mlp, "units"), (cnn, "both"), (Transformer, "units")])
def test_an_example_on_the_cpu_is_moved(make: Any, what: str) -> None:
    model, (x, _) = make().to(SIM), data(make)
    expected = find_sites(model, x[:2].to(SIM), what=what)
    found = find_sites(model, x[:2], what=what)
    assert [str(site) for site in found] == [str(site) for site in expected] and found
    assert found.skipped == expected.skipped


def test_dead_units_are_found_with_an_example_on_the_cpu() -> None:
    model, (x, _) = mlp(), data(mlp)
    with torch.no_grad():
        model[0].bias[:2] = -100.0
    there = copy.deepcopy(model).to(SIM)
    expected = [str(growth.site) for growth in recycle(model, x)]
    assert [str(growth.site) for growth in recycle(there, x)] == expected and expected


@pytest.mark.parametrize(
    "name, options, what",
    [
        ("AdamW", {}, "both"), ("AdamW", {"fused": True}, "units"), ("Adam", {"capturable": True}, "units"),
        ("SGD", {"momentum": 0.9, "foreach": True}, "layers"), ("Adagrad", {}, "units"),
    ],
)  # fmt: skip
def test_growths_train_and_go_back_on_the_device(name: str, options: Any, what: str) -> None:
    x, y = data(mlp, device=SIM)
    model = mlp().to(SIM)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    trained(model, x, y, optimizer)
    best = measure(model, find_sites(model, x[:2], what=what), [(x, y)], cross_entropy).best
    grow(model, best.site, optimizer=optimizer, check=x)
    trained(model, x, y, optimizer)
    assert {each.device for each in [*model.parameters(), *model.buffers()]} == {SIM}
    undo(model, optimizer=optimizer)
    trained(model, x, y, optimizer)


@pytest.mark.parametrize("strategy", ["gradmax", "tiny", "net2net", "splitting", "firefly", "variance-transfer"])
def test_strategies_grow_what_they_grow_on_the_cpu(strategy: str) -> None:
    model, (x, y) = mlp(), data(mlp)
    there = copy.deepcopy(model).to(SIM)

    def grown(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: Any = {"what": "units", "strategy": strategy, "trigger": triggers.Every(1)}
        grower = Grower(model, optimizer, preset="paper", example=x[:2], **options)
        assert grower.step([(x, y)], cross_entropy)
        return [each.detach().cpu() for each in model.parameters()]

    for here, other in zip(grown(model), grown(there), strict=True):
        torch.testing.assert_close(here, other, rtol=1e-4, atol=1e-5)


# --- random numbers ---


@pytest.mark.parametrize("make, device", [(mlp, SIM), (mlp, OTHER), (Transformer, OTHER)], ids=str)
def test_a_look_gives_the_numbers_of_all_devices_back(make: Any, device: torch.device) -> None:
    x, y = data(make, device=device)
    model, before = make(0.2).to(device), states()
    best = measure(model, find_sites(model, x[:2], what="both"), [(x, y)], cross_entropy).best
    grow(model, best.site, check=x)
    assert same(before, states())


@pytest.mark.parametrize("what", ["layers", "both"])
def test_a_step_with_a_probe_draws_what_it_draws_without(what: str) -> None:
    x, y = data(mlp, device=SIM)
    model = mlp(0.2).to(SIM)
    sites, begin = find_sites(model, x[:2], what=what), torch.sim.get_rng_state(0)
    cross_entropy(model(x), y).backward()
    end = states()
    torch.sim.set_rng_state(begin, 0)
    with Probe(model, sites):
        cross_entropy(model(x), y).backward()
    assert same(end, states())


def test_units_are_checked_with_the_same_masks() -> None:
    x, y = data(mlp, device=SIM)
    model = mlp(0.2).to(SIM)
    grow(model, measure(model, find_sites(model, x[:2], what="units"), [(x, y)], cross_entropy).best.site, check=x)


def test_twins_of_blocks_that_draw_on_the_device_are_found() -> None:
    x, _ = data(Transformer)
    sites = find_sites(Transformer(0.2).to(SIM), x[:2], form="twin")
    assert len(sites) == len(find_sites(Transformer(0.2), x[:2], form="twin")) > 0


def test_a_trial_with_dropout_ends_as_on_the_cpu() -> None:
    """All arms start from the same numbers, and the winner's are those that training goes on with."""
    model, (x, y) = mlp(0.2), data(mlp)
    there = copy.deepcopy(model).to(SIM)

    def tried(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(7)
        options: Any = {"trigger": triggers.Every(1), "tau": 0, "what": "both", "trial": Trial(steps=4)}
        grower = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), preset="paper", example=x[:2], **options)
        grower.step([(x, y)], cross_entropy)
        return [each.detach().cpu() for each in model.parameters()]

    for here, other in zip(tried(model), tried(there), strict=True):
        torch.testing.assert_close(here, other, rtol=1e-4, atol=1e-5)


def test_random_states_of_older_checkpoints_and_of_other_devices_are_read() -> None:
    kept = random_state.capture()
    assert len(kept["sim"]) == 2
    torch.manual_seed(3)
    random_state.restore({**kept, "sim": kept["sim"][0], "cuda": [torch.zeros(16, dtype=torch.uint8)]})  # as MPS had it
    assert same(states()[:2], [kept["torch"], kept["sim"][0]]) and not same(states(), [kept["torch"], *kept["sim"]])
    random_state.restore(kept)
    assert same(states(), [kept["torch"], *kept["sim"]]) and random_state.equal_states(kept, random_state.capture())


def run_of(device: Any) -> tuple[Any, Any, Any]:
    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def make_grower(model: Any, optimizer: Any, _: Any) -> Grower:
        example = torch.ones(2, 2)
        return Grower(model, optimizer, preset="paper", example=example, trigger=triggers.Every(1), tau=0, what="both")

    return lambda: mlp(0.2).to(device), make_optimizer, make_grower


@pytest.mark.parametrize("index", [0, 1])
def test_a_checkpoint_goes_on_to_the_bit(tmp_path: Path, index: int) -> None:
    device = torch.device("sim", index)
    x, y = data(mlp, device=device)
    make, make_optimizer, make_grower = run_of(device)

    def epoch(model: nn.Module, optimizer: Any, grower: Grower) -> None:
        trained(model, x, y, optimizer)
        grower.step([(x, y)], cross_entropy)

    model = make()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, None)
    epoch(model, optimizer, grower)
    save_checkpoint(tmp_path / "run", model, optimizer=optimizer, grower=grower)
    epoch(model, optimizer, grower)
    torch.manual_seed(99)
    again = load_checkpoint(tmp_path / "run", make, make_optimizer, make_grower=make_grower)
    epoch(again.model, again.optimizer, again.grower)
    assert same(model.parameters(), again.model.parameters()) and len(grower.history) == 2


@pytest.mark.parametrize("there, back", [(SIM, "cpu"), ("cpu", SIM), (SIM, OTHER)], ids=str)
def test_a_checkpoint_goes_on_elsewhere(tmp_path: Path, there: Any, back: Any) -> None:
    x, y = data(mlp)
    make, make_optimizer, make_grower = run_of(there)
    model = make()
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, None)
    trained(model, x.to(there), y.to(there), optimizer)
    grower.step([(x, y)], cross_entropy)
    trained(model, x.to(there), y.to(there), optimizer)
    save_checkpoint(tmp_path / "run", model, optimizer=optimizer, grower=grower)
    again = load_checkpoint(tmp_path / "run", run_of(back)[0], make_optimizer, make_grower=make_grower)
    assert same([p.cpu() for p in model.parameters()], [p.cpu() for p in again.model.parameters()])
    assert {p.device for p in again.model.parameters()} == {torch.device(back)}
    trained(again.model, x.to(back), y.to(back), again.optimizer)
    assert again.grower.step([(x, y)], cross_entropy)


def test_a_rate_that_is_a_tensor_comes_back_on_the_device(tmp_path: Path) -> None:
    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5, device=SIM), capturable=True)

    model = mlp().to(SIM)
    optimizer = make_optimizer(model)
    trained(model, *data(mlp, device=SIM), optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    save_checkpoint(tmp_path / "run", model, optimizer=optimizer, extra={"mean": torch.ones(2, device=SIM)})
    again = load_checkpoint(tmp_path / "run", lambda: mlp().to(SIM), make_optimizer)
    rate = again.optimizer.param_groups[0]["lr"]
    assert rate.device == SIM and float(rate) == 0.25 and again.extra["mean"].device.type == "cpu"
    trained(again.model, *data(mlp, device=SIM), again.optimizer)


# --- where things are ---


@pytest.mark.parametrize("make", MODELS)
def test_a_default_device(make: Any) -> None:
    with torch.device(SIM):
        model, (x, y) = make(), data(make, device=SIM)
        assert next(model.parameters()).device == SIM
        before = states()
        optimizer = torch.optim.AdamW(model.parameters())
        options: Any = {"trigger": triggers.Every(1), "tau": 0, "what": "both", "recycle": True}
        grower = Grower(model, optimizer, preset="paper", example=x[:2], **options)
        assert grower.step([(x, y)], cross_entropy)
        trained(model, x, y, optimizer)
        undo(model, optimizer=optimizer)
        assert same(before, states())


@pytest.mark.parametrize("make", [mlp, cnn])
def test_a_model_on_the_cpu_beside_a_default_device(make: Any) -> None:
    model, (x, y) = make(), data(make)
    expected = [str(site) for site in find_sites(model, x[:2], what="both")]
    with torch.device(SIM):
        sites = find_sites(model, x[:2], what="both")
        assert [str(site) for site in sites] == expected
        grow(model, measure(model, sites, [(x, y)], cross_entropy).best.site, check=x)
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_what_comes_to_the_host_has_arrived() -> None:
    assert to_device(torch.ones(3, device=SIM), torch.device("cpu")).tolist() == [1, 1, 1]


def test_a_model_on_the_cpu_with_batches_on_the_device() -> None:
    model, (x, y) = mlp(), data(mlp)
    sites = find_sites(model, x[:2], what="both")
    expected = [merit.value for merit in measure(model, sites, [(x, y)], cross_entropy)]
    assert [m.value for m in measure(model, sites, [(x.to(SIM), y.to(SIM))], cross_entropy)] == expected


class OverTwo(nn.Module):
    """Its first layers on one device, the others on another; units made on one are read on the other."""

    def __init__(self, first: Any, second: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = torch.device(first), torch.device(second)
        self.one = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.Dropout(dropout)).to(first)
        self.two = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 2)).to(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu().to(self.second))


@pytest.mark.parametrize(
    "first, second, norm", [(SIM, OTHER, "natural"), ("cpu", SIM, "frobenius"), (SIM, "cpu", "natural")], ids=str
)
def test_a_model_over_two_devices(first: Any, second: Any, norm: str) -> None:
    x, y = data(mlp, 256)
    torch.manual_seed(3)
    here = OverTwo("cpu", "cpu")
    torch.manual_seed(3)
    model = OverTwo(first, second)
    sites = find_sites(model, x[:2].to(first), what="both")
    # Where the model itself moves values, a new layer would be on the wrong side: that place is skipped.
    expected = [site for site in find_sites(here, x[:2], what="both") if site.side != "before"]
    assert [str(site) for site in sites] == [str(site) for site in expected]
    assert any("same device" in each.reason for each in sites.skipped if each.path == "two.0")
    found = measure(model, sites, [(x.to(first), y.to(second))], cross_entropy, norm=norm)
    merits = measure(here, expected, [(x, y)], cross_entropy, norm=norm)
    assert {str(m.site): m.value for m in found} == pytest.approx({str(m.site): m.value for m in merits}, rel=1e-4)
    optimizer = torch.optim.AdamW(model.parameters())
    for merit in sorted(found, key=str)[:3]:
        grow(model, find_sites(model, x[:2], what="both", where=[merit.site.path])[0], optimizer=optimizer, check=x)
        trained(model, x.to(first), y.to(second), optimizer)


def test_a_model_over_two_devices_draws_what_it_drew() -> None:
    x, y = data(mlp)
    model = OverTwo(SIM, OTHER, dropout=0.2)
    before = states()
    options: Any = {"trigger": triggers.Every(1), "tau": 0, "what": "both"}
    grower = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), preset="paper", example=x[:2], **options)
    assert grower.step([(x, y)], cross_entropy) and same(before, states())


def test_a_trial_inside_autocast() -> None:
    x, y = data(mlp, device=SIM)
    model = mlp(0.1).to(SIM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options: Any = {"trigger": triggers.Every(1), "tau": 0, "what": "both", "trial": Trial(steps=3), "recycle": True}
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        Grower(model, optimizer, preset="paper", example=x[:2], **options).step([(x, y)], cross_entropy)
    assert {each.device for each in model.parameters()} == {SIM}


def test_a_probe_with_a_scaler() -> None:
    x, y = data(mlp, device=SIM)
    model, scaler = mlp().to(SIM), torch.amp.GradScaler("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Probe(model, find_sites(model, x[:2], what="both"), scaler=scaler) as probe:
        with torch.autocast("sim", dtype=torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert max(merit.value for merit in probe.merits()) > 0


# --- devices without double precision, as MPS and some of Intel's ---


class NoDouble(TorchDispatchMode):
    """Whatever makes float64 or complex128 on the device raises."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if (
                isinstance(each, Tensor)
                and each.device.type == "sim"
                and each.dtype in (torch.float64, torch.complex128)
            ):
                raise RuntimeError(f"this device has no float64 ({function})")
        return made


@pytest.mark.parametrize("make, norm", [(mlp, "natural"), (cnn, "operator")])
def test_nothing_needs_double_precision_on_the_device(make: Any, norm: str) -> None:
    (x, y), model = data(make, 64, SIM), make().to(SIM)
    optimizer = torch.optim.AdamW(model.parameters())
    options: Any = {"trigger": triggers.Every(1), "tau": 0, "what": "both", "norm": norm, "recycle": True}
    with NoDouble():
        with pytest.raises(RuntimeError, match="no float64"):
            x.double()
        assert Grower(model, optimizer, preset="paper", example=x[:2], **options).step([(x, y)], cross_entropy)
        trained(model, x, y, optimizer)
        undo(model, optimizer=optimizer)
        for start in ("gradmax", "net2net"):
            sites = find_sites(model, x[:2], what="units", init=start)
            grow(model, measure(model, sites, [(x, y)], cross_entropy).best.site, optimizer=optimizer, check=x)
        trained(model, x, y, optimizer)


def test_nor_do_blocks_of_a_transformer() -> None:
    (x, y), model = data(Transformer, 64, SIM), Transformer().to(SIM)
    with NoDouble():
        best = measure(model, find_sites(model, x[:2]), [(x, y)], cross_entropy, norm="natural").best
        grow(model, best.site, check=x)


@pytest.mark.parametrize("strategy", ["firefly", "morphnet", "net2net-deeper", "senn", "splitting"])
def test_no_strategy_needs_it(strategy: str) -> None:
    (x, y), model = data(mlp, 64, SIM), mlp().to(SIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NoDouble():
        grower = Grower(model, optimizer, preset="paper", example=x[:2], trigger=triggers.Every(1), strategy=strategy)
        grower.step([(x, y)], cross_entropy)
    assert {each.device for each in model.parameters()} == {SIM}


# --- what it would cost on a real one ---


@pytest.mark.parametrize("make, what", [(mlp, "layers"), (mlp, "units"), (cnn, "both"), (Transformer, "both")])
def test_the_host_waits_twice_per_batch_and_a_few_times_per_site(make: Any, what: str) -> None:
    x, y = data(make, device=SIM)
    model = make().to(SIM)
    sites = find_sites(model, x[:2], what=what)

    def counted(batches: int) -> tuple[int, int]:
        pairs = list(zip(x.chunk(batches), y.chunk(batches), strict=True))
        sim_device.reset_counts()
        measure(model, sites, pairs, cross_entropy)
        return sim_device.waits(), sim_device.uploads()

    few, many = counted(2), counted(4)
    assert many[0] - few[0] <= 2 * 2 and many[1] - few[1] <= 0
    assert few[0] <= 22 * len(sites)


@pytest.mark.parametrize("make", MODELS)
def test_a_search_for_units_waits_a_few_times_per_module(make: Any) -> None:
    (x, _), model = data(make, device=SIM), make().to(SIM)
    sim_device.reset_counts()
    find_sites(model, x[:2], what="units")
    assert sim_device.waits() <= 12 * len(list(model.modules()))
