"""One call of `Grower.step`: ask the trigger, and if it fires look, decide, try, grow and note what came of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sensli.errors import MovedSite, ZeroMerits
from sensli.growing.following import Followers
from sensli.growing.looked import Looked, draw, keep
from sensli.growing.options import Options
from sensli.growing.proposing import proposed
from sensli.growing.recycling import Recycling, reusable
from sensli.growing.room import Room
from sensli.growing.sizes import Sizes
from sensli.growing.strategies.strategy import Strategy
from sensli.growing.trials.arms import Outcome, Trying
from sensli.growing.trigger import Moment
from sensli.merits.backward import LossFunction
from sensli.merits.merits import Merit, Merits
from sensli.modules.engines.all_or_nothing import AllOrNothing
from sensli.modules.engines.distributed import Together, numbered
from sensli.modules.wrappers import bare
from sensli.moves.sites import Site
from sensli.surgery.history.growth import Growth
from sensli.surgery.history.history import History
from sensli.text.names import UNMEASURED


@dataclass(frozen=True)
class Call:
    """What one call works with. It changes the model, what follows it and the history; the caller takes all back if it raises.

    Args:
        number: Which call of the grower it is, from 1.
        metric: What the triggers watch, the same on all ranks.
        model: The network, or its wrapper.
        example: What the model is called with.
        sizes: How large the model is; counted again after a growth.
        options: Those of the grower.
        strategy: What is asked at a look.
        followers: What follows a growth.
        recycling: What gives dead units a new start.
        history: The growths so far, and the record.
        together: All ranks.
        change: What takes everything back if the call raises.
    """

    number: int
    metric: float | None
    model: nn.Module
    example: Any
    sizes: Sizes
    options: Options
    strategy: Strategy
    followers: Followers
    recycling: Recycling
    history: History
    together: Together
    change: AllOrNothing

    def run(self, batches: Iterable[Any], loss_fn: LossFunction | None) -> Looked | None:
        """What the look came to, or None if the trigger did not fire; recorded either way."""
        if not self.history.record:
            draw(self.history.record, 0, bare(self.model))
        fires = bool(self.options.trigger.fires(self._moment))
        self.together.agree_on({"whether the trigger fires": fires}, last=not fires)
        looked = self._looked(batches, loss_fn) if fires else None
        look = None if looked is None else looked.noted(self.number, self.options, self.sizes)
        keep(self.history.record, self.options, bare(self.model), self.number, self.metric, look)
        if fires:
            self.together.agree()
        return looked

    def _looked(self, batches: Iterable[Any], loss_fn: LossFunction | None) -> Looked:
        """All that a look does."""
        self.followers.keep(self.change, self.model, self.history)
        self.options.trigger.looked()
        if self.options.recycle or self.options.trial is not None:
            batches = reusable(batches)
        recycled = self._recycle(batches)
        looked = self._look(batches, loss_fn)
        if looked.merits is not None:
            chosen = self._decide(looked.merits)
            self._grow_by_trial(looked, chosen, batches, loss_fn)
            recycled += self._recycle(batches, inside=[growth.number for _, growth in looked.grown])
            refused = self.options.trigger.refusal(self._moment_of(chosen[0])) if chosen and not looked.grown else ""
            why = looked.tried or refused or self.strategy.reason(looked.merits, looked.taken)
            looked.reason = f"{why}{looked.room.left_out}"
            looked.rule = "" if looked.tried else self.strategy.rule(looked.merits, looked.taken)
        looked.recycled = recycled
        return looked

    def _look(self, batches: Iterable[Any], loss_fn: LossFunction | None) -> Looked:
        """What the sites that fit are worth; if there is nothing to choose from, the reason."""
        sites = proposed(self.strategy, self.model, self.example, self.followers.optimizer, self.options)
        room = Room.of(sites, self.options, self._moment)
        self.together.agree_on(numbered("site", room.fitting), last=False)
        if not room.fitting:
            return Looked(room, reason=room.why_none)
        try:
            merits = self.strategy.score(self.model, room.fitting, batches, loss_fn)
        except ZeroMerits as nothing:
            text = f"{self.options.unit} {self.number}: nothing was inserted, because {nothing}"
            warnings.warn(text, stacklevel=5)  # at the call of `step`
            return Looked(room, reason="all merits are zero")
        return Looked(room, merits, kept=self.strategy.keeps_function())

    def _decide(self, merits: Merits) -> list[Merit]:
        """The merits whose sites the strategy would take, in that order; the same on all ranks."""
        sites = self.strategy.choose(merits, self._moment)
        self.together.agree_on(numbered("choice", sites), last=False)
        known = {id(merit.site): merit for merit in merits}
        return [known[id(site)] for site in sites]

    def _grow_by_trial(
        self, looked: Looked, chosen: Sequence[Merit], batches: Iterable[Any], loss_fn: LossFunction | None
    ) -> None:
        """Grow what was chosen; where growths are tried first, what won, with the values it ended with."""
        measured = looked.merits is not None and looked.merits.norm != UNMEASURED
        outcome = self._try(chosen, batches, loss_fn)
        if outcome is None:
            looked.grown = self._grow(chosen, measured)
            return
        looked.grown = self._grow([] if outcome.winner is None else [outcome.winner], measured)
        outcome.take_over()
        self.options.trigger.judged(outcome.tried.grew)
        looked.tried = outcome.tried

    def _try(self, chosen: Sequence[Merit], batches: Iterable[Any], loss_fn: LossFunction | None) -> Outcome | None:
        """What comes of the best of the chosen growths that the trigger allows, if they are to be tried and there are any."""
        options, trial = self.options, self.options.trial
        if trial is None:
            return None
        candidates = trial.candidates_of(
            [merit for merit in chosen if options.trigger.allows(merit.site, self._moment_of(merit))]
        )
        if not candidates:
            return None
        trying = Trying(trial, self.model, self.followers, self.history, options, self.sizes["flops"], self.together)
        return trying.run(candidates, batches, loss_fn, self.change)

    def _grow(self, chosen: Sequence[Merit], measured: bool) -> list[tuple[Merit, Growth]]:
        """Grow at the first ones that the trigger still allows, at most ``count``; at all of them if they are one decision."""
        options, grown = self.options, list[tuple[Merit, Growth]]()
        most = len(chosen) if self.strategy.all_at_once else options.count
        for merit in chosen:
            if len(grown) == most:
                break
            site = self._still_fitting(merit.site) if grown else merit.site
            if site is None:
                continue
            merit_now = replace(merit, site=site)
            if not options.trigger.allows(site, self._moment_of(merit_now)):
                continue
            growth = self.followers.insert(
                self.model, merit_now, self.history, options, when=self._when, first=not grown, measured=measured
            )
            grown.append((merit, growth))
            self.sizes.forget()
        if grown:
            options.trigger.grown()
        # Before a sharded model runs for its FLOPs, for which all ranks are needed.
        self.together.agree_on({"the number of growths": len(self.history)}, last=False)
        return grown

    def _recycle(self, batches: Iterable[Any], inside: Sequence[int] | None = None) -> int:
        """Recycle dead units, if that is wanted: all of them, or those in the layers of these growths. How many there were."""
        if not self.options.recycle or (inside is not None and not inside):
            return 0
        return self.recycling.recycle(
            self.model, self.example, batches, self.together, self.history, when=self._when, inside=inside
        )

    def _still_fitting(self, site: Site) -> Site | None:
        """A site after another growth of the same look, with its costs of now; None if that growth changed what fits there."""
        try:
            return site.move.plan(bare(self.model), site).site
        except MovedSite:
            return None

    def _moment_of(self, merit: Merit) -> Moment:
        """The moment, with what was measured of the site in question."""
        return replace(self._moment, merit=merit)

    @property
    def _when(self) -> dict[str, int]:
        return {self.options.unit: self.number}

    @property
    def _moment(self) -> Moment:
        """What triggers and strategies are told, as it is now."""
        return Moment(self.number, self.metric, self.history.additions, self.sizes, self.options.grow)
