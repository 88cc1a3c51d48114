"""The options of growing: one frozen object that checks itself, used by `Grower` and both callbacks; and the one registry of selections."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from models import batches, cnn, deep, fnn, images, loss_fn, points, residual, untouched
from sensli import Grower, Merits, Rates, Site, Sites, find_sites, measure, undo
from sensli.growing.looking import Sensli
from sensli.growing.options import OF_STRATEGIES, Options, StrategyOptions
from sensli.growing.strategy import STRATEGIES, Strategy, strategy_class
from sensli.growing.triggers import At, Every, Limit, TriggerContext
from sensli.merits.merits import BY_MERIT, SELECTIONS, Merit
from sensli.text.commands import GROW
from sensli_lab.paper.settings import DataSettings, Network, Optimizer, Settings

DATA = batches((8, 8, 4))
OF_A_RUN = {"model", "optimizer", "example", "scheduler", "averaged"}


def grower(model: Any, optimizer: Any = None, **options: Any) -> Grower:
    return Grower(
        model, optimizer, preset="paper", **{"example": points(2), "trigger": Every(1), "tau": 0.0, **options}
    )


# --- one object ---


def test_they_are_the_arguments_of_a_grower_with_its_defaults() -> None:
    given = inspect.signature(Grower).parameters
    named = {field.name for field in dataclasses.fields(Options)}
    assert given.keys() - named == {*OF_A_RUN, "options"} and len(given) - 1 <= 14
    assert named - given.keys() == StrategyOptions.__annotations__.keys()
    for field in dataclasses.fields(Options):
        if field.name in given and field.name not in ("preset", "trigger", "rates", "strategy"):
            assert field.default == given[field.name].default


def test_every_argument_of_a_grower_reaches_them() -> None:
    def where(site: Site) -> bool:
        return True

    given: dict[str, Any] = {
        "trigger": At(3), "tau": 0.5, "norm": "operator", "select": "smallest", "max_growths": 2, "form": "relu", "where": where,
        "what": "both", "units": 3, "init": ("fresh", "random"), "per": "flops",
        "confidence": None, "tolerance": 0.0, "rates": Rates(lr_factor=0.9, group=0), "max_factor": 3.0, "floor": 0.0, "seed": 4,
        "log": print, "recycle": True, "strategy": "sensli", "kernel_size": 5,
        "step_name": "step", "trial": None, "preset": "paper", "factor": 2, "order": "stack", "spare": 0, "noise": 0.0,
        "max_check_share": 0.5,
    }  # fmt: skip
    model = deep()
    made = Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), example=points(2), **given)
    assert vars(made.options) == given and made.options == Options(**given)
    assert given.keys() == {field.name for field in dataclasses.fields(Options)}
    own = Backwards()
    assert Grower(model, preset="paper", example=points(2), trigger=At(3), strategy=own).options.strategy is own


def test_they_are_frozen_and_hold_plain_numbers() -> None:
    options = Options(
        trigger=Every(1), tau=torch.tensor(0.5), max_growths=np.int64(2), rates=Rates(np.float32(0.5)),
        max_factor=torch.tensor(3), seed=np.uint8(1)
    )  # type: ignore[arg-type]  # fmt: skip
    numbers = (options.tau, options.max_growths, options.rates.lr_factor, options.max_factor, options.seed)
    assert numbers == (0.5, 2, 0.5, 3.0, 1) and [type(number) for number in numbers] == [float, int, float, float, int]
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.tau = 1.0  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"tau must be a number of at least 0 .*, got -1"):
        dataclasses.replace(options, tau=-1)


@pytest.mark.library
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_callback_holds_them(library: str) -> None:
    pytest.importorskip(library)
    make = importlib.import_module(f"sensli.integrations.{library}").GrowthCallback
    trigger = Every(2)
    callback = make(trigger, preset="paper", tau=0.5, rates=Rates(group=0), select="last", monitor="loss")
    assert callback.options == Options(trigger=trigger, tau=0.5, rates=Rates(group=0), select="last")
    with pytest.raises(TypeError, match=r"^taus= is not an option of GrowthCallback\. Its options are .*, tau, "):
        make(trigger, taus=0.5)
    with pytest.raises(ValueError, match="single largest"):
        make(trigger, confidence=0.9, max_growths=2)


# --- one registry of selections ---


@pytest.mark.parametrize("select", SELECTIONS)
def test_every_selection_is_known_everywhere_and_takes_its_place(select: str) -> None:
    model = deep()
    merits = measure(model, find_sites(model, points(2)), DATA, loss_fn)
    order = torch.randperm(len(merits), generator=torch.Generator().manual_seed(0)).tolist()
    expected = {
        "largest": merits.best, "smallest": merits.worst, "random": merits[order[0]], "first": merits[0], "last": merits[-1],
        "even": merits[round((len(merits) - 1) / 2)], "auto": merits.best,
    }  # fmt: skip
    growing = grower(model, select=select)
    growth = growing.step(DATA, loss_fn)
    assert growth is not None and growth.site == expected[select].site
    settings = Settings(Network("fnn", (5, 5)), Optimizer(), 45, 3, DataSettings(), select=select)
    assert settings.select == select


@pytest.mark.parametrize("select", [name for name in SELECTIONS if name not in BY_MERIT])
def test_the_largest_merit_decides_whether_a_control_grows(select: str) -> None:
    model = deep()
    small = copy.deepcopy(model)
    merits = measure(model, find_sites(model, points(2)), DATA, loss_fn)
    ratios = sorted(merit.ratio or 0.0 for merit in merits)
    growing = grower(model, select=select, max_growths=3, tau=(ratios[-3] + ratios[-2]) / 2)  # two of them pass
    assert growing.step(DATA, loss_fn) is not None and len(growing.history) == 2
    assert f"the largest merit, {ratios[-1]:.2g} x" in growing.history.record.decisions[0].reason
    assert grower(small, select=select, tau=ratios[-1] * 1.01).step(DATA, loss_fn) is None


def test_several_layers_are_spaced_as_the_selection_says() -> None:
    for select, expected in {"first": {0, 1}, "last": {2, 3}, "even": {1, 2}}.items():
        model = deep()
        sites = find_sites(model, points(2))
        assert len(sites) == 4
        growing = grower(model, select=select, max_growths=2)
        growing.step(DATA, loss_fn)
        assert {str(growth.site) for growth in growing.history} == {str(sites[place]) for place in expected}


def test_errors_list_what_is_registered() -> None:
    with pytest.raises(ValueError, match=f"select must be one of {', '.join(map(repr, SELECTIONS))}, or a function"):
        grower(deep(), select="best")
    with pytest.raises(ValueError, match="Known: auto, even, first, largest, last, random, smallest"):
        Settings(Network("fnn", (5, 5)), Optimizer(), 45, 3, DataSettings(), select="best")


def test_a_function_is_not_taken_for_the_selection_of_the_same_name() -> None:
    def smallest(merits: Merits) -> Merit:
        return merits.ranked[1]

    growing = grower(deep(), select=smallest, tau=1e-6)
    assert growing.step(DATA, loss_fn) is not None
    reason, second = growing.history.record.decisions[0].reason, growing.last_merits.ranked[1]  # type: ignore[union-attr]
    assert f"and {second.ratio:.2g} x the mean" in reason and "largest" not in reason


def inflated(blocks: int = 4) -> torch.nn.Module:
    """A stack whose merits are by far the largest around its first block, and which the same seed gives again."""
    torch.manual_seed(0)
    model = residual(blocks)
    with torch.no_grad():
        for _, parameter in [each for each in model[2:-1].named_parameters() if "first" in each[0]]:  # type: ignore[index]
            parameter.mul_(0.01)
    return model


def test_between_blocks_the_default_takes_the_middle_and_says_so() -> None:
    model = inflated()
    merits = measure(model, find_sites(model, points(2)), DATA, loss_fn)
    middle = merits[len(merits) // 2]
    assert len({merit.site.stack for merit in merits}) == 1 and len(merits) == 5
    assert middle is not merits.best and middle.ratio is not None and merits.best.ratio is not None
    lines: list[str] = []
    # The largest merit of the stack decides whether, as before; the middle itself would not pass.
    tau = (max(middle.ratio, sorted(merit.ratio or 0.0 for merit in merits)[-2]) + merits.best.ratio) / 2
    growing = grower(model, tau=tau, log=lambda look: lines.append(str(look)))
    growth = growing.step(DATA, loss_fn)
    assert growth is not None and growth.site == middle.site
    assert lines[0].endswith(" | the middle of 5 sites between blocks")
    look = growing.history.record.decisions[0]
    assert look.select == "auto" and look.rule == "the middle of 5 sites between blocks"
    assert look.reason == (
        "it is the middle of 5 sites between blocks, where no merit is known to tell the better one, and the largest merit there, "
        f"{merits.best.ratio:.2g} x the mean of the existing weights is at least tau = {tau:g}"
    )
    again = type(look).from_dict(look.to_dict())
    assert again == look
    assert grower(inflated(), tau=merits.best.ratio * 1.01).step(DATA, loss_fn) is None
    plain = grower(inflated(), select="largest")
    grown = plain.step(DATA, loss_fn)
    assert grown is not None and grown.site == merits.best.site and plain.history.record.decisions[0].rule == ""


def test_several_blocks_are_spaced_evenly_by_default() -> None:
    model = inflated()
    sites = find_sites(model, points(2))
    growing = grower(model, max_growths=2)
    growing.step(DATA, loss_fn)
    assert [str(growth.site) for growth in growing.history] == [str(sites[1]), str(sites[3])]
    assert growing.history.record.decisions[0].rule == "one of 5 sites between blocks, evenly spaced"


def test_places_stay_in_their_stack_after_a_growth() -> None:
    model = inflated(2)
    growing = grower(model)
    for call in range(3):
        assert growing.step(DATA, loss_fn) is not None
        assert {site.stack for site in growing.sites()} == {growing.sites()[0].stack} != {None}
        assert len(growing.sites()) == 4 + call
    assert [look.rule.split()[3] for look in growing.history.record.decisions] == ["3", "4", "5"]


@pytest.mark.parametrize("what", ["units", "both"])
def test_a_separate_rate_for_units_is_refused_before_any_training(what: str) -> None:
    model = deep()
    with pytest.raises(
        ValueError, match=f"new_lr_factor must be None with what='{what}', got 0.5: new units are part of"
    ):
        Grower(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            preset="paper",
            example=points(2),
            trigger=At(3),
            what=what,
            rates=Rates(new_lr_factor=0.5),
        )


# --- what a look warns of points to the user's own line ---


def test_warnings_of_a_look_name_the_line_that_called_step() -> None:
    model: Any = fnn()
    small = grower(model, torch.optim.SGD(model.parameters()), max_factor=1.0001, step_name="step")
    with pytest.warns(UserWarning, match="step 1: nothing has grown, because every growth") as caught:
        small.step(DATA, loss_fn)
    assert caught[0].filename == __file__
    model = fnn()
    with torch.no_grad():
        model[0].bias.fill_(-100)
        model[2].bias.fill_(-100)
    dead = grower(model, torch.optim.SGD(model.parameters()))
    with pytest.warns(UserWarning, match="nothing has grown, because all 2 merits are zero") as caught:
        dead.step(DATA, loss_fn)
    assert caught[0].filename == __file__


def test_a_look_without_room_says_how_large_the_model_is() -> None:
    model = deep()
    size = sum(parameter.numel() for parameter in model.parameters())
    growing = grower(model, trigger=Every(1) & Limit(parameters=size + 1))
    assert growing.step(DATA, loss_fn) is None
    look = growing.history.record.decisions[0]
    assert look.reason.startswith("the trigger's limits leave no room") and look.parameters == size


# --- a strategy ---


class Backwards(Strategy):
    """Proposes the last two sites, takes the last one, and remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked, self.fails = 0, False

    def propose(self, model: Any, example: Any) -> Sites:
        return Sites(find_sites(model, example)[-2:])

    def score(self, model: Any, sites: Any, batches: Any, loss_fn: Any) -> Merits:
        return measure(model, sites, batches, loss_fn, ratio=False)

    def choose(self, merits: Merits, context: TriggerContext) -> list[Site]:
        self.asked += 1
        return [merit.site for merit in reversed(merits)]

    def reason(self, merits: Merits, taken: Any) -> str:
        if self.fails:
            raise ZeroDivisionError
        return super().reason(merits, taken)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Any) -> None:
        self.asked = state["asked"]


