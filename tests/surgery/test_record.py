"""What a Grower writes down: every look, every metric, the layers; and that it comes back from JSON."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recorded import BATCHES, X, Y, grow, make_model
from sensli import Grower, History, find_sites, replay, triggers, undo
from sensli.errors import HistoryError
from sensli.growing import grower as grower_module
from sensli.merits.merits import Merit, Merits, order_merits
from sensli.page import page_data, write_page
from sensli.surgery import record as record_module
from sensli.surgery.outline import outline
from sensli.surgery.record import Decision, Record, reason_of


def test_every_look_is_kept_with_all_merits() -> None:
    grower = grow()
    record = grower.history.record
    assert [look.call for look in record.decisions] == [2, 4]
    assert [look.growths for look in record.decisions] == [(1,), (2,)]
    assert [len(look.merits) for look in record.decisions] == [2, 3]
    assert record.metrics == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
    for look, growth in zip(record.decisions, grower.history, strict=True):
        chosen = look.merits[look.chosen[0]]
        assert (chosen.site, chosen.value, chosen.ratio) == (
            str(growth.site), growth.details["merit"], growth.details["ratio"],
        )  # fmt: skip


def test_a_look_without_insertion_is_kept_with_its_reason() -> None:
    looks = grow(tau=1e9).history.record.decisions
    assert len(looks) == 2 and not looks[0].growths and len(looks[0].merits) == 2
    assert "below tau = 1e+09" in looks[0].reason
    assert str(looks[0]).startswith("epoch 2: nothing grown | the best, Linear(4, 4) + ReLU after")
    no_room = grow(trigger=triggers.Every(2) & triggers.Limit(parameters=43)).history.record.decisions
    assert [look.reason for look in no_room] == ["the trigger's limits leave no room to grow at any site"] * 2


def test_the_reason_of_a_control_names_the_largest_merit() -> None:
    look = grow(calls=2, select="smallest", tau=1e-6).history.record.decisions[0]
    assert look.chosen == (1,)
    assert look.reason.startswith("select=smallest gave it, and the largest merit, ")
    own = grow(calls=2, select=lambda merits: merits.worst, tau=1e-6).history.record.decisions[0]
    assert own.chosen == (1,) and own.reason.startswith("select=<lambda> gave it, and ")


def test_the_reason_tells_what_a_stack_competed_with() -> None:
    """Above a table in which a place before the first block has a merit that is 18 times as large."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    model = nn.Sequential(nn.Linear(2, 4), *(Block() for _ in range(3)), nn.Linear(4, 2))
    sites = find_sites(model, X[:1], what="both", units=2)
    between = [site for site in sites if site.stack is not None]
    units = next(site for site in sites if site.kind == "units")
    worth = {between[0]: 0.018, between[1]: 0.0002, between[2]: 0.0004, units: 0.001}
    found = [Merit(site, worth.get(site, 0.0001)) for site in sites]
    merits = Merits(found, norm="frobenius", batches=1)
    (first, *_) = order_merits("auto", merits, 1)
    assert first.site is units
    assert reason_of(merits, [first], select="auto", tau=0.0) == (
        "its merit, 1.0e-03, is the largest of those that compete (of the 4 sites between blocks only the middle one, "
        "Twin(Block) after 2 with 4.0e-04, because merits at the ends of a stack mislead)"
    )
    assert "tau" not in reason_of(merits, [replace(first, ratio=0.5)], select="largest", tau=0.0)
    assert "is at least tau = 0.1" in reason_of(merits, [replace(first, ratio=0.5)], select="largest", tau=0.1)
    second = next(merit for merit in merits if merit.value == 0.0001)  # a limit left the first one out
    assert reason_of(merits, [second], select="auto", tau=0.0).startswith(
        "its merit is the largest of those that passed"
    )


