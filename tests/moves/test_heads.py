"""Attention heads as a width: found in attention however it is written, the function kept, the merit a gradient, configurations saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import sensli
from architectures import GENERATORS, TRANSFORMERS
from sensli import History, find_sites, grow, measure, replay, undo
from sensli.errors import UnknownSite
from sensli.modules.running import run, tensors
from sensli.surgery.averaging import follow
from widening import column_gradients, redrawn, widened


class Attention(nn.Module):
    """Queries, keys and values from maps of their own, or from one; heads counted by the module."""

    def __init__(self, size: int = 12, heads: int = 3, dim: int = 4, fused: str = "", shared: int = 1) -> None:
        super().__init__()
        self.heads, self.dim_head, self.fused, self.shared, self.scale = heads, dim, fused, shared, dim**-0.5
        if fused:
            self.qkv = nn.Linear(size, (heads + 2 * heads // shared) * dim)
        else:
            self.q, self.k = nn.Linear(size, heads * dim), nn.Linear(size, heads // shared * dim, bias=False)
            self.v = nn.Linear(size, heads // shared * dim)
        self.out = nn.Linear(heads * dim, size)

    def maps(self, x: Tensor) -> list[Tensor]:
        b, n, _ = x.shape
        if not self.fused:
            maps = [self.q(x), self.k(x), self.v(x)]
            return [each.view(b, n, -1, self.dim_head).transpose(1, 2) for each in maps]
        if self.fused == "q,kv":
            groups = self.heads // self.shared
            parts = self.qkv(x).view(b, n, -1, self.dim_head).split([self.heads, groups, groups], 2)
            return [each.transpose(1, 2) for each in parts]
        order = {"3hd": (3, self.heads, -1), "h3d": (self.heads, 3, -1), "hd3": (self.heads, -1, 3)}[self.fused]
        each = self.qkv(x).view(b, n, *order).movedim(2 + self.fused.index("3"), 0)
        return list(each.transpose(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x)
        k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(*x.shape[:2], self.heads * self.dim_head))


class Inferred(Attention):
    """No number of heads anywhere: the size of a head decides. Norms over each head, a gate, torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        del self.heads
        self.norm, self.gate = nn.LayerNorm(4), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x)
        mixed = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2) * self.gate(x).sigmoid())


class Configured(nn.Module):
    """The number of heads is in an object that the module holds; another number has the same value and must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.shift = SimpleNamespace(n_head=3, layers=3, split=12), 3
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        parts = self.qkv(x).split(self.config.split, -1)
        q, k, v = (part.view(b, n, self.config.n_head, -1).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).roll(self.shift, 1)


class Torch(nn.Module):
    """torch's own attention; with ``memory`` its keys and values have other sizes than its queries."""

    def __init__(
        self, kind: type[nn.MultiheadAttention] = nn.MultiheadAttention, memory: bool = False, **options: Any
    ) -> None:
        super().__init__()
        sizes = {"kdim": 7, "vdim": 5} if memory else {}
        self.inner, self.memory = kind(12, 3, **sizes, **options), memory
        for name, parameter in self.inner.named_parameters():
            if "bias" in name:
                nn.init.normal_(parameter)  # torch begins with zeros

    def forward(self, x: Tensor) -> Tensor:
        others = (x[..., :7], x[..., :5]) if self.memory else (x, x)
        return self.inner(x, *others, need_weights=self.memory)[0]


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], count: int = 2) -> None:
        super().__init__()
        self.attention = nn.ModuleList([make() for _ in range(count)])
        self.norms = nn.ModuleList([nn.LayerNorm(12) for _ in range(count)])
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return self.out(x.mean(1))


