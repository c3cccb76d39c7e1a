"""The store with faults: each fault, and what a save and a restore make of it."""

import errno
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from ostraka.errors import Damaged, SaveFailed
from ostraka.storage import MemoryStore
from ostraka.testing import FaultyStore

TREE = {"w": np.arange(5000)}


def memory() -> MemoryStore:
    return MemoryStore(f"faulty-{uuid.uuid4().hex}")


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("verb", ["create", "write", "finish", "put", "publish", "sync", "files"])
def test_a_save_to_a_store_that_fails(verb: str):
    below = memory()
    ostraka.save(below, TREE)
    with pytest.raises(SaveFailed, match="No space left on device"):
        ostraka.save(FaultyStore(below, fail={verb: no_space()}), {"w": np.zeros(5000)})
    assert np.array_equal(ostraka.restore(below)["w"], TREE["w"])
    assert ostraka.verify(below).ok
    assert len(below.list()) == 2


@pytest.mark.parametrize("verb", ["get", "open", "read_into"])
def test_a_restore_from_a_store_that_fails(verb: str):
    below = memory()
    ostraka.save(below, TREE)
    away = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
    with pytest.raises(OSError, match="No route to host"):
        ostraka.restore(FaultyStore(below, fail={verb: away}))


def test_reads_that_are_cut_short_are_noticed():
    below = memory()
    ostraka.save(below, TREE)
    with pytest.raises(Damaged, match="shard_00000"):
        ostraka.restore(FaultyStore(below, cut_reads_bytes=100))
    assert not ostraka.verify(FaultyStore(below, cut_reads_bytes=100), raises=False).ok


def test_a_store_that_lags_is_only_slow():
    store = FaultyStore(memory(), lag_s=0.001)
    ostraka.save(store, TREE)
    assert np.array_equal(ostraka.restore(store)["w"], TREE["w"])
    assert ("put", "_METADATA") in store.calls


def test_before_is_called_with_the_verb_and_the_file():
    seen: list[tuple[str, str]] = []
    store = FaultyStore(memory(), before=lambda verb, name: seen.append((verb, name)))
    store.prepare()
    store.put("a", b"1")
    store.at("b").put("c", b"2")
    assert seen == store.calls
    assert ("put", "a") in seen
    assert ("put", "b/c") in seen


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_power_failure_at_any_moment_of_a_save(tmp_path: Path, kind: str):
    """What was there before is there, or what has come: never a part of it."""
    number = 0
    while True:
        below: Any = tmp_path / str(number) if kind == "local" else memory()
        ostraka.save(below, {"n": 1, "w": np.full(100, 1)})
        if not fails_at(below, number):
            break
        found = ostraka.restore(below)
        assert set(found["w"].tolist()) == {found["n"]}, number
        assert ostraka.verify(below).ok, number
        number += 1
    assert number > 10


def fails_at(below: Any, number: int) -> bool:
    """Whether the power failed at verb `number` of a save."""
    left = iter(range(number))

    class PowerFailure(OSError):
        pass

    failed = False

    def fail(verb: str, name: str) -> None:
        nonlocal failed
        if next(left, None) is None:
            failed = True
            raise PowerFailure("no power")

    store = FaultyStore(below, before=fail)
    with suppress(SaveFailed, PowerFailure):
        ostraka.save(store, {"n": 2, "w": np.full(100, 2)})
    store.lose_unsynced()
    return failed


def test_what_a_power_failure_undoes():
    store = FaultyStore(memory())
    store.prepare()
    store.put("kept", b"1")
    store.put("gone", b"2")
    store.sync("")
    store.create("d/unsynced", 3).finish()
    store.put("e/put", b"3")
    store.delete("gone")
    store.lose_unsynced()
    # The directory of a file that was put is new, and its own name was not synced.
    assert store.list() == ["gone", "kept"]
    assert store.get("gone") == b"2"
    store.put("e/put", b"3")
    store.sync("")
    store.delete("gone")
    store.sync("")
    store.lose_unsynced()
    assert store.list() == ["e", "kept"]


def test_a_place_without_locks():
    store = FaultyStore(memory(), has_locks=False)
    assert store.lock() is None
