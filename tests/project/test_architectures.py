"""Every architecture of the table: at every site the function stays, the layer learns, undo and replay are exact."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from building import TABLE, assert_same, build, example_of, marked, outputs
from sensli import Growth, History, find_sites, insert, measure, replay, undo
from sensli.modules.running import run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    output = run(model, example_of(batch))
    return output.loss if isinstance(batch, dict) else loss_fn(output, batch[1])


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def facts(model: nn.Module) -> str:
    """All that a configuration says and all numbers inside modules, as text."""
    said = {
        path: {k: v for k, v in vars(m).items() if isinstance(v, (int, str, list))} for path, m in model.named_modules()
    }
    config = getattr(model, "config", None)
    return json.dumps([said, config.to_dict() if config is not None else None], default=str, sort_keys=True)


@pytest.mark.parametrize("name", marked(TABLE))
@pytest.mark.slow
def test_every_site_of_every_architecture(name: str) -> None:
    """A merit is the gradient of the really inserted layer, for every site alone."""
    model, batch = build(name, torch.float64)
    model.eval()
    sites = find_sites(model, example_of(batch))
    assert sites or sites.skipped
    assert len({str(site) for site in sites}) == len(sites)
    if not sites:
        return
    before, state, said = outputs(model, batch), copy.deepcopy(model.state_dict()), facts(model)
    merits = measure(model, sites, [batch], None if isinstance(batch, dict) else loss_fn, norm="frobenius")

    for site, merit in zip(sites, merits, strict=True):
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        growth = insert(model, site, optimizer=optimizer)
        assert_same(before, outputs(model, batch), 1e-12)
        parameters = dict(model.named_parameters())
        new = [parameters[key] for key in growth.parameters]
        named = {key for group in optimizer.param_groups for key in group["param_names"]}
        assert named == set(parameters)

        grown = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        gradients = [parameters[f"{growth.name}.{key}"].grad for key in site.move.measured]
        assert all(gradient is not None and gradient.any() for gradient in gradients)
        assert merit.value == pytest.approx(sum(each.square().sum().item() for each in gradients), rel=1e-9)
        optimizer.step()
        assert any(not torch.equal(p, grown[key]) for key, p in zip(growth.parameters, new, strict=True))

        model.load_state_dict(grown)
        undo(model, Growth.from_dict(json.loads(json.dumps(growth.to_dict()))), optimizer=optimizer)
        assert facts(model) == said
        now = model.state_dict()
        assert list(now) == list(state) and all(torch.equal(now[key], state[key]) for key in state)
        # every optimizer group holds exactly the model's parameters again, under their names
        assert [n for group in optimizer.param_groups for n in group["param_names"]] == [
            key for key, _ in model.named_parameters()
        ]

    growths = [insert(model, site) for site in sites]
    assert_same(before, outputs(model, batch), 1e-12)
    # the recorded growths alone build the same names and shapes again, from JSON, also in single precision
    again, singles = build(name)
    again.eval()
    alone = outputs(again, singles)
    replay(again, History.from_json(History(growths).to_json()))
    assert_same(alone, outputs(again, singles), 1e-5)
    again.double().load_state_dict(model.state_dict())
    assert_same(before, outputs(again, batch), 1e-12)
    for growth in reversed(growths):
        undo(model, growth)
    assert_same(before, outputs(model, batch), 0.0)


@pytest.mark.parametrize(
    "name", marked(["resnet_basic", "resnet_bottleneck", "resnet_projected", "resnet", "mlp_mixer"])
)
def test_batch_norm_blocks_are_exact_in_training_mode(name: str) -> None:
    model, batch = build(name)
    sites = find_sites(model, example_of(batch), form="twin")
    assert sites
    model.train()
    state = copy.deepcopy(model.state_dict())
    before = outputs(model, batch)
    for site in sites:
        model.load_state_dict(state)
        growth = insert(model, site)
        assert_same(before, outputs(model, batch), 1e-5)
        undo(model, growth)


@pytest.mark.parametrize("name", marked(["gpt", "resnet_basic", "convnext_blocks", "gpt2"]))
def test_fresh_twins(name: str) -> None:
    model, batch = build(name)
    model.eval()
    before = outputs(model, batch)
    site = find_sites(model, example_of(batch), form="twin", init="fresh")[1]
    growth = insert(model, site)
    assert_same(before, outputs(model, batch), 1e-5)
    source = dict(model.get_submodule(site.path).named_parameters())
    twin = dict(model.get_submodule(growth.name).named_parameters())
    free = [key for key in twin if twin[key].ndim > 1 and key not in site.move.zeroed]
    assert free and all(not torch.equal(twin[key], source[key]) for key in free)


def forms(name: str) -> set[str]:
    return {site.move.form for site in find_sites(*_given(name))}


BLOCKS = ["resnet_basic", "resnet_leaky", "gpt_postnorm", "attributes_resnet", "llama", "vit", "convnext"]


@pytest.mark.parametrize("name", marked(BLOCKS))
def test_between_blocks_goes_a_twin(name: str) -> None:
    assert forms(name) == {"twin"}


def test_which_form_a_boundary_gets() -> None:
    assert forms("plain_blocks") == {"relu", "residual"}  # residual after a batch norm, with its own
    assert forms("encoder_postnorm") == {"residual"}
    # two lists that are walked together cannot take a block, and a twin around its neighbour would have the neighbour's number
    assert forms("parallel_lists") == {"residual"}
    assert all(site.point.place is not None for site in find_sites(*_given("sliced_list")))


def _given(name: str) -> tuple[nn.Module, Any]:
    model, batch = build(name)
    return model, example_of(batch)
