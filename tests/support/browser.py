"""Headless Chromium for tests, by the WebDriver client of the manual's checks.

`with open_browser() as browser` skips the test if `chromium` or `chromedriver` is missing (Debian:
`apt-get install chromium chromium-driver`).
"""

import base64
import importlib.util
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_CHECK = Path(__file__).parents[2] / "docs" / "_site" / "check.py"
WIDTHS_PX = (1440, 390)
WAITS_S = 60


def _client() -> Any:
    if "site_check" not in sys.modules:
        spec = importlib.util.spec_from_file_location("site_check", _CHECK)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["site_check"] = module
        spec.loader.exec_module(module)
    return sys.modules["site_check"]


@contextmanager
def open_browser() -> Generator[Any]:
    """A browser at 1440 pixels. It has `open`, `run`, `set_size`, `take_log`, `requested`."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium or chromedriver is missing: apt-get install chromium chromium-driver")
    with _client().start_browser() as browser:
        browser.open("about:blank")
        browser.requested()  # forget what the browser's own first page needed
        browser.set_size(WIDTHS_PX[0], 900)
        yield browser


def wait_until(browser: Any, condition: str, *arguments: Any) -> Any:
    """The value of a JavaScript expression once it is true."""
    ends = time.monotonic() + WAITS_S
    while True:
        found = browser.run(f"return {condition}", *arguments)
        if found:
            return found
        assert time.monotonic() < ends, (
            f"{condition} did not become true; {browser.take_log('browser')}"
        )
        time.sleep(0.05)


def open_page(browser: Any, url: str) -> None:
    """Open a report page and wait until it is drawn."""
    browser.open(url)
    wait_until(browser, "document.documentElement.dataset.ready === 'yes'")


def complaints(browser: Any, *, own: str) -> list[str]:
    """Lines in the console, and requests to other places than `own`, since the last call."""
    said = [entry["message"] for entry in browser.take_log("browser")]
    others = [url for url in browser.requested() if not url.startswith((own, "data:", "blob:"))]
    return said + [f"requests {url}" for url in others]


def is_wider_than_screen(browser: Any) -> bool:
    """True if the page scrolls sideways."""
    script = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
    return browser.run(script)


def take_picture(browser: Any, path: Path, *, whole: bool = False) -> None:
    """Write a PNG of the visible part, or of the whole page."""
    options = {"format": "png", "captureBeyondViewport": whole}
    if whole:
        size = browser.run(
            "return [document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        options["clip"] = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
    picture = browser.command("Page.captureScreenshot", options)["data"]
    path.write_bytes(base64.b64decode(picture))


def click(browser: Any, selector: str) -> None:
    """Click the first element that a CSS selector finds, as a person does."""
    box = browser.run(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]",
        selector,
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        event = {"type": kind, "x": box[0], "y": box[1], **button}
        browser.command("Input.dispatchMouseEvent", event)


def hover(browser: Any, selector: str) -> None:
    """Move the pointer over the first element that a CSS selector finds."""
    box = browser.run(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]",
        selector,
    )
    browser.command("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": box[0], "y": box[1]})


def type_text(browser: Any, selector: str, text: str) -> None:
    """Type into a field, as a person does."""
    browser.run("document.querySelector(arguments[0]).focus()", selector)
    browser.command("Input.insertText", {"text": text})
