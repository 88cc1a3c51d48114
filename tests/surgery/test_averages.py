"""Averages follow a growth, whatever they are an average of: of the model, of a part of it, inside or beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from sensli import Grower, History, Rates, find_sites, grow, load_checkpoint, replay, save_checkpoint, triggers, undo
from sensli.errors import UnsupportedModel
from sensli.modules.grown import grown_modules
from sensli.surgery.rewinding import rewind

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(24, 3, dtype=torch.float64, generator=GENERATOR)
Y = (X[:, 0] * X[:, 1] > 0).long()


class Net(nn.Module):
    """The head comes first among the parameters: pairs by position go wrong without an error."""

    def __init__(self, averaged: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 2)
        self.body = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
        if averaged:
            self.ema = AveragedModel(self.body, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def trained(model: nn.Module) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train(model: nn.Module, optimizer: Any, *pairs: tuple[AveragedModel, nn.Module], steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()
        for average, source in pairs:
            average.update_parameters(source)


def names(network: nn.Module) -> list[Any]:
    return [(name, tensor.shape) for name, tensor in (*network.named_parameters(), *network.named_buffers())]


def by_name(average: AveragedModel, source: nn.Module, decay: float) -> dict[str, Tensor]:
    """The next values of an average, pair by pair of the same name."""
    theirs = dict(source.named_parameters())
    return {n: decay * p.detach() + (1 - decay) * theirs[n].detach() for n, p in average.module.named_parameters()}


OPTIONS: dict[str, dict[str, Any]] = {
    "a residual layer": {"form": "residual"},
    "a layer": {},
    "units": {"what": "units", "units": 2},
    "units at the end of the part": {"what": "units", "units": 2, "where": "body.3"},
}


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_an_average_of_a_part_follows(options: dict[str, Any], inside: bool) -> None:
    model = Net(averaged=inside)
    average: Any = model.ema if inside else AveragedModel(model.body, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = trained(model)
    sites = find_sites(model, X[:2], **options)
    assert sites and not any(site.path.startswith("ema") for site in sites)
    train(model, optimizer, (average, model.body))
    before = {name: value.clone() for name, value in average.state_dict().items()}
    average.eval()
    kept = average(X)
    given = None if inside else average
    grower = Grower(
        model, optimizer, preset="paper", example=X[:2], trigger=triggers.Every(1), tau=0.0, averaged=given, **options
    )  # fmt: skip
    growth = grower.step([(X, Y)], cross_entropy)
    assert growth is not None
    average.eval()
    assert names(average.module) == names(model.body)
    torch.testing.assert_close(average(X)[..., :6], kept, rtol=1e-12, atol=1e-12)
    # What is new has the model's values, and no memory in common.
    ours = dict(average.module.named_parameters())
    for name in growth.parameters:
        theirs = model.get_parameter(name)
        mine = ours[name.removeprefix("body.")]
        assert torch.equal(mine, theirs) and mine is not theirs
        assert not any(mine is p for group in optimizer.param_groups for p in group["params"])
    train(model, optimizer, (average, model.body), steps=1)
    expected = by_name(average, model.body, 0.5)
    average.update_parameters(model.body)
    for name, value in average.module.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name])

    grower.step([(X, Y)], cross_entropy)
    assert names(average.module) == names(model.body) and len(grower.history) == 2
    while len(grower.history):
        rewind(model, grower.history, History(grower.history[:-1]), optimizer=optimizer, averaged=given)
        assert names(average.module) == names(model.body)
    assert {name: value.shape for name, value in average.state_dict().items()} == {
        n: v.shape for n, v in before.items()
    }
    assert not list(grown_modules(average.module)) and type(average.module) is nn.Sequential


class Body(nn.Module):
    """Ends in a function, so that a layer after it goes around the head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.two(torch.relu(self.one(x))))


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
def test_a_layer_that_goes_around_the_part_is_part_of_its_average(inside: bool) -> None:
    model = Net()
    model.body = Body().double()
    average = AveragedModel(model.head)
    if inside:
        model.ema = average
    optimizer, seen = trained(model), torch.rand(9, 6, dtype=torch.float64)
    train(model, optimizer, (average, model.head))
    kept, plain = average(seen), model.head
    grower = Grower(
        model, optimizer, preset="paper", example=X[:2], trigger=triggers.Every(1), tau=0.0, averaged=average, where="head"
    )  # fmt: skip
    for number in (1, 2):
        growth = grower.step([(X, Y)], cross_entropy)
        assert growth is not None and growth.name == f"head.grown{number}"
        assert names(average.module) == names(model.head)
        torch.testing.assert_close(average(seen), kept, rtol=1e-12, atol=1e-12)
        train(model, optimizer, (average, model.head))
        kept = average(seen)
    rewind(model, grower.history, History(grower.history[:1]), optimizer=optimizer, averaged=average)
    assert names(average.module) == names(model.head)
    rewind(model, grower.history, History(), optimizer=optimizer, averaged=average)
    assert names(average.module) == names(plain) and type(average.module) is nn.Linear and model.head is plain
    assert grower.step([(X, Y)], cross_entropy) is not None and names(average.module) == names(model.head)


