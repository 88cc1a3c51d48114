"""The stacked engine computes what one network at a time computes, grows where it would, and can be stopped."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import reference
from experiments import settings
from sensli_lab.paper import datasets, stacked
from sensli_lab.paper.engine import TrainingJob
from sensli_lab.paper.settings import DataSettings, Network, Optimizer
from sensli_lab.paper.stacked import NetworkStack

RUNS = (0, 1, 2, 5)

CASES = {
    "fnn, full batch": settings(),
    "fnn, mini-batch, uneven last batch": settings(batch=40),
    "fnn, smallest, rate halved": settings(select="smallest", lr_scale=0.5),
    "fnn, order over two blocks": settings(batch=45, epochs=30, insert_at=(26,)),
    "resnet, full batch": settings(network=Network("resnet", (3, 3, 3))),
    "resnet, mini-batch": settings(network=Network("resnet", (3, 3)), batch=30),
    "resnet as run": settings(network=Network("resnet", (3, 3), True, True), lr_scale=0.7),
    "no insertion": settings(insert_at=()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_network_at_a_time(case):
    together = stacked.train_runs(TrainingJob(case, 3, RUNS)).runs
    places = set()
    for row, run in enumerate(RUNS):
        alone = reference.train(case, 3, run)
        for curve in ("train_loss", "test_loss", "test_error"):
            expected = torch.tensor(getattr(alone, curve), dtype=torch.float64)
            torch.testing.assert_close(together[curve][row], expected, rtol=0, atol=1e-9)
        if case.insert_at:
            assert together["place"][row].tolist() == alone.places
            places.update(alone.places)
            for k, merits in enumerate(alone.merits):
                torch.testing.assert_close(together["merits"][row, k, : len(merits)], torch.tensor(merits))
                torch.testing.assert_close(together["ratios"][row, k, : len(merits)], torch.tensor(alone.ratios[k]))
    assert not case.insert_at or len(places) > 1, "the case is too easy: all runs grew at the same place"


def test_a_run_does_not_depend_on_its_neighbours():
    case = settings(batch=30)
    together = stacked.train_runs(TrainingJob(case, 0, (0, 1, 2))).runs
    alone = stacked.train_runs(TrainingJob(case, 0, (1,))).runs
    torch.testing.assert_close(together["train_loss"][1], alone["train_loss"][0], rtol=0, atol=1e-12)
    assert together["place"][1].tolist() == alone["place"][0].tolist()


def test_baseline_and_grown_arm_agree_until_the_insertion():
    grown = stacked.train_runs(TrainingJob(settings(batch=30, insert_at=(10,)), 0, RUNS)).runs["train_loss"]
    plain = stacked.train_runs(TrainingJob(settings(batch=30, insert_at=()), 0, RUNS)).runs["train_loss"]
    assert torch.equal(grown[:, :11], plain[:, :11])  # the point after the insertion too: the function is the same
    assert not torch.equal(grown[:, 11], plain[:, 11])


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_stopped_training_goes_on_to_the_bit(stop):
    case = settings(batch=30, epochs=80, insert_at=(20, 55), record_gradients=True, dtype="float32")
    states = []
    whole = stacked.train_runs(
        TrainingJob(case, 0, RUNS, save=lambda state: states.append(_copied(state)), save_every=0)
    )
    rest = stacked.train_runs(TrainingJob(case, 0, RUNS, state=states[stop]))
    assert whole.runs.keys() == rest.runs.keys()
    for name, values in whole.runs.items():
        assert torch.equal(values.nan_to_num(), rest.runs[name].nan_to_num()), name


def _copied(state):
    records = {name: values.clone() for name, values in state["records"].items()}
    return {**state, "parameters": [p.clone() for p in state["parameters"]], "records": records}


def test_equal_merits_go_to_the_first_place():
    looks = type("Looks", (), {"merits": torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0], [2.0, 1.0, 1.0]])})
    cases = {"largest": [1, 0, 0], "smallest": [0, 0, 1], "first": [0, 0, 0], "last": [2, 2, 2], "even": [1, 1, 1]}
    for select, expected in cases.items():
        training = stacked._Training(TrainingJob(settings(select=select), 0, (0, 1, 2)))
        assert training._choose(looks, 0).tolist() == expected


def test_random_places_cover_all_and_repeat():
    case = settings(select="random", epochs=3, insert_at=(1,))
    first, again = (stacked.train_runs(TrainingJob(case, 0, tuple(range(20)))).runs["place"] for _ in range(2))
    assert torch.equal(first, again)
    assert set(first.flatten().tolist()) == {0, 1}


def test_the_first_gradient_of_the_inner_residual_weight_is_zero():
    case = settings(network=Network("resnet", (3, 3)), insert_at=(6,))
    gradient = stacked.train_runs(TrainingJob(case, 0, RUNS)).runs["new_gradient"]  # [runs, times, 3, (W1, W2), 3, 3]
    assert gradient.shape == (len(RUNS), 1, 3, 2, 3, 3)
    assert not gradient[:, 0, 0, 0].any()
    assert gradient[:, 0, 1, 0].any() and gradient[:, 0, 0, 1].any()


def test_gradient_norms_follow_the_layers():
    case = settings(network=Network("fnn", (4,)), insert_at=(6,), record_gradients=True)
    runs = stacked.train_runs(TrainingJob(case, 0, RUNS)).runs
    norms = runs["gradient_norm"]  # [runs, epochs, layers]: before the insertion there are two
    assert norms.shape[2] == 3
    assert norms[:, :6, 2].isnan().all() and not norms[:, 6:].isnan().any()
    new = runs["new_gradient"][:, 0, 0, 0].square().sum((1, 2)).sqrt()
    torch.testing.assert_close(norms[:, 6, 1], new)


def test_waking_dead_units_keeps_the_function_on_the_data():
    x = datasets.split_spirals(dtype=torch.float64).train_x.T.expand(6, -1, -1)
    stack = NetworkStack.of(
        [stacked.build_small_network(Network("fnn", (5, 5)), seed, torch.float64) for seed in range(6)]
    )
    stack.layers[0].bias[:, 2] = -9.0  # dead on all data, at place 0
    stack.layers[1].bias[:, 4] = -9.0  # and at place 1
    before = stack.logits(x)
    looks = stack.measure(x, torch.ones(1, 2, 1, dtype=torch.float64) / 2)
    places = torch.tensor([0, 1, 0, 1, 0, 1])
    stack.insert(places)
    dead = looks.dead[torch.arange(6), places]
    assert dead[0, 2] and dead[1, 4]
    stack.wake(places, dead, torch.rand(6, 5, 5, dtype=torch.float64))
    torch.testing.assert_close(stack.logits(x), before)
    alive = stack.layers[1].forward(stack.layers[0].forward(x)[0])[0][0]
    assert alive[2].any()


def test_recycling_dead_units_keeps_the_function_on_the_data_and_they_learn_again():
    x = datasets.split_spirals(dtype=torch.float64).train_x.T.expand(3, -1, -1)
    stack = NetworkStack.of(
        [stacked.build_small_network(Network("fnn", (5, 5)), seed, torch.float64) for seed in range(3)]
    )
    stack.layers[0].bias[1, 2] = -9.0
    stack.layers[1].bias[1, 4] = -9.0
    before, untouched = stack.logits(x), stack.layers[0].weight[0].clone()
    count = stack.recycle(x, [torch.Generator().manual_seed(run) for run in range(3)])
    torch.testing.assert_close(stack.logits(x), before)
    assert count[1] >= 2 and (count[0] or torch.equal(stack.layers[0].weight[0], untouched))
    hidden = stack.layers[0].forward(x)[0][1]
    assert hidden[2].any() and stack.layers[1].forward(hidden.expand(3, -1, -1))[0][1][4].any()
    assert not stack.layers[2].weight[1, :, 4].any()
    case = settings(network=Network("fnn", (4,)), insert_at=(6,), recycle_at=(6,))
    assert stacked.train_runs(TrainingJob(case, 0, RUNS)).runs["recycled"].shape == (len(RUNS), 1)


def test_refused_settings_say_why():
    for changes, text in (
        ({"optimizer": Optimizer(lr=0.1, momentum=0.9)}, "must be 'sgd' without momentum"),
        ({"tau": 1.0}, "tau"),
        ({"network": Network("resnet", (3, 3)), "wake": True}, "ReLU"),
        ({"network": Network("resnet", (3, 3)), "recycle_at": (3,)}, "ReLU"),
        ({"data": DataSettings(name="cifar10")}, "spirals"),
    ):
        with pytest.raises(stacked.BadExperiment, match=text):
            stacked.check_settings(dataclasses.replace(settings(), **changes))
