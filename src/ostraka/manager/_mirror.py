"""The mirror of a run: the steps to copy there, the thread that copies them, and each copy.

The store is the truth here, too. A step is due if the root has it and the mirror lacks it. So a run
that was killed resumes copying when it is started again. The newest step comes first. A mirror that
is slower than the run misses steps, if retention deletes them before their turn comes.

All processes copy a step together. Process 0 chooses the step, locks its directory in the mirror,
announces it, and commits when all are done. Every process copies the files that it wrote. A copy is
an operation with its own numbers, apart from saves and restores, so that it may begin and end at
any time. Announcements are keys `go/<n>`. Process 0 makes each of them once. A process that leaves
makes the last one.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from ostraka.common.progress import Count
from ostraka.common.record import OnRecord, Stopwatch, report, summarize
from ostraka.common.record import logger as log
from ostraka.common.threads import Stopped, at_exit
from ostraka.errors import Busy, Damaged, OstrakaError, PathInTheWay, StoreError, describe
from ostraka.formats.ostraka.source import OstrakaSource, open_ostraka
from ostraka.layout.file_names import list_steps
from ostraka.manager.leases import RootLock
from ostraka.manager.run_file import RunFileWriter
from ostraka.manager.steps import Root, Step
from ostraka.processes.operation import Operation, ProcessFailed
from ostraka.processes.service import Keys, Member, this_member
from ostraka.storage import PathLike, is_inside
from ostraka.transfer import CopyPlace, copy_shards, find_lost

_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
"""Pauses after failures. Each is twice as long as the one before."""
_LEAVE_WITHIN_S = 5.0
_LOOK_EVERY_S = 1.0

Status = Literal["there", "gone", "damaged"]
_Job = tuple[OstrakaSource, CopyPlace]
"""The source and the destination of a copy, on process 0."""

OnCopied = Callable[[], Callable[[], None] | None]
"""A weak reference to the function to call."""


def open_mirror(root: Root, mirror: PathLike | None, every: Any) -> Root | None:
    """Return the directory of a mirror. Raises ValueError if it can't be one."""
    if mirror is None:
        if every is not None:
            raise ValueError(
                f"mirror_every={every!r} is given without mirror=, the place to copy to"
            )
        return None
    place = Root(mirror)
    if is_inside(root.store, place.store) or is_inside(place.store, root.store):
        raise ValueError(
            f"the mirror {place.location} and the root {root.location} are one place, or one is "
            "inside the other; give the mirror a place of its own"
        )
    return place


