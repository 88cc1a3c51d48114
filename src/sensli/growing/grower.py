"""`Grower`: Algorithm 1 of the paper. Train, look, decide whether and where, insert, train on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sensli.errors import HistoryError, SensliError, ZeroMerits
from sensli.growing.logs import Log, check_log, tell
from sensli.growing.searching import Search
from sensli.growing.sizes import Sizes
from sensli.growing.triggers import Moment, Trigger
from sensli.merits.backward import LossFunction
from sensli.merits.measuring import check_level, measure
from sensli.merits.merits import Merit, Merits
from sensli.merits.norms import choose
from sensli.modules import checks
from sensli.modules.engines.distributed import Together, numbered
from sensli.modules.engines.fsdp import is_sharded, reshard
from sensli.modules.flops import count_flops
from sensli.modules.marks import grown
from sensli.modules.wrappers import bare
from sensli.moves.finding import check_request
from sensli.moves.sites import Site, Sites
from sensli.surgery.averaging import Averaged, check_alike, follow, unfollow
from sensli.surgery.history.history import Growth, History
from sensli.surgery.history.outline import outline
from sensli.surgery.history.record import Look, factor_text, reason_of
from sensli.surgery.insertion import insert, undo
from sensli.surgery.state.optim import Optimizers, as_optimizers, check_needed, check_optimizers
from sensli.surgery.state.own_rate import check_own_rate
from sensli.surgery.state.rates import Schedulers, plan_rate_scaling

Selection = Callable[[Merits], Merit | Site]
SELECTIONS = ("largest", "smallest", "random")
SOLVED = 1e-3  # the share of the largest loss below which the floor holds
NO_OPTIMIZER = (
    "this Grower has no optimizer, so nothing will train the layers that it inserts. Give Grower(model, optimizer, ...), or add the "
    "parameters that growth.parameters names to your optimizer yourself after each growth."
)


class Grower:
    """Grows a model between epochs: call `step` once per epoch, and continue training whether it grew or not.

    On a call on which the trigger fires, the merits of all sites are measured, and a layer is inserted if its merit is at least
    ``tau`` times the mean over the existing weights. A model may be wrapped in DistributedDataParallel: then all processes call
    `step`, each with its own batches, and all insert the same layer.

    Args:
        model: The network to grow, or its wrapper.
        optimizer: The optimizer or optimizers that train the model. Without one nothing trains the new layers.
        example: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        trigger: When to look, one of `sensli.growing.triggers`, for example ``Every(10) & AtMost(3)``.
        tau: The threshold: insert only if the merit is at least this many times the mean over the existing weights
            (default: 1.0).
        norm: The norm of the gradient, as in `measure` (default: "auto").
        select: Which site to take: ``"largest"`` merit; as controls ``"smallest"`` or ``"random"``, for which the largest merit
            still decides whether to insert at all; or a function of `Merits` that returns one of them (default: "largest").
        count: The largest number of layers to insert at once (default: 1).
        layer: The form of the new layers, as in `find_sites` (default: "auto").
        where: Which sites to consider, as in `find_sites`. None considers all of them.
        confidence: Stop measuring as soon as the best site is clear at this level, as in `measure`. None uses all batches.
        tolerance: With ``confidence``: the share of the best merit that may be missed, as in `measure` (default: 0.0).
        lr_scale: Multiplies all learning rates after each growth (default: 1.0).
        own_rate: A factor: each new layer gets separate parameter groups with this many times its neighbours' learning rate.
        group: The parameter group that new parameters join if their neighbours are in none, as in `insert`. Without it such
            places (a frozen part that the optimizer does not hold) are skipped.
        max_factor: A layer that would bring the model to more than this many times its parameters is left out. None allows
            every layer (default: 2.0).
        floor: Stops growth on a solved problem: once the loss has fallen to a thousandth of the largest one measured so far, a
            change of the new weights by 1 must lower it, to first order, by this share of the largest. 0 turns it off
            (default: 1e-7).
        scheduler: The learning-rate scheduler or schedulers of the optimizer.
        averaged: A `torch.optim.swa_utils.AveragedModel` of the model, or several, that grow with it.
        seed: The random seed of ``select="random"`` (default: 0).
        log: Receives every decision, including those not to insert: a function of a `Look` (``print`` gives one line each), or a
            TensorBoard writer.

    Raises:
        ValueError: If an argument is wrong; the message names it. A wrong type raises `WrongType`, which is a ValueError too.
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
        group: int | dict[str, Any] | None = None,
        max_factor: float | None = 2.0,
        floor: float = 1e-7,
        scheduler: Schedulers = None,
        averaged: Averaged = None,
        seed: int = 0,
        log: Log = None,
    ) -> None:
        bare(model)
        checks.example("example", example)
        what = "one of sensli.growing.triggers (for example triggers.Every(10) & triggers.AtMost(3))"
        checks.instance("trigger", trigger, Trigger, what)
        tau = checks.at_least("tau", tau, 0, 1.0)
        count = checks.whole("count", count, 1)
        if not callable(select):
            checks.one_of("select", select, SELECTIONS, other="a function of Merits that returns one of them")
        if confidence is not None and (select != "largest" or count != 1):
            raise ValueError(
                "confidence= stops when the single largest merit is clear; use it with select='largest' and count=1."
            )
        if (
            max_factor is not None
            and not checks.number("max_factor", max_factor, "a number above 1 (for example 2), or None") > 1
        ):
            raise ValueError(f"max_factor must be a number above 1 (for example 2), or None, got {max_factor!r}.")
        floor = checks.share("floor", floor, 1e-7, zero=True)
        confidence, tolerance = check_level(confidence, tolerance)
        lr_scale = plan_rate_scaling(optimizer, scheduler, lr_scale).factor
        check_needed(optimizer, lr_scale=lr_scale != 1, group=group is not None)
        own_rate = None if own_rate is None else check_own_rate(optimizer, own_rate)
        choose(norm, ())
        check_request(layer, where)
        seed = checks.whole("seed", seed, 0, least=0, below=2**64)
        check_log(log)
        check_optimizers(bare(model), optimizer, group)
        self.model = model
        self.history = History()
        self.last_merits: Merits | None = None  # of the last look, also where nothing was inserted
        self.calls = 0
        self._optimizer, self._scheduler, self._averaged = optimizer, scheduler, averaged
        check_alike(model, averaged)
        self._search = Search(model, example, layer=layer, where=where)
        self._example, self._layer, self._where, self._group = example, layer, where, group
        self._trigger, self._tau, self._norm, self._select = trigger, tau, norm, select
        self._count, self._lr_scale, self._own_rate = count, lr_scale, own_rate
        self._confidence, self._tolerance = confidence, tolerance
        self._max_factor, self._floor = max_factor, floor
        self._largest_loss = 0.0  # of all looks: the scale that the floor is compared with
        self._log = log
        self._look: Look | None = None  # of the call that runs
        self._said_too_large = False
        self._generator = torch.Generator().manual_seed(
            seed
        )  # of its own: growing leaves the global random state alone
        if not self.optimizers:
            warnings.warn(NO_OPTIMIZER, stacklevel=2)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that follow, without wrappers of other libraries."""
        return as_optimizers(self._optimizer)

    def step(
        self, batches: Iterable[Any], loss_fn: LossFunction | None = None, *, metric: float | None = None
    ) -> Growth | None:
        """Count one epoch; if the trigger fires, measure, decide and insert.

        A call that raises does not count, and leaves the model and all that follows it as they were; with several processes, on
        all of them.

        Args:
            batches: The data to measure on: yields ``(input, target)`` pairs or dicts of keyword arguments.
            loss_fn: The mean loss of a batch, as in `measure`. None uses ``output.loss``.
            metric: The number that `triggers.Plateau` watches, for example the validation loss.

        Returns:
            The growth (with ``count`` > 1 the first one; `history` has all), or None if nothing was inserted.
        """
        put_back: Callable[[], None] | None = None
        try:
            with Together(self.model, "step the grower") as together:
                checks.batches("batches", batches)
                checks.loss("loss_fn", loss_fn)
                put_back = self._remember()
                return self._step(together, batches, loss_fn, metric)
        except BaseException:
            if put_back is not None:
                put_back()
            raise

    def _step(
        self, together: Together, batches: Iterable[Any], loss_fn: LossFunction | None, metric: Any
    ) -> Growth | None:
        metric = self._agreed_metric(together, metric)
        self.calls += 1
        self._look = None
        if not self.history.record:
            self.history.record.draw(0, outline(bare(self.model)))
        fires = bool(self._trigger.fires(self._moment(metric)))
        together.agree_on({"whether the trigger fires": fires}, last=not fires)
        growth = self._grow(together, batches, loss_fn, metric) if fires else None
        self._keep(metric)
        if fires:
            together.agree()
        return growth

    def _grow(
        self, together: Together, batches: Iterable[Any], loss_fn: LossFunction | None, metric: float | None
    ) -> Growth | None:
        self._trigger.looked()
        sites, moment = self._sites(together), self._moment(metric)
        parameters = moment.sizes["parameters"]
        allowed = [site for site in sites if self._trigger.allows(site, moment)]
        fitting = [site for site in allowed if self._is_small(site, parameters)]
        together.agree_on(numbered("site", fitting), last=False)
        if not allowed:
            self._saw("the trigger's limits leave no room for a layer at any site")
            return None
        if not fitting:
            self._saw(self._too_large(allowed, parameters), parameters=parameters)
            return None
        try:
            self.last_merits = merits = measure(
                self.model, fitting, batches, loss_fn, norm=self._norm, ratio=True, confidence=self._confidence,
                tolerance=self._tolerance,
            )  # fmt: skip
        except ZeroMerits as nothing:
            warnings.warn(f"call {self.calls}: nothing was inserted, because {nothing}", stacklevel=4)
            self._saw("all merits are zero", parameters=parameters)
            return None
        least = self._least_gain(abs(merits.loss or 0.0))
        chosen = self._chosen(merits, least)
        together.agree_on(numbered("choice", (merit.site for merit in chosen)), last=False)
        grown: list[Growth] = []
        taken: list[Merit] = []
        for merit in chosen:
            if len(grown) < self._count and self._trigger.allows(merit.site, self._moment(metric)):
                grown.append(self._insert(merit, factor=self._lr_scale if not grown else 1.0))
                taken.append(merit)
        if grown:
            self._trigger.grown()
        # Before a sharded model runs for its FLOPs, for which all ranks are needed.
        together.agree_on({"the number of growths": len(self.history)}, last=False)
        reason = reason_of(merits, taken, select=self._select_name, tau=self._tau, floor=least)
        larger = len(allowed) - len(fitting)
        if larger:
            reason += f"; left out as larger than max_factor = {self._max_factor:g} allows: {larger}"
        self._saw(reason, merits, taken, grown, parameters=parameters)
        return grown[0] if grown else None

    def _agreed_metric(self, together: Together, metric: Any) -> float | None:
        """The mean of the ranks' metrics: a trigger must see the same everywhere. One that no rank has stays None."""
        own = None if metric is None else checks.number("metric", metric)
        settings = {"metric=": "given" if own is not None else "not given", **self._settings}
        told = together.agree_on(settings, own, last=False)
        return None if own is None else sum(told) / len(told)

    @property
    def _settings(self) -> dict[str, Any]:
        """What all ranks must have in common. What functions and triggers say is compared when they say it."""
        where = "a function" if callable(self._where) else self._where
        return {
            "the number of calls": self.calls, "the number of growths": len(self.history), "tau": self._tau,
            "norm": self._norm, "select": self._select_name, "count": self._count, "layer": self._layer, "where": where,
            "confidence": self._confidence, "tolerance": self._tolerance, "lr_scale": self._lr_scale, "own_rate": self._own_rate,
            "max_factor": self._max_factor, "floor": self._floor,
        }  # fmt: skip

    def _remember(self) -> Callable[[], None]:
        """How to put back all that a step changes; with several processes all of them have to do it together."""
        calls, merits, loss, look = self.calls, self.last_merits, self._largest_loss, self._look
        trigger, generator = self._trigger.state_dict(), self._generator.get_state()
        growths, record = len(self.history), self.history.record.copied()

        def put_back() -> None:
            for growth in reversed(self.history[growths:]):
                unfollow(self._averaged, growth)
                undo(self.model, growth, optimizer=self._optimizer, scheduler=self._scheduler)
                self.history.pop()
            self.history.record.become(record)
            self.calls, self.last_merits, self._largest_loss, self._look = calls, merits, loss, look
            self._generator.set_state(generator)
            if self._trigger.state_dict() != trigger:
                self._trigger.load_state_dict(trigger)

        return put_back

    def sites(self) -> Sites:
        """The sites at which the model could grow now. Call it before training to learn early that there are none.

        Returns:
            The sites in the order of the data flow.

        Raises:
            SensliError: If there are none.
        """
        # One rank may ask alone, unless the parameters have to be put together for it.
        with Together(self.model if is_sharded(bare(self.model)) else None, "find sites") as together:
            sites = self._sites(together)
            together.agree()
        return sites

    def _sites(self, together: Together) -> Sites:
        sites = self._search.sites(together, self._optimizer, self._group)
        if not sites:
            asked = "" if self._where is None else f" for where={self._where!r}"
            raise SensliError(f"there is nowhere to grow{asked} in this {type(self.model).__name__}. {sites.explain()}")
        return sites

    def _is_small(self, site: Site, parameters: int) -> bool:
        return self._max_factor is None or parameters + site.parameters <= self._max_factor * parameters

    def _too_large(self, sites: Sequence[Site], parameters: int) -> str:
        """Why none of the sites is taken. The first time it is a warning too: without a log nobody would know."""
        smallest = min(sites, key=lambda site: site.parameters)
        after = parameters + smallest.parameters
        reason = (
            f"every layer would bring the model to more than max_factor = {self._max_factor:g} times its parameters; the smallest, "
            f"{smallest}, {factor_text(parameters, after)}"
        )
        if not self._said_too_large:
            advice = f"Give Grower(max_factor={math.ceil(after / parameters)}) to allow it, or None for no limit."
            warnings.warn(f"call {self.calls}: nothing was inserted, because {reason}. {advice}", stacklevel=5)
            self._said_too_large = True
        return reason

    def _least_gain(self, loss: float) -> float:
        """The least first-order decrease of the loss, per unit change of the new weights, that a layer must promise now.

        Only where most of the loss is gone: a network whose outputs are far too small for its targets has small gradients too.
        """
        self._largest_loss = max(self._largest_loss, loss)
        return self._floor * (self._largest_loss or 1.0) if loss <= SOLVED * self._largest_loss else 0.0

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
            own_rate=self._own_rate, group=self._group,
        )  # fmt: skip
        growth = replace(growth, details={"epoch": self.calls, "merit": merit.value, "ratio": merit.ratio})
        self.history.append(growth)  # at once: what is in the history is taken out again if anything fails from here on
        follow(self._averaged, growth, self.model)
        return growth

    def _chosen(self, merits: Merits, least: float) -> list[Merit]:
        """The merits that may be inserted, in that order.

        A control differs from the method in *where* alone: whether, and how many at most, the largest merits decide for it too.
        """
        worth = [
            merit
            for merit in merits.ranked
            if (merit.ratio is None or merit.ratio >= self._tau) and math.sqrt(merit.value) >= least
        ]
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
        raise TypeError(f"select must return one of the merits it was given, or its site, got {choice!r}.")

    def _moment(self, metric: float | None) -> Moment:
        return Moment(self.calls, metric, len(self.history), Sizes(bare(self.model), self._example))

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: calls, history, trigger, random choices. Save the model's tensors yourself."""
        return {
            "calls": self.calls,
            "history": self.history.to_dict(),
            "trigger": self._trigger.state_dict(),
            "generator": self._generator.get_state().tolist(),
            "largest_loss": self._largest_loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. The model must have been grown by `replay` of the same history before.

        Args:
            state: What `state_dict` returned.

        Raises:
            HistoryError: If the state is damaged, or belongs to another model or trigger. Nothing was changed.
        """
        checks.instance("state", state, Mapping, "what Grower.state_dict() returned", error=HistoryError)
        missing_entries = {"calls", "history", "trigger", "generator"} - set(state)
        if missing_entries:
            raise HistoryError(
                f"Not a state of a Grower: the keys {sorted(missing_entries)} are missing. Use an intact copy."
            )
        try:
            history = History.from_dict(state["history"])
            calls, loss, generator = _numbers_of(state)
            self._check_grown_like(history)
        except SensliError:
            raise
        except Exception as error:
            raise HistoryError(
                f"the state of the Grower is damaged: {type(error).__name__}: {error}. Use an intact copy."
            ) from error
        try:
            self._trigger.load_state_dict(state["trigger"])
        except Exception as error:
            raise HistoryError(
                f"the state belongs to a trigger other than {self._trigger!r}. Make the Grower with the trigger it was saved with."
            ) from error
        self.calls, self.history, self._largest_loss = calls, history, loss
        self._generator.set_state(generator)

    def _check_grown_like(self, history: History) -> None:
        expected: list[str] = []
        for growth in history:  # what the inserted parameters are called today: later growths may have renamed them
            expected = [growth.renames.get(name, name) for name in expected] + list(growth.parameters)
        network = bare(self.model)
        names = [name for name, _ in network.named_parameters()]
        numbers = [number for number, _, _ in grown(network)]
        lacking = [str(name) for name in expected if name not in names]
        lacking += [f"growth {growth.number}" for growth in history if growth.number not in numbers]
        if lacking:
            raise HistoryError(
                f"the model lacks {lacking[0]}: it has not grown as this state says. "
                "Call replay(model, History.from_dict(state['history'])) before loading the state."
            )


def _numbers_of(state: Mapping[str, Any]) -> tuple[int, float, Tensor]:
    """Calls, largest loss and random state, or an error if one of them is none."""
    calls, loss, numbers = state["calls"], state.get("largest_loss", 0.0), state["generator"]
    if type(calls) is not int or not 0 <= calls < 2**63:
        raise ValueError(f"calls is {calls!r}")
    if type(loss) not in (int, float) or not 0 <= loss < math.inf:
        raise ValueError(f"largest_loss is {loss!r}")
    if not isinstance(numbers, list) or any(type(number) is not int or not 0 <= number < 256 for number in numbers):
        raise ValueError("generator is not a list of bytes")
    generator = torch.tensor(numbers, dtype=torch.uint8)
    torch.Generator().set_state(generator)  # raises if it is none
    return calls, float(loss), generator
