"""Random models keep every promise; a failure prints the recipe that repeats it."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("hypothesis", reason="random models need hypothesis")

from hypothesis import given, settings

import random_models
from invariants import REPEATABLE, check
from random_models import PIECES, Recipe, piece, recipes

EXAMPLES = int(os.environ.get("SENSLI_RANDOM_MODELS", "40"))


@pytest.mark.slow
@settings(REPEATABLE, max_examples=EXAMPLES)
@given(recipes())
def test_random_models_keep_every_promise(recipe: Recipe) -> None:
    check(recipe, most=1)


@settings(REPEATABLE, max_examples=50)
@given(recipes())
def test_a_recipe_is_its_text(recipe: Recipe) -> None:
    text = repr(recipe)
    assert repr(eval(text, vars(random_models))) == text


@pytest.mark.parametrize("kind", random_models.KINDS)
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.slow
def test_every_piece_runs_with_each_of_its_options(name: str, kind: str) -> None:
    if name in random_models.FOR_TOKENS and kind != "tokens":
        return
    for key, values in PIECES[name][1].items():
        for value in values:
            model, x, _ = Recipe(kind, piece(name, **{key: value}), train=True).build()
            again = Recipe(kind, piece(name, **{key: value}), train=True).build()[0]
            assert all(
                a.equal(b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
            )
            model(x)


def test_blocks_of_one_class_that_compute_different_things_are_tried_one_by_one() -> None:
    """Alike in classes and shapes, not in how they join their branches: what is an identity in one is none in the other."""
    pieces = piece("branches", act="tanh"), piece("branches", join="gate")
    check(Recipe("mlp", *pieces, body="sequential"), most=1)
