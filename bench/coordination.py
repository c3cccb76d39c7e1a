"""How the coordination of a save grows with the number of processes.

    python -m bench.coordination [PROCESSES ...]

Light clients on one real coordination service of JAX's, each with the real `Operation`, as threads
of several programs; process 0 has a program of its own, in which the service lives as well. For
each number of processes there are saves without anything to write, and one that takes `LONG_S`
longer. Writes `bench/results/coordination.json` and the table in `docs/maintainers/benchmarks.md`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from ostraka.processes.operation import Operation
from ostraka.processes.service import Member
from ostraka.testing import free_port

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "coordination.json"
PAGE = ROOT / "docs" / "maintainers" / "benchmarks.md"
TABLE_BEGINS = "<!-- coordination-table -->\n"
TABLE_ENDS = "<!-- /coordination-table -->\n"
PROCESSES = (8, 32, 128, 512, 1024)
PROGRAMS = 4
ROUNDS = 5
LONG_S = 10.0
HOST_LEAVES = 20
LIMIT_S = 3.0
"""For agreeing and committing, with 1,024 processes."""


class CountingClient:
    """A client that counts its calls."""

    def __init__(self, client: Any):
        self._client = client
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return method(*args, **options)

        return call


def _runtime() -> Any:
    """The part of jaxlib that makes services and clients, which JAX keeps private."""
    return import_module("jax._src.lib")._jax


@contextmanager
def serve(port: int, count: int) -> Generator[None]:
    """JAX's coordination service, for so many processes."""
    service = _runtime().get_distributed_runtime_service(
        f"[::]:{port}", count, heartbeat_timeout=100, shutdown_timeout=60
    )
    try:
        yield
    finally:
        service.shutdown()


@contextmanager
def connect(port: int, numbers: Iterable[int], count: int) -> Generator[list[Member]]:
    """Some of the `count` processes; all must come, and leave, at about the same time."""
    runtime = _runtime()
    clients = {
        number: runtime.get_distributed_runtime_client(
            f"localhost:{port}",
            number,
            init_timeout=120,
            shutdown_timeout=60,
            heartbeat_timeout=100,
            use_compression=True,
        )
        for number in numbers
    }
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(lambda client: client.connect(), clients.values()))
        try:
            counting: dict[int, Any] = {n: CountingClient(c) for n, c in clients.items()}
            yield [Member(number, count, client) for number, client in counting.items()]
        finally:
            list(pool.map(lambda client: client.shutdown(), clients.values()))


@contextmanager
def many_members(count: int) -> Generator[list[Member]]:
    """All in this program; `member.client.calls` has their calls."""
    port = free_port()
    with serve(port, count), connect(port, range(count), count) as members:
        yield members


