"""`sensli sites` with data: the ranking and the choices beside it, on a saved model and on a user's own, read only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sensli import find_sites, measure
from sensli.cli.main import main
from sensli.merits.merits import BETWEEN_BLOCKS, CHOICES, SELECTIONS, Merit, Merits, compare_choices, spread

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5), nn.Tanh(), nn.Linear(5, 2))

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(self.hidden(self.embed(tokens)).relu())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mymodel.py").write_text(MODEL)
    (tmp_path / "notes.txt").write_text("a text that says little, again and again. " * 40)
    torch.save((torch.randn(6, 3, 8, 8), torch.randint(0, 2, (6,))), tmp_path / "batch.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def merits(values: list[float]) -> Merits:
    sites: list[Any] = [SimpleNamespace(place=f"after h.{i}", stack=None) for i in range(len(values))]
    return Merits([Merit(site, value) for site, value in zip(sites, values, strict=True)], norm="frobenius", batches=1)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, {"by merit": [3], "even spacing": [2], "top only": [4], "bottom only": [0]}),
        (2, {"by merit": [3, 1], "even spacing": [1, 3], "top only": [3, 4], "bottom only": [0, 1]}),
        (5, {"by merit": [3, 1, 2, 0, 4], "even spacing": [1, 2, 3], "top only": [0, 1, 2, 3, 4]}),
    ],
)
def test_choices(count: int, expected: dict[str, list[int]]) -> None:
    measured = merits([2.0, 4.0, 3.0, 5.0, 1.0])
    for name, places in expected.items():
        assert [list(measured).index(merit) for merit in CHOICES[name](measured, count)] == places
    table = compare_choices(measured, count)
    assert "even spacing" in table and "sum of merits" in table and "Between the blocks" not in table


# --- the default: by merit where merits compare, evenly in a stack of blocks ---

PLAIN, STACK, OTHER = None, "blocks", "others"


@pytest.mark.parametrize(
    ("values", "stacks", "count", "expected"),
    [
        ([2.0, 4.0, 3.0], [PLAIN] * 3, 1, [1, 2, 0]),  # the largest
        ([4.0, 4.0, 5.0], [PLAIN] * 3, 2, [2, 0, 1]),  # of equal ones the first
        ([400.0, 3.0, 2.0, 1.0], [STACK] * 4, 1, [2, 0, 1, 3]),  # the middle, and then by merit
        ([400.0, 3.0, 2.0], [STACK] * 3, 1, [1, 0, 2]),
        ([400.0, 3.0], [STACK] * 2, 1, [1, 0]),  # of two middles the one nearer to the output
        ([400.0, 3.0, 2.0, 1.0, 1.0], [STACK] * 5, 2, [1, 3, 0, 2, 4]),  # evenly
        ([400.0, 3.0, 2.0], [STACK] * 3, 3, [0, 1, 2]),
        ([400.0], [STACK], 1, [0]),
        # A stack competes with the merit at its middle, whatever the place before its first block has.
        ([400.0, 3.0, 2.0, 5.0], [STACK, STACK, STACK, PLAIN], 1, [3, 0, 1, 2]),
        ([400.0, 3.0, 2.0, 2.5], [STACK, STACK, STACK, PLAIN], 1, [1, 0, 3, 2]),
        ([400.0, 3.0, 2.0, 2.5], [STACK, STACK, STACK, PLAIN], 3, [0, 2, 3, 1]),  # two for the stack
        ([400.0, 3.0, 2.0, 9.0, 8.0, 7.0], [*[STACK] * 3, *[OTHER] * 3], 1, [4, 3, 5, 0, 1, 2]),
        ([400.0, 3.0, 2.0, 9.0, 1.0, 7.0], [*[STACK] * 3, *[OTHER] * 3], 1, [1, 0, 2, 3, 5, 4]),
    ],
)  # fmt: skip
def test_the_default(values: list[float], stacks: list[str | None], count: int, expected: list[int]) -> None:
    assert SELECTIONS["auto"](values, stacks, count, torch.Generator()) == expected


def test_places_are_spread_over_all_there_are() -> None:
    for places in range(1, 9):
        for count in range(1, places + 1):
            taken = spread(count, places)
            assert len(set(taken)) == count and taken == sorted(taken) and taken[0] >= 0 and taken[-1] < places
            mirrored = [places - 1 - place for place in reversed(taken)]
            assert all(abs(one - other) <= 1 for one, other in zip(taken, mirrored, strict=True))
    assert spread(3, 3) == [0, 1, 2] and spread(2, 8) == [2, 5]


def test_a_user_s_model_on_a_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", "mymodel.py:make", "--batch", "batch.pt"]) == 0
    out = capsys.readouterr().out
    assert "merit" in out and "Conv2d(8, 8, 3) + ReLU after 1" in out and "top only" in out
    assert main(["sites", "mymodel.py:make", "--batch", "batch.pt", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    values = [merit["value"] for merit in told["merits"]]
    assert values == sorted(values, reverse=True) and len(values) == len(told["sites"])
    assert told["choices"]["by merit"] == [told["merits"][0]["site"]] and f"{values[0]:.3e}" in out


def test_layers_and_units_in_one_table_ranked_by_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sites", "mymodel.py:make", "--batch", "batch.pt", "--what", "both", "--units", "2"]
    assert main([*command, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    kinds = {entry["site"]: entry["kind"] for entry in plain["sites"]}
    assert {kinds[merit["site"]] for merit in plain["merits"]} >= {"units", "conv"} and plain["per"] is None
    for per in ("parameters", "flops"):
        assert main([*command, "--per", per, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        worth = [merit["value"] / merit[per] for merit in told["merits"]]
        assert worth == sorted(worth, reverse=True) and told["per"] == per
        assert told["choices"]["by merit"] == [told["merits"][0]["site"]]
        assert sorted(merit["value"] for merit in told["merits"]) == sorted(merit["value"] for merit in plain["merits"])
    assert main([*command, "--per", "parameters", "--count", "2"]) == 0
    out = capsys.readouterr().out
    assert "per parameter" in out.splitlines()[0] and "ordered by the merit per parameter that the growth adds" in out
    assert "in 0" in out.split("choice of 2")[1]  # a width has no side


def test_merits_per_cost() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    sites = find_sites(model, torch.randn(1, 3), what="both", units=1)
    measured = measure(model, sites, [(torch.randn(16, 3), torch.randint(0, 2, (16,)))], nn.functional.cross_entropy)
    by_cost = measured.per("parameters")
    assert list(by_cost) == list(measured) and measured.compared is None
    expected = sorted(measured, key=lambda merit: -merit.value / merit.site.parameters)
    assert by_cost.ranked == expected and by_cost.best is expected[0] and by_cost.worst is expected[-1]
    assert by_cost.best is not measured.best  # one unit is cheaper than a layer of 72 parameters
    assert f"{expected[0].value / expected[0].site.parameters:.3e}" in str(by_cost).splitlines()[2]
    assert str(by_cost.per(None)) == str(measured) and "per parameter" in by_cost._repr_html_()
    with pytest.raises(ValueError, match=r"^cost must be one of 'parameters', 'flops', or None, got 'time'\.$"):
        measured.per("time")


def test_a_user_s_model_on_a_text_byte_by_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", "mymodel.py:Reader", "--text", "notes.txt", "--length", "16"]) == 0
    assert "Linear(8, 8) + ReLU before head" in capsys.readouterr().out


@pytest.mark.library
def test_a_saved_model_on_a_text_and_on_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "saved")
    before = {path.name: path.read_bytes() for path in (folder / "saved").iterdir()}
    assert main(["sites", "saved", "--text", "notes.txt", "--count", "2", "--length", "32"]) == 0
    out = capsys.readouterr().out
    assert "Twin(LlamaDecoderLayer) after model.layers.1" in out and "choice of 2" in out
    line = next(line for line in out.splitlines() if line.startswith("as Grower"))
    assert "after model.layers.0, after model.layers.1" in line and out.rstrip().endswith(f"{BETWEEN_BLOCKS}")
    ids = torch.randint(0, 256, (2, 9))
    save_file({"input_ids": ids, "labels": ids.clone()}, folder / "batch.safetensors")
    assert main(["sites", "saved", "--batch", "batch.safetensors"]) == 0
    assert "even spacing" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (folder / "saved").iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sites", ".", "--input", "1x2"], "without config.json"),
        (["sites", "mymodel.py:make", "--batch", "mymodel.py"], "cannot be read as a batch"),
        (["sites", "mymodel.py:make", "--batch", "none.pt"], "none.pt"),
        (["sites", "mymodel.py:Reader", "--text", "mymodel.py", "--length", "100000"], "Give a longer text"),
        (["sites", "mymodel.py:make", "--batch", "batch.pt", "--count", "0"], "must be at least 1"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("sensli: ") and text in said
