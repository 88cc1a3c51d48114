"""The Lightning callback with a real Trainer: grows, logs, resumes to the bit."""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402

import ranks  # noqa: E402
from sensli import Grower, Rates, Trial, triggers  # noqa: E402
from sensli.errors import SensliError, UnsupportedModel  # noqa: E402
from sensli.integrations.lightning import GrowthCallback, grow_like  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Module(pl.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(3, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
        )
        self.layers.double()

    def forward(self, x: Any) -> Any:
        return self.layers(x)

    def groups(self) -> Any:
        return self.parameters()

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.groups(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)}


class PerParameter(Module):
    def groups(self) -> Any:
        return [{"params": [p], "lr": 0.01 / (1 + number)} for number, p in enumerate(self.parameters())]


def data(shuffle: bool = False) -> Any:
    x = torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=16, shuffle=shuffle)


def fit(folder: Path, epochs: int, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> tuple[Any, Any]:
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module, train, seed = (
        options.pop("kind", Module)(options.pop("dropout", 0.1)),
        data(options.pop("shuffle", False)),
        options.pop("seed", 7),
    )
    trainer = pl.Trainer(max_epochs=epochs, default_root_dir=folder, callbacks=[*callbacks], **{**settings, **options})
    torch.manual_seed(seed)
    trainer.fit(module, train, data(), ckpt_path=ckpt_path)
    return module, trainer


def test_it_grows_as_a_loop_of_ones_own_would(tmp_path: Path) -> None:
    callback = GrowthCallback(triggers.At(2, 3), preset="paper", tau=0.0, rates=Rates(lr_factor=0.9))
    module, _ = fit(tmp_path, 5, callback, limit_val_batches=0, dropout=0.0)
    assert len(callback.history) == 2

    plain = Module(0.0)
    parts = plain.configure_optimizers()
    optimizer, scheduler = parts["optimizer"], parts["lr_scheduler"]
    x = data().dataset[:][0]
    grower = Grower(
        plain.layers,
        optimizer,
        preset="paper",
        example=x[:1],
        trigger=triggers.At(2, 3),
        tau=0.0,
        rates=Rates(lr_factor=0.9),
        scheduler=scheduler,
    )
    torch.manual_seed(7)
    loader = data()
    for _ in range(5):
        for a, b in loader:
            optimizer.zero_grad()
            cross_entropy(plain(a), b).backward()
            optimizer.step()
        grower.step(loader, cross_entropy)
        scheduler.step()
    theirs = {name.removeprefix("layers."): value for name, value in module.state_dict().items()}
    assert list(theirs) == list(plain.layers.state_dict())
    for name, value in plain.layers.state_dict().items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        ({}, Module),
        ({"rates": Rates(new_lr_factor=0.5)}, Module),
        ({"rates": Rates(freeze_rest=True)}, Module),
        ({}, PerParameter),
    ],
    ids=str,
)
def test_resume_from_a_checkpoint_is_the_same_run_to_the_bit(own: dict[str, Any], kind: Any, tmp_path: Path) -> None:
    """With dropout and a loader that shuffles: the callback saves the random states, which Lightning does not."""
    options: dict[str, Any] = {"tau": 0.0, "select": "random", **own}
    fitting: dict[str, Any] = {"shuffle": True, "kind": kind}
    whole, _ = fit(tmp_path / "a", 7, GrowthCallback(triggers.Every(2), preset="paper", **options), **fitting)
    _, trainer = fit(tmp_path / "b", 5, GrowthCallback(triggers.Every(2), preset="paper", **options), **fitting)
    trainer.save_checkpoint(tmp_path / "at5.ckpt")
    callback = GrowthCallback(triggers.Every(2), preset="paper", **options)
    resumed, _ = fit(tmp_path / "c", 7, callback, ckpt_path=tmp_path / "at5.ckpt", seed=8, **fitting)
    assert len(callback.history) == 3
    assert list(resumed.state_dict()) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("what", ["layers", "units"])
