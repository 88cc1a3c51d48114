"""What a Ray task does on its machine: train what came, report meanwhile, and put an error into words."""

from __future__ import annotations

import io
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sensli.errors import SensliError
from sensli.paper.cluster import one_line
from sensli.paper.engines import engine
from sensli.paper.pieces import train

POLL = 0.5  # seconds between two reports


@dataclass(frozen=True)
class Failed:
    """A training ended with an error; text, because not every error can travel."""

    kind: type[SensliError] | None
    text: str
    trace: str


def work_on(payload: bytes, put: Callable[..., None]) -> bytes:
    """Train an order, or only check it if it has no runs; `put(share=)` and `put(state=)` report meanwhile."""
    given: dict[str, Any] = pickle.loads(payload)
    torch.set_num_threads(given["threads"])
    if not given["may_fetch"]:
        os.environ["SENSLI_OFFLINE"] = "1"
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if time.monotonic() - told >= POLL:
            told = time.monotonic()
            put(share=share)

    result: Any = None
    try:
        for one in given["orders"]:
            engine(one.settings).ready(one.settings, one.machine)
            if one.runs:
                tell(0.0)
                result = train(one, lambda state: put(state=packed(state)), tell, save_every=given["save_every"])
    except SensliError as error:
        result = Failed(type(error), str(error), "")
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {one_line(error)} ({frame.filename}, line {frame.lineno})"
        result = Failed(None, text, traceback.format_exc())
    return packed(result)


def packed(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """On the CPU, wherever it was made: this process may have no GPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
