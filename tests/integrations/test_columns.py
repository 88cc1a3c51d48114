"""Tables as people have them: what columns become, and what the estimators make of frames, gaps, words, dates and wrong tables."""

from __future__ import annotations

import datetime
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import warm

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sensli.integrations import columns
from sensli.integrations.columns import Features, TableReader, column_moments
from sensli.integrations.fitting import FoldData, SparseRows, Stacked, train_on
from sensli.integrations.sklearn import GrowingClassifier, GrowingRegressor, networks

QUICK: dict[str, Any] = {
    "width": 8,
    "max_layers": 1,
    "max_width": 8,
    "max_epochs": 30,
    "learning_rate": 0.03,
    "random_state": 0,
}


pytestmark = pytest.mark.filterwarnings("ignore:Growing.*max_epochs")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def cells(count: int = 90) -> dict[str, list[Any]]:
    """A table of every kind of column, of which the target needs the word, the number and the day of the week."""
    random = np.random.default_rng(0)
    days = [
        datetime.datetime(1965, 1, 1) + datetime.timedelta(days=int(day)) for day in random.integers(0, 3000, count)
    ]
    number = random.normal(size=count).tolist()
    return {
        "size": [None if place % 10 == 3 else value for place, value in enumerate(number)],
        "word": [("a", "b", "c")[place % 3] for place in range(count)],
        "flag": [bool(place % 2) for place in range(count)],
        "day": list(days),
        "empty": [None] * count,
        "same": ["x"] * count,
    }


def target(table: dict[str, list[Any]]) -> Any:
    return np.array(
        [2.0 * (word == "a") + (day.weekday() == 6) for word, day in zip(table["word"], table["day"], strict=True)]
    )


def made(kind: str, table: dict[str, list[Any]]) -> Any:
    if kind == "array":
        return np.array(list(zip(*table.values(), strict=True)), dtype=object)
    library = pytest.importorskip(kind)
    frame = library.DataFrame(table)
    if kind == "pandas":
        return frame.astype({"word": "category", "flag": "boolean", "size": "Float64"})
    return frame.with_columns(library.col("word").cast(library.Categorical), library.col("day").cast(library.Date))


KINDS = ["array", "pandas", "polars"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_every_kind_of_column_is_fitted_as_it_is(kind: str) -> None:
    table = cells()
    x, y = made(kind, table), target(table)
    model = GrowingRegressor(**{**QUICK, "max_epochs": 150}).fit(x, y)
    assert model.n_features_in_ == 6 and hasattr(model, "feature_names_in_") == (kind != "array")
    assert model.score(x, y) > 0.8
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(x[:5]), model.predict(x[:5]))
    if kind == "array":
        assert np.array_equal(model.predict(x.tolist()), model.predict(x))


