"""A process is stopped while it deletes, copies or saves, and goes on after another took over.

The moments are random. The worker is a real process that gets SIGSTOP; the other writer is this
one. Whatever the worker was about to do, the checkpoint that this process has committed meanwhile
is intact afterwards.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from figures import Figures
from ostraka.errors import Busy, OstrakaError
from ostraka.storage import is_claim, open_store
from ostraka.testing import FaultyStore
from suspended import hurry

LONG_S = 120.0
OPERATIONS = (
    *("rm", "retention", "gc", "save", "failed save"),
    *("rm of a copy", "gc of a copy", "copy", "repair"),  # The other may make the same again.
)
COPIED, OLD, NEWER, OF_THE_WORKER = 2, 1, 5, 9
LOOK_EVERY_S = 0.02
ON_DISK_S, IN_BUCKETS_S = (0.05, 0.3), (0.3, 4.5)
"""How often claims are renewed, and when they are dead. Signed requests end at whole seconds."""


def tree_of(number: int) -> dict[str, Any]:
    return {"w": np.full(1000, number), "v": np.full((3, 5), number), "number": number}


# The worker: reads what to do, line by line, and says when it has claimed something


def work(renew_every_s: float, dead_after_s: float) -> None:
    hurry(pytest.MonkeyPatch(), renew_every_s, dead_after_s, LOOK_EVERY_S)
    ostraka.save("memory://warm", tree_of(0))
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        begun_s = time.monotonic()
        outcome = "returned"
        try:
            _do(order["what"], order["path"], order["beside"], _slow_store(order))
        except OstrakaError as error:
            outcome = f"{type(error).__name__}: {error}"
        except OSError as error:
            outcome = f"wrong: {type(error).__name__}: {error}"
        took_s = time.monotonic() - begun_s
        print(json.dumps({"outcome": outcome, "took_s": took_s}), flush=True)


def _slow_store(order: Any) -> Callable[[str], FaultyStore]:
    """Says "claims" before the first claim: what is to be done has been decided by then."""
    rng = random.Random(order["seed"])
    begun = False

    def before(verb: str, name: str) -> None:
        nonlocal begun
        if not begun and (verb == "lock" or (verb == "touch" and "_CLAIM-" in name)):
            begun = True
            print("claims", flush=True)
        if rng.random() < 0.5 or verb == "remove":
            # Mostly between the check of a claim and the deletion: the worst moment to be stopped.
            time.sleep(rng.uniform(0, order["lag_s"] * (10 if verb == "remove" else 1)))
        if verb == "finish" and order["what"] == "failed save":
            raise OSError(5, "Input/output error")

    return lambda path: FaultyStore(path, has_locks=order["locks"], before=before)


def _do(what: str, path: str, beside: str, slow: Callable[[str], FaultyStore]) -> None:
    from ostraka.manager._arguments import check_count
    from ostraka.manager._keep import check_keep
    from ostraka.manager.retain import Retention, remove_step
    from ostraka.manager.steps import Root
    from ostraka.saving.place import collect_garbage

    root, _, name = path.rpartition("/")
    if what.startswith("rm"):
        remove_step(Root(slow(root)), int(name), even_if_read=True)
    elif what == "retention":
        keep = check_keep(check_count("keep", 1), None, None, None, None)
        Retention(Root(slow(root)), keep).run(just_saved=int(name) + 1)
    elif what.startswith("gc"):
        collect_garbage(slow(path))
    elif what == "copy":
        ostraka.copy(beside, slow(path))
    elif what == "repair":
        ostraka.repair(slow(path), sources=beside)
    else:
        ostraka.save(slow(path), tree_of(OF_THE_WORKER))


class Worker:
    def __init__(self, log: Path, times_s: tuple[float, float]):
        program = f"import test_claim_stops as t; t.work(*{times_s})"
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._read() == "ready", log.read_text()

    def begin(self, **order: Any) -> bool:
        """Returns whether it claims something; else it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._last = self._read()
        return self._last == "claims"

    def finish(self) -> tuple[str, float]:
        line = self._read() if self._last == "claims" else self._last
        found = json.loads(line)
        return found["outcome"], found["took_s"]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass
class Place:
    """Where a kind of trial runs."""

    path: str
    locks: bool
    lag_s: float
    times_s: tuple[float, float]

    @property
    def is_disk(self) -> bool:
        return "://" not in self.path

    def store(self, path: str) -> Any:
        return FaultyStore(path, has_locks=self.locks)


