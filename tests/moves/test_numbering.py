"""Blocks that carry their own number, and what counts them: no two blocks ever share a number, and every count stays true."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from sensli import History, find_sites, insert, load_checkpoint, measure, replay, save_checkpoint, undo


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down, self.layer_idx = nn.Linear(8, 16), nn.Linear(16, 8), number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Named(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.third = blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


class Listed(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def numbers(model: nn.Module) -> list[int]:
    return [part.layer_idx for part in model.modules() if "layer_idx" in vars(part)]


@pytest.mark.parametrize(
    ("around", "order"),
    [
        (lambda blocks: nn.Sequential(*blocks), [0, 1, 2]),
        (Named, [0, 1, 2]),
        (Listed, [2, 1, 0]),  # numbered, but not by position: nothing tells the number of another block
        (Listed, [0, 10, 20]),
    ],
)
def test_a_number_that_cannot_be_given_anew_is_never_shared(
    around: Callable[[list[nn.Module]], nn.Module], order: list[int]
) -> None:
    torch.manual_seed(0)
    model, x = around([Block(number) for number in order]), torch.randn(3, 8)
    refused = find_sites(model, x, form="twin")
    assert not refused and all("its own number (layer_idx)" in reason for _, reason in refused.skipped)
    sites = find_sites(model, x)
    assert sites and all(site.move.form != "twin" for site in sites)
    insert(model, sites[1], check=x)
    assert sorted(numbers(model)) == sorted(order)


def test_a_list_numbers_all_blocks_again() -> None:
    torch.manual_seed(0)
    model = Listed([Block(number) for number in range(3)])
    x = torch.randn(3, 8)
    sites = find_sites(model, x)
    growths = [insert(model, site, check=x) for site in (sites[0], sites[-1], sites[1], sites[0])]
    assert numbers(model) == list(range(7))
    for growth in reversed(growths):
        undo(model, growth)
    assert numbers(model) == [0, 1, 2]


def test_a_list_in_which_a_layer_stands_around_a_block_is_numbered_too() -> None:
    torch.manual_seed(0)
    model = Listed([Block(number) for number in range(3)])
    x = torch.randn(3, 8)
    beside = insert(model, find_sites(model, x, form="residual")[1], check=x)
    twins = [site for site in find_sites(model, x) if site.move.form == "twin"]
    assert twins and all(site.point.place is not None for site in twins)
    growth = insert(model, twins[-1], check=x)
    assert numbers(model) == [0, 1, 2, 3]
    undo(model, growth)
    undo(model, beside)
    assert numbers(model) == [0, 1, 2]


def test_what_only_looks_like_a_number_is_left_alone() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.down = nn.Embedding(5, 8, padding_idx=2), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(x + self.table.weight[0]))

    torch.manual_seed(0)
    model, x = Listed([Tables()]), torch.randn(3, 8)
    insert(model, find_sites(model, x, form="twin")[0], check=x)
    assert [part.padding_idx for part in model.modules() if isinstance(part, nn.Embedding)] == [2, 2]


# --- counts ---


class Counting(nn.Module):
    """A block that tells, in one of three ways, how many there are."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if config.way == "number":
            self.n_layer = config.n_layer
        elif config.way == "configuration":
            self.config = copy.deepcopy(config)
        elif config.way == "inside":
            self.inner = Counting(SimpleNamespace(way="number", n_layer=config.n_layer), 0)
        self.scale = 2 if config.way == "last" and number == config.n_layer - 1 else 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Configured(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Counting(config, number) for number in range(config.n_layer))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("way", ["number", "configuration", "inside"])
def test_a_count_inside_every_block_follows(way: str) -> None:
    def counts() -> list[int]:
        holders = [*model.modules(), *(part.config for part in model.modules() if "config" in vars(part))]
        return [vars(holder)["n_layer"] for holder in holders if "n_layer" in vars(holder)]

    torch.manual_seed(0)
    model, x = Configured(SimpleNamespace(n_layer=3, way=way)), torch.randn(3, 8)
    sites = find_sites(model, x)
    before = counts()
    assert len(before) == 4 and set(before) == {3}
    growths = [insert(model, site, check=x) for site in (sites[1], sites[-1])]
    assert len(counts()) == 6 and set(counts()) == {5}
    for growth in reversed(growths):
        undo(model, growth)
    assert counts() == before


def test_where_the_last_block_is_built_differently_the_list_takes_none_after_it() -> None:
    """Built from the configuration, a model with one block more would have the difference in another place."""
    torch.manual_seed(0)
    model, x = Configured(SimpleNamespace(n_layer=4, way="last")), torch.randn(3, 8)
    before, sites = model(x), find_sites(model, x)
    assert [site.point.place is not None for site in sites] == [True, True, True, True, False]
    for site in sites:
        growth = insert(model, site)
        if site.point.place is not None:
            built = Configured(copy.deepcopy(model.config))
            built.load_state_dict(model.state_dict())
            assert torch.equal(built(x), before)
        undo(model, growth)


# --- a dict of numbered blocks is a list too ---


@dataclass
class Arguments:
    n_layers: int = 3
    dim: int = 8


class Numbered(nn.Module):
    def __init__(self, layer_id: int, arguments: Arguments) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.norm, self.up, self.down = nn.LayerNorm(arguments.dim), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x + table))))


class Dicted(nn.Module):
    """As torchtitan writes its models: blocks in a dict by their number, run in its order."""

    def __init__(self, arguments: Arguments, keys: str = "") -> None:
        super().__init__()
        self.model_args, self.n_layers = arguments, arguments.n_layers
        self.register_buffer("table", torch.linspace(0, 1, arguments.dim), persistent=False)
        blocks = {f"{keys}{number}": Numbered(number, arguments) for number in range(arguments.n_layers)}
        self.layers, self.output = nn.ModuleDict(blocks), nn.Linear(arguments.dim, 3)

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.layers.values()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks():
            x = layer(x, self.table)
        return self.output(x)


