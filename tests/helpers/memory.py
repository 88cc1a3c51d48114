"""How much memory torch allocates at most while something runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak(work: Callable[[], Any]) -> int:
    """Bytes beyond what was there before, as torch's own allocator on the CPU tells."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
