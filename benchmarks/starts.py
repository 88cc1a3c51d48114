"""Start against start: a small network grown to eight times its width on Fashion-MNIST, from the folder that SENSLI_DATA names."""

from __future__ import annotations

import gzip
import math
import os
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.figure import Figure
from sensli.merits.measuring import measure
from sensli.moves.finding import find_sites
from sensli.moves.width.starts import STARTS
from sensli.surgery.growth import grow

IMAGES, SEEDS, EPOCHS, EVERY, MORE, WIDEST = 6000, 4, 30, 3, 8, 64


def starts() -> list[Figure]:
    """The training loss of sensitive rows against every other start, the same seeds for all."""
    data = _data()
    how = (
        f"784-8-8-10 grown to 784-{WIDEST}-{WIDEST}-10, {MORE} units a layer every {EVERY} of {EPOCHS} epochs, {IMAGES} images, SGD with "
        f"momentum, geometric mean of {SEEDS} paired seeds"
    )
    found = {} if data is None else {start: [_grown(start, seed, *data) for seed in range(SEEDS)] for start in STARTS}
    return [
        Figure(f"training loss: sensitive / {other}", _ratio(found, other), 1.0, f"{how}; {_losses(found, other)}")
        for other in STARTS
        if other != "sensitive"
    ]


def _ratio(found: dict[str, list[float]], other: str) -> float | None:
    if not found:
        return None
    logs = [math.log(a / b) for a, b in zip(found["sensitive"], found[other], strict=True)]
    return math.exp(statistics.mean(logs))


def _losses(found: dict[str, list[float]], other: str) -> str:
    if not found:
        return "SENSLI_DATA has no Fashion-MNIST"
    mine, its = ([f"{loss:.3f}" for loss in found[name]] for name in ("sensitive", other))
    return f"{', '.join(mine)} against {', '.join(its)}"


def _grown(start: str, seed: int, x: Tensor, y: Tensor) -> float:
    """The training loss in the end."""
    torch.manual_seed(seed)
    first, second, out = nn.Linear(784, 8), nn.Linear(8, 8), nn.Linear(8, 10)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    for epoch in range(EPOCHS):
        if epoch and epoch % EVERY == 0 and first.out_features < WIDEST:
            sites = find_sites(model, x[:2], what="units", units=MORE, init=start)
            batches = list(zip(x.split(1000), y.split(1000), strict=True))
            for merit in measure(model, sites, batches, cross_entropy, norm="frobenius", ratio=False):
                grow(model, merit, optimizer=optimizer)
        for part in torch.randperm(len(x), generator=order).split(100):
            optimizer.zero_grad()
            cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(cross_entropy(model(x), y))


def _data() -> tuple[Tensor, Tensor] | None:
    """The first training images, normalised, and their labels; None where they are not there."""
    root = Path(os.environ.get("SENSLI_DATA") or "/nowhere")
    for folder in (root / "fashion_mnist", root / "FashionMNIST" / "raw"):
        files = [folder / f"train-{name}.gz" for name in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        if all(file.is_file() for file in files):
            images, labels = (gzip.decompress(file.read_bytes()) for file in files)
            pixels = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).reshape(-1, 784)[:IMAGES].float() / 255
            numbers = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8)[:IMAGES].long()
            return (pixels - pixels.mean()) / pixels.std(), numbers
    return None
