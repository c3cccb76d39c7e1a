"""Run the fenced blocks of a document, and compare what they print."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def find_blocks(name: str) -> list[tuple[str, str]]:
    """The fenced blocks in order: language and text."""
    text = (ROOT / name).read_text("utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_blocks(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """Run the Python of a document in one namespace; how many blocks ran and were compared.

    A `text` block is what the Python block before it printed.
    """
    namespace: dict[str, object] = {"__name__": Path(name).stem}
    printed = ""
    ran = compared = 0
    for language, text in find_blocks(name):
        if language == "python":
            exec(compile(text, f"{name}, block {ran}", "exec"), namespace)
            printed = capsys.readouterr().out
            ran += 1
        elif language == "text":
            assert printed == text
            compared += 1
    return ran, compared
