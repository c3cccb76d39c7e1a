"""Folders import only from the folders below them, and `_x` belongs to its folder alone."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from manual import find_block

PACKAGE = Path(__file__).parents[2] / "src" / "ostraka"
# From the bottom to the top. Those between two bars know nothing of each other.
LAYERS = (
    "errors _version | common | metrics tree | layout | storage | families processes | formats",
    "live | sharding | data reading | saving | restoring | integrity | audit | transfer",
    "planner exercises",
    "manager | report",
    "compat | cli testing | __init__",
)
HEIGHT = {
    name: height
    for height, line in enumerate(" | ".join(LAYERS).split("|"))
    for name in line.split()
}
FILES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """The names below the package that a module reaches, but for those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node = ast.Module(node.orelse, [])
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        yield from (name.partition(".")[2] for name in names if name.split(".")[0] == "ostraka")
        yield from imports_of(node)


@cache
def all_imports() -> dict[str, list[str]]:
    """By module, the names that it reaches."""
    return {m: [*imports_of(ast.parse(file.read_text("utf-8")))] for m, file in FILES.items()}


def violations(module: str, names: Iterable[str]) -> Iterator[str]:
    own, folder = module.split(".")[0], f"{module.rpartition('.')[0]}."
    for name in names:
        parts = name.split(".")
        there = parts[0] if parts[0] in HEIGHT else "__init__"
        if there != own and HEIGHT[there] >= HEIGHT.get(own, -1):
            yield f"{module} imports {name}, which is not below it"
        for depth in range(1, len(parts)):
            home, path = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
            if parts[depth][0] == "_" and path in FILES and not folder.startswith(f"{home}."):
                yield f"{module} imports {name}, which belongs to {home}"


def test_folders_import_from_those_below_and_keep_their_own():
    found = [line for module, names in all_imports().items() for line in violations(module, names)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("layout.box", "from ostraka.storage import open_store"),
        ("layout.box", "def f():\n    import ostraka.saving.save"),
        ("layout.box", "from ostraka import save"),
        ("restoring.restore", "from ostraka.saving._commit import Commit"),
    ],
)
def test_a_broken_rule_is_found(module: str, source: str):
    assert len(list(violations(module, imports_of(ast.parse(source))))) == 1


def test_no_modules_import_each_other():
    graph = {
        m: {e for n in names for e in (n, n.rpartition(".")[0])} & {*FILES} - {m}
        for m, names in all_imports().items()
    }
    TopologicalSorter(graph).prepare()


PAGE = "docs/maintainers/architecture.md"


def test_the_picture_has_these_layers():
    rows = [re.split(r"\s{2,}", line) for line in find_block(PAGE, "cli ").splitlines()]
    cells = [[cell.split(".")[0] for cell in row] for row in rows]
    folders = [[HEIGHT[folder] for folder in row if folder in HEIGHT] for row in cells]
    for above, below in pairwise(folders):
        assert min(above) > max(below)
    drawn = sorted(height for row in folders for height in row)
    others = {"_version", "exercises", "__init__"}
    assert drawn == sorted(height for name, height in HEIGHT.items() if name not in others)


def test_the_spine_has_these_modules():
    names = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b(?!\(|-)", find_block(PAGE, "ostraka.save("))
    assert len(names) >= 10
    for name in (name for name in names if not name.endswith((".safetensors", ".json"))):
        assert name in FILES or f"{name}.__init__" in FILES, name
