"""Saves and downloads that replace a checkpoint while others read it."""

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import save

import ostraka
from ostraka.formats.source_files import TICK_NS
from ostraka.storage import open_store
from places import Place

# The forms that `convert` writes, and what a target of each may be called.
TARGETS = {
    "ostraka": "out",
    "orbax": "out",
    "safetensors": "out.safetensors",
    "hf": "out",
    "npz": "out.npz",
}


@contextmanager
def replaced_once(path: Place, tree: Any, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Another save commits just before the first shard file is opened."""
    kind: Any = type(open_store(path))
    real = kind.open

    def replace_first(self: Any, name: str, *options: Any) -> Any:
        monkeypatch.setattr(kind, "open", real)
        ostraka.save(path, tree)
        return real(self, name, *options)

    monkeypatch.setattr(kind, "open", replace_first)
    yield
    assert kind.open is real, "nothing was read"


SAVE_IN_A_LOOP = """
import sys
from itertools import count
import numpy as np
import ostraka
path, how = sys.argv[1:]
manager = ostraka.Manager(path, keep=1, asynchronous=False) if how == "steps" else None
for number in count():
    tree = {"x": np.full(50_000, number), "y": np.full(50_000, number)}
    if manager is None:
        ostraka.save(path, tree)
    else:
        manager.save(number, tree)
    if number == 2:
        print("ready", flush=True)
"""


@contextmanager
def saving_in_a_loop(path: Place, how: Literal["over", "steps"] = "over") -> Generator[None]:
    """A process that saves over and over again to one path, or steps of which it keeps one."""
    command = [sys.executable, "-c", SAVE_IN_A_LOOP, str(path), how]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as saver:
        assert saver.stdout is not None
        assert saver.stdout.readline() == "ready\n"
        try:
            yield
            assert saver.poll() is None
        finally:
            saver.kill()


MODEL_FILES = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
HOWS = ("renamed over", "in place", "in place, with its old time", "copied with its old time")
"""How a file of a model is replaced by one of the same size."""


def model_bytes(number: int, value: float, elements: int = 2048) -> bytes:
    """A file of a model whose every element is `value`."""
    return save({f"k{number + 1}": np.full((16, elements // 16), value, np.float32)})


def write_model(path: Place, value: float, elements: int = 2048) -> None:
    """Write a model of four files, or replace it one file after the other."""
    path.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(MODEL_FILES):
        data = model_bytes(number, value, elements)
        if isinstance(path, Path):
            change_file(path / name, data)
        else:
            (path / name).write_bytes(data)


def change_file(file: Path, data: bytes, how: str = "renamed over") -> None:
    if how.startswith("in place"):
        before = file.stat()
        with open(file, "r+b") as opened:
            opened.write(data)
        if how.endswith("time"):
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        return
    beside = file.with_name(f".{file.name}.part")
    beside.write_bytes(data)
    if how.endswith("time"):
        before = file.stat()
        os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(beside, file)


REPLACE_IN_A_LOOP = """
import os, random, sys, time
from pathlib import Path
model, contents, how, seed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
rng = random.Random(seed)
changes = os.open(contents / "changes", os.O_WRONLY | os.O_APPEND)
def note():
    os.write(changes, time.monotonic_ns().to_bytes(8, "little"))
names = sorted(path.name for path in (contents / "1.0").iterdir())
for number in range(10**9):
    value = ("2.0", "1.0")[number % 2]
    ready = {}
    for name in names if how == "all renamed over" else ():
        ready[name] = model / f".{name}.part"
        ready[name].write_bytes((contents / value / name).read_bytes())
    for name in names:
        data = (contents / value / name).read_bytes()
        if how == "each renamed over":
            ready[name] = model / f".{name}.part"
            ready[name].write_bytes(data)
        before = os.stat(model / name)
        note()
        if name in ready:
            os.replace(ready[name], model / name)
        else:
            with open(model / name, "r+b") as file:
                file.write(data)
            if how == "in place, with its old time":
                os.utime(model / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        note()
    if number == 0:
        print("ready", flush=True)
    time.sleep(rng.uniform(0, 0.15))
"""
LOOPS = ("all renamed over", "each renamed over", "in place", "in place, with its old time")


class Replacing:
    """What a process that replaces the files of a model, in their order, has done."""

    def __init__(self, changes: Path):
        self._changes = changes

    def stood_still(self, found: list[float], since_ns: int) -> bool:
        """Whether the files may have been as they were found, for at least a tick of the clock."""
        data = self._changes.read_bytes()
        times = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
        for number in range((len(times) + 1) // 2):  # the last may be under way
            # Times are noted before and after each change, which is at any moment between them.
            begin = times[2 * number]
            end = times[2 * number + 3] if 2 * number + 3 < len(times) else time.monotonic_ns()
            replaced, value = number % len(found) + 1, 2.0 - number // len(found) % 2
            state = [value] * replaced + [3.0 - value] * (len(found) - replaced)
            if state == found and end > since_ns and end - begin >= TICK_NS:
                return True
        return False


@contextmanager
def replacing_in_a_loop(model: Path, how: str, elements: int = 1 << 18) -> Generator[Replacing]:
    """A process that replaces the files of a model by those of another, and back."""
    contents = model.with_name("contents")
    for value in (1.0, 2.0):
        write_model(contents / str(value), value, elements)
    write_model(model, 1.0, elements)
    changes = contents / "changes"
    changes.touch()
    command = [sys.executable, "-c", REPLACE_IN_A_LOOP, str(model), str(contents), how, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replacer:
        assert replacer.stdout is not None
        assert replacer.stdout.readline() == "ready\n"
        try:
            yield Replacing(changes)
            assert replacer.poll() is None
        finally:
            replacer.kill()
