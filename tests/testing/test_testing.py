"""Real processes: each run below starts one interpreter a process."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostraka import testing
from ostraka.testing import (
    ProcessesFailed,
    _processes,
    free_port,
    kill_when,
    preloaded,
    run_processes,
)
from workers import (
    Odd,
    hang,
    hang_and_mark,
    hang_unless_named,
    run_alone,
    wait_for,
    wait_until_gone,
)


@pytest.fixture(scope="module", autouse=True)
def _fresh() -> Iterator[None]:
    """Processes that start from nothing; `test_testing_preload.py` has those that don't."""
    with preloaded():
        yield


@dataclass
class Point:
    x: int


# --- what the processes run --------------------------------------------------------------


def look_around(point: Point, array: np.ndarray):
    """Also a sum over all processes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    print("out of", jax.process_index())
    print("err of", jax.process_index(), file=sys.stderr)
    counts = (jax.process_index(), jax.process_count(), jax.local_device_count())
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("d",)), PartitionSpec("d"))
    spread = jax.make_array_from_callback((6,), sharding, lambda index: np.arange(6.0)[index])
    total = float(jax.jit(lambda a: a.sum())(spread).addressable_data(0))
    return counts, Point(point.x + jax.process_index()), array * 2, total


# --- with JAX ----------------------------------------------------------------------------


def test_values_output_and_counts_come_back():
    results = run_processes(look_around, Point(5), np.arange(3), devices_per_process=3)
    for index, result in enumerate(results):
        counts, point, array, total = result.value
        assert counts == (index, 2, 3)
        assert point == Point(5 + index)
        assert array.tolist() == [0, 2, 4]
        assert total == 15.0
        assert (result.process, result.exit_code) == (index, 0)
        assert (result.error, result.traceback) == (None, None)
        lines = result.stdout.splitlines()
        assert [line for line in lines if "[Gloo]" not in line] == [f"out of {index}"]
        assert f"err of {index}" in result.stderr
        assert 0 < result.duration_s < 240


# --- how things fail, without JAX --------------------------------------------------------


def test_a_single_process_does_not_import_jax():
    assert run_processes(run_alone, "jax", processes=1)[0].value is False


def test_check_raises_with_the_error_and_the_tail_of_the_output():
    with pytest.raises(ProcessesFailed, match="process 0 failed: Odd: bad luck") as caught:
        run_processes(run_alone, "many lines", "bad luck", processes=1)
    message = str(caught.value)
    assert "line 999" in message
    assert "line 900" not in message
    assert "the last 40 lines of 1000" in message
    assert "in run_alone" in message
    assert len(caught.value.results[0].stdout.splitlines()) == 1000


@pytest.mark.parametrize(
    ("args", "exit_code", "match"),
    [
        (("exit",), 3, "process 0 failed: SystemExit: 3"),
        (("leave", 4), 4, "process 0 ended with exit code 4 before the function returned"),
        (("leave", 0), 0, "ended with exit code 0 before the function returned"),
        (("lambda",), 1, "TypeError: The function returned a function that can't be pickled"),
    ],
)
def test_other_ways_to_fail(args: tuple, exit_code: int, match: str):
    with pytest.raises(ProcessesFailed, match=match) as caught:
        run_processes(run_alone, *args, processes=1)
    assert [r.exit_code for r in caught.value.results] == [exit_code]


def test_a_timeout_shows_the_stacks_and_ends_every_process(tmp_path: Path):
    def wait_until_they_hang(popens: list[subprocess.Popen[bytes]]):
        for popen in popens:
            wait_for(tmp_path / str(popen.pid))

    with pytest.raises(ProcessesFailed, match="processes 0, 1 did not end within 1 s") as caught:
        run_processes(
            hang_and_mark,
            str(tmp_path),
            distributed=False,
            timeout_s=1,
            check=False,
            on_start=wait_until_they_hang,  # the time counts from here
        )
    message = str(caught.value)
    assert message.count("in hang\n") == 2
    assert message.count("about to hang") == 2
    assert [r.exit_code for r in caught.value.results] == [-9, -9]
    pids = [int(mark.name) for mark in tmp_path.iterdir()]
    assert len(pids) == 2
    assert all(map(wait_until_gone, pids))


def test_after_a_failure_the_others_have_some_grace(tmp_path: Path):
    with pytest.raises(
        ProcessesFailed, match=r"still ran 0\.5 s after the first failure"
    ) as caught:
        run_processes(hang_unless_named, str(tmp_path / "first"), distributed=False, grace_s=0.5)
    assert "failed: Odd: the other hangs" in str(caught.value).splitlines()[0]
    assert "in hang\n" in str(caught.value)


def test_a_signal_counts_as_the_cause():
    with pytest.raises(ProcessesFailed, match="process 0 was ended by SIGTERM before") as caught:
        run_processes(
            hang, processes=1, on_start=kill_when(0, after_s=0.3, signal_number=signal.SIGTERM)
        )
    assert caught.value.results[0].exit_code == -15


def test_what_a_process_started_ends_with_it():
    pid = run_processes(run_alone, "grandchild", processes=1)[0].value
    assert wait_until_gone(pid)


def test_processes_end_when_the_caller_is_killed(tmp_path: Path):
    mark = tmp_path / "pid"
    code = "import sys; from ostraka.testing import run_processes as r\n"
    code += "r('workers:hang', sys.argv[1], processes=1)"
    # What a killed caller leaves behind is left where it is cleaned up.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code, str(mark)], env=env) as caller:
        while not mark.exists():
            assert caller.poll() is None
            time.sleep(0.02)
        caller.kill()
    assert wait_until_gone(int(mark.read_text()))


def test_an_exception_in_on_start_ends_the_processes():
    started: list[subprocess.Popen[bytes]] = []

    def refuse(popens: list[subprocess.Popen[bytes]]):
        started.extend(popens)
        raise Odd("not today")

    with pytest.raises(Odd, match="not today"):
        run_processes(hang, distributed=False, on_start=refuse)
    assert [popen.returncode for popen in started] == [-9, -9]


# --- which functions ---------------------------------------------------------------------


def test_a_function_by_name():
    assert run_processes("os.path:join", "a", "b", processes=1)[0].value == "a/b"


LONELY = """
from ostraka.testing import run_processes

