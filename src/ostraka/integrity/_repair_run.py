"""The stages of a repair: what was saved, its indexes, what is lost, who mends it, the end.

Every process of a run goes through them. Each looks at a share of the files, process 0 collects
what is lost and says who mends what: the one whose devices hold most of it. No JAX: the live tree
and the other processes come in through two small protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ostraka import _format
from ostraka._damage import damage_on_contradiction, damaged
from ostraka._format import METADATA_COPY, METADATA_NAME, Entry, FileEntry
from ostraka._memory import Scratch
from ostraka._metadata import (
    Metadata,
    decode_metadata,
    encode_metadata,
    metadata_is_intact,
    shard_contents,
)
from ostraka._parallel import StopSignal, run_all
from ostraka._parity_format import ParityFile
from ostraka._shards import Shards
from ostraka.errors import Damaged, Problem
from ostraka.integrity._find_metadata import (
    NOWHERE,
    FoundMetadata,
    find_metadata,
    load_metadata,
)
from ostraka.integrity._lost import LostFile, find_lost
from ostraka.integrity._mend import MendJob, mend
from ostraka.integrity._mend_group import Proved, mend_groups
from ostraka.integrity._origins import CopyOrigin, Origin, Shard
from ostraka.integrity._rebuild_tree import rebuild_metadata
from ostraka.integrity._reindex import find_candidates, prove_index
from ostraka.integrity._repair_parity import ORIGIN as PARITY
from ostraka.integrity._repair_parity import ParityOrigin, find_lost_parity, mend_parity
from ostraka.integrity._repair_place import RepairPlace
from ostraka.integrity._repair_report import (
    MendedFile,
    RepairReport,
    Tally,
    decode_mended,
    encode_mended,
)
from ostraka.integrity._repair_team import Live, Team
from ostraka.storage import Store

Key = tuple[int, int]
"""A file: its device and its part."""


@dataclass
class Repair:
    """One repair, on one of its processes."""

    store: Store
    team: Team
    place: RepairPlace
    copies: Sequence[Store]
    make_live: Callable[[Metadata], Live] | None
    dry_run: bool
    rebuild_tree: bool
    tally: Tally
    mended: list[MendedFile] = field(default_factory=list[MendedFile])
    problems: list[Problem] = field(default_factory=list[Problem])
    notes: list[str] = field(default_factory=list[str])
    _origins: list[Origin] = field(default_factory=list[Origin])
    _live: Live | None = None
    _unproved: set[int] = field(default_factory=set[int])
    """Processes whose index is lost for good: nothing can be said of their files."""
    _proved: Proved = field(default_factory=Proved)
    _rebuilt_indexes: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def run(self) -> RepairReport:
        """Go through all stages."""
        found = self._agree_on_metadata()
        try:
            self._prepare()
            self._mend_indexes()
            self._mend_groups()
            self._mend_files(self._find_lost())
            if self._shards.parities is not None:
                self._mend_parity(self._shards.parities.files)
            return self._end(found)
        finally:
            for origin in self._origins:
                origin.close()

    # What was saved

    def _agree_on_metadata(self) -> FoundMetadata:
        def decide(_: list[Any]) -> list[Any]:
            self.place.take()
            found = find_metadata(self.store, self.copies, required=not self.rebuild_tree)
            return [found.copy, found.name, found.found, found.was_committed]

        found = FoundMetadata(*self.team.exchange("metadata", None, decide))
        if found.copy == NOWHERE:
            self._metadata_bytes = self._rebuild_metadata()
        else:
            self._metadata_bytes = load_metadata(self.store, self.copies, found)
        self.tally.add(read=len(self._metadata_bytes))
        if not metadata_is_intact(self._metadata_bytes):
            raise damaged(self.store, found.name, "it has changed during the repair")
        with damage_on_contradiction(self.store):
            self.metadata = decode_metadata(self._metadata_bytes)
            contents = shard_contents(self.metadata)
        self._contents = contents
        self.tally.expected = sum(file.size for file in self.metadata.files)
        self._shards = Shards(self.store, self.metadata)
        for process, data in self._rebuilt_indexes.items():
            self._shards.provide_index(process, data)
        return found

    def _rebuild_metadata(self) -> bytes:
        """Without any copy of it: from the headers of the shards."""
        rebuilt = rebuild_metadata(self.store, self.tally)
        self.notes += rebuilt.notes
        shards = Shards(self.store, rebuilt.metadata)
        for process, data in rebuilt.indexes.items():
            self._put_index(shards.name_of_index(process), "it is lost", data, "its shards")
            self._rebuilt_indexes[process] = data
        return encode_metadata(rebuilt.metadata)

    def _prepare(self) -> None:
        self._copies = [CopyOrigin(copy, self.metadata, self.tally) for copy in self.copies]
        if self.make_live is not None:
            self._live = self.make_live(self.metadata)
            self._origins.append(self._live)
        self._origins += self._copies
        if self._shards.parities is not None:
            self._origins.append(ParityOrigin(self._shards, self.tally))
        if self.team.process == 0:
            self.place.clear(_format.shards_directory(self.metadata.id))

    def _is_mine(self, process: int) -> bool:
        """Whether this process looks at what a process of the save has written."""
        return process % self.team.count == self.team.process

    # Indexes

    def _mend_indexes(self) -> None:
        lost = self.team.exchange("indexes", self._lost_indexes(), _join)
        if not lost:
            return
        mine = {str(p): self._live_candidates(p) for p, _ in lost}

        def decide(candidates: list[Any]) -> list[Any]:
            return [self._mend_index(p, found, candidates) for p, found in lost]

        for (process, found), text in zip(
            lost, self.team.exchange("candidates", mine, decide), strict=True
        ):
            if text is not None:
                self._shards.provide_index(process, text.encode())
                continue
            self._unproved.add(process)
            if self.team.process == 0:
                name = self._shards.name_of_index(process)
                what = "not all of its shards are whole, here or in a copy, to make it again from"
                self.problems.append(Problem(name, f"{found}, and can't be mended: {what}"))

    def _lost_indexes(self) -> list[Any]:
        lost: list[Any] = []
        for process in filter(self._is_mine, sorted(self.metadata.indexes)):
            if process in self._rebuilt_indexes:
                continue
            try:
                self.tally.add(read=len(self._shards.read_index(process)))
            except Damaged as error:
                lost.append([process, error.problems[0].found])
        return lost

    def _files_of(self, process: int) -> list[tuple[FileEntry, list[Entry]]]:
        process_of = self.metadata.process_of
        return [f for f in self._contents.values() if process_of[f[0].device] == process]

    def _live_candidates(self, process: int) -> dict[str, Any]:
        """What the index of a process would say of files that this one holds all of."""
        found: dict[str, Any] = {}
        for file, contents in self._files_of(process) if self._live is not None else ():
            assert self._live is not None
            e_tag = self.store.parts.is_remote
            digests = self._live.digest_file(file, contents, with_e_tag=e_tag)
            if digests is not None:
                found[file.name] = f"{''.join(digests.digests)}/{digests.identity}"
        return found

    def _mend_index(self, process: int, found: str, live: list[Any]) -> str | None:
        """On process 0: the index that was lost, which is written; None if nothing tells it."""
        name, expected = self._shards.name_of_index(process), self.metadata.indexes[process]
        for copy in self._copies:
            if (data := copy.read_index(process, expected)) is not None:
                return self._put_index(name, found, data, copy.name)
        if self._shards.parities is not None:
            data = self._shards.parities.index_copy(process)
            if data is not None:
                return self._put_index(name, found, data, PARITY)
        stores = [self.store, *self.copies]
        texts = [of_process[str(process)] for of_process in live]
        files = self._files_of(process)
        candidates = find_candidates(stores, self.metadata, files, texts, self.tally)
        data = prove_index(self.metadata, process, candidates, self.store.location)
        return None if data is None else self._put_index(name, found, data, "its shards")

    def _put_index(self, name: str, found: str, data: bytes, *origins: str) -> str:
        self._put(name, data)
        self.mended.append(MendedFile(name, found, (), origins, len(data), 0))
        return data.decode()

    def _put(self, name: str, data: bytes) -> None:
        if not self.dry_run:
            self.store.put(name, data, check=self.place.check)
            self.tally.add(written=len(data))

    # Shards

    def _mend_groups(self) -> None:
        """Files that are missing, from parity, if there is nothing better to mend them from."""
        if self.copies or self.make_live is not None:
            return

        def shard_of(file: FileEntry) -> Shard | None:
            with suppress(Damaged):  # It is told in the next stage.
                if self.metadata.process_of[file.device] not in self._unproved:
                    return self._shard((file.device, file.part))
            return None

        self._proved = mend_groups(self._job(), self._shards, shard_of)
        self.mended += self._proved.mended

    def _find_lost(self) -> list[LostFile]:
        shards: list[Shard] = []
        for key, (file, _) in self._contents.items():
            process = self.metadata.process_of[file.device]
            if self._shards.name_of(file) in self._proved.whole:
                continue
            if self._is_mine(process) and process not in self._unproved:
                try:
                    shards.append(self._shard(key))
                except Damaged as error:  # Its index contradicts `_METADATA`.
                    self.problems += error.problems
        scratch, check = Scratch(), self.team.check
        look = partial(find_lost, self.store, scratch=scratch, tally=self.tally, check=check)
        threads = self.store.parts.reads_at_once
        found = run_all(look, shards, threads=threads, stop=StopSignal())
        mine = [lost.encode() for lost in found if lost is not None]
        return [LostFile.decode(one) for one in self.team.exchange("lost", mine, _join)]

    def _shard(self, key: Key) -> Shard:
        file, contents = self._contents[key]
        data_bytes = contents[-1].offset + contents[-1].nbytes
        digests = self._shards.digests_of(file, data_bytes)
        return Shard(self._shards.name_of(file), file, contents, digests.blocks())

    def _mend_files(self, lost: Sequence[LostFile]) -> None:
        if not lost:
            return
        mine = [one for one, who in zip(lost, self._share_out(lost), strict=True) if self._is(who)]
        job = self._job()
        for result in run_all(
            lambda one: mend(job, self._shard((one.device, one.part)), one),
            mine,
            threads=self.store.parts.at_once,
            stop=StopSignal(),
        ):
            self._add(result)

    def _job(self) -> MendJob:
        return MendJob(
            store=self.store,
            metadata=self.metadata,
            origins=self._origins,
            process=self.team.process,
            dry_run=self.dry_run,
            tally=self.tally,
            check=self.team.check,
        )

    def _mend_parity(self, files: Sequence[ParityFile]) -> None:
        """Last of the files: parity is made of indexes and shards."""
        # They are whole once every process has mended its own, and only then.
        left = self.team.exchange("shards", len(self.problems), sum)
        tally = self.tally
        for file in files:
            if not self._is_mine(file.process):
                continue
            self.team.check()
            is_summed = self._shards.name_of(file) in self._proved.sums
            found = find_lost_parity(self._shards, file, tally, is_summed=is_summed)
            if not found:
                continue
            if self.dry_run and not left:
                name, origins = self._shards.name_of(file), ("its group",)
                mended = MendedFile(name, found, (), origins, file.size, self.team.process)
                self.mended.append(mended)
                continue
            if self.dry_run:
                self.problems.append(Problem(self._shards.name_of(file), found))
                continue
            self._add(
                mend_parity(self._shards, file, found, self.team.process, tally, self.team.check)
            )

    def _add(self, result: MendedFile | Problem) -> None:
        if isinstance(result, Problem):
            self.problems.append(result)
        else:
            self.mended.append(result)

    def _is(self, process: int) -> bool:
        return process == self.team.process

    def _share_out(self, lost: Sequence[LostFile]) -> list[int]:
        """By file, the process that mends it: the one that holds most of what it lost."""
        if self.team.count == 1:
            return [0] * len(lost)
        covered = [0] * len(lost)
        if self._live is not None:
            for number, one in enumerate(lost):
                shard = self._shard((one.device, one.part))
                covered[number] = self._live.covered_bytes(shard, one.blocks)

        def decide(posted: list[list[int]]) -> list[int]:
            load = [0] * self.team.count
            chosen: list[int] = []
            for number, one in enumerate(lost):
                owner = self.metadata.process_of[one.device]
                best = max(
                    range(self.team.count),
                    key=lambda p, n=number, o=owner: (posted[p][n], -load[p], p == o),
                )
                load[best] += 1
                chosen.append(best)
            return chosen

        return self.team.exchange("share", covered, decide)

    # The end

    def _end(self, found: FoundMetadata) -> RepairReport:
        def decide(posts: list[Any]) -> dict[str, Any]:
            mended = [f for post in posts for f in decode_mended(post["mended"])]
            problems = [p for post in posts for p in _decode_problems(post["problems"])]
            self._mend_metadata(found, mended, problems)
            posts[0] |= self._encode_bytes()  # with what `_METADATA` took
            return {
                "mended": encode_mended(sorted(mended, key=lambda f: f.file)),
                "problems": _encode_problems(problems),
                "notes": self.notes,
                "read": sum(post["read"] for post in posts),
                "written": sum(post["written"] for post in posts),
            }

        mine = {
            "mended": encode_mended(self.mended),
            "problems": _encode_problems(self.problems),
            **self._encode_bytes(),
        }
        said = self.team.exchange("end", mine, decide, is_last=True)
        return RepairReport(
            path=self.store.location,
            dry_run=self.dry_run,
            mended=tuple(decode_mended(said["mended"])),
            problems=tuple(_decode_problems(said["problems"])),
            notes=tuple(said["notes"]),
            bytes_read=said["read"],
            bytes_written=said["written"],
            time_s=0.0,
        )

    def _encode_bytes(self) -> dict[str, int]:
        return {"read": self.tally.read, "written": self.tally.written}

    def _mend_metadata(
        self, found: FoundMetadata, mended: list[MendedFile], problems: list[Problem]
    ) -> None:
        """On process 0, last of all: nothing is a checkpoint that is not whole."""
        data = self._metadata_bytes
        if found.found:
            origin = self.copies[found.copy].location if found.copy >= 0 else found.name
            if problems and not found.was_committed:
                what = "is not written, since not all of what it names is there"
                problems.append(Problem(METADATA_NAME, f"{found.found}, and {what}"))
                return
            if not self.dry_run:
                self.place.put_metadata(data)
                self.tally.add(written=len(data))
            mended.append(MendedFile(METADATA_NAME, found.found, (), (origin,), len(data), 0))
            if not found.was_committed:
                self.notes.append(
                    f"{METADATA_NAME} was lost, or this save was never committed: which of the "
                    "two can't be told; all that it names is there"
                )
        if self.metadata.files:
            self._mend_metadata_copy(data, mended)

    def _mend_metadata_copy(self, data: bytes, mended: list[MendedFile]) -> None:
        name = f"{_format.shards_directory(self.metadata.id)}/{METADATA_COPY}"
        try:
            there = self.store.get(name)
        except FileNotFoundError:
            there = None
        except OSError:
            there = b""
        if there != data:
            found = "it is missing" if there is None else f"it is not a copy of {METADATA_NAME}"
            self._put(name, data)
            mended.append(MendedFile(name, found, (), (METADATA_NAME,), len(data), 0))


def _join(posts: list[Any]) -> list[Any]:
    return [one for post in posts for one in post]


def _encode_problems(problems: Sequence[Problem]) -> list[Any]:
    return [[problem.file, problem.found, problem.leaves] for problem in problems]


def _decode_problems(problems: list[Any]) -> list[Problem]:
    return [Problem(file, found, tuple(leaves)) for file, found, leaves in problems]
