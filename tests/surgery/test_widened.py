"""All that follows a widening beside the optimizer: averages, checkpoints, replay, compiled models, several processes."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ranks
from sensli import Growth, History, find_sites, grow, load_checkpoint, replay, save_checkpoint, undo
from sensli.errors import CheckpointError, DistributedError, HistoryError, OptimizerError
from sensli.moves.sites import Site
from sensli.surgery.averaging import check_alike, follow
from sensli.surgery.rewinding import rewind
from widths import normal, width_site

X, Y = normal(32, 4, seed=1), torch.arange(32) % 3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def first(model: nn.Module, more: int = 2) -> Site:
    return width_site(model, "0", "3", more, norm="1")


def second(model: nn.Module, more: int = 3) -> Site:
    return width_site(model, "3", "5", more)


def step(model: nn.Module, *optimizers: Any, x: Tensor = X, y: Tensor = Y) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def same_values(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


# --- averages ---


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("ema", [False, True])
def test_an_average_gets_the_model_s_new_units_and_goes_on(ema: bool, buffers: bool) -> None:
    model = make_model()
    optimizer = adam(model)
    average = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.5) if ema else None, use_buffers=buffers
    )  # several updates, so that its weights have another spread than the model's
    for _ in range(4):
        step(model, optimizer)
        average.update_parameters(model)
    average.module.eval()
    old = {name: value.clone() for name, value in average.module.state_dict().items()}
    kept = average(X)
    growth = grow(model, first(model), optimizer=optimizer)
    follow(average, growth, model)
    check_alike(model, average)
    torch.testing.assert_close(average(X), kept, rtol=1e-12, atol=1e-14)
    for name, cut in {"0.weight": 0, "0.bias": 0, "1.running_var": 0, "3.weight": 1}.items():
        ours, theirs = average.module.state_dict()[name], model.state_dict()[name]
        assert torch.equal(ours.narrow(cut, 5, 2), theirs.narrow(cut, 5, 2)), name
        assert torch.equal(ours.narrow(cut, 0, 5), old[name]), name
        assert ours.data_ptr() != theirs.data_ptr()
    step(model, optimizer)
    before = average.module[0].weight[5:].clone()
    number = int(average.n_averaged)
    average.update_parameters(model)
    expected = before + (model[0].weight[5:] - before) * (0.5 if ema else 1 / (number + 1))
    torch.testing.assert_close(average.module[0].weight[5:], expected)
    undo(average.module, growth)
    undo(model, growth, optimizer=optimizer)
    check_alike(model, average)


def test_an_average_that_is_taken_back_is_to_the_bit_what_it_was() -> None:
    model = make_model()
    average = AveragedModel(model)
    average.update_parameters(model)
    before = copy.deepcopy(average.module)
    growth = grow(model, first(model))
    follow([average], growth, model)
    undo(average.module, growth)
    assert same_values(before, average.module) and str(before) == str(average.module)


# --- checkpoints, replay, rewinding ---

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "fused": True}), ("Adam", {}), ("AdamW", {"fused": True, "amsgrad": True}),
    ("NAdam", {}), ("RAdam", {"foreach": True}), ("Adamax", {}), ("Adadelta", {}), ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9}), ("Rprop", {}), ("ASGD", {"t0": 1.0}), ("Adafactor", {}), ("Muon", {}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_every_optimizer_resumes_to_the_bit_after_a_widening(
    kind: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    x = X.to(dtype)

    def make() -> nn.Module:
        return make_model().to(dtype)

    def optimizers_of(model: nn.Module) -> Any:
        cls = getattr(torch.optim, kind)
        if kind != "Muon":
            return [cls(model.parameters(), lr=0.01, **options)]
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return [cls(matrices, lr=0.01), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)]

    model = make()
    optimizers, history = optimizers_of(model), History()
    for site in (first, second, lambda m: find_sites(m, x[:2])[-1], lambda m: first(m, 1)):
        step(model, *optimizers, x=x)
        step(model, *optimizers, x=x)
        history.append(grow(model, site(model), optimizer=optimizers, check=x))
    save_checkpoint(tmp_path / "a", model, optimizer=optimizers, history=history)
    again = load_checkpoint(tmp_path / "a", make, optimizers_of)
    assert shapes(again.model) == shapes(model) and again.history == history
    assert same_values(model, again.model)
    for _ in range(3):
        step(model, *optimizers, x=x)
        step(again.model, *again.optimizer, x=x)
    assert same_values(model, again.model)
    theirs = dict(again.model.named_parameters())
    for ours, their in zip(optimizers, again.optimizer, strict=True):
        for name, parameter in model.named_parameters():
            for key, value in ours.state.get(parameter, {}).items():
                other = their.state[theirs[name]][key]
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (name, key)
    for growth in reversed(again.history):  # which is known by paths alone
        undo(again.model, growth, optimizer=again.optimizer)
    assert shapes(again.model) == shapes(make())
    step(again.model, *again.optimizer, x=x)


@pytest.mark.parametrize(("kind", "key"), [("AdamW", "exp_avg"), ("Adafactor", "col_var"), ("Rprop", "step_size")])
def test_a_state_of_the_old_width_is_refused(kind: str, key: str, tmp_path: Path) -> None:
    """torch would take it, and fail at the next step or, where it can, stretch a single number over all entries."""
    model = make_model()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    step(model, optimizer)
    history = [grow(model, second(model), optimizer=optimizer)]
    state = optimizer.state[model[5].weight]
    state[key] = state[key][:, :5].clone()
    save_checkpoint(tmp_path / "a", model, optimizer=optimizer, history=history)
    with pytest.raises(
        CheckpointError, match=rf"'{key}' in the state of parameter 6 in {kind} .* does not fit \(3, 8\)"
    ):
        load_checkpoint(tmp_path / "a", make_model, lambda m: getattr(torch.optim, kind)(m.parameters(), lr=0.01))


def test_a_history_with_widenings_is_json_and_builds_the_shapes() -> None:
    model = make_model()
    history = History(
        grow(model, site(model)) for site in (first, second, lambda m: find_sites(m, X[:2])[-1], lambda m: first(m, 1))
    )
    text = history.to_json()
    assert History.from_json(text) == history and "_entries" not in text
    read = History.from_json(text)
    assert read[0].resized == history[0].resized and str(read[0].resized[0]) == "0.weight: (5, 4) -> (7, 4)"
    again = replay(make_model(), read)
    assert shapes(again) == shapes(model) and str(again) == str(model)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(X), model(X), rtol=0, atol=0)
    assert shapes(replay(make_model(), history)) == shapes(model)  # as bound to the other model


@pytest.mark.parametrize("damage", ["another number", "another tensor", "another model"])
def test_a_history_that_does_not_fit_leaves_the_model_as_it_was(damage: str) -> None:
    model = make_model()
    growth = grow(model, first(model))
    fresh = make_model()
    if damage == "another number":
        growth = replace(growth, resized=(replace(growth.resized[0], new_shape=(9, 4)), *growth.resized[1:]))
    elif damage == "another tensor":
        growth = replace(growth, resized=growth.resized[1:])
    else:
        fresh[0] = nn.Linear(4, 3).double()
    before = copy.deepcopy(fresh)
    with pytest.raises(HistoryError, match=r"growth 1 .* does not fit this Sequential"):
        replay(fresh, History([growth]))
    assert same_values(before, fresh) and str(before) == str(fresh) and not hasattr(fresh[0], "sensli_changes")


@pytest.mark.parametrize(
    "entry",
    [None, {"name": 3, "old_shape": [1], "new_shape": [2]}, {"name": "a", "old_shape": ["x"], "new_shape": [2]}],
)
def test_a_damaged_record_of_shapes_is_refused(entry: Any) -> None:
    model = make_model()
    data = grow(model, first(model)).to_dict()
    data["resized"][0] = entry
    with pytest.raises(HistoryError, match="damaged"):
        Growth.from_dict(data)
    del data["resized"]
    assert Growth.from_dict(data).resized == ()  # of an earlier version


def test_rewinding_goes_back_and_forth_with_the_optimizer() -> None:
    model = make_model()
    optimizer = adam(model)
    step(model, optimizer)
    history = History([grow(model, first(model), optimizer=optimizer)])
    early, early_shapes = History(list(history)), shapes(model)
    step(model, optimizer)
    history.append(grow(model, second(model), optimizer=optimizer))
    step(model, optimizer)
    late, late_shapes = History.from_json(history.to_json()), shapes(model)
    now = history
    for wanted, expected in ((early, early_shapes), (late, late_shapes), (History(), shapes(make_model()))):
        rewind(model, now, wanted, optimizer=optimizer)
        assert shapes(model) == expected and len(now) == len(wanted)
        for parameter in model.parameters():
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
        step(model, optimizer)


# --- compiled models ---


class Own(nn.Module):
    """A module of the user's own: torch does not compile the forward of nn.Sequential in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_that_was_widened_compiles_once_more_and_trains(in_place: bool) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(1)
        return aot_eager(graph, inputs)

    plain, model = Own(), Own()
    called: Any = model if in_place else torch.compile(model, backend=backend)
    if in_place:
        model.compile(backend=backend)
    optimizers = adam(plain), adam(model)
    for growths in range(3):
        for net, optimizer in ((plain, optimizers[0]), (called, optimizers[1])):
            step(net, optimizer)
        assert len(graphs) == growths + 1
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
        for net, optimizer in ((plain, optimizers[0]), (called, optimizers[1])):
            network = plain if net is plain else model
            wide = network.layers[3].weight.shape
            last = grow(net, width_site(network, "layers.3", "layers.5", 1), optimizer=optimizer)
    undo(called, last, optimizer=optimizers[1])
    step(called, optimizers[1])
    assert len(graphs) == 4 and model.layers[3].weight.shape == wide


