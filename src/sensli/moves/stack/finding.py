"""Which stacks of blocks a model has that could be copied as a whole, and where the copies would go, found by trial on a copy."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sensli.errors import SensliError
from sensli.modules import random_state
from sensli.modules.failing import note
from sensli.modules.running import device_of, run, tensors, to_device
from sensli.modules.wrappers import bare
from sensli.moves.lists import ListPlace
from sensli.moves.point import Ref
from sensli.moves.search import Refused, Request, Search
from sensli.moves.sites import Site, Sites, Skipped
from sensli.moves.stack.stack import Stack
from sensli.moves.trace.flow import Call, check_values, record
from sensli.moves.trace.stacks import Stack as Row
from sensli.moves.trace.stacks import parent_of
from sensli.moves.twin.block_trial import NoTwin
from sensli.moves.twin.finder import TwinFinder
from sensli.moves.twin.zeroing import block_flops


def find_stacks(model: nn.Module, example: Any) -> Sites:
    """For each stack of equal blocks the site that copies it once, after its last block. The model is only read."""
    model = bare(model)
    check_values(example)
    with torch.inference_mode(False):
        flow = record(model, example)
        search = Search(model, example, flow, Request(layer="twin"), [])
        finder = TwinFinder(example, "copy")
        found, skipped = list[Site](), list[Skipped]()
        for row in sorted(search.stacks, key=lambda row: row.blocks[0].began):
            last = row.blocks[-1]
            try:
                site = _site(search, finder, row)
                _try(flow.model, site, example, flow.output)
            except (Refused, NoTwin) as refusal:
                skipped.append(Skipped(last.path, str(refusal)))
            else:
                found.append(replace(site, _root=Ref.to("", model)))
    return Sites(found, skipped, model_name=type(model).__name__)


def _site(search: Search, finder: TwinFinder, row: Row) -> Site:
    model, last = search.model, row.blocks[-1]
    assert last.result is not None
    search.check(last, "after", last.result, block=True)
    chained, place = _place(search, finder, row, last)
    point = search.point(last, "after", last.result, block=True, chained=chained, place=place)
    blocks = [(call.path, model.get_submodule(call.path)) for call in row.blocks]
    parameters = sum(parameter.numel() for _, block in blocks for parameter in block.parameters())
    flops = sum(map(block_flops, row.blocks))
    refs = tuple(Ref.to(*block) for block in blocks)
    return Site(point, Stack(type(last.module).__name__, refs, 1, parameters, flops))


def _place(search: Search, finder: TwinFinder, row: Row, last: Call) -> tuple[bool, ListPlace | None]:
    """Whether the copies go into an ``nn.Sequential`` that is called as a whole, and what must follow if they go into a list."""
    assert last.result is not None
    if row.added:
        chained = isinstance(search.model.get_submodule(parent_of(last.path)), nn.Sequential)
        return True, finder.find_null(search.flow, last, chained=chained)[1]
    chained = search.around.chained(last.path)
    try:  # an identity in the list shows best whether the list can take a block: nothing may change
        return chained, finder.find(search.flow, last, last.result, chained=chained)[1]
    except NoTwin:  # a block with a norm after its sum, say
        return chained, finder.find_plain(search.flow, last, chained=chained)


def _try(trial: nn.Module, site: Site, example: Any, before: Any) -> None:
    """Refuse a stack whose copies would not each run once, or with which the model returns something of another shape."""
    here = replace(
        site, point=site.point.on(trial), move=site.move.bound(lambda r: Ref.to(r.path, trial.get_submodule(r.path)))
    )
    edit = here.move.plan(trial, here)
    edit.build()
    calls = [0] * len(edit.added)
    handles = []
    for index, module in enumerate(edit.added):

        def count(*_: Any, index: int = index) -> None:
            calls[index] += 1

        module.eval()
        handles.append(module.register_forward_pre_hook(count))
    edit.apply()
    try:
        with random_state.kept(), torch.no_grad():
            after = run(trial, copy.deepcopy(to_device(example, device_of(trial))))
    except SensliError:
        raise
    except Exception as error:
        note(error)
        raise Refused(
            f"the forward pass fails with a copy of the stack after it ({type(error).__name__}: {error})"
        ) from error
    finally:
        edit.revert()
        for handle in handles:
            handle.remove()
    if set(calls) != {1}:
        raise Refused("the forward pass would not run each block of a copy of the stack once")
    if _first(before) != _first(after):
        raise Refused("the model returns something else with a copy of the stack after it")


def _first(output: Any) -> tuple[int, ...] | None:
    """The shape of the first tensor that a model returns: others may be lists of all blocks' states."""
    return next((tuple(tensor.shape) for tensor in tensors(output)), None)
