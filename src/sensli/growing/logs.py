"""Where decisions go while a training runs: any callable, a writer of TensorBoard scalars, or several of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from sensli.errors import WrongType
from sensli.modules import checks
from sensli.surgery.history.record import Look


@runtime_checkable
class ScalarWriter(Protocol):
    """What we use of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...
    def add_text(self, tag: str, text_string: str, global_step: int) -> Any: ...


OneLog = Callable[[Look], Any] | ScalarWriter
Log = OneLog | Sequence[OneLog] | None


def check_log(log: Log) -> None:
    """Refuse what is neither, before any training."""
    for one in _each(log):
        writer = isinstance(one, ScalarWriter)
        if isinstance(one, type) if writer else not callable(one):  # the class of a writer can be called too
            what = "a function that takes one Look (for example print), a writer with add_scalar and add_text, or a list of these"
            checks.refuse("log", what, one, WrongType)


def tell(log: Log, look: Look) -> None:
    """Hand a decision on. A log that fails warns: the model has grown already, and training must go on."""
    for one in _each(log):
        try:
            if isinstance(one, ScalarWriter):
                _write(one, look)
            else:
                one(look)
        except Exception as error:
            warnings.warn(f"the log of the Grower failed: {type(error).__name__}: {error}", stacklevel=5)


def _each(log: Log) -> Sequence[Any]:
    if log is None:
        return ()
    return log if isinstance(log, (list, tuple)) else (log,)


def _write(writer: ScalarWriter, look: Look) -> None:
    for merit in look.merits if look.measured else ():
        writer.add_scalar(f"sensli/merit/{merit.site}", merit.value, look.call)
    if look.merits and look.merits[0].ratio is not None:
        writer.add_scalar("sensli/best ratio", look.merits[0].ratio, look.call)
    if look.parameters_after is not None:
        writer.add_scalar("sensli/parameters", look.parameters_after, look.call)
    if look.tried is not None:
        writer.add_scalar("sensli/trial FLOPs", look.tried.flops, look.call)
        writer.add_scalar("sensli/lost FLOPs", look.tried.lost, look.call)
    writer.add_text("sensli/decision", str(look), look.call)
