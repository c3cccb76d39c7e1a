"""What a failed background save keeps in memory: nothing but its error."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from forced import copies_forced
from ostraka.errors import SaveFailed
from ostraka.live import values
from ostraka.testing import FaultyStore

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": {"dtype": "bfloat16"},
    "zstd": {"compress": "zstd"},
    "parity": {"parity": 1},
    "limit": {"max_host_bytes": "64MiB"},
}


def fail_at(path: Path, verb: str, gate: threading.Event | None = None) -> FaultyStore:
    def before(called: str, name: str) -> None:
        if called == verb and name.endswith(".safetensors"):
            assert gate is None or gate.wait(60)
            raise OSError(28, "no space left")

    return FaultyStore(path, before=before)


@pytest.mark.parametrize("verb", ["create", "write", "finish"])
@pytest.mark.parametrize("case", OPTIONS)
def test_the_handle_keeps_no_values(tmp_path: Path, case: str, verb: str):
    made: list[weakref.ref[Any]] = []
    state = {
        "x": jnp.ones((1024, 700)),
        "n": np.ones((1024, 1200)),
        "four": jnp.ones((512, 1001), "int4"),
    }
    made += [weakref.ref(state["x"]), weakref.ref(state["four"])]
    with copies_forced():
        copy = values._host_copy

        def noted(array: Any) -> Any:
            taken = copy(array)
            made.append(weakref.ref(taken))
            return taken

        with patch.object(values, "_host_copy", noted):
            handle = ostraka.save_async(fail_at(tmp_path / "c", verb), state, **OPTIONS[case])
            state.clear()
            while not handle.done():
                threading.Event().wait(0.005)
    gc.collect()
    kept = [ref() for ref in made if ref() is not None]
    assert not kept, [type(one) for one in kept]
    assert len(made) > 3
    with pytest.raises(SaveFailed, match="no space left"):
        handle.wait()


def train(root: ostraka.Manager, seen: list[weakref.ref[Any]], opened: threading.Event) -> None:
    state = {"x": jnp.ones((1024, 700))}
    seen.append(weakref.ref(state["x"]))
    root.save(1, state)
    opened.set()
    while root._pending.is_running():
        threading.Event().wait(0.005)
    root.save(2, state)


def test_a_manager_keeps_none_of_the_frames_that_saw_the_error(tmp_path: Path):
    opened = threading.Event()
    manager = ostraka.Manager(fail_at(tmp_path, "write", opened), every=1)
    seen: list[weakref.ref[Any]] = []
    with pytest.raises(SaveFailed, match="no space left") as caught:
        train(manager, seen, opened)
    del caught
    gc.collect()
    assert seen[0]() is None
    manager.close()
