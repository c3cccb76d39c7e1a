"""The test of others' code runs here with what the development environment has of it."""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from world.__main__ import main  # noqa: E402
from world.case import Case, Program, shapes_of  # noqa: E402
from world.facts import adopt, as_in, compare, facts_of, once  # noqa: E402
from world.runner import Row  # noqa: E402
from world.table import BEGIN, END, failure_lines, markdown_table, put_between_marks  # noqa: E402

FEW = {
    "flax_nnx": ["flax: nnx.ModelAndOptimizer*"],
    "flax_linen": ["flax: Linen TrainState"],
    "data_iterators": ["grain: Dataset*"] if find_spec("grain") else [],
}

FEW_AND_BROKEN = f"""
from fnmatch import fnmatch

import jax.numpy as jnp
from world.case import Program, Registry, load_group

CASES = Registry()
for group, patterns in {FEW!r}.items():
    for pattern in patterns:
        CASES += [case for case in load_group(group) if fnmatch(case.key, pattern)]


@CASES.case("numpy", "forgets a part of its state", "a fault of the program itself")
def forgetful():
    memory = []

    def step(state, i):
        memory.append(i)
        return {{"x": state["x"] + 1}}, state["x"][0] + len(memory)

    return Program(lambda: {{"x": jnp.zeros(4)}}, step)
"""


