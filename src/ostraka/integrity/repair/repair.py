"""`ostraka.repair`: find the lost and damaged files of a checkpoint, and rewrite only those."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from ostraka.common.progress import Count, OnBytes
from ostraka.errors import CheckpointNotFound, Damaged
from ostraka.formats.source import names_in
from ostraka.formats.unknown import is_committed
from ostraka.integrity.repair._origins import RepairJob
from ostraka.integrity.repair._stages import run_stages
from ostraka.integrity.repair.report import RepairReport
from ostraka.layout.file_names import steps_among
from ostraka.layout.shard_file import METADATA_NAME
from ostraka.processes.operation import Operation
from ostraka.reading.locate import locate
from ostraka.saving.place import Place
from ostraka.storage import PathLike, Store, open_store


def repair(
    path: PathLike,
    tree: Any = None,
    *,
    from_: PathLike | Sequence[PathLike] | None = None,
    dry_run: bool = False,
    raises: bool = True,
    on_bytes: OnBytes | None = None,
) -> RepairReport:
    """Find the lost and damaged files of a checkpoint, and rewrite only those.

    Only bytes with the digests that the save recorded are written. So the values of a model that
    has trained on are refused, and the error names the leaf. Lost blocks come from `tree`, from
    `from_`, or from parity. A lost index is made again from the shards, and a lost `_METADATA` from
    its copy among them, both bit for bit.

    A file is replaced as a whole, atomically, and all others stay untouched. A repair that was
    killed leaves every file unchanged or repaired, and the next repair does the rest. If
    `_METADATA` is gone, it is written only if all of its files are complete. The path may be one
    where a save died just before its commit, and the repair commits it.

    Args:
        path: A checkpoint.
        tree: The live tree that was saved, or parts of it. Every process of a run calls this with
            its tree, and gives what its devices and memory hold. Without it, one process calls.
        from_: Another copy of this save (a mirror, a copied directory), or any checkpoint with some
            of the same bytes, such as an older step. One path, or a list of paths. In a run
            directory, the step of the same name comes first.
        dry_run: Write nothing, and report what would be written.
        raises: Raise an error for damage that is left. With False, only the report has it.
        on_bytes: Called now and then, from threads, with the bytes read so far and the bytes in
            all.

    Returns:
        A report with the repaired files and the problems that are left.

    Raises:
        Damaged: Some files could not be repaired, for the reasons that it names. Others were.
        CheckpointNotFound: Nothing is at the path.
        Busy: A save or another repair writes there.
        RepairFailed: Another process failed.

    Example:
        >>> print(ostraka.repair("runs/7", {"model": model}, from_="s3://bucket/runs"))
    """
    begin = time.perf_counter()
    store = locate(path)
    if not store.exists():
        raise CheckpointNotFound(f"there is no checkpoint at {store.location}")
    copies = _copies(store, from_)
    place = Place(store, "repair", dry_run=dry_run)

    def run(operation: Operation, make_live: Callable[[Any], Any] | None) -> RepairReport:
        bytes_read = Count(on_bytes=on_bytes)
        job = RepairJob(store, copies, operation, place, dry_run, bytes_read)
        return run_stages(job, make_live)

    try:
        if tree is None:
            report = run(Operation(f"repair of {store.location}", alone=True), None)
        else:
            from ostraka.integrity.repair._live import repair_together  # needs JAX

            report = repair_together(store.location, tree, run)
    finally:
        place.release()
    report = replace(report, time_s=time.perf_counter() - begin)
    if report.problems and raises:
        raise Damaged(report.path, report.problems)
    return report


def _copies(store: Store, given: PathLike | Sequence[PathLike] | None) -> list[Store]:
    """The stores to take bytes from, the likeliest first."""
    if given is None:
        return []
    several = isinstance(given, list | tuple)
    paths = cast("Sequence[PathLike]", given) if several else [cast("PathLike", given)]
    own_name = store.location.rstrip("/").rpartition("/")[2]
    found: list[Store] = []
    for path in paths:
        root = open_store(path)
        names = names_in(root)
        steps = [name for of_step in steps_among(names).values() for name in of_step]
        if METADATA_NAME in names or not steps:
            found.append(locate(path))
            continue
        committed = [name for name in reversed(steps) if is_committed(root.at(name))]
        committed.sort(key=lambda name: name != own_name)
        found += [root.at(name) for name in committed]
    for copy in found:
        if not copy.exists():
            raise CheckpointNotFound(f"there is nothing at {copy.location}, given as from_")
    # A store that was given as such may have the same name on another server.
    return [
        copy
        for copy in found
        if copy.location != store.location or not getattr(copy, "is_named", True)
    ]
