"""What goes wrong around a manager: odd arguments, signals, and a disk that others change, too."""

import errno
import gc
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ostraka
from mounts import lose_sectors
from ostraka import Best, Manager
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    InvalidTree,
    OstrakaError,
    PathInTheWay,
    UnsupportedFormat,
)
from ostraka.manager.steps import RESERVED_KEY
from ostraka.testing import FaultyStore, run_processes
from places import names_of
from runs import damage, error_of, fill, steps_in, tree_of

# Arguments

ODD = "must be a whole number, not"
WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({name: 0}, ValueError, f"^{name} must be more than 0, not 0$")
        for name in ("every", "every_s", "keep", "keep_every", "keep_every_s", "mtbf_s")
    ),
    ({"keep": 1.5}, TypeError, f"keep {ODD} 1.5"),
    ({"keep": "3"}, TypeError, f"keep {ODD} '3'"),
    ({"keep": True}, TypeError, f"keep {ODD} True"),
    ({"every": 2.5}, TypeError, f"every {ODD} 2.5"),
    ({"every": math.inf}, TypeError, f"every {ODD} inf"),
    ({"keep_every": 1.5}, TypeError, f"keep_every {ODD} 1.5"),
    ({"keep_best": ["loss"]}, TypeError, r"a Best, such as Best\('loss'.*, not \['loss'\]"),
    ({"keep_if": 3}, TypeError, "keep_if must be a function, not 3"),
    ({"when": 5}, TypeError, "when must be a function, not 5"),
    ({"on_record": 5}, TypeError, "on_record must be a function, not 5"),
    ({"at": "100"}, TypeError, "at must be a list of steps, not '100'"),
    ({"at": 5}, TypeError, "at must be a list of steps, not 5"),
    ({"at": [1.5]}, TypeError, f"at: a step {ODD} 1.5"),
    ({"at": [-1]}, ValueError, "at: a step must be 0 or more, not -1"),
    ({"every_s": "5"}, TypeError, "every_s must be a number of seconds, not '5'"),
    ({"every_s": math.nan}, ValueError, "every_s must be more than 0, not nan"),
    ({"mtbf_s": math.inf}, ValueError, "mtbf_s must be less than infinity, not inf"),
    ({"if_busy": "maybe"}, ValueError, 'if_busy is \'maybe\'; it must be "wait" or "raise"'),
    *(
        ({"on_preemption": odd}, ValueError, 'on_preemption is .*; it must be "exit", "continue"')
        for odd in ("stop", None, 1.5, "Exit")
    ),
    ({"mirror_every": 2}, ValueError, "mirror_every=2 is given without mirror="),
    ({"mirror": "m", "mirror_every": 2.5}, TypeError, f"mirror_every {ODD} 2.5"),
    ({"mirror": "m", "mirror_every": 0}, ValueError, "mirror_every must be more than 0, not 0"),
    *(
        ({"root": root}, TypeError, "path must be text or a pathlib.Path, not ")
        for root in (None, 5, b"runs", ["runs"])
    ),
    ({"root": "ftp://x"}, UnsupportedFormat, "has no store for ftp://"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG_OPTIONS, ids=str)
def test_wrong_options(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str
):
    with pytest.raises(kind, match=message):
        Manager(**{"root": tmp_path / "runs", **options})
    assert not (tmp_path / "runs").exists()


BEST = r"^by must be a Best, such as Best\('loss', 'min'\) for"
NO_NUMBER = "metric 'loss' must be a number, not"
PAIRS = r"\[\('loss', 1.0\)\]"


def saves(step: Any, tree: Any = 1, **options: Any) -> Callable[[Manager], Any]:
    return lambda manager: manager.save(step, {"a": tree}, asynchronous=False, **options)


