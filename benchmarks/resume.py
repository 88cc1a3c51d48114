"""A run that is killed at random moments and started again ends with the weights of one that was left alone, to the bit.

The run is `train`: it resumes from a file if there is one, and returns a digest of all weights.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.figure import Figure
from sensli import Grower, Rates, load_checkpoint, save_checkpoint
from sensli.growing import triggers

EPOCHS = 24


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed: dict[str, Any] = {"params": [p for p in model.parameters() if p.ndim > 1]}
    others: dict[str, Any] = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], lr=0.01)


def make_scheduler(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * 4)


def make_grower(model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
    trigger = triggers.Every(5) & triggers.Limit(growths=3)
    options: dict[str, Any] = {"tau": 0.0, "select": "random", "rates": Rates(lr_factor=0.9)}
    return Grower(
        model, optimizer, preset="paper", example=torch.zeros(2, 8), trigger=trigger, scheduler=scheduler, **options
    )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()


def train(file: Path) -> str:
    """Train to the end, from the file if it is there, saving after each epoch. Returns a digest of the weights."""
    torch.set_num_threads(1)
    x, y = data()
    if file.exists():
        found = load_checkpoint(
            file, make_model, make_optimizer, make_scheduler=make_scheduler, make_grower=make_grower
        )
        model, optimizer, scheduler, epoch = found.model, found.optimizer, found.scheduler, found.extra["epoch"]
        grower = found.grower
    else:
        model, epoch = make_model(), 0
        optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer)
        grower = make_grower(model, optimizer, scheduler)
    assert grower is not None
    while epoch < EPOCHS:
        for index in torch.randperm(len(x)).split(64):  # the order of the data is part of the random state
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            scheduler.step()
        grower.step([(x, y)], cross_entropy)
        epoch += 1
        state = {"optimizer": optimizer, "scheduler": scheduler, "grower": grower}
        save_checkpoint(file, model, **state, extra={"epoch": epoch})
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def _work(file: Path, kill_after: float | None, pipe: Connection) -> None:
    start = time.process_time()
    if kill_after is not None:
        # Ends the process as SIGKILL would, wherever it is. It counts the time that the run computes, so that a busy machine
        # does not move the moment.
        signal.setitimer(signal.ITIMER_PROF, kill_after)
    digest = train(file)
    pipe.send((digest, time.process_time() - start))


def run(file: Path, kill_after: float | None = None) -> tuple[str | None, float]:
    """The run in a separate process, killed after so many seconds of computing. Returns its digest, None if killed, and its time."""
    # A server that has imported torch once and forks from there: the time goes into the run instead of twenty imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # which the first optimizer would import
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(file, kill_after, theirs))
    process.start()
    theirs.close()
    try:
        ended: tuple[str | None, float] = ours.recv()
    except EOFError:
        ended = None, kill_after or 0.0
    process.join()
    return ended


def killed_and_resumed(kills: int, seed: int = 0) -> tuple[bool, int]:
    """Whether a run with so many kills, spread at random over it, ends as one without; and how many kills hit it."""
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        expected, seconds = run(Path(folder) / "whole")
        assert expected is not None, "the run without a kill failed"
        hit = 0
        for _ in range(kills):
            ended, _ = run(Path(folder) / "killed", kill_after=moments.uniform(0, 2 * seconds / kills))
            hit += ended is None
        ended, _ = run(Path(folder) / "killed")
        return ended == expected, hit


def resume() -> list[Figure]:
    """Twenty kills in one run."""
    same, hit = killed_and_resumed(20)
    detail = (
        f"{hit} of 20 kills by a signal hit the run; {EPOCHS} epochs, 3 growths, AdamW, OneCycleLR, dropout, batch norm"
    )
    return [Figure("killed and resumed run equals the whole one to the bit", float(same), 1.0, detail, at_most=False)]
