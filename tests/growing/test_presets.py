"""Presets: ``Grower(model, optimizer)`` is what we recommend, ``preset="paper"`` Algorithm 1; and what a first call needs not be told."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from models import batches, deep, loss_fn
from sensli import Grower, History, Rates, SensliError, triggers
from sensli.errors import MeasurementError
from sensli.growing.triggers import TriggerContext
from sensli.integrations.callback import GrowingCallback
from sensli.surgery.warmup import steps_of_warmup

DATA = batches((8, 8, 4))


def values(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def grower(**options: Any) -> Grower:
    torch.manual_seed(0)
    model = deep()
    return Grower(model, torch.optim.Adam(model.parameters(), lr=0.01), **options)


def test_the_default_is_what_we_recommend() -> None:
    options = grower().options
    assert (options.what, options.tau, options.per, repr(options.trigger)) == (
        "units",
        0.0,
        "flops",
        repr((triggers.Pays() | triggers.Diminishing()) & triggers.Spaced() & triggers.Limit(factor=10)),
    )
    assert "preset='auto': decides at the first step between copies of blocks and units" in repr(grower())
    settled = grower(what="units")
    assert (
        "preset='auto': strategy='sensli', what='units', tau=0, per='flops', warmup='auto', trigger=(((Pays(2) | Diminishing("
        in repr(settled)
    )


def test_the_paper_is_algorithm_1() -> None:
    options = grower(preset="paper", trigger=triggers.Every(2)).options
    assert (options.what, options.tau, options.select, options.norm) == ("layers", 1.0, "auto", "auto")
    with pytest.raises(ValueError, match=r"trigger must be one of sensli\.triggers with preset='paper' .*, got None"):
        grower(preset="paper")


def test_what_is_given_overrides_a_preset() -> None:
    options = grower(what="both", tau=0.5, trigger=triggers.Every(3), units=2).options
    assert (options.what, options.tau, options.units, repr(options.trigger)) == ("both", 0.5, 2, "Every(3)")
    assert grower(what=None).options.what == "units"
    assert [grower(**given).options.per for given in ({"what": "both"}, {"confidence": 0.9}, {"per": None})] == [
        None
    ] * 3


def test_other_strategies_get_the_trigger_alone() -> None:
    assert repr(grower(strategy="net2net").options.trigger).startswith("((Diminishing")
    assert grower(strategy="gradmax").options.what == "units"


def test_callbacks_take_the_same_preset() -> None:
    made, own = GrowingCallback(), grower().options
    assert repr(made.options.trigger) == repr(own.trigger)
    assert (made.options.preset, made.options.what, made.options.tau) == ("auto", own.what, own.tau)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"lr_factor": 0.5}, r"lr_factor belongs to the learning rates: give rates=Rates\(lr_factor=\.\.\.\)"),
        ({"selct": "last"}, "Grower has no argument 'selct'. Did you mean 'select'?"),
        ({"xyz": 1}, "Grower has no argument 'xyz'. There are confidence, "),
    ],
    ids=["a rate", "a typing error", "unknown"],
)
def test_an_argument_that_is_unknown_is_told(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        grower(**given)
    assert grower(rates=Rates(lr_factor=0.5)).options.rates.lr_factor == 0.5


def test_the_number_of_growths_is_refused_where_a_strategy_takes_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"max_growths must be left out with strategy='splitting', got 3: it decides"):
        grower(strategy="splitting", max_growths=3)


def test_a_model_without_units_to_grow_says_what_to_give() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
    growing = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [(torch.randn(8, 3), torch.randint(0, 2, (8,)))]
    with pytest.raises(
        SensliError, match=r"(?s)nowhere to grow in this Sequential.*Give what='both', which adds layers too\."
    ):
        growing.step(data, nn.functional.cross_entropy)
    assert growing.calls == 0
    again = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), what="both", trigger=triggers.Every(1))
    assert again.step(data, nn.functional.cross_entropy) is not None


# --- the example is the first batch ---


def grown(given: Any, **options: Any) -> list[Any]:
    growing = grower(trigger=triggers.Every(1), **options)
    growing.step(given, loss_fn)
    return [growing.history.to_dict()["growths"], values(growing.model)]


def test_the_first_batch_serves_as_the_example() -> None:
    known = grown(DATA, example=DATA[0][0][:2])
    assert known[0] and grown(DATA) == known
    assert grown(iter(DATA)) == known  # of which nothing is lost
    growing = grower()
    with pytest.raises(SensliError, match=r"no example is known before the first step\. Give Grower\(\.\.\., example="):
        growing.sites()
    growing.step(DATA, loss_fn)
    assert len(growing.sites()) > 0


def test_dicts_serve_too() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = deep()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    model = Named()
    growing = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), trigger=triggers.Every(1))
    data = [{"x": x, "labels": y} for x, y in DATA]
    assert growing.step(data, lambda output, batch: loss_fn(output, batch["labels"])) is not None


def test_taking_it_changes_no_random_number() -> None:
    x, y = (torch.cat(part) for part in zip(*DATA, strict=True))

    def orders(example: Any) -> list[float]:
        torch.manual_seed(3)
        loader = DataLoader(TensorDataset(x, y), 4, shuffle=True)
        model = deep()
        growing = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), example=example, trigger=triggers.At(2))
        for _ in range(3):
            growing.step(loader, loss_fn)
        return [float(part.sum()) for part, _ in loader]

    assert orders(None) == orders(x[:2])


def test_empty_batches_are_refused_and_change_nothing() -> None:
    growing = grower()
    with pytest.raises(MeasurementError, match="the batches are empty"):
        growing.step([], loss_fn)
    assert (growing.calls == 0 and growing.step(DATA, loss_fn) is None) or growing.calls == 1


# --- without a metric ---


def test_the_losses_of_checks_stand_for_the_metric() -> None:
    growing = grower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(8):
            growing.step(DATA, loss_fn)
    record = growing.history.record
    assert [call for call, _ in record.metrics] == [look.call for look in record.decisions]
    assert all(isinstance(value, float) for _, value in record.metrics)
    # What the trigger watches is the loss of the check before.
    assert growing.state_dict()["trigger"]["left"]["left"]["right"]["first"][1] == record.metrics[0][1]
    with pytest.raises(ValueError, match="Diminishing needs a metric"):  # where it was asked for
        grower(trigger=triggers.Diminishing()).step(DATA, loss_fn)


def test_a_run_without_a_metric_resumes_to_the_bit() -> None:
    def train(growing: Grower, calls: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(calls):
                for x, y in DATA:
                    growing.optimizers[0].zero_grad()
                    loss_fn(growing.model(x), y).backward()
                    growing.optimizers[0].step()
                growing.step(DATA, loss_fn)

    whole = grower()
    train(whole, 3)
    state, model = json.loads(json.dumps(whole.state_dict())), copy.deepcopy(whole.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(whole.optimizers[0].state_dict()))
    train(whole, 6)
    again = Grower(model, optimizer)
    again.load_state_dict(state)
    train(again, 6)
    assert again.state_dict() == whole.state_dict() and values(again.model) == values(whole.model)


# --- what is said ---


def test_the_first_line_of_the_log_says_what_the_preset_came_to() -> None:
    lines: list[str] = []
    growing = grower(trigger=triggers.Every(1), log=lambda look: lines.extend(str(look).split("\n")))
    growing.step(DATA, loss_fn)
    growing.step(DATA, loss_fn)
    assert (
        lines[0]
        == "preset='auto': strategy='sensli', what='units', tau=0, per='flops', warmup='auto', trigger=Every(1)"
    )
    assert not any("preset" in line for line in lines[1:]) and lines[1].startswith("epoch 1: ")
    assert History.from_dict(growing.history.to_dict()).record.decisions[0].preset == lines[0]


def test_five_checks_in_a_row_without_a_growth_give_one_hint() -> None:
    growing = grower(preset="paper", trigger=triggers.Every(1), tau=1e9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            growing.step(DATA, loss_fn)
    assert len(caught) == 1 and caught[0].filename == __file__
    text = str(caught[0].message)
    assert text.startswith("epoch 5: 5 checks in a row have grown nothing. The last: the best, ")
    assert "below tau = 1e+09. The largest ratio was " in text and text.endswith(
        "give a smaller tau, or leave it to preset='auto'."
    )


def test_the_hint_names_what_holds_growth_back() -> None:
    for options, words in (
        ({"trigger": triggers.Every(1) & triggers.Pays(1e9)}, "large enough"),
        ({"trigger": triggers.Every(1) & triggers.Limit(parameters=1)}, ""),
    ):
        growing = grower(**options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(80):
                growing.step(DATA, loss_fn)
        assert [words in str(each.message) for each in caught] == ([True] if words else [])


def test_a_model_that_trains_has_no_hint_when_it_grows() -> None:
    growing = grower(trigger=triggers.Every(1), max_factor=None)
    for _ in range(6):
        assert growing.step(DATA, loss_fn) is not None


# --- what "auto" is for a stack of blocks ---


class Blocks(nn.Module):
    """A stack of equal blocks, each with a skip."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(count))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def on_blocks(**options: Any) -> Grower:
    torch.manual_seed(0)
    model = Blocks()
    return Grower(model, torch.optim.Adam(model.parameters()), **options)


