"""What the soak tests counted: kills, flips, rounds. Kept in a file, shown as one table.

A test that is marked `soak` takes the fixture `figures` and says what it has done:
`figures.add("saves killed with -9", 250)`. `make soak` has them written to soak.json and soak.md in
`bench/results`, and into the documents that quote them. A run of some of the tests replaces just
their figures; what has never been run is in none of them.

`python tests/support/figures.py` writes the documents anew from the file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "soak.json"
TABLE = RESULTS.with_suffix(".md")
QUOTED_IN = ROOT / "docs" / "maintainers" / "durability.md"
BEGIN = "<!-- figures of make soak: written by tests/support/figures.py -->"
END = "<!-- end of figures -->"
PROPERTY = "figures"

Results = dict[str, dict[str, Any]]
"""By test: its seconds, whether it passed, on which day, and its counts."""


class Figures:
    """What one test has counted."""

    def __init__(self, counts: dict[str, int]):
        self._counts = counts

    def add(self, what: str, count: int = 1) -> None:
        self._counts[what] = self._counts.get(what, 0) + count


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    counts: dict[str, int] = {}
    request.node.user_properties.append((PROPERTY, counts))
    return Figures(counts)


class FiguresPlugin:
    """Collects the figures of a run, and writes them to `file` if there is one."""

    def __init__(self, file: Path | None):
        self.file = file
        self.found: Results = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or "soak" not in report.keywords or report.skipped:
            return
        file, _, name = report.nodeid.partition("::")
        self.found[f"{Path(file).name}::{name}"] = {
            "passed": report.passed,
            "seconds": round(report.duration, 1),
            "day": datetime.now(UTC).date().isoformat(),
            "counts": dict(report.user_properties).get(PROPERTY, {}),
        }

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.found:
            return
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join(table(self.found)))
        if self.file is not None:
            save(self.file, {**load(self.file), **self.found})


def load(file: Path) -> Results:
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def save(file: Path, results: Results) -> None:
    file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    file.with_suffix(".md").write_text("\n".join(table(results)) + "\n", "utf-8")


def table(results: Results) -> list[str]:
    """One row for each test function, the counts of all its parameters added up."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for test, result in sorted(results.items()):
        rows.setdefault(re.sub(r"\[.*\]$", "", test).replace(".py::", "."), []).append(result)
    lines = ["| test | counted | seconds | runs | failed |", "| --- | --- | ---: | ---: | ---: |"]
    for test, found in rows.items():
        counted = ", ".join(f"{count:,} {what}" for what, count in totals(found)) or "–"
        seconds = sum(result["seconds"] for result in found)
        failed = sum(not result["passed"] for result in found)
        lines.append(f"| `{test}` | {counted} | {seconds:,.0f} | {len(found)} | {failed} |")
    return lines


def quote(text: str, results: Results) -> str:
    """A document with the figures of what passed; what failed or was not run is not quoted."""
    passed = {test: result for test, result in results.items() if result["passed"]}
    days = sorted({result["day"] for result in passed.values()})
    said = ["Nothing has been run yet."]
    if passed:
        span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        said = [f"Run on {span}, on two cores:", "", *table(passed)]
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return "\n".join([f"{before}{BEGIN}", *said, f"{END}{after}"])


def totals(results: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
    return list(counts.items())


def main() -> None:
    results = load(RESULTS)
    save(RESULTS, results)
    QUOTED_IN.write_text(quote(QUOTED_IN.read_text("utf-8"), results), "utf-8")


if __name__ == "__main__":
    main()
