"""The growth page without a browser: what is read, what is refused, what the file holds."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from forging import places
from recorded import BATCHES, X, grow, make_model
from sensli import Grower, History, Trial, find_sites, insert, measure, triggers
from sensli.checkpoint.checkpoint import save_checkpoint
from sensli.cli.main import main
from sensli.errors import HistoryError
from sensli.page import page_data, read_history
from sensli.page.data import resized_in, spent_flops, with_rivals, words
from sensli.page.files import render
from sensli.surgery.outline import Unit
from sensli.surgery.record import Decision, SiteMerit, Tried, TriedArm


def test_report_from_a_history_and_from_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grower = grow()
    grower.history.save(tmp_path / "history.json")
    (tmp_path / "state.json").write_text(json.dumps(grower.state_dict()))
    torch.save({"model": grower.model.state_dict(), "grower": grower.state_dict()}, tmp_path / "run.pt")
    save_checkpoint(tmp_path / "run.ckpt", grower.model, grower=grower)
    for name in ("history.json", "state.json", "run.pt", "run.ckpt"):
        assert read_history(tmp_path / name).record == grower.history.record
        assert main(["report", str(tmp_path / name), "--metric", "loss"]) == 0
        out = capsys.readouterr().out
        page = (tmp_path / name).with_suffix(".html")
        assert str(page) in out and page.exists()
        for look in grower.history.record.decisions:
            assert str(look) in out
    assert main(["report", str(tmp_path / "history.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [look["inserted"] for look in told["decisions"]] == [[1], [2]]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "neither JSON nor a file that torch.save wrote"),
        (b"{", "cannot be read (JSONDecodeError"),
        (b"{}", "does not contain a history"),
        (b"PK\x03\x04broken", "cannot be read"),
        (b'{"growths": []}', "no record of the training"),
        (b'{"growths": [3]}', "the history is damaged"),
    ],
)
def test_what_is_no_history_is_refused_in_one_line(
    tmp_path: Path, content: bytes, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert main(["report", str(file)]) == 2
    error = capsys.readouterr().err
    assert text in error and error.startswith("sensli: ") and len(error.strip().splitlines()) == 1
    assert not file.with_suffix(".html").exists()


class Anything:
    """What a user may have put into a checkpoint."""


def test_an_altered_look_gives_a_page_or_one_line() -> None:
    """Whatever single entry of a look or of its trial was altered, and whatever it is now."""
    trial = Trial(1, metric=lambda model: float(sum(p.numel() for p in model.parameters())), mode="max")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"what": "both", "units": 1, "per": "parameters", "trial": trial, "tau": 0, "max_factor": None}
    grower = Grower(model, optimizer, preset="paper", example=X[:1], trigger=triggers.Every(1), **options)
    grower.step(BATCHES, cross_entropy)
    data = json.loads(grower.history.to_json())
    look = data["record"]["looks"][0]
    assert look["per"] == "parameters" and look["tried"]["winner"] > 0 and look["inserted"] == [1]
    look["merits"], pages = look["merits"][: max(look["chosen"]) + 1], 0
    for path in places(look):
        for value in (None, "x", "flops", -1, 1.5, True, [], {}, [look["tried"]["arms"][0]]):
            try:
                words(
                    page_data(
                        History.from_dict({**data, "record": {**data["record"], "looks": [put(look, path, value)]}})
                    )
                )
                pages += 1
            except HistoryError as error:
                assert "\n" not in str(error), (path, value)
    assert pages > 20
    with pytest.raises(HistoryError, match="the look at call 1 compares merits per 'x'"):
        History.from_dict({**data, "record": {**data["record"], "looks": [put(look, ("per",), "x")]}})


def put(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value there."""
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


def test_checkpoints_of_other_libraries_are_read_whatever_else_is_in_them(tmp_path: Path) -> None:
    """As Lightning and the Trainer of Hugging Face write them; the weights are not read."""
    grower = grow()
    state = {"grower": grower.state_dict(), "names": []}
    content = {
        "state_dict": grower.model.state_dict(), "hyper_parameters": {"any": Anything(), "path": tmp_path},
        "callbacks": {"Other{}": {"x": 1}, "GrowthCallback": state},
    }  # fmt: skip
    torch.save(content, tmp_path / "last.ckpt")
    for number in (4, 16, 8):
        folder = tmp_path / "run" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        told = {**state, "grower": {**state["grower"], "calls": number}} if number == 16 else {"grower": None}
        (folder / "sensli.json").write_text(json.dumps(told))
    for name in ("last.ckpt", "run", "run/checkpoint-16"):
        assert read_history(tmp_path / name).record == grower.history.record
    with pytest.raises(HistoryError, match=r"is a folder without a history: it has no file 'checkpoint'"):
        read_history(tmp_path)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "sprung",))  # type: ignore[return-value]

    torch.save({"grower": Trap()}, tmp_path / "bad.pt")
    with pytest.raises(HistoryError, match="does not contain a history"):
        read_history(tmp_path / "bad.pt")
    assert not (tmp_path / "sprung").exists()


