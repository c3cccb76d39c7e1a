"""README.md keeps its word: its Python runs, its output is real, its links lead somewhere."""

import builtins
import re
from pathlib import Path

import pytest

from ostraka import _coordinate, errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/format.md",
    "docs/architecture.md",
    "docs/sharding.md",
]


def find_blocks() -> list[tuple[str, str]]:
    """The fenced blocks in order: language and text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_python_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In one namespace. A `text` block is what the Python block before it printed."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    printed = ""
    ran = compared = 0
    for language, text in find_blocks():
        if language == "python":
            exec(compile(text, f"README.md, block {ran}", "exec"), namespace)
            printed = capsys.readouterr().out.replace(str(tmp_path), "/home/me")
            ran += 1
        elif language == "text":
            assert printed == text
            compared += 1
    assert ran >= 5
    assert compared == 1


def test_python_blocks_show_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    first = next(text for language, text in find_blocks() if language == "python")
    exec(first, namespace)
    assert list(namespace["params"]) == ["params"]  # pyright: ignore[reportArgumentType,reportCallIssue]
    assert namespace["as_saved"].keys() == namespace["state"].keys()  # pyright: ignore[reportAttributeAccessIssue]
    assert namespace["corner"].shape == (16, 16)  # pyright: ignore[reportAttributeAccessIssue]


def test_the_table_of_errors_is_complete():
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*?\|", README, re.MULTILINE))))
    unlisted = set(errors.__all__) - listed
    assert unlisted == {"InvalidSharding", "OstrakaError", "Problem"}
    for name, builtin in re.findall(r"^\| `(\w+)`.*\| `(\w+)` \|$", README, re.MULTILINE):
        assert issubclass(getattr(errors, name), getattr(builtins, builtin))


def test_times_are_those_of_the_code():
    text = " ".join(README.split())
    assert f"after {_coordinate.DEAD_AFTER_S:g} s without a sign of life" in text
    assert f"for {_coordinate.ARRIVE_WITHIN_S:g} s (`ARRIVE_WITHIN_S`)" in text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str):
    document = ROOT / name
    text = document.read_text("utf-8")
    anchors = {anchor_of(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif "://" not in target:
            assert (document.parent / target.partition("#")[0]).exists(), target


def anchor_of(title: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
