"""Hooks of the manual's site: pages from outside docs/, links to them, and long messages.

The pages are written for a reader of the repository: a link to `../../CHANGELOG.md` or
`../../examples/demo.py` works there. On the site README.md is the start page, CHANGELOG.md and
CONTRIBUTING.md are pages of their own, and every other linked file is added under `files/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGE_OF = {
    "README.md": "index.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "maintainers/contributing.md",
}
"""The page on the site, by the file at the root of the repository that it shows."""
FILE_OF = {page: file for file, page in PAGE_OF.items()}
PICTURES = (".png", ".svg")
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
MESSAGE = re.compile(
    r'(<div class="language-text)( highlight"><pre><span></span><code>[^\n]*\n?</code>)'
)
"""A block with one line of text, such as an error message."""
LINK = re.compile(r'(\]\(|src=")([^)"\s]+)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the start page and the linked files outside docs/."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for target in sorted(_outside_targets()):
        path = ROOT / target
        if target.endswith(PICTURES):
            made = File.generated(config, _site_path(target), abs_src_path=str(path))
        else:
            language = path.suffix.removeprefix(".") or "text"
            text = f"# {target}\n\n````{language}\n{path.read_text('utf-8')}````\n"
            made = File.generated(config, _site_path(target), content=text)
        files.append(made)
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """The file at the root, for a page that shows one."""
    file = FILE_OF.get(page.file.src_uri)
    return (ROOT / file).read_text("utf-8") if file else None


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site."""
    here = page.file.src_uri
    if here == "index.md":
        page.meta["hide"] = ["navigation"]
    source = FILE_OF.get(here, f"docs/{here}")

    def point(found: re.Match[str]) -> str:
        name, mark, anchor = found[2].partition("#")
        if not name or "://" in name:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        path = posixpath.relpath(_site_path(target), posixpath.dirname(here) or ".")
        return f"{found[1]}{path}{mark}{anchor}"

    return "".join(
        text if is_code else LINK.sub(point, text) for is_code, text in _split_code(markdown)
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark the blocks with one line of text: the style sheet lets them wrap."""
    return MESSAGE.sub(r"\1 message\2", html)


def _outside_targets() -> set[str]:
    """Paths from the root of the files outside docs/ that pages link to, and that are no pages."""
    targets: set[str] = set()
    for source in (*(ROOT / name for name in PAGE_OF), *(ROOT / "docs").rglob("*.md")):
        for is_code, text in _split_code(source.read_text("utf-8")):
            for _, link in [] if is_code else LINK.findall(text):
                name = link.partition("#")[0]
                if not name or "://" in name:
                    continue
                path = (source.parent / name).resolve().relative_to(ROOT).as_posix()
                if not path.startswith("docs/") and path not in PAGE_OF:
                    targets.add(path)
    return targets


def _site_path(target: str) -> str:
    """The path on the site of a file, given its path in the repository."""
    if target in PAGE_OF:
        return PAGE_OF[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"files/{target}" if target.endswith(PICTURES) else f"files/{target}.md"


def _split_code(text: str) -> Iterator[tuple[bool, str]]:
    """The text in parts, in order; True for a fenced block."""
    end = 0
    for fence in FENCE.finditer(text):
        yield False, text[end : fence.start()]
        yield True, fence[0]
        end = fence.end()
    yield False, text[end:]
