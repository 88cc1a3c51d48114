"""Sites from a small sibling: the same as those that a search of the model itself finds, bound to the model and sized by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sensli import Site, find_sites, insert, measure
from sensli.errors import BadExample, UnsupportedModel, WrongType
from sensli.moves import finding
from sensli.moves.width.width import Width


class Block(nn.Module):
    def __init__(self, width: int, heads: int, number: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.layer_idx = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


class Network(nn.Module):
    """A stem of convolutions, a stack of numbered blocks and a head."""

    def __init__(self, depth: int, width: int, heads: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()
        )
        self.blocks = nn.ModuleList([Block(width, heads, number) for number in range(depth)])
        self.num_layers = depth
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def large() -> nn.Module:
    torch.manual_seed(0)
    return Network(5, 24, 6, 10).eval()


def small() -> nn.Module:
    return Network(3, 8, 2, 4)


X = torch.linspace(-1, 1, 2 * 3 * 16).view(2, 3, 4, 4)


def facts(site: Site) -> Any:
    """All that a growth depends on, without the order of what has none."""
    move: Any = site.move
    if isinstance(move, Width):
        move = (move.units, move.more, move.blocks, move.heads, move.axes, set(move.sizes), move.readers)
    point = site.point
    return str(site), site.cost, site.stack, move, point.shape, point.place, point.slot, point.first_part, point.chained


def same(model: nn.Module, example: Any, sibling: Any, **request: Any) -> None:
    state = copy.deepcopy(model.state_dict())
    random, mode = torch.get_rng_state(), model.training
    found = find_sites(model, example, sibling=sibling, **request)
    assert torch.equal(torch.get_rng_state(), random) and model.training == mode
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    expected = find_sites(model, example, sibling=False, **request)
    assert list(map(facts, found)) == list(map(facts, expected))
    assert {path for path, _ in expected.skipped} == {path for path, _ in found.skipped}


def test_a_sibling_shows_the_sites_of_the_model_itself() -> None:
    same(large(), X, small, what="both")


def test_what_was_found_on_a_sibling_is_measured_and_grows_the_model() -> None:
    model = large()
    sites = find_sites(model, X, what="both", sibling=small)
    y = torch.tensor([1, 3])
    merits = measure(model, sites, [(X, y)], nn.functional.cross_entropy)
    expected = measure(model, find_sites(model, X, what="both"), [(X, y)], nn.functional.cross_entropy)
    assert [m.value for m in merits] == pytest.approx([m.value for m in expected], rel=1e-6)
    before = model(X)
    for path, kind in (("blocks.2.attention", "units"), ("blocks.3", "block"), ("stem.1", "conv")):
        site = next(site for site in sites if site.path == path and site.kind == kind)
        insert(model, site)
        torch.testing.assert_close(model(X), before)
    assert [block.layer_idx for block in model.blocks] == list(range(6)) and model.num_layers == 6
    again = find_sites(model, X, sibling=small)  # the model has grown, the sibling has not
    assert "blocks.5" in {site.path for site in again} and "stem.1" in {site.path for site in again}
    assert "was inserted into the model" in dict(map(tuple, again.skipped))["stem.grown1"]


def test_a_sibling_may_take_another_example_and_the_model_may_be_partly_frozen() -> None:
    model = large()
    model.blocks[2].feed.requires_grad_(False)
    with pytest.raises(BadExample, match="return a pair from sibling="):
        find_sites(model, X, sibling=lambda: Other())
    found = find_sites(model, X, what="units", sibling=lambda: (small(), X[:1]))
    assert "blocks.2.feed.0" not in {site.path for site in found}
    assert "does not train" in dict(map(tuple, found.skipped))["blocks.2.feed.0"]


class Other(Network):
    """Of another class, which is of no concern before the search; takes another example."""

    def __init__(self) -> None:
        super().__init__(3, 8, 2, 4)
        self.__class__ = Network  # the class of the model, so that only the example differs
        self.stem[0] = nn.Conv2d(2, 4, 3, padding=1)


def shared() -> nn.Module:
    model = small()
    model.head.bias = MODEL.head.bias
    return model


def with_another_class() -> nn.Module:
    model = small()
    model.blocks[1].norm = nn.Identity()
    return model


def with_another_path() -> nn.Module:
    model = small()
    model.more = nn.Linear(1, 1)
    return model


def failing() -> nn.Module:
    raise RuntimeError("no luck")


MODEL = large()
WRONG: list[tuple[Any, type[Exception], str]] = [
    (3, WrongType, "sibling must be a function that returns a small model"),
    (small(), WrongType, "sibling must be a function"),
    (lambda: 3, WrongType, "That is what it returned"),
    (lambda x: x, UnsupportedModel, "without arguments"),
    (failing, UnsupportedModel, "RuntimeError: no luck"),
    (True, UnsupportedModel, "has no configuration"),
    (lambda: Network(2, 8, 2, 4), UnsupportedModel, "5 blocks in the model and 2 in the sibling"),
    (with_another_class, UnsupportedModel, "block 1 of 'blocks' in the sibling .Block. is like none"),
    (with_another_path, UnsupportedModel, "the sibling has a module 'more' and the model has none"),
    (lambda: nn.Linear(2, 2), UnsupportedModel, "'' is Network in the model and Linear in the sibling"),
    (shared, UnsupportedModel, "shares memory with 'head.bias'"),
]


@pytest.mark.parametrize(("sibling", "error", "text"), WRONG)
def test_a_wrong_sibling_is_refused_and_nothing_changes(sibling: Any, error: type[Exception], text: str) -> None:
    state, before = copy.deepcopy(MODEL.state_dict()), MODEL(X)
    with pytest.raises(error, match=text):
        find_sites(MODEL, X, sibling=sibling)
    assert all(torch.equal(value, state[name]) for name, value in MODEL.state_dict().items())
    assert torch.equal(MODEL(X), before) and not MODEL._forward_hooks


# --- models with a configuration ---


def llama() -> Any:
    import transformers

    sizes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 96,
        "vocab_size": 512,
    }
    config = transformers.LlamaConfig(**sizes, intermediate_size=200)
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=5, n_head=8, n_embd=96, vocab_size=512)).eval()


def gemma() -> Any:
    import transformers

    sizes = {
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 96,
        "vocab_size": 512,
    }
    config = transformers.Gemma3TextConfig(**sizes, intermediate_size=200, head_dim=24, sliding_window=4)
    return transformers.Gemma3ForCausalLM(config).eval()


def t5() -> Any:
    import transformers

    sizes = {
        "num_layers": 5,
        "num_decoder_layers": 4,
        "num_heads": 6,
        "d_model": 96,
        "d_ff": 200,
        "d_kv": 16,
        "vocab_size": 512,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()


@pytest.mark.library
def test_a_gradient_that_overflows_is_named() -> None:
    # The word 0 is padding and has the embedding zero, which every norm of a block divides by its size.
    found = find_sites(gemma(), {"input_ids": torch.arange(9)[None]}, what="layers")
    reasons = {skipped.path: skipped.reason for skipped in found.skipped}
    assert "is infinite or not a number on the example" in reasons["model.layers.0"]


@pytest.mark.library
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (llama, "both"),
        (gpt2, "layers"),
        *(pytest.param(make, "both", marks=pytest.mark.thorough) for make in (gpt2, gemma, t5)),
    ],
)
def test_a_sibling_from_the_configuration_shows_the_sites_of_the_model_itself(
    make: Callable[..., Any], what: str
) -> None:
    ids = torch.arange(18).view(2, 9) * 25 + 1
    model = make()
    same(model, {"input_ids": ids, **({"decoder_input_ids": ids} if make is t5 else {})}, True, what=what)


@pytest.mark.library
def test_above_a_size_a_configured_model_is_looked_at_through_its_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), torch.arange(18).view(2, 9)
    copied: list[int] = []
    search = finding._search
    monkeypatch.setattr(
        finding,
        "_search",
        lambda model, *rest, **named: copied.append(len(list(model.parameters()))) or search(model, *rest, **named),
    )
    monkeypatch.setattr(finding, "LARGE", 1000)
    found = find_sites(model, {"input_ids": ids})
    assert len(copied) == 1 and copied[0] < len(list(model.parameters())) and not found.notes
    model.model.layers[1].mlp.up_proj = nn.Sequential(model.model.layers[1].mlp.up_proj)  # no configuration says that
    found = find_sites(model, {"input_ids": ids})
    assert "a copy of the whole model was searched" in found.notes[0] and len(found) == 5
