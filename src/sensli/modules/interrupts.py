"""Ctrl-C waits while something is being changed."""

from __future__ import annotations

import signal
import threading
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
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), Waiting):
                self._handler = handler
                try:
                    signal.signal(signal.SIGINT, self._note)
                except ValueError:  # not in the main interpreter, which alone may
                    self._handler = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, handler)
        came, self._came = self._came, None
        if came is not None:
            handler(*came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None and self._handler is not None:
            self._handler(number, frame)
        self._came = number, frame
