"""Progress: a bar with the time left on a terminal, one quiet line per arm elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    def start(self, what: str, cost: float) -> None: ...

    def advance(self, share: float) -> None: ...

    def note(self, text: str) -> None: ...


class Quiet:
    """No bar: what was done is printed when it is done."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.note = write

    def start(self, what: str, cost: float) -> None:
        pass

    def advance(self, share: float) -> None:
        pass


@contextmanager
def progress(total: float) -> Iterator[Progress]:
    """A progress report over work of `total` estimated seconds."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        yield Quiet(print)
        return
    if not sys.stderr.isatty():
        yield Quiet(print)
        return
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")]
    console = Console(stderr=True)
    with Bar(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("starting", total=total)

        class Rich:
            done = 0.0
            cost = 0.0

            def start(self, what: str, cost: float) -> None:
                self.done += self.cost
                self.cost = cost
                bar.update(task, description=what, completed=self.done)

            def advance(self, share: float) -> None:
                bar.update(task, completed=self.done + share * self.cost)

            def note(self, text: str) -> None:
                bar.console.print(text, highlight=False)

        yield Rich()
        bar.update(task, description="done", completed=total)
