"""What a Ray task does on its machine: train a job, and yield the progress, the states and the result as they come."""

from __future__ import annotations

import io
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from sensli import __version__
from sensli.errors import SensliError
from sensli.paper.engines.engine import engine
from sensli.paper.errors import PaperError
from sensli.paper.running.pieces import train

TELL_EVERY = 0.5  # seconds
News = tuple[str, Any]  # ("share", how much is done), ("state", packed), ("done", packed), ("failed", the error)


def work(version: str, payload: bytes) -> Iterator[News]:
    """Train jobs, or only check those that have no runs. An error is one line, names the machine and can be sent back."""
    host = platform.node()
    if version != __version__:  # before anything is unpacked
        raise PaperError(
            f"on {host}: sensli is {__version__} there and {version} here. Install the same version on every machine."
        )
    news: SimpleQueue[News] = SimpleQueue()
    cancelled = threading.Event()
    # The training calls back while a stream is asked, so a thread runs between them.
    threading.Thread(target=_train, args=(unpacked(payload), host, news, cancelled), daemon=True).start()
    kind = ""
    try:
        while kind != "done":
            with suppress(Empty):  # time to notice that Ray cancels this task: it does not wake a waiting thread
                kind, value = news.get(timeout=TELL_EVERY)
                if kind == "failed":
                    raise value
                yield kind, value
    finally:
        cancelled.set()


def _train(given: dict[str, Any], host: str, news: SimpleQueue[News], cancelled: threading.Event) -> None:
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if cancelled.is_set():
            sys.exit()  # of this thread
        if time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            news.put(("share", share))

    try:
        torch.set_num_threads(given["threads"])
        if not given["may_fetch"]:
            os.environ["SENSLI_OFFLINE"] = "1"
        result = None
        for job in given["jobs"]:
            engine(job.settings).ready(job.settings, job.machine)
            if job.runs:
                tell(0.0)
                result = train(replace(job, save=lambda state: news.put(("state", packed(state))), tell=tell))
        news.put(("done", packed((result, host))))
    except SensliError as error:
        news.put(("failed", type(error)(f"on {host}: {error}")))
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"on {host}: {type(error).__name__}: {one_line(error)} ({frame.filename}, line {frame.lineno})"
        hint = "Run the same command without --on ray to see the full traceback."
        failure = PaperError(f"{text}. {hint}")
        failure.__cause__ = error
        news.put(("failed", failure))


def one_line(error: object) -> str:
    """The first lines of a longer text, as one."""
    words = " ".join(str(error).split())
    return words if len(words) <= 300 else words[:300].rsplit(" ", 1)[0] + " ..."


def packed(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """On the CPU, wherever it was made: this process may have no GPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
