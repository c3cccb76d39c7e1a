"""Walk the whole chain of digests: `_METADATA`, process indexes, every block of every file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ostraka._checkpoint import open_at
from ostraka._foreign import is_committed
from ostraka._step_names import steps_among
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    Problem,
    UnsupportedFormat,
)
from ostraka.formats._ostraka import OstrakaSource
from ostraka.formats._safetensors import SafetensorsSource
from ostraka.integrity._check import Check
from ostraka.integrity._report import Report
from ostraka.storage import PathLike, open_store

OnBytes = Callable[[int, int], None]
"""Told of progress: the bytes that have been read so far, and those that there are in all."""


def verify(
    path: PathLike,
    *,
    raises: bool = True,
    read: bool = True,
    all_steps: bool = False,
    on_bytes: OnBytes | None = None,
) -> Report:
    """Read all of a checkpoint, compare every byte with its digest, and decode its tree.

    What is intact can be restored. Headers are compared with `_METADATA`, too, and every element of
    every leaf must be in the files exactly once. Raises Damaged with every problem, naming files,
    the processes that wrote them, leaves and their boxes; with `raises=False` the report has them
    instead. Damage to `_METADATA` itself always raises: nothing else can be told without it. Files
    that are not part of the checkpoint are `notes` of the report, not problems. `on_bytes` is
    called now and then with the bytes read so far and the bytes that there are.

    With `read=False` no shard file is read: they must be there and have their sizes. Of files in a
    bucket the store also says whether they are the very objects that the save uploaded: the
    report's `proven` counts those, and its `notes` name those of which only reading could tell.
    That finds what was lost, cut or written again, and not what rotted on the store's own disks.

    Safetensors files have no digests. Of those it is checked that all are there, that none is cut
    short, and that headers, index and sizes agree; the report's `has_digests` is False.

    `path` may be a directory of steps, for the newest of them, or `runs/7` for step 7 of `runs`;
    the report's `path` tells which it was. With `all_steps=True` it is a directory of steps, and
    all of them are verified: the report's `steps` has a report for each, and in `problems` the
    names of files begin with that of their step. A step whose `_METADATA` is damaged has a report,
    too.

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
        source = open_at(path)
        if isinstance(source, SafetensorsSource):
            return _verify_structure(source, begin)
        if not isinstance(source, OstrakaSource):
            raise UnsupportedFormat(
                f"can't verify {source.location}: Ostraka did not write it, and it has no digests "
                "to compare with"
            )
        source.shards.has_warned = True  # What is damaged comes into the report.
        check = Check(source, on_bytes)
        check.run(read=read)
        # A save to the same path may have replaced the files under our hands.
        if not check.problems or source.is_current():
            break
    return Report(
        path=source.location,
        leaves=len(source.metadata.leaves),
        files=len(source.files()),
        bytes_read=check.bytes_read,
        time_s=time.perf_counter() - begin,
        problems=tuple(check.problems),
        notes=tuple(check.notes),
        unchecked=tuple(check.unchecked),
        proven=check.proven,
    )


def _verify_structure(source: SafetensorsSource, begin: float) -> Report:
    """Of files without digests: all that can be checked was checked when they were opened."""
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
        except Damaged as error:
            report = Report(error.path, 0, 0, 0, 0.0, error.problems)
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
