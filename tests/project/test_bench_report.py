"""What a run of the benchmark leaves: bars as long as their ratios, a table that is the results."""

import json
from pathlib import Path

import pytest
from bench.bars import judge, median
from bench.report import (
    SHORT_BEGINS,
    SHORT_ENDS,
    TABLE_BEGINS,
    TABLE_ENDS,
    make_figure,
    make_short_table,
    make_table,
    with_table,
)
from bench.rounds import Row

ROOT = Path(__file__).parents[2]


def measured() -> list[Row]:
    document = json.loads((ROOT / "bench/results/results.json").read_text("utf-8"))
    return [Row(**row) for row in document["rows"]]


def test_a_bar_is_as_long_as_its_ratio():
    rows = [row for row in measured() if row.unit == "s" and row.values.get("orbax")]
    figure = make_figure(measured())
    (axis,) = figure.axes
    assert axis.get_xscale() == "linear"
    assert axis.get_xlim()[0] == 0
    lengths = sorted(bar.get_width() for bar in axis.patches)
    expected = sorted(
        (median(row, "orbax") or 0) / (median(row, name) or 1)
        for row in rows
        for name in row.values
        if name != "orbax"
    )
    assert lengths == pytest.approx(expected)
    assert [label.get_text() for label in axis.get_yticklabels()] == [row.title for row in rows]


def test_without_orbax_there_is_no_picture():
    assert make_figure([Row("a", "a", 1, values={"ostraka": [1.0]})]) is None


def test_the_page_has_the_table_of_the_results():
    page = (ROOT / "docs/maintainers/benchmarks.md").read_text("utf-8")
    rows = measured()
    assert with_table(page, make_table(rows, judge(rows))) == page
    assert page.count(TABLE_BEGINS) == page.count(TABLE_ENDS) == 1


def test_the_readme_has_a_few_rows_of_them():
    """None is written by hand."""
    readme = (ROOT / "README.md").read_text("utf-8")
    run = json.loads((ROOT / "bench/results/results.json").read_text("utf-8"))["run"]
    short = make_short_table(measured(), run)
    assert len(short) == 10
    assert with_table(readme, short, SHORT_BEGINS, SHORT_ENDS) == readme
    assert readme.count(SHORT_BEGINS) == readme.count(SHORT_ENDS) == 1
