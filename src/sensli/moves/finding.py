"""`find_sites`: where a user's model could grow, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sensli.errors import UnsupportedModel, WrongType, unknown_choice
from sensli.modules import checks
from sensli.modules.copies import OnlyRead, SharedMemoryWritten
from sensli.modules.running import device_of, tf32_note_of, to_device, without_autocast
from sensli.modules.siblings import is_configured, sibling_of
from sensli.modules.wrappers import averages_in, bare, is_sharded
from sensli.moves.carrying import Found, carry_over, made_sibling
from sensli.moves.dead import NarrowKind, RecycleKind
from sensli.moves.layers import LayerKind
from sensli.moves.point import Ref
from sensli.moves.search import Request, Search
from sensli.moves.sites import Kind, Move, Site, Sites, Skipped, Where, check_where, filter_sites, remember_sites
from sensli.moves.stacking import StackKind
from sensli.moves.trace.flow import check_values, record
from sensli.moves.trace.stacks import parent_of
from sensli.moves.trial import LayerRehearsal
from sensli.moves.twin.finding import TwinKind
from sensli.moves.twin.twins import INITS
from sensli.moves.width.finding import WidthKind
from sensli.moves.width.starts import STARTS
from sensli.text.commands import FORMS, GROW, UNIFORM

# ---- The registry of the ways to grow, in the order in which they are asked.


# Twins before layers: between two blocks a copy of a block fits better than any layer.
KINDS: list[Kind] = [TwinKind(), LayerKind(), WidthKind(), RecycleKind(), NarrowKind(), StackKind()]


def move_from_dict(data: Mapping[str, Any]) -> Move:
    """A move from its plain data, by its tag."""
    known = {kind.move.tag: kind.move for kind in KINDS}
    if not isinstance(data, Mapping):
        raise TypeError(f"a move must be a mapping, got a {type(data).__name__}")
    tag = data["tag"]
    if tag not in known:
        raise ValueError(unknown_choice("tag", tag, tuple(known)))
    move: Move = known[tag].from_dict({key: value for key, value in data.items() if key != "tag"})
    return move


Init = str | Sequence[str] | None  # how what is new gets its weights
_INIT_NAMES = ", ".join(map(repr, (*INITS, *STARTS)))
# From a function, or from the configuration of the model: at any size, never, or (None) above so many parameters.
SiblingOption = Callable[[], Any] | bool | None
LARGE = 1_000_000_000
_LOOKED_FOR = {"twin": "no stack of blocks", "relu": "no ReLU"}


def check_request(form: str, kernel_size: int | None) -> int | None:
    """Raise if a layer is asked for that does not exist; the kernel size as a number."""
    checks.one_of("form", form, ("auto", *FORMS, "twin"))
    if kernel_size is None:
        return None
    return checks.odd("kernel_size", kernel_size, 3, "a new convolution must keep the size of its feature map")


def check_init(init: Init) -> tuple[str, str]:
    """How new blocks and how new units get their weights, from what was said about either or both of them."""
    given = init if isinstance(init, (tuple, list)) and init else (init,)
    if init is None:
        given = ()
    elif not all(isinstance(each, str) for each in given):
        checks.refuse(
            "init",
            f"one of {_INIT_NAMES}, or one for blocks and one for units (for example ('copy', 'random'))",
            init,
            WrongType,
        )
    for each in given:
        checks.one_of("init", each, (*INITS, *STARTS))
    of_blocks, of_units = ([each for each in given if each in known] for known in (INITS, STARTS))
    if len(of_blocks) > 1 or len(of_units) > 1:
        checks.refuse("init", "at most one for blocks and one for units", init, ValueError)
    return (*of_blocks, "copy")[0], (*of_units, "sensitive")[0]


def check_units(units: int | float) -> int | float:
    """How many new units: a number, or a share."""
    what = "a number of units (for example 8) or a share of those that a layer has (for example 0.25)"
    if not isinstance(units, float):
        return checks.integer("units", units, what, lambda number: number >= 1)
    if not 0 < units < 1:
        checks.refuse("units", what, units, ValueError)
    return units


@without_autocast()
def find_sites(
    model: nn.Module,
    example: Any,
    *,
    what: str = "layers",
    where: Where = None,
    form: str = "auto",
    kernel_size: int | None = None,
    units: int | float = 0.25,
    init: Init = None,
    sibling: SiblingOption = None,
) -> Sites:
    """Find the places where a model can grow without changing its function: by an identity layer, or by more units in a layer.

    The example runs a few times through a copy of the model, with and without new layers; the model itself is only read.

    Args:
        model: The network.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments; keys that ``forward`` does
            not take, such as labels, are left out.
        what: What to grow: ``"layers"``, ``"units"`` (more units, channels, hidden features or attention heads for layers that
            exist) or ``"both"`` (default: "layers").
        where: Which sites to keep: a kind (``"conv"``, ``"linear"``, ``"block"``, ``"units"``), the path of a module (with all that
            is in it) or a pattern such as ``"head.*"``, a list of these, or a function of a `Site` that returns a bool. None keeps
            all of them.
        form: The form of the new layers: ``"relu"``, ``"residual"``, ``"parametric"``, ``"twin"``, or ``"auto"`` to choose
            what fits each site (default: "auto").
        kernel_size: The kernel size of new convolutions, an odd number. None takes the neighbour's if it is odd, otherwise 3.
        units: How many units a layer would get, of attention how many heads: a number, or a share of those it has, at least one
            (default: 0.25).
        init: How what is new gets its weights, or a pair for blocks and units. The weights of a block that need not be zero:
            ``"copy"`` takes those of its neighbor, ``"fresh"`` draws new ones with the same spread. Units: ``"sensitive"`` chooses the
            incoming weights that are worth most among several that are made for the data, ``"random"`` draws them, ``"gradmax"`` leaves
            them zero and chooses the outgoing weights, ``"net2net"`` copies units that are there. None takes "copy" and "sensitive".
        sibling: Where to look: a function that makes a small model of the same class, with at least three blocks, or a pair of it and
            an example for it. Sites are found there and bound to this model by path, and the example runs through the model once, so
            that no copy of it is made. True builds one from ``model.config``, False always copies. None builds one for models with a
            configuration that are sharded or have more than a billion parameters.

    Returns:
        The sites in the order of the data flow, with the places that were skipped and why.

    Raises:
        BadExample: If the example does not run through the model.
        UnsupportedModel: If the model as a whole cannot be read, or the sibling has other paths or classes.
    """
    if what == UNIFORM:
        raise ValueError(
            f"what must be one of {', '.join(map(repr, GROW))} here, got {UNIFORM!r}: that is a decision of a Grower about all sites of "
            "what='units' together."
        )
    checks.one_of("what", what, GROW)
    kernel_size, units = check_request(form, kernel_size), check_units(units)
    block_init, unit_init = check_init(init)
    model = bare(model)
    check_where(where, model)
    check_values(checks.example("example", example))
    with torch.inference_mode(False):
        request = Request(form, kernel_size, block_init, what, units, unit_init)
        found, skipped, notes = _found(model, example, request, sibling)
    found, skipped = _outside_of_averages(model, found, skipped)
    sites = [replace(site, _root=Ref.to("", model)) for site in found]
    remember_sites(model, sites)
    return Sites(filter_sites(sites, where), skipped, notes=notes, model_name=type(model).__name__)


def _outside_of_averages(
    model: nn.Module, sites: list[Site], skipped: list[Skipped]
) -> tuple[list[Site], list[Skipped]]:
    """The sites that are no part of an average in the model: it follows the model, and does not train."""
    for path in averages_in(model):
        edits = [site.move.plan(model, site) for site in sites]
        names = [[edit.name, *(each.name for each in edit.resized)] for edit in edits]
        kept = [not any(name.startswith(f"{path}.") for name in its) for its in names]
        sites = [site for site, stays in zip(sites, kept, strict=True) if stays]
        skipped = [each for each in skipped if not f"{each.path}.".startswith(f"{path}.")]
        skipped.append(Skipped(path, "is an average, which grows with what it averages and does not train"))
    return sites, skipped


def _found(model: nn.Module, example: Any, request: Request, sibling: SiblingOption) -> Found:
    """What was found on a sibling, where there is one to look at, or else on a copy of the model."""
    if sibling is not None and not isinstance(sibling, bool):
        return carry_over(model, example, partial(made_sibling, sibling), request, _search_on_copy)
    if sibling:
        return carry_over(model, example, sibling_of, request, _search_on_copy)
    note: list[str] = []
    large = is_sharded(model) or sum(p.numel() for p in model.parameters()) > LARGE
    if sibling is None and is_configured(model) and large:
        try:
            return carry_over(model, example, sibling_of, request, _search_on_copy)
        except UnsupportedModel as error:
            note.append(f"a copy of the whole model was searched, because a small sibling of it would not do: {error}")
    found, skipped, notes = _search_on_copy(model, example, request)
    return found, skipped, [*note, *notes]


def _search_on_copy(model: nn.Module, example: Any, request: Request) -> Found:
    """The search on a copy that shares the model's memory or, where the model's code writes into its parameters, on a whole one."""
    guard = OnlyRead(model)
    if guard and not is_sharded(model):
        with suppress(SharedMemoryWritten), guard:
            return _search(model, example, request, share=True)
    return _search(model, example, request, share=False)


def _search(model: nn.Module, example: Any, request: Request, *, share: bool) -> Found:
    example = to_device(example, device_of(model))
    flow = record(model, example, share=share)
    try:
        if (note := tf32_note_of(model)) is not None:
            flow.note(note)
        trial = LayerRehearsal(flow, example)
        kinds = [kind for kind in KINDS if request.what in ("both", kind.grows)]
        search = Search(model, example, flow, request, kinds)
        sites, skipped = search.find(trial)
        lists = {parent_of(block.path) for stack in search.stacks if stack.added for block in stack.blocks}
        if lists and lists.isdisjoint(parent_of(site.path) for site in sites):
            # Nothing can go between the blocks of those lists, so they are looked into.
            within = Search(model, example, flow, request, kinds, added=False, learned=search.learned)
            sites, others = within.find(trial)
            skipped = [*skipped, *(each for each in others if each not in skipped)]
        if not sites and not skipped:
            what = _LOOKED_FOR.get(request.form, "no activation, no linear layer and no convolution")
            skipped = [Skipped("", f"{what} was reached by the example")]
        return sites, skipped, flow.notes
    finally:
        flow.forget()
