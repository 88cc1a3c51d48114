"""What an earlier version wrote loads, and training continues: histories and checkpoints in `tests/data`, from commit bb21d91.

Each was made by five steps of AdamW with a growth at every second one, and the losses of the two steps after them are known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from sensli import Grower, History, load_checkpoint, replay, triggers
from sensli.page import page_data, write_page

DATA = Path(__file__).parents[1] / "data"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "layers": (mlp, {}),
    "units": (mlp, {"what": "units", "units": 2}),
    "blocks": (Stacked, {}),
    "both": (Stacked, {"what": "both", "units": 2, "recycle": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_history_loads_replays_and_becomes_a_page(name: str, tmp_path: Path) -> None:
    history = History.load(DATA / f"{name}.history.json")
    assert len(history) == 2 and len(history.record.decisions) == 2
    grown = replay(CASES[name][0](), history)
    assert sum(p.numel() for p in grown.parameters()) > sum(p.numel() for p in CASES[name][0]().parameters())
    write_page(tmp_path / "page.html", page_data(history))


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_loads_and_training_continues(name: str) -> None:
    make, options = CASES[name]
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
    found = load_checkpoint(
        DATA / f"{name}.ckpt", make, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        make_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 20),
        make_grower=lambda model, optimizer, scheduler: Grower(
            model, optimizer, preset="paper", example=x[:2], trigger=triggers.Every(2), tau=0.0, scheduler=scheduler, **options
        ),
    )  # fmt: skip
    assert found.extra == {"epoch": 5} and found.grower.calls == 5
    losses = []
    for _ in range(2):
        found.optimizer.zero_grad()
        loss = cross_entropy(found.model(x), y)
        loss.backward()
        found.optimizer.step()
        found.scheduler.step()
        losses.append(loss.item())
    assert losses == pytest.approx(json.loads((DATA / f"{name}.losses.json").read_text()), rel=1e-6)
    found.grower.step([(x, y)], cross_entropy)
    assert len(found.grower.history) == 3
