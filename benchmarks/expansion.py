"""Expanding a small language model: where to put new blocks. Trained on the spot on the help texts of Python, five seeds.

A model of six blocks is trained; then two blocks are added by merit, evenly, at the top or at the bottom, and training continues with the
same batches for the same number of steps: of all weights, or of the new blocks alone.
`python -m benchmarks.expansion` prints the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.language import LanguageModel, batches, next_byte_loss, text_of_python
from sensli.merits.measuring import measure
from sensli.merits.merits import CHOICES
from sensli.moves.finding import find_sites
from sensli.surgery.growth import insert
from sensli.text.files import check_writable, write_bytes
from sensli.text.tables import text_table

BLOCKS, WIDTH, HEADS, LENGTH, SIZE, NEW = 6, 48, 4, 48, 8, 2
RATE = 1e-3
COMPARED = ("by merit", "even spacing", "top only", "bottom only")


def expansion(seeds: Sequence[int], before: int, after: int) -> list[dict[str, object]]:
    """One record per seed, choice and way of training: places, validation loss at the end, seconds of the measurement."""
    training, validation = text_of_python()
    held_out = list(batches(validation, LENGTH, 64, 8, seed=0))
    records: list[dict[str, object]] = []
    for seed in seeds:
        torch.manual_seed(seed)
        base = LanguageModel(BLOCKS, WIDTH, HEADS, LENGTH)
        _train(base, training, before, seed=1000 + seed)
        start = _loss(base, held_out)
        began = time.perf_counter()
        sites = find_sites(base, held_out[0][0][:1])
        merits = measure(base, sites, batches(training, LENGTH, SIZE, 16, seed=2000 + seed), next_byte_loss)
        seconds = time.perf_counter() - began
        values = [merit.value for merit in merits]
        for frozen in (False, True):
            arms: dict[str, list[int]] = {
                name: sorted(list(merits).index(merit) for merit in choose(merits, NEW))
                for name, choose in CHOICES.items()
                if name in COMPARED
            }
            if not frozen:
                arms["not expanded"] = []
            for name, places in arms.items():
                model = _expanded(base, places, frozen)
                _train(model, training, after, seed=3000 + seed)
                record = {
                    "seed": seed, "choice": name, "frozen": frozen, "places": places, "merits": values, "start": start,
                    "loss": _loss(model, held_out), "measuring": seconds,
                }  # fmt: skip
                records.append(record)
                way = "new blocks only" if frozen else "all weights"
                print(f"seed {seed}, {way}: {name} {places} {record['loss']:.4f}", file=sys.stderr)
    return records


def _expanded(base: nn.Module, places: list[int], frozen: bool) -> nn.Module:
    """A copy with twins at these places: 0 is before the first block, k after block k."""
    model = copy.deepcopy(base)
    sites = find_sites(model, torch.zeros(1, LENGTH, dtype=torch.long))
    growths = [insert(model, sites[place], freeze_rest=frozen) for place in reversed(places)]
    for growth in growths if frozen else ():  # a later growth has frozen the earlier one
        for parameter in model.get_submodule(
            growth.name if growth is growths[-1] else _moved(growth.name)
        ).parameters():
            parameter.requires_grad_(True)
    return model


def _moved(name: str) -> str:
    """The name of a block behind which, or before which, one more was inserted since."""
    container, _, number = name.rpartition(".")
    return f"{container}.{int(number) + 1}"


def _train(model: nn.Module, text: Tensor, steps: int, seed: int) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    model.train()
    for x, y in batches(text, LENGTH, SIZE, steps, seed):
        optimizer.zero_grad()
        next_byte_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def _loss(model: nn.Module, held_out: list[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        return statistics.mean(next_byte_loss(model(x), y).item() for x, y in held_out)


def table(records: list[dict[str, object]]) -> str:
    """Mean and spread over the seeds, and how often a choice was the best of the four."""
    rows = []
    for frozen in (False, True):
        names = [
            name
            for name in (*COMPARED, "not expanded")
            if any(r["choice"] == name and r["frozen"] == frozen for r in records)
        ]
        best = []
        for seed in sorted({int(str(r["seed"])) for r in records}):
            of_seed = [r for r in records if r["seed"] == seed and r["frozen"] == frozen and r["choice"] in COMPARED]
            best.append(min(of_seed, key=lambda r: float(str(r["loss"])))["choice"])
        for name in names:
            losses = [float(str(r["loss"])) for r in records if r["choice"] == name and r["frozen"] == frozen]
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            wins = str(best.count(name)) if name in COMPARED else ""
            what = "new blocks only" if frozen else "all weights"
            rows.append([what, name, f"{statistics.mean(losses):.4f}", f"{spread:.4f}", wins])
    return text_table(["trained", "choice", "validation loss", "std", "best of four"], rows, left=(0, 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--before", type=int, default=400, help="steps before the expansion (default: %(default)s)")
    parser.add_argument("--after", type=int, default=150, help="steps after it (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("expansion.json"))
    args = parser.parse_args(arguments)
    check_writable(args.out)
    records = expansion(args.seeds, args.before, args.after)
    write_bytes(args.out, json.dumps(records, indent=1).encode())
    print(table(records))


if __name__ == "__main__":
    main()
