"""Hooks of the user in the measurement of units: what they change is changed for candidates too, and the others notice nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sensli import Probe, find_sites, measure
from sensli.errors import MeasurementError
from widening import column_gradients, new_gradients, widened


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=draw, dtype=torch.float64), torch.randint(3, (8,), generator=draw)


def overwrite(module: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(3)


HOOKS: dict[str, Callable[[nn.Sequential], Any]] = {
    "of what a layer makes": lambda m: m[0].register_forward_hook(lambda module, args, output: 10 * output),
    "of what an activation gives": lambda m: m[1].register_forward_hook(lambda module, args, output: output + 0.5),
    "in place": lambda m: m[0].register_forward_hook(overwrite),
    "of what a layer reads": lambda m: m[2].register_forward_pre_hook(lambda module, args: (args[0] * 2 + 1,)),
    "of what a reader gives": lambda m: m[2].register_forward_hook(lambda module, args, output: output.sin()),
    "with keywords": lambda m: m[1].register_forward_hook(
        lambda module, args, kwargs, output: 2 * output, with_kwargs=True
    ),
    "of the input": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "of all modules": lambda m: register_module_forward_hook(
        lambda module, args, output: 2 * output if isinstance(module, nn.Tanh) else None
    ),
    "of what all modules read": lambda m: register_module_forward_pre_hook(
        lambda module, args: (1.5 * args[0],) if isinstance(module, nn.Linear) else None
    ),
}


@pytest.mark.parametrize("start", ["sensitive", "net2net", "gradmax"])
@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_changes_counts_as_in_the_wider_network(name: str, start: str) -> None:
    model, (x, y) = network(), data()
    handle = HOOKS[name](model)
    try:
        sites = find_sites(model, x[:4], what="units", units=2, init=start)
        assert len(sites) == 2 or start == "gradmax"
        before = [dict(module._forward_hooks) for module in model.modules()]
        merits = measure(model, sites, [(x, y)], F.cross_entropy, norm="frobenius") if sites else []
        for merit in merits:
            other, edit = widened(model, merit.site)
            F.cross_entropy(other(x), y).backward()
            known = new_gradients(edit, "row") if start == "gradmax" else column_gradients(edit)
            assert merit.value == pytest.approx(known, rel=1e-6 if start == "gradmax" else 1e-10)
        assert [dict(module._forward_hooks) for module in model.modules()] == before
    finally:
        handle.remove()


def test_hooks_that_only_look_are_called_once_for_each_pass_and_see_the_model_itself() -> None:
    model, (x, y) = network(), data()
    sites = find_sites(model, x[:2], what="units", units=2)
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    model[1].register_forward_hook(lambda module, args, output: output)  # the same that it was given
    gone = model[0].register_forward_hook(lambda *_: gone.remove())  # a hook that removes itself
    with Probe(model, sites):
        F.cross_entropy(model(x), y).backward()
    assert [tuple(each.shape) for each in seen] == [(8, 6)] and not model[0]._forward_hooks
    assert torch.equal(seen[0], model[1](model[0](x)))


def test_a_hook_that_changes_values_and_keeps_them_is_refused() -> None:
    model, (x, y) = network(), data()
    sites = find_sites(model, x[:2], what="units", units=2)
    kept: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        kept.append(output)
        return 2 * output

    model[1].register_forward_hook(hook)
    with pytest.raises(MeasurementError, match="a forward hook on a Tanh changes values and keeps them"):
        measure(model, sites, [(x, y)], F.cross_entropy)
    assert list(model[1]._forward_hooks.values()) == [hook]


def test_a_hook_of_all_modules_that_changes_what_a_reader_gives_is_refused() -> None:
    model, (x, y) = network(), data()
    sites = find_sites(model, x[:2], what="units", units=2)
    with register_module_forward_hook(lambda module, args, output: 2 * output if module is model[2] else None):
        with pytest.raises(MeasurementError, match="a hook of all modules"):
            measure(model, sites, [(x, y)], F.cross_entropy)
        (own,) = torch.nn.modules.module._global_forward_hooks.values()
        assert own.__module__ == __name__


@pytest.mark.parametrize("ratio", [True, False])
def test_a_hook_that_overwrites_what_a_reader_gives_is_refused(ratio: bool) -> None:
    model, (x, y) = network(), data()
    model[2].register_forward_hook(overwrite)
    sites = find_sites(model, x[:2], what="units", units=2)
    with pytest.raises(MeasurementError, match="overwritten in place"):
        measure(model, sites[:1], [(x, y)], F.cross_entropy, ratio=ratio)


@pytest.mark.library
def test_a_mixture_of_experts_that_records_its_router_is_measured() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=3, output_router_logits=True, experts_implementation="eager",
    )  # fmt: skip
    model, tokens = MixtralForCausalLM(config).double().eval(), torch.randint(32, (2, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    sites = find_sites(model, batch, what="units")
    assert sites
    for merit in measure(model, sites, [batch], norm="frobenius"):
        other, edit = widened(model, merit.site)
        other(**batch).loss.backward()
        assert merit.value == pytest.approx(column_gradients(edit), rel=1e-8)
