"""The optimizer of a saved training follows an expansion: the next step is the one of a model that was expanded in memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families import FAMILIES
from sensli import SensliError, expand, find_sites, grow

pytestmark = pytest.mark.library
BATCH = {"input_ids": torch.arange(3, 27).view(2, 12), "labels": torch.arange(3, 27).view(2, 12)}


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**BATCH).loss.backward()
        optimizer.step()


def adam(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """An optimizer as people, or the Trainer, build it."""
    if kind == "trainer":
        from transformers import Trainer

        decayed = set(Trainer.get_decay_parameter_names(None, model))
        named = list(model.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [each for name, each in named if name in decayed], "weight_decay": 0.1},
                {"params": [each for name, each in named if name not in decayed], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )
    return torch.optim.AdamW(model.named_parameters() if kind == "named" else model.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one kind of optimizer each, trained for two steps."""
    folder = tmp_path_factory.mktemp("trained")
    for kind in ("plain", "named", "trainer"):
        torch.manual_seed(0)
        model = FAMILIES["Llama, tied"]()
        optimizer = adam(model, kind)
        train(model, optimizer, 2)
        model.save_pretrained(folder / kind)
        torch.save(optimizer.state_dict(), folder / kind / "optimizer.pt")
    return folder


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def expanded_in_memory(folder: Path, kind: str) -> dict[str, Tensor]:
    """The weights after a block has come after the second one, and one more step."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = adam(model, kind)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    example = {"input_ids": BATCH["input_ids"]}
    site = next(each for each in find_sites(model.eval(), example, form="twin") if " after model.layers.1" in str(each))
    grow(model, site, optimizer=optimizer)
    train(model, optimizer)
    return weights(model)


@pytest.mark.parametrize("kind", ["plain", "named", "trainer"])
def test_the_next_step_is_that_of_a_model_expanded_in_memory(trained: Path, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    path = trained / kind if kind == "trainer" else trained / kind / "optimizer.pt"
    record = expand(trained / kind, tmp_path / "deeper", place=[1], optimizer=path)
    assert record.data["optimizer"] == "optimizer.pt"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deeper")
    optimizer = adam(model, kind)
    optimizer.load_state_dict(torch.load(tmp_path / "deeper" / "optimizer.pt"))
    assert len(optimizer.state) == len(list(model.parameters())) - len(record.new_parameters)
    train(model, optimizer)
    found, wanted = weights(model), expanded_in_memory(trained / kind, kind)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


def test_units_have_moments_of_zero(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expand(trained / "plain", tmp_path / "wider", 1, units=8, optimizer=trained / "plain" / "optimizer.pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wider")
    optimizer = adam(model, "plain")
    optimizer.load_state_dict(torch.load(tmp_path / "wider" / "optimizer.pt"))
    before = torch.load(trained / "plain" / "optimizer.pt")["state"]
    parameter = model.model.layers[0].mlp.down_proj.weight
    moment = optimizer.state[parameter]["exp_avg"]
    old = next(each["exp_avg"] for each in before.values() if each["exp_avg"].shape == (64, 96))
    assert torch.equal(moment[:, :96], old) and not moment[:, 96:].any()
    train(model, optimizer)


@pytest.mark.parametrize("flat", [False, True])
def test_a_distributed_checkpoint_follows(trained: Path, tmp_path: Path, flat: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from transformers import AutoModelForCausalLM

    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        one, other = get_state_dict(model, optimizer, options=options)
        return {"model": one, "optim": other, "step": 2}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(trained / "plain")
        optimizer = adam(model, "plain")
        optimizer.load_state_dict(torch.load(trained / "plain" / "optimizer.pt"))
        dcp.save(states(model, optimizer), checkpoint_id=tmp_path / "step-2", no_dist=True)
        expand(trained / "plain", tmp_path / "deeper", place=[1], optimizer=tmp_path / "step-2")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "deeper")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # all comes from the checkpoint
        optimizer = adam(model, "plain")
        empty = states(model, optimizer)
        dcp.load(empty, checkpoint_id=tmp_path / "deeper" / "step-2", no_dist=True)
        set_state_dict(
            model, optimizer, model_state_dict=empty["model"], optim_state_dict=empty["optim"], options=options
        )
        train(model, optimizer)
    wanted = expanded_in_memory(trained / "plain", "plain")
    for name, value in weights(model).items():
        assert torch.equal(value, wanted[name]), name


def test_the_trainer_resumes_from_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    def trainer(model: Any, folder: Path, steps: int) -> Any:
        asked = TrainingArguments(
            str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True,
            lr_scheduler_type="constant",
        )  # fmt: skip
        rows = [{name: row[index] for name, row in BATCH.items()} for index in (0, 1)] * 2
        return Trainer(model, asked, train_dataset=rows)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        trainer(FAMILIES["Llama"](), tmp_path / "run", 2).train()
        base = tmp_path / "run" / "checkpoint-2"
        record = expand(base, tmp_path / "checkpoint-2", 1, optimizer=base)
        resumed = trainer(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2"), tmp_path / "on", 3)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3
    named = dict(resumed.model.named_parameters())
    steps = {name: int(resumed.optimizer.optimizer.state[named[name]]["step"]) for name in named}
    assert all(step == (1 if name in record.new_parameters else 3) for name, step in steps.items())


def test_an_optimizer_of_another_model_is_refused(trained: Path, tmp_path: Path) -> None:
    torch.save(torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict(), tmp_path / "other.pt")
    for path, text in (
        (tmp_path / "other.pt", "has groups of 2 parameters, which are not those of the model"),
        (tmp_path / "nowhere", "optimizer must be a file of torch"),
        (trained / "plain" / "model.safetensors", "is not the state_dict of an optimizer"),
    ):
        with pytest.raises(SensliError, match=text):
            expand(trained / "plain", tmp_path / "out", 1, optimizer=path)
    assert [path.name for path in tmp_path.iterdir()] == ["other.pt"]
