"""The scikit-learn estimators: the library's own checks, and what its users rely on."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sensli import replay
from sensli.page import page_data, write_page
from sensli.surgery.history import History

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_digits, load_wine  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.model_selection import cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from sensli.integrations import fitting  # noqa: E402
from sensli.integrations.fitting import (  # noqa: E402
    FoldData,
    Stacked,
    train_on,
)
from sensli.integrations.sklearn import (  # noqa: E402
    GrowingClassifier,
    GrowingRegressor,
    best_temperature,
    networks,
)

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


pytestmark = pytest.mark.filterwarnings("ignore:Growing.*max_epochs")  # most of these fits are short on purpose


def waves(samples: int = 400) -> tuple[Any, Any]:
    """What one narrow layer cannot do."""
    x = np.random.default_rng(0).uniform(-1, 1, (samples, 2))
    return x, np.sin(4 * x[:, 0]) * np.sin(4 * x[:, 1])


@pytest.fixture(scope="module")
def grown() -> GrowingRegressor:
    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "members": 3,
        "layers": 1,
        "width": 16,
        "max_width": 32,
        "learning_rate": 0.01,
        "bins": 1,
    }
    return GrowingRegressor(**settings, random_state=0).fit(*waves())


@pytest.mark.filterwarnings("ignore")  # the checks warn on purpose, and about what is not installed
@pytest.mark.parametrize("kind", [GrowingClassifier, GrowingRegressor])
def test_the_librarys_own_checks(kind: Any) -> None:
    results = check_estimator(kind(**{**SMALL, "members": 2, "max_epochs": 40}), on_skip=None)
    assert len(results) > 50
    assert {result["status"] for result in results} <= {"passed", "skipped"}


def test_it_grows_while_the_held_out_samples_improve_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = waves(600)
    fixed: dict[str, Any] = {
        "members": 3, "layers": 1, "width": 16, "max_width": 16, "learning_rate": 0.01, "max_epochs": 300, "bins": 1,
    }  # fmt: skip
    model = GrowingRegressor(**fixed, max_layers=2, random_state=0, verbose=1).fit(x, y)
    printed = capsys.readouterr().out
    assert model.n_layers_ == 1 + len(model.history_) == 2
    assert "growth 1: Linear(16, 16) + ReLU after 1" in printed
    assert "hidden layers: 1, loss" in printed
    shallow = GrowingRegressor(**fixed, max_layers=1, random_state=0).fit(x, y)
    assert model.validation_loss_ < shallow.validation_loss_
    assert model.score(x, y) > shallow.score(x, y)


def test_it_widens_where_no_more_layers_are_allowed() -> None:
    settings: dict[str, Any] = {
        "members": 2,
        "layers": 1,
        "width": 4,
        "max_layers": 1,
        "max_width": 8,
        "learning_rate": 0.03,
    }
    model = GrowingRegressor(**settings, random_state=0).fit(*waves())
    assert model.n_layers_ == 1 and model.widths_ == (8,)
    assert [growth.site.kind for growth in model.history_] == ["units"]


def test_all_networks_have_the_grown_shape_and_the_history_leads_to_it(grown: GrowingRegressor) -> None:
    assert len(grown.history_) > 0
    shapes = [[tuple(weight.shape) for weight in member.parameters()] for member in grown.model_.members]
    assert shapes[0] == shapes[1] == shapes[2]
    fresh = replay(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)), grown.history_)
    fresh.double().load_state_dict(grown.model_.members[2].state_dict())
    x = torch.randn(3, 2, dtype=torch.float64)
    assert torch.equal(fresh(x), grown.model_.members[2](x))


def test_the_record_has_the_real_epochs_and_the_page_shows_it(grown: GrowingRegressor, tmp_path: Path) -> None:
    record = grown.history_.record
    epochs = [growth.details["epoch"] for growth in grown.history_]
    kept = [look for look in record.decisions if look.growths]
    taken_out = [look for look in record.decisions if not look.growths]
    assert sorted(set(epochs)) == [look.call for look in kept]
    assert all(1 < epoch < grown.n_iter_ == record.calls for epoch in epochs)
    assert taken_out and all("took it out again at epoch" in look.reason for look in taken_out)  # the last tries
    calls = [call for call, _ in record.metrics]
    assert calls == sorted(set(calls)) and calls[-1] == grown.n_iter_
    # What was reached while a growth was tried does not count if it was taken out again.
    tries = [(look.call, int(re.findall(r"at epoch (\d+)", look.reason)[0])) for look in taken_out]
    lasting = [value for call, value in record.metrics if not any(start < call <= end for start, end in tries)]
    assert min(value for value in lasting if value is not None) == grown.validation_loss_
    page = write_page(tmp_path / "growth.html", page_data(grown.history_))
    assert "took it out again" in page.read_text() and "Validation loss: " in page.read_text()


def test_networks_trained_together_are_those_trained_alone() -> None:
    torch.manual_seed(0)
    together = [network.double() for network in networks(3, [4, 5, 2])]
    alone = copy.deepcopy(together)
    x, y = torch.randn(3, 20, 4, dtype=torch.float64), torch.randn(3, 20, 2, dtype=torch.float64)
    stacked = Stacked(together, 0.01, 0.1)
    for _ in range(5):
        stacked.step((stacked.forward(x) - y).square().mean((1, 2)).sum())
    stacked.write(stacked.flat)
    for network, before, inputs, target in zip(together, alone, x, y, strict=True):
        optimizer = torch.optim.AdamW(before.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (before(inputs) - target).square().mean().backward()
            optimizer.step()
        for mine, other in zip(network.parameters(), before.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=0, atol=1e-12)


def test_every_sample_is_held_out_once_and_few_samples_never() -> None:
    model = GrowingClassifier()
    y = np.arange(60) % 3
    rows, held_out = model._folds(y, 0, 5)
    assert sorted(torch.cat(held_out).tolist()) == list(range(60))
    assert all(set(train.tolist()).isdisjoint(rest.tolist()) for train, rest in zip(rows, held_out, strict=True))
    assert all(len(train) + len(rest) == 60 for train, rest in zip(rows, held_out, strict=True))
    rows, held_out = model._folds(y[:49], 0, 5)
    assert held_out == [] and all(train.tolist() == list(range(49)) for train in rows)
    x, target = waves(40)
    assert len(GrowingRegressor(**SMALL, random_state=0).fit(x, target).history_) == 0


def test_what_is_held_out_does_not_train() -> None:
    """Other targets of the samples that the first network holds out leave that network as it is."""
    x, y = waves(60)
    rows = [torch.arange(30), torch.arange(30, 60)]
    ends = []
    for shift in (0.0, 5.0):
        torch.manual_seed(0)
        members = networks(2, [2, 4, 1])
        target = torch.tensor(y).float()[:, None]
        target[30:] += shift
        data = FoldData(torch.tensor(x).float(), target, torch.ones(60), rows, rows[::-1])
        stacked = Stacked(members, 0.01, 0.0)
        for _ in range(3):
            train_on(stacked, data, GrowingRegressor()._losses, 200)
        stacked.write(stacked.flat)
        ends.append([member[0].weight.clone() for member in members])
    assert torch.equal(ends[0][0], ends[1][0]) and not torch.equal(ends[0][1], ends[1][1])


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


def test_warm_start_continues_with_the_grown_networks() -> None:
    x, y = load_digits(return_X_y=True)
    model = GrowingClassifier(**{**SMALL, "max_epochs": 5}, random_state=0, warm_start=True).fit(x, y)
    first, curve = model.validation_loss_, model.loss_curve_
    model.fit(x, y)
    assert model.validation_loss_ < first
    assert model.loss_curve_[:5] == curve and model.n_iter_ == 10 == model.history_.record.calls
    before = model.predict_proba(x)
    with pytest.raises(ValueError, match=r"GrowingClassifier\(warm_start=True\) continues with the classes"):
        model.fit(x[y < 5], y[y < 5])
    assert np.array_equal(model.predict_proba(x), before)


def test_classes_are_weighted() -> None:
    x, y = load_wine(return_X_y=True)
    balanced = GrowingClassifier(**SMALL, random_state=0, class_weight="balanced").fit(x, y)
    by_hand = GrowingClassifier(**SMALL, random_state=0).fit(x, y, 178 / 3 / np.bincount(y)[y])
    assert np.allclose(balanced.predict_proba(x), by_hand.predict_proba(x))
    rare = GrowingClassifier(**SMALL, random_state=0, class_weight={0: 1.0, 1: 1.0, 2: 1e-6}).fit(x, y)
    assert (rare.predict(x) == 2).mean() < 0.05
    with pytest.raises(ValueError, match="The 'class_weight' parameter of GrowingClassifier must be"):
        GrowingClassifier(class_weight="equal").fit(x, y)


def test_labels_are_smoothed_as_asked() -> None:
    x, y = load_wine(return_X_y=True)
    model = GrowingClassifier(**SMALL, random_state=0).fit(x, y)
    assert model.predict_proba(x).min() < 1e-3  # the held-out samples say that it may be surer than it was taught to be
    assert np.allclose(model.predict_proba(x).sum(1), 1)
    plain, smoothed = (
        GrowingClassifier(**SMALL, random_state=0, label_smoothing=share).fit(x[::4], y[::4]).predict_proba(x)
        for share in (0.0, 0.3)
    )
    assert plain.min() < 1e-3 and smoothed.min() > 0.01
    with pytest.raises(ValueError, match="The 'label_smoothing' parameter of GrowingClassifier must be a float in"):
        GrowingClassifier(label_smoothing=1.0).fit(x, y)


@pytest.mark.parametrize("kind", [GrowingClassifier, GrowingRegressor])
def test_partial_fit_learns_and_continues_from_a_pickle(kind: Any) -> None:
    x, y = load_wine(return_X_y=True)
    more: dict[str, Any] = {"classes": [0, 1, 2]} if kind is GrowingClassifier else {}
    plain = {"label_smoothing": 0.0} if kind is GrowingClassifier else {}  # whose loss can fall to zero
    model = kind(**{**SMALL, "batch_size": 50, **plain}, random_state=0)
    for _ in range(3):
        model.partial_fit(x, y, **more)
    copied = pickle.loads(pickle.dumps(model))
    for each in (model, copied):
        each.partial_fit(x, y)
    assert np.array_equal(model.predict(x), copied.predict(x)) and model.loss_curve_ == copied.loss_curve_
    for _ in range(20):
        model.partial_fit(x, y)
    assert model.loss_curve_[-1] < 0.2 * model.loss_curve_[0]
    assert model.n_iter_ == len(model.loss_curve_) == 24 and len(model.history_) == 0
    assert model.score(x, y) > 0.9


def test_partial_fit_after_fit_keeps_what_has_grown(grown: GrowingRegressor) -> None:
    model = copy.deepcopy(grown)
    model.partial_fit(*waves(50))
    assert model.widths_ == grown.widths_ and len(model.history_) == len(grown.history_)
    assert model.n_iter_ == grown.n_iter_ + 1
    assert not np.array_equal(model.predict(waves()[0]), grown.predict(waves()[0]))


def test_partial_fit_refuses_other_classes_and_stays_as_it_was() -> None:
    x, y = load_wine(return_X_y=True)
    model = GrowingClassifier(**SMALL, random_state=0)
    with pytest.raises(ValueError, match="classes must be given at the first call of GrowingClassifier"):
        model.partial_fit(x, y)
    model.partial_fit(x, y, classes=[0, 1, 2])
    before = model.predict_proba(x)
    with pytest.raises(ValueError, match=r"y must contain only the classes \[0 1 2\] of GrowingClassifier, got"):
        model.partial_fit(x, y + 1)
    with pytest.raises(ValueError, match="classes must be those of the first call of GrowingClassifier"):
        model.partial_fit(x, y, classes=[0, 1])
    regressor = GrowingRegressor(**SMALL).partial_fit(x, y)
    with pytest.raises(ValueError, match="GrowingRegressor continues with 1 targets, but y has 2"):
        regressor.partial_fit(x, np.stack([y, y], 1))
    assert np.array_equal(model.predict_proba(x), before) and model.n_iter_ == 1


def test_a_fit_that_max_epochs_stops_says_so_and_one_that_stops_itself_does_not(grown: GrowingRegressor) -> None:
    x, y = waves()
    with pytest.warns(ConvergenceWarning, match="GrowingRegressor stopped after max_epochs=8 epochs"):
        model = GrowingRegressor(**{**SMALL, "max_epochs": 8}, random_state=0).fit(x, y)
    assert len(model.loss_curve_) == model.n_iter_ == 8
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clone(grown).fit(x, y)


def test_a_learning_rate_that_is_too_large_is_named(grown: GrowingRegressor) -> None:
    x, y = waves()
    with pytest.raises(
        ValueError, match=r"GrowingRegressor: learning_rate must be small enough .* got 1e\+30 and a loss"
    ):
        GrowingRegressor(**{**SMALL, "learning_rate": 1e30}).fit(x, y)
    model = copy.deepcopy(grown).set_params(warm_start=True, learning_rate=1e30)
    with pytest.raises(ValueError, match="learning_rate"):
        model.fit(x, y)
    assert np.array_equal(model.predict(x), grown.predict(x)) and model.history_ == grown.history_


def test_read_only_samples_as_pandas_gives_them_cause_no_warning() -> None:
    x, y = waves(60)
    x.flags.writeable = y.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = GrowingRegressor(**{**SMALL, "max_epochs": 3}, random_state=0).fit(x, y)
        model.partial_fit(x, y).predict(x)


def test_sample_weights_count() -> None:
    x, y = load_wine(return_X_y=True)
    weight = np.where(y == 2, 1e-6, 1.0)
    predicted = GrowingClassifier(**SMALL, random_state=0).fit(x, y, weight).predict(x)
    assert (predicted == 2).mean() < 0.05
    with pytest.raises(ValueError, match="non-zero"):
        GrowingClassifier(**SMALL).fit(x, y, np.zeros(len(y)))


def test_the_last_training_is_on_all_samples(capsys: pytest.CaptureFixture[str]) -> None:
    """What grows is found with a part held out; at the end nothing is."""
    x, y = waves(100)
    settings: dict[str, Any] = {**SMALL, "max_epochs": 30, "random_state": 0}
    whole = GrowingRegressor(**settings, verbose=1).fit(x, y)
    assert "15 epochs on all 100 samples" in capsys.readouterr().out
    part = GrowingRegressor(**settings, refit=False, verbose=1).fit(x, y)
    assert "on all" not in capsys.readouterr().out
    assert whole.validation_loss_ == part.validation_loss_  # what decided is the same
    assert [str(growth.site) for growth in whole.history_] == [str(growth.site) for growth in part.history_]
    assert not np.array_equal(whole.predict(x), part.predict(x))


def test_the_last_training_is_longer_where_the_loss_still_fell_when_growing_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = waves(100)
    monkeypatch.setattr(fitting, "STAGE", 3)  # evaluations, each after ten epochs of one batch
    settings: dict[str, Any] = {**SMALL, "layers": 2, "patience": 10, "random_state": 0, "verbose": 1}
    GrowingRegressor(**settings, tau=1e9).fit(x, y)  # there is room, but no place is worth it
    assert "30 epochs on all 100 samples" in capsys.readouterr().out
    GrowingRegressor(**{**settings, "max_epochs": 30, "max_width": 12}).fit(x, y)  # no room: max_epochs ends it
    assert "15 epochs on all 100 samples" in capsys.readouterr().out


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
    assert epochs <= len(steps) <= epochs + (math.ceil(epochs / 2) if refit else 0)


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
        ("members", 0),
        ("layers", 0),
        ("max_width", 0),
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
        ("device", 5),
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


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_fitted(device: str) -> None:
    x, y = load_wine(return_X_y=True)
    model = GrowingClassifier(**SMALL, device=device)
    text = f"device must be one that torch finds on this machine for GrowingClassifier, such as 'cpu', got {device!r}"
    for fit in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=re.escape(text)):
            fit(x, y)
    assert not hasattr(model, "n_features_in_")


def test_a_device_is_named_as_torch_names_it() -> None:
    x, y = load_wine(return_X_y=True)
    models = [GrowingClassifier(**SMALL, random_state=0, device=each) for each in ("cpu", torch.device("cpu", 0))]
    one, other = (clone(model).fit(x, y).predict_proba(x) for model in models)
    assert np.array_equal(one, other)


def test_networks_are_averaged_only_where_the_held_out_samples_say_that_it_pays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = waves()
    noise = x[:, 0] + np.random.default_rng(1).normal(size=400)
    short: dict[str, Any] = {"max_epochs": 60, "bins": 1}
    fits = [
        GrowingRegressor(random_state=0, tolerance=0.02, verbose=1, **settings).fit(x, each)
        for each, settings in (
            (y, {"max_epochs": 150}),
            (noise, short),
            (noise, {**short, "members": 3}),
            (y, {**short, "members": 1}),
        )
    ]
    # It pays, it does not, it was asked for, one was asked for.
    assert [len(model.model_.members) for model in fits] == [6, 1, 3, 1]
    gains = [
        float(gain)
        for gain in re.findall(r"the mean of 6 networks would lower the loss by (.+)%", capsys.readouterr().out)
    ]
    assert len(gains) == 2 and gains[0] > 2 > gains[1]
    assert len(GrowingRegressor(max_epochs=5, random_state=0).fit(x[:40], y[:40]).model_.members) == 1
    assert len(GrowingRegressor(max_epochs=5, random_state=0, warm_start=True).fit(x, noise).model_.members) == 6


def test_what_an_ensemble_wins_is_told_by_pairs_of_networks() -> None:
    """Each sample is held out by two networks, which train on the same samples."""
    x, y = waves(90)
    torch.manual_seed(0)
    model = GrowingRegressor(max_width=32, max_layers=1)
    rows, held_out = model._folds(y, 0, 3)
    data = FoldData(
        torch.tensor(x).float(), torch.tensor(y).float()[:, None], torch.ones(90), rows * 2, held_out * 2, 2
    )
    members = networks(6, [2, 32, 1])
    silent: Any = lambda *_: None  # noqa: E731
    fit = fitting.Fit(members, data, model._losses, model._losses, model._plan(), silent, History(), silent)
    fit.run()
    mean, target, share = fit.held_out(lambda outputs: outputs.mean(0))
    by_hand = torch.cat(
        [(members[place](data.x[rest]) + members[place + 3](data.x[rest])) / 2 for place, rest in enumerate(held_out)]
    )
    assert torch.allclose(mean, by_hand, atol=1e-6) and torch.equal(target, data.y[torch.cat(held_out)])
    alone = [
        torch.cat([members[place + shift](data.x[rest]) for place, rest in enumerate(held_out)]) for shift in (0, 3)
    ]
    single = sum((share @ model._losses(each, target)).item() for each in alone) / 2
    assert fit.fitted.loss == pytest.approx(single, rel=1e-4)


def test_probabilities_are_as_sure_as_the_held_out_samples_allow() -> None:
    """Labels that are drawn with the probabilities of logits are learnt three times too surely."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 3, generator=random)
    target = torch.multinomial(logits.softmax(-1), 1, generator=random).flatten()
    share = torch.full((4000,), 1 / 4000)
    assert best_temperature(3 * logits, target, share) == pytest.approx(3, rel=0.1)
    assert best_temperature(logits, target, share) == pytest.approx(1, rel=0.1)


