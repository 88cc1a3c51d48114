"""All or nothing: whatever is raised at whatever line, the model and all that follows it are entirely old or entirely new, and train on."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from every_line import Injected, Line, Tracer, ends_here, lines_of, raising
from models import alive
from sensli import (
    Grower,
    History,
    Rates,
    Site,
    Trial,
    find_sites,
    grow,
    measure,
    recycle,
    remove_dead,
    replay,
    triggers,
    undo,
)
from sensli.errors import OptimizerError, UnsupportedModel
from sensli.growing.strategy import Strategy
from sensli.merits.merits import Merits
from sensli.modules import grown
from sensli.modules.engines.all_or_nothing import Waiting
from sensli.modules.engines.distributed import Together
from sensli.moves.inserting import _KEPT
from sensli.moves.sites import Sites
from sensli.moves.stacking import find_stack_copies
from sensli.moves.width.widening import _MADE
from sensli.surgery.dead import find_dead, renew
from sensli.surgery.rewinding import rewind

X = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] * X[:, 1] > 0).long()


class Block(nn.Module):
    def __init__(self, config: SimpleNamespace, number: int) -> None:
        super().__init__()
        self.number, self.norm = number, nn.LayerNorm(config.width)
        self.attention = nn.MultiheadAttention(config.width, config.heads, batch_first=True)
        self.up, self.act, self.down = nn.Linear(config.width, 6), nn.ReLU(), nn.Linear(6, config.width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(self.act(self.up(x)))


class Blocks(nn.Module):
    """Blocks in a list, which the model counts and each block numbers; an object that is no module says how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=4, heads=2, layers=2)
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block(self.config, i) for i in range(self.config.layers)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(1)
        for i in range(self.config.layers):
            x = self.blocks[i](x)
        return self.head(x.squeeze(1))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return alive(
        nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    )


class Body(nn.Module):
    """Ends in a function, so that a layer after it goes around the head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.two(torch.relu(self.one(x))))


class Averaging(nn.Module):
    """Holds an average of a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(4, 2)
        self.ema = AveragedModel(self.body).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def averaging() -> nn.Module:
    torch.manual_seed(0)
    return alive(Averaging())


