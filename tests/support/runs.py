"""Runs of a Manager: their steps, harm to them, and faults at a chosen moment."""

import json
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

import ostraka
from ostraka import Manager
from ostraka.layout import metadata, shard_file
from ostraka.storage import open_store
from ostraka.testing import FaultyStore

LONG_S = 120.0
"""How long a test waits for an event."""


def tree_of(step: int) -> dict[str, Any]:
    return {"a": np.full(8, step), "step": step}


def fill(root: Any, *steps: int, **options: Any) -> None:
    """Save steps, each with its number as the loss."""
    with Manager(root, asynchronous=False, **options) as manager:
        for step in steps:
            manager.save(step, tree_of(step), force=True, metrics={"loss": float(step)})


def damage(root: Any, *steps: int, name: str = ".safetensors") -> None:
    """Change the last byte of the first file of each step whose name ends so."""
    for step in steps:
        place = open_store(root).at(f"step_{step:08d}")
        file = min(file.name for file in place.files("") if file.name.endswith(name))
        data = bytearray(place.get(file))
        data[-1] ^= 1
        place.put(file, bytes(data))


def make_newer(root: Any, step: int) -> None:
    """Let a step be of a newer version of the format, with the digest that it then has."""
    place = open_store(root).at(f"step_{step:08d}")
    document = {**json.loads(place.get("_METADATA")), "version": 3}
    document.pop("digest")
    text = json.dumps(document, separators=(",", ":")).encode()[:-1]
    whole = text + b',"digest":"' + shard_file.digest(text).encode() + b'"}\n'
    assert metadata.metadata_is_intact(whole)
    place.put("_METADATA", whole)


def contents(path: Any) -> dict[str, bytes]:
    """The bytes of each file. Claims and `_RUN` are left out."""
    store = open_store(path)
    names = [f.name for f in store.files("") if not f.name.startswith(("_CLAIM-", "_RUN"))]
    return {name: store.get(name) for name in names}


def steps_in(path: Any) -> list[int]:
    """The steps that a place lists. Each of them must be whole."""
    with Manager(open_store(path), read_only=True) as manager:
        steps = manager.steps()
        for step in steps:
            assert ostraka.verify(manager.path(step)).ok
    return steps


def error_of(call: Callable[[], Any]) -> str:
    """The type and the message of what it raises, or nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class Gate:
    """Holds up a verb of a store, for names that contain `name`, until it is opened."""

    def __init__(self, verb: str, name: str = ""):
        self._verb = verb
        self._name = name
        self._is_reached = threading.Event()
        self._is_open = threading.Event()

    def __call__(self, verb: str, name: str) -> None:
        if verb == self._verb and self._name in name:
            self._is_reached.set()
            assert self._is_open.wait(LONG_S)

    def wait_until_reached(self) -> None:
        assert self._is_reached.wait(LONG_S)

    def open(self) -> None:
        self._is_open.set()


def raises_from(faults: Mapping[str, BaseException]) -> Callable[[str, str], None]:
    """For `FaultyStore(before=…)`: raise the fault that a verb has at the moment."""

    def before(verb: str, name: str) -> None:
        if verb in faults:
            raise faults[verb]

    return before


@contextmanager
def writes_held(path: Any) -> Generator[tuple[FaultyStore, Gate]]:
    """A store in which no block is written before the gate is opened, or the block is left."""
    gate = Gate("write")
    try:
        yield FaultyStore(path, before=gate), gate
    finally:
        gate.open()
