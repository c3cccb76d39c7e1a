"""A checkpoint as a document: its tree, shards, files, integrity and values. No JAX."""

from __future__ import annotations

from typing import Any

from ostraka.report.measure import Progress, unseen
from ostraka.report.schema import CheckpointDocument
from ostraka.storage import PathLike


def describe_checkpoint(
    path: PathLike,
    *,
    names: Any = None,
    values: bool | None = None,
    verified: bool = False,
    progress: Progress = unseen,
) -> CheckpointDocument:
    """The document of a checkpoint. `values`: read the arrays; None reads up to 1 GiB."""
    raise NotImplementedError