def flat(grower: Grower, calls: int) -> None:
    for _ in range(calls):
        grower.step(iter(PAIRS), nn.functional.mse_loss, metric=1.0)


def steps(grower: Grower, count: int) -> None:
    for _ in range(count):
        grower.optimizers[0].step()


PAIRS = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(2)]


def test_a_stack_of_blocks_doubles_when_it_has_learned_what_it_can() -> None:
    told: list[str] = []
    one = on_blocks(log=lambda look: told.append(str(look)))
    steps(one, 1000)
    flat(one, 15)
    assert not one.history and "strategy='stack', what='layers', trigger=(Saturating(0.4, calls=16" in repr(one)
    flat(one, 1)
    assert len(one.model.blocks) == 4 and len(one.history) == 1 and "each of 2 blocks" in str(one.history[0].site)
    assert told[0].startswith("preset='auto': strategy='stack'") and "the function is not kept" in told[0]
    assert one.options.rates == Rates()  # blocks have moments of their own


@pytest.mark.parametrize("limit", [{}, {"max_check_share": None}, {"max_check_share": 0.5}])
def test_it_does_not_double_in_the_first_thousand_steps(limit: Any) -> None:
    one = on_blocks(**limit)
    flat(one, 1)  # with max_check_share=None steps are counted from the first call on
    steps(one, 999)
    flat(one, 40)
    assert not one.history
    again = on_blocks(**limit)
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for each in (one, again):
        flat(each, 1)
        assert not each.history
        steps(each, 1)
        flat(each, 1)
        assert len(each.history) == 1
    assert again.state_dict() == one.state_dict()


