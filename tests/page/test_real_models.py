"""The page of a deep model in a real browser: every growth is seen, nothing is wider than its box, all of it is on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from browser import opened, too_wide
from recorded import deep
from sensli.page import page_data, write_page

pytestmark = pytest.mark.process

SIZES = {"desk": (1400, 900), "tablet": (820, 1100), "phone": (390, 844)}

# The box of a growth, as far as it can be seen: inside its panel, and not below the curves that stay at the edge of a phone.
SEEN = """number => {
    const box = document.querySelector(`[data-growth="${number}"]`);
    if (!box) return false;
    const at = box.getBoundingClientRect(), panel = document.querySelector("#network .drawing").getBoundingClientRect();
    const found = [at.top + 3, at.bottom - 3].map(y => document.elementFromPoint((at.left + at.right) / 2, y));
    return at.top >= panel.top && at.bottom <= panel.bottom && found.every(e => e && document.getElementById("network").contains(e));
}"""
THROUGH = """seen => Array.from({length: 20}, (_, k) => {
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "n"}));
    return [seen(k + 1), document.querySelectorAll("[data-growth]").length];
})"""
PLACES = """() => Object.fromEntries([...document.querySelectorAll(".controls, figure:not([hidden])")]
    .map(e => [e.id || "controls", e.getBoundingClientRect().toJSON()]))"""


# The line under the slider and the network while it plays: the first is not below the controls, the second not below the curves.
CLEAR = """() => {
    const place = e => document.querySelector(e).getBoundingClientRect();
    const [controls, line, network, loss] = [".controls", "#state", "#network", "#loss"].map(place);
    return controls.bottom <= line.top + 1 && line.bottom <= network.top && network.bottom <= loss.top;
}"""


def size(name: str) -> dict[str, int]:
    return dict(zip(("width", "height"), SIZES[name], strict=True))


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 growths in a stack of 24 blocks with long names, by steps, of a metric with a name; one value is a spike."""
    return write_page(
        tmp_path_factory.mktemp("deep") / "page.html", page_data(deep(step_name="step", metric="eval_loss"))
    )


@pytest.mark.parametrize("name", ["desk", "phone", pytest.param("tablet", marks=pytest.mark.thorough)])
def test_every_growth_has_a_box_that_is_scrolled_to(browser: Any, page_file: Path, name: str) -> None:
    with opened(browser, page_file, place="step=0", viewport=size(name), reduced_motion="reduce") as page:
        page.evaluate("document.getElementById('network').scrollIntoView({block: 'nearest'})")  # as playing does
        seen = page.evaluate(f"({THROUGH})({SEEN})")
        assert seen == [[True, number] for number in range(1, 21)]
        page.goto(f"{page_file.as_uri()}?#step=30")  # opened there at once
        page.evaluate("document.getElementById('network').scrollIntoView({block: 'nearest'})")
        assert page.evaluate(SEEN, 10)
        page.keyboard.press("n")
        assert page.locator("#state").evaluate(
            "e => e.clientHeight <= 2.5 * parseFloat(getComputedStyle(e).lineHeight)"
        )
        assert page.locator("rect.now").get_attribute("data-growth") == "11"
        boxes = page.eval_on_selector_all(
            "[data-unit*='blocks.']", "all => all.map(e => e.getBoundingClientRect().width)"
        )
        assert len(boxes) == 35 and max(boxes) - min(boxes) < 0.1
        assert too_wide(page) == []
        lines = "all => all.map(e => e.clientHeight / parseFloat(getComputedStyle(e).lineHeight))"
        assert (
            max(page.eval_on_selector_all(".bar .name span:first-child", lines)) < 2.1
        )  # names keep the width of the panel
        page.keyboard.press("n")
        assert page.evaluate("document.querySelector('#network .drawing').scrollTop") > 0  # the twelfth is far down
        page.evaluate("() => { slider.value = 0; slider.dispatchEvent(new Event('input')); }")
        assert page.evaluate("document.querySelector('#network .drawing').scrollTop") == 0  # a film begins at the top