def dying() -> nn.Module:
    """Two units of each layer are dead."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    alive(model)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight[1:3], layer.bias[1:3] = 0.0, -1.0
    return model


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return alive(Blocks())


class Training:
    """A model with all that follows it, after two steps; the rate is a tensor, which is written in place."""

    def __init__(self, make: Callable[[], nn.Module], part: str = "") -> None:
        torch.manual_seed(0)
        self.model, self._part = make(), part
        rate = torch.tensor(0.01, dtype=torch.float64)
        self.optimizer = torch.optim.AdamW(list(self.model.named_parameters()), lr=rate, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.average = AveragedModel(self.model.get_submodule(part))
        self.history = History()
        self.grower: Grower | None = None
        for _ in range(2):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(X), Y).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.update_average()

    def update_average(self) -> None:
        self.average.update_parameters(self.model.get_submodule(self._part))

    def seen(self, *, objects: bool) -> Any:
        """Everything, in a form that compares with ==; with the objects that hold it, or by values alone."""
        number = id if objects else (lambda thing: 0)
        order = {id(p): i for i, p in enumerate(self.model.parameters())}

        def tensor(value: Tensor | None) -> Any:
            if value is None:
                return None
            gradient = value.grad.tolist() if value.is_leaf and value.grad is not None else None
            return number(value), value.requires_grad, value.detach().tolist(), gradient

        def plain(value: Any) -> Any:
            if isinstance(value, Tensor):
                return tensor(value)
            if isinstance(value, SimpleNamespace):
                return number(value), dict(vars(value))
            if isinstance(value, dict):
                return [(key, plain(each)) for key, each in value.items()]
            if isinstance(value, (list, tuple)):
                return [plain(each) for each in value]
            if isinstance(value, set):
                return sorted(value)
            return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__

        def modules(root: nn.Module) -> Any:
            return [
                (path, number(module), type(module).__name__, sorted((k, plain(v)) for k, v in vars(module).items()))
                for path, module in root.named_modules(remove_duplicate=False)
            ]

        optimizer, scheduler = self.optimizer, self.scheduler
        return {
            "model": modules(self.model),
            "average": modules(self.average),
            "groups": [
                [(k, [order.get(id(p)) for p in v] if k == "params" else plain(v)) for k, v in group.items()]
                for group in optimizer.param_groups
            ],
            "state": [(order.get(id(p)), plain(state)) for p, state in optimizer.state.items()],
            "hooks": [list(optimizer._optimizer_step_pre_hooks), list(optimizer._optimizer_step_post_hooks)]
            if objects
            else [],
            "scheduler": plain({k: v for k, v in vars(scheduler).items() if k != "optimizer"}),
            "history": self.history.to_dict(),
            "grower": None if self.grower is None else [self.grower.state_dict(), number(self.grower.last_merits)],
            "memory": [[len(kept.get(module, ())) for module in self.model.modules()] for kept in (_KEPT, _MADE)],
            "random": torch.get_rng_state().tolist(),
        }

    def still_trains(self) -> None:
        """A backward pass, after which the gradients are those of before."""
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        for parameter, _ in gradients:
            parameter.grad = None
        cross_entropy(self.model(X), Y).backward()
        for parameter, gradient in gradients:
            assert not parameter.requires_grad or (
                parameter.grad is not None and parameter.grad.shape == parameter.shape
            )
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)


class Known(Strategy):
    """Answers at once, always the same."""

    def __init__(self, merits: Merits) -> None:
        self.merits = merits

    def propose(self, model: nn.Module, example: Any) -> Sites:
        return Sites([merit.site for merit in self.merits])

    def score(self, model: nn.Module, sites: Sequence[Site], batches: Iterable[Any], loss_fn: Any) -> Merits:
        return self.merits

    def choose(self, merits: Merits, moment: Any) -> list[Site]:
        return [merit.site for merit in merits]


# --- what is done ---

Work = Callable[[], Any]
Case = tuple[Training, Work]


def growth_of(make: Callable[[], nn.Module], name: str, *, back: bool = False, **options: Any) -> Case:
    """One growth, or the undoing of one."""
    training = Training(make)
    finding = {key: options.pop(key) for key in ("what", "init") if key in options}
    sites = (
        find_stack_copies(training.model, X) if name == "copy" else find_sites(training.model, X, units=1, **finding)
    )
    site = next(site for site in sites if name in str(site))
    followers: dict[str, Any] = {"optimizer": training.optimizer, "scheduler": training.scheduler}

    def work() -> None:
        grow(training.model, site, **followers, **options)

    if not back:
        return training, work
    work()
    return training, lambda: undo(training.model, **followers)


def dead_units(change: Callable[..., Any], back: bool = False) -> Case:
    training = Training(dying)
    if not back:
        return training, lambda: change(training.model, X, optimizer=training.optimizer)
    change(training.model, X, optimizer=training.optimizer)
    return training, lambda: undo(training.model, optimizer=training.optimizer)


def renewed() -> Case:
    """The dead units of one layer, which are known."""
    training = Training(dying)
    widths = find_sites(training.model, X, what="units", units=1)
    found = find_dead(training.model, widths, X, None, Together(None, "test"))
    return training, lambda: renew(training.model, found.sites[0], optimizer=training.optimizer, check=found.check)


def replayed() -> Case:
    model = plain()
    history = History(
        [
            grow(model, find_sites(model, X)[0]),
            grow(model, find_sites(model, X, what="units", units=2)[0]),
        ]
    )
    training = Training(plain)
    return training, lambda: replay(training.model, history)


def rewound() -> Case:
    """From one growth to two others."""
    other = plain()
    wanted = History(
        [grow(other, find_sites(other, X, what="units", units=2)[0]), grow(other, find_sites(other, X)[0])]
    )
    training = Training(plain)
    followers: dict[str, Any] = {"optimizer": training.optimizer, "scheduler": training.scheduler}
    training.history.append(grow(training.model, find_sites(training.model, X)[0], **followers))
    return training, lambda: rewind(training.model, training.history, wanted, **followers)


def rewound_averages() -> Case:
    """From a layer to units, and from a layer around an averaged part to none."""
    other = averaging()
    wanted = History([grow(other, find_sites(other, X, what="units", units=2)[0])])
    training, work = stepped(averaging, ["before head"], part="head")
    work()
    followers: dict[str, Any] = {"optimizer": training.optimizer, "scheduler": training.scheduler}
    return training, lambda: rewind(training.model, training.history, wanted, **followers, averaged=training.average)


def stepped(make: Callable[[], nn.Module], names: Sequence[str], part: str = "", **options: Any) -> Case:
    """A step of a Grower, with all that can follow; the average is one of the model or of a part."""
    training = Training(make, part)
    sites = list(find_sites(training.model, X, what="both", units=1))
    known = measure(
        training.model, [next(site for site in sites if name in str(site)) for name in names], [(X, Y)], cross_entropy
    )
    training.grower = Grower(
        training.model, training.optimizer, preset="paper",
            example=X[:2], trigger=triggers.Every(1), strategy=Known(known), max_factor=None,
        scheduler=training.scheduler, averaged=training.average, rates=Rates(lr_factor=0.5), **options,
    )  # fmt: skip
    training.history = training.grower.history
    return training, lambda: training.grower.step([(X, Y)], cross_entropy)


CASES: dict[str, Callable[[], Case]] = {
    "layer": lambda: growth_of(plain, "after 4", lr_factor=0.5, check=X),
    "layer of its own": lambda: growth_of(plain, "after 2", new_lr_factor=2.0, freeze_rest=True),
    "units": lambda: growth_of(plain, "in 0", what="units", lr_factor=0.5, check=X),
    "copied units": lambda: growth_of(plain, "in 0", what="units", init="net2net"),
    "units that warm up": lambda: growth_of(plain, "in 0", what="units", warmup=5),
    "undo units that warm up": lambda: growth_of(plain, "in 0", what="units", warmup=5, back=True),
    "twin": lambda: growth_of(blocks, "Block", lr_factor=0.5),
    "stack": lambda: growth_of(blocks, "copy"),
    "heads": lambda: growth_of(blocks, "head", what="units"),
    "undo layer": lambda: growth_of(plain, "after 4", lr_factor=0.5, back=True),
    "undo layer of its own": lambda: growth_of(plain, "after 2", new_lr_factor=2.0, freeze_rest=True, back=True),
    "undo units": lambda: growth_of(plain, "in 0", what="units", lr_factor=0.5, back=True),
    "undo copied units": lambda: growth_of(plain, "in 0", what="units", init="net2net", back=True),
    "undo twin": lambda: growth_of(blocks, "Block", back=True),
    "undo stack": lambda: growth_of(blocks, "copy", back=True),
    "undo heads": lambda: growth_of(blocks, "head", what="units", back=True),
    "recycle": lambda: dead_units(recycle),
    "recycle one": renewed,
    "undo recycle": lambda: dead_units(recycle, back=True),
    "remove dead": lambda: dead_units(remove_dead),
    "undo remove dead": lambda: dead_units(remove_dead, back=True),
    "average inside": lambda: growth_of(averaging, "in body.one", what="units"),
    "undo average inside": lambda: growth_of(averaging, "in body.one", what="units", back=True),
    "replay": replayed,
    "rewind": rewound,
    "rewind averages": rewound_averages,
    "step": lambda: stepped(plain, ["after 4", "in 0"], max_growths=2),
    "step that recycles": lambda: stepped(dying, ["after 3"], recycle=True),
    "step with averages of parts": lambda: stepped(
        averaging, ["in body.two", "in body.one"], part="head", max_growths=2
    ),
    "step around an averaged part": lambda: stepped(averaging, ["before head"], part="head"),
    "trial": lambda: stepped(plain, ["after 4", "in 0"], trial=Trial(2, candidates=2)),
}


def check_lines(
    name: str, errors: Sequence[type[BaseException]], chosen: Callable[[int, Line], bool], *, later: bool = False
) -> None:
    """Raise at the chosen ones of all lines that are reached, one after the other, and look at everything each time.

    At the first visit of a line, or at ``later`` ones.
    """
    training, work = CASES[name]()
    lines = lines_of(work)
    new = training.seen(objects=False)
    training, work = CASES[name]()
    old = training.seen(objects=True)
    wanted = [line for number, line in enumerate(lines) if chosen(number, line) and not (later and ends_here(line))]
    visits = [(line, visit) for line in wanted for visit in ({2, lines[line]} - {1} if later else {1})]
    assert len(visits) > 20
    for number, (line, visit) in enumerate(visits):
        error, done = errors[number % len(errors)], False
        with suppress(Exception, KeyboardInterrupt, SystemExit), Tracer(line, visit, raising(error)) as tracer:
            work()
            done = True  # somebody knew what to do without
        assert tracer.fired or later, line
        if training.seen(objects=True) != old:
            now = training.seen(objects=False)
            assert done or not [key for key in new if now[key] != new[key]], (line, visit, error)
            training.still_trains()
            training, work = CASES[name]()
            old = training.seen(objects=True)
        training.still_trains()
    work()
    assert training.seen(objects=False) == new
    optimizer = training.optimizer if name != "replay" else torch.optim.SGD(training.model.parameters())
    cross_entropy(training.model(X), Y).backward()
    optimizer.step()
    if training.grower is not None:
        training.update_average()
    grow(training.model, find_sites(training.model, X)[0], optimizer=optimizer)


MAIN = ("layer", "units", "twin", "undo layer", "undo units", "undo twin")
# Of the others the lines that only they reach, and some of the common ones; `make thorough` takes all.
OWN = {
    "layer of its own": ("surgery/growth.py", "surgery/rates.py"),
    "copied units": ("moves/stretching.py", "moves/inserting.py", "moves/width/widening.py"),
    "units that warm up": ("surgery/warmup.py",),
    "undo units that warm up": ("surgery/warmup.py",),
    "stack": ("moves/stacking.py", "moves/point.py"),
    "heads": ("moves/width/widening.py", "surgery/growth.py"),
    "undo layer of its own": ("surgery/growth.py", "surgery/rates.py"),
    "undo copied units": ("moves/stretching.py", "moves/inserting.py", "moves/width/widening.py"),
    "undo stack": ("moves/stacking.py", "moves/point.py"),
    "undo heads": ("moves/width/widening.py", "surgery/growth.py"),
    "recycle": ("surgery/dead.py",),
    "recycle one": ("moves/dead.py", "moves/inserting.py"),
    "undo recycle": ("moves/dead.py", "moves/inserting.py"),
    "remove dead": (),
    "undo remove dead": ("moves/dead.py", "moves/inserting.py"),
    "average inside": ("surgery/averaging.py",),
    "undo average inside": ("surgery/averaging.py",),
    "replay": ("surgery/growth.py",),
    "rewind": ("surgery/rewinding.py",),
    "rewind averages": ("surgery/averaging.py",),
    "step": ("growing/following.py", "growing/grower.py", "growing/grower.py", "growing/grower.py", "surgery/averaging.py"),
    "step that recycles": ("growing/following.py",),
    "step with averages of parts": ("surgery/averaging.py", "surgery/averaging.py"),
    "step around an averaged part": ("surgery/averaging.py",),
    "trial": ("growing/trials.py", "growing/trials.py", "growing/trials.py"),
}  # fmt: skip


def test_every_case_has_its_lines() -> None:
    assert {*MAIN, *OWN} == set(CASES)


@pytest.mark.parametrize("name", MAIN[:2])
def test_an_error_at_some_lines_leaves_all_as_it_was(name: str) -> None:
    check_lines(name, (Injected, KeyboardInterrupt), lambda number, line: number % 11 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAIN)
def test_an_error_at_every_line_leaves_all_as_it_was_or_comes_when_all_is_done(name: str) -> None:
    check_lines(name, (Injected, KeyboardInterrupt), lambda number, line: True)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_an_error_at_every_line_of_its_own_leaves_all_as_it_was(name: str) -> None:
    check_lines(name, (Injected, KeyboardInterrupt), lambda number, line: number % 29 == 0 or line[0] in OWN[name])


@pytest.mark.thorough
@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("name", CASES)
def test_any_error_at_every_line_leaves_all_as_it_was(name: str, error: type[BaseException]) -> None:
    check_lines(name, (error,), lambda number, line: True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_an_error_in_a_later_turn_of_a_loop_leaves_all_as_it_was(name: str) -> None:
    check_lines(name, (KeyboardInterrupt, Injected), lambda number, line: True, later=True)


# --- Ctrl-C ---


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is handled as in a program of one's own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "units" else []) for name in MAIN]
)
def test_a_signal_during_the_change_comes_when_the_change_is_complete(name: str, interruptible: None) -> None:
    training, work = CASES[name]()
    lines = list(lines_of(work))
    new = training.seen(objects=False)
    function = grown.unmark if name.startswith("undo") else grown.mark
    source, first = inspect.getsourcelines(function)
    inside = lines.index(
        ("modules/grown.py", next(n for n in range(first + 1, first + len(source)) if ("modules/grown.py", n) in lines))
    )
    assert inside < len(lines) - 20
    training, work = CASES[name]()
    old = training.seen(objects=True)
    for number in (*range(0, inside, 40), *range(inside, len(lines), 5)):
        with pytest.raises(KeyboardInterrupt), Tracer(lines[number], 1, interrupt):
            work()
        if number < inside and training.seen(objects=True) == old:
            continue
        assert training.seen(objects=False) == new, lines[number]
        training, work = CASES[name]()
        old = training.seen(objects=True)


def test_a_signal_waits_a_second_one_does_not(interruptible: None) -> None:
    came = []
    with pytest.raises(KeyboardInterrupt), Waiting():  # at the end
        interrupt()
        came.append("waits")
    with pytest.raises(KeyboardInterrupt), Waiting():
        interrupt()
        interrupt()
        came.append("never")
    with pytest.raises(KeyboardInterrupt), Waiting():
        with Waiting():
            interrupt()
        came.append("nested")
    assert came == ["waits", "nested"]


def test_a_handler_of_ones_own_is_called_later_and_stays(interruptible: None) -> None:
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    with Waiting():
        interrupt()
        assert not came
    assert came == [signal.SIGINT]
    for ignored in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, ignored)
        with Waiting():
            assert signal.getsignal(signal.SIGINT) == ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_grow_too_and_leave_the_handler_alone(interruptible: None) -> None:
    model, found = plain(), []

    def work() -> None:
        with Waiting():
            found.append(signal.getsignal(signal.SIGINT))
        grow(model, find_sites(model, X)[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler] and undo(model).number == 1


# --- other errors ---


def test_an_error_when_the_optimizer_follows_takes_the_new_shapes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    training, work = growth_of(plain, "in 0", what="units")
    old = training.seen(objects=True)

    def fail(parameter: nn.Parameter) -> None:
        raise MemoryError

    monkeypatch.setattr("sensli.surgery.optimizers._new_accumulator", fail)
    with pytest.raises(MemoryError):
        work()
    assert training.seen(objects=True) == old
    monkeypatch.undo()
    work()
    training.still_trains()


def test_undo_with_an_optimizer_of_another_model_changes_nothing() -> None:
    training, _ = growth_of(plain, "in 0", what="units", back=True)
    other = torch.optim.AdamW(plain().parameters())
    old = training.seen(objects=True)
    with pytest.raises(OptimizerError, match="optimizer=AdamW contains no parameter of this Sequential"):
        undo(training.model, optimizer=other)
    driver = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(OptimizerError, match=r"the StepLR drives an optimizer \(AdamW\) other than those given"):
        undo(training.model, optimizer=training.optimizer, scheduler=driver)
    assert training.seen(objects=True) == old
    undo(training.model, optimizer=training.optimizer, scheduler=training.scheduler)
    training.still_trains()


# --- inference mode ---


@pytest.mark.parametrize("name", CASES)
def test_inference_mode_makes_no_difference(name: str) -> None:
    training, work = CASES[name]()
    work()
    expected = training.seen(objects=False)
    training, work = CASES[name]()
    with torch.inference_mode():
        work()
        assert torch.is_inference_mode_enabled()
    assert training.seen(objects=False) == expected
    states = [
        value for state in training.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]
    held = [*training.model.parameters(), *training.model.buffers(), *training.average.parameters(), *states]
    assert not any(tensor.is_inference() for tensor in held)
    training.still_trains()


@pytest.mark.parametrize("kind", ["layers", "units"])
def test_inputs_that_were_made_in_inference_mode(kind: str) -> None:
    model, other = plain(), plain()
    merits = measure(other, find_sites(other, X, what=kind), [(X, Y)], cross_entropy)
    with torch.inference_mode():
        x, y = X.clone(), Y.clone()
        found = find_sites(model, x, what=kind)
        again = measure(model, found, [(x, y)], cross_entropy)
        assert [merit.value for merit in again] == [merit.value for merit in merits]
        grow(model, again[0], check=x)
    grow(other, merits[0])
    assert torch.equal(model(X), other(X))


def test_a_model_that_was_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = plain()
    calls: list[Work] = [
        lambda: find_sites(model, X),
        lambda: Grower(model, preset="paper", example=X, trigger=triggers.Every(1)),
        lambda: grow(model, "after 4"),
        lambda: undo(model),
        lambda: recycle(model, X),
        lambda: replay(model, History()),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModel, match=r"made inside torch\.inference_mode\(\)"):
            call()
