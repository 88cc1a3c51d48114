"""A look draws no random number that training would have drawn: torch, Python and numpy are where they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from sensli import Grower, Probe, count_flops, find_sites, insert, measure, triggers

X, Y = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2


class Noisy(nn.Module):
    """A layer that draws from all three states."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002  (the user's global one)
        return x * scale + 0.01 * torch.randn_like(x)


class Augmented(TensorDataset):
    """Data that are drawn from Python's and numpy's states when they are read."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * random.random() + float(np.random.rand()), y  # noqa: NPY002


def make() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), Noisy(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )


def blocks() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True, norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(6, 2))


def loader(**options: Any) -> Any:
    return DataLoader(Augmented(X, Y), batch_size=8, shuffle=True, **options)


def states() -> list[Any]:
    numpy = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2:]]  # type: ignore[union-attr, index]


@contextmanager
def untouched() -> Iterator[None]:
    before = states()
    yield
    for name, old, new in zip(("torch", "Python", "numpy", "numpy"), before, states(), strict=True):
        assert old == new, f"the state of {name} moved"


def step(model: nn.Module, **options: Any) -> None:
    settings: dict[str, Any] = {"example": X[:2], "trigger": triggers.Every(1), "tau": 0.0, **options}
    grower = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), preset="paper", **settings)
    grower.step(loader(), cross_entropy)
    assert len(grower.history) == 1


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "find_sites": lambda model: find_sites(model, X[:2]),
    "measure": lambda model: measure(model, find_sites(model, X[:2]), loader(), cross_entropy),
    "measure, some": lambda model: measure(model, find_sites(model, X[:2]), loader(), cross_entropy, confidence=0.9),
    "measure, workers": lambda model: measure(model, find_sites(model, X[:2]), loader(num_workers=1), cross_entropy),
    "insert": lambda model: insert(model, find_sites(model, X[:2])[0]),
    "insert with check": lambda model: insert(model, find_sites(model, X[:2])[0], check=X),
    "Probe": lambda model: Probe(model, find_sites(model, X[:2])),
    "count_flops": lambda model: count_flops(model, X[:2]),
    "Grower.step": step,
    "Grower.step, random": lambda model: step(model, select="random"),
    "Grower.step, budget": lambda model: step(model, trigger=triggers.Every(1) & triggers.Limit(flops=10**9)),
}


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=name, marks=[pytest.mark.process] * ("workers" in name)) for name, call in CALLS.items()],
)
def test_a_call_leaves_every_random_state_as_it_was(call: Callable[[nn.Module], Any]) -> None:
    model = make()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    with untouched():
        call(model)


@pytest.mark.parametrize("init", ["copy", "fresh"])
def test_twins_leave_every_random_state_as_it_was(init: str) -> None:
    model = blocks()
    x = torch.randn(4, 3, 6)
    with untouched():
        sites = find_sites(model, x, form="twin", init=init)
        Probe(model, sites)
        measure(
            model,
            sites,
            [(x, Y[:12].reshape(4, 3))],
            lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten()),
        )
        insert(model, sites[0])


def test_a_failed_measurement_puts_the_states_back_too() -> None:
    model = make()
    sites = find_sites(model, X[:2])
    with untouched(), pytest.raises(ZeroDivisionError):
        measure(model, sites, loader(), lambda output, target: 1 / 0)


def test_the_order_of_the_next_epoch_does_not_change() -> None:
    """Loaders with a generator of their own shuffle as they would have without a look."""

    def orders(look: bool) -> list[int]:
        torch.manual_seed(0)
        model = make()
        data = DataLoader(
            TensorDataset(X, Y, torch.arange(24)),
            batch_size=8,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
        )
        found: list[int] = []
        for _ in range(2):
            for _, _, index in data:
                found += index.tolist()
            if look:
                pairs = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=data.generator)
                measure(model, find_sites(model, X[:2]), pairs, cross_entropy)
        return found

    assert orders(True) == orders(False)
