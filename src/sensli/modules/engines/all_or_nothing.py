"""All or nothing: a change of a model and of all that follows it is made entirely, or everything is as it was.

`grow`, `undo` and whatever is made of them open an `AllOrNothing` and let it keep what they are about to change. If anything is raised
inside, an error or Ctrl-C, everything is put back. They may be nested: a step of a Grower that fails after its first growth takes that
back too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import nn

from sensli.modules.before import Before
from sensli.modules.engines import fsdp
from sensli.modules.engines.distributed import is_known, process_group
from sensli.modules.interrupts import Waiting
from sensli.modules.wrappers import around, forget_compiled, is_a


class _Open(threading.local):
    """The changes under way in this thread, the outermost first."""

    def __init__(self) -> None:
        self.changes: list[AllOrNothing] = []


_OPEN = _Open()


def about_to_change(thing: Any, name: str | None = None) -> None:
    """Told before something is changed that is no module, optimizer or scheduler: changes that are under way keep it, or one attribute."""
    for change in _OPEN.changes:
        for kept in change.kept:
            kept.also(thing, name)


class AllOrNothing:
    """What is done inside is done entirely, or what it keeps is as it was."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self._ways_back: list[Callable[[BaseException], object]] = []
        self._waiting = Waiting()

    def __enter__(self) -> AllOrNothing:
        _OPEN.changes.append(self)
        return self

    def keep(self, model: nn.Module, *others: Any) -> Kept:
        """From now on: the model, its wrappers, and what follows it. What is kept can be put back at other times too."""
        kept = Kept(model, *others)
        self.kept.append(kept)
        self._ways_back.append(kept.put_back)
        return kept

    def on_failure(self, way_back: Callable[[], object]) -> None:
        """What to do if something is raised, before what was kept earlier is put back."""
        self._ways_back.append(lambda error: way_back())

    def wait(self) -> None:
        """Ctrl-C waits from now on: what follows takes no time, and had better be done."""
        self._waiting.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as last:  # what is to be done, the last one first; it goes on after one that has failed
            last.callback(self._waiting.end)
            self._waiting.begin()
            last.callback(_OPEN.changes.remove, self)
            if error is not None:
                for way_back in self._ways_back:
                    last.callback(way_back, error)


class Kept:
    """A model and what follows it at one moment."""

    def __init__(self, model: nn.Module, *others: Any) -> None:
        self._model = model
        self._before = Before(around(model)[-1], *others)
        self._reducers = [(each, each.reducer) for each in _ddps(model)]

    def also(self, thing: Any, name: str | None = None) -> None:
        """Keep something else as it is now, unless it is kept already."""
        if name is None:
            self._before.add(thing)
        else:
            self._before.add_attribute(thing, name)

    def put_back(self, error: BaseException | None = None) -> None:
        """Make everything as it was, and let the wrappers follow. With several processes all come here, unless one of them has an error
        that the others do not know of."""
        changed = self._before.put_back()
        if changed:
            forget_compiled(self._model)
            own = around(self._model)[-1]
            if fsdp.is_sharded(own):
                fsdp.follow_shapes(own)
                fsdp.look_again(own)
        alone = process_group(self._model) is None
        for wrapper, reducer in self._reducers:
            # With several processes only when a growth was over on all of them, and all take it back: they rebuild together.
            rebuilt = wrapper.reducer is not reducer
            if (rebuilt or changed) if alone else rebuilt and (error is None or is_known(error)):
                from sensli.modules.engines import ddp

                ddp.rebuild(wrapper)


def _ddps(model: nn.Module) -> list[Any]:
    return [each for each in around(model) if is_a(each, "DistributedDataParallel")]
