"""Logical shards on several processes: the same batches on any number of them, despite kills."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest

import ostraka
from elastic_data import mixed, row_digests
from figures import Figures
from ostraka.data import ElasticIterator
from ostraka.errors import InvalidSharding, OstrakaError, SaveFailed
from ostraka.testing import preloaded, run_processes

SHARDS, BATCH = 12, 24
CYCLE = (1, 4, 3, 8, 2)


@pytest.fixture(scope="module", autouse=True)
def _with_grain() -> Iterator[None]:
    """To import Grain in each process would be most of what these tests do."""
    with preloaded("jax", "grain.experimental", "ostraka.manager._manager", "ostraka.data"):
        yield


def make_data(count: int) -> ElasticIterator:
    """The mix in logical shards, over all devices of all processes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    where = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))
    return ElasticIterator(
        lambda shard: mixed(shard, SHARDS, count), shards=SHARDS, batch=BATCH, sharding=where
    )


# Kills


def train(root: str, logs: str, count: int) -> int:
    """Take all batches that are left, note the digests of their rows, and save every other one."""
    import jax

    with make_data(count) as data, ostraka.Manager(root, keep=2) as manager:
        if manager.latest() is not None:
            manager.restore(like={"data": data, "step": 0})
        step = data.get_state()["position"]
        name = f"{os.getpid()}-{jax.process_index()}-of-{jax.process_count()}"
        with (Path(logs) / name).open("a", buffering=1) as log:
            for batch in data:
                print(json.dumps([step, row_digests(batch)]), file=log)
                step += 1
                if step % 2 == 0:
                    manager.save(step, {"data": data, "step": step})
            manager.wait()
            print(json.dumps([step, None]), file=log)
    return step


