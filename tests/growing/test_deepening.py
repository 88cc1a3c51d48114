"""The methods that deepen: each against a slow version of what it does, and all through undo, checkpoints and the log."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import snapshot
from sensli import Grower, History, load_checkpoint, replay, save_checkpoint, undo
from sensli.errors import FunctionChanged
from sensli.growing.strategies.g_stack import GStack
from sensli.growing.triggers import At, Budget, Every
from sensli.moves.stack.finding import find_stacks
from sensli.surgery.insertion import grow

WIDTH = 4


def part() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Block(nn.Module):
    """With its own skip connection, as in a transformer."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.layer_idx = number
        self.body = part()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Listed(nn.Module):
    """A hand-written stack that counts and numbers its blocks, with a norm of another kind between them and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.n_layers = 3
        self.blocks = nn.ModuleList(Block(number) for number in range(self.n_layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.n_layers):
            x = self.blocks[index](x)
        return self.head(self.norm(x))


class Stages(nn.Module):
    """Two lists whose loop adds what the blocks give."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(part() for _ in range(2))
        self.second = nn.ModuleList(part() for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.second):
            x = x + block(x)
        return self.out(x)


class Sliced(nn.Module):
    """A loop over a fixed number of blocks, which no list can tell: copies go around the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(2))), nn.Linear(WIDTH, 3))


def post_norm() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), encoder, nn.Flatten(), nn.Linear(WIDTH, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "listed": Listed, "stages": Stages, "sliced": Sliced, "sequence": sequence, "post-norm": post_norm,
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():  # the blocks of an encoder are copies of one at first
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


X = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1)).double()
Y = torch.randint(3, (12,), generator=torch.Generator().manual_seed(2))
BATCHES = [(X, Y)]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    optimizer.zero_grad()


def grower_of(model: nn.Module, optimizer: Any, strategy: Any, **options: Any) -> Grower:
    options = {"trigger": Every(1), "max_factor": None, **options}
    return Grower(model, optimizer, example=X, strategy=strategy, **options)


# --- all of them ---

# strategy -> a model that it grows, and whether it keeps the function
DEEPENING = {
    "autogrow": ("stages", True),
    "llama-pro": ("listed", True),
    "g-stack": ("listed", False),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEPENING)
def test_a_growth_is_taken_back_to_the_bit_and_the_log_says_whether_the_function_stays(name: str) -> None:
    kind, keeps = DEEPENING[name]
    model, told = made(kind), list[Any]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trained(model, optimizer)
    before, output = snapshot(model, optimizer), model(X)
    grower = grower_of(model, optimizer, name, log=told.append)
    growth = grower.step(BATCHES, F.cross_entropy, metric=1.0)
    assert growth is not None and torch.equal(model(X), output) is keeps
    assert ("not kept" in str(told[-1])) is not keeps
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, model.parameters()))
    assert not any(optimizer.state.get(p) for n, p in model.named_parameters() if n in growth.parameters)
    undo(model, growth, optimizer=optimizer)
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize("name", DEEPENING)
def test_a_training_that_is_saved_and_loaded_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    def advance(model: nn.Module, optimizer: Any, grower: Grower, metrics: tuple[float, ...]) -> None:
        for metric in metrics:
            trained(model, optimizer)
            grower.step(BATCHES, F.cross_entropy, metric=metric)

    kind, _ = DEEPENING[name]
    limits = {"trigger": Every(1) & Budget(parameters=2000)}
    model = made(kind)
    optimizer = adam(model)
    grower = grower_of(model, optimizer, name, **limits)
    advance(model, optimizer, grower, (1.0, 0.5))
    save_checkpoint(tmp_path / "run", model, optimizer=optimizer, grower=grower)
    loaded = load_checkpoint(
        tmp_path / "run", lambda: made(kind), adam, make_grower=lambda m, o, _: grower_of(m, o, name, **limits)
    )
    assert loaded.grower is not None and len(loaded.grower.history) == len(grower.history) > 0
    advance(model, optimizer, grower, (0.2, 0.1, 0.1))
    advance(loaded.model, loaded.optimizer, loaded.grower, (0.2, 0.1, 0.1))
    assert [str(growth) for growth in loaded.grower.history] == [str(growth) for growth in grower.history]
    ours, theirs = model.state_dict(), loaded.model.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert loaded.grower.strategy.state_dict() == grower.strategy.state_dict()


# --- G_stack ---


def stacked_by_hand(name: str, model: nn.Module, factor: int) -> Tensor:
    """What a model gives whose blocks run (0, ..., n - 1) so many times, written out."""
    x, parts = X, dict(model.named_children())
    if name == "stages":
        for block in list(parts["first"]) * factor + list(parts["second"]):
            x = x + block(x)
        return parts["out"](x)
    if name == "post-norm":
        x = parts["0"](x)
    blocks = {"sequence": "0", "post-norm": "1"}.get(name, "blocks")
    inside = parts[blocks].layers if name == "post-norm" else parts[blocks]
    for block in list(inside) * factor:
        x = block(x)
    tail = {"listed": ["norm", "head"], "sliced": ["head"], "sequence": ["1"], "post-norm": ["2", "3"]}[name]
    for key in tail:
        x = parts[key](x)
    return x


@pytest.mark.parametrize("name", MODELS)
def test_g_stack_runs_the_whole_stack_four_times(name: str) -> None:
    model = made(name)
    expected = stacked_by_hand(name, copy.deepcopy(model), 4)
    grower = grower_of(model, torch.optim.Adam(model.parameters()), "g-stack")
    before, parameters = len(grower.history), sum(p.numel() for p in model.parameters())
    growth = grower.step(BATCHES, F.cross_entropy)
    assert growth is not None and len(grower.history) == before + 1
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    assert sum(p.numel() for p in model.parameters()) == parameters + growth.site.parameters
    model.eval()
    torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=1e-12)
    again = replay(made(name), History.from_dict(grower.history.to_dict()))
    again.load_state_dict(model.state_dict())
    again.eval()
    assert torch.equal(again(X), model(X))
    if name == "listed":
        assert model.n_layers == 12 and growth.name == "blocks.3" and not growth.renames


def test_g_stack_takes_the_largest_factor_that_fits_and_stacks_once() -> None:
    model = made("listed")
    blocks = sum(p.numel() for p in model.blocks.parameters())
    limit = sum(p.numel() for p in model.parameters()) + 2 * blocks
    told = list[Any]()
    grower = grower_of(
        model,
        torch.optim.Adam(model.parameters()),
        "g-stack",
        trigger=Every(1) & Budget(parameters=limit + 1),
        log=told.append,
    )
    grower.step(BATCHES, F.cross_entropy)
    assert model.n_layers == 9 and sum(p.numel() for p in model.parameters()) == limit
    model = made("listed")
    grower = grower_of(model, torch.optim.Adam(model.parameters()), GStack(factor=2), log=told.append)
    assert grower.step(BATCHES, F.cross_entropy) is not None and grower.step(BATCHES, F.cross_entropy) is None
    assert model.n_layers == 6 and "stacks once" in str(told[-1])


def test_g_stack_stacks_several_lists_as_count_says() -> None:
    model = made("stages")
    grower = grower_of(model, torch.optim.Adam(model.parameters()), GStack(factor=3), count=2)
    expected = X
    first, second = (copy.deepcopy(list(blocks)) for blocks in (model.first, model.second))
    for block in first * 3 + second * 3:
        expected = expected + block(expected)
    grower.step(BATCHES, F.cross_entropy)
    assert len(grower.history) == 2 and torch.equal(model(X), model.out(expected))


def test_a_stack_in_the_middle_of_its_list_renames_what_is_behind_it() -> None:
    class Mixed(Listed):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].body[3].bias = None  # not equal to the two before it

    torch.manual_seed(0)
    model = Mixed().double()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    last, moments = model.blocks[2].body[1].weight, snapshot(model, optimizer)
    site = find_stacks(model, X)[0]
    assert str(site) == "a copy of 2 blocks (Block) after blocks.1"
    growth = grow(model, site, optimizer=optimizer)
    assert growth.renames["blocks.2.body.1.weight"] == "blocks.4.body.1.weight"
    assert model.blocks[4].body[1].weight is last and [block.layer_idx for block in model.blocks] == [0, 1, 2, 3, 4]
    undo(model, optimizer=optimizer)
    assert snapshot(model, optimizer) == moments


def test_a_stack_that_must_not_change_the_output_is_put_back() -> None:
    model = made("listed")
    before = snapshot(model)
    with pytest.raises(FunctionChanged, match="a copy of 3 blocks"):
        grow(model, find_stacks(model, X)[0], check=X)
    assert snapshot(model) == before


def test_an_average_is_stacked_with_the_model_from_its_own_blocks() -> None:
    model = made("listed")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        for parameter in averaged.module.parameters():
            parameter.mul_(0.5)
    expected = stacked_by_hand("listed", copy.deepcopy(averaged.module), 2)
    grower = grower_of(model, torch.optim.Adam(model.parameters()), GStack(factor=2), averaged=averaged)
    grower.step(BATCHES, F.cross_entropy)
    assert torch.equal(averaged.module(X), expected)


@pytest.mark.library
def test_g_stack_keeps_the_configuration_of_a_decoder_true(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 17,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, pad_token_id=0, **sizes))
    ids = torch.randint(1, 17, (2, 5))
    grower = Grower(
        model,
        torch.optim.AdamW(model.parameters()),
        example={"input_ids": ids},
        trigger=At(1),
        strategy="g-stack",
        max_factor=None,
    )
    grower.step([{"input_ids": ids, "labels": ids}])
    assert model.config.num_hidden_layers == len(model.model.layers) == 8
    for number, layer in enumerate(model.model.layers):
        assert layer.self_attn.layer_idx == number
        assert torch.equal(layer.mlp.up_proj.weight, model.model.layers[number % 2].mlp.up_proj.weight)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    model.eval(), again.eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        text = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        cached, plain = (model.generate(ids, use_cache=cache, **text) for cache in (True, False))
    assert torch.equal(cached, plain)
