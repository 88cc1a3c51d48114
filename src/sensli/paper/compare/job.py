"""A job: one method on one task under one seed with one budget, and the digest of all that decides its numbers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from sensli.paper.compare.methods import Method
from sensli.paper.compare.task import Task

FORMAT = 1  # of the numbers: raised when the same job would give others


@dataclass(frozen=True)
class Job:
    """What to train. ``budget`` is a factor on the task's own."""

    task: Task
    method: Method
    seed: int
    budget: float = 1.0

    def __str__(self) -> str:
        size = "" if self.budget == 1 else f" x {self.budget:g}"
        return f"{self.task.name}{size}, {self.method.name}, seed {self.seed}"

    @property
    def digest(self) -> str:
        """The same for all seeds."""
        content = json.dumps({"format": FORMAT, **self.facts()}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def facts(self) -> dict[str, Any]:
        """What decides the numbers, besides the seed and the code: plain data. Looks do not concern a fixed size."""
        task = self.task
        grows = {"looks": task.looks, "units": task.units, "looked_at": task.looked_at} if self.method.grows else {}
        return {
            "task": task.name,
            "network": task.outlines[self.method.size],
            "large": task.outlines["large"],
            "optimizer": task.recipe,
            "batch": task.batch,
            "steps": task.steps,
            "warmup": task.warmup,
            "points": task.points,
            "budget": self.budget,
            # every strategy was given grow="both" once, whatever it grows: results of then stay valid
            "options": {**({"grow": "both"} if "strategy" in self.method.options else {}), **self.method.options},
            **grows,
            # only where they differ from what all have in common: results of before they existed stay valid
            **({"schedule": self.method.schedule.facts()} if self.method.schedule is not None else {}),
            **({"full": True} if self.method.full else {}),
            **({"trial": self.method.trial} if self.method.trial is not None else {}),
            **({"waits": True} if self.method.waits else {}),
            **({"pays": True} if self.method.pays else {}),
            **({"source": self.method.source} if self.method.source else {}),
            # new units of ours had other rows once
            **({"rows": "made for the data"} if self.method.widens else {}),
        }

    def seconds(self) -> float:
        """What it takes on one core of a small machine, roughly."""
        task = self.task
        batch = task.batch or task.looked_at
        total = 3 * task.forward_flops["large"] * batch * task.steps * self.budget
        ratio = task.forward_flops["large"] / task.forward_flops["small"]
        steps = task.steps * self.budget * task.forward_flops["large"] / task.forward_flops[self.method.size]
        total, steps = (total * ratio, steps * ratio) if self.method.full else (total, steps)
        return total / 1.5e10 + steps * 5e-4
