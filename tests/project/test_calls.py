"""How many Python calls a small save and a small restore make: their cost without the bytes."""

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax.numpy as jnp

import ostraka

PACKAGE = str(Path(ostraka.__file__).parent)
MOST_OWN = 300
MOST_IN_ALL = 500
MOST_MODULES_IN_SAVE = 25
MOST_IN_RESTORE = 550
MOST_MODULES_IN_RESTORE = 35


def count_calls(work: Any) -> Counter[CodeType]:
    """By function, how often all threads call it while `work` runs."""
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def test_a_save_of_one_small_array_makes_few_calls(tmp_path: Path):
    tree = {"w": jnp.ones((8, 8))}
    ostraka.save(tmp_path / "first", tree)  # Imports, and what is worked out once in a program.
    calls = count_calls(lambda: ostraka.save(tmp_path / "second", tree))
    own = {code: n for code, n in calls.items() if code.co_filename.startswith(PACKAGE)}
    most = "\n".join(
        f"{n:4} {Path(code.co_filename).name} {code.co_qualname}"
        for code, n in sorted(own.items(), key=lambda item: -item[1])
    )
    print(f"{len(own)} functions, {sum(own.values())} own calls, {calls.total()} in all")
    assert sum(own.values()) <= MOST_OWN, most
    assert calls.total() <= MOST_IN_ALL, most
    modules = {Path(code.co_filename).relative_to(PACKAGE) for code in own}
    assert len(modules) <= MOST_MODULES_IN_SAVE, sorted(map(str, modules))


def test_a_restore_of_one_small_array_makes_few_calls(tmp_path: Path):
    tree = {"w": jnp.ones((8, 8))}
    ostraka.save(tmp_path, tree)
    ostraka.restore(tmp_path, like=tree)  # Imports, and what is worked out once in a program.
    calls = count_calls(lambda: ostraka.restore(tmp_path, like=tree))
    own = {code: n for code, n in calls.items() if code.co_filename.startswith(PACKAGE)}
    modules = {Path(code.co_filename).relative_to(PACKAGE) for code in own}
    assert sum(own.values()) <= MOST_IN_RESTORE, own
    assert len(modules) <= MOST_MODULES_IN_RESTORE, sorted(map(str, modules))
    assert Path("restoring", "share.py") not in modules
