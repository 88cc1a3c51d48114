"""The study of places for `sensli expand`: what each place brings on a new text, and what it costs on the old one.

A small Llama reads bytes. It is trained on the help texts of Python, saved, expanded by two blocks with `expand`, and trained on the
sources of asyncio: only its new blocks, or all weights. All arms get the same FLOPs, so larger models take fewer steps, a frozen base
saves some, and a measurement of places is paid for. Each arm has its own learning rate, chosen on another seed by the loss on the new text.

    nice -n 10 python -m benchmarks.expansion_study                # resumes where it was; half an hour of one core
    python -m benchmarks.expansion_study --show                    # the table of the documentation
    python -m benchmarks.expansion_study --figure docs/assets/expansion.svg
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.language import batches, text_of_python
from sensli.expanding.expanding import expand
from sensli.expanding.record import expansion
from sensli.text.tables import text_table
from sensli_lab.compare.training import flops_of_step

RESULTS = Path(__file__).parents[1] / "docs" / "expansion" / "study.json"
BLOCKS, NEW, WIDTH, INNER, HEADS, LENGTH, SIZE = 6, 2, 64, 172, 4, 64, 8
BEFORE, AFTER = 3000, 300  # steps on the old text; the FLOPs of so many steps of the base on the new one
MEASURED = 8  # batches that a measurement of places sees
SEEDS, TUNING = (0, 1, 2), 100
RATES = {"all weights": (3e-4, 1e-3, 3e-3, 1e-2), "new blocks": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
DRAWN = {"all weights": (3e-4, 1e-3, 3e-3), "new blocks": (1e-3, 3e-3, 1e-2)}  # on every seed, for the figure
PLACES = ("even", "merit", "least", "top")
ARMS = (("not expanded", "all weights"), *((place, way) for way in ("new blocks", "all weights") for place in PLACES))
Run = dict[str, Any]


# ---- Two texts that every Python has, and the windows of them.


def texts() -> dict[str, tuple[Tensor, Tensor]]:
    """Training and validation part of the old and of the new text, as bytes."""
    training, validation = bytearray(), bytearray()
    for path in sorted(Path(asyncio.__file__).parent.glob("*.py")):
        data = path.read_bytes()
        training += data[: len(data) * 9 // 10]
        validation += data[len(data) * 9 // 10 :]
    new = tuple(torch.frombuffer(part, dtype=torch.uint8).long() for part in (training, validation))
    return {"old": text_of_python(), "new": (new[0], new[1])}


def facts() -> dict[str, Any]:
    """What the results depend on: a file is only continued if they are the same."""
    hashes = {
        name: hashlib.sha256(bytes(torch.cat(parts).to(torch.uint8).tolist())).hexdigest()[:16]
        for name, parts in texts().items()
    }
    setting = {
        "blocks": BLOCKS,
        "new": NEW,
        "width": WIDTH,
        "length": LENGTH,
        "size": SIZE,
        "before": BEFORE,
        "after": AFTER,
    }
    return {"python": platform.python_version(), "torch": torch.__version__, "texts": hashes, **setting}


def next_byte(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def losses(model: nn.Module) -> dict[str, float]:
    """The loss on the validation part of both texts: the same windows for all."""
    model.eval()
    found = {}
    with torch.no_grad():
        for name, (_, held_out) in texts().items():
            given = list(batches(held_out, LENGTH, 64, 4, seed=0))
            found[name] = statistics.mean(next_byte(model(x), y).item() for x, y in given)
    return found


# ---- Training, and what it costs.


def train(model: nn.Module, text: Tensor, steps: int, rate: float, seed: int) -> None:
    """AdamW with a tenth of warm-up, then a cosine down to a tenth of the rate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)
    warm = max(1, steps // 10)

    def share(step: int) -> float:
        done = (step - warm) / max(1, steps - warm)
        return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * done)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    model.train()
    for x, y in batches(text, LENGTH, SIZE, steps, seed):
        optimizer.zero_grad()
        next_byte(model(x), y).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()


def step_flops(model: nn.Module) -> int:
    """FLOPs of a forward and a backward pass; a frozen weight has no gradient to compute."""
    x = torch.zeros(SIZE, LENGTH, dtype=torch.long)
    return flops_of_step(model, (x, x), next_byte)


