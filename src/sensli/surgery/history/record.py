"""What a `Grower` saw on its way: every look with all merits, the metric of every call, the layers of the model.

Plain data beside the growths of a `History`. Nothing here is needed to replay a model; it is what a person wants to see afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sensli.merits.merits import Merit, Merits
from sensli.surgery.history.outline import Unit
from sensli.surgery.history.tried import Tried
from sensli.text.names import UNMEASURED

UNITS = ("epoch", "step")  # what one call of `Grower.step` may be called
LIMIT = 4096  # metrics kept; beyond it every second one goes, so that a look at every step costs no memory


@dataclass(frozen=True)
class SiteMerit:
    """One row of a look's table, as plain data.

    Attributes:
        site: The site as text.
        path: The path of the module that names the place.
        side: ``"after"`` or ``"before"``.
        value: The merit.
        ratio: The merit divided by the mean over the existing weights, or None.
        dead: The share of units that were zero on all the data, or None.
        parameters: The parameters that the growth would add.
        flops: The FLOPs per sample that the growth would add.
        kind: What would be added: ``"linear"``, ``"conv"``, ``"block"`` or ``"units"``.
    """

    site: str
    path: str
    side: str
    value: float
    ratio: float | None
    dead: float | None
    parameters: int
    flops: int
    kind: str = ""  # older files do not say it

    @classmethod
    def of(cls, merit: Merit) -> SiteMerit:
        """A merit as plain data.

        Args:
            merit: The merit of a site.
        """
        site = merit.site
        return cls(
            str(site), site.path, site.side, merit.value, merit.ratio, merit.dead, site.parameters, site.flops, site.kind
        )  # fmt: skip


@dataclass(frozen=True)
class Look:
    """One look at all sites and the decision. Prints one line for each growth, or one that says why there was none.

    Attributes:
        call: The number of the call of `Grower.step`.
        tau: The threshold.
        select: How the site was selected.
        reason: One sentence: why this site, or why none.
        norm: The norm of the merits.
        batches: How many batches were used.
        samples: How many samples were used, if known.
        merits: All merits, best first.
        inserted: The numbers of the growths.
        chosen: The indices of the merits that were taken, in the same order.
        parameters: The parameters of the model before the look.
        flops: The FLOPs of the model before the look, per sample; counted only if it grew.
        added: The parameters that each of the growths added.
        per: What the merits were compared by: per added ``"parameters"`` or ``"flops"``; None if as they are.
        unit: What a call is called: ``"epoch"`` or ``"step"``.
        tried: How the candidates did in a trial, and what it cost; None if there was none.
        kept: Whether the growths keep the function.
        rule: By which rule the place was taken, where the merit did not decide it; empty otherwise.
    """

    call: int
    tau: float
    select: str
    reason: str  # one sentence: why this site, or why none
    norm: str | None = None
    batches: int = 0
    samples: int | None = None
    merits: tuple[SiteMerit, ...] = ()  # best first
    inserted: tuple[int, ...] = ()  # numbers of the growths
    chosen: tuple[int, ...] = ()  # which of the merits went in, in the same order
    parameters: int | None = None  # of the model before the look
    flops: int | None = None  # likewise, per sample, counted only where it grew
    added: tuple[int, ...] = ()  # parameters; of two widths at once the second may cost more than it would have alone
    per: str | None = None
    unit: str = "epoch"
    tried: Tried | None = None
    kept: bool = True
    rule: str = ""  # older files do not say it

    @classmethod
    def of(cls, merits: Merits | None, taken: Sequence[Merit], **facts: Any) -> Look:
        """Make a look from what was measured, if anything was, and from the merits that were taken.

        Args:
            merits: What was measured, or None.
            taken: The merits that were taken.
            **facts: The other attributes.
        """
        if merits is None:
            return cls(**facts)
        ranked = merits.ranked
        return cls(
            norm=merits.norm,
            batches=merits.batches,
            samples=merits.samples,
            merits=tuple(SiteMerit.of(merit) for merit in ranked),
            chosen=tuple(next(i for i, other in enumerate(ranked) if other is merit) for merit in taken),
            **facts,
        )

    @property
    def measured(self) -> bool:
        """Whether the values of the sites are merits: some strategies take places without measuring any."""
        return self.norm != UNMEASURED

    @property
    def parameters_after(self) -> int | None:
        """The parameters of the model after the look, with what has grown; None if they were not counted."""
        return None if self.parameters is None else self.parameters + sum(self._added)

    @property
    def _added(self) -> Sequence[int]:
        return self.added or [self.merits[index].parameters for index in self.chosen]  # older files do not say it

    def __str__(self) -> str:
        if not self.inserted:
            return f"{self.unit} {self.call}: nothing inserted | {self.reason}"
        lines, parameters = [], self.parameters
        taken = [self.merits[index] for index in self.chosen]
        for merit, added in zip(taken, self._added, strict=False):
            lines.append(self._line(merit, added, parameters))
            parameters = None if parameters is None else parameters + added
        if self.tried is not None:
            lines.append(f"{self.unit} {self.call}: {self.tried}")
        return "\n".join(lines)

    def _line(self, merit: SiteMerit, added: int, parameters: int | None) -> str:
        ratio = f", {merit.ratio:.2g} x mean" if merit.ratio is not None else ""
        worth = f" | merit {merit.value:.1e}{ratio}" if self.measured else ""
        flops = f", {merit.flops / self.flops:+.0%} FLOPs".replace("%", " %") if self.flops else ""
        cost = f"+{added:,} parameters" if not parameters else factor_text(parameters, parameters + added)
        change = "" if self.kept else " | the function is not kept"
        rule = f" | {self.rule}" if self.rule else ""
        sign = "" if merit.site.startswith("-") else "+"
        grown = f"{self.unit} {self.call}: {sign}{merit.site.removeprefix('+')}"
        return f"{grown}{worth} | {cost}{flops}{rule}{change}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Look:
        """The inverse of `to_dict`."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        plain["merits"] = tuple(SiteMerit(**merit) for merit in data["merits"])
        if plain.get("tried") is not None:  # older files do not say it
            plain["tried"] = Tried.from_dict(plain["tried"])
        return cls(**plain)


