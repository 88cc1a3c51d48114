"""Mixed precision, compiled models, averages and gradient clipping go on working when a model grows."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import warm
from sensli import Grower, Probe, find_sites, insert, measure, triggers, undo
from sensli.errors import MeasurementError, UnsupportedModel

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


class Own(nn.Module):
    """A module of the user's own: torch does not compile the forward of nn.Sequential in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def values(merits: Any) -> Tensor:
    return torch.tensor([[merit.value, merit.ratio] for merit in merits], dtype=torch.float64)


def test_with_a_gradient_scaler_the_merits_are_those_of_the_loss_itself() -> None:
    model = make_model(torch.float64)
    x, sites = X.double(), find_sites(model, X.double())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**13)
    expected = values(measure(model, sites, [(x, Y)], cross_entropy))
    with Probe(model, sites, scaler=scaler) as probe:
        scaler.scale(cross_entropy(model(x), Y)).backward()
    assert model[0].weight.grad.abs().max() > 10  # type: ignore[union-attr]  # the step's gradients stay scaled
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(values(probe.merits()), expected, rtol=1e-12, atol=0)
    with Probe(model, sites) as probe:  # without the scaler they would be the square of the scale too large
        scaler.scale(cross_entropy(model(x), Y)).backward()
    assert values(probe.merits())[0, 0] > 1e6 * expected[0, 0]


def test_a_pass_that_overflows_under_the_scaler_says_so() -> None:
    model = make_model()
    sites, scaler = find_sites(model, X), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with Probe(model, sites, scaler=scaler) as probe:
        scaler.scale(1e10 * cross_entropy(model(X), Y)).backward()
    with pytest.raises(MeasurementError, match=r"overflowed at the scale.*next step"):
        probe.merits()


def train_scaled(grow: bool) -> Tensor:
    model = make_model(torch.float64)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler("cpu")
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(X.double()), Y)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 2 and grow:
            insert(model, find_sites(model, X.double())[0], optimizer=optimizer)
            model.get_submodule("grown1").requires_grad_(False)  # an identity that stays one: the run must not change
    return torch.cat([p.detach().flatten() for name, p in model.named_parameters() if "grown" not in name])


def test_a_scaled_run_goes_on_after_a_growth() -> None:
    assert torch.equal(train_scaled(grow=True), train_scaled(grow=False))


IN_BF16 = """
import torch
from torch.nn.functional import cross_entropy
from sensli import Trial
from test_precision import *
torch.set_num_threads(1)
model = make_model()
sites = find_sites(model, X)
exact = values(measure(model, sites, [(X, Y)], cross_entropy))
with torch.autocast("cpu", dtype=torch.bfloat16):
    inside = values(measure(model, sites, [(X, Y)], cross_entropy))
with Probe(model, sites) as probe:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(X), Y)
    loss.backward()
for found in (inside, values(probe.merits())):
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0)
    assert not torch.equal(found, exact)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
grower = Grower(model, optimizer, example=X, trigger=triggers.Every(2), tau=0.0)
losses = []
for _ in range(6):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(X), Y)
    loss.backward()
    optimizer.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grower.step([(X, Y)], cross_entropy)
    losses.append(loss.item())
assert len(grower.history) == 3 and losses[-1] < losses[0], losses
assert all(p.dtype == torch.float32 for p in model.parameters())

blocks = Blocks()
sites = find_sites(blocks, X, what="both", units=2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    same = find_sites(blocks, X, what="both", units=2)  # in half precision hardly anything is exact
    merits = measure(blocks, same, [(X, Y)], cross_entropy)
assert [str(site) for site in same] == [str(site) for site in sites] and {site.kind for site in sites} == {"block", "units"}
torch.testing.assert_close(values(merits), values(measure(blocks, [m.site for m in merits], [(X, Y)], cross_entropy)), rtol=0.1, atol=0)
grower = Grower(blocks, torch.optim.AdamW(blocks.parameters()), example=X, trigger=triggers.Every(1), tau=0.0, what="both", recycle=True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert grower.step([(X, Y)], cross_entropy) is not None
    blocks(X)  # with weights of another shape than those that autocast has cast before


def step(model, optimizer, batch):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def tried(trial, around):
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    grower = Grower(model, optimizer, example=X, trigger=triggers.Every(1), tau=0.0, what="both", trial=trial)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        grower.step([(X, Y)] * 6, cross_entropy)
    return torch.tensor([arm.score for arm in grower.history.record.decisions[-1].tried.arms])


inside, outside = tried(Trial(steps=6), True), tried(Trial(steps=6, step=step), False)
torch.testing.assert_close(inside, outside, rtol=0.02, atol=0)
stack = Grower(Blocks(), None, example=X, trigger=triggers.Every(1), strategy="g-stack")
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert stack.sites()
"""


