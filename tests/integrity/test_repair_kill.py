"""kill -9 during a repair: never worse than before, and the next repair does the rest.

The rounds run in a program of their own, which forks and never imports JAX.
"""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
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


def killed_in(repair: Callable[[], object], delay_s: float | None = None) -> bool:
    """Repair in a child, which is killed after so long; False if it has come through."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            repair()
            code = 0
        finally:
            os._exit(code)
    if delay_s is not None:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def dying_at(path: Path, count: int) -> FaultyStore:
    """A store that kills its process before its `count`-th verb."""
    calls = itertools.count(1)

    def die(verb: str, name: str) -> None:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return FaultyStore(path, before=die)


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
            store = dying_at(path, number + 1)
            was_killed = killed_in(lambda store=store: ostraka.repair(store, sources=made))
        else:
            delay_s = random.uniform(0.0, took_s)
            was_killed = killed_in(lambda: ostraka.repair(path, sources=made), delay_s)
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
