"""The report: the claims one by one with verdicts, then every experiment with its tables and figures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sensli_lab.errors import NoResults
from sensli_lab.paper import claims, figures, planning, tables
from sensli_lab.paper.claims import Claim, Question
from sensli_lab.paper.engine import engine
from sensli_lab.paper.evidence import CNN, UNDECIDED, WORDS, Evidence, Finding, pair, ratios
from sensli_lab.paper.planning import Plan, RunOptions
from sensli_lab.paper.store import Result, Store
from sensli_lab.work.pages import Block, Bullets, Heading, Paragraph, Picture, Table, write_report
from sensli_lab.work.statistics import AWAITING, CONFIRMED, OPPOSITE, Interval, interval, overall_verdict

TITLE = "Replicating the paper's claims"
Stored = list[tuple[Plan, dict[str, Result]]]
DRAWN = ("when-full", "when-mini")  # further experiments whose curves are worth a picture


def write_replication(store: Store, options: RunOptions, folder: Path) -> list[Path]:
    """Write README.md with its figures, report.html and summary.json into `folder`."""
    evidence = Evidence(store, options)
    names = [*planning.paper_names(), *planning.further_names()]
    stored = [(one, results) for name in names for one, results in evidence.each(name)]
    for reason in evidence.left_out:
        print(f"left out: {reason}")
    if not stored:
        raise NoResults(
            f"{store.root}: no results are stored for these options. Compute them with: sensli paper run spirals further"
            f"{options.typed}{store.typed}"
        )
    weighed = [
        Weighed(claim, _weigh(claim, evidence), {one: _weigh(one, evidence) for one in claim.questions})
        for claim in (*claims.CLAIMS, claims.WAKE, claims.RECYCLE)
    ]
    blocks = [
        *_opening(),
        *_summary(weighed),
        *(block for each in weighed for block in _claim(each)),
        *_experiments(stored, folder),
        *_closing(stored),
    ]
    return write_report(folder, TITLE, blocks, _record(weighed, stored))


@dataclass(frozen=True)
class Weighed:
    """A claim with what was found, and its questions with what was found."""

    claim: Claim
    findings: list[Finding]
    questions: dict[Question, list[Finding]]


def _weigh(asked: Claim | Question, evidence: Evidence) -> list[Finding]:
    return [finding for check in asked.checks for finding in check.weigh(evidence)]


def verdict_of(findings: list[Finding]) -> str:
    """One line for a claim: whether it holds, in how many comparisons, and what has not been computed yet."""
    judged = [finding.verdict for finding in findings if finding.verdict not in UNDECIDED]
    if not judged:
        waits = any(finding.verdict == AWAITING for finding in findings)
        return "awaiting results" if waits else "inconclusive (one run, or the network did not learn)"
    text = f"{overall_verdict(judged)} ({judged.count(CONFIRMED)} of {len(judged)} comparisons)"
    return text + ("; awaiting further results" if any(f.verdict == AWAITING for f in findings) else "")


def _opening() -> list[Block]:
    return [
        Heading(TITLE, 1),
        Paragraph(
            "Every comparison is over paired runs: run r of both arms starts from the same seed, on the same split, "
            "and, with mini-batches, sees the samples in the same order. A difference is the first arm minus the "
            "second, with its 95 % confidence interval (Student's t); smaller is better throughout. **Confirmed** "
            "means that the whole interval is on the claimed side of zero, **opposite** that it is on the other "
            "side, **not confirmed** that it contains zero. No correction is made for the number of "
            "comparisons: of twenty without an effect, one will appear to have one."
        ),
        Paragraph(
            "Recipes: `stated` is what the paper's appendix says, `run` what the authors' published scripts do "
            "where that differs, `text` the paper's running text where it differs from the appendix, `many` the "
            "stated recipe of a single-run experiment with 30 runs. All others are ours and named after what they "
            "change. Of the CNN experiments `trains` is the stated recipe with one setting changed, so that the network "
            "leaves chance level; their presets other than `paper` use fewer images and epochs, and every table and figure says so."
        ),
    ]


def _summary(weighed: list[Weighed]) -> list[Block]:
    rows, asked = [], []
    for each in weighed:
        name = each.claim.name
        words = each.claim.words.split(". ")[0].split(" (Not")[0]  # the first sentence; all of them follow
        rows.append((name, words, f"**{verdict_of(each.findings)}**"))
        asked += [f"{name}: {one.text} **{_answer(one, findings)}**" for one, findings in each.questions.items()]
    return [
        Heading("In short"),
        Table(("", "claim", "verdict"), tuple(rows)),
        Paragraph("Where a claim did not hold everywhere, these further questions were asked:"),
        Bullets(tuple(asked)),
    ]


def _claim(each: Weighed) -> list[Block]:
    blocks: list[Block] = [Heading(each.claim.name), Paragraph(each.claim.words)]
    blocks += [Paragraph(f"Verdict: **{verdict_of(each.findings)}**."), _evidence(each.findings)]
    for question, findings in each.questions.items():
        blocks += [Heading(question.text, 3), Paragraph(_answer(question, findings)), _evidence(findings)]
    return blocks


def _answer(question: Question, findings: list[Finding]) -> str:
    """The sentence that goes with what was found."""
    judged = [finding.verdict for finding in findings if finding.verdict not in UNDECIDED]
    if not judged:
        return "Not computed yet."
    if all(verdict == CONFIRMED for verdict in judged):
        return question.yes
    if CONFIRMED in judged:
        return question.partly
    return question.opposite if question.opposite and set(judged) == {OPPOSITE} else question.no


def _evidence(findings: list[Finding]) -> Table:
    return Table(("comparison", "measured", "verdict"), tuple((f.setting, f.measured, f.verdict) for f in findings))


def _experiments(stored: Stored, folder: Path) -> list[Block]:
    blocks: list[Block] = [Heading("The experiments")]
    for one, results in stored:
        name = one.experiment.name
        blocks.append(Heading(f"Experiment {name}, {one.words}: {one.experiment.title}", 3))
        size = "" if one.preset == "paper" else f" --preset {one.preset}"
        command = f"`sensli paper run {name} --as {one.recipe}{size}`"
        blocks.append(Paragraph(" ".join(filter(None, (one.note, one.experiment.note, f"Command: {command}.")))))
        blocks += [tables.counts_table(one), tables.measured_table(one, results)] if name in planning.PAPER else []
        blocks += [Paragraph(line) for line in tables.remarks(one, results)]
        if name not in planning.PAPER:
            blocks.append(tables.measured_table(one, results))
        if name in planning.PAPER or name in DRAWN:
            for path in figures.draw_figures(one, results, folder / "figures", ("png",)):
                blocks.append(Picture(path, _caption(one, path)))
    blocks += [Heading("Where the paper contradicts itself"), Bullets(tables.MISPRINTS)]
    return blocks


def _caption(one: Plan, path: Path) -> str:
    kind = path.stem.rsplit("-", 1)[1]
    words = {
        "curves": "training loss and test error over iterations, mean over the runs with a 95 % band, dotted at insertions",
        "times": "training loss and test error over iterations for each insertion time, mean over the runs",
        "gradients": "norm of each layer's weight gradient over iterations",
        "heatmaps": "gradient of the new weights in the first three iterations after the insertion",
        "cost": "training loss and test accuracy over time and over FLOPs, dots at insertions",
        "norms": "the five squared norms of the new kernel's gradient at every place, a line per run",
    }
    return f"Experiment {one.experiment.name} ({one.words}): {words[kind]}."


def _closing(stored: Stored) -> list[Block]:
    facts = next(iter(stored[0][1].values())).facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    every = [(one.experiment.name in planning.PAPER, result) for one, results in stored for result in results.values()]
    paper, further = (sum(result.seconds for is_paper, result in every if is_paper is own) for own in (True, False))
    commits = sorted({_commit(result.facts["commit"]) for _, result in every})
    named = [str(result.facts["device"]) for _, result in every if "device" in result.facts]
    devices = {re.sub(r"\b1 threads", "1 thread", text) for text in named}  # as older results spell it
    cnns = f" (CNNs: {'; '.join(sorted(devices))})" if devices else ""
    preset = next((f" --preset {one.preset}" for one, _ in stored if one.preset != "paper"), "")
    cnn = f", `sensli paper run cnn{preset}`" if any(one.experiment.name in CNN for one, _ in stored) else ""
    return [
        Heading("How it was measured"),
        Paragraph(
            f"{versions}, {facts['machine']}, one thread{cnns}, seed {stored[0][0].seed}, commits {', '.join(commits)}. "
            f"Training took {paper:.0f} s for the paper's experiments and {further:.0f} s for the further ones. To "
            f"reproduce this page: `sensli paper run spirals further`{cnn}, then `sensli paper report{preset}`, which also "
            "writes it as one HTML file."
        ),
    ]


def _commit(name: str | None) -> str:
    """Short, and marked if files differed from it."""
    head, plus, rest = (name or "unknown").partition("+")
    return head[:10] + plus + rest


def _record(weighed: list[Weighed], stored: Stored) -> dict[str, Any]:
    """The numbers of the page for programs."""
    experiments: dict[str, Any] = {}
    for one, results in stored:
        arms: dict[str, Any] = {}
        for arm, result in results.items():
            own = engine(result.settings).count_arm(result.settings)
            finals = {curve: _numbers(interval(result.final(curve))) for curve in WORDS}
            flops = result.final("flops").mean().item() if "flops" in result.runs else own.flops
            arms[arm] = {**finals, "parameters": own.parameters, "flops": flops, "seconds": result.seconds}
        experiments[one.key] = {"runs": one.runs, "seed": one.seed, "preset": one.preset, "arms": arms}
        both = pair(one)
        if both is not None:
            found = vars(ratios(results[both[0]], results[both[1]]))
            experiments[one.key]["ratios"] = {name: _numbers(value) for name, value in found.items()}
    facts = next(iter(stored[0][1].values())).facts
    judged = {
        each.claim.name: {
            "verdict": verdict_of(each.findings),
            "findings": [vars(finding) for finding in each.findings],
        }
        for each in weighed
    }
    provenance = {key: facts[key] for key in ("commit", "versions", "machine")}
    return {"claims": judged, "experiments": experiments, **provenance}


def _numbers(value: Interval) -> dict[str, float | None]:
    """Mean and half width, shortened; one run has no width."""
    return {"mean": float(f"{value.mean:.6g}"), "half": float(f"{value.half:.6g}") if value.runs > 1 else None}