class Journal:
    """The rows of all batches that any process has seen."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._read: dict[Path, int] = {}
        self.rows: dict[int, dict[int, str]] = {}
        self.ends: set[int] = set()
        self.again = 0
        """How many rows were seen again, after a restore or on another process."""

    def update(self) -> bool:
        """Read what is new. Return True if it has batches."""
        has_batches = False
        for file in sorted(self._logs.iterdir()):
            text = file.read_text()
            whole = text[: text.rfind("\n") + 1]
            for line in whole[self._read.get(file, 0) :].splitlines():
                step, rows = json.loads(line)
                if rows is None:
                    self.ends.add(step)
                    continue
                has_batches = True
                known = self.rows.setdefault(step, {})
                for row, digest in rows.items():
                    self.again += int(row) in known
                    assert known.setdefault(int(row), digest) == digest, (step, row, file.name)
            self._read[file] = len(whole)
        return has_batches

    def batches(self) -> list[list[str]]:
        """All batches in order. Every row of each must be known."""
        assert sorted(self.rows) == list(range(len(self.rows)))
        return [[self.rows[step][row] for row in range(BATCH)] for step in range(len(self.rows))]


def kill_all_after(
    victim: int, batches: int, wait_s: float, logs: Path
) -> Callable[[list[subprocess.Popen[bytes]]], None]:
    """Kill a process a while after it has noted so many batches, then the others.

    That is what a scheduler does. Nothing happens if the data ends before.
    """
    before = set(logs.iterdir())

    def has_come(popen: subprocess.Popen[bytes]) -> bool:
        new = [file for file in logs.glob(f"*-{victim}-of-*") if file not in before]
        return popen.poll() is None and any(f.read_text().count("\n") >= batches for f in new)

    def watch(popens: list[subprocess.Popen[bytes]]) -> None:
        while not has_come(popens[victim]):
            if popens[victim].poll() is not None:
                return
            time.sleep(0.005)
        time.sleep(wait_s)
        for popen in (popens[victim], *popens):
            popen.send_signal(signal.SIGKILL)

    def start(popens: list[subprocess.Popen[bytes]]) -> None:
        threading.Thread(target=watch, args=(popens,), daemon=True).start()

    return start


def train_with_kills(
    directory: Path, count: int, cycle: Sequence[int], kills: int, seed: int
) -> tuple[list[list[str]], set[int], dict[str, int]]:
    """Train on one number of processes after the other, each killed, the last to the end."""
    chance = random.Random(seed)
    root, logs = directory / "root", directory / "logs"
    logs.mkdir(parents=True)
    journal = Journal(logs)
    done = {"kills": 0, "killed after a batch": 0, "processes started": 0, "whole passes": 0}
    number = 0
    while True:
        processes = cycle[number % len(cycle)]
        is_last = done["kills"] >= kills and processes == cycle[-1]
        number += 1
        kill = kill_all_after(
            chance.randrange(processes), chance.randrange(8), chance.random() * 0.3, logs
        )
        results = run_processes(
            train,
            str(root),
            str(logs),
            count,
            processes=processes,
            check=is_last,
            timeout_s=900,
            on_start=None if is_last else kill,
        )
        done["processes started"] += processes
        is_killed = any(result.exit_code == -signal.SIGKILL for result in results)
        done["kills"] += is_killed
        done["killed after a batch"] += journal.update() and is_killed
        if any(result.error for result in results):
            raise AssertionError([result.error for result in results])
        if is_last:
            done["rows seen again"] = journal.again
            done["whole passes"] += 1
            return journal.batches(), journal.ends, done
        if not is_killed:  # It came to the end before: once more from the start.
            done["whole passes"] += 1
            shutil.rmtree(root)


def train_undisturbed(directory: Path, count: int) -> list[list[str]]:
    logs = directory / "logs"
    logs.mkdir(parents=True)
    run_processes(train, str(directory / "root"), str(logs), count, processes=1)
    journal = Journal(logs)
    journal.update()
    return journal.batches()


def test_killed_runs_on_other_process_counts_see_the_same_batches(tmp_path: Path):
    expected = train_undisturbed(tmp_path / "whole", 600)
    assert len(expected) > 8
    found, ends, done = train_with_kills(tmp_path / "killed", 600, (1, 3, 2), 2, seed=1)
    assert found == expected
    assert ends == {len(expected)}
    assert done["kills"] >= 2
    assert done["killed after a batch"] >= 1


@pytest.mark.soak
def test_a_hundred_kills(tmp_path: Path, figures: Figures):
    expected = train_undisturbed(tmp_path / "whole", 24_000)
    found, ends, done = train_with_kills(tmp_path / "killed", 24_000, CYCLE, 100, seed=2)
    assert found == expected
    assert ends == {len(expected)}
    assert done["rows seen again"] > 0
    assert done["killed after a batch"] > 50
    figures.add("batches of logical shards compared", len(found))
    for what, count in done.items():
        figures.add(f"elastic data: {what}", count)


# Whose rows are where


class Numbers:
    """The multiples of a shard, up to an end, where it ends or fails."""

    def __init__(self, shard: int, end: int = 20, error: str = ""):
        self.shard, self.end, self.error = shard, end, error
        self.at = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.at == self.end:
            raise OSError(self.error) if self.error else StopIteration
        self.at += 1
        return {"n": np.int32(100 * self.shard + self.at)}

    def get_state(self) -> Any:
        return self.at

    def set_state(self, state: Any) -> None:
        self.at = state


def spread(make: Callable[[int], Any], *split: str, batch: int = 8) -> ElasticIterator:
    """4 shards over 2 processes of 2 devices: rows split by "a" are on one process each."""
    import jax
    from jax.sharding import PartitionSpec

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    return ElasticIterator(make, shards=4, batch=batch, sharding=(mesh, PartitionSpec(split)))


def take(data: ElasticIterator, count: int) -> list[int]:
    """The sums of global batches, computed by all processes together."""
    import jax

    total = jax.jit(lambda n: n.sum())
    return [int(total(batch["n"])) for batch in itertools.islice(data, count)]


SPLITS: dict[tuple[str, ...], list[set[int]]] = {
    ("a",): [{0, 1}, {2, 3}],
    ("b",): [{0, 1, 2, 3}, {0, 1, 2, 3}],
    ("a", "b"): [{0, 1}, {2, 3}],
    ("b", "a"): [{0, 2}, {1, 3}],
    (): [{0, 1, 2, 3}, {0, 1, 2, 3}],
}
"""By the axes that split the rows: the shards of each process."""


def go_through(root: str) -> list[Any]:
    """Save and restore with each way to split the rows. Go back and forth as well."""
    import jax

    found: list[Any] = []
    for number, split in enumerate(SPLITS):
        made: set[int] = set()

        def make(shard: int, made: set[int] = made) -> Numbers:
            made.add(shard)
            return Numbers(shard, end=20 + shard)

        with spread(make, *split) as data, spread(Numbers, *split, batch=4) as odd:
            first = take(data, 3)
            handle = ostraka.save_async(f"{root}/{number}", {"data": data})
            more = take(data, 4)
            handle.wait()
            saved = data.get_state()["states"].keys()
            ostraka.restore(f"{root}/{number}", like={"data": data})
            assert take(data, 4) == more
            ostraka.restore(f"{root}/{number}", like={"data": data})
            assert data.get_state()["position"] == 3
            rest = take(data, 100)
            assert take(data, 100) == []
            assert take(odd, 2) == [sum(100 * k + n for k in range(4)) for n in (1, 2)]
        found.append((made, {int(shard) for shard in saved}, first + rest))
    with pytest.raises(InvalidSharding, match="several processes need sharding=, which says whose"):
        ElasticIterator(Numbers, shards=4, batch=8)
    far = jax.sharding.SingleDeviceSharding(jax.devices()[-1 - jax.process_index()])
    if far.is_fully_addressable:
        return found
    with pytest.raises(
        InvalidSharding, match="process 0 has none of .* iterator on process 1 only"
    ):
        ElasticIterator(Numbers, shards=4, batch=8, sharding=far)
    return found


# Ends and errors


def end_differently(root: str) -> list[Any]:
    import jax

    me = jax.process_index()
    # Process 1 has the shards 2 and 3.
    with spread(lambda k: Numbers(k, end=9 if k == 3 else 50 - k), "a") as data:
        found: list[Any] = [len(take(data, 100)), data.get_state()["position"]]
    for prefetch in (1, 5):
        with spread(lambda k: Numbers(k, 7 if k == 3 else 50, "no disk" * (k == 3)), "a") as data:
            cast(Any, data)._prefetch = prefetch
            found.append(len(take(data, 3)))
            with pytest.raises(Exception, match="no disk") as caught:
                next(data)
            found.append(f"{type(caught.value).__name__}: {caught.value}")

    class Wide(Numbers):
        def __next__(self) -> Any:
            return {"n": np.zeros(me, np.int32)}

    for make, what in ((Wide, "examples"), (Numbers, "position")):
        with spread(make, "a") as data:
            if what == "position":
                other = spread(Numbers, "a").get_state() | {"position": me}
                data.set_state(other)
            with pytest.raises(OstrakaError, match=f"process 1 has {what} ") as caught:
                next(data)
            found.append(str(caught.value))
    with spread(Numbers, "a") as data:
        take(data, 1)
        cast(Any, data)._position += me
        with pytest.raises(SaveFailed, match="process 1 has position 2, that of process 0 has 1"):
            ostraka.save(root, {"data": data})
    mine = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    with ElasticIterator(Numbers, shards=4, batch=8, sharding=mine) as data:
        for _ in range(1 + me):
            next(data)
        cast(Any, data)._position = 1
        with pytest.raises(SaveFailed, match="have another state for shard 0 of an Elastic"):
            ostraka.save(root, {"data": data})
    return found


def end_unclosed() -> None:
    """At the end of a program, a thread in a call of JAX's client would abort it."""
    import jax
    from jax.experimental import multihost_utils

    from ostraka.data import _prepare

    me, let_go = jax.process_index(), threading.Event()

    class Late(Numbers):
        def __next__(self) -> Any:
            if self.at == 3 and me == 1:
                let_go.wait()
            return super().__next__()

    data = spread(Late, "a", batch=4)
    take(data, 1)
    _prepare._end_all()
    names = [thread.name for thread in threading.enumerate()]
    assert "ostraka-data-rounds" not in names
    let_go.set()
    multihost_utils.sync_global_devices("both have ended")


