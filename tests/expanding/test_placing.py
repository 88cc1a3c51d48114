"""Places of new blocks that are found on data: the values against slow oracles in float64, the choice, what is written and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from sensli.cli.inputs import loss_for
from sensli.cli.main import main
from sensli.errors import ExpansionError
from sensli.expanding.expanding import expand, undo_expansion
from sensli.expanding.placing import importance_of_blocks, load_to_measure, merits_of_places, pick_places
from sensli.expanding.record import expansion
from sensli.expanding.sibling import read_description
from sensli.expanding.weights import read_weights

pytestmark = pytest.mark.library
STACK, BLOCKS = "model.layers", 3


def make_llama(width: int, inner: int, heads: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=BLOCKS, num_attention_heads=heads, num_key_value_heads=heads,
        vocab_size=128, max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama computes its norms in float32 whatever its weights are."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return scaled

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def make_pairs(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets: a loss on logits in float64, which the model's own is not."""
    return [(batch["input_ids"][:, :-1], batch["input_ids"][:, 1:]) for batch in make_batches(*sizes)]


def loss_of(model: Any, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(pair[0]).logits.flatten(0, 1), pair[1].flatten())


def make_batches(*sizes: int) -> list[dict[str, torch.Tensor]]:
    ids = [torch.randint(0, 128, (size, 6), generator=torch.Generator().manual_seed(size)) for size in sizes]
    return [{"input_ids": each, "labels": each} for each in ids]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_llama(32, 48, 2).save_pretrained(path / "base")
    torch.save(make_batches(4, 2), path / "batches.pt")
    (path / "notes.txt").write_text("A text of the user's, to measure on. " * 30)
    return path


@pytest.mark.usefixtures("precise")
def test_merits_are_the_gradients_of_blocks_that_are_really_there(folder: Path, tmp_path: Path) -> None:
    """A new block at every place, written and loaded; what must be zero in it gets the gradient that the merit is the squared norm of."""
    from transformers import LlamaForCausalLM

    torch.save(make_pairs(4, 2), tmp_path / "pairs.pt")
    done = expand(folder / "base", tmp_path / "out", BLOCKS + 1, place="merit", batch=tmp_path / "pairs.pt")
    data = done.data
    assert data["places"] == [-1, 0, 1, 2] and data["new_blocks"] == [0, 2, 4, 6]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for pair in make_pairs(4, 2):
        (loss_of(model, pair) * len(pair[0]) / 6).backward()
    weights = dict(model.named_parameters())
    for row, block in zip(data["placing"]["places"], data["new_blocks"], strict=True):
        zero = [name for name in data["zero_tensors"] if name.startswith(f"{STACK}.{block}.")]
        assert len(zero) == 2
        slow = sum(weights[name].grad.square().sum().item() for name in zero)
        assert row["merit"] == pytest.approx(slow, rel=1e-9)


@pytest.mark.usefixtures("precise")
def test_importance_is_the_first_order_loss_of_every_weight() -> None:
    """By differences of the loss around every single weight, in the mean over batches of different sizes."""
    model, pairs = make_llama(4, 6, 1), make_pairs(3, 1)
    slow, step = dict.fromkeys(range(BLOCKS), 0.0), 1e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(STACK):
                continue
            flat = parameter.view(-1)
            for index, value in enumerate(flat.tolist()):
                for pair in pairs:
                    losses = []
                    for moved in (value + step, value - step):
                        flat[index] = moved
                        losses.append(loss_of(model, pair).item())
                    flat[index] = value
                    change = abs(value * (losses[0] - losses[1]) / (2 * step))
                    slow[int(name.split(".")[2])] += change * len(pair[0]) / 4
    assert importance_of_blocks(model, STACK, pairs, loss_for(pairs)) == pytest.approx(slow, rel=1e-6)


@pytest.mark.parametrize("measured", [merits_of_places, importance_of_blocks])
def test_a_measurement_leaves_the_model_as_it_was(measured: Any) -> None:
    model = make_llama(8, 12, 2)
    model.model.layers[1].requires_grad_(False)
    kept = torch.ones_like(model.model.norm.weight)
    model.model.norm.weight.grad = kept
    before = {name: (value.detach().clone(), value.requires_grad) for name, value in model.named_parameters()}
    measured(model, STACK, make_batches(2))
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name][0]) and value.requires_grad == before[name][1]
        assert value.grad is (kept if name == "model.norm.weight" else None)