def test_zero_merits_are_kept_too() -> None:
    grower = Grower(make_model(), preset="paper", example=X[:1], trigger=triggers.Every(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grower.step(BATCHES, lambda output, target: output.sum() * 0.0)
    assert [look.reason for look in grower.history.record.decisions] == ["all merits are zero"]


def test_one_line_per_decision() -> None:
    look = grow().history.record.decisions[0]
    merit = look.merits[0]
    before = 2 * (2 * 4 + 4 * 4 + 4 * 2)
    assert look.flops == before and look.parameters == 42
    assert str(look) == (
        f"epoch 2: +{merit.site} | merit {merit.value:.1e}, {merit.ratio:.2g} x mean | 42 -> 62 parameters, x1.5, +{32 / before:.0%} FLOPs"
    ).replace("%", " %")
    both = grow(calls=2, max_growths=2).history.record.decisions[0]
    assert len(str(both).splitlines()) == 2 and both.growths == (1, 2)
    assert "| 42 -> 62 parameters, x1.5," in str(both) and "| 62 -> 82 parameters, x1.3," in str(both)
    assert "(2 layers at once)" in both.reason


def test_round_trip_and_older_files() -> None:
    history = grow().history
    text = history.to_json()
    again = History.from_json(text)
    assert again == history and again.record == history.record
    assert again.to_json() == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    data = history.to_dict()
    del data["record"]  # as written before there was one
    older = History.from_dict(data)
    assert older == history and not older.record
    assert "record" not in older.to_dict()
    replay(make_model(), older)


def test_a_damaged_record_is_refused_with_the_reason() -> None:
    data = grow().history.to_dict()
    data["record"]["looks"][0].pop("merits")
    with pytest.raises(HistoryError, match="the history is damaged: the key 'merits' is missing"):
        History.from_dict(data)


def test_a_resumed_grower_goes_on_writing() -> None:
    grower = grow(calls=2)
    model = replay(make_model(), grower.history)
    again = Grower(model, preset="paper", example=X[:1], trigger=triggers.Every(2), tau=0)
    again.load_state_dict(json.loads(json.dumps(grower.state_dict())))
    for call in (2, 3):
        again.step(BATCHES, cross_entropy, metric=1 / (call + 1))
    assert [look.call for look in again.history.record.decisions] == [2, 4]
    assert [call for call, _ in again.history.record.metrics] == [1, 2, 3, 4]
    assert len(again.history.record.outlines) == 3


def test_a_call_that_raises_leaves_no_trace() -> None:
    grower = grow(calls=1)
    with pytest.raises(RuntimeError):
        grower.step([(X[:, :1], Y)], cross_entropy, metric=7.0)
    assert grower.history.record.metrics == [(1, 1.0)] and not grower.history.record.decisions


def test_the_model_is_drawn_only_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def drawing(model: Any) -> Any:
        drawn.append(sum(parameter.numel() for parameter in model.parameters()))
        return outline(model)

    monkeypatch.setattr(grower_module, "outline", drawing)
    idle = grow(calls=6, tau=1e9)
    assert len(idle.history.record.decisions) == 3 and drawn == [42]
    drawn.clear()
    grower = grow(calls=5)
    assert len(grower.history) == 2 and drawn == [42, 62, 82]
    grower.history.pop()
    undo(grower.model)
    grower.options.trigger.allows = lambda site, moment: False  # type: ignore[method-assign]
    grower.step(BATCHES, cross_entropy)
    assert drawn == [42, 62, 82, 62]
    assert [call for call, _ in grower.history.record.outlines] == [0, 2, 4, 6]


def test_a_drawing_that_fails_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(model: Any) -> Any:
        raise RuntimeError("no pencil")

    monkeypatch.setattr(grower_module, "outline", fails)
    with pytest.warns(
        UserWarning, match=r"could not be drawn for the page of the training: RuntimeError: no pencil"
    ) as told:
        grower = grow()
    assert (
        sum("drawn" in str(each.message) for each in told) == 3
        and len(grower.history) == 2
        and not grower.history.record.outlines
    )
    again = History.from_json(grower.history.to_json())
    assert "2 layers inserted" in write_page(tmp_path / "page.html", page_data(again)).read_text()


def test_metrics_stay_few_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "LIMIT", 10)
    record = Record()
    for call in range(1, 101):
        record.count(call, math.nan if call == 96 else float(call))
    assert len(record.metrics) <= 10 and record.calls == 100
    assert all(call == metric for call, metric in record.metrics if metric is not None)
    assert (96, None) in record.metrics


def test_the_log_is_told_every_decision() -> None:
    told: list[Decision] = []
    grower = grow(log=told.append)
    assert told == grower.history.record.decisions
    with pytest.raises(TypeError, match="log must be a function that takes one Decision"):
        grow(log=3)
    with pytest.raises(TypeError, match="or a list of these, got 3"):
        grow(log=[print, 3])


def test_several_logs_are_told_and_one_that_fails_does_not_silence_the_others() -> None:
    first: list[Decision] = []
    second: list[Decision] = []
    with pytest.warns(UserWarning, match="the log of the Grower failed: ZeroDivisionError"):
        grower = grow(log=[first.append, lambda look: 1 / 0, second.append])
    assert first == second == grower.history.record.decisions


def test_tensorboard_gets_merits_sizes_and_decisions(tmp_path: Path) -> None:
    """What its own reader finds in the file that its own writer wrote."""
    pytest.importorskip("tensorboard", reason="TensorBoard is missing. Get it with: pip install 'sensli[dev]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        looks = grow(log=writer).history.record.decisions
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    best = looks[0].merits[0]
    merits = {event.step: event.value for event in events.Scalars(f"sensli/merit/{best.site}")}
    assert merits[2] == pytest.approx(best.value)
    assert [(e.step, e.value) for e in events.Scalars("sensli/parameters")] == [(2, 62), (4, 82)]
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("sensli/decision/text_summary")]
    assert texts == [str(look) for look in looks]


def test_a_log_that_fails_does_not_stop_the_training() -> None:
    with pytest.warns(UserWarning, match="the log of the Grower failed: ZeroDivisionError"):
        grower = grow(calls=2, log=lambda look: 1 / 0)
    assert len(grower.history) == 1 and grower.calls == 2


def test_steps_are_called_steps(tmp_path: Path) -> None:
    lines: list[str] = []
    history = grow(step_name="step", recycle=True, log=lambda look: lines.append(str(look))).history
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
    assert [growth.call for growth in history] == [growth.details["step"] for growth in history] == [2, 2, 4]
    assert "(step 2, merit" in str(history) and "step</th>" in history._repr_html_()
    history.save(tmp_path / "history.json")
    again = History.load(tmp_path / "history.json")
    assert again.record.step_name == "step" and str(again.record.decisions[0]) == lines[0]
    data = history.to_dict()
    data["record"]["unit"] = "banana"
    with pytest.raises(HistoryError, match="unit is 'banana'"):
        History.from_dict(data)
    for look in data["record"]["looks"]:  # as written before calls could be steps
        del look["unit"]
    del data["record"]["unit"], data["record"]["metric"]
    assert str(History.from_dict(data).record.decisions[0]).startswith("epoch 2: ")