def test_without_steps_that_can_be_counted_it_doubles_when_its_loss_rests() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing trains it
        one = Grower(Blocks())
        flat(one, 16)
    assert len(one.history) == 1


def warms_for(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, **options: Any) -> int | None:
    """How many steps new units warm up for if a Grower of the default makes them after so many steps of training."""
    growing = Grower(model, optimizer, trigger=triggers.Every(1), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model(DATA[0][0]), DATA[0][1]).backward()
        optimizer.step()
    growing.step(DATA, loss_fn)
    assert len(growing.history) == 1
    found = {ages[-1][2] for state in optimizer.state.values() if (ages := state.get("warmup_ages"))}
    return found.pop() if found else None


@pytest.mark.parametrize(
    ("make", "steps", "options", "expected"),
    [
        (torch.optim.AdamW, 40, {}, 10),
        (torch.optim.NAdam, 43, {}, 10),
        (torch.optim.Adam, 900, {}, 200),
        (torch.optim.Adam, 7, {}, None),  # too short to mean something
        (torch.optim.SGD, 40, {}, None),
        (torch.optim.Adam, 40, {"rates": Rates()}, None),
        (torch.optim.Adam, 40, {"rates": Rates(warmup=7)}, 7),
        (torch.optim.SGD, 40, {"rates": Rates(warmup=7)}, 7),
        (torch.optim.SGD, 40, {"rates": Rates(warmup="auto")}, None),
        (torch.optim.Adam, 40, {"what": "layers"}, None),
    ],
)
def test_new_units_of_the_default_warm_up_under_adam(make: Any, steps: int, options: Any, expected: int | None) -> None:
    torch.manual_seed(0)
    model = deep()
    assert warms_for(model, make(model.parameters(), lr=1e-3), steps, **options) == expected


