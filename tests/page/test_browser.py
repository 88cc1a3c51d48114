"""The growth page in a real browser: it loads cleanly, the slider moves the picture, and every number is the history's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

from browser import opened, too_wide
from recorded import BATCHES, X, grow, infinite, make_model
from sensli import Grower, History, Trial, triggers
from sensli.growing.looking import Sensli
from sensli.page import Film, page_data, write_page
from sensli_lab import demo

pytestmark = pytest.mark.process

CANVAS = "document.querySelector('#boundary .main canvas').toDataURL()"


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """The page of a short demo, and the history it was made from."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("EPOCHS", 60), ("LOOKS", (20, 40)), ("TAU", 0.2)):
            patch.setattr(demo, name, value)
        demo.demo(out, seed=0, as_json=True)
    return out / "growth.html", History.load(out / "history.json")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """The page of a convolutional network that grew once and refused once; its names try to break out of the page."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 2, (16,))
    history = History()
    for tau in (0.0, 1e6):
        grower = Grower(model, preset="paper", example=x[:1], trigger=triggers.Every(5), tau=tau)
        grower.history, grower.calls = history, history.record.calls
        for _ in range(5):
            grower.step([(x, y)], cross_entropy, metric=1 / (grower.calls + 3))
    file = write_page(
        tmp_path_factory.mktemp("report") / "page.html",
        page_data(history, title="</script><img src=x onerror=alert(1)> <!--data-->", measure="loss"),
    )
    return file, history


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """The page of a convolutional network that got channels at epoch 2, a layer at 4, and channels once more at 6."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 2, (16,))

    def alternate(merits: Any) -> Any:
        channels = [merit for merit in merits if merit.site.path == "0"]
        return merits.per("parameters").ranked[0] if not channels else channels[0]

    grower = Grower(
        model, preset="paper", example=x[:1], trigger=triggers.Every(2) & triggers.Limit(growths=3), tau=0, what="both", units=2,
        select=alternate,
    )  # fmt: skip
    for _ in range(8):
        layers = len(grower.history) == 1
        grower.options = replace(grower.options, where="conv" if layers else "units")
        grower._strategy = Sensli(grower.options)
        grower.step([(x, y)], cross_entropy, metric=1.0)
    assert [growth.site.kind for growth in grower.history] == ["units", "conv", "units"]
    file = write_page(tmp_path_factory.mktemp("wider") / "page.html", page_data(grower.history))
    return file, grower.history


def test_a_box_gets_wider_at_the_growth(browser: Any, wider: tuple[Path, History]) -> None:
    file, history = wider
    box = "document.querySelector('[data-unit=\"0\"]').getBoundingClientRect().width"
    boxes = "[...document.querySelectorAll('[data-unit]')].map(e => e.dataset.unit)"
    added = "[...document.querySelectorAll('[data-added]')].map(e => Number(e.dataset.added))"
    with opened(browser, file, place="epoch=1", reduced_motion="reduce") as page:
        narrow = page.evaluate(box)
        assert page.evaluate(added) == [] and " units" not in page.locator("#network svg").text_content()
        page.keyboard.press("n")
        assert page.evaluate(added) == [2] and page.evaluate(box) > narrow
        assert "4 → 6 units" in page.locator("#network svg").text_content()
        assert "0 Conv2d(1, 6, 3) (widened from 4 to 6 units)" in page.get_attribute("#network svg", "aria-label")
        chosen = history.record.decisions[0].merits[history.record.decisions[0].chosen[0]]
        assert chosen.site == "+2 units in 0 (Conv2d 4 -> 6), read by 2"
        assert page.locator("#decision .line").inner_text().startswith(f"epoch 2: {chosen.site} | merit ")
        assert page.locator(".bar.won .name span").first.inner_text() == chosen.site
        assert f"Grew: {chosen.site}" in page.locator("#state").inner_text()
        page.keyboard.press("n")
        assert page.evaluate(boxes) == [unit.path for unit in history.record.outlines[2][1]]
        page.keyboard.press("n")
        assert "4 → 8 units" in page.locator("#network svg").text_content() and page.evaluate(added) == [4]
        assert "4 → 6 → 8 units" in page.locator("#network svg > g > text").all_text_contents()
        parts = page.eval_on_selector_all(
            "[data-part]", "all => all.map(e => [e.dataset.part, e.textContent, e.classList.contains('now')])"
        )
        assert parts == [["2", "epoch 2: 4 → 6", False], ["2", "epoch 6: 6 → 8", True]]
        page.keyboard.press("p")
        assert "4 → 6 units" in page.locator("#network svg").text_content()
        words = page.locator("#words").text_content()
        assert "1 layer inserted, 2 layers widened" in words and "Epoch 2: 1 layer widened" in words


