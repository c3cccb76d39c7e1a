"""kill -9 during a repair: never worse than before, and the next repair does the rest.

The rounds run in a program of their own, which forks and never imports JAX.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ostraka
from figures import Figures
from ostraka.testing import FaultyStore


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and not file.name.startswith("_CLAIM-")
    }


def do_harm(path: Path) -> None:
    """Of everything something: files that are gone, half there or changed."""
    shards = sorted(path.glob("shards-*/shard_*"))
    shards[1].unlink()
    os.truncate(shards[2], 5000)
    with open(shards[3], "r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"changed!!")
    for file in path.glob("shards-*/*.json"):
        file.unlink()
    (path / "_METADATA").unlink()


def check_no_worse(path: Path, harmed: dict[str, bytes], right: dict[str, bytes]) -> None:
    """Each file is as it was or right; others are temporary."""
    now = contents(path)
    for name, data in now.items():
        if not name.endswith(".tmp"):
            assert data in (harmed.get(name), right[name]), name
    for name, data in harmed.items():
        assert now.get(name) in (data, right[name]), name


def kill_at(path: Path, other: Path, count: int) -> bool:
    """Repair in a child that is killed before its `count`-th verb; False if it has come through."""
    pid = os.fork()
    if pid == 0:
        calls = 0

        def die(verb: str, name: str) -> None:
            nonlocal calls
            calls += 1
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            ostraka.repair(FaultyStore(path, before=die), sources=other)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def kill_after(path: Path, other: Path, delay_s: float) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ostraka.repair(path, sources=other)
            code = 0
        finally:
            os._exit(code)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def run_rounds(made: str, directory: str, kind: str, rounds: str) -> None:
    right = contents(Path(made))
    path = Path(directory) / "c"
    random.seed(int(rounds))
    killed, took_s = 0, 0.2
    for number in range(int(rounds)):
        shutil.copytree(made, path)
        do_harm(path)
        harmed = contents(path)
        if kind == "verbs":
            was_killed = kill_at(path, Path(made), number + 1)
        else:
            was_killed = kill_after(path, Path(made), random.uniform(0.0, took_s))
        killed += was_killed
        check_no_worse(path, harmed, right)
        began_s = time.monotonic()
        ostraka.repair(path, sources=made)
        if not was_killed:  # It was too late: repairs take less on this machine.
            took_s = max(0.9 * took_s, time.monotonic() - began_s)
        assert contents(path) == right
        shutil.rmtree(path)
        if kind == "verbs" and not was_killed:
            break
    assert "jax" not in sys.modules
    print("killed", killed)


def run(made: Path, directory: Path, kind: str, rounds: int) -> int:
    program = "import sys, test_repair_kill as t; t.run_rounds(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(made), str(directory), kind, str(rounds)],
        check=False,
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    import numpy as np

    rng = np.random.default_rng(1)
    size = getattr(request, "param", 100_000)
    tree = {str(n): rng.standard_normal(size) for n in range(4)}
    ostraka.save(tmp_path / "made", tree)
    return tmp_path / "made"


def test_killed_before_each_verb(made: Path, tmp_path: Path):
    """Until it comes through: before every single thing that a repair does to a store."""
    assert 40 < run(made, tmp_path, "verbs", 1000) < 1000


@pytest.mark.soak
@pytest.mark.parametrize("made", [4_000_000], indirect=True)
def test_killed_at_any_moment(made: Path, tmp_path: Path, figures: Figures):
    killed = run(made, tmp_path, "moments", 80)
    assert killed >= 40
    figures.add("repairs killed with -9", killed)
