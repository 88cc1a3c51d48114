"""What other libraries do on the accelerator of device.cpp: Lightning's Trainer, the estimators for scikit-learn."""

from __future__ import annotations

import pickle
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from sensli import Trial, triggers
from sensli.integrations.lightning import GrowthCallback
from sensli.integrations.sklearn import GrowingClassifier, GrowingRegressor

SIM = torch.device("sim", 0)


class OnSim(Accelerator):
    """What Lightning must be told of a device that it does not know."""

    def setup_device(self, device: torch.device) -> None:
        torch.sim.set_device(device)

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [SIM]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(2, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        assert batch[0].device == SIM
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trial", [None, Trial(steps=2)], ids=["plain", "trial"])
def test_lightning_grows_there(trial: Any) -> None:
    x = torch.randn(64, 2)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)
    module = Module()
    growth = GrowthCallback(triggers.At(1, 2), preset="paper", tau=0.0, what="both", trial=trial)
    before = sum(p.numel() for p in module.parameters())
    trainer = pl.Trainer(
        max_epochs=3, strategy=SingleDeviceStrategy(SIM, accelerator=OnSim()), callbacks=[growth],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    looks = growth.history.record.decisions
    assert len(looks) == 2 and all(look.merits or look.tried for look in looks)
    if trial is None:
        assert sum(p.numel() for p in module.parameters()) > before


OPTIONS: dict[str, Any] = {"members": 2, "width": 8, "max_epochs": 30, "patience": 2, "batch_size": 40}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("kind", [GrowingClassifier, GrowingRegressor])
def test_the_estimators_train_there_and_predict_everywhere(kind: Any) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 3))
    y = (x[:, 0] * x[:, 1] > 0).astype(int) if kind is GrowingClassifier else x[:, 0] * x[:, 1]
    before = [torch.get_rng_state(), torch.sim.get_rng_state(0)]
    here = kind(**OPTIONS, random_state=0).fit(x, y)
    there = kind(**OPTIONS, random_state=0, device="sim").fit(x, y)
    assert all(map(torch.equal, before, [torch.get_rng_state(), torch.sim.get_rng_state(0)]))
    assert there.widths_ == here.widths_ and len(there.history_) == len(here.history_)
    expected = here.predict_proba(x) if kind is GrowingClassifier else here.predict(x)
    found = there.predict_proba(x) if kind is GrowingClassifier else there.predict(x)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)
    for _ in range(2):
        there.partial_fit(x, y)
        assert there._stacked.flat.device == SIM
        stored = pickle.dumps(there.set_params(device="cpu"))
        assert b"sim:" in pickle.dumps(there._stacked.flat) and b"sim:" not in stored  # any machine can read it
        again = pickle.loads(stored)
        assert {each.device.type for each in again.model_.parameters()} == {"cpu"}
        np.testing.assert_array_equal(again.predict(x), there.predict(x))
        again.partial_fit(x, y)
        there.set_params(device="sim:0")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device must be one that torch finds on this machine.*'sim:7'"):
        GrowingClassifier(device="sim:7").fit(np.zeros((60, 2)), np.arange(60) % 2)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_default_device_changes_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(80, 3))
    expected = GrowingRegressor(**OPTIONS, random_state=0).fit(x, x[:, 0])
    with torch.device(SIM):
        found = GrowingRegressor(**OPTIONS, random_state=0).fit(x, x[:, 0])
        np.testing.assert_array_equal(found.predict(x), expected.predict(x))
