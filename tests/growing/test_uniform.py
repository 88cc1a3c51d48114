"""`Grower(what="uniform")`: all widths by one share, as one decision; each part against what a plain growth of it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import snapshot
from sensli import Grower, Rates, Trial, find_sites, grow, load_checkpoint, measure, replay, save_checkpoint, undo
from sensli.errors import SensliError, UnsupportedSite
from sensli.growing.triggers import At, Every, Limit, Pays
from sensli.growing.uniform import Uniform
from sensli.page import page_data
from sensli.surgery.history import History
from sensli_lab.compare.tasks.images import resnet

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).double()
Y = torch.randint(3, (16,), generator=torch.Generator().manual_seed(2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 8, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


class Dense(nn.Module):
    """What two layers make lies side by side in what reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(4, 4)
        self.read, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([torch.tanh(self.first(x)), torch.tanh(self.second(x)), torch.tanh(self.third(x))], dim=1)
        return self.head(torch.tanh(self.read(joined)))


def small_resnet() -> nn.Module:
    return resnet(8, 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "transformer": transformer, "dense": Dense, "resnet": small_resnet,
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def data(name: str) -> list[tuple[Tensor, Tensor]]:
    if name != "resnet":
        return [(X, Y)]
    return [(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(4)).double(), Y[:6])]


def grower_of(model: nn.Module, name: str = "mlp", **options: Any) -> Grower:
    options = {"trigger": Every(1), "what": "uniform", "example": data(name)[0][0][:2], **options}
    return Grower(model, torch.optim.Adam(model.parameters(), lr=1e-2), **options)


def train(model: Any, optimizer: Any, name: str, steps: int = 2) -> None:
    for _ in range(steps):
        for x, y in data(name):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_all_widths_grow_by_the_share_and_the_function_stays(name: str) -> None:
    model = made(name)
    grower = grower_of(model, name)
    optimizer = grower.optimizers[0]
    train(model, optimizer, name)
    model.eval()
    x = data(name)[0][0]
    sites = find_sites(model, x[:2], what="units", units=0.25)
    widths = {site.path: (site.move.units, round(site.move.units * 1.25)) for site in sites}
    before, output = snapshot(model, optimizer), model(x)
    size = sum(p.numel() for p in model.parameters())
    fresh = copy.deepcopy(model)
    moments = {id(p): optimizer.state[p]["exp_avg"].clone() for p in model.parameters()}
    growth = grower.step(data(name), F.cross_entropy)
    assert growth is not None and len(grower.history) == len(widths) > 1 and grower.history.additions == 1
    torch.testing.assert_close(model(x), output, rtol=1e-12, atol=1e-12)
    after = find_sites(model, x[:2], what="units", units=1)
    assert {site.path: site.move.units for site in after} == {path: new for path, (_, new) in widths.items()}
    assert {
        each.site.path: (each.site.move.units, each.site.move.units + each.site.move.more) for each in grower.history
    } == widths
    # One decision, whose costs are what the model has really got.
    (look,) = grower.history.record.decisions
    (merit,) = look.merits
    assert look.growths == tuple(each.number for each in grower.history) and look.chosen == (0,)
    assert merit.parameters == sum(p.numel() for p in model.parameters()) - size == sum(look.added)
    assert all(each.details["group"] == growth.number for each in grower.history)
    assert str(look).count("\n") == 1 and f"in {len(widths)} widths" in str(look)
    # The moments of the old entries are kept.
    kept = [
        p
        for p in model.parameters()
        if id(p) in moments and optimizer.state[p]["exp_avg"].shape != moments[id(p)].shape
    ]
    assert kept and all(
        optimizer.state[p]["exp_avg"].abs().sum() == pytest.approx(moments[id(p)].abs().sum()) for p in kept
    )
    train(model, optimizer, name, 1)  # it trains on
    again = replay(fresh, History.from_dict(grower.history.to_dict()))
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert page_data(grower.history)

    model = made(name)
    grower = grower_of(model, name)
    train(model, grower.optimizers[0], name)
    model.eval()
    before = snapshot(model, *grower.optimizers)
    grower.step(data(name), F.cross_entropy)
    for _ in widths:
        undo(model, optimizer=grower.optimizers)
    assert snapshot(model, *grower.optimizers) == before


def test_the_merit_is_the_sum_of_those_of_the_parts() -> None:
    model = made("mlp")
    merits = measure(model, find_sites(model, X[:2], what="units", units=0.25), data("mlp"), F.cross_entropy)
    grower = grower_of(model, tau=1e9)
    assert grower.step(data("mlp"), F.cross_entropy) is None
    assert grower.last_merits is not None
    (whole,) = grower.last_merits
    assert whole.value == pytest.approx(sum(merit.value for merit in merits))
    assert whole.ratio == pytest.approx(sum(merit.ratio or 0 for merit in merits))
    assert whole.share == pytest.approx(sum(merit.share or 0 for merit in merits))
    assert isinstance(whole.site.move, Uniform)
    assert [part.value for part in whole.site.move.parts] == pytest.approx([merit.value for merit in merits])
    assert "below tau" in grower.history.record.decisions[0].reason