WRONG_CALLS: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda _: Best("loss", "most"), ValueError, "must be 'min' or 'max', not 'most'"),  # type: ignore[arg-type]
    (lambda _: Best("loss", n=0), ValueError, "n of Best must be more than 0, not 0"),
    (lambda _: Best("loss", n=1.5), TypeError, f"n of Best {ODD} 1.5"),  # type: ignore[arg-type]
    (lambda _: Best("loss", n=None), TypeError, f"n of Best {ODD} None"),  # type: ignore[arg-type]
    (lambda _: Best(3), TypeError, "the metric of Best must be a name, not 3"),  # type: ignore[arg-type]
    *((lambda m, by=by: m.best(by), TypeError, BEST) for by in (3, ("loss", "min"), Best)),
    (saves(-1), ValueError, "a step must be 0 or more, not -1"),
    (saves(1 << 63), ValueError, r"a step must be less than 2\*\*63"),
    (saves(True), TypeError, f"a step {ODD} True"),
    (saves(1.5), TypeError, f"a step {ODD} 1.5"),
    (lambda m: m.should_save("7"), TypeError, f"a step {ODD} '7'"),
    (lambda m: m.save({"a": 1}, 7), TypeError, "not a dict; the step comes first, as in save"),
    (lambda m: m.restore({"a": 1}), TypeError, "not a dict; leave it out for the newest.*like="),
    (lambda m: m.restore("latest"), TypeError, "not 'latest'; leave it out for the newest"),
    (lambda m: m.restore(), CheckpointNotFound, "there is no step in .* to restore"),
    (lambda m: m.watch(after=-1), ValueError, "a step must be 0 or more, not -1"),
    (lambda m: m.watch(after="7"), TypeError, f"a step {ODD} '7'"),
    (lambda m: m.watch(timeout_s=-1), ValueError, "timeout_s must be more than 0, not -1"),
    (lambda m: m.watch(timeout_s="1"), TypeError, "timeout_s must be a number of seconds, not '1'"),
    (lambda m: m.watch(backlog=-1), ValueError, "backlog must be 0 or more, not -1"),
    (lambda m: m.watch(backlog=True), TypeError, "backlog .* whole number of steps, not True"),
    (saves(4, metadata={"t": (1, 2)}), InvalidTree, "tuple"),
    (saves(4, metadata={RESERVED_KEY: 1}), ValueError, f"metadata has the key '{RESERVED_KEY}'"),
    (saves(4, metadata=[("loss", 1.0)]), TypeError, f"metadata must be a dict, not {PAIRS}"),
    (saves(4, metrics=[("loss", 1.0)]), TypeError, f"metrics must be a dict, .*, not {PAIRS}"),
    (saves(4, metrics={1: 2.0}), TypeError, "the name of a metric must be text, not 1"),
    (saves(4, metrics={"loss": 10**400}), ValueError, "metric 'loss' is too large for a float"),
    *(
        (saves(4, metrics={"loss": value}), TypeError, NO_NUMBER)
        for value in ("1.5", "nan", b"1", np.array("3"), np.complex64(1), np.ones(1), np.ones(2))
    ),
]


def test_wrong_calls(tmp_path: Path):
    with Manager(tmp_path) as manager:
        for call, kind, message in WRONG_CALLS:
            with pytest.raises(kind, match=message):
                call(manager)
        with pytest.raises(TypeError, match=NO_NUMBER):
            manager.save(4, tree_of(4), metrics={"loss": jnp.ones(2)})
        assert manager.steps() == []


def test_numbers_of_numpy_and_jax(tmp_path: Path):
    count: Any = jnp.int32(2)
    last: Any = np.int64(2)
    metrics = {"loss": jnp.bfloat16(2), "n": np.float16(1)}
    with Manager(tmp_path, keep=last, every=count, asynchronous=False) as manager:
        for step in range(9):
            manager.save(np.int64(step), tree_of(step), metrics=metrics)
        assert manager.steps() == [6, 8]
        assert manager.metrics(8) == {"loss": 2, "n": 1}


# What is on disk


def test_falls_back_over_any_number_of_damaged_steps(tmp_path: Path):
    fill(tmp_path, *range(15))
    damage(tmp_path, *range(1, 15))
    with Manager(tmp_path, read_only=True) as manager:
        with pytest.warns(UserWarning, match="can't be restored, so step") as said:
            assert manager.restore(fallback=True)["step"] == 0
        assert manager.restored == 0
    assert len(said) == 14


def test_a_step_that_the_disk_has_lost_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in (1, 2):
        ostraka.save(tmp_path / str(step), {"state": nnx.Param(jnp.full(8, step))})
    lose_sectors((tmp_path / "2").glob("shards-*/shard_*.safetensors"), monkeypatch)
    into = {"state": nnx.Param(jnp.zeros(8, int))}
    with Manager(tmp_path) as manager:
        said = r"/2 is damaged: shards-\w+/shard_00000.safetensors: it can't be read: Input/output"
        with pytest.raises(Damaged, match=f"{said} error; the step before it is 1"):
            manager.restore(into=into)
        for strict in (False, True):
            into["state"][...] = jnp.zeros(8, int)
            with pytest.warns(UserWarning, match=f"step 2 can't be .*, so step 1 is: .*{said}"):
                manager.restore(into=into, strict=strict, fallback=True)
            assert manager.restored == 1
            assert into["state"][...].tolist() == [1] * 8


