"""After an insertion a language model is what its library expects: configuration, cache, saving, tied embeddings."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import programs
from architectures import GENERATORS, TRANSFORMERS
from building import assert_same, build, outputs
from sensli import find_sites, insert, measure, replay, undo
from sensli.surgery.history import History

# An encoder-decoder says at every call that its way to compute the loss was new once.
pytestmark = [pytest.mark.library, pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")]
NOT_GENERATING = {"vit", "convnext", "resnet", "bert", "roberta"}
WITHOUT_TWINS = {"jamba", "qwen2_moe"}  # what a block is depends on its number, so no list of them takes another
GENERATING = [name for name in (*TRANSFORMERS, *GENERATORS) if name not in NOT_GENERATING]
FORMS = {"gpt2", "t5", "mamba"}  # whose example is given in all forms
# One of each kind: plain, experts, states, a configuration that lists kinds of blocks, two stacks. The others are like one of these.
KINDS = {
    "gpt2", "llama", "mamba", "bert_decoder", "gemma3", "gpt_neo", "lfm2", "qwen2_moe", "deepseek_v3", "bart", "two_berts", "t5",
}  # fmt: skip


def rows(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in KINDS else pytest.mark.thorough) for name in names]


@pytest.fixture(autouse=True)
def transformers_is_there() -> None:
    """Not where the file is read: `make quick` would import it for nothing."""
    pytest.importorskip("transformers")


def trained_a_little(model: nn.Module, batch: Any, growth: Any) -> None:
    """Steps that make the new block do something."""
    model.train()
    new = [p for name, p in model.named_parameters() if name in growth.parameters]
    optimizer = torch.optim.SGD(new, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval()


def awake(model: nn.Module, growths: list[Any]) -> None:
    """Small random values in the new blocks' zeroed maps, so that a wrong entry in the cache shows."""
    generator = torch.Generator().manual_seed(0)
    grown = {key for growth in growths for key in growth.parameters}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in grown and not parameter.any():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))


def tokens(model: Any, batch: Any, cache: bool) -> torch.Tensor:
    ids = batch["input_ids"]
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            min_new_tokens=5,
            do_sample=False,
            use_cache=cache,
        )


def examples(model: Any, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The batch as it is trained on, the same without labels, and the same when no cache is wanted."""
    yield batch
    plain = {key: value for key, value in batch.items() if key != "labels"}
    if model.config.is_encoder_decoder:
        plain["decoder_input_ids"] = batch["labels"]
    yield plain
    yield {**plain, "use_cache": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", rows(GENERATING))
def test_generate_with_and_without_cache(name: str, tmp_path: Path) -> None:
    model, batch = build(name)
    model.eval()
    before = tokens(model, batch, True)
    assert torch.equal(tokens(model, batch, False), before)
    number = 3 if name in FORMS else 2
    with_labels, *others = (find_sites(model, each) for each in itertools.islice(examples(model, batch), number))
    assert with_labels
    for sites in others:  # what is offered does not depend on how the example happens to be given
        assert list(map(str, sites)) == list(map(str, with_labels))
        assert [site.point.place for site in sites] == [site.point.place for site in with_labels]

    state = copy.deepcopy(model.state_dict())
    twins = [site for site in with_labels if site.move.form == "twin"]
    assert bool(twins) == (name not in WITHOUT_TWINS) and all(site.point.place is not None for site in twins)
    first, last = with_labels[0], (twins or with_labels)[-1]
    growths = []
    chosen = [last, first, first]  # at two places, at one of them twice
    for site in chosen:
        growths.append(insert(model, site))
        assert torch.equal(tokens(model, batch, True), before)
        if len(growths) in (1, 3):
            assert torch.equal(tokens(model, batch, False), before)
            asleep = copy.deepcopy(model.state_dict())
            awake(model, growths)
            assert torch.equal(tokens(model, batch, True), tokens(model, batch, False))
            if len(growths) == 1:
                model.load_state_dict(asleep)
    if all(site.point.place is not None and not site.move.replaced for site in chosen):
        model.save_pretrained(tmp_path)  # it is a model of its library, which builds it again
        again = type(model).from_pretrained(tmp_path)
        assert not any(type(module).__module__.startswith("sensli") for module in again.modules())
        assert_same(outputs(model, batch), outputs(again, batch), 1e-5)
    for growth in reversed(growths):
        undo(model, growth)
    model.load_state_dict(state)
    assert torch.equal(tokens(model, batch, True), before)


@pytest.mark.parametrize(
    "name", ["llama", "two_berts", "lfm2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("bart", "t5"))]
)
def test_a_model_that_has_grown_is_searched_again(name: str) -> None:
    """Sites that are looked for in the grown model, as a Grower does."""
    model, batch = build(name)
    model.eval()
    before, growths = tokens(model, batch, True), []
    for number in range(3):
        sites = find_sites(model, batch, form="twin")
        growths.append(insert(model, sites[(number + 1) % len(sites)]))
        assert torch.equal(tokens(model, batch, True), before)
    awake(model, growths)
    assert torch.equal(tokens(model, batch, True), tokens(model, batch, False))


class Adapter(nn.Module):
    """A low-rank addition to a layer, as adapters put it in: names that no configuration knows."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", ["gemma3", "bart"])
