"""A module imports only from those above it, and no two modules import each other."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ostraka"

# Top to bottom. A folder is one layer: its files may import each other.
LAYERS = (
    "errors",
    "_version",
    "_units",
    "_lifetime",
    "_interval",
    "_parallel",
    "_allowance",
    "_runs",
    "_box",
    "_spec",
    "_plain",
    "_format",
    "_header",
    "_parity",
    "_parity_format",
    "_metadata",
    "_plan_write",
    "_plan_parity",
    "_plan_read",
    "_plan_restore",
    "_plan_share",
    "_record",
    "_pack",
    "_pattern",
    "_rearrange",
    "_form",
    "_name_patterns",
    "_name_rules",
    "_name_parts",
    "_name_problems",
    "_names",
    "_name_families",
    "_names_given",
    "_codec",
    "_step_names",
    "_foreign_files",
    "storage",
    "_nodes",
    "_document",
    "_source",
    "_foreign",
    "_columns",
    "_rebuild",
    "_damage",
    "_shards",
    "_blocks",
    "_recycle",
    "_memory",
    "_fetch",
    "_view_read",
    "_view_tree",
    "_view_leaves",
    "_view",
    "formats",
    "_checkpoint",
    "_lazy",
    "_presence",
    "_service",
    "_coordinate",
    "_nnx",
    "_tree",
    "_values",
    "_capture",
    "sharding",
    "_write_compressed",
    "_write_parity",
    "_write_shards",
    "_handle",
    "_leftovers",
    "_agree",
    "_commit",
    "_save",
    "_inplace",
    "_differences",
    "_fused",
    "_place",
    "_leaf_types",
    "_match",
    "_assemble",
    "_share",
    "_read",
    "integrity",
    "transfer",
    "exercises",
    "planner",
    "manager",
    "interop",
    "compat",
    "report",
    "cli",
    "testing",
    "__init__",
)


def layer_of(module: str) -> str:
    """The layer of a dotted module name: `ostraka.storage._local` is in `storage`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def find_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import that may run, those inside functions too; not those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            for other in node.orelse:
                yield from find_imports(ast.Module([other], []))
        else:
            yield from find_imports(node)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_modules(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> list[str]:
    """The dotted names that an import reaches, relative ones resolved against `module`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        package = parts[: len(parts) - node.level + is_package]
        base = ".".join([*package, *base.split(".")] if base else package)
    if base != "ostraka":
        return [base]
    # `from ostraka import errors` reaches a module, `from ostraka import save` the public surface.
    names = (alias.name for alias in node.names)
    return [f"ostraka.{name}" if is_module(name) else "ostraka" for name in names]


def is_module(name: str) -> bool:
    return name in LAYERS or (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


def find_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Say, line by line, which imports of `module` point downwards or nowhere."""
    own = layer_of(module)
    if own not in LAYERS:
        return [f"{module} has no place in LAYERS"]
    found: list[str] = []
    for node in find_imports(ast.parse(source)):
        for name in imported_modules(node, module, is_package):
            layer = layer_of(name)
            if name.split(".")[0] != "ostraka" or layer == own:
                continue
            if layer not in LAYERS:
                found.append(f"{module}:{node.lineno} imports {name}, which has no place in LAYERS")
            elif LAYERS.index(layer) > LAYERS.index(own):
                found.append(f"{module}:{node.lineno} imports {name}, which is below it")
    return found


def find_cycle(sources: Mapping[str, str], packages: Collection[str] = ()) -> list[str] | None:
    """Modules of `sources` that import each other in a circle, inside a package or not."""
    imports: dict[str, set[str]] = {}
    for module, source in sources.items():
        found = imports[module] = set[str]()
        for node in find_imports(ast.parse(source)):
            for base in imported_modules(node, module, module in packages):
                names = [alias.name for alias in node.names]
                below = {f"{base}.{name}" for name in names} & sources.keys()
                found |= below or {base} & sources.keys()
        found.discard(module)  # `ostraka.testing` run as a program imports itself by its name
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def package_files() -> Iterator[tuple[str, Path]]:
    """Each module of the package by its dotted name, with its file."""
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ("ostraka", *file.relative_to(PACKAGE).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def test_modules_import_only_from_those_above():
    found: list[str] = []
    for module, file in package_files():
        is_package = file.stem == "__init__"
        found += find_violations(file.read_text("utf-8"), module, is_package=is_package)
    assert not found, "\n" + "\n".join(found)


def test_no_modules_import_each_other_at_any_level():
    files = dict(package_files())
    packages = {module for module, file in files.items() if file.stem == "__init__"}
    sources = {module: file.read_text("utf-8") for module, file in files.items()}
    cycle = find_cycle(sources, packages)
    assert cycle is None, " imports ".join(cycle or [])


@pytest.mark.parametrize(
    "source",
    [
        "from ostraka.storage._b import x",
        "from ostraka.storage import _b",
        "from . import _b",
        "from ._b import x",
        "import ostraka.storage._b",
        "def f():\n    from ._b import x",
    ],
)
def test_a_cycle_inside_a_package_is_found(source: str):
    sources = {"ostraka.storage._a": source, "ostraka.storage._b": "from ._c import y"}
    assert find_cycle({**sources, "ostraka.storage._c": ""}) is None
    cycle = find_cycle({**sources, "ostraka.storage._c": "from ._a import z"})
    assert cycle is not None
    assert {*cycle} == {*sources, "ostraka.storage._c"}
    for_types = f"if TYPE_CHECKING:\n    {source.splitlines()[-1].strip()}"
    typed = {"ostraka.storage._a": for_types, "ostraka.storage._b": "from ._a import z"}
    assert find_cycle(typed) is None


def test_the_planner_does_not_reach_into_the_manager():
    assert find_violations("from ostraka.manager._advice import x", "ostraka.planner._time")


def test_contributing_lists_the_same_layers():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    listing = re.search(r"^## Layers\n.*?^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert listing is not None
    names = [line.split()[0].removesuffix(".py").rstrip("/") for line in listing[1].splitlines()]
    assert tuple(names) == LAYERS


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ostraka._box", "from ostraka import _plan_write"),
        ("ostraka._box", "from ostraka._plan_write import plan_write"),
        ("ostraka._box", "import ostraka._plan_write"),
        ("ostraka._box", "import ostraka"),
        ("ostraka._box", "from ostraka import save"),
        ("ostraka._box", "from . import _plan_write"),
        ("ostraka._box", "from ._plan_write import plan_write"),
        ("ostraka._box", "from .storage._local import LocalStore"),
        ("ostraka._box", "def f():\n    from ostraka import _plan_write"),
        (
            "ostraka._box",
            "try:\n    pass\nexcept ImportError:\n    from ostraka import _pack",
        ),
        ("ostraka._box", "if TYPE_CHECKING:\n    pass\nelse:\n    from ostraka import _pack"),
        ("ostraka._box", "from ostraka._unheard_of import x"),
        ("ostraka._checkpoint", "from ostraka._read import restore"),
        ("ostraka.storage._local", "from .._save import save"),
        ("ostraka.storage._local", "from .. import _save"),
        ("ostraka._unheard_of", ""),
    ],
)
def test_a_downward_import_is_found(module: str, source: str):
    assert len(find_violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ostraka._plan_write", "import os\nimport numpy as np\nfrom numpy import _plan_write"),
        ("ostraka._plan_write", "from ostraka import _box, errors\nfrom ._spec import Leaf"),
        ("ostraka._box", "if TYPE_CHECKING:\n    from ostraka._plan_write import Plan"),
        ("ostraka._box", "if typing.TYPE_CHECKING:\n    from ostraka._plan_write import Plan"),
        ("ostraka._read", "from ostraka._checkpoint import open_at"),
        ("ostraka.storage._local", "from ._base import Store\nfrom .. import errors"),
        ("ostraka.storage._local", "from ostraka.storage import _base"),
        ("ostraka", "from ostraka._save import save"),
    ],
)
def test_an_upward_import_is_fine(module: str, source: str):
    assert find_violations(source, module) == []


@pytest.mark.parametrize("source", ["from ._local import LocalStore", "from .. import errors"])
def test_relative_imports_of_a_package_start_at_itself(source: str):
    assert find_violations(source, "ostraka.storage", is_package=True) == []


def test_a_package_reaching_down_is_found():
    found = find_violations("from .._save import save", "ostraka.storage", is_package=True)
    assert found == ["ostraka.storage:1 imports ostraka._save, which is below it"]
