"""The rows as a table, for a terminal and for docs/maintainers/world.md."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from world.case import MODES
from world.runner import Row

BEGIN = "<!-- world-table: written by `make world WORLD_ARGS=--write-docs` -->"
END = "<!-- world-table ends -->"
_MOST = 700
_EXAMPLES = 2
"""Case names that a row of a package shows."""


def plain_table(rows: list[Row]) -> str:
    """A line for every case."""
    lines = [[row.case.package, row.version, row.case.name, *map(row.mark, MODES)] for row in rows]
    titles = ["package", "version", "what", *MODES]
    widths = [max(len(line[i]) for line in [titles, *lines]) for i in range(len(titles))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [titles, *lines]
    )


def markdown_table(rows: list[Row]) -> str:
    """A line for every package, and the reason for everything that was left out."""
    titles = ["package", "version", "cases", "for example", *MODES]
    rules = ["---:" if title == "cases" else "---" for title in titles]
    lines = [_line(titles), _line(rules)]
    packages: dict[str, list[Row]] = {}
    for row in rows:
        packages.setdefault(row.case.package, []).append(row)
    for package, found in sorted(packages.items()):
        marks = [_summarize([row.mark(mode) for row in found]) for mode in MODES]
        lines.append(_line([package, found[0].version, str(len(found)), _examples(found), *marks]))
    reasons = [
        f"- {row.case.key}, {mode}: {reason}"
        for row in rows
        for mode, reason in row.case.left_out.items()
    ]
    if reasons:
        lines += ["", "Left out:", "", *reasons]
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    packages = len([package for package, _ in groupby(sorted(r.case.package for r in rows))])
    compared = sum(row.mark(mode) != "–" for row in rows for mode in MODES)
    return f"{len(rows)} cases of {packages} packages, {compared} ways of restoring them"


def failure_lines(rows: list[Row]) -> list[str]:
    """Each case with its problems; what several phases have alike, once."""
    lines: list[str] = []
    for row in rows:
        lines.append(row.case.key)
        phases: dict[str, list[str]] = {}
        for phase, problem in row.problems.items():
            phases.setdefault(problem[:_MOST], []).append(phase)
        lines += [f"  {', '.join(names)}: {problem}" for problem, names in phases.items()]
    return lines


def put_between_marks(text: str, table: str) -> str:
    """The document with the table in its place."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}"


def _examples(rows: list[Row]) -> str:
    more = ["…"] if len(rows) > _EXAMPLES else []
    return "; ".join([*(row.case.name for row in rows[:_EXAMPLES]), *more])


def _summarize(marks: list[str]) -> str:
    """The mark if all are equal, else each with its count: `4 same, 1 as dicts`."""
    counts = Counter(marks).most_common()
    if len(counts) == 1:
        return marks[0]
    return ", ".join(f"{count} {mark}" for mark, count in counts)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
