"""The methods of others in two processes: one decides with the data of both, as one process on the joined batches would."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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
from parallel import data, same_on_all_ranks
from sensli import Grower
from sensli.errors import DistributedError, UnsupportedModel
from sensli.growing.options import used_options
from sensli.growing.triggers import Every

METHODS = ("tiny", "north", "splitting", "convsenn", "variance-transfer", "net2net-deeper", "morphnet")
TWICE = ("north", "morphnet")  # remember what they saw


def network(normed: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    norm = [nn.BatchNorm1d(6)] if normed else []
    return nn.Sequential(nn.Linear(4, 6), *norm, nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def growing(model: nn.Module, name: str, example: Any) -> Grower:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Grower(
        model, optimizer, preset="paper", example=example, trigger=Every(1), strategy=name, max_factor=None, seed=3,
        **{option: value for option, value in {"units": 2, "tau": 0.0, "floor": 0.0}.items() if option in used_options(name)},
    )  # fmt: skip


def looks(model: Any, name: str, batches: list[Any]) -> Grower:
    """Looks with a step of training after them, of gradients that are the same in both settings."""
    grower = growing(model, name, batches[0][0][:1])
    for _ in range(2 if name in TWICE else 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # north may find that nothing would help
            grower.step(batches, cross_entropy, metric=1.0)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        grower.optimizers[0].step()
    return grower


def as_in_one_process() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = data(rank, world)[: 3 - rank]  # not equally many on both
    both = [data(0, world)[0], data(1, world)[0], data(0, world)[1], data(1, world)[1], data(0, world)[2]]
    for name in METHODS:
        alone = network(normed=name == "net2net-deeper")
        model = DistributedDataParallel(network(normed=name == "net2net-deeper"), broadcast_buffers=False)
        grower = looks(model, name, mine)
        same_on_all_ranks(model.module)
        if rank == 1:  # what one process does is computed on the other one
            states = [grower.strategy.state_dict()]
        else:
            states = [looks(alone, name, both).strategy.state_dict()]
            assert grower.strategy.state_dict() == states[0], name
            found, expected = model.module.state_dict(), alone.state_dict()
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=f"{name} {key}")
            assert name == "north" or len(grower.history), name
        dist.broadcast_object_list(states, src=0)
        assert grower.strategy.state_dict() == states[0], name
        cross_entropy(model(mine[0][0]), mine[0][1]).backward()

    _nothing_helps_on_any(rank, mine)
    _fails_on_one(rank, mine)
    sharded = fully_shard(network())
    assert isinstance(sharded, nn.Module)
    for name in ("tiny", "variance-transfer", "convsenn"):
        with pytest.raises(UnsupportedModel, match="needs whole parameters, but the model is sharded"):
            growing(sharded, name, mine[0][0][:1]).step(mine, cross_entropy)


def _nothing_helps_on_any(rank: int, mine: list[Any]) -> None:
    model = DistributedDataParallel(network())
    with pytest.warns(UserWarning, match="Tiny finds that no more units would help"):
        assert growing(model, "tiny", mine[0][0][:1]).step(mine, lambda output, target: 0.0 * output.sum()) is None


def _fails_on_one(rank: int, mine: list[Any]) -> None:
    def batches() -> Iterator[Any]:
        yield mine[0]
        if rank == 1:
            raise OSError("the disk is gone")

    model = DistributedDataParallel(network())
    grower = growing(model, "nest", mine[0][0][:1])
    with pytest.raises(OSError if rank == 1 else DistributedError, match="the disk is gone"):
        grower.step(batches(), cross_entropy)
    assert not grower.history
    assert grower.step(mine, cross_entropy) is not None, "and both can continue"


@pytest.mark.process
def test_two_processes_decide_as_one_with_the_batches_of_both(tmp_path: Path) -> None:
    ranks.run(as_in_one_process, 2, tmp_path)
