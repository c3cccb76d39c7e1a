"""What a run leaves behind: all raw values as JSON, a table, a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.bars import NAMES, Verdict, judge, median
from bench.rounds import Row

COLOURS = {
    "ostraka": "#c8553d",
    "plain": "#e3a08f",
    "orbax": "#2f4b7c",
    "orbax_best": "#7d9bd1",
    "dcp": "#3f7d4e",
    "dcp_best": "#93c49c",
    "bare": "#b8b8b8",
    "in_turn": "#8f8f8f",
}
TITLE_INCHES = 0.5


def write_results(folder: Path, rows: list[Row], run: dict[str, Any]) -> None:
    """Write results.json, results.md and results.png; `run` is the machine and the options."""
    folder.mkdir(parents=True, exist_ok=True)
    verdicts = judge(rows)
    _write_json(folder / "results.json", rows, run, verdicts)
    (folder / "results.md").write_text(make_markdown(rows, run, verdicts))
    draw(folder / "results.png", rows)


def _write_json(path: Path, rows: list[Row], run: dict[str, Any], verdicts: list[Verdict]) -> None:
    document = {
        "run": run,
        "rows": [row.to_json() for row in rows],
        "bars": [{"row": v.row, "bar": v.bar, "ratio": v.ratio, "met": v.met} for v in verdicts],
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def make_markdown(rows: list[Row], run: dict[str, Any], verdicts: list[Verdict]) -> str:
    """The table of medians and bars, with the machine and the remarks below it."""
    lines = [
        "# Results",
        "",
        "Medians of interleaved rounds in one run on one machine: compare the columns of a row,",
        "not the rows of different runs. Same bytes, everything durable, every restore checked",
        "bit for bit.",
        "",
        "| work | " + " | ".join(NAMES.values()) + " | ratio | bar | met? |",
        "| --- |" + " ---: |" * len(NAMES) + " ---: | --- | --- |",
    ]
    for row in rows:
        lines += _table_lines(row, [v for v in verdicts if v.row == row.id])
    lines += ["", "## Machine", "", *_bullets(run)]
    notes = [note for row in rows for note in row.notes]
    if notes:
        lines += ["", "## Remarks", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _table_lines(row: Row, verdicts: list[Verdict]) -> list[str]:
    """One line a bar: the first carries the medians."""
    medians = " | ".join(show(row, name) for name in NAMES)
    blank = " | ".join("" for _ in NAMES)
    lines: list[str] = []
    for i, verdict in enumerate(verdicts or [Verdict(row.id, "", "", None)]):
        start = f"| {row.title} | {medians}" if i == 0 else f"| | {blank}"
        lines.append(f"{start} | {verdict.ratio} | {verdict.bar} | {met_word(verdict)} |")
    return lines


def met_word(verdict: Verdict) -> str:
    """Met, not met, or nothing where there was nothing to measure."""
    if verdict.met is None:
        return ""
    return "met" if verdict.met else "**not met**"


def show(row: Row, name: str) -> str:
    """A median with its unit."""
    value = median(row, name)
    if value is None:
        return ""
    if row.unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if row.unit == "ratio":
        return f"{value:.2f}×"
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _bullets(run: dict[str, Any]) -> list[str]:
    facts: dict[str, Any] = {**run["machine"], **run["options"]}
    versions = facts.pop("packages")
    facts["packages"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [f"- {key.replace('_', ' ')}: {value}" for key, value in facts.items()]


def draw(path: Path, rows: list[Row]) -> None:
    """One panel a row, bars of medians on a log scale, dots for the single rounds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.values]
    if not shown:
        return
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    height = 2.3 * lines + TITLE_INCHES
    figure, axes = plt.subplots(lines, columns, figsize=(6.5 * columns, height), squeeze=False)
    for axis, row in zip(axes.flat, shown, strict=False):
        _draw_row(axis, row)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    figure.suptitle("Ostraka, Orbax, PyTorch DCP and bare I/O (log scale; shorter is better)")
    figure.tight_layout(rect=(0, 0, 1, 1 - TITLE_INCHES / height))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _label(row: Row, name: str) -> str:
    """The median, and how often Ostraka's goes into it."""
    ours, value = median(row, "ostraka"), median(row, name)
    if name == "ostraka" or not ours or not value:
        return show(row, name)
    ratio = value / ours
    words = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return f"{show(row, name)}  ({words}×)"


def _draw_row(axis: Any, row: Row) -> None:
    names = [name for name in NAMES if row.values.get(name)]
    divisor = 2**20 if row.unit == "bytes" else 1
    middles = [max((median(row, name) or 0) / divisor, 1e-3) for name in names]
    places = range(len(names))
    axis.barh(places, middles, color=[COLOURS[name] for name in names], height=0.7)
    for place, name, middle in zip(places, names, middles, strict=True):
        dots = [max(value / divisor, 1e-3) for value in row.values[name]]
        axis.plot(dots, [place] * len(dots), ".", color="black", markersize=3, alpha=0.6)
        axis.annotate(
            _label(row, name),
            (max([middle, *dots]), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(places, [NAMES[name] for name in names], fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(min(middles) / 3, max(max(row.values[n]) / divisor for n in names) * 10)
    axis.set_title(row.title, fontsize=9)
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel({"bytes": "MiB", "ratio": "ratio"}.get(row.unit, "seconds"), fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