def test_generate_with_adapters_in_every_block(name: str) -> None:
    model, batch = build(name)
    for path, layer in list(model.named_modules()):
        parent, _, key = path.rpartition(".")
        if key == "q_proj":
            setattr(model.get_submodule(parent), key, Adapter(layer))
    model.eval()
    before = tokens(model, batch, True)
    sites = find_sites(model, batch, form="twin")
    growths = [insert(model, site) for site in (sites[0], sites[-1], sites[1])]
    assert torch.equal(tokens(model, batch, True), before)
    awake(model, growths)
    assert torch.equal(tokens(model, batch, True), tokens(model, batch, False))


def test_a_grown_bart_that_has_learned_to_copy_copies_with_its_cache() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=12, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        decoder_start_token_id=0, forced_eos_token_id=None, dropout=0.0,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 12, (size, 5))
        return {"input_ids": ids, "labels": ids}

    def train(steps: int) -> None:
        model.train()
        for _ in range(steps):
            optimizer.zero_grad()
            model(**batch(32)).loss.backward()
            optimizer.step()
        model.eval()

    train(60)
    for number in range(2):
        sites = [site for site in find_sites(model, batch(4)) if site.path.startswith("model.decoder.layers")]
        assert {site.move.form for site in sites} == {"twin"}
        insert(model, sites[number], optimizer=optimizer)
        train(60)
    for cache in (True, False):
        data = batch(64)
        assert (tokens(model, data, cache)[:, 1:] == data["input_ids"]).float().mean() > 0.99


FRESH = """
import sys, torch, transformers
assert "sensli" not in sys.modules
for folder, name in zip(sys.argv[1::2], sys.argv[2::2]):
    model = getattr(transformers, name).from_pretrained(folder)
    model.eval()
    data = torch.load(folder + "/batch.pt")
    with torch.no_grad():
        logits = model(**data["batch"]).logits
    assert (logits - data["logits"]).abs().max() <= 1e-6 * data["logits"].abs().max(), name
    print(name, "same")
assert "sensli" not in sys.modules
"""


