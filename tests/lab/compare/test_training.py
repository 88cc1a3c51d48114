"""Runs: what is equal for all methods, what they pay for, and that an interruption changes nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sensli import find_sites
from sensli.growing.options import used_options
from sensli.growing.strategy import STRATEGIES, strategy_class
from sensli_lab.compare import training, work
from sensli_lab.compare.jobs import Job, Run, RunStore
from sensli_lab.compare.methods import choose_methods, methods
from sensli_lab.compare.tasks.registry import TASKS
from sensli_lab.compare.tasks.spirals import SPIRALS
from sensli_lab.compare.tasks.text import TEXT, Transformer
from sensli_lab.compare.training import JobTraining, flops_of_step, train
from sensli_lab.work.workers import Tell, processes

TINY = replace(SPIRALS, steps=12, looks=(0.2, 0.5), points=6, batch=120, looked_at=240)
DATA = TINY.load(None, 0)


def job(method: str, seed: int = 0, task: Any = TINY) -> Job:
    return Job(task, methods(task)[method], seed)


def computed(one: Job, store: RunStore, tell: Tell = lambda share: None) -> str:
    """One run, from where it was interrupted; why it was left out, or nothing."""
    runs = work.Runs([one], store)
    runs.done(one, work.compute_run(runs.call(one).given, tell, partial(runs.save, one)), "")
    return "".join(runs.left_out)


def plain(run: Run) -> dict[str, Any]:
    """Without what a machine decides."""
    data = run.to_dict()
    timeless = [{**look, "seconds": 0} for look in data["costs"]]
    return {**data, "seconds": 0, "step_seconds": 0, "costs": timeless}


def test_a_fixed_network_pays_its_steps_and_nothing_else() -> None:
    run = train(job("small"), DATA)
    batch = DATA.train.x[:120], DATA.train.y[:120]
    step, large = (flops_of_step(TINY.network(size, 0), batch, TINY.loss) for size in ("small", "large"))
    assert run.budget == 12 * large and run.decisions == 0 and run.looks == 0
    assert run.flops[-1] == run.steps * step and 0 <= run.flops[-1] - run.budget < step
    assert len(run.flops) == TINY.points + 1 and run.flops[0] == 0


def test_a_growing_run_pays_for_its_looks_and_stays_below_the_large_network() -> None:
    run = train(job("both"), DATA)
    assert run.looks == 2 and len(run.grown) == 2 and not run.uncounted
    looked = 2 * 240 * TINY.forward_flops["small"]  # at least: forward passes of what the first look was given
    assert looked < run.decisions < run.budget
    assert TINY.forward_flops["small"] < run.forward <= TINY.forward_flops["large"]
    assert run.flops[-1] >= run.budget and run.steps < train(job("small"), DATA).steps


def test_each_look_is_counted_and_timed_beside_a_plain_pass_of_its_samples() -> None:
    run = train(job("both"), DATA)
    small = flops_of_step(TINY.network("small", 0), (DATA.train.x[:240], DATA.train.y[:240]), TINY.loss)
    assert [look.samples for look in run.costs] == [240, 240]
    assert run.costs[0].sweep == small < run.costs[1].sweep, "of the network as it was at the look"
    assert sum(look.flops for look in run.costs) == run.decisions and all(look.flops > small for look in run.costs)
    timed = sum(look.seconds for look in run.costs)
    assert run.step_seconds > 0 and all(look.seconds > 0 for look in run.costs) and timed < run.seconds
    assert Run.from_dict(run.to_dict()).costs == run.costs


def test_a_record_without_costs_is_still_read() -> None:
    old = {name: value for name, value in Run().to_dict().items() if name not in ("costs", "step_seconds")}
    assert Run.from_dict(old) == Run()


def test_the_flops_of_a_run_are_those_of_its_steps_and_its_looks() -> None:
    one, batch, steps = JobTraining(job("both"), DATA), (DATA.train.x[:120], DATA.train.y[:120]), 0
    while not one.finished:
        one.advance()
        steps += flops_of_step(one.model, batch, TINY.loss)  # of the network that has just taken a step
    assert one.run.decisions > 0 and one.spent == steps + one.run.decisions


@pytest.mark.slow
def test_a_trial_costs_its_losers_and_its_winner_has_trained() -> None:
    task = replace(TINY, steps=80, looks=(0.25,))
    one = JobTraining(job("tried", task=task), DATA)
    steps = 0
    while not one.finished:
        one.advance()
        steps += flops_of_step(one.model, one.batches.at(0), TINY.loss)
    assert one.grower is not None
    tried = one.grower.history.record.decisions[0].tried
    assert tried is not None and len(tried.arms) == 3, "no growth, the best layer, the best units"
    kinds = {arm.name.startswith("+") for arm in tried.arms[1:]}
    assert kinds == {True, False}
    winner = tried.arms[tried.winner].steps * flops_of_step(one.model, one.batches.at(0), TINY.loss)
    assert tried.arms[0].flops == pytest.approx(0.75 * one.run.budget / 32, rel=0.2), "a 32nd of what is left"
    assert one.spent == steps + one.run.decisions + winner and one.run.decisions >= 0.8 * tried.lost
    assert one.batches.taken == tried.arms[0].steps, "nobody trains on the batches of a trial again"


def test_a_method_that_waits_looks_where_training_has_slowed_down() -> None:
    one = JobTraining(job("when"), DATA)
    assert one.looks[-1] <= max(TINY.looks) and len(one.looks) > len(TINY.looks)
    values = iter([5.0, 3.0, 2.0, 1.9, 1.89, 1.88, 1.87, 1.86, *(1.8 - 0.3 * call for call in range(40))])
    one._metric = lambda: next(values)  # type: ignore[method-assign]
    while not one.finished:
        one.advance()
    assert one.grower is not None
    calls = [growth.details["epoch"] for growth in one.grower.history]
    assert len(calls) == 1 and 6 <= calls[0] <= 9, "after the fast part, and not again while the loss falls"
    assert len(one.run.costs) == 1 and one.run.looks == len(one.looks)


def test_all_methods_have_one_start_and_one_order() -> None:
    first = [train(job(name), DATA) for name in ("small", "layers", "units")]
    assert len({run.validation[0] for run in first}) == 1
    assert len({run.validation[1] for run in first}) == 1, "before the first look they are the same run"
    assert train(job("small", seed=1), DATA).validation[0] != first[0].validation[0]


def test_the_rate_follows_the_share_of_the_flops() -> None:
    task = replace(TINY, warmup=0.1)
    assert [task.rate(share) for share in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0, 1.1)] == [0.02, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    one = JobTraining(job("small"), DATA)
    while one.share < 0.75:
        one.advance()
    assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 2 * (1 - one.share))


@pytest.mark.parametrize("name", ["both", "random-place", "tried", "when", "pays"])
@pytest.mark.slow
def test_a_run_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    state, resumed = tmp_path / "state.ckpt", JobTraining(job(name), DATA)
    for stop in (0.35, 0.8):  # between and after the looks
        while resumed.share < stop:
            resumed.advance()
        resumed.save(state)
        resumed = JobTraining(job(name), DATA)
        resumed.restore(state)
    while not resumed.finished:
        resumed.advance()
    assert plain(resumed.ended()) == plain(train(job(name), DATA))


def test_an_interrupted_run_continues_from_what_it_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensli_lab.compare.jobs.provenance", dict)
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)
    store, one = RunStore(tmp_path), job("large")

    def interrupt(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        computed(one, store, interrupt)
    assert store.state(one).exists() and store.load(one) is None
    shares: list[float] = []
    assert computed(one, store, shares.append) == ""
    assert shares[0] > 0.5 and not store.state(one).exists()
    assert plain(store.load(one)) == plain(train(one, DATA))  # type: ignore[arg-type]


def test_only_what_is_missing_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sensli_lab.compare.jobs.provenance", dict)
    store, jobs = RunStore(tmp_path), [job(name, seed) for seed in (0, 1) for name in ("small", "large")]
    assert work.compute_runs(jobs[:3], store) == []
    assert capsys.readouterr().out.count("done") == 3 and store.missing(jobs) == jobs[3:]
    store.path(jobs[0]).write_text("{}")  # damaged: computed again
    work.compute_runs(jobs, store)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "spirals, large, seed 1: done",
        "spirals, small, seed 0: done",
    ]
    assert plain(store.load(jobs[0])) == plain(train(jobs[0], DATA))  # type: ignore[arg-type]
    other = job("small", task=replace(TINY, steps=13))
    assert store.load(other) is None, "another configuration has another place"


def test_a_state_that_cannot_be_used_is_computed_from_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sensli_lab.compare.jobs.provenance", dict)
    store, one = RunStore(tmp_path), job("small")
    store.state(one).parent.mkdir(parents=True)
    store.state(one).write_bytes(b"no checkpoint")
    assert computed(one, store) == ""
    assert plain(store.load(one)) == plain(train(one, DATA)) and not store.state(one).exists()  # type: ignore[arg-type]


def test_what_a_method_refuses_is_said_and_the_others_go_on(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sensli_lab.compare.jobs.provenance", dict)
    known = methods(TINY)
    nowhere = replace(known["layers"], name="nowhere", options={"grow": "layers", "where": "conv"})
    jobs = [Job(TINY, nowhere, 0), Job(TINY, known["small"], 0)]
    refused = work.compute_runs(jobs, RunStore(tmp_path))
    assert len(refused) == 1 and "there is nowhere to grow for where='conv'" in refused[0]
    out = capsys.readouterr().out
    assert "spirals, nowhere, seed 0: left out: there is nowhere" in out and "spirals, small, seed 0: done" in out


@pytest.mark.slow
@pytest.mark.process
def test_another_process_gives_the_same_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sensli_lab.compare.jobs.provenance", dict)
    one = Job(SPIRALS, methods(SPIRALS)["units"], 0, 0.01)
    assert work.compute_runs([one], RunStore(tmp_path), place=processes(2)) == []
    assert plain(RunStore(tmp_path).load(one)) == plain(train(one, DATA))  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.process
def test_no_worker_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sensli",
        "compare",
        "run",
        "spirals",
        "--methods",
        "small",
        "--seeds",
        "900",
        "--jobs",
        "2",
    ]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as first:
        assert first.stdout is not None and b"seed 0: done" in first.stdout.readline() + first.stdout.readline()
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        first.kill()
    assert len(workers) == 2
    for _ in range(600):  # a minute at most, and mostly none
        if not any(Path(f"/proc/{pid}").exists() for pid in workers):
            return
        time.sleep(0.1)
    pytest.fail("the workers still run")


# --- methods ---


def test_every_registered_strategy_is_a_method() -> None:
    known = methods(TINY)
    named = {method.options.get("strategy", "sensli") for method in known.values() if method.grows}
    assert named == set(STRATEGIES) - {"random-place"}  # which is the control of that name
    assert [one.name for one in choose_methods(TINY, ["units", "small"])] == ["small", "units"]
    assert {one.kind for one in choose_methods(TINY, ["fixed", "control"])} == {"fixed", "control"}
    assert choose_methods(TINY, ["all"]) == list(known.values())


def test_every_method_makes_its_grower() -> None:
    """None gives its strategy an option that is refused, and what is common to all reaches those that use it."""
    data = TINY.load(None, 0)
    for method in methods(TINY).values():
        grower = JobTraining(Job(TINY, method, 0), data).grower
        if grower is not None and not method.preset:  # which gets nothing else
            known = used_options(grower.options.strategy, grower.options.what)
            own = {"tau": 0.0, "floor": 0.0, "units": TINY.units, **method.options}
            assert {name: getattr(grower.options, name) for name in own if name in known} == {
                name: value for name, value in own.items() if name in known
            }


def test_results_of_before_stay_valid() -> None:
    """The digests that name the folders of published results."""
    expected = {
        "units": "66e0ff321340", "net2net": "e145b5bde0d8", "random-start": "5d6ccf26e81d",
        "llama-pro-own": "e9930bd7cc5c", "autogrow": "eb867cbcf55f",
    }  # fmt: skip
    known = methods(SPIRALS)
    assert {name: Job(SPIRALS, known[name], 0).digest for name in expected} == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_that_reads_the_metric_says_so(name: str) -> None:
    made = strategy_class(name)
    assert made.needs_metric == ("context.metric" in inspect.getsource(made.choose))


def test_a_random_start_has_the_place_of_the_best_rows_and_other_rows() -> None:
    known = methods(TINY)
    random = replace(known["random-start"], options={**known["random-start"].options, "grow": "units"})
    best, drawn = (JobTraining(Job(TINY, method, 0), DATA) for method in (known["units"], random))
    for one in (best, drawn):
        while one.run.looks == 0:
            one.advance()
    assert best.run.grown == drawn.run.grown, "one place, found at one cost"
    mine, theirs = (dict(one.model.named_parameters()) for one in (best, drawn))
    assert {name: value.shape for name, value in mine.items()} == {name: value.shape for name, value in theirs.items()}
    assert any(not torch.equal(mine[name], theirs[name]) for name in mine)


# --- tasks ---


@pytest.mark.parametrize(
    "name", [name for name, task in TASKS.items() if name not in ("fashion", "vgg", "resnet", "cifar", "code")]
)
def test_the_parts_of_a_task_do_not_overlap_and_fit_its_networks(name: str) -> None:
    task = TASKS[name]
    data = task.load(None, 3)
    parts = [{tuple(row) for row in part.x.flatten(1).tolist()} for part in (data.train, data.validation, data.test)]
    if name != "text":  # windows of a text may repeat
        assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    for size in task.sizes:
        loss = task.loss(task.network(size, 0)(data.train.x[:3]), data.train.y[:3])
        assert torch.isfinite(loss)
    assert torch.equal(task.load(None, 3).train.x, data.train.x)


@pytest.mark.parametrize("name", list(TASKS))
def test_the_small_network_is_the_smallest_and_no_other_is_larger_than_the_large_one(name: str) -> None:
    task = TASKS[name]
    sizes = {size: task.forward_flops[size] for size in task.sizes}
    assert next(iter(sizes)) == "small" and list(sizes)[-1] == "large"
    assert min(sizes.values()) == sizes["small"] and max(sizes.values()) <= 1.01 * sizes["large"]
    assert list(task.looks) == sorted(task.looks) and task.looks[0] > 0 and task.looks[-1] <= 0.5


def test_the_transformer_grows_in_depth_and_in_all_its_widths() -> None:
    sites = find_sites(Transformer(1), TEXT.sample(), what="both", units=TEXT.units)
    grown = {"blocks.0": "block", "blocks.0.attention.all": "units", "blocks.0.up": "units"}
    assert {site.path: site.kind for site in sites} == grown
    assert TEXT.forward_flops["wide"] == TEXT.forward_flops["middle"], (
        "twice the widths cost as much as twice the blocks"
    )


def test_the_weights_of_the_transformer_begin_small_and_the_digest_knows_it() -> None:
    weights = [value for name, value in Transformer(1).named_parameters() if value.ndim == 2 and "norm" not in name]
    assert all(float(value.detach().std()) == pytest.approx(0.02, rel=0.1) for value in weights)
    assert Job(TEXT, methods(TEXT)["small"], 0).facts()["optimizer"].endswith("weights from N(0, 0.02)")
