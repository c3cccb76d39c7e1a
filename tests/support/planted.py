"""Plant faults in the package, one at a time, and see whether the tests notice: `make faults`.

A fault is one small change of the syntax tree: a comparison turned, a statement left out, a number
one higher. The tests that reach the changed line are run, fastest first, until one fails. What
reaches a line is read from the coverage data and the times of a whole run (`make coverage`).
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

AREAS = {
    "boxes": ("layout/box.py", "layout/spec.py", "layout/runs.py"),
    "plans": ("layout/plan_write.py", "layout/plan_read.py", "layout/plan_restore.py"),
    "formats": ("layout/shard_file.py", "layout/metadata.py", "formats/ostraka"),
    "matching": ("restoring",),
    "trees": ("tree", "live"),
    "commit": ("saving",),
    "coordination": ("processes",),
    "retention": ("manager",),
    "repair": ("integrity",),
    "names": ("reading", "families"),
    "stores": ("storage",),
    "transfer": ("transfer", "formats/orbax", "formats/safetensors"),
    "common": ("common",),
    "sharding": ("sharding",),
    "planner": ("planner",),
    "data": ("data",),
    "audits": ("audit", "metrics"),
    "report": ("report",),
    "command": ("cli",),
    "compat": ("compat",),
}
_COMPARED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_CALLED = {"min": "max", "max": "min", "all": "any", "any": "all"}
_MOST_BYTES = 4 << 30
"""A fault may have a loop that never ends, and keeps what it makes."""
_NOT_CHANGED = ("__repr__", "__str__", "_repr_html_")
_MODULES = ("jax", "flax.nnx", "optax", "obstore", "safetensors", "click")
"""What most tests import. Not pytest's plugins, such as hypothesis: pytest wants to import them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one function: the `number`-th of those that it allows."""

    area: str
    function: str
    digest: str
    """Of the function's syntax tree, by which it is found in another version."""
    number: int
    change: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a version of the package has a fault."""

    file: str
    line: int
    last_line: int
    source: str
    """The file with the fault in it."""


class _Planter(ast.NodeTransformer):
    """Counts the changes that a function allows, and makes the one with the given number."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted = wanted
        self.found: list[tuple[int, int, str]] = []

    def _is_next(self, node: ast.stmt | ast.expr, change: str) -> bool:
        last_line = node.lineno if isinstance(node, ast.stmt) else node.end_lineno or node.lineno
        self.found.append((node.lineno, last_line, change))
        return len(self.found) - 1 == self.wanted

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Pass() if self._is_next(node, "raise left out") else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node
        if isinstance(node.value, ast.Call) and self._is_next(node, "call left out"):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        has_value = node.value is not None and not isinstance(node.value, ast.Constant)
        if has_value and self._is_next(node, "returns None"):
            return ast.Return(ast.Constant(None))
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._is_next(node, "condition turned"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return node
        return self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> ast.AST:
        return ast.Continue() if self._is_next(node, "break to continue") else node

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return ast.Break() if self._is_next(node, "continue to break") else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        other = _COMPARED.get(type(node.ops[0]))
        if other and self._is_next(node, f"{type(node.ops[0]).__name__} to {other.__name__}"):
            node.ops[0] = other()
            return node
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        other = _COMPUTED.get(type(node.op))
        if other and self._is_next(node, f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()
            return node
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if self._is_next(node, "and for or"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _CALLED and self._is_next(node, f"{name} to {_CALLED[name]}"):
            node.func = ast.Name(_CALLED[name], ast.Load())
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._is_next(node, f"{node.value} to {not node.value}"):
                return ast.Constant(not node.value)
        elif isinstance(node.value, int) and self._is_next(node, f"{node.value} + 1"):
            return ast.Constant(node.value + 1)
        return node


def choose(package: Path, count: int, seed: int, other: Path | None = None) -> list[Fault]:
    """Choose `count` faults of each area, at most two of a function.

    With `other`, only functions that another version of the package has, too, are taken.
    """
    known = {digest for *_, digest in _functions_below(other)} if other else None
    chosen: list[Fault] = []
    for area, places in AREAS.items():
        faults: list[Fault] = []
        for place in places:
            for file, name, node, digest in _functions_below(package / place):
                if known is None or digest in known:
                    planter = _Planter()
                    planter.visit(node)
                    where = f"{file.relative_to(package)}:{name}"
                    faults += [
                        Fault(area, where, digest, number, change)
                        for number, (_, _, change) in enumerate(planter.found)
                    ]
        random.Random(f"{seed} {area}").shuffle(faults)
        of_function: Counter[str] = Counter()
        taken: list[Fault] = []
        for fault in faults:
            of_function[fault.digest] += 1
            if of_function[fault.digest] <= 2:
                taken.append(fault)
        chosen += taken[:count]
    return chosen


def plant(package: Path, fault: Fault) -> Place | None:
    """A fault in a version of the package. None if that has another function."""
    for file, _, node, digest in _functions_below(package):
        if digest == fault.digest:
            tree = ast.parse(file.read_text())
            planter = _Planter(fault.number)
            for changed in _functions(tree):
                if changed[1].lineno == node.lineno:
                    planter.visit(changed[1])
            line, last_line, _ = planter.found[fault.number]
            source = ast.unparse(ast.fix_missing_locations(tree))
            return Place(str(file.relative_to(package)), line, last_line, source)
    return None


def _functions(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module, without those inside of them."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{name}", found) for name, found in _functions(node))
        elif isinstance(node, ast.FunctionDef) and node.name not in _NOT_CHANGED:
            yield node.name, node


@functools.cache
def _functions_below(place: Path) -> list[tuple[Path, str, ast.FunctionDef, str]]:
    return [
        (file, name, node, hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16])
        for file in _files(place)
        for name, node in _functions(ast.parse(file.read_text()))
    ]


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


class Reach:
    """Which tests run a line, and how long each takes."""

    def __init__(self, coverage_data: Path, junit: Path) -> None:
        self._data = sqlite3.connect(coverage_data)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for case in ElementTree.parse(junit).iter("testcase"):
            module = case.get("classname", "").split(".")
            name = case.get("name", "").partition("[")[0]
            file = "/".join(module) + ".py"
            self.seconds[f"{file}::{name}"] += float(case.get("time", "0"))
        self._ids = {
            f"{test.partition('::')[0].rpartition('/')[2][:-3]}.{test.partition('::')[2]}": test
            for test in self.seconds
        }

    def tests(self, place: Place, most_s: float) -> list[str]:
        """The tests that reach a fault, fastest first, for so many seconds in all."""
        query = (
            "select distinct context.context from arc "
            "join context on context.id = arc.context_id join file on file.id = arc.file_id "
            "where file.path like ? and abs(arc.tono) between ? and ?"
        )
        rows = self._data.execute(query, (f"%/ostraka/{place.file}", place.line, place.last_line))
        found = [self._ids[name] for (name,) in rows if name in self._ids]
        if len(found) < 5:
            # Only programs and processes that tests start reach it.
            folder = f"tests/{place.file.partition('/')[0]}/"
            found += [test for test in self.seconds if test.startswith(folder)]
        taken: list[str] = []
        total_s = 0.0
        for test in sorted(dict.fromkeys(found), key=lambda test: self.seconds[test]):
            total_s += self.seconds[test]
            if taken and total_s > most_s:
                break
            taken.append(test)
        return taken


def _run(tree: Path, tests: list[str], timeout_s: float, log: Path) -> str:
    """Fork a process that runs the tests: found, missed or hung."""
    process = os.fork()
    if process == 0:
        os.setsid()
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:] = [str(tree / "src"), *sys.path]
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "120"]
        code = 3
        try:
            code = int(pytest.main([*options, *tests]))
        finally:
            os._exit(code)
    until = time.monotonic() + timeout_s
    ended = status = 0
    while not ended and time.monotonic() < until and _memory_bytes(process) < _MOST_BYTES:
        time.sleep(0.1)
        ended, status = os.waitpid(process, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if not ended:
        os.waitpid(process, 0)
        return "hung"
    code = os.waitstatus_to_exitcode(status)
    if code in (0, 5):  # All passed, or none was collected.
        return "missed"
    # 4: a file of tests could not be imported. A test that is missing has no such line.
    if code < 0 or (code in (1, 2, 4) and _first_failure(log)):
        return "found"
    raise RuntimeError(f"pytest ended with {code}: {log.read_text(errors='replace')[-2000:]}")


def _memory_bytes(process: int) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).memory_info().rss
    return 0


