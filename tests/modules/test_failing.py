"""Memory that runs out says nothing of the model: it goes through wherever other failures become a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sensli import count_flops, find_sites, insert, measure
from sensli.checkpoint.states import loading
from sensli.modules.running import decompose, forgiven, is_out_of_memory, let_memory_through, note, noting


def test_memory_that_ran_out_is_known_from_other_failures() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)  # more than any machine can address
    texts = ("MPS backend out of memory (MPS allocated: 1 GB)", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")
    for error in (
        caught.value,
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        *map(RuntimeError, texts),
    ):
        assert is_out_of_memory(error)
        with pytest.raises(type(error)):
            let_memory_through(error)
        with pytest.raises(type(error)), forgiven():
            raise error
    for other in (ValueError("out of memory"), RuntimeError("shapes do not match"), IndexError()):
        assert not is_out_of_memory(other)
        let_memory_through(other)
        with forgiven():
            raise other


def test_other_failures_are_noted_without_what_they_hold() -> None:
    note(ValueError("nobody listens"))
    with noting() as outer:
        note(ValueError("one"))
        with noting() as inner:
            note(KeyError("two"))
        with pytest.raises(MemoryError):
            note(MemoryError())
    assert (outer, inner) == (["ValueError: one"], ["KeyError: 'two'"])


class _Full(nn.Module):
    full = False

    def forward(self, x: Tensor) -> Tensor:
        if self.full:
            raise torch.OutOfMemoryError("memory ran out")
        return x.relu()


def _loads(model: nn.Module, site: Any, x: Tensor) -> None:
    with loading("the model"):
        model(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, site, x: find_sites(model, x),
        lambda model, site, x: measure(model, [site], [(x, x)], F.mse_loss),
        lambda model, site, x: count_flops(model, x),
        lambda model, site, x: insert(model, site, check=x),
        _loads,
    ],
    ids=["find_sites", "measure", "count_flops", "check", "load_checkpoint"],
)
def test_it_goes_through(call: Callable[..., Any]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), _Full(), nn.Linear(4, 4)), torch.randn(3, 4)
    site = find_sites(model, x)[0]
    before = [name for name, _ in model.named_modules()]
    model[1].full = True
    with pytest.raises(torch.OutOfMemoryError, match="memory ran out"):
        call(model, site, x)
    assert [name for name, _ in model.named_modules()] == before


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64])
def test_a_decomposition_that_does_not_converge_is_made_in_double_precision(kind: torch.dtype, silent: bool) -> None:
    asked = []

    def single_fails(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def called(matrix: Tensor) -> Any:
            asked.append(matrix.dtype)
            if matrix.dtype == kind and silent:  # as LAPACK's divide and conquer has done
                return function(matrix * torch.nan)
            if matrix.dtype == kind:
                raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
            return function(matrix)

        return called

    root = torch.randn(5, 5, dtype=kind, generator=torch.Generator().manual_seed(0))
    matrix = root @ root.mH
    values, vectors = decompose(single_fails(torch.linalg.eigh), matrix)
    assert asked == [kind, torch.promote_types(kind, torch.float64)]
    assert values.dtype == torch.float32 and vectors.dtype == kind
    torch.testing.assert_close((vectors * values) @ vectors.mH, matrix)
    torch.testing.assert_close(decompose(single_fails(torch.linalg.eigvalsh), matrix), values)
    with pytest.raises(torch.linalg.LinAlgError, match="failed"):
        decompose(lambda _: (_ for _ in ()).throw(torch.linalg.LinAlgError("failed")), matrix)