def test_a_strategy_says_where_what_it_is_worth_and_what_is_taken() -> None:
    model = deep()
    last = find_sites(model, points(2))[-1]
    strategy = Backwards()
    growing = grower(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, tau=1.0)
    growth = growing.step(DATA, loss_fn)
    assert growth is not None and growth.site == last and len(growing.last_merits or ()) == 2
    assert growing.history.record.decisions[0].reason == "Backwards chose 1 of 2 sites"
    assert growing.state_dict()["asked"] == 1

    strategy.fails = True  # after the layer went in
    before = growing.state_dict()
    with untouched(model, *growing.optimizers), pytest.raises(ZeroDivisionError):
        growing.step(DATA, loss_fn)
    assert growing.state_dict() == before and strategy.asked == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_registered_strategy_is_made_by_its_name(name: str) -> None:
    growing = grower(deep(), strategy=name, tau=1.0)
    assert isinstance(growing.strategy, Strategy) and growing.options.common["strategy"] == name
    assert f"{type(growing.strategy).__module__}:{type(growing.strategy).__name__}" == STRATEGIES[name]


# an option of those that say how to grow -> a value that is not its default
GIVEN: dict[str, Any] = {
    "tau": 0.5, "norm": "operator", "select": "largest", "form": "relu", "where": "linear", "kernel_size": 5, "units": 3,
    "init": "fresh", "per": "flops", "confidence": 0.9, "tolerance": 0.5, "floor": 0.0,
    "factor": 3, "order": "interleave", "spare": 1, "noise": 0.01,
}  # fmt: skip