def test_the_page_is_one_file_with_the_data_in_it() -> None:
    history = grow().history
    page = render(page_data(history, title="<b> & co"))
    assert not re.search(r"(?:src|href)=\"(?!data:)", page) and "http://" not in page.replace(
        "http://www.w3.org/2000/svg", ""
    )
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))  # type: ignore[union-attr]
    assert data["title"] == "<b> & co" and "<h1>&lt;b&gt; &amp; co</h1>" in page
    assert data["curves"][0]["values"] == [metric for _, metric in history.record.metrics]
    assert data["frames"] == [0, 1, 2, 3, 4]
    assert [look["line"] for look in data["looks"]] == [str(look) for look in history.record.decisions]
    for look in data["looks"]:
        for merit in look["merits"]:
            assert merit["value"] == pytest.approx(merit["ratio"] * look["mean"])


def test_a_history_without_a_record_is_refused() -> None:
    model = make_model()
    history = History([insert(model, find_sites(model, X[:1])[0])])
    with pytest.raises(HistoryError, match="no record of the training"):
        page_data(history)


def test_an_undone_growth_is_said_to_be_undone() -> None:
    history = grow().history
    history.pop()
    assert [look["undone"] for look in page_data(history)["looks"]] == [[], [2]]


def test_growths_that_share_a_box_in_older_records_are_drawn_apart() -> None:
    """Older records have one box for `fc1.grown1` and all that went into it later."""
    grown = grow(6).history
    history = History(
        [replace(growth, name="fc1" + ".grown1" * growth.number) for growth in grown], record=grown.record.copied()
    )
    added, label = [growth.site.parameters for growth in history], str(history[0].site.move)
    history.record.outlines[:] = [
        (2 * count, (Unit("fc1.grown1", label, sum(added[:count]), 1), Unit("fc1.anchor", "Linear(4, 2)", 10)))
        for count in (1, 2, 3)
    ]
    for count, drawn in enumerate(page_data(history)["outlines"], 1):
        boxes = {unit["growth"]: unit for unit in drawn["units"]}
        assert len(drawn["units"]) == count + 1 and sorted(boxes, key=str) == [*range(1, count + 1), None]
        for growth in history[:count]:
            assert boxes[growth.number]["path"] == growth.name and boxes[growth.number]["label"] == label
            assert boxes[growth.number]["parameters"] == growth.site.parameters


def test_a_metric_has_its_name() -> None:
    history = grow().history
    assert page_data(history)["measure"] == "metric"
    history.record.metric = "eval_loss"
    data = page_data(history)
    assert (data["measure"], data["caption"], data["curves"][0]["name"]) == ("eval_loss", "eval_loss", "eval_loss")
    assert "eval_loss: 1 at epoch 1" in render(data) and "of eval_loss" not in render(data)
    named = page_data(history, measure="validation loss")
    assert named["caption"] == "Validation loss" and "Validation loss: 1 at epoch 1" in render(named)


def test_tables_in_a_notebook() -> None:
    model = make_model()
    sites = find_sites(model, X[:1])
    merits = measure(model, sites, BATCHES, cross_entropy)
    grower = Grower(model, preset="paper", example=X[:1], trigger=triggers.Every(1), tau=0)
    grower.step(BATCHES, cross_entropy)
    for shown in (sites, merits, grower.history):
        html = shown._repr_html_()
        assert html.startswith("<table>") and str(sites[0].move) in html
    assert f"{merits.best.value:.3e}" in merits._repr_html_()


def reasons(look: Decision, *paths: str) -> list[str]:
    """Why the sites of a check did not compete, in the order of their merits."""
    return [row["aside"] for row in with_rivals(look, [Unit(path, "", 1) for path in paths])]


