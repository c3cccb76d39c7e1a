"""The rows as a table, for a terminal and for docs/maintainers/world.md."""

from __future__ import annotations

from itertools import groupby

from world.case import MODES
from world.runner import Row

BEGIN = "<!-- world-table: written by `make world WORLD_ARGS=--write-docs` -->"
END = "<!-- world-table ends -->"
_MOST = 700
_TITLES = ["package", "version", "what", "shows", *MODES]


def plain_table(rows: list[Row]) -> str:
    lines = [[row.case.package, row.version, row.case.name, *map(row.mark, MODES)] for row in rows]
    titles = [title for title in _TITLES if title != "shows"]
    widths = [max(len(line[i]) for line in [titles, *lines]) for i in range(len(titles))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [titles, *lines]
    )


def markdown_table(rows: list[Row]) -> str:
    """With a line for every case and the reason for everything that was left out."""
    lines = [_line(_TITLES), _line(["---"] * len(_TITLES))]
    lines += [
        _line([row.case.package, row.version, row.case.name, row.case.shows, *map(row.mark, MODES)])
        for row in rows
    ]
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


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
