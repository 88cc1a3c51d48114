"""`Grower`: Algorithm 1 in a few lines, its controls and limits, and a resume that goes on as if nothing had been."""

import copy
import json

import pytest
import torch
from torch import nn

import sensli.growing.following
from models import Named, alive, batches, cnn, deep, fnn, images, loss_fn, points, residual, snapshot, untouched
from sensli import Grower, History, Merits, Rates, find_sites, measure, replay
from sensli.errors import HistoryError, MeasurementError, OptimizerError, SensliError
from sensli.growing.triggers import At, Every, Limit, Plateau

DATA = batches((8, 8, 4))


def train(model, optimizer):
    for x, y in DATA:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def grower(model, optimizer=None, **options):
    return Grower(
        model, optimizer, preset="paper", **{"example": points(2), "trigger": Every(1), "tau": 0.0, **options}
    )


def test_algorithm_1_in_fewer_than_ten_lines():
    model = fnn()
    # --- what the user writes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    growing = Grower(model, optimizer, preset="paper", example=points(2), trigger=Every(2) & Limit(growths=2), tau=0.0)
    for _ in range(6):
        for x, y in DATA:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        growing.step(DATA, loss_fn)
    # --- nine lines
    assert [growth.details["epoch"] for growth in growing.history] == [2, 4]
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters())) == 10
    assert str(growing.history).count("\n") == 1


def test_the_best_merit_goes_in_and_the_record_says_why():
    model = deep()
    sites = find_sites(model, points(2))
    merits = measure(model, sites, DATA, loss_fn)
    growing = grower(model)
    growth = growing.step(DATA, loss_fn)
    assert growth.site == merits.best.site
    assert growth.details == {"epoch": 1, "merit": merits.best.value, "ratio": merits.best.ratio}
    assert growing.last_merits.best.value == merits.best.value and growing.history[0] is growth


@pytest.mark.parametrize("select", ["largest", "smallest", "random", lambda m: m[1], lambda m: m.ranked[2].site])
def test_selection(select):
    model = deep()
    merits = measure(model, find_sites(model, points(2)), DATA, loss_fn)
    order = torch.randperm(len(merits), generator=torch.Generator().manual_seed(7)).tolist()
    expected = {"largest": merits.best, "smallest": merits.worst, "random": merits[order[0]]}
    chosen = select(merits) if callable(select) else expected[select]
    growth = grower(model, select=select, seed=7).step(DATA, loss_fn)
    assert growth.site == getattr(chosen, "site", chosen)


@pytest.mark.parametrize("select", ["smallest", "random"])
def test_whether_a_control_grows_is_the_largest_merits_decision(select):
    model = deep()
    merits = measure(model, find_sites(model, points(2)), DATA, loss_fn)
    ratios = sorted(merit.ratio for merit in merits)
    assert ratios[0] < ratios[-1]
    passing = (ratios[-2] + ratios[-1]) / 2  # only the best passes
    assert grower(model, select=select, tau=passing).step(DATA, loss_fn) is not None
    assert grower(deep(), select=select, tau=ratios[-1] * 1.01).step(DATA, loss_fn) is None


@pytest.mark.slow
def test_random_choices_come_from_the_seed_alone():
    def places(seed):
        torch.manual_seed(3)
        growing = grower(deep(), select="random", seed=seed)
        state = torch.get_rng_state()
        found = [str(growing.step(DATA, loss_fn).site) for _ in range(4)]
        assert torch.equal(torch.get_rng_state(), state)
        return found

    assert places(1) == places(1)
    assert len({tuple(places(seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize("select, first", [("largest", 0), ("smallest", 0)])
def test_ties_go_to_the_first_in_the_data_flow(select, first):
    model = alive(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.Linear(4, 2)))
    sites = find_sites(model, points(2))
    values = [m.value for m in measure(model, sites, DATA, loss_fn)]
    assert len(values) == 3 and len(set(values)) == 1
    assert grower(model, select=select).step(DATA, loss_fn).site == sites[first]


@pytest.mark.parametrize("factor, grows", [(0.999, True), (1.001, False)])
def test_tau_lets_through_what_reaches_it(factor, grows):
    model = deep()
    ratio = measure(model, find_sites(model, points(2)), DATA, loss_fn).best.ratio
    growing = grower(model, tau=ratio * factor)
    before = snapshot(model)
    growth = growing.step(DATA, loss_fn)
    assert (growth is not None) == grows and len(growing.history) == grows
    assert growing.last_merits is not None and (grows or snapshot(model) == before)


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_the_k_best_go_in_at_once(count):
    model, x = deep(), points()
    merits = measure(model, find_sites(model, points(2)), DATA, loss_fn)
    before = model(x)
    growing = grower(model, max_growths=count, trigger=At(1))
    assert growing.step(DATA, loss_fn) is growing.history[0]
    assert [g.site for g in growing.history] == [m.site for m in merits.ranked[:count]]
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    "limit, grown",
    [  # 86 parameters, 136 FLOPs and 5 layers at first; 20, 32 and 1 more with each growth
        (Limit(growths=3), 3),
        (Limit(parameters=86 + 40), 2),
        (Limit(parameters=86 + 39), 1),
        (Limit(flops=136 + 70), 2),
        (Limit(depth=7), 2),
        (Limit(depth=5), 0),
    ],
    ids=repr,
)
def test_limits_hold_within_one_call_and_over_all(limit, grown):
    growing = grower(deep(), trigger=Every(1) & limit, max_growths=4)
    growing.step(DATA, loss_fn)
    assert len(growing.history) == grown
    assert growing.step(DATA, loss_fn) is None and len(growing.history) == grown


def test_lr_scale_once_per_look_and_the_scheduler_follows():
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    growing = grower(model, optimizer, scheduler=scheduler, rates=Rates(lr_factor=0.5), max_growths=2, trigger=At(2, 3))
    rates = []
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        growing.step(DATA, loss_fn)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 0.05, 0.025, 0.0025])
    assert len(growing.history) == 4 and scheduler.base_lrs == [0.25]


