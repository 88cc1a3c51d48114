"""Ctrl-C waits while something is being changed."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any


class Waiting:
    """Inside of it a first Ctrl-C waits for the end, and a second one does not, so that what hangs can be stopped.

    Only the main thread gets signals; elsewhere, or where Python does not handle Ctrl-C, nothing happens. May be nested.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # whose turn it is at the end
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Waiting:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self) -> None:
        """From now on Ctrl-C waits; nothing happens if it does already."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), Waiting):
                self._handler = handler
                with suppress(ValueError):  # of an interpreter inside of another one, which gets no signals
                    signal.signal(signal.SIGINT, self._note)

    def end(self) -> None:
        """From now on it does not, and one that has waited comes now; nothing happens if none was to wait."""
        if self._handler is not None and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self._handler)
        handler, came = self._handler, self._came
        self._handler = self._came = None
        if handler is not None and came is not None:
            handler(*came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None and self._handler is not None:
            self._handler(number, frame)
        self._came = number, frame
