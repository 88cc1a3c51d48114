"""Which sites to keep: by kind, by path, or as a function says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from sensli.errors import WrongType
from sensli.modules import checks
from sensli.moves.sites import Site
from sensli.text.names import KINDS

Where = str | Sequence[str] | Callable[[Site], bool] | None
_WHAT = (
    f"a kind ({', '.join(map(repr, KINDS))}), a path or a pattern of paths (for example 'head.*'), a list of these, or a function "
    "of a Site that returns True or False"
)


def check_where(where: Where, model: nn.Module | None = None) -> None:
    """Raise if ``where`` cannot choose sites; with the model also if it names a path that this model does not have."""
    if where is None or callable(where):
        return
    names = _names(where)
    if not names or not all(isinstance(name, str) for name in names):
        checks.refuse("where", _WHAT, where, WrongType)
    for name in names:
        if not name:
            checks.refuse("where", _WHAT, where, ValueError)
        if model is not None and name not in KINDS and not any(_is_in(path, name) for path, _ in model.named_modules()):
            parts = ", ".join(repr(part) for part, _ in list(model.named_children())[:8]) or "none"
            hint = f"No module of this {type(model).__name__} has the path {name!r}. The first ones at the top are: {parts}."
            checks.refuse("where", _WHAT, where, ValueError, hint)


def chosen(sites: Sequence[Site], where: Where) -> list[Site]:
    """The sites that ``where`` keeps."""
    if where is None:
        return list(sites)
    if callable(where):
        return [site for site in sites if where(site)]
    return [site for site in sites if any(_keeps(name, site) for name in _names(where))]


def _names(where: object) -> list[str]:
    return (
        [where] if isinstance(where, str) else list(where) if isinstance(where, (list, tuple, set, frozenset)) else []
    )


def _keeps(name: str, site: Site) -> bool:
    return site.kind == name if name in KINDS else _is_in(site.path, name)


def _is_in(path: str, name: str) -> bool:
    """Whether a path is the named one, lies below it, or has the pattern."""
    return bool(path) and (path == name or path.startswith(f"{name}.") or fnmatchcase(path, name))
