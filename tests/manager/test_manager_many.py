"""Many steps: one scan, a number of calls that grows as they do, and no save that waits."""

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import ostraka
from ostraka import Manager
from ostraka.manager._keep import check_keep
from ostraka.manager.leases import Lease
from ostraka.manager.retain import Retention
from ostraka.manager.steps import Root
from ostraka.storage import Traits
from ostraka.testing import FaultyStore
from programs import run_quietly
from proxies import proxied
from runs import LONG_S, Gate
from servers import Server

KEEP_ONE = check_keep(1, None, None, None, None)


def fill(root: Path, steps: int) -> None:
    """Copies of one step, which take less time than saves."""
    first = root / "step_00000001"
    ostraka.save(first, {"a": np.arange(8)})
    for step in range(2, steps + 1):
        shutil.copytree(first, root / f"step_{step:08d}")


def lease(root: Path, number: int, kind: str, step: int, backlog: int = 4) -> None:
    (root / f"_LEASE-host.{number}.0a-backlog-{backlog}-{kind}-{step}").touch()


def reads(store: FaultyStore) -> int:
    return sum(verb == "get" and name.endswith("_METADATA") for verb, name in store.calls)


def retain(root: Path, steps: int, leases: int) -> Counter[str]:
    """How often each verb was called to delete all steps but one, or but what readers want."""
    fill(root, steps)
    for number in range(leases):
        lease(root, number, "step", 1 + number * steps // leases)
    store = FaultyStore(root)
    Retention(Root(store), KEEP_ONE).run(just_saved=steps)
    assert reads(store) == steps
    left = [step.step for step in Root(root).steps()]
    assert len(left) == (1 if not leases else min(steps, 5 * leases + 1))
    return Counter(
        f"{verb} of the root" if not name else verb for verb, name in store.calls
    ) + Counter(total=len(store.calls))


@pytest.mark.parametrize("leases", [0, 8])
def test_retention_makes_as_many_calls_for_each_step(leases: int):
    """From 48 steps to 96 it grows as from 96 to 144: neither scans nor listings for each."""
    with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        counts = [retain(Path(root, str(steps)), steps, leases) for steps in (48, 96, 144)]
    first, second = (after["total"] - before["total"] for before, after in pairwise(counts))
    assert second <= first * 1.1
    assert first <= 48 * 24
    # A listing for each 32 steps that are claimed together.
    assert counts[2]["list of the root"] <= 144 // 32 + 8


def test_the_steps_that_a_lease_covers():
    there = [1, 3, 5, 7, 9]
    assert Lease("", "", 3, True, 2).covered(there) == {3, 5, 7}
    assert Lease("", "", 4, True, 2).covered(there) == {4, 5, 7}
    assert Lease("", "", 3, False, 2).covered(there) == {3, 5}
    assert Lease("", "", 3, False, 0).covered(there) == {3}
    assert Lease("", "", 3, True, 0).covered(there) == {3}
    assert Lease("", "", 10, False, 10**30).covered(there) == set()
    assert Lease("", "", 3, True, 4).covered(()) == {3}


def test_a_manager_that_opens_reads_one_step(tmp_path: Path):
    fill(tmp_path, 40)
    store = FaultyStore(tmp_path)
    with Manager(store, on_preemption=False) as manager:
        assert reads(store) == 1
        assert manager.latest() == 40
        assert manager.restore()["a"].shape == (8,)
        manager.save(41, {"a": np.arange(8)})
    assert reads(store) < 10


def test_a_save_looks_again_only_at_what_the_decision_depends_on(tmp_path: Path):
    fill(tmp_path, 60)
    store = FaultyStore(tmp_path)
    options: Any = {"keep": 2, "keep_every": 1, "asynchronous": False, "on_preemption": False}
    with Manager(store, **options) as manager:
        manager.save(61, {"a": np.arange(8)})
        manager.save(62, {"a": np.arange(8)})
        store.calls.clear()
        manager.save(63, {"a": np.arange(8)})
        old = [name for _, name in store.calls if name.startswith("step_000000")]
        assert not [name for name in old if name.split("/")[0] < "step_00000061"]
        assert len(manager.steps()) == 63


def test_requests_grow_as_steps_do(
    servers: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Locks are renewed by time, which would make the number of requests depend on it.
    monkeypatch.setattr("ostraka.storage._claim._start_timer", lambda: None)
    server = servers("moto")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    totals: list[int] = []
    with proxied(int(server.endpoint.rpartition(":")[2])) as proxy:
        for steps in (2, 6, 10):
            fill(tmp_path / str(steps), steps)
            root = f"{server.url}/many-{steps}"
            ostraka.copy(tmp_path / str(steps), root)
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
            before = proxy.requests.total()
            with Manager(root, keep=1, on_preemption=False) as manager:
                manager.save(steps + 1, {"a": np.arange(8)})
            totals.append(proxy.requests.total() - before)
            assert Manager(root, read_only=True).steps() == [steps + 1]
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    assert totals[2] - totals[1] <= (totals[1] - totals[0]) * 1.2
    # 35 a step: a signed DELETE for each object, and the marker's time before each deletion.
    assert totals[2] - totals[1] <= 4 * 36


# No save waits


def held_up(root: Path) -> tuple[Gate, FaultyStore]:
    """A root whose deletions of `_METADATA` wait until they are let go."""
    gate = Gate("delete", "/_METADATA")
    return gate, FaultyStore(root, before=gate)


def retaining(store: FaultyStore, gate: Gate, step: int, **options: Any) -> Manager:
    """A manager whose retention has begun after it has saved this step."""
    manager = Manager(store, on_preemption=False, **{"keep": 1, **options})
    manager.save(step, {"a": np.full(8, step)})
    gate.wait_until_reached()
    return manager


def test_no_save_waits_for_retention(tmp_path: Path):
    fill(tmp_path, 12)
    gate, store = held_up(tmp_path)
    manager = retaining(store, gate, 13, keep=2)
    for step in (14, 15):
        manager.save(step, {"a": np.full(8, step)})
    manager._pending.wait()
    assert manager.latest() == 15
    assert len(manager.steps()) == 15
    gate.open()
    manager.wait()
    assert manager.steps() == [14, 15]
    manager.close()


@pytest.mark.parametrize("end", ["restore", "close", "wait", "save"])
def test_who_waits_for_a_step_waits_for_retention(tmp_path: Path, end: str):
    """So does the save of a step that is being deleted, and its step is not deleted."""
    fill(tmp_path, 4)
    gate, store = held_up(tmp_path)
    manager = retaining(store, gate, 5)
    threading.Timer(0.05, gate.open).start()
    if end == "save":
        manager.save(2, {"a": np.full(8, 2)}, force=True)
        manager.wait()
        assert manager.restore(2)["a"][0] == 2
    else:
        getattr(manager, end)()
    expected = [2, 5] if end == "save" else [5]
    assert [step.step for step in Root(tmp_path).steps()] == expected
    manager.close()


def test_a_step_that_is_pinned_or_replaced_while_it_waits_is_spared(tmp_path: Path):
    fill(tmp_path, 5)
    root = Root(FaultyStore(tmp_path, before=None))

    def change(_: Any) -> tuple[int, ...]:
        (tmp_path / "step_00000002" / "_PINNED").touch()
        metadata = tmp_path / "step_00000003" / "_METADATA"
        data = metadata.read_bytes()
        metadata.unlink()
        metadata.write_bytes(data)
        return ()

    Retention(root, KEEP_ONE, held=change).run(just_saved=5)
    assert [step.step for step in Root(tmp_path).steps()] == [2, 3, 5]


def test_a_step_that_was_damaged_since_does_not_count(tmp_path: Path):
    """What is known of kept steps may be old: they are looked at before others are deleted."""
    with Manager(tmp_path, keep=3, asynchronous=False, on_preemption=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"a": np.full(8, step)})
        (tmp_path / "step_00000002" / "_METADATA").write_text("broken")
        manager.save(4, {"a": np.full(8, 4)})
        assert manager.steps() == [1, 3, 4]


def test_a_function_of_retention_cannot_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def wait(_: Any) -> bool:
        manager.wait()
        return True

    manager = Manager(tmp_path, keep_if=wait, on_preemption=False)
    manager.save(1, {"a": np.arange(8)})
    manager.close()
    assert "keep_if is a part of retention, and can't wait for it" in caplog.text


PROGRAM = """
import sys
import numpy as np
import ostraka

manager = ostraka.Manager(sys.argv[1], keep=1, on_preemption=False)
manager.save(1000, {"a": np.arange(8)})
"""


def test_the_end_of_a_program_waits_for_retention(tmp_path: Path):
    fill(tmp_path, 40)
    assert run_quietly(PROGRAM, tmp_path) == ""
    assert [step.step for step in Root(tmp_path).steps()] == [1000]


def test_a_bucket_is_asked_many_things_at_a_time(tmp_path: Path):
    fill(tmp_path, 12)
    together = threading.Barrier(3)

    def before(verb: str, name: str) -> None:
        if verb == "get" and name.endswith("_METADATA"):
            together.wait(LONG_S)

    traits = Traits(is_remote=True, reads_at_once=3)
    steps = Root(FaultyStore(tmp_path, before=before, traits=traits)).steps()
    assert [step.step for step in steps] == list(range(1, 13))
