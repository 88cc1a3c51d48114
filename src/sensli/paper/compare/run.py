"""The record of one run: a curve over FLOPs, what it grew, what its decisions cost, and how it ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sensli.paper.running.files import Damaged
from sensli.text.strict_json import lenient, strict
from sensli.text.typed import check_types


@dataclass(frozen=True)
class Look:
    """What one look cost: FLOPs as counted, seconds as timed under the counter, beside FLOPs of a plain pass of its samples.

    Args:
        flops: All that ran inside.
        seconds: All that ran inside, by the clock, while it was counted.
        sweep: FLOPs of a forward and a backward pass of the samples that the look was given, through the network as it was.
        samples: How many samples these were.
    """

    flops: float
    seconds: float
    sweep: float
    samples: int


@dataclass
class Run:
    """One method on one task under one seed. Lists of a curve are equally long; FLOPs are those spent by then."""

    flops: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)  # mean loss of the steps since the point before
    validation: list[float] = field(default_factory=list)
    grown: list[tuple[float, str]] = field(default_factory=list)  # FLOPs, and what grew
    decisions: float = 0.0  # FLOPs of all looks
    looks: int = 0
    costs: list[Look] = field(default_factory=list)  # of each look; records of older versions have none
    uncounted: dict[str, int] = field(default_factory=dict)  # operations of looks that there is no rule for
    budget: float = 0.0
    steps: int = 0
    parameters: int = 0  # at the end
    forward: int = 0  # FLOPs of one sample, at the end
    test_loss: float = 0.0
    test_error: float | None = None
    seconds: float = 0.0
    step_seconds: float = 0.0  # of all steps of training, were each of them an ordinary one, without a replay

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = strict(asdict(self))
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        """The inverse of `to_dict`; what is not such a record is Damaged."""
        try:
            run = cls(**lenient(data))
            run.grown = [(flops, what) for flops, what in run.grown]
            run.costs = [Look(**data) for data in lenient(data).get("costs", [])]
            check_types(run, "run")
            if not len(run.flops) == len(run.train) == len(run.validation):
                raise ValueError("the curves are not equally long")
        except (TypeError, ValueError, RecursionError) as error:
            raise Damaged(str(error)) from None
        return run
