"""Several processes do the same: what fails on one fails on all, sums are taken over all, and every rank decides the same.

Whoever changes or measures a model opens a `Together`. Without several processes it does nothing.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sensli.errors import DistributedError, UnsupportedModel
from sensli.modules.copies import copied_block
from sensli.modules.engines import fsdp
from sensli.modules.running import whole_tensor
from sensli.modules.wrappers import check_whole, forget_compiled, is_a, is_sharded, wrappers_around


def ddps(model: nn.Module) -> list[Any]:
    """The wrappers of DistributedDataParallel around a model."""
    return [each for each in wrappers_around(model) if is_a(each, "DistributedDataParallel")]


def process_group(model: nn.Module, *, sharded: bool) -> Any:
    """The processes that train this model together, or None if there is only one."""
    for wrapper in ddps(model):
        return wrapper.process_group if dist.get_world_size(wrapper.process_group) > 1 else None
    return fsdp.mesh_group(model) if sharded else None


def readable_part(model: nn.Module, part: nn.Module) -> nn.Module:
    """A part of a model, or, where it is sharded, a copy with whole parameters. All processes must call it together."""
    if not is_sharded(model):
        return part
    fsdp.reshard(model)
    with fsdp.as_written(part) as instead:
        for parameter in part.parameters():
            instead[id(parameter)] = nn.Parameter(whole_tensor(parameter).clone(), parameter.requires_grad)
        return copied_block(part, model, instead=instead)


@contextmanager
def running_part(model: nn.Module, part: nn.Module, *, leave: bool) -> Iterator[nn.Module]:
    """A part of a sharded model as it was written, with the parameters that passes run with; ``leave``: as for `fsdp.gathered`."""
    with fsdp.gathered(model, part, leave=leave):
        with fsdp.as_written(part) as instead:
            copied = copied_block(part, model, share=True, instead=instead)
        yield copied


class Together:
    """A piece of work that all ranks do at once. ``agree`` is the point of no return: it passes on all ranks or on none.

    Work before it may fail on some ranks only; then all of them raise, so that none waits for another in vain. Pieces may be nested: what
    fails around an inner one reaches the others wherever they wait, and is reported once.
    """

    def __init__(self, model: nn.Module | None, what: str) -> None:
        # By fully_shard: asked once, and whoever takes part in the work reads it here.
        self.sharded = isinstance(model, nn.Module) and is_sharded(model)
        self.group = None if model is None else process_group(model, sharded=self.sharded)
        self.what = what
        self._agreed = False

    @classmethod
    def of_the_job(cls, what: str) -> Together:
        """Work of all processes of the job, used before there is a model that tells which processes train it."""
        together = cls(None, what)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            together.group = dist.group.WORLD
        return together

    @property
    def rank(self) -> int:
        """This process among those that train the model; 0 if there is only one."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def __enter__(self) -> Together:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, Exception):
            self.failed(value)

    def failed(self, error: Exception) -> None:
        """Tell the other ranks, unless they know already or have continued."""
        if self.group is None or self._agreed or is_known(error):
            return
        self._agreed = True
        with suppress(DistributedError):  # raised for a rank that is gone: this error says more
            gather(self.group, (f"{type(error).__name__}: {error}", self.what, None), self.what)
        setattr(error, _KNOWN, True)

    def agree(self, fact: Any = None, *, last: bool = True) -> list[Any]:
        """Wait for all ranks; raise if one failed. Returns the facts of all ranks, by rank. Unless it is the last time, work continues."""
        self._agreed = True
        if self.group is None:
            self._agreed = last
            return [fact]
        answers = gather(self.group, (None, self.what, fact), self.what)
        for rank, (error, _, _) in enumerate(answers):
            if error is not None:
                raise _known(
                    f"could not {self.what}, because rank {rank} failed: {error} Nothing was changed on any rank."
                )
        for rank, (_, what, _) in enumerate(answers):
            if what != answers[0][1]:
                raise _known(
                    f"Ranks disagree: rank 0 is about to {answers[0][1]}, rank {rank} to {what}. All must hold the same model and take the "
                    "same decisions. Nothing was changed."
                )
        self._agreed = last
        return [fact for _, _, fact in answers]

    def agree_on(self, facts: Mapping[str, Any], own: Any = None, *, last: bool = True) -> list[Any]:
        """As `agree`, and all ranks must bring the same facts; the error names what differs. Returns the ``own`` of each rank."""
        answers = self.agree((dict(facts), own), last=last)
        told = [facts for facts, _ in answers]
        for rank, its in enumerate(told):
            different = [name for name in {**told[0], **its} if told[0].get(name) != its.get(name)]
            if different:
                self._agreed = True
                name = different[0]
                raise _known(
                    f"Ranks disagree, so they cannot {self.what}: {name} is {told[0].get(name)} on rank 0 and {its.get(name)} on rank "
                    f"{rank}. All must hold the same model and settings and take the same decisions. Nothing was changed."
                )
        return [own for _, own in answers]


class ShardedPass(Together):
    """A forward pass of a sharded model: all processes make it, and all or none of them go on to the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "run the model")
        self._model = model

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, Exception) and not self._agreed:
            try:
                fsdp.finish_forward(self._model)
            except RuntimeError as error:
                raise _gone(self.what, error) from value
        super().__exit__(kind, value, trace)
        if value is not None:
            fsdp.forget_pass(self._model)


def number_facts(name: str, things: Iterable[Any]) -> dict[str, str]:
    """Facts for `agree_on` from a list, so that the first entry that differs is named."""
    return {f"{name} {number}": f"'{thing}'" for number, thing in enumerate(things, 1)}


def gather(group: Any, value: Any, what: str) -> list[Any]:
    """Each rank's value, by rank. A rank that is gone makes the others raise instead of waiting."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(answers, value, group=group)
    except RuntimeError as error:
        raise _gone(what, error) from error
    return answers


