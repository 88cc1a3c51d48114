"""Make the films of the gallery and their pictures: run `python docs/make_films.py [NAME ...]` from the repository.

Needs Chromium and the extra `dev`. Writes docs/films/NAME.html and docs/films/NAME.png.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent / "src"), str(DOCS.parent / "tests" / "helpers"), str(DOCS)]

from make_pages import code, notebook  # noqa: E402

from browser import chromium, opened  # noqa: E402
from sensli import Grower, triggers  # noqa: E402
from sensli.page import page_data, write_page  # noqa: E402
from sensli_lab.demo import demo  # noqa: E402

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def spirals(to: Path) -> None:
    """The demo: layers, at three fixed times."""
    with tempfile.TemporaryDirectory() as folder:
        demo(Path(folder), seed=1, as_json=True)
        to.write_text((Path(folder) / "growth.html").read_text())


def digits(to: Path) -> None:
    """The network of the tutorial, for more epochs."""
    names: dict[str, Any] = {}
    for cell in notebook()["cells"]:
        if cell["cell_type"] == "code" and "write_page" not in code(cell) and "checkpoint" not in code(cell):
            exec(code(cell).replace("range(1, 21)", "range(1, 61)"), names)
            if "grower" in names:
                break
    write_page(to, page_data(names["grower"].history, title="A CNN reads digits", measure="training loss"))


def language(to: Path) -> None:
    """Blocks in the middle of the stack, heads and hidden units."""
    page = (DOCS / "tasks" / "expand-my-transformer.md").read_text()
    block = next(each for each in re.findall(r"```python\n(.*?)```", page, re.S) if "class LanguageModel" in each)
    names: dict[str, Any] = {}
    exec(block.split("model, steps = ")[0].replace("[:7_920]", "[:79_200]"), names)
    model, data, loss_fn = names["LanguageModel"](), names["data"], names["loss_fn"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options: dict[str, Any] = {"what": "both", "units": 0.5, "per": "flops", "tau": 0.0, "step_name": "step"}
    trigger = triggers.Every(40) & triggers.Limit(growths=5)
    grower = Grower(model, optimizer, example=data[0][0][:1], trigger=trigger, **options)
    for step in range(240):
        x, y = data[step]
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        grower.step(data[-4:], loss_fn, metric=loss.item())
    write_page(to, page_data(grower.history, title="A language model grows", measure="training loss"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


def waves() -> Batches:
    """Noisy waves in four directions."""
    torch.manual_seed(0)
    y, i = torch.randint(0, 4, (512,)), torch.arange(16.0)
    rows, columns = i[:, None], i[None]
    kinds = torch.stack(
        [torch.sin(0.8 * each) for each in (rows + 0 * i, columns + 0 * rows, rows + columns, rows - columns)]
    )
    x = kinds[y].unsqueeze(1) + 3 * torch.randn(512, 3, 16, 16)
    return list(zip(x.split(64), y.split(64), strict=True))


def residual(to: Path) -> None:
    """Blocks and channels of a residual network compete, by merit per parameter."""
    batches = waves()
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    model = nn.Sequential(stem, nn.Sequential(Block(6), Block(6)), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    options: dict[str, Any] = {"what": "both", "per": "parameters", "tau": 0.0}
    trigger = triggers.Every(5) & triggers.Limit(growths=4)
    grower = Grower(model, optimizer, example=batches[0][0][:2], trigger=trigger, **options)
    for _ in range(30):
        total = 0.0
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() / len(batches)
        grower.step(batches, cross_entropy, metric=total)
    write_page(to, page_data(grower.history, title="A residual network grows", measure="training loss"))


def table(to: Path) -> None:
    """The estimator of scikit-learn: growths are kept if held-out samples get better."""
    from sklearn.datasets import load_digits

    from sensli.integrations.sklearn import GrowingClassifier

    x, y = load_digits(return_X_y=True)
    fitted = GrowingClassifier(members=3, layers=1, width=32, max_width=64, random_state=0).fit(x, y)
    write_page(to, page_data(fitted.history_, title="A classifier for a table: digits", measure="held-out loss"))


FILMS = {"spirals": spirals, "digits": digits, "language": language, "residual": residual, "table": table}


def main() -> None:
    folder = DOCS / "films"
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(FILMS)
    for name in chosen:
        FILMS[name](folder / f"{name}.html")
    with chromium() as browser:
        for name in chosen:
            size = {"width": 1200, "height": 800}
            with opened(browser, folder / f"{name}.html", viewport=size, reduced_motion="reduce") as page:
                last = int(page.get_attribute("#slider", "max") or 0)
                page.evaluate(
                    f"(() => {{ const s = document.getElementById('slider'); s.value = {last}; s.dispatchEvent(new Event('input')); }})()"
                )
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.resize((900, 600), Image.Resampling.LANCZOS).save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
