"""The project keeps its own promises: extras that are used, one version."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ostraka._version import __version__

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ostraka"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
IMPORTED_AS = {
    "opentelemetry-api": "opentelemetry",
    "orbax-checkpoint": "orbax",
    "prometheus-client": "prometheus_client",
}


@cache
def parsed() -> dict[str, ast.Module]:
    """Each file of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {f.relative_to(PACKAGE).as_posix(): ast.parse(f.read_text("utf-8")) for f in files}


def imported_names() -> Iterator[str]:
    """The top names of all that the package imports, anywhere."""
    for tree in parsed().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0]


def names_of(requirements: list[str]) -> list[str]:
    names = [re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in requirements]
    return [IMPORTED_AS.get(name, name) for name in names if name != "ostraka"]


FOR_DEVELOPERS = {"dev", "docs"}


def test_what_is_installed_is_imported():
    found = set(imported_names())
    extras = PROJECT["optional-dependencies"]
    wanted = {name: extras[name] for name in extras.keys() - FOR_DEVELOPERS}
    for extra, requirements in {"": PROJECT["dependencies"], **wanted}.items():
        assert set(names_of(requirements)) <= found, extra


def test_an_extra_is_imported_nowhere_but_in_functions():
    """Nor in modules that only functions import: those that have `flax` at the top are few."""
    extras = {n for names in PROJECT["optional-dependencies"].values() for n in names_of(names)}
    at_top = {
        name
        for name, tree in parsed().items()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in extras
    }
    assert at_top <= {
        "planner/_factory.py",
        "storage/_cloud.py",
        "storage/_object.py",
    }


def test_the_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", __version__)
    assert f'"{__version__}"' in (PACKAGE / "_version.py").read_text("utf-8")
    assert PROJECT["dynamic"] == ["version"]
