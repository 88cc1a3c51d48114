"""The CNN engine: a plain loop in disguise, exact counts, the threshold, and a stop at any moment."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import pictures
import warm
from experiments import make_plan
from pictures import TINY, raw, tiny
from sensli import count_flops, find_sites, measure
from sensli_lab.errors import BadExperiment
from sensli_lab.paper import cnn, datasets, image_sets, runner
from sensli_lab.paper import machine as machine_module
from sensli_lab.paper.engine import TrainingJob, engine
from sensli_lab.paper.image_sets import FACTS
from sensli_lab.paper.machine import Machine, generator, run_seed
from sensli_lab.paper.planning import RunOptions, parse, plan
from sensli_lab.paper.settings import Network
from sensli_lab.paper.store import Store
from sensli_lab.work import store
from sensli_lab.work.workers import processes

CIFAR = FACTS["cifar10"]
CNN = Network("cnn", (500, 500), channels=(64, 128, 256))


@pytest.fixture(autouse=True)
def _made_up_images(monkeypatch):
    monkeypatch.setitem(image_sets._LOADERS, "cifar10", lambda folder: raw())
    cnn.cached_images.cache_clear()
    yield
    cnn.cached_images.cache_clear()


def arm(name="LI", **settings):
    return plan(parse(tiny(**settings), "tiny.json"), "stated", RunOptions()).arms[name]


def train(settings, **job):
    return {name: values[0] for name, values in cnn.train_runs(TrainingJob(settings, 3, (1,), **job)).runs.items()}


def same(one, other):
    timed = {"seconds", "look_seconds"}
    return one.keys() == other.keys() and all(
        torch.equal(one[name].nan_to_num(), other[name].nan_to_num()) for name in one if name not in timed
    )


def test_a_gpu_trains_without_tf32(monkeypatch):
    """Rounded so, a convolution is no exact identity: other layers than the paper's would be offered."""
    parts = (torch.backends.cudnn, torch.backends.cuda.matmul)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    seen = []

    def images(*_):
        seen.extend(each.allow_tf32 for each in parts)
        raise ZeroDivisionError

    monkeypatch.setattr(cnn, "cached_images", images)
    images.cache_clear = lambda: None
    before = [each.allow_tf32 for each in parts]
    with pytest.raises(ZeroDivisionError):
        train(arm())
    assert seen == [False, False] and [each.allow_tf32 for each in parts] == before == [True, False]


@pytest.mark.parametrize(
    ("network", "places", "sizes"),
    [
        (CNN, [0, 0], [2_674_816, 2_711_744, 2_748_672]),
        (Network("cnn", (500, 500), channels=(200, 200, 200)), [1], [2_582_000, 2_942_200]),
    ],
)
def test_parameters_of_the_paper(network, places, sizes):
    for grown, size in enumerate(sizes):
        stages = cnn.stages_after(network, places[:grown])
        assert cnn.count_cnn_parameters(network, CIFAR, stages) == size
        assert sum(p.numel() for p in cnn.build_cnn(network, CIFAR, 0, stages).parameters()) == size


def test_flops_of_the_paper():
    stages = [1, 1, 1]
    by_rule = int(count_flops(cnn.build_cnn(CNN, CIFAR, 0), torch.zeros(1, 3, 32, 32)))
    elementwise = 3 * 114_688 + 2 * 1_000  # bias, ReLU and pooling input; bias and ReLU of the hidden layers
    assert by_rule == 83_642_416 and by_rule + elementwise == 83_988_480
    assert cnn.cnn_flops(CNN, CIFAR, stages) == 83_988_480
    assert cnn.layer_flops(CNN, CIFAR) == [75_497_472] * 3
    five = plan(engine_plan("5"), "stated", RunOptions()).arms
    totals = {name: cnn.count_arm(settings) for name, settings in five.items()}
    assert totals["CNN1"].flops == 25_196_544_000 and totals["CNN2"].flops == 47_845_785_600
    assert (totals["CNN LI"].flops, totals["CNN LI"].measuring) == (37_452_607_488, 931_442_688)
    one = plan(engine_plan("1"), "stated", RunOptions()).arms
    grown, whole = (cnn.count_arm(one[name], (50, 150)) for name in ("CNN LI", "CNN"))
    assert whole.flops == 3 * 46_996_684_800 and grown.flops == 3 * 33_130_622_976
    assert grown.parameters == (2_674_816, 2_711_744, 2_748_672) and whole.parameters == (2_748_672,)
    assert grown.flops / whole.flops == pytest.approx(0.705, abs=5e-4)


