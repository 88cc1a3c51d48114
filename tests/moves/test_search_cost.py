"""What a search does, counted: how often it builds the model, and how many samples it sends through the model and its blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sensli import find_sites
from sensli.modules.copies import made_general
from sensli.moves.twin.counting import Known


class _Config:
    def __init__(self, num_layers: int, width: int, tuples: bool = False) -> None:
        self.num_layers, self.width, self.tuples = num_layers, width, tuples


class _Block(nn.Module):
    samples = 0

    def __init__(self, config: _Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.tuples = layer_idx, config.tuples
        self.norm = nn.LayerNorm(config.width)
        self.up, self.down = nn.Linear(config.width, 16), nn.Linear(16, config.width)

    def forward(self, x: Tensor) -> Any:
        _Block.samples += len(x)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return (x, None) if self.tuples else x


class _Net(nn.Module):
    built = 0
    samples = 0

    def __init__(self, config: _Config) -> None:
        super().__init__()
        _Net.built += 1
        self.config = config
        self.layers = nn.ModuleList(_Block(config, number) for number in range(config.num_layers))
        self.head = nn.Linear(config.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        _Net.samples += len(x)
        for layer in self.layers:
            x = layer(x)[0] if self.config.tuples else layer(x)
        return self.head(x)


@pytest.mark.parametrize(("frozen", "tuples"), [(False, False), (True, False), (False, True)])
def test_a_model_is_built_once_and_few_samples_go_through_it(frozen: bool, tuples: bool) -> None:
    torch.manual_seed(0)
    model, batch = _Net(_Config(5, 8, tuples)), 32
    model.layers[0].requires_grad_(not frozen)  # a backward pass more, of a few samples
    _Net.built = _Net.samples = _Block.samples = 0
    sites = find_sites(model, torch.randn(batch, 4, 8))
    assert len(sites) == 6 and all(site.point.place is not None for site in sites)
    assert _Net.built == 1
    # The example is recorded, and tried with a layer at every place; what else runs makes do with a few samples.
    assert _Net.samples <= 2.5 * batch
    # Through the blocks of the recorded run, and of the trial with some twins among them.
    assert _Block.samples <= 15 * batch


@pytest.mark.parametrize(("mixes", "samples"), [(False, 1), (True, 6)])
def test_one_sample_tells_that_a_model_gives_something_else_unless_samples_are_mixed(mixes: bool, samples: int) -> None:
    class Counting(nn.Linear):
        samples = 0

        def forward(self, x: Tensor) -> Tensor:
            self.samples += len(x)
            return super().forward(x - x.mean(0) if mixes else x)

    torch.manual_seed(0)
    model, other, example = Counting(4, 4), Counting(4, 4), torch.randn(6, 4)
    known = Known(model, example, model(example))
    assert not known.is_given_by(other) and other.samples == samples
    model.samples = 0
    assert known.is_given_by(model) and model.samples == samples


def test_a_block_that_mixes_its_samples_is_tried_on_all_of_them() -> None:
    """One sample alone would be its own mean, and every weight of the branch would seem to do nothing."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.out(torch.tanh(self.mix(x - x.mean(0))))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Mixing(), Mixing(), Mixing(), nn.Linear(4, 2))
    sites = find_sites(model, torch.randn(6, 4), form="twin")
    assert len(sites) == 4
    assert {site.move.zeroed for site in sites if site.move is not None} == {("out.bias", "out.weight")}


def test_small_weights_are_enlarged_in_the_copy_and_put_back_to_the_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(5, 8))
    with torch.no_grad():
        model[0].weight.normal_(0, 1e-3)
    before = copy.deepcopy(model.state_dict())
    put_back = made_general(model)
    assert 0.5 < torch.linalg.matrix_norm(model[0].weight).item() / 8**0.5 <= 1
    assert model[1].weight.std() > 0
    put_back()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
