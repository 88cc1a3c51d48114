"""A job is one method on one task under one seed with one budget; its record, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sensli.growing.options import Options
from sensli.text.records import Plain, check_types, lenient_data, strict_data
from sensli_lab.compare.methods import Method, find_method
from sensli_lab.compare.task import Task
from sensli_lab.compare.tasks.registry import find
from sensli_lab.errors import PaperError
from sensli_lab.work.store import Damaged, ResultsFolder, digest_of, provenance, read_json, write_json

FORMAT = 1  # of the numbers: raised when the same job would give others


@dataclass(frozen=True)
class Job:
    """What to train. ``budget`` is a factor on the task's own, ``lr_factor`` one on its learning rate; None takes what the task says."""

    task: Task
    method: Method
    seed: int
    budget: float = 1.0
    lr_factor: float | None = None

    def __str__(self) -> str:
        size = "" if self.budget == 1 else f" x {self.budget:g}"
        rate = "" if self.lr_factor is None else f", {self.lr_factor:g} times the rate"
        return f"{self.task.name}{size}, {self.method.name}{rate}, seed {self.seed}"

    @property
    def rate(self) -> float:
        """The factor on the learning rate of the task."""
        return self.task.rates.get(self.method.name, 1.0) if self.lr_factor is None else self.lr_factor

    @property
    def digest(self) -> str:
        """The same for all seeds."""
        return digest_of({"format": FORMAT, **self.facts()})

    def facts(self) -> dict[str, Any]:
        """What decides the numbers, besides the seed and the code: plain data. Looks do not concern a fixed size."""
        task, method = self.task, self.method
        schedule = None if method.schedule is None else method.schedule.facts()
        rare = {
            "schedule": schedule, "full": method.full, "trial": method.trial, "waits": method.waits, "pays": method.pays,
            "source": method.source, "trigger": method.trigger,
            "preset": str(Options.of(method.preset)) if method.preset else "",
            "rate": 0 if self.rate == 1 else self.rate,
            "decay": 0 if task.decay == 0.5 else task.decay,
            "until": task.until if method.waits else None, "calls": task.calls if method.waits and task.until else 0,
            "rows": "made for the data" if method.widens else "",  # new units of ours had other rows once
        }  # fmt: skip
        return {
            "task": task.name,
            "network": task.outlines[method.size],
            "large": task.outlines["large"],
            "optimizer": task.recipe,
            "batch": task.batch,
            "steps": task.steps,
            "warmup": task.warmup,
            "points": task.points,
            "budget": self.budget,
            # every strategy was given grow="both" once, whatever it grows: results of then stay valid
            "options": {**({"grow": "both"} if "strategy" in method.options else {}), **method.options},
            **({"looks": task.looks, "units": task.units, "looked_at": task.looked_at} if method.grows else {}),
            # only where they differ from what all have in common: results of before they existed stay valid
            **{name: value for name, value in rare.items() if value},
        }

    @property
    def cost(self) -> float:
        """Seconds that it takes on one core of a small machine, roughly."""
        task = self.task
        batch = task.batch or task.looked_at
        total = 3 * task.forward_flops["large"] * batch * task.steps * self.budget
        ratio = task.forward_flops["large"] / task.forward_flops["small"]
        steps = task.steps * self.budget * task.forward_flops["large"] / task.forward_flops[self.method.size]
        total, steps = (total * ratio, steps * ratio) if self.method.full else (total, steps)
        return total / 1.5e10 + steps * 5e-4

    def needs(self, other: Job) -> bool:
        """No run begins with the result of another."""
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        """By name: networks and losses are functions, which do not travel to another process."""
        return _arrived, (self.task.name, self.method.name, self.seed, self.budget, self.lr_factor, self.digest)


def _arrived(task: str, method: str, seed: int, budget: float, lr_factor: float | None, digest: str) -> Job:
    known = find(task)
    job = Job(known, find_method(known, method), seed, budget, lr_factor)
    if job.digest != digest:
        raise PaperError(f"{task} is configured in another way there. Install the same version on every machine.")
    return job


@dataclass(frozen=True)
class Comparison:
    """Methods on one task with one factor on its FLOPs, under the seeds 0 to ``seeds`` - 1."""

    task: Task
    methods: list[Method]
    seeds: int
    budget: float

    def jobs(self, seed: int) -> list[Job]:
        return [Job(self.task, method, seed, self.budget) for method in self.methods]


@dataclass(frozen=True)
class RunLook(Plain):
    """What one look cost: FLOPs as counted, seconds as timed under the counter, beside FLOPs of a plain pass of its samples."""

    flops: float  # of all that ran inside
    seconds: float  # of all that ran inside, by the clock, while it was counted
    sweep: float  # FLOPs of a forward and a backward pass of the samples that the look was given, through the network as it was
    samples: int  # how many samples these were


@dataclass
class Run(Plain):
    """One method on one task under one seed. Lists of a curve are equally long; FLOPs are those spent by then."""

    flops: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)  # mean loss of the steps since the point before
    validation: list[float] = field(default_factory=list)
    grown: list[tuple[float, str]] = field(default_factory=list)  # FLOPs, and what grew
    decisions: float = 0.0  # FLOPs of all looks
    looks: int = 0
    costs: list[RunLook] = field(default_factory=list)  # of each look; records of older versions have none
    uncounted: dict[str, int] = field(default_factory=dict)  # operations of looks that there is no rule for
    budget: float = 0.0
    steps: int = 0
    parameters: int = 0  # at the end
    forward: int = 0  # FLOPs of one sample, at the end
    test_loss: float = 0.0
    test_error: float | None = None
    seconds: float = 0.0
    data: str = ""  # the digest of data that other machines may have otherwise
    step_seconds: float = 0.0  # of all steps of training, were each of them an ordinary one, without a replay

    def to_dict(self) -> dict[str, Any]:
        return strict_data(super().to_dict())  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """The inverse of `to_dict`; what is not such a record is Damaged."""
        try:
            run = super().from_dict(lenient_data(data))
            check_types(run, "run")
            if not len(run.flops) == len(run.train) == len(run.validation):
                raise ValueError("the curves are not equally long")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise Damaged(str(error)) from None
        return run


# ---- The results folder: `<root>/<task>-<budget>/<method>-<digest>/seed-0000.json`, each file one run with its checksum.


class RunStore(ResultsFolder):
    """The runs of jobs."""

    def path(self, job: Job) -> Path:
        budget = f"x{job.budget:g}"
        method = job.method.name.replace(":", ".")  # which some systems do not allow in a path
        return self.root / f"{job.task.name}-{budget}" / f"{method}-{job.digest}" / f"seed-{job.seed:04d}.json"

    def state(self, job: Job) -> Path:
        """Where an unfinished run keeps what it needs to resume."""
        return self.path(job).with_name(f"unfinished-{job.seed:04d}.ckpt")

    def load(self, job: Job) -> Run | None:
        """The run, or None if it is not stored or its file is damaged: then it is computed again."""
        try:
            content = read_json(self.path(job))
            return Run.from_dict(content["run"])
        except (Damaged, KeyError):
            return None

    def save(self, job: Job, run: Run) -> None:
        content = {"job": {**job.facts(), "method": job.method.name, "seed": job.seed}, "run": run.to_dict()}
        write_json(self.path(job), {**content, **provenance()})
        self.state(job).unlink(missing_ok=True)

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if self.load(job) is None]
