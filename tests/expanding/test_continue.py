"""Growing goes on where an expansion on disk ended: the folder is a model like any other, and says what is new."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from families import FAMILIES
from sensli import Grower, expand, expansion, triggers

pytestmark = pytest.mark.library
IDS = torch.arange(3, 27).view(2, 12)
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("continue")
    torch.manual_seed(0)
    FAMILIES["Llama"]().save_pretrained(folder / "base")
    expand(folder / "base", folder / "deeper", 2)
    return folder / "deeper"


def test_a_grower_goes_on_from_an_expanded_folder(deeper: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(deeper)
    record = expansion(deeper)
    record.freeze(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    assert [name for name, each in model.named_parameters() if each.requires_grad] == record.new_parameters
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    grower = Grower(
        model, optimizer, example={"input_ids": IDS}, trigger=triggers.Every(1), form="twin", what="layers", preset="paper", tau=0.0
    )  # fmt: skip
    grower.step([BATCH], lambda output, _: output.loss)
    assert len(grower.history) == 1 and len(model.model.layers) == 7 and model.config.num_hidden_layers == 7


@pytest.mark.slow
def test_the_callback_goes_on_from_an_expanded_folder_and_resumes(deeper: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from sensli.integrations.transformers import GrowthCallback

    def train(epochs: int, resume: str | None = None) -> Any:
        asked = TrainingArguments(
            str(tmp_path), num_train_epochs=epochs, save_strategy="epoch", per_device_train_batch_size=2, report_to=[],
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        rows = [{name: row[index] for name, row in BATCH.items()} for index in (0, 1)]
        growing = GrowthCallback(triggers.At(1), form="twin", what="layers", preset="paper", tau=0.0)
        trainer = Trainer(AutoModelForCausalLM.from_pretrained(deeper), asked, train_dataset=rows, callbacks=[growing])
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = train(2)
        resumed = train(2, str(tmp_path / "checkpoint-1"))
    assert len(whole.model.model.layers) == len(resumed.model.model.layers) == 7
    for (name, one), (_, other) in zip(whole.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
