"""The stages of a repair, on every process of a run.

    _METADATA → indexes → groups of parity → shards → parity files → report

Each process looks at a share of the files. Process 0 collects the lost ones and assigns each to the
process whose devices hold most of it. The live tree comes in through a small protocol, so that a
repair without it needs no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Damaged, Problem, problems_from_json, problems_to_json
from ostraka.formats.buffers import Scratch
from ostraka.formats.ostraka.damage import MISSING, damage_on_contradiction, damaged
from ostraka.formats.ostraka.shards import Shards
from ostraka.integrity.repair._files import LostFile, find_lost, find_lost_parity, mend, mend_parity
from ostraka.integrity.repair._find_metadata import OWN, FoundMetadata, find_metadata
from ostraka.integrity.repair._indexes import find_index
from ostraka.integrity.repair._origins import (
    CopyOrigin,
    Origin,
    ParityOrigin,
    RepairJob,
    SavedShard,
)
from ostraka.integrity.repair._parity_pass import PassResult, mend_groups
from ostraka.integrity.repair.report import (
    MendedFile,
    RepairReport,
    RepairResult,
    decode_mended,
)
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import Metadata, decode_metadata, metadata_is_intact, shard_contents
from ostraka.layout.shard_file import METADATA_COPY, METADATA_NAME, Entry, FileEntry
from ostraka.saving.place import find_temporaries

if TYPE_CHECKING:
    from ostraka.integrity.repair._live import LiveOrigin


@dataclass(frozen=True, slots=True)
class _SavedFiles:
    """The checkpoint as it was saved, by its `_METADATA`, and the origins of bytes it has lost."""

    found: FoundMetadata
    data: bytes
    """The bytes of `_METADATA`."""
    metadata: Metadata
    shards: Shards
    contents: Mapping[tuple[int, int], tuple[FileEntry, list[Entry]]]
    """Shard files and their boxes, by device and part."""
    copies: Sequence[CopyOrigin]
    live: LiveOrigin | None

    def shard(self, device: int, part: int) -> SavedShard:
        """A shard file. Raises Damaged if its index contradicts `_METADATA`."""
        file, contents = self.contents[device, part]
        digests = self.shards.digests_of(file, contents[-1].offset + contents[-1].nbytes)
        name = self.shards.name_of(file)
        return SavedShard(name, file, contents, digests.blocks(), self.metadata)


def run_stages(job: RepairJob, make_live: Callable[[Metadata], LiveOrigin] | None) -> RepairReport:
    """Repair a checkpoint, together with the other processes of the operation."""
    saved = _agree_on_metadata(job, make_live)
    origins: list[Origin] = [*filter(None, [saved.live]), *saved.copies]
    if saved.shards.parities is not None:
        origins.append(ParityOrigin(saved.shards, job.bytes_read))
    with ExitStack() as stack:
        for origin in origins:
            stack.callback(origin.close)
        if job.process == 0:
            directory = _format.shards_directory(saved.metadata.id)
            for name in find_temporaries(job.store, directory):  # of a repair that was killed
                job.place.delete(name)
        results, unknown = _mend_indexes(job, saved)
        done = PassResult()
        if not saved.copies and saved.live is None:  # Nothing is better than parity.
            done = mend_groups(job, saved.shards, saved.shard, unknown)
            results += done.mended
        problems, lost = _find_lost(job, saved, unknown, done.whole)
        results += problems
        results += _mend_files(job, saved, origins, lost)
        results += _mend_parity(job, saved, results, done.sums)
    return _finish(job, saved, results)


def _agree_on_metadata(
    job: RepairJob, make_live: Callable[[Metadata], LiveOrigin] | None
) -> _SavedFiles:
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
    return _SavedFiles(found, data, metadata, shards, contents, copies, live)


def _mend_indexes(job: RepairJob, saved: _SavedFiles) -> tuple[list[RepairResult], set[int]]:
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
            got = find_index(job, saved.shards, saved.copies, process, files[process], posts)
            name = saved.shards.name_of_index(process)
            if got is None:
                why = "not all of its shards are whole, here or in a copy, to make it again from"
                if saved.metadata.version >= _format.COMPRESSED_VERSION:
                    why = "only a copy or parity can give the index of compressed files"
                results.append(Problem(name, f"{found}, and can't be mended: {why}"))
                texts.append(None)
                continue
            data, origin = got
            job.put(name, data)
            results.append(MendedFile(name, found, (), (origin,), len(data), 0))
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
    job: RepairJob, saved: _SavedFiles, unknown: Collection[int], whole: Collection[str]
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
    mine = [lost.encode() for lost in found if lost is not None]
    return problems, list(map(LostFile.decode, job.operation.exchange("lost", mine, _join)))


def _mend_files(
    job: RepairJob, saved: _SavedFiles, origins: Sequence[Origin], lost: Sequence[LostFile]
) -> list[RepairResult]:
    if not lost:
        return []
    shares = zip(lost, _assign(job, saved, lost), strict=True)
    return run_all(
        lambda one: mend(job, origins, saved.shard(one.device, one.part), one),
        [one for one, process in shares if process == job.process],
        threads=job.store.traits.at_once,
        stop=StopSignal(),
    )


def _assign(job: RepairJob, saved: _SavedFiles, lost: Sequence[LostFile]) -> list[int]:
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


def _mend_parity(
    job: RepairJob, saved: _SavedFiles, results: Sequence[RepairResult], summed: Collection[str]
) -> list[RepairResult]:
    """Mend parity files, after the indexes and shards that they are made of."""
    if saved.shards.parities is None:
        return []
    # The groups are complete once every process has mended its own files, and only then.
    mine = sum(isinstance(result, Problem) for result in results)
    problems = job.operation.exchange("shards", mine, sum)
    mended: list[RepairResult] = []
    for file in saved.shards.parities.files:
        if not job.has_share(file.process):
            continue
        job.operation.check()
        name = saved.shards.name_of(file)
        found = find_lost_parity(job, saved.shards, file, is_summed=name in summed)
        if not found:
            continue
        if not job.dry_run:
            mended.append(mend_parity(job, saved.shards, file, found))
        elif problems:
            mended.append(Problem(name, found))
        else:
            mended.append(MendedFile(name, found, (), ("its group",), file.size, job.process))
    return mended


def _finish(job: RepairJob, saved: _SavedFiles, results: Sequence[RepairResult]) -> RepairReport:
    """Write `_METADATA` if it was lost, last of all, and report the results of all processes."""

    def decide(posts: list[Any]) -> dict[str, Any]:
        mended = decode_mended(_join([post["mended"] for post in posts]))
        problems = list(problems_from_json(_join([post["problems"] for post in posts])))
        written_before = job.bytes_written.done
        notes = _mend_metadata(job, saved, mended, problems)
        written = job.bytes_written.done - written_before
        return {
            "mended": list(map(astuple, sorted(mended, key=lambda file: file.file))),
            "problems": problems_to_json(problems),
            "notes": notes,
            "read": sum(post["read"] for post in posts),
            "written": sum(post["written"] for post in posts) + written,
        }

    mine = {
        "mended": [astuple(one) for one in results if isinstance(one, MendedFile)],
        "problems": problems_to_json([one for one in results if isinstance(one, Problem)]),
        "read": job.bytes_read.done,
        "written": job.bytes_written.done,
    }
    answer = job.operation.exchange("end", mine, decide, is_last=True)
    return RepairReport(
        path=job.store.location,
        dry_run=job.dry_run,
        mended=tuple(decode_mended(answer["mended"])),
        problems=problems_from_json(answer["problems"]),
        notes=tuple(answer["notes"]),
        bytes_read=answer["read"],
        bytes_written=answer["written"],
        time_s=0.0,
    )


def _mend_metadata(
    job: RepairJob, saved: _SavedFiles, mended: list[MendedFile], problems: list[Problem]
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
        mended.append(MendedFile(METADATA_NAME, found.found, (), (origin,), len(data), 0))
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
            mended.append(MendedFile(name, why, (), (METADATA_NAME,), len(data), 0))
    return notes


def _join(posts: list[Any]) -> list[Any]:
    return [one for post in posts for one in post]