def test_the_best_places_are_taken_each_once() -> None:
    values = {-1: 3.0, 0: 1.0, 1: 5.0, 2: 1.0}
    assert pick_places(values, 2, largest=True) == (-1, 1)
    assert pick_places(values, 1, largest=False) == (0,)
    assert pick_places(values, 3, largest=False) == (-1, 0, 2)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ExpansionError, match="place 0 is not a finite number"):
            pick_places({0: value, 1: 1.0}, 1, largest=True)


def test_the_least_important_block_is_copied_after_itself(folder: Path, tmp_path: Path) -> None:
    done = expand(folder / "base", tmp_path / "out", 1, place="least", text=folder / "notes.txt")
    data = done.data
    rows = {row["after"]: row["importance"] for row in data["placing"]["places"]}
    least = min(rows, key=lambda place: rows[place])
    assert list(rows) == [0, 1, 2] and data["places"] == [least] and data["new_blocks"] == [least + 1]
    assert [row["chosen"] for row in data["placing"]["places"]] == [place == least for place in rows]
    tensors = read_weights(tmp_path / "out")
    for part in ("self_attn.q_proj", "mlp.up_proj"):
        digests = [tensors[f"{STACK}.{block}.{part}.weight"].digest() for block in (least, least + 1)]
        assert digests[0] == digests[1]


def test_a_block_before_the_first_is_undone(folder: Path, tmp_path: Path) -> None:
    expand(folder / "base", tmp_path / "out", BLOCKS + 1, place="merit", text=folder / "notes.txt")
    undo_expansion(tmp_path / "out", tmp_path / "back")
    before, after = read_weights(folder / "base"), read_weights(tmp_path / "back")
    assert {name: each.digest() for name, each in before.items()} == {
        name: each.digest() for name, each in after.items()
    }
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == BLOCKS


def test_the_command_prints_and_writes_what_was_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ["expand", str(folder / "base"), "--out", str(out), "--blocks", "1", "--place", "merit"]
    assert main([*given, "--text", str(folder / "notes.txt")]) == 0
    printed = capsys.readouterr().out
    placing = expansion(out).data["placing"]
    assert (placing["by"], placing["file"], placing["batches"], placing["samples"]) == ("merit", "notes.txt", 5, 34)
    best = max(placing["places"], key=lambda row: row["merit"])
    lines = [line.split("  ") for line in printed.splitlines()]
    (chosen,) = [line for line in lines if line[-1] == "new block"]
    assert chosen[0] == ("before block 0" if best["after"] < 0 else f"after block {best['after']}")
    assert f"{best['merit']:.3e}" in chosen
    assert "measured on notes.txt: 5 batches, 34 samples" in printed
    assert ("these places were the worst" in printed) == (best["after"] == -1)
    card = (out / "README.md").read_text()
    assert "measured on notes.txt: 5 batches, 34 samples" in card and f"{best['merit']:.3e}" in card


@pytest.mark.parametrize("room", [True, False])
def test_half_precision_is_measured_in_float32_where_there_is_room(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_llama(8, 12, 2).half().save_pretrained(tmp_path / "base")
    if not room:
        monkeypatch.setattr("sensli.expanding.placing.free_memory", lambda: 1)
    model = load_to_measure(read_description(tmp_path / "base"))
    assert model.dtype == (torch.float32 if room else torch.float16)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--place", "merit"], "place='merit' measures on data: give a text (--text FILE) or saved batches (--batch FILE)."),
        (["--place", "least"], "place='least' measures on data"),
        (["--place", "even", "--text", "notes.txt"], "which measure, got 'even'."),
        (["--place", "1", "--batch", "batches.pt"], "which measure, got places that are given."),
        (["--place", "merit", "--text", "notes.txt", "--batch", "batches.pt"], "give either --text or --batch, not both."),
        (["--place", "least", "--text", "notes.txt", "--stream"], "--stream (stream=True) never loads."),
        (["--place", "merit", "--text", "nowhere.txt"], "nowhere.txt"),
        (["--place", "least", "--text", "notes.txt", "--blocks", "4"], "blocks must be at most 3, the number of places that can take one"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_said_and_nothing_is_written(
    given: list[str],
    said: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    count = [] if "1" in given or "--blocks" in given else ["--blocks", "1"]
    assert main(["expand", "base", "--out", str(tmp_path / "out"), *count, *given]) == 2
    assert said in capsys.readouterr().err and list(tmp_path.iterdir()) == []