WRITTEN: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "separate": (Attention, "q", "+1 head"),
    "fused": (lambda: Attention(fused="3hd"), "qkv", "+1 head"),
    "fused by heads": (lambda: Attention(fused="h3d"), "qkv", "+1 head"),
    "fused by entries": (lambda: Attention(fused="hd3"), "qkv", "+1 head"),
    "as many heads as entries": (lambda: Attention(heads=4, fused="3hd"), "qkv", "+1 head"),
    "grouped": (lambda: Attention(heads=4, shared=2), "q", "+1 group of 2 heads"),
    "grouped in one": (lambda: Attention(heads=8, dim=3, fused="q,kv", shared=4), "qkv", "+1 group of 4 heads"),
    "one group in one": (lambda: Attention(heads=6, dim=2, fused="q,kv", shared=6), "qkv", "+1 group of 6 heads"),
    "one head": (lambda: Attention(heads=1), "q", "+1 head"),
    "inferred": (Inferred, "q", "+1 head"),
    "configured": (Configured, "qkv", "+1 head"),
    "torch": (lambda: Torch(batch_first=True), "inner", "+1 head"),
    "torch with all it can have": (
        lambda: Torch(memory=True, add_bias_kv=True, add_zero_attn=True), "inner", "+1 head",
    ),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Blocks(WRITTEN[name][0]).double(), torch.randn(4, 5, 12, dtype=torch.float64)
    return model, x, torch.arange(4) % 3


def check_exact(model: nn.Module, sites: Any, run: Callable[[nn.Module], Tensor], merits: Any) -> None:
    """The merit is the gradient in the wider network, whose output is the same and does not hang on the new rows at all."""
    output = run(model)
    assert len(merits) == len(sites)
    for merit in merits:
        wider, edit = widened(model, merit.site)
        assert torch.allclose(run(wider), output, rtol=1e-12, atol=1e-12)
        run(wider).backward()
        assert merit.value == pytest.approx(column_gradients(edit), rel=1e-10) and merit.value > 0
        with torch.no_grad():
            redrawn(edit, 1)
            first = run(wider)
            redrawn(edit, 2)
            assert torch.equal(run(wider), first)


@pytest.mark.parametrize(("name", "training"), [(name, number % 2 == 0) for number, name in enumerate(WRITTEN)])
def test_a_merit_of_heads_is_the_gradient_in_the_network_that_really_has_them(name: str, training: bool) -> None:
    model, x, y = made(name)
    model.train(training)
    sites = find_sites(model, x, what="units")
    _, maker, text = WRITTEN[name]
    assert [site.path for site in sites] == [f"attention.{block}.{maker}" for block in range(2)]
    assert all(str(site).startswith(f"{text} in ") and site.kind == "units" for site in sites)
    merits = measure(model, sites, [(x, y)], F.cross_entropy, norm="frobenius")
    check_exact(model, sites, lambda m: F.cross_entropy(m(x), y), merits)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_heads_cost_is_what_they_add(name: str) -> None:
    model, x, _ = made(name)
    sites = find_sites(model, x, what="units", units=2)
    assert len(sites) == 2
    for site in sites:
        wider, _ = widened(model, site)
        assert site.parameters == sum(p.numel() for p in wider.parameters()) - sum(
            p.numel() for p in model.parameters()
        )
        assert site.flops == sensli.count_flops(wider, x) - sensli.count_flops(model, x)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    heads=st.integers(min_value=1, max_value=4),
    dim=st.integers(min_value=2, max_value=5),
    fused=st.sampled_from(["", "", "3hd", "h3d", "hd3", "q,kv"]),
    shared=st.sampled_from([1, 1, 2, 3]),
    more=st.integers(min_value=1, max_value=3),
    seed=st.integers(min_value=0, max_value=99),
)
def test_random_attention_keeps_its_function(
    heads: int, dim: int, fused: str, shared: int, more: int, seed: int
) -> None:
    torch.manual_seed(seed)
    shared = 1 if fused not in ("", "q,kv") else shared
    model = Blocks(lambda: Attention(12, heads * shared, dim, fused, shared), 1).double()
    x, y = torch.randn(3, 4, 12, dtype=torch.float64), torch.arange(3)
    sites = find_sites(model, x, what="units", units=more)
    assert [(site.move.units, site.move.heads) for site in sites] == [(heads, shared)]
    merits = measure(model, sites, [(x, y)], F.cross_entropy, norm="frobenius")
    check_exact(model, sites, lambda m: F.cross_entropy(m(x), y), merits)


