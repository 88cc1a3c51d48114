"""Sites by name: a person may type what a site of the last search prints, instead of handing the site itself on."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import nn

from sensli.errors import UnknownSite
from sensli.moves.sites import Site

_MOST = 12  # names in an error text
# Sites refer to modules weakly, so what is remembered of a model goes with it.
_found: WeakKeyDictionary[nn.Module, tuple[Site, ...]] = WeakKeyDictionary()


def remember(model: nn.Module, sites: Iterable[Site]) -> None:
    """What the last search of the model found."""
    _found[model] = tuple(sites)


def named(model: nn.Module, name: str) -> Site:
    """The site with this line, this place (``"after features.1"``) or this path; the most exact of the three decides."""
    own = type(model).__name__
    if model not in _found:
        raise UnknownSite(
            f"site={name!r} is a name, but no sites of this {own} are known yet. Call find_sites(model, example) first, or give a Site."
        )
    sites = _found[model]
    for names in (map(str, sites), (site.place for site in sites), (site.path for site in sites)):
        matching = [site for site, known in zip(sites, names, strict=True) if known == name]
        if len(matching) > 1:
            lines = _listed(f"'{site}'" for site in matching)
            raise UnknownSite(
                f"site={name!r} is ambiguous: {len(matching)} sites of this {own} match. Give one of {lines}."
            )
        if matching:
            return matching[0]
    places = _listed(f"'{site.place}'" for site in sites) or "none"
    raise UnknownSite(
        f"site must be one that the last find_sites on this {own} found, got {name!r}. It found: {places}."
    )


def _listed(names: Iterable[str]) -> str:
    known = list(dict.fromkeys(names))
    return ", ".join(known[:_MOST]) + (f" and {len(known) - _MOST} more" if len(known) > _MOST else "")
