"""Check the built site: `python docs/_site/check.py site`. `make docs` runs it.

The files: every page can be reached from the start page by links, every link and anchor leads
somewhere, nothing is loaded from another host, and no Markdown is left in the text. The browser:
every page opens at two widths without an error in the console, without a request to another host
and without scrolling sideways, and the search finds a word. It needs `chromium` and `chromedriver`
(Debian: `apt-get install chromium chromium-driver`), and is skipped with a message without them.
"""

from __future__ import annotations

import argparse
import base64
import http.server
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

START = "index.html"
NOT_LINKED = ("404.html",)
WIDTHS_PX = (1440, 390)
HEIGHT_PX = 900
STARTS_WITHIN_S = 60
SEARCHED = "parity"
BROWSER_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--disable-dev-shm-usage"),
)
LOADED_BY = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
MARKDOWN = re.compile(r"(^|\n)(```|\| |#{1,4} |[-*] )|\]\(")
"""Marks that the text of a page has only if its Markdown was not understood."""


class HtmlPage(HTMLParser):
    """The links, anchors, loaded files and paragraphs of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.paragraphs: list[str] = []
        self._paragraph: list[str] | None = None
        self._code_depth = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the links and anchors of a tag."""
        attributes = {name: value or "" for name, value in attrs}
        self.anchors.update(attributes[name] for name in ("id", "name") if name in attributes)
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag == "link":
            self.loaded.append(attributes.get("href", ""))
        if attributes.get(LOADED_BY.get(tag, "")):
            self.loaded.append(attributes[LOADED_BY[tag]])
        if tag in ("p", "li"):
            self._paragraph = []
        self._code_depth += tag in ("code", "pre")

    def handle_endtag(self, tag: str) -> None:
        """Note the paragraph that ends."""
        self._code_depth -= tag in ("code", "pre")
        if tag in ("p", "li") and self._paragraph is not None:
            self.paragraphs.append("".join(self._paragraph))
            self._paragraph = None

    def handle_data(self, data: str) -> None:
        """Note text that is no code."""
        if self._paragraph is not None and not self._code_depth:
            self._paragraph.append(data)