def test_where_layer_and_norm_reach_the_search():
    model = alive(nn.Sequential(cnn()[0], nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    data = batches((6, 6), images)
    growing = grower(model, example=images(2), where="linear", form="residual", norm="mean_square")
    growth = growing.step(data, loss_fn)
    assert (growth.site.kind, growth.site.move.form, growing.last_merits.norm) == ("linear", "residual", "mean_square")


def run(model, growing, optimizer, epochs):
    for _ in range(epochs):
        train(model, optimizer)
        with torch.no_grad():
            metric = sum(loss_fn(model(x), y).item() for x, y in DATA)
        growing.step(DATA, loss_fn, metric=metric)


def fresh(make, seed=5):
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    trigger = (Every(3) | Plateau(2, threshold=0.05)) & Limit(growths=5)
    return model, optimizer, grower(model, optimizer, trigger=trigger, select="random", seed=4)


@pytest.mark.parametrize("make", [deep, Named, lambda: Named(nn.Tanh), residual])
def test_the_same_seed_gives_the_same_run(make):
    results = []
    for _ in range(2):
        model, optimizer, growing = fresh(make)
        run(model, growing, optimizer, 8)
        results.append((growing.history.to_json(), [p.tolist() for p in model.parameters()]))
    assert results[0] == results[1] and len(growing.history) >= 2


@pytest.mark.parametrize("make", [deep, Named, lambda: Named(nn.Tanh), residual])
@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_nothing_had_been(make):
    model, optimizer, growing = fresh(make)
    run(model, growing, optimizer, 5)
    assert len(growing.history) >= 1
    state = json.loads(json.dumps(growing.state_dict()))
    weights, named = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    in_order = sorted(
        named, key=lambda name: [id(p) for p in optimizer.param_groups[0]["params"]].index(id(named[name]))
    )
    moments = {name: copy.deepcopy(optimizer.state[named[name]]) for name in in_order if named[name] in optimizer.state}

    again = replay(make(), History.from_dict(state["history"]))
    again.load_state_dict(weights)
    named = dict(again.named_parameters())
    other = torch.optim.Adam([named[name] for name in in_order], lr=0.03)
    for name, entry in moments.items():
        other.state[named[name]] = entry
    trigger = (Every(3) | Plateau(2, threshold=0.05)) & Limit(growths=5)
    resumed = grower(again, other, trigger=trigger, select="random", seed=99)
    resumed.load_state_dict(state)
    assert resumed.calls == 5

    run(model, growing, optimizer, 6)
    run(again, resumed, other, 6)
    assert resumed.history == growing.history
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_state_is_refused_where_it_does_not_belong():
    model = Named()
    growing = grower(model, trigger=Every(1) & Plateau(2))
    growing.options.trigger.load_state_dict({"left": {}, "right": {"best": 1.0, "waited": 1}})
    growing.step(DATA, loss_fn, metric=2.0)
    state = growing.state_dict()
    assert len(growing.history) == 1

    plain = grower(Named(), trigger=Every(1) & Plateau(2))
    grown = grower(replay(Named(), growing.history), trigger=Plateau(2) & Every(1))
    damaged = {key: value for key, value in state.items() if key != "trigger"}
    for target, given, text in [
        (plain, state, "has not grown as this state says.*replay"),
        (grown, state, "a trigger other than"),
        (grown, damaged, r"the keys \['trigger'\] are missing"),
    ]:
        before = target.state_dict()
        with pytest.raises(HistoryError, match=text):
            target.load_state_dict(given)
        assert target.state_dict() == before


def test_names_that_later_growths_changed_are_found_in_a_resume():
    model = Named(nn.Tanh)
    growing = grower(model, select=lambda merits: merits[0])
    for _ in range(3):
        growing.step(DATA, loss_fn)
    again = grower(replay(Named(nn.Tanh), growing.history))
    again.load_state_dict(growing.state_dict())
    assert again.history == growing.history


def test_a_call_that_raises_changes_nothing_and_does_not_count():
    model = deep()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    growing = grower(model, optimizer, trigger=Every(1) | Plateau(5))
    growing.step(DATA, loss_fn, metric=1.0)
    for step, error in [
        (lambda: growing.step([], loss_fn, metric=0.5), MeasurementError),
        (lambda: growing.step(DATA, lambda o, t: o.mean() * float("nan"), metric=0.5), MeasurementError),
        (lambda: growing.step(DATA, lambda o, t: 1 / 0, metric=0.5), ZeroDivisionError),
        (lambda: growing.step(DATA, loss_fn), ValueError),
    ]:
        before = growing.state_dict()
        with untouched(model, optimizer), pytest.raises(error):
            step()
        assert growing.state_dict() == before
    assert growing.step(DATA, loss_fn, metric=1.0) is not None and growing.calls == 2


def test_several_layers_go_in_together_or_not_at_all(monkeypatch):
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    growing = grower(model, optimizer, max_growths=4, rates=Rates(lr_factor=0.5))
    real, calls = sensli.growing.following.grow, []

    def fails_third(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise OptimizerError("no more")
        return real(*args, **options)

    monkeypatch.setattr(sensli.growing.following, "grow", fails_third)
    with untouched(model, optimizer), pytest.raises(OptimizerError, match="no more"):
        growing.step(DATA, loss_fn)
    assert (len(growing.history), growing.calls) == (0, 0)


def test_dead_networks_are_left_alone_with_a_warning():
    model = fnn()
    with torch.no_grad():
        model[0].bias.fill_(-100)
        model[2].bias.fill_(-100)
    growing = grower(model)
    with (
        untouched(model),
        pytest.warns(UserWarning, match="epoch 1: nothing has grown, because all 2 merits are zero"),
    ):
        assert growing.step(DATA, loss_fn) is None


def test_no_place_to_grow_is_said_with_the_reasons():
    with pytest.raises(SensliError, match=r"nowhere to grow in this Sequential.*0 sites"):
        grower(nn.Sequential(nn.Linear(3, 2)).double()).step(DATA, loss_fn)
    with pytest.raises(SensliError, match="for where='conv'"):
        grower(deep(), where="conv").step(DATA, loss_fn)


@pytest.mark.process  # compiles
def test_compiled_models_grow_through_their_wrapper():
    model = torch.compile(fnn(), backend="eager")
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1))
    growing.step(DATA, loss_fn)
    assert growing.model is model and len(growing.history) == 1


def test_confidence_is_for_the_largest_alone():
    model = deep()
    data = DATA * 40
    growing = grower(model, confidence=0.9)
    growing.step(data, loss_fn)
    assert isinstance(growing.last_merits, Merits) and growing.last_merits.confidence == 0.9
    for options in ({"select": "smallest"}, {"max_growths": 2}):
        with pytest.raises(ValueError, match="single largest"):
            grower(model, confidence=0.9, **options)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"trigger": 5}, TypeError, "triggers.Every"),
        ({"tau": -1}, ValueError, "at least 0"),
        ({"tau": float("nan")}, ValueError, "at least 0"),
        ({"max_growths": 0}, ValueError, "whole number"),
        ({"select": "best"}, ValueError, "'largest', 'smallest', 'random'"),
        ({"norm": "nuclear"}, ValueError, "'auto', 'frobenius'"),
        ({"form": "magic"}, ValueError, "'relu', 'residual'"),
        ({"where": "dense"}, ValueError, "'conv', 'linear', 'block'"),
        ({"confidence": 1.5}, ValueError, "between 0 and 1"),
    ],
)
def test_bad_settings_are_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        grower(fnn(), **options)


def test_a_selection_must_return_what_it_was_given():
    model = deep()
    growing = grower(model, select=lambda merits: "the best")
    with untouched(model), pytest.raises(TypeError, match="one of the merits"):
        growing.step(DATA, loss_fn)
