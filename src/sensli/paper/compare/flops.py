"""What a run has computed, in FLOPs: two for each multiply-add of every product that ran, also inside of a look.

Nothing is estimated from a formula of the method: a counter sees each operation, so a search that tries a hundred candidates counts a
hundred times. Factorisations and Fourier transforms, which looks use and models rarely do, are counted by the usual leading terms.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from sensli.modules.flops import PRODUCTS, FlopCounter, Rule


def _matrix(given: Any) -> tuple[int, int, int]:
    """How many matrices a tensor holds, the longer and the shorter side of each."""
    rows, columns = given.shape[-2:]
    return math.prod(given.shape[:-2]), max(rows, columns), min(rows, columns)


def _by_sides(work: Callable[[int, int], float]) -> Rule:
    def rule(matrix: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
        count, long, short = _matrix(matrix)
        return round(count * work(long, short))

    return rule


def _solve(matrix: Any, right: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    count, size, _ = _matrix(matrix)
    return int(count * 2 * size**3 // 3 + 2 * size * right.numel())


def _triangular(matrix: Any, right: Any, **kwargs: Any) -> int:
    return int(matrix.shape[-1] * right.numel())


def _fourier(data: Any, dims: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    size = math.prod(out_val.shape[dim] for dim in dims)
    return int(5 * out_val.numel() * math.log2(max(size, 2)))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    # the scores again, and the gradients of values, weights, queries and keys: five products where the forward pass has two
    return int(math.prod(query.shape[:-1]) * key.shape[-2] * (6 * query.shape[-1] + 4 * value.shape[-1]))


# Factorisations: Golub and Van Loan, Matrix Computations; m x n with m the longer side.
FURTHER: dict[str, Rule] = {
    "_linalg_svd": _by_sides(lambda m, n: 6 * m * n**2 + 20 * n**3),
    "_linalg_eigh": _by_sides(lambda m, n: 9 * n**3),
    "linalg_eig": _by_sides(lambda m, n: 25 * n**3),
    "_linalg_eigvals": _by_sides(lambda m, n: 10 * n**3),
    "linalg_qr": _by_sides(lambda m, n: 4 * m * n**2 - 4 * n**3 / 3),
    "linalg_cholesky_ex": _by_sides(lambda m, n: n**3 / 3),
    "linalg_inv_ex": _by_sides(lambda m, n: 2 * n**3),
    "linalg_lu_factor_ex": _by_sides(lambda m, n: 2 * n**3 / 3),
    "linalg_lstsq": _by_sides(lambda m, n: 2 * m * n**2),
    "_linalg_solve_ex": _solve,
    "linalg_solve_triangular": _triangular,
    "cholesky_solve": lambda right, matrix, *args, **given: 2 * _triangular(matrix, right),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_fft_r2c": _fourier,
    "_fft_c2c": _fourier,
    "_fft_c2r": _fourier,
}


class Counted(FlopCounter):
    """Counts what runs inside: ``with Counted() as counted: ...``, then ``counted.total``; ``counted.unknown`` has what has no rule."""

    products: ClassVar[Mapping[str, Rule]] = {**PRODUCTS, **FURTHER}


def training_flops(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Callable[[Tensor, Tensor], Tensor]) -> int:
    """FLOPs of a forward and a backward pass of one batch; the model is left as it is."""
    twin = copy.deepcopy(model).train()
    x, y = batch
    with Counted() as counted:
        loss(twin(x), y).backward()
    return int(counted.total)