def engine_plan(name):
    from sensli_lab.paper import planning

    return planning.find_experiment(name)


def test_places_name_stages():
    assert cnn.stages_after(CNN, [0, 1, 3]) == [3, 2, 1]
    assert cnn.stages_after(CNN, [-1, 2, -1]) == [1, 1, 2]
    with pytest.raises(ValueError, match="place 3 does not exist"):
        cnn.stages_after(CNN, [3])


def test_a_baseline_is_trained_as_a_plain_loop_would():
    optimizer = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.005}
    settings = arm("small", optimizer=optimizer, schedule=None, dtype="float64")
    found = train(settings)
    images = datasets.split_images(raw(), CIFAR, settings.data, torch.device("cpu"), torch.float64)
    model = cnn.build_cnn(settings.network, CIFAR, run_seed(3, 1, "weights")).double()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.005)
    for epoch in range(settings.epochs):
        source, losses = generator(3, 1, f"augment {epoch}"), []
        for index in torch.randperm(96, generator=generator(3, 1, f"order {epoch}")).split(32):
            x, y = images.train.augmented(index, source)
            plain.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            plain.step()
            losses.append(loss.item())
        assert found["train_loss"][epoch + 1].item() == pytest.approx(sum(losses) / 3, abs=1e-6)
        with torch.no_grad():
            output = model(images.test.x.permute(0, 3, 1, 2))
        assert found["test_loss"][epoch + 1].item() == pytest.approx(
            cross_entropy(output, images.test.y).item(), abs=1e-6
        )


def test_until_the_first_insertion_an_arm_that_grows_is_the_baseline():
    grown, small = train(arm(insert_at=[2])), train(arm("small"))
    for name in ("train_loss", "test_loss", "test_error"):
        assert torch.equal(grown[name][:3], small[name][:3])
    assert grown["place"].item() >= 0 and not torch.equal(grown["train_loss"], small["train_loss"])


def test_what_was_recorded_is_what_was_counted():
    settings = arm(record_gradients=True, record_norms=True)
    found = train(settings)
    places = found["place"].tolist()
    assert min(places) >= 0
    total = 0
    for epoch in range(4):
        stages = cnn.stages_after(settings.network, places[:epoch])
        total += 3 * cnn.cnn_flops(settings.network, CIFAR, stages)
        total += 3 * cnn.extended_flops(settings.network, CIFAR, stages) if epoch < 3 else 0
    assert found["flops"][-1] == total
    torch.testing.assert_close(found["norms"][..., 2], found["merits"], equal_nan=True, rtol=1e-4, atol=0)
    assert (found["gradient_norm"].isnan().sum(1) == torch.tensor([3, 2, 1, 0])).all()
    shown = found["new_gradient"]
    assert shown.shape == (3, 3, 1, 12, 12) and not shown.isnan().any() and (shown.flatten(2).abs().amax(2) > 0).all()
    assert (found["seconds"].diff() > 0).all() and (found["look_seconds"] > 0).all()


def test_a_look_computes_what_is_counted_for_it():
    network, stages = Network("cnn", (8,), channels=(4, 6)), [2, 1]
    model = cnn.build_cnn(network, CIFAR, 0, stages)
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    sites = find_sites(model, x, form="relu", where="conv")
    with FlopCounterMode(display=False) as counter:
        measure(model, sites, [(x, y)], cross_entropy, norm="frobenius")
    elements = (
        3 * (4 * 32**2 + 6 * 16**2) + 2 * 8
    )  # biases, ReLUs and poolings, which the paper counts and torch does not
    first = 2 * 9 * 3 * 4 * 32**2  # nobody asks for the gradient of the images
    assert counter.get_total_flops() == 2 * (cnn.look_flops(network, CIFAR, stages) - 3 * elements - first)


@pytest.mark.slow
def test_the_threshold_rejects_and_the_control_arms_obey_it_too():
    assert train(arm(tau=1e9))["place"].tolist() == [-1, -1, -1]
    found = train(arm(tau=1e9, select="smallest"))
    assert found["place"].tolist() == [-1, -1, -1] and not found["ratios"][:, :2].isnan().any()
    low = train(arm(tau=1e-9, select="smallest"))
    assert low["place"].tolist() == low["merits"].nan_to_num(1e9).argmin(1).tolist()


@pytest.mark.slow
def test_the_extended_network_is_the_one_its_partner_grew_into(tmp_path):
    one = plan(parse(TINY, "tiny.json"), "stated", RunOptions())
    store = Store(tmp_path)
    runner.run_plans([one], store)
    grown, whole = store.load(one, "LI"), store.load(one, "whole")
    for run in range(2):
        stages = cnn.stages_after(one.arms["LI"].network, grown.runs["place"][run].tolist())
        assert whole.runs["flops"][run, 1] == 3 * cnn.cnn_flops(one.arms["LI"].network, CIFAR, stages)
    assert "place" not in whole.runs and store.load(one, "small").facts["preset"] == "paper"


