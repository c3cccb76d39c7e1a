"""The examples run, and a run that was stopped ends as one that was not."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import ostraka
from nnx_models import bits
from ostraka import sharding
from ostraka.testing import run_processes

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import tiny_transformer  # noqa: E402
import train_processes  # noqa: E402
from tiny_transformer import make_mesh, run  # noqa: E402

FSDP = sharding.fsdp("data", min_size=256)
STRATEGIES = {
    "data parallel": ({"data": 8}, sharding.data_parallel()),
    "fsdp": ({"data": 8}, FSDP),
    "tensor parallel": ({"data": 2, "model": 4}, sharding.tensor_parallel("model") | FSDP),
}
OTHER = {
    "data parallel": ({"data": 2}, sharding.data_parallel()),
    "fsdp": STRATEGIES["tensor parallel"],
    "tensor parallel": ({"data": 1}, FSDP),
}


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Each program is compiled once, for all runs here; the variables do it for other processes."""
    path = str(tmp_path_factory.mktemp("compiled"))
    settings = {
        "jax_compilation_cache_dir": path,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield {name.upper(): str(value) for name, value in settings.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


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
    whole, losses = go(tmp_path / "whole", STRATEGIES[name], 4)
    stopped, first = go(tmp_path / "parts", STRATEGIES[name], 2)
    half = everything(stopped)
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    parts, second = go(tmp_path / "parts", STRATEGIES[name], 4)
    assert [*first, *second] == losses
    assert everything(parts) == everything(whole)
    assert losses[-1] < losses[0]
    # On another mesh: the state bit for bit, the losses as near as other sums come.
    restored, none = go(tmp_path / "other", OTHER[name], 2)
    assert none == []
    assert everything(restored) == half
    _, others = go(tmp_path / "other", OTHER[name], 4)
    assert np.allclose(others, second, rtol=1e-3)


def test_a_killed_run_equals_an_uninterrupted_one(tmp_path: Path, compiled: dict[str, str]):
    """The example as one starts it, killed with SIGKILL after a step that was not saved."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1", **compiled}

    def start(name: str, steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / "train_fsdp.py"), str(tmp_path / name)]
        options = ["--steps", str(steps), "--every", "2"]
        return subprocess.Popen([*command, *options], env=env, stdout=subprocess.PIPE, text=True)

    def finish(name: str, steps: int) -> list[str]:
        with start(name, steps) as process:
            printed, _ = process.communicate()
        assert process.returncode == 0
        return printed.splitlines()

    printed: list[str] = []
    with start("killed", 1_000_000) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if line.startswith("step 3:"):
                process.kill()  # it may take another step or two before it dies
    assert process.returncode == -signal.SIGKILL
    done = len(printed)
    resumed = finish("killed", done + 2)
    whole = finish("whole", done + 2)
    saved = int(resumed[0].removeprefix("resumed after step "))
    assert 2 <= saved <= done
    assert resumed[1:] == whole[saved:]  # its losses, to the last digit that is printed
    found, expected = (ostraka.restore(tmp_path / name) for name in ("killed", "whole"))
    assert bits(found) == bits(expected)


def train_in_processes(path: str) -> tuple[list[float], list[float]]:
    """Four steps at once, and two and two, in the same processes."""
    tiny_transformer.LAYERS = 1
    whole = train_processes.train(f"{path}/whole", 4, 2)
    parts = train_processes.train(f"{path}/parts", 2, 2)
    if jax.process_index() == 0:
        shutil.copytree(f"{path}/parts", f"{path}/half")
    parts += train_processes.train(f"{path}/parts", 4, 2)
    return whole, parts


def test_several_processes(tmp_path: Path, compiled: dict[str, str]):
    results = run_processes(
        train_in_processes,
        str(tmp_path),
        processes=4,
        devices_per_process=2,
        timeout_s=290,
        # Eight processors' worth of programs are compiled on what cores there are: in a hurry.
        env={**compiled, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    for result in results:
        whole, parts = result.value
        assert len(whole) == 4
        assert parts == whole
    found, expected = (ostraka.restore(tmp_path / name) for name in ("parts", "whole"))
    assert bits(found) == bits(expected)
    # What 4 processes have saved, this one restores, on a mesh of its own, and goes on.
    mesh = make_mesh(data=2, model=4)
    _, losses = run(tmp_path / "half", mesh, FSDP, steps=4, keep_data=False, say=lambda line: None)
    assert np.allclose(losses, results[0].value[0][2:], rtol=1e-3)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("t*.py")), ids=lambda file: file.name)
def test_each_can_be_read_in_one_sitting(file: Path):
    assert len(file.read_text("utf-8").splitlines()) < 150
