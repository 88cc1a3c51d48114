"""`find_sites`: where a user's model could grow, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sensli.modules import checks
from sensli.modules.wrappers import bare
from sensli.moves.kinds import KINDS
from sensli.moves.layer.forms import FORMS
from sensli.moves.search import Request, Search
from sensli.moves.sites import Site, Sites, Skipped
from sensli.moves.trace.flow import record
from sensli.moves.trace.stacks import parent_of
from sensli.moves.trial import Trial
from sensli.moves.twin.twins import INITS

WHERE = ("conv", "linear", "block")


def check_request(layer: str, where: str | Callable[[Site], bool] | None) -> None:
    """Raise if a layer or a kind of site is asked for that does not exist."""
    checks.one_of("layer", layer, ("auto", *FORMS, "twin"))
    if where is not None and not callable(where):
        checks.one_of("where", where, WHERE, other="a function of a Site that returns True or False")


def find_sites(
    model: nn.Module,
    example: Any,
    *,
    layer: str = "auto",
    where: str | Callable[[Site], bool] | None = None,
    kernel_size: int | None = None,
    init: str = "copy",
) -> Sites:
    """Find the places where an identity layer can be inserted without changing the function.

    The example runs a few times through a copy of the model, with and without new layers; the model itself is only read.

    Args:
        model: The network.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        layer: The form of the new layers: ``"relu"``, ``"residual"``, ``"parametric"``, ``"twin"``, or ``"auto"`` to choose
            what fits each place (default: "auto").
        where: Which sites to keep: a kind (``"conv"``, ``"linear"``, ``"block"``) or a function of a `Site` that returns a bool.
            None keeps all of them.
        kernel_size: The kernel size of new convolutions, an odd number. None takes the neighbour's if it is odd, otherwise 3.
        init: How a twin gets the weights that need not be zero: ``"copy"`` takes those of its neighbour, ``"fresh"`` draws new
            ones with the same spread (default: "copy").

    Returns:
        The sites in the order of the data flow, with the places that were skipped and why.

    Raises:
        BadExample: If the example does not run through the model.
        UnsupportedModel: If the model as a whole cannot be read.
    """
    check_request(layer, where)
    checks.one_of("init", init, INITS)
    if kernel_size is not None:
        kernel_size = checks.odd(
            "kernel_size", kernel_size, 3, "a new convolution must keep the size of its feature map"
        )
    model = bare(model)
    checks.example("example", example)
    with torch.inference_mode(False):
        sites, skipped = _search(model, example, Request(layer, kernel_size, init))
    if callable(where):
        chosen = where
        sites = [site for site in sites if chosen(site)]
    elif where is not None:
        sites = [site for site in sites if site.kind == where]
    return Sites(sites, skipped, model_name=type(model).__name__)


def _search(model: nn.Module, example: Any, request: Request) -> tuple[list[Site], list[Skipped]]:
    flow = record(model, example)
    trial = Trial(flow, example)
    search = Search(model, example, flow, request, KINDS)
    sites, skipped = search.find(trial)
    lists = {parent_of(block.path) for stack in search.stacks if stack.added for block in stack.blocks}
    if lists and lists.isdisjoint(parent_of(site.path) for site in sites):
        # Nothing can go between the blocks of those lists, so they are looked into.
        within = Search(model, example, flow, request, KINDS, added=False, learned=search.learned)
        sites, others = within.find(trial)
        skipped = [*skipped, *(each for each in others if each not in skipped)]
    return sites, skipped