def test_what_did_not_compete_is_told() -> None:
    def site(path: str, value: float, kind: str = "linear", side: str = "after") -> SiteMerit:
        return SiteMerit(f"{kind} {side} {path}", path, side, value, value, None, 10, 10, kind)

    blocks = [
        site("b.0", 9, "block", "before"),
        site("b.2", 5, "block"),
        site("b.1", 3, "block"),
        site("b.0", 2, "block"),
    ]
    plain = [site("x", 4), site("y", 0.5)]
    facts: dict[str, Any] = {"call": 1, "tau": 1.0, "reason": "", "norm": "frobenius", "growths": (1,)}
    middle, paths = "between blocks only the middle site competes", ("b.0", "b.1", "b.2", "x", "y")
    auto = Decision(**facts, select="auto", merits=(*blocks, *plain), chosen=(4,))
    assert reasons(auto, *paths) == [
        middle,
        middle,
        "",
        middle,
        "",
        "below tau = 1",
    ]  # of 4: before 0, after 0, 1 and 2
    largest = Decision(**facts, select="largest", merits=(*blocks, *plain), chosen=(1,))
    assert reasons(largest, *paths) == ["left out by the limits", "", "", "", "", "below tau = 1"]
    first = Decision(**facts, select="first", merits=tuple(plain), chosen=(0,))
    assert reasons(first, *paths) == ["the merit did not decide: select=first did"] * 2
    arms = (TriedArm("no growth", 1, 1, 0.1), TriedArm(plain[0].site, 1, 1, 0.2))
    tried = Decision(**facts, select="auto", merits=tuple(plain), chosen=(0,), tried=Tried(arms, 1, "metric"))
    assert reasons(tried, *paths) == ["", "not in the trial, which decided"]
    unmeasured = Decision(**{**facts, "norm": "none"}, select="first", merits=tuple(plain), chosen=(0,))
    assert reasons(unmeasured, *paths) == ["", ""]


def test_a_resized_tensor_is_found_under_the_name_that_it_has_then() -> None:
    """A block that comes in moves the numbers of those after it."""
    history = grow(2, what="units", units=2, where=lambda site: site.path == "2").history
    (growth,) = history
    later = replace(
        growth, number=2, resized=(), renames={"4.weight": "5.weight"}, details={"epoch": 3}, parameters=("4.weight",)
    )
    both = History([growth, later])
    units = [Unit(path, "", 1, changes=(1,) if path == "2.anchor" else ()) for path in ("0", "2.anchor", "4", "5")]
    assert resized_in(units, 2, both) == [[], [], [1], []]
    assert resized_in(units, 3, both) == [[], [], [], [1]]
    assert resized_in(units, 1, both) == [[], [], [], []]


def test_flops_are_summed_where_they_are_known() -> None:
    history = grow(max_factor=None).history
    cost, record = spent_flops(history.record), history.record
    assert cost is not None and [cost(call) for call in range(5)] == [0, 192, 384, 672, 960]
    assert page_data(history)["curves"][0]["flops"] == [192, 384, 672, 960]
    other = page_data(history, baseline=grow(trigger=triggers.At(9)).history)["curves"]
    assert [curve["flops"] for curve in other] == [[192, 384, 672, 960], [192, 384, 576, 768]]
    record.decisions[0] = replace(record.decisions[0], flops=None)  # older files do not say them
    assert spent_flops(record) is None and page_data(history)["curves"][0]["flops"] is None
    undone = grow().history
    undone.pop()
    assert page_data(undone)["curves"][0]["flops"] is None
    assert spent_flops(grow(tau=1e9).history.record) is None


def test_the_subtitle() -> None:
    assert (
        page_data(grow(2).history)["subtitle"] == "Started with 42 parameters, grew once to 62 (+48 %). Metric 1 → 0.5."
    )
    assert page_data(grow(tau=1e9).history)["subtitle"] == "42 parameters, 2 checks, nothing grew. Metric 1 → 0.25."


def test_report_with_a_second_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grow().history.save(tmp_path / "grown.json")
    grow(trigger=triggers.At(9)).history.save(tmp_path / "still.json")
    assert main(["report", str(tmp_path / "grown.json"), "--baseline", str(tmp_path / "still.json")]) == 0
    assert '"name":"baseline"' in (tmp_path / "grown.html").read_text()
    assert main(["report", str(tmp_path / "grown.json"), "--baseline", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
