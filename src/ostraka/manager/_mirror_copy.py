"""One step, copied to the mirror by all processes together.

Process 0 chooses the step, takes the place in the mirror, announces it, and commits when all are
done; every process copies the files that it wrote. A copy is an operation, numbered apart from
saves and restores, so that it does not matter when it begins or ends. Announcements are keys
`go/<n>`, each made once: by process 0, or by a process that leaves, which is the last then.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

from ostraka._coordinate import Operation
from ostraka._parallel import Stopped
from ostraka._record import OnRecord, Stopwatch, report, summarize
from ostraka._service import Keys, Member
from ostraka.errors import Damaged, StoreError
from ostraka.formats._ostraka import OstrakaSource, open_ostraka
from ostraka.manager._steps import Root
from ostraka.transfer import CopyPlace, Tally, copy_shards, find_lost

Status = Literal["there", "gone", "damaged"]
_Job = tuple[OstrakaSource, CopyPlace]
"""A copy, as process 0 alone knows it."""


class Ended(Exception):
    """There will be no more copies, because a process has left its manager."""


class StepCopier:
    """Copies steps from a root to its mirror, on each process in a thread of its own."""

    def __init__(self, root: Root, mirror: Root, member: Member, on_record: OnRecord | None):
        self._root = root
        self._mirror = mirror
        self._member = member
        self._on_record = on_record
        self._keys = Keys(member.client, member.prefix)
        self._announced = 0
        self._is_left = threading.Event()

    @property
    def leads(self) -> bool:
        return self._member.process == 0

    def leave(self) -> None:
        """From any thread: give up the copy that is under way, and take part in no other.

        This ends copying on all processes. A process that waits for an announcement gets its own.
        """
        self._is_left.set()
        if self._member.count > 1:
            self._keys.create(f"go/{self._announced}", {"left": self._member.process})

    def copy(self, name: str) -> tuple[Status, str]:
        """On process 0: have a step in the mirror; returns how it went, and why if not well.

        `there`: the mirror has it, the same bytes; `gone`: it was deleted or replaced meanwhile;
        `damaged`: the step in the root is. Raises Ended if a process has left its manager; what
        the store raises; ProcessFailed. Another step of that name is replaced, and one that has
        lost files is mended.
        """
        source = None
        try:
            source = open_ostraka(self._root.at(name))
            if source is None:
                return "gone", ""
            place = CopyPlace(source, self._mirror.at(name), may_replace=True)
            is_missing = place.take()
        except Damaged as error:
            is_gone = source is not None and not source.is_current()
            return "gone" if is_gone else "damaged", str(error)
        if not is_missing:
            return "there", ""
        try:
            self._announce(name, source.metadata.id)
            status, why = self._copy_together(name, source.metadata.id, (source, place))
        finally:
            place.release()
        if status == "gone" and source.is_current():
            raise StoreError(f"{why} does not see {source.location}, which process 0 sees")
        return status, why

    def follow(self) -> None:
        """On any other process: take part in the next copy. Raises Ended after the last."""
        if self._is_left.is_set():
            self.leave()  # Again: the copy that it was in had been announced before.
        begun = self._keys.wait_for(f"go/{self._announced}")
        if "left" in begun:
            raise Ended(f"process {begun['left']} has left its manager")
        self._announced += 1
        self._copy_together(begun["name"], begun["id"], None)

    def _announce(self, name: str, save_id: str) -> None:
        if self._member.count == 1:
            return
        key = f"go/{self._announced}"
        if not self._keys.create(key, {"name": name, "id": save_id}):
            raise Ended(f"process {self._keys.wait_for(key)['left']} has left its manager")
        self._announced += 1

    def _copy_together(self, name: str, save_id: str, job: _Job | None) -> tuple[Status, str]:
        watch = Stopwatch()
        with Operation(f"copy to {self._mirror.location}", member=self._member) as operation:
            tally = Tally(lambda done: self._check(operation))
            mine = self._copy_share(operation, tally, name, save_id)
            mine["written"] = [tally.copied, watch.lap("copy")]
            answer = operation.exchange(
                "commit", mine, lambda reports: self._commit(name, job, reports), is_last=True
            )
            watch.lap("commit")
        if answer["status"] == "there":
            report("mirror", self._mirror.path(name), watch, answer["summary"], self._on_record)
        return answer["status"], answer["why"]

    def _copy_share(
        self, operation: Operation, tally: Tally, name: str, save_id: str
    ) -> dict[str, Any]:
        """Copy this process's files. What is wrong with the step is returned: the others go on."""
        source = None
        process, count = operation.process, operation.count
        try:
            source = open_ostraka(self._root.at(name))
            if source is None or source.metadata.id != save_id:
                return {"status": "gone", "why": f"process {process}"}
            copy_shards(source, self._mirror.at(name), tally, process=process, count=count)
        except Damaged as error:
            if source is not None and not source.is_current():
                return {"status": "gone", "why": f"process {process}"}
            return {"status": "damaged", "why": str(error)}
        return {"status": "there", "why": ""}

    def _commit(self, name: str, job: _Job | None, reports: list[Any]) -> dict[str, Any]:
        """On process 0: commit, if every process has copied its files."""
        assert job is not None
        source, place = job
        for status in ("gone", "damaged"):
            for said in reports:
                if said["status"] == status:
                    place.discard()
                    return said
        lost = find_lost(source, self._mirror.at(name)) if len(reports) > 1 else []
        if lost:
            raise StoreError(
                f"process 0 can't see {self._mirror.path(name)}/{lost[0].file}, which another "
                "process has copied: all processes must have one mirror in common"
            )
        summary = summarize([said["written"] for said in reports])
        summary[0] += place.commit()
        return {"status": "there", "why": "", "summary": summary}

    def _check(self, operation: Operation) -> None:
        """Between pieces: raise if the copy is not to go on."""
        operation.check()
        if self._is_left.is_set():
            raise Stopped("its manager was left")