def ended_by_others(what: str, error: Exception) -> DistributedError | None:
    """What to raise instead of an error that a process gets when another one is gone; None for all other errors."""
    told = isinstance(error, dist.DistError) or "gloo/transport" in str(error)  # gloo raises a bare RuntimeError
    return _gone(what, error) if told else None


def _gone(what: str, error: Exception) -> DistributedError:
    return _known(
        f"could not {what}, because another process of the job has ended or does not answer ({error}). "
        "Start the job again from its last checkpoint."
    )


# A mark on an error, so that pieces of work around this one do not report it again.
_KNOWN = "sensli_known_to_all_ranks"


def _known(text: str) -> DistributedError:
    error = DistributedError(text)
    setattr(error, _KNOWN, True)
    return error


def is_known(error: BaseException | None) -> bool:
    """Whether all ranks know of an error, or of the one that it was raised for."""
    while error is not None:
        if getattr(error, _KNOWN, False):
            return True
        error = error.__cause__
    return False


class Changing(Together):
    """A change of a model that all ranks make at once; when it is over, the wrappers around the model follow."""

    def __init__(self, model: nn.Module, what: str) -> None:
        super().__init__(model, what)
        self._model = model

    def __enter__(self) -> Changing:
        try:
            if self.sharded:
                fsdp.check_sharded(wrappers_around(self._model)[-1])
                fsdp.reshard(self._model)
            elif isinstance(self._model, nn.Module):  # what is none, is told below
                check_whole(wrappers_around(self._model)[-1])
            for wrapper in ddps(self._model):
                check_wrapper(wrapper)
        except Exception as error:
            self.failed(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)
        if value is None:
            forget_compiled(self._model)
            if self.sharded:
                fsdp.look_again(self._model)
            for wrapper in ddps(self._model):
                rebuild(wrapper)

    def prepare(self, layer: nn.Module, path: str) -> None:
        """Make a new layer like the modules around its place, before its parameters are handed to anybody."""
        if self.sharded:
            fsdp.shard_like(layer, wrappers_around(self._model)[-1], path)


# ---- DistributedDataParallel follows a changed module: the wrapper is rebuilt in place.
#
# Others hold the wrapper (the user's loop, Lightning's strategy, the Trainer of Hugging Face in a local variable), so
# it must stay the same object: its arguments are read off it, its hooks into autograd removed, and its constructor
# run again on it. The constructor compares the shapes of the parameters over all processes and sends rank 0's weights
# to the others.


# What `nn.Module.__init__` would empty although it is the user's: hooks on the wrapper itself.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
# Arguments that the wrapper keeps under their own name; which of them there are depends on the version of torch.
_KEPT = (
    "device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "gradient_as_bucket_view", "static_graph",
    "skip_all_reduce_unused_params", "batched_grad_copy", "broadcast_buffers",
)  # fmt: skip


def check_wrapper(wrapper: DistributedDataParallel) -> None:
    """Refuse what could not be rebuilt, before anything changes."""
    for name, what in (
        ("mixed_precision", "mixed_precision= keeps copies of the parameters. Use torch.autocast instead"),
        ("_delay_all_reduce_params", "delay_all_reduce_named_params= names parameters that a growth may rename"),
    ):
        if getattr(wrapper, name, None):
            raise UnsupportedModel(f"this DistributedDataParallel cannot follow a growth: {what}.")
    if not wrapper.require_backward_grad_sync:
        raise UnsupportedModel(
            "this DistributedDataParallel is inside no_sync(): gradients are being accumulated, and a growth would drop them. "
            "Grow after optimizer.step()."
        )


def arguments(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """The constructor's arguments, read off the wrapper."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    given = {name: getattr(wrapper, name) for name in _KEPT if name in known and hasattr(wrapper, name)}
    mesh = getattr(wrapper, "device_mesh", None)
    if mesh is not None:
        del given["process_group"]
        given["device_mesh"] = mesh
    if not getattr(wrapper, "bucket_bytes_cap_default", True):
        given["bucket_cap_mb"] = wrapper.bucket_bytes_cap / 2**20
    return given


def rebuild(wrapper: DistributedDataParallel) -> None:
    """Rebuild the wrapper around its changed module. All processes must call it together, between two steps."""
    given, module, training = arguments(wrapper), wrapper.module, wrapper.training
    hooks = {name: getattr(wrapper, name) for name in _HOOKS if hasattr(wrapper, name)}
    comm_hooks = list(getattr(wrapper, "_comm_hooks", ()))
    _let_go(wrapper, module)
    with warnings.catch_warnings():
        # broadcast_buffers: its successor means something else at this moment.
        warnings.simplefilter("ignore", FutureWarning)
        DistributedDataParallel.__init__(wrapper, module, **given)
    for name, value in hooks.items():
        object.__setattr__(wrapper, name, value)
    wrapper.training = training
    for hook, state in comm_hooks:
        wrapper.register_comm_hook(state, hook)


def _let_go(wrapper: DistributedDataParallel, module: nn.Module) -> None:
    # A reducer that stays alive with its hooks continues to reduce, and may abort the process.
    wrapper._remove_autograd_hooks()
    for handle in getattr(wrapper, "_accum_grad_hooks", ()):
        handle.remove()
    for parameter in module.parameters():
        parameter.grad = None  # it may be a view into the buckets of the old reducer
    wrapper.reducer = wrapper.logger = None  # type: ignore[assignment]
