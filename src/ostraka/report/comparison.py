"""How two checkpoints differ, or the steps along a run, as a document. No JAX."""

from __future__ import annotations

from typing import Any

from ostraka.report.measure import Progress, unseen
from ostraka.report.schema import ComparisonDocument
from ostraka.storage import PathLike


def describe_comparison(
    a: PathLike, b: PathLike, *, names: Any = None, progress: Progress = unseen
) -> ComparisonDocument:
    """The document of two checkpoints, whose arrays are read piece by piece and verified."""
    raise NotImplementedError


def describe_changes(run: PathLike, *, progress: Progress = unseen) -> ComparisonDocument:
    """The document of the first and the last step of a run, with the steps between them."""
    raise NotImplementedError
