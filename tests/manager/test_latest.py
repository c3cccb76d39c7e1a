"""`ostraka.latest`: the newest step, by the rules of a read-only manager."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ostraka
from ostraka import Manager
from ostraka.errors import CheckpointNotFound, Damaged
from places import Place


def fill(root: Any, *steps: int) -> None:
    with Manager(root, asynchronous=False) as manager:
        for step in steps:
            manager.save(step, {"w": jnp.full(2, step)})


def latest_of_manager(root: Any) -> int | None:
    with Manager(root, read_only=True) as manager:
        return manager.latest()


def test_the_newest_step(place: Place):
    assert ostraka.latest(place / "run") is None
    fill(place / "run", 3, 12, 100)
    assert ostraka.latest(place / "run") == 100 == latest_of_manager(place / "run")
    if isinstance(place, Path):
        assert ostraka.latest(str(place / "run")) == 100


def test_no_directory_and_no_step(tmp_path: Path):
    for path in (tmp_path, tmp_path / "absent"):
        assert ostraka.latest(path) is None
        assert latest_of_manager(path) is None
    assert not (tmp_path / "absent").exists()


def test_it_looks_while_a_run_writes(tmp_path: Path):
    with Manager(tmp_path, asynchronous=False) as manager:
        manager.save(1, {"w": jnp.ones(2)})
        assert ostraka.latest(tmp_path) == 1
        manager.save(2, {"w": jnp.ones(2)})
        assert ostraka.latest(tmp_path) == 2


def test_steps_that_cannot_be_read(tmp_path: Path):
    fill(tmp_path, 1, 2)
    (tmp_path / "step_00000002" / "_METADATA").write_bytes(b"{")
    assert ostraka.latest(tmp_path) == 1 == latest_of_manager(tmp_path)
    (tmp_path / "step_00000001" / "_METADATA").write_bytes(b"{")
    for look in (ostraka.latest, latest_of_manager):
        with pytest.raises(Damaged, match="no step in .* can be read: repair one"):
            look(tmp_path)


def test_a_checkpoint_and_a_file_hold_no_steps(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"w": jnp.ones(2)})
    (tmp_path / "file").touch()
    for look in (ostraka.latest, latest_of_manager):
        with pytest.raises(CheckpointNotFound, match="is itself a checkpoint"):
            look(tmp_path / "c")
        with pytest.raises(CheckpointNotFound, match="is a file"):
            look(tmp_path / "file")


def test_it_needs_no_jax_and_writes_nothing(tmp_path: Path):
    fill(tmp_path, 7)
    before = sorted(tmp_path.rglob("*"))
    program = f"import sys, ostraka\nprint(ostraka.latest({str(tmp_path)!r}), 'jax' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["7", "False"]
    assert sorted(tmp_path.rglob("*")) == before
