"""The project keeps its own promises: extras that are used, a test file for each module."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostraka._version import __version__

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ostraka"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
IMPORTED_AS = {"orbax-checkpoint": "orbax"}

TESTED_IN = {
    "_allowance": "hostile",
    "_blocks": "fetch",
    "_capture": "roundtrip",
    "_columns": "rebuild",
    "_commit": "failures",
    "_document": "restorable",
    "_foreign": "errors",
    "_handle": "async",
    "_header": "format",
    "_match": "restorable",
    "_metadata": "format",
    "_form": "names",
    "_name_families": "names",
    "_name_parts": "names",
    "_name_patterns": "names",
    "_name_problems": "names",
    "_name_rules": "names",
    "_names_given": "names",
    "_plan_read": "plan",
    "_plan_write": "plan",
    "_read": "roundtrip",
    "_runs": "format",
    "_save": "roundtrip",
    "_service": "coordinate",
    "_shards": "rebuild",
    "_version": "project",
    "_view_leaves": "view",
    "_view_read": "view",
    "_view_tree": "view",
    "_write_compressed": "compress",
    "_write_shards": "roundtrip",
    "formats": "source",
    "integrity": "damage",
    "interop": "merge",
    "transfer": "copy",
}
"""Modules that are tested through what they are for, in the file of that name."""


def imported_names() -> Iterator[str]:
    """The top names of all that the package imports, anywhere."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0]


def names_of(requirements: list[str]) -> list[str]:
    names = [re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in requirements]
    return [IMPORTED_AS.get(name, name) for name in names if name != "ostraka"]


@pytest.mark.parametrize("extra", ["", *sorted(PROJECT["optional-dependencies"].keys() - {"dev"})])
def test_what_is_installed_is_imported(extra: str):
    wanted = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    assert set(names_of(wanted)) <= set(imported_names())


def test_an_extra_is_imported_nowhere_but_in_functions():
    """Nor in modules that only functions import: those that have `flax` at the top are few."""
    extras = {n for names in PROJECT["optional-dependencies"].values() for n in names_of(names)}
    at_top = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in extras
    }
    assert at_top <= {"planner/_shapes.py", "storage/_cloud.py", "storage/_object.py"}


def test_every_module_has_its_test_file():
    lacking: list[str] = []
    for entry in sorted(PACKAGE.iterdir()):
        name = entry.stem
        if name in ("__init__", "__pycache__") or entry.suffix not in ("", ".py"):
            continue
        stem = TESTED_IN.get(name, name.lstrip("_"))
        pattern = f"test_{stem}*.py" if entry.is_dir() else f"test_{stem}.py"
        if not any((ROOT / "tests").glob(pattern)):
            lacking.append(f"{name} has no tests/test_{stem}.py")
    assert not lacking, "\n".join(lacking)


def test_no_module_is_said_to_be_tested_elsewhere_that_has_a_file():
    tests = ROOT / "tests"
    both = [name for name in TESTED_IN if (tests / f"test_{name.lstrip('_')}.py").exists()]
    assert both == []


def test_the_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", __version__)
    assert f'"{__version__}"' in (PACKAGE / "_version.py").read_text("utf-8")
    assert PROJECT["dynamic"] == ["version"]
