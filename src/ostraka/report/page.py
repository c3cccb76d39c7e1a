"""A page: one self-contained HTML file that shows documents. No JAX, no request, no other file.

The scripts in `assets/` are plain ES modules. `render` joins them into one, so the page needs no
server. They create text nodes only, never markup, so no name in a checkpoint becomes markup. The
Content-Security-Policy allows just this script and this style.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from functools import cache
from importlib import resources
from typing import Any

from ostraka._version import __version__
from ostraka.report.schema import Page

_MODULES = ("base", "charts", "run", "checkpoint", "comparison", "plan", "main")
"""In the order of their imports. A name at the top of a module is unique among all modules."""
_IMPORT = re.compile(r"^import\s[^;]*?from\s+\"\./\w+\.js\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?(function|const|class)\b)", re.MULTILINE)


def render(page: Page) -> str:
    """The HTML of a page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(is_live=page["live"] is not None)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{html.escape(page["title"])}</title>
<style>{_style()}</style>
</head>
<body>
<noscript>This page needs JavaScript. ostraka show, ls and plan print the same numbers.</noscript>
<main id="page"></main>
{_data(page)}
<script type="module">{_script()}</script>
</body>
</html>
"""


@cache
def policy(*, is_live: bool) -> str:
    """The Content-Security-Policy of a page. Only a live one may send requests, to its board."""
    reach = "'self'" if is_live else "'none'"
    script, style = _digest(_script()), _digest(_style())
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
        f"connect-src {reach}; base-uri 'none'; form-action 'none'"
    )


def embed(document: Any) -> str:
    """A document as JSON that can stand in a script element. Raises ValueError for NaN."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_PLAIN_BYTES = 256 << 10
"""Longer JSON is compressed. Browsers decompress it by themselves."""


def _data(page: Page) -> str:
    """The element with the documents."""
    text = embed({"version": __version__, **page})
    if len(text) <= _PLAIN_BYTES:
        return f'<script type="application/json" id="data">{text}</script>'
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f'<script type="application/gzip" id="data">{packed}</script>'


@cache
def _script() -> str:
    sources = [_asset(f"{name}.js") for name in _MODULES]
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", source)) for source in sources)


@cache
def _style() -> str:
    return _asset("style.css")


def _asset(name: str) -> str:
    return (resources.files("ostraka.report") / "assets" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
