"""Candidates for new units are chosen one after the other: what those before can do is no merit of the next."""

from __future__ import annotations

import pytest
import torch

from sensli.moves.width.gauge import choose_greedily


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_candidates_are_taken_greedily(dtype: torch.dtype) -> None:
    """Against the slow way: take the largest, project what it explains out of the gradients of all, and go on."""
    generator = torch.Generator().manual_seed(0)
    activations = torch.randn(50, 9, dtype=torch.float64, generator=generator).relu()
    cotangents = torch.randn(50, 4, dtype=torch.float64, generator=generator)
    gradients = activations.T @ cotangents
    expected, left, own = [], gradients.clone(), activations.clone()
    for _ in range(4):
        worth = left.square().sum(1)
        worth[expected] = -1
        best = int(worth.argmax())
        expected.append(best)
        unit = own[:, best].clone()
        share = own.T @ unit / (unit @ unit)
        left = left - share[:, None] * left[best]
        own = own - unit[:, None] * share
    longer = gradients @ torch.linalg.qr(torch.randn(20, 4, dtype=torch.float64, generator=generator)).Q.T
    for columns in (gradients, longer):  # the same lengths and angles
        assert choose_greedily(columns.to(dtype), (activations.T @ activations).to(dtype), 4) == sorted(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_candidates_one_is_taken_before_any_other_twice(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    six = torch.randn(6, 40, generator=generator, dtype=dtype)
    six[5] *= 1e-3  # worth little, but more than what is there already
    activations = torch.cat([six, six, torch.zeros(4, 40, dtype=dtype)])  # the last ones are dead
    gradients = activations @ torch.randn(40, 3, generator=generator, dtype=dtype)
    chosen = choose_greedily(gradients, activations @ activations.T, 6)
    assert sorted(each % 6 for each in chosen) == list(range(6)) and max(chosen) < 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_that_can_be_told_apart_is_a_choice_too(dtype: torch.dtype) -> None:
    assert len(choose_greedily(torch.zeros(5, 3, dtype=dtype), torch.zeros(5, 5, dtype=dtype), 3)) == 3


def test_huge_numbers_are_compared_and_those_that_are_none_end_the_choice() -> None:
    generator = torch.Generator().manual_seed(0)
    activations = torch.randn(50, 9, generator=generator).relu()
    gradients, likeness = activations.T @ torch.randn(50, 4, generator=generator), activations.T @ activations
    chosen = choose_greedily(gradients, likeness, 4)
    assert choose_greedily(gradients * 2.0**100, likeness * 2.0**118, 4) == chosen  # their squares overflow
    for bad in (torch.nan, torch.inf):
        assert (
            choose_greedily(gradients * bad, likeness, 4)
            == choose_greedily(gradients, likeness * bad, 4)
            == [0, 1, 2, 3]
        )
