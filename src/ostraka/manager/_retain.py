"""Delete the steps that are no longer to be kept. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ostraka._record import logger as log
from ostraka.manager._keep import Keep, find_superfluous
from ostraka.manager._steps import Root


def retain(
    root: Root,
    keep: Keep,
    *,
    just_saved: int,
    ignore: Collection[int],
    held: Callable[[Sequence[int]], Collection[int]],
) -> None:
    """After a commit: delete steps that no condition of `keep` keeps; skip those in `ignore`.

    `held` says which of all steps may not be deleted now, though they count as any other. The save
    has succeeded already: errors go to the log, and the next save retries.
    """
    try:
        steps = [step for step in root.steps() if step.step not in ignore]
        spared = held([step.step for step in steps])
        superfluous = find_superfluous(steps, keep, just_saved=just_saved)
        superfluous = [step for step in superfluous if step not in spared]
    except Exception:
        log.exception("nothing is deleted from %s: it can't be told what to keep", root.location)
        return
    for step in superfluous:
        try:
            root.remove(step)
        except Exception:
            log.exception("step %d of %s can't be deleted now", step, root.location)
