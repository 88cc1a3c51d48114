"""`Grower`: Algorithm 1 of the paper. Train, look, decide whether and where, insert, train on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sensli.averaging import Averaged, check_alike, follow
from sensli.backward import LossFunction
from sensli.distributed import mean_metric
from sensli.errors import HistoryError, SensliError, ZeroMerits, one_of
from sensli.finding import check_request, find_sites
from sensli.flops import count_flops
from sensli.fsdp import reshard
from sensli.history import Growth, History
from sensli.logs import Log, check_log, tell
from sensli.measuring import check_level, measure
from sensli.merits import Merit, Merits
from sensli.norms import choose
from sensli.optim import Optimizers, as_optimizers
from sensli.outline import outline
from sensli.own_rate import check_own_rate
from sensli.rates import Schedulers
from sensli.record import Look, reason_of
from sensli.sites import Site, Sites
from sensli.surgery import insert, undo
from sensli.triggers import Moment, Trigger
from sensli.wrappers import bare

Selection = Callable[[Merits], Merit | Site]
SELECTIONS = ("largest", "smallest", "random")


class _Sizes(Mapping[str, int]):
    """How large a model is, counted when asked for: most triggers never do, and they are asked every epoch."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._rules: dict[str, Callable[[], int]] = {
            "parameters": lambda: sum(p.numel() for p in model.parameters()),
            "flops": lambda: int(count_flops(model, example)),
            "depth": lambda: sum(any(p.ndim >= 2 for p in m.parameters(recurse=False)) for m in model.modules()),
        }

    def __getitem__(self, name: str) -> int:
        return self._rules[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)


