"""Make the pictures of the growth page that the documentation shows: run `python docs/make_pictures.py` from the repository.

Needs Chromium and the extra `dev`. Writes docs/assets/growth.png (a still) and growth.gif (the film).
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers")]

from browser import chromium, opened  # noqa: E402
from sensli_lab.demo import demo  # noqa: E402

STILL, SIZE, FRAMES = 600, {"width": 1200, "height": 900}, 24
WIDE, COLOURS = 960, 256  # of the film: enough for the shades of the boundaries


def main() -> None:
    assets = ROOT / "docs" / "assets"
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        demo(Path(folder), seed=1, as_json=True)
        with opened(browser, Path(folder) / "growth.html", viewport=SIZE, reduced_motion="reduce") as page:
            last = int(page.get_attribute("#slider", "max") or 0)
            pictures = []
            for step in range(FRAMES):
                where = round(step * last / (FRAMES - 1))
                page.evaluate(
                    f"(() => {{ const s = document.getElementById('slider'); s.value = {where}; s.dispatchEvent(new Event('input')); "
                    "document.getElementById('start').hidden = true; })()"  # a picture has nothing to press
                )
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                pictures.append(picture.resize((WIDE, WIDE * 3 // 4), Image.Resampling.LANCZOS))
            # one palette for all of them, of what has most colours in some: with one each, the shades would flicker
            lower = [
                picture.crop((0, picture.height * 2 // 3, *picture.size)) for picture in pictures[::4] + pictures[-1:]
            ]
            sheet = Image.new("RGB", (WIDE, sum(part.height for part in lower)))
            for number, part in enumerate(lower):
                sheet.paste(part, (0, number * part.height))
            palette = sheet.quantize(COLOURS, Image.Quantize.MEDIANCUT, kmeans=2)
            frames = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
            times = [200] * FRAMES
            times[0], times[-1] = 700, 2500
            frames[0].save(
                assets / "growth.gif", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True
            )
        with opened(browser, Path(folder) / "growth.html", place=f"epoch={STILL}", viewport=SIZE) as page:
            Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(assets / "growth.png", optimize=True)


if __name__ == "__main__":
    main()
