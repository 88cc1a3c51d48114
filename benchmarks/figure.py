"""One measured figure and the bar it is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A number with its bar; ``at_most`` says on which side of the bar it should lie. No value: it could not be measured."""

    name: str
    value: float | None
    bar: float
    detail: str = ""
    at_most: bool = True

    @property
    def shown(self) -> str:
        return "-" if self.value is None else f"{self.value:.3g}"

    @property
    def bar_shown(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bar:g}"

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "skipped"
        return "reached" if (self.value <= self.bar) == self.at_most or self.value == self.bar else "missed"