# --- the verbs ---


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.slow
def test_heads_grow_train_are_taken_back_and_replayed(name: str) -> None:
    model, x, y = made(name)
    before, numbers = {key: value.clone() for key, value in model.state_dict().items()}, whole_numbers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    kept, output = {key: value.clone() for key, value in model.state_dict().items()}, model(x)
    history = History()
    growth = grow(model, find_sites(model, x, what="units", units=2)[1], optimizer=optimizer)
    history.append(growth)
    assert torch.allclose(model(x), output, rtol=1e-12, atol=1e-12)
    other = replay(made(name)[0], History.from_json(history.to_json()))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x)) and whole_numbers(other) == whole_numbers(model) != numbers
    undo(model, growth, optimizer=optimizer)
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    assert whole_numbers(model) == numbers and before.keys() == kept.keys()
    grow(model, find_sites(model, x, what="units")[0], optimizer=optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not torch.allclose(model(x), output)


def whole_numbers(model: nn.Module) -> dict[str, int]:
    """All whole numbers of all modules and of what they hold."""
    found = {}
    for path, module in model.named_modules():
        for through, holder in (("", module), ("config.", getattr(module, "config", None))):
            values = vars(holder) if hasattr(holder, "__dict__") else {}
            found.update(
                {f"{path}.{through}{n}": v for n, v in values.items() if type(v) is int and n != "sensli_growth"}
            )
    return found


def test_only_what_counts_heads_follows() -> None:
    model, x, _ = made("configured")
    grow(model, find_sites(model, x, what="units")[0])
    assert vars(model.attention[0].config) == {"n_head": 4, "layers": 3, "split": 16}
    assert model.attention[0].shift == 3 and model.attention[1].config.n_head == 3
    model, x, _ = made("as many heads as entries")
    grow(model, find_sites(model, x, what="units")[0])
    assert (model.attention[0].heads, model.attention[0].dim_head) == (5, 4)


@pytest.mark.parametrize(("units", "more"), [(1, 1), (2, 2), (0.5, 2), (0.01, 1)])
def test_units_of_attention_are_heads(units: Any, more: int) -> None:
    torch.manual_seed(0)
    model = Blocks(lambda: Attention(heads=4))
    site = find_sites(model, torch.randn(2, 5, 12), what="units", units=units)[0]
    heads = "head" if more == 1 else "heads"
    assert str(site) == (f"+{more} {heads} in attention.0.q (Linear 4 -> {4 + more} heads), read by attention.0.out")
    assert f"attention.0.k.weight: (16, 12) -> ({16 + 4 * more}, 12)" in site.describe(model)


class Divided(Attention):
    """The size of a head hangs on their number."""

    def maps(self, x: Tensor) -> list[Tensor]:
        size = x.shape[-1] // self.heads
        return [m(x).view(*x.shape[:2], self.heads, size).transpose(1, 2) for m in (self.q, self.k, self.v)]


class Special(nn.MultiheadAttention):
    """Somebody's own."""


class Told(Torch):
    """The mean of the weights of all heads takes part in what the model returns."""

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.inner(x, x, x)
        return mixed + weights.square().sum()


class Twice(Torch):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Biased(Attention):
    """Every head has its own slope, which nobody could make for a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x)
        weights = (q @ k.transpose(-2, -1) * self.slopes).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Frozen(Configured):
    """Nobody may change the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Numbers(3, 12)


@dataclass(frozen=True)
class Numbers:
    n_head: int
    split: int


@pytest.mark.parametrize(
    ("make", "path", "reason"),
    [
        (Divided, "attention.0.q", "no more heads: the model fails with more of them"),
        (
            lambda: Torch(Special, batch_first=True),
            "attention.0.inner",
            "is a Special, not torch's own nn.MultiheadAttention",
        ),
        (Told, "attention.1.inner", "no more heads: what the model returns changes with more of them"),
        (Twice, "attention.0.inner", "no more heads: is called 2 times in one forward pass"),
        (Frozen, "attention.0.qkv", "no more heads: the model fails with more of them (FrozenInstanceError"),
        (Biased, "attention.1.k", "no more heads: the model fails with more of them"),
    ],
)
def test_attention_that_cannot_have_more_heads_says_why(make: Any, path: str, reason: str) -> None:
    torch.manual_seed(0)
    model, x = Blocks(make), torch.randn(2, 5, 12)
    numbers = whole_numbers(model)
    sites = find_sites(model, x, what="units")
    assert not [site for site in sites if site.path.startswith("attention")]
    assert reason in dict(sites.skipped)[path] and whole_numbers(model) == numbers


def test_a_number_that_is_gone_is_told_before_anything_changes() -> None:
    model, x, _ = made("configured")
    site = find_sites(model, x, what="units")[0]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.attention[0].config.n_head = "three"
    with pytest.raises(UnknownSite, match=r"attention.0.config.n_head is 'three', which does not count the units"):
        grow(model, site)
    model.attention[0].config = None
    with pytest.raises(UnknownSite, match="is 'missing', which does not count the units"):
        grow(model, site)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    data = site.to_dict()
    data["move"]["sizes"][-1]["through"] = ["__dict__"]
    with pytest.raises(ValueError, match="are not names of parameters and sizes"):
        type(site).from_dict(data).check()


def test_a_growth_that_fails_halfway_leaves_the_model_as_it_was() -> None:
    model, x, _ = made("configured")
    site = find_sites(model, x, what="units")[0]
    model.attention[0].config = Numbers(3, 12)
    before, numbers, output = (
        {key: value.clone() for key, value in model.state_dict().items()},
        whole_numbers(model),
        model(x),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AttributeError, match="cannot assign"):
        grow(model, site, optimizer=optimizer)
    assert whole_numbers(model) == numbers and torch.equal(model(x), output)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_average_follows_new_heads() -> None:
    model, x, _ = made("configured")
    average = AveragedModel(model)
    growth = grow(model, find_sites(model, x, what="units")[0])
    follow(average, growth, model)
    assert average.module.attention[0].config.n_head == 4 == model.attention[0].config.n_head
    average.update_parameters(model)
    assert torch.allclose(average(x), model(x), rtol=1e-12, atol=1e-12)


def test_a_share_of_sites_goes_to_json_and_back() -> None:
    model, x, _ = made("configured")
    site = find_sites(model, x, what="units")[0]
    back = type(site).from_dict(json.loads(json.dumps(site.to_dict())))
    assert back.by_path() == site.by_path() and str(back) == str(site)


# --- Hugging Face ---


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tokens = {"input_ids": torch.randint(0, 29, (3, 7)), "labels": torch.randint(0, 29, (3, 7))}
    if name == "bert":
        config = transformers.BertConfig(vocab_size=29, **small, **quiet)
        return transformers.BertForMaskedLM(config).double(), tokens
    if name == "gpt2":
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=29, n_embd=12, n_layer=2, n_head=3, n_positions=32, **drops)
        return transformers.GPT2LMHeadModel(config).double(), tokens
    if name == "llama":
        small |= {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=29, **small)).double(), tokens
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **small, **quiet)
    images = {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64), "labels": torch.arange(3)}
    return transformers.ViTForImageClassification(config).double(), images


