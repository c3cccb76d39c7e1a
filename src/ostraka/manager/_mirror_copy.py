"""The copy of one step to the mirror, by all processes together.

Process 0 chooses the step, locks its directory in the mirror, announces it, and commits when all
are done. Every process copies the files that it wrote. A copy is an operation with its own numbers,
apart from saves and restores, so that it may begin and end at any time. Announcements are keys
`go/<n>`. Process 0 makes each of them once. A process that leaves makes the last one.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

from ostraka.common.progress import Count
from ostraka.common.record import OnRecord, Stopwatch, report, summarize
from ostraka.common.threads import Stopped
from ostraka.errors import Damaged, StoreError
from ostraka.formats.ostraka.source import OstrakaSource, open_ostraka
from ostraka.manager.steps import Root
from ostraka.processes.operation import Operation
from ostraka.processes.service import Keys, Member
from ostraka.transfer import CopyPlace, copy_shards, find_lost

Status = Literal["there", "gone", "damaged"]
_Job = tuple[OstrakaSource, CopyPlace]
"""The source and the destination of a copy, on process 0."""


class CopyingEnded(Exception):
    """A process has left its manager, so there are no more copies."""


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
        """From any thread: give up the running copy, and take part in no other.

        This ends copying on all processes. A process that waits for an announcement receives its
        own.
        """
        self._is_left.set()
        if self._member.count > 1:
            self._keys.create(f"go/{self._announced}", {"left": self._member.process})

    def copy(self, name: str) -> tuple[Status, str]:
        """On process 0: copy a step to the mirror. Return the status, and the reason of a failure.

        `there`: the mirror has the same bytes. `gone`: the step was deleted or replaced meanwhile.
        `damaged`: the step in the root is damaged. This replaces another step of that name, and
        repairs a copy that has lost files. Raises CopyingEnded if a process has left its manager,
        ProcessFailed, and errors of the store.
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
            if self._member.count > 1:
                key = f"go/{self._announced}"
                if not self._keys.create(key, {"name": name, "id": source.metadata.id}):
                    raise CopyingEnded(
                        f"process {self._keys.wait_for(key)['left']} has left its manager"
                    )
                self._announced += 1
            status, why = self._copy_together(name, source.metadata.id, (source, place))
        finally:
            place.release()
        if status == "gone" and source.is_current():
            raise StoreError(f"{why} does not see {source.location}, which process 0 sees")
        return status, why

    def follow(self) -> None:
        """On any other process: take part in the next copy. Raises CopyingEnded after the last."""
        if self._is_left.is_set():
            self.leave()  # Again: the copy that it was in had been announced before.
        begun = self._keys.wait_for(f"go/{self._announced}")
        if "left" in begun:
            raise CopyingEnded(f"process {begun['left']} has left its manager")
        self._announced += 1
        self._copy_together(begun["name"], begun["id"], None)

    def _copy_together(self, name: str, save_id: str, job: _Job | None) -> tuple[Status, str]:
        watch = Stopwatch()
        with Operation(f"copy to {self._mirror.location}", member=self._member) as operation:
            progress = Count(on_bytes=lambda done, total: self._check(operation))
            mine = self._copy_share(operation, progress, name, save_id)
            mine["written"] = [progress.done - progress.kept, watch.lap("copy")]
            answer = operation.exchange(
                "commit", mine, lambda reports: self._commit(name, job, reports), is_last=True
            )
            watch.lap("commit")
        if answer["status"] == "there":
            path, summary = self._mirror.path(name), answer["summary"]
            report("mirror", path, watch, summary, self._on_record, in_background=True)
        return answer["status"], answer["why"]

    def _copy_share(
        self, operation: Operation, progress: Count, name: str, save_id: str
    ) -> dict[str, Any]:
        """Copy this process's files. Return the status instead of raising: the others go on."""
        source = None
        process, count = operation.process, operation.count
        try:
            source = open_ostraka(self._root.at(name))
            if source is None or source.metadata.id != save_id:
                return {"status": "gone", "why": f"process {process}"}
            copy_shards(source, self._mirror.at(name), progress, process=process, count=count)
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
        """Raise if the copy is to stop. Called between pieces."""
        operation.check()
        if self._is_left.is_set():
            raise Stopped("its manager was left")