# --- several processes ---


def widen_in_two_processes() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # whose import warns

    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = X.chunk(world)[rank], Y.chunk(world)[rank]
    network = plain_model()
    model = DistributedDataParallel(network)
    optimizer = adam(network)
    step(model, optimizer, x=x, y=y)
    one = width_site(network, "0", "2", 2)
    growth = grow(model, one, optimizer=optimizer, check=x)
    for _ in range(3):
        step(model, optimizer, x=x, y=y)
    equal_on_all_ranks(network)
    result = {"widened": {name: value.clone() for name, value in network.state_dict().items()}}
    undo(model, growth, optimizer=optimizer)
    step(model, optimizer, x=x, y=y)
    equal_on_all_ranks(network)
    result["undone"] = {name: value.clone() for name, value in network.state_dict().items()}

    # statistics of a norm are each rank's own, and get new entries too
    normed = make_model()
    wrapped = DistributedDataParallel(normed)
    its = adam(normed)
    step(wrapped, its, x=x, y=y)
    grow(wrapped, first(normed), optimizer=its)
    for _ in range(2):
        step(wrapped, its, x=x, y=y)
    equal_on_all_ranks(normed)
    assert normed[1].running_mean.shape == (7,)

    # an optimizer that has divided the parameters among the processes cannot follow
    divided = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=0.01)
    before = shapes(network)
    with pytest.raises(
        OptimizerError, match="ZeroRedundancyOptimizer cannot follow a growth: it has divided the parameters"
    ):
        grow(model, width_site(network, "0", "2", 1), optimizer=divided)
    assert shapes(network) == before

    # one rank wants more units than the other: nothing changes on either
    with pytest.raises(DistributedError, match="Ranks disagree"):
        grow(model, width_site(network, "0", "2", 1 + rank), optimizer=optimizer)
    assert shapes(network) == before
    step(model, optimizer, x=x, y=y)
    return result