def test_a_warm_up_goes_on_in_a_resumed_fit(what: str, tmp_path: Path) -> None:
    """Saved when what is new has not taken a step yet; an epoch has four steps."""
    runs = []
    for warmup in (6, None):
        rates = Rates(warmup=warmup, depth_power=0.5 if what == "layers" else 0.0)
        options: dict[str, Any] = {"tau": 0.0, "what": what, "preset": "paper", "rates": rates}
        whole, _ = fit(tmp_path / "a", 4, GrowthCallback(triggers.At(2), **options), dropout=0.0)
        _, trainer = fit(tmp_path / "b", 2, GrowthCallback(triggers.At(2), **options), dropout=0.0)
        assert any("warmup_ages" in state for state in trainer.optimizers[0].state.values()) == (warmup is not None)
        trainer.save_checkpoint(tmp_path / "at2.ckpt")
        callback = GrowthCallback(triggers.At(2), **options)
        resumed, trainer = fit(tmp_path / "c", 4, callback, ckpt_path=tmp_path / "at2.ckpt", seed=8, dropout=0.0)
        for name, value in whole.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name]), name
        hooks = trainer.optimizers[0]._optimizer_step_post_hooks
        assert len(callback.history) == 1 and len(hooks) == 1  # which counts the steps; the warm-up's has gone
        runs.append(whole.state_dict())
    assert any(not torch.equal(value, runs[1][name]) for name, value in runs[0].items())


@pytest.mark.parametrize("way", ["whole", "again", "resumed"])
def test_all_steps_of_all_fits_are_counted(way: str, tmp_path: Path) -> None:
    """Also those of the first epoch of a fit, before there is a Grower; an epoch has four steps."""
    told: list[int | None] = []

    class Asked(triggers.Trigger):
        def fires(self, context: triggers.TriggerContext) -> bool:
            told.append(context.steps)
            return False

    callback, saved = GrowthCallback(Asked(), preset="paper"), None
    for epoch in [3] if way == "whole" else [1, 2, 3]:
        if way == "resumed":
            callback = GrowthCallback(Asked(), preset="paper")
        _, trainer = fit(tmp_path, 1 if way == "again" else epoch, callback, ckpt_path=saved)
        if way == "resumed":
            saved = tmp_path / f"{epoch}.ckpt"
            trainer.save_checkpoint(saved)
    assert told == [4, 8, 12]


class Growing(Module):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        grow_like(self, checkpoint)


def test_what_has_grown_is_loaded_by_lightning_itself(tmp_path: Path) -> None:
    callback = GrowthCallback(triggers.Every(2), preset="paper", tau=0.0)
    module, trainer = fit(tmp_path, 2, callback)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    one = {name: value.clone() for name, value in module.state_dict().items()}
    expected = trainer.validate(module, data(), verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, data())  # once more with the same callback: it grows on
    assert len(callback.history) == 2 and len(trainer.optimizers[0].param_groups[0]["params"]) == 10
    trainer.save_checkpoint(tmp_path / "two.ckpt")

    # A class that has the one line, and a Trainer without the callback.
    loaded = Growing.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert {name: value.tolist() for name, value in loaded.state_dict().items()} == {
        name: value.tolist() for name, value in one.items()
    }
    plain = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path)
    assert plain.validate(Growing(), data(), ckpt_path=tmp_path / "one.ckpt", verbose=False) == expected
    # The grown module back to an earlier checkpoint, as with ckpt_path="best", and forth again.
    assert trainer.validate(module, data(), ckpt_path=tmp_path / "one.ckpt", verbose=False) == expected
    assert len(callback.history) == 1 and list(module.state_dict()) == list(one)
    trainer.validate(module, data(), ckpt_path=tmp_path / "two.ckpt", verbose=False)
    assert len(callback.history) == 2
    # Weights of a training that did not grow are what they were.
    fit(tmp_path, 1)[1].save_checkpoint(tmp_path / "none.ckpt")
    assert len(list(Growing.load_from_checkpoint(tmp_path / "none.ckpt").parameters())) == 6


class Direct(Module):
    def training_step(self, batch: Any, index: int) -> Any:
        return cross_entropy(self.layers(batch[0]), batch[1])  # a part of the module, not the module itself


def test_units_grow_where_the_step_calls_parts_of_the_module(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
    }
    merits = []
    for kind in (Module, Direct):
        callback = GrowthCallback(triggers.At(1), preset="paper", tau=0.0, what="units", units=2)
        trainer = pl.Trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=False, **settings)
        trainer.fit(kind(0.0), data())
        merits.append([merit.value for merit in callback.history.record.decisions[0].merits])
        assert callback.history[0].site.kind == "units"
    assert merits[0] == pytest.approx(merits[1], rel=1e-9)


