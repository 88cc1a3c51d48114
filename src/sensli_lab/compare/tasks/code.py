"""A byte-level transformer on the sources of Python's standard library: a text that is too long to be memorised.

Budgets are such that the smallest network is not the best one at the end.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensli_lab.compare.methods import at_shares, when_triggered
from sensli_lab.compare.task import Task, TaskData, sizes_of
from sensli_lab.compare.tasks.text import HEAD, START, WINDOW, Transformer, cut, next_byte, split_windows
from sensli_lab.errors import PaperError

WIDTH = 32
LEAST = 20_000_000  # bytes: some systems have Python without its tests
HELD = 512  # windows to decide by, and as many to test with


def build_transformer(blocks: int) -> Transformer:
    return Transformer(blocks, WIDTH // HEAD, 4 * WIDTH, WIDTH)


def sources(folder: Path) -> list[Path]:
    """The files of a library, without what was installed beside it, in an order that does not depend on the system."""
    found = (path for path in folder.rglob("*.py") if "site-packages" not in path.relative_to(folder).parts)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


@lru_cache(maxsize=1)
def _windows() -> tuple[Tensor, str]:
    folder = Path(os.__file__).parent
    text = b"\n".join(path.read_bytes() for path in sources(folder))
    if len(text) < LEAST:
        raise PaperError(
            f"{folder} has {len(text):,} bytes of Python, the task 'code' needs {LEAST:,}: this Python came without its tests. Use one "
            "that has its whole standard library."
        )
    return cut(text), hashlib.sha256(text).hexdigest()[:16]


def load_sources(folder: Path | None, seed: int) -> TaskData:
    """The same windows for all seeds."""
    windows, digest = _windows()
    return split_windows(windows, HELD, digest)


_STACK: dict[str, Any] = {"strategy": "stack"}
_TRIED = (5, 10, 15, 20, 25, 30, 40)
_TWIN: dict[str, Any] = {"what": "layers", "form": "twin", "select": "last"}

ARMS = (
    at_shares("stack", "the whole stack twice, two times", 5, 15, **_STACK),
    at_shares("stack", "the whole stack twice, two times", 10, 25, **_STACK),
    at_shares("stack", "the whole stack twice, two times", 5, 20, **_STACK),
    at_shares("stack", "the whole stack twice, two times", 10, 40, **_STACK),
    at_shares("stack", "the whole stack twice, two times", 15, 60, **_STACK),
    at_shares("stack", "the whole stack twice, two times", 20, 40, **_STACK),
    at_shares("stack", "the whole stack twice, once", 15, **_STACK),
    at_shares("stack", "the whole stack twice, two times", 30, 60, **_STACK),
    at_shares("stack", "the whole stack twice, three times", 5, 15, 40, **_STACK),
    *(
        at_shares("once", "the whole stack four times, once", share, factor=4, **_STACK)
        for share in (5, 10, 20, 40, 75)
    ),
    at_shares("interleave", "each block twice in its place, two times", 10, 25, order="interleave", **_STACK),
    at_shares("noise", "as interleave, with 1 % noise on the copies", 10, 25, order="interleave", noise=0.01, **_STACK),
    at_shares("twin", "copies whose outputs begin at zero, the same number", 10, 25, 25, **_TWIN),
    at_shares("fresh", "random blocks whose outputs begin at zero, the same number", 10, 25, 25, init="fresh", **_TWIN),
    at_shares(
        "least", "twins of the least important blocks, the same number", 10, 25, 25, **{**_TWIN, "select": "least"}
    ),
    at_shares("warmup", "as stack, the updates of new blocks warm up for 200 steps", 10, 25, warmup=200, **_STACK),
    at_shares("depth", "as stack, rates times the root of the ratio of depths", 10, 25, depth_power=0.5, **_STACK),
    at_shares("uniform", "all widths by a half, at each of four moments", 5, 10, 15, 25, what="uniform"),
    when_triggered("saturating", "the whole stack twice, when the loss is near the end that its curve tells", **_STACK),
    when_triggered("slow", "the whole stack twice, when training on brings little for its FLOPs", **_STACK),
    when_triggered("pays", "a twin, when it adds twice as much to the gradient as to the FLOPs", **_TWIN),
    at_shares("tried", "the whole stack twice, if that wins a short trial", *_TRIED, trial=1 / 32, **_STACK),
)

# Factors on the learning rate, chosen on seed 1000 from a half, one and two: `sensli compare tune code`.
_HALF = (
    "stack-5-15", "stack-10-25", "stack-10-40", "stack-20-40", "stack-30-60", "once-20", "once-40", "twin-10-25", "least-10-25",
    "uniform-5-10-15-25", "stack-saturating",
)  # fmt: skip
_TWICE = ("small", "middle", "deep", "once-5", "once-75", "tried-5-10-15-20-25-30-40")

CODE = Task(
    name="code",
    title="the standard library of Python, byte by byte, transformers of width 32",
    sizes=sizes_of(build_transformer, small=(1,), middle=(2,), deep=(4,), large=(8,)),
    load=load_sources,
    example=((WINDOW,), torch.long),
    loss=next_byte,
    optimizer=partial(torch.optim.AdamW, lr=6e-3, fused=True),
    recipe=f"AdamW 0.006, weights from N(0, {START})",
    batch=16,
    steps=2000,
    looks=(0.05, 0.1, 0.15, 0.2, 0.25, 0.3),
    looked_at=64,
    arms=ARMS,
    rates=dict.fromkeys(_HALF, 0.5) | dict.fromkeys(_TWICE, 2.0),
    warmup=0.01,
    decay=0.2,
    points=50,
    counts_errors=False,
    tokens=WINDOW,
    calls=200,
    until=0.8,
    long=True,
)
