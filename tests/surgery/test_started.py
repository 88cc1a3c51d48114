"""What follows units that start with columns, or as copies: the optimizer, undo, averages, checkpoints, replay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import ranks
from optimizers import KEEPING_COPIES
from sensli import Growth, History, find_sites, grow, load_checkpoint, measure, replay, save_checkpoint, undo
from sensli.errors import FunctionChanged, HistoryError
from sensli.moves.sites import Site
from sensli.surgery.averaging import check_alike, follow
from widths import normal

X, Y = normal(32, 4, seed=1), torch.arange(32) % 3
STARTS = ("gradmax", "net2net")


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    cross_entropy(model(X), Y).backward()
    optimizer.step()


def site_of(model: nn.Module, start: str, path: str = "0", units: int = 7) -> Site:
    sites = find_sites(model, X[:2], what="units", units=units, init=start, where=lambda site: site.path == path)
    return measure(model, sites, [(X, Y)], cross_entropy).best.site


def values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = torch.as_tensor(value).clone()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("kind", ["AdamW", *KEEPING_COPIES])
@pytest.mark.parametrize("start", STARTS)
def test_without_a_step_undo_gives_everything_back_to_the_bit(start: str, kind: str) -> None:
    model = make_model()
    optimizer = KEEPING_COPIES.get(kind, torch.optim.AdamW)(model.parameters())
    for _ in range(3):
        step(model, optimizer)
    before, text = values(model, optimizer), str(model)
    growths = [grow(model, site_of(model, start, path), optimizer=optimizer, check=X) for path in ("0", "2", "0")]
    for growth in reversed(growths):
        undo(model, growth, optimizer=optimizer)
    assert same(values(model, optimizer), before) and str(model) == text
    step(model, optimizer)


def test_an_optimizer_that_averages_averages_the_copies_too() -> None:
    """ASGD keeps the mean of the parameters: as a network it is the same with copies."""
    model, mean = make_model(), make_model()
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, t0=1.0)
    for _ in range(4):
        step(model, optimizer)

    def averaged() -> Tensor:
        with torch.no_grad():
            for mine, its in zip(mean.parameters(), model.parameters(), strict=True):
                mine.copy_(optimizer.state[its]["ax"])
            return mean(X)

    before = averaged()
    growth = grow(model, site_of(model, "net2net"), optimizer=optimizer)
    replay(mean, History([growth]))
    torch.testing.assert_close(averaged(), before, rtol=1e-12, atol=1e-12)
    undo(mean, growth)
    undo(model, growth, optimizer=optimizer)
    torch.testing.assert_close(averaged(), before, rtol=1e-12, atol=1e-12)


def test_after_steps_undo_gives_the_shares_of_copies_back() -> None:
    """By the sum of what a unit and its copies have, so that copies that have stayed equal leave no trace."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growth = grow(model, site_of(model, "net2net"), optimizer=optimizer)
    for _ in range(3):
        step(model, optimizer)
    after = model(X).detach()
    columns, sources = model[2].weight.detach().clone(), growth.site.move.sources
    read = Growth.from_dict(growth.to_dict())  # as a file has it
    undo(model, read, optimizer=optimizer)
    expected = columns[:, :5].clone()
    for number, source in enumerate(sources):
        expected[:, source] += columns[:, 5 + number]
    torch.testing.assert_close(model[2].weight.detach(), expected)
    torch.testing.assert_close(model(X).detach(), after, rtol=1e-12, atol=1e-12)


def test_copies_in_another_state_than_memory_are_given_back_up_to_rounding() -> None:
    model = make_model()
    before = values(model)
    growth = grow(model, site_of(model, "net2net"))
    other = copy.deepcopy(model)
    undo(other, growth)
    torch.testing.assert_close(values(other), before, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("start", STARTS)
def test_an_average_keeps_its_function_and_is_taken_back(start: str) -> None:
    model = make_model()
    optimizer = adam(model)
    average = AveragedModel(model)
    for _ in range(4):
        step(model, optimizer)
        average.update_parameters(model)
    before, kept = values(average.module), average(X).detach()
    growth = grow(model, site_of(model, start), optimizer=optimizer)
    follow(average, growth, model)
    check_alike(model, average)
    torch.testing.assert_close(average(X).detach(), kept, rtol=1e-12, atol=1e-14)
    undo(average.module, growth)
    assert same(values(average.module), before)
    follow(average, growth, model)
    step(model, optimizer)
    average.update_parameters(model)
    undo(average.module, growth)
    undo(model, growth, optimizer=optimizer)
    check_alike(model, average)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "ASGD", "Adafactor"])