@pytest.mark.parametrize("kind", KINDS)
def test_words_that_are_unknown_and_gaps_that_are_new_are_predicted(kind: str) -> None:
    table = cells()
    model = GrowingClassifier(**QUICK).fit(made(kind, table), target(table) > 1)
    later = {name: column[:9] for name, column in table.items()}
    later["word"] = ["new", *later["word"][1:]]
    later["flag"] = [None, *later["flag"][1:]]
    later["day"] = [*later["day"][:8], None]
    later["same"] = ["y"] * 9
    found = model.predict_proba(made(kind, later))
    assert found.shape == (9, 2) and np.isfinite(found).all()
    same = {name: column[:9] for name, column in table.items()}
    unchanged = model.predict_proba(made(kind, same))
    assert np.allclose(found[1:8], unchanged[1:8])  # one word in fit says nothing, so another later does not either
    assert not np.allclose(found[0], unchanged[0])


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_columns_in_another_order_or_with_other_names_are_refused_as_scikit_learn_does(kind: str) -> None:
    table = cells(60)
    model = GrowingRegressor(**{**QUICK, "max_epochs": 2}).fit(made(kind, table), target(table))
    turned = dict(reversed(table.items()))
    with pytest.raises(ValueError, match="Feature names must be in the same order as they were in fit"):
        model.predict(made(kind, turned))
    with pytest.raises(ValueError, match=r"Feature names unseen at fit time:\n- extent"):
        model.predict(made_renamed(kind, table))
    with (
        pytest.raises(ValueError, match="X has 2 features, but GrowingRegressor is expecting 6"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        model.predict(np.zeros((3, 2)))


def made_renamed(kind: str, table: dict[str, list[Any]]) -> Any:
    frame = made(kind, table)
    return frame.rename(columns={"size": "extent"}) if kind == "pandas" else frame.rename({"size": "extent"})


def test_a_frame_of_pandas_in_a_pipeline_with_set_output() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": np.arange(60.0), "b": np.arange(60.0) % 7})
    steps = make_pipeline(StandardScaler(), GrowingRegressor(**{**QUICK, "max_epochs": 2})).set_output(
        transform="pandas"
    )
    steps.fit(frame, frame["a"])
    assert list(steps[-1].feature_names_in_) == ["a", "b"] and steps.predict(frame).shape == (60,)


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_sparse_samples_are_those_of_the_dense_matrix(form: str) -> None:
    x = np.random.default_rng(0).poisson(0.2, (60, 8)).astype(float)
    y = x[:, 0] - x[:, 3]
    dense = GrowingRegressor(**{**QUICK, "max_epochs": 3}).fit(x, y).predict(x)
    assert np.allclose(
        GrowingRegressor(**{**QUICK, "max_epochs": 3}).fit(sparse.coo_array(x).asformat(form), y).predict(x), dense
    )


def sparse_cells() -> Any:
    """Some rows and columns without entries, an entry that is zero, and a gap."""
    x = np.random.default_rng(0).poisson(0.3, (60, 8)) * np.linspace(1, 9, 8)
    x[7], x[:, 2] = 0.0, 0.0
    x = sparse.csr_array(x)
    x.data[:2] = 0.0, np.nan
    return x


def test_networks_learn_of_sparse_samples_what_they_learn_of_dense_ones() -> None:
    x = sparse_cells()
    features = Features(x, np.ones(60), [False] * 8, 16)
    rows, inputs = features.inputs(x, torch.float64, torch.device("cpu")), features(torch.tensor(x.toarray()))
    assert isinstance(rows, SparseRows) and torch.equal(rows[torch.arange(60)[None]].to_dense()[0], inputs)
    assert inputs.isfinite().all() and inputs[:, 2].abs().max() == 0
    entries = [column[column != 0] for column in inputs.T]
    assert all(entry.square().mean() == pytest.approx(1) for entry in entries if len(entry))
    y, ends = torch.randn(60, 1, dtype=torch.float64), []
    parts = [torch.arange(40), torch.arange(25, 60)]
    for each in (rows, inputs):
        torch.manual_seed(0)
        members = [network.double() for network in networks(2, [8, 5, 1])]
        stacked = Stacked(members, 0.01, 0.1)
        for _ in range(3):
            train_on(stacked, FoldData(each, y, torch.ones(60).double(), parts), GrowingRegressor()._losses, 15)
        ends.append(stacked.flat.detach().clone())
    assert torch.allclose(*ends, rtol=0, atol=1e-12)


def test_a_large_sparse_matrix_stays_sparse_and_predicts_as_its_dense_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = sparse_cells(), np.arange(60) % 2
    monkeypatch.setattr(columns, "DENSE", 100)
    model = GrowingClassifier(**{**QUICK, "max_epochs": 3, "max_width": 16}).fit(x, y)
    assert model.model_.features.count == 8
    found = model.predict_proba(x)
    assert np.allclose(found, model.predict_proba(x.toarray())) and np.allclose(found[3:5], model.predict_proba(x[3:5]))
    assert np.allclose(found, model.model_(torch.tensor(x.toarray())).softmax(1).detach())
    model.partial_fit(x, y)
    with pytest.raises(
        ValueError, match=r"categorical_features must be 'from_dtype' or None for a sparse matrix of more than 100"
    ):
        GrowingClassifier(**QUICK, categorical_features=[1]).fit(x, y)


@pytest.mark.process
def test_a_wide_sparse_matrix_is_never_dense(tmp_path: Path) -> None:
    """As a tensor it takes 1.6 GB in single precision, and 3.2 in double; fit and predict get half of one."""
    code = """
import resource
import numpy as np
from scipy import sparse
from sensli.integrations.sklearn import GrowingRegressor
x = sparse.random_array((20000, 20000), density=1e-3, format="csr", rng=np.random.default_rng(0))
y = x[:, :50].sum(axis=1)
model = GrowingRegressor(members=2, batch_size=2000, max_epochs=2, random_state=0)
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 2**29, used + 2**29))
print(model.fit(x, y).predict(x).shape)
"""
    done = warm.run(["-c", code], tmp_path, ["sensli.integrations.sklearn"])
    assert done.stdout == "(20000,)\n", done.stderr


@pytest.mark.parametrize("asked", [[1], np.array([False, True]), [False, True]])
def test_columns_that_are_named_as_categories_are_categories(asked: Any) -> None:
    """A target that is no line in the codes, which one unit could not learn of them as numbers."""
    x = np.stack([np.zeros(60), np.arange(60) % 4], axis=1)
    parts = TableReader(x, asked, "it").parts
    assert parts == [False, True]
    features = Features(x, np.ones(60), parts, 16)
    assert features.count == 4  # what does not vary has no input
    model = GrowingRegressor(**QUICK, categorical_features=asked).fit(
        x, np.array([0.0, 3.0, 1.0, 2.0])[np.arange(60) % 4]
    )
    assert model.model_.features.count == 4


def test_columns_of_a_frame_are_named_as_categories() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"code": [1, 2, 3] * 4, "size": np.arange(12.0)})
    assert TableReader(frame, ["code"], "it").parts == [True, False]
    assert TableReader(frame, "from_dtype", "it").parts == [False, False]
    assert TableReader(frame.astype({"code": "category"}), "from_dtype", "it").parts == [True, False]
    with pytest.raises(ValueError, match=r"categorical_features must be among code, size, got 'other'\."):
        TableReader(frame, ["other"], "it")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("all", "The 'categorical_features' parameter of GrowingClassifier must be a str among"),
        ([7], "categorical_features must be places of 2 columns, from 0 on, got 7."),
        ([-1], "categorical_features must be places of 2 columns, from 0 on, got -1."),
        ([True], "categorical_features must have one entry for each of 2 columns as a mask, got 1."),
        (["a"], "categorical_features must be places or a mask where columns have no names, got ['a']."),
        (
            [0.5],
            "categorical_features must be 'from_dtype', None, or the places, names or a mask of columns for GrowingClassifier, got",
        ),
    ],
)
def test_wrong_categories_are_refused_and_nothing_is_fitted(asked: Any, text: str) -> None:
    model = GrowingClassifier(**QUICK, categorical_features=asked)
    before = dict(vars(model))
    with pytest.raises(ValueError, match=re.escape(text)):
        model.fit(np.zeros((60, 2)), np.arange(60) % 2)
    assert vars(model) == before


