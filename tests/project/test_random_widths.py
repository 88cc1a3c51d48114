"""Random models keep every promise at every width that is offered; a failure prints the recipe that repeats it."""

from __future__ import annotations

import os
from collections import Counter

import pytest

pytest.importorskip("hypothesis", reason="random models need hypothesis")

from hypothesis import Phase, given, seed, settings

from invariants import REPEATABLE
from random_models import PIECES, Piece, Recipe, piece, recipes
from sensli import find_sites
from width_promises import check_widths

# Of each part; with those of test_random_models.py there are 150 in `make test`. `make bench` tries ten times as many.
EXAMPLES = int(os.environ.get("SENSLI_RANDOM_MODELS", "52"))


@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(part, marks=pytest.mark.slow if part < 2 else pytest.mark.thorough) for part in range(1, 5))],
)
def test_random_models_keep_every_promise_of_layers_and_units_together(part: int) -> None:
    """With hooks, frozen parts, units that compete, losses that run the model again or take gradients: found, measured, grown, undone."""
    seen: Counter[str] = Counter()

    @seed(part)
    @settings(
        REPEATABLE, derandomize=False, max_examples=EXAMPLES, phases=[Phase.generate]
    )  # to make one shorter takes minutes
    @given(recipes())
    def one(recipe: Recipe) -> None:
        seen.update(check_widths(recipe, "both"))

    one()
    assert seen["models"] >= EXAMPLES and seen["sites"] > seen["models"] and seen["refused"]


@pytest.mark.parametrize("way", PIECES["wide"][1]["way"])
@pytest.mark.parametrize("kind", ["mlp", "conv2d", "conv1d", "tokens"])
def test_what_happens_to_units_on_their_way_is_followed(kind: str, way: str) -> None:
    """Every way offers its width, unless a norm mixes the units."""
    for norm in ("no", "layer"):
        found = check_widths(Recipe(kind, piece("wide", way=way, act="tanh", norm=norm)))
        assert (found["sites"] > 1) == (norm == "no"), (kind, way, norm)


@pytest.mark.parametrize("how", PIECES["competing"][1]["how"])
@pytest.mark.parametrize("kind", ["mlp", "conv2d", pytest.param("conv1d", marks=pytest.mark.slow), "tokens"])
def test_units_that_depend_on_each_other_or_on_their_number_are_left_alone(kind: str, how: str) -> None:
    """Whatever their number is, and however they are activated; the rest of the model is offered."""
    for act, more in (("relu", 2), ("tanh", 3)):
        recipe = Recipe(kind, piece("competing", how=how, act=act, more=more))
        assert check_widths(recipe)["sites"]
        model, x, _ = recipe.build()
        sites = find_sites(model, x[:2], what="units", units=more - 1)
        assert "part0.up" not in {site.path for site in sites} and "part0.up" in dict(sites.skipped)


@pytest.mark.parametrize("written", PIECES["heads"][1]["written"])
def test_heads_are_offered_however_they_are_written(written: str) -> None:
    assert check_widths(Recipe("tokens", piece("heads", written=written)))["heads"] == 1


@pytest.mark.parametrize(
    "part",
    [
        piece("keywords", call="all"),
        piece("detached", part="all"),
        piece("overwritten"),
        piece("branches", join="gate", act="leaky", spelling="in place"),
    ],
    ids=repr,
)
def test_what_random_models_have_found(part: Piece) -> None:
    """A layer called by keyword; a reader that no gradient reaches; readers whose output is overwritten."""
    assert check_widths(Recipe("mlp", part))["sites"]


def test_a_weight_that_other_code_reads_keeps_its_shape() -> None:
    """In single precision the mean of a weight with more zeros hardly moves the output."""
    model, x, _ = Recipe("mlp", piece("odd", use="weight"), dtype="float32").build()
    sites = find_sites(model, x, what="units")
    assert [site.path for site in sites] == ["stem"]
    assert "other code reads part0.net.2.weight too" in dict(sites.skipped)["part0.net.0"]
