"""An error or an interrupt at every line of the code that changes things."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import sensli

SOURCE = Path(sensli.__file__).parent
# What changes a model or what follows it, and what calls that.
CHANGES = (
    "surgery", "growing/following.py", "growing/grower.py", "growing/trials.py", "moves/inserting.py", "moves/point.py",
    "moves/stretching.py", "moves/width/widening.py", "moves/dead.py", "moves/stacking.py", "modules/grown.py", "modules/wrappers.py",
    "modules/engines",
)  # fmt: skip
# The way back itself, and what ends the waiting of a signal: an error in there is not survived. It is short and calls nobody else's code.
WAY_BACK = {
    "modules/engines/all_or_nothing.py": (
        "__exit__", "put_back", "<lambda>", "_note", "_fill", "_objects", "<listcomp>", "_restore", "_set", "_write", "_point", "_is_at",
        "end",
    ),
}  # fmt: skip

Line = tuple[str, int]


class Injected(Exception):
    """What no code expects."""


class Tracer:
    """Notes the lines that are reached, and raises at one of them, the first time or a later one."""

    def __init__(self, at: Line | None = None, visit: int = 1, what: Callable[[], None] | None = None) -> None:
        self.at, self.visit, self.what = at, visit, what
        self.reached: dict[Line, int] = {}
        self.fired = False
        self._files: dict[str, str | None] = {}

    def __enter__(self) -> Tracer:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.fired:
            return None
        code = frame.f_code
        try:
            name = self._files[code.co_filename]
        except KeyError:
            name = self._files[code.co_filename] = _covered(code.co_filename)
        if name is None or code.co_name in WAY_BACK.get(name, ()) or (self.at is not None and self.at[0] != name):
            return None
        return lambda frame, event, arg: self._line(name, frame, event)

    def _line(self, name: str, frame: FrameType, event: str) -> Any:
        if event == "line" and not self.fired:
            line = name, frame.f_lineno
            count = self.reached[line] = self.reached.get(line, 0) + 1
            if line == self.at and count == self.visit:
                self.fired = True
                sys.settrace(self._before)
                assert self.what is not None
                self.what()
        return lambda frame, event, arg: self._line(name, frame, event)


def _covered(path: str) -> str | None:
    file = Path(path)
    if not file.is_relative_to(SOURCE):
        return None
    name = file.relative_to(SOURCE).as_posix()
    return name if any(name == each or name.startswith(f"{each}/") for each in CHANGES) else None


def raising(error: type[BaseException]) -> Callable[[], None]:
    def fire() -> None:
        raise error("injected")

    return fire


def lines_of(work: Callable[[], Any]) -> dict[Line, int]:
    """The lines that a piece of work reaches, in that order, and how often."""
    with Tracer() as tracer:
        work()
    return tracer.reached


def ends_here(line: Line) -> bool:
    """Whether a later visit is the end of a ``with``: to raise there would leave out its end, which no error and no signal does."""
    return linecache.getline(str(SOURCE / line[0]), line[1]).lstrip().startswith("with ")