@pytest.mark.parametrize("what", ["units", "both"])
def test_units_grow_in_a_fit_and_a_resumed_one(what: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tau": 0.0, "what": what, "units": 3, "init": "random", "per": "parameters"}
    first = GrowthCallback(triggers.Every(2), preset="paper", **options)
    whole, _ = fit(tmp_path / "a", 7, first, dropout=0.0)
    assert len(first.history) == 3 and first.history[0].site.kind == "units"
    _, trainer = fit(tmp_path / "b", 5, GrowthCallback(triggers.Every(2), preset="paper", **options), dropout=0.0)
    trainer.save_checkpoint(tmp_path / "at5.ckpt")
    callback = GrowthCallback(triggers.Every(2), preset="paper", **options)
    resumed, _ = fit(tmp_path / "c", 7, callback, ckpt_path=tmp_path / "at5.ckpt", dropout=0.0)
    assert [str(growth.site) for growth in callback.history] == [str(growth.site) for growth in first.history]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_metrics_reach_the_logger_and_the_monitored_one_the_trigger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    plateau = triggers.Plateau(patience=1, threshold=10.0)  # nothing ever is an improvement
    callback = GrowthCallback(
        plateau & triggers.Limit(growths=1), preset="paper", monitor="val_loss", tau=0.0, batches=2
    )
    _, trainer = fit(tmp_path, 3, callback, logger=logger, log_every_n_steps=1)
    assert len(callback.history) == 1
    assert (callback.history.record.metric, callback.history.record.step_name) == ("val_loss", "epoch")
    assert callback.grower is not None and callback.grower.last_merits is not None
    assert callback.grower.last_merits.batches == 2
    logged = trainer.logged_metrics
    assert logged["sensli/growths"] == 1
    assert logged["sensli/parameters"] == sum(p.numel() for p in trainer.lightning_module.parameters())
    assert logged["sensli/flops"] > 0
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "sensli/merit" in text and "train_loss" in text
    with pytest.raises(SensliError, match=r"monitor='absent' was not logged.*val_loss"):
        fit(tmp_path, 2, GrowthCallback(plateau, preset="paper", monitor="absent"))


def test_a_trigger_that_watches_a_metric_needs_its_name_from_the_start() -> None:
    for trigger in (
        triggers.Plateau(),
        triggers.Pays() | triggers.Diminishing(),
        triggers.Every(2) & triggers.Plateau(),
    ):
        with pytest.raises(
            ValueError, match=r"^monitor must be the name of a metric \(for example 'val_loss'\) with trigger="
        ):
            GrowthCallback(trigger, preset="paper", what="units", tau=0)
        GrowthCallback(trigger, preset="paper", monitor="val_loss")
    GrowthCallback(triggers.Pays() & triggers.Limit(growths=2), preset="paper")


def test_a_look_leaves_the_random_numbers_of_the_training_alone(tmp_path: Path) -> None:
    """Shuffled data and dropout: a training with looks that insert nothing is the training without them, to the bit."""

    def train(generator: torch.Generator | None, *callbacks: Any) -> Any:
        settings: dict[str, Any] = {
            "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu",
            "default_root_dir": tmp_path,
        }  # fmt: skip
        module = Module(0.3)
        torch.manual_seed(7)
        loader = DataLoader(data().dataset, batch_size=16, shuffle=True, generator=generator)
        pl.Trainer(max_epochs=3, callbacks=[*callbacks], **settings).fit(module, loader)
        return module.state_dict()

    for seed in (None, 5):

        def own(seed: int | None = seed) -> torch.Generator | None:
            return None if seed is None else torch.Generator().manual_seed(seed)

        plain = train(own())
        looked = train(own(), GrowthCallback(triggers.Every(1), preset="paper", tau=1e9, batches=2))
        assert all(torch.equal(value, looked[name]) for name, value in plain.items())


class Frozen(Module):
    """Only the head trains, and the optimizer holds nothing else."""

    def configure_optimizers(self) -> Any:
        self.layers[:4].requires_grad_(False)
        return torch.optim.AdamW(self.layers[5].parameters(), lr=0.01)


def test_a_group_of_the_trainers_optimizer_takes_layers_of_a_frozen_part(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "default_root_dir": tmp_path,
    }  # fmt: skip
    callback = GrowthCallback(triggers.Every(1), preset="paper", tau=0.0)
    with pytest.raises(SensliError, match=r"(?s)nowhere to grow.*nothing would train a layer there.*group="):
        pl.Trainer(max_epochs=1, callbacks=[callback], **settings).fit(Frozen(), data())
    callback = GrowthCallback(triggers.Every(1), preset="paper", tau=0.0, rates=Rates(group=0))
    module = Frozen()
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback], **settings)
    trainer.fit(module, data())
    assert len(callback.history) == 2
    held = trainer.optimizers[0].param_groups[0]["params"]
    assert all(any(p is each for each in held) for p in module.parameters() if p.requires_grad)


