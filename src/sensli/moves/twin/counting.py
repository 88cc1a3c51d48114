"""What counts and numbers the blocks of a list, found by trial on a copy, so that an insertion can make it true.

A model that is built from a configuration object is the strictest judge: rebuilt from the changed configuration it must have exactly
the parameters, and inside its modules the numbers and names, of the model that has grown. Other lists are judged by a run of the example:
the new block is called once and the output stays.

Configurations do not say it by one name: of the models of transformers in our tests eight count in `n_layer`, `num_layers`,
`encoder_layers`, `decoder_layers` or one entry of `depths`, T5 in three configurations at once, some keep `attention_layers` or
`no_rope_layers` beside `layer_types`, and four build another kind of block at the place in question. So it is found out, not looked up.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from sensli.modules import random_state
from sensli.modules.chain import Chain
from sensli.modules.failing import note
from sensli.modules.running import device_of, run, to_device
from sensli.moves.lists import ListPlace, grown_list, unwrapped
from sensli.moves.trace.flow import Flow
from sensli.moves.twin.around import numbers
from sensli.moves.twin.configured import Rebuilt, configured
from sensli.moves.twin.known import Known
from sensli.moves.twin.numbering import find_indices, own_numbers
from sensli.moves.twin.rebuilding import COUNTS
from sensli.moves.twin.twins import Twin


def plan_list(flow: Flow, example: Any, container: str, sources: tuple[int, int], twin: Twin) -> ListPlace | None:
    """What must follow when the list takes a twin beside a block; None where no trial confirms any plan.

    ``sources`` are the first and the last of the equal blocks that a twin may go beside. What holds at both holds between them: unless the
    configuration lists the blocks one by one, a block more at either end can give the same list only if all between are equal.
    The copy that the example ran through takes the twin, and is put back.
    """
    trial = flow.model
    blocks = list(trial.get_submodule(container).children())
    source, last = sources
    position = source + 1
    indices = find_indices(blocks)
    if not {*own_numbers(blocks)[source]} <= {(index.module, index.name) for index in indices}:
        return None  # nothing tells which number a twin should have
    layer = twin.build(unwrapped(blocks[source]), trial)
    # Never chained: somebody's eval() returns None.
    layer.eval()
    identity = bool(twin.zeroed)
    known = Known(example, trial, flow.output if identity else _beside(flow, container, source, layer, example))

    def holds(place: ListPlace) -> bool:
        """Whether the grown copy runs the new block once and gives the same output; the copy is put back."""
        with grown_list(trial, container, place, position, source, layer):
            return known.is_given_by(trial, layer)

    for owner, name in configured(trial, container):
        remade = Rebuilt(trial, owner, name, container, indices)
        for facts, built in remade.plans(position, source, layer):
            place = ListPlace(facts, indices)
            if remade.matches(facts, last + 1, last, layer):
                with grown_list(trial, container, place, position, source, layer):
                    alike = remade.runs_alike(built, known)
                if alike if alike is not None else holds(place):
                    return place
        if remade.is_faithful:
            return None
    named = tuple(fact for fact in numbers(trial, container, len(blocks)) if fact.name in COUNTS)
    for guess in (named, *((*named, fact) for fact in numbers(trial, container, len(blocks)) if fact not in named)):
        if holds(ListPlace(guess, indices)):
            return ListPlace(guess, indices)
    return None


def _beside(flow: Flow, container: str, source: int, layer: nn.Module, example: Any) -> Any:
    """What the copy gives if a block that is not an identity runs directly after the one at ``source``; None if that fails."""
    trial = flow.model
    blocks, key = trial.get_submodule(container), str(source)
    anchor = blocks.get_submodule(key)
    calls = flow.calls_of(f"{container}.{key}" if container else key)
    if len(calls) != 1 or calls[0].slot is None:
        return None
    chain = Chain(anchor, calls[0].slot)
    chain.add_module("grown1", layer)
    chain.takes_call.add("grown1")
    chain.eval()
    blocks._modules[key] = chain
    try:
        with random_state.kept(), torch.no_grad():
            return run(trial, copy.deepcopy(to_device(example, device_of(trial))))
    except Exception as error:
        note(error)
        return None
    finally:
        blocks._modules[key] = anchor
