"""Workers in processes of their own: order, progress, states, a lost worker, errors of one line, and that none is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sensli_lab.errors import PaperError
from sensli_lab.work.workers import HERE, Place, Save, Tell, WorkCall, processes

pytestmark = [pytest.mark.process, pytest.mark.slow]  # each process imports torch


@dataclass(frozen=True)
class Number:
    """To be counted up to."""

    value: int
    after: int = -1
    cost: float = 1.0

    def needs(self, other: Number) -> bool:
        return self.after == other.value

    def __str__(self) -> str:
        return f"number {self.value}"


def count(given: tuple[int, int], tell: Tell, save: Save) -> tuple[int, int]:
    """From the state to the number: where it began, and where it ended."""
    state, value = given
    tell(0.0)
    for reached in range(state + 1, value + 1):
        save(reached)
    return state, value


def die(given: tuple[int, int], tell: Tell, save: Save) -> None:
    """After one more state; one that has three of them is done."""
    state, _ = given
    if state < 2:
        save(state + 1)
        os.kill(os.getpid(), signal.SIGKILL)


def die_at_once(given: Any, tell: Tell, save: Save) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(given: Any, tell: Tell, save: Save) -> None:
    raise ValueError("of no\nuse")


def refuse(given: Any, tell: Tell, save: Save) -> None:
    raise PaperError("not today.")


@dataclass
class Counting:
    """Numbers as work; what is stored stays in memory."""

    items: Sequence[Number]
    function: Any = count
    states: dict[int, int] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    interrupt: bool = False

    def call(self, item: Number) -> WorkCall:
        assert item.after == -1 or item.after in self.results
        return WorkCall(self.function, (self.states.get(item.value, 0), item.value))

    def save(self, item: Number, state: int) -> None:
        self.states[item.value] = state
        if self.interrupt:
            raise KeyboardInterrupt

    def done(self, item: Number, result: Any, where: str) -> None:
        assert where == ""
        self.results[item.value] = result


def run(work: Counting, place: Place) -> list[float]:
    reached: list[float] = []
    with place as workers:
        workers.compute(work, lambda done, note: reached.append(done))
    return reached


def test_processes_do_what_this_process_does() -> None:
    here, there = (Counting([Number(3), Number(4, after=3), Number(5)], states={5: 2}) for _ in range(2))
    assert run(here, HERE)[-1] == 2.0 and run(there, processes(2))[-1] == 3.0
    assert here.results == there.results == {3: (0, 3), 4: (0, 4), 5: (2, 5)}
    assert here.states == there.states == {3: 3, 4: 4, 5: 5}
    assert not multiprocessing.active_children()


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_lost_worker_goes_on_from_its_last_state_but_not_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    work = Counting([Number(7)], die)
    run(work, processes(2))
    assert work.states == {7: 2} and work.results == {7: None}
    assert capsys.readouterr().out == "number 7: its worker was lost (exit code -9); running it again\n" * 2
    text = r"^number 7: its worker was lost 3 times \(exit code -9\)\. If it runs out of memory, use fewer processes"
    with pytest.raises(PaperError, match=text):
        run(Counting([Number(7)], die_at_once), processes(1))
    assert not multiprocessing.active_children()


def test_what_fails_is_one_line_and_leaves_no_process() -> None:
    text = (
        rf"^number 1, in another process: ValueError: of no use \(\S*{Path(__file__).name}, line \d+\)\. Run .* --jobs"
    )
    with pytest.raises(PaperError, match=text):
        run(Counting([Number(1)], fail), processes(2))
    with pytest.raises(PaperError, match=r"^number 1, in another process: not today\.$"):
        run(Counting([Number(1)], refuse), processes(2))
    with pytest.raises(KeyboardInterrupt):
        run(Counting([Number(10**9), Number(2)], interrupt=True), processes(2))
    assert not multiprocessing.active_children()
