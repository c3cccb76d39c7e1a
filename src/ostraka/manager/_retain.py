"""Delete the steps that are no longer to be kept. No JAX."""

from __future__ import annotations

from collections.abc import Collection

from ostraka._record import logger as log
from ostraka.manager._keep import Keep, find_superfluous
from ostraka.manager._steps import Root


def retain(root: Root, keep: Keep, *, just_saved: int, ignore: Collection[int]) -> None:
    """After a commit: delete what `keep` has no reason to keep; leave steps in `ignore` alone.

    The save is good whatever happens here: errors go to the log, and the next save tries again.
    """
    try:
        steps = [step for step in root.steps() if step.step not in ignore]
        superfluous = find_superfluous(steps, keep, just_saved=just_saved)
    except Exception:
        log.exception("nothing is deleted from %s: it can't be told what to keep", root.location)
        return
    for step in superfluous:
        try:
            root.remove(step)
        except Exception:
            log.exception("step %d of %s can't be deleted now", step, root.location)