def test_thresholds_and_limits_apply_to_the_whole() -> None:
    model = made("mlp")
    site = grower_of(model).sites()[0]
    size = sum(p.numel() for p in model.parameters())
    alone = sum(each.parameters for each in find_sites(model, X[:2], what="units", units=0.25))
    assert site.parameters > alone  # what is new in both directions of the matrix between them
    for trigger, grows in (
        (Every(1) & Limit(parameters=size + site.parameters - 1), False),
        (Every(1) & Limit(parameters=size + site.parameters), True),
        (Pays(1e-9), True),
        (Pays(1e9), False),
    ):
        each = copy.deepcopy(model)
        assert (grower_of(each, trigger=trigger).step(data("mlp"), F.cross_entropy) is not None) is grows
        assert (sum(p.numel() for p in each.parameters()) > size) is grows
    limit = (size + site.parameters - 1) / size
    with pytest.warns(UserWarning, match="every growth would bring the model to more than max_factor"):
        assert grower_of(copy.deepcopy(model), max_factor=limit).step(data("mlp"), F.cross_entropy) is None
    grower = grower_of(model, trigger=Every(1) & Limit(growths=2))
    for _ in range(4):
        grower.step(data("mlp"), F.cross_entropy)
    assert grower.history.additions == 2 and len(grower.history) == 4


def test_a_training_that_is_saved_and_loaded_goes_on_to_the_bit(tmp_path: Path) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    def make_grower(model: nn.Module, optimizer: Any, _: Any) -> Grower:
        return Grower(
            model,
            optimizer,
            what="uniform",
            units=0.5,
            trigger=Every(1) & Limit(growths=3),
            example=X[:2],
            max_factor=4,
        )

    def advance(model: nn.Module, optimizer: Any, grower: Grower) -> None:
        train(model, optimizer, "mlp")
        grower.step(data("mlp"), F.cross_entropy)

    model = made("mlp")
    optimizer = adam(model)
    grower = make_grower(model, optimizer, None)
    advance(model, optimizer, grower)
    save_checkpoint(tmp_path / "run", model, optimizer=optimizer, grower=grower)
    loaded = load_checkpoint(tmp_path / "run", lambda: made("mlp"), adam, make_grower=make_grower)
    assert loaded.grower is not None
    for _ in range(3):
        advance(model, optimizer, grower)
        advance(loaded.model, loaded.optimizer, loaded.grower)
    assert len(grower.history) == 6 and model[0].out_features == 27
    ours, theirs = model.state_dict(), loaded.model.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_it_can_be_tried_and_is_then_kept_or_taken_back_as_a_whole() -> None:
    for better, grows in (
        (lambda model: float(-model[0].out_features), True),
        (lambda model: float(model[0].out_features), False),
    ):
        model = made("mlp")
        grower = grower_of(model, trial=Trial(2, metric=better), rates=Rates(lr_factor=0.5))
        grower.step(data("mlp"), F.cross_entropy)
        assert (model[0].out_features, model[2].out_features) == ((10, 15) if grows else (8, 12))
        assert grower.optimizers[0].param_groups[0]["lr"] == (5e-3 if grows else 1e-2)  # once, not for each part


def test_where_names_the_widths_and_other_starts_work_too() -> None:
    for options, expected in (
        ({"where": "2"}, (8, 15)),
        ({"init": "net2net"}, (10, 15)),
        ({"init": "gradmax"}, (10, 15)),
    ):
        model = made("mlp")
        output = model(X)
        grower_of(model, **options).step(data("mlp"), F.cross_entropy)
        assert (model[0].out_features, model[2].out_features) == expected
        torch.testing.assert_close(model(X), output, rtol=1e-9, atol=1e-9)


def test_what_makes_no_sense_is_refused() -> None:
    for options, text in (
        ({"units": 4}, r"^units must be a share with what='uniform' \(for example 0\.25\), got 4"),
        ({"max_growths": 2}, r"^max_growths must be left out with what='uniform', got 2: all layers grow together"),
        (
            {"select": "largest"},
            r"^select must be left out with what='uniform', got 'largest': it chooses between sites",
        ),
        ({"per": "flops"}, r"^per must be left out with what='uniform'"),
        ({"confidence": 0.9}, r"^confidence must be left out with what='uniform'"),
        ({"form": "relu"}, r"^form must be left out with what='uniform', got 'relu': it is about layers"),
        ({"init": "fresh"}, r"^init must be about what grows with what='uniform', got 'fresh'"),
        ({"rates": Rates(new_lr_factor=0.5)}, r"^new_lr_factor must be None with what='uniform'"),
        ({"rates": Rates(freeze_rest=True)}, r"^freeze_rest must be False with what='uniform'"),
        ({"trigger": At(1) & Limit(depth=3)}, r"^depth in Limit\(depth=3\) must be left out where only units grow"),
        ({"strategy": "net2net"}, r"^what must be 'units' with strategy='net2net', got 'uniform'"),
    ):
        with pytest.raises(ValueError, match=text):
            grower_of(made("mlp"), **options)
    with pytest.raises(
        ValueError, match=r"^what must be one of .* here, got 'uniform': that is a decision of a Grower about al"
    ):
        find_sites(made("mlp"), X[:2], what="uniform")
    with pytest.raises(SensliError, match="nowhere to grow"):
        Grower(nn.Sequential(nn.Linear(4, 3)), what="uniform", trigger=At(1), example=X[:2].float()).sites()
    model = made("mlp")
    with pytest.raises(
        UnsupportedSite, match=r"is grown by a Grower, part by part\. Grow at the sites in site\.move\.parts"
    ):
        grow(model, grower_of(model).sites()[0])
