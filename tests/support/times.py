"""The time that a run spent in each folder of tests, printed after its results."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import PurePosixPath

import pytest


class TimesPlugin:
    """Adds up the seconds of setup, call and teardown. With xdist, of all workers together."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = str(PurePosixPath(report.nodeid.partition("::")[0]).parent)
        self._seconds[folder] += report.duration
        self._tests[folder] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._seconds) > 1:
            terminalreporter.section("seconds by folder")
            for folder, seconds in sorted(self._seconds.items(), key=lambda item: -item[1]):
                count = self._tests[folder]
                terminalreporter.write_line(f"{seconds:8.1f}s {count:6} tests  {folder}")
