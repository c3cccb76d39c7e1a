"""`ostraka watch`, and what the other commands make of leases."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_runs import PROGRAM, as_json, assert_fails, run
from ostraka import Manager
from ostraka.errors import StoreError
from ostraka.manager.leases import is_lease
from ostraka.storage import LocalStore, _claim, open_store

LONG_S = 120.0


@pytest.fixture(params=["directory", "memory", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "bucket":
        return f"{request.getfixturevalue('bucket')}/runs"
    return {
        "directory": str(tmp_path / "runs"),
        "memory": f"memory://{uuid.uuid4().hex}/runs",
    }[request.param]


def fill(root: Any, *steps: int, **options: Any) -> None:
    with Manager(root, asynchronous=False, **options) as manager:
        for step in steps:
            manager.save(step, {"a": np.full(8, step)}, metrics={"loss": step / 2})


def leases(root: Any) -> list[str]:
    return list(filter(is_lease, open_store(root).list()))


@contextmanager
def watching(*arguments: object) -> Generator[subprocess.Popen[str]]:
    """The command in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, "watch", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# What it prints


def test_a_line_for_each_step(tmp_path: Path):
    fill(tmp_path, 1, 20)
    result = run("watch", tmp_path, "--timeout", 0)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [(line[0], line[-1]) for line in lines] == [("1", "loss=0.5"), ("20", "loss=10")]
    assert leases(tmp_path) == []
    wrong = run("watch", tmp_path / "step_00000001")
    assert_fails(wrong, "is a checkpoint, not a directory of steps")


def test_json(root: str):
    fill(root, 1, 2, 3)
    result = run("watch", root, "--timeout", 0, "--json", "--after", 1)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [step["step"] for step in found] == [2, 3]
    listed = as_json("ls", root)["steps"]
    for step, as_listed in zip(found, listed[1:], strict=True):
        assert step.pop("schema") == 1
        assert step == {name: as_listed[name] for name in step}
    newest = run("watch", root, "--timeout", 0, "--json", "--newest-only").stdout
    assert [json.loads(line)["step"] for line in newest.splitlines()] == [3]
    assert leases(root) == []


def test_new_steps_are_printed_as_they_come(tmp_path: Path):
    with watching(tmp_path, "--timeout", LONG_S) as process:
        assert process.stdout is not None
        for step in (1, 2, 3):
            fill(tmp_path, step)
            assert process.stdout.readline().split()[0] == str(step)


def test_a_root_that_is_not_there(tmp_path: Path):
    result = run("watch", tmp_path / "later", "--timeout", 0)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"ostraka: waiting for {tmp_path / 'later'}, where nothing is yet\n"


def test_a_root_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path, 1, 2)

    def refuse(store: LocalStore, name: str, **_: object) -> None:
        raise StoreError(f"can't write {store.location}/{name}: Permission denied")

    monkeypatch.setattr(LocalStore, "touch", refuse)  # its mode would not stop root
    result = run("watch", tmp_path, "--timeout", 0, "--json")
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr.count("may be deleted while they are read") == 1


# A command for each step


def test_a_command_for_each_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    fill(tmp_path / "a run", 1, 2)
    program = "import os, sys; print(sys.argv[1:], [n for n in os.listdir('.') if 'LEASE' in n])"
    command = f'{sys.executable} -c "{program}" {{step}} x{{path}}'
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "a run")
        given = ("--timeout", 0, "--backlog", 9, "--exec", command)
        assert run("watch", ".", *given).exit_code == 0
        said = capfd.readouterr().out.splitlines()
        (one, two) = [line.rpartition(" [") for line in said]
    path = tmp_path / "a run"
    assert one[0] == str(["1", f"x{path}/step_00000001"])
    assert two[0] == str(["2", f"x{path}/step_00000002"])
    assert one[2].endswith("-backlog-9-step-1']")
    assert two[2].endswith("-backlog-9-step-2']")


