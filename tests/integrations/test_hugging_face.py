"""The callback for the Trainer of Hugging Face, with the real Trainer and a real torchrun: grows, logs, resumes to the bit."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, DistributedType, PartialState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import ranks  # noqa: E402
import warm  # noqa: E402
from parallel import same_on_all_ranks  # noqa: E402
from sensli import Grower, Rates, Trial, find_sites, measure, triggers  # noqa: E402
from sensli.errors import CheckpointError, SensliError, UnsupportedModel  # noqa: E402
from sensli.integrations.transformers import GrowthCallback  # noqa: E402
from sensli.page import read_history  # noqa: E402
from tables import through_axes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library, about itself
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
LIBRARIES = (
    "transformers.trainer",
    "accelerate",
    "transformers.models.gpt2.modeling_gpt2",
)  # imported once for all programs
VOCABULARY, EXACT = 17, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def make_model(**options: Any) -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=8, n_head=2, vocab_size=VOCABULARY, n_positions=8, bos_token_id=0, eos_token_id=1, **options
        )
    )  # fmt: skip


def rows(ragged: bool = False) -> list[dict[str, Tensor]]:
    """Tokens of which every second one repeats the one before; ragged: rows of different lengths count, the rest is ignored."""
    ids = torch.randint(0, VOCABULARY, (32, 6), generator=torch.Generator().manual_seed(1))
    ids[:, 1::2] = ids[:, ::2]
    labels = ids.clone()
    for index in range(len(ids) if ragged else 0):
        labels[index, 6 - index % 4 :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def make(folder: Any, callback: Any, *, model: Any = None, cls: Any = Trainer, **options: Any) -> Any:
    parts = {
        name: options.pop(name)
        for name in ("optimizers", "eval_dataset", "compute_loss_func", "train_dataset", "model_init")
        if name in options
    }
    settings: dict[str, Any] = {
        "num_train_epochs": 4, "per_device_train_batch_size": 8, "learning_rate": 0.01, "save_strategy": "epoch",
        "logging_strategy": "epoch", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    if model is None and "model_init" not in parts:
        model = make_model()
    trainer = cls(model, args, callbacks=[callback], **{"train_dataset": rows(), **parts})
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def grow(*at: int, **options: Any) -> GrowthCallback:
    return GrowthCallback(triggers.At(*at), preset="paper", **{"tau": 0.0, **options})


def assert_same(one: Any, other: Any) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_trigger_that_watches_a_metric_needs_its_name_from_the_start() -> None:
    with pytest.raises(
        ValueError, match=r"^monitor must be .* \(for example 'eval_loss'\) with trigger=\(Pays\(2\) \| Diminish"
    ):
        GrowthCallback(triggers.Pays() | triggers.Diminishing(), preset="paper", what="units", tau=0)


# --- averages ---


class Averaging(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """As people write it: made when the training begins, updated after every step."""

    def __init__(self, kind: str) -> None:
        self.kind, self.steps = kind, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.kind == "copy":
            self.average: Any = copy.deepcopy(model)
        elif self.kind == "tensors":
            self.average = [parameter.detach().clone() for parameter in model.parameters()]
        elif not hasattr(self, "average"):
            self.average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps += 1
        if self.kind == "copy":
            for mean, parameter in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.data.lerp_(parameter.data, 0.5)
        else:
            self.average.update_parameters(model)


@pytest.mark.parametrize(("kind", "what"), through_axes(["kept", "copy", "given"], ["layers", "units"]))
def test_averages_follow(kind: str, what: str, tmp_path: Path) -> None:
    model, averaging = make_model(**EXACT).double(), Averaging(kind)
    given: dict[str, Any] = {}
    if kind == "given":
        given["averaged"] = averaging.average = AveragedModel(model.transformer, avg_fn=get_ema_avg_fn(0.5))
        averaging.on_step_end = lambda *args, model, **_: averaging.average.update_parameters(model.transformer)  # type: ignore[method-assign]
    trainer = make(tmp_path, grow(1, 2, what=what, **given), model=model, num_train_epochs=3, save_strategy="epoch")
    trainer.add_callback(averaging)
    trainer.train()
    source, mean = (model.transformer, averaging.average.module) if given else (model, averaging.average)
    mean = getattr(mean, "module", mean)
    assert [(n, p.shape) for n, p in mean.named_parameters()] == [(n, p.shape) for n, p in source.named_parameters()]
    # After many steps at a rate that ends at zero the mean is where the model is, entry by entry.
    for name, parameter in mean.named_parameters():
        assert (parameter - source.get_parameter(name)).abs().max() < 0.02, name
    # A resumed training grows the small model and its average alike, before the weights are loaded.
    model, averaging = make_model(**EXACT).double(), Averaging("kept")
    averaging.average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5))
    trainer = make(tmp_path, grow(1, 2, what=what), model=model, num_train_epochs=3)
    trainer.add_callback(averaging)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert [n for n, _ in averaging.average.module.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_an_average_that_cannot_follow_is_refused_before_the_first_step(tmp_path: Path) -> None:
    averaging = Averaging("tensors")
    trainer = make(tmp_path, grow(1))
    trainer.add_callback(averaging)
    with pytest.raises(
        UnsupportedModel, match=r"^Averaging\.average keeps the values of .*torch\.optim\.swa_utils\.AveragedModel"
    ):
        trainer.train()
    assert averaging.steps == 0


# --- the loss is the Trainer's own ---


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnLoss(Trainer):  # type: ignore[misc, unused-ignore]
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        output = model(inputs["input_ids"])  # by position
        loss = 3 * shifted(output.logits, labels)
        return (loss, output) if return_outputs else loss


def test_it_grows_as_a_loop_of_ones_own_would(tmp_path: Path) -> None:
    callback = grow(2, 3, rates=Rates(lr_factor=0.9))
    model = make_model(**EXACT).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = make(
        tmp_path, callback, model=model, cls=OwnLoss, save_strategy="no", train_sampling_strategy="sequential",
        gradient_accumulation_steps=2, max_grad_norm=0.5,
        optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)),
    )  # fmt: skip
    trainer.train()

    plain = make_model(**EXACT).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    ids = torch.stack([row["input_ids"] for row in rows()])
    grower = Grower(
        plain, optimizer, preset="paper",
            example={"input_ids": ids[:8]}, trigger=triggers.At(2, 3), tau=0.0, rates=Rates(lr_factor=0.9), scheduler=scheduler
    )  # fmt: skip
    plain.train()
    for _ in range(4):
        for batch in ids.split(16):
            optimizer.zero_grad()
            (3 * shifted(plain(batch).logits, batch)).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
        grower.step([({"input_ids": x}, x) for x in ids.split(8)], lambda out, x: 3 * shifted(out.logits, x))
    assert [growth.name for growth in callback.history] == [growth.name for growth in grower.history]
    assert len(callback.history) == 2 and model.config.n_layer == 4
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-4, atol=1e-7)  # GPT-2 casts to float32


def smoothed(output: Any, labels: Tensor) -> Tensor:
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)


def summed(output: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    kept = cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return kept / num_items_in_batch


@pytest.mark.parametrize("way", ["model", "smoothing", "function"])
def test_merits_are_those_of_the_trainer_s_loss_over_all_tokens(way: str, tmp_path: Path) -> None:
    options = {"smoothing": {"label_smoothing_factor": 0.2}, "function": {"compute_loss_func": summed}}.get(way, {})
    callback, model = grow(1, tau=1e9), make_model(**EXACT)
    model.loss_type = "ForCausalLM"  # from which the Trainer knows that the first token of a row does not count
    trainer = make(
        tmp_path, callback, model=model, learning_rate=0.0, num_train_epochs=1, save_strategy="no",
        train_dataset=rows(ragged=True), **options,
    )  # fmt: skip
    trainer.train()
    batch = {name: torch.stack([row[name] for row in rows(ragged=True)]) for name in ("input_ids", "labels")}
    loss = (lambda out, b: smoothed(out, b["labels"])) if way == "smoothing" else (lambda out, b: out.loss)
    expected = measure(model, find_sites(model, batch), [batch], loss)
    assert callback.grower is not None and callback.grower.last_merits is not None
    found = callback.grower.last_merits
    assert [m.value for m in found] == pytest.approx([m.value for m in expected], rel=1e-4)
    assert [m.ratio for m in found] == pytest.approx([m.ratio for m in expected], rel=1e-4)
    assert not callback.history and "forward" not in vars(model)


# --- checkpoints ---


class Interrupted(TrainerCallback):  # type: ignore[misc, unused-ignore]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 11:
            raise KeyboardInterrupt


RESUME = """
import sys, torch, test_hugging_face as t
torch.set_num_threads(1)
trainer = t.make(sys.argv[1], t.grow(1, 2, 4, select="random"))
trainer.train(resume_from_checkpoint=True)
torch.save(trainer.model.state_dict(), sys.argv[2])
t.compiled_in_bf16(sys.argv[1] + "/compiled")
"""


@pytest.mark.process
def test_an_interrupted_run_goes_on_to_the_bit_in_a_fresh_process(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", grow(1, 2, 4, select="random"))
    whole.train()
    trainer = make(tmp_path / "cut", callback := grow(1, 2, 4, select="random"))
    trainer.add_callback(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(callback.history) == 2
    arguments = ["-c", RESUME, str(tmp_path / "cut"), str(tmp_path / "weights")]
    done = warm.run(arguments, tmp_path, LIBRARIES, ONEDNN_MAX_CPU_ISA="AVX2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same(whole.model.state_dict(), torch.load(tmp_path / "weights", weights_only=True))

    # in the process that was interrupted too, back over a growth
    trainer.remove_callback(Interrupted)
    trainer.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert_same(whole.model.state_dict(), trainer.model.state_dict())
    assert len(callback.history) == 3
    assert read_history(tmp_path / "cut" / "checkpoint-16" / "sensli.json") == callback.history


def with_sgd() -> dict[str, Any]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5))}


class PerParameter(Trainer):  # type: ignore[misc, unused-ignore]
    """As a layer decay: a group for each parameter of the model, also of a grown one."""

    def create_optimizer(self, *_: Any) -> Any:
        groups = [{"params": [p], "lr": 1e-3 / (1 + number)} for number, p in enumerate(self.model.parameters())]
        self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer


def with_images() -> dict[str, Any]:
    """A model that the library saves under older names than those its Trainer looks for."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=4, patch_size=2, num_labels=2))
    return {
        "model": model,
        "train_dataset": [{"pixel_values": torch.randn(3, 4, 4), "labels": i % 2} for i in range(32)],
    }


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}, 8),  # the last of an epoch
        ({"save_strategy": "steps", "save_steps": 5, "gradient_checkpointing": True, "weight_decay": 0.1}, 10),
        ({"gradient_accumulation_steps": 3, "model_init": lambda: make_model()}, 4),
        (with_sgd, 8),
        (with_images, 8),
        ({"cls": PerParameter, "save_strategy": "steps", "save_steps": 5}, 10),
    ],
    ids=["steps", "checkpointing", "accumulation", "sgd", "images", "a group each"],
)
@pytest.mark.slow
def test_resume_to_the_bit(options: Any, step: int, tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        return {"num_train_epochs": 3, "logging_strategy": "no", **(options() if callable(options) else options)}

    growing: dict[str, Any] = {"batches": 2, "rates": Rates(lr_factor=0.8, new_lr_factor=0.5 if step == 8 else None)}
    whole = make(tmp_path, first := grow(2, 3, **growing), **settings())
    whole.train()
    resumed = make(tmp_path / "again", second := grow(2, 3, **growing), **settings())
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert len(first.history) == len(second.history) == 2
    assert first.history == second.history
    assert_same(whole.model.state_dict(), resumed.model.state_dict())


@pytest.mark.parametrize("warmup", [pytest.param(None, marks=pytest.mark.thorough), 6])
def test_units_grow_in_a_training_and_a_resumed_one(warmup: int | None, tmp_path: Path) -> None:
    growing: dict[str, Any] = {"what": "units", "units": 4, "init": "random", "per": "flops", "batches": 2}
    growing["rates"] = Rates(warmup=warmup)
    settings = {"num_train_epochs": 3, "logging_strategy": "no"}
    whole = make(tmp_path, first := grow(1, 2, **growing), **settings)
    whole.train()
    assert [growth.site.kind for growth in first.history] == ["units", "units"]
    assert str(first.history[0].site).startswith("+4 ")
    for step in (4, 8):  # after the first growth, and after the second
        resumed = make(tmp_path / f"again{step}", second := grow(1, 2, **growing), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert second.history == first.history
        assert_same(whole.model.state_dict(), resumed.model.state_dict())
    states = [state for saved in (4, 8) for state in groups(tmp_path / f"checkpoint-{saved}")]
    assert any("sensli_warmup" in group for group in states) == (warmup is not None)


def groups(folder: Path) -> Any:
    return torch.load(folder / "optimizer.pt", weights_only=True)["param_groups"]


def test_the_best_model_comes_back_with_its_layers_and_everything_is_logged(tmp_path: Path) -> None:
    plateau = triggers.Plateau(patience=1, threshold=10.0)  # nothing ever is an improvement
    callback = GrowthCallback(plateau, preset="paper", monitor="eval_loss", tau=0.0)
    trainer = make(
        tmp_path, callback, eval_strategy="epoch", eval_dataset=rows()[:8], load_best_model_at_end=True,
        greater_is_better=True, metric_for_best_model="eval_loss",  # so that an early one is the best
    )  # fmt: skip
    sizes = []

    class Sizes(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            sizes.append(sum(p.numel() for p in model.parameters()))

    trainer.add_callback(Sizes())
    trainer.train()
    logs = trainer.state.log_history
    looks = [entry for entry in logs if "sensli/merit" in entry]
    assert [entry["epoch"] for entry in looks] == [2.0, 3.0, 4.0]
    assert (callback.history.record.metric, callback.history.record.step_name) == ("eval_loss", "epoch")
    counted = [entry["sensli/parameters"] for entry in logs if "sensli/parameters" in entry]
    assert counted[:3] == sizes[1:] and counted[0] < counted[1]
    assert all(entry["sensli/flops"] > 0 and entry["sensli/ratio"] > 0 for entry in looks)
    assert len([entry for entry in logs if "loss" in entry]) == 4  # the Trainer's own are all there

    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-16"  # or the test would prove nothing
    expected = load_file(best / "model.safetensors")
    assert_same(expected, {name: trainer.model.state_dict()[name] for name in expected})
    assert len(callback.history) == len(read_history(best / "sensli.json")) < 3 == len(looks)
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric
    logits = trainer.predict(rows()[:4]).predictions
    loaded = GPT2LMHeadModel.from_pretrained(best)
    loaded.eval()
    assert loaded.config.n_layer == 2 + len(callback.history)
    with torch.no_grad():
        again = loaded(torch.stack([row["input_ids"] for row in rows()[:4]])).logits
    torch.testing.assert_close(torch.from_numpy(logits), again)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    first = make(tmp_path, grow(1, 2), num_train_epochs=2, model=make_model())
    first.train()
    folder = tmp_path / "checkpoint-8"
    grown = GPT2LMHeadModel.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="Give the Trainer the small model"):
        make(tmp_path / "x", grow(1, 2), model=grown).train(resume_from_checkpoint=str(folder))
    with pytest.raises(ValueError, match="valid checkpoint"):
        first.train(resume_from_checkpoint=str(tmp_path / "absent"))
    assert first.model.config.n_layer == 4  # untouched

    (folder / "sensli.json").write_text('{"format": 1, "gro')
    with pytest.raises(CheckpointError, match=r"sensli\.json is damaged"):
        make(tmp_path / "x", grow(1, 2)).train(resume_from_checkpoint=str(folder))
    (folder / "sensli.json").unlink()
    with pytest.raises(CheckpointError, match=r"does not have.*sensli\.json is missing"):
        make(tmp_path / "x", grow(1, 2)).train(resume_from_checkpoint=str(folder))


class Net(nn.Module):
    """A module of one's own: no configuration, no save_pretrained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.layers(self.table(input_ids))
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def compiled_in_bf16(folder: str) -> None:
    """A model of one's own, compiled, in mixed precision. In a process of its own: some processors need another setting for bf16."""
    options = {"bf16": True, "torch_compile": True, "torch_compile_backend": "eager", "num_train_epochs": 3}
    weights = []
    for name, checkpoint in (("a", None), ("b", f"{folder}/a/checkpoint-8")):
        trainer = make(f"{folder}/{name}", callback := grow(1, 3), model=Net(), **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        weights.append(trainer.model.state_dict())
        assert len(callback.history) == 2 and hasattr(trainer.model_wrapped, "_orig_mod")
    assert_same(*weights)


# --- several processes ---


def several(folder: str, processes: int) -> Any:
    """One run on the same joined batches, whatever the number of processes, and the same again from the middle."""

    def trainer(name: str, callback: GrowthCallback) -> Any:
        settings: dict[str, Any] = {
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 3,
            "train_dataset": rows(ragged=True),
        }
        size = 8 // processes
        model = make_model(**EXACT).double()
        return make(f"{folder}/{name}", callback, model=model, per_device_train_batch_size=size, **settings)

    whole = trainer("whole", callback := grow(1, 2, 3))
    whole.train()
    resumed = trainer("again", grow(1, 2, 3))
    resumed.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-4")
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    merits = [entry["sensli/merit"] for entry in whole.state.log_history if "sensli/merit" in entry]
    names = [growth.name for growth in callback.history]
    trying = trainer("tried", tries := tried(1, what="layers", batches=None))
    trying.args.num_train_epochs, trying.args.save_strategy = 2, "no"
    trying.train()
    arms = [arm for look in tries.history.record.decisions if look.tried for arm in look.tried.arms]
    return {
        "model": dict(whole.model.state_dict()),
        "tried": dict(trying.model.state_dict()),
        "merits": merits,
        "names": names,
        "arms": [(arm.name, arm.steps, arm.flops) for arm in arms],
        "scores": [arm.score for arm in arms],
    }


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """accelerate takes no notice of fsdp= on CPUs, and wraps the model in DDP. Told that it may shard there, it does."""
    given = AcceleratorState.__init__

    def told(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        given(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "__init__", told)
        yield


def sharded(saved: str) -> dict[str, Tensor]:
    """The same run on a model that accelerate has sharded by FSDP2, and the same again from the middle."""

    def trainer(name: str) -> Any:
        settings: dict[str, Any] = {
            "fsdp_version": 2,
            "state_dict_type": saved,
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
        }
        more = {"gradient_accumulation_steps": 2, "num_train_epochs": 3, "train_dataset": rows(ragged=True)}
        sizes = {
            "per_device_train_batch_size": 8 // dist.get_world_size(),
            "eval_strategy": "epoch",
            "eval_dataset": rows(),
        }
        model = make_model(**EXACT).double()
        return make(f"{saved}/{name}", grow(1, 2, 3), model=model, fsdp=True, fsdp_config=settings, **more, **sizes)

    with sharding_on_cpu():
        whole = trainer("whole")
        whole.train()
        dist.barrier()
        resumed = trainer("again")
        resumed.train(resume_from_checkpoint=f"{saved}/whole/checkpoint-4")
    network = whole.model.transformer
    assert len(network.h) == whole.model.config.n_layer == 5
    assert all(isinstance(module, FSDPModule) for module in (whole.model, network.wte, *network.h))
    found = ranks.wholes(dict(whole.model.state_dict()))
    assert_same(found, ranks.wholes(dict(resumed.model.state_dict())))
    return found


def in_two_processes() -> Any:
    found = several(os.getcwd(), dist.get_world_size())
    same_on_all_ranks_of(found["model"])
    same_on_all_ranks_of(found["tried"])
    with pytest.raises(UnsupportedModel, match="fully_shard"):
        make("sharded", grow(1), fsdp=True, fsdp_config={"fsdp_version": 1, "sync_module_states": False})
    return {**found, "sharded": sharded("SHARDED_STATE_DICT")}


def sharded_and_saved_whole() -> Any:
    return sharded("FULL_STATE_DICT")


def same_on_all_ranks_of(state: dict[str, Tensor]) -> None:
    module = nn.Module()
    for index, tensor in enumerate(state.values()):
        module.register_buffer(f"b{index}", tensor)
    same_on_all_ranks(module)


@pytest.mark.thorough
@pytest.mark.process
def test_two_processes_equal_one_on_the_joined_batches(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    found = ranks.run(in_two_processes, 2, tmp_path / "two", LIBRARIES)
    expected = several(str(tmp_path / "one"), 1)
    assert found["names"] == expected["names"] and len(found["names"]) == 3
    assert found["merits"] == pytest.approx(expected["merits"], rel=1e-5)  # GPT-2 casts to float32 for the loss
    assert found["arms"] == expected["arms"] and len(found["arms"]) == 3
    assert found["scores"] == pytest.approx(expected["scores"], rel=1e-5)
    expected["sharded"] = expected["model"]
    for which in ("model", "tried", "sharded"):
        assert list(found[which]) == list(expected[which])
        for name, tensor in expected[which].items():
            torch.testing.assert_close(found[which][name], tensor, rtol=1e-6, atol=1e-8)


@pytest.mark.process
@pytest.mark.thorough
def test_a_sharded_training_that_saves_whole_files_resumes_to_the_bit(tmp_path: Path) -> None:
    ranks.run(sharded_and_saved_whole, 2, tmp_path, LIBRARIES)


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fp16": True}, "Use bf16=True"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
        ({"monitor": "eval_loss"}, "eval_strategy='no'"),
        ({"monitor": "loss", "save_strategy": "steps"}, "Set save_strategy='epoch'"),
    ],
)
def test_what_the_trainer_s_design_forbids_is_refused_before_training(
    options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    monitor = options.pop("monitor", None)
    with pytest.raises(SensliError, match=text):
        make(tmp_path, grow(1, monitor=monitor), **options)


def test_mistakes_are_told_before_training(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    for options, text in (
        ({"tau": -1.0}, "tau must be .*, got -1.0"),
        ({"batches": 0}, "batches must be .*, got 0"),
        ({"optimizer": None}, "belongs to the trainer"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            grow(1, **options)
    callback = grow(1)
    assert torch.equal(before, torch.get_rng_state())
    trainer = make(tmp_path, callback)
    with pytest.raises(SensliError, match="belongs to another Trainer"):
        make(tmp_path, callback)
    trainer.args._n_gpu = 2
    with pytest.raises(UnsupportedModel, match="DataParallel"):
        trainer.train()
    with pytest.raises(SensliError, match="nowhere to grow for where='conv'"):
        make(tmp_path, grow(3, where="conv")).train()
    trainer = make(
        tmp_path, grow(1, monitor="eval_absent"), eval_strategy="epoch", eval_dataset=rows()[:8], save_strategy="no"
    )
    with pytest.raises(SensliError, match=r"monitor='eval_absent' was not logged.*eval_loss"):
        trainer.train()


def test_a_callback_that_is_added_later(tmp_path: Path) -> None:
    make(tmp_path, grow(1), num_train_epochs=2).train()
    args = TrainingArguments(
        str(tmp_path / "x"), num_train_epochs=2, use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
        per_device_train_batch_size=8, learning_rate=0.01, logging_strategy="no",
    )  # fmt: skip
    for add, attach in ((True, True), (True, False), (False, True)):
        trainer, callback = Trainer(make_model(), args, train_dataset=rows()), grow(1)
        if add:
            trainer.add_callback(callback)
        if attach:
            callback.attach(trainer)
        assert sum(each is callback for each in trainer.callback_handler.callbacks) == 1
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if attach else None)
        assert len(callback.history) == 1 and trainer.model.config.n_layer == 3


def test_a_group_of_the_trainers_optimizer_takes_layers_of_a_frozen_part(tmp_path: Path) -> None:
    def frozen(callback: GrowthCallback) -> Any:
        model = make_model()
        model.transformer.h.requires_grad_(False)
        trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trains, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return make(
            tmp_path, callback, model=model, optimizers=(optimizer, schedule), save_strategy="no", num_train_epochs=1
        )

    def after(site: Any) -> bool:
        return site.path == "transformer.h.1"

    with pytest.raises(SensliError, match=r"(?s)nowhere to grow.*nothing would train a layer there.*group="):
        frozen(grow(1, where=after)).train()  # before the first epoch
    callback = grow(1, where=after, rates=Rates(group=0))
    trainer = frozen(callback)
    trainer.train()
    assert len(callback.history) == 1
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert all(id(p) in held for p in trainer.model.parameters() if p.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["all blocks", "one block"])
def test_a_trainer_widens_resumes_to_the_bit_and_saves_what_its_configuration_describes(
    which: str, tmp_path: Path
) -> None:
    def chosen(site: Any) -> bool:
        return bool(site.move.blocks if which == "all blocks" else site.move.heads)

    growing: dict[str, Any] = {"what": "units", "where": chosen, "batches": 2}
    whole = make(tmp_path, first := grow(2, 3, **growing), num_train_epochs=3)
    whole.train()
    resumed = make(tmp_path / "again", second := grow(2, 3, **growing), num_train_epochs=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert len(first.history) == 2 and first.history == second.history
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    assert whole.model.config.n_inner == resumed.model.config.n_inner == (50 if which == "all blocks" else None)
    if which == "all blocks":  # 32, 40 and 50 hidden units: a quarter more each time
        resumed.save_model(str(tmp_path / "model"))
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
        assert_same(loaded.state_dict(), resumed.model.state_dict())


# --- trials ---


def tried(*at: int, steps: int = 3, **options: Any) -> GrowthCallback:
    # Rows that do not depend on the data: those of the Trainer's loop and of one's own are then the same.
    units = {} if options.get("what") == "layers" else {"units": 4, "init": "random"}
    return grow(*at, **{"what": "both", "batches": 2, "trial": Trial(steps, candidates=2), **units, **options})


def test_a_trial_makes_the_updates_of_the_trainer(tmp_path: Path) -> None:
    """As a Grower whose step accumulates and clips as the Trainer does, on the batches of the next epoch; the schedule stays."""
    model = make_model(**EXACT).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = make(
        tmp_path, callback := tried(2, batches=None), model=model, cls=OwnLoss, save_strategy="no", num_train_epochs=3,
        train_sampling_strategy="sequential", gradient_accumulation_steps=2, max_grad_norm=0.5,
        optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 6  # the loop's own

    plain = make_model(**EXACT).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    ids = torch.stack([row["input_ids"] for row in rows()])

    def step(model: Any, optimizer: Any, batch: Tensor) -> float:
        optimizer.zero_grad()
        loss = 3 * shifted(model(batch).logits, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    grower = Grower(
        plain, optimizer, preset="paper",
            example={"input_ids": ids[:8]}, trigger=triggers.At(2), tau=0.0, scheduler=scheduler, what="both", units=4,
        init="random", trial=Trial(3, candidates=2, step=step, batches=ids.split(16)),
    )  # fmt: skip
    plain.train()
    for _ in range(3):
        for batch in ids.split(16):
            step(plain, optimizer, batch)
            scheduler.step()
        grower.step([({"input_ids": x}, x) for x in ids.split(8)], lambda out, x: 3 * shifted(out.logits, x))
    mine, theirs = (each.history.record.decisions[0].tried for each in (callback, grower))
    assert mine is not None and theirs is not None and len(mine.arms) == 3
    assert [(arm.name, arm.steps, arm.flops) for arm in mine.arms] == [
        (arm.name, arm.steps, arm.flops) for arm in theirs.arms
    ]
    # The Trainer takes its loss for one that is divided by the items of an update, and adds up those of two batches.
    assert [arm.score for arm in mine.arms] == pytest.approx([2 * (arm.score or 0) for arm in theirs.arms], rel=1e-5)
    assert mine.winner == theirs.winner
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)  # GPT-2 casts to float32


class Killed(Trainer):  # type: ignore[misc, unused-ignore]
    """Ends within the trial: the third epoch has not begun, and yet there is a ninth update."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.updates = getattr(self, "updates", 0) + 1
        if self.updates == 11:
            raise KeyboardInterrupt
        return super().training_step(*args, **kwargs)


def test_a_training_with_trials_resumes_to_the_bit_also_if_it_was_killed_within_one(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 3, "logging_strategy": "no"}
    whole = make(tmp_path / "whole", first := tried(2), **settings)
    whole.train()
    killed = make(tmp_path / "killed", tried(2), cls=Killed, **settings)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert [folder.name for folder in (tmp_path / "killed").glob("checkpoint-*")] == ["checkpoint-4"]
    for folder, step in (("killed", 4), ("whole", 8)):  # before the trial, and with the outcome of it
        resumed = make(tmp_path / f"again{step}", second := tried(2), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / folder / f"checkpoint-{step}"))
        assert [look.tried for look in second.history.record.decisions] == [
            look.tried for look in first.history.record.decisions
        ]
        assert_same(whole.model.state_dict(), resumed.model.state_dict())
        assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    tried_ones = first.history.record.decisions[0].tried
    assert tried_ones is not None and len({arm.score for arm in tried_ones.arms}) == 3


def test_the_metric_of_a_trial_gets_the_model_itself(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metric(model: Any) -> float:
        seen.append(model(rows()[0]["input_ids"][None]).logits.shape)
        return -float(sum(parameter.numel() for parameter in model.parameters()))

    trial = Trial(1, candidates=2, metric=metric)
    trainer = make(tmp_path, callback := tried(1, trial=trial), save_strategy="no", num_train_epochs=1)
    trainer.train()
    assert seen == [(1, 6, VOCABULARY)] * 3 and len(callback.history) == 1 and "forward" not in vars(trainer.model)


class OwnLoop(Trainer):  # type: ignore[misc, unused-ignore]
    def _run_epoch(self, **kwargs: Any) -> Any:
        return super()._run_epoch(**kwargs)


def test_a_trial_is_refused_where_the_trainer_makes_its_updates_otherwise(tmp_path: Path) -> None:
    for name, value in (("step", lambda model, optimizer, batch: 0.0), ("batches", [1])):
        with pytest.raises(
            UnsupportedModel, match=rf"^Trial\({name}=\) is not an option in GrowthCallback: a trial trains"
        ):
            tried(1, trial=Trial(2, **{name: value}))
    with pytest.raises(
        UnsupportedModel, match="trial= cannot be used in this training: OwnLoop has its own _run_epoch, which"
    ):
        make(tmp_path, tried(1), cls=OwnLoop)
    with pytest.raises(UnsupportedModel, match=r"the optimizer \(optim='lomo'\) steps inside of the backward pass"):
        make(tmp_path, tried(1), optim="lomo")


# --- the steps that run anyway ---


class Failing(Trainer):  # type: ignore[misc, unused-ignore]
    """Fails in the last update before the check."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
        if self.state.global_step == 7:
            raise RuntimeError("mine")
        return super().training_step(model, inputs, *args)


@pytest.mark.parametrize("what", ["layers", "units"])
def test_watched_updates_decide_as_in_a_loop_of_ones_own(what: str, tmp_path: Path) -> None:
    """Of the last two updates before a check, with batches accumulated and gradients clipped."""
    callback = grow(2, what=what, watch=2)
    model = make_model(**EXACT).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make(
        tmp_path, callback, model=model, cls=OwnLoss, save_strategy="no", train_sampling_strategy="sequential", num_train_epochs=2,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )  # fmt: skip
    trainer.train()
    assert len(callback.history) == 1
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())

    plain = make_model(**EXACT).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    ids = torch.stack([row["input_ids"] for row in rows()])
    grower = Grower(
        plain, optimizer, preset="paper", example={"input_ids": ids[:2]}, trigger=triggers.At(2), tau=0.0, what=what
    )
    plain.train()
    for _ in range(2):
        updates = ids.split(8)
        for index, update in enumerate(updates):
            with grower.watch() if len(updates) - index <= 2 else nullcontext():
                optimizer.zero_grad()
                for batch in update.split(4):
                    (3 * shifted(plain(batch).logits, batch)).backward()  # as OwnLoss, which does not divide either
                nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                optimizer.step()
        grower.step()
    theirs, ours = callback.history.record.decisions[0].merits, grower.history.record.decisions[0].merits
    assert [each.site for each in theirs] == [each.site for each in ours]
    assert [each.value for each in theirs] == pytest.approx(
        [each.value for each in ours], rel=1e-3
    )  # GPT-2 casts to float32


def test_a_training_that_watches_resumes_to_the_bit_and_one_that_fails_leaves_no_hook(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", grow(2, 3, watch=2, what="both"))
    whole.train()
    again = grow(2, 3, watch=2, what="both")
    resumed = make(tmp_path / "again", again)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert len(again.history) == 2
    assert_same(whole.model.state_dict(), resumed.model.state_dict())

    failing = make(tmp_path / "failing", grow(2, watch=2), cls=Failing, save_strategy="no")
    with pytest.raises(RuntimeError, match="mine"):
        failing.train()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in failing.model.modules())
    with pytest.raises(SensliError, match="scores sites in passes of its own"):
        GrowthCallback(triggers.At(2), strategy="llama-pro", watch=2)
