"""What a Grower writes down of widths: lines, reasons, boxes; and that all of it comes back from JSON."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ranks
from recorded import BATCHES, X, grow, make_model
from sensli import Grower, History, find_sites, measure, triggers
from sensli import grow as grow_at
from sensli.surgery.outline import outline


def counted(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_width_is_one_line_of_the_log() -> None:
    grower = grow(calls=2, what="units", units=2)
    look, growth = grower.history.record.decisions[0], grower.history[0]
    merit = look.merits[look.chosen[0]]
    assert merit.kind == "units" and merit.site.startswith("+2 units in ")
    assert str(look).startswith(f"epoch 2: {merit.site} | merit {merit.value:.1e}, ")
    assert f"| 42 -> {counted(grower.model)} parameters, x1.3, +38 % FLOPs" in str(look)
    assert str(growth).startswith(f"growth 1: {growth.site} (epoch 2, merit")  # nothing has a new name
    assert f">1: {html.escape(str(growth.site))}<" in grower.history._repr_html_()


def test_two_widths_at_once_are_counted_as_they_are() -> None:
    """The second reads the new units of the first, so it costs more than it would have alone."""
    grower = grow(calls=2, what="units", units=2, max_growths=2)
    look = grower.history.record.decisions[0]
    assert look.growths == (1, 2) and "(2 growths at once)" in look.reason
    assert counted(grower.model) == 74 == 42 + sum(look.added)
    first = 42 + look.added[0]
    assert f"| {first} -> 74 parameters" in str(look).splitlines()[1]
    assert [growth.site.parameters for growth in grower.history] == list(look.added)
    assert look.flops == 64 and sum(growth.site.flops for growth in grower.history) == 24 + 32


def test_several_growths_at_once_leave_a_model_that_runs() -> None:
    """A layer that was measured for four units does not fit after six, and units do not pass a layer that was put in between."""
    kinds = set()
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)
        ).double()  # fmt: skip
        x, y = torch.randn(64, 2, dtype=torch.float64), torch.randint(0, 2, (64,))
        trigger = triggers.Every(1)
        grower = Grower(
            model,
            preset="paper",
            example=x[:1],
            trigger=trigger,
            tau=0,
            what="both",
            units=2,
            max_growths=6,
            max_factor=None,
        )
        for _ in range(2):
            before = model(x)
            grower.step([(x, y)], cross_entropy)
            look = grower.history.record.decisions[-1]
            torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
            assert len(look.growths) > 1 and look.parameters is not None
            assert look.parameters + sum(look.added) == counted(model)
        kinds |= {growth.site.kind for growth in grower.history}
    assert kinds == {"units", "linear"}


def grow_both_in_a_process() -> Any:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters())
    grower = Grower(
        model,
        optimizer,
        preset="paper",
        example=X[:1],
        trigger=triggers.Every(1),
        tau=0,
        what="both",
        units=2,
        max_growths=3,
        max_factor=None,
    )
    x, y = BATCHES[0]
    part = slice(dist.get_rank(), None, 2)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        grower.step([(x[part], y[part])], cross_entropy)
    return [str(growth) for growth in grower.history], [look.added for look in grower.history.record.decisions]


@pytest.mark.process
def test_processes_leave_out_the_same_sites(tmp_path: Path) -> None:
    found, added = ranks.run(grow_both_in_a_process, 2, tmp_path)
    assert len(found) > 2 and any("units in" in line for line in found)
    assert all(len(each) > 0 for each in added)


def test_a_reason_tells_what_merits_were_compared_by() -> None:
    for per, words in (
        (None, "its merit is the largest of 4"),
        ("parameters", "its merit per parameter is the largest of 4"),
    ):
        look = grow(calls=2, what="both", units=1, per=per).history.record.decisions[0]
        assert words in look.reason and look.per == per


def test_a_box_knows_its_units_and_what_changed_it() -> None:
    model = make_model()
    grow_at(model, find_sites(model, X[:1], what="units", units=2)[0])
    boxes = {unit.path: unit for unit in outline(model)}
    assert [(unit.label, unit.units, unit.changes) for unit in boxes.values()] == [
        ("Linear(2, 6)", 6, (1,)), ("ReLU", None, ()), ("Linear(6, 4)", 4, ()), ("ReLU", None, ()), ("Linear(4, 2)", 2, ()),
    ]  # fmt: skip


def test_a_widened_layer_of_a_deep_model_stays_a_box() -> None:
    model = nn.Sequential(*(layer for _ in range(30) for layer in (nn.Linear(3, 3), nn.ReLU())), nn.Linear(3, 1))
    grow_at(model, find_sites(model, torch.randn(1, 3), what="units", units=1)[7])
    units = outline(model, 40)
    widened = [unit for unit in units if unit.changes]
    assert len(units) <= 40 and [(unit.label, unit.units) for unit in widened] == [("Linear(3, 4)", 4)]


def test_units_of_an_inserted_layer_are_widened() -> None:
    model = make_model()
    x, y = BATCHES[0]
    grow_at(model, find_sites(model, X[:1])[0])
    inside = [site for site in find_sites(model, X[:1], what="units", units=2) if site.path.startswith("grown1")]
    grow_at(model, measure(model, inside, [(x, y)], cross_entropy).best)
    box = next(unit for unit in outline(model) if unit.path == "grown1")
    assert (box.label, box.growth, box.units, box.changes) == ("Linear(4, 6) + ReLU", 1, 6, (2,))


def test_it_comes_back_from_json_and_older_files_load() -> None:
    history = grow(calls=4, what="both", units=2, max_growths=2, per="flops").history
    again = History.from_json(history.to_json())
    assert again == history and again.record == history.record and again.to_json() == history.to_json()
    data = history.to_dict()
    for look in data["record"]["looks"]:  # as written before units could grow
        del look["added"], look["per"]
        for merit in look["merits"]:
            del merit["kind"]
    for drawn in data["record"]["outlines"]:
        for unit in drawn["units"]:
            del unit["units"], unit["changes"]
    older = History.from_dict(data)
    assert [look.growths for look in older.record.decisions] == [look.growths for look in history.record.decisions]
    assert str(older.record.decisions[0]).splitlines()[0] == str(history.record.decisions[0]).splitlines()[0]


def test_a_budget_counts_widths_as_they_are() -> None:
    for limit, growths in ((55, 0), (56, 1), (73, 1), (74, 2)):
        grower = grow(
            calls=2, what="units", units=2, max_growths=2, trigger=triggers.Every(2) & triggers.Limit(parameters=limit)
        )
        assert (len(grower.history), counted(grower.model) <= limit) == (growths, True)
    flops = triggers.Limit(flops=88)  # 64 now, 24 for two units
    grower = grow(calls=8, what="units", units=2, trigger=triggers.Every(2) & flops)
    assert len(grower.history) == 1


def test_a_full_depth_leaves_room_for_units() -> None:
    for what, growths in (("layers", 0), ("both", 1)):
        model = make_model()
        grower = Grower(
            model, preset="paper", example=X[:1], trigger=triggers.Every(1) & triggers.Limit(depth=3), tau=0, what=what
        )
        grower.step(BATCHES, cross_entropy)
        assert [growth.site.kind for growth in grower.history] == ["units"] * growths
