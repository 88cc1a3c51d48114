"""Checks say what the numbers say: which runs, which moment, which verdict."""

from __future__ import annotations

import pytest
import torch

from sensli_lab.paper import planning
from sensli_lab.paper.claims import CLAIMS, WAKE
from sensli_lab.paper.evidence import Cheaper, Evidence, NewGradient, Smaller, ThresholdCheck
from sensli_lab.paper.planning import Plan, RunOptions, plan
from sensli_lab.paper.report import verdict_of
from sensli_lab.paper.store import Result, Store
from sensli_lab.work.statistics import AWAITING

RUNS = 6


class Made(Evidence):
    """Evidence made by hand: arm -> tensors with the runs in front."""

    def __init__(self, tmp_path, name: str, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        super().__init__(Store(tmp_path), RunOptions())
        self.name, self.tensors = name, tensors

    def each(self, name, recipes=()):
        if name == self.name:
            one: Plan = plan(planning.find_experiment(name), "stated", RunOptions(runs=RUNS))
            yield one, {arm: Result(arm, one.arms[arm], t, {}, 1.0, {}) for arm, t in self.tensors.items()}


def losses(start: float, end: float, points: int = 1851) -> dict[str, torch.Tensor]:
    jitter = 0.01 * torch.arange(RUNS).unsqueeze(1)
    curve = torch.linspace(start, end, points).repeat(RUNS, 1) + jitter
    return {"train_loss": curve, "test_error": curve, "dead": torch.tensor([0, 0, 0, 1, 2, 1]).unsqueeze(1)}


def test_the_end_of_training_decides_unless_told_otherwise(tmp_path):
    evidence = Made(tmp_path, "2", {"FNN LI": losses(1.0, 0.0), "FNN2": losses(0.0, 1.0)})
    (end,) = Smaller("2", "FNN LI", "FNN2", ("train_loss",)).weigh(evidence)
    assert end.verdict == "confirmed" and "smaller in 6 of 6 runs" in end.measured
    (early,) = Smaller("2", "FNN LI", "FNN2", ("train_loss",), epoch=100).weigh(evidence)
    assert early.verdict == "opposite" and "after 100 epochs" in early.setting
    (beyond,) = Smaller("2", "FNN LI", "FNN2", ("train_loss",), epoch=2000).weigh(evidence)
    assert beyond.verdict == AWAITING, "of 1,850 epochs"


def test_equal_cost_reads_the_dearer_arm_earlier(tmp_path):
    evidence = Made(tmp_path, "2", {"FNN LI": losses(1.0, 0.5), "FNN2": losses(1.0, 0.0)})
    (finding,) = Smaller("2", "FNN LI", "FNN2", ("train_loss",), equal_cost=True).weigh(evidence)
    assert "epoch 1601 of FNN2" in finding.setting  # 432,270 / 499,500 of 1850
    assert "0.525 against 0.160" in finding.measured


@pytest.mark.parametrize(("dead", "runs"), [(True, 3), (False, 3), (None, 6)])
def test_runs_with_and_without_dead_units(tmp_path, dead, runs):
    evidence = Made(tmp_path, "2", {"FNN LI": losses(1.0, 0.0), "FNN2": losses(1.0, 0.5)})
    (finding,) = Smaller("2", "FNN LI", "FNN2", ("train_loss",), dead=dead).weigh(evidence)
    assert f"of {runs} runs" in finding.measured


def test_a_difference_that_should_be_hidden(tmp_path):
    clear = Made(tmp_path, "8", {"SensLI": losses(1.0, 0.0, 551), "LIother": losses(1.0, 0.5, 551)})
    same = Made(tmp_path, "8", {"SensLI": losses(1.0, 0.5, 551), "LIother": losses(1.0, 0.5, 551)})
    check = Smaller("8", "SensLI", "LIother", ("train_loss",), hidden=True)
    assert check.weigh(clear)[0].verdict == "not confirmed"
    assert check.weigh(same)[0].verdict == "confirmed"


def test_cheaper_compares_counts(tmp_path):
    (finding,) = Cheaper("2", "FNN LI", "FNN2").weigh(Made(tmp_path, "2", {"FNN LI": {}, "FNN2": {}}))
    assert finding.measured == "432,270 against 499,500 FLOPs per sample, ratio 0.865"


@pytest.mark.parametrize(("size", "word"), [(1.0, "confirmed"), (1e-3, "opposite"), (1e3, "opposite")])
def test_a_gradient_that_vanishes_or_explodes_is_seen(tmp_path, size, word):
    norms = torch.ones(RUNS, 1850, 3)
    norms[:, 450:, 1] = size
    tensors = {"gradient_norm": norms, "place": torch.zeros(RUNS, 1, dtype=torch.long)}
    (finding,) = NewGradient("4", "FNN LI").weigh(Made(tmp_path, "4", {"FNN LI": tensors}))
    assert finding.verdict == word


def test_a_threshold_that_takes_all_is_no_threshold(tmp_path):
    for ratios, word in (([2.0] * 6, "not confirmed"), ([2.0, 0.5] * 3, "confirmed")):
        tensors = {"ratios": torch.tensor(ratios).view(RUNS, 1, 1)}
        (finding,) = ThresholdCheck("2", "FNN LI").weigh(Made(tmp_path, "2", {"FNN LI": tensors}))
        assert finding.verdict == word


def test_without_results_every_claim_awaits_them(tmp_path):
    nothing = Evidence(Store(tmp_path), RunOptions())
    for claim in (*CLAIMS, WAKE):
        findings = [finding for check in claim.checks for finding in check.weigh(nothing)]
        assert findings and all(finding.verdict == AWAITING for finding in findings)
        assert verdict_of(findings) == "awaiting results", "of which experiments, its lines say"
        for question in claim.questions:
            assert all(f.verdict == AWAITING for check in question.checks for f in check.weigh(nothing))
