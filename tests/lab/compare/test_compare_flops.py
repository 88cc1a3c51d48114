"""What a run pays for: equal to a count by hand, for a training step and for all that a look does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from sensli_lab.compare.training import Counted, flops_of_step


def test_a_training_step_is_the_forward_pass_and_both_gradients_but_that_of_the_input() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    batch = torch.randn(7, 3), torch.randint(2, (7,))
    forward = 2 * 7 * (3 * 5 + 5 * 2)
    weights, inputs = forward, 2 * 7 * 5 * 2
    assert flops_of_step(model, batch, cross_entropy) == forward + weights + inputs


def test_a_convolution_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten())
    batch = torch.randn(2, 3, 6, 6), torch.randn(2, 72)
    first, second = 2 * 2 * 36 * (9 * 3 * 4), 2 * 2 * 36 * (4 * 2)
    assert flops_of_step(model, batch, mse_loss) == 2 * first + 3 * second


def test_counting_leaves_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flops_of_step(model, (torch.randn(7, 3), torch.randint(2, (7,))), cross_entropy)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and not model.training


def test_attention_backwards_is_five_products_for_two() -> None:
    query, key, value = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    with Counted() as counted:
        nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    product = 2 * (2 * 3) * 8 * 8 * 4
    assert counted.total == 7 * product and not counted.unknown


A, B = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
S = B @ B.T + torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: torch.linalg.svd(A, full_matrices=False), 6 * 6 * 16 + 20 * 64),
        (lambda: torch.linalg.eigh(S), 9 * 64),
        (lambda: torch.linalg.qr(A), round(4 * 6 * 16 - 4 * 64 / 3)),
        (lambda: torch.linalg.cholesky(S), round(64 / 3)),
        (lambda: torch.linalg.inv(S), 2 * 64),
        (lambda: torch.linalg.solve(S, B), 2 * 64 // 3 + 2 * 4 * 16),
        (lambda: torch.linalg.solve_triangular(S, B, upper=True), 4 * 16),
        (lambda: torch.cholesky_solve(B, S), 2 * 4 * 16),
        (lambda: torch.fft.fft(torch.randn(3, 8)), 5 * 3 * 8 * 3),
        (lambda: torch.zeros(4, 4, dtype=torch.float64).addmm_(B, S), 2 * 64),
    ],
)
def test_what_looks_use_and_models_rarely_do(run: Any, flops: int) -> None:
    with Counted() as counted:
        run()
    assert counted.total == flops and not counted.unknown


def test_what_has_no_rule_is_named() -> None:
    with Counted() as counted:
        torch.linalg.matrix_exp(S)
    assert "linalg_matrix_exp" in counted.unknown
