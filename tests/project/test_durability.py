"""What docs/maintainers/durability.md promises has tests, and quotes what was really counted."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import figures
from figures import QUOTED_IN, RESULTS, TABLE, FiguresPlugin, load, quote, table

TESTS = {file.stem: file for file in Path(__file__).parents[1].rglob("test_*.py")}
PAGE = Path(__file__).parents[2] / "docs" / "maintainers" / "durability.md"


@cache
def functions_in(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_is_there():
    named = set(re.findall(r"`(test_\w+)\.(test_\w+)`", PAGE.read_text("utf-8")))
    assert len(named) > 30
    missing = [
        f"{module}.{name}"
        for module, name in sorted(named)
        if name not in functions_in(TESTS[module])
    ]
    assert missing == []


def test_every_test_in_the_figures_is_there():
    for test in load(RESULTS):
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions_in(TESTS[file.removesuffix(".py")]), test


def test_what_is_quoted_is_what_was_counted():
    # To write them anew: python tests/support/figures.py
    results = load(RESULTS)
    assert TABLE.read_text("utf-8") == "\n".join(table(results)) + "\n"
    text = QUOTED_IN.read_text("utf-8")
    assert text == quote(text, results)


class Report:
    """As pytest reports a test."""

    when = "call"
    skipped = False
    duration = 1.25

    def __init__(self, name: str, counts: dict[str, int], *, passed: bool = True):
        self.nodeid = f"tests/test_x.py::{name}"
        self.keywords = {"soak": 1}
        self.passed = passed
        self.user_properties = [("figures", counts)]


def test_figures_are_added_up_kept_and_quoted(tmp_path: Path):
    shown: list[str] = []

    class Terminal:
        section = write_line = staticmethod(shown.append)

    def run(*reports: Any) -> None:
        plugin = FiguresPlugin(tmp_path / "soak.json")
        for report in reports:
            plugin.pytest_runtest_logreport(report)
        plugin.pytest_terminal_summary(Terminal())

    run(Report("test_a[1]", {"kills": 3}), Report("test_a[2]", {"kills": 1_000}))
    run(Report("test_b", {"flips": 7}, passed=False), Report("test_a[2]", {"kills": 1_001}))
    assert shown[0] == "figures"
    assert "1,003 kills" in shown[1]
    results = load(tmp_path / "soak.json")
    assert table(results)[2:] == [
        "| `test_x.test_a` | 1,004 kills | 2 | 2 | 0 |",
        "| `test_x.test_b` | 7 flips | 1 | 1 | 1 |",
    ]
    assert (tmp_path / "soak.md").read_text() == "\n".join(table(results)) + "\n"
    text = f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n"
    quoted = quote(text, results)
    assert "1,004 kills" in quoted
    assert "flips" not in quoted
    assert "old" not in quoted
    assert quote(quoted, results) == quoted
    assert "Nothing has been run yet." in quote(text, {})