class Asked:
    """Options that remember what was read of them."""

    def __init__(self, options: Options) -> None:
        self.options, self.read = options, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.options, name)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_option_that_the_strategy_does_not_use_is_refused_with_those_that_it_uses(name: str) -> None:
    kind = strategy_class(name)
    assert GIVEN.keys() == OF_STRATEGIES and kind.takes <= OF_STRATEGIES
    for option, value in GIVEN.items():
        level = {"confidence": 0.9} if option == "tolerance" and "confidence" in kind.takes else {}
        grow = "both" if "both" in kind.grows else kind.grows[0]
        given = {"strategy": name, "what": grow, option: value, **level}
        if option in kind.takes:
            assert getattr(Options(trigger=At(1), max_factor=None, **given), option) == value
        elif option == "tolerance":
            with pytest.raises(ValueError, match=r"tolerance=0\.5 needs confidence="):
                Options(trigger=At(1), **given)
        else:
            with pytest.raises(
                ValueError, match=f"^{option} must be left out with strategy='{name}', got .*: of the"
            ) as told:
                Options(trigger=At(1), **given)
            assert all(used in str(told.value) for used in kind.takes)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if not issubclass(strategy_class(name), Sensli)])
def test_what_a_strategy_says_that_it_takes_is_what_it_reads(name: str) -> None:
    asked: Any = Asked(Options(trigger=At(1), strategy=name))
    strategy_class(name).made(asked)
    assert asked.read & OF_STRATEGIES == strategy_class(name).takes


