"""What a run leaves behind: all raw values as JSON, a table, a picture."""

from __future__ import annotations

import json
import sys
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
YARDSTICK = "orbax"
"""What the picture compares with, as it is when nobody sets anything."""
PAGE = Path("docs/maintainers/benchmarks.md")
TABLE_BEGINS = "<!-- bench-table -->"
TABLE_ENDS = "<!-- /bench-table -->"
README = Path("README.md")
SHORT_BEGINS = "<!-- speed -->"
SHORT_ENDS = "<!-- /speed -->"
IN_SHORT = {
    "save_large": "save 1 GiB",
    "restore_warm": "restore 1 GiB",
    "save_many": "save 1,000 arrays of 256 KiB",
    "restore_many": "restore them",
    "stall_large": "until `save_async` of 1 GiB returns",
}
BAR_INCHES = 0.15
GAP_INCHES = 0.14
TITLE_INCHES = 0.6


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
        *make_table(rows, verdicts),
        "",
        "## Machine",
        "",
        *_bullets(run),
    ]
    notes = [note for row in rows for note in row.notes]
    if notes:
        lines += ["", "## Remarks", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def make_table(rows: list[Row], verdicts: list[Verdict]) -> list[str]:
    """The lines of the table alone."""
    lines = [
        "| work | " + " | ".join(NAMES.values()) + " | ratio | bar | met? |",
        "| --- |" + " ---: |" * len(NAMES) + " ---: | --- | --- |",
    ]
    for row in rows:
        lines += _table_lines(row, [v for v in verdicts if v.row == row.id])
    return lines


def make_short_table(rows: list[Row], run: dict[str, Any]) -> list[str]:
    """A few rows against Orbax, for the README."""
    by_id = {row.id: row for row in rows}
    lines = ["| | Ostraka | Orbax | Orbax, best setting |", "| --- | ---: | ---: | ---: |"]
    for row_id, title in IN_SHORT.items():
        shown = [show(by_id[row_id], name) for name in ("ostraka", "orbax", "orbax_best")]
        lines.append(f"| {title} | {' | '.join(shown)} |")
    machine = run["machine"]
    place = f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB"
    place = f"{place}, {machine['file_system']}"
    orbax = machine["packages"]["orbax-checkpoint"]
    return [
        *lines,
        "",
        f"Medians of one run on {place}, 8 CPU devices, Orbax {orbax}.",
        f"[All rows]({PAGE.as_posix()}) include missed targets.",
    ]


def with_table(
    page: str, table: list[str], begins: str = TABLE_BEGINS, ends: str = TABLE_ENDS
) -> str:
    """A page with this table between its marks."""
    before, _, rest = page.partition(begins)
    _, _, after = rest.partition(ends)
    return "\n".join([f"{before}{begins}", *table, f"{ends}{after}"])


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
    """Draw the picture of a run, if Orbax was measured."""
    figure = make_figure(rows)
    if figure is not None:
        figure.savefig(path, dpi=130)


def make_figure(rows: list[Row]) -> Any:
    """One row for each work that Orbax does, too: how many times as fast each one is as Orbax.

    The axis is linear and begins at 0, so that a bar twice as long is twice as fast.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.unit == "s" and row.values.get(YARDSTICK)]
    if not shown:
        return None
    bars = sum(len(_contenders(row)) for row in shown)
    height = BAR_INCHES * bars + GAP_INCHES * len(shown) + TITLE_INCHES
    figure = Figure(figsize=(8.6, height))
    axis = figure.subplots()
    _draw_rows(axis, shown)
    axis.axvline(1, color=COLOURS[YARDSTICK], linewidth=1.5, zorder=3)
    axis.set_xlim(0, axis.dataLim.xmax * 1.13)
    axis.invert_yaxis()
    axis.margins(y=0.01)
    axis.set_xlabel(
        "times as fast as Orbax; a thin line goes from the slowest round to the fastest", fontsize=9
    )
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.legend(handles=_legend(shown), loc="lower right", fontsize=8, frameon=False)
    figure.tight_layout()
    return figure


def _contenders(row: Row) -> list[str]:
    """Those that get a bar, in the order of the table."""
    return [name for name in NAMES if name != YARDSTICK and row.values.get(name)]


def _draw_rows(axis: Any, rows: list[Row]) -> None:
    place = 0.0
    ticks: list[float] = []
    for row in rows:
        names = _contenders(row)
        places = [place + BAR_INCHES * number for number in range(len(names))]
        ticks.append(places[0] + BAR_INCHES * (len(names) - 1) / 2)
        for at, name in zip(places, names, strict=True):
            _draw_bar(axis, at, row, name)
        place = places[-1] + BAR_INCHES + GAP_INCHES
    axis.set_yticks(ticks, [row.title for row in rows], fontsize=8)


def _draw_bar(axis: Any, place: float, row: Row, name: str) -> None:
    """The ratio of the medians, with the range of the rounds."""
    ratio = _times_as_fast(row, name)
    yardstick = median(row, YARDSTICK)
    assert ratio is not None
    assert yardstick is not None
    axis.barh(place, ratio, color=COLOURS[name], height=BAR_INCHES * 0.86)
    rounds = [yardstick / value for value in row.values[name]]
    axis.plot([min(rounds), max(rounds)], [place, place], color="black", linewidth=0.6, alpha=0.6)
    words = f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×"
    axis.annotate(
        f"{words}  {show(row, name)}" if name == "ostraka" else words,
        (max(ratio, *rounds), place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        fontweight="bold" if name == "ostraka" else "normal",
    )


def _times_as_fast(row: Row, name: str) -> float | None:
    ours, yardstick = median(row, name), median(row, YARDSTICK)
    return yardstick / ours if ours and yardstick else None


def _legend(rows: list[Row]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    there = {name for row in rows for name in _contenders(row)}
    bars = [Patch(color=COLOURS[name], label=NAMES[name]) for name in NAMES if name in there]
    return [*bars, Line2D([], [], color=COLOURS[YARDSTICK], linewidth=1.5, label="Orbax, 1×")]


def main() -> None:
    """Draw the picture of a run and write its table anew: `python -m bench.report [FOLDER]`."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "bench/results")
    document = json.loads((folder / "results.json").read_text())
    rows = [Row(**row) for row in document["rows"]]
    draw(folder / "results.png", rows)
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), make_table(rows, judge(rows))), "utf-8")
    short = make_short_table(rows, document["run"])
    text = with_table(README.read_text("utf-8"), short, SHORT_BEGINS, SHORT_ENDS)
    README.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
