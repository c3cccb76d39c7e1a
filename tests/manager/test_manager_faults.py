"""What goes wrong around a manager: odd arguments, signals, and a disk that others change, too."""

import errno
import gc
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ostraka
from mounts import lose_sectors
from ostraka import Best, Manager
from ostraka.errors import Damaged, OstrakaError, PathInTheWay
from ostraka.saving import place as _leftovers
from ostraka.storage import _claim
from ostraka.testing import FaultyStore, run_processes
from places import Place, names_of, remove_tree


@pytest.fixture(autouse=True)
def _quick_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is soon known who is alive; nobody comes back to what he left in a bucket."""
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.2)
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 3.0)
    monkeypatch.setattr(_leftovers, "GONE_AFTER_S", -5.0)


def tree_of(step: int) -> dict[str, Any]:
    return {"a": np.full(8, step), "step": step}


def fill(root: Place, *steps: int, **options: Any) -> None:
    with Manager(root, asynchronous=False, **options) as manager:
        for step in steps:
            manager.save(step, tree_of(step))


def from_deep(depth: int, call: Callable[[], Any]) -> Any:
    """What `call` returns, called from so many calls deep."""
    return call() if not depth else from_deep(depth - 1, call)


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Each of these once was taken, and deleted nothing, or saved at odd steps.
        ({"keep": 1.5}, "keep must be a whole number, not 1.5"),
        ({"keep": "3"}, "keep must be a whole number, not '3'"),
        ({"keep": True}, "keep must be a whole number, not True"),
        ({"every": 2.5}, "every must be a whole number, not 2.5"),
        ({"every": math.inf}, "every must be a whole number, not inf"),
        ({"keep_every": 1.5}, "keep_every must be a whole number, not 1.5"),
        (
            {"keep_best": "loss"},
            r"keep_best must be a Best, such as Best\('loss', 'min'\).*not 'loss'",
        ),
        ({"keep_best": ["loss"]}, "keep_best must be a Best, .*, not \\['loss'\\]"),
        ({"every": "100"}, "every must be a whole number, not '100'"),
        ({"at": "100"}, "at must be a list of steps, not '100'"),
        ({"keep_if": 3}, "keep_if must be a function, not 3"),
        ({"when": 5}, "when must be a function, not 5"),
        ({"on_record": 5}, "on_record must be a function, not 5"),
        ({"at": 5}, "at must be a list of steps, not 5"),
        ({"at": [1.5]}, "at: a step must be a whole number, not 1.5"),
        ({"every_s": "5"}, "every_s must be a number of seconds, not '5'"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind(place: Place, options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        Manager(place, **options)


def test_numbers_out_of_bounds(place: Place):
    with pytest.raises(ValueError, match="a step must be 0 or more, not -1"):
        Manager(place, at=[-1])
    with pytest.raises(ValueError, match="mtbf_s must be less than infinity, not inf"):
        Manager(place, mtbf_s=math.inf)
    with pytest.raises(ValueError, match="every_s must be more than 0, not nan"):
        Manager(place, every_s=math.nan)
    n: Any
    for n in (1.5, None):
        with pytest.raises(TypeError, match=f"n of Best must be a whole number, not {n}"):
            Best("loss", n=n)
    metric: Any = 3
    with pytest.raises(TypeError, match="the metric of Best must be a name, not 3"):
        Best(metric)


def test_numbers_of_numpy_and_jax(place: Place):
    count: Any = jnp.int32(2)
    last: Any = np.int64(2)
    with Manager(place, keep=last, every=count, asynchronous=False) as manager:
        for step in range(9):
            manager.save(step, tree_of(step))
        assert manager.steps() == [6, 8]


@pytest.mark.parametrize(
    "value", ["1.5", "nan", b"1", np.array("3"), np.complex64(1), np.ones(1), jnp.ones(2)], ids=repr
)
def test_metrics_that_are_no_numbers(place: Place, value: Any):
    with Manager(place) as manager:
        with pytest.raises(TypeError, match="metric 'loss' must be a number, not"):
            manager.save(1, tree_of(1), metrics={"loss": value})
        with pytest.raises(ValueError, match="metric 'loss' is too large for a float"):
            manager.save(1, tree_of(1), metrics={"loss": 10**400})
        assert manager.save(1, tree_of(1), metrics={"loss": jnp.bfloat16(2), "n": np.float16(1)})
        manager.wait()
        assert manager.metrics(1) == {"loss": 2, "n": 1}


def test_metrics_and_metadata_that_are_no_dict(place: Place):
    odd: Any = [("loss", 1.0)]
    with Manager(place) as manager:
        with pytest.raises(
            TypeError, match=r"metrics must be a dict, such as .*, not \[\('loss', 1.0\)\]"
        ):
            manager.save(1, tree_of(1), metrics=odd)
        with pytest.raises(TypeError, match=r"metadata must be a dict, not \[\('loss', 1.0\)\]"):
            manager.save(1, tree_of(1), metadata=odd)
        assert manager.steps() == []


# Going on


@pytest.mark.parametrize("by", ["loss", ("loss", "min"), Best], ids=str)
def test_the_best_by_what_is_no_best(place: Place, by: Any):
    with (
        Manager(place) as manager,
        pytest.raises(TypeError, match=r"^by must be a Best, such as Best\('loss', 'min'\) for"),
    ):
        manager.best(by)


def test_a_step_and_a_tree_in_each_others_place(place: Place):
    tree = {"a": np.zeros(1000)}
    with Manager(place, asynchronous=False) as manager:
        with pytest.raises(
            TypeError, match=r"number, not a dict; the step comes first, as in save"
        ):
            manager.save(tree, 7)  # type: ignore[arg-type]
        manager.save(7, tree)
        with pytest.raises(TypeError, match="not a dict; leave it out for the newest.*like="):
            manager.restore(tree)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not 'latest'; leave it out for the newest"):
            manager.restore("latest")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a step must be less than 2"):
            manager.save(1 << 63, tree)
        assert manager.steps() == [7]


def test_a_root_that_is_no_path():
    for given in (None, 5, b"runs", ["runs"]):
        with pytest.raises(TypeError, match="path must be text or a pathlib.Path, not "):
            Manager(given)  # type: ignore[arg-type]


def test_an_empty_root_has_nothing_to_restore(place: Place):
    with (
        Manager(place) as manager,
        pytest.raises(ostraka.errors.CheckpointNotFound, match="there is no step in .* to restore"),
    ):
        manager.restore()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_checkpoint_is_no_root(place: Place, read_only: bool):
    fill(place, 7)
    kind = ostraka.errors.CheckpointNotFound if read_only else PathInTheWay
    with pytest.raises(kind, match="step_00000007 is itself a checkpoint, .* the directory above"):
        Manager(place / "step_00000007", read_only=read_only)
    assert ostraka.verify(place / "step_00000007").ok
    fill(place, 8)


def test_a_resumed_loop_that_takes_several_steps_at_once_misses_none(place: Place):
    fill(place, 14)
    with Manager(place, every=10, at=[30], asynchronous=False) as manager:
        manager.restore()
        assert [step for step in range(21, 50, 7) if manager.save(step, tree_of(step))] == [
            21,  # after 20
            35,  # after 30
            42,
        ]
    with Manager(place, every=21, asynchronous=False) as manager:
        manager.restore(21)
        assert manager.save(42, tree_of(42))


# What is on disk


def test_a_run_does_not_begin_anew_because_no_step_can_be_read(place: Place):
    fill(place, 20)
    file = place / "step_00000020" / "_METADATA"
    file.write_bytes(file.read_bytes()[:-20])
    with Manager(place, asynchronous=False) as manager:
        with pytest.raises(Damaged, match="step_00000020 is damaged.* no step .* can be read"):
            manager.latest()
        manager.delete(20)
        assert manager.latest() is None
        manager.save(1, tree_of(1))
        assert manager.latest() == 1


def damage(root: Place, step: int) -> None:
    file = min((root / f"step_{step:08d}").glob("shards-*/shard_*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_manager_says_of_damage_all_that_a_restore_says(place: Place):
    fill(place, 10)
    damage(place, 10)
    with pytest.raises(Damaged, match="leaf 'a'") as plain:
        ostraka.restore(place / "step_00000010")
    with Manager(place) as manager, pytest.raises(Damaged, match="leaf 'a'") as managed:
        manager.restore()
    assert managed.value.problems == plain.value.problems
    assert plain.value.problems[0].process == 0
    assert plain.value.problems[0].boxes


def test_falls_back_over_any_number_of_damaged_steps(place: Place):
    steps = 15 if isinstance(place, Path) else 5
    fill(place, *range(steps))
    for step in range(1, steps):
        damage(place, step)
    with Manager(place, read_only=True) as manager:
        with pytest.warns(UserWarning, match="can't be restored, so step") as said:
            assert manager.restore(fallback=True)["step"] == 0
        assert manager.restored == 0
    assert len(said) == steps - 1


@pytest.mark.parametrize("lenient", [False, True])
def test_a_step_that_the_disk_has_lost_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lenient: bool
):
    for step in (1, 2):
        ostraka.save(tmp_path / str(step), {"state": nnx.Param(jnp.full(8, step))})
    lose_sectors((tmp_path / "2").glob("shards-*/shard_*.safetensors"), monkeypatch)
    into = {"state": nnx.Param(jnp.zeros(8, int))}
    with Manager(tmp_path) as manager:
        said = r"/2 is damaged: shards-\w+/shard_00000.safetensors: it can't be read: Input/output"
        with pytest.raises(Damaged, match=f"{said} error; the step before it is 1"):
            manager.restore(into=into)
        with pytest.warns(UserWarning, match=f"step 2 can't be restored, so step 1 is: .*{said}"):
            manager.restore(into=into, strict=not lenient, fallback=True)
        assert manager.restored == 1
    assert into["state"][...].tolist() == [1] * 8


def test_steps_that_cannot_be_read_are_not_said_to_be_missing(place: Place):
    fill(place, 1, 2)
    for step in (1, 2):
        (place / f"step_{step:08d}" / "_METADATA").write_bytes(b"")
    manager = Manager(place, read_only=True)
    with pytest.raises(Damaged, match="no step in .* can be read: mend one, or delete them all"):
        manager.latest()
    with pytest.raises(Damaged, match="step_00000002 is damaged.* has no intact step before it"):
        manager.restore(fallback=True)


@pytest.mark.parametrize("name", ["step_00000001", "1"])
def test_what_a_linked_step_leads_to_is_not_written_to(tmp_path: Path, name: str):
    elsewhere = tmp_path / "elsewhere"
    fill(elsewhere, 7)
    with Manager(elsewhere) as other:
        other.pin(7)
    root = tmp_path / "root"
    root.mkdir()
    (root / name).symlink_to(elsewhere / "step_00000007")
    with Manager(root, asynchronous=False) as manager:
        with pytest.raises(PathInTheWay, match=f"{name} is a link.*delete step 1 first, which"):
            manager.save(1, tree_of(1))
        manager.unpin(1)
        assert manager.restore()["step"] == 7
        manager.delete(1)
        assert manager.save(1, tree_of(1))
        assert manager.restore()["step"] == 1
    with Manager(elsewhere, keep=1, asynchronous=False) as other:
        other.save(8, tree_of(8))
        assert other.steps() == [7, 8]
        assert other.restore(7)["step"] == 7


def replace_step(root: Path, elsewhere: Path) -> None:
    (root / "step_00000002").symlink_to(elsewhere / "step_00000007")


def replace_root_by_a_link(root: Path, elsewhere: Path) -> None:
    root.rename(root.with_name("moved"))
    root.symlink_to(elsewhere)


def replace_root_by_a_directory(root: Path, elsewhere: Path) -> None:
    root.rename(root.with_name("moved"))
    elsewhere.rename(root)
    elsewhere.symlink_to(root)  # so that one can look at it under its old name


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (replace_step, "step_00000002 is a link, and saving would replace what it leads to"),
        (replace_root_by_a_link, "root is no longer the directory that this Manager was opened"),
        (replace_root_by_a_directory, "root is no longer the directory that this Manager was"),
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


def test_a_root_that_was_deleted_is_made_and_locked_again(place: Place):
    root = place / "root"
    with Manager(root, asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        remove_tree(root)
        manager.save(2, tree_of(2))
        assert manager.steps() == [2]
        with pytest.raises(ostraka.errors.Busy, match="another Manager is writing"):
            Manager(root)


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
        with pytest.raises(OstrakaError, match="it is a pipe, not a file"):
            manager.restore(3)
        with pytest.raises(OstrakaError, match="it is a pipe, not a file"):
            manager.restore(1)


def nested(levels: int) -> Any:
    tree: Any = np.arange(3)
    for _ in range(levels):
        tree = [tree]
    return tree


@pytest.mark.parametrize("depth", [0, 300, 500, 700, 800, 850])
def test_a_deep_stack_is_not_taken_for_damage(place: Place, depth: int):
    """The tree needs more room on the stack than its caller has left."""
    with Manager(place, asynchronous=False, on_preemption=False) as manager:
        manager.save(1, tree_of(1))
        manager.save(2, nested(150))
    shards = sorted(place.rglob("*.safetensors"))

    def look() -> tuple[int | None, list[int]]:
        with Manager(place, on_preemption=False) as manager:  # which cleans up
            return manager.latest(), manager.steps()

    assert from_deep(depth, look) == (2, [1, 2])
    assert sorted(place.rglob("*.safetensors")) == shards


def test_a_stack_without_any_room_is_not_taken_for_damage(place: Place):
    """Whatever the depth, the answer is right or there is none."""
    fill(place, 1)
    outcomes: set[Any] = set()
    for depth in range(700, sys.getrecursionlimit() + 1, 3):
        manager = Manager(place, read_only=True)
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


def test_a_step_that_is_replaced_by_the_next_while_it_is_looked_at(place: Place):
    def save_next(verb: str, name: str) -> None:
        if verb == "look" and writer.latest() == 1:
            writer.save(2, tree_of(2))

    fill(place, 1)
    with Manager(place, keep=1, asynchronous=False) as writer:
        reader = Manager(FaultyStore(place, before=save_next), read_only=True)
        assert reader.latest() == 2


def test_leftovers_that_cannot_be_removed_do_not_stop_the_run(
    place: Place, caplog: pytest.LogCaptureFixture
):
    """As where another machine has one of the files open, on a network file system."""
    refused = OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    fill(place, 1)
    left = place / "step_00000002" / "shards-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "shard_00000.safetensors").write_bytes(b"half")
    Manager(FaultyStore(place, fail={"delete": refused})).close()
    assert "step_00000002 can't be removed now" in caplog.text
    with Manager(place) as manager:
        assert manager.steps() == [1]
    assert names_of(place) == ["step_00000001"]


# Signals, and the end of a program


def test_a_second_signal_may_come_while_the_first_is_handled(place: Place):
    """The handler takes no lock, which the line that it interrupts could hold."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == threading.__file__:
            lines.append(frame.f_lineno)
        return trace

    lines: list[int] = []
    with Manager(place) as manager:
        gc.disable()  # it may come at any line, and what it ends is not the handler's doing
        sys.settrace(trace)
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            sys.settrace(None)
            gc.enable()
        assert manager.reached_preemption(1)
    assert lines == []