def test_new_units_of_a_small_network_are_drawn(browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    x, y = torch.randn(16, 2), torch.randint(0, 2, (16,))
    grower = Grower(
        model,
        preset="paper",
        example=x[:1],
        trigger=triggers.Every(2),
        tau=0,
        what="units",
        units=2,
        where=lambda site: site.path == "0",
    )
    pictures = Film("grown")
    pictures.take(0, model)
    for call in (1, 2, 3, 4):
        grower.step([(x, y)], cross_entropy)
        pictures.take(call, model)
    file = write_page(tmp_path / "page.html", page_data(grower.history, films=[pictures]))
    new = "[...document.querySelectorAll('[data-new]')].map(e => [e.dataset.column, Number(e.dataset.new)])"
    with opened(browser, file, place="epoch=1") as page:
        assert page.evaluate(new) == []
        page.keyboard.press("ArrowRight")  # animated: the columns spread, and the new units come
        page.wait_for_function(f"{new}.length === 2")
        assert page.evaluate(new) == [["0", 3], ["0", 4]]
        assert "3 → 5" in page.locator("#network svg").text_content()
        page.keyboard.press("n")
        page.wait_for_function(f"{new}.length === 4")


def test_the_chosen_site_is_always_listed(browser: Any, tmp_path: Path) -> None:
    """Compared by cost, the choice may be far down in the table of merits; it is scrolled to."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(7) for layer in (nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 2))
    x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
    grower = Grower(
        model,
        preset="paper",
        example=x[:1],
        trigger=triggers.At(1),
        tau=0,
        what="both",
        units=1,
        select="smallest",
        per="parameters",
    )
    grower.step([(x, y)], cross_entropy)
    look = grower.history.record.decisions[0]
    assert look.chosen[0] >= 10
    inside = """() => {
        const [won, panel] = [".bar.won", "#decision .drawing"].map(e => document.querySelector(e).getBoundingClientRect());
        return won.top >= panel.top && won.bottom <= panel.bottom + 1;
    }"""
    with opened(browser, write_page(tmp_path / "page.html", page_data(grower.history)), place="epoch=1") as page:
        assert page.evaluate(inside)
        assert page.locator(".bar.won .name span").first.inner_text() == look.merits[look.chosen[0]].site
        assert "chosen by the merit per added parameter" in page.locator("#decision").inner_text()


def test_the_numbers_are_the_historys(browser: Any, film: tuple[Path, History]) -> None:
    file, history = film
    metrics = dict(history.record.metrics)
    for look in history.record.decisions:
        with opened(browser, file, place=f"epoch={look.call}") as page:
            assert page.locator("#epoch").inner_text() == f"epoch {look.call}"
            shown = page.eval_on_selector_all("[data-merit]", "all => all.map(e => e.dataset.merit)")
            assert [float(value) for value in shown] == [merit.value for merit in look.merits]
            assert page.locator(".bar.won .name span").first.inner_text() == look.merits[look.chosen[0]].site
            assert f"{look.merits[0].value:.2e}" in page.locator("[data-merit]").first.inner_text()
            assert float(page.get_attribute("#tau", "data-tau")) == look.tau == 0.2
            assert look.reason in page.locator(".why").inner_text()
            assert page.locator("#decision .line").inner_text() == str(look)
            grown = page.locator("[data-curve=grown]")
            assert float(grown.get_attribute("data-value")) == metrics[look.call]
            assert float(grown.inner_text().split()[-1]) == pytest.approx(metrics[look.call], rel=1e-3)
            parameters = sum(
                unit.parameters for call, units in history.record.outlines if call == look.call for unit in units
            )
            assert page.locator("#size").inner_text() == f"{parameters} parameters"


def test_an_infinite_ratio_is_shown(browser: Any, tmp_path: Path) -> None:
    file = write_page(tmp_path / "page.html", page_data(infinite()))
    with opened(browser, file, place="epoch=1") as page:
        assert "Infinity x mean" in page.locator("[data-merit]").first.inner_text()
        assert "inf x mean" in page.locator("#decision .line").inner_text()


def test_the_slider_moves_the_picture(browser: Any, film: tuple[Path, History]) -> None:
    with opened(browser, film[0], place="epoch=60") as page:
        assert page.locator("#epoch").inner_text() == "epoch 60"
        before, cursor = page.evaluate(CANVAS), page.get_attribute("#cursor", "x1")
        columns = "new Set([...document.querySelectorAll('[data-column]')].map(c => c.dataset.column)).size"
        assert page.evaluate(columns) == 6
        page.focus("#slider")
        page.keyboard.press("Home")
        assert page.locator("#epoch").inner_text() == "epoch 0"
        page.wait_for_function(f"{columns} === 4")
        assert page.evaluate(CANVAS) != before
        assert page.get_attribute("#cursor", "x1") != cursor
        assert "The first check of all sites is at epoch 20" in page.locator("#decision").inner_text()
        page.keyboard.press("n")
        assert page.locator("#epoch").inner_text() == "epoch 20"
        page.wait_for_function(f"{columns} === 5")
        assert "Grew: Linear(10, 10) + ReLU after " in page.locator("#state").inner_text()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#epoch").inner_text() == "epoch 19"


def test_the_film_plays_and_stops(browser: Any, film: tuple[Path, History]) -> None:
    with opened(browser, film[0], reduced_motion="reduce") as page:
        page.clock.install()  # time passes as the test says, however busy the machine is
        page.click("#play")
        page.clock.run_for(3000)
        assert 3 < int(page.input_value("#slider")) < int(page.get_attribute("#slider", "max"))
        assert page.get_attribute("#play", "aria-label") == "Stop"
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("Space")
        assert page.get_attribute("#play", "aria-label") == "Play"
        stopped = page.input_value("#slider")
        page.clock.run_for(3000)
        assert page.input_value("#slider") == stopped


@pytest.mark.parametrize("which", ["film", "report", "wider"])
def test_it_fits_a_phone_and_has_words_for_everything(browser: Any, which: str, request: pytest.FixtureRequest) -> None:
    file, _ = request.getfixturevalue(which)
    with opened(browser, file, viewport={"width": 360, "height": 740}, color_scheme="dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360 and too_wide(page) == []
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
        nameless = (
            "[...document.querySelectorAll('button, input, [role=img]')].filter(e => !e.getAttribute('aria-label'))"
        )
        assert page.evaluate(f"{nameless}.length") == 0
        small = "[...document.querySelectorAll('button')].filter(e => e.getBoundingClientRect().height < 40).length"
        assert page.evaluate(small) == 0


def test_a_report_shows_any_model_and_a_refusal(browser: Any, report: tuple[Path, History]) -> None:
    file, history = report
    assert [len(look.growths) for look in history.record.decisions] == [1, 0]
    boxes = "[...document.querySelectorAll('[data-unit]')].map(e => e.dataset.unit)"
    with opened(browser, file, place="epoch=4") as page:
        assert page.evaluate(boxes) == ["0", "1", "2", "3", "4", "5"]
        page.keyboard.press("ArrowRight")
        page.wait_for_function(f"{boxes}.length === 7")
        assert page.evaluate(boxes) == [unit.path for unit in history.record.outlines[1][1]]
        page.keyboard.press("n")
        assert "nothing grown" in page.locator("#decision").inner_text()
        assert page.locator(".bar.won").count() == 0
        assert page.locator("#boundary").is_hidden()
        # a title is text, whatever stands in it
        assert page.locator("h1").inner_text() == "</script><img src=x onerror=alert(1)> <!--data-->"
        assert page.locator("img").count() == 0


def test_no_size_of_the_window_is_an_error(
    browser: Any, film: tuple[Path, History], report: tuple[Path, History]
) -> None:
    """Before the first layout and in a hidden frame a page has no width; it draws itself when it gets one."""
    for file, _ in (film, report):
        with opened(browser, file, viewport={"width": 1, "height": 1}) as page:
            page.set_viewport_size({"width": 900, "height": 700})
            page.wait_for_function("document.querySelector('#loss svg').width.baseVal.value > 300")


def test_without_javascript_the_words_are_there(browser: Any, film: tuple[Path, History]) -> None:
    file, history = film
    with opened(browser, file, java_script_enabled=False) as page:
        text = page.locator("#words").inner_text()
        for look in history.record.decisions:
            assert str(look) in text and look.reason in text
        assert page.get_by_text("The film needs JavaScript").is_visible()


def test_the_film_starts_at_the_beginning_with_a_large_button(browser: Any, film: tuple[Path, History]) -> None:
    with opened(browser, film[0], reduced_motion="reduce") as page:
        page.clock.install()
        assert page.locator("#epoch").inner_text() == "epoch 0"
        start = page.locator("#start").bounding_box()
        assert start is not None and min(start["width"], start["height"]) > 80
        page.clock.run_for(3000)
        assert page.input_value("#slider") == "0"  # nothing moves that nobody asked for
        page.click("#start")
        assert page.locator("#start").is_hidden() and page.evaluate("document.activeElement.id") == "play"
        page.clock.run_for(1500)
        assert int(page.input_value("#slider")) > 3
    with opened(browser, film[0], place="epoch=20") as page:
        assert page.locator("#start").is_hidden()
        page.focus("#slider")
        page.keyboard.press("Home")
        assert page.locator("#start").is_visible()


def test_the_subtitle_says_what_came_of_it(
    browser: Any, wider: tuple[Path, History], film: tuple[Path, History]
) -> None:
    first, last = (sum(unit.parameters for unit in wider[1].record.outlines[place][1]) for place in (0, -1))
    with opened(browser, wider[0]) as page:
        text = f"Started with {first:,} parameters, grew 3 times to {last:,} ({100 * (last / first - 1):+.0f} %). Metric 1 → 1."
        assert page.locator("header p").inner_text() == text
    with opened(browser, film[0]) as page:
        assert " grew twice to " in page.locator("header p").inner_text()


def test_every_resized_box_is_marked(browser: Any, wider: tuple[Path, History]) -> None:
    """Where channels are added, the layer that reads them changes too."""
    marked = (
        "[...document.querySelectorAll('[data-resized]')]"
        ".map(e => [e.dataset.unit, e.dataset.resized, e.classList.contains('current')])"
    )
    with opened(browser, wider[0], place="epoch=1", reduced_motion="reduce") as page:
        assert page.evaluate(marked) == []
        page.keyboard.press("n")
        assert page.evaluate(marked) == [["2", "1", True]]
        assert "148 → 220" in page.locator("#network svg > g > text").all_text_contents()
        assert "2 Conv2d(6, 4, 3) (resized at epoch 2)" in page.get_attribute("#network svg", "aria-label")
        page.keyboard.press("n")
        assert [path.replace(".anchor", "") for path, *_ in page.evaluate(marked)] == ["2"]


def test_what_is_new_is_called_by_its_epoch(browser: Any, wider: tuple[Path, History]) -> None:
    with opened(browser, wider[0], place="epoch=8", reduced_motion="reduce") as page:
        names = page.locator("#network svg > g > text").all_text_contents()
        assert "new, epoch 4" in names and not any("grown" in name for name in names)
        assert "Conv2d 1→8, 3×3" in names and "Linear 64→2" in names
        assert page.locator("#epoch").is_visible()
        seen = "[...document.querySelectorAll('#state span:not(.spoken)')].map(e => e.textContent).join('')"
        assert page.evaluate(seen) == "No more checks"  # the counter alone says the epoch


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    """A stack of blocks in which units grew, although the site before the first block had by far the largest merit."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(self.norm(x)).relu())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(4)), nn.Linear(8, 2))
    with torch.no_grad():
        model[1].down.weight.mul_(5)
        for block in model[2:5]:  # their twins would do as little as they do
            block.up.weight.mul_(0.03)
            block.up.bias.mul_(0.03)
    x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
    grower = Grower(
        model, preset="paper", example=x[:1], trigger=triggers.At(2), tau=0, what="both", units=2, select="auto", step_name="step",
    )  # fmt: skip
    noise = torch.randn(120)
    for step in range(120):
        grower.step([(x, y)], cross_entropy, metric=float(3 * 0.98**step + 0.2 * noise[step]))
    file = write_page(tmp_path_factory.mktemp("stacked") / "page.html", page_data(grower.history))
    return file, grower.history


def test_bars_of_sites_that_did_not_compete_say_why(browser: Any, stacked: tuple[Path, History]) -> None:
    file, history = stacked
    look = history.record.decisions[0]
    chosen, largest = look.merits[look.chosen[0]], look.merits[0]
    assert chosen.kind == "units" and largest.kind == "block" and largest.value > 2 * chosen.value
    with opened(browser, file, place="step=2") as page:
        aside = page.eval_on_selector_all(
            ".bar.aside", "all => all.map(e => [e.querySelector('.name span').textContent, e.dataset.aside])"
        )
        assert dict(aside)[largest.site] == "between blocks only the middle site competes" and len(aside) == 4
        assert chosen.site not in dict(aside) and "Twin(Block) after 2" not in dict(aside)  # the middle of five
        won, other = (
            page.locator(f".bar{name} .fill").first.bounding_box()["width"]
            for name in (".won", ":not(.won):not(.aside)")
        )
        assert won >= other  # the choice is the longest of those that competed
        decision = page.locator("#decision").inner_text()
        assert "Did not compete: between blocks only the middle site competes" in decision
        assert "is the largest of those that compete" in decision and "tau" not in decision
        assert page.locator("#words td", has_text="between blocks only the middle site competes").count() == 4


def test_a_noisy_curve_is_smoothed(browser: Any, stacked: tuple[Path, History], film: tuple[Path, History]) -> None:
    rough = """name => { const ys = [...document.querySelector(name).points].map(p => p.y);
        return ys.slice(1).reduce((sum, y, i) => sum + Math.abs(y - ys[i]), 0); }"""
    with opened(browser, stacked[0], place="step=120") as page:
        assert page.evaluate(rough, "[data-past]") < 0.35 * page.evaluate(rough, "#loss polyline:not([data-past])")
        assert "line: mean of 5" in page.locator("#legend").inner_text()
        last = stacked[1].record.metrics[-1][1]
        assert float(page.locator("[data-curve]").get_attribute("data-value")) == last
    with opened(browser, film[0]) as page:
        assert "mean of" not in page.locator("#legend").inner_text()


def test_the_loss_can_be_seen_over_flops(browser: Any, film: tuple[Path, History], tmp_path: Path) -> None:
    ends = """() => Object.fromEntries([...document.querySelectorAll('[data-past]')].map(e => [e.dataset.past, [...e.points].at(-1).x]))"""
    with opened(browser, film[0], place="epoch=60") as page:
        by_epoch = page.evaluate(ends)
        assert len(set(by_epoch.values())) == 1 and len(by_epoch) == 3
        page.check("#flops")
        by_cost = page.evaluate(ends)
        assert by_cost["baseline"] < by_cost["grown"]
        assert page.locator("#loss .time").last.text_content().endswith("FLOPs per sample")
    history = grown_and_not(tmp_path)
    with opened(browser, history, place="epoch=4") as page:
        assert page.locator("#cost").is_visible()
        page.check("#flops")
        # 3 x 64 FLOPs in each of two epochs, 3 x 96 in the two after the growth; the other network: 3 x 64 in each of four
        assert page.locator("#loss .time").last.text_content() == "960 FLOPs per sample"
        by_cost = page.evaluate(ends)
        left = page.evaluate("document.querySelector('#loss .grid').x1.baseVal.value")
        assert (by_cost["baseline"] - left) / (by_cost["grown"] - left) == pytest.approx(768 / 960, abs=0.01)


def grown_and_not(folder: Path) -> Path:
    """The page of a training with that of the same network that did not grow beside it."""
    grown, still = grow(max_factor=None, trigger=triggers.At(2)), grow(trigger=triggers.At(100))
    assert len(grown.history) == 1 and len(still.history) == 0
    return write_page(folder / "two.html", page_data(grown.history, baseline=still.history))


def test_a_second_training_is_a_second_curve(browser: Any, tmp_path: Path) -> None:
    with opened(browser, grown_and_not(tmp_path), place="epoch=4") as page:
        curves = page.eval_on_selector_all("[data-curve]", "all => all.map(e => e.dataset.curve)")
        assert curves == ["grown", "baseline"]


@pytest.mark.parametrize("which", ["film", "wider", "stacked"])
def test_the_page_can_be_saved_as_a_picture(browser: Any, which: str, request: pytest.FixtureRequest) -> None:
    file, _ = request.getfixturevalue(which)
    with opened(browser, file, place="epoch=40", color_scheme="dark") as page:
        with page.expect_download() as download:
            page.click("#save")
        assert download.value.suggested_filename.endswith(".png")
        image = Image.open(download.value.path()).convert("RGB")
        assert image.width == 2400 and image.height > 800
        assert image.getpixel((2, 2)) == (20, 23, 28)  # the page's colour
        orange = sum(count for count, pixel in image.getcolors(1 << 24) if pixel == (255, 154, 77))
        assert orange > 500  # what has grown


def test_a_growth_takes_a_third_of_a_second(browser: Any, wider: tuple[Path, History]) -> None:
    width = "document.querySelector('[data-unit=\"0\"]').width.baseVal.value"
    with opened(browser, wider[0], place="epoch=1") as page:
        page.clock.install()
        page.clock.pause_at(page.evaluate("Date.now() + 1000"))
        before = page.evaluate(width)
        page.keyboard.press("n")
        page.clock.run_for(150)
        during = page.evaluate(width)
        page.clock.run_for(250)
        after = page.evaluate(width)
        assert before < during < after
        page.clock.run_for(500)
        assert page.evaluate(width) == after


@pytest.mark.parametrize("width", [390, 768, 1024, 1400])
def test_no_text_is_cut_at_any_width(
    browser: Any, width: int, stacked: tuple[Path, History], film: tuple[Path, History]
) -> None:
    for file, place in ((stacked[0], "step=2"), (film[0], "epoch=20")):
        with opened(browser, file, place=place, viewport={"width": width, "height": 900}) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= width and too_wide(page) == []
            assert "…" not in page.locator("#network").inner_text()


def test_a_trial_shows_how_each_network_did(browser: Any, tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grower = Grower(
        model, optimizer, preset="paper", example=X[:1], trigger=triggers.Every(1), tau=0, max_factor=None, trial=Trial(1),
    )  # fmt: skip
    grower.step(BATCHES, cross_entropy)
    tried = grower.history.record.decisions[0].tried
    assert tried is not None and len(tried.arms) == 3
    file = write_page(tmp_path / "page.html", page_data(grower.history))
    with opened(browser, file, place="epoch=1", viewport={"width": 390, "height": 844}) as page:
        shown = page.eval_on_selector_all("[data-trial]", "all => all.map(e => e.dataset.trial)")
        assert sorted(map(float, shown)) == sorted(arm.score for arm in tried.arms[1:] if arm.score is not None)
        assert "A trial decided: the mean loss of each network after it" in page.locator("#decision").inner_text()
        assert too_wide(page) == []