def test_a_taken_back_growth_leaves_an_average_of_a_part_as_it_was() -> None:
    for options in OPTIONS.values():
        model = Net(averaged=True)
        train(model, trained(model), (model.ema, model.body))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        growth = grow(model, find_sites(model, X[:2], **options)[-1])
        assert names(model.ema.module) == names(model.body)
        other = copy.deepcopy(model)
        for each in (model, other):
            undo(each, growth)
            assert {name: value.tolist() for name, value in each.state_dict().items()} == {
                name: value.tolist() for name, value in before.items()
            }


@pytest.mark.parametrize("what", ["layers", "units"])
def test_an_average_inside_the_model_is_no_part_of_what_grows(what: str, tmp_path: Any) -> None:
    """An optimizer over all parameters, a checkpoint and a replay: as without the average."""
    ends = []
    for averaged in (False, True):

        def make_model(averaged: bool = averaged) -> Net:
            return Net(averaged=averaged)

        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        settings: dict[str, Any] = {"example": X[:2], "trigger": triggers.Every(1), "tau": 0.0, "what": what}
        grower = Grower(model, optimizer, preset="paper", **settings)
        for _ in range(2):
            train(model, optimizer)
            grower.step([(X, Y)], cross_entropy)
        train(model, optimizer, *([(model.ema, model.body)] if averaged else []))
        looks = [(look.parameters, [m.value for m in look.merits]) for look in grower.history.record.decisions]
        ratios = [growth.details["ratio"] for growth in grower.history]
        ends.append((model(X), looks, ratios, [str(growth.site) for growth in grower.history]))
        save_checkpoint(tmp_path / "run.ckpt", model, optimizer=optimizer, grower=grower)
        again = load_checkpoint(
            tmp_path / "run.ckpt", make_model, lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
            make_grower=lambda model, optimizer, scheduler: Grower(model, optimizer, preset="paper", **settings),  # noqa: B023
        )  # fmt: skip
        for name, value in model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), name
        fresh = replay(make_model(), History.from_dict(grower.history.to_dict()))
        assert names(fresh) == names(model)
    (output, looks, ratios, sites), (its_output, its_looks, its_ratios, its_sites) = ends
    torch.testing.assert_close(output, its_output)
    assert sites == its_sites and ratios == pytest.approx(its_ratios)
    for (size, merits), (its_size, its_merits) in zip(looks, its_looks, strict=True):
        assert size == its_size and merits == pytest.approx(its_merits)


def test_an_average_inside_the_model_is_not_frozen_and_has_no_groups_of_its_own(tmp_path: Any) -> None:
    """The rest that freezes is what trains; a group for each parameter resumes, although the rebuilt model has more of them."""

    def make_optimizer(model: nn.Module) -> Any:
        return torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.05)

    model = Net(averaged=True)
    optimizer = make_optimizer(model)
    train(model, optimizer, (model.ema, model.body))
    growth = grow(model, find_sites(model, X[:2])[0], optimizer=optimizer, freeze_rest=True)
    assert growth.frozen and not any(name.startswith("ema") for name in growth.frozen)
    assert all(p.requires_grad for p in model.ema.parameters())
    save_checkpoint(tmp_path / "run.ckpt", model, optimizer=optimizer, history=History([growth]))
    again = load_checkpoint(tmp_path / "run.ckpt", lambda: Net(averaged=True), make_optimizer)
    assert [len(g["params"]) for g in again.optimizer.param_groups] == [
        len(g["params"]) for g in optimizer.param_groups
    ]