class ByKey(Dicted):
    def blocks(self) -> Iterator[nn.Module]:
        return (self.layers[str(number)] for number in range(self.n_layers))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Dicted, ByKey])
def test_a_dict_of_numbered_blocks_takes_twins_and_stays_numbered(kind: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = kind(Arguments()).double(), torch.randn(4, 8, dtype=torch.float64)
    names, before = list(model.state_dict()), model(x).detach()
    sites = find_sites(model, x)
    assert [site.place for site in sites] == ["before layers.0", *(f"after layers.{number}" for number in range(3))]
    assert {site.kind for site in sites} == {"block"} and {site.stack for site in sites} == {("layers", (8,))}
    merits = measure(model, sites, [(x, x[:, :3])], F.mse_loss, norm="frobenius")
    truth, _ = oracle.gradients(model, sites, [(x, x[:, :3])], F.mse_loss)
    for merit, gradient in zip(merits, truth, strict=True):
        assert merit.value == pytest.approx(gradient.square().sum().item(), rel=1e-9)
    old = model.layers["1"]
    optimizer, history = make_optimizer(model), History()
    for place in ("after layers.0", "before layers.0"):
        history.append(insert(model, next(s for s in find_sites(model, x) if s.place == place), optimizer=optimizer))
        assert torch.equal(model(x), before)
    # The order of the dict is the order of the blocks, whatever their names were.
    assert list(model.layers) == list("01234") and model.layers["3"] is old
    assert [block.layer_id for block in model.blocks()] == list(range(5))
    assert model.n_layers == model.model_args.n_layers == 5
    assert history[0].name == "layers.1" and history[0].renames["layers.1.up.weight"] == "layers.2.up.weight"
    F.mse_loss(model(x), x[:, :3]).backward()
    optimizer.step()
    # The class built with more blocks loads it, and so does a checkpoint.
    deeper = kind(Arguments(n_layers=5)).double()
    deeper.load_state_dict(model.state_dict())
    assert torch.equal(deeper(x), model(x))
    again = replay(kind(Arguments()).double(), history)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x)) and list(again.layers) == list(model.layers)
    save_checkpoint(tmp_path / "dict.ckpt", model, optimizer=optimizer, history=history)
    loaded = load_checkpoint(tmp_path / "dict.ckpt", lambda: kind(Arguments()).double(), make_optimizer)
    for one, its in ((model, optimizer), (loaded.model, loaded.optimizer)):
        its.zero_grad()
        F.mse_loss(one(x), x[:, :3]).backward()
        its.step()
    assert torch.equal(loaded.model(x), model(x))
    for growth in reversed(history):
        undo(model, growth, optimizer=optimizer)
    assert list(model.state_dict()) == names and model.layers["1"] is old
    assert model.n_layers == model.model_args.n_layers == 3
    assert [block.layer_id for block in model.blocks()] == [0, 1, 2]


class FromTwo(Dicted):
    """The keys begin with another number, and the blocks know theirs."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__(arguments)
        numbers = range(2, 2 + arguments.n_layers)
        self.layers = nn.ModuleDict({str(number): Numbered(number, arguments) for number in numbers})


def test_a_dict_may_begin_with_another_number() -> None:
    torch.manual_seed(0)
    model, x = FromTwo(Arguments()).double(), torch.randn(4, 8, dtype=torch.float64)
    names, before, old = list(model.state_dict()), model(x).detach(), model.layers["3"]
    history = History()
    for place in ("after layers.2", "before layers.2", "after layers.6"):
        history.append(insert(model, next(s for s in find_sites(model, x) if s.place == place)))
        assert torch.equal(model(x), before)
    assert list(model.layers) == list("234567") and model.layers["5"] is old
    assert [block.layer_id for block in model.blocks()] == [2, 3, 4, 5, 6, 7]
    assert history[0].name == "layers.3" and history[0].renames["layers.3.up.weight"] == "layers.4.up.weight"
    again = replay(FromTwo(Arguments()).double(), history)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), before)
    for growth in reversed(history):
        undo(model, growth)
    assert list(model.state_dict()) == names and model.layers["3"] is old and torch.equal(model(x), before)
    assert [block.layer_id for block in model.blocks()] == [2, 3, 4]


def test_a_dict_with_other_keys_is_not_renumbered() -> None:
    model, x = Dicted(Arguments(), keys="block").double(), torch.randn(4, 8, dtype=torch.float64)
    sites = find_sites(model, x)
    assert sites and {site.kind for site in sites} == {"linear"}
    assert "has its own number (layer_id)" in find_sites(model, x, form="twin").explain()


class Skipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Repeating(nn.Module):
    """Runs as many blocks as a number says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.depth = nn.ModuleList([Skipped(), Skipped()]), 2

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.depth):
            x = self.blocks[number](x)
        return x


class Outer(nn.Module):
    """A list in which another list is."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Skipped(), Repeating()])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_what_counts_a_list_is_found_again_when_a_list_around_it_has_taken_a_block() -> None:
    model, x = Outer().eval(), torch.randn(2, 3, 4)
    before = model(x)
    sites = {site.path: site for site in find_sites(model, x)}
    first, second = insert(model, sites["parts.0"]), insert(model, sites["parts.1.blocks.0"])
    assert model.parts[2].depth == len(model.parts[2].blocks) == 3 and torch.equal(model(x), before)
    again = replay(Outer(), History.from_json(History([first, second]).to_json()))
    assert again.parts[2].depth == 3
    undo(model, second)
    undo(model, first)
    assert model.parts[1].depth == 2
