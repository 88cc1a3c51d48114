"""Trials in real processes: one that is killed is repeated to the same end, and all ranks of a job keep the same network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ranks
import warm
from parallel import compare, data, make_model, result, same_on_all_ranks
from sensli import Grower, Trial, triggers

pytestmark = pytest.mark.process

PROGRAM = """
import os, signal
from pathlib import Path
import torch, torch._dynamo  # the first optimizer would import dynamo, in each process
from torch import nn
from torch.nn.functional import cross_entropy
from sensli import Grower, Trial, load_checkpoint, save_checkpoint, triggers

torch.set_num_threads(1)
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, (X[:, 0] * X[:, 1] > 0).long()), 16, shuffle=True)

def make_model():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), 0.02)

def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()

def run(name, kill=0):
    file, left = Path(f"{name}.ckpt"), [kill]

    def tried(model, optimizer, batch):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(model, optimizer, batch)

    def make_grower(model, optimizer, scheduler):
        size = lambda model: sum(p.numel() for p in model.parameters())
        trial = Trial(5, candidates=2, batches=loader, step=tried, metric=size, mode="max")
        return Grower(model, optimizer, example=X[:1], trigger=triggers.Every(2), tau=0.0, what="both", units=2, trial=trial)

    if file.exists():
        found = load_checkpoint(file, make_model, make_optimizer, make_grower=make_grower)
        model, optimizer, grower = found.model, found.optimizer, found.grower
    else:
        torch.manual_seed(0)
        model = make_model()
        optimizer = make_optimizer(model)
        grower = make_grower(model, optimizer, None)
    while grower.calls < 4:
        for batch in loader:
            train(model, optimizer, batch)
        grower.step(loader, cross_entropy)
        save_checkpoint(file, model, optimizer=optimizer, grower=grower)
    looks = [look.to_dict() for look in grower.history.record.decisions]
    torch.save([dict(model.state_dict()), optimizer.state_dict(), torch.get_rng_state(), looks], f"{name}.pt")

for kill in (8, 14):  # in the second network of the first trial, and inside of the second trial
    child = os.fork()
    if child == 0:
        run("killed", kill)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
run("killed")
run("whole")
"""


def test_a_killed_trial_is_repeated_to_the_same_end(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = warm.run(["program.py"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    killed, whole = (torch.load(tmp_path / f"{name}.pt") for name in ("killed", "whole"))
    assert len(whole[-1]) == 2 and all(look["tried"]["winner"] for look in whole[-1])  # both trials ended with a growth
    assert_equal(killed, whole)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, (list, tuple, dict)):
        assert len(one) == len(other)
        pairs = [(one[k], other[k]) for k in one] if isinstance(one, dict) else zip(one, other, strict=True)
        for a, b in pairs:
            assert_equal(a, b)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- several ranks ---


def trained(model: nn.Module, batches: list[Any], mode: str) -> tuple[Grower, list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    metric = None if mode == "loss" else lambda model: sum(p.numel() for p in model.parameters())

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        model.train()
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    trial = Trial(6, candidates=2, step=step, metric=metric, mode="max")
    grower = Grower(
        model, optimizer, preset="paper", example=batches[0][0][:1], trigger=triggers.Every(1), tau=0.0, what="both", units=2, trial=trial
    )  # fmt: skip
    scores = []
    for _ in range(2):
        for batch in batches:
            step(model, optimizer, batch)
        grower.step(batches, cross_entropy)
        tried = grower.history.record.decisions[-1].tried
        assert tried is not None
        scores += [arm.score or 0.0 for arm in tried.arms] + [tried.winner, tried.flops]
    return grower, scores


def on_ranks() -> Any:
    found = {}
    for mode in ("loss", "size"):
        model = DistributedDataParallel(make_model())
        grower, scores = trained(model, data(dist.get_rank(), dist.get_world_size()), mode)
        same_on_all_ranks(model.module)
        found[mode] = result(model.module, grower, scores)
    failing(make_model())
    return found


def failing(network: nn.Module) -> None:
    """What fails on all ranks leaves all of them as they were; a trial that differs is refused before anything is trained."""
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = data(dist.get_rank(), dist.get_world_size())
    before = {name: value.clone() for name, value in network.state_dict().items()}

    def step(*_: Any) -> float:
        raise ZeroDivisionError("mine")

    for trial in (Trial(2, step=step), Trial(2 + dist.get_rank())):
        grower = Grower(
            model, optimizer, preset="paper", example=batches[0][0][:1], trigger=triggers.Every(1), tau=0.0, trial=trial
        )
        try:
            grower.step(batches, cross_entropy)
        except Exception as error:
            text = str(error)
        assert ("mine" in text) if trial.step else ("Ranks disagree" in text and "trial is Trial(2" in text), text
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
        assert len(grower.history) == 0


def test_two_ranks_keep_the_network_that_one_process_keeps(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for mode, found in ranks.run(on_ranks, 2, tmp_path).items():
        model = make_model()
        grower, scores = trained(model, data(0, 1), mode)
        compare(found, result(model, grower, scores))
        assert len(grower.history) == 2 or mode == "loss"
