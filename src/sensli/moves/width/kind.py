"""The widths of a search: layers whose units are read by others that are known, as far as a trial confirms it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import nn

from sensli.modules.failing import brief_error, note
from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.trace.flow import Call
from sensli.moves.width.configured import as_configured
from sensli.moves.width.confirming import Trial, confirm
from sensli.moves.width.grouping import Grouping, Refused
from sensli.moves.width.siting import Siting
from sensli.moves.width.width import Width


class WidthKind:
    """More units, channels, hidden features or heads."""

    move: ClassVar[type[Width]] = Width
    grows: ClassVar[str] = "units"

    def propose(self, search: Search) -> None:
        grouping, trial = Grouping(search), Trial(search)
        siting = Siting(search, trial)
        sites = _attentions(search, grouping, siting)
        for group in grouping.groups():
            try:
                sites.append(_planned(siting.of, group))
            except Refused as reason:
                grouping.give_up(group, str(reason))
        sites.sort(key=lambda site: siting.calls[site.path].ended)
        good, wrong = confirm(trial, sites)
        for site, problem in wrong:
            assert isinstance(site.move, Width)
            makers = {axis.module.path for axis in site.move.axes if axis.fill == "row"}
            grouping.refuse(makers, problem, "heads" if site.move.heads else "units")
        for site in as_configured(trial, search.model, good):
            search.keep(siting.calls[site.path], siting.calls[site.path].ended, site)
        for path, why in grouping.refused.items():
            if search.request.grow == "units":  # what was said of layers is of no use there
                search.skipped[path] = why
            else:
                search.skipped.setdefault(path, why)

    def at(self, search: Search, call: Call, side: str, seen: Any) -> Iterator[Site]:
        return iter(())

    def otherwise(self, search: Search) -> None:
        """Nothing else could be widened."""


def _attentions(search: Search, grouping: Grouping, siting: Siting) -> list[Site]:
    """More heads for torch's own attention."""
    found = []
    for path, module in search.model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and grouping.called_once(path, "heads"):
            try:
                found.append(_planned(siting.of_attention, path, module))
            except Refused as reason:
                grouping.refuse([path], str(reason), "heads")
    return found


def _planned(plan: Callable[..., Site], *given: Any) -> Site:
    """A site, or why there is none: one width that fails is no reason to lose all others."""
    try:
        return plan(*given)
    except Refused:
        raise
    except Exception as error:
        note(error)
        raise Refused(f"this width cannot be planned ({brief_error(error)})") from error
