"""What a `Grower` saw on its way: every look with all merits, the metric of every call, the layers of the model.

Plain data beside the growths of a `History`. Nothing here is needed to replay a model; it is what a person wants to see afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sensli.merits.merits import BY_MERIT, Merit, Merits, order_merits, spread, worth_of
from sensli.surgery.outline import Unit
from sensli.text.commands import PER, UNMEASURED
from sensli.text.records import Plain, to_plain

if TYPE_CHECKING:
    from typing_extensions import Self

# ---- What came of a trial at a look, as plain data: how each network did, and what it cost.

NO_GROWTH = "no growth"


@dataclass(frozen=True)
class TriedArm(Plain):
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
class Tried(Plain):
    """A trial: the model without a growth, and with each of the candidates, trained for equal FLOPs. Prints as one phrase.

    Attributes:
        arms: The networks, the one without a growth first.
        winner: The index of the one that stayed.
        score: What was compared: ``"mean loss"`` or ``"metric"``.
    """

    arms: tuple[TriedArm, ...]
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

    def _verify(self) -> None:
        if len(self.arms) < 2 or type(self.winner) is not int or not 0 <= self.winner < len(self.arms):
            raise ValueError(f"the winner of {len(self.arms)} networks is {self.winner!r}")


def _number(arm: TriedArm) -> float:
    return math.inf if arm.score is None else arm.score


def _shown(arm: TriedArm) -> str:
    return "no finite number" if arm.score is None else f"{arm.score:.4g}"


STEP_NAMES = ("epoch", "step")  # what one call of `Grower.step` may be called
LIMIT = 4096  # metrics kept; beyond it every second one goes, so that a look at every step costs no memory


@dataclass(frozen=True)
class SiteMerit(Plain):
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
class Decision(Plain):
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
        growths: The numbers of the growths.
        chosen: The indices of the merits that were taken, in the same order.
        parameters: The parameters of the model before the look.
        flops: The FLOPs of the model before the look, per sample; counted only if it grew.
        added: The parameters that each of the growths added.
        per: What the merits were compared by: per added ``"parameters"`` or ``"flops"``; None if as they are.
        step_name: What a call is called: ``"epoch"`` or ``"step"``.
        tried: How the candidates did in a trial, and what it cost; None if there was none.
        kept: Whether the growths keep the function.
        rule: By which rule the place was taken, where the merit did not decide it; empty otherwise.
        preset: What the preset came to, in the first look of a Grower; empty otherwise.
    """

    _needed = ("merits",)

    call: int
    tau: float
    select: str
    reason: str
    norm: str | None = None
    batches: int = 0
    samples: int | None = None
    merits: tuple[SiteMerit, ...] = ()
    growths: tuple[int, ...] = field(default=(), metadata={"key": "inserted"})
    chosen: tuple[int, ...] = ()
    parameters: int | None = None
    flops: int | None = None
    added: tuple[int, ...] = ()  # of two widths at once the second may cost more than it would have alone
    per: str | None = None
    step_name: str = field(default="epoch", metadata={"key": "unit"})
    tried: Tried | None = None
    kept: bool = True
    rule: str = ""  # older files do not say it
    preset: str = ""

    @classmethod
    def of(cls, merits: Merits | None, taken: Sequence[Merit], **facts: Any) -> Decision:
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
        lines, parameters = [self.preset] if self.preset else [], self.parameters
        if not self.growths:
            return "\n".join([*lines, f"{self.step_name} {self.call}: nothing grown | {self.reason}"])
        taken = [self.merits[index] for index in self.chosen]
        for merit, added in zip(taken, self._added, strict=False):
            lines.append(self._line(merit, added, parameters))
            parameters = None if parameters is None else parameters + added
        if self.tried is not None:
            lines.append(f"{self.step_name} {self.call}: {self.tried}")
        return "\n".join(lines)

    def _line(self, merit: SiteMerit, added: int, parameters: int | None) -> str:
        ratio = f", {merit.ratio:.2g} x mean" if merit.ratio is not None else ""
        worth = f" | merit {merit.value:.1e}{ratio}" if self.measured else ""
        flops = f", {merit.flops / self.flops:+.0%} FLOPs".replace("%", " %") if self.flops else ""
        cost = f"+{added:,} parameters" if not parameters else factor_text(parameters, parameters + added)
        change = "" if self.kept else " | the function is not kept"
        rule = f" | {self.rule}" if self.rule else ""
        sign = "" if merit.site.startswith("-") else "+"
        grown = f"{self.step_name} {self.call}: {sign}{merit.site.removeprefix('+')}"
        return f"{grown}{worth} | {cost}{flops}{rule}{change}"


