"""Wrappers around a model, compiled ones too: those that are looked through, and those that are refused."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from sensli.errors import UnsupportedModel
from sensli.modules import checks

# ---- Compiled code of a model that has grown is dropped, and that of other models stays.
#
# torch.compile keeps code per Python function, so all models of a class share one cache, and after eight changes of
# one of them it silently stops compiling. A compiled module can have a separate part of that cache
# (``isolate_recompiles``): each growth gives it a fresh one. How that is kept is private to torch and used here
# alone. Where torch has it otherwise, all compiled code of the process is dropped.

_PART = "_isolate_recompiles_id"  # which part of the cache a compiled module uses; known from torch 2.13


def forget_compiled(model: nn.Module) -> None:
    """Compiled code of a model that has changed is dropped, so that it compiles once more at its next call.

    torch.compile would notice by itself, but counts each change, and after eight it silently stops compiling.
    """
    chain = wrappers_around(model)
    modules = (*chain[:-1], *chain[-1].modules())
    found = [each for each in modules if "_orig_mod" in each._modules or each.__dict__.get("_compiled_call_impl")]
    if not found:
        return
    contexts = [_context(each) for each in found]
    if not all(hasattr(context, _PART) for context in contexts) or not _begin_again(contexts):
        torch.compiler.reset()


def _context(module: nn.Module) -> Any:
    """What holds the settings of a compiled module, or None."""
    if "_orig_mod" in module._modules:  # torch.compile(module)
        return module.__dict__.get("dynamo_ctx")
    call = module.__dict__["_compiled_call_impl"]  # module.compile()
    return inspect.getclosurevars(call).nonlocals.get("self") if inspect.isfunction(call) else None


def compile_like(new: nn.Module, source: nn.Module) -> None:
    """Compile a copy of a module, and its parts, where `module.compile()` was called on those of the source: a copy does not keep that."""
    there = dict(new.named_modules())
    for path, module in source.named_modules():
        if module.__dict__.get("_compiled_call_impl") and path in there:
            part, context = there[path], _context(module)
            if context is None:  # torch keeps it in another way: as it compiles if nothing is asked for
                part.compile()
            else:
                part._compiled_call_impl = copy.copy(context)(part._call_impl)


def _begin_again(contexts: list[Any]) -> bool:
    """Give compiled modules a fresh part of the cache each; False where torch keeps it in another way, or where that would not help."""
    from torch._dynamo import config, convert_frame, eval_frame, guards

    private = (
        (eval_frame, "_next_isolate_recompiles_id"),
        (eval_frame, "_get_cache_entries_for_region"),
        (eval_frame, "_get_total_cache_entry_count"),
        (guards, "DeletedGuardManagerWrapper"),
        (convert_frame.input_codes, "seen"),
    )
    if not all(hasattr(holder, name) for holder, name in private):
        return False
    # The Python functions that were compiled so far.
    codes: list[Any] = [code for each in convert_frame.input_codes.seen if (code := each()) is not None]
    # One that has been compiled so often, for all models, that torch is about to give it up.
    if any(eval_frame._get_total_cache_entry_count(code) >= config.accumulated_recompile_limit - 1 for code in codes):
        return False
    for context in contexts:
        old = getattr(context, _PART)
        setattr(context, _PART, next(eval_frame._next_isolate_recompiles_id))
        # Below 0 is the part that is common to all: the old code may belong to others, and no longer fits this model.
        for code in codes if old >= 0 else ():
            for entry in eval_frame._get_cache_entries_for_region(code, old):
                holder = entry.guard_manager.extra_state
                if holder is not None:  # frees the memory of the old code
                    holder.invalidate(entry, guards.DeletedGuardManagerWrapper("the model has grown"))
    return True


# By class name, because some of them live in modules that are costly to import or absent from a build of torch.
_ENGINES = {
    "DistributedDataParallel": "DistributedDataParallel inside a model cannot be rebuilt when a layer is inserted. Wrap the whole model",
    "DataParallel": "DataParallel copies the model at every step. Use DistributedDataParallel, or grow its .module before wrapping it",
    "FullyShardedDataParallel": "its flat parameters cannot include a new layer. Use fully_shard (FSDP2)",
}


def wrappers_around(model: nn.Module) -> list[nn.Module]:
    """The wrappers around the user's own module, the outermost first, and that module last."""
    chain = [model]
    while True:
        inner = getattr(chain[-1], "_orig_mod", None)  # torch.compile
        if not isinstance(inner, nn.Module) and is_a(chain[-1], "DistributedDataParallel"):
            inner = chain[-1].module
        if not isinstance(inner, nn.Module):
            return chain
        chain.append(inner)


