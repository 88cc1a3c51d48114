"""The engine of the CIFAR-10 experiments: one network at a time, grown by the core's `Grower`.

`train` reads from top to bottom. All randomness depends on (seed, run, purpose, epoch), so an interrupted run
needs no generator state to resume to the bit.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from sensli.paper.data import FACTS, pipeline
from sensli.paper.engines import convnets
from sensli.paper.engines.engine import Counts, Job, Outcome
from sensli.paper.engines.logbook import Logbook
from sensli.paper.engines.restoring import check_count, restoring
from sensli.paper.engines.training import Training, float_type, wait_for
from sensli.paper.errors import BadExperiment
from sensli.paper.plans.machine import Machine, full_precision, has_bf16
from sensli.paper.plans.reading import nearest, unknown
from sensli.paper.plans.seeds import generator
from sensli.paper.plans.settings import Data, Settings

AT_ONCE: int | None = 1
LOOK_BATCH = (
    64  # images, where a look may stop early: small enough to stop early, large enough to cost more than the norms
)
OPTIMIZERS = ("sgd", "adam")
FLOPS_PER_SECOND = 9e10  # of a training step on two cores of a small machine


def check(settings: Settings) -> None:
    """Refuse what cannot be trained, before anything is computed."""
    data, network, optimizer = settings.data, settings.network, settings.optimizer
    if data.name not in FACTS:
        raise BadExperiment(
            f"data, name: the engine 'cnn' trains on images, got {data.name!r}. {nearest(data.name, FACTS)}"
        )
    if network.kind != "cnn":
        raise BadExperiment(f"network, kind must be 'cnn' for the engine 'cnn', got {network.kind!r}.")
    facts = FACTS[data.name]
    if data.train + data.validation > facts.train or data.test > facts.test:
        raise BadExperiment(
            f"data: {data.name} has {facts.train:,} training and {facts.test:,} test images, fewer than requested: train "
            f"{data.train:,} + validation {data.validation:,}, test {data.test:,}."
        )
    if facts.size >> len(network.channels) == 0:
        raise BadExperiment(
            f"channels: {len(network.channels)} poolings leave nothing of a {facts.size} x {facts.size} image."
        )
    if optimizer.name not in OPTIMIZERS:
        raise BadExperiment(f"optimizer, name: {unknown('optimizer', optimizer.name, OPTIMIZERS)}")
    if optimizer.name == "adam" and optimizer.momentum:
        raise BadExperiment(f"optimizer, momentum must be 0 for 'adam', which has its own, got {optimizer.momentum}.")
    for name in ("wake", "recycle_at"):
        if getattr(settings, name):
            raise BadExperiment(f"{name} is a setting of the engine 'stacked', not of 'cnn'.")


def ready(settings: Settings, machine: Machine) -> None:
    """Find out what is missing (a device, the images) before the first hour of work."""
    device = machine.chosen()
    if settings.dtype == "bfloat16" and not has_bf16(device.type):
        raise BadExperiment(
            f"--bf16: a training step in bfloat16 does not work on this {device.type}. Leave the option out."
        )
    images(settings.data, machine.data, device, float_type(settings))


def counts(settings: Settings, accepted: tuple[int, ...] | None = None) -> Counts:
    """Parameters and FLOPs if the looks at these epochs insert a layer in the first stage (default: all looks)."""
    facts, network = FACTS[settings.data.name], settings.network
    stages = convnets.repeats(network)
    times = settings.insert_at if accepted is None else accepted
    if settings.from_start:
        stages[0] += len(times)
        forward = convnets.forward_flops(network, facts, stages)
        return Counts((convnets.parameters(network, facts, stages),), 3 * settings.epochs * forward, 0)
    sizes, training, measuring = [convnets.parameters(network, facts, stages)], 0, 0
    for start, end in zip((0, *settings.insert_at), (*settings.insert_at, settings.epochs), strict=True):
        if start in times:
            stages[0] += 1
            sizes.append(convnets.parameters(network, facts, stages))
        training += 3 * (end - start) * convnets.forward_flops(network, facts, stages)
        if end < settings.epochs:
            measuring += 3 * convnets.extended_flops(network, facts, stages)
    return Counts(tuple(sizes), training + measuring, measuring)


def estimate(settings: Settings, runs: int) -> float:
    """Seconds on two cores, evaluation included."""
    evaluated = (
        (settings.data.validation + (settings.data.test or FACTS[settings.data.name].test)) * settings.epochs / 3
    )
    own = counts(settings)
    share = 1 + evaluated / (settings.data.train * settings.epochs)
    return runs * own.flops * settings.data.train * share / FLOPS_PER_SECOND


@lru_cache(maxsize=1)  # all arms and runs of an experiment train on the same images
def images(data: Data, folder: Path | None, device: torch.device, dtype: torch.dtype) -> pipeline.Split:
    return pipeline.load(data, folder, device, dtype)


@full_precision()
def train(job: Job) -> Outcome:
    """Train one run from the start, or from the state that the job carries."""
    settings, run = job.settings, job.runs[0]
    device = job.machine.chosen()
    data = images(settings.data, job.machine.data, device, float_type(settings))
    steps = -(-len(data.train) // settings.batch)
    one = Training(job, device)
    log = Logbook(settings, steps)
    done = 0
    if job.state is not None:
        with restoring():
            done = check_count(job.state["epoch"], settings.epochs)
            one.restore(job.state)
            log.restore(job.state["log"])
    else:
        log.test(0, *one.evaluate(data.test))
    saved = time.monotonic()

    for epoch in range(done, settings.epochs):
        began = time.perf_counter()
        order = torch.randperm(len(data.train), generator=generator(job.seed, run, f"order {epoch}"), device="cpu")
        source = generator(job.seed, run, f"augment {epoch}")
        rate, losses = one.optimizer.param_groups[0]["lr"], []
        one.model.train()
        for step, index in enumerate(order.split(settings.batch)):
            x, y = data.train.augmented(index, source)
            one.optimizer.zero_grad()
            with one.precision():
                loss = cross_entropy(one.called(x), y)
            torch.autograd.backward(loss)
            log.step(one.model, one.last)
            one.optimizer.step()
            losses.append(loss.detach())
            job.tell((epoch + (step + 1) / steps) / settings.epochs)
        wait_for(device)
        log.epoch(epoch, losses, rate, time.perf_counter() - began, 3 * one.flops(log.places))

        test_loss, test_error = one.evaluate(data.test)
        log.test(epoch + 1, test_loss, test_error)
        if one.schedule is not None and settings.schedule is not None:
            followed = test_error if settings.schedule.metric == "test" else one.evaluate(data.validation)[1]
            one.schedule.step(followed)
        if one.grower is not None:
            shuffled = torch.randperm(
                len(data.train), generator=generator(job.seed, run, f"look {epoch}"), device="cpu"
            )
            size = settings.batch if settings.confidence is None else LOOK_BATCH
            one.look(log, data.train.batches(size, shuffled), epoch + 1)

        finished = epoch + 1 == settings.epochs
        if not finished and time.monotonic() - saved >= job.save_every:
            job.save({"epoch": epoch + 1, "log": log.state(), **one.state()})
            saved = time.monotonic()
    return log.outcome()
