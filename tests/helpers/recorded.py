"""Short trainings with a history to look at."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sensli import Grower, History, triggers
from sensli.surgery.outline import outline
from sensli.surgery.record import Decision, Record, SiteMerit

X = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))


Y = (X[:, 0] * X[:, 1] > 0).long()


BATCHES = [(X, Y)]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def grow(calls: int = 4, **options: Any) -> Grower:
    model = make_model()
    grower = Grower(model, preset="paper", example=X[:1], **{"trigger": triggers.Every(2), "tau": 0, **options})
    for call in range(calls):
        grower.step(BATCHES, cross_entropy, metric=1 / (call + 1))
    return grower


def infinite() -> History:
    """A history of a training in which the existing weights had no gradient: the threshold's quotient is infinite."""
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    nn.init.ones_(model[0].bias)
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 0])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    grower = Grower(model, optimizer, preset="paper", example=x[:1], trigger=triggers.Every(1))
    grower.step([(x, y)], cross_entropy, metric=math.nan)
    return grower.history


class Block(nn.Module):
    """A block of a deep model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)


def deep(blocks: int = 24, growths: int = 20, kind: str = "Block", **names: Any) -> History:
    """The history of a deep model that grew far below and far above in turn, written by hand: training one would take long."""
    names_of = [f"residual_transformer_stage.blocks.{number}" for number in range(blocks)]
    make = type(kind, (Block,), {})
    stack = {str(number): make() for number in range(blocks)}
    record = Record(**names)
    for call in range(1, 3 * growths + 1):
        if call == 1:
            record.draw(0, outline(_model(stack)))
        record.count(call, 1e4 if call == 20 else 2.1 + 0.2 / call)
        if call % 3:
            continue
        number = call // 3
        merits = [
            SiteMerit(f"Twin(Block) after {name}", name, "after", 0.1 / k, 1.5 / k, None, 76, 100, "block")
            for k, name in enumerate(names_of, 1)
        ]
        place = number % 4 if number % 2 else len(stack) - number % 4
        layers = list(stack.items())
        new: nn.Module = make()
        new.sensli_growth = number
        stack = dict([*layers[:place], (f"grown{number}", new), *layers[place:]])
        facts = {
            "call": call,
            "tau": 1.0,
            "select": "largest",
            "reason": "its merit is the largest",
            "step_name": record.step_name,
        }
        record.decisions.append(
            Decision(**facts, merits=tuple(merits), growths=(number,), chosen=(3,), parameters=4000)
        )
        record.draw(call, outline(_model(stack)))
    return History(record=record)


def _model(stack: dict[str, nn.Module]) -> nn.Module:
    stage = nn.Module()
    stage.blocks = nn.Sequential(OrderedDict(stack))
    return nn.Sequential(OrderedDict(stem=nn.Linear(4, 4), residual_transformer_stage=stage, head=nn.Linear(4, 2)))