def test_the_full_cycle_of_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All in the same processes. What a program keeps to itself, and nothing else, is found."""
    monkeypatch.setenv("WORLD_CASES", str(tmp_path))
    (tmp_path / "few.py").write_text(FEW_AND_BROKEN, "utf-8")
    command = [sys.executable, "-m", "world", "--scratch", str(tmp_path / "scratch")]
    done = subprocess.run(
        [*command, "--jobs", "2", "--skip-missing", "--only", "few"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        check=False,
        capture_output=True,
        text=True,
        timeout=850,
    )
    rows = [re.split("  +", line) for line in done.stdout.splitlines()]
    marks = {f"{row[0]}: {row[2]}": row[3:] for row in rows if len(row) == 8}
    for pattern in [pattern for patterns in FEW.values() for pattern in patterns]:
        (key,) = [key for key in marks if fnmatch(key, pattern)]
        assert set(marks[key]) <= {"same", "as dicts", "–"}, done.stdout
    assert marks["numpy: forgets a part of its state"] == ["FAILED"] * 5
    assert "like, abstract, into, none, mesh: losses: [7.0, 9.0, 11.0], now [4.0, 6.0, 8.0]" in (
        done.stdout
    )
    assert f"{len(marks) - 1} cases of" in done.stdout  # a line is the titles
    assert ", 1 failed" in done.stdout
    assert done.returncode == 1


def test_a_missing_package_is_said_and_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("world.cases.__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "argv", ["world", "--scratch", str(tmp_path), "--only", "absent"])
    (tmp_path / "absent.py").write_text("import a_package_that_nobody_has\n", "utf-8")
    assert main() == 2
    printed = capsys.readouterr()
    assert "SKIPPED  absent: ModuleNotFoundError: No module named 'a_package" in printed.out
    assert printed.err == "no case matches, or none can be imported\n"


def some_state() -> dict[str, Any]:
    shared = jnp.arange(3.0)
    return {
        "a": shared,
        "b": [shared, np.arange(2)],
        "n": 3,
        "weak": jnp.asarray(1.0) * 2,
        "key": jax.random.key(0),
        "module": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
    }


def test_facts_of_the_same_state_agree():
    assert compare(facts_of(some_state()), facts_of(some_state()), "x") == []
    assert json.loads(json.dumps(facts_of(some_state()))) == facts_of(some_state())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("a", jnp.arange(3.0), "one object"),
        ("n", 4, "value of 1 leaves: n: 3, now 4"),
        ("n", np.int64(3), "type of 1 leaves: n: int, now numpy"),
        ("weak", jnp.asarray(1, jnp.float32) * 2, "weak of 1 leaves"),
        ("weak", jnp.float32(2.5), "value of 1 leaves"),
        ("key", jax.random.key(1), "value of 1 leaves: key"),
        ("b", [], "2 leaves are gone: ['b/0', 'b/1']"),
        ("more", 1, "1 leaves are new: ['more']"),
    ],
)
def test_facts_tell_what_differs(name: str, value: Any, said: str):
    changed = {**some_state(), name: value}
    problems = compare(facts_of(some_state()), facts_of(changed), "here")
    assert any(problem.startswith("here: ") and said in problem for problem in problems)


def test_commitment_is_seen_and_is_the_templates():
    state = {"x": jnp.ones(2)}
    committed = {"x": jax.device_put(jnp.ones(2), jax.devices()[0])}
    problems = compare(facts_of(state), facts_of(committed), "x")
    assert problems == ["x: committed of 1 leaves: x: False, now True"]
    assert as_in(facts_of(committed), facts_of(state)) == facts_of(committed)


def test_a_number_as_the_template_has_it():
    trained, template = {"step": jnp.asarray(3)}, {"step": 0}
    assert as_in(facts_of(template), facts_of(trained)) == facts_of({"step": 3})


def test_a_tied_variable_may_come_back_at_one_of_its_places():
    tied = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    saved = facts_of({"first": tied, "second": tied})
    found = facts_of({"first": nnx.to_pure_dict(nnx.state(tied))})
    assert compare(once(saved, found), found, "x", ignore=("shared",)) == []
    lost = facts_of({"first": {"kernel": tied.kernel[...]}})
    problems = compare(once(saved, lost), lost, "x", ignore=("shared",))
    assert problems == ["x: 2 leaves are gone: ['first/bias', 'second/bias']"]


def test_leaves_are_adopted_by_path():
    fresh = {"a": (jnp.zeros(2), jnp.ones(2)), "b": jnp.zeros(1)}
    restored = {"b": jnp.full(1, 5.0), "a": {"1": jnp.full(2, 7.0), "0": jnp.full(2, 6.0)}}
    found = adopt(fresh, restored)
    assert [float(x[0]) for x in jax.tree.leaves(found)] == [6.0, 7.0, 5.0]


def test_shapes_keep_weak_types_and_numpy():
    weak, table = shapes_of((jnp.asarray(1.0) * 2, np.arange(2)))
    assert weak.weak_type
    assert isinstance(table, np.ndarray)


def case_of(package: str, name: str, **options: Any) -> Case:
    return Case(package, name, "moments", lambda: Program(dict, lambda s, i: (s, i)), **options)


def test_the_table_has_a_row_per_package_with_reasons_and_failures():
    rows = [
        Row(case_of("optax", "adam", left_out={"into": "why"}), "1.0", {"save": "it broke"}),
        Row(case_of("optax", "sgd"), "1.0", {}),
        Row(case_of("optax", "lion"), "1.0", {}),
        Row(case_of("flax", "TrainState", as_dicts=True), "2.0", {}),
    ]
    table = markdown_table(rows)
    flax, optax = [line for line in table.splitlines() if line.startswith(("| flax", "| optax"))]
    assert flax == "| flax | 2.0 | 1 | TrainState | same | same | same | as dicts | same |"
    few = "2 same, 1 FAILED"
    assert (
        optax == f"| optax | 1.0 | 3 | adam; sgd; … | {few} | {few} | 2 same, 1 – | {few} | same |"
    )
    assert "- optax: adam, into: why" in table
    assert failure_lines(rows[:1]) == ["optax: adam", "  save: it broke"]
    written = put_between_marks(f"head\n{BEGIN}\nold\n{END}\ntail\n", "new")
    assert written == f"head\n{BEGIN}\n\nnew\n\n{END}\ntail\n"