@pytest.mark.process
@pytest.mark.thorough  # imports all there is once more; above a saved model is loaded in this process
def test_saved_and_loaded_where_sensli_is_unknown(tmp_path: Path) -> None:
    arguments, count = [], 0
    for name in ("gpt2", "gemma2", "mamba", "vit", "convnext", "t5"):
        model, batch = build(name)
        sites = [site for site in find_sites(model, batch) if site.point.place is not None]
        layers = len(sites)
        history = History()
        for site in (sites[0], sites[-1]):  # two growths, the first of which moves the place of the second
            history.append(insert(model, site))
            trained_a_little(model, batch, history[-1])
        assert len(find_sites(model, batch)) >= layers + 1
        again = replay(build(name)[0], history)
        again.load_state_dict(model.state_dict())
        again.eval()
        assert_same(outputs(model, batch), outputs(again, batch), 1e-6)
        folder = tmp_path / name
        model.save_pretrained(folder)
        torch.save({"batch": batch, "logits": outputs(model, batch)[0]}, folder / "batch.pt")
        arguments += [str(folder), type(model).__name__]
        count += 1
    command = [sys.executable, "-c", FRESH, *arguments]
    alone = {"PATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=alone, timeout=programs.HANGS)
    assert done.stdout.count("same") == count, done.stderr


def test_the_configuration_tells_the_truth_and_undo_takes_it_back() -> None:
    model, batch = build("qwen2")
    before = copy.deepcopy(model.config.to_dict())
    growths = [insert(model, find_sites(model, batch)[1]) for _ in range(2)]
    assert model.config.num_hidden_layers == 5 and len(model.config.layer_types) == 5
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3, 4]
    assert all(
        layer.self_attn.config is model.config for layer in model.model.layers
    )  # one configuration, not a copy each
    for growth in reversed(growths):
        undo(model, growth)
    assert model.config.to_dict() == before

    stages, batch = build("convnext")
    insert(stages, next(site for site in find_sites(stages, batch) if "stages.1" in site.path))
    assert stages.config.depths == [2, 4]

    both, batch = build("t5")
    insert(both, next(site for site in find_sites(both, batch) if "decoder" in site.path and site.point.place))
    assert (both.config.num_layers, both.config.num_decoder_layers, both.decoder.config.num_layers) == (3, 3, 3)


def test_tied_embeddings_stay_tied() -> None:
    for name in ("gpt2", "llama"):
        model, batch = build(name)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        table = model.get_input_embeddings().weight
        assert model.get_output_embeddings().weight is table
        growth = insert(model, find_sites(model, batch)[0])
        assert model.get_input_embeddings().weight is table and model.get_output_embeddings().weight is table
        undo(model, growth)
        assert model.get_output_embeddings().weight is table


def test_batches_are_dicts_and_the_loss_is_the_model_s() -> None:
    model, batch = build("llama")
    sites = find_sites(model, batch)
    model.eval()
    own = measure(model, sites, [batch, batch])
    given = measure(model, sites, [batch], lambda output, batch: output.loss)
    assert [m.value for m in own] == pytest.approx([m.value for m in given], rel=1e-5)


def test_a_block_that_depends_on_its_number_is_not_renumbered() -> None:
    """Attention that is divided by the number of its block: a list that takes a block would change all blocks after it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=8, n_head=2, vocab_size=29, bos_token_id=0, eos_token_id=1, scale_attn_by_inverse_layer_idx=True
    )  # fmt: skip
    model, ids = GPT2LMHeadModel(config), torch.randint(0, 29, (2, 7))
    model.eval()
    sites = find_sites(model, {"input_ids": ids})
    assert sites and all(site.point.place is None for site in sites)
    assert {site.move.form for site in sites} == {"residual"}
    reasons = [reason for _, reason in find_sites(model, {"input_ids": ids}, form="twin").skipped]
    assert reasons and all("attn.layer_idx" in reason for reason in reasons)


@pytest.mark.parametrize("tied", [False, True], ids=["olmo2", "tied llama"])
def test_weights_in_half_precision_beside_precise_frequencies_have_twins_whatever_the_example(tied: bool) -> None:
    """As `from_pretrained` loads them: cast to half precision too, the frequencies of the rebuilt model would differ."""
    from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

    options: dict[str, Any] = {"vocab_size": 29, "num_hidden_layers": 2, "pad_token_id": 0, "num_attention_heads": 2}
    torch.manual_seed(0)
    if tied:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.3, "tie_word_embeddings": True}
        model: Any = LlamaForCausalLM(LlamaConfig(**options, **sizes))
    else:
        model = Olmo2ForCausalLM(Olmo2Config(**options, hidden_size=16, intermediate_size=24, num_key_value_heads=2))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    for seed in (0, 6, 9):
        torch.manual_seed(seed)
        sites = find_sites(model, {"input_ids": torch.randint(0, 29, (2, 16))}, form="twin")
        assert len(sites) == 3 and all(site.point.place is not None for site in sites), sites.explain()
