"""The tables of an experiment: exact counts beside the paper's, and what was measured."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sensli.text.tables import text_table
from sensli_lab.paper import statistics
from sensli_lab.paper.engine import engine
from sensli_lab.paper.evidence import at_chance
from sensli_lab.paper.planning import Plan, RunOptions
from sensli_lab.paper.planning import plan as make_plan
from sensli_lab.paper.statistics import interval, number
from sensli_lab.paper.store import Result

# ---- A page as a list of blocks, written as Markdown (pictures beside it) or as one self-contained HTML file.


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; margin-top: 2.2em; }
h1 { margin-top: 0; }
table { border-collapse: collapse; margin: 1em 0; font-size: 0.88em; display: block; overflow-x: auto; }
th, td { text-align: left; padding: 0.3em 0.7em; border-bottom: 1px solid #8884; vertical-align: top; }
img { max-width: 100%; background: #fff; border-radius: 4px; }
figure { margin: 1.4em 0; }
figcaption { font-size: 0.88em; opacity: 0.8; }
code { font-size: 0.92em; background: #8882; padding: 0.1em 0.3em; border-radius: 3px; }
""".strip()


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Plain text with `code` and **bold** as the only marks."""

    text: str


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    path: Path
    caption: str


Block = Heading | Paragraph | Bullets | Table | Picture


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    """Markdown to be kept in `folder`, pictures linked by relative path."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Bullets):
        return "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Table):
        return "\n".join((_row(block.header), _row(["---"] * len(block.header)), *map(_row, block.rows)))
    return f"![{block.caption}]({block.path.relative_to(folder).as_posix()})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(blocks: Sequence[Block], title: str) -> str:
    """One HTML file with everything in it: no script, no request to anywhere."""
    body = "\n".join(_html(block) for block in blocks)
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Table):
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.header)
        rows = ("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in block.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    data = base64.b64encode(block.path.read_bytes()).decode()
    caption = _inline(block.caption)
    alt = html.escape(block.caption)
    return f'<figure><img src="data:image/png;base64,{data}" alt="{alt}"><figcaption>{caption}</figcaption></figure>'


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


# What the paper prints: (experiment, arm) -> FLOPs per training sample in total, of which measuring.
PRINTED: dict[tuple[str, str], tuple[int, int]] = {
    ("2", "FNN1"): (222_000, 0),
    ("2", "FNN2"): (499_500, 0),
    ("2", "FNN LI"): (432_270, 270),
    ("3", "ResNet1"): (333_000, 0),
    ("3", "ResNet2"): (532_000, 0),
    ("3", "ResNet LI"): (484_488, 288),
    ("4", "FNN1"): (222_000, 0),
    ("4", "FNN2"): (499_500, 0),
    ("4", "FNN LI"): (432_270, 270),
    ("13", "ResNet1"): (90_000, 0),
    ("13", "ResNet2"): (252_000, 0),
    ("13", "ResNet LI"): (188_712, 1_512),
    ("5", "CNN1"): (25_196_544_000, 0),
    ("5", "CNN2"): (47_845_785_600, 0),
    ("5", "CNN LI"): (37_452_607_488, 931_442_688),
    ("1", "CNN"): (3 * 46_996_684_800, 0),
    ("1", "CNN LI"): (3 * 33_063_616_512, 3 * 914_460_672),
}

# The looks that inserted a layer in the paper's single run of an experiment with a threshold.
ACCEPTED: dict[str, tuple[int, ...]] = {"1": (50, 150)}

MISPRINTS = (
    "Experiment 3, ResNet2: printed 532,000 FLOPs; 3 x 96 x 1850 = 532,800.",
    "Experiments 3 and 13, measuring: the tables count one new place per residual block (288 and 1,512); a layer can "
    "also go before the first block, which the experiments do use, and then it is 396 and 1,836.",
    "Experiment 13: learning rate 0.1 in the appendix, 0.01 in the text; both are recipes here.",
    "Experiments 3 and 4: the appendix and the caption disagree about the number of runs, 30 or 40.",
    "Experiment 1, CNN LI: printed 3 x 33,063,616,512 FLOPs of which 3 x 914,460,672 for measuring. With the insertions of the "
    "paper's table (after 50 and 150 epochs) the rule of the other tables gives 3 x 33,130,622,976 of which 3 x 1,233,432,576: the "
    "printed total mixes conventions. The ratio to the extended network is 0.70 by both.",
    "CNN tables: the baseline counts one per element for bias, ReLU and pooling beside two per multiply-add (83,988,480 "
    "for a forward pass); an inserted convolution counts its multiply-adds alone (75,497,472 at every place).",
    "Experiment 12, baseline: printed 2,674,368 parameters, which leaves out the 448 biases of the convolutions.",
)


def counts(plan: Plan) -> Table:
    """Parameters and FLOPs of every arm; both counts of places where they differ."""
    header = ("arm", "parameters", "FLOPs per sample", "of which measuring", "by the paper's count", "printed", "")
    rows = []
    unscaled = make_plan(plan.experiment, plan.recipe, RunOptions())  # what is printed holds for the full length only
    for arm, settings in plan.arms.items():
        full = unscaled.arms[arm] == settings
        own = engine(settings).counts(settings, ACCEPTED.get(plan.experiment.name) if full else None)
        paper = ""
        total, measuring = own.flops, own.measuring
        if own.flops_printed is not None and own.measuring_printed is not None:
            total, measuring = own.flops_printed, own.measuring_printed
            paper = f"{total:,} ({measuring:,})"
        printed = PRINTED.get((plan.experiment.name, arm)) if full else None
        remark = "" if printed is None else "equal" if printed == (total, measuring) else "misprint"
        if settings.tau > 0 and not full:
            remark = "if every look inserts"
        rows.append(
            (
                arm,
                " → ".join(f"{size:,}" for size in own.parameters),
                f"{own.flops:,}",
                f"{own.measuring:,}" if own.measuring else "",
                paper,
                "" if printed is None else f"{printed[0]:,}" + (f" ({printed[1]:,})" if printed[1] else ""),
                remark,
            )
        )
    return _without_empty_columns(header, rows)


def measured(plan: Plan, results: Mapping[str, Result]) -> Table:
    """Final losses and errors, mean over the runs with a 95 % interval."""
    header = (
        "arm",
        "training loss",
        "test loss",
        "test error",
        "places chosen",
        "dead units",
        "FLOPs per sample",
        "seconds",
        "",
    )
    rows = []
    for arm, result in results.items():
        finals = [str(interval(result.final(curve))) for curve in ("train_loss", "test_loss", "test_error")]
        flops = f"{result.final('flops').mean().item():.3e}" if "flops" in result.runs else ""
        # Hours on a machine with other work compare nothing: times of CNNs are shown where the experiment is about time.
        timed = "flops" not in result.runs or "cost" in plan.experiment.figures
        seconds = f"{result.seconds:.1f}" if timed else ""
        remark = "chance level: did not learn" if at_chance(result) else ""
        rows.append((arm, *finals, _places(result), _dead(result), flops, seconds, remark))
    return _without_empty_columns(header, rows)


def remarks(plan: Plan, results: Mapping[str, Result]) -> list[str]:
    """Sentences on what a table does not say: the ratios of the paper's experiment 1, and which networks did not learn."""
    lines = []
    both = statistics.pair(plan)
    if both is not None:
        lines.append(f"{both[0]} over {both[1]}: {statistics.ratios(results[both[0]], results[both[1]])}.")
    idle = [arm for arm, result in results.items() if at_chance(result)]
    if idle:
        lines.append(
            f"At chance level to the end, as this recipe leaves them: {', '.join(idle)}. Comparing networks that did not "
            "learn says nothing."
        )
    return lines


def _places(result: Result) -> str:
    """How often each place was chosen, insertion by insertion: `0: 12, 1: 18`."""
    if "place" not in result.runs:
        return ""
    texts = []
    for k, chosen in enumerate(result.runs["place"].T):
        available = int((~result.runs["merits"][:, k].isnan()).sum(1).max())
        rejected = int((chosen < 0).sum())
        if available > 1 or rejected:
            names = [f"{p + 1}: {int((chosen == p).sum())}" for p in range(available)]
            texts.append(", ".join(names + ([f"none: {rejected}"] if rejected else [])))
    return "; ".join(texts)


def _dead(result: Result) -> str:
    if "dead" not in result.runs or result.settings.network.kind != "fnn":
        return ""
    return number(result.runs["dead"].double().mean().item())


def _without_empty_columns(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    keep = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return Table(tuple(header[i] for i in keep), tuple(tuple(row[i] for i in keep) for row in rows))


def plain(table: Table) -> str:
    """The table for a terminal, columns aligned."""
    return text_table(table.header, table.rows, left=range(len(table.header)))
