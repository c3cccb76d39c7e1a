"""What parity adds to a save: files, bytes, requests, memory. Pure: the plan that `save` runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostraka import _format
from ostraka._parity_format import Parity, ParityFile, layouts_of
from ostraka._plan_parity import Covers, plan_parity
from ostraka._plan_write import WritePlan
from ostraka.storage._requests import upload_requests

_NO_DIGEST = "0" * 16
_GROUPS_AT_ONCE = 3
"""As `_write_parity` has it."""


@dataclass(frozen=True, slots=True)
class PlannedParity:
    """The parity files of a save, and what is read for them."""

    table: Parity
    covers: Covers | None
    """What may be lost, as many as `table.count`; None of a checkpoint that is there already."""
    is_read_back: bool
    """Whether shard files are read back: not by a single process that has them in memory."""

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.table.files)

    def bytes_by_process(self, count: int) -> list[int]:
        """What each of `count` processes writes."""
        totals = [0] * count
        for file in self.table.files:
            totals[file.process] += file.size
        return totals

    def read_bytes_by_process(self, write: WritePlan) -> list[int]:
        """What each process reads back: once the members of a group for which it writes parity."""
        totals = [0] * (max(write.process_of) + 1)
        if self.is_read_back:
            for group, members in enumerate(self.table.groups):
                for process in {file.process for file in self.table.files_of(group)}:
                    totals[process] += sum(write.files[row].size for row in members)
        return totals

    def requests_by_process(self, write: WritePlan) -> list[int]:
        """The requests of each process, to write parity files and to read back what they sum up."""
        totals = [0] * (max(write.process_of) + 1)
        for file in self.table.files:
            totals[file.process] += upload_requests(file.size)
        if not self.is_read_back:
            return totals
        indexes: list[set[int]] = [set() for _ in totals]
        copied: set[int] = set()
        for group, members in enumerate(self.table.groups):
            files = [write.files[row] for row in members]
            of = {write.process_of[file.device] for file in files}
            for process in {file.process for file in self.table.files_of(group)}:
                # Each is opened, and read in blocks; an index that is copied is read again.
                ranges = sum(1 + -(-file.size // _format.BLOCK_BYTES) for file in files)
                totals[process] += ranges + len(of - copied)
                indexes[process] |= of
            copied |= of
        return [total + len(known) for total, known in zip(totals, indexes, strict=True)]

    def memory_bytes(self, writers: int) -> int:
        """The most memory that a process takes for it."""
        most = max((len(members) for members in self.table.groups), default=0)
        if not self.is_read_back:
            return writers * self.table.count * _format.BLOCK_BYTES
        return _GROUPS_AT_ONCE * (most + self.table.count) * _format.BLOCK_BYTES


def plan_parity_files(
    write: WritePlan, count: int, index_bytes: Mapping[int, int]
) -> PlannedParity:
    """The parity files of a save by a process on each host."""
    processes = max(write.process_of) + 1
    planned = plan_parity(write.files, write.process_of, range(processes), count=count)
    groups = tuple(group.members for group in planned.groups)
    layouts = layouts_of(groups, write.files, write.process_of, index_bytes)
    files = [
        ParityFile(number, place, process, layout.header_bytes, layout.size, _NO_DIGEST)
        for number, (group, layout) in enumerate(zip(planned.groups, layouts, strict=True))
        for place, process in enumerate(group.writers)
    ]
    table = Parity(count, groups, tuple(files))
    return PlannedParity(table, planned.covers, processes > 1 or bool(write.compressed))