@dataclass
class Record:
    """The looks, the metrics and the layers of one training run, oldest first.

    Attributes:
        looks: One `Look` for each call on which the trigger fired.
        metrics: Pairs of call and metric.
        outlines: Pairs of call and the layers of the model from then on.
        stride: Every how many calls a metric is kept.
        calls: The number of calls so far.
        unit: What a call is called: ``"epoch"`` or ``"step"``.
        metric: What the metric is called, if that is known.
    """

    looks: list[Look] = field(default_factory=list)
    metrics: list[tuple[int, float | None]] = field(default_factory=list)  # (call, metric)
    outlines: list[tuple[int, tuple[Unit, ...]]] = field(default_factory=list)  # (call, layers from then on)
    stride: int = 1  # of the metrics kept
    calls: int = 0
    unit: str = "epoch"
    metric: str | None = None

    def __bool__(self) -> bool:
        return self.calls > 0

    def count(self, call: int, metric: float | None) -> None:
        """Note a call and its metric.

        Args:
            call: The number of the call.
            metric: Its metric, or None.
        """
        self.calls = call
        if metric is None or call % self.stride:
            return
        value = float(metric)
        self.metrics.append((call, value if math.isfinite(value) else None))  # JSON knows no infinity
        if len(self.metrics) > LIMIT:
            self.stride *= 2
            self.metrics = [entry for entry in self.metrics if entry[0] % self.stride == 0]

    def draw(self, call: int, units: Sequence[Unit]) -> None:
        """Note the layers of the model if they have changed since they were last noted.

        Args:
            call: The number of the call.
            units: The layers of the model.
        """
        if not self.outlines or self.outlines[-1][1] != tuple(units):
            self.outlines.append((call, tuple(units)))

    @property
    def drawn_parameters(self) -> int | None:
        """The parameters in the last drawing of the layers; None if there is none."""
        return sum(unit.parameters for unit in self.outlines[-1][1]) if self.outlines else None

    def copied(self) -> Record:
        """A copy that does not change with this one."""
        return replace(self, looks=list(self.looks), metrics=list(self.metrics), outlines=list(self.outlines))

    def become(self, other: Record) -> None:
        """Take the content of another record in place, because others may hold this one.

        Args:
            other: The record to take the content of.
        """
        self.looks[:], self.metrics, self.outlines[:] = other.looks, other.metrics, other.outlines
        self.stride, self.calls, self.unit, self.metric = other.stride, other.calls, other.unit, other.metric

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "calls": self.calls,
            "unit": self.unit,
            "metric": self.metric,
            "stride": self.stride,
            "metrics": [list(entry) for entry in self.metrics],
            "outlines": [{"call": call, "units": [asdict(unit) for unit in units]} for call, units in self.outlines],
            "looks": [look.to_dict() for look in self.looks],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """The inverse of `to_dict`. Counts that are none raise ValueError: a file may have been altered."""
        for name, least in (("calls", 0), ("stride", 1)):
            if type(data[name]) is not int or data[name] < least:
                raise ValueError(f"{name} is {data[name]!r}")
        for call, metric in data["metrics"]:
            if type(call) is not int or not (metric is None or type(metric) in (int, float)):
                raise ValueError(f"the metric of call {call!r} is {metric!r}")
        return cls(
            looks=[Look.from_dict(look) for look in data["looks"]],
            metrics=[(call, metric) for call, metric in data["metrics"]],
            outlines=[(entry["call"], tuple(map(Unit.from_dict, entry["units"]))) for entry in data["outlines"]],
            stride=data["stride"],
            calls=data["calls"],
            unit=data.get("unit", "epoch"),  # older files have neither
            metric=data.get("metric"),
        )


def factor_text(before: int, after: int) -> str:
    """How the number of parameters grows: "26,722 -> 53,442 parameters, x2.0"."""
    return f"{before:,} -> {after:,} parameters, x{after / before:.{1 if after >= 1.1 * before else 2}f}"
