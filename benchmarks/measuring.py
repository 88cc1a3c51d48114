"""What a measurement costs: against the extended network, in memory, inside the user's own step, per site, and with confidence."""

from __future__ import annotations

import ctypes
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.cifar10 import training_data
from benchmarks.figure import Figure
from benchmarks.networks import deep_network, densenet, extended, paper_cnn, wide_cnn
from sensli.merits import sums
from sensli.merits.catching import Catch
from sensli.merits.measuring import measure
from sensli.merits.norms import squared_norm
from sensli.merits.probe import Probe
from sensli.merits.sums import SiteCatch, WeightCatch
from sensli.moves.finding import find_sites
from sensli.moves.roles import Geometry

BATCH = 128


def _seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def interleaved(
    works: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each, taken in turn, so that a busy moment of the machine hits all alike."""
    for work in works.values():
        work()
    taken = {name: [] for name in works}  # type: dict[str, list[float]]
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(_seconds(work, clock))
    return {name: statistics.median(times) for name, times in taken.items()}


@contextmanager
def keeping_memory() -> Iterator[None]:
    """Have the C library keep what is freed (glibc; elsewhere nothing happens).

    A training step gives tensors of many megabytes back to the system and asks for them again. What the system takes for that is up
    to a quarter of the step, and changes from process to process.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    trim_threshold, most_maps = -1, -4  # of mallopt
    if library is None or not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(most_maps, 0)
    library.mallopt(trim_threshold, 2**31 - 1)
    try:
        yield
    finally:
        library.mallopt(most_maps, 2**16)  # as it was
        library.mallopt(trim_threshold, 2**17)


def _images(count: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(0, 10, (count,), generator=generator)


def measure_against_extended() -> list[Figure]:
    """An exact measurement of the paper's CNN against the same pass through the network with a layer at every place."""
    torch.manual_seed(0)
    model, (x, y) = paper_cnn(), _images()
    sites = find_sites(model, x[:1], where="conv")
    big = extended(model, x[:1], where="conv")
    new = [p for name, p in big.named_parameters() if "grown" in name and p.ndim == 4]

    def extended_pass() -> None:
        big.zero_grad()
        cross_entropy(big(x), y).backward()
        for parameter, site in zip(new, sites, strict=True):
            assert parameter.grad is not None
            squared_norm(parameter.grad, "operator", Geometry(site.shape[1:]))

    works = {
        "extended": extended_pass,
        "ratio": lambda: measure(model, sites, [(x, y)], cross_entropy),
        "plain": lambda: measure(model, sites, [(x, y)], cross_entropy, ratio=False),
    }
    returned = interleaved(works, rounds=9)
    with keeping_memory():
        seconds = interleaved(works, rounds=9)
    ten = [(x, y)] * 10
    whole = _seconds(lambda: measure(model, sites, ten, cross_entropy))
    norms, _ = _seconds_of_norms(model, x, y)
    how = (
        "paper's CNN, batch 128, channels_last, operator norm, one batch, median of 9 interleaved rounds; {:.3f} where freed memory "
        "goes back to the system"
    )

    def against_extended(name: str, work: str, bar: float) -> Figure:
        kept, gave = (taken[work] / taken["extended"] for taken in (seconds, returned))
        return Figure(f"measure {name} ratio / extended pass", kept, bar, how.format(gave))

    return [
        against_extended("with", "ratio", 0.62),
        against_extended("without", "plain", 0.51),
        Figure(
            "norms / measurement",
            norms / whole,
            0.05,
            "all operator norms of sites and weights / measurement of 10 batches",
        ),
    ]


def norm_cost() -> list[Figure]:
    """The operator norms that norm="auto" takes of convolutions, of all sites and weights, against the pass of one small batch."""
    generator = torch.Generator().manual_seed(0)
    figures = []
    for name, make, batch, size in (("DenseNet-121", densenet, 16, 64), ("256 channels on 32 x 32", wide_cnn, 16, 32)):
        torch.manual_seed(0)
        x = torch.randn(batch, 3, size, size, generator=generator)
        y = torch.randint(0, 10, (batch,), generator=generator)
        norms, whole = _seconds_of_norms(make(), x, y)
        how = f"{norms:.2f} s / {whole:.2f} s, one batch of {batch} images of {size} x {size}, median of 5"
        figures.append(Figure(f'norm="auto" / pass, {name}', norms / whole, 1.0, how))
    return [*figures, *_norms_within_measurements()]


def _norms_within_measurements() -> list[Figure]:
    """The same where operator norms would not pay: one image, and a measurement with confidence, which looks again and again."""
    torch.manual_seed(0)
    model = densenet()
    sites = find_sites(model, torch.randn(2, 3, 64, 64), where="conv")
    figures = []
    for name, batch, count, level in (("one image", 1, 1, None), ("confidence, batches of 16", 16, 17, 0.99)):
        data = [(torch.randn(batch, 3, 64, 64), torch.randint(0, 10, (batch,))) for _ in range(count)]
        taken: list[float] = []
        most = None if level is None else 16
        with _timed_norms(taken):
            whole = _seconds(partial(measure, model, sites, data, cross_entropy, confidence=level, max_batches=most))
        norms = sum(taken)
        how = f"{norms:.2f} s / {whole - norms:.2f} s, {len(taken)} norms in one measurement of {most or count} batches"
        figures.append(Figure(f'norm="auto" / pass, DenseNet-121, {name}', norms / (whole - norms), 1.0, how))
    return figures


@contextmanager
def _timed_norms(taken: list[float]) -> Iterator[None]:
    """The seconds of every norm that is taken inside."""

    def timed(*args: Any) -> float:
        start = time.perf_counter()
        value = squared_norm(*args)
        taken.append(time.perf_counter() - start)
        return value

    with patch.object(sums, "squared_norm", timed):
        yield


def _seconds_of_norms(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Of the operator norms of all sites and weights, and of the pass that catches their gradients; taken in turn."""
    sites = find_sites(model, x[:2], where="conv")
    caught: list[SiteCatch | WeightCatch] = []

    def one_pass() -> None:
        catch = Catch(model, sites, weights=True)
        with catch.hooked():
            gradients = torch.autograd.grad(cross_entropy(model(x), y), [w.parameter for w in catch.weights])
            for weight, gradient in zip(catch.weights, gradients, strict=True):
                weight.add_gradient(gradient, 0)
        caught[:] = [*catch.sites, *catch.weights]

    seconds = interleaved(
        {"pass": one_pass, "norms": lambda: [part.merit("operator", 1.0) for part in caught]}, rounds=5
    )
    return seconds["norms"], seconds["pass"]


def memory() -> list[Figure]:
    """Peak resident memory of a measurement against that of an ordinary training step, each in a fresh process."""
    step, probe = peak("step"), peak("measure")
    detail = f"resident peak {probe / 2**20:.0f} MiB / {step / 2**20:.0f} MiB, paper's CNN, batch 128"
    return [Figure("peak memory of measure / training step", probe / step, 1.15, detail)]


def peak(work: str) -> float:
    """Bytes of resident memory, of a fresh process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.measuring", work]
    root = Path(__file__).parents[1]  # where `python -m` finds this package
    return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)


def _in_fresh_process(work: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = paper_cnn(), _images()
    if work == "step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    elif work == "widths":
        measure(model, find_sites(model, x[:1], what="both"), [(x, y)] * 3, cross_entropy, norm="frobenius")
    else:
        measure(model, find_sites(model, x[:1], where="conv"), [(x, y)] * 3, cross_entropy)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def probe() -> list[Figure]:
    """A training step with a probe riding on it against the same step without."""
    torch.manual_seed(0)
    model, (x, y) = paper_cnn(), _images()
    sites = find_sites(model, x[:1], where="conv")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    def probed() -> None:
        with Probe(model, sites):
            step()

    seconds = interleaved({"step": step, "probed": probed}, rounds=9)
    how = "paper's CNN, batch 128, 3 sites, median of 9 interleaved rounds"
    return [Figure("step with Probe / step", seconds["probed"] / seconds["step"], 2.0, how)]


def linear_cost() -> list[Figure]:
    """Time per site for 8 to 64 hidden layers: the largest over the smallest."""
    torch.manual_seed(0)
    x = torch.randn(256, 256)
    y = torch.randint(0, 10, (256,))
    works: dict[str, Callable[[], Any]] = {}
    for hidden in (8, 16, 32, 64):
        model = deep_network(hidden)
        sites = find_sites(model, x[:1])
        works[str(hidden)] = partial(measure, model, sites, [(x, y)], cross_entropy)
    seconds = interleaved(works, rounds=15)
    per_site = {hidden: taken / int(hidden) * 1e3 for hidden, taken in seconds.items()}
    detail = "ms per site: " + ", ".join(f"{hidden} layers {ms:.2f}" for hidden, ms in per_site.items())
    return [Figure("time per site, largest / smallest", max(per_site.values()) / min(per_site.values()), 1.5, detail)]


def confidence(draws: int = 20) -> list[Figure]:
    """Whether a measurement that stops early chooses a place as good as the full pass's, on CIFAR-10 after one epoch."""
    data = training_data()
    names = ("draws that chose a place within 10 % of the best, of 20", "most batches used / all batches")
    if data is None:
        missing = "needs CIFAR-10: set SENSLI_DATA to a folder with cifar-10-batches-bin"
        return [Figure(names[0], None, 19, missing, at_most=False), Figure(names[1], None, 0.1, missing)]
    images, labels = data
    torch.manual_seed(0)
    model = paper_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for index in torch.randperm(len(images)).split(BATCH):
        optimizer.zero_grad()
        cross_entropy(model(images[index]), labels[index]).backward()
        optimizer.step()
    sites = find_sites(model, images[:1], where="conv")

    def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        return [(images[index], labels[index]) for index in order.split(BATCH)]

    full = measure(model, sites, batches(0), cross_entropy)
    values = {str(merit.site): merit.value for merit in full}
    sampled = [
        measure(model, sites, batches(seed), cross_entropy, confidence=0.99, tolerance=0.1, ratio=False)
        for seed in range(1, draws + 1)
    ]
    chosen = [str(merits.best.site) for merits in sampled]
    good = sum(values[site] >= 0.9 * full.best.value for site in chosen)
    same = chosen.count(str(full.best.site))
    used = [merits.batches for merits in sampled]
    lead = full.ranked[0].value / full.ranked[1].value - 1
    detail = f"the best, {full.best.site}, is {lead:.0%} ahead of the next; {same} of {draws} draws chose it"
    return [
        Figure(names[0], good * 20 / draws, 19, detail, at_most=False),
        Figure(names[1], max(used) / full.batches, 0.1, f"mean {statistics.mean(used):.1f} of {full.batches} batches"),
    ]


if __name__ == "__main__":
    _in_fresh_process(sys.argv[1])