@pytest.mark.parametrize("name", ["step_00000001", "1"])
def test_what_a_linked_step_leads_to_is_neither_written_to_nor_deleted(tmp_path: Path, name: str):
    elsewhere = tmp_path / "elsewhere"
    fill(elsewhere, 7)
    with Manager(elsewhere) as other:
        other.pin(7)
    root = tmp_path / "root"
    root.mkdir()
    (root / name).symlink_to(elsewhere / "step_00000007")
    with Manager(root, keep=1, asynchronous=False) as manager:
        with pytest.raises(PathInTheWay, match=f"{name} is a link.*delete step 1 first, which"):
            manager.save(1, tree_of(1))
        manager.unpin(1)
        assert manager.restore()["step"] == 7
        manager.save(2, tree_of(2))
        manager.save(3, tree_of(3))
        assert manager.steps() == [1, 3]
        manager.delete(1)
        assert manager.steps() == [3]
        assert manager.save(1, tree_of(1), force=True)
        assert manager.restore(1)["step"] == 1
    fill(elsewhere, 8, keep=1)
    assert steps_in(elsewhere) == [7, 8]


def replace_step(root: Path, elsewhere: Path) -> None:
    (root / "step_00000002").symlink_to(elsewhere / "step_00000007")


def replace_root_by_a_link(root: Path, elsewhere: Path) -> None:
    root.rename(root.with_name("moved"))
    root.symlink_to(elsewhere)


def replace_root_by_a_directory(root: Path, elsewhere: Path) -> None:
    root.rename(root.with_name("moved"))
    elsewhere.rename(root)
    elsewhere.symlink_to(root)  # so that one can look at it under its old name


@pytest.mark.parametrize(
    ("replace", "message", "asynchronous"),
    [
        (replace_step, "step_00000002 is a link, and saving would replace what it", False),
        (replace_root_by_a_link, "root is no longer the directory that this Manager was", True),
        (replace_root_by_a_directory, "root is no longer the directory that this", False),
    ],
)
def test_a_link_that_was_made_while_the_manager_is_open(
    tmp_path: Path, replace: Callable[[Path, Path], None], message: str, asynchronous: bool
):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    fill(elsewhere, 1, 7)
    with Manager(root, asynchronous=asynchronous, keep=1) as manager:
        manager.save(1, tree_of(1))
        manager.wait()
        replace(root, elsewhere)
        before = {f: f.stat().st_mtime_ns for f in elsewhere.resolve().rglob("*")}
        with pytest.raises(PathInTheWay, match=message):
            manager.save(2, tree_of(2))
        if "no longer" in message:
            with pytest.raises(PathInTheWay, match=message):
                manager.delete(1)
        assert {f: f.stat().st_mtime_ns for f in elsewhere.resolve().rglob("*")} == before
        assert ostraka.restore(elsewhere / "step_00000007")["step"] == 7


def test_a_link_that_is_no_step_is_to_be_removed_by_hand(tmp_path: Path):
    (tmp_path / "step_00000001").symlink_to("nowhere")
    with (
        Manager(tmp_path, asynchronous=False) as manager,
        pytest.raises(PathInTheWay, match="leads to; remove the link first"),
    ):
        manager.save(1, tree_of(1))


