"""Logical shards on several processes: the same batches on any number of them, despite kills."""

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

import pytest

import ostraka
from elastic_data import mixed, row_digests
from figures import Figures
from ostraka.data import ElasticIterator
from ostraka.testing import preloaded, run_processes

SHARDS, BATCH = 12, 24
CYCLE = (1, 4, 3, 8, 2)


@pytest.fixture(scope="module", autouse=True)
def _with_grain() -> Iterator[None]:
    """To import Grain in each process would be most of what these tests do."""
    with preloaded("jax", "grain.experimental", "ostraka.manager._manager", "ostraka.data"):
        yield


def make_data(count: int, axes: tuple[str, ...] = ("data",), prefetch: int = 2) -> ElasticIterator:
    """The mix in logical shards, over all devices of all processes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    shape = (jax.device_count(),) if len(axes) == 1 else (jax.device_count() // 2, 2)
    mesh = jax.make_mesh(shape, axes)
    sharding = NamedSharding(mesh, PartitionSpec(axes[0]))
    return ElasticIterator(
        lambda shard: mixed(shard, SHARDS, count),
        shards=SHARDS,
        batch=BATCH,
        sharding=sharding,
        prefetch=prefetch,
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
    expected = train_undisturbed(tmp_path / "whole", 1200)
    assert len(expected) > 20
    found, ends, done = train_with_kills(tmp_path / "killed", 1200, (1, 3, 2), 2, seed=1)
    assert found == expected
    assert ends == {len(expected)}
    assert done["kills"] >= 2
    assert done["killed after a batch"] >= 1


@pytest.mark.soak
def test_a_hundred_kills(tmp_path: Path, figures: Figures):
    expected = train_undisturbed(tmp_path / "whole", 8000)
    found, ends, done = train_with_kills(tmp_path / "killed", 8000, CYCLE, 100, seed=2)
    assert found == expected
    assert ends == {len(expected)}
    assert done["rows seen again"] > 0
    assert done["killed after a batch"] > 50
    figures.add("batches of logical shards compared", len(found))
    for what, count in done.items():
        figures.add(f"elastic data: {what}", count)
