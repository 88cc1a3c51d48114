"""`insert(check=)` in training mode: fair to layers that draw random numbers, and strict where the function really changes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import untouched
from sensli import find_sites, insert
from sensli.errors import BadExample, FunctionChanged
from sensli.moves.point import Ref


class Block(nn.Module):
    """A pre-norm block that drops out by modules, by functions or within attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True) if how == "attention" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.how == "attention":
            assert self.attention is not None
            x = x + self.attention(y, y, y, need_weights=False)[0]
        elif self.how == "sdpa":
            y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.3 if self.training else 0.0)
        elif self.how == "functional":
            y = F.dropout(y, 0.3, self.training)
        return x + self.dropout(self.second(torch.relu(self.first(y))))


class Stack(nn.Module):
    """Blocks in a list; ``draws`` once per block in its own loop, as models with LayerDrop do."""

    def __init__(self, how: str = "module", draws: str = "", blocks: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(how) for _ in range(blocks)), nn.Linear(8, 2)
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and self.draws == "torch":
                torch.rand([])
            if self.training and self.draws == "python":
                random.random()
            x = block(x)
        return self.head(F.dropout(x, 0.3, self.training))


@pytest.mark.parametrize("draws", ["", "torch", "python"])
@pytest.mark.parametrize("how", ["module", "functional", "attention", "sdpa"])
@pytest.mark.slow
def test_twins_with_dropout_are_accepted_in_training_mode(how: str, draws: str) -> None:
    model, x = Stack(how, draws).double().train(), torch.randn(4, 5, 8, dtype=torch.float64)
    for _ in range(2):
        sites = find_sites(model, x, form="twin")
        insert(model, sites[0], check=x)
    assert model(x).shape == (4, 5, 2) and not model.blocks[0]._forward_hooks


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - torch.rand_like(x) if self.training else x


@pytest.mark.parametrize("noise", [nn.AlphaDropout(0.5), Noise()], ids=["alpha dropout", "noise"])
@pytest.mark.parametrize("more", [False, True], ids=["", "more dropout"])
def test_a_change_that_shows_in_training_mode_only_is_found(noise: nn.Module, more: bool) -> None:
    """The layer goes after the ReLU; what stands between them in training makes its own ReLU cut something off."""
    other = [nn.Dropout(0.5)] if more else []
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *other, nn.Linear(8, 2)).double()
    x = torch.randn(16, 6, dtype=torch.float64)
    site = find_sites(model, x)[0]
    model[1].register_forward_hook(lambda module, args, output: noise(output))
    model.eval(), noise.eval()
    model.train(), noise.train()
    with untouched(model), pytest.raises(FunctionChanged, match="changed the output"):
        insert(model, site, check=x)
    model.eval(), noise.eval()
    insert(model, site, check=x)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.head = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.act(self.first(x * mask)))


def test_several_arguments_are_told_from_input_and_target() -> None:
    model, x, mask = Two(), torch.randn(3, 6), torch.ones(3, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site = find_sites(model, (x, mask))[0]
    wrong: list[Any] = [(x, mask), x, {"x": x}, (torch.randn(3, 5), None), ((x, mask, x), None)]
    for check in wrong:
        with (
            untouched(model, optimizer),
            pytest.raises(BadExample, match=r"check does not run.*check=\(\(x, mask\), None\)"),
        ):
            insert(model, site, optimizer=optimizer, check=check)
    parts: list[Any] = [(), (x, mask, x)]
    for check in parts:
        with untouched(model, optimizer), pytest.raises(BadExample, match="check must be"):
            insert(model, site, optimizer=optimizer, check=check)
    for check in ((((x, mask), None)), [(x, mask)], {"x": x, "mask": mask}):
        insert(model, site, optimizer=optimizer, check=check)


class Counted(nn.Module):
    """Fails when its list is longer than it was."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(self.net) != 3:
            raise RuntimeError("not three")
        return self.net(x)


def test_a_model_that_fails_with_the_layer_is_put_back() -> None:
    model, x = Counted(), torch.randn(3, 6)
    site = find_sites(nn.Sequential(model.net), x)[0]
    site = replace(site, point=replace(site.point, anchor=Ref("net.1"), neighbours=(Ref("net.0"),)))
    with untouched(model), pytest.raises(FunctionChanged, match="the model fails on check"):
        insert(model, site, check=x)
