"""`ostraka.repair`: find the lost and damaged files of a checkpoint, and rewrite only those.

Its stages, on every process of a run:

    _METADATA → indexes → groups of parity → shards → parity files → report

Each process looks at a share of the files. Process 0 collects the lost ones and assigns each to the
process whose devices hold most of it. Only a repair from the live tree needs JAX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ostraka.common.progress import Count, OnBytes, shown
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    Problem,
    problems_from_json,
    problems_to_json,
)
from ostraka.formats.buffers import Scratch
from ostraka.formats.ostraka.damage import MISSING, damage_on_contradiction, damaged
from ostraka.formats.ostraka.shards import Shards
from ostraka.formats.source import names_in
from ostraka.formats.unknown import is_committed
from ostraka.integrity._report import RepairedFile, RepairReport, RepairResult, decode_repaired
from ostraka.integrity.repair._descriptions import OWN, find_index, find_metadata
from ostraka.integrity.repair._files import (
    CopyOrigin,
    FoundMetadata,
    LostFile,
    Origin,
    ParityOrigin,
    RepairJob,
    SavedFiles,
    SavedShard,
    find_lost,
    find_lost_parity,
    repair_parity,
    repair_shard,
)
from ostraka.integrity.repair._parity_pass import PassResult, repair_groups
from ostraka.layout import shard_file as _format
from ostraka.layout.file_names import steps_among
from ostraka.layout.metadata import Metadata, decode_metadata, metadata_is_intact, shard_contents
from ostraka.layout.runs import decode_runs, encode_runs
from ostraka.layout.shard_file import METADATA_COPY, METADATA_NAME
from ostraka.processes.operation import Operation
from ostraka.reading.locate import locate
from ostraka.saving.place import Place, find_temporaries
from ostraka.storage import PathLike, Store, open_store

if TYPE_CHECKING:
    from ostraka.integrity.repair._live import LiveOrigin

_MakeLive: TypeAlias = "Callable[[Metadata], LiveOrigin]"


def repair(
    path: PathLike,
    tree: Any = None,
    *,
    sources: PathLike | Sequence[PathLike] | None = None,
    dry_run: bool = False,
    raises: bool = True,
    progress: bool = False,
    on_bytes: OnBytes | None = None,
) -> RepairReport:
    """Find the lost and damaged files of a checkpoint, and rewrite only those.

    Only bytes with the digests that the save recorded are written. So the values of a model that
    has trained on are refused, and the error names the leaf. Lost blocks come from `tree`, from
    `sources`, or from parity. A lost index is made again from the shards, and a lost `_METADATA`
    from its copy among them, both bit for bit.

    A file is replaced as a whole, atomically, and all others stay untouched. A repair that was
    killed leaves every file unchanged or repaired, and the next repair does the rest. If
    `_METADATA` is gone, it is written only if all of its files are complete. The path may be one
    where a save died just before its commit, and the repair commits it.

    Args:
        path: A checkpoint.
        tree: The live tree that was saved, or parts of it. Every process of a run calls this with
            its tree, and gives what its devices and memory hold. Without it, one process calls.
        sources: Another copy of this save (a mirror, a copied directory), or any checkpoint with
            some of the same bytes, such as an older step. One path, or a list of paths. In a run
            directory, the step of the same name comes first.
        dry_run: Write nothing, and report what would be written.
        raises: Raise an error for damage that is left. With False, only the report has it.
        progress: Show how far it has come: a bar on a terminal or in a notebook, else a line in the
            log every 30 s.
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
        >>> print(ostraka.repair("runs/7", {"model": model}, sources="s3://bucket/runs"))
    """
    begin = time.perf_counter()
    store = locate(path)
    if not store.exists():
        raise CheckpointNotFound(f"there is no checkpoint at {store.location}")
    copies = _copies(store, sources)
    place = Place(store, "repair", dry_run=dry_run)

    def run(operation: Operation, make_live: _MakeLive | None) -> RepairReport:
        is_shown = progress and operation.process == 0
        with shown(f"repair {store.location}", is_shown, on_bytes) as tell:
            job = RepairJob(store, copies, operation, place, dry_run, Count(on_bytes=tell))
            return _run_stages(job, make_live)

    try:
        if tree is None:
            report = run(Operation(f"repair of {store.location}", alone=True), None)
        else:
            from ostraka.integrity.repair._live import repair_together  # needs JAX

            report = repair_together(store.location, tree, run)
    finally:
        place.release()
    report = replace(report, duration_s=time.perf_counter() - begin)
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
            raise CheckpointNotFound(f"there is nothing at {copy.location}, given as sources=")
    # A store that was given as such may have the same name on another server.
    return [
        copy
        for copy in found
        if copy.location != store.location or not getattr(copy, "is_named", True)
    ]


# The stages


def _run_stages(job: RepairJob, make_live: _MakeLive | None) -> RepairReport:
    """Repair a checkpoint, together with the other processes of the operation."""
    saved = _agree_on_metadata(job, make_live)
    with ExitStack() as stack:
        for origin in saved.origins:
            stack.callback(origin.close)
        if job.process == 0:
            directory = _format.shards_directory(saved.metadata.id)
            for name in find_temporaries(job.store, directory):  # of a repair that was killed
                job.place.delete(name)
        results, unknown = _repair_indexes(job, saved)
        done = PassResult()
        if not saved.copies and saved.live is None:  # Nothing is better than parity.
            done = repair_groups(job, saved, unknown)
            results += done.repaired
        problems, lost = _find_lost(job, saved, unknown, done.whole)
        results += problems
        results += _repair_files(job, saved, lost)
        results += _repair_parity(job, saved, results, done.sums)
    return _finish(job, saved, results)


def _agree_on_metadata(job: RepairJob, make_live: _MakeLive | None) -> SavedFiles:
    def decide(_: list[Any]) -> FoundMetadata:
        job.place.take()
        return find_metadata(job.store, job.copies)

    found = FoundMetadata(*job.operation.exchange("metadata", None, decide))
    data = (job.store if found.copy == OWN else job.copies[found.copy]).get(found.name)
    if not metadata_is_intact(data):
        raise damaged(job.store, found.name, "it has changed during the repair")
    with damage_on_contradiction(job.store):
        metadata = decode_metadata(data)
        contents = shard_contents(metadata)
    job.bytes_read.total = sum(file.size for file in metadata.files)
    job.bytes_read.add(len(data))
    copies = [CopyOrigin(copy, metadata, job.bytes_read) for copy in job.copies]
    live = None if make_live is None else make_live(metadata)
    shards = Shards(job.store, metadata)
    origins: list[Origin] = [*filter(None, [live]), *copies]
    if shards.parities is not None:
        origins.append(ParityOrigin(shards, job.bytes_read))
    return SavedFiles(found, data, metadata, shards, contents, copies, live, origins)


def _repair_indexes(job: RepairJob, saved: SavedFiles) -> tuple[list[RepairResult], set[int]]:
    """Get lost indexes back. Also returns the processes whose index stays lost."""
    mine: list[Any] = []
    for process in filter(job.has_share, sorted(saved.metadata.indexes)):
        try:
            job.bytes_read.add(len(saved.shards.read_index(process)))
        except Damaged as error:
            mine.append([process, error.problems[0].found])
    lost: list[Any] = job.operation.exchange("indexes", mine, _join)
    if not lost:
        return [], set()
    process_of = saved.metadata.process_of
    files = {
        process: [
            saved.contents[file.device, file.part]
            for file in saved.metadata.files
            if process_of[file.device] == process
        ]
        for process, _ in lost
    }
    results: list[RepairResult] = []

    def decide(posts: list[Any]) -> list[str | None]:
        texts: list[str | None] = []
        for process, found in lost:
            got = find_index(job, saved, process, files[process], posts)
            name = saved.shards.name_of_index(process)
            if got is None:
                why = "not all of its shards are whole, here or in a copy, to make it again from"
                if saved.metadata.version >= _format.COMPRESSED_VERSION:
                    why = "only a copy or parity can give the index of compressed files"
                results.append(Problem(name, f"{found}, and can't be repaired: {why}"))
                texts.append(None)
                continue
            data, origin = got
            job.put(name, data)
            results.append(RepairedFile(name, found, (), (origin,), len(data), 0))
            texts.append(data.decode())
        return texts

    posted: dict[str, str | None] = {}
    if saved.live is not None:
        is_remote = job.store.traits.is_remote
        for file, contents in chain.from_iterable(files.values()):
            posted[file.name] = saved.live.digest_file(file, contents, with_e_tag=is_remote)
    texts = job.operation.exchange("candidates", posted, decide)
    found = {process: text for (process, _), text in zip(lost, texts, strict=True)}
    for process, text in found.items():
        if text is not None:
            saved.shards.provide_index(process, text.encode())
    return results, {process for process, text in found.items() if text is None}


def _find_lost(
    job: RepairJob, saved: SavedFiles, unknown: Collection[int], whole: Collection[str]
) -> tuple[list[Problem], list[LostFile]]:
    """The lost files of all processes. Also returns the problems with indexes, on this process.

    Files of `unknown` processes can't be compared, and those in `whole` were compared just now.
    """
    shards: list[SavedShard] = []
    problems: list[Problem] = []
    for key, (file, _) in saved.contents.items():
        process = saved.metadata.process_of[file.device]
        if process in unknown or saved.shards.name_of(file) in whole or not job.has_share(process):
            continue
        try:
            shards.append(saved.shard(*key))
        except Damaged as error:
            problems += error.problems
    scratch = Scratch()
    found = run_all(
        lambda shard: find_lost(job, shard, scratch),
        shards,
        threads=job.store.traits.reads_at_once,
        stop=StopSignal(),
    )
    mine = [(one.device, one.part, one.found, encode_runs(one.blocks)) for one in found if one]
    lost = job.operation.exchange("lost", mine, _join)
    return problems, [LostFile(d, p, what, decode_runs(blocks)) for d, p, what, blocks in lost]


def _repair_files(
    job: RepairJob, saved: SavedFiles, lost: Sequence[LostFile]
) -> list[RepairResult]:
    if not lost:
        return []
    shares = zip(lost, _assign(job, saved, lost), strict=True)
    return run_all(
        lambda one: repair_shard(job, saved.origins, saved.shard(one.device, one.part), one),
        [one for one, process in shares if process == job.process],
        threads=job.store.traits.at_once,
        stop=StopSignal(),
    )


def _assign(job: RepairJob, saved: SavedFiles, lost: Sequence[LostFile]) -> list[int]:
    """Assign each lost file to the process that holds most of its lost bytes."""
    count, live = job.operation.count, saved.live
    if count == 1:
        return [0] * len(lost)
    covered = [
        0 if live is None else live.covered_bytes(saved.shard(one.device, one.part), one.blocks)
        for one in lost
    ]

    def decide(posted: list[list[int]]) -> list[int]:
        load = [0] * count
        chosen: list[int] = []
        for number, one in enumerate(lost):
            owner = saved.metadata.process_of[one.device]
            best = max(
                range(count),
                key=lambda p, n=number, o=owner: (posted[p][n], -load[p], p == o),
            )
            load[best] += 1
            chosen.append(best)
        return chosen

    return job.operation.exchange("share", covered, decide)


def _repair_parity(
    job: RepairJob, saved: SavedFiles, results: Sequence[RepairResult], summed: Collection[str]
) -> list[RepairResult]:
    """Repair parity files, after the indexes and shards that they are made of."""
    if saved.shards.parities is None:
        return []
    # The groups are complete once every process has repaired its own files, and only then.
    mine = sum(isinstance(result, Problem) for result in results)
    problems = job.operation.exchange("shards", mine, sum)
    repaired: list[RepairResult] = []
    for file in saved.shards.parities.parity.files:
        if not job.has_share(file.process):
            continue
        job.operation.check()
        name = saved.shards.name_of(file)
        found = find_lost_parity(job, saved.shards, file, is_summed=name in summed)
        if not found:
            continue
        if not job.dry_run:
            repaired.append(repair_parity(job, saved.shards, file, found))
        elif problems:
            repaired.append(Problem(name, found))
        else:
            repaired.append(RepairedFile(name, found, (), ("its group",), file.size, job.process))
    return repaired


def _finish(job: RepairJob, saved: SavedFiles, results: Sequence[RepairResult]) -> RepairReport:
    """Write `_METADATA` if it was lost, last of all, and report the results of all processes."""

    def decide(posts: list[Any]) -> dict[str, Any]:
        repaired = decode_repaired(_join([post["repaired"] for post in posts]))
        problems = list(problems_from_json(_join([post["problems"] for post in posts])))
        written_before = job.bytes_written.done
        notes = _repair_metadata(job, saved, repaired, problems)
        written = job.bytes_written.done - written_before
        return {
            "repaired": list(map(astuple, sorted(repaired, key=lambda file: file.file))),
            "problems": problems_to_json(problems),
            "notes": notes,
            "read": sum(post["read"] for post in posts),
            "written": sum(post["written"] for post in posts) + written,
        }

    mine = {
        "repaired": [astuple(one) for one in results if isinstance(one, RepairedFile)],
        "problems": problems_to_json([one for one in results if isinstance(one, Problem)]),
        "read": job.bytes_read.done,
        "written": job.bytes_written.done,
    }
    answer = job.operation.exchange("end", mine, decide, is_last=True)
    return RepairReport(
        path=job.store.location,
        dry_run=job.dry_run,
        repaired=tuple(decode_repaired(answer["repaired"])),
        problems=problems_from_json(answer["problems"]),
        notes=tuple(answer["notes"]),
        bytes_read=answer["read"],
        bytes_written=answer["written"],
        duration_s=0.0,
    )


def _repair_metadata(
    job: RepairJob, saved: SavedFiles, repaired: list[RepairedFile], problems: list[Problem]
) -> list[str]:
    """On process 0, write `_METADATA` and its copy if they were lost. Returns notes for the report.

    A save that may never have been committed is only committed if all of its files are complete.
    """
    notes: list[str] = []
    found, data = saved.found, saved.data
    if found.found:
        if problems and not found.was_committed:
            why = "is not written, since not all of what it names is there"
            problems.append(Problem(METADATA_NAME, f"{found.found}, and {why}"))
            return notes
        if not job.dry_run:
            job.place.commit(data, {})
            job.bytes_written.add(len(data))
        origin = job.copies[found.copy].location if found.copy >= 0 else found.name
        repaired.append(RepairedFile(METADATA_NAME, found.found, (), (origin,), len(data), 0))
        if not found.was_committed:
            notes.append(
                f"{METADATA_NAME} was lost, or this save was never committed: which of the "
                "two can't be told; all that it names is there"
            )
    if saved.metadata.files:
        name = saved.shards.path_of(METADATA_COPY)
        try:
            copy = job.store.get(name)
        except FileNotFoundError:
            copy = None
        except OSError:
            copy = b""
        if copy != data:
            why = MISSING if copy is None else f"it is not a copy of {METADATA_NAME}"
            job.put(name, data)
            repaired.append(RepairedFile(name, why, (), (METADATA_NAME,), len(data), 0))
    return notes


def _join(posts: list[Any]) -> list[Any]:
    return [one for post in posts for one in post]
