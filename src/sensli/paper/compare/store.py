"""The results folder: `<root>/<task>-<budget>/<method>-<digest>/seed-0000.json`, each file one run with its checksum."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sensli.paper.compare.job import Job
from sensli.paper.compare.run import Run
from sensli.paper.errors import StoreError
from sensli.paper.running.files import Damaged, read_json, write_json
from sensli.paper.running.origin import provenance
from sensli.text.writing import check_writable


class Store:
    """Runs on disk. A run of a changed configuration has another digest, so old and new numbers never mix."""

    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise StoreError(f"{root} is a file, not a results folder. Choose a folder with --out.")
        self.root = root

    def check_writable(self) -> None:
        """Find out before the work, not after it."""
        check_writable(self.root / "results", StoreError)

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
