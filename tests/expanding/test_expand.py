"""`sensli expand`: what it writes, what it refuses, and that a call that does not end well leaves nothing."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import programs
from families import FAMILIES, SMALL
from sensli import SensliError, expand, expansion, undo_expansion
from sensli.cli.main import main
from sensli.expanding import checking, expanding
from sensli.expanding.expanding import choose_places
from sensli.expanding.weights import INDEX, SINGLE, load_tensor, parse_size, read_weights

pytestmark = pytest.mark.library


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama in several files, with all that lies beside the weights of a real one."""
    folder = tmp_path_factory.mktemp("saved") / "base"
    torch.manual_seed(0)
    FAMILIES["Llama, tied"]().to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_own.py").write_text("x = 1\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n\nText.\n")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "optimizer.pt").write_bytes(b"large")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights once more")
    return folder


def hidden(folder: Path) -> list[str]:
    """What an interrupted call could have left."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# ---- What is written.


def test_old_tensors_keep_their_bytes_and_new_ones_are_copies_or_zero(saved: Path, tmp_path: Path) -> None:
    record = expand(saved, tmp_path / "deeper", place=(0, 3, 3), shard_size="100KB")
    before, after = read_weights(saved), read_weights(tmp_path / "deeper")
    assert record.new_blocks == [1, 5, 6] and record.data["sources"] == [0, 3, 3]
    assert "lm_head.weight" not in after  # tied as before
    old = {0: 0, 2: 1, 3: 2, 4: 3}
    for number in range(7):
        for name, tensor in after.items():
            if name.startswith(f"model.layers.{number}."):
                rest = name.removeprefix(f"model.layers.{number}.")
                source = old.get(number, 0 if number == 1 else 3)
                zero = number not in old and rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
                like = before[f"model.layers.{source}.{rest}"]
                assert tensor.is_zero() == zero and (zero or tensor.digest() == like.digest()), name
    assert json.loads((tmp_path / "deeper" / "config.json").read_text())["num_hidden_layers"] == 7
    assert sorted(record.data["zero_tensors"]) == sorted(name for name, each in after.items() if each.is_zero())
    assert sorted(record.data["new_tensors"]) == sorted(record.new_parameters)  # Llama calls both alike


def test_what_lies_beside_the_weights_comes_along(saved: Path, tmp_path: Path) -> None:
    expand(saved, tmp_path / "deeper", 1)
    names = {path.name for path in (tmp_path / "deeper").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "modeling_own.py", "1_Pooling", "README.md",
        "expansion.json", SINGLE,
    }  # fmt: skip
    card = (tmp_path / "deeper" / "README.md").read_text()
    assert (
        card.startswith("---\nlicense: mit\n---\n") and card.endswith("# A model\n\nText.\n") and "LoraConfig(" in card
    )


def test_an_expanded_model_is_undone_to_the_byte(saved: Path, tmp_path: Path) -> None:
    expand(saved, tmp_path / "one", 1, units=8, shard_size="100KB")
    expand(tmp_path / "one", tmp_path / "two", 2)  # once more, and back in two steps
    undo_expansion(tmp_path / "two", tmp_path / "one again")
    undo_expansion(tmp_path / "one again", tmp_path / "base again")
    before, after = read_weights(saved), read_weights(tmp_path / "base again")
    assert {name: each.digest() for name, each in before.items()} == {
        name: each.digest() for name, each in after.items()
    }
    for name in ("config.json", "README.md", "tokenizer.json"):
        one, other = ((folder / name).read_text() for folder in (saved, tmp_path / "base again"))
        assert one == other if name != "config.json" else json.loads(one) == json.loads(other)
    assert not (tmp_path / "base again" / "expansion.json").exists()


def test_an_undo_is_refused_where_old_weights_were_trained(saved: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    record = expand(saved, tmp_path / "deeper", 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deeper", dtype="auto")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in record.new_parameters:
                parameter += 1
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(SensliError, match=r"has no expansion\.json"):
        undo_expansion(tmp_path / "trained", tmp_path / "back")
    shutil.copy(tmp_path / "deeper" / "expansion.json", tmp_path / "trained")
    undo_expansion(tmp_path / "trained", tmp_path / "back")  # only new blocks were trained
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(SensliError, match=r"1 old tensors .* the first of them model\.norm\.weight"):
        undo_expansion(tmp_path / "trained", tmp_path / "never")
    assert not (tmp_path / "never").exists() and not hidden(tmp_path)
    undo_expansion(tmp_path / "trained", tmp_path / "forced", force=True)
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert read_weights(tmp_path / "forced").keys() == read_weights(saved).keys() and config["num_hidden_layers"] == 6


def test_fresh_blocks_are_identities_with_the_spread_of_their_neighbors(saved: Path, tmp_path: Path) -> None:
    one = expand(saved, tmp_path / "one", place=[1], start="fresh", seed=3)
    expand(saved, tmp_path / "two", place=[1], start="fresh", seed=3)
    expand(saved, tmp_path / "three", place=[1], start="fresh", seed=4)
    assert "equal to the bit" in one.data["check"]
    first, second, third = (read_weights(tmp_path / name) for name in ("one", "two", "three"))
    assert {name: each.digest() for name, each in first.items()} == {
        name: each.digest() for name, each in second.items()
    }
    name = "model.layers.2.mlp.up_proj.weight"
    assert first[name].digest() != third[name].digest()
    new, like = load_tensor(first[name]).float(), load_tensor(first[name.replace("2", "1", 1)]).float()
    assert not torch.equal(new, like) and abs(float(new.std() / like.std()) - 1) < 0.05
    assert first["model.layers.2.self_attn.o_proj.weight"].is_zero()


def test_copies_change_the_output_and_say_so(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["expand", str(saved), "--out", str(tmp_path / "copied"), "--blocks", "1", "--start", "copy"]) == 0
    assert "the output is not that of the base" in capsys.readouterr().out
    assert not expansion(tmp_path / "copied").data["zero_tensors"]


@pytest.mark.parametrize("given", [["--stream"], ["--check", "text"], ["--check", "none"]])
def test_how_it_was_checked_is_said(
    saved: Path, tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "batch.pt").write_bytes(b"")
    torch.save({"input_ids": torch.tensor([[3, 5, 8]])}, tmp_path / "batch.pt")
    given = [str(tmp_path / "batch.pt") if each == "text" else each for each in given]
    command = [
        "expand",
        str(saved),
        "--out",
        str(tmp_path / "out"),
        "--blocks",
        "2",
        "--units",
        "0.5",
        "--json",
        *given,
    ]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert ("sibling" in found["check"]) == ("--stream" in given)
    assert ("outputs" in found["check"]) == ("none" not in given)
    assert found["new_blocks"] == [2, 5] and found["units"] == [48] and "PEFT" in found["lines"]


def test_places() -> None:
    assert choose_places("even", 2, 8) == [3, 7] and choose_places("even", 3, 8) == [1, 4, 7]
    assert choose_places("top", 2, 8) == [6, 7] and choose_places("bottom", 2, 8) == [0, 1]
    assert choose_places("middle", 2, 8) == [3, 4] and choose_places([5, 1], None, 8) == [1, 5]
    assert choose_places("even", 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]


# ---- Lines to paste.


def test_the_lines_to_paste_choose_the_new_parameters_and_no_others(saved: Path, tmp_path: Path) -> None:
    import re

    from transformers import AutoModelForCausalLM

    record = expand(saved, tmp_path / "deeper", place=[1, 3])
    lines = dict(record.lines())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deeper", dtype="auto")

    def trained() -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    exec(lines["plain torch, Trainer"], {"model": model})
    assert trained() == record.new_parameters and record.new_parameters
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    record.freeze(torch.nn.ModuleDict({"inside": model}))
    assert trained() == record.new_parameters
    yaml = pytest.importorskip("yaml")
    patterns = yaml.safe_load(lines["axolotl"])["unfrozen_parameters"]
    assert [n for n, _ in model.named_parameters() if any(re.match(p, n) for p in patterns)] == record.new_parameters
    assert yaml.safe_load(lines["LLaMA-Factory"]) == {
        "finetuning_type": "freeze", "use_llama_pro": True, "freeze_trainable_layers": 2
    }  # fmt: skip
    # as its documentation says: of so many blocks in equal parts the last one of each
    assert [number for number in range(6) if (number + 1) % (6 // 2) == 0] == record.new_blocks
    odd = expand(saved, tmp_path / "odd", place=[0])
    assert "can only express" in dict(odd.lines())["LLaMA-Factory"]


@pytest.mark.parametrize("family", ["Llama", pytest.param("GPT-2", marks=pytest.mark.slow)])
def test_the_line_for_peft_adapts_the_new_blocks_alone(tmp_path: Path, family: str) -> None:
    peft = pytest.importorskip("peft")
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path / "base")
    record = expand(tmp_path / "base", tmp_path / "deeper", 2)
    wide = type(model).from_pretrained(tmp_path / "deeper")
    config = eval(dict(record.lines())["PEFT"], {"LoraConfig": peft.LoraConfig})
    config.fan_in_fan_out = family == "GPT-2"
    adapted = peft.get_peft_model(wide, config)
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    stack = record.data["stack"]
    found = {int(name.split(f"{stack}.")[1].split(".")[0]) for name in names}
    assert names and found == set(record.new_blocks)


# ---- What is refused, and that nothing is written then.


def edited(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def cut(folder: Path) -> None:
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    path.write_bytes(path.read_bytes()[:-10])


def no_weights(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()


def only_bin(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def adapter(folder: Path) -> None:
    no_weights(folder)
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")


def other_number(folder: Path) -> None:
    first = folder / "model-00001-of-00003.safetensors"
    first.write_bytes(struct.pack("<Q", 2**40) + b"{}")


def reshape_first(file: Path) -> None:
    """Let the header say another shape than the bytes have."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"][0] += 1
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no folder": (lambda folder: shutil.rmtree(folder), {}, r"is not a folder\. Give one that save_pretrained wrote"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), {}, r"is not a model folder: it has no config\.json"),
    "a configuration that is none": (lambda folder: (folder / "config.json").write_text("{"), {}, r"config\.json cannot be read"),
    "no class": (lambda folder: edited(folder, architectures=None), {}, "does not say which class the model is of"),
    "an unknown class": (lambda folder: edited(folder, architectures=["NeverModel"]), {}, "names the class NeverModel"),
    "no weights": (no_weights, {}, r"has pytorch_model\.bin and no safetensors"),
    "weights of another format": (only_bin, {}, r"has pytorch_model\.bin and no safetensors"),
    "an adapter": (adapter, {}, "has an adapter and no model. Merge it first"),
    "quantized": (lambda folder: edited(folder, quantization_config={"quant_method": "gptq"}), {}, r"is quantized \(gptq\)"),
    "own code": (lambda folder: edited(folder, auto_map={"AutoModel": "own.Model"}), {}, r"brings its own code \(own\.Model\)"),
    "a missing shard": (lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(), {}, r"lacks model-00001.*Get it again"),
    "a cut shard": (cut, {}, "is cut: it ends before the tensor"),
    "a shard that is none": (lambda folder: sorted(folder.glob("*.safetensors"))[0].write_bytes(b"no"), {}, "is not an intact safetensors"),
    "an index that is none": (lambda folder: (folder / INDEX).write_text("[]"), {}, r"index\.json cannot be read"),
    "fewer blocks than stated": (lambda folder: edited(folder, num_hidden_layers=9), {}, "of 4 blocks .* says num_hidden_layers=9"),
    "no blocks": (None, {"blocks": 0}, r"blocks must be a whole number of at least 1 \(for example 8\), got 0"),
    "no number": (None, {"blocks": None}, "blocks must say how many blocks to add"),
    "a place outside": (None, {"blocks": None, "place": [4]}, "place must name blocks from 0 to 3, .* got 4: the model has 4 blocks"),
    "two numbers": (None, {"blocks": 3, "place": [1]}, "blocks must be 1, the number of places given"),
    "too many at the top": (None, {"blocks": 5, "place": "top"}, "blocks must be at most 4 with place='top'"),
    "an unknown stack": (None, {"stack": "model.blocks"}, r"stack must be one of model\.layers"),
    "no size": (None, {"shard_size": "5 apples"}, "shard size must be a number with KB, MB or GB"),
    "no units": (None, {"units": 0}, "units must be a whole number of at least 1"),
    "a share above one": (None, {"units": 1.5}, "or a share between 0 and 1"),
    "a shape that is another": (
        lambda folder: reshape_first(sorted(folder.glob("*.safetensors"))[0]), {}, r"has [\d,]+ bytes for the shape .* Get it again"
    ),
    "a check that is no file": (None, {"check": "nowhere.txt"}, "check must be 'none' or a file"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_and_nothing_is_written(saved: Path, tmp_path: Path, case: str) -> None:
    spoil, given, text = WRONG[case]
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    if spoil is not None:
        spoil(folder)
    with pytest.raises(SensliError, match=text):
        expand(folder, tmp_path / "out", **{"blocks": 2, **given})
    assert sorted(path.name for path in tmp_path.iterdir()) in (["model"], [])


def test_units_are_refused_where_no_configuration_states_their_width(tmp_path: Path) -> None:
    FAMILIES["Bloom"]().save_pretrained(tmp_path / "base")
    with pytest.raises(SensliError, match="its configuration states no width"):
        expand(tmp_path / "base", tmp_path / "out", units=8)
    assert not (tmp_path / "out").exists() and not hidden(tmp_path)


def test_kinds_that_alternate_by_number_are_refused(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    given = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **given, decoder_sparse_step=2)).save_pretrained(tmp_path / "base")
    with pytest.raises(SensliError, match=r"no block can be added|would be of another kind"):
        expand(tmp_path / "base", tmp_path / "out", 1)
    assert not (tmp_path / "out").exists() and not hidden(tmp_path)