@pytest.mark.parametrize(
    ("x", "text"),
    [
        ([[np.inf, 1.0]] * 60, "Input X contains infinity or a value too large for dtype('float64')."),
        (np.array([[1.0, float("-inf")]] * 60, dtype=object), "Input X contains infinity"),
        (np.array([[1.0, 2j]] * 60, dtype=object), "Complex data not supported, got '2j'."),
        (np.empty((0, 2)), "Found array with 0 sample(s)"),
        (np.empty((60, 0)), "Found array with 0 feature(s)"),
        (np.zeros((59, 2)), "Found input variables with inconsistent numbers of samples: [59, 60]"),
    ],
)
def test_tables_that_mean_nothing_are_refused_and_the_last_fit_stays(x: Any, text: str) -> None:
    fresh = GrowingClassifier(**{**QUICK, "max_epochs": 2})
    good, y = np.arange(180.0).reshape(60, 3), np.arange(60) % 2
    model = GrowingClassifier(**{**QUICK, "max_epochs": 2}).fit(good, y)
    before, kept = model.predict_proba(good), dict(vars(model))
    for each in (fresh, model):
        with pytest.raises(ValueError, match=re.escape(text)):
            each.fit(x, y)
    assert not hasattr(fresh, "n_features_in_") and not hasattr(fresh, "_reader")
    assert vars(model) == kept and np.array_equal(model.predict_proba(good), before)


def test_a_frame_that_is_not_in_memory_is_refused() -> None:
    lazy = pytest.importorskip("polars").DataFrame({"a": np.arange(60.0)}).lazy()
    with pytest.raises(TypeError, match=r"X must be a table in memory for GrowingClassifier, got a LazyFrame\. Call"):
        GrowingClassifier(**QUICK).fit(lazy, np.arange(60) % 2)


def test_words_are_refused_where_no_column_is_a_category() -> None:
    x = np.array([["a", 1.0]] * 30 + [["b", 2.0]] * 30, dtype=object)
    with pytest.raises(
        ValueError, match=r"could not convert string to float: 'a': column 0 must be numbers\. Name it in"
    ):
        GrowingClassifier(**QUICK, categorical_features=None).fit(x, np.arange(60) % 2)
    numbers = GrowingClassifier(**{**QUICK, "max_epochs": 2}).fit(x[:, 1:], np.arange(60) % 2)
    with pytest.raises(ValueError, match="could not convert string to float: 'a': column 0 must be numbers"):
        numbers.predict(x[:, :1])
    with pytest.raises(ValueError, match=r"column 0 must be numbers, got dates such as '1960-01-01"):
        numbers.predict(np.array([[datetime.datetime(1960, 1, 1)]], dtype=object))