def test_a_command_that_fails_ends_the_watch(tmp_path: Path):
    fill(tmp_path, 1, 2)
    ended = "the command for step 1 ended with"
    for command, message in (
        ("sh -c 'exit 3'", f"{ended} status 3; --after 1 goes on after it"),
        ("sh -c 'kill -9 $$'", f"{ended} signal 9; --after 1 goes on"),
        ("./no-such-program {path}", "can't run ./no-such-program: No such file or directory"),
        ("'", "No closing quotation"),
        ("", "it is empty; give a command"),
    ):
        result = run("watch", tmp_path, "--timeout", 0, "--json", "--exec", command)
        assert result.exit_code == 2, command
        assert message in result.stderr
        assert len(result.stdout.splitlines()) <= 1
        assert leases(tmp_path) == []


# Its end


def test_ctrl_c_ends_it_with_its_lease(tmp_path: Path):
    fill(tmp_path, 1)
    with watching(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split()[0] == "1"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LONG_S) == ("", "\nostraka: interrupted\n")
    assert process.returncode == 130
    assert leases(tmp_path) == []


def test_sigterm_ends_the_command(tmp_path: Path):
    fill(tmp_path, 1)
    with watching(tmp_path, "--exec", "sh -c 'echo $$; exec sleep 1000'") as process:
        assert process.stdout is not None
        process.stdout.readline()
        command = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=LONG_S) == ("", "")
    assert process.returncode == 143
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(command, 0)
    assert leases(tmp_path) == []


def test_ctrl_c_waits_for_the_command(tmp_path: Path):
    """At a terminal it is for both; here the command does not get it, and ends by itself."""
    fill(tmp_path, 1)
    go_on = tmp_path / "go on"
    script = f"echo begun; until test -e '{go_on}'; do sleep 0.05; done; echo ended"
    with watching(tmp_path, "--exec", f'sh -c "{script}"') as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        go_on.touch()
        assert process.communicate(timeout=LONG_S) == ("ended\n", "\nostraka: interrupted\n")
    assert process.returncode == 130
    assert leases(tmp_path) == []


def test_a_reader_of_its_output_that_has_gone(tmp_path: Path):
    fill(tmp_path, 1)
    with watching(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        fill(tmp_path, 2)
        assert process.wait(LONG_S) == 141
    assert leases(tmp_path) == []


# Other commands


def test_rm_of_a_step_that_is_read(root: str):
    fill(root, 1, 2)
    watched = Manager(root, read_only=True).watch()
    assert next(watched) == 1
    result = run("rm", root, 1, "--yes")
    assert result.exit_code == 2
    assert f"step 1 of {root} is being read by" in result.stderr
    assert run("rm", root, 1, "--yes", "--force").exit_code == 0
    assert Manager(root, read_only=True).steps() == [2]
    watched.close()


def test_gc_of_leases(root: str, monkeypatch: pytest.MonkeyPatch):
    fill(root, 1)
    store = open_store(root)
    name = "_LEASE-there.7.0123-step-1"
    store.touch(name, create=True)
    shown = run("gc", root).stdout
    assert shown == f"{root}/{name}: the lease of a reader; --yes removes it if it has expired\n"
    alive = run("gc", root, "--yes").stdout
    assert alive == f"{root}/{name}: the lease of a reader; it is active; left alone\n"
    assert as_json("gc", root)["leases"] == [name]
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", -5.0)
    document = as_json("gc", root, "--yes")
    assert [left["names"] for left in document["leftovers"]] == [[name]]
    assert document["leases"] == []
    assert leases(root) == []


def test_commands_take_no_notice_of_a_lease(root: str):
    fill(root, 1)
    watched = Manager(root, read_only=True).watch()
    assert next(watched) == 1
    assert "1 step" in run("ls", root, "--verify").stdout
    assert run("verify", root).exit_code == 0
    assert run("show", root).exit_code == 0
    target = f"{root}-copy"
    assert run("copy", root, target).exit_code == 0
    assert open_store(target).list() == ["step_00000001"]
    watched.close()
