"""`ostraka.verify`: compare `_METADATA`, process indexes and every block with their digests."""

from __future__ import annotations

import time
from dataclasses import replace

from ostraka.common.progress import OnBytes
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    Problem,
    UnsupportedFormat,
)
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.unknown import is_committed
from ostraka.integrity._check import Check
from ostraka.integrity._report import Report
from ostraka.layout.file_names import steps_among
from ostraka.reading.locate import open_at
from ostraka.storage import PathLike, open_store
from ostraka.tree.nodes import has_values


def verify(
    path: PathLike,
    *,
    raises: bool = True,
    read: bool = True,
    all_steps: bool = False,
    on_bytes: OnBytes | None = None,
) -> Report:
    """Read a checkpoint, compare every byte with its digest, and decode its tree.

    A verified checkpoint can be restored. Headers are compared with `_METADATA`, too, and every
    element of every leaf must be in the files exactly once. If `_METADATA` itself is damaged,
    nothing else can be checked, and the report counts no leaves and no files.

    Safetensors files have no digests. For them, `verify` checks that all files exist, that none is
    truncated, and that headers, index and sizes agree.

    Args:
        path: A checkpoint, a run directory for its newest step, or `runs/7` for step 7 of `runs`.
            The report's `path` is the location of the checkpoint.
        raises: Raise an error for damage. With False, only the report has it.
        read: Read shard files. With False, they must exist and have their sizes. A bucket also
            tells if they are the objects that the save uploaded. This detects lost, truncated and
            overwritten files, but no bit rot.
        all_steps: Verify all steps of the run directory at `path`. The report's `steps` has a
            report for each, and the file names in `problems` begin with the name of the step.
        on_bytes: Called now and then with the bytes read so far and the bytes in all.

    Returns:
        A report with all problems and notes.

    Raises:
        Damaged: Something is damaged. It names files, the processes that wrote them, leaves and
            their boxes.
        CheckpointNotFound: Nothing is at the path.
        UnsupportedFormat: Ostraka did not write it, and it has no digests.

    Example:
        >>> print(ostraka.verify("runs/7"))
        >>> print(ostraka.verify("runs", all_steps=True, raises=False))
    """
    if all_steps:
        report = _verify_steps(path, read, on_bytes)
    else:
        report = _verify_one(path, read, on_bytes)
    if report.problems and raises:
        raise Damaged(report.path, report.problems)
    return report


def _verify_one(path: PathLike, read: bool, on_bytes: OnBytes | None) -> Report:
    begin = time.perf_counter()
    while True:
        try:
            source = open_at(path)
        except Damaged as error:
            return Report(error.path, 0, 0, 0, time.perf_counter() - begin, error.problems)
        if isinstance(source, SafetensorsSource):
            return _verify_structure(source, begin)
        if not isinstance(source, OstrakaSource):
            raise UnsupportedFormat(
                f"can't verify {source.location}: Ostraka did not write it, and it has no digests "
                "to compare with"
            )
        if source.shards.parities is not None:
            source.shards.parities.has_warned = True  # What is damaged comes into the report.
        check = Check(source, on_bytes)
        check.run(read=read)
        # A save to the same path may have replaced the files under our hands.
        if not check.problems or source.is_current():
            break
    return Report(
        path=source.location,
        leaves=len(source.metadata.leaves),
        files=len(source.files()),
        bytes_read=check.bytes_read.done,
        time_s=time.perf_counter() - begin,
        problems=tuple(check.problems),
        notes=tuple(check.notes),
        unchecked=tuple(check.unchecked),
        proven=check.proven,
        is_empty=not (check.problems or source.metadata.leaves or has_values(source.tree)),
    )


def _verify_structure(source: SafetensorsSource, begin: float) -> Report:
    """The report on files without digests. Opening them has checked all that can be checked."""
    return Report(
        path=source.location,
        leaves=len(source.saved.leaves),
        files=len(source.files()),
        bytes_read=source.header_bytes,
        time_s=time.perf_counter() - begin,
        problems=(),
        has_digests=False,
    )


def _verify_steps(path: PathLike, read: bool, on_bytes: OnBytes | None) -> Report:
    begin = time.perf_counter()
    root = open_store(path)
    steps: list[Report] = []
    problems: list[Problem] = []
    committed = (
        name
        for names in steps_among(root.list()).values()
        for name in [n for n in names if is_committed(root.at(n))][:1]
    )
    for name in committed:
        try:
            report = _verify_one(root.at(name), read, on_bytes)
        except NotACheckpoint:
            continue
        steps.append(report)
        problems += [replace(found, file=f"{name}/{found.file}") for found in report.problems]
    if not steps:
        raise CheckpointNotFound(f"there are no steps in {root.location} to verify")
    return Report(
        path=root.location,
        leaves=sum(step.leaves for step in steps),
        files=sum(step.files for step in steps),
        bytes_read=sum(step.bytes_read for step in steps),
        time_s=time.perf_counter() - begin,
        problems=tuple(problems),
        proven=sum(step.proven for step in steps),
        steps=tuple(steps),
    )
