"""The boxes of a drawing: one level of detail, one box for each growth, every parameter in one of them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from recorded import grow
from sensli import find_sites, insert
from sensli import grow as grow_at
from sensli.surgery.outline import outline


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.first, self.second, self.drop = (
            nn.LayerNorm(width),
            nn.Linear(width, 6),
            nn.Linear(6, width),
            nn.Sequential(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.second(torch.relu(self.first(self.norm(x)))))


class Stage(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Transformer(nn.Module):
    """As vision transformers are written: weights at the top, a list of blocks, things that do nothing."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.token, self.place = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.patches = nn.Linear(4, 4)
        self.nothing, self.empty = nn.Identity(), nn.Sequential(nn.Sequential(), nn.Identity())
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.patches.weight  # tied

    def forward(self, x: Tensor) -> Tensor:
        x = self.nothing(self.patches(x)) + self.token + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


def counted(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def paths(model: nn.Module) -> list[str]:
    units = outline(model)
    assert sum(unit.parameters for unit in units) == counted(model)
    return [unit.path for unit in units]


def test_new_layers_are_named_as_their_sites_are() -> None:
    for layer, label in (
        ("auto", "Linear(4, 4) + ReLU"),
        ("residual", "Residual(Linear(4, 4), ReLU)"),
        ("parametric", "Parametric(Linear(4, 4), ReLU)"),
    ):
        units = outline(grow(calls=2, form=layer).model)
        assert [(unit.label, unit.growth) for unit in units if unit.growth] == [(label, 1)]


def test_a_stack_of_blocks_is_a_stack_of_boxes() -> None:
    model = Transformer()
    before = ["token", "patches", "layers.0", "layers.1", "layers.2", "head"]
    assert paths(model) == before
    assert [unit.label for unit in outline(model)][:3] == ["Parameter and 1 more", "Linear(4, 4)", "Block"]
    for place in (1, 2):
        twins = [site for site in find_sites(model, torch.randn(1, 4)) if site.kind == "block"]
        insert(model, twins[place])
    assert paths(model) == [*before[:-1], "layers.3", "layers.4", "head"]
    assert sorted(unit.growth for unit in outline(model) if unit.growth) == [1, 2]
    assert {unit.label for unit in outline(model) if unit.path.startswith("layers")} == {"Block"}


def test_stages_are_opened_and_heads_are_not() -> None:
    assert paths(nn.Sequential(Stage(2), Stage(3))) == [
        f"{i}.blocks.{k}" for i, n in ((0, 2), (1, 3)) for k in range(n)
    ]
    many = nn.Sequential(nn.Linear(4, 4), Stage(50), nn.Linear(4, 4))
    assert paths(many) == ["0", *(f"1.blocks.{k}" for k in range(50)), "2"]
    block = Block(16)
    block.heads = nn.ModuleList(Block(1) for _ in range(3))
    assert paths(nn.Sequential(block, Block(16))) == ["0", "1"]
    two_attentions = nn.TransformerDecoderLayer(4, 1, 8)
    assert paths(nn.TransformerDecoder(two_attentions, 2)) == ["layers.0", "layers.1"]


def test_a_layer_inside_a_block_has_its_own_box_after_it() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(30)))
    assert [unit.label for unit in outline(blocks)] == ["Linear(2, 2) + ReLU + Linear(2, 2)"] * 30
    blocks[3].add_module("new", nn.Linear(2, 2))
    blocks[3].get_submodule("new").sensli_growth = 1
    assert paths(blocks)[2:6] == ["2", "3", "3.new", "4"]
    assert [(unit.path, unit.label) for unit in outline(blocks) if unit.growth] == [("3.new", "Linear(2, 2)")]
    assert {unit.label for unit in outline(blocks) if not unit.growth} == {"Linear(2, 2) + ReLU + Linear(2, 2)"}


def test_a_widened_layer_inside_a_block_has_its_own_box_after_it() -> None:
    model = nn.Sequential(Block(), Block())
    site = find_sites(model, torch.randn(1, 4), what="units", units=2)[0]
    grow_at(model, site)
    grow_at(model, find_sites(model, torch.randn(1, 4), what="units", units=2)[0])
    assert paths(model) == ["0", "0.first", "1"]
    assert [(unit.label, unit.units, unit.changes) for unit in outline(model)][1] == ("Linear(4, 10)", 10, (1, 2))


@pytest.mark.parametrize(
    ("layer", "place", "order"),
    [("auto", 0, [3, 2, 1]), ("parametric", 0, [3, 2, 1]), ("parametric", -1, [1, 2, 3])],
)
def test_three_growths_in_one_place_are_three_boxes(layer: str, place: int, order: list[int]) -> None:
    """However they are nested: a parametric layer holds those that come after its activation or before its map."""
    model = Functional()
    for _ in range(3):
        insert(model, find_sites(model, torch.randn(2, 4), form=layer)[place])
    units = outline(model)
    assert [unit.growth for unit in units if unit.growth] == order
    assert len({unit.label for unit in units if unit.growth}) == 1 and len(units) == 6
    paths(model)


def test_a_layer_with_parts_is_one_box() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.MultiheadAttention(4, 2), Transformer())
    assert paths(model)[:3] == ["0", "1", "2.token"]


def test_a_long_chain_stays_short_and_a_growth_moves_no_box() -> None:
    chain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(600)))
    before = paths(chain)
    assert len(before) == 120 and outline(chain)[0].label == "Linear(2, 2) and 4 more"
    new = nn.Linear(2, 2)
    new.sensli_growth = 1
    layers = list(chain.named_children())
    grown = nn.Sequential(OrderedDict([*layers[:78], ("grown1", new), *layers[78:]]))
    assert [path for path in paths(grown) if path not in before] == ["grown1", "78"]
    assert [unit.path for unit in outline(grown) if unit.growth] == ["grown1"]
