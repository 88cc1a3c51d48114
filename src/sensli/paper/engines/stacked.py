"""The engine of the spiral experiments: all runs of an arm trained at once, each growing at its own place."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from sensli.merits.ranking import SELECTIONS
from sensli.paper.data.spirals import CLASSES, POINTS, split
from sensli.paper.engines import networks
from sensli.paper.engines.engine import SHOWN, Counts, Job, Outcome
from sensli.paper.engines.restoring import check_alike, check_count, restoring
from sensli.paper.engines.stack import Looks, Pass, Stack
from sensli.paper.errors import BadExperiment
from sensli.paper.plans.machine import Machine
from sensli.paper.plans.seeds import ORDER_BLOCK, generator, order_block, run_seed
from sensli.paper.plans.settings import Settings

AT_ONCE: int | None = None


def check(settings: Settings) -> None:
    """Refuse what the stack cannot do, before anything is computed."""
    if settings.data.name != "spirals":
        raise BadExperiment(f"data, name must be 'spirals' for the engine 'stacked', got {settings.data.name!r}.")
    if settings.data.train >= 2 * POINTS:
        raise BadExperiment(
            f"data, train must be below {2 * POINTS}, so that points are left for testing, got {settings.data.train}."
        )
    optimizer = settings.optimizer
    if optimizer.name != "sgd" or optimizer.momentum or optimizer.weight_decay:
        raise BadExperiment(
            f"optimizer must be 'sgd' without momentum and weight decay for the engine 'stacked', got {optimizer}."
        )
    if settings.tau > 0:
        raise BadExperiment(
            f"tau must be 0 for the engine 'stacked', which inserts a layer in every run, got {settings.tau}."
        )
    if settings.network.kind == "cnn":
        raise BadExperiment(
            "network, kind must be 'fnn' or 'resnet' for the engine 'stacked', got 'cnn'. Set engine = 'cnn'."
        )
    alone = ("schedule", "confidence", "tolerance", "fresh_optimizer", "from_start", "record_norms")
    for name in alone:
        if getattr(settings, name):
            raise BadExperiment(f"{name} is a setting of the engine 'cnn', not of 'stacked'.")
    if settings.dtype == "bfloat16" or settings.data.validation or settings.data.test:
        raise BadExperiment(
            "bfloat16, data.validation and data.test are settings of the engine 'cnn', not of 'stacked'."
        )
    for name in ("wake", "recycle_at"):
        if getattr(settings, name) and settings.network.kind != "fnn":
            raise BadExperiment(f"{name} is for ReLU layers (network kind 'fnn'): a residual layer has no dead units.")


def ready(settings: Settings, machine: Machine) -> None:
    """The spirals are computed when needed: nothing can be missing."""


def counts(settings: Settings, accepted: tuple[int, ...] | None = None) -> Counts:
    network = settings.network
    sizes = tuple(networks.parameters(network, grown) for grown in range(len(settings.insert_at) + 1))
    flops, measuring = networks.training_flops(settings)
    printed = networks.training_flops(settings, printed=True)
    if printed == (flops, measuring):
        return Counts(sizes, flops, measuring)
    return Counts(sizes, flops, measuring, *printed)


def estimate(settings: Settings, runs: int) -> float:
    """Seconds on one core, from step times measured on a small machine: a price per call and one per number."""
    steps = settings.epochs * -(-settings.data.train // settings.batch)
    layers = len(settings.network.widths) + 1 + len(settings.insert_at)
    size = runs * settings.batch * settings.network.widths[0]
    return steps * layers * (110e-6 + 2e-9 * size)


def train(job: Job) -> Outcome:
    """Train the runs of `job` from the start, or from the state it carries."""
    with one_thread():
        return _Training(job).finish()


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a few thousand numbers lose more by being shared among threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Training:
    """The state of one job: the stack, the epoch, and what was recorded so far."""

    def __init__(self, job: Job) -> None:
        self.job, self.settings = job, job.settings
        settings = job.settings
        dtype = getattr(torch, settings.dtype)
        data = split(settings.data.train, settings.data.split_seed, dtype)
        runs = len(job.runs)
        self.x = data.train_x.T.contiguous()  # [2, N]
        self.y = one_hot(data.train_y, CLASSES).T.to(dtype).contiguous()  # [classes, N]
        self.train_x = self.x.expand(runs, -1, -1).contiguous()
        self.test_x = data.test_x.T.expand(runs, -1, -1).contiguous()
        self.test_y = one_hot(data.test_y, CLASSES).T.to(dtype).contiguous()
        self.full = settings.batch == settings.data.train
        self.steps_per_epoch = -(-settings.data.train // settings.batch)
        self.epoch = 0
        self.lr = settings.optimizer.lr
        self.since = SHOWN  # iterations since the last insertion, counted up to SHOWN
        self.order = torch.empty(0, device="cpu")
        seeds = [run_seed(job.seed, run, "weights") for run in job.runs]
        self.stack = Stack.of([networks.build(settings.network, seed, dtype) for seed in seeds])
        self.records = self._empty_records(runs)
        if job.state is not None:
            with restoring():
                self._restore(job.state)

    def _empty_records(self, runs: int) -> dict[str, Tensor]:
        settings = self.settings
        points, times, width = settings.epochs + 1, len(settings.insert_at), settings.network.widths[0]
        most = networks.places(settings.network, max(times - 1, 0))
        weights = 1 if settings.network.kind == "fnn" else 2
        nan = float("nan")
        records = {
            name: torch.full((points, runs), nan, device="cpu") for name in ("train_loss", "test_loss", "test_error")
        }
        if settings.dtype == "float64":
            records = {name: values.double() for name, values in records.items()}
        if times:
            records["place"] = torch.full((times, runs), -1, device="cpu")
            records["merits"] = torch.full((times, runs, most), nan, device="cpu")
            records["ratios"] = torch.full((times, runs, most), nan, device="cpu")
            records["dead"] = torch.zeros(times, runs, dtype=torch.long, device="cpu")
            records["new_gradient"] = torch.full((times, SHOWN, runs, weights, width, width), nan, device="cpu")
        if settings.recycle_at:
            records["recycled"] = torch.zeros(len(settings.recycle_at), runs, dtype=torch.long, device="cpu")
        if settings.record_gradients:
            layers = len(settings.network.widths) + 1 + times
            records["gradient_norm"] = torch.full((settings.epochs, layers, runs), nan, device="cpu")
        return records

    def finish(self) -> Outcome:
        saved = time.monotonic()
        while self.epoch < self.settings.epochs:
            if self.epoch % ORDER_BLOCK == 0:
                self.job.tell(self.epoch / self.settings.epochs)
                if time.monotonic() - saved >= self.job.save_every:
                    self.job.save(self._state())
                    saved = time.monotonic()
            self._evaluate()
            self._train_epoch()
            self.epoch += 1
            if self.epoch in self.settings.insert_at:
                self._grow(self.settings.insert_at.index(self.epoch))
            if self.epoch in self.settings.recycle_at:
                self._recycle(self.settings.recycle_at.index(self.epoch))
        self._evaluate()
        if self.full:
            self.records["train_loss"][self.epoch] = self._train_loss()
        self.job.tell(1.0)
        iteration = torch.arange(self.settings.epochs + 1, device="cpu") * self.steps_per_epoch
        return Outcome(
            {name: _runs_first(name, value) for name, value in self.records.items()}, {"iteration": iteration}
        )

    def _evaluate(self) -> None:
        """Losses and error after `self.epoch` epochs. In full-batch training the next step gives the training loss."""
        log_p = torch.log_softmax(self.stack.logits(self.test_x), 1)
        own = (log_p * self.test_y).sum(1)  # [runs, N]
        self.records["test_loss"][self.epoch] = -own.mean(1)
        # wrong where another class is more likely; argmax over the middle axis would cost more than the pass itself
        self.records["test_error"][self.epoch] = (own < log_p.amax(1)).to(own.dtype).mean(1)
        if not self.full:
            self.records["train_loss"][self.epoch] = self._train_loss()

    def _train_loss(self) -> Tensor:
        log_p = torch.log_softmax(self.stack.logits(self.train_x), 1)
        return (log_p * self.y).sum((1, 2)).div_(-self.x.shape[1])

    def _train_epoch(self) -> None:
        if self.full:
            done = self._step(self.train_x, self.y)
            self.records["train_loss"][self.epoch] = done.loss
            self._record_norms(self._norms(done), 1)
            return
        within = self.epoch % ORDER_BLOCK
        if within == 0 or len(self.order) == 0:
            self.order = order_block(self.job.seed, self.job.runs, self.epoch // ORDER_BLOCK, self.x.shape[1])
        order = self.order[within]
        shuffled = [values[:, order].transpose(0, 1) for values in (self.x, self.y)]  # [runs, 2 or classes, N]
        norms = None
        for x, y in zip(*(torch.split(values, self.settings.batch, dim=2) for values in shuffled), strict=True):
            done = self._step(x.contiguous(), y.contiguous())
            own = self._norms(done)
            norms = own if norms is None or own is None else norms + own
        self._record_norms(norms, self.steps_per_epoch)

    def _step(self, x: Tensor, y: Tensor) -> Pass:
        done = self.stack.run(x, y)
        if self.since < SHOWN:
            self._keep_new_gradient(done)
        grads = [grad for own in done.grads for grad in own]
        torch._foreach_add_(self.stack.parameters(), grads, alpha=-self.lr)
        return done

    def _norms(self, done: Pass) -> Tensor | None:
        """The Frobenius norm of each layer's weight gradient: [layers, runs]."""
        if not self.settings.record_gradients:
            return None
        layers = zip(self.stack.layers, done.grads, strict=True)
        squares = [sum(w.square().sum((1, 2)) for w in layer.weights_of(own)) for layer, own in layers]
        return torch.stack(squares).sqrt()  # type: ignore[arg-type]

    def _record_norms(self, total: Tensor | None, steps: int) -> None:
        if total is not None:
            self.records["gradient_norm"][self.epoch, : len(total)] = total / steps

    def _keep_new_gradient(self, done: Pass) -> None:
        time_index = sum(at <= self.epoch for at in self.settings.insert_at) - 1
        for run, place in enumerate(self.records["place"][time_index].tolist()):
            layer, own = self.stack.layers[place + 1], done.grads[place + 1]
            weights = torch.stack([w[run] for w in layer.weights_of(own)])
            self.records["new_gradient"][time_index, self.since, run] = weights
        self.since += 1

    def _grow(self, index: int) -> None:
        """Measure on the whole training set, choose a place for each run, insert there."""
        looks = self.stack.measure(self.train_x, self.y)
        places = self._choose(looks, index)
        found = looks.merits.shape[1]
        everyone = torch.arange(len(places), device="cpu")
        self.records["place"][index] = places
        self.records["merits"][index, :, :found] = looks.merits
        self.records["ratios"][index, :, :found] = looks.ratios
        dead = looks.dead[everyone, places]
        self.records["dead"][index] = dead.sum(1)
        self.stack.insert(places)
        if self.settings.wake:
            self.stack.wake(places, dead, self._incoming(index))
        self.lr *= self.settings.lr_scale
        self.since = 0

    def _choose(self, looks: Looks, index: int) -> Tensor:
        merits, select = looks.merits, self.settings.select
        if select == "random":  # from each run's own source, as in the results that are stored
            count = merits.shape[1]
            sources = [generator(self.job.seed, run, f"place {index}") for run in self.job.runs]
            return torch.cat([torch.randint(count, (1,), generator=source, device=source.device) for source in sources])
        order, unused = SELECTIONS[select], torch.Generator()
        nowhere = [None] * merits.shape[1]  # there are no stacks of blocks
        return torch.tensor([order(own, nowhere, 1, unused)[0] for own in merits.tolist()], device="cpu")

    def _recycle(self, index: int) -> None:
        """Give the units that are zero on the whole training set new rows, as PyTorch draws them, and no outgoing weights."""
        sources = [generator(self.job.seed, run, f"recycle {index}") for run in self.job.runs]
        self.records["recycled"][index] = self.stack.recycle(self.train_x, sources)

    def _incoming(self, index: int) -> Tensor:
        """Random weights as PyTorch draws them for a linear layer of this width."""
        width = self.settings.network.widths[0]
        draws = []
        for run in self.job.runs:
            source = generator(self.job.seed, run, f"wake {index}")
            draws.append(torch.rand(width, width, dtype=self.x.dtype, generator=source, device=source.device))
        return (2 * torch.stack(draws) - 1) / math.sqrt(width)

    def _state(self) -> dict[str, Any]:
        layers = len(self.stack.layers)
        tensors = self.stack.parameters()
        return {
            "epoch": self.epoch,
            "lr": self.lr,
            "since": self.since,
            "layers": layers,
            "parameters": tensors,
            "records": self.records,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        everyone = torch.zeros(len(self.job.runs), dtype=torch.long, device="cpu")
        layers = check_count(state["layers"], len(self.stack.layers) + len(self.settings.insert_at))
        epoch, since = check_count(state["epoch"], self.settings.epochs), check_count(state["since"], SHOWN)
        rate = float(state["lr"])
        check_alike(state["records"], self.records)
        while len(self.stack.layers) < layers:
            self.stack.insert(everyone)  # where does not matter: the saved tensors come next
        for mine, saved in zip(self.stack.parameters(), state["parameters"], strict=True):
            check_alike({"weight": saved}, {"weight": mine})
            mine.copy_(saved)
        self.epoch, self.lr, self.since, self.records = epoch, rate, since, state["records"]


def _runs_first(name: str, value: Tensor) -> Tensor:
    axis = 2 if name == "new_gradient" else value.dim() - 1 if name not in ("merits", "ratios") else 1
    return value.movedim(axis, 0).contiguous()
