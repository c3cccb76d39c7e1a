"""kill -9 at a random moment of a save.

What was there before, or what was just committed, is there and whole, and the next save leaves no
trace of the dead one.
"""

import os
import pickle
import random
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from figures import Figures
from numbered import CLEAN, names_in, number_in, on_all
from ostraka.errors import CheckpointNotFound, SaveFailed
from ostraka.storage import _claim
from ostraka.testing import FaultyStore, run_processes
from places import BucketPath, Place, at, remove_tree

NOTHING = -1
"""Instead of a number: there is no checkpoint."""


def make_tree(number: int, nbytes: int) -> dict[str, Any]:
    """Every element of every leaf is `number`: large leaves, small ones, some on devices."""

    def full(count: int) -> np.ndarray:
        return np.full(count // 4, number, np.int32)

    return {
        "number": number,
        "large": [full(nbytes // 16) for _ in range(12)],
        "small": {str(n): full(n * 64) for n in range(50)},
        "sharded": on_all(full(nbytes // 8), "x"),
        "replicated": on_all(full(nbytes // 8)),
    }


def find_number(path: str) -> int | str:
    """The number of the checkpoint at a path, which must be whole; NOTHING if there is none."""
    try:
        tree = ostraka.restore(path)
    except CheckpointNotFound:
        assert not at(f"{path}/_METADATA").exists()
        return NOTHING
    assert ostraka.verify(path).ok
    return number_in(tree)


# One process: a parent that never starts JAX's backend forks a child for each step


def forked(work: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Run a function in a forked process: its id, and a pipe with what it says."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        work(*args, writing)
        code = 0
    except BaseException:
        os.write(writing, pickle.dumps(traceback.format_exc()))
    finally:
        os._exit(code)


def outcome_of(work: Callable[..., Any], *args: Any) -> Any:
    pid, pipe = forked(work, *args)
    with os.fdopen(pipe, "rb") as said:
        value = pickle.loads(said.read())
    _, status = os.waitpid(pid, 0)
    assert status == 0, value
    return value


def save_and_die(
    path: str, number: int, nbytes: int, parity: int, moment: int, delay_s: float, pipe: int
) -> None:
    """Be killed some time after call number `moment` of the store, or of those about parity."""
    calls = count(1)
    is_counting = not parity

    def die(verb: str, name: str) -> None:
        nonlocal is_counting
        is_counting = is_counting or "parity" in name
        if is_counting and next(calls) == moment:
            if not delay_s:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGKILL]).start()

    ostraka.save(FaultyStore(path, before=die), make_tree(number, nbytes), parity=parity)
    os.write(pipe, pickle.dumps("saved"))


def save_first(path: str, nbytes: int, pipe: int) -> None:
    store = FaultyStore(path)
    ostraka.save(store, make_tree(0, nbytes))
    os.write(pipe, pickle.dumps(len(store.calls)))


def look_and_save(path: str, number: int, nbytes: int, is_removed: bool, pipe: int) -> None:
    """Look what a dead save has left, save over it, and remove that, too, if wanted."""
    found = find_number(path)
    ostraka.save(path, make_tree(number, nbytes))
    outcome = found, find_number(path), names_in(path)
    if is_removed:
        remove_tree(at(path))
    os.write(pipe, pickle.dumps(outcome))


def run_trials(root: str, trials: int | list[int], nbytes: int, parity: int = 0) -> dict[str, int]:
    """Kill saves at these moments, or at so many random ones."""
    # Imported before the forks, not in each of them.
    assert ostraka.save
    assert ostraka.restore
    assert ostraka.verify
    # There is one writer at a time: who left a marker in a bucket is dead.
    _claim.DEAD_AFTER_S, _claim._PAUSES_S = -1.0, ()
    rng = random.Random(nbytes)
    path = f"{root}/checkpoint"
    tally = {"returned": 0, "committed": 0, "kept": 0, "nothing": 0}
    calls = outcome_of(save_first, path, nbytes)
    before = 0
    if isinstance(trials, int):
        moments = [5, *(rng.randint(1, calls) for _ in range(trials - 1))]
        delays = [0.0, *(rng.choice((0.0, rng.uniform(0, 0.05))) for _ in moments)]
    else:
        moments, delays = trials, [0.0] * len(trials)
    for number, (moment, delay_s) in enumerate(zip(moments, delays, strict=False)):
        new = 2 * number + 1
        pid, pipe = forked(save_and_die, path, new, nbytes, parity, moment, delay_s)
        with os.fdopen(pipe, "rb") as said:
            rest = said.read()
        _, status = os.waitpid(pid, 0)
        returned = bool(rest) and pickle.loads(rest) == "saved"
        assert os.WIFSIGNALED(status) or returned, rest
        is_removed = rng.random() < 0.15 and not parity
        found, last, names = outcome_of(look_and_save, path, new + 1, nbytes, is_removed)
        where = f"killed {delay_s} s after call {moment}: {before} before, {found} found"
        assert found == new if returned else found in (before, new), where
        assert (last, names) == (new + 1, CLEAN), where
        kind = "committed" if found == new else "nothing" if found == NOTHING else "kept"
        tally["returned" if returned else kind] += 1
        before = NOTHING if is_removed else last
    return tally


def kill_saves(place: Place, *args: Any) -> dict[str, int]:
    (result,) = run_processes(
        run_trials, str(place), *args, processes=1, devices_per_process=4, timeout_s=3600
    )
    return result.value


@pytest.mark.parametrize(
    ("trials", "nbytes"),
    [
        (10, 1 << 20),
        (10, 16 << 20),
        pytest.param(250, 4 << 20, marks=pytest.mark.soak),
        pytest.param(250, 96 << 20, marks=pytest.mark.soak),
    ],
)
def test_kill_a_single_process(place: Place, trials: int, nbytes: int, figures: Figures):
    if isinstance(place, BucketPath):
        trials, nbytes = trials // 2, nbytes // 4
    tally = kill_saves(place, trials, nbytes)
    assert sum(tally.values()) == trials
    assert tally["kept"] > 0, tally
    figures.add("saves killed with -9", trials)


# Four processes

DEAD_AFTER_S = 10.0
"""Long enough for a survivor that does not get its turn for a while."""


def save_among_four(path: str, marks: str, number: int, nbytes: int) -> str:
    import jax

    from ostraka.processes import operation

    operation.DEAD_AFTER_S = DEAD_AFTER_S
    tree = make_tree(number, nbytes)
    real = operation.Operation.__enter__

    def enter_and_mark(self: Any) -> Any:
        """A process that dies before it has entered the save is JAX's to miss."""
        entered = real(self)
        Path(f"{marks}/go{jax.process_index()}").touch()
        return entered

    operation.Operation.__enter__ = enter_and_mark
    said = "saved"
    try:
        ostraka.save(path, tree)
    except SaveFailed as error:
        said = str(error)
    if "the coordination service can't be reached" in said:
        time.sleep(1000)  # process 0 is gone, so JAX is about to end this one too
    while not os.path.exists(f"{marks}/killed"):  # so that nobody dies later than that
        time.sleep(0.01)
    return said


def kill_some(
    victims: list[int], marks: list[str], killed: str, delay_s: float
) -> Callable[[list[subprocess.Popen[bytes]]], None]:
    """Kill some of the processes at once, some time after all files are there."""

    def watch(popens: list[subprocess.Popen[bytes]]) -> None:
        while not all(map(os.path.exists, marks)):
            if any(popen.returncode is not None for popen in popens):
                return
            time.sleep(0.001)
        time.sleep(delay_s)
        for victim in victims:
            popens[victim].kill()
        for victim in victims:
            popens[victim].wait()
        Path(killed).touch()

    return lambda popens: threading.Thread(target=watch, args=(popens,), daemon=True).start()


def kill_among_four(
    path: str, folder: Path, victims: list[int], nbytes: int, delay_s: float
) -> None:
    """Checkpoint 1 is to replace checkpoint 0: one of them must be there afterwards."""
    ostraka.save(path, make_tree(0, nbytes))
    marks = [str(folder / f"go{process}") for process in range(4)]
    results = run_processes(
        save_among_four,
        path,
        str(folder),
        1,
        nbytes,
        processes=4,
        devices_per_process=2,
        check=False,
        on_start=kill_some(victims, marks, str(folder / "killed"), delay_s),
    )
    for mark in [*marks, folder / "killed"]:
        os.unlink(mark)
    assert all(results[victim].value is None for victim in victims)
    said = {r.process: r.value for r in results if r.value is not None}
    ends = [(r.process, r.exit_code, r.error, r.stderr[-1000:]) for r in results]
    where = f"{victims} killed after {delay_s:.3f} s: {said}, {ends}"
    if 0 not in victims:
        assert len(said) == 4 - len(victims), where
        assert len(set(said.values())) == 1, where
    found = find_number(path)
    assert found in (0, 1), where
    for text in said.values():
        if text == "saved":
            assert found == 1, where
            continue
        assert "\n" not in text, where
        assert any(f"on process {victim}: it" in text for victim in victims), where
        if 0 not in victims:  # else it may have committed, and nobody was told
            assert found == 0, where
    ostraka.save(path, make_tree(2, nbytes))
    assert find_number(path) == 2
    assert names_in(path) == CLEAN


@pytest.mark.parametrize("victims", [[0], [2, 3], [0, 1, 2, 3]], ids=str)
def test_kill_some_of_four_processes(
    place: Place, tmp_path: Path, victims: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 3.0)  # which they are
    nbytes = 48 << 20 if isinstance(place, Path) else 12 << 20
    rng = random.Random(len(victims) + victims[0])
    kill_among_four(str(place / "checkpoint"), tmp_path, victims, nbytes, rng.uniform(0, 0.5))


@pytest.mark.soak
def test_kill_some_of_four_processes_again_and_again(tmp_path: Path, figures: Figures):
    path = str(tmp_path / "checkpoint")
    nbytes = 48 << 20
    rng = random.Random(19)
    for _ in range(100):
        victims = rng.sample(range(4), rng.randint(1, 4))
        kill_among_four(path, tmp_path, victims, nbytes, rng.uniform(0, 0.8))
        figures.add("saves of four processes")
        figures.add("processes killed with -9", len(victims))