@pytest.mark.parametrize("start", STARTS)
def test_a_checkpoint_resumes_to_the_bit(start: str, kind: str, tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {"t0": 1.0} if kind == "ASGD" else {}
        found: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        return found

    model = make_model()
    optimizer, history = optimizer_of(model), History()
    for path in ("0", "2", "0"):
        step(model, optimizer)
        history.append(grow(model, site_of(model, start, path, 2), optimizer=optimizer, check=X))
    save_checkpoint(tmp_path / "a", model, optimizer=optimizer, history=history)
    again = load_checkpoint(tmp_path / "a", make_model, optimizer_of)
    assert again.history == history
    for _ in range(3):
        step(model, optimizer)
        step(again.model, again.optimizer)
    assert same(values(model, optimizer), values(again.model, again.optimizer))
    for growth in reversed(again.history):
        undo(again.model, growth, optimizer=again.optimizer)
    step(again.model, again.optimizer)


@pytest.mark.parametrize("start", STARTS)
def test_a_history_repeats_the_shapes_and_the_sources(start: str) -> None:
    model = make_model()
    history = History([grow(model, site_of(model, start)), grow(model, site_of(model, start, "2"))])
    read = History.from_json(history.to_json())
    assert read == history
    again = replay(make_model(), read)
    torch.testing.assert_close(again(X), make_model()(X), rtol=1e-12, atol=1e-12)  # of fresh values too
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(X), model(X), rtol=0, atol=0)
    if start == "net2net":
        assert read[0].site.move.sources == history[0].site.move.sources != ()


@pytest.mark.parametrize("sources", [[0, 1], [0] * 6 + [5], [0] * 6 + [-2]])
def test_sources_that_no_growth_has_are_refused(sources: list[int]) -> None:
    model = make_model()
    data = grow(model, site_of(model, "net2net")).to_dict()
    data["site"]["move"]["sources"] = sources
    with pytest.raises(HistoryError, match="damaged"):
        Growth.from_dict(data)


def test_a_growth_that_fails_its_check_leaves_sources_and_optimizer_as_they_were() -> None:
    """A layer that changes with the number of its units: the check finds it, and all is put back."""
    model = make_model()
    optimizer = adam(model)
    step(model, optimizer)
    site = site_of(model, "net2net")
    model[1].register_forward_hook(lambda module, args, output: output * output.shape[-1])
    before = values(model, optimizer)
    with pytest.raises(FunctionChanged):
        grow(model, site, optimizer=optimizer, check=X)
    assert same(values(model, optimizer), before)


def start_in_two_processes() -> Any:
    rank, found = dist.get_rank(), {}
    for start in STARTS:
        model = make_model()
        sites = find_sites(model, X[:2], what="units", units=7, init=start)
        wrapped = DistributedDataParallel(model)
        merits = measure(wrapped, sites, [(X[rank::2], Y[rank::2])], cross_entropy)
        grow(wrapped, merits.best, check=X)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        both = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(both, weights)
        assert torch.equal(*both)
        found[start] = [merit.value for merit in merits], weights
    return found


@pytest.mark.process
def test_two_processes_start_their_units_alike(tmp_path: Path) -> None:
    found = ranks.run(start_in_two_processes, 2, tmp_path)
    for start in STARTS:
        model = make_model()
        sites = find_sites(model, X[:2], what="units", units=7, init=start)
        merits = measure(model, sites, [(X, Y)], cross_entropy)
        assert found[start][0] == pytest.approx([merit.value for merit in merits], rel=1e-10)
        grow(model, merits.best)
        expected = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(found[start][1], expected, rtol=1e-8, atol=1e-8)
