"""What a watched training step costs, and checks that decide by watched steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.figure import Figure
from benchmarks.language import BYTES, LanguageModel, next_byte_loss
from benchmarks.measuring import interleaved
from benchmarks.networks import paper_cnn
from sensli.growing.grower import Grower
from sensli.growing.triggers import Every
from sensli.modules.flops import count_flops
from sensli.modules.running import fit_threads

ROUNDS = 7
EPOCHS, CHECKS, IMAGES, BATCH = 20, 3, 2000, 32  # experiment 1 of the paper at the laptop preset
WATCHED = 4


def watching_cost() -> list[Figure]:
    """A watched step against the same step, where layers and where units are measured; the share of the checks in a short training.

    On one thread: of several, those that wait count as processor seconds too.
    """
    with fit_threads():
        return _watching_cost()


def _watching_cost() -> list[Figure]:
    images = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last), torch.randint(0, 10, (BATCH,))
    text = torch.randint(0, BYTES, (8, 64)), torch.randint(0, BYTES, (8, 64))
    figures = []
    for name, make, (x, y), loss_fn in (
        ("paper's CNN", paper_cnn, images, cross_entropy),
        ("transformer", lambda: LanguageModel(blocks=4, width=128, heads=4, length=64), text, next_byte_loss),
    ):
        for what, bar in (("layers", 1.3), ("units", 1.6)):
            torch.manual_seed(0)
            works, first, grower = _works(make(), x, y, loss_fn, what)
            seconds = interleaved(works, ROUNDS, time.process_time)
            seconds.update(interleaved(first, 3, time.process_time))
            alone = seconds["first and decision"] - seconds["watched"]
            how = (
                f"{len(grower.sites())} sites, batch {len(x)}, step {seconds['step'] * 1e3:.0f} ms, beginning and decision "
                f"{alone * 1e3:.0f} ms more; median of {ROUNDS} interleaved rounds"
            )
            if what == "layers":  # a product as large as the forward pass of the new layer, exact over all samples
                new = sum(site.flops for site in grower.sites()) / 3 / count_flops(grower.model, x[:2])
                how += f"; by FLOPs at least {1 + new:.2f}"
            figures.append(
                Figure(f"watched step / step, {name}, {what}", seconds["watched"] / seconds["step"], bar, how)
            )
            if name == "paper's CNN" and what == "layers":
                figures.append(_share(seconds["step"], seconds["watched"] - seconds["step"], alone))
    return figures


def _works(
    model: nn.Module, x: Tensor, y: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor], what: str
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]], Grower]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    grower = Grower(model, optimizer, preset="paper", trigger=Every(1), tau=1e9, what=what, example=x[:2])

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()

    def watched() -> None:
        with grower.watch():
            step()

    def check() -> None:
        watched()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing grows
            grower.step(metric=1.0)

    check()
    return {"step": step, "watched": watched}, {"first and decision": check}, grower


def _share(step: float, more: float, alone: float) -> Figure:
    """Of all that checks add to a training of this length: the watched steps, the search and the decision."""
    share = CHECKS * (WATCHED * more + alone) / (EPOCHS * IMAGES / BATCH * step)
    how = f"{CHECKS} checks in {EPOCHS} epochs of {IMAGES} images, {WATCHED} watched steps each; computed from these times"
    return Figure("checks by watched steps / training, paper's CNN, 2,000 images", share, 0.01, how)
