"""Ctrl-C with on_interrupt="save"."""

import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from ostraka import Manager

PROGRAM = """
import sys, jax.numpy as jnp, ostraka
with ostraka.Manager(sys.argv[1], every=1000, on_interrupt=sys.argv[2]) as manager:
    for step in range(1, 10**9):
        manager.save(step, {"step": jnp.asarray(step)})
        if step == 3:
            print("ready", flush=True)
            sys.stdin.readline()
"""


def interrupt(folder: Path, on_interrupt: str) -> tuple[int, str]:
    program = [sys.executable, "-c", PROGRAM, str(folder), on_interrupt]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(program, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate("\n", timeout=120)
    return process.returncode, errors


def test_ctrl_c_saves_and_ends(tmp_path: Path):
    code, errors = interrupt(tmp_path, "save")
    assert code == -signal.SIGINT
    assert "the next save is the last one; press Ctrl-C again to end at once" in errors
    (step,) = Manager(tmp_path, read_only=True).steps()
    assert f"interrupted: step {step} is saved in {tmp_path}" in errors
    assert "preempted" not in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_just_ends_by_default(tmp_path: Path):
    code, errors = interrupt(tmp_path, "raise")
    assert code == -signal.SIGINT
    assert "saved" not in errors
    assert Manager(tmp_path, read_only=True).steps() == []


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path):
    with Manager(tmp_path, on_interrupt="save", on_preemption="continue") as manager:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="^$"):
            signal.raise_signal(signal.SIGINT)
        assert manager.reached_preemption(1)


def test_ctrl_c_after_the_last_save(tmp_path: Path):
    before = signal.getsignal(signal.SIGINT)
    manager = Manager(tmp_path, on_interrupt="save")
    manager.save(1, {"w": jnp.ones(4)})
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="^$"):
        manager.close()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_may_end_itself(tmp_path: Path):
    steps: list[int] = []
    with Manager(tmp_path, on_interrupt="save", on_preemption="continue") as manager:
        for step in range(1, 100):
            if step == 5:
                signal.raise_signal(signal.SIGINT)
            manager.save(step, {"w": jnp.ones(4)})
            steps.append(step)
            if manager.reached_preemption(step):
                break
    assert steps[-1] == manager.latest() == 5


def test_arguments(tmp_path: Path):
    with pytest.raises(ValueError, match='on_interrupt is True; it must be "raise" or "save"'):
        Manager(tmp_path, on_interrupt=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_preemption is False; leave that out"):
        Manager(tmp_path, on_interrupt="save", on_preemption=False)