def prepare(what: str, path: str, beside: str) -> None:
    """Have something to delete at `path`, and what an operation needs `beside` it."""
    root, _, name = path.rpartition("/")
    if what in ("copy", "gc of a copy"):
        # What a copy that died has left: one file of another size, one cut short, none committed.
        ostraka.save(beside, tree_of(COPIED))
        source, target = open_store(beside), open_store(path)
        target.prepare()
        for file in source.files("shards-"):
            data = source.get(file.name)
            put(target, file.name, data[: len(data) // 2] if what == "copy" else data)
        return
    if what == "retention":
        ostraka.save(f"{root}/{int(name) + 1}", tree_of(3))
    ostraka.save(path, tree_of(OLD))
    if what == "gc":
        put(open_store(path), f"shards-{'ab' * 8}/left.safetensors", b"left")
    if what in ("rm of a copy", "repair"):
        ostraka.copy(path, beside)
    if what == "repair":
        store = open_store(path)
        file = next(f.name for f in store.files("shards-") if f.name.endswith(".safetensors"))
        data = bytearray(store.get(file))
        data[-1] ^= 1
        store.delete(file)
        put(store, file, bytes(data))
        put(store, f"{file}.{'0' * 32}.tmp", b"left by a repair")


def put(store: Any, name: str, data: bytes) -> None:
    writer = store.create(name, len(data))
    writer.write(0, [data])
    writer.finish()


def take_over(place: Place, path: str, beside: str, *, same: bool, worker: Worker) -> bool:
    """Commit a newer checkpoint; returns whether the worker stood still until then."""
    end_s = time.monotonic() + LONG_S
    gave_up_s = time.monotonic() + 2 * place.times_s[1]
    stopped = True
    while True:
        try:
            if same:
                ostraka.copy(beside, place.store(path))
            else:
                ostraka.save(place.store(path), tree_of(NEWER))
            return stopped
        except Busy:
            # A lock is held by a process that stands still: it is never taken over.
            assert time.monotonic() < end_s
            if place.locks and time.monotonic() > gave_up_s:
                stopped = False
                worker.go_on()
            time.sleep(0.02)


def found_at(path: str) -> int | str:
    try:
        if not ostraka.verify(path, raises=False).ok:
            return "damaged"
        tree = ostraka.restore(path)
    except OstrakaError as error:
        return f"{type(error).__name__}: {error}"
    (number,) = {int(tree["number"]), *np.unique(tree["w"]).tolist(), *np.unique(tree["v"])}
    return int(number)


def run_trial(
    place: Place, number: int, what: str, worker: Worker, usual_s: dict[str, float], *, stop: bool
) -> tuple[str, str]:
    """One trial; returns what became of it, and what is wrong, or nothing."""
    path, beside = f"{place.path}/{number}/7", f"{place.path}/{number}-beside"
    prepare(what, path, beside)
    claims = worker.begin(
        what=what, path=path, beside=beside, seed=number, lag_s=place.lag_s, locks=place.locks
    )
    if not stop:
        outcome, took_s = worker.finish()
        usual_s[what] = max(usual_s.get(what, 0.0), took_s)
        return "measured", "" if claims and not outcome.startswith(
            "wrong"
        ) else f"{what}: {outcome}"
    time.sleep(random.uniform(0, usual_s[what]))
    worker.stop()
    claims_then = set(filter(is_claim, open_store(path).list()))
    # The same source again makes the very checkpoint that the worker deletes, copies or repairs.
    same = what in ("rm of a copy", "gc of a copy", "copy", "repair") and random.random() < 0.7
    stood_still = take_over(place, path, beside, same=same, worker=worker)
    held = bool(claims_then) and claims_then.isdisjoint(open_store(path).list())
    worker.go_on()
    outcome, _ = worker.finish()
    found = found_at(path)
    if same and what == "rm of a copy" and not held:
        # All was there still, and the copy had nothing to do: then it is the worker's to delete.
        return "not taken over", ""
    wanted = [NEWER if not same else COPIED if what in ("copy", "gc of a copy") else OLD]
    if what == "save" and outcome == "returned":  # It may have begun after this one was done.
        wanted.append(OF_THE_WORKER)
    wrong = "" if found in wanted and not outcome.startswith("wrong") else "!"
    verdict = "taken over" if held and stood_still else "not taken over"
    for old in (f"{place.path}/{number}", beside):
        if not place.is_disk:
            open_store(old).delete("")
        else:
            shutil.rmtree(old, ignore_errors=True)
    return verdict, wrong and f"{what}, same {same}: {found}, while the worker {outcome}"


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> Place:
    if kind in ("moto", "seaweed"):
        bucket = request.getfixturevalue("new_bucket")(kind)
        return Place(str(bucket), True, 0.02, IN_BUCKETS_S)
    return Place(str(tmp_path / "places"), kind == "disk with locks", 0.02, ON_DISK_S)


@pytest.fixture
def workers(tmp_path: Path, place: Place) -> Iterator[list[Worker]]:
    """In a bucket several at once: most of the time is spent waiting for claims to expire."""
    count = 1 if place.is_disk else 6
    workers = [Worker(tmp_path / f"worker{n}.log", place.times_s) for n in range(count)]
    yield workers
    for worker in workers:
        worker.close()


ROUNDS = {"disk with locks": 200, "disk without locks": 240, "moto": 240, "seaweed": 60}


@pytest.mark.soak
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_a_process_that_is_stopped_at_any_moment_deletes_nothing_newer(
    kind: str,
    place: Place,
    workers: list[Worker],
    monkeypatch: pytest.MonkeyPatch,
    figures: Figures,
):
    hurry(monkeypatch, *place.times_s, LOOK_EVERY_S)
    rounds = ROUNDS[kind]
    usual_s: dict[str, float] = {}

    def trials(worker: Worker, numbers: range) -> list[tuple[str, str]]:
        return [
            run_trial(
                *(place, n + 100, OPERATIONS[n % len(OPERATIONS)], worker, usual_s), stop=n >= 0
            )
            for n in numbers
        ]

    found = trials(workers[0], range(-2 * len(OPERATIONS), 0))
    parts = [range(first, rounds, len(workers)) for first in range(len(workers))]
    with ThreadPoolExecutor(len(workers)) as pool:
        for results in pool.map(trials, workers, parts):
            found += results
    verdicts = Counter(verdict for verdict, _ in found)
    faults = [wrong for _, wrong in found if wrong]
    print(kind, dict(verdicts), usual_s, Counter(fault.split(":")[0] for fault in faults))
    assert not faults, f"{len(faults)} of {rounds}: {faults[:10]}"
    figures.add("processes stopped while they delete, copy, repair or save", rounds)
    figures.add("of them taken over meanwhile", verdicts["taken over"])
