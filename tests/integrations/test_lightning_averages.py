"""Averages of Lightning, and what else its callbacks keep of a module, with a real Trainer: they follow a growth, or are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from sensli import Rates, Trial, triggers  # noqa: E402
from sensli.errors import UnsupportedModel  # noqa: E402
from sensli.integrations.lightning import GrowthCallback, grow_like  # noqa: E402
from tables import through_axes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers

X = torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SAMPLES = TensorDataset(X, (X[:, 0] * X[:, 1] > 0).long())


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Module(pl.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
    """The head comes first among the parameters, so that pairs by position go wrong without an error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 2)
        self.backbone = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.prepare()
        self.double()

    def prepare(self) -> None:
        pass

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, index: int) -> Any:
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.02)


class Holding(Module):
    """An average of a part, inside of the module and in its own hands."""

    def prepare(self) -> None:
        self.ema = AveragedModel(self.backbone, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.ema.update_parameters(self.backbone)


def fit(module: Any, folder: Path, epochs: int, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Any:
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    seed = options.pop("seed", 7)
    trainer = pl.Trainer(max_epochs=epochs, default_root_dir=folder, callbacks=[*callbacks], **{**settings, **options})
    torch.manual_seed(seed)
    loader = DataLoader(SAMPLES, batch_size=16, shuffle=True)
    trainer.fit(module, loader, DataLoader(SAMPLES, batch_size=32), ckpt_path=ckpt_path)
    return trainer


def growing(*epochs: int, **options: Any) -> GrowthCallback:
    units = {"init": "random", "units": 2} if options.get("what") in ("units", "both") else {}
    return GrowthCallback(triggers.At(*epochs), preset="paper", **{"tau": 0.0, **units, **options})


def values(module: nn.Module, buffers: bool) -> dict[str, Tensor]:
    named = dict(module.named_parameters()) | (dict(module.named_buffers()) if buffers else {})
    return {name: tensor.detach() for name, tensor in named.items() if tensor.is_floating_point()}


class ByName(pl.Callback):  # type: ignore[misc, name-defined, unused-ignore]
    """The slow way: an average of each tensor by its name, extended by the module's values where the module has grown."""

    def __init__(self, share: Any, buffers: bool, *, epochs: int | None = None) -> None:
        self.said = [share, buffers, epochs, {}, 0]  # in a list, because it is no average to be found

    def extend(self, module: nn.Module) -> None:
        _, buffers, _, mean, _ = self.said
        for name, value in values(module, buffers).items():
            new = value.clone()
            if name in mean:
                new[tuple(slice(0, size) for size in mean[name].shape)] = mean[name]
            mean[name] = new

    def update(self, module: nn.Module) -> None:
        share, buffers, _, mean, number = self.said
        for name, value in values(module, buffers).items():
            mean[name] = mean[name] + share(number) * (value - mean[name]) if number else value.clone()
        self.said[4] += 1

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if self.said[2] is None:
            self.update(module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.said[2] is not None and trainer.current_epoch >= self.said[2]:
            self.update(module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.extend(module)


WHAT: dict[str, dict[str, Any]] = {
    "layers": {"form": "residual"},
    "units": {"what": "units"},
    "both": {"what": "both", "max_growths": 2},
    "a trial": {
        "what": "both",
        "trial": Trial(2, candidates=2, metric=lambda model: -sum(p.numel() for p in model.parameters())),
    },
}


@pytest.mark.parametrize(("what", "first"), through_axes([*WHAT], [False, True]))
def test_the_average_of_lightning_follows(what: str, first: bool, tmp_path: Path) -> None:
    buffers = what != "units"
    module, growth = Module(), growing(2, 4, **WHAT[what])
    averaging = EMAWeightAveraging(decay=0.9, use_buffers=buffers)
    expected = ByName(lambda number: 0.1, buffers)
    fit(module, tmp_path, 6, *([growth, averaging] if first else [averaging, growth]), expected)
    assert growth.history and averaging._average_model is not None
    assert [n for n, _ in averaging._average_model.module.named_parameters()] == [
        n for n, _ in module.named_parameters()
    ]
    # Lightning has put the average into the module. Where a trial has trained what is new, its average begins before these steps.
    now, trained = values(module, buffers), WHAT[what].get("trial") is not None
    for name in ["head.bias"] if trained else now:
        torch.testing.assert_close(now[name], expected.said[3][name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("what", ["layers", "units"])
def test_stochastic_weight_averaging_follows(what: str, tmp_path: Path) -> None:
    """It keeps a plain copy of the module, exchanges the scheduler and runs an epoch more, in which nothing grows."""
    module, growth = Module(), growing(1, 3, 4, 6, 7, rates=Rates(lr_factor=0.5), **WHAT[what])
    averaging = StochasticWeightAveraging(
        swa_lrs=0.01, swa_epoch_start=3, annealing_epochs=1, annealing_strategy="linear"
    )
    expected = ByName(lambda number: 1 / (number + 1), False, epochs=2)
    mean = expected.said[3]
    trainer = fit(module, tmp_path, 6, averaging, growth, expected)
    assert [each.call for each in growth.history] == [1, 3, 4, 6]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.detach(), mean[name], rtol=1e-9, atol=1e-11)


def averaged_in(kind: str) -> tuple[Any, list[Any]]:
    if kind == "ema":
        return Module(), [EMAWeightAveraging(decay=0.9)]
    if kind == "swa":
        return Module(), [WeightAveraging(use_buffers=False)]
    if kind == "stochastic":
        return Module(), [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)]
    return Holding(), [EMAWeightAveraging(decay=0.9)] if kind == "inside, and of the whole" else []


@pytest.mark.parametrize(
    ("kind", "what"),
    through_axes(["ema", "swa", "stochastic", "inside", "inside, and of the whole"], ["layers", "units"]),
)
def test_a_resumed_fit_has_the_average_to_the_bit(kind: str, what: str, tmp_path: Path) -> None:
    def run(name: str, epochs: int, **options: Any) -> tuple[Any, Any]:
        module, callbacks = averaged_in(kind)
        return module, fit(module, tmp_path / name, epochs, *callbacks, growing(1, 3, **WHAT[what]), **options)

    whole, _ = run("a", 5)
    keep = ModelCheckpoint(tmp_path, filename="at2", every_n_epochs=2, save_top_k=-1, enable_version_counter=False)
    module, callbacks = averaged_in(kind)
    fit(module, tmp_path / "b", 2 if kind != "stochastic" else 5, *callbacks, growing(1, 3, **WHAT[what]), keep)
    saved = sorted(tmp_path.glob("at2*.ckpt"))[0]
    resumed, _ = run("c", 5, ckpt_path=saved, seed=8)
    assert list(resumed.state_dict()) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("given", [False, True])
def test_averages_in_the_hands_of_the_module_follow(given: bool, tmp_path: Path) -> None:
    """Registered, given to the callback, hidden in a list, or in a callback."""

    class Own(pl.Callback):  # type: ignore[misc, name-defined, unused-ignore]
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.average = AveragedModel(module.backbone, avg_fn=get_ema_avg_fn(0.9))

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            self.average.update_parameters(module.backbone)
            module.hidden[0].update_parameters(module.head)

    module, own = Holding(), Own()
    module.hidden = [AveragedModel(module.head)]
    growth = growing(1, 2, what="both", max_growths=2, **({"averaged": module.ema} if given else {}))
    fit(module, tmp_path, 3, growth, own)
    assert len(growth.history) >= 3
    names = [(name, parameter.shape) for name, parameter in module.backbone.named_parameters()]
    for average in (module.ema, own.average):
        assert [(name, parameter.shape) for name, parameter in average.module.named_parameters()] == names
    assert module.hidden[0].module.weight.shape == module.head.weight.shape


class Shadow(pl.Callback):  # type: ignore[misc, name-defined, unused-ignore]
    """Averages by other means."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_start(self, trainer: Any, module: Any) -> None:
        parameters = [parameter.detach().clone() for parameter in module.parameters()]
        if self.kind == "a list":
            self.shadow: Any = parameters
        elif self.kind == "names":
            self.shadow = copy.deepcopy(module.state_dict())
        elif self.kind == "an object":
            self.shadow = type("EMA", (), {})()
            self.shadow.params = parameters
        elif self.kind == "another model":
            self.shadow = AveragedModel(nn.Linear(2, 2))
        elif self.kind == "a wrapper":
            self.shadow = nn.Module()
            self.shadow.ema_model = copy.deepcopy(module)
        elif self.kind == "a part":
            self.shadow = copy.deepcopy(module.backbone)
        else:
            self.shadow = [*module.parameters(), nn.Linear(8, 8)]  # the parameters themselves, and something else


class Teaching(Module):
    """A teacher made by hand, whose parameters may be in the optimizer too: no gradient comes to them."""

    frozen, moves = True, True

    def prepare(self) -> None:
        self.teacher = copy.deepcopy(self.backbone).requires_grad_(not self.frozen)
        self.others = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])  # alike, and trained
        self.others[1].load_state_dict(self.others[0].state_dict())

    def forward(self, x: Any) -> Any:
        seen = self.backbone(x)
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.head(self.others[1](self.others[0](seen))) + (seen - wanted)[:, :2]

    def on_train_batch_end(self, *args: Any) -> None:
        for mean, parameter in zip(self.teacher.parameters(), self.backbone.parameters(), strict=self.moves):
            mean.data.lerp_(parameter.data, 0.01 if self.moves else 0.0)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_teacher_made_by_hand_is_refused_after_one_step(frozen: bool, tmp_path: Path) -> None:
    module = type("Teaching", (Teaching,), {"frozen": frozen})()
    with pytest.raises(
        UnsupportedModel,
        match=r"^'teacher' began as a copy of 'backbone' and changes .*AveragedModel\(backbone\)",
    ):
        trainer = pl.Trainer(
            max_epochs=1, callbacks=[growing(1)], logger=False, accelerator="cpu", default_root_dir=tmp_path
        )
        trainer.fit(module, DataLoader(SAMPLES, batch_size=16))
    assert trainer.global_step == 1
    # A copy that stays as it is, a reference model, is not one, and need not follow.
    still = type("Still", (Teaching,), {"frozen": frozen, "moves": False})()
    fit(still, tmp_path, 2, growth := growing(1, where="backbone"))
    assert len(growth.history) == 1


def test_what_cannot_follow_is_refused_before_the_first_step(tmp_path: Path) -> None:
    steps: list[int] = []

    class Counted(Module):
        def on_train_batch_end(self, *args: Any) -> None:
            steps.append(1)

    for kind in ("a list", "names", "an object", "a wrapper", "a part"):
        for order in (1, -1):
            with pytest.raises(
                UnsupportedModel, match=r"^Shadow\.shadow keeps the values of .* Average by EMAWeightAver"
            ):
                fit(Counted(), tmp_path, 1, *[growing(1), Shadow(kind)][::order])
    with pytest.raises(UnsupportedModel, match=r"^Shadow\.shadow is an average whose parameters are not those of this"):
        fit(Counted(), tmp_path, 1, growing(1), Shadow("another model"))
    with pytest.raises(UnsupportedModel, match=r"^ModelPruning keeps masks .* Prune the module when"):
        fit(Counted(), tmp_path, 1, growing(1), ModelPruning("l1_unstructured", amount=0.5))
    assert not steps
    fit(Counted(), tmp_path, 1, growing(1), Shadow("harmless"))
    assert steps


class Unfreezing(Module):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


@pytest.mark.parametrize("own", [{}, {"rates": Rates(new_lr_factor=0.5)}], ids=str)
@pytest.mark.parametrize("first", [False, True], ids=["finetuning first", "growth first"])
def test_a_backbone_that_is_unfrozen_resumes(own: dict[str, Any], first: bool, tmp_path: Path) -> None:
    """It remembers the groups of the optimizer by names, from which they are made again."""

    def run(name: str, epochs: int, **options: Any) -> tuple[Any, Any]:
        module = Unfreezing()
        finetuning, growth = BackboneFinetuning(1, backbone_initial_lr=0.01, verbose=False), growing(2, 3, **own)
        callbacks = [growth, finetuning] if first else [finetuning, growth]
        rates = LearningRateMonitor("epoch")
        logger = CSVLogger(tmp_path / name)
        return module, fit(module, tmp_path / name, epochs, *callbacks, rates, logger=logger, **options)

    _, trainer = run("b", 3)
    trainer.save_checkpoint(tmp_path / "at3.ckpt")
    expected = [[tuple(p.shape) for p in group["params"]] for group in trainer.optimizers[0].param_groups]
    _, resumed = run("c", 4, ckpt_path=tmp_path / "at3.ckpt")
    groups = resumed.optimizers[0].param_groups
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == expected
    held = {id(p) for group in groups for p in group["params"]}
    assert all(id(parameter) in held for parameter in resumed.lightning_module.parameters())


class Growing(Module):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        grow_like(self, checkpoint)


def test_a_checkpoint_of_weights_alone_has_the_growths(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_weights_only=True, save_top_k=-1)
    module, growth = Module(), growing(1, 2)
    trainer = fit(module, tmp_path, 2, growth, keep)
    first, last = sorted(tmp_path.glob("epoch*.ckpt"))
    one, two = (len(list(Growing.load_from_checkpoint(path).parameters())) for path in (first, last))
    assert one < two == len(list(module.parameters()))
    trainer.validate(module, DataLoader(SAMPLES, batch_size=32), ckpt_path=first, verbose=False)
    assert len(list(module.parameters())) == one