def test_while_it_plays_the_line_is_the_counters_and_the_growth_is_seen(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file, place="step=0", viewport=size("phone")) as page:
        page.clock.install()  # the film's own clock, which is moved on by hand
        page.clock.pause_at(page.evaluate("Date.now() + 1000"))
        page.click("#play")
        shown, seen = [0], set[int]()
        for _ in range(30):
            page.clock.run_for(200)
            counter, line = page.evaluate("['epoch', 'state'].map(id => document.getElementById(id).textContent)")
            assert line.split(" | ")[0] == counter
            shown.append(int(counter.removeprefix("step ")))
            if shown[-4:] == [shown[-1]] * 4:  # the boxes have moved apart
                assert page.evaluate(SEEN, shown[-1] // 3) and page.evaluate(CLEAR), counter
                seen.add(shown[-1])
        assert seen == {3, 6, 9}
        page.click("#play")
        assert page.locator("#said").text_content() == page.locator("#state").get_attribute("title")


def test_all_panels_are_on_one_screen(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file, viewport=size("desk"), color_scheme="dark") as page:
        places = page.evaluate(PLACES)
        assert all(0 <= place["top"] < place["bottom"] <= 900 for place in places.values()) and len(places) == 4
        page.set_viewport_size(size("phone"))
        for down in (0, 300, 500):
            page.evaluate(f"scrollTo(0, {down})")
            places = page.evaluate(PLACES)
            assert places["controls"]["top"] >= 0 and places["loss"]["bottom"] <= 844
            assert places["controls"]["bottom"] < places["loss"]["top"]


def test_the_curve_stays_in_its_chart(browser: Any, page_file: Path) -> None:
    outside = """() => { const svg = document.querySelector('#loss svg'), height = svg.height.baseVal.value;
        return [...svg.querySelectorAll('polyline')].flatMap(e => [...e.points]).filter(p => p.y < 0 || p.y > height - 20).length; }"""
    ticks = "() => [...document.querySelectorAll('#loss .tick')].map(e => Number(e.textContent))"
    with opened(browser, page_file, viewport=size("desk")) as page:
        assert page.evaluate(outside) == 0 and min(page.evaluate(ticks)) > 2 and max(page.evaluate(ticks)) < 2.5
        assert page.locator("#loss .time").all_text_contents() == ["0", "20", "40", "step 60"]
        assert page.eval_on_selector_all("[data-above]", "all => all.map(e => e.dataset.above)") == ["10000"]
        assert page.locator("[data-above] title").text_content() == "step 20: 10,000, above the chart"
        page.check("#log")
        assert (
            page.evaluate(outside) == 0
            and page.locator("[data-above]").count() == 0
            and max(page.evaluate(ticks)) >= 1000
        )


def test_names_and_legends(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file, viewport=size("phone")) as page:
        assert page.locator("#measure").inner_text() == "eval_loss"
        assert "eval_loss: 2.3 at step 1, 2.103 at step 60." in page.locator("#words").text_content()
        assert "of eval_loss" not in page.content() and "epoch" not in page.locator("body").inner_text().lower()
        legend = page.locator("#key").inner_text()
        assert all(
            word in legend for word in ("from the start", "new", "just now", "measured", "width of a box: parameters")
        )
        name = page.locator("#network svg text", has_text="…").first
        assert name.locator("title").text_content().startswith("residual_transformer_stage.blocks.")


def test_a_name_that_stands_out_is_not_wider_than_its_box(browser: Any, tmp_path: Path) -> None:
    data = page_data(deep(kind="Qwen2DecoderLayer"))
    data["looks"][9]["chosen"] = [3, 4]
    data["looks"][9]["merits"][4]["kind"] = "units"
    file = write_page(tmp_path / "page.html", data)
    with opened(browser, file, place="epoch=30", viewport=size("phone"), reduced_motion="reduce") as page:
        assert page.locator("#state").text_content().startswith("epoch 30 | Grew: ")
        name = page.locator("rect.now + text")
        seen = set()
        for width in range(320, 420, 6):
            page.set_viewport_size({"width": width, "height": 844})

            page.evaluate("dispatchEvent(new Event('resize'))")
            assert too_wide(page) == []
            seen.add((name.text_content() == "Qwen2DecoderLayer", name.get_attribute("font-weight")))
        assert seen >= {(True, None), (True, "600")}  # in regular type where bold has no room


def test_an_arrow_is_not_broken(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file, place="step=30") as page:
        assert "->" in page.locator("#decision .line .whole").all_text_contents()
