"""The scikit-learn estimators: the library's own checks, and what its users rely on."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_digits, load_wine  # noqa: E402
from sklearn.model_selection import cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from sensli.integrations.sklearn import GrowingClassifier, GrowingRegressor  # noqa: E402

SMALL: dict[str, Any] = {
    "width": 12,
    "max_layers": 2,
    "max_width": 24,
    "max_epochs": 100,
    "learning_rate": 0.03,
    "patience": 3,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore")  # the checks warn on purpose, and about what is not installed
@pytest.mark.parametrize("kind", [GrowingClassifier, GrowingRegressor])
def test_the_librarys_own_checks(kind: Any) -> None:
    results = check_estimator(kind(**SMALL), on_skip=None)
    assert len(results) > 50
    assert {result["status"] for result in results} <= {"passed", "skipped"}


def test_it_grows_while_the_held_out_part_improves_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (600, 2))
    y = np.sin(4 * x[:, 0]) * np.sin(4 * x[:, 1])
    settings: dict[str, Any] = {"width": 16, "random_state": 0, "learning_rate": 0.01}
    model = GrowingRegressor(**settings, max_layers=3, verbose=1).fit(x, y)
    printed = capsys.readouterr().out
    assert model.n_layers_ == 1 + len(model.history_) >= 2
    assert "growth 1: Linear(16, 16) + ReLU after 2" in printed
    assert "1 hidden layers: loss" in printed
    shallow = GrowingRegressor(**settings, max_layers=1).fit(x, y)
    assert model.validation_loss_ < shallow.validation_loss_
    assert model.score(x, y) > shallow.score(x, y)


def test_pipeline_cross_validation_clone_and_pickle() -> None:
    x, y = load_wine(return_X_y=True)
    names = np.array(["a", "b", "c"])[y]
    pipeline = make_pipeline(StandardScaler(), GrowingClassifier(**SMALL, random_state=0))
    assert cross_val_score(pipeline, x, names, cv=3).mean() > 0.9
    fitted = clone(pipeline).fit(x, names)
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.predict_proba(x), fitted.predict_proba(x))
    assert set(fitted.predict(x)) == {"a", "b", "c"}
    assert np.allclose(fitted.predict_proba(x).sum(1), 1)


def test_the_same_seed_gives_the_same_fit_and_leaves_the_users_random_state_alone() -> None:
    x, y = load_digits(return_X_y=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fits = [
        GrowingClassifier(**{**SMALL, "max_epochs": 20}, random_state=1).fit(x, y).predict_proba(x) for _ in range(2)
    ]
    assert np.array_equal(fits[0], fits[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_warm_start_goes_on_with_the_grown_network() -> None:
    x, y = load_digits(return_X_y=True)
    model = GrowingClassifier(**{**SMALL, "max_epochs": 5}, random_state=0, warm_start=True).fit(x, y)
    first, network = model.validation_loss_, model.model_
    model.fit(x, y)
    assert model.model_ is network
    assert model.validation_loss_ < first
    with pytest.raises(ValueError, match="continues with the classes"):
        model.fit(x[y < 5], y[y < 5])


def test_sample_weights_count() -> None:
    x, y = load_wine(return_X_y=True)
    weight = np.where(y == 2, 1e-6, 1.0)
    predicted = GrowingClassifier(**SMALL, random_state=0).fit(x, y, weight).predict(x)
    assert (predicted == 2).mean() < 0.05
    with pytest.raises(ValueError, match="non-zero"):
        GrowingClassifier(**SMALL).fit(x, y, np.zeros(len(y)))


def test_the_last_training_is_on_all_samples(capsys: pytest.CaptureFixture[str]) -> None:
    """The way is found with a part held out; the second time nothing is."""
    x, y = load_digits(return_X_y=True)
    settings: dict[str, Any] = {**SMALL, "max_epochs": 30, "random_state": 0}
    whole = GrowingClassifier(**settings, verbose=1).fit(x, y)
    part = GrowingClassifier(**settings, refit=False).fit(x, y)
    assert f"again on all {len(x)} samples" in capsys.readouterr().out
    assert whole.validation_loss_ == part.validation_loss_  # what decided is the same
    assert [str(growth.site) for growth in whole.history_] == [str(growth.site) for growth in part.history_]
    assert torch.allclose(whole.model_[0].mean, torch.from_numpy(x).mean(0))
    assert not torch.allclose(part.model_[0].mean, torch.from_numpy(x).mean(0))
    assert whole.n_layers_ == part.n_layers_ == 1 + len(whole.history_)


@pytest.mark.parametrize("kind", [GrowingClassifier, GrowingRegressor])
@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("epochs", [1, 7, 13])
def test_there_are_no_more_epochs_than_asked_for(
    kind: Any, refit: bool, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On few data, where an epoch is one step."""
    x, y = load_wine(return_X_y=True)
    steps: list[int] = []
    once = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: steps.append(1) or once(self)
    )  # counted, and really taken
    model = kind(**{**SMALL, "max_epochs": epochs, "refit": refit}, random_state=0).fit(x, y)
    assert model.n_iter_ == epochs
    assert epochs <= len(steps) <= (2 if refit else 1) * epochs


@pytest.mark.parametrize("kind", [GrowingClassifier, GrowingRegressor])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("width", 0),
        ("width", "3"),
        ("width", 2.5),
        ("max_layers", 0),
        ("max_layers", None),
        ("patience", -1),
        ("patience", [1]),
        ("validation_fraction", 1.5),
        ("validation_fraction", "a"),
        ("tau", -1.0),
        ("tau", float("nan")),
        ("learning_rate", 0),
        ("learning_rate", float("inf")),
        ("weight_decay", -1),
        ("batch_size", "all"),
        ("max_epochs", 1e3),
        ("tolerance", 1),
        ("refit", "yes"),
        ("warm_start", 5),
        ("random_state", "a"),
        ("verbose", "loud"),
    ],
)
def test_settings_that_mean_nothing_are_refused_before_anything_is_fitted(kind: Any, name: str, value: Any) -> None:
    x, y = load_wine(return_X_y=True)
    model = kind(**{**SMALL, name: value})
    with pytest.raises(
        ValueError,
        match=re.escape(f"The {name!r} parameter of {kind.__name__} must be ") + rf".* Got {re.escape(repr(value))}",
    ):
        model.fit(x, y)
    assert not hasattr(model, "model_") and not hasattr(model, "classes_") and not hasattr(model, "n_features_in_")
