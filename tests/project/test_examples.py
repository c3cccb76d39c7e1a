"""The examples run, and a run that was stopped ends as one that was not."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from nnx_models import bits
from ostraka import sharding
from ostraka.testing import run_processes

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import tiny_transformer  # noqa: E402
import train_processes  # noqa: E402
from tiny_transformer import make_mesh, run  # noqa: E402

FSDP = sharding.fsdp("data", min_size=256)
DATA_PARALLEL = sharding.data_parallel()
STRATEGIES = {
    "data parallel, then fsdp": (({"data": 8}, DATA_PARALLEL), ({"data": 8}, FSDP)),
    "tensor parallel and fsdp, then data parallel": (
        ({"data": 2, "model": 4}, sharding.tensor_parallel("model") | FSDP),
        ({"data": 1}, DATA_PARALLEL),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_cache: str) -> dict[str, str]:
    """Each program is compiled once, for all runs here; the variables do it for other processes."""
    return {
        "JAX_COMPILATION_CACHE_DIR": compile_cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer compiles in half the time of two."""
    monkeypatch.setattr(tiny_transformer, "LAYERS", 1)


def go(path: Path, strategy: tuple[dict[str, int], Any], steps: int) -> tuple[Any, list[float]]:
    sizes, rules = strategy
    return run(path, make_mesh(**sizes), rules, steps=steps, every=2, say=lambda line: None)


def everything(state: dict[str, Any]) -> Any:
    """Parameters, moments, counters, random numbers, and how far the data has been read."""
    return bits((state["model"], state["optimizer"])), state["data"].get_state()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str):
    strategy, other = STRATEGIES[name]
    whole, losses = go(tmp_path / "whole", strategy, 4)
    stopped, first = go(tmp_path / "parts", strategy, 2)
    half = everything(stopped)
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    parts, second = go(tmp_path / "parts", strategy, 4)
    assert [*first, *second] == losses
    assert everything(parts) == everything(whole)
    assert losses[-1] < losses[0]
    # On another mesh: the state bit for bit, the losses as near as other sums come.
    restored, none = go(tmp_path / "other", other, 2)
    assert none == []
    assert everything(restored) == half
    _, others = go(tmp_path / "other", other, 4)
    assert np.allclose(others, second, rtol=1e-3)


DIES_AFTER_STEP_3 = """
import builtins, os, runpy, signal, sys

say = builtins.print

def say_and_die(line):
    say(line, flush=True)
    if line.startswith("step 3:"):
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = say_and_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path, compiled: dict[str, str]):
    """The example as one starts it, killed with SIGKILL after a step that was not saved."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), **compiled}

    def start(name: str, *python: str) -> tuple[int, list[str]]:
        program = [sys.executable, *python, str(EXAMPLES / "train_fsdp.py")]
        options = [str(tmp_path / name), "--steps", "5", "--every", "2"]
        done = subprocess.run(
            [*program, *options], env=env, stdout=subprocess.PIPE, text=True, check=False
        )
        return done.returncode, done.stdout.splitlines()

    code, whole = start("whole")
    assert (code, len(whole)) == (0, 5)
    code, killed = start("killed", "-c", DIES_AFTER_STEP_3)
    assert (code, killed) == (-signal.SIGKILL, whole[:3])
    code, resumed = start("killed")
    # The losses of the uninterrupted run, to the last digit that is printed.
    assert (code, resumed) == (0, ["resumed after step 2", *whole[2:]])
    found, expected = (ostraka.restore(tmp_path / name) for name in ("killed", "whole"))
    assert bits(found) == bits(expected)


def train_in_processes(path: str) -> tuple[list[float], list[float]]:
    """Four steps, and the last two of them again from a copy of the checkpoint after two."""
    tiny_transformer.LAYERS = 1

    def keep_a_copy(line: str) -> None:
        if line.startswith("step 3:"):
            for name in ("resumed", "elsewhere"):
                shutil.copytree(f"{path}/whole", f"{path}/{name}")

    whole = train_processes.train(f"{path}/whole", 4, 2, keep_a_copy)
    return whole, train_processes.train(f"{path}/resumed", 4, 2)


def test_several_processes(tmp_path: Path, compiled: dict[str, str]):
    results = run_processes(
        train_in_processes,
        str(tmp_path),
        processes=2,
        devices_per_process=4,
        timeout_s=800,
        # Eight processors' worth of programs are compiled on what cores there are: in a hurry.
        env={**compiled, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    for result in results:
        whole, resumed = result.value
        assert len(whole) == 4
        assert resumed == whole[2:]
    found, expected = (ostraka.restore(tmp_path / name) for name in ("resumed", "whole"))
    assert bits(found) == bits(expected)
    # What 2 processes have saved, this one restores, on a mesh of its own, and goes on.
    mesh, quiet = make_mesh(data=8), {"keep_data": False, "say": lambda line: None}
    _, losses = run(tmp_path / "elsewhere", mesh, FSDP, steps=4, **quiet)
    assert np.allclose(losses, results[0].value[0][2:], rtol=1e-3)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("t*.py")), ids=lambda file: file.name)
def test_each_can_be_read_in_one_sitting(file: Path):
    assert len(file.read_text("utf-8").splitlines()) < 150
