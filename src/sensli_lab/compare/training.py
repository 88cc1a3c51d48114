"""Train one job: the same loop for every method. A step costs what was counted once for the network as it is; a look costs what ran."""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from sensli.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from sensli.errors import CheckpointError, SensliError
from sensli.growing.grower import Grower
from sensli.growing.options import Rates, Trial, used_options
from sensli.growing.saturating import Saturating
from sensli.growing.strategy import strategy_class
from sensli.growing.triggers import Diminishing, Every, Limit, Pays, Trigger
from sensli.modules.flops import PRODUCTS, FlopCounter, Rule, count_flops
from sensli.surgery.record import Decision
from sensli_lab.compare.jobs import Job, Run, RunLook
from sensli_lab.compare.steps import ReplayedSteps
from sensli_lab.compare.task import Loss, Task, TaskData, TaskPart
from sensli_lab.paper.machine import generator, run_seed
from sensli_lab.work.workers import Save, Tell, ignore

# ---- Which samples a step and a look are given: the same for all methods of a seed.

Batch = tuple[Tensor, Tensor]


_OF_RATES = ("freeze_rest", "warmup", "depth_power")
# What a method that waits may ask, by name.
TRIGGERS: dict[str, Callable[[], Trigger]] = {"slow": Diminishing, "saturating": Saturating, "pays": Pays}
_NAMES = {"grow": "what", "count": "max_growths"}  # of options of `Grower`, before and now


