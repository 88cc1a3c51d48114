"""Second moments of features, and what the methods of other papers do with them."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1e-6  # of the largest eigenvalue of a second moment: what is below is not a direction of the data


def moment(x: Tensor) -> Tensor:
    """The second moment of features: [samples, features] to [features, features]."""
    return x.T @ x / len(x)


def inverse_root(matrix: Tensor) -> Tensor:
    """The inverse square root of a second moment, on the directions that the data have."""
    return _by_eigenvalues(matrix, -0.5)


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """The inverse of a second moment, on the directions that the data have."""
    return _by_eigenvalues(matrix, -1.0)


def mean_norm(vectors: Tensor) -> float:
    """The mean length of rows or columns; 1 if all are zero."""
    return float(vectors.norm(dim=1).mean()) or 1.0


def _by_eigenvalues(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > SMALLEST * values.max().clamp_min(1e-300)
    scaled = torch.where(kept, values.clamp_min(1e-300) ** power, values.new_zeros(()))
    found: Tensor = (vectors * scaled) @ vectors.T
    return found