HUGGING_FACE = {
    "bert": (
        "bert.encoder.layer.0.attention.self.query",
        "bert.encoder.layer.0.intermediate.dense",
        "intermediate_size",
    ),
    "gpt2": ("transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc", "n_inner"),
    "llama": ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "intermediate_size"),
    "vit": ("vit.layers.0.attention.q_proj", "vit.layers.0.mlp.fc1", "intermediate_size"),
}


@pytest.mark.library
@pytest.mark.parametrize(("name", "training"), list(zip(HUGGING_FACE, (True, False, True, False), strict=True)))
def test_heads_and_hidden_units_of_hugging_face_models_are_exact(name: str, training: bool) -> None:
    model, batch = hugging_face(name)
    model.train(training)
    sites = find_sites(model, batch, what="units")
    assert {site.path for site in sites} >= set(HUGGING_FACE[name][:2])
    merits = measure(model, sites, [(batch, None)], lambda output, _: output.loss, norm="frobenius")
    check_exact(model, sites, lambda m: m(**batch).loss, merits)


@pytest.mark.library
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_what_a_configuration_states_once_is_widened_everywhere_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, batch = hugging_face(name)
    model.eval()(**batch)
    model.save_pretrained(tmp_path / "before")  # which completes the configuration
    config = model.config.to_dict()
    heads, units, number = HUGGING_FACE[name]
    sites = {site.path: site for site in find_sites(model, batch, what="units", units=2)}
    assert " and in 1 block like it (" in str(sites[units])
    chosen = [sites[units], *([sites[heads]] if name == "llama" else [])]  # whose configuration has the size of a head
    growths = [grow(model, site) for site in chosen]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.allclose(loaded(**batch).logits, model(**batch).logits, rtol=1e-12, atol=1e-12)
    assert getattr(loaded.config, number) == (50 if name == "gpt2" else 12)
    assert name != "llama" or (loaded.config.num_attention_heads, loaded.config.num_key_value_heads) == (8, 4)
    for growth in reversed(growths):
        undo(model, growth)
    assert model.config.to_dict() == config


