"""The reference pages are complete: they name what the code has."""

import inspect
import json
import re
from pathlib import Path

from bench.bars import median
from bench.rounds import Row

import ostraka
from ostraka.tree.patterns import matches

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def read_page(name: str) -> str:
    return (REFERENCE / name).read_text("utf-8")


def test_every_environment_variable_is_listed():
    """Those of Ostraka and of object stores that the package names."""
    names = re.compile(r"\b(?:OSTRAKA|AWS|GOOGLE|AZURE)_[A-Z][A-Z0-9_]*\b")
    found = {
        name
        for file in (ROOT / "src/ostraka").rglob("*.py")
        for name in names.findall(file.read_text("utf-8"))
    }
    assert len(found) > 15
    listed = set(names.findall(read_page("environment.md")))
    assert found - listed == set()


def test_examples_of_patterns_match_as_the_table_says():
    table = read_page("patterns.md").partition("| pattern | selects | does not select |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 8
    for row in rows:
        pattern, selected, others = (
            re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split("|")
        )
        assert [matches(pattern, path) for path in selected] == [True] * len(selected), row
        assert [matches(pattern, path) for path in others] == [False] * len(others), row


def test_the_glossary_is_sorted_and_names_a_term_once():
    terms = re.findall(r"^\| ([^|]+?) \|", read_page("glossary.md"), re.MULTILINE)[2:]
    assert len(terms) > 40
    assert terms == sorted(set(terms))


def test_the_manager_has_the_arguments_and_methods_of_its_page():
    page = read_page("manager.md")
    arguments, _, methods = page.partition("## Methods")
    listed = set(re.findall(r"`(\w+)`", arguments.partition("## Arguments")[2]))
    parameters = set(inspect.signature(ostraka.Manager).parameters)
    assert parameters - listed == set()
    table = methods.partition("\n- ")[0]
    told = set(re.findall(r"`(\w+)(?:\(.*?\))?`", table))
    public = {name for name in vars(ostraka.Manager) if not name.startswith("_")}
    assert public - told == set()


def test_the_six_rows_are_those_of_the_results():
    """No number is written by hand."""
    page = (ROOT / "docs/explanation/performance.md").read_text("utf-8")
    rows = page.partition("| work, on 8 CPU devices")[2].partition("\n\n")[0].splitlines()[2:]
    document = json.loads((ROOT / "bench/results/results.json").read_text("utf-8"))
    measured = [Row(**row) for row in document["rows"]]
    names = ("ostraka", "orbax", "orbax_best")
    texts = {
        tuple(
            f"{found:.3f} s" if row.unit == "s" else f"{found / 2**20:.0f} MiB"
            for found in (median(row, name) or 0.0 for name in names)
        )
        for row in measured
    }
    told = [tuple(cell.strip() for cell in row.strip("|").split("|")[1:]) for row in rows]
    assert len(told) == 6
    assert set(told) <= texts
