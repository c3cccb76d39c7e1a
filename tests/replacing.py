"""Saves that replace a checkpoint while others read it."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import pytest

import ostraka
from ostraka.storage import open_store
from places import Place


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