class Consistent(Net):
    """A mean teacher: the average runs in the forward pass, and its output is part of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.ema(x)
        seen = self.body(x)
        return self.head(seen) + 0.1 * (seen - wanted)[..., :2]


@pytest.mark.parametrize("what", ["layers", "units"])
def test_an_average_that_runs_in_the_forward_pass_is_not_offered(what: str) -> None:
    model = Consistent(averaged=True)
    model.ema.requires_grad_(False)
    sites = find_sites(model, X[:2], what=what, form="residual" if what == "layers" else "auto")
    assert sites and not any("ema" in site.describe(model) for site in sites)
    for site in sites:
        other = copy.deepcopy(model)
        grow(other, site.in_model(other))
        assert names(other.ema.module) == names(other.body)
        assert not any(parameter.requires_grad for parameter in other.ema.parameters())
        torch.testing.assert_close(other.eval()(X), model.eval()(X))


def test_averages_of_averages_follow() -> None:
    """As Lightning averages a module that holds an average."""
    model = Net(averaged=True)
    outer = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5))
    optimizer = trained(model)
    grower = Grower(
        model, optimizer, preset="paper", example=X[:2], trigger=triggers.Every(1), tau=0.0, averaged=[outer, model.ema]
    )
    for _ in range(2):
        train(model, optimizer, (model.ema, model.body), (outer, model))
        grower.step([(X, Y)], cross_entropy)
        assert names(outer.module) == names(model)
        assert names(outer.module.ema.module) == names(model.body) == names(model.ema.module)


@pytest.mark.parametrize("what", ["layers", "units"])
@pytest.mark.parametrize("swa", [False, True])
def test_swa_goes_on_after_a_growth(swa: bool, what: str) -> None:
    """`SWALR`, an average that is not one of buffers, and `update_bn`."""
    model = Net()
    average = AveragedModel(model, torch.device("cpu"), None if swa else get_ema_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=4)
    grower = Grower(
        model, optimizer, preset="paper",
            example=X[:2], trigger=triggers.At(2), tau=0.0, what=what, scheduler=scheduler, averaged=average, rates=Rates(lr_factor=0.5)
    )  # fmt: skip
    for _ in range(8):
        train(model, optimizer, (average, model))
        grower.step([(X, Y)], cross_entropy)
        scheduler.step()
    assert len(grower.history) == 1 and names(average.module) == names(model)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    update_bn([X], average)
    torch.testing.assert_close(average.module.body[1].running_mean, average.module.body[0](X).mean(0))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Net(), Net()
        with torch.no_grad():
            self.two.head.weight.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


def test_parts_that_are_alike_are_told_apart_by_their_values() -> None:
    model = Pair().double()
    average = AveragedModel(model.two)
    optimizer = trained(model)
    where = "two.*"
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=X[:2],
        trigger=triggers.Every(1),
        tau=0.0,
        averaged=average,
        where=where,
    )
    train(model, optimizer, (average, model.two))
    assert grower.step([(X, Y)], cross_entropy) is not None
    assert names(average.module) == names(model.two) != names(model.one)

    model = Pair().double()
    average = AveragedModel(model.two)
    with torch.no_grad():
        average.module.head.bias.add_(1)
    with pytest.raises(UnsupportedModel, match=r"a Net that may be an average of 'one' or of 'two'\. Make the Grower"):
        Grower(model, preset="paper", example=X[:2], trigger=triggers.Every(1), averaged=average)


def test_what_cannot_follow_is_refused_before_anything_changes() -> None:
    def refused(model: nn.Module, averaged: Any, match: str) -> None:
        before = [(name, id(p)) for name, p in model.named_parameters()]
        with pytest.raises(UnsupportedModel, match=match):
            Grower(model, trained(model), preset="paper", example=X[:2], trigger=triggers.Every(1), averaged=averaged)
        assert [(name, id(p)) for name, p in model.named_parameters()] == before

    model = Net()
    refused(
        model,
        AveragedModel(nn.Linear(3, 5)),
        r"a Linear whose parameters are not those of the model, a Net, or of a part of it",
    )
    refused(model, copy.deepcopy(model.body), r"a copy of 'body', to which .*AveragedModel\(part\)")
    refused(model, model.body, r"a Sequential that is a part of the model itself\. Make it an average")
    model = Net(averaged=True)
    model.body.append(nn.Linear(6, 6, dtype=torch.float64))  # the average was made before
    refused(model, None, r"'ema' of the model holds a Sequential whose parameters are not those")
    site = find_sites(model, X[:2])[0]
    with pytest.raises(UnsupportedModel, match="'ema' of the model holds"):
        grow(model, site)
    assert not list(grown_modules(model))


class Taught(Net):
    """Made by hand: a copy that its owner updates, and alike parts that train."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body)
        self.deep = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        seen = self.body(x)
        return self.head(self.deep(seen[:, None])[:, 0]) + (seen - wanted)[:, :2]


def test_an_average_made_by_hand_is_refused_and_a_copy_that_rests_is_not() -> None:
    for moves in (False, True):
        model = Taught()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        settings: dict[str, Any] = {"example": X[:2], "trigger": triggers.Every(1), "tau": 0.0, "where": "body"}
        grower = Grower(model, optimizer, preset="paper", **settings)
        train(model, optimizer)
        for mean, parameter in zip(model.teacher.parameters(), model.body.parameters(), strict=True):
            mean.data.lerp_(parameter.data, 1e-3 if moves else 0.0)
        before = names(model)
        if moves:
            with pytest.raises(
                UnsupportedModel, match=r"^'teacher' began as a copy of 'body' and changes without a gradient"
            ):
                grower.step([(X, Y)], cross_entropy)
            assert names(model) == before and not grower.history
        else:
            assert grower.step([(X, Y)], cross_entropy) is not None


class Ema(nn.Module):
    """As timm's: a copy called ``module``, paired by the order of the state dicts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.5 * mean + 0.5 * value)


@pytest.mark.parametrize("part", [False, True])
def test_averages_of_other_libraries_follow(part: bool) -> None:
    model = Net()
    source: Any = model.body if part else model
    ema, optimizer = Ema(source), trained(model)
    settings: dict[str, Any] = {"what": "both", "max_growths": 2, "tau": 0.0, "averaged": ema}
    grower = Grower(model, optimizer, preset="paper", example=X[:2], trigger=triggers.Every(1), **settings)
    for _ in range(2):
        train(model, optimizer)
        ema.update(source)
        grower.step([(X, Y)], cross_entropy)
        assert names(ema.module) == names(source)
    assert len(grower.history) > 2
