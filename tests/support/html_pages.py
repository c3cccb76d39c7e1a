"""A strict reader of the HTML that objects show in notebooks."""

from __future__ import annotations

from html.parser import HTMLParser

TAGS = {"div", "span", "b", "details", "summary", "ul", "li"}
ATTRIBUTES = {"style", "open"}


class Reader(HTMLParser):
    """Collects the texts, and raises for anything but balanced, static, plain HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.folded = 0
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        assert {name for name, _ in attrs} <= ATTRIBUTES, attrs
        assert "url(" not in (dict(attrs).get("style") or ""), attrs
        self.folded += tag == "details" and "open" not in dict(attrs)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert data.isprintable(), data
        if data.strip():
            self.texts.append(data.strip())

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(decl)

    def close(self) -> None:
        super().close()
        assert not self._open


def read_html(page: str) -> Reader:
    """The texts of the page that an object shows."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def texts_in(page: str) -> list[str]:
    return read_html(page).texts
