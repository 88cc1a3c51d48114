"""`Grower(select="least")`: a copy of the block that matters least, as the gradients of the blocks that are there say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import Block, deep, residual, snapshot
from sensli import Grower, find_sites, measure
from sensli.errors import MeasurementError, SensliError
from sensli.growing.triggers import At, Every
from sensli.merits.importance import measure_importance

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)).double()
Y = torch.randint(2, (24,), generator=torch.Generator().manual_seed(2))
BATCHES = [(X[:16], Y[:16]), (X[16:], Y[16:])]


def made() -> nn.Module:
    torch.manual_seed(4)
    model = residual(4)
    with torch.no_grad():
        model[2].second.weight.mul_(0.01)  # the second block hardly does anything
    return model


def by_hand(model: nn.Module) -> list[float]:
    """The mean over the batches, by samples, of the sum of |weight * gradient|."""
    model = copy.deepcopy(model)
    found = [0.0] * 4
    for x, y in BATCHES:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for index in range(4):
            found[index] += (
                sum(float((p.detach() * p.grad).abs().sum()) for p in model[1 + index].parameters()) * len(x) / len(X)
            )
    return found


def grower_of(model: nn.Module, **options: Any) -> Grower:
    options = {"trigger": Every(1), "what": "layers", "select": "least", "example": X[:2], **options}
    return Grower(model, torch.optim.Adam(model.parameters(), lr=1e-2), **options)


def test_importance_is_what_a_slow_loop_finds_and_nothing_is_touched() -> None:
    model = made()
    model[0].weight.requires_grad_(False)
    model[1].first.weight.grad = torch.ones_like(model[1].first.weight)
    before = snapshot(model)
    blocks = [module for module in model if isinstance(module, Block)]
    found = measure_importance(model, blocks, BATCHES, F.cross_entropy)
    assert found == pytest.approx(by_hand(model), rel=1e-9) and snapshot(model) == before
    with pytest.raises(MeasurementError, match="the batches are empty"):
        measure_importance(model, blocks, [], F.cross_entropy)


def test_the_least_important_block_is_copied_after_itself_and_the_function_stays() -> None:
    model = made()
    importance = by_hand(model)
    assert importance.index(min(importance)) == 1
    merits = measure(model, find_sites(model, X[:2], form="twin"), BATCHES, F.cross_entropy)
    assert merits.best.site.path != "2" and merits.worst.site.path != "2"  # neither by merit
    output, told = model(X), list[Any]()
    grower = grower_of(model, log=told.append)
    growth = grower.step(iter(BATCHES), F.cross_entropy)
    assert growth is not None and (growth.site.path, growth.site.side) == ("2", "after")
    assert torch.equal(model(X), output)
    new = model.get_submodule(growth.name)
    assert torch.equal(new.first.weight, model[2].first.weight) and not new.second.weight.any()
    assert "copies the least important of 4 blocks" in str(told[-1])
    assert told[-1].reason.startswith("select=least gave it")


def test_several_blocks_are_taken_from_the_least_on_and_the_threshold_holds() -> None:
    model = made()
    ranked = sorted(range(4), key=by_hand(model).__getitem__)
    grower = grower_of(model, max_growths=2)
    grower.step(BATCHES, F.cross_entropy)
    assert [each.site.path for each in grower.history] == [str(1 + index) for index in ranked[:2]]
    assert grower_of(made(), tau=1e9).step(BATCHES, F.cross_entropy) is None


def test_what_it_cannot_choose_from_is_refused() -> None:
    for options, text in (
        (
            {"what": "units"},
            r"^select='least' copies blocks: it needs what='layers' with form='auto' or 'twin', got what='un",
        ),
        ({"what": "both"}, r"^select='least' copies blocks: .* got what='both' and form='auto'"),
        ({"form": "relu"}, r"^select='least' copies blocks: .* form='relu'"),
        ({"confidence": 0.9}, r"^confidence= stops when the single largest merit is clear"),
        (
            {"select": "lest"},
            r"^select must be one of 'auto', .*, or a function of Merits that returns one of them, or 'least' for blocks",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            grower_of(made(), **options)
    with pytest.raises(
        SensliError, match=r"the model: select='least' copies blocks, and it has no stack of equal blocks"
    ):
        Grower(deep(), what="layers", select="least", trigger=At(1), example=X[:2]).sites()