class Mirror:
    """Copies the steps of a root that are due, in the background. No save waits for it.

    Process 0 leads: it alone calls the methods other than `start` and `stop`.
    """

    def __init__(self, root: Root, place: Root, *, every: int | None, on_record: OnRecord | None):
        self._root = root
        self._place = place
        self._every = every
        self._on_record = on_record
        self._lock = RootLock(place.store)
        self._is_locked = False
        self._is_clean = False
        """True once the files of interrupted copies are gone there."""
        self.run_file: RunFileWriter | None = None
        """Learns which steps wait for a copy."""
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._copier: StepCopier | None = None
        self._changed = threading.Condition()
        """Guards all of the following."""
        self._is_left = False
        self._asked = 1
        """The number of requests to bring the mirror up to date."""
        self._answered = 0
        """The last request that was answered, by success or by failure."""
        self._hurries = False
        """True while somebody waits, so that there is no pause after a failure."""
        self._failure: Exception | None = None
        self._pause_s = _FIRST_PAUSE_S
        """The pause after the next failure."""
        self._retry_at_s = 0.0
        self._waiting: set[int] = set()
        """Steps of the root that are due, and not known to be in the mirror."""
        self._settled: set[int] = set()
        """Steps that are in the mirror, or can't be copied because they are damaged."""
        self._copying: int | None = None
        self._is_stale = False
        """True if the step that is being copied was saved again."""

    def start(self, channel: str, on_copied: OnCopied) -> None:
        """Begin to copy. All processes pass the same `channel`, and no other mirror has it.

        After each copy process 0 calls `on_copied` in the background.
        """
        member = this_member().aside(channel)
        copier = self._copier = StepCopier(self._root, self._place, member, self._on_record)
        lead, follow = partial(self._lead, copier, on_copied), partial(self._follow, copier)
        work = lead if copier.leads else follow
        self._thread = threading.Thread(target=work, name="ostraka-mirror", daemon=True)
        self._thread.start()
        _live.add(self)

    def is_due(self, step: int) -> bool:
        return self._every is None or step % self._every == 0

    def note_commit(self, step: int) -> None:
        """Note the commit of a step in the root."""
        with self._changed:
            self._settled.discard(step)
            self._is_stale |= step == self._copying
            if self.is_due(step):
                self._waiting.add(step)
                self._asked += 1
                self._changed.notify_all()

    def held(self, steps: Iterable[int]) -> set[int]:
        """Return those of the root's steps that retention must leave for now.

        They are the step of the running copy, and the newest one that waits. If there were more, a
        slow mirror could fill the disk.
        """
        with self._changed:
            waiting = [step for step in steps if self.is_due(step) and step not in self._settled]
            held = {max(waiting)} if waiting else set[int]()
            return held if self._copying is None else held | {self._copying}

    def wait(self) -> None:
        """Wait until the mirror has all steps that are due. Raises StoreError if that fails now.

        A pause after a failure ends, and copying is tried once more.
        """
        thread = self._thread
        if thread is None or os.getpid() != self._process:
            return  # A forked child: it is its parent's.
        if thread is threading.current_thread():
            raise RuntimeError(
                "on_record is a part of the copy to the mirror, and can't wait for it"
            )
        with self._changed:
            self._asked += 1
            wanted = self._asked
            self._hurries = True
            self._changed.notify_all()
            while self._answered < wanted and thread.is_alive():
                self._changed.wait(_LOOK_EVERY_S)
            if self._failure is not None:
                raise StoreError(
                    f"{self._say_missing()}: {_reason(self._failure)}; the root has it all, and "
                    "the next Manager with this mirror copies what is missing",
                    filename=self._place.location,
                )

    def stop(self, *, alone: bool) -> None:
        """Copy no more, and give up a running copy. With `alone` other processes may go on."""
        thread, copier = self._thread, self._copier
        if thread is None or copier is None or os.getpid() != self._process:
            return
        self._thread = None
        with self._changed:
            self._is_left = True
            if self._waiting and self._failure is None:
                log.warning(
                    "%s; the next Manager with this mirror copies what is missing",
                    self._say_missing(),
                )
            self._changed.notify_all()
        if copier.leads or alone:
            with suppress(Exception):  # The service may have gone: then so have the others.
                copier.leave()
        thread.join(_LEAVE_WITHIN_S)

    # The thread of process 0

    def _lead(self, copier: StepCopier, on_copied: OnCopied) -> None:
        try:
            while (wanted := self._wait_for_work()) is not None:
                failure: Exception | None = None
                try:
                    self._catch_up(copier, on_copied)
                except Exception as error:
                    failure = error
                self._answer(wanted, failure)
        finally:
            self._lock.release()

    def _wait_for_work(self) -> int | None:
        """Return the request number to answer, or None if the manager is closed."""
        with self._changed:
            while not self._is_left:
                pause_s = self._retry_at_s - time.monotonic() if self._failure else 0.0
                if pause_s <= 0 or self._hurries:
                    if self._failure is not None or self._answered < self._asked:
                        self._hurries = False
                        return self._asked
                    self._changed.wait()
                else:
                    self._changed.wait(pause_s)
            return None

    def _answer(self, wanted: int, failure: Exception | None) -> None:
        with self._changed:
            self._copying = None
            self._answered = wanted
            before, self._failure = self._failure, failure
            if self.run_file is not None:
                problem = None if failure is None else _reason(failure)
                self.run_file.note_mirror(self._waiting, problem)
            self._changed.notify_all()
            if failure is None:
                self._pause_s = _FIRST_PAUSE_S
                return
            self._retry_at_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            if self._is_left:
                return
            self._is_left = isinstance(failure, CopyingEnded)
            # Once for each reason: it may last for long.
            if before is None or _reason(before) != _reason(failure):
                known = isinstance(failure, OstrakaError | OSError | ProcessFailed | CopyingEnded)
                log.warning(
                    "%s: %s; saving goes on, and copying is tried again",
                    self._say_missing(),
                    _reason(failure),
                    exc_info=None if known else failure,
                )

    def _catch_up(self, copier: StepCopier, on_copied: OnCopied) -> None:
        """Copy all steps that are due, the newest first. Raises if one can't be copied."""
        failed: dict[int, Exception] = {}
        """The errors of single steps, which do not hold the others up."""
        while (step := self._choose(failed.keys())) is not None:
            self._hold_place()
            try:
                status, why = copier.copy(step.names[0])
            except (PathInTheWay, Busy) as error:
                failed[step.step] = error
                continue
            if not self._settle(step.step, status, why):
                failed[step.step] = StoreError(f"step {step.step} was replaced while it was copied")
            if self.run_file is not None:
                self.run_file.note_mirror(self._waiting, None)
            if status == "there" and (tell := on_copied()) is not None:
                tell()
        left = failed.keys() & self._waiting
        if left:
            raise failed[max(left)]
        if self._is_locked and not self._is_clean:
            self._place.clean()
            self._is_clean = True

    def _settle(self, step: int, status: Status, why: str) -> bool:
        """Note the status of a copy. Return False if the step is gone and was not saved again."""
        with self._changed:
            self._copying = None
            if self._is_stale:
                return True  # It is chosen again.
            if status == "gone":
                return False
            self._waiting.discard(step)
            self._settled.add(step)
        if status == "damaged":
            log.error("step %d is not copied to %s: %s", step, self._place.location, why)
        return True

    def _choose(self, passed_over: Iterable[int]) -> Step | None:
        """Return the newest step that is due. Retention leaves it from now on."""
        with self._changed:
            noted = set(self._waiting)
        every = self._root.scan(trusting=True)
        own = [step for step in every if not step.problems and not step.is_foreign]
        there = {step.step: step for step in own if self.is_due(step.step)}
        with self._changed:
            for step in sorted(noted - there.keys()):
                log.warning(
                    "step %d was deleted from %s before it was copied to %s, which has newer ones "
                    "to copy first",
                    step,
                    self._root.location,
                    self._place.location,
                )
            self._waiting -= noted - there.keys()
            self._waiting |= there.keys() - self._settled
            chosen = max((self._waiting & there.keys()) - set(passed_over), default=None)
            self._copying, self._is_stale = chosen, False
            return None if chosen is None else there[chosen]

    def _hold_place(self) -> None:
        """Lock the mirror. Raises Busy if another manager writes to it."""
        if self._is_locked:
            try:
                self._lock.check_place()
                return
            except FileNotFoundError:
                self._lock.release()
        self._place.prepare()
        self._is_locked = False
        try:
            self._lock.acquire(wait=False)
        except Busy as error:
            raise Busy(
                f"another Manager is writing to {self._place.location}, or copies to it; end it, "
                "or give each run a mirror of its own"
            ) from error
        self._is_locked = True

    def _say_missing(self) -> str:
        steps = sorted(self._waiting)
        what = f"{'step' if len(steps) == 1 else 'steps'} {list_steps(steps)}" if steps else "steps"
        return f"the mirror {self._place.location} lacks {what} of {self._root.location}"

    # The thread of any other process

    def _follow(self, copier: StepCopier) -> None:
        is_left = False
        while not is_left:
            try:
                copier.follow()
            except CopyingEnded:
                return
            except Exception as error:
                # Process 0 has it in its own log, if it lives.
                log.info("a copy to %s failed: %s", self._place.location, _reason(error))
                with self._changed:
                    # The service may be gone, and nobody there to announce the end.
                    is_left = self._changed.wait_for(lambda: self._is_left, _LOOK_EVERY_S)


