"""Families of models, expanded on disk: the same outputs to the bit, also where sensli is not installed, and with a cache."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import programs
from families import FAMILIES, STACKS
from sensli import expand
from sensli.errors import ExpansionError
from sensli.expanding.checking import outputs_of
from sensli.expanding.record import ExpansionRecord

pytestmark = [pytest.mark.library, pytest.mark.process]
TABLE = Path(__file__).parents[2] / "docs" / "expansion" / "families.txt"
QUICK = (
    "Llama, tied",
    "GPT-2",
    "Qwen3-MoE",
    "T5",
)  # tied; other names; experts; two stacks, and a block of its own kind
NOTES = """\
*exact*: outputs are equal before and after, bit for bit, in bfloat16. Units are *refused* where the configuration states no width of the
feed-forward parts that could be another one: experts, or always four times the width of the model. With a decoder of T5 that is deeper than
the encoder, generate with `use_cache=False`: the cache of transformers has as many entries as the encoder has blocks.
"""
# Loads all pairs of folders without sensli, and compares what the models give and what they generate with a cache.
WITHOUT_SENSLI = """
import json, sys
import torch, transformers
transformers.utils.logging.disable_progress_bar()
for model_class, before, after in json.load(open(sys.argv[1])):
    torch.manual_seed(0)
    one, other = (getattr(transformers, model_class).from_pretrained(folder, dtype="auto").eval() for folder in (before, after))
    def example(model):
        generator = torch.Generator().manual_seed(3)
        config = model.config
        if model.main_input_name == "pixel_values":
            return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size, generator=generator).to(model.dtype)}
        ids = torch.randint(3, config.vocab_size, (2, 9), generator=generator)
        if model.main_input_name == "input_features":
            sound = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
            return {"input_features": sound.to(model.dtype), "decoder_input_ids": ids}
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    with torch.no_grad():
        assert torch.equal(one(**example(one)).logits, other(**example(other)).logits), after
        if one.can_generate() and one.main_input_name == "input_ids":
            ids = example(one)["input_ids"]
            # For a T5 transformers makes a cache for as many blocks as the encoder has: a deeper decoder cannot use it.
            cache = getattr(other.config, "num_decoder_layers", 0) <= getattr(other.config, "num_layers", 0)
            asked = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=cache)
            told = [model.generate(ids, attention_mask=torch.ones_like(ids), **asked) for model in (one, other)]
            assert torch.equal(*told), after
assert not any(name.split(".")[0] == "sensli" for name in sys.modules)
print("equal")
"""


def expanded(folder: Path, family: str, dtype: torch.dtype, stack: str | None = None) -> tuple[Any, ExpansionRecord]:
    """A small model of a family in several files, and what became of it."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype)
    model.save_pretrained(folder / "base", max_shard_size="150KB")
    assert len(list((folder / "base").glob("*.safetensors"))) > 1
    return model, expand(folder / "base", folder / "deeper", 2, stack=stack, shard_size="150KB")


def check(folder: Path, families: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    pairs = []
    for family in families:
        for dtype in dtypes:
            for stack in STACKS.get(family, (None,)):
                own = folder / f"{family}-{str(dtype)[6:]}-{stack}"
                own.mkdir()
                model, record = expanded(own, family, dtype, stack)
                assert "model before and after: equal to the bit" in record.data["check"]
                assert record.data["stack"] == (stack or record.data["stack"])
                one, other = (outputs_of(type(model), own / name, None) for name in ("base", "deeper"))
                assert torch.equal(one, other) and one.dtype == dtype
                pairs.append([type(model).__name__, str(own / "base"), str(own / "deeper")])
    (folder / "pairs.json").write_text(json.dumps(pairs))
    done = programs.run([sys.executable, "-c", WITHOUT_SENSLI, str(folder / "pairs.json")], folder, PYTHONPATH="")
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-2000:]


def test_families_are_expanded_exactly(tmp_path: Path) -> None:
    check(tmp_path, QUICK, (torch.bfloat16,))


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(3))
def test_all_families_are_expanded_exactly(tmp_path: Path, part: int) -> None:
    check(tmp_path, tuple(FAMILIES)[part::3], (torch.bfloat16, torch.float32))


@pytest.mark.thorough
def test_the_table_of_families_is_what_was_found(tmp_path: Path) -> None:
    """``SENSLI_TABLES=write`` writes it."""
    rows = ["| family | class | blocks | new blocks | units |", "|---|---|---|---|---|"]
    for number, family in enumerate(FAMILIES):
        for stack in STACKS.get(family, (None,)):
            own = tmp_path / f"{number}-{stack}"
            own.mkdir()
            model, record = expanded(own, family, torch.bfloat16, stack)
            exact = "exact" if "equal to the bit" in record.data["check"] else "not exact"
            try:
                wider = expand(own / "base", own / "wider", units=0.25)
                units = "exact" if "equal to the bit" in wider.data["check"] else "within rounding"
            except ExpansionError as error:
                assert "its configuration states no width" in str(error)
                units = "refused"
            rows.append(f"| {family} | `{type(model).__name__}` | `{record.data['stack']}` | {exact} | {units} |")
    text = "\n".join(rows) + f"\n\n{NOTES}"
    if os.environ.get("SENSLI_TABLES") == "write":
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(text)
    assert TABLE.read_text() == text