class Blocks(nn.Module):
    """A loop that adds what its blocks give."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(X.shape[1], 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.last(x)
        return y


@pytest.mark.process
def test_bf16_autocast(tmp_path: Path) -> None:
    # In a process of its own: on some processors bf16 kernels stop with an illegal instruction unless this is set at the start.
    done = warm.run(["-c", IN_BF16], tmp_path, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.returncode == 0, done.stderr


@pytest.mark.process  # compiles
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_grows_compiles_once_more_and_stays_right(in_place: bool) -> None:
    # Changes after which torch would stop to compile: eight, if nothing is said.
    with torch._dynamo.config.patch(recompile_limit=3):
        grown_and_compiled(in_place, 5 - in_place)


def grown_and_compiled(in_place: bool, times: int) -> None:
    compiled_graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled_graphs.append(1)
        return graph.forward

    model = Own()
    if in_place:
        model.compile(backend=backend)
        called: Any = model
    else:
        called = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(called, optimizer, preset="paper", example=X, trigger=triggers.Every(1), tau=0.0)
    plain = Own()
    expected = values(measure(plain, find_sites(plain, X), [(X, Y)], cross_entropy))
    called(X)
    with Probe(
        called, find_sites(called, X)
    ) as probe:  # a step of a compiled model is seen although hooks are not compiled
        cross_entropy(called(X), Y).backward()
    torch.testing.assert_close(values(probe.merits()), expected)
    for growths in range(1, times + 1):
        before = called(X)
        assert len(compiled_graphs) == growths
        called(X)
        assert len(compiled_graphs) == growths
        grower.step([(X, Y)], cross_entropy)
        torch.testing.assert_close(called(X), before)
        assert len(compiled_graphs) == growths + 1
    assert len(grower.history) == times
    undo(called, grower.history[-1], optimizer=optimizer)
    torch.testing.assert_close(called(X), before)


class Around(nn.Module):
    """A model with a part that is compiled by itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def compiled_in(way: str, backend: Any) -> tuple[nn.Module, Any]:
    """A model, and what is called: all share the class of the compiled part, and with it torch's cache of code."""
    model = Own()
    if way == "wrapper":
        return model, torch.compile(model, backend=backend)
    if way == "in place":
        model.compile(backend=backend)
        return model, model
    if way == "part in place":
        model.compile(backend=backend)
        outer = Around(model)
        return outer, outer
    if way == "part":
        outer = Around(torch.compile(model, backend=backend))  # type: ignore[arg-type]
        return outer, outer
    sequential = make_model()
    return sequential, torch.compile(sequential, backend=backend)


@pytest.mark.process  # compiles
@pytest.mark.parametrize(
    ("way", "limit", "growths"),
    [
        ("wrapper", 256, 4),
        *((way, 256, 2) for way in ("in place", "part", "part in place", "sequential")),
        ("wrapper", 6, 7),
    ],
)
def test_another_compiled_model_keeps_its_code_when_one_grows(way: str, limit: int, growths: int) -> None:
    torch.compiler.reset()
    with torch._dynamo.config.patch(accumulated_recompile_limit=limit, recompile_limit=3):
        counts = grown_beside_another(way, growths)
    assert counts["growing"] == growths + 1
    # Where torch is about to give the function up, all code goes, so that it does not.
    assert counts["other"] == 1 if limit == 256 else 1 < counts["other"] < 10