class Own(nn.Module):
    """Built from a configuration, but no library saves it by that."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.up = nn.ModuleList([nn.Linear(6, config.hidden) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(config.hidden, 6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return x


def test_blocks_of_a_model_that_no_library_saves_may_differ() -> None:
    model = Own(SimpleNamespace(hidden=8))
    sites = find_sites(model, torch.randn(2, 6), what="units")
    assert [site.path for site in sites] == ["up.0", "up.1"]
    grow(model, sites[0])
    assert model.config.hidden == 8


OTHERS = {**TRANSFORMERS, **GENERATORS}


@pytest.mark.library
@pytest.mark.filterwarnings("ignore")  # of the library, about itself
@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "t5", "jamba", "two_berts"),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("qwen3", "gpt_neox", "bart", "modernbert_decoder")
        ),
    ],
)
def test_whatever_is_offered_in_other_architectures_is_exact_and_what_is_configured_is_loaded(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = OTHERS[name]()
    model.double().eval()

    def loss(output: Any, _: Any = None) -> Tensor:
        return sum(each.double().sin().mean() for each in tensors(output) if each.dim() > 1)  # type: ignore[return-value]

    sites = find_sites(model, batch, what="units")
    configured = [site for site in sites if site.move.blocks]
    assert len(sites) > 0
    check_exact(
        model, sites, lambda m: loss(run(m, batch)), measure(model, sites, [(batch, None)], loss, norm="frobenius")
    )
    for site in configured:
        grow(model, site)
    if configured:
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
        assert torch.allclose(loss(run(loaded, batch)), loss(run(model, batch)), rtol=1e-12)


@pytest.mark.library
def test_a_site_of_all_blocks_is_stale_once_there_is_another_block() -> None:
    model, batch = hugging_face("llama")
    sites = find_sites(model, batch, what="both")
    block = next(site for site in sites if site.kind == "block")
    units = next(site for site in sites if "like it" in str(site))
    growth = grow(model, block)
    before = whole_numbers(model)
    with pytest.raises(UnknownSite, match="all blocks of this LlamaForCausalLM, but their number has changed"):
        grow(model, units)
    assert whole_numbers(model) == before
    undo(model, growth)
    grow(model, units)
    assert model.config.intermediate_size == 12


@pytest.mark.library
def test_a_configuration_that_its_library_would_refuse_states_nothing() -> None:
    model, batch = hugging_face("llama")  # 6 heads are no divisor of its hidden size, which LlamaConfig wants
    sites = [site for site in find_sites(model, batch, what="units") if site.move.heads]
    assert [site.path for site in sites] == [f"model.layers.{block}.self_attn.q_proj" for block in range(2)]


@pytest.mark.library
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_heads_of_one_block_are_replayed_where_no_configuration_states_them(name: str) -> None:
    model, batch = hugging_face(name)
    model.eval()
    config = model.config.to_dict()
    history = History()
    site = next(site for site in find_sites(model, batch, what="units") if site.path == HUGGING_FACE[name][0])
    history.append(grow(model, site))
    assert model.config.to_dict() == config  # it is that of all blocks
    other = replay(hugging_face(name)[0], History.from_json(history.to_json())).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(**batch).logits, model(**batch).logits)


@pytest.mark.library
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generating_with_the_cache_is_generating_without_it(name: str) -> None:
    model, batch = hugging_face(name)
    model.eval()
    prompt = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before = model.generate(**prompt, **options)
    for _ in range(2):
        sites = find_sites(model, batch, what="units")
        assert any(site.move.heads for site in sites)
        for site in sites:
            grow(model, site)
    cached = model.generate(**prompt, **options, use_cache=True)
    assert torch.equal(cached, before) and torch.equal(cached, model.generate(**prompt, **options, use_cache=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**batch).loss.backward()
    optimizer.step()
    trained = model.generate(**prompt, **options, use_cache=True)
    assert torch.equal(trained, model.generate(**prompt, **options, use_cache=False))
