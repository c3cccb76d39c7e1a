"""Delete the steps that are no longer to be kept, unless somebody reads them. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ostraka import _format
from ostraka._record import logger as log
from ostraka.errors import Busy
from ostraka.manager._keep import Keep, find_superfluous
from ostraka.manager._leases import Lease, Leases
from ostraka.manager._steps import Root, Step
from ostraka.storage import Claim


class Retention:
    """Deletes steps of a root that no condition of `keep` keeps."""

    def __init__(self, root: Root, keep: Keep):
        self._root = root
        self._keep = keep
        self._leases = Leases(root.store)
        self._warned: set[str] = set()
        """Readers that are known to be behind."""

    def run(
        self,
        *,
        just_saved: int,
        ignore: Collection[int],
        held: Callable[[Sequence[int]], Collection[int]],
    ) -> None:
        """After a commit: delete what is superfluous; skip steps in `ignore`.

        `held` says which of all steps may not be deleted now, though they count as any other. A
        step that a reader has, or has yet to come to, stays until a later save. This save has
        succeeded already: errors go to the log, and the next one retries.
        """
        if self._keep.keeps_all:
            return
        try:
            steps = [step for step in self._root.steps() if step.step not in ignore]
            spared = held([step.step for step in steps])
            superfluous = find_superfluous(steps, self._keep, just_saved=just_saved)
            superfluous = [step for step in superfluous if step not in spared]
            kept = len(steps) - len(superfluous)
            there = [step.step for step in steps]
            if len(superfluous) > 1:  # Else it costs no more to find out when it is claimed.
                now_s = self._time_of(just_saved, steps)
                superfluous = self._leave_to_readers(superfluous, there, kept, now_s)
        except Exception:
            log.exception(
                "nothing is deleted from %s: it can't be told what to keep", self._root.location
            )
            return
        self._delete(superfluous, there)

    def _delete(self, superfluous: Sequence[int], there: list[int]) -> None:
        for step in superfluous:

            def spare(claim: Claim, step: int = step) -> bool:
                reader = self._leases.release_step(step, there=there, now_s=claim.now_s)
                return reader is not None

            try:
                if self._root.remove(step, spare=spare):
                    there.remove(step)
            except Exception:
                log.exception("step %d of %s can't be deleted now", step, self._root.location)

    def _time_of(self, just_saved: int, steps: Sequence[Step]) -> float | None:
        """When a step was saved, by the store's own clock."""
        for step in steps:
            if step.step == just_saved:
                file = self._root.at(step.names[0]).look(_format.METADATA_NAME)
                return None if file is None else file.changed_s
        return None

    def _leave_to_readers(
        self, superfluous: Sequence[int], there: Sequence[int], kept: int, now_s: float | None
    ) -> list[int]:
        """Which steps no reader seems to want. So those that wait for one are not claimed."""
        wanted: set[int] = set()
        leases = self._leases.living(now_s)
        for lease in leases:
            its = [step for step in superfluous if lease.covers(step, there)]
            wanted.update(its)
            self._warn_if_behind(lease, sum(map(lease.has_yet_to_see, its)), kept)
        self._warned &= {lease.reader for lease in leases}
        return [step for step in superfluous if step not in wanted]

    def _warn_if_behind(self, lease: Lease, waiting: int, kept: int) -> None:
        if waiting <= kept or lease.reader in self._warned:
            return
        self._warned.add(lease.reader)
        log.warning(
            "%s (host, process id, random number), which watches %s, has fallen behind: %d steps "
            "that would be deleted are kept until it has seen them, and up to %d may be; if their "
            "disk space matters, save less often, have it do less for each step, or give its watch "
            "a smaller backlog or newest_only",
            lease.reader,
            self._root.location,
            waiting,
            lease.backlog,
        )


def remove_unless_read(root: Root, step: int) -> None:
    """Delete a step. Raises Busy, naming the reader, while one reads it."""

    def refuse(claim: Claim) -> bool:
        reader = Leases(root.store).release_step(step, there=(), now_s=claim.now_s)
        if reader is not None:
            raise Busy(
                f"step {step} of {root.location} is being read by {reader} (host, process id, "
                "random number), which watches this run; wait for it, or end it"
            )
        return False

    root.remove(step, spare=refuse)