def test_a_small_training_takes_one_thread_and_gives_the_others_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        GrowingRegressor(**{**SMALL, "max_epochs": 2}).fit(*waves(60))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_verbose_shows_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys, "stderr", bar := _Terminal())
    GrowingRegressor(**{**SMALL, "max_epochs": 20}, verbose=1).fit(*waves(60))
    assert "GrowingRegressor" in bar.getvalue() and "loss" in bar.getvalue()
    assert "hidden layers: 1" in capsys.readouterr().out  # the stages, as without a terminal
    monkeypatch.setattr(sys, "stderr", bar := _Terminal())
    GrowingRegressor(**{**SMALL, "max_epochs": 20}).fit(*waves(60))
    assert bar.getvalue() == ""


def test_a_fit_of_a_failed_partial_fit_goes_on_as_if_it_had_not_been() -> None:
    x, y = load_wine(return_X_y=True)
    models = [GrowingRegressor(**SMALL, random_state=0).partial_fit(x, y) for _ in range(2)]
    with pytest.raises(ValueError, match="non-zero"):
        models[0].partial_fit(x, y, sample_weight=np.zeros(len(y)))
    models[0]._stacked.optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(ValueError, match="learning_rate must be small enough"):
        for _ in range(3):
            models[0].partial_fit(x, y)
    models[0]._stacked.optimizer.param_groups[0]["lr"] = models[1]._stacked.optimizer.param_groups[0]["lr"]
    assert all(np.isfinite(each).all() for each in (models[0].predict(x), models[0]._stacked.flat.detach().numpy()))