class Sampling:
    """The batches of a run by the number of the step. As an iterable, those from the step ``next`` on, without an end.

    ``taken`` of them were trained on between the steps, in trials: the steps after that take the batches after these.
    """

    def __init__(self, task: Task, part: TaskPart, seed: int) -> None:
        self.task, self.part, self.seed = task, part, seed
        self.next = self.taken = 0
        self._drawn: tuple[int, Tensor] | None = None

    def at(self, step: int) -> Batch:
        """The batch of a step. A rest that fills no batch is left to another epoch."""
        part, size = self.part, self.task.batch
        if size is None:
            return part.x, part.y
        epoch, place = divmod(step + self.taken, len(part) // size)
        index = self._order(epoch)[place * size : (place + 1) * size]
        return part.x[index], part.y[index]

    def __iter__(self) -> Iterator[Batch]:
        return (self.at(step) for step in itertools.count(self.next))

    def of_look(self, look: int) -> Iterator[Batch]:
        """The training samples of a look, others at each one, in batches as large as those of a step."""
        part, size = self.part, self.task.batch
        if size is None:
            yield part.x, part.y
            return
        source = generator(self.seed, look, "look")
        index = torch.randperm(len(part), generator=source, device=source.device)[: self.task.looked_at]
        for some in index.split(size):
            yield part.x[some], part.y[some]

    def _order(self, epoch: int) -> Tensor:
        if self._drawn is None or self._drawn[0] != epoch:
            order = torch.randperm(len(self.part), generator=generator(self.seed, epoch, "order"), device="cpu")
            self._drawn = epoch, order
        return self._drawn[1]


# ---- What a run has computed, in FLOPs: two for each multiply-add of every product that ran, also inside of a look.
#
# Nothing is estimated from a formula of the method: a counter sees each operation, so a search that tries a hundred
# candidates counts a hundred times. Factorisations and Fourier transforms, which looks use and models rarely do, are
# counted by the usual leading terms.


def _matrix(given: Any) -> tuple[int, int, int]:
    """How many matrices a tensor holds, the longer and the shorter side of each."""
    rows, columns = given.shape[-2:]
    return math.prod(given.shape[:-2]), max(rows, columns), min(rows, columns)


def _by_sides(work: Callable[[int, int], float]) -> Rule:
    def rule(matrix: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
        count, long, short = _matrix(matrix)
        return round(count * work(long, short))

    return rule


def _solve(matrix: Any, right: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    count, size, _ = _matrix(matrix)
    return int(count * 2 * size**3 // 3 + 2 * size * right.numel())


def _triangular(matrix: Any, right: Any, **kwargs: Any) -> int:
    return int(matrix.shape[-1] * right.numel())


def _fourier(data: Any, dims: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    size = math.prod(out_val.shape[dim] for dim in dims)
    return int(5 * out_val.numel() * math.log2(max(size, 2)))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_val: Any, **kwargs: Any) -> int:
    # the scores again, and the gradients of values, weights, queries and keys: five products where the forward pass has two
    return int(math.prod(query.shape[:-1]) * key.shape[-2] * (6 * query.shape[-1] + 4 * value.shape[-1]))


# Factorisations: Golub and Van Loan, Matrix Computations; m x n with m the longer side.
FURTHER: dict[str, Rule] = {
    "_linalg_svd": _by_sides(lambda m, n: 6 * m * n**2 + 20 * n**3),
    "_linalg_eigh": _by_sides(lambda m, n: 9 * n**3),
    "linalg_eig": _by_sides(lambda m, n: 25 * n**3),
    "_linalg_eigvals": _by_sides(lambda m, n: 10 * n**3),
    "linalg_qr": _by_sides(lambda m, n: 4 * m * n**2 - 4 * n**3 / 3),
    "linalg_cholesky_ex": _by_sides(lambda m, n: n**3 / 3),
    "linalg_inv_ex": _by_sides(lambda m, n: 2 * n**3),
    "linalg_lu_factor_ex": _by_sides(lambda m, n: 2 * n**3 / 3),
    "linalg_lstsq": _by_sides(lambda m, n: 2 * m * n**2),
    "_linalg_solve_ex": _solve,
    "linalg_solve_triangular": _triangular,
    "cholesky_solve": lambda right, matrix, *args, **given: 2 * _triangular(matrix, right),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_fft_r2c": _fourier,
    "_fft_c2c": _fourier,
    "_fft_c2r": _fourier,
}


class Counted(FlopCounter):
    """Counts what runs inside: ``with Counted() as counted: ...``, then ``counted.total``; ``counted.unknown`` has what has no rule."""

    products: ClassVar[Mapping[str, Rule]] = {**PRODUCTS, **FURTHER}


def flops_of_step(model: nn.Module, batch: Batch, loss: Loss) -> int:
    """FLOPs of a forward and a backward pass of one batch; the model is left as it is."""
    twin = copy.deepcopy(model).train()
    x, y = batch
    with Counted() as counted:
        loss(twin(x), y).backward()
    return int(counted.total)


EVALUATED_AT_ONCE = 500
SAVE_EVERY = 10.0  # seconds


def train(
    job: Job, data: TaskData, *, state: bytes | None = None, tell: Tell = ignore, save: Save | None = None,
    save_every: float | None = None,
) -> Run:  # fmt: skip
    """Train until the FLOPs are spent. ``tell`` gets the share that is spent, ``save`` what can be the ``state`` to resume from."""
    training = JobTraining(job, data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.ckpt"
        if state is not None:
            path.write_bytes(state)
            try:
                training.restore(path)
            except CheckpointError:  # a damaged state, or one of other code: from the start
                training = JobTraining(job, data)
        saved = time.monotonic()
        while not training.finished:
            training.advance()
            if save is not None and time.monotonic() - saved >= (SAVE_EVERY if save_every is None else save_every):
                training.save(path)
                save(path.read_bytes())
                saved = time.monotonic()
            tell(training.share)
    return training.ended()


class JobTraining:
    """A run on its way: the model, what trains and grows it, and the record."""

    def __init__(self, job: Job, data: TaskData) -> None:
        self.job, self.task, self.data = job, job.task, data
        self.run = Run(data=data.digest)
        self.spent = 0.0
        self.batches = Sampling(self.task, data.train, job.seed)
        self._began = time.perf_counter()
        large, first = self.task.network("large", job.seed), self.batches.at(0)
        step = flops_of_step(large, first, self.task.loss)
        self.run.budget = job.budget * self.task.steps * step
        if job.method.full:  # as many steps as the small network takes with the FLOPs of the task
            self.run.budget *= step / flops_of_step(self.task.network("small", job.seed), first, self.task.loss)
        self._trial = None if job.method.trial is None else Trial(1, candidates=2, batches=self.batches)
        self.limit = int(count_flops(large, self.task.sample()))
        self.model = self._model()
        self.optimizer = self._optimizer(self.model)
        self.scheduler = self._scheduler(self.optimizer)
        self.grower = self._grower(self.model, self.optimizer, self.scheduler) if job.method.grows else None
        self._step_flops: int | None = None  # of the model as it is
        self._steps: ReplayedSteps | None = None  # of the model as it is
        # numbers: a tensor of one would keep the large block of memory that it lies in from being used again
        self._losses: list[float] = []
        self._since: list[float] = []  # losses since the last call of a grower that waits

    # --- the parts, as a checkpoint rebuilds them ---

    def _model(self) -> nn.Module:
        return self.task.network(self.job.method.size, self.job.seed)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = self.task.optimizer(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] *= self.job.rate
        return optimizer

    def _scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda _: self._rate())

    def _rate(self) -> float:
        """The factor of the learning rate now: of the method's own schedule, if it has one."""
        schedule, share = self.job.method.schedule, self.share
        if schedule is None:
            return self.task.rate(share)
        return schedule.rate(share) * self.task.warmed(share)

    @property
    def looks(self) -> tuple[float, ...]:
        """Shares of the FLOPs at which it looks, or asks whether to."""
        schedule = self.job.method.schedule
        if self.job.method.waits:
            shares = ((call + 1) / self.task.calls for call in range(self.task.calls))
            until = max(self.task.looks) if self.task.until is None else self.task.until
            return tuple(share for share in shares if share <= until)
        return self.task.looks if schedule is None else schedule.looks

    def _grower(self, model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
        """All must stay below the size of the large network; none may refuse to grow unless its own schedule lets it."""
        if preset := self.job.method.preset:
            # whose size nothing limits, as for everybody who writes this
            return Grower(model, optimizer, preset=preset, example=self.task.sample(), scheduler=scheduler)
        # Stored runs are known by the names that these options had when they were made.
        options = {_NAMES.get(name, name): value for name, value in self.job.method.options.items()}
        strategy = options.get("strategy", "sensli")
        if (strategy_class(strategy) if isinstance(strategy, str) else strategy).all_at_once:
            options.pop("max_growths", None)  # which says nothing there
        rates = Rates(**{name: options.pop(name) for name in _OF_RATES if name in options})
        known = used_options(strategy, options.get("what"))
        common = {"tau": 0.0, "floor": 0.0, "units": self.task.units}
        return Grower(
            model, optimizer, preset="paper", example=self.task.sample(), trigger=self._trigger() & Limit(flops=self.limit),
            max_factor=None, rates=rates, scheduler=scheduler, trial=self._trial, seed=run_seed(self.job.seed, 0, "place"),
            **{**{name: value for name, value in common.items() if name in known}, **options},
        )  # fmt: skip

    def _trigger(self) -> Trigger:
        """At which of the calls that are due it looks: at all of them, unless it waits, and then not more often than the others."""
        if not self.job.method.waits:
            return Every(1)
        if self.job.method.trigger:
            return TRIGGERS[self.job.method.trigger]()
        late = Diminishing() & Limit(growths=len(self.task.looks))
        return Pays() | late if self.job.method.pays else late

    def _metric(self) -> float | None:
        """What a call is told: the validation loss, where the strategy decides by it; the training loss since the last, where it waits."""
        if self.job.method.waits:
            mean = _mean(self._since)
            self._since.clear()
            return mean
        needed = self.grower is not None and self.grower.strategy.needs_metric
        return self._loss_of(self.data.validation) if needed else None

    # --- the loop ---

    @property
    def share(self) -> float:
        """The share of the FLOPs that is spent."""
        return self.spent / self.run.budget

    @property
    def finished(self) -> bool:
        return self.share >= 1 and bool(self.run.flops)

    def advance(self) -> None:
        """What is due now, a point of the curve or a look, and one step."""
        if self.share >= len(self.run.flops) / self.task.points:
            self._point()
        if self.grower is not None and self._look_is_due():
            self._look()
        self._step()

    def _step(self) -> None:
        cost = self._cost_of_a_step()
        if self._steps is None:
            self._steps = ReplayedSteps(self.model, self.optimizer, self.task.loss, constant=self.task.batch is None)
        self._losses.append(self._steps.take(*self.batches.at(self.run.steps)).item())
        if self.job.method.waits:
            self._since.append(self._losses[-1])
        self.run.steps += 1
        self.spent += cost
        self.scheduler.step()
        self.run.step_seconds += self._steps.plain

    def _cost_of_a_step(self) -> int:
        if self._step_flops is None:
            self._step_flops = flops_of_step(self.model, self.batches.at(self.run.steps), self.task.loss)
        return self._step_flops

    def _look_is_due(self) -> bool:
        return self.run.looks < len(self.looks) and self.share >= self.looks[self.run.looks]

    def _look(self) -> None:
        """One call of the grower. All that runs inside is counted, and so is the validation loss if the strategy decides by it."""
        assert self.grower is not None
        batches = list(self.batches.of_look(self.run.looks))
        samples = sum(len(y) for _, y in batches)
        sweep = self._cost_of_a_step() * samples / len(self.batches.at(self.run.steps)[1])
        began = time.perf_counter()
        with Counted() as counted, warnings.catch_warnings():
            # nothing fits any more, or all merits are zero: no growth says so
            warnings.simplefilter("ignore", UserWarning)
            metric = self._metric()
            self.model.train()
            before = len(self.grower.history)
            self._prepare_trial()
            self.grower.step(batches, self.task.loss, metric=metric)
        looks = self.grower.history.record.decisions
        look = looks[-1] if looks and looks[-1].call == self.grower.calls else None  # None: the trigger has not fired
        decision = counted.total - self._trained_in_trial(look)
        if look is not None:
            self.run.costs.append(RunLook(decision, time.perf_counter() - began, sweep, samples))
            self._step_flops = self._steps = None
        self.run.looks += 1
        self.run.decisions += decision
        self.spent += counted.total
        for name, times in counted.unknown.items():
            self.run.uncounted[name] = self.run.uncounted.get(name, 0) + times
        self.run.grown += [(self.spent, str(growth.site)) for growth in self.grower.history[before:]]
        schedule = self.job.method.schedule
        if schedule is not None and schedule.forgets and len(self.grower.history) > before:
            self.optimizer.state.clear()  # as another optimizer of the same parameters

    def _prepare_trial(self) -> None:
        """A trial trains each network for the same share of the FLOPs that are left, whatever the size of the model is by now."""
        self.batches.next = self.run.steps
        if self._trial is not None and self.job.method.trial is not None:
            left = max(self.run.budget - self.spent, 0.0)
            self._trial.steps = max(1, round(self.job.method.trial * left / self._cost_of_a_step()))

    def _trained_in_trial(self, look: Decision | None) -> int:
        """FLOPs of the steps of a trial that count as training: the winner's, whose network the model is now."""
        tried = None if look is None else look.tried
        if self._trial is None or tried is None:
            return 0
        self.batches.taken += self._trial.steps  # no step takes them again
        step = flops_of_step(self.model, self.batches.at(self.run.steps), self.task.loss)
        return tried.arms[tried.winner].steps * step

    def _point(self) -> None:
        """A point of the curve: for the reader, not for the method, and not counted."""
        train = _mean(self._losses) if self._losses else float("nan")
        self._losses.clear()
        self.run.flops.append(self.spent)
        self.run.train.append(train)
        self.run.validation.append(self._loss_of(self.data.validation))

    def ended(self) -> Run:
        """The record with its last point and what the test data say."""
        self._point()
        run = self.run
        run.test_loss = self._loss_of(self.data.test)
        run.test_error = self._error_of(self.data.test) if self.task.counts_errors else None
        run.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        run.forward = int(count_flops(self.model, self.task.sample()))
        run.seconds += time.perf_counter() - self._began
        return run

    # --- what it is judged by ---

    @torch.no_grad()
    def _loss_of(self, part: TaskPart) -> float:
        return sum(float(self.task.loss(output, y)) * len(y) for output, y in self._outputs(part)) / len(part)

    @torch.no_grad()
    def _error_of(self, part: TaskPart) -> float:
        return sum(int((output.argmax(1) != y).sum()) for output, y in self._outputs(part)) / len(part)

    def _outputs(self, part: TaskPart) -> Iterator[tuple[Tensor, Tensor]]:
        self.model.eval()
        for x, y in zip(part.x.split(EVALUATED_AT_ONCE), part.y.split(EVALUATED_AT_ONCE), strict=True):
            yield self.model(x), y

    # --- interruptions ---

    def save(self, path: Path) -> None:
        """All that is needed to resume, between two steps."""
        now = time.perf_counter()
        self.run.seconds += now - self._began
        self._began = now
        extra = {
            "run": self.run.to_dict(), "spent": self.spent, "taken": self.batches.taken, "losses": self._losses,
            "since": self._since,
        }  # fmt: skip
        save_checkpoint(
            path, self.model, optimizer=self.optimizer, scheduler=self.scheduler, grower=self.grower, extra=extra
        )

    def restore(self, path: Path) -> None:
        """Continue where `save` was called."""
        grows = self.job.method.grows
        found = load_checkpoint(
            path, self._model, self._optimizer,
            make_scheduler=self._scheduler, make_grower=self._grower if grows else None,
        )  # fmt: skip
        self.model, self.optimizer, self.scheduler, self.grower = found.model, found.optimizer, found.scheduler, found.grower  # fmt: skip
        self.run = Run.from_dict(found.extra["run"])
        self.spent, self.batches.taken, self._losses = found.extra["spent"], found.extra["taken"], found.extra["losses"]
        self._since = found.extra.get("since", [])
        if self.grower is not None and (looks := self.grower.history.record.decisions) and not looks[-1].growths:
            # The look before has paid for this search, and a run that was not interrupted still knows the sites, or that there are none.
            with suppress(SensliError):
                self.grower.sites()


def _mean(losses: list[float]) -> float:
    return float(torch.tensor(losses, device="cpu").mean())