def test_a_root_that_is_a_link_from_the_beginning(tmp_path: Path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "scratch")
    fill(tmp_path / "root", 1, 2)
    assert Manager(tmp_path / "scratch", read_only=True).steps() == [1, 2]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path):
    fill(tmp_path, 1, 2)
    for name in ("3", "2"):
        (tmp_path / name).mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name / "_METADATA")
    shard = next((tmp_path / "step_00000001").glob("shards-*/*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    with Manager(tmp_path, asynchronous=False) as manager:
        assert manager.steps() == [1, 2]
        assert manager.restore(2)["step"] == 2
        for step in (1, 3):
            with pytest.raises(OstrakaError, match="it is a pipe, not a file"):
                manager.restore(step)


def from_deep(depth: int, call: Callable[[], Any]) -> Any:
    """What `call` returns, called from so many calls deep."""
    return call() if not depth else from_deep(depth - 1, call)


def test_a_deep_stack_is_not_taken_for_damage(tmp_path: Path):
    """The tree needs more room on the stack than its caller has left."""
    nested: Any = np.arange(3)
    for _ in range(150):
        nested = [nested]
    with Manager(tmp_path, asynchronous=False, on_preemption=False) as manager:
        manager.save(1, tree_of(1))
        manager.save(2, nested)
    shards = sorted(tmp_path.rglob("*.safetensors"))

    def look() -> tuple[int | None, list[int]]:
        with Manager(tmp_path, on_preemption=False) as manager:  # which cleans up
            return manager.latest(), manager.steps()

    for depth in (0, 300, 500, 700, 800, 850):
        assert from_deep(depth, look) == (2, [1, 2]), depth
        assert sorted(tmp_path.rglob("*.safetensors")) == shards, depth


def test_a_stack_without_any_room_is_not_taken_for_damage(tmp_path: Path):
    """Whatever the depth, the answer is right or there is none."""
    fill(tmp_path, 1)
    outcomes: set[Any] = set()
    for depth in range(700, sys.getrecursionlimit() + 1, 3):
        manager = Manager(tmp_path, read_only=True)
        try:
            outcomes.add(from_deep(depth, manager.latest))
        except RecursionError:
            outcomes.add("no room")
    assert outcomes == {1, "no room"}


def test_a_step_that_cannot_be_looked_at_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on a network file system whose server has gone."""

    def stale(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if "step_00000002" in str(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *args, **options)

    stat = os.stat
    fill(tmp_path, 1, 2)
    manager = Manager(tmp_path, read_only=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stale)
        assert manager.steps() == [1]
        with pytest.raises(Damaged, match="Stale file handle.*the step before it is 1"):
            manager.restore()
    assert manager.restore()["step"] == 2


def test_a_step_that_is_replaced_by_the_next_while_it_is_looked_at(tmp_path: Path):
    def save_next(verb: str, name: str) -> None:
        if verb == "look" and writer.latest() == 1:
            writer.save(2, tree_of(2))

    fill(tmp_path, 1)
    with Manager(tmp_path, keep=1, asynchronous=False) as writer:
        reader = Manager(FaultyStore(tmp_path, before=save_next), read_only=True)
        assert reader.latest() == 2


def test_leftovers_that_cannot_be_removed_do_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """As where another machine has one of the files open, on a network file system."""
    refused = OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    fill(tmp_path, 1)
    left = tmp_path / "step_00000002" / "shards-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "shard_00000.safetensors").write_bytes(b"half")
    Manager(FaultyStore(tmp_path, fail={"delete": refused})).close()
    assert "step_00000002 can't be removed now" in caplog.text
    with Manager(tmp_path) as manager:
        assert manager.steps() == [1]
    assert names_of(tmp_path) == ["step_00000001"]


# Signals, and the end of a program


def test_a_second_signal_may_come_while_the_first_is_handled(tmp_path: Path):
    """The handler takes no lock, which the line that it interrupts could hold."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == threading.__file__:
            lines.append(frame.f_lineno)
        return trace

    lines: list[int] = []
    with Manager(tmp_path) as manager:
        gc.disable()  # it may come at any line, and what it ends is not the handler's doing
        sys.settrace(trace)
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            sys.settrace(None)
            gc.enable()
        assert manager.reached_preemption(1)
    assert lines == []


def leave_unclosed(root: str) -> None:
    manager = Manager(f"{root}/runs", mirror=f"{root}/mirror")
    manager.save(1, {"a": 1})
    manager.wait()
    manager.pin(1)


def test_a_program_that_never_closes_its_manager_ends_quietly(tmp_path: Path):
    (result,) = run_processes(leave_unclosed, str(tmp_path), processes=1)
    assert (result.stdout, result.stderr) == ("", "")
    assert steps_in(tmp_path / "runs") == steps_in(tmp_path / "mirror") == [1]


# Processes that disagree


def disagree(root: str, options: list[list[dict[str, Any]]]) -> list[str]:
    found = [
        error_of(lambda mine=mine: Manager(**{"root": root, **mine}).close())
        for mine in (each[jax.process_index()] for each in options)
    ]
    with Manager(root, keep=1) as manager:
        manager.save(1, {"a": 1})
    return found


def test_processes_with_different_arguments(tmp_path: Path):
    root, other = str(tmp_path / "root"), str(tmp_path / "other")
    wrong: list[tuple[list[dict[str, Any]], str]] = [
        ([{}, {"every": 5}], "every=5 while process 0 has every=None"),
        ([{}, {"keep": 2}], "keep=2 while process 0 has keep=None"),
        ([{}, {"when": bool}], "when=a function while process 0 has when=None"),
        ([{}, {"root": other}], f"root={other} while process 0 has root={root}"),
        ([{}, {"at": [3]}], "at=[3] while process 0 has at=[]"),
        ([{}, {"mirror": other}], f"mirror={other} while process 0 has mirror=None"),
        (
            [{"mirror": other}, {"mirror": other, "mirror_every": 2}],
            "mirror_every=2 while process 0 has mirror_every=None",
        ),
    ]
    results = run_processes(disagree, root, [options for options, _ in wrong], processes=2)
    for result in results:
        for found, (_, said) in zip(result.value, wrong, strict=True):
            assert f"failed on process 1: it has {said}" in found
        assert f"opening of {root} failed on process 1" in results[0].value[0]
    assert Manager(root, read_only=True).steps() == [1]
    assert not (tmp_path / "other").exists()