@dataclass
class Record(Plain):
    """The looks, the metrics and the layers of one training run, oldest first.

    Attributes:
        decisions: One `Decision` for each call on which the trigger fired.
        metrics: Pairs of call and metric.
        outlines: Pairs of call and the layers of the model from then on.
        stride: Every how many calls a metric is kept.
        calls: The number of calls so far.
        step_name: What a call is called: ``"epoch"`` or ``"step"``.
        metric: What the metric is called, if that is known.
    """

    _needed = ("looks", "metrics", "outlines", "stride", "calls")

    decisions: list[Decision] = field(default_factory=list, metadata={"key": "looks"})
    metrics: list[tuple[int, float | None]] = field(default_factory=list)
    outlines: list[tuple[int, tuple[Unit, ...]]] = field(default_factory=list)
    stride: int = 1
    calls: int = 0
    step_name: str = field(default="epoch", metadata={"key": "unit"})
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
        return replace(self, decisions=list(self.decisions), metrics=list(self.metrics), outlines=list(self.outlines))

    def become(self, other: Record) -> None:
        """Take the content of another record in place, because others may hold this one.

        Args:
            other: The record to take the content of.
        """
        self.decisions[:], self.metrics, self.outlines[:] = other.decisions, other.metrics, other.outlines
        self.stride, self.calls, self.step_name, self.metric = other.stride, other.calls, other.step_name, other.metric

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        outlines = [{"call": call, "units": to_plain(units)} for call, units in self.outlines]
        return {**super().to_dict(), "outlines": outlines}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        return super().from_dict({**data, "outlines": [(each["call"], each["units"]) for each in data["outlines"]]})


def factor_text(before: int, after: int) -> str:
    """How the number of parameters grows: "26,722 -> 53,442 parameters, x2.0"."""
    return f"{before:,} -> {after:,} parameters, x{after / before:.{1 if after >= 1.1 * before else 2}f}"


# ---- Why a look ended as it did, in words for a person.


def rule_of(merits: Merits, taken: Sequence[Merit], select: str) -> str:
    """By which rule the first of the taken merits was, where ``select="auto"`` did not go by merit; empty otherwise."""
    own = _stack(merits, taken[0]) if taken and select == "auto" else []
    if len(own) < 2:
        return ""
    if len(taken) == 1 and taken[0] is own[spread(1, len(own))[0]]:
        return f"the middle of {len(own)} sites between blocks"
    return f"one of {len(own)} sites between blocks, evenly spaced"


def _stack(merits: Merits, merit: Merit) -> list[Merit]:
    """The merits of the stack of blocks that this one belongs to."""
    return [each for each in merits if each.site.stack is not None and each.site.stack == merit.site.stack]


def reason_of(
    merits: Merits,
    chosen: Sequence[Merit],
    *,
    select: str,
    tau: float,
    floor: float = 0.0,
    control: bool = False,
    per: str | None = None,
) -> str:
    """Why a look ended as it did, in one sentence for a person.

    ``floor`` is the least gradient norm that counts; for a ``control`` the largest merit decided whether to insert; ``per`` is what
    the merits were compared by.
    """
    best = merits.best
    if not chosen:
        if best.ratio is not None and best.ratio < tau:
            return f"the best, {best.site}, has merit {best.value:.1e}, {best.ratio:.2g} x mean, below tau = {tau:g}"
        if math.sqrt(best.value) < floor:
            return (
                f"the problem is solved: a change of 1 in the weights of the best, {best.site}, would lower the loss by about "
                f"{math.sqrt(best.value):.1e} (merit {best.value:.1e}), less than the floor of {floor:.1e}"
            )
        if select not in BY_MERIT:
            return f"the site that select={select} gave did not pass tau = {tau:g} or the trigger's limits"
        return "the trigger's limits left no room for a site that passes"
    first, ranked = chosen[0], merits.per(per).ranked
    rule = rule_of(merits, chosen, select)
    merit = f"merit {PER[per]}" if per else "merit"
    if len(merits) == 1:
        ground = "it is the only site"
    elif rule:
        ground = f"it is {rule}, where no merit is known to tell the better one"
    elif select in BY_MERIT and first is ranked[0]:
        ground = f"its {merit} is the largest of {len(merits)}{_ahead(worth_of(first, per), worth_of(ranked[1], per))}"
    elif select == "auto" and first is order_merits(select, merits, 1, per=per)[0]:
        own = _stack(merits, ranked[0])
        middle = own[spread(1, len(own))[0]]
        ground = (
            f"its {merit}, {worth_of(first, per):.1e}, is the largest of those that compete (of the {len(own)} sites between blocks only "
            f"the middle one, {middle.site} with {worth_of(middle, per):.1e}, because merits at the ends of a stack mislead)"
        )
    elif select in BY_MERIT:
        ground = f"its {merit} is the largest of those that passed the limits"
    else:
        ground = f"select={select} gave it"
    ratio, whose = (best.ratio, "the largest merit, ") if control else (first.ratio, "")
    if rule:
        ratio, whose = max(_stack(merits, first), key=lambda each: each.value).ratio, "the largest merit there, "
    passed = ""
    if tau and ratio is not None:  # with tau = 0 everything passes
        passed = f", and {whose}{ratio:.2g} x the mean of the existing weights is at least tau = {tau:g}"
    what = "growths" if any(each.site.kind == "units" for each in chosen) else "layers"
    more = f" ({len(chosen)} {what} at once)" if len(chosen) > 1 else ""
    return f"{ground}{passed}{more}"


def _ahead(first: float, second: float) -> str:
    if second <= 0 or first == second:
        return ""
    if first >= 1.5 * second:
        return f", {first / second:.2g} times the next"
    return f", {100 * (first / second - 1):.1f} % ahead of the next"
