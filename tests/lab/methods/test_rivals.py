"""The methods of other papers as strategies: each against a slow version of its formula, and all through a Grower."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rivals import convolutions, data, grown, mean_loss, mlp, seen, tokens
from sensli import Grower
from sensli.growing.strategy import STRATEGIES, strategy_class
from sensli.growing.triggers import Every
from sensli.integrations.callback import LookFacts
from sensli.moves.width.width import Width
from sensli.page.data import page_data, words
from sensli_lab.methods.blocks import AutoGrow
from sensli_lab.methods.net2net import NetMorph
from sensli_lab.methods.pairs import Pair, inverse_root, moment, pseudo_inverse
from sensli_lab.methods.units import ALPHA, BETA, DAMPING, Nest, North, Senn, Tiny

WIDENING = [
    "random-units",
    "net2net",
    "netmorph",
    "gradmax",
    "tiny",
    "nest",
    "senn",
    "north",
    "splitting",
    "firefly",
    "variance-transfer",
    "convsenn",
    "morphnet",
]


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (mlp(), data()),
        (convolutions(), data((2, 6, 6), 2)),
        (tokens(), data((7, 4))),
        (tokens(early=True), data((7, 4))),
    ],
)
def test_the_bypass_is_the_gradient_of_a_unit_without_activation(
    model: nn.Sequential, batches: list[tuple[Tensor, Tensor]]
) -> None:
    """A new unit with row e_i and zero columns in a linear network: the gradient of its columns is row i of the bypass."""
    linear = nn.Sequential(*(nn.Identity() if isinstance(module, nn.Tanh) else module for module in model))
    for pair in seen(linear, batches):
        width = pair.h.shape[1]
        site = pair.start(torch.eye(width).double())
        wide = grown(linear, site)
        mean_loss(wide, batches).backward()
        axis = pair.column
        weight = wide.get_submodule(axis.module.path).weight.grad
        units = weight.movedim(axis.dim, 0).unflatten(0, (axis.outer, -1, axis.inner))[:, -width:]
        torch.testing.assert_close(units.transpose(0, 1).flatten(1), pair.bypass(), rtol=1e-10, atol=1e-14)


def test_what_the_reader_can_serve_is_left_out() -> None:
    for pair in seen(mlp(), data()):
        left = pair.g - pair.a @ pair.explained
        assert (pair.a.T @ left).abs().max() < 1e-9
        slow = torch.linalg.lstsq(pair.a, pair.g, driver="gelsd").solution
        torch.testing.assert_close(pair.explained, slow, rtol=1e-6, atol=1e-10)


def test_tiny_predicts_the_decrease_that_is_measured() -> None:
    """Exactly so for tanh, where the reader's own weights can do no more."""
    model, batches = mlp(), data(count=4)
    reader = model[4]
    optimizer = torch.optim.LBFGS(
        reader.parameters(), max_iter=300, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, batches)
        loss.backward()
        return loss

    optimizer.step(closure)
    pair = seen(model, batches)[1]
    assert pair.explained.abs().max() < 1e-3
    _, predicted = Tiny().start(pair, lambda site: mean_loss(grown(model, site), batches).item())
    root = inverse_root(moment(pair.h))
    left, values, right = torch.linalg.svd(root @ -pair.bypass(residual=True))
    rows, columns = (root @ left[:, :2]).T * values[:2, None].sqrt(), right[:2] * values[:2, None].sqrt()
    small = 1e-3
    wide = grown(model, pair.start(small * rows, small * columns))
    fell = (mean_loss(model, batches) - mean_loss(wide, batches)) / small**2
    torch.testing.assert_close(fell, values[:2].square().sum(), rtol=1e-2, atol=0)
    torch.testing.assert_close(predicted, float(values[:2].square().sum()))


def test_nest_serves_the_largest_entries_downhill() -> None:
    for pair in seen(mlp(), data()):
        site, _ = Nest().start(pair, lambda _: 0.0)
        assert isinstance(site.move, Width) and site.move._entries is not None
        weight, bias = (value for value in site.move._entries.values[:2])
        columns = site.move._entries.values[-1]
        assert weight is not None and bias is not None and columns is not None
        rows = torch.cat([weight, bias[:, None]], 1)
        assert (rows.T @ columns.T * pair.bypass()).sum() < 0


def test_the_closed_form_of_senn_is_not_below_its_search() -> None:
    """Against the score of the paper for many random small units."""
    for pair in seen(mlp(), data()):
        _, best = Senn().start(pair, lambda _: 0.0)
        left = pair.g - pair.a @ pair.explained
        fisher = moment(pair.g)
        fisher = fisher + DAMPING * fisher.diagonal().mean() * torch.eye(len(fisher)).double()
        whitener = pseudo_inverse(fisher)

        def score(row: Tensor, pair: Pair = pair, left: Tensor = left, whitener: Tensor = whitener) -> float:
            unit = torch.tanh(1e-4 * pair.h @ row[:, None])
            c = unit.T @ left / len(unit)
            return float((c * (c @ whitener)).sum() / unit.square().mean())

        root = inverse_root(moment(pair.h))
        vectors, values, _ = torch.linalg.svd(root @ -pair.bypass(residual=True) @ inverse_root(fisher))
        torch.testing.assert_close(best, float(values[:2].square().sum()), rtol=1e-9, atol=0)
        torch.testing.assert_close(score(root @ vectors[:, 0]), float(values[0].square()), rtol=1e-4, atol=0)
        generator = torch.Generator().manual_seed(0)
        found = [score(torch.randn(pair.h.shape[1], generator=generator).double()) for _ in range(300)]
        assert max(found) <= float(values[0].square()) * (1 + 1e-6)


