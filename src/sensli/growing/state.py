"""The state of a Grower: remembered in case a step fails, and read from a checkpoint, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from sensli.errors import HistoryError, SensliError
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.trigger import Trigger
from sensli.modules import checks
from sensli.modules.marks import grown
from sensli.surgery.history.growth import names_of_today
from sensli.surgery.history.history import History

_NEWER = {"largest_loss"}  # states that were saved earlier lack it


def remember(history: History, strategy: Strategy, trigger: Trigger) -> Callable[[], None]:
    """How to put back what a step changes of a Grower itself."""
    record = history.record.copied()
    chosen, fired = strategy.state_dict(), trigger.state_dict()

    def put_back() -> None:
        history.record.become(record)
        strategy.load_state_dict(chosen)
        if trigger.state_dict() != fired:
            trigger.load_state_dict(fired)

    return put_back


def read(state: Mapping[str, Any], network: nn.Module, wanted: Collection[str]) -> tuple[int, History]:
    """Calls and history of a state that has the keys in ``wanted`` and belongs to this network."""
    checks.instance("state", state, Mapping, "what Grower.state_dict() returned", error=HistoryError)
    missing = set(wanted) - _NEWER - set(state)
    if missing:
        raise HistoryError(f"Not a state of a Grower: the keys {sorted(missing)} are missing. Use an intact copy.")
    with _reading():
        history, calls = History.from_dict(state["history"]), state["calls"]
        if type(calls) is not int or not 0 <= calls < 2**63:
            raise ValueError(f"calls is {calls!r}")
        _check_grown(network, history)
        return calls, history


def load(state: Mapping[str, Any], strategy: Strategy, trigger: Trigger) -> None:
    """Give strategy and trigger their states, or raise and leave both as they were."""
    before = strategy.state_dict()
    with _reading():
        strategy.load_state_dict(state)
    try:
        trigger.load_state_dict(state["trigger"])
    except Exception as error:
        strategy.load_state_dict(before)
        raise HistoryError(
            f"the state belongs to a trigger other than {trigger!r}. Make the Grower with the trigger it was saved with."
        ) from error


@contextmanager
def _reading() -> Iterator[None]:
    """Whatever the parts of a damaged state raise becomes one error."""
    try:
        yield
    except SensliError:
        raise
    except Exception as error:
        raise HistoryError(
            f"the state of the Grower is damaged: {type(error).__name__}: {error}. Use an intact copy."
        ) from error


def _check_grown(network: nn.Module, history: History) -> None:
    names = [name for name, _ in network.named_parameters()]
    numbers = [number for number, _, _ in grown(network)]
    lacking = [str(name) for name in names_of_today(history) if name not in names]
    lacking += [f"growth {growth.number}" for growth in history if growth.number not in numbers]
    if lacking:
        raise HistoryError(
            f"the model lacks {lacking[0]}: it has not grown as this state says. "
            "Call replay(model, History.from_dict(state['history'])) before loading the state."
        )