@pytest.mark.parametrize("count", [None, "40", torch.ones(3)])
def test_a_count_of_steps_that_is_none_starts_no_warm_up(count: Any) -> None:
    """Optimizers of others keep what they like under this name."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {"step": count}
    assert steps_of_warmup("auto", optimizer) is None
    optimizer.state[parameter] = {"step": torch.tensor(40.0)}
    assert steps_of_warmup("auto", optimizer) == 10 and steps_of_warmup(7, optimizer) == 7


def test_an_optimizer_that_tells_nobody_of_its_steps_is_no_error_where_nobody_asked_for_a_warm_up() -> None:
    class Silent(torch.optim.Adam):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=1e-3)
            del self._optimizer_step_pre_hooks

    torch.manual_seed(0)
    model = deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn(model(DATA[0][0]), DATA[0][1]).backward()
    optimizer.step()
    silent = Silent(model.parameters())
    silent.state.update({p: {**state, "step": torch.tensor(40.0)} for p, state in optimizer.state.items()})
    growing = Grower(model, silent, trigger=triggers.Every(1))
    growing.step(DATA, loss_fn)
    assert len(growing.history) == 1


def test_without_a_metric_it_goes_by_the_loss_of_a_few_batches_and_draws_no_random_number() -> None:
    one, state = on_blocks(), torch.random.get_rng_state()
    one.step(DataLoader(TensorDataset(*PAIRS[0]), batch_size=2, shuffle=True), nn.functional.mse_loss)
    assert torch.equal(torch.random.get_rng_state(), state)
    (_, metric), *_ = one.history.record.metrics
    assert metric is not None and 0 < metric < 100


@pytest.mark.parametrize(
    "options",
    [{"what": "units"}, {"units": 0.5}, {"strategy": "sensli"}, {"preset": "paper", "trigger": triggers.Every(1)}],
)
def test_who_says_what_to_grow_gets_that(options: Any) -> None:
    one = on_blocks(**options)
    flat(one, 1)
    assert one.options.strategy == "sensli" and "on_blocks" not in one.state_dict()


def test_a_trigger_of_the_user_says_when_the_stack_doubles() -> None:
    one = on_blocks(trigger=triggers.Every(2), rates=Rates(lr_factor=0.5, warmup=3))
    assert one.options.rates.warmup == 3
    flat(one, 2)
    assert len(one.model.blocks) == 4 and one.options.strategy == "stack"


def test_the_decision_is_saved_and_taken_back_if_the_first_step_fails() -> None:
    one, other = on_blocks(), on_blocks()
    before = other.options
    with pytest.raises(MeasurementError):
        other.step([(torch.randn(8, 4), torch.randn(8, 1), "three")], nn.functional.mse_loss)
    assert other.options is before and "decides at the first step" in repr(other)
    steps(one, 1000)
    flat(one, 7)
    state = json.loads(json.dumps(one.state_dict()))
    with pytest.raises(SensliError):
        other.load_state_dict({**state, "calls": "many"})
    assert other.options is before
    other.load_state_dict(state)
    assert other.options.strategy == "stack" and repr(other.options) == repr(one.options)
    for each in (one, other):
        flat(each, 9)
    assert [str(growth.site) for growth in one.history] == [str(growth.site) for growth in other.history] != []


def test_a_model_that_is_watched_grows_by_its_merits() -> None:
    one = on_blocks(trigger=triggers.Every(1), example=torch.randn(2, 4))
    with one.watch():
        nn.functional.mse_loss(one.model(PAIRS[0][0]), PAIRS[0][1]).backward()
        one.optimizers[0].step()
    assert one.step(metric=1.0) is not None and one.options.what == "units" and len(one.model.blocks) == 2


def test_a_state_of_before_is_one_of_units() -> None:
    one = on_blocks(what="units")
    flat(one, 1)
    other = on_blocks()
    other.load_state_dict(one.state_dict())
    flat(other, 1)
    assert other.options.strategy == "sensli"


def test_a_default_ends_at_ten_times_the_parameters_and_remembers_where_it_began() -> None:
    limit = triggers.Limit(factor=10)
    small, large = ({"parameters": count} for count in (100, 999))
    assert limit.may_fire(TriggerContext(1, sizes=large)) and limit.fires(TriggerContext(1, sizes=small))
    again = triggers.Limit(factor=10)
    again.load_state_dict(json.loads(json.dumps(limit.state_dict())))
    for each in (limit, again):
        assert each.fires(TriggerContext(2, sizes=large)) and not each.fires(
            TriggerContext(3, sizes={"parameters": 1000})
        )
    with pytest.raises(ValueError, match="needs the number of parameters at the first call"):
        again.load_state_dict({"first": "many"})
    assert repr(limit) == "Limit(factor=10)" and triggers.Limit(growths=3).state_dict() == {}
