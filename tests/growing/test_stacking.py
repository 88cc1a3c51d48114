"""`Grower(strategy="stack")`: which block comes where and with which weights, against lists that are written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ranks
from models import deep, points, snapshot
from sensli import Grower, History, Rates, load_checkpoint, replay, save_checkpoint, undo
from sensli.errors import SensliError
from sensli.growing.stacking import StackBlocks
from sensli.growing.triggers import At, Every, Limit
from sensli.moves.stacking import find_stack_copies

WIDTH = 4


class Block(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.layer_idx = number
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Listed(nn.Module):
    """A list that the model counts and numbers."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.n_layers = blocks
        self.blocks = nn.ModuleList(Block(number) for number in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.n_layers):
            x = self.blocks[index](x)
        return self.head(x)


class Sliced(Listed):
    """A fixed number of blocks, which do not know theirs: copies go around them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            del block.layer_idx

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:4]:
            x = block(x)
        return self.head(x)


class Part(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Summed(Listed):
    """The loop adds what the blocks give."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Part(number) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Staged(nn.Module):
    """Two stacks of different blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.down = nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        x = self.down(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def sequence() -> nn.Module:
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(4))), nn.Linear(WIDTH, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "listed": Listed, "sliced": Sliced, "summed": Summed, "sequence": sequence,
}  # fmt: skip
X = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1)).double()
Y = torch.randint(3, (12,), generator=torch.Generator().manual_seed(2))
BATCHES = [(X, Y)]


def made(name: str = "listed") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def blocks_of(model: Any) -> list[nn.Module]:
    """In the order in which they run."""
    return [module for module in model.modules() if isinstance(module, Block)]


def grower_of(model: nn.Module, **options: Any) -> Grower:
    options = {"trigger": Every(1), "strategy": "stack", "example": X, **options}
    return Grower(model, torch.optim.Adam(model.parameters(), lr=1e-2), **options)


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    optimizer.zero_grad()


# --- the order ---

# The numbers of the blocks, by the options; four blocks to begin with.
ORDERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "stack": ({}, [0, 1, 2, 3, 0, 1, 2, 3]),
    "three times": ({"factor": 3, "max_factor": 3}, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]),
    "spared": ({"spare": 1}, [0, 1, 2, 1, 2, 3]),
    "interleave": ({"order": "interleave"}, [0, 0, 1, 1, 2, 2, 3, 3]),
    "interleave, spared, three times": (
        {"order": "interleave", "spare": 1, "factor": 3, "max_factor": None},
        [0, 1, 1, 1, 2, 2, 2, 3],
    ),
}


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_run_in_the_order_that_is_said_with_the_weights_of_their_sources(name: str, options: str) -> None:
    given, numbers = ORDERS[options]
    model = made(name)
    grower = grower_of(model, **given)
    train(model, grower.optimizers[0])
    before, x = snapshot(model, *grower.optimizers), X
    old = blocks_of(copy.deepcopy(model))
    own = blocks_of(model)
    head = model.head if isinstance(model, Listed) else model[1]
    for number in numbers:
        x = x + old[number](x) if name == "summed" else old[number](x)
    expected = head(x)
    growth = grower.step(BATCHES, F.cross_entropy, metric=1.0)
    assert growth is not None and len(grower.history) == 1
    assert torch.equal(model(X), expected)
    found = blocks_of(model)
    for block, number in zip(found, numbers, strict=True):
        ours, theirs = block.state_dict(), old[number].state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    # The blocks that were there are the same objects, in their order, with their moments; the copies have none.
    kept = [block for block in found if any(block is each for each in own)]
    assert all(one is other for one, other in zip(kept, own, strict=True))
    state = grower.optimizers[0].state
    for block in found:
        assert all(bool(state.get(p)) == (block in own) for p in block.parameters())
    if name == "listed":
        assert model.n_layers == len(numbers) and [block.layer_idx for block in found] == list(range(len(numbers)))
    again = replay(made(name), History.from_dict(grower.history.to_dict()))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(X), expected)
    names = dict(model.named_parameters())
    assert all(id(names[growth.renames.get(old, old)]) == number for old, number, *_ in before["parameters"])
    undo(model, growth, optimizer=grower.optimizers)
    assert snapshot(model, *grower.optimizers) == before


@pytest.mark.parametrize("order", ["stack", "interleave"])
@pytest.mark.parametrize("name", MODELS)
def test_a_stack_doubles_at_every_check(name: str, order: str) -> None:
    model = made(name)
    before, output = snapshot(model), copy.deepcopy(model)
    numbers = [0, 1, 2, 3]
    for _ in range(2):
        numbers = numbers * 2 if order == "stack" else [number for number in numbers for _ in range(2)]
    grower = grower_of(model, order=order)
    for _ in range(2):
        grower.step(BATCHES, F.cross_entropy, metric=1.0)
    assert len(grower.history) == 2
    old = blocks_of(output)
    pairs = zip(blocks_of(model), numbers, strict=True)
    assert all(torch.equal(block.body[1].weight, old[number].body[1].weight) for block, number in pairs)
    for _ in range(2):
        undo(model)
    assert snapshot(model) == before


def test_all_stacks_are_copied_at_once_and_where_says_which() -> None:
    torch.manual_seed(0)
    model = Staged().double()
    whole = copy.deepcopy(model)
    told = list[Any]()
    grower = grower_of(model, log=told.append)
    grower.step(BATCHES, F.cross_entropy, metric=1.0)
    assert (len(model.first), len(model.blocks), len(grower.history)) == (4, 6, 2)
    assert told[-1].reason == "2 of 2 stacks copied" and "not kept" in str(told[-1]) and not told[-1].measured
    grower_of(whole, where="blocks").step(BATCHES, F.cross_entropy, metric=1.0)
    assert (len(whole.first), len(whole.blocks)) == (2, 6)


def test_nothing_is_measured_and_the_limits_hold() -> None:
    model = made()
    size = sum(p.numel() for p in model.parameters())
    grower = grower_of(model, trigger=Every(1) & Limit(parameters=2 * size))

    def refuse(*_: Any) -> Any:
        raise AssertionError("the data were run")

    for _ in range(3):
        grower.step([(X, Y)], refuse, metric=1.0)
    assert model.n_layers == 8 and len(grower.history) == 1


# --- noise ---


def test_noise_is_a_share_of_the_deviation_of_each_tensor_and_its_seed_is_recorded() -> None:
    torch.manual_seed(3)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96)) for _ in range(2)))
    model.append(nn.Linear(96, 3))
    x, copies = torch.randn(4, 96), []
    for seed in (5, 5, 6):
        each = copy.deepcopy(model)
        state = torch.get_rng_state()
        grower = Grower(
            each, strategy="stack", noise=0.01, seed=seed, trigger=At(1), example=x, max_factor=None
        )  # fmt: skip
        growth = grower.step([(x, Y[:4])], F.cross_entropy)
        assert growth is not None and torch.equal(torch.get_rng_state(), state)
        copies.append((each, growth, grower.history))
    one, again, other = (
        [module for module in each.modules() if isinstance(module, nn.Linear)] for each, _, _ in copies
    )
    source = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for index in (0, 1, 2, 3, 8):  # what was there
        place = -1 if index == 8 else index
        assert torch.equal(one[place].weight, source[min(index, 4)].weight)
    for index in range(4):
        moved = (one[4 + index].weight - source[index].weight) / source[index].weight.std(correction=0)
        assert moved.std().item() == pytest.approx(0.01, rel=0.05) and abs(moved.mean().item()) < 5e-4
        assert torch.equal(one[4 + index].weight, again[4 + index].weight)
        assert not torch.equal(one[4 + index].weight, other[4 + index].weight)
    assert not torch.equal(one[4].weight - source[0].weight, one[6].weight - source[2].weight)
    # As data, in a history and in a replay of the same weights, to the bit.
    history = History.from_dict(copies[0][2].to_dict())
    assert history[0].site.move == copies[0][1].site.move and "noise 0.01" in str(history[0])
    repeated = replay(copy.deepcopy(model), history)
    ours = copies[0][0].state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in repeated.state_dict().items())


def test_noise_leaves_a_constant_tensor_alone_and_works_in_half_precision() -> None:
    model = made().to(torch.bfloat16)
    grower = grower_of(model, noise=0.5, example=X.bfloat16())
    grower.step([(X.bfloat16(), Y)], F.cross_entropy, metric=1.0)
    norm, weight = model.blocks[4].body[0].weight, model.blocks[4].body[1].weight
    assert torch.equal(norm, torch.ones_like(norm)) and norm.dtype == weight.dtype == torch.bfloat16
    moved = (weight - model.blocks[0].body[1].weight).float().std()
    assert 0.2 < moved / model.blocks[0].body[1].weight.float().std() < 0.9


def test_a_later_growth_has_other_noise() -> None:
    model = made()
    grower = grower_of(model, noise=0.1)
    seeds = [grower.step(BATCHES, F.cross_entropy, metric=1.0).site.move.seed for _ in range(2)]  # type: ignore[union-attr]
    assert seeds[0] != seeds[1]


# --- what follows ---


@pytest.mark.parametrize("order", ["stack", "interleave"])
def test_a_training_that_is_saved_and_loaded_goes_on_to_the_bit(order: str, tmp_path: Path) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    def make_grower(model: nn.Module, optimizer: Any, _: Any) -> Grower:
        return Grower(
            model, optimizer, strategy="stack", order=order, spare=1, noise=0.01, seed=7, trigger=At(1, 2), example=X
        )  # fmt: skip

    def advance(model: nn.Module, optimizer: Any, grower: Grower) -> None:
        train(model, optimizer)
        grower.step(BATCHES, F.cross_entropy)

    model = made()
    optimizer = adam(model)
    grower = make_grower(model, optimizer, None)
    advance(model, optimizer, grower)
    save_checkpoint(tmp_path / "run", model, optimizer=optimizer, grower=grower)
    loaded = load_checkpoint(tmp_path / "run", made, adam, make_grower=make_grower)
    assert loaded.grower is not None
    for _ in range(2):
        advance(model, optimizer, grower)
        advance(loaded.model, loaded.optimizer, loaded.grower)
    assert len(grower.history) == 2
    ours, theirs = model.state_dict(), loaded.model.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_average_interleaves_its_own_blocks_and_comes_back() -> None:
    model = made()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        for parameter in averaged.module.parameters():
            parameter.mul_(0.5)
    before = copy.deepcopy(averaged.module.state_dict())
    grower = grower_of(model, order="interleave", averaged=averaged, noise=0.01)
    grower.step(BATCHES, F.cross_entropy, metric=1.0)
    found = averaged.module.blocks
    assert len(found) == 8 and torch.equal(found[2].body[1].weight, before["blocks.1.body.1.weight"])
    moved = found[3].body[1].weight - found[2].body[1].weight
    assert 0 < moved.std() < 0.05 * found[2].body[1].weight.std()


def test_new_blocks_may_have_a_rate_of_their_own_or_train_alone() -> None:
    model = made()
    grower = grower_of(model, order="interleave", rates=Rates(new_lr_factor=0.1, freeze_rest=True))
    growth = grower.step(BATCHES, F.cross_entropy, metric=1.0)
    assert growth is not None
    training = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert training == set(growth.parameters) and {n.split(".")[1] for n in training} == {"1", "3", "5", "7"}
    assert sorted({group["lr"] for group in grower.optimizers[0].param_groups}) == pytest.approx([1e-3, 1e-2])


@pytest.mark.library
def test_the_configuration_of_a_decoder_stays_true(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_key_value_heads=1, pad_token_id=0, **sizes))
    before = copy.deepcopy(model.model.layers)
    ids = torch.randint(1, 17, (2, 5))
    grower = Grower(
        model, torch.optim.AdamW(model.parameters()), trigger=At(1), strategy="stack", order="interleave", spare=1
    )  # fmt: skip
    grower.step([{"input_ids": ids, "labels": ids}])
    layers = model.model.layers
    assert model.config.num_hidden_layers == len(layers) == 6
    for number, source in enumerate([0, 1, 1, 2, 2, 3]):
        assert layers[number].self_attn.layer_idx == number
        assert torch.equal(layers[number].mlp.up_proj.weight, before[source].mlp.up_proj.weight)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    model.eval(), again.eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def on_ranks() -> Any:
    """DDP and FSDP2 in turn; ranks whose noise would differ are told so."""
    found = {}
    for name, wrap in {"ddp": DistributedDataParallel, "fsdp": _shard}.items():
        model = wrap(made())
        grower = grower_of(model, order="interleave", noise=0.1, seed=3)
        train(model, grower.optimizers[0])
        grower.step(BATCHES, F.cross_entropy, metric=1.0)
        train(model, grower.optimizers[0])
        found[name] = ranks.wholes(getattr(model, "module", model).state_dict())
    # The least important block, on the data of all ranks together.
    mine = [(X[dist.get_rank() :: 2], Y[dist.get_rank() :: 2])]
    least = {"strategy": "sensli", "what": "layers", "select": "least", "floor": 0.0}
    model = DistributedDataParallel(made())
    found["least"] = grower_of(model, **least).step(mine, F.cross_entropy).site.path
    with pytest.raises(SensliError, match=r"needs whole gradients, but the model is sharded"):
        grower_of(_shard(made()), **least).step(mine, F.cross_entropy)
    model = DistributedDataParallel(made())
    with pytest.raises(SensliError, match=r"Ranks disagree.*noise 0\.1, seed 0.* on rank 0 and .*seed 1.* on rank 1"):
        grower_of(model, noise=0.1, seed=dist.get_rank()).step(BATCHES, F.cross_entropy, metric=1.0)
    return found


def _shard(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.process
def test_several_processes_copy_alike(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = made()
    grower = grower_of(model, order="interleave", noise=0.1, seed=3)
    train(model, grower.optimizers[0])
    grower.step(BATCHES, F.cross_entropy, metric=1.0)
    train(model, grower.optimizers[0])
    expected = model.state_dict()
    found = ranks.run(on_ranks, 2, tmp_path)
    options = {"strategy": "sensli", "what": "layers", "select": "least"}
    assert found.pop("least") == grower_of(made(), **options).step(BATCHES, F.cross_entropy).site.path  # type: ignore[union-attr]
    for values in found.values():
        assert list(values) == list(expected)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


# --- what is refused ---


def test_a_model_without_a_stack_says_so() -> None:
    grower = Grower(deep(), strategy="stack", trigger=At(1), example=points(2))
    with pytest.raises(
        SensliError, match=r"nowhere to grow(.|\n)*the model: it has no stack of equal blocks that the ex"
    ):
        grower.sites()
    with pytest.raises(
        SensliError, match=r"blocks\.3: its stack has 4 blocks, and spare=2 leaves out so many at each end"
    ):
        grower_of(made(), spare=2).sites()
    assert "interleave" not in str(find_stack_copies(made(), X)[0])


def test_wrong_arguments_are_refused_when_a_grower_is_made() -> None:
    for options, text in (
        ({"factor": 1}, r"^factor must be a whole number of at least 2 \(for example 2\), got 1"),
        ({"factor": 2.5}, r"^factor must be a whole number"),
        ({"factor": 4}, r"^factor must be at most max_factor, which is 2, got 4: .* Give max_factor=4 too, or None\."),
        ({"order": "abab"}, r"^order must be one of 'stack', 'interleave', got 'abab'"),
        ({"spare": -1}, r"^spare must be a whole number of at least 0"),
        ({"noise": -0.1}, r"^noise must be a number of at least 0"),
        ({"noise": float("inf")}, r"^noise must be a number of at least 0"),
        (
            {"tau": 0.5},
            r"^tau must be left out with strategy='stack', got 0.5: of the options .* factor, noise, order, spare and where",
        ),
        ({"max_growths": 2}, r"^max_growths must be left out with strategy='stack'"),
        ({"what": "units"}, r"^what must be 'layers' with strategy='stack'"),
    ):
        with pytest.raises(ValueError, match=text):
            grower_of(made(), **options)
    with pytest.raises(ValueError, match=r"^order must be left out with strategy='sensli', got 'interleave'"):
        Grower(made(), trigger=At(1), order="interleave")
    with pytest.raises(ValueError, match=r"^noise must be left out with strategy=StackBlocks\(\.\.\.\)"):
        grower_of(made(), strategy=StackBlocks(), noise=0.1)
    assert grower_of(made(), strategy=StackBlocks(order="interleave", spare=1)).sites()