class Brought(type(Path())):
    """A data folder that brings its images along: where it arrives, they are made up."""

    def __reduce__(self):
        return _arrived, (str(self),)


def _arrived(folder):
    image_sets._LOADERS["cifar10"] = lambda folder: raw()
    return Path(folder)


@pytest.mark.thorough  # test_ray.py has the same with other processes
@pytest.mark.process
def test_several_processes_give_the_same_numbers_to_the_bit(tmp_path):
    """Also those of networks whose partner must grow first."""
    plans = [make_plan(), plan(parse(TINY, "tiny.json"), "stated", RunOptions())]
    there, here = Store(tmp_path / "there"), Store(tmp_path / "here")
    machine = Machine(Brought("data"), "cpu")
    assert runner.run_plans(plans, there, machine, processes(2)) == 2 + 6
    runner.run_plans(plans, here, machine)
    for one in plans:
        for arm in one.arms:
            mine, theirs = there.load(one, arm), here.load(one, arm)
            assert same(mine.runs, theirs.runs), arm
            assert mine.facts.get("device") == theirs.facts.get("device")
    assert runner.run_plans(plans, there, machine, processes(2)) == 0


def saved(settings, tmp_path):
    """The states after every epoch, through a file and back, and the result of the whole."""
    states = []

    def save(state):
        store.write_results(tmp_path / "state", state)
        states.append(store.read_results(tmp_path / "state"))

    return states, train(settings, save=save, save_every=0.0)