def _first_failure(log: Path) -> str:
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].partition(" ")[2]
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="faults of each area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--area", action="append", choices=list(AREAS))
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="the checkout to test")
    parser.add_argument("--data", type=Path, default=Path(".coverage"))
    parser.add_argument("--junit", type=Path, default=Path(".covered.xml"))
    parser.add_argument("--same-in", type=Path, help="only functions that this checkout has, too")
    parser.add_argument("--faults", type=Path, help="the faults of this result, and no others")
    parser.add_argument("--only", default="", help="of them: missed, found, hung")
    parser.add_argument("--most-s", type=float, default=40.0, help="of tests for a fault")
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    options = parser.parse_args(arguments)
    package = options.tree / "src" / "ostraka"
    first: dict[Fault, list[str]] = {}
    if options.faults:
        for row in json.loads(options.faults.read_text()):
            by = row.pop("by", "")
            if row.pop("result") == options.only or not options.only:
                row.pop("tests")
                first[Fault(**row)] = [by.partition("[")[0]] if by else []
        faults = list(first)
    else:
        other = options.same_in / "src" / "ostraka" if options.same_in else None
        faults = choose(package, options.count, options.seed, other)
    faults = [fault for fault in faults if not options.area or fault.area in options.area]
    reach = Reach(options.data, options.junit)
    for variable, value in (
        ("JAX_PLATFORMS", "cpu"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8"),
        ("JAX_DISABLE_MOST_OPTIMIZATIONS", "1"),
    ):
        os.environ[variable] = value
    for module in _MODULES:
        __import__(module)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        tree = Path(scratch) / "tree"
        ignore = shutil.ignore_patterns(".venv*", ".git", "__pycache__", "site", "scratch")
        shutil.copytree(options.tree, tree, ignore=ignore)
        for fault in faults:
            place = plant(package, fault)
            if place is None:
                print(f"{fault.function} is another one here", flush=True)
                continue
            tests = reach.tests(place, options.most_s)
            known = [test for test in first.get(fault, []) if test in reach.seconds]
            tests = list(dict.fromkeys([*known, *tests]))
            file = tree / "src" / "ostraka" / place.file
            source = file.read_text()
            file.write_text(place.source)
            log = Path(scratch) / "log"
            started_s = time.monotonic()
            result = _run(tree, tests, 60 + 3 * options.most_s, log) if tests else "missed"
            file.write_text(source)
            by = _first_failure(log) if result == "found" else ""
            rows.append({**asdict(fault), "result": result, "by": by, "tests": len(tests)})
            options.out.write_text(json.dumps(rows, indent=0))
            print(
                f"{result:6} {time.monotonic() - started_s:5.1f}s {len(tests):3} tests  "
                f"{fault.area}: {place.file}:{place.line} {fault.change}  {by}",
                flush=True,
            )
    for area in dict.fromkeys(fault.area for fault in faults):
        counts = Counter(str(row["result"]) for row in rows if row["area"] == area)
        print(f"{area:14}", *(f"{number:4} {result}" for result, number in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
