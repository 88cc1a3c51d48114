"""Whether widths hold, found by widening a copy of the model: what it returns must stay, and must not depend on the new rows at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sensli.modules import random_state
from sensli.modules.dropout import NoDropout
from sensli.modules.failing import brief_error, let_memory_through, note
from sensli.modules.flops import count_flops
from sensli.modules.nearness import moved
from sensli.modules.running import device_of, run, tensors, to_device, untouched
from sensli.modules.samples import with_another
from sensli.modules.wrappers import eager
from sensli.moves.search import Search
from sensli.moves.sites import Site
from sensli.moves.width.starts.random import drawn_rows
from sensli.moves.width.starts.registry import STARTS
from sensli.moves.width.widening import Widening
from sensli.moves.width.width import TOLERANCE, Width, family

_ATTEMPTS = 24  # more would cost more than they find


def confirm(trial: Trial, sites: Sequence[Site]) -> tuple[list[Site], list[tuple[Site, str]]]:
    """Those that hold, and the others with the reason. All are tried at once, then layer by layer of equal blocks, then in halves."""
    good: list[Site] = []
    wrong: list[tuple[Site, str]] = []
    waiting, attempts = [list(sites)], 0
    while waiting:
        group = waiting.pop()
        if not group:
            continue
        attempts += 1
        problem = trial.of(group)
        families: dict[str, list[Site]] = {}
        for site in group:
            families.setdefault(family(site.path), []).append(site)
        if not problem:
            good += group
        elif len(group) == 1 or attempts >= _ATTEMPTS:
            wrong += [(site, problem) for site in group]
        elif len(families) > 1:
            waiting += families.values()
        elif trial.of(group[:1]) == problem:  # what one of them does wrong its equals do too
            wrong += [(site, problem) for site in group]
        else:
            waiting += [group[: len(group) // 2], group[len(group) // 2 :]]
    return _able(trial, good, wrong)


def _able(
    trial: Trial, sites: Sequence[Site], wrong: list[tuple[Site, str]]
) -> tuple[list[Site], list[tuple[Site, str]]]:
    """Those whose units can start as they should, and the others with the reason."""
    good = []
    for site in sites:
        assert isinstance(site.move, Width)
        reason = STARTS[site.move.start].refusal(site, trial)
        if reason:
            wrong.append((site, reason))
        else:
            good.append(site)
    return good, wrong


class Trial:
    """The copy that the example ran through."""

    def __init__(self, search: Search) -> None:
        self.model = search.flow.model
        self.example = to_device(search.example, device_of(self.model))
        self._flow, self._training = search.flow, self.example
        self._base: dict[bool, list[Tensor] | None] = {}

    def of(self, sites: Sequence[Site], modes: Sequence[bool] = (False, True)) -> str:
        """What is wrong with the sites together, in evaluation and in training; empty if nothing is."""
        for training in modes:
            base = self._baseline(training)
            if base is None and not training:
                return "the model does not run with other random numbers"
            if base is None:
                continue  # a batch too small for its norms: it cannot train on the example
            try:
                first, second = (self._outputs(sites, training, seed) for seed in (0, 1))
            except Exception as error:
                note(error)
                return f"the model fails with more of them ({brief_error(error)})"
            if [t.shape for t in first] != [t.shape for t in base]:
                return "what the model returns changes its shape with more of them"
            if any(moved(old, new) > _tolerance(old) for old, new in zip(base, first, strict=True)):
                return "what the model returns changes with more of them"
            if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
                return "what the model returns depends on units whose columns are zero"
        return ""

    def _baseline(self, training: bool) -> list[Tensor] | None:
        if training not in self._base:
            try:
                self._base[training] = self._run(training)
            except Exception as error:
                let_memory_through(error)
                more = with_another(self.example) if training and self._training is self.example else self.example
                if more is not self.example:
                    self._training = more
                    return self._baseline(True)
                note(error)
                if training:
                    self._flow.note_untrained(error)
                self._base[training] = None
        return self._base[training]

    def flops(self, site: Site) -> int:
        """What a site that holds adds to a forward pass, per sample."""
        before = count_flops(self.model, self.example)
        with self.widened([site]):
            return count_flops(self.model, self.example) - before

    def _outputs(self, sites: Sequence[Site], training: bool, seed: int) -> list[Tensor]:
        with self.widened(sites, seed):
            return self._run(training)

    @contextmanager
    def widened(self, sites: Sequence[Site], seed: int = 0) -> Iterator[None]:
        """The copy is wider as long as the context lasts."""
        generator = torch.Generator().manual_seed(seed)
        with ExitStack() as stack:
            for site in in_order(sites):
                assert isinstance(site.move, Width)
                move = site.move.by_path().on(self.model)
                # However units start, they must do nothing as long as nothing reads them.
                move = replace(move, start="random", _entries=drawn_rows(move, generator))
                self._widen(replace(site, move=move), stack)
            yield

    def changes(self, site: Site) -> bool:
        """Whether the output moves with new units as they start without a measurement."""
        base = self._baseline(False)
        with ExitStack() as stack:
            self._widen(replace(site, move=site.move.by_path()), stack)
            now = self._run(False)
        return base is None or any(moved(old, new) > TOLERANCE for old, new in zip(base, now, strict=True))

    def _widen(self, site: Site, stack: ExitStack) -> None:
        """Widen the copy until the stack is closed."""
        point = replace(site.point, anchor=site.point.by_path().anchor, neighbours=())
        edit = Widening(self.model, replace(site, point=point), strict=False)
        edit.build()
        edit.apply()
        stack.callback(edit.revert)

    def _run(self, training: bool) -> list[Tensor]:
        # Never chained: somebody's train() returns None.
        self.model.train(training)
        with untouched(self.model), torch.no_grad(), eager(), NoDropout():
            random_state.seed_torch(0)
            output: Any = run(self.model, self._training if training else self.example)
        self.model.eval()
        return [t.detach().clone() for t in tensors(output)]


def _tolerance(output: Tensor) -> float:
    """By how much an output may move: what rounding does to it, and not more."""
    return 1e-9 if output.dtype == torch.float64 else TOLERANCE


def in_order(sites: Sequence[Site]) -> list[Site]:
    """An order in which a site keeps its positions although others were widened before: from the end of shared axes."""

    def last(site: Site) -> int:
        assert isinstance(site.move, Width)
        return max(axis.start for axis in site.move.axes)

    return sorted(sites, key=last, reverse=True)