def test_numbers_are_refused_where_dates_were() -> None:
    x = np.array([[datetime.date(1950, 1, 1) + datetime.timedelta(days=day)] for day in range(60)], dtype=object)
    model = GrowingRegressor(**{**QUICK, "max_epochs": 2}).fit(x, np.arange(60.0))
    with pytest.raises(ValueError, match=r"column 0 must be dates, as in fit, got '3\.0'"):
        model.predict(np.array([[3.0]]))


def test_a_table_of_gaps_and_one_of_a_single_category_are_fitted() -> None:
    y = np.arange(60) % 2
    for x in (np.full((60, 2), np.nan), np.array([["x"]] * 60, dtype=object)):
        found = GrowingClassifier(**{**QUICK, "max_epochs": 2}).fit(x, y).predict_proba(x)
        assert np.allclose(found[0], found) and np.isfinite(found).all()


def test_a_class_with_one_member_is_fitted() -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 2
    y[7] = 5
    model = GrowingClassifier(**{**QUICK, "max_epochs": 3}).fit(x, y)
    assert list(model.classes_) == [0, 1, 5] and model.predict_proba(x).shape == (60, 3)


def test_moments_of_time_before_1970_and_after_are_their_parts() -> None:
    moments_of = [
        datetime.datetime(1969, 12, 28, 18, 30),
        datetime.datetime(1600, 2, 29),
        datetime.datetime(2024, 2, 29, 23, 0),
    ]
    table = np.array([[each] for each in [*moments_of, None]], dtype=object)
    found = TableReader(table, "from_dtype", "it").read(table)
    for row, moment in zip(found, moments_of, strict=False):
        seconds = (moment - datetime.datetime(1970, 1, 1)).total_seconds()
        hours = moment.hour + moment.minute / 60
        assert row == pytest.approx([seconds, moment.month - 1 + (moment.day - 1) / 31, moment.weekday(), hours])
    assert np.isnan(found[3]).all()


def test_pieces_between_quantiles_add_up_to_the_number() -> None:
    """Inside of what was seen the pieces are the number itself, so nothing is lost; outside they go on for one piece."""
    values = np.random.default_rng(0).lognormal(size=(500, 1))
    features = Features(values, np.ones(500), [False], 8)
    assert features.count == 8
    ramps = features.raw(torch.tensor(values))
    whole = features.low[0] + (ramps / features.slope).sum(1)
    assert torch.allclose(whole, torch.tensor(values[:, 0]))
    held = [
        int(((values >= low) & (values < low + 1 / slope)).sum())
        for low, slope in zip(features.low.tolist(), features.slope.tolist(), strict=True)
    ]
    assert all(61 <= count <= 64 for count in held)
    far = features.raw(torch.tensor([[-1e9], [1e9]], dtype=torch.float64))
    assert far.min() == -1 and far.max() == 2
    inputs = features(torch.tensor(values))
    assert torch.allclose(inputs.mean(0), torch.zeros(8, dtype=torch.float64), atol=1e-9)
    assert inputs.square().mean(0).sum() == pytest.approx(1.0)


def test_a_sample_of_weight_two_is_two_samples() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(40, 2))
    weight = random.integers(1, 4, 40).astype(float)
    repeated = np.repeat(values, weight.astype(int), axis=0)
    one, other = (
        Features(values, weight, [False, False], 6),
        Features(repeated, np.ones(len(repeated)), [False, False], 6),
    )
    assert all(torch.allclose(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def test_gaps_do_not_move_the_mean_and_have_an_input_of_their_own() -> None:
    values = np.array([[1.0], [3.0], [np.nan], [5.0]])
    mean, scale = column_moments(values, np.ones(4))
    assert mean == 3.0 and scale == pytest.approx(np.std([1, 3, 5]))
    inputs = Features(values, np.ones(4), [False], 1)(torch.tensor(values))
    assert inputs[2, 0] == 0 and inputs[2, 1] > 0 > inputs[0, 1]


def test_rare_words_share_the_place_of_unknown_ones() -> None:
    words = np.array([["often"]] * 5 + [["also"]] * 3 + [["once"], ["never again"]], dtype=object)
    reader = TableReader(words, "from_dtype", "it")
    assert reader.columns[0].places == {"also": 0, "often": 1}
    assert reader.read(np.array([["once"], ["unheard"], ["often"], [None]], dtype=object))[:3, 0].tolist() == [2, 2, 1]


def test_tags_say_what_is_taken() -> None:
    for model in (GrowingClassifier(), GrowingRegressor()):
        tags = model.__sklearn_tags__().input_tags
        assert tags.allow_nan and tags.categorical and tags.sparse and tags.string
