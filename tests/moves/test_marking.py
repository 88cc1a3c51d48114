"""Marks that share samples, and equal blocks of which the first and the last are marked, tell what marks one by one tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sensli import find_sites
from sensli.moves.width import marking


class Block(nn.Module):
    """Two maps and a skip; ``odd``: the same modules, and another way through them."""

    def __init__(self, odd: str = "", norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6) if norm else nn.Identity()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        units, gate = self.up(h).relu(), self.gate(h).sigmoid()
        if self.odd == "alone":
            return x + self.down(units) + gate.mean(-1, keepdim=True)
        if self.odd == "turned":
            units = units.flip(-1)
        if self.odd == "mixed":
            units = units.softmax(-1)
        if self.odd == "inside":
            return self.down(units * gate)
        return x + self.down(units * gate)


class Stack(nn.Module):
    def __init__(self, odd: str = "", norm: bool = False, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(odd if place == 2 else "", norm) for place in range(count))
        self.norm = nn.LayerNorm(6) if norm else nn.Identity()
        self.out = nn.Linear(6, 3)
        self.extra = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        beside, returned = 0.0, None
        for block in self.blocks:
            assert isinstance(block, Block)
            if block.odd == "read twice":
                beside = self.extra(block.up(block.norm(x)).relu())
                x = x + block.down(x.new_zeros(len(x), 8))
            else:
                x = block(x)
            returned = x if block.odd == "returned" else returned
        y = self.out(self.norm(x)) + beside
        return y if returned is None else (y, returned)


class Halves(nn.Module):
    """The two halves of a layer have different readers, and the readers are others' too."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.other = nn.Linear(4, 8), nn.Linear(4, 4)
        self.left, self.right, self.out = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.both(x).relu().chunk(2, -1)
        y: Tensor = self.out((self.left(left) + self.right(right * self.other(x))).relu())
        return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"{odd or 'equal'}{' with norms' * norm}": lambda odd=odd, norm=norm: Stack(odd, norm)  # type: ignore[misc]
        for odd in ("", "alone", "turned", "mixed", "inside", "read twice", "returned")
        for norm in (False, True)
    },
    "halves": Halves,
    "layers": lambda: nn.Sequential(
        *(part for _ in range(7) for part in (nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 2)
    ),
}


def told(model: nn.Module, example: Any) -> tuple[list[str], dict[str, str]]:
    found = find_sites(model, example, what="units")
    return list(map(str, found)), {skipped.path: skipped.reason for skipped in found.skipped}


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """All units are marked, each in a sample of its own."""

    def mark(self: marking.Marking) -> None:
        self._run([[(path, u)] for path, each in self.seen.items() for u in marking._at_ends(each.units, 2)])

    def share(self: marking.Marking, units: dict[str, list[int]]) -> None:
        self._run([[(path, unit)] for path, some in units.items() for unit in some])

    patch.setattr(marking.Marking, "mark", mark)
    patch.setattr(marking.Marking, "_share", share)


@pytest.mark.parametrize("name", MODELS)
def test_marks_that_share_samples_tell_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    example = torch.randn(3, next(model.parameters()).shape[-1])
    shared = told(model, example)
    one_by_one(monkeypatch)
    assert shared == told(model, example)
    assert shared[0] or name == "read twice"


def test_a_deeper_stack_takes_no_more_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    look = marking._Run.look
    monkeypatch.setattr(
        marking._Run, "look", lambda run, example: (counts.append(len(run.samples)), look(run, example))[1]
    )
    taken = []
    for count in (4, 16):
        counts.clear()
        assert len(find_sites(Stack(norm=True, count=count), torch.randn(2, 6), what="units")) == count
        taken.append(sum(counts))
    assert taken[0] == taken[1] <= 32
    counts.clear()
    assert (
        len(find_sites(Stack("turned", norm=True, count=16), torch.randn(2, 6), what="units")) == 15
    )  # and the one apart
    assert sum(counts) <= 100


def test_what_is_large_is_marked_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    look = marking._Run.look
    monkeypatch.setattr(
        marking._Run, "look", lambda run, example: (sizes.append(len(run.samples)), look(run, example))[1]
    )
    expected = told(Stack(), torch.ones(2, 6))[0]
    assert max(sizes) > marking._LEAST
    sizes.clear()
    monkeypatch.setattr(marking, "_ROOM", 1)
    assert told(Stack(), torch.ones(2, 6))[0] == expected and max(sizes) == marking._LEAST


class Fan(nn.Module):
    """One layer, and eight that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.readers = nn.ModuleDict({name: nn.Linear(4, 2) for name in "qwertyui"})

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        y: Tensor = sum(reader(h) for reader in self.readers.values())  # type: ignore[assignment]
        return y


def test_readers_come_in_the_order_of_their_calls() -> None:
    """On all ranks of a job: the order of a set of names would differ between processes."""
    (site,) = find_sites(Fan(), torch.randn(2, 3), what="units")
    assert site.move.readers == tuple(f"readers.{name}" for name in "qwertyui")  # type: ignore[attr-defined]
