"""What people shard with: groups of modules, meshes of two dimensions, wrapped and compiled blocks. Real processes, gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import ranks
from parallel import compare, data, raised, result, train
from sensli import Grower, History, find_sites, grow, load_checkpoint, measure, replay, save_checkpoint, triggers, undo

pytestmark = pytest.mark.process


class Block(nn.Module):
    """A block that knows its number."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.norm = layer_id, nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Titan(nn.Module):
    """As torchtitan writes its models: blocks in a dict by number; what comes after them is sharded as one group."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleDict({str(number): Block(number) for number in range(2)})
        self.norm, self.mid, self.output = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(torch.relu(self.mid(self.norm(x))))


def make_titan() -> Any:
    torch.manual_seed(1)
    return Titan().double()


def shard(model: Any, mesh: Any = None) -> Any:
    """Blocks alone and the tail together; gradients are summed, not averaged, where the factor says so."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard([model.norm, model.mid, model.output], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_mesh(shape: tuple[int, int]) -> Callable[[Any], Any]:
    return lambda model: shard(model, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def make_optimizer(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def make_grower(model: nn.Module, optimizer: Any, scheduler: Any) -> Grower:
    trigger = triggers.Every(1) & triggers.Limit(growths=2)
    return Grower(model, optimizer, preset="paper", example=data(0, 1)[0][0][:1], trigger=trigger, tau=0.0)


def here() -> list[tuple[Tensor, Tensor]]:
    """The share of this process in the joined batches."""
    return data(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else data(0, 1)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    x, y = here()[0]
    cross_entropy(model(x), y).backward()
    optimizer.step()


def wholes(model: nn.Module) -> dict[str, Tensor]:
    return ranks.wholes(dict(model.state_dict()))


def equal(one: dict[str, Tensor], other: dict[str, Tensor], near: float = 0.0) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[key], other[key], rtol=near, atol=near) for key in one)


# --- each layout against one process, and its checkpoint ---


def trained(wrap: Callable[[Any], Any]) -> Any:
    """Grown three times; saved and loaded, the next step is the same to the bit."""
    model = wrap(make_titan())
    grower, merits = train(model, here(), epochs=3)
    blocks = list(model.layers.values())
    assert list(model.layers) == [str(block.layer_id) for block in blocks] and len(blocks) > 2
    assert all(isinstance(block, FSDPModule) for block in blocks)
    assert {block._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info for block in blocks} == {None}
    optimizer = make_optimizer(model)
    step(model, optimizer)
    save_checkpoint("layout.ckpt", model, optimizer=optimizer, history=grower.history)
    found = load_checkpoint("layout.ckpt", make_titan, make_optimizer, wrap=wrap)
    for one, its in ((model, optimizer), (found.model, found.optimizer)):
        step(one, its)
    assert equal(wholes(model), wholes(found.model))
    return {**result(model, grower, merits), "model": wholes(model)}


def groups() -> None:
    """Sites inside of a group, and growths of its modules, as in one process; undone in the end."""
    model, plain = shard(make_titan()), make_titan()
    optimizers = [make_optimizer(model), make_optimizer(plain)]
    made = []
    for options in ({"form": "residual"}, {"what": "units", "units": 2}, {"form": "residual"}):
        sites, theirs = (find_sites(each, data(0, 1)[0][0][:4], **options) for each in (model, plain))
        assert [str(site) for site in sites] == [str(site) for site in theirs]
        merits, expected = (
            measure(model, sites, here(), cross_entropy),
            measure(plain, theirs, data(0, 1), cross_entropy),
        )
        assert all(abs(a.value / b.value - 1) < 1e-9 for a, b in zip(merits, expected, strict=True))
        assert "output" in str(sites[-1])
        made.append(grow(model, sites[-1], optimizer=optimizers[0]))
        grow(plain, theirs[-1], optimizer=optimizers[1])
        step(model, optimizers[0])
        optimizers[1].zero_grad()
        cross_entropy(plain(data(0, 1)[0][0]), data(0, 1)[0][1]).backward()
        optimizers[1].step()
        assert equal(wholes(model), wholes(plain), 1e-10)
    for growth in reversed(made):
        undo(model, growth, optimizer=optimizers[0])
        step(model, optimizers[0])
    assert list(model.state_dict()) == list(make_titan().state_dict())


def settings() -> None:
    """A new block divides its gradients as the others do, and is sharded along the same axes, inside too."""
    model = make_titan()
    for layer in model.layers.values():
        fully_shard(layer.down, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1))
        fully_shard(layer)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    growth = grow(model, find_sites(model, here()[0][0])[0])
    new, old = model.get_submodule(growth.name), model.layers["1"]
    assert isinstance(new.down, FSDPModule) and new.down.weight.placements == old.down.weight.placements
    assert new.down.weight.placements[0].dim == 1 and new.up.weight.placements[0].dim == 0
    factors = [
        m._get_fsdp_state()._fsdp_param_group.gradient_divide_factor
        for m in model.modules()
        if isinstance(m, FSDPModule)
    ]
    assert len(factors) == 7 and set(factors) == {1.0}


def refused() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "tensor"))
    x = here()[0][0]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    plain = make_titan()
    site = find_sites(plain, x)[0]
    for sharded in (False, True):
        model = make_titan()
        for layer in model.layers.values():
            parallelize_module(layer, mesh["tensor"], plan)
        if sharded:
            fully_shard(model, mesh=mesh["data"])
        before = [id(parameter) for parameter in model.parameters()]
        for call in (lambda m=model: find_sites(m, x), lambda m=model: grow(m, site.by_path())):
            text = raised(call)
            assert "tensor-parallel plan" in text and "'layers.0.up.weight'" in text, text
        assert [id(parameter) for parameter in model.parameters()] == before


