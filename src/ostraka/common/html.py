"""Objects as HTML for notebooks: facts, tables, lists, folded parts. Pure.

Arguments are plain text, which is escaped, or `Html` that these functions returned. So no name in a
checkpoint becomes markup. The result is static: no script, no request, and only inline styles.
Colours derive from the colour of the text around it, so it suits light and dark themes.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import NewType

from ostraka.common.units import human_bytes
from ostraka.errors import count_of, printable

Html = NewType("Html", str)

_MOST_CHARACTERS = 120
_MOST_ITEMS = 50
_FRAME = (
    "font:13px/1.5 system-ui,sans-serif;overflow-x:auto;padding:8px 12px;border-radius:6px;"
    "border:1px solid color-mix(in srgb,currentColor 25%,transparent)"
)
_MONO = "font-family:ui-monospace,monospace;white-space:nowrap"
_MUTED = "opacity:.7"


def text(plain: str, most: int = _MOST_CHARACTERS) -> Html:
    """The first characters of a text, escaped. Invisible characters are shown by their codes."""
    shown = plain[:most]
    if not shown.isprintable():
        shown = printable(shown)
    return Html(html.escape(shown if len(plain) <= most else f"{shown}…"))


def size(nbytes: int) -> str:
    """`1.5 MiB (1,572,864 bytes)`."""
    return human_bytes(nbytes) if nbytes < 1024 else f"{human_bytes(nbytes)} ({nbytes:,} bytes)"


def frame(kind: str, title: str, *parts: Html) -> str:
    """The HTML of one object: its class, its name, and its parts."""
    name = f' <span style="{_MONO}">{text(title, 4 * _MOST_CHARACTERS)}</span>' if title else ""
    head = f"<div><b>{text(kind)}</b>{name}</div>"
    return f'<div style="{_FRAME}">{head}{"".join(parts)}</div>'


def facts(entries: Mapping[str, str | None]) -> Html:
    """Names and values, one line each. Those without a value are left out."""
    rows = [(name, value) for name, value in entries.items() if value]
    lines = "".join(
        f'<div style="display:contents"><span style="{_MUTED}">{text(name)}</span> '
        f"<span>{text(value, 4 * _MOST_CHARACTERS)}</span></div>"
        for name, value in rows
    )
    style = "display:grid;grid-template-columns:max-content 1fr;gap:0 1.5em"
    return Html(f'<div style="{style}">{lines}</div>')


def grid(rows: Iterable[Sequence[str]], columns: int, head: Sequence[str] = ()) -> Html:
    """Aligned rows of cells. The last cell of a short row extends over the remaining columns."""
    lines: list[str] = []
    for row in rows:
        spans = [f"<span>{text(cell)}</span>" for cell in row]
        if len(row) < columns:
            spans[-1] = f'<span style="grid-column:{len(row)}/-1">{text(row[-1])}</span>'
        lines.append(f'<div style="display:contents">{" ".join(spans)}</div>')
    if head:
        titles = " ".join(f'<span style="{_MUTED}">{text(name)}</span>' for name in head)
        lines.insert(0, f'<div style="display:contents">{titles}</div>')
    style = f"display:grid;grid-template-columns:repeat({columns},max-content);gap:0 1.5em;{_MONO}"
    return Html(f'<div style="{style};margin-left:1.2em">{"".join(lines)}</div>')


def fold(summary: str, *parts: Html, note: str = "", is_open: bool = False) -> Html:
    """A part that a click opens."""
    beside = f' <span style="{_MUTED}">{text(note)}</span>' if note else ""
    return Html(
        f'<details{" open" if is_open else ""} style="margin-left:1.2em">'
        f'<summary style="margin-left:-1.2em;cursor:pointer">{text(summary)}{beside}</summary>'
        f"{''.join(parts)}</details>"
    )


def remark(plain: str) -> Html:
    """A line about the lines around it."""
    return Html(f'<div style="{_MUTED};margin-left:1.2em">{text(plain)}</div>')


def table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_open: bool = False
) -> Html:
    """A folded table of the first rows. Empty if there are none."""
    if not rows:
        return Html("")
    parts = [grid(rows[:_MOST_ITEMS], len(head), head)]
    if len(rows) > _MOST_ITEMS:
        parts.append(remark(f"… and {len(rows) - _MOST_ITEMS:,} more"))
    return fold(title, *parts, is_open=is_open)


def sentences(noun: str, lines: Sequence[str], *, is_open: bool = False) -> Html:
    """A folded list of the first sentences, with their number. Empty if there are none."""
    if not lines:
        return Html("")
    items = "".join(f"<li>{text(line, 5 * _MOST_CHARACTERS)}</li>" for line in lines[:_MOST_ITEMS])
    parts = [Html(f'<ul style="margin:0">{items}</ul>')]
    if len(lines) > _MOST_ITEMS:
        parts.append(remark(f"… and {len(lines) - _MOST_ITEMS:,} more"))
    return fold(count_of(len(lines), noun), *parts, is_open=is_open)
