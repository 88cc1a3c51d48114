"""Large gradients are summed as sketches: the same merits, within the spread that is told."""

from __future__ import annotations

import gc
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sensli import find_sites, measure
from sensli.merits import norms
from sensli.merits.confidence import Estimate, is_clear
from sensli.merits.norms import Sketcher
from sensli.moves.width.gauge import candidates
from tests.helpers.memory import peak


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _net(width: int, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), *(_Block(width) for _ in range(blocks)), nn.Linear(width, 3))


def _batches(count: int, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 16, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(count)
    ]


def _order(merits: Any) -> list[str]:
    return [str(merit.site) for merit in merits.ranked]


@pytest.mark.parametrize("rank", [1, 64])
def test_a_sketch_is_right_in_the_mean_and_off_by_what_it_says(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    gradient = draw(300, rank) @ draw(rank, 500)
    exact = float(gradient.square().sum())
    found, told = [], []
    for seed in range(60):
        sketcher = Sketcher(64, seed)
        sketch = sketcher.sketch(gradient)
        assert sketch.shape == (64, 64)
        found.append(float(sketch.square().sum()) / exact)
        told.append(sketcher.spread(sketch))
    mean, predicted = sum(found) / 60, sum(told) / 60
    spread = math.sqrt(sum((each - mean) ** 2 for each in found) / 59)
    assert abs(mean - 1) < 4 * predicted / math.sqrt(60)
    assert 0.6 * predicted < spread < 1.5 * predicted


def test_sketches_add_up_before_the_norm_and_small_sides_stay() -> None:
    one, other = torch.randn(2, 40, 8, 5, 5)
    sketcher = Sketcher(16)
    assert torch.allclose(
        sketcher.sketch(one) + sketcher.sketch(other), sketcher.sketch(one + other), rtol=1e-4, atol=1e-4
    )
    assert sketcher.sketch(torch.randn(7, 900)).shape == (7, 16)
    assert not sketcher.takes(torch.randn(30, 30)) and sketcher.takes(torch.randn(40, 40))


def test_merits_from_sketches_have_the_order_of_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = _net(384), _batches(3)
    sites = find_sites(model, batches[0][0])
    exact = measure(model, sites, batches, mse_loss)
    assert exact.spread == 0.0 and "sketches" not in str(exact) and "spread" not in exact.to_dict()
    monkeypatch.setattr(norms, "ROOM", 1000)
    found = measure(model, sites, batches, mse_loss)
    assert 0 < found.spread < 0.2 and "from sketches of large gradients" in str(found)
    assert found.to_dict()["spread"] == found.spread
    assert _order(found) == _order(exact)
    for merit, true in zip(found, exact, strict=True):
        assert merit.value != true.value and abs(merit.value / true.value - 1) < 3 * found.spread
    again = measure(model, sites, batches, mse_loss, exact=True)
    assert again.spread == 0.0 and [merit.value for merit in again] == [merit.value for merit in exact]
    # there is no sketch for the other norms
    assert measure(model, sites[:1], batches[:1], mse_loss, norm="mean_square", ratio=False).spread == 0.0


def test_with_confidence_the_groups_are_sketches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = _net(256), _batches(20)
    sites = find_sites(model, batches[0][0])
    exact = measure(model, sites, batches, mse_loss)
    monkeypatch.setattr(norms, "ROOM", 1000)
    found = measure(model, sites, batches, mse_loss, confidence=0.9, tolerance=0.5)
    assert found.spread > 0 and str(found.best.site) in _order(exact)[:2]
    for merit, true in zip(found, exact, strict=True):
        assert merit.ratio is not None and true.ratio is not None and 0.3 < merit.ratio / true.ratio < 3


@pytest.mark.parametrize("rank", [1, 64])
def test_mixtures_of_columns_keep_the_length_of_each_row(rank: int) -> None:
    """They add up over readers, and are right in the mean for any choice of rows."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    readers = [draw(60, rank) @ draw(rank, 300) for _ in range(3)]
    some = list(range(0, 60, 2))
    exact = float(torch.cat(readers, 1)[some].square().sum())
    found, told = [], []
    for seed in range(60):
        sketcher = Sketcher(64, seed)
        mixed = sum((sketcher.mix(index, each) for index, each in enumerate(readers)), torch.zeros(60, 64))
        found.append(float(mixed[some].square().sum()) / exact)
        told.append(sketcher.spread(mixed))
    mean, predicted = sum(found) / 60, sum(told) / 60
    spread = math.sqrt(sum((each - mean) ** 2 for each in found) / 59)
    assert abs(mean - 1) < 4 * predicted / math.sqrt(60)
    assert 0.5 * predicted < spread < 1.5 * predicted


@pytest.fixture(scope="module")
def widths() -> tuple[nn.Module, Any, list[dict[str, Tensor]]]:
    """A Llama in double precision, units for all eight blocks at once, and batches."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=8, vocab_size=40, num_attention_heads=4,
    )  # fmt: skip
    model: nn.Module = hf.LlamaForCausalLM(config).double()
    ids = torch.randint(0, 40, (24, 4, 12), generator=torch.Generator().manual_seed(1))
    sites = [site for site in find_sites(model, {"input_ids": ids[0]}, what="units") if ".mlp." in site.path]
    assert len(sites) == 1
    return model, sites, [{"input_ids": each, "labels": each} for each in ids]