# Of wrappers around a block: torch.compile(block), and checkpoint_wrapper(block) of activation checkpointing.
_AROUND_BLOCKS = ("_orig_mod", "_checkpoint_wrapped_module")


def block_inside(block: nn.Module) -> nn.Module:
    """The block in wrappers that compile it or checkpoint its activations."""
    for name in _AROUND_BLOCKS:
        inner = block._modules.get(name)
        if inner is not None:
            return block_inside(inner)
    return block


def bare(model: nn.Module, name: str = "model") -> nn.Module:
    """The user's own module: torch.compile and DistributedDataParallel are looked through, what would fail silently is refused."""
    own = wrappers_around(checks.model(name, model))[-1]
    if isinstance(own, torch.jit.ScriptModule):
        raise UnsupportedModel(
            f"{type(own).__name__} is scripted, and a scripted module can be neither read nor changed. "
            "Grow the Python module and script it afterwards."
        )
    parts = list(own.modules())
    for name, reason in _ENGINES.items():
        if any_is_a(parts, name):
            path = next(path for path, module in own.named_modules() if is_a(module, name))
            place = f"'{path}'" if path else "the model"
            raise UnsupportedModel(f"{place} is wrapped in {name}: {reason}.")
    parameters = [each for part in parts for each in part._parameters.values() if each is not None]
    if any(isinstance(each, nn.UninitializedParameter) for each in parameters):
        raise UnsupportedModel(
            f"{type(own).__name__} has lazy layers whose parameters are not initialized. Run one batch through it first: a growing "
            "model needs to know its shapes."
        )
    if any(each.is_inference() for each in parameters):
        raise UnsupportedModel(
            f"{type(own).__name__} has parameters that were made inside torch.inference_mode(), which can never train. Build the model, "
            "and move it to its device, outside of inference mode."
        )
    return own


def is_a(module: nn.Module, name: str) -> bool:
    """Whether the module is of this class of torch, by name: the classes live where an import is costly or may fail."""
    return _is_kind(type(module), name)


def any_is_a(modules: Iterable[nn.Module], name: str) -> bool:
    """Whether one of the modules is of this class of torch. They may be many, and of few classes."""
    return any(_is_kind(kind, name) for kind in set(map(type, modules)))


def _is_kind(kind: type, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.startswith("torch.") for base in kind.__mro__)


def check_whole(model: nn.Module) -> None:
    """Refuse a model without `fully_shard` whose layers each compute a part of a result."""
    name = next((name for name, each in model.named_parameters() if hasattr(type(each), "full_tensor")), None)
    if name is not None:
        raise spread_error(name)


def spread_error(name: str) -> UnsupportedModel:
    """For a parameter of which each process computes with its own part."""
    return UnsupportedModel(
        f"'{name}' is spread by a tensor-parallel plan (parallelize_module): each process computes a part of its layer, and nothing tells "
        "how a new layer should be divided. Grow the model without the plan, with fully_shard alone or in one process. Apply it afterwards."
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or to a part of it."""
    return any_is_a(model.modules(), "FSDPModule")


def class_of(module: nn.Module) -> type[nn.Module]:
    """The user's class of a module, also where `fully_shard` has put one of its own in front of it."""
    kind = type(module)
    return kind.__bases__[1] if is_a(module, "FSDPModule") and len(kind.__bases__) > 1 else kind


def is_average(module: object) -> bool:
    """Whether this is an average of torch (`torch.optim.swa_utils.AveragedModel`)."""
    return isinstance(module, nn.Module) and is_a(module, "AveragedModel")


def averages_in(model: nn.Module) -> dict[str, nn.Module]:
    """The averages of torch that a model holds itself, by path."""
    if not any_is_a(model.modules(), "AveragedModel"):
        return {}
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if path and is_average(module) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their paths, without averages of them that the model holds: these follow, and do not train."""
    inside = {id(module) for average in averages_in(model).values() for module in average.modules()}
    return ((path, module) for path, module in model.named_modules() if id(module) not in inside)


def own_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters, without those of averages that the model holds."""
    inside = {id(p) for average in averages_in(model).values() for p in average.parameters()}
    return (parameter for parameter in model.parameters() if id(parameter) not in inside)


def run_eagerly() -> AbstractContextManager[Any]:
    """Compiled modules run as they are written, because compiled code does not call the hooks that a measurement sets."""
    # Whoever compiles has imported dynamo; for the others the import would cost seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
