"""What came of a trial at a look, as plain data: how each network did, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_GROWTH = "no growth"


@dataclass(frozen=True)
class Arm:
    """One network of a trial.

    Attributes:
        name: The site as text, or ``"no growth"``.
        steps: How many steps it trained.
        flops: The FLOPs of these steps, over all processes; a backward pass counts as two forward passes.
        score: What was compared; None if it is not a finite number.
    """

    name: str
    steps: int
    flops: int
    score: float | None


@dataclass(frozen=True)
class Tried:
    """A trial: the model without a growth, and with each of the candidates, trained for equal FLOPs. Prints as one phrase.

    Attributes:
        arms: The networks, the one without a growth first.
        winner: The index of the one that stayed.
        score: What was compared: ``"mean loss"`` or ``"metric"``.
    """

    arms: tuple[Arm, ...]
    winner: int
    score: str

    @property
    def grew(self) -> bool:
        """Whether a growth won."""
        return self.winner > 0

    @property
    def flops(self) -> int:
        """The FLOPs of all networks together."""
        return sum(arm.flops for arm in self.arms)

    @property
    def lost(self) -> int:
        """The FLOPs of those that did not stay."""
        return self.flops - self.arms[self.winner].flops

    def __str__(self) -> str:
        won, others = self.arms[self.winner], [arm for index, arm in enumerate(self.arms) if index != self.winner]
        best = min(others, key=lambda arm: abs(_number(arm) - _number(won)))
        return (
            f"{won.name} won the trial of {len(self.arms)} networks: {self.score} {_shown(won)}, the next {_shown(best)} ({best.name}); "
            f"{self.flops:.1e} FLOPs, {100 * self.lost / max(self.flops, 1):.0f} % of them lost"
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tried:
        """The inverse of `dataclasses.asdict`. What is not a trial raises ValueError: a file may have been altered."""
        arms: Sequence[Arm] = tuple(Arm(**arm) for arm in data["arms"])
        winner = data["winner"]
        if len(arms) < 2 or type(winner) is not int or not 0 <= winner < len(arms):
            raise ValueError(f"the winner of {len(arms)} networks is {winner!r}")
        return cls(tuple(arms), winner, data["score"])


def _number(arm: Arm) -> float:
    return math.inf if arm.score is None else arm.score


def _shown(arm: Arm) -> str:
    return "no finite number" if arm.score is None else f"{arm.score:.4g}"