def plain_model() -> nn.Sequential:
    """Without a norm, whose statistics are each rank's own."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def equal_on_all_ranks(model: nn.Module) -> None:
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    copies = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, values)
    assert all(torch.equal(each, values) for each in copies)


@pytest.mark.process
def test_two_processes_widen_and_stay_one_model(tmp_path: Path) -> None:
    found = ranks.run(widen_in_two_processes, 2, tmp_path)
    model = plain_model()
    optimizer = adam(model)
    step(model, optimizer)
    first = X.chunk(2)[0]  # the rows are made for the batch of the first process
    growth = grow(model, width_site(model, "0", "2", 2), optimizer=optimizer, check=first)
    for _ in range(3):
        step(model, optimizer)
    torch.testing.assert_close(found["widened"], dict(model.state_dict()), rtol=1e-10, atol=1e-12)
    undo(model, growth, optimizer=optimizer)
    step(model, optimizer)
    torch.testing.assert_close(found["undone"], dict(model.state_dict()), rtol=1e-10, atol=1e-12)


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    known = {
        name for name, cls in inspect.getmembers(torch.optim, inspect.isclass) if issubclass(cls, torch.optim.Optimizer)
    }
    assert known - {"Optimizer", "LBFGS", "SparseAdam"} <= {kind for kind, _ in OPTIONS}
