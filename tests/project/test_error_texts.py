"""What the texts of common mistakes say: the likely cause, every form of a value, and the name that was meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sensli
from models import fnn, points
from sensli import Grower, SensliError, find_sites, grow, load_checkpoint, triggers


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def other_optimizer(what: str) -> None:
    model = fnn()
    grow(model, find_sites(model, points(), what=what)[0], optimizer=sgd(fnn()))


def without_metric(trigger: triggers.Trigger) -> None:
    model, x = fnn(), points()
    Grower(model, sgd(model), trigger=trigger).step([(x, x)], nn.functional.mse_loss)


UNITS = "units must be a number of units (for example 8) or a share of those that a layer has (for example 0.25), got "


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: other_optimizer("layers"),
            "SGD contains no parameter of this Sequential, so it belongs to another model",
        ),
        (
            lambda: other_optimizer("units"),
            "SGD contains no parameter of this Sequential, so it belongs to another model",
        ),
        (lambda: without_metric(triggers.Diminishing()), "call grower.step(loader, loss_fn, metric=loss)."),
        (lambda: without_metric(triggers.Saturating()), "call grower.step(loader, loss_fn, metric=loss)."),
        (lambda: without_metric(triggers.Plateau(5)), "call grower.step(loader, loss_fn, metric=loss)."),
        (lambda: Grower(fnn(), trigger=10), "trigger must be one of sensli.triggers (for example "),  # type: ignore[arg-type]
        *((lambda units=units: Grower(fnn(), units=units), f"{UNITS}{units}.") for units in (1.5, 0.0, 0, -1)),
        (lambda: find_sites(fnn(), points(), what="unit"), "got 'unit'. Did you mean 'units'?"),
        (lambda: Grower(fnn(), strategy="gradMax"), "got 'gradMax'. Did you mean 'gradmax'?"),
        (lambda: Grower(fnn(), norm="frobenus"), "got 'frobenus'. Did you mean 'frobenius'?"),
        (lambda: find_sites(fnn(), points(), what="nothing"), "'both', got 'nothing'."),
        (lambda: load_checkpoint("nope.ckpt", fnn), "cannot read the checkpoint nope.ckpt: No such file or directory."),
    ],
)
def test_a_text_says_what_to_do(
    call: Callable[[], Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, SensliError), match=re.escape(text)) as raised:
        call()
    assert "Did you mean" in text or "Did you mean" not in str(raised.value)


@pytest.mark.parametrize("what", ["layers", "units", "both"])
def test_a_single_layer(what: str) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(SensliError) as raised:
        Grower(model, sgd(model), what=what, example=torch.randn(2, 4)).sites()
    told = str(raised.value)
    assert told.startswith("there is nowhere to grow in this Linear: 0 sites, 1 place skipped\n")
    assert told.count("nowhere to grow") == 1 and told.count("Linear") == 1
    if what != "units":
        assert "is the only layer with weights, and it is the output: nothing can go after it" in told


def test_an_example_of_several_arguments_has_one_pair_of_brackets() -> None:
    with pytest.raises(SensliError, match=re.escape("the example (float32 tensor of shape (1, 7)) does not run")):
        find_sites(fnn(), (torch.randn(1, 7),))
    with pytest.raises(SensliError, match=re.escape("the example (float32 tensor of shape (1, 7)) does not run")):
        find_sites(fnn(), torch.randn(1, 7))


def test_the_error_of_a_wrong_type_is_public() -> None:
    with pytest.raises(sensli.WrongType):
        Grower(fnn(), units="many")  # type: ignore[arg-type]