# ---- The arms.


def base_folder(work: Path, seed: int) -> Path:
    """The model that was trained on the old text, saved."""
    folder = work / f"base-{seed}"
    if not folder.is_dir():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=BLOCKS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
            vocab_size=256, max_position_embeddings=LENGTH, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
            use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        train(model, texts()["old"][0], BEFORE, 3e-3, seed=1000 + seed)
        model.save_pretrained(work / f"part-{seed}")
        (work / f"part-{seed}").rename(folder)
    return folder


def expanded_folder(work: Path, seed: int, place: str) -> Path:
    """The base of a seed with two more blocks. A merit is measured on the new text, what matters least on the old one."""
    folder = work / f"{place}-{seed}"
    if not folder.is_dir():
        data = None
        if place in ("merit", "least"):
            text = texts()["new" if place == "merit" else "old"][0]
            data = work / f"{place}-{seed}.pt"
            torch.save(list(batches(text, LENGTH, SIZE, MEASURED, seed=2000 + seed)), data)
        expand(base_folder(work, seed), folder, NEW, place=place, batch=data)
    return folder


def run_arm(work: Path, seed: int, place: str, way: str, rate: float) -> Run:
    """Train one arm on the new text within the FLOPs of all."""
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(base_folder(work, seed))
    unit = step_flops(base)
    budget, places = AFTER * unit, []
    model = base
    if place != "not expanded":
        folder = expanded_folder(work, seed, place)
        model = LlamaForCausalLM.from_pretrained(folder)
        record = expansion(folder)
        places = record.data["places"]
        if way == "new blocks":
            record.freeze(model)
        if place in ("merit", "least"):
            budget -= MEASURED * unit  # a pass forward and one backward of the base for each batch
    each = step_flops(model)
    steps = budget // each
    train(model, texts()["new"][0], steps, rate, seed=3000 + seed)
    return {
        "seed": seed, "place": place, "way": way, "rate": rate, "places": places, "steps": steps, "step_flops": each, "base_flops": unit,
        **losses(model),
    }  # fmt: skip


def study(work: Path, out: Path) -> dict[str, Any]:
    """All runs that are missing, each written as it ends."""
    found: dict[str, Any] = {"facts": facts(), "bases": {}, "runs": []}
    if out.is_file():
        found = json.loads(out.read_text())
        if found["facts"] != facts():
            raise SystemExit(
                f"{out} was made with other texts, versions or settings: {found['facts']}. Give another --out."
            )
    work.mkdir(parents=True, exist_ok=True)
    for seed, place, way, rate in planned(found["runs"]):
        if str(seed) not in found["bases"]:
            from transformers import LlamaForCausalLM

            found["bases"][str(seed)] = losses(LlamaForCausalLM.from_pretrained(base_folder(work, seed)))
        run = run_arm(work, seed, place, way, rate)
        found["runs"].append(run)
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"seed {seed} {place}, {way}, {rate:g}: old {run['old']:.4f} new {run['new']:.4f}",
            file=sys.stderr,
            flush=True,
        )
    return found


def planned(runs: list[Run]) -> Iterator[tuple[int, str, str, float]]:
    """What is still to be done: the rates on their own seed, every arm with its rate on the others, and there some other rates too."""
    done = {(run["seed"], run["place"], run["way"], run["rate"]) for run in runs}
    for place, way in ARMS:
        yield from ((TUNING, place, way, rate) for rate in RATES[way] if (TUNING, place, way, rate) not in done)
    for seed in SEEDS:
        for place, way in ARMS:
            rate = best_rate(runs, place, way)
            if (seed, place, way, rate) not in done:
                yield seed, place, way, rate
    done = {(run["seed"], run["place"], run["way"], run["rate"]) for run in runs}
    for seed in SEEDS:
        for place, way in ARMS:
            yield from ((seed, place, way, rate) for rate in DRAWN[way] if (seed, place, way, rate) not in done)


def best_rate(runs: list[Run], place: str, way: str) -> float:
    """The rate with the smallest loss on the new text, on the seed that is only for this."""
    tuned = [run for run in runs if (run["seed"], run["place"], run["way"]) == (TUNING, place, way)]
    return float(min(tuned, key=lambda run: run["new"])["rate"])


