"""`ostraka.latest`: the newest step of a run, without a manager. No JAX."""

from __future__ import annotations

from ostraka.errors import CheckpointNotFound
from ostraka.manager._recover import Places
from ostraka.manager.steps import Root
from ostraka.storage import PathLike


def latest(directory: PathLike) -> int | None:
    """Return the newest committed step of a run, by the rules of `Manager.latest`.

    This takes no lock and does not import JAX. It needs no other process: each that calls it sees
    the directory for itself.

    Args:
        directory: The directory of the run, as a path, a URL or a store.

    Returns:
        The number of the step. None if there is no step, or no directory.

    Raises:
        CheckpointNotFound: The path is a checkpoint or a file, not a directory of steps.
        Damaged: There are steps, but none of them can be read.
        UnsupportedFormat: A newer version of Ostraka wrote the newest step.

    Example:
        >>> step = ostraka.latest("runs/a")
    """
    root = Root(directory)
    root.refuse_checkpoint(CheckpointNotFound)
    return Places(root, None).latest_here()
