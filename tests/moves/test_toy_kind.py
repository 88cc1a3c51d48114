"""A new way to grow is one file: here a toy that gives a linear map the bias it was built without, from finding it to replaying it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import sensli
from sensli.moves.finding import KINDS
from sensli.moves.point import Bind, Point, Ref
from sensli.moves.roles import Geometry
from sensli.moves.search import Search
from sensli.moves.sites import Cost, Edit, Gauge, New, Site

# --- the kind ---


@dataclass(frozen=True)
class Bias:
    """A bias of zeros for a linear map."""

    tag: ClassVar[str] = "bias"
    kind: ClassVar[str] = "bias"
    tolerance: ClassVar[float | None] = None

    units: int

    def line(self, point: Point) -> str:
        return f"+{self.units} biases in {point.path}"

    def cost(self, point: Point) -> Cost:
        return Cost(self.units, self.units)

    def gauge(self, site: Site, model: nn.Module) -> Gauge:
        return BiasGauge([(site.point, site.find(model)[1])])

    def plan(self, model: nn.Module, site: Site) -> Edit:
        return AddBias(model, site, *site.find(model))

    def made(self, model: nn.Module, site: Site, module: nn.Module, path: str) -> Edit:
        edit = AddBias(model, site, path, module)
        edit.new = [New(f"{path}.bias", module.bias, ())]
        return edit

    def joining(self, model: nn.Module, site: Site) -> list[New]:
        return [New("bias", nn.Parameter(torch.empty(self.units, device="meta")), (site.find(model)[1].weight,))]

    def bound(self, bind: Bind) -> Bias:
        return self

    def by_path(self) -> Bias:
        return self

    def check(self, point: Point) -> None:
        if self.units < 1:
            raise ValueError(f"units must be positive, got {self.units}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Bias:
        return cls(**data)


class BiasGauge(Gauge):
    def caught(
        self, index: int, x: Tensor, cotangent: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        return {"gradient": cotangent.reshape(-1, cotangent.shape[-1]).sum(0)}

    def gradients(self, sums: Any, shape: tuple[int, ...]) -> list[tuple[Tensor, Geometry]]:
        return [(sums["gradient"][None], Geometry())]


class AddBias(Edit):
    def __init__(self, model: nn.Module, site: Site, path: str, module: nn.Module) -> None:
        self.name, self.module = path, module
        self.site = replace(site, point=replace(site.point, anchor=Ref.to(path, module)))
        self.renames, self.beside = {}, {f"{path}.weight": tuple(module.weight.shape)}

    def build(self) -> None:
        weight = self.module.weight
        self.new = [New(f"{self.name}.bias", nn.Parameter(weight.detach().new_zeros(weight.shape[0])), (weight,))]

    def apply(self) -> None:
        self.module.bias = self.new[0].parameter

    def revert(self) -> None:
        self.module.bias = None


class BiasKind:
    move: ClassVar[type[Bias]] = Bias
    grows: ClassVar[str] = "layers"

    def propose(self, search: Search) -> None:
        for call in search.flow.calls:
            if isinstance(call.module, nn.Linear) and call.module.bias is None and call.output is not None:
                point = search.point(call, "after", call.output)
                search.offer(call, "after", call.output, iter([Site(point, Bias(call.module.out_features))]))

    def at(self, search: Search, *_: Any) -> Iterator[Site]:
        return iter(())

    def otherwise(self, search: Search) -> None:
        pass


# --- what a user does with it ---


@pytest.fixture
def kind() -> Iterator[None]:
    KINDS.append(BiasKind())
    yield
    KINDS.pop()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)
    ).double()


X, Y = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2


def biases(model: nn.Module) -> list[Site]:
    return [site for site in sensli.find_sites(model, X) if site.kind == "bias"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.usefixtures("kind")
def test_a_toy_kind_of_growth_goes_all_the_way(tmp_path: Path) -> None:
    model = network()
    optimizer = adam(model)
    train(model, optimizer)
    sites = biases(model)
    assert [str(site) for site in sites] == ["+4 biases in 0", "+4 biases in 2"]
    assert len(sensli.find_sites(model, X)) == 4  # the layers are found beside them

    # the merit is the gradient of the bias that is not there yet
    merits = sensli.measure(model, sites, [(X, Y)], nn.functional.cross_entropy)
    with_bias = network()
    with_bias.load_state_dict(model.state_dict())
    for index in (0, 2):
        with_bias[index].bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    nn.functional.cross_entropy(with_bias(X), Y).backward()
    assert [m.value for m in merits] == pytest.approx(
        [with_bias[index].bias.grad.square().sum().item() for index in (0, 2)], rel=1e-12
    )

    # it goes in without changing the function, the optimizer follows, and undo brings everything back
    before, state = model(X), {name: value.clone() for name, value in model.state_dict().items()}
    growth = sensli.insert(model, merits.best, optimizer=optimizer, check=X)
    assert torch.equal(model(X), before) and growth.parameters == (f"{growth.name}.bias",)
    assert any(p is model.get_parameter(growth.parameters[0]) for p in optimizer.param_groups[0]["params"])
    sensli.undo(model, growth, optimizer=optimizer)
    assert model.state_dict().keys() == state.keys() and len(optimizer.param_groups[0]["params"]) == len(state)

    # both grow, beside a layer; training, checkpoint, replay
    history = sensli.History()
    for site in (*sites, sensli.find_sites(model, X, where="linear")[0]):
        history.append(sensli.insert(model, site, optimizer=optimizer))
    train(model, optimizer)
    assert model[0].bias.abs().sum() > 0
    sensli.save_checkpoint(tmp_path / "c.pt", model, optimizer=optimizer, history=history)
    loaded = sensli.load_checkpoint(tmp_path / "c.pt", network, make_optimizer=adam)
    assert train(loaded.model, loaded.optimizer) == train(model, optimizer)
    replayed = sensli.replay(network(), sensli.History.from_json(history.to_json()))
    replayed.load_state_dict(model.state_dict())
    assert torch.equal(replayed(X), model(X))
    for growth in reversed(history):
        sensli.undo(model, growth, optimizer=optimizer)
    assert model.state_dict().keys() == state.keys()


@pytest.mark.usefixtures("kind")
def test_a_grower_takes_whatever_kind_is_best() -> None:
    model = network()
    grower = sensli.Grower(
        model,
        adam(model),
        preset="paper",
        example=X,
        trigger=sensli.triggers.Every(1),
        where=lambda site: site.kind == "bias",
        tau=0.0,
    )
    while len(grower.history) < 2:
        assert grower.step([(X, Y)], nn.functional.cross_entropy)
    assert {growth.site.kind for growth in grower.history} == {"bias"}


def test_without_its_kind_a_growth_is_refused_with_the_tags_that_are_known() -> None:
    site = Site(Point(Ref("0"), "after", (4,)), Bias(4))
    with pytest.raises(ValueError, match="unknown tag 'bias'"):
        Site.from_dict(site.to_dict())