def test_north_adds_what_no_unit_has_yet() -> None:
    model, batches = mlp(), data(count=4)
    for pair in seen(model, batches)[:1]:
        pair.width.in_model(model)
        site, excess = North().start(pair, lambda _: 0.0)
        assert excess >= 0 and isinstance(site.move, Width) and site.move._entries is not None
        rows = torch.cat([site.move._entries.values[0], site.move._entries.values[1][:, None]], 1)  # type: ignore[index,list-item]
        new, old = pair.h @ rows.T, pair.h @ pair.existing_rows.T
        alone = new - old @ torch.linalg.lstsq(old, new, driver="gelsd").solution
        # Five units of four inputs and a bias leave no direction free, so what is left is rounding; with fewer units there is one.
        assert pair.existing_rows.shape == (5, 5) and alone.norm() < 1e-6 * new.norm() + 1e-6


@pytest.mark.parametrize("name", WIDENING)
def test_every_method_grows_a_network_and_says_whether_the_function_stays(name: str) -> None:
    model, batches, told = mlp(nn.Tanh), data(), list[Any]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    options = {"example": batches[0][0], "trigger": Every(1), "units": 2, "max_factor": None}
    grower = Grower(model, optimizer, preset="paper", strategy=name, log=told.append, **options)
    before = mean_loss(model, batches).item()
    for _ in range(2):
        growth = grower.step(batches, F.cross_entropy)
        if growth is None:
            continue
        optimizer.zero_grad()
        mean_loss(model, batches).backward()
        optimizer.step()
    keeps = name not in ("tiny", "nest", "splitting", "firefly", "variance-transfer", "convsenn", "morphnet")
    assert all(("not kept" in str(look)) is not keeps for look in told if look.growths)
    if name not in ("north", "senn", "morphnet"):  # these may find that nothing would help, or begin otherwise
        assert [bool(look.growths) for look in told] == [True, True]
    # Variance transfer makes the outputs smaller first, here from a loss that was below that of equal outputs; MorphNet begins again.
    assert (
        mean_loss(model, batches).item() < before
        or not len(grower.history)
        or name in ("variance-transfer", "morphnet")
    )
    again = Grower(mlp(nn.Tanh), preset="paper", strategy=name, **options)
    again.model = model
    again.load_state_dict(grower.state_dict())
    assert again.state_dict() == grower.state_dict()


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
        self.second = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.first, *self.second):
            x = x + block(x)
        return self.out(x)


def test_autogrow_takes_the_stages_in_turn_and_closes_one_that_does_not_pay() -> None:
    torch.manual_seed(0)
    model, batches = Stages().double(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=batches[0][0],
        trigger=Every(1),
        strategy=AutoGrow(least=0.1),
        max_factor=None,
    )
    places = []
    for metric in (1.0, 0.5, 0.45, 0.1, 0.05):
        growth = grower.step(batches, F.cross_entropy, metric=metric)
        places.append(growth.name.split(".")[0] if growth else None)
    # The second stage did not pay at 0.45 and is closed; the first did once more at 0.1, and then is closed too.
    assert places == ["first", "second", "first", "first", None]


def test_llama_pro_spaces_blocks_evenly() -> None:
    torch.manual_seed(0)
    model, batches = Stages().double(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=batches[0][0],
        trigger=Every(1),
        strategy="llama-pro",
        max_growths=2,
        max_factor=None,
    )
    grower.step(batches, F.cross_entropy)
    assert len(grower.history) == 2 and len({growth.site.path for growth in grower.history}) == 2


