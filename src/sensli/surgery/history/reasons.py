"""Why a look ended as it did, in words for a person."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sensli.merits.merits import Merit, Merits, worth_of
from sensli.merits.ranking import BY_MERIT, ordered, spread
from sensli.text.names import PER


def rule_of(merits: Merits, taken: Sequence[Merit], select: str) -> str:
    """By which rule the first of the taken merits was, where ``select="auto"`` did not go by merit; empty otherwise."""
    own = _stack(merits, taken[0]) if taken and select == "auto" else []
    if len(own) < 2:
        return ""
    if len(taken) == 1 and taken[0] is own[spread(1, len(own))[0]]:
        return f"the middle of {len(own)} places between blocks"
    return f"one of {len(own)} places between blocks, evenly spaced"


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
    elif select == "auto" and first is ordered(select, merits, 1, per=per)[0]:
        own = _stack(merits, ranked[0])
        middle = worth_of(own[spread(1, len(own))[0]], per)
        ground = (
            f"its {merit}, {worth_of(first, per):.1e}, is more than {middle:.1e}, that of the middle of {len(own)} places between blocks, "
            f"which counts for all of them (their largest is {worth_of(ranked[0], per):.1e})"
        )
    elif select in BY_MERIT:
        ground = f"its {merit} is the largest of those that passed the limits"
    else:
        ground = f"select={select} gave it"
    ratio, whose = (best.ratio, "the largest merit, ") if control else (first.ratio, "")
    if rule:
        ratio, whose = max(_stack(merits, first), key=lambda each: each.value).ratio, "the largest merit there, "
    passed = (
        f", and {whose}{ratio:.2g} x the mean of the existing weights is at least tau = {tau:g}"
        if ratio is not None
        else ""
    )
    what = "growths" if any(each.site.kind == "units" for each in chosen) else "layers"
    more = f" ({len(chosen)} {what} at once)" if len(chosen) > 1 else ""
    return f"{ground}{passed}{more}"


def _ahead(first: float, second: float) -> str:
    if second <= 0 or first == second:
        return ""
    return (
        f", {first / second:.2g} times the next"
        if first >= 1.5 * second
        else f", {100 * (first / second - 1):.1f} % ahead of the next"
    )
