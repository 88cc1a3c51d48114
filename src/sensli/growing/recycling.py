"""Dead units get a new start at a look: before the sites are measured, and in the layers that were just inserted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from sensli.growing.following import Followers
from sensli.growing.proposing import trained
from sensli.growing.searching import Search
from sensli.modules.engines.distributed import Together, numbered
from sensli.modules.marks import grown
from sensli.modules.wrappers import bare
from sensli.moves.dead.dead import Recycle
from sensli.moves.sites import Site
from sensli.moves.width.width import Width
from sensli.surgery.dead import find_dead
from sensli.surgery.history.history import History


class Recycling:
    """Finds the widths of a model, again only after a change, and recycles their dead units."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._search = Search(where=None, grow="units", units=1)

    def recycle(
        self,
        model: nn.Module,
        example: Any,
        batches: Iterable[Any],
        together: Together,
        history: History,
        *,
        when: Mapping[str, int],
        inside: Collection[int] | None = None,
    ) -> int:
        """Recycle the units that are zero on all batches; how many they were. ``inside``: only in the layers of these growths."""
        network = bare(model)
        widths = trained(network, self._search.sites(model, example), self._followers.optimizer, None)
        kept = list(widths) if inside is None else _made_by(network, widths, inside)
        together.agree_on(numbered("width", kept), last=False)
        if not kept:
            return 0
        found = find_dead(model, kept, example, batches, together)
        for site in found.sites:
            self._followers.recycle(model, site, history, when=when, check=found.check)
        return sum(len(site.move.which) for site in found.sites if isinstance(site.move, Recycle))


def reusable(batches: Iterable[Any]) -> Iterable[Any]:
    """Batches that can be taken more than once."""
    return list(batches) if hasattr(batches, "__next__") else batches


def _made_by(network: nn.Module, widths: Iterable[Site], numbers: Collection[int]) -> list[Site]:
    """The widths whose units a layer of these growths makes."""
    layers = [path for number, path, _ in grown(network) if number in numbers]
    return [
        site
        for site in widths
        if isinstance(site.move, Width)
        and any(
            f"{axis.module.path}.".startswith(f"{layer}.")
            for axis in site.move.axes
            if axis.fill == "row"
            for layer in layers
        )
    ]
