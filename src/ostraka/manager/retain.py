"""The deletion of steps, by retention after a save, or by a user. No JAX.

Nobody deletes a step while a reader reads it (see `leases`). A deletion refers to the step as it
was when the deletion was decided: a step that was saved again since then stays. The docstring of
`storage._claim` says why this is safe.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ostraka.common.record import logger as log
from ostraka.common.threads import at_exit
from ostraka.errors import Busy
from ostraka.layout import shard_file
from ostraka.layout.file_names import ADDED_NAME, PIN_NAME
from ostraka.manager._keep import Keep, find_counted, find_superfluous
from ostraka.manager.leases import Leases
from ostraka.manager.steps import Root, Step, ascending
from ostraka.saving.place import delete_metadata, is_of_a_save
from ostraka.storage import ANYTHING, Claim, Store, claimed

_LOOK_EVERY_S = 1.0
_AT_ONCE = 32
"""How many steps retention claims at the same time."""


def remove_step(
    root: Root, number: int, *, seen: Step | None = None, even_if_read: bool = False
) -> None:
    """Delete a step, under all its names. A crash never leaves half a step.

    `seen` is the step as it was when somebody decided to delete it. Raises Busy if it was saved
    again since then, or if a reader reads it, whom the message names.
    """

    def refuse_if_read(claim: Claim) -> None:
        leases = Leases(root.store)
        found = leases.release_steps([number], there=(), now_s=claim.now_s, wait=True)
        if number in found:
            raise Busy(
                f"step {number} of {root.location} is being read by {found[number]} (host, process "
                "id, random number), which watches this run; wait for it, or end it"
            )

    with root.changing.lock:
        step = root.find(number) if seen is None else seen
        for name, version in root.own_names(step, "deletes").items():
            if root.store.is_link(name):
                root.store.delete_link(name)
                continue
            remove_checkpoint(
                root.at(name),
                version=ANYTHING if version is None else version,
                check=None if even_if_read else refuse_if_read,
            )


def remove_checkpoint(
    place: Store, *, version: Any = ANYTHING, check: Callable[[Claim], None] | None = None
) -> None:
    """Delete the checkpoint in a directory.

    `check` is called while the directory is claimed, before anything is deleted, and may raise.
    With a `version` of `_METADATA`, raises Busy if another has replaced it.
    """
    with claimed(place) as claim:
        if check is not None:
            check(claim)
        there = place.look(shard_file.METADATA_NAME)
        found = None if there is None else there.version
        if version is not ANYTHING and found not in (version, None):
            raise Busy(f"{place.location} has been saved again meanwhile; look at it first")
        _remove_claimed(place, claim, found)
    place.remove_if_empty()  # other people's files stay


def _remove_claimed(place: Store, claim: Claim, version: Any) -> None:
    """Delete the checkpoint in a directory that this process holds a claim on.

    `version` is the version of its `_METADATA`, or None. Another `_METADATA` is not deleted.
    """
    # The notes first: left alone in the directory, they would block the next save. Then the copy of
    # `_METADATA`: files that an interrupted deletion leaves must not look like a loss.
    for note in (PIN_NAME, ADDED_NAME):
        if note in claim.names:
            claim.delete(note)
    of_saves = list(filter(is_of_a_save, claim.names))
    for directory in filter(shard_file.is_shards_directory, of_saves):
        claim.delete(f"{directory}/{shard_file.METADATA_COPY}")
    # Then `_METADATA`, synced before any shard is deleted: after a power failure there must be none
    # without its shards.
    if version is not None:
        delete_metadata(place, claim, version)
    place.sync("")
    # Only names that were there when it was claimed: any others are another's.
    for other in of_saves:
        claim.delete(other)


_Claimed = tuple[Store, Claim, Any]
"""A directory to delete, the claim on it, and the version of its `_METADATA`."""


class Retention:
    """Deletes steps of a run that no condition of `keep` keeps, in a thread of its own.

    So the next save does not wait for it. The end of the program does. `check` raises if the run
    directory is no longer this manager's, and is called before each deletion. `held` returns the
    steps that may not be deleted now, though they count like any other.
    """

    def __init__(
        self,
        root: Root,
        keep: Keep,
        check: Callable[[], None] | None = None,
        held: Callable[[Sequence[int]], Collection[int]] | None = None,
    ):
        self.damaged: set[int] = set()
        """Steps that turned out to be damaged: they do not count, and are not deleted."""
        self._root = root
        self._keep = keep
        self._check = check
        self._held = held
        self._leases = Leases(root.store)
        self._warned: set[str] = set()
        """Readers that a warning has named as behind."""
        self._process = os.getpid()
        self._changed = threading.Condition()
        """Guards all of the following."""
        self._saving: int | None = None
        """The step that is being saved or was saved last, perhaps in the place of another."""
        self._deleting: frozenset[int] = frozenset()
        self._is_stopped = False
        self._next: int | None = None
        """The step that was just saved, if retention has yet to run after it."""
        self._thread: threading.Thread | None = None
        """The thread that is at work, if any."""

    # When

    def prepare_to_save(self, step: int) -> None:
        """Spare the step of the coming save. If its deletion has begun, wait for the end of it."""
        with self._changed:
            self._saving = step
            while step in self._deleting:
                self._changed.wait(_LOOK_EVERY_S)

    def begin(self, just_saved: int) -> None:
        """Run soon, in the background. If it runs already, it runs once more afterwards."""
        if self._keep.keeps_all:
            return
        with self._changed:
            self._next = just_saved
            if self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._work, name="ostraka-retention", daemon=True
            )
            _live.add(self)
        if not _Exit.has_begun:
            with suppress(RuntimeError):  # The system has no thread left.
                self._thread.start()
                return
        # A program that ends would wait for no new thread, but waits for the save that asks.
        self._thread = threading.current_thread()
        self._work()

    def begin_again(self) -> None:
        """Run after a copy to the mirror: perhaps a step stayed for that alone."""
        if self._saving is not None:
            self.begin(self._saving)

    def wait(self) -> None:
        """Wait until nothing is left to do."""
        if os.getpid() != self._process:
            return  # In a forked child the thread is its parent's.
        if threading.current_thread() is self._thread:
            raise RuntimeError("keep_if is a part of retention, and can't wait for it")
        with self._changed:
            while self._thread is not None:
                self._changed.wait(_LOOK_EVERY_S)

    def stop(self) -> None:
        """Begin to delete no more steps."""
        self._is_stopped = True

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    just_saved, self._next = self._next, None
                    if just_saved is None:
                        self._thread = None
                        return
                self.run(just_saved)
        finally:
            with self._changed:
                # Another thread may have begun since this one found nothing left to do.
                if self._thread is threading.current_thread():
                    self._thread = None
                self._changed.notify_all()

    # Which steps

    def run(self, just_saved: int) -> None:
        """Delete the superfluous steps.

        A step that a reader reads, or has yet to see, stays until a later save. The save has
        succeeded already, so errors go to the log, and the next run retries.
        """
        ignore = frozenset(self.damaged)
        try:
            every = self._root.scan(trusting=True)
            readable = [step for step in every if not step.problems]
            counting = [step for step in readable if step.step not in ignore]
            superfluous = self._choose(counting, just_saved)
            own = [step.step for step in readable if not step.is_foreign]
            held = self._held([one for one in own if one not in ignore]) if self._held else ()
            superfluous = [step for step in superfluous if step.step not in held]
            there = sorted(step.step for step in readable)
            self._leases.forget_active()
            if len(superfluous) > 1:  # Else it costs no more to find out when it is claimed.
                names = next((step.names for step in every if step.step == just_saved), ())
                # When it was saved, by the store's own clock.
                files = (self._root.at(n).look(shard_file.METADATA_NAME) for n in names[:1])
                now_s = next((file.changed_s for file in files if file is not None), None)
                kept = len(own) - len(superfluous)
                superfluous = self._leave_to_readers(superfluous, there, kept, now_s)
        except Exception:
            log.exception(
                "nothing is deleted from %s: it can't be told what to keep", self._root.location
            )
            return
        self._delete(superfluous, there)

    def _choose(self, readable: Sequence[Step], just_saved: int) -> list[Step]:
        """Return the steps to delete, ascending, as they are now.

        The information about `readable` may be old. So this looks again at all steps that the
        decision depends on.
        """
        steps = ascending(readable)
        if self._keep.asks_for_metrics:  # An evaluator may have added some to any step.
            steps = [one for one in self._root.look_again(steps) if not one.problems]
        chosen = set(find_superfluous(steps, self._keep, just_saved=just_saved))
        if not chosen:
            return []
        doubtful = chosen | find_counted(steps, self._keep)
        again = self._root.look_again([step for step in steps if step.step in doubtful])
        known = [step for step in steps if step.step not in doubtful]
        steps = ascending([*known, *(step for step in again if not step.problems)])
        chosen &= set(find_superfluous(steps, self._keep, just_saved=just_saved))
        return [step for step in steps if step.step in chosen]

    def _leave_to_readers(
        self, superfluous: Sequence[Step], there: Sequence[int], kept: int, now_s: float | None
    ) -> list[Step]:
        """Return the steps that no reader seems to want. Only these need claims."""
        wanted: set[int] = set()
        numbers = {step.step for step in superfluous}
        leases = self._leases.active(now_s)
        for lease in leases:
            covered = lease.covered(there) & numbers
            wanted |= covered
            waiting = sum(map(lease.has_yet_to_see, covered))
            if waiting > kept and lease.reader not in self._warned:
                self._warned.add(lease.reader)
                log.warning(
                    "%s (host, process id, random number), which watches %s, has fallen behind: %d "
                    "steps that would be deleted are kept until it has seen them, and up to %d may "
                    "be; if their disk space matters, save less often, have it do less for each "
                    "step, or give its watch a smaller backlog or newest_only",
                    lease.reader,
                    self._root.location,
                    waiting,
                    lease.backlog,
                )
        self._warned &= {lease.reader for lease in leases}
        return [step for step in superfluous if step.step not in wanted]

    # Their deletion

    def _delete(self, steps: Sequence[Step], there: list[int]) -> None:
        """Delete steps that were just looked at, some at a time.

        This removes their numbers from `there`, the steps that readers may still see.
        """
        try:
            for start in range(0, len(steps), _AT_ONCE):
                some = steps[start : start + _AT_ONCE]
                chosen = self._begin_to_delete([step.step for step in some])
                with self._root.changing.lock:
                    self._delete_claimed([one for one in some if one.step in chosen], there)
        except Exception:
            log.exception("steps of %s can't be deleted now", self._root.location)
        finally:
            self._begin_to_delete([])

    def _begin_to_delete(self, steps: Sequence[int]) -> Collection[int]:
        with self._changed:
            chosen = () if self._is_stopped else (step for step in steps if step != self._saving)
            self._deleting = frozenset(chosen)
            self._changed.notify_all()
            return self._deleting

    def _delete_claimed(self, steps: Sequence[Step], there: list[int]) -> None:
        """Claim all of these steps, then delete those that no reader holds."""
        with ExitStack() as stack:
            claims: dict[int, list[_Claimed]] = {}
            for step in steps:
                with self._logging(step.step):
                    claims[step.step] = self._claim_unchanged(step, stack)
            claims = {step: places for step, places in claims.items() if places}
            if not claims:
                return
            if self._check is not None:
                self._check()
            now_s = next(iter(claims.values()))[0][1].now_s
            for step in self._leases.release_steps(list(claims), there=there, now_s=now_s):
                for _, claim, _ in claims.pop(step):
                    claim.release()
            for step, places in claims.items():
                with self._logging(step):
                    for place, claim, version in places:
                        _remove_claimed(place, claim, version)
                        claim.release()
                        place.remove_if_empty()  # other people's files stay
                    there.remove(step)

    def _claim_unchanged(self, step: Step, stack: ExitStack) -> list[_Claimed]:
        """Claim a step's directories. Return none if somebody changed it since it was looked at."""
        places: list[_Claimed] = []
        for name, version in self._root.own_names(step, "deletes").items():
            place = self._root.at(name)
            claim = Claim(place)
            claim.take(wait=False)
            stack.callback(claim.release)
            file = place.look(shard_file.METADATA_NAME)
            places.append((place, claim, version))
            is_noted = ADDED_NAME in claim.names and self._root.look_again([step]) != [step]
            if PIN_NAME in claim.names or is_noted or file is None or file.version != version:
                for _, other, _ in places:
                    other.release()
                return []
        return places

    @contextmanager
    def _logging(self, step: int) -> Generator[None]:
        try:
            yield
        except Exception:
            log.exception("step %d of %s can't be deleted now", step, self._root.location)


class _Exit:
    has_begun = False
    """True once the program has begun to end."""


_live: weakref.WeakSet[Retention] = weakref.WeakSet()


def _wait_at_exit() -> None:
    """Finish all deletions before the program ends. Ctrl-C leaves them to the next one."""
    _Exit.has_begun = True
    with suppress(KeyboardInterrupt):
        for retention in list(_live):
            retention.wait()


at_exit(_wait_at_exit, lambda: None)