def test_what_cannot_be_supported_is_refused(tmp_path: Path) -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    trainer = pl.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", callbacks=[GrowthCallback(triggers.Every(1), preset="paper")]
    )
    with pytest.raises(UnsupportedModel, match="automatic_optimization=False"):
        trainer.fit(Manual(), data())


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_hand_their_weights_back_are_refused_before_training(tmp_path: Path) -> None:
    """The same launcher serves ddp_spawn, ddp_fork and ddp_notebook; forks need not import everything again."""

    class Told(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            (tmp_path / "trained").touch()
            return super().training_step(batch, index)

    settings: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    callback = GrowthCallback(triggers.Every(1), preset="paper", tau=0.0)
    trainer = pl.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", strategy="ddp_fork", devices=2, callbacks=[callback], **settings
    )
    with pytest.raises(ProcessRaisedException, match=r"UnsupportedModel: .*ddp_spawn.*Use strategy='ddp' in a script"):
        trainer.fit(Told(), data())
    assert not (tmp_path / "trained").exists()


# --- trials ---


def tried(*epochs: int, steps: int = 6, **options: Any) -> GrowthCallback:
    # Rows that do not depend on the data: those of one process and of two are then the same.
    given = {"tau": 0.0, "what": "both", "units": 2, "init": "random", "trial": Trial(steps, candidates=2), **options}
    return GrowthCallback(triggers.At(*epochs), preset="paper", **given)