@pytest.mark.library
def test_new_units_are_worth_what_their_mixtures_say(widths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sites, batches = widths
    [exact] = measure(model, sites, batches)
    monkeypatch.setattr(norms, "ROOM", 1000)
    found, whole = measure(model, sites, batches), measure(model, sites, batches, exact=True)
    assert 0 < found.spread < 0.2 and whole.spread == 0.0
    assert found[0].value != whole[0].value and abs(found[0].value / whole[0].value - 1) < 3 * found.spread
    assert abs(whole[0].value / exact.value - 1) < 0.02  # their rows are rounded, which is nothing to random rows
    # the units that were chosen by a sample of the columns are nearly the best ones, and their rows are those that were measured
    [taken] = measure(model, found, batches, exact=True)
    assert 0.97 * whole[0].value < taken.value < 1.01 * whole[0].value
    assert abs(found[0].value / taken.value - 1) < 3 * found.spread
    [again] = measure(model, whole, batches, exact=True)
    assert again.value == pytest.approx(whole[0].value, rel=1e-9)


@pytest.mark.library
def test_with_confidence_new_units_lose_their_noise_by_mixtures_too(
    widths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sites, batches = widths
    exact = measure(model, sites, batches, confidence=0.99, ratio=False)
    [noisy] = measure(model, sites, batches[: exact.batches], ratio=False)
    assert exact[0].value < 0.8 * noisy.value
    monkeypatch.setattr(norms, "ROOM", 1000)
    found = measure(model, sites, batches, confidence=0.99, ratio=False)
    assert 0 < found.spread < 0.2 and found.batches == exact.batches
    assert abs(found[0].value - exact[0].value) < 2 * found.spread * noisy.value  # noise is known as well as the rest


def test_rounded_rows_are_nearly_what_they_were_and_take_a_quarter() -> None:
    model = nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 3))
    [site] = find_sites(model, torch.randn(4, 16), what="units")
    width = site.move.in_model(model)  # type: ignore[attr-defined]
    before = candidates(width)
    before.values[0][5] = 0.0  # type: ignore[index]
    after = before.rounded(width)
    for index, axis in enumerate(width.axes):
        row, rounded, held = before.along(index, axis), after.along(index, axis), after.values[index]
        if row is None or row.dim() < 2:
            assert rounded is row
            continue
        assert rounded is not None and held is not None and held.element_size() == 1
        assert rounded.dtype == row.dtype and (row - rounded).norm() < 0.01 * row.norm() and not rounded[5].any()
        taken = after.taken(width, [3, 5])
        assert taken.is_held and torch.equal(taken.values[index], rounded[[3, 5]])  # type: ignore[arg-type]
    assert after.count(width) == before.count(width) and before.is_held and not after.is_held


def test_what_sketches_leave_open_is_not_called_clear() -> None:
    """All groups agree that the first is a tenth better, but both may be off by as much."""
    sizes = [1.0] * 8

    def clear(spread: float) -> bool:
        sites = [Estimate(value, (value * 0.99, value * 1.01) * 4, spread) for value in (1.1, 1.0)]
        return is_clear(sites, sizes, look=1, confidence=0.99)

    assert clear(0.0) and not clear(0.1)


def test_the_sums_of_a_measurement_take_no_more_than_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = _net(512, blocks=5), _batches(3, size=4)
    held = sum(parameter.nbytes for parameter in model.parameters())
    sites = find_sites(model, batches[0][0])

    def ordinary() -> None:
        for x, y in batches:
            mse_loss(model(x), y).backward()
        model.zero_grad()

    monkeypatch.setattr(norms, "ROOM", 2**20)
    for more in ({}, {"confidence": 0.99, "max_batches": 3}):
        beyond = peak(partial(measure, model, sites, batches, mse_loss, **more)) - peak(ordinary)
        assert beyond < 0.25 * held, more


def test_a_measurement_lets_go_of_its_sums_at_once() -> None:
    model, batches = _net(64), _batches(2)
    sites = find_sites(model, batches[0][0])
    gc.collect()
    gc.disable()
    try:
        before = _alive()
        measure(model, sites, batches, mse_loss)
        assert _alive() <= before
    finally:
        gc.enable()


def _alive() -> int:
    return sum(isinstance(each, Tensor) for each in gc.get_objects())