class Writer:
    """Of TensorBoard: what it was told."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.texts: list[str] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.tags.append(tag)

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts.append(text_string)


@pytest.mark.parametrize(
    ("strategy", "make", "measures"),
    [("llama-pro", Stages, False), ("net2net", lambda: mlp(), False), ("gradmax", lambda: mlp(), True)],
)
def test_a_strategy_that_measures_nothing_logs_no_merit(strategy: str, make: Any, measures: bool) -> None:
    torch.manual_seed(0)
    model, batches, writer = make().double(), data(), Writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=batches[0][0],
        trigger=Every(1),
        strategy=strategy,
        max_factor=None,
        log=writer,
    )
    grower.step(batches, F.cross_entropy)
    (growth,), (look,) = grower.history, grower.history.record.decisions
    assert look.measured == measures
    assert any(tag.startswith("sensli/merit") for tag in writer.tags) == measures and "sensli/parameters" in writer.tags
    for text in (*writer.texts, str(look), str(growth), words(page_data(grower.history))[1].split("<table")[0]):
        assert ("merit" in text) == measures, text
    assert ("merit" in growth.details) == measures
    facts = LookFacts().of(grower, batches[0][0])
    assert ("sensli/merit" in facts) == measures and "sensli/growths" in facts


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_says_what_it_is_and_whether_the_function_stays(name: str) -> None:
    kind = strategy_class(name)
    assert "__doc__" in vars(kind) and vars(kind)["__doc__"]
    if name not in ("sensli", "random-start"):
        text = " ".join((Path(inspect.getfile(kind)).read_text()).replace("\n# ", " ").split())
        assert "function is kept" in text or "function is not kept" in text or "keeps the function" in text, name


def test_nest_is_the_formula_pair_by_pair() -> None:
    for pair in seen(mlp(), data()):
        site, score = Nest(seed=4).start(pair, lambda _: 0.0)
        bypass, units = pair.bypass(), pair.width.more
        entries = [(abs(float(bypass[i, j])), i, j) for i in range(len(bypass)) for j in range(bypass.shape[1])]
        largest = sorted(entries, reverse=True)[: max(units, round(BETA * len(entries)))]
        signs = torch.randint(2, (len(largest),), generator=torch.Generator().manual_seed(4)).tolist()
        rows, columns = (torch.zeros(units, size).double() for size in bypass.shape)
        for number, (size, i, j) in enumerate(largest):
            sign = 2 * signs[number] - 1
            rows[number % units, i] += sign * (-1 if bypass[i, j] > 0 else 1) * size**0.5
            columns[number % units, j] += sign * size**0.5
        for made, old in ((rows, pair.existing_rows), (columns, pair.existing_columns)):
            made *= ALPHA * old.abs().mean() / made[made != 0].abs().mean()
        weight, bias, *_, read = site.move._entries.values  # type: ignore[union-attr]
        torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), rows)  # type: ignore[index,list-item]
        torch.testing.assert_close(read.T, columns)  # type: ignore[union-attr]
        assert score == pytest.approx(sum(size**2 for size, _, _ in largest))


def test_north_counts_and_draws_as_the_paper_does() -> None:
    """With fewer units than inputs: as many new ones as the rank exceeds its share, orthogonal to all pre-activations that are there."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double(), data(count=4)
    (pair,) = seen(model, batches)
    site, excess = North().start(pair, lambda _: 0.0)
    x = torch.cat([x for x, _ in batches])
    h = torch.tanh(model[0](x)) / len(x) ** 0.5
    rank = int((torch.linalg.eigvalsh(h.T @ h).clamp_min(0).sqrt() > 0.01).sum())
    assert rank == 3 and excess == rank - int(3 * 0.97 * rank / 3) == 1
    weight, bias, *_ = site.move._entries.values  # type: ignore[union-attr]
    new, old = x @ weight.T + bias, model[0](x)  # type: ignore[union-attr,operator]
    assert (old.T @ new).abs().max() < 1e-9 * old.norm() * new.norm() and new.norm() > 0.1
    lengths = torch.cat([weight, bias[:, None]], 1).norm(dim=1)  # type: ignore[index,list-item]
    torch.testing.assert_close(lengths, pair.existing_rows.norm(dim=1).mean().expand(2))


def test_netmorph_has_its_zeros_on_the_side_with_fewer_weights() -> None:
    model, batches = mlp(), data()
    for pair, zero_rows in zip(seen(model, batches), (True, False), strict=True):  # 5 and 6 weights of a unit; 6 and 3
        site, _ = NetMorph(seed=2).start(pair, lambda _: 0.0)
        weight, bias, *_, read = site.move._entries.values  # type: ignore[union-attr]
        rows, columns = torch.cat([weight, bias[:, None]], 1), read.T  # type: ignore[index,list-item,union-attr]
        assert (rows == 0).all() == zero_rows and (columns == 0).all() != zero_rows
        old, new = (pair.existing_columns, columns) if zero_rows else (pair.existing_rows, rows)
        generator = torch.Generator().manual_seed(2)
        shapes = [(2, pair.existing_rows.shape[1]), (2, pair.existing_columns.shape[1])]
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        spread = (old - old.mean()).square().mean().sqrt()
        torch.testing.assert_close(new, drawn[int(zero_rows)] * spread)
        torch.testing.assert_close(mean_loss(grown(model, site), batches), mean_loss(model, batches))


def test_a_reader_of_other_tokens_is_left_out() -> None:
    """Half of the tokens go to the last layer: which ones is not known, so its units have no bypass."""

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, ::2]

    first, act, second, act2, last, mean = tokens()
    model = nn.Sequential(first, act, second, act2, Half(), last, mean)
    assert [pair.site.path for pair in seen(tokens(), data((6, 4)))] == ["0", "2"]
    assert [pair.site.path for pair in seen(model, data((6, 4)))] == ["0"]
    grower = Grower(
        model,
        preset="paper",
        example=data((6, 4))[0][0],
        trigger=Every(1),
        strategy="gradmax",
        units=2,
        max_factor=None,
    )
    assert grower.step(data((6, 4)), F.cross_entropy) is not None
