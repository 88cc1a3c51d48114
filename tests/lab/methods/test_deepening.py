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
from sensli.errors import FunctionChanged, SensliError
from sensli.growing.triggers import At, Every, Limit
from sensli.moves.stacking import find_stack_copies
from sensli.surgery.growth import grow
from sensli_lab.methods import blocks
from sensli_lab.methods.blocks import AutoGrow, GStack

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


class Basic(nn.Module):
    """The block of a residual network: two maps with norms, a sum, a ReLU."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.second, self.norm2 = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def residual_network(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    stages = [nn.Sequential(Basic(width), Basic(width)), nn.Sequential(Basic(width))]
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), *stages, nn.Linear(width, 3)).double()


def plain(activation: type[nn.Module] = nn.Tanh, norm: bool = False) -> nn.Module:
    between = [nn.BatchNorm1d(5)] if norm else []
    return nn.Sequential(
        nn.Linear(WIDTH, 5), *between, activation(), nn.Linear(5, 6), activation(), nn.Linear(6, 3)
    )  # fmt: skip


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "residual": residual_network, "plain": plain, "normed": lambda: plain(nn.ReLU, norm=True),
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = {**MODELS, **OTHERS}[name]().double()
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
    always = {"tau": 0.0} if strategy == "random-place" else {}  # the others have no threshold
    options = {"trigger": Every(1), "max_factor": None, **always, **options}
    return Grower(model, optimizer, preset="paper", example=X, strategy=strategy, **options)


# --- all of them ---

# strategy -> a model that it grows, and whether it keeps the function
DEEPENING = {
    "autogrow": ("stages", True),
    "autogrow-gauss": ("residual", False),
    "autogrow-adam": ("residual", False),
    "llama-pro": ("listed", True),
    "g-stack": ("listed", False),
    "net2net-deeper": ("normed", False),
    "netmorph-deeper": ("plain", True),
    "random-place": ("plain", True),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEPENING)
def test_a_growth_is_taken_back_to_the_bit_and_the_log_says_whether_the_function_stays(name: str) -> None:
    kind, keeps = DEEPENING[name]
    model, told = made(kind), list[Any]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trained(model, optimizer)
    model.eval()
    before, output = snapshot(model, optimizer), model(X)
    grower = grower_of(model, optimizer, name, log=told.append)
    growth = grower.step(BATCHES, F.cross_entropy, metric=1.0)
    assert growth is not None and ("not kept" in str(told[-1])) is not keeps
    # A batch norm that undoes itself changes the function in training mode; in eval mode it is rounding, or not even that.
    assert torch.equal(model(X), output) is keeps or name == "net2net-deeper"
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, model.parameters()))
    assert not any(optimizer.state.get(p) for n, p in model.named_parameters() if n in growth.parameters)
    undo(model, growth, optimizer=optimizer)
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize("name", DEEPENING)
@pytest.mark.slow
def test_a_training_that_is_saved_and_loaded_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    def advance(model: nn.Module, optimizer: Any, grower: Grower, metrics: tuple[float, ...]) -> None:
        for metric in metrics:
            trained(model, optimizer)
            grower.step(BATCHES, F.cross_entropy, metric=metric)

    kind, _ = DEEPENING[name]
    limits = {"trigger": Every(1) & Limit(parameters=2000)}
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
        trigger=Every(1) & Limit(parameters=limit + 1),
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
    grower = grower_of(model, torch.optim.Adam(model.parameters()), GStack(factor=3), max_growths=2)
    expected = X
    first, second = (copy.deepcopy(list(blocks)) for blocks in (model.first, model.second))
    for block in first * 3 + second * 3:
        expected = expected + block(expected)
    grower.step(BATCHES, F.cross_entropy)
    assert len(grower.history) == 2 and torch.equal(model(X), model.out(expected))


def test_a_stack_in_the_middle_of_its_list_renames_what_comes_after_it() -> None:
    class Mixed(Listed):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].body[3].bias = None  # not equal to the two before it

    torch.manual_seed(0)
    model = Mixed().double()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    last, moments = model.blocks[2].body[1].weight, snapshot(model, optimizer)
    site = find_stack_copies(model, X)[0]
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
        grow(model, find_stack_copies(model, X)[0], check=X)
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
        preset="paper",
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


# --- AutoGrow ---


@pytest.mark.parametrize("start", ["zero", "uniform", "normal"])
def test_autogrow_adds_a_new_block_whose_last_norm_is_drawn(start: str) -> None:
    """Against the network written out with the block by hand; what is drawn has the moments that it should have."""
    width, count = 96, 4
    model, x = residual_network(width), torch.randn(8, width, generator=torch.Generator().manual_seed(0)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=x,
        trigger=Every(1),
        strategy=AutoGrow(start=start, where="2", seed=5),
        max_factor=None,
        max_growths=1,
    )
    before = copy.deepcopy(model)
    for number in range(count):
        grower.step([(x, torch.zeros(8).long())], F.cross_entropy, metric=1.0 / (number + 1))
    new = [model.get_submodule(growth.name) for growth in grower.history]
    assert len(new) == count and all(type(block) is Basic for block in new)
    for block in new:
        assert torch.equal(block.norm1.weight, torch.ones(width).double()) and not block.norm1.running_mean.any()
    value = before[2](before[1](before[0](x)))
    for block in new:
        hidden = F.relu(block.norm1(block.first(value)))
        value = F.relu(value + block.norm2(block.second(hidden)))
    torch.testing.assert_close(model(x), before[4](before[3](value)), rtol=1e-12, atol=1e-12)
    last = torch.stack([torch.stack([block.norm2.weight, block.norm2.bias]) for block in new]).detach()
    mean, deviation = {"zero": (0.0, 0.0), "uniform": (0.5, 12**-0.5), "normal": (0.0, 1.0)}[start]
    for drawn in last.movedim(1, 0):  # weights, biases
        assert abs(float(drawn.mean()) - mean) < 0.15 and abs(float(drawn.std()) - deviation) < 0.1
    if start != "zero":
        assert all(not torch.equal(one, other) for i, one in enumerate(last) for other in last[:i])
    # The default start of a linear map: uniform up to 1 / sqrt(inputs), and not a copy of the neighbour's.
    for block in new:
        weight = block.second.weight.detach()
        assert 0.9 < float(weight.abs().max()) * width**0.5 <= 1.0 and not torch.equal(
            weight, before[2][1].second.weight
        )


def by_hand(model: Any, block: Any, batches: Any, most: int) -> tuple[list[Tensor], list[float]]:
    """AdamInit written out: weight and bias of the last norm of a block after the first stage, and the mean loss of each pass."""
    w, b = (torch.full((WIDTH,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
    moments = [[torch.zeros(WIDTH).double(), torch.zeros(WIDTH).double()] for _ in range(2)]
    count, passes = 0, []
    for _ in range(most):
        losses = []
        for x, y in batches:
            value = model[2](model[1](model[0](x)))
            inner = block.second(F.relu(block.norm1(block.first(value))))
            inner = (inner - inner.mean(0)) / (inner.var(0, unbiased=False) + block.norm2.eps).sqrt()
            value = F.relu(value + w * inner + b)
            loss = F.cross_entropy(model[4](model[3](value)), y)
            gradients = torch.autograd.grad(loss, [w, b])
            losses.append(float(loss.detach()) * len(x))
            count += 1
            with torch.no_grad():
                for own, gradient, (first, second) in zip([w, b], gradients, moments, strict=True):
                    gradient = gradient + 5e-4 * own
                    first.mul_(0.9).add_(0.1 * gradient)
                    second.mul_(0.999).add_(0.001 * gradient**2)
                    own -= 1e-3 * (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)
        passes.append(sum(losses) / sum(len(x) for x, _ in batches))
    return [w.detach(), b.detach()], passes


@pytest.mark.parametrize("near", [0.005, 0.05, 1e9])
def test_autogrow_trains_the_last_norm_alone_until_the_loss_is_back(near: float, monkeypatch: Any) -> None:
    """Against the training written out, which ends after ten passes, in between, or after one."""
    monkeypatch.setattr(blocks, "NEAR", near)
    model = residual_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer)
    before = copy.deepcopy(model)
    batches = [BATCHES[0], (BATCHES[0][0][:3], BATCHES[0][1][:3])]
    strategy = AutoGrow(start="trained", seed=5)
    grower = grower_of(model, optimizer, strategy, log=(told := list[Any]()).append)
    grower.step(batches, F.cross_entropy, metric=1.0)
    assert "not kept" in str(told[-1]) and str(grower.history[0].site).startswith("New(Basic, trained last norm)")
    block = model.get_submodule(grower.history[0].name)
    start = copy.deepcopy(before).train()
    old = sum(float(F.cross_entropy(start(x), y).detach()) * len(x) for x, y in batches) / sum(
        len(x) for x, _ in batches
    )
    _, passes = by_hand(copy.deepcopy(before).train(), copy.deepcopy(block).train(), batches, 10)
    taken = next((number for number, loss in enumerate(passes, 1) if loss < old + near * abs(old)), 10)
    expected, _ = by_hand(copy.deepcopy(before).train(), copy.deepcopy(block).train(), batches, taken)
    for found, value in zip((block.norm2.weight, block.norm2.bias), expected, strict=True):
        torch.testing.assert_close(found.detach(), value, rtol=1e-9, atol=1e-11)
    assert taken == 10 if near == 0.005 else taken == 1 if near == 1e9 else 1 < taken < 10
    # Nothing else has moved, in the model and in the block.
    assert not block.norm2.running_mean.any() and torch.equal(block.norm1.weight, torch.ones(WIDTH).double())
    for name, value in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


# --- Net2Net, NetMorph, random place, LLaMA-Pro ---


def normed_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3),
    ).double()  # fmt: skip


def test_net2net_deepens_by_identities_whose_norms_undo_themselves() -> None:
    x = torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    model, batches = normed_network(), [(x[:16], Y), (x[16:], Y)]
    model(x)  # the running statistics move
    model.eval()
    told, before, arrives = list[Any](), model(x), model[:3](x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=x,
        trigger=Every(1),
        strategy="net2net-deeper",
        max_factor=None,
        log=told.append,
    )
    growth = grower.step(batches, F.cross_entropy)
    assert growth is not None and str(growth.site) == "Conv2d(3, 3, 3) + BatchNorm2d + ReLU after 2"
    conv, norm, _ = model.get_submodule(growth.name)
    mean, variance = arrives.mean((0, 2, 3)), arrives.var((0, 2, 3), correction=0)
    torch.testing.assert_close(norm.weight.detach(), (variance + norm.eps).sqrt(), rtol=1e-12, atol=0)
    torch.testing.assert_close(norm.bias.detach(), mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(conv(arrives), arrives, rtol=0, atol=0)
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-12)
    norm.train()  # on all the data of the pass the statistics of a batch are those of the pass
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-12)
    assert "not kept" in str(told[-1])  # on another batch they are not
    model.eval()
    growth = grower.step(batches, F.cross_entropy)  # the next place: no norm before it
    assert growth is not None and str(growth.site) == "Conv2d(5, 5, 3) + ReLU after 4"
    again = replay(normed_network(), History.from_dict(grower.history.to_dict()))
    again.load_state_dict(model.state_dict())
    again.eval()
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(("name", "activation"), [("net2net-deeper", nn.ReLU), ("netmorph-deeper", nn.Tanh)])
def test_identity_layers_go_in_one_place_after_the_other(name: str, activation: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = plain(activation).double()
    before, told = model(X), list[Any]()
    grower = grower_of(model, torch.optim.Adam(model.parameters()), name, log=told.append)
    for _ in range(3):
        grower.step(BATCHES, F.cross_entropy)
    assert [growth.site.path for growth in grower.history] == ["1", "3", "1"]
    assert torch.equal(model(X), before) and not any("not kept" in str(look) for look in told)
    for growth in grower.history:
        layer = model.get_submodule(growth.name)
        x = torch.randn(7, layer.linear.in_features).double().relu()
        if name == "netmorph-deeper":  # as the paper writes it, with its a of 1 at first
            z, a = layer.linear(x), 1 - layer.a
            torch.testing.assert_close(layer(x), a * z + (1 - a) * torch.tanh(z))
            with torch.no_grad():
                layer.a.fill_(0.25)
            torch.testing.assert_close(layer(x), 0.75 * z + 0.25 * torch.tanh(z))
        else:
            assert torch.equal(layer(x), x)


def test_net2net_has_no_place_where_the_activation_is_not_idempotent() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(SensliError, match="nowhere to grow"):
        grower_of(model, torch.optim.Adam(model.parameters()), "net2net-deeper").sites()


def test_a_random_place_is_that_of_the_selection() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())), nn.Linear(WIDTH, 3)
    ).double()
    second, places = copy.deepcopy(first), []
    for model, options in ((first, {"strategy": "random-place"}), (second, {"strategy": "sensli", "select": "random"})):
        grower = grower_of(model, torch.optim.Adam(model.parameters()), tau=0.0, seed=3, **options)
        for _ in range(3):
            grower.step(BATCHES, F.cross_entropy)
        places.append([str(growth.site) for growth in grower.history])
    assert places[0] == places[1] and len(set(places[0])) > 1


def test_llama_pro_copies_each_nth_block_as_its_code_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Block() for _ in range(8))), nn.Linear(WIDTH, 3)).double()
    grower = grower_of(model, torch.optim.Adam(model.parameters()), "llama-pro", max_growths=4)
    grower.step(BATCHES, F.cross_entropy)
    # The released script: a copy after block i wherever (i + 1) is divisible by 8 / 4.
    assert [growth.site.place for growth in grower.history] == [f"after 0.{i}" for i in range(8) if (i + 1) % 2 == 0]
