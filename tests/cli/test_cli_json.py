"""The JSON of every command: its version, and the keys that scripts rely on."""

import json
from pathlib import Path

import numpy as np
import pytest

import ostraka
from cli_runs import run
from ostraka.cli import main

ONE_VERIFIED = """
    path ok leaves files bytes_read duration_s problems notes unchecked proven has_digests is_empty
    damaged_leaves
"""
KEYS = {
    "show {runs}/1": "path id writer metadata meshes leaves files totals",
    "show {runs}/1 w --stats --slice 0": """
        checkpoint path kind dtype shape spec mesh prng per_process memory bytes boxes statistics
        slice
    """,
    "show {runs}/1 --nan": "path finite nan infinite leaves_read leaves",
    "ls {runs}": "root steps",
    "diff {runs}/1 {runs}/1": "a b same containers leaves",
    "verify {runs}/1": ONE_VERIFIED,
    "verify {runs}": "ok checkpoints",
    "du {runs}": "bytes checkpoints",
    "which {runs}": "root step path",
    "audit {runs}": "directory runs",
    "watch {runs} --timeout 0 --after 1": "step path saved_at bytes metrics",
    "doctor {runs}": "ok path checks",
    "report {runs}": "documents",
    "top {runs}": "kind path at steps bytes metrics rules writer advice mirror space notes",
    "copy {runs}/1 {new}": """
        source target copied skipped bytes_copied bytes_skipped duration_s
    """,
    "convert {runs}/1 {new}.npz --to npz": """
        source target to arrays nbytes bytes_kept duration_s left_out notes
    """,
    "merge {runs}/1 {runs}/2 {new}": """
        target sources weights averaged adapted taken nbytes duration_s
    """,
    "repair {runs}/1 --dry-run": """
        path ok dry_run repaired problems notes bytes_read bytes_written duration_s
    """,
    "repair {runs} --dry-run": "ok checkpoints",
    "pin {runs}/1": "steps",
    "unpin {runs}/1": "steps",
    "rm {runs} 1 --dry-run": "root removed steps",
    "gc {runs} --dry-run": "root removed leftovers in_use leases refused",
    "plan {runs}/1": "source variants comparison",
    "plan --names": "names",
}
"""By command line, the keys that its JSON has."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("json") / "runs"
    for step in (1, 2):
        ostraka.save(path / str(step), {"w": np.full(4, float(step))})
    with ostraka.Manager(path, every=10, audit_every=1) as manager:
        manager.save(3, {"w": np.zeros(4)})
    return path


@pytest.mark.parametrize("line", KEYS)
def test_the_keys_of_each_command(
    runs: Path, tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ostraka.cli._doctor._DEVICES", "print('[1, {}]')")  # needs no JAX
    given = [word.format(runs=runs, new=tmp_path / "new") for word in line.split()]
    result = run(*given, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert next(iter(document.items())) == ("schema", 1)
    assert document.keys() - {"schema"} == set(KEYS[line].split())


def test_every_command_with_json_is_here():
    context = main.make_context("ostraka", [])
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    with_json = {
        name
        for name, command in commands.items()
        if command and any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json == commands.keys() - {"completion", "board"}
    assert with_json == {line.split()[0] for line in KEYS}


def test_the_file_of_a_plan_has_the_schema_too(runs: Path, tmp_path: Path):
    result = run("plan", runs / "1", "-o", tmp_path / "plan.json")
    assert "what is written" in result.stdout
    document = json.loads((tmp_path / "plan.json").read_text())
    assert (document["schema"], document["source"]) == (1, str(runs / "1"))
