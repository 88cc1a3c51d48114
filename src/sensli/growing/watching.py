"""`Grower.watch`: the merits of a check from the training steps that run anyway, without a pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sensli.errors import BadExample, MeasurementError, SensliError
from sensli.growing.following import Followers
from sensli.growing.looking import Sensli, propose_sites
from sensli.growing.options import Options
from sensli.growing.strategy import Strategy
from sensli.growing.uniform import add_up, parts_of_sites
from sensli.merits.merits import LEAST, Merits
from sensli.merits.probe import MeanProbe
from sensli.modules import checks
from sensli.modules.running import without_autocast, without_inference_mode
from sensli.modules.wrappers import bare, is_sharded
from sensli.moves.sites import Site, Sites
from sensli.text.commands import UNIFORM

NOTHING_WATCHED = (
    "batches is None, and no step was watched since the last call of grower.step. Give grower.step(batches, loss_fn), or train inside "
    "of `with grower.watch():` before it."
)


def check_watchable(strategy: Strategy | type[Strategy], options: Options) -> None:
    """Refuse what needs passes of its own, before anything trains."""
    kind = strategy if isinstance(strategy, type) else type(strategy)
    trial = options.trial
    reason = ""
    if options.strategy == "stack":
        reason = "strategy='stack' measures nothing, so there is nothing to watch"
    elif not issubclass(kind, Sensli) or kind.score is not Sensli.score:
        reason = f"strategy={options.strategy!r} scores sites in passes of its own"
    elif options.select == LEAST:
        reason = "select='least' measures how much the blocks matter in a pass of its own"
    elif options.recycle:
        reason = "recycle=True looks for dead units in batches"
    elif options.confidence is not None:
        reason = f"confidence={options.confidence:g} chooses the number of batches, and here it is the number of steps that are watched"
    elif trial is not None and (trial.batches is None or trial.step is None):
        reason = "a Trial trains on batches: give it batches= and step="
    if reason:
        raise SensliError(
            f"steps cannot be watched with these options: {reason}. Leave it out, or give grower.step(batches, loss_fn)."
        )


class Watching:
    """What a Grower has watched since its last call: the sites, and the sums of all steps."""

    def __init__(self, model: nn.Module, strategy: Strategy, options: Options, followers: Followers) -> None:
        self._model, self._strategy, self._options, self._followers = model, strategy, options, followers
        self._probe: MeanProbe | None = None
        self._sites = Sites(())
        self.asked = False  # whether `Grower.watch` was called since the last call
        self.is_open = False
        self._may_fire: bool | None = None  # on the next call, once it is known

    def may_fire(self, ask: Callable[[], bool]) -> bool:
        """Whether the trigger could fire on the next call; asked once for each."""
        if self._may_fire is None:
            self._may_fire = ask()
        return self._may_fire

    def forget(self) -> None:
        """A call is over: what was watched before it is used up."""
        self._probe, self.asked, self._may_fire = None, False, None

    def prepare(self, example: Any) -> MeanProbe:
        """Find the sites, unless they are known since the last call."""
        if self.is_open:
            raise MeasurementError("a watch of this Grower is open already. Leave its `with` block first.")
        if self._probe is not None and self._probe.is_outdated:
            self._probe = None
            raise MeasurementError(
                "the model has changed since its steps were watched, and not by this Grower. What was watched before is dropped: call "
                "grower.watch() again, or grower.step right before you change the model."
            )
        if self._probe is None:
            if example is None:
                raise BadExample(
                    "the sites to watch are found by running the model, and no example is known before the first step. Give "
                    "Grower(..., example=x[:1])."
                )
            with without_inference_mode(), without_autocast():
                optimizer = self._followers.optimizer
                self._sites = propose_sites(self._strategy, self._model, example, optimizer, self._options)
                self._probe = self._made()
        return self._probe

    def _made(self) -> MeanProbe:
        try:
            return MeanProbe(self._model, parts_of_sites(self._sites), norm=self._options.norm)
        except MeasurementError as error:
            if not is_sharded(bare(self._model)):
                raise
            raise MeasurementError(
                f"the steps of this sharded model cannot be watched: {error} Give grower.step(batches, loss_fn) instead."
            ) from error

    def set_hooks(self, probe: MeanProbe, stack: ExitStack) -> None:
        """On the optimizers, as long as the stack is open: what must be known before weights move, and how many steps there are."""
        for number, optimizer in enumerate(self._followers.optimizers):
            stack.callback(optimizer.register_step_pre_hook(_settling(probe)).remove)
            if number == 0:
                stack.callback(optimizer.register_step_post_hook(lambda *_: probe.count_update()).remove)

    # --- at a check ---

    @property
    def sites(self) -> Sites:
        """Those that were watched."""
        if self._probe is None:
            raise MeasurementError(NOTHING_WATCHED)
        if self._probe.is_outdated:
            raise MeasurementError(
                "the model has changed since its steps were watched, and not by this Grower, so the merits are not those of the model as "
                "it is now. Watch steps after the change, or give grower.step(batches, loss_fn)."
            )
        return self._sites

    def merits_of(self, sites: Sequence[Site]) -> Merits:
        """What the sites are worth, by the steps that were watched."""
        assert self._probe is not None
        merits = self._probe.merits_of(parts_of_sites(sites))
        return add_up(bare(self._model), merits) if self._options.what == UNIFORM else merits


def _settling(probe: MeanProbe) -> Callable[..., Any]:
    """A hook before an optimizer's step; of a closure that is given to the step, which passes forward and backward, a hook after it."""

    def hook(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, kwargs.get("closure")]
        closure = next((each for each in given[1:] if callable(each)), None)
        if closure is None:
            probe.settle()
            return None

        def closed(*inner: Any, **named: Any) -> Any:
            result = closure(*inner, **named)
            probe.settle()
            return result

        changed = {name: closed if value is closure else value for name, value in kwargs.items()}
        return tuple(closed if each is closure else each for each in args), changed

    return hook


class Watch:
    """What ``with grower.watch() as watched:`` gives: hooks are there as long as the context lasts, and only if a check may follow."""

    def __init__(self, watching: Watching, example: Any, scaler: torch.amp.GradScaler | None, *, idle: bool) -> None:
        self._watching, self._example, self._scaler, self._idle = watching, example, scaler, idle
        self._probe: MeanProbe | None = None
        self._hooks = ExitStack()

    def prepare(self) -> None:
        """Find the sites already, where that needs more around it than the step."""
        if not self._idle:
            self._watching.prepare(self._example)

    def __enter__(self) -> Watch:
        if not self._idle:
            probe = self._watching.prepare(self._example)
            probe.watch(self._scaler)
            with ExitStack() as stack:
                stack.push(probe.__enter__())
                self._watching.set_hooks(probe, stack)
                self._hooks = stack.pop_all()
            self._probe, self._watching.is_open = probe, True
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._probe is not None:
            self._probe, self._watching.is_open = None, False
            self._hooks.__exit__(*raised)

    def add_loss(self, loss: float | Tensor) -> None:
        """Note the loss of a batch. Optional: it tells when a problem is solved (`floor`), and stands in for a missing metric.

        Args:
            loss: The mean loss of the batch, a number or a tensor with one.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            loss = checks.number("loss", loss)
        if self._probe is not None:
            self._probe.add_loss(loss)