class Grower:
    """Grows a model between epochs: call `step` once per epoch, and train on whether it grew or not.

    At a call on which ``trigger`` fires, the merits of all sites are measured; a layer is inserted if its merit is at least
    ``tau`` times the mean over the existing weights. ``select`` names which: ``"largest"``, or as controls ``"smallest"``
    and ``"random"`` (whether to insert is then still the largest merit's decision), or a callable on `Merits`; ``count``
    layers at once at most. ``lr_scale`` multiplies the learning rates after each growth; ``own_rate`` gives every new layer a group of its
    own, with that many times its neighbours' rate.
    ``log`` is told every decision, also not to insert: a callable on `Look` (``print`` gives one line each), or a TensorBoard writer.
    ``averaged`` is a `torch.optim.swa_utils.AveragedModel` of the model (or several) that grows with it. ``model`` may be wrapped in
    DistributedDataParallel: then all processes call `step`, each with its own batches, and all insert the same layer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        example: Any,
        trigger: Trigger,
        tau: float = 1.0,
        norm: str = "auto",
        select: str | Selection = "largest",
        count: int = 1,
        layer: str = "auto",
        where: str | Callable[[Site], bool] | None = None,
        confidence: float | None = None,
        tolerance: float = 0.0,
        lr_scale: float = 1.0,
        own_rate: float | None = None,
        scheduler: Schedulers = None,
        averaged: Averaged = None,
        seed: int = 0,
        log: Log = None,
    ) -> None:
        if not isinstance(trigger, Trigger):
            raise TypeError(
                f"trigger={trigger!r}: give one of sensli.triggers, such as triggers.Every(10) & triggers.AtMost(3)."
            )
        if not tau >= 0:
            raise ValueError(f"tau={tau}: the threshold is a quotient of squared norms, so it must be at least 0.")
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"count={count!r}: give how many layers may go in at once, a whole number from 1.")
        if not callable(select) and select not in SELECTIONS:
            raise ValueError(one_of("selection", select, SELECTIONS))
        if confidence is not None and (select != "largest" or count != 1):
            raise ValueError(
                "confidence= stops when the single largest merit is clear; use it with select='largest' and count=1."
            )
        check_level(confidence, tolerance)
        if own_rate is not None:
            check_own_rate(optimizer, own_rate)
        choose(norm, ())
        check_request(layer, where)
        check_log(log)
        bare(model)
        self.model = model
        self.history = History()
        self.last_merits: Merits | None = None  # of the last look, also where nothing was inserted
        self.calls = 0
        self._optimizer, self._scheduler, self._averaged = optimizer, scheduler, averaged
        check_alike(model, averaged)
        self._example, self._layer, self._where = example, layer, where
        self._trigger, self._tau, self._norm, self._select = trigger, tau, norm, select
        self._count, self._lr_scale, self._own_rate = count, lr_scale, own_rate
        self._confidence, self._tolerance = confidence, tolerance
        self._log = log
        self._look: Look | None = None  # of the call that runs
        self._generator = torch.Generator().manual_seed(
            seed
        )  # of its own: growing leaves the global random state alone

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that follow, without wrappers of other libraries."""
        return as_optimizers(self._optimizer)

    def step(
        self, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, metric: float | None = None
    ) -> Growth | None:
        """Count one epoch; look, decide and insert if the trigger fires.

        Returns the growth (with ``count`` > 1 the first choice; `history` has all), or None if nothing was inserted. A call that
        raises does not count, and leaves the model as it was.
        """
        trigger = self._trigger.state_dict()
        self.calls += 1
        self._look = None
        try:
            if not self.history.record:
                self.history.record.draw(0, outline(bare(self.model)))
            growth = self._step(batches, loss_fn, metric)
        except BaseException:
            self.calls -= 1
            self._trigger.load_state_dict(trigger)
            raise
        self._keep(metric)
        return growth

    def _step(self, batches: Iterable[Any], loss_fn: LossFunction | None, metric: float | None) -> Growth | None:
        metric = mean_metric(self.model, metric)
        if not self._trigger.fires(self._moment(metric)):
            return None
        self._trigger.looked()
        sites = self.sites()
        fitting = [site for site in sites if self._trigger.allows(site, self._moment(metric))]
        if not fitting:
            self._saw("the trigger's limits leave no room for a layer at any site")
            return None
        parameters = self._moment(metric).sizes["parameters"]
        try:
            self.last_merits = merits = measure(
                self.model, fitting, batches, loss_fn, norm=self._norm, ratio=True, confidence=self._confidence,
                tolerance=self._tolerance,
            )  # fmt: skip
        except ZeroMerits as nothing:
            warnings.warn(f"call {self.calls}: nothing inserted, because {nothing}", stacklevel=3)
            self._saw("all merits are zero", parameters=parameters)
            return None
        grown: list[Growth] = []
        taken: list[Merit] = []
        try:
            for merit in self._chosen(merits):
                moment = self._moment(metric)
                if len(grown) < self._count and self._trigger.allows(merit.site, moment):
                    grown.append(self._insert(merit, factor=self._lr_scale if not grown else 1.0))
                    taken.append(merit)
        except BaseException:  # all layers of a call go in, or none
            for growth in reversed(grown):
                undo(self.model, growth, optimizer=self._optimizer, scheduler=self._scheduler)
                self.history.pop()
            raise
        if grown:
            self._trigger.grown()
        reason = reason_of(merits, taken, select=self._select_name, tau=self._tau)
        self._saw(reason, merits, taken, grown, parameters=parameters)
        return grown[0] if grown else None

    def sites(self) -> Sites:
        """The places where the model could grow now. Raises where there is none; before training, to know it early."""
        sites = find_sites(self.model, self._example, layer=self._layer, where=self._where)
        if not sites:
            asked = "" if self._where is None else f" for where={self._where!r}"
            raise SensliError(
                f"there is no place to grow{asked} in this {type(self.model).__name__}. {sites.explain()}"
            )
        return sites

    def _saw(
        self,
        reason: str,
        merits: Merits | None = None,
        taken: Sequence[Merit] = (),
        grown: Sequence[Growth] = (),
        *,
        parameters: int | None = None,
    ) -> None:
        """Note a look: what the page and the log show. FLOPs are counted after a growth only."""
        self._look = Look.of(
            merits,
            taken,
            call=self.calls,
            tau=self._tau,
            select=self._select_name,
            reason=reason,
            inserted=tuple(growth.number for growth in grown),
            parameters=parameters,
            flops=self._flops_without(taken) if taken else None,
        )

    def _flops_without(self, taken: Sequence[Merit]) -> int | None:
        """FLOPs of the model before it grew; None where they cannot be counted, because no decision depends on them."""
        try:
            return int(count_flops(bare(self.model), self._example)) - sum(merit.site.flops for merit in taken)
        except Exception:
            return None
        finally:
            reshard(bare(self.model))  # a forward pass without a backward one leaves whole parameters behind

    def _keep(self, metric: float | None) -> None:
        record = self.history.record
        record.count(self.calls, metric)
        if self._look is not None:
            record.looks.append(self._look)
            record.draw(self.calls, outline(bare(self.model)))
            tell(self._log, self._look)

    @property
    def _select_name(self) -> str:
        return self._select if isinstance(self._select, str) else getattr(self._select, "__name__", "a callable")

    def _insert(self, merit: Merit, factor: float) -> Growth:
        check_alike(self.model, self._averaged)
        growth = insert(
            self.model, merit.site, optimizer=self._optimizer, scheduler=self._scheduler, lr_scale=factor,
            own_rate=self._own_rate,
        )  # fmt: skip
        follow(self._averaged, growth)
        growth = replace(growth, details={"epoch": self.calls, "merit": merit.value, "ratio": merit.ratio})
        self.history.append(growth)
        return growth

    def _chosen(self, merits: Merits) -> list[Merit]:
        """The merits that may be inserted, in that order.

        A control differs from the method in *where* alone: whether, and how many at most, the largest merits decide for it too.
        """
        worth = [merit for merit in merits.ranked if merit.ratio is None or merit.ratio >= self._tau]
        if self._select == "largest":
            return worth
        if self._select == "smallest":
            return sorted(merits, key=lambda merit: merit.value)[: len(worth)]  # of equal ones the first, as everywhere
        if self._select == "random":
            order = torch.randperm(len(merits), generator=self._generator).tolist()
            return [merits[index] for index in order][: len(worth)]
        assert callable(self._select)
        choice = self._select(merits)
        for merit in merits:
            if choice is merit or choice is merit.site:
                return [merit] if merit in worth else []
        raise TypeError(
            f"the selection returned {choice!r}; it must return one of the merits it was given, or its site."
        )

    def _moment(self, metric: float | None) -> Moment:
        return Moment(self.calls, metric, len(self.history), _Sizes(bare(self.model), self._example))

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: calls, history, trigger, random choices. The model's tensors are the user's to save."""
        return {
            "calls": self.calls,
            "history": self.history.to_dict(),
            "trigger": self._trigger.state_dict(),
            "generator": self._generator.get_state().tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. The model must have been grown by `replay` of the same history before."""
        missing_entries = {"calls", "history", "trigger", "generator"} - set(state)
        if missing_entries:
            raise HistoryError(f"this is no state of a Grower: it lacks {sorted(missing_entries)}. Use an intact copy.")
        history = History.from_dict(state["history"])
        expected: list[str] = []
        for growth in history:  # what the inserted parameters are called today: later growths may have renamed them
            expected = [growth.renames.get(name, name) for name in expected] + list(growth.parameters)
        names = {name for name, _ in bare(self.model).named_parameters()}
        for name in expected:
            if name not in names:
                raise HistoryError(
                    f"the model lacks {name}: it has not grown as this state says. "
                    "Call replay(model, History.from_dict(state['history'])) before loading the state."
                )
        before = self._trigger.state_dict()
        try:
            self._trigger.load_state_dict(state["trigger"])
        except (KeyError, TypeError) as error:
            self._trigger.load_state_dict(before)
            raise HistoryError(
                f"the state belongs to another trigger than {self._trigger!r}. Make the Grower with the trigger it was saved with."
            ) from error
        self.calls = state["calls"]
        self.history = history
        self._generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