# ---- What came out.


def of_arm(found: dict[str, Any], place: str, way: str) -> list[Run]:
    """The runs of an arm with its rate, by seed."""
    return of_rate(found, place, way, best_rate(found["runs"], place, way))


def of_rate(found: dict[str, Any], place: str, way: str, rate: float) -> list[Run]:
    """The runs of an arm with some rate, by seed."""
    return [
        run
        for run in found["runs"]
        if (run["place"], run["way"], run["rate"]) == (place, way, rate) and run["seed"] in SEEDS
    ]


def table(found: dict[str, Any]) -> str:
    """Losses of every arm in the mean over the seeds, beside the base."""
    base = mean_of(found["bases"][str(seed)] for seed in SEEDS)
    rows = [["base", "nothing", "", "", "", f"{base['new']:.3f}", f"{base['old']:.3f}", ""]]
    for place, way in ARMS:
        runs = of_arm(found, place, way)
        new, old = ([run[name] for run in runs] for name in ("new", "old"))
        forgotten = [run["old"] - found["bases"][str(run["seed"])]["old"] for run in runs]
        chosen = " ".join(dict.fromkeys(",".join(map(str, run["places"])) for run in runs))
        rows.append(
            [
                place, way, chosen, f"{runs[0]['rate']:g}", f"{statistics.mean(run['steps'] for run in runs):.0f}", _spread(new),
                _spread(old), f"{statistics.mean(forgotten):+.3f}",
            ]
        )  # fmt: skip
    header = ["place", "trained", "after block", "rate", "steps", "loss, new text", "loss, old text", "forgotten"]
    return text_table(header, rows, left=(0, 1, 2))


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


def figure(found: dict[str, Any], file: Path) -> None:
    """Both losses of every arm, in the mean over the seeds: a line goes through its rates, and a large mark is at the chosen one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = dict(zip(("not expanded", *PLACES), ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7"), strict=True))
    base = mean_of(found["bases"][str(seed)] for seed in SEEDS)
    drawing, panels = pyplot.subplots(1, 2, figsize=(9, 4.2), sharex=True, sharey=True, layout="constrained")
    for axes, way in zip(panels, ("new blocks", "all weights"), strict=True):
        for place in ("not expanded", *PLACES):
            own = "all weights" if place == "not expanded" else way
            rates = sorted({*DRAWN[own], best_rate(found["runs"], place, own)})
            points = [mean_of(of_rate(found, place, own, rate)) for rate in rates]
            chosen = mean_of(of_arm(found, place, own))
            style = {"color": colors[place], "linestyle": "--" if place == "not expanded" else "-"}
            label = "not expanded, all weights" if place == "not expanded" else place
            axes.plot([p["new"] for p in points], [p["old"] for p in points], marker=".", linewidth=1.2, **style)
            axes.plot(
                chosen["new"], chosen["old"], marker="o", markersize=9, markeredgecolor="white", label=label, **style
            )
        axes.axhline(base["old"], color="#aaaaaa", linewidth=1)
        axes.text(
            0.02,
            base["old"],
            f"before: {base['old']:.2f}, and {base['new']:.2f} on the new text",
            fontsize=8,
            color="#666666",
            transform=axes.get_yaxis_transform(),
            va="bottom",
        )
        axes.set_title(f"trained: {way}", fontsize=11)
        axes.set_xlabel("loss on the new text (left is better)")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss on the old text (lower is better)")
    drawing.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=5
    )
    drawing.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(drawing)


def mean_of(runs: Iterable[Run]) -> dict[str, float]:
    """The mean loss on both texts."""
    runs = list(runs)
    return {name: statistics.mean(run[name] for run in runs) for name in ("old", "new")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, or show what it gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument(
        "--work", type=Path, default=Path("expansion-study"), help="folder for models (default: %(default)s)"
    )
    parser.add_argument("--show", action="store_true", help="only print the table of what is there")
    parser.add_argument("--figure", type=Path, help="only draw what is there into this file")
    args = parser.parse_args(arguments)
    if args.figure is not None:
        figure(json.loads(args.out.read_text()), args.figure)
        return 0
    if not args.show:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        study(args.work, args.out)
    print(table(json.loads(args.out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
