"""Compiled code of a model that has grown is dropped, and that of other models stays.

torch.compile keeps code per Python function, so all models of a class share one cache, and after eight changes of one of them it silently
stops compiling. A compiled module can have a separate part of that cache (``isolate_recompiles``): each growth gives it a fresh one.
How that is kept is private to torch and used here alone. Where torch has it otherwise, all compiled code of the process is dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_PART = "_isolate_recompiles_id"  # which part of the cache a compiled module uses; known from torch 2.13


def forget(modules: Iterable[nn.Module]) -> None:
    """Those modules that are compiled compile once more at their next call."""
    found = [each for each in modules if "_orig_mod" in each._modules or each.__dict__.get("_compiled_call_impl")]
    if not found:
        return
    contexts = [_context(each) for each in found]
    if all(hasattr(context, _PART) for context in contexts) and _known() and not _is_full():
        for context in contexts:
            _begin_again(context)
    else:
        torch.compiler.reset()


def _context(module: nn.Module) -> Any:
    """What holds the settings of a compiled module, or None."""
    if "_orig_mod" in module._modules:  # torch.compile(module)
        return module.__dict__.get("dynamo_ctx")
    call = module.__dict__["_compiled_call_impl"]  # module.compile()
    return inspect.getclosurevars(call).nonlocals.get("self") if inspect.isfunction(call) else None


def _known() -> bool:
    from torch._dynamo import convert_frame, eval_frame, guards

    return (
        hasattr(eval_frame, "_next_isolate_recompiles_id")
        and hasattr(eval_frame, "_get_cache_entries_for_region")
        and hasattr(eval_frame, "_get_total_cache_entry_count")
        and hasattr(guards, "DeletedGuardManagerWrapper")
        and hasattr(convert_frame.input_codes, "seen")
    )


def _codes() -> list[Any]:
    """The Python functions that were compiled so far."""
    from torch._dynamo import convert_frame

    return [code for reference in convert_frame.input_codes.seen if (code := reference()) is not None]


def _is_full() -> bool:
    """Whether a function has been compiled so often, for all models, that torch is about to give it up."""
    from torch._dynamo import config, eval_frame

    most: int = config.accumulated_recompile_limit
    return any(eval_frame._get_total_cache_entry_count(code) >= most - 1 for code in _codes())


def _begin_again(context: Any) -> None:
    from torch._dynamo import eval_frame, guards

    old, fresh = getattr(context, _PART), next(eval_frame._next_isolate_recompiles_id)
    setattr(context, _PART, fresh)
    if old < 0:
        return  # the part that is common to all: the old code may belong to others, and no longer fits this model
    for code in _codes():
        for entry in eval_frame._get_cache_entries_for_region(code, old):
            holder = entry.guard_manager.extra_state
            if holder is not None:  # frees the memory of the old code
                holder.invalidate(entry, guards.DeletedGuardManagerWrapper("the model has grown"))
