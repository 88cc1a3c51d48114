"""The table of architectures on the accelerator of device.cpp: the sites and merits of the CPU, and no random number of any device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from architectures import HANDWRITTEN
from building import build, example_of, marked
from sensli import find_sites, grow, measure

OTHER = torch.device("sim", 1)  # not the current one
# The device has no fused cell of an LSTM, and torch's Transformer takes a tuple, which `check` would read as a pair.
HERE = [name for name in HANDWRITTEN if name not in ("recurrent", "torch_transformer")]
LIBRARY = ["gpt2", "llama", "bloom", "mixtral", "bert", "t5", "mamba", "vit", "resnet"]  # one of each kind


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", marked([*HERE, *LIBRARY]))
def test_every_architecture(name: str) -> None:
    model, batch = build(name, torch.float64)
    there, example = copy.deepcopy(model).to(OTHER), example_of(batch)
    before = [torch.get_rng_state(), torch.sim.get_rng_state(0), torch.sim.get_rng_state(1)]
    expected = find_sites(model, example, what="both")
    with torch.device("sim"):  # a default device changes nothing
        sites = find_sites(there, example, what="both")
        assert [str(site) for site in find_sites(model, example, what="both")] == [str(site) for site in expected]
    assert [str(site) for site in sites] == [str(site) for site in expected] and sites

    def merits(model: Any, sites: Any) -> dict[str, float]:
        found = measure(model.eval(), sites, [batch], None if isinstance(batch, dict) else loss_fn)
        return {str(merit.site): merit.value for merit in found}

    found = merits(there, sites)
    assert found == pytest.approx(merits(model, expected), rel=1e-6)
    best = max(sites, key=lambda site: found[str(site)])
    grow(there.train(), best, check=example)
    now = [torch.get_rng_state(), torch.sim.get_rng_state(0), torch.sim.get_rng_state(1)]
    assert all(map(torch.equal, before, now))
    assert {parameter.device for parameter in there.parameters()} == {OTHER}
