"""Ctrl-C with on_interrupt="save"."""

import signal
from pathlib import Path
from typing import Literal

import pytest

from ostraka import Manager
from runs import tree_of


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("on_interrupt", ["save", "raise"])
def test_ctrl_c_saves_or_just_ends(
    tmp_path: Path, on_interrupt: Literal["save", "raise"], caplog: pytest.LogCaptureFixture
):
    before = signal.getsignal(signal.SIGINT)
    done: list[int] = []

    def train() -> None:
        with Manager(tmp_path, every=1000, on_interrupt=on_interrupt) as manager:
            manager.save(1, tree_of(1))
            interrupt()
            done.append(1)
            manager.save(2, tree_of(2))
            done.append(2)

    with pytest.raises(KeyboardInterrupt, match="^$"):
        train()
    assert signal.getsignal(signal.SIGINT) is before
    saves = on_interrupt == "save"
    assert done == [1] * saves
    assert Manager(tmp_path, read_only=True).steps() == [2] * saves
    said = "the next save is the last one; press Ctrl-C again to end at once"
    assert (said in caplog.text) == saves
    assert (f"interrupted: step 2 is saved in {tmp_path}" in caplog.text) == saves
    assert "preempted" not in caplog.text


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path):
    with Manager(tmp_path, on_interrupt="save", on_preemption="continue") as manager:
        interrupt()
        with pytest.raises(KeyboardInterrupt, match="^$"):
            interrupt()
        assert manager.reached_preemption(1)


def test_ctrl_c_after_the_last_save(tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    Manager(tmp_path, on_interrupt="save").close()  # without any Ctrl-C
    assert signal.getsignal(signal.SIGINT) is before
    manager = Manager(tmp_path, on_interrupt="save")
    manager.save(1, tree_of(1))
    interrupt()
    with pytest.raises(KeyboardInterrupt, match="^$"):
        manager.close()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_may_end_itself(tmp_path: Path):
    steps: list[int] = []
    with Manager(tmp_path, on_interrupt="save", on_preemption="continue") as manager:
        for step in range(1, 100):
            if step == 5:
                interrupt()
            manager.save(step, tree_of(step))
            steps.append(step)
            if manager.reached_preemption(step):
                break
    assert steps[-1] == manager.latest() == 5


def test_arguments(tmp_path: Path):
    with pytest.raises(ValueError, match='on_interrupt is True; it must be "raise" or "save"'):
        Manager(tmp_path, on_interrupt=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_preemption is False; leave that out"):
        Manager(tmp_path, on_interrupt="save", on_preemption=False)