CASES = {
    "adam, schedule, three insertions": {},
    "sgd with momentum, random places": {"optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}, "select": "random"},
    "made anew at insertions, gradients": {"fresh_optimizer": True, "record_gradients": True, "lr_scale": 0.5},
    "threshold, confidence": {"tau": 0.2, "confidence": 0.9, "batch": 8},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit_from_every_epoch(settings, tmp_path):
    one = arm(**settings)
    states, whole = saved(one, tmp_path)
    assert [state["epoch"] for state in states] == [1, 2, 3]
    for state in states if settings == {} else states[1:2]:
        assert same(train(one, state=state), whole)


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
from pathlib import Path
from pictures import TINY, raw
from sensli_lab.paper import image_sets, runner
from sensli_lab.paper.planning import RunOptions, parse, plan
from sensli_lab.paper.engine import TrainingJob
from sensli_lab.paper.store import Store
torch.set_num_threads(1)
image_sets._LOADERS["cifar10"] = lambda folder: raw()
TrainingJob.__init__.__defaults__ = (*TrainingJob.__init__.__defaults__[:-1], 0.0)
save = Store.save_state

def save_and_die(self, *given):
    save(self, *given)
    os.kill(os.getpid(), signal.SIGKILL)

def work():
    runner.run_plans([plan(parse(TINY, "tiny.json"), "stated", RunOptions(runs=1))], Store(Path({out!r})))

killed = os.fork()  # before anything is computed: a start of Python costs more than the work
if killed == 0:
    Store.save_state = save_and_die
    work()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
assert list(Path({out!r}).rglob("unfinished*"))
work()
"""


@pytest.mark.process
@pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")
def test_a_killed_process_goes_on_to_the_bit(tmp_path):
    paths = [str(Path(pictures.__file__).parent), str(Path(cnn.__file__).parents[2])]
    script = KILLED.format(paths=paths, out=str(tmp_path))
    done = warm.run(["-c", script], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stdout
    one = plan(parse(TINY, "tiny.json"), "stated", RunOptions(runs=1))
    result = Store(tmp_path).load(one, "LI")
    fresh = cnn.train_runs(TrainingJob(one.arms["LI"], 0, (0,))).runs
    assert same({k: v[0] for k, v in result.runs.items()}, {k: v[0] for k, v in fresh.items()})
    assert not list(tmp_path.rglob("unfinished*"))


@pytest.mark.slow
def test_compiled_models_are_compiled_anew_after_an_insertion(monkeypatch):
    seen = []
    monkeypatch.setattr(cnn.torch, "compile", lambda model: seen.append(len(list(model.parameters()))) or model)
    found = train(arm(), machine=Machine(compile=True))
    assert seen == [7, 9, 11, 13] and same(found, train(arm()))


@pytest.mark.process
def test_bfloat16_is_tried_before_it_is_used(monkeypatch):
    asked = plan(parse(TINY, "tiny.json"), "stated", RunOptions(bf16=True)).arms["LI"]
    assert asked.dtype == "bfloat16"
    monkeypatch.setattr(cnn, "has_bf16", lambda device: False)
    with pytest.raises(BadExperiment, match="--bf16: a training step in bfloat16 does not work on this cpu"):
        cnn.check_machine(asked, Machine(device="cpu"))
    monkeypatch.setattr(
        machine_module, "_BF16_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)  # {device}"
    )
    machine_module.has_bf16.cache_clear()
    assert machine_module.has_bf16("cpu") is False
    machine_module.has_bf16.cache_clear()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data": {"name": "cifar11"}}, "trains on images, got 'cifar11'"),
        ({"data": {"name": "cifar10", "train": 50_000, "validation": 1}}, "has 50,000 training and 10,000 test images"),
        ({"optimizer": {"name": "adamw", "lr": 0.1}}, "unknown optimizer 'adamw'"),
        ({"optimizer": {"name": "adam", "momentum": 0.9}}, "momentum must be 0 for 'adam', which has its own, got 0.9"),
        (
            {"network": {"kind": "cnn", "channels": [4] * 6, "widths": [8]}},
            "6 poolings leave nothing of a 32 x 32 image",
        ),
        ({"network": {"kind": "fnn", "widths": [8]}}, "kind must be 'cnn' for the engine 'cnn', got 'fnn'"),
        ({"wake": True}, "wake is a setting of the engine 'stacked'"),
        ({"engine": "stacked", "insert_at": []}, "must be 'spirals' for the engine 'stacked', got 'cifar10'"),
    ],
)
def test_what_cannot_be_trained_is_refused(settings, text):
    changed = tiny(**{"schedule": None, "insert_at": [], **settings})
    changed["figures"] = ["curves"]
    changed["arms"] = {"small": {}}
    with pytest.raises(BadExperiment, match=text):
        engine(plan(parse(changed, "tiny.json"), "stated", RunOptions()).arms["small"])


def test_presets_are_settings_of_their_own():
    from sensli_lab.paper import planning
    from sensli_lab.paper.settings import digest

    names = ("paper", "day", "laptop", "smoke")
    sizes = [plan(planning.find_experiment("1"), "trains", RunOptions(preset=name)) for name in names]
    assert [one.arms["CNN LI"].epochs for one in sizes] == [200, 100, 20, 4]
    assert [one.arms["CNN LI"].insert_at for one in sizes] == [(50, 100, 150), (25, 50, 75), (5, 10, 15), (1, 2, 3)]
    assert [one.runs for one in sizes] == [3, 3, 3, 1]
    assert (
        plan(planning.find_experiment("12"), "stated", RunOptions(preset="laptop")).runs == 1
    )  # not more than the paper's
    assert [one.arms["CNN LI"].batch for one in sizes] == [128, 128, 32, 128]
    assert [one.arms["CNN LI"].tolerance for one in sizes] == [0.0, 0.1, 0.1, 0.0]
    assert len({digest(one.arms["CNN LI"], 0) for one in sizes}) == 4 and len({one.key for one in sizes}) == 4
    assert [one.arms["CNN LI"].schedule.patience for one in sizes] == [10, 5, 2, 2]
    assert [one.arms["CNN LI"].confidence for one in sizes] == [None, 0.99, 0.99, None]
    spiral, same_spiral = (
        plan(planning.find_experiment("2"), "stated", RunOptions(preset=name)) for name in ("paper", "laptop")
    )
    assert spiral == dataclasses.replace(same_spiral, options=spiral.options)
    for name in planning.GROUPS["cnn"]():
        for preset in names:
            for recipe in planning.find_experiment(name).recipes:
                for settings in plan(planning.find_experiment(name), recipe, RunOptions(preset=preset)).arms.values():
                    assert engine(settings).estimate_seconds(settings, 1) > 0
    times = [
        settings.insert_at
        for settings in plan(planning.find_experiment("12"), "stated", RunOptions(preset="laptop")).arms.values()
    ]
    assert times == [(), *((time,) for time in range(1, 9))]


def test_the_same_arm_but_for_what_is_recorded_may_be_followed():
    image_sets = tiny()
    image_sets["arms"] = {"LI": {"record_gradients": True}, "whole": {"from_start": True}}
    one = plan(parse(image_sets, "tiny.json"), "stated", RunOptions())
    assert one.grown_arm("whole") == "LI" and dataclasses.replace(one.arms["whole"], from_start=False) != one.arms["LI"]