def on_all(members: list[Member], work: Callable[[Member], Any]) -> list[Any]:
    """What `work` returns for each, done by all at once."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, members))


# One save


@dataclass(slots=True)
class Times:
    """When one process came to each point of a save, and the calls it made."""

    begin: float = 0.0
    agreed: float = 0.0
    written: float = 0.0
    committed: float = 0.0
    left: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)


def describe_tree(process: int) -> dict[str, Any]:
    """About what a process posts before it writes, with some leaves on the host."""
    leaves = range(HOST_LEAVES)
    return {
        "path": "/shared/team/experiments/llama-3.1-405b/run-17/checkpoints/120000",
        "tree": "0123456789abcdef" * 2,
        "paths": [f"optimizer/opt_state/1/inner_states/group_{n}/schedule/count" for n in leaves],
        "sole": [[n, process] for n in leaves],
        "states": {"iterator": {"shard": process, "position": 123456789, "epoch": 3}},
        "digests": [[n, f"{n:032x}"] for n in leaves],
    }


def report_written(process: int) -> dict[str, Any]:
    """About what a process posts once it has written."""
    digest = "0123456789abcdef" * 2
    host = f"worker-{process:04d}.cluster.local"
    return {"index": [181_234, digest], "written": [3_221_225_472, 2.5], "host": host}


def agree(posts: list[Any]) -> dict[str, Any]:
    assert len({post["tree"] for post in posts}) == 1
    return {"id": "0123456789abcdef", "common": list(range(HOST_LEAVES)), "per_process": []}


def commit(posts: list[Any]) -> list[float]:
    written = [post["written"][0] for post in posts]
    return [sum(written), min(written), max(written)]


def save(member: Member, meet: Callable[[], Any], write_s: float) -> Times:
    """Go through a save; `meet` waits for all, as if all had as much to write."""
    times = Times()
    client: Any = member.client
    before = Counter(client.calls)
    meet()
    times.begin = time.monotonic()
    with Operation("measured save", member=member) as operation:
        operation.exchange("begin", describe_tree(member.process), agree)
        times.agreed = time.monotonic()
        meet()
        time.sleep(write_s)
        times.written = time.monotonic()
        operation.exchange("commit", report_written(member.process), commit, is_last=True)
        times.committed = time.monotonic()
    times.left = time.monotonic()
    times.calls = client.calls - before
    return times


# Many programs


def run_program(
    port: int, numbers: list[int], count: int, barrier: Any, waits: list[float], results: Any
) -> None:
    """Take part as some of the processes in a save for each of `waits`."""
    if 0 not in numbers:
        # Hundreds of threads that wait for Python's lock would wake up every 5 ms to ask for it.
        sys.setswitchinterval(1.0)
    here = threading.Barrier(len(numbers), action=barrier.wait)
    with (
        serve(port, count) if 0 in numbers else nullcontext(),
        connect(port, numbers, count) as members,
    ):
        found = on_all(members, lambda member: [save(member, here.wait, s) for s in waits])
        results.put(dict(zip(numbers, found, strict=True)))


def measure(count: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """The times and calls of saves by `count` processes."""
    spawn = multiprocessing.get_context("spawn")
    others = list(range(1, count))
    groups = [[0], *(group for n in range(PROGRAMS) if (group := others[n::PROGRAMS]))]
    barrier, results, port = spawn.Barrier(len(groups)), spawn.Queue(), free_port()
    waits = [0.0] * (rounds + 1) + [LONG_S]  # the first is not counted
    programs = [
        spawn.Process(target=run_program, args=(port, group, count, barrier, waits, results))
        for group in groups
    ]
    for program in programs:
        program.start()
    found: dict[int, list[Times]] = {}
    for _ in groups:
        found |= results.get(timeout=600)
    for program in programs:
        program.join()
    saves = [[found[process][n] for process in range(count)] for n in range(len(waits))]
    return {
        "processes": count,
        "agree_s": [_duration(save, "begin", "agreed") for save in saves[1:-1]],
        "commit_s": [_duration(save, "written", "committed") for save in saves[1:-1]],
        "leave_s": [_duration(save, "committed", "left") for save in saves[1:-1]],
        "calls_short": _count_calls(saves[-2]),
        "calls_long": _count_calls(saves[-1]),
        "call_names": {
            "process 0": dict(saves[-1][0].calls),
            "process 1": dict(saves[-1][1].calls),
        },
    }


def _duration(save: list[Times], begin: str, end: str) -> float:
    """From the first process that began to the last that was done."""
    return max(getattr(t, end) for t in save) - min(getattr(t, begin) for t in save)


def _count_calls(save: list[Times]) -> dict[str, int]:
    process_0, *others = [times.calls.total() for times in save]
    return {"process_0": process_0, "least": min(others), "most": max(others)}


# What is left behind


def make_table(rows: list[dict[str, Any]]) -> str:
    names = ["processes", "agree", "commit", "calls of process 0", "calls of another process"]
    lines = [
        f"| {' | '.join(names)} | both, {LONG_S:g} s longer |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        short, long = row["calls_short"], row["calls_long"]
        lines.append(
            f"| {row['processes']:,} | {median(row['agree_s']):.3f} s "
            f"| {median(row['commit_s']):.3f} s | {short['process_0']} "
            f"| {short['least']} to {short['most']} "
            f"| {long['process_0']}; {long['least']} to {long['most']} |"
        )
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str:
    before, rest = text.split(TABLE_BEGINS)
    return before + TABLE_BEGINS + table + TABLE_ENDS + rest.split(TABLE_ENDS)[1]


def main() -> None:
    counts = [int(argument) for argument in sys.argv[1:]] or list(PROCESSES)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for count in counts:
        rows.append(measure(count))
        print(make_table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"load before: {load:.1f}, on {os.cpu_count()} cores")
    print("names of calls:", rows[-1]["call_names"])
    whole_s = median(rows[-1]["agree_s"]) + median(rows[-1]["commit_s"])
    print(f"agree and commit: {whole_s:.2f} s (bar {LIMIT_S:g} s)")
    if tuple(counts) != PROCESSES:
        return
    results = {"cores": os.cpu_count(), "load_before": load, "limit_s": LIMIT_S, "rows": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    block = (
        f"{make_table(rows)}\nMedians of {ROUNDS} saves; load of the machine before: {load:.1f}.\n"
    )
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), block), "utf-8")


if __name__ == "__main__":
    main()