# All in the same two processes


def work_in_two(root: str) -> tuple[list[Any], list[Any]]:
    found = go_through(root), end_differently(f"{root}/c")
    end_unclosed()
    return found


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """Where two processes have saved, and what both found."""
    root = str(tmp_path_factory.mktemp("two"))
    results = run_processes(work_in_two, root, processes=2, devices_per_process=2)
    return root, [result.value for result in results]


def test_each_process_runs_and_saves_its_shards(in_two: tuple[str, list[Any]]):
    root, results = in_two
    alone = ElasticIterator(lambda k: Numbers(k, end=20 + k), shards=4, batch=8)
    expected = take(alone, 100)
    assert len(expected) == 10
    for number, shards in enumerate(SPLITS.values()):
        seen = [found[number] for found, _ in results]
        assert [made for made, _, _ in seen] == shards
        saved = [saved for _, saved, _ in seen]
        assert saved[0] | saved[1] == {0, 1, 2, 3}
        assert saved == [shards[0], shards[1] - shards[0]]
        assert [batches for _, _, batches in seen] == [expected] * 2
        ostraka.restore(f"{root}/{number}", like={"data": alone})
        assert take(alone, 100) == expected[3:]


def test_all_processes_end_and_fail_at_the_same_batch(in_two: tuple[str, list[Any]]):
    (_, first), (_, second) = in_two[1]
    assert first[:2] == second[:2] == [4, 4]
    at = "OstrakaError: no process has batch 3 of the data, because process 1: OSError: no disk"
    assert first[2:6] == [3, at, 3, at]
    assert second[2:6] == [3, "OSError: no disk", 3, "OSError: no disk"]
    assert first[6] == second[6]
    assert "examples n: int32[1], while process 0 has n: int32[0]; all must" in first[6]
    assert "process 1 has position 1, while process 0 has 0; all must have the same" in first[7]