def test_a_manager_that_nobody_has_any_more_gives_sigterm_back(place: Place):
    before = signal.getsignal(signal.SIGTERM)
    manager = Manager(place)
    assert signal.getsignal(signal.SIGTERM) != before
    del manager
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_program_that_never_closes_its_manager_ends_quietly(place: Place):
    code = (
        "import sys, ostraka\n"
        "manager = ostraka.Manager(sys.argv[1])\n"
        "manager.save(1, {'a': 1})\n"
        "manager.wait()\n"
        "manager.pin(1)\n"
    )
    command = [sys.executable, "-c", code, str(place)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert ostraka.verify(place / "step_00000001").ok


# Processes that disagree


def disagree(root: str, options: list[dict[str, Any]]) -> list[str]:
    import jax

    found: list[str] = []
    for number in range(len(options)):
        mine = options[number] if jax.process_index() else {}
        try:
            Manager(mine.pop("root", root), **mine).close()
        except OstrakaError as error:
            found.append(str(error))
    with Manager(root, keep=1) as manager:
        manager.save(1, {"a": 1})
    return found


def test_processes_with_different_arguments(place: Place):
    root, other = str(place / "root"), str(place / "other")
    options = [{"every": 5}, {"keep": 2}, {"when": bool}, {"root": other}, {"at": [3]}]
    results = run_processes(disagree, root, options, processes=2)
    for result in results:
        assert len(result.value) == len(options)
        assert (
            f"opening of {root} failed on process 1: it has every=5 while" in (results[0].value[0])
        )
        assert (
            "failed on process 1: it has every=5 while process 0 has every=None" in result.value[0]
        )
        assert "it has keep=2 while process 0 has keep=None" in result.value[1]
        assert "it has when=a function while" in result.value[2]
        assert f"it has root={other} while process 0 has root={root}" in result.value[3]
        assert "it has at=[3] while process 0 has at=[]" in result.value[4]
    assert Manager(root, read_only=True).steps() == [1]
    assert not (place / "other").exists()