def test_what_is_about_layers_or_units_is_refused_where_these_do_not_grow() -> None:
    for option, grow, other in (("units", "layers", "units"), ("form", "units", "layers"),
                                ("kernel_size", "units", "layers")):  # fmt: skip
        with pytest.raises(
            ValueError, match=f"^{option} must be left out with what='{grow}', got .*: it is about {other}\\. Leave"
        ):
            grower(deep(), what=grow, **{option: GIVEN[option]})
        assert getattr(grower(deep(), what="both", **{option: GIVEN[option]}).options, option) == GIVEN[option]


def test_an_initialization_is_of_what_grows() -> None:
    for init, what, other in (
        ("random", "layers", "units"),
        ("fresh", "units", "layers"),
        (("copy", "random"), "units", "layers"),
    ):
        with pytest.raises(
            ValueError, match=f"^init must be about what grows with what='{what}', got .*: it is about {other}"
        ):
            grower(deep(), what=what, init=init)
    assert grower(deep(), what="both", init=("fresh", "random")).options.init == ("fresh", "random")
    found = find_sites(deep(), points(2), what="both", init=["random", "fresh"])
    assert {site.move.start for site in found if site.kind == "units"} == {"random"}


def test_a_strategy_grows_what_it_says() -> None:
    for name in STRATEGIES:
        grows = strategy_class(name).grows
        assert Options(trigger=At(1), strategy=name).what == grows[0]
        for grow in GROW:
            if grow in grows:
                assert Options(trigger=At(1), strategy=name, what=grow).what == grow
            else:
                with pytest.raises(
                    ValueError, match=f"^what must be '{grows[0]}' with strategy='{name}', got '{grow}': it"
                ):
                    Options(trigger=At(1), strategy=name, what=grow)