def check_files(site: Path) -> list[str]:
    """What is wrong with the files, one sentence each."""
    pages = {
        path.relative_to(site).as_posix(): HtmlPage(path.read_text("utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    problems: list[str] = []
    leads_to: dict[str, set[str]] = {}
    for name, page in pages.items():
        leads_to[name] = set()
        for link in page.links:
            target, anchor = _resolve(name, link)
            if target is None:
                continue
            if not (site / target).is_file():
                problems.append(f"{name}: the link {link!r} leads to no file")
            elif target in pages:
                leads_to[name].add(target)
                if anchor and anchor not in pages[target].anchors:
                    problems.append(f"{name}: the link {link!r} leads to no anchor of {target}")
        for link in page.loaded:
            target, _ = _resolve(name, link)
            if target is None:
                problems.append(f"{name}: loads {link!r} from another host")
            elif not (site / target).is_file():
                problems.append(f"{name}: loads {link!r}, which is no file of the site")
        for paragraph in page.paragraphs:
            if MARKDOWN.search(paragraph):
                problems.append(f"{name}: shows Markdown as text: {paragraph[:80]!r}")
    unreached = pages.keys() - _reached(leads_to) - set(NOT_LINKED)
    problems += [f"{name}: no link leads here from {START}" for name in sorted(unreached)]
    return problems


def _resolve(page: str, link: str) -> tuple[str | None, str]:
    """The file of the site that a link leads to, or None for another host, and its anchor."""
    base = f"http://site/{page}"
    url, anchor = urldefrag(urljoin(base, link))
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.netloc != "site":
        return None, anchor
    path = unquote(parts.path).lstrip("/")
    return (f"{path}{START}" if path.endswith("/") or not path else path), unquote(anchor)


def _reached(leads_to: dict[str, set[str]]) -> set[str]:
    reached, to_visit = {START}, [START]
    while to_visit:
        for target in leads_to[to_visit.pop()] - reached:
            reached.add(target)
            to_visit.append(target)
    return reached


class Browser:
    """A Chromium, driven by the WebDriver protocol."""

    def __init__(self, driver_url: str, profile: Path):
        options = {
            "binary": shutil.which("chromium"),
            "args": [*BROWSER_FLAGS, f"--user-data-dir={profile}"],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self._url = f"{driver_url}/session"
        made = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/{made['sessionId']}"

    def close(self) -> None:
        """End the browser."""
        self._call("DELETE", "")

    def open(self, url: str) -> None:
        """Load a page and wait until all its files have arrived."""
        self._call("POST", "/url", {"url": url})

    def set_size(self, width_px: int, height_px: int) -> None:
        """Set the size of the visible part."""
        size = {"width": width_px, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """Send a command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page; returns its value."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def take_log(self, kind: str) -> list[dict[str, Any]]:
        """The entries since the last call: `browser` (the console) or `performance`."""
        return self._call("POST", "/se/log", {"type": kind})

    def requested(self) -> list[str]:
        """The addresses requested since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.take_log("performance")]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=STARTS_WITHIN_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()}") from None


def check_in_browser(site: Path, screenshots: Path | None) -> list[str]:
    """What is wrong with the pages in a browser, one sentence each."""
    problems: list[str] = []
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    with _serve(site) as address, start_browser() as browser:
        browser.open("about:blank")
        browser.requested()  # forget what the browser's own first page needed
        for width in WIDTHS_PX:
            browser.set_size(width, HEIGHT_PX)
            for name in names:
                browser.open(f"{address}/{name}")
                where = f"{name} at {width} px"
                for entry in browser.take_log("browser"):
                    problems.append(f"{where}: the console says {entry['message']}")
                for url in browser.requested():
                    if not url.startswith((address, "data:", "blob:")):
                        problems.append(f"{where}: requests {url}")
                wide = browser.run("return document.documentElement.scrollWidth")
                if wide > width:
                    problems.append(f"{where}: is {wide} px wide and scrolls sideways")
                if screenshots is not None:
                    file = f"{name.removesuffix('.html').replace('/', '-')}-{width}"
                    _take_pictures(browser, screenshots, f"{address}/{name}", file)
        problems += _check_search(browser, address)
    return problems


def _check_search(browser: Browser, address: str) -> list[str]:
    browser.open(f"{address}/{START}")
    browser.run(
        "const box = document.querySelector('.md-search__input');"
        "document.querySelector('#__search').checked = true; box.focus();"
        "box.value = arguments[0];"
        "box.dispatchEvent(new KeyboardEvent('keyup', {key: 'y', bubbles: true}))",
        SEARCHED,
    )
    ends = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < ends:
        if browser.run("return document.querySelectorAll('.md-search-result__item').length"):
            return []
        time.sleep(0.1)
    return [f"the search finds {SEARCHED!r} on no page"]


def _take_pictures(browser: Browser, folder: Path, url: str, file: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("dark", "light"):
        preference = {"name": "prefers-color-scheme", "value": scheme}
        browser.command("Emulation.setEmulatedMedia", {"features": [preference]})
        browser.open(url)
        picture = browser.command("Page.captureScreenshot", {"format": "png"})["data"]
        (folder / f"{file}-{scheme}.png").write_bytes(base64.b64decode(picture))


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _serve(folder: Path) -> Generator[str]:
    handler = partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def start_browser() -> Generator[Browser]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(port)
            browser = Browser(f"http://127.0.0.1:{port}", Path(profile))
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait()


def _wait_for(port: int) -> None:
    ends = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
                if json.load(answer)["value"]["ready"]:
                    return
        except OSError:
            if time.monotonic() > ends:
                raise
        time.sleep(0.1)


def main() -> int:
    """Check the site and print the problems; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="also write pictures of all pages here")
    arguments = parser.parse_args()
    problems = check_files(arguments.site)
    count = sum(1 for _ in arguments.site.rglob("*.html"))
    if shutil.which("chromium") and shutil.which("chromedriver"):
        problems += check_in_browser(arguments.site, arguments.screenshots)
        how = f"in the files, and in a browser at {' and '.join(map(str, WIDTHS_PX))} px"
    else:
        how = "in the files (SKIPPED IN A BROWSER: there is no `chromium` or no `chromedriver`)"
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems on {count} pages, {how}.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