# --- blocks that are wrapped, compiled, or both, before they are sharded ---


def wrapped(model: Any) -> Any:
    for number, block in list(model.layers.named_children()):
        model.layers[number] = torch.compile(checkpoint_wrapper(block), backend="eager")
    return model


def compiled(model: Any) -> Any:
    for block in model.layers.values():
        block.compile(backend="eager")
    return model


def kept(ways: Callable[[Any], Any], after: Callable[[Any], Any] | None = None) -> None:
    """The sites and merits of the plain model; what is new is wrapped as its neighbours, and comes back from a checkpoint."""
    model, plain = (after or (lambda model: model))(ways(make_titan())), make_titan()
    x, own = data(0, 1)[0][0][:4], here() if after else data(0, 1)
    sites, theirs = find_sites(model, x), find_sites(plain, x)
    assert [str(site) for site in sites] == [str(site) for site in theirs] and len(sites) == 4
    merits, expected = measure(model, sites, own, cross_entropy), measure(plain, theirs, data(0, 1), cross_entropy)
    assert all(abs(a.value / b.value - 1) < 1e-9 for a, b in zip(merits, expected, strict=True))
    optimizer, before = make_optimizer(model), model(x)
    history = History([grow(model, sites[1], optimizer=optimizer)])
    assert torch.equal(model(x), before) and list(model.layers) == list("012")
    new, old = model.layers["1"], model.layers["0"]
    kinds = [[type(part) for part in each.modules()] for each in (new, old)]
    assert kinds[0] == kinds[1] and bool(new._compiled_call_impl) == bool(old._compiled_call_impl)
    step(model, optimizer)
    path = "wrapped.ckpt" if after else f"wrapped{dist.get_rank()}.ckpt"
    save_checkpoint(path, model, optimizer=optimizer, history=history)
    found = load_checkpoint(path, lambda: ways(make_titan()), make_optimizer, wrap=after)
    for one, its in ((model, optimizer), (found.model, found.optimizer)):
        step(one, its)
    assert equal(wholes(model), wholes(found.model))
    undo(model, history[0], optimizer=optimizer)
    assert list(model.state_dict()) == list(ways(make_titan()).state_dict())


# --- torch.distributed.checkpoint, by hand: another number of processes goes on ---


def save_by_hand(model: Any, optimizer: Any, grower: Grower) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="by_hand")
    if dist.get_rank() == 0:
        torch.save(grower.state_dict(), "grower.pt")


def load_by_hand(wrap: Callable[[Any], Any]) -> tuple[Any, Any, Grower]:
    saved = torch.load("grower.pt", weights_only=True)
    model = wrap(replay(make_titan(), History.from_dict(saved["history"])))
    optimizer = make_optimizer(model)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id="by_hand", no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])
    grower = make_grower(model, optimizer, None)
    grower.load_state_dict(saved)
    return model, optimizer, grower


def go_on(model: Any, optimizer: Any, grower: Grower) -> dict[str, Tensor]:
    step(model, optimizer)
    grower.step(here(), cross_entropy)
    step(model, optimizer)
    assert len(grower.history) == 2
    return wholes(model)


def resumed() -> dict[str, Tensor]:
    """What two processes save, two go on with to the bit."""
    model = shard(make_titan())
    optimizer = make_optimizer(model)
    grower = make_grower(model, optimizer, None)
    step(model, optimizer)
    grower.step(here(), cross_entropy)
    step(model, optimizer)
    save_by_hand(model, optimizer, grower)
    dist.barrier()
    again = load_by_hand(shard)
    end = go_on(model, optimizer, grower)
    assert equal(go_on(*again), end)
    return end


def two() -> Any:
    found = trained(on_mesh((1, 2)))
    groups()
    settings()
    refused()
    for ways in (wrapped, compiled):
        kept(ways)
        kept(ways, shard)
    return {**found, "end": resumed()}


def half() -> Any:
    """A mesh of two dimensions with those two of four processes that this one is among."""
    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("half", "replicate", "shard"))["replicate", "shard"]


def four() -> Any:
    assert "with 2 of the 4 processes" in raised(lambda: find_sites(shard(make_titan(), half()), here()[0][0]))
    return {**trained(on_mesh((2, 2))), "end": go_on(*load_by_hand(shard))}


def expected() -> Any:
    """What one process has in the end, on the joined batches."""
    model = make_titan()
    grower, merits = train(model, data(0, 1), 3)
    optimizer = make_optimizer(model)
    for _ in range(2):
        step(model, optimizer)
    return result(model, grower, merits)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by torch, as one process loads
def test_layouts_of_fully_shard_equal_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    found = ranks.run(two, 2, tmp_path)
    compare(found, expected())
    # one process that shards nothing goes on with what two have saved
    assert equal(go_on(*load_by_hand(lambda model: model)), found["end"], 1e-11)


@pytest.mark.thorough
def test_four_processes_on_a_mesh_of_two_dimensions_equal_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    before = ranks.run(resumed, 2, tmp_path)
    found = ranks.run(four, 4, tmp_path)
    compare(found, expected())
    assert equal(found["end"], before, 1e-11)