def test_blocks_whose_norms_come_last_are_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=300
    )
    BertForMaskedLM(config).save_pretrained(tmp_path / "base")
    with pytest.raises(SensliError, match=r"would have to go without attention\.output\.LayerNorm\.bias"):
        expand(tmp_path / "base", tmp_path / "out", 1)
    assert not (tmp_path / "out").exists() and not hidden(tmp_path)


def test_a_configuration_inside_of_another_is_changed_there(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    eye = CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    config = LlavaConfig(text_config=LlamaConfig(**SMALL), vision_config=eye, image_token_index=299)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    record = expand(tmp_path / "base", tmp_path / "out", 2)
    assert record.data["stack"] == "model.language_model.layers" and "equal to the bit" in record.data["check"]
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["text_config"]["num_hidden_layers"] == 6 and found["vision_config"]["num_hidden_layers"] == 2


def test_code_of_the_folder_is_run_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.manual_seed(0)
    FAMILIES["Llama"]().save_pretrained(tmp_path / "base")
    code = "from transformers import LlamaForCausalLM\n\nclass OwnForCausalLM(LlamaForCausalLM):\n    pass\n"
    (tmp_path / "base" / "modeling_own.py").write_text(code)
    own = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    edited(tmp_path / "base", architectures=["OwnForCausalLM"], auto_map=own)
    record = expand(tmp_path / "base", tmp_path / "out", 2, trust_remote_code=True)
    assert record.data["architecture"] == "OwnForCausalLM" and "equal to the bit" in record.data["check"]
    assert (tmp_path / "out" / "modeling_own.py").read_text() == code


def test_an_existing_target_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(SensliError, match="out must be a folder that does not exist yet"):
        expand(saved, tmp_path / "out", 1)
    with pytest.raises(SensliError, match="out must lie in a folder that exists"):
        expand(saved, tmp_path / "nowhere" / "out", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not list((tmp_path / "out").iterdir())


def test_too_little_room_is_said_before_the_first_byte(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanding.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    monkeypatch.setattr(expanding, "write_weights", lambda *_: pytest.fail("it was written"))
    with pytest.raises(SensliError, match=r"there is no room for 0\.0 GB in .* Nothing was written"):
        expand(saved, tmp_path / "out", 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(OSError, marks=pytest.mark.thorough)])
def test_a_call_that_fails_anywhere_leaves_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def failing(*_: Any, **__: Any) -> Iterator[int]:
        raise error

    for module, name in ((expanding, "write_weights"), (expanding, "copy_beside"), (expanding, "check_function"),
                         (expanding, "write_card"), (checking, "outputs_of")):  # fmt: skip
        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(module, name, failing)
            expand(saved, tmp_path / "out", 1)
        assert not list(tmp_path.iterdir()), name


def test_outputs_that_differ_are_refused(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([torch.zeros(2), torch.ones(2)])
    monkeypatch.setattr(checking, "outputs_of", lambda *_: next(found))
    with pytest.raises(SensliError, match="the outputs before and after differ"):
        expand(saved, tmp_path / "out", 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing(saved: Path, tmp_path: Path, number: signal.Signals) -> None:
    """It is interrupted while it writes, after the weights."""
    program = (
        "import sys, time\nfrom sensli.cli.main import main\nfrom sensli.expanding import expanding\n"
        "def wait(*_):\n    print('writing', flush=True)\n    time.sleep(300)\n"
        "expanding.copy_beside = wait\nsys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "expand", str(saved), "--out", str(tmp_path / "out"), "--blocks", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=programs.environment(), **pipes) as running:
        assert running.stdout is not None and running.stdout.readline() == "writing\n"
        assert len(hidden(tmp_path)) == 1 and not (tmp_path / "out").exists()
        running.send_signal(number)
        errors = running.communicate(timeout=programs.HANGS)[1]
    assert running.returncode == 130 and errors.strip() == "Interrupted."
    assert not hidden(tmp_path) and not (tmp_path / "out").exists()


def test_sizes_are_read_as_transformers_reads_them() -> None:
    assert parse_size("5GB") == 5 * 10**9 and parse_size("1.5 MiB") == 3 * 2**19


@pytest.mark.parametrize("streams", [True, False])
def test_what_the_outputs_are_compared_on_is_refused_where_the_model_is_not_loaded(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    torch.save({"input_ids": torch.randint(3, 60, (1, 8))}, tmp_path / "batch.pt")
    if not streams:
        monkeypatch.setattr(expanding, "free_memory", lambda: 1000)
    text = "left out or 'none' with stream, got" if streams else r"GB, more than half of the free memory, got"
    with pytest.raises(SensliError, match=text):
        expand(saved, tmp_path / "out", 2, check=tmp_path / "batch.pt", stream=streams)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.pt"]
