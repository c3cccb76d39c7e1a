"""Delete the steps that are no longer to be kept, unless somebody reads them. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ostraka._record import logger as log
from ostraka.errors import Busy
from ostraka.manager._keep import Keep, find_superfluous
from ostraka.manager._leases import reader_of
from ostraka.manager._steps import Root
from ostraka.storage import Claim


def retain(
    root: Root,
    keep: Keep,
    *,
    just_saved: int,
    ignore: Collection[int],
    held: Callable[[Sequence[int]], Collection[int]],
) -> None:
    """After a commit: delete steps that no condition of `keep` keeps; skip those in `ignore`.

    `held` says which of all steps may not be deleted now, though they count as any other. A step
    that is being read stays until a later save. This save has succeeded already: errors go to the
    log, and the next one retries.
    """
    try:
        steps = [step for step in root.steps() if step.step not in ignore]
        spared = held([step.step for step in steps])
        superfluous = find_superfluous(steps, keep, just_saved=just_saved)
        superfluous = [step for step in superfluous if step not in spared]
    except Exception:
        log.exception("nothing is deleted from %s: it can't be told what to keep", root.location)
        return
    there = [step.step for step in steps]
    for step in superfluous:

        def spare(claim: Claim, step: int = step) -> bool:
            return reader_of(root.store, step, there=there, now_s=claim.now_s) is not None

        try:
            if root.remove(step, spare=spare):
                there.remove(step)
        except Exception:
            log.exception("step %d of %s can't be deleted now", step, root.location)


def remove_unless_read(root: Root, step: int) -> None:
    """Delete a step. Raises Busy, naming the reader, while one reads it."""

    def refuse(claim: Claim) -> bool:
        reader = reader_of(root.store, step, there=(), now_s=claim.now_s)
        if reader is not None:
            raise Busy(
                f"step {step} of {root.location} is being read by {reader} (host, process id, "
                "random number), which watches this run; wait for it, or end it"
            )
        return False

    root.remove(step, spare=refuse)
