"""A real browser for tests: Debian's Chromium, driven by Playwright. Where one is missing the tests skip and say how to get it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import programs

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def find_chromium() -> str:
    """The path of the browser, or a skip that says how to get it."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here. Get it with: apt-get install chromium (as root)")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("Playwright is missing. Get it with: pip install 'sensli[dev]'")
    return path


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser with an empty profile."""
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=1000 * programs.HANGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, file: Path, *, place: str = "", **options: Any) -> Iterator[Any]:
    """A page of the file; at the end it must have logged no error and asked for nothing but the file."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * programs.HANGS)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda r: None if r.url.startswith(("file:", "data:")) else problems.append(f"asked for {r.url}")
    )
    try:
        page.goto(f"{file.as_uri()}#{place}")
        yield page
        assert problems == []
    finally:
        context.close()


WIDER = """() => {
    const place = e => e.getBoundingClientRect(), around = e => place(e.closest("figure"));
    const says = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    const texts = [...document.querySelectorAll("body *")].filter(e => !e.closest("svg, script, .wide, .spoken") && says(e));
    const drawn = [...document.querySelectorAll("svg text")].filter(e => e.getComputedTextLength() > Number(e.dataset.space || 1e9) + 1
        || place(e).left < around(e).left || place(e).right > around(e).right);
    return [...texts.filter(e => e.clientWidth && e.scrollWidth > e.clientWidth), ...drawn].map(e => e.textContent);
}"""


def too_wide(page: Any) -> list[str]:
    """Texts that are wider than their box, in words or in drawings; tables scroll."""
    found: list[str] = page.evaluate(WIDER)
    return found