class Clipped(Module):
    """With a scheduler that steps with the optimizer, beside the one of epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_trial_takes_the_steps_of_the_trainer(tmp_path: Path) -> None:
    """As a Grower whose step accumulates, clips and schedules as the Trainer does; what is logged meanwhile goes nowhere."""
    module = Clipped(0.0)
    callback = tried(2)
    settings = {
        "logger": CSVLogger(tmp_path),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = pl.Trainer(
        max_epochs=4, callbacks=[callback], gradient_clip_val=0.05, limit_val_batches=0, log_every_n_steps=1, accumulate_grad_batches=2,
        **settings,
    )  # fmt: skip
    trainer.fit(module, data())
    assert trainer.global_step == 8  # the loop's own

    plain = Clipped(0.0)
    parts = plain.configure_optimizers()
    optimizer, scheduler = parts["optimizer"], parts["lr_scheduler"]["scheduler"]

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        return loss.item()

    grower = Grower(
        plain.layers, optimizer, preset="paper", example=data().dataset[:1][0], trigger=triggers.At(2), tau=0.0, what="both", units=2,
        init="random", scheduler=scheduler, trial=Trial(6, candidates=2, step=step),
    )  # fmt: skip
    joined = list(DataLoader(data().dataset, batch_size=32))
    for _ in range(4):
        for batch in joined:
            step(plain.layers, optimizer, batch)
        grower.step(joined, cross_entropy)
    mine, theirs = (each.history.record.decisions[0].tried for each in (callback, grower))
    assert mine is not None and theirs is not None
    assert [(arm.steps, arm.flops) for arm in mine.arms] == [(arm.steps, arm.flops) for arm in theirs.arms]
    assert mine.winner == theirs.winner
    assert [arm.score for arm in mine.arms] == pytest.approx([arm.score for arm in theirs.arms], rel=1e-9)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])
    for one, other in zip(module.layers.parameters(), plain.layers.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    steps = [row for row in rows if row.split(",")[rows[0].split(",").index("train_loss_step")]]
    assert len(steps) - 1 == 8


def test_a_fit_with_trials_resumes_to_the_bit(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "a", 5, first := tried(1, 4), shuffle=True)
    _, trainer = fit(tmp_path / "b", 2, tried(1, 4), shuffle=True)
    trainer.save_checkpoint(tmp_path / "at2.ckpt")
    resumed, _ = fit(tmp_path / "c", 5, second := tried(1, 4), ckpt_path=tmp_path / "at2.ckpt", shuffle=True, seed=8)
    assert [look.tried for look in first.history.record.decisions] == [
        look.tried for look in second.history.record.decisions
    ]
    assert list(resumed.state_dict()) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_metric_of_a_trial_gets_the_module_itself(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metric(module: Any) -> float:
        seen.append(module(data().dataset[:3][0]).shape)
        return -float(sum(parameter.numel() for parameter in module.parameters()))

    module, _ = fit(tmp_path, 1, callback := tried(1, trial=Trial(2, candidates=2, metric=metric)))
    assert seen == [(3, 2)] * 3 and len(callback.history) == 1 and "forward" not in vars(module)


class Careful(Module):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


def test_a_trial_is_refused_where_the_trainer_steps_otherwise(tmp_path: Path) -> None:
    for name in ("step", "batches"):
        with pytest.raises(
            UnsupportedModel, match=rf"^Trial\({name}=\) is not an option in GrowthCallback: a trial trains with"
        ):
            tried(1, trial=Trial(2, **{name: (lambda model, optimizer, batch: 0.0) if name == "step" else [1]}))
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[tried(1)], logger=False, accelerator="cpu", enable_progress_bar=False, default_root_dir=tmp_path
    )  # fmt: skip
    with pytest.raises(
        UnsupportedModel,
        match="trial= cannot be used in this training: the module has its own optimizer_step, which the steps",
    ):
        trainer.fit(Careful(), data())


def size_of(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def tried_on(processes: int, by_size: bool) -> dict[str, Any]:
    """A fit with trials on the same joined batches, whatever the number of processes: samples are dealt out in turn."""
    decided: dict[str, Any] = {"metric": size_of, "mode": "max"} if by_size else {}
    module, callback = Clipped(0.0), tried(1, 2, trial=Trial(3, candidates=2, **decided))
    samples, rank = data().dataset, dist.get_rank() if processes > 1 else 0
    trainer = pl.Trainer(
        max_epochs=3, callbacks=[callback], gradient_clip_val=0.05, limit_val_batches=0, accelerator="cpu",
        strategy="ddp" if processes > 1 else "auto", devices=processes, use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, accumulate_grad_batches=2,
    )  # fmt: skip
    dealt = DistributedSampler(samples, processes, rank, shuffle=False)
    trainer.fit(module, DataLoader(samples, batch_size=16 // processes, sampler=dealt))
    looks = [look.tried for look in callback.history.record.decisions if look.tried is not None]
    assert trainer.world_size == processes and len(looks) == 2
    return {
        "model": dict(module.state_dict()),
        "arms": [(arm.name, arm.steps, arm.flops) for look in looks for arm in look.arms],
        "scores": [arm.score for look in looks for arm in look.arms],
        "winners": [look.winner for look in looks],
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }


EXAMPLE = Path(__file__).parents[2] / "examples" / "12_lightning.py"


def example_on_this_rank() -> str:
    """What the example for several processes prints here."""
    with redirect_stdout(io.StringIO()) as printed, patch.object(sys, "argv", [EXAMPLE.name, "2"]):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def in_two_processes() -> tuple[list[Any], list[str]]:
    found = [tried_on(dist.get_world_size(), by_size) for by_size in (False, True)]
    for each in found:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, each)
        assert told[0]["winners"] == told[1]["winners"] and told[0]["scores"] == told[1]["scores"]
        assert all(torch.equal(value, told[1]["model"][name]) for name, value in told[0]["model"].items())
    printed = [""] * dist.get_world_size()
    dist.all_gather_object(printed, example_on_this_rank())
    return found, printed


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes found, which import Lightning once for all that they do."""
    return ranks.run(in_two_processes, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.process
def test_the_example_in_two_processes(two_processes: Any) -> None:
    _, printed = two_processes
    sums = [text.split("sum of weights ")[1].split()[0] for text in printed]
    assert all(f"rank {rank}: 2 growths" in text for rank, text in enumerate(printed))
    assert len(sums) == 2 and sums[0] == sums[1]


@pytest.mark.process
def test_trials_in_two_processes_keep_what_one_process_keeps(two_processes: Any) -> None:
    for by_size, found in enumerate(two_processes[0]):
        expected = tried_on(1, bool(by_size))
        for name in ("arms", "winners", "rate"):
            assert found[name] == expected[name], name
        assert found["scores"] == pytest.approx(expected["scores"], rel=1e-9)
        assert all(expected["winners"]) or not by_size  # the largest has grown
        assert list(found["model"]) == list(expected["model"])
        for name, value in expected["model"].items():
            torch.testing.assert_close(found["model"][name], value, rtol=1e-9, atol=1e-11)


# --- the steps that run anyway ---


@pytest.mark.parametrize(("what", "kind", "accumulate"), [("layers", Module, 2), ("units", Direct, 1)])
def test_watched_steps_decide_as_in_a_loop_of_ones_own(what: str, kind: Any, accumulate: int, tmp_path: Path) -> None:
    """Of the last two updates before a check; a step that calls parts of the module is watched too, and logs as ever."""
    options: dict[str, Any] = {"preset": "paper", "tau": 0.0, "what": what}
    callback, logged = GrowthCallback(triggers.At(2, 3), watch=2, **options), []

    class Logged(kind):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, index: int) -> Any:
            self.log("mine", 1.0)
            return super().training_step(batch, index)

        def on_train_batch_end(self, *_: Any) -> None:
            logged.append(float(self.trainer.callback_metrics.pop("mine")))

    module, _ = fit(
        tmp_path, 3, callback, limit_val_batches=0, dropout=0.0, kind=Logged, accumulate_grad_batches=accumulate
    )
    assert len(callback.history) == 2 and len(logged) == 12 and "training_step" not in vars(module)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())

    plain, loader = Module(0.0), data()
    parts = plain.configure_optimizers()
    optimizer, scheduler = parts["optimizer"], parts["lr_scheduler"]
    grower = Grower(
        plain.layers,
        optimizer,
        example=data().dataset[:2][0],
        trigger=triggers.At(2, 3),
        scheduler=scheduler,
        **options,
    )
    for _ in range(3):
        updates = list(zip(*[iter(loader)] * accumulate, strict=True))
        for index, update in enumerate(updates):
            with grower.watch() if len(updates) - index <= 2 else nullcontext():
                optimizer.zero_grad()
                for a, b in update:
                    (cross_entropy(plain(a), b) / accumulate).backward()
                optimizer.step()
        grower.step()
        scheduler.step()
    merits = [look.merits for look in grower.history.record.decisions]
    for theirs, ours in zip((look.merits for look in callback.history.record.decisions), merits, strict=True):
        assert [each.value for each in theirs] == pytest.approx([each.value for each in ours], rel=1e-9)
    for (_, one), (_, other) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_fit_that_watches_resumes_to_the_bit_and_a_step_that_fails_leaves_no_hook(tmp_path: Path) -> None:
    def callback() -> GrowthCallback:
        return GrowthCallback(triggers.At(2, 4), preset="paper", tau=0.0, watch=2)

    whole, _ = fit(tmp_path, 5, callback(), limit_val_batches=0)
    _, trainer = fit(tmp_path, 3, callback(), limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again = callback()
    resumed, _ = fit(tmp_path, 5, again, limit_val_batches=0, ckpt_path=tmp_path / "half.ckpt", seed=99)
    assert len(again.history) == 2
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)

    made: list[Any] = []

    class Failing(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            made[:] = [self]
            if self.current_epoch == 1 and index == 3:
                raise RuntimeError("mine")
            return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match="mine"):
        fit(tmp_path, 3, callback(), limit_val_batches=0, kind=Failing)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in made[0].modules())
    assert "training_step" not in vars(made[0])


def test_steps_that_cannot_be_watched_are_refused(tmp_path: Path) -> None:
    for options, text in (
        ({"watch": 0}, "watch must be"),
        ({"watch": 2, "batches": 3}, "batches must be left out with watch=2"),
        ({"watch": 2, "strategy": "gradmax"}, "scores sites in passes of its own"),
    ):
        with pytest.raises((ValueError, SensliError), match=text):
            GrowthCallback(triggers.At(2), **options)
    endless = DataLoader(Endless(), batch_size=8)
    trainer = pl.Trainer(
        max_epochs=1, default_root_dir=tmp_path, callbacks=[GrowthCallback(triggers.At(1), watch=2)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="this training loader has no length"):
        trainer.fit(Module(), endless)


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield from zip(*data().dataset[:], strict=True)