def grown_beside_another(way: str, times: int) -> dict[str, int]:
    """How often a model that grows so many times was compiled, and another one of the same class."""
    counts = {"growing": 0, "other": 0}

    def counting(name: str) -> Any:
        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            counts[name] += 1
            return graph.forward

        return backend

    model, called = compiled_in(way, counting("growing"))
    _, other = compiled_in(way, counting("other"))
    called(X), other(X)
    for growths in range(1, times + 1):
        insert(called, find_sites(called, X)[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        found = called(X)
        called(X), other(X)
        assert counts["growing"] == growths + 1
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(found, called(X))
    return counts


@pytest.mark.process  # compiles
def test_the_old_code_of_a_grown_model_is_freed() -> None:
    graphs: list[weakref.ref[Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(weakref.ref(graph))
        return graph.forward

    called = torch.compile(Own(), backend=backend)
    for _ in range(5):
        called(X)
        insert(called, find_sites(called, X)[0])
    gc.collect()
    assert [graph() for graph in graphs[1:]] == [None] * 4  # the first is in the part of the cache that models share


@pytest.mark.process  # compiles
def test_a_compiled_run_is_the_same_run() -> None:
    ends = []
    for compiled in (False, True):
        model = make_model()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grower = Grower(called, optimizer, preset="paper", example=X, trigger=triggers.At(2), tau=0.0)
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(called(X), Y).backward()
            optimizer.step()
            grower.step([(X, Y)], cross_entropy)
        ends.append(called(X).detach())
        assert len(grower.history) == 1
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore")  # torch about itself
def test_inductor() -> None:
    model = make_model()
    compiled = torch.compile(model)
    with torch.no_grad():
        before = compiled(X)
        insert(compiled, find_sites(compiled, X)[0])
        torch.testing.assert_close(compiled(X), before)
        model.get_submodule("grown1").get_parameter("linear.weight").mul_(2)
        torch.testing.assert_close(compiled(X), model(X))


def test_an_average_grows_with_its_model() -> None:
    model = make_model(torch.float64)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model, optimizer, preset="paper", example=X.double(), trigger=triggers.At(2, 4), tau=0.0, averaged=average
    )
    for _ in range(6):
        optimizer.zero_grad()
        cross_entropy(model(X.double()), Y).backward()
        optimizer.step()
        average.update_parameters(model)
        kept = average(X.double())
        grown = grower.step([(X.double(), Y)], cross_entropy)
        assert torch.equal(average(X.double()), kept)
        assert [n for n, _ in average.module.named_parameters()] == [n for n, _ in model.named_parameters()]
        if grown:
            new = average.module.get_parameter(grown.parameters[0])
            assert new is not model.get_parameter(grown.parameters[0])
    assert not torch.equal(new, model.get_parameter(grower.history[-1].parameters[0]))


def test_an_average_of_another_model_is_refused() -> None:
    average = AveragedModel(make_model())
    model = make_model()
    insert(model, find_sites(model, X)[0])
    with pytest.raises(UnsupportedModel, match=r"averaged=.*not those of the model"):
        Grower(model, preset="paper", example=X, trigger=triggers.Every(1), averaged=average)


def test_clipped_training_sees_the_new_parameters() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growth = insert(model, find_sites(model, X)[0], optimizer=optimizer)
    cross_entropy(model(X), Y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    total = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(torch.as_tensor(total).sqrt(), torch.tensor(1e-3), rtol=1e-3, atol=0)
    assert all(model.get_parameter(name).grad is not None for name in growth.parameters)