@pytest.mark.parametrize("name", ["gradmax", "random-units", "morphnet", "convsenn"])
def test_what_only_new_layers_can_have_is_refused_with_a_strategy_that_adds_units(name: str) -> None:
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grows = strategy_class(name).grows[0]
    with pytest.raises(
        ValueError, match=f"^new_lr_factor must be None with strategy='{name}', which grows {grows}, got 0.5: "
    ):
        Grower(
            model,
            optimizer,
            preset="paper",
            example=points(2),
            trigger=At(3),
            strategy=name,
            rates=Rates(new_lr_factor=0.5),
        )
    with pytest.raises(
        ValueError, match=f"^freeze_rest must be False with strategy='{name}', which grows {grows}, got T"
    ):
        Grower(
            model,
            optimizer,
            preset="paper",
            example=points(2),
            trigger=At(3),
            strategy=name,
            rates=Rates(freeze_rest=True),
        )
    if grows == "units":
        with pytest.raises(
            ValueError, match=r"^depth in Limit\(depth=3\) must be left out where only units grow, got 3"
        ):
            Grower(model, optimizer, preset="paper", example=points(2), trigger=At(3) & Limit(depth=3), strategy=name)
    Grower(
        model,
        optimizer,
        preset="paper",
        example=points(2),
        trigger=At(3),
        strategy="autogrow",
        rates=Rates(new_lr_factor=0.5, freeze_rest=True),
    )


def test_options_for_a_strategy_object_are_given_to_the_object() -> None:
    for option, value in GIVEN.items():
        with pytest.raises(ValueError, match=option):
            Options(trigger=At(1), strategy=Backwards(), **{option: value})
    with pytest.raises(
        ValueError,
        match=r"^tau must be left out with strategy=Backwards\(\.\.\.\), got 0\.5: .* Give it to Backwards\(\.\.\.\) i",
    ):
        Options(trigger=At(1), strategy=Backwards(), tau=0.5)


@pytest.mark.library
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_callback_refuses_them_when_it_is_made(library: str) -> None:
    pytest.importorskip(library)
    make = importlib.import_module(f"sensli.integrations.{library}").GrowthCallback
    with pytest.raises(ValueError, match=r"^tau must be left out with strategy='net2net', got 0\.0: "):
        make(Every(2), strategy="net2net", tau=0.0)
    with pytest.raises(ValueError, match=r"^depth in Limit\(depth=3\) must be left out"):
        make(Limit(depth=3), what="units")


def test_a_strategy_that_is_not_registered_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        ValueError, match=f"strategy must be one of {', '.join(map(repr, STRATEGIES))}, or a Strategy object, got 'x'"
    ):
        grower(deep(), strategy="x")
    with pytest.raises(ValueError, match=r"got the class Backwards. Call it: strategy=Backwards\(\.\.\.\)\."):
        grower(deep(), strategy=Backwards)
    assert Options(trigger=Every(1), strategy=Backwards()).common["strategy"] == "Backwards"


def test_what_find_sites_and_insert_take_reaches_them() -> None:
    """The kernel of new convolutions, the start of twins, and the rest that rests."""
    model = cnn()
    made = Grower(
        model, torch.optim.SGD(model.parameters()), preset="paper", example=images(2), trigger=At(1), kernel_size=1
    )
    assert [str(site) for site in made.sites()] == [str(site) for site in find_sites(model, images(2), kernel_size=1)]
    assert str(made.sites()) != str(find_sites(model, images(2)))

    stack = residual(3)
    for init in ("copy", "fresh"):
        made = Grower(
            stack, torch.optim.SGD(stack.parameters()), preset="paper", example=points(2), trigger=At(1), init=init
        )
        assert list(made.sites()) == list(find_sites(stack, points(2), init=init))


def test_all_that_has_grown_trains_after_growths_that_freeze_the_rest() -> None:
    model, data = deep(4), batches()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Grower(
        model,
        optimizer,
        preset="paper",
        example=points(2),
        trigger=At(1, 2),
        tau=0.0,
        max_growths=2,
        rates=Rates(freeze_rest=True),
        max_factor=None,
    )
    for call in (1, 2):
        made.step(data, loss_fn)
        new = {name for growth in made.history for name in growth.parameters}
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == new
        assert len(made.history) == 2 * call
        optimizer.zero_grad()
        loss_fn(model(data[0][0]), data[0][1]).backward()
        optimizer.step()
    for _ in range(4):
        undo(model, optimizer=optimizer)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == {"0.bias"}
    with pytest.raises(ValueError, match="freeze_rest must be False with what='both', got True"):
        Grower(
            model,
            optimizer,
            preset="paper",
            example=points(2),
            trigger=At(1),
            rates=Rates(freeze_rest=True),
            what="both",
        )
