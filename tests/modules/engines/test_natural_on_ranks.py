"""The natural merit over several processes: moments add up with the right weights, to those of one process on the joined data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ranks
from parallel import data, make_model
from sensli import Merits, Probe, find_sites, measure


def _same(found: Merits, expected: Merits, *, ratio: bool = True) -> None:
    assert max(merit.value for merit in expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a.value == pytest.approx(b.value, rel=1e-9, abs=1e-12)
        assert not ratio or a.ratio == pytest.approx(b.ratio, rel=1e-9)


def all_wrappers() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    batches, whole = data(rank, world), data(0, 1)
    plain = make_model()
    own = find_sites(plain, whole[0][0])
    expected = measure(plain, own, whole, cross_entropy, norm="natural")
    model = DistributedDataParallel(make_model())
    sites = find_sites(model, batches[0][0])
    _same(measure(model, sites, batches, cross_entropy, norm="natural"), expected)

    # batches of different sizes: a cotangent is that of a mean, so each rank has its own scale
    x, y = (torch.cat(parts) for parts in zip(*whole, strict=True))
    sizes = [40, 20] if rank == 0 else [7, 61]
    mine = slice(0, 60) if rank == 0 else slice(60, 128)
    uneven = list(zip(x[mine].split(sizes), y[mine].split(sizes), strict=True))
    _same(measure(model, sites, uneven, cross_entropy, norm="natural"), expected)
    _same(measure(model, sites, whole if rank == 1 else [], cross_entropy, norm="natural"), expected)

    level: dict[str, Any] = {"norm": "natural", "confidence": 0.9, "tolerance": 0.5}
    longer = measure(plain, own, data(0, 1, 30), cross_entropy, **level)
    found = measure(model, sites, data(rank, world, 30), cross_entropy, **level)
    assert (found.clear, found.samples) == (longer.clear, longer.samples)
    _same(found, longer)

    first = measure(plain, own, whole[:1], cross_entropy, norm="natural")
    with Probe(model, sites, norm="natural") as probe:
        cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    for _ in range(2):  # asking does not change what was caught
        _same(probe.merits(), first)

    shards = fully_shard(make_model())
    assert isinstance(shards, nn.Module)
    places = find_sites(shards, batches[0][0])
    _same(measure(shards, places, batches, cross_entropy, norm="natural"), expected)
    with Probe(shards, places, norm="natural", ratio=False) as probe:
        cross_entropy(shards(batches[0][0]), batches[0][1]).backward()
    _same(probe.merits(), first, ratio=False)


@pytest.mark.process
def test_all_ranks_have_the_merits_of_one_process_on_the_joined_data(tmp_path: Path) -> None:
    ranks.run(all_wrappers, 2, tmp_path)
