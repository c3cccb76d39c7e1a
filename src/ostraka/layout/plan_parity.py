"""Plans parity: groups of shard files, and the process that writes each parity file. Pure.

A group has at most one file of each host, and other hosts write its parity files. So one parity
file makes up for the loss of any one host with all its files, two for the loss of any two. On one
host, processes stand for hosts, and in one process files.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ostraka.layout.shard_file import DIGEST_DIGITS, Entry, FileDigests, FileEntry, block_lengths

GROUP_FILES = 8
"""The most shard files in a group: parity adds an eighth of the bytes, or more."""
PARITY_COUNTS = (0, 1, 2)

GROUPS_AT_ONCE = 3
"""The groups that a process reads back at a time, a block of each member and sum."""

Covers = Literal["hosts", "processes", "files"]


@dataclass(frozen=True, slots=True)
class ParityGroup:
    """Shard files, as rows of the file table in the order in which parity counts them."""

    members: tuple[int, ...]
    writers: tuple[int, ...]
    """The process that writes each of its parity files."""


@dataclass(frozen=True, slots=True)
class ParityPlan:
    """The groups of a save."""

    count: int
    """The parity files of a group, and the losses that it can take."""
    groups: tuple[ParityGroup, ...]
    covers: Covers
    """The unit that may fail as a whole, with all its files: `count` of them at once."""


def check_parity(parity: Any) -> None:
    """Raise ValueError if `parity` is not 0, 1 or 2."""
    if type(parity) is not int or parity not in PARITY_COUNTS:
        raise ValueError(f"parity is {parity!r}; it must be 0, 1 or 2")


def planned_digests(file: FileEntry, entries: Sequence[Entry]) -> FileDigests:
    """The digests of a planned file: placeholders of the right length."""
    lengths = tuple(block_lengths(file.header_bytes, entries))
    return FileDigests(file.size, lengths, ("0" * DIGEST_DIGITS,) * len(lengths))


def plan_parity(
    files: Sequence[FileEntry],
    process_of: Sequence[int],
    hosts: Sequence[int],
    *,
    count: int,
) -> ParityPlan:
    """Group the files. `hosts` has the host of each process.

    Files of similar size come together: parity is as long as the longest of its group.
    """
    by_size = sorted(range(len(files)), key=lambda n: (-files[n].size, n))
    covers, key_of = _keys(files, process_of, hosts, count)
    keys = {row: key_of(row) for row in by_size}
    limit = GROUP_FILES
    if covers != "files":
        limit = min(limit, (len(set(hosts)) if covers == "hosts" else len(hosts)) - count)
    writers = _Writers(hosts, covers)
    groups: list[ParityGroup] = []
    for members in _groups_of(by_size, keys, limit):
        used = () if covers == "files" else {keys[row] for row in members}
        last = process_of[files[members[-1]].device]
        after = hosts[last] if covers == "hosts" else last
        groups.append(ParityGroup(tuple(members), writers.choose(used, after, count)))
    return ParityPlan(count, tuple(groups), covers)


def _keys(
    files: Sequence[FileEntry], process_of: Sequence[int], hosts: Sequence[int], count: int
) -> tuple[Covers, Callable[[int], Hashable]]:
    """The unit that may fail as a whole, and a function from a file to its unit."""
    if len(set(hosts)) > max(count, 1):
        return "hosts", lambda row: hosts[process_of[files[row].device]]
    if len(hosts) > max(count, 1):
        return "processes", lambda row: process_of[files[row].device]
    return "files", lambda row: row


def _groups_of(rows: Sequence[int], keys: Mapping[int, Hashable], limit: int) -> list[list[int]]:
    """Rows in groups of at most `limit`, none with a key twice, in rounds over all keys."""
    taken: Counter[Hashable] = Counter()
    rounds: dict[int, list[int]] = {}
    for row in rows:
        rounds.setdefault(taken[keys[row]], []).append(row)
        taken[keys[row]] += 1
    waiting = deque(row for part in rounds.values() for row in part)
    groups: list[list[int]] = []
    while waiting:
        group: list[int] = []
        used: set[Hashable] = set()
        passed: list[int] = []
        # Rows of one round have distinct keys: few are passed over, unless few keys are left.
        while waiting and len(group) < limit and len(passed) < limit:
            row = waiting.popleft()
            if keys[row] in used:
                passed.append(row)
            else:
                used.add(keys[row])
                group.append(row)
        waiting.extendleft(reversed(passed))
        groups.append(group)
    return groups


class _Writers:
    """Shares the parity files out: the host or process with the fewest so far takes the next.

    Among several of these it is the next one after the last member. Members go round all hosts, and
    so do writers then. So no host is left over at the end that can't take the last files.
    """

    def __init__(self, hosts: Sequence[int], covers: Covers):
        owner = hosts if covers == "hosts" else range(len(hosts))
        self._processes: dict[int, deque[int]] = {}
        for process, key in enumerate(owner):
            self._processes.setdefault(key, deque()).append(process)
        self._by_load = [sorted(self._processes)]
        """By the number of files that they have: hosts, or processes, in order."""

    def choose(self, used: Collection[Any], after: int, count: int) -> tuple[int, ...]:
        """The processes that write the parity files of a group, none of them in `used`."""
        chosen: list[int] = []
        while len(chosen) < count:
            # Fewer than parity files: some write several.
            taken = {*used, *chosen} if len(chosen) < len(self._processes) else used
            chosen.append(self._take(taken, chosen[-1] if chosen else after))
        return tuple(self._next_process(key) for key in chosen)

    def _take(self, taken: Collection[Any], after: int) -> int:
        for load, keys in enumerate(self._by_load):
            start = bisect_right(keys, after)
            for key in (*keys[start:], *keys[:start]):
                if key not in taken:
                    keys.remove(key)
                    if load + 1 == len(self._by_load):
                        self._by_load.append([])
                    insort(self._by_load[load + 1], key)
                    return key
        raise AssertionError("a group has files of all hosts")

    def _next_process(self, key: int) -> int:
        processes = self._processes[key]
        processes.rotate(-1)
        return processes[-1]