_live: weakref.WeakSet[Mirror] = weakref.WeakSet()


def _stop_all() -> None:
    """Stop all mirrors when a program ends without closing its managers.

    A thread that still waits for the coordination service would abort the program.
    """
    for mirror in list(_live):
        mirror.stop(alone=True)


at_exit(_stop_all, lambda: None)


def _reason(failure: Exception) -> str:
    cause = failure.__cause__
    if isinstance(failure, ProcessFailed) and isinstance(cause, Exception):
        return describe(cause)
    return str(failure) if isinstance(failure, ProcessFailed | CopyingEnded) else describe(failure)


# One copy


class CopyingEnded(Exception):
    """A process has left its manager, so there are no more copies."""

    def __init__(self, announced: Mapping[str, Any]):
        super().__init__(f"process {announced['left']} has left its manager")


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
                    raise CopyingEnded(self._keys.wait_for(key))
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
            raise CopyingEnded(begun)
        self._announced += 1
        self._copy_together(begun["name"], begun["id"], None)

    def _copy_together(self, name: str, save_id: str, job: _Job | None) -> tuple[Status, str]:
        def check(done: int, total: int) -> None:
            """Raise between two pieces if the copy is to stop."""
            operation.check()
            if self._is_left.is_set():
                raise Stopped("its manager was left")

        watch = Stopwatch()
        with Operation(f"copy to {self._mirror.location}", member=self._member) as operation:
            progress = Count(on_bytes=check)
            mine = self._copy_share(progress, name, save_id)
            mine["written"] = [progress.done - progress.kept, watch.lap("copy")]
            answer = operation.exchange(
                "commit", mine, lambda reports: self._commit(name, job, reports), is_last=True
            )
            watch.lap("commit")
        if answer["status"] == "there":
            path, summary = self._mirror.path(name), answer["summary"]
            report("mirror", path, watch, summary, self._on_record, in_background=True)
        return answer["status"], answer["why"]

    def _copy_share(self, progress: Count, name: str, save_id: str) -> dict[str, Any]:
        """Copy this process's files. Return the status instead of raising: the others go on."""
        source = None
        process, count = self._member.process, self._member.count
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
            if failed := [said for said in reports if said["status"] == status]:
                place.discard()
                return failed[0]
        lost = find_lost(source, self._mirror.at(name)) if len(reports) > 1 else []
        if lost:
            raise StoreError(
                f"process 0 can't see {self._mirror.path(name)}/{lost[0].file}, which another "
                "process has copied: all processes must have one mirror in common"
            )
        summary = summarize([said["written"] for said in reports])
        summary[0] += place.commit()
        return {"status": "there", "why": "", "summary": summary}
