"""A search shares the memory of large parameters with the model, and never writes there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sensli import find_sites
from sensli.modules.copies import OnlyRead, SharedMemoryWritten, copied_model
from tests.helpers.memory import peak

WIDTH = 256  # squared: large enough to be shared


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Writing(nn.Linear):
    """A layer that keeps its own weight small, by the way that versions do not tell of."""

    def __init__(self, training_only: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.training_only = training_only

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self.training_only:
            self.weight.data.clamp_(-0.03, 0.03)
        return super().forward(x)


def _net(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), *parts, *(_Block() for _ in range(6)), nn.Linear(WIDTH, 3))


def _state(model: nn.Module) -> list[tuple[int, Tensor]]:
    return [(parameter._version, parameter.detach().clone()) for parameter in model.parameters()]


def _is_as_it_was(model: nn.Module, before: list[tuple[int, Tensor]]) -> bool:
    pairs = zip(model.parameters(), before, strict=True)
    return all(p._version == version and torch.equal(p, value) for p, (version, value) in pairs)


def test_a_copy_shares_large_parameters_and_copies_all_else() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.LazyLinear(4))
    copy = copied_model(model, share=True)
    assert copy[0].weight.data_ptr() == model[0].weight.data_ptr() and copy[0].weight is not model[0].weight
    for mine, its in ((copy[0].bias, model[0].bias), (copy[1].running_mean, model[1].running_mean)):
        assert mine.data_ptr() != its.data_ptr()
    tied = nn.Linear(WIDTH, WIDTH)
    tied.again = tied.weight
    copy = copied_model(tied, share=True)
    assert copy.again is copy.weight


@pytest.mark.parametrize("what", ["layers", "both"])
def test_a_search_writes_nothing_into_the_model(what: str) -> None:
    model = _net()
    with torch.no_grad():
        model[0].weight.mul_(1e-3)  # small, so that the copy enlarges it
        model[3].down.weight.zero_()  # and constant, so that it moves it
    model[1].up.weight.grad = kept = torch.ones(WIDTH, WIDTH)
    before = _state(model)
    assert len(find_sites(model, torch.randn(2, 8), what=what)) > 6
    assert _is_as_it_was(model, before) and model[1].up.weight.grad is kept


@pytest.mark.parametrize("training_only", [False, True])
def test_a_model_that_writes_into_its_weights_is_searched_on_a_whole_copy(training_only: bool) -> None:
    model = _net(_Writing(training_only))
    before = _state(model)
    sites = find_sites(model, torch.randn(2, 8), what="both")
    assert len(sites) > 6 and _is_as_it_was(model, before)


def test_what_would_be_written_is_stopped_before_it_is() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(4, 4))
    copy, before = copied_model(model, share=True), model[0].weight.detach().clone()
    for write in (
        lambda: copy[0].weight.data.zero_(),
        lambda: copy[0].weight.detach()[3].mul_(2),
        lambda: torch.add(copy[0].weight.detach(), 1, out=copy[0].weight.detach()),
        lambda: torch._foreach_add_([copy[0].weight.detach()], 1),
    ):
        with pytest.raises(SharedMemoryWritten), OnlyRead(model):
            write()
        assert torch.equal(model[0].weight, before)
    with OnlyRead(model), torch.no_grad():  # small ones are really copied
        copy[1].weight.zero_()
    assert model[1].weight.any() and not OnlyRead(model[1])


def test_a_search_takes_little_memory_beside_the_model() -> None:
    model = _net(*(_Block() for _ in range(10)))
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert peak(lambda: find_sites(model, torch.randn(2, 8))) < 0.35 * held
