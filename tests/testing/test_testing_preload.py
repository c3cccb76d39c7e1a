"""Processes that are forked from one that has imported what they need."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ostraka.testing import ProcessesFailed, _processes, kill_when, preloaded, run_processes
from workers import fail_everywhere, outlive_the_other, wait_until_gone


@pytest.fixture(scope="module", autouse=True)
def _preloaded_here() -> Iterator[None]:
    with preloaded("jax", "json.tool"):
        yield


def describe() -> dict[str, Any]:
    loaded = sorted({"jax", "json.tool", "jax.experimental.pallas"} & set(sys.modules))
    print("said aloud")
    return {
        "loaded": loaded,
        "hash": hash("a"),
        "directory": os.getcwd(),
        "variable": os.environ.get("OSTRAKA_TEST_MARK"),
        "session": os.getsid(0) == os.getpid(),
        "open": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in (0, 1, 2)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "group": os.getpgid(0) == os.getpid(),
        "sigchld": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "parent": os.getppid(),
    }


def test_they_are_as_fresh_ones_but_for_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    mark = {"OSTRAKA_TEST_MARK": "here"}
    results = run_processes(describe, processes=4, env=mark, distributed=False)
    for result in results:
        assert (result.stdout, result.stderr) == ("said aloud\n", "")
        found = result.value
        assert found["loaded"] == ["jax", "json.tool"]
        assert (found["directory"], found["variable"]) == (str(tmp_path), "here")
        assert found["session"]
        assert found["group"]
        assert found["sigchld"]
        assert "/dev/null" in found["open"]
        assert found["parent"] != os.getpid()
    with preloaded():
        (fresh,) = run_processes(describe, processes=1, env=mark)
    assert fresh.value["loaded"] == []
    assert fresh.value["parent"] == os.getpid()
    assert {result.value["descriptors"] for result in results} == {fresh.value["descriptors"]}
    # Two kinds of processes, which differ in the order of their sets.
    assert len({result.value["parent"] for result in results}) == 2
    assert len({result.value["hash"] for result in results}) == 2


def sum_over_all() -> tuple[int, float]:
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    return jax.device_count(), float(multihost_utils.process_allgather(np.arange(3)).sum())


def test_they_are_jax_processes():
    results = run_processes(sum_over_all, processes=2, devices_per_process=3)
    assert [result.value for result in results] == [(6, 6.0)] * 2


def test_when_all_fail_each_reports_its_own_error():
    # Were process 0 gone at once, JAX would abort process 1.
    with pytest.raises(
        ProcessesFailed, match=r"^workers:fail_everywhere: process 0 failed: Odd"
    ) as caught:
        run_processes(fail_everywhere, grace_s=100)
    assert [r.error for r in caught.value.results] == ["Odd: no luck on 0", "Odd: no luck on 1"]
    assert [r.exit_code for r in caught.value.results] == [1, 1]


def test_a_killed_process_and_its_survivor_that_fails(tmp_path: Path):
    mark = tmp_path / "here"
    results = run_processes(
        outlive_the_other, str(mark), check=False, on_start=kill_when(1, appears=mark, after_s=0.1)
    )
    assert [(r.exit_code, r.value) for r in results] == [(1, None), (-9, None)]
    assert results[0].error == "Odd: no luck on 0"
    assert results[0].traceback is not None
    assert "in outlive_the_other" in results[0].traceback
    assert results[1].error is None
    assert "about to hang" in results[1].stdout


def read_config() -> tuple[bool, int]:
    import jax

    return jax.config.read("jax_enable_x64"), os.getppid()


def test_what_counts_at_an_import_is_not_too_late():
    (result,) = run_processes(read_config, processes=1, env={"JAX_ENABLE_X64": "1"})
    assert result.value == (True, os.getpid())


def fail_or_wait(mark: str) -> None:
    if not mark:
        raise ValueError("odd")
    Path(mark).touch()
    time.sleep(1000)


def test_failures_and_kills_are_told(tmp_path: Path):
    with pytest.raises(ProcessesFailed, match="process 0 failed: ValueError: odd"):
        run_processes(fail_or_wait, "", processes=1)
    mark = tmp_path / "here"
    (result,) = run_processes(
        fail_or_wait, str(mark), processes=1, check=False, on_start=kill_when(0, appears=mark)
    )
    assert result.exit_code == -signal.SIGKILL
    with pytest.raises(ProcessesFailed, match=r"(?s)had to be killed.*in fail_or_wait"):
        run_processes(fail_or_wait, str(mark), processes=1, timeout_s=1)


WAITING = """
import os, sys, time
from ostraka.testing import preloaded, run_processes

def wait():
    print(os.getpid(), os.getppid(), file=open(sys.argv[1] + "/../pids", "w"))
    os.rename(sys.argv[1] + "/../pids", os.environ["OSTRAKA_TEST_MARK"])
    time.sleep(1000)

if __name__ == "__main__":
    with preloaded("json"):
        run_processes(wait, processes=1)
"""


def test_they_end_with_the_caller(tmp_path: Path):
    (tmp_path / "script.py").write_text(WAITING)
    mark = tmp_path / "pids"
    path = os.pathsep.join(filter(None, sys.path))
    env = {"PYTHONPATH": path, "OSTRAKA_TEST_MARK": str(mark), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, env=os.environ | env) as caller:
        while not mark.exists():
            assert caller.poll() is None
            time.sleep(0.01)
        caller.kill()
    assert all(map(wait_until_gone, map(int, mark.read_text().split())))


def test_modules_that_are_not_there():
    with (
        preloaded("no_such_module"),
        pytest.raises(RuntimeError, match="the process that preloads modules ended with 1"),
    ):
        run_processes(read_config, processes=1)


def test_threads_that_begin_together_have_the_same_fork_servers(monkeypatch: pytest.MonkeyPatch):
    started: list[Any] = []

    class Slow(_processes.ForkServers):
        def __init__(self, *args: Any):
            started.append(self)
            time.sleep(0.5)
            super().__init__(*args)

    monkeypatch.setattr(_processes, "ForkServers", Slow)
    with preloaded("json.tool"), ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_processes, describe, processes=1) for _ in range(2)]
        assert [len(run.result()) for run in runs] == [1, 1]
    assert len(started) == 1


def test_the_thread_that_came_first_may_end():
    """The servers that it has started are still there for others."""
    with preloaded("json.decoder"):
        with ThreadPoolExecutor(1) as pool:
            (first,) = pool.submit(run_processes, "os:getppid", processes=1).result()
        found = run_processes("os:getppid", processes=2, distributed=False)
    assert first.value == found[0].value != found[1].value
