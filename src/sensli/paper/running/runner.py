"""Computing what is missing; each result is on disk before it is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from sensli.growing.terminal import Reach, progress
from sensli.paper.engines.engine import engine
from sensli.paper.plans.config import Plan
from sensli.paper.plans.machine import Machine
from sensli.paper.running.pieces import Piece, job_of, keep, pieces, train
from sensli.paper.running.store import Store

Compute = Callable[[Store, Reach], None]
# Where the work is done: checks that it can be done there, and gives the function that does it.
Place = Callable[[Sequence[Piece], Machine], AbstractContextManager[Compute]]


@contextmanager
def here(work: Sequence[Piece], machine: Machine) -> Iterator[Compute]:
    """In this process, one piece after another."""
    for piece in work:
        engine(piece.settings).ready(piece.settings, machine)

    def compute(store: Store, reach: Reach) -> None:
        before = 0.0
        for piece in work:
            _compute(piece, store, machine, reach, before)
            before += piece.cost

    yield compute


def run(
    plans: Sequence[Plan],
    store: Store,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
    place: Place = here,
) -> int:
    """Compute all that is missing and return how many pieces that were. May be interrupted at any moment."""
    store.check_writable()
    damaged = [bad for plan in plans for arm in plan.arms for bad in store.parts(plan, arm)[1]]
    work = pieces(plans, store)
    if not work:
        return 0
    with place(work, machine) as compute, progress("computing", sum(piece.cost for piece in work)) as reach:
        for path, reason in damaged:
            print(f"{path}: damaged ({reason}); computing these runs again")
            store.discard(path)
        compute(store, reach)
    return len(work)


def _compute(piece: Piece, store: Store, machine: Machine, reach: Reach, before: float) -> None:
    reach(before, str(piece))
    job = replace(
        job_of(piece, store, machine),
        save=lambda state: store.save_state(piece.plan, piece.arm, piece.runs, state),
        tell=lambda share: reach(before + share * piece.cost, str(piece)),
    )
    keep(piece, train(job), store)