class Box:
    pass

def make(box):
    from . import helper

    box.size = helper.size
    return box

def test_make():
    assert __name__ == "some.checks.test_lonely"
    box = run_processes(make, Box(), processes=1)[0].value
    assert isinstance(box, Box)
    assert box.size == 7
"""


def run_python(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_function_of_a_test_file_that_no_import_finds(tmp_path: Path):
    folder = tmp_path / "some" / "checks"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text("size = 7\n")
    (folder / "test_lonely.py").write_text(LONELY)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    python_path = str(Path(testing.__file__).parents[2])
    command = ["-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider"]
    done = run_python(tmp_path, *command, PYTHONPATH=python_path, PYTHONSAFEPATH="1")
    assert "1 passed" in done.stdout, done.stdout


SCRIPT = """
from dataclasses import dataclass
from functools import partial
from ostraka.testing import run_processes
from {}other import factor

@dataclass
class Point:
    x: int

def double(point):
    return Point(point.x * factor)

if __name__ == "__main__":
    print(run_processes(double, Point(4), processes=1)[0].value)
"""


@pytest.mark.parametrize(
    ("package", "command"), [(".", ["-m", "package.script"]), ("", ["package/script.py"])]
)
def test_a_function_of_the_script_being_run(tmp_path: Path, package: str, command: list[str]):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "other.py").write_text("factor = 2\n")
    (tmp_path / "package" / "script.py").write_text(SCRIPT.format(package))
    done = run_python(tmp_path, *command)
    assert (done.stdout, done.stderr) == ("Point(x=8)\n", "")


def test_a_script_without_guard_does_not_start_processes_forever(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "from ostraka.testing import run_processes\ndef f(): pass\nrun_processes(f, processes=1)\n"
    )
    done = run_python(tmp_path, "script.py")
    assert done.returncode == 1
    assert 'Put the call under `if __name__ == "__main__":`' in done.stderr


def bad(function: Any, **options: Any) -> Any:
    return lambda: run_processes(function, **options)


NOT_FOUND = (TypeError, "can't be found again by another process")
NO_NAME = (ValueError, r'must read "package\.module:name"')


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *[(bad(f), NOT_FOUND) for f in (lambda: 0, partial(run_alone, "jax"), Point(1).__eq__)],
        *[(bad(name), NO_NAME) for name in ("os.path", "os.path:", ":join")],
        (bad(run_alone, processes=0), (ValueError, "^processes must be at least 1, not 0")),
        (
            bad(run_alone, devices_per_process=0),
            (ValueError, "devices_per_process must be at least 1, not 0"),
        ),
    ],
    ids=["lambda", "partial", "method", "no colon", "no name", "no module", "processes", "devices"],
)
def test_arguments_that_are_refused(call: Any, error: tuple[type[Exception], str]):
    with pytest.raises(error[0], match=error[1]):
        call()


# --- settings ----------------------------------------------------------------------------


def test_the_environment_of_a_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "5")
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("OSTRAKA_A", "inherited")
    names = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "OSTRAKA_A", "OSTRAKA_B")
    results = run_processes(
        run_alone,
        "environment",
        *names,
        processes=1,
        devices_per_process=3,
        env={"OSTRAKA_B": "given"},
    )
    flags = "--a=1 --xla_force_host_platform_device_count=3"
    assert results[0].value == ["cpu", None, flags, "inherited", "given"]


def test_a_proxy_is_not_asked_for_the_coordinator():
    assert "no_grpc_proxy" not in _processes._child_environment({}, 1)
    env = _processes._child_environment({"https_proxy": "http://proxy"}, 1)
    assert env["no_grpc_proxy"] == "127.0.0.1"


def test_a_reserved_port_is_given_to_nobody_else():
    with _processes._reserve_port() as reserved:
        port = reserved.getsockname()[1]
        for address in ("127.0.0.1", "0.0.0.0"):
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind((address, port))
        assert port not in {free_port() for _ in range(100)}


def test_kill_when_leaves_a_process_alone_that_has_ended(tmp_path: Path):
    before = threading.active_count()
    on_start = kill_when(0, appears=tmp_path / "never")
    assert run_processes(run_alone, "x", processes=1, on_start=on_start)[0].exit_code == 0
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
