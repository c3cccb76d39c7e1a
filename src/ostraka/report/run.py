"""A run directory as a document: steps, metrics, sizes, save times, what goes next. No JAX."""

from __future__ import annotations

from ostraka.report.schema import RunDocument
from ostraka.storage import PathLike


def is_run(path: PathLike) -> bool:
    """True if a path is a directory of steps, not a checkpoint."""
    raise NotImplementedError


def describe_run(path: PathLike, *, verified: bool = False) -> RunDocument:
    """The document of a run directory. With `verified`, every byte of every step is read."""
    raise NotImplementedError
