"""The last stage of a save: all or nothing; and its place, as process 0 handles it."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import astuple, replace
from datetime import UTC, datetime
from operator import attrgetter, itemgetter
from typing import Any

import jax

from ostraka import _format
from ostraka._agree import Agreed
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._leftovers import UNKNOWN, Seen, committed_directory, remove_leftovers, take_over
from ostraka._metadata import IndexEntry, Metadata, encode_metadata
from ostraka._parallel import StopSignal, run_all
from ostraka._parity_format import Parity, ParityFile
from ostraka._plan_parity import ParityPlan
from ostraka._plan_write import WritePlan
from ostraka._record import Stopwatch, summarize, timeline
from ostraka._runs import encode_runs
from ostraka._version import __version__
from ostraka._write_parity import with_sizes
from ostraka._write_shards import Written
from ostraka.errors import (
    Busy,
    InvalidTree,
    NotDurable,
    OutcomeUnknown,
    PathInTheWay,
    TooLarge,
)
from ostraka.storage import MOST_BYTES, Claim, Store

_LOOKERS = 16


class SavePlace:
    """The place of one save. Only process 0 of a run has one."""

    def __init__(self, store: Store):
        self.store = store
        self._claim = Claim(store)
        self._seen = Seen((), None, None)
        self._is_new = False
        """Whether there was nothing at the path, not even an empty directory."""
        self._may_be_there = False
        """Whether the commit may have happened, or may yet happen, though it raised."""

    def take(self, *, unfinished: str | None = None) -> None:
        """Make the place exist and claim it; clear what dead saves left, or do so later.

        `unfinished` is the directory of a save that this one goes on with: it stays, and no other
        checkpoint is replaced. Raises Busy while another save writes there, PathInTheWay for what
        is not ours.
        """
        self._is_new = self.store.prepare()
        self._claim.take(wait=True)
        self._seen = take_over(self.store, self._claim.names)
        if unfinished is not None:
            if self._seen.version is not None:
                raise PathInTheWay(
                    f"{self.store.location} has a checkpoint already, which is not replaced; "
                    "remove it, or give another place"
                )
            names = tuple(name for name in self._seen.names if name != unfinished)
            self._seen = replace(self._seen, names=names)
        if self._seen.names:
            remove_leftovers(self.store, self._seen)

    def commit(self, metadata: bytes, save_id: str, sizes: Mapping[str, int]) -> None:
        """Write `_METADATA`: from now on the checkpoint is there.

        `sizes` are those of all files in the save's directory. Raises Busy if another save has
        taken this one for dead, removed any of them, or replaced the `_METADATA` that was there.
        """
        directory = _format.shards_directory(save_id)

        def check() -> None:
            self._claim.check()
            self._check_files(directory, sizes)

        if len(metadata) > MOST_BYTES:
            raise InvalidTree(
                f"the description of the tree has {len(metadata):,} bytes, and no more than "
                f"{MOST_BYTES:,} are read again; save parts of it to paths of their own"
            )
        if sizes:
            # Not synced: no promise depends on it, and small saves would wait for it.
            self.store.put(f"{directory}/{_format.METADATA_COPY}", metadata, durable=False)
        # The shards must not be lost to a crash that keeps the commit.
        self.store.sync("")
        try:
            self.store.put(
                _format.METADATA_NAME, metadata, replaces=self._seen.version, check=check
            )
        except OutcomeUnknown as error:
            self._may_be_there = True
            what = (
                "the new checkpoint is in place, but may not survive a power failure"
                if isinstance(error, NotDurable)
                else "whether the new checkpoint or what was there before is in place can't be told"
            )
            raise type(error)(f"{what}: {error}; save again", errno=error.errno) from error

    def _check_files(self, directory: str, sizes: Mapping[str, int]) -> None:
        if not sizes:
            return
        there = {file.name: file.size for file in self.store.files(f"{directory}/")}
        for name, size in sizes.items():
            path = f"{directory}/{name}"
            if there.get(path) == size:
                continue
            # A list may be that of a moment ago, on network file systems: ask the file itself.
            try:
                with closing(self.store.open(path)) as reader:
                    found = reader.size
            except FileNotFoundError:
                found = None
            if found != size:
                what = "is gone" if found is None else f"has {found:,} of its {size:,} bytes"
                raise Busy(
                    f"{self.store.location}/{path}, which this save has written, {what}: another "
                    "save or program has changed it; save again"
                )

    def remove_replaced(self) -> None:
        """After the commit: delete the shards of what was there before.

        The new checkpoint is good: what can't be deleted now, the next save tries again.
        """
        # Only what was seen before: what has come since then is another save's, and alive.
        with suppress(OSError):
            for name in filter(_format.is_shards_directory, self._seen.names):
                self.store.delete(name)
            if self._claim.found_dead:
                self.store.discard_uploads()

    def clean_up(self, save_id: str) -> None:
        """Remove what a failed save wrote, unless it is what `_METADATA` names.

        Raises OSError for what can't be told or deleted now; the next save removes it.
        """
        if save_id and not self._may_be_there:
            directory = _format.shards_directory(save_id)
            if committed_directory(self.store) not in (directory, UNKNOWN):
                self.store.delete(directory)
        # The claim's own file would keep the place from being empty.
        self._claim.release()
        if self._is_new:
            self.store.remove_if_empty()

    def release(self) -> None:
        """Let others have the place."""
        self._claim.release()


def commit(
    operation: Operation,
    place: SavePlace,
    agreed: Agreed,
    plan: WritePlan,
    written: Written,
    watch: Stopwatch,
    parity: ParityPlan | None = None,
) -> list[float]:
    """Report, and commit if every process has reported well; returns what all have done."""

    def decide(reports: list[Any]) -> list[float]:
        indexes = {p: IndexEntry(*r["index"]) for p, r in enumerate(reports) if r["index"]}
        if operation.count > 1:
            _check_visible(place.store, indexes, agreed.save_id)
        files = plan.files
        if plan.compressed:
            files = with_sizes(plan, list(map(itemgetter("sizes"), reports)))
        summary = summarize(list(map(itemgetter("written"), reports)))
        hosts = list(map(itemgetter("host"), reports))
        metadata = Metadata(
            id=agreed.save_id,
            writer={**_describe_writer(), "hosts": hosts, "timeline": timeline(watch, summary)},
            process_of=plan.process_of,
            tree=agreed.tree,
            meshes=plan.meshes,
            layouts=plan.layouts,
            leaves=plan.leaves,
            files=files,
            indexes=indexes,
            user=agreed.user,
            parity=None if parity is None else _join_parity(parity, reports),
            version=plan.version,
        )
        sizes = {file.name: file.size for file in files}
        sizes |= {_format.index_name(process): i.size for process, i in indexes.items()}
        if metadata.parity is not None:
            sizes |= {file.name: file.size for file in metadata.parity.files}
        place.commit(encode_metadata(metadata), agreed.save_id, sizes)
        return summary

    index = written.index
    mine: dict[str, Any] = {
        "index": None if index is None else [index.size, index.digest],
        "sizes": encode_runs(written.sizes) if plan.compressed else [],
        "written": [sum(written.sizes), watch.phases["write"]],
        "host": socket.gethostname(),
    }
    if parity is not None:
        mine["parity"] = [astuple(file) for file in written.parity]
        mine["written"][0] += sum(file.size for file in written.parity)
        mine["written"][1] += watch.phases["parity"]
    return operation.exchange("commit", mine, decide, is_last=True)


def _join_parity(plan: ParityPlan, reports: list[Any]) -> Parity:
    """What `_METADATA` says of parity, from what each process has written of it."""
    files = sorted(
        (ParityFile(*row) for report in reports for row in report["parity"]),
        key=attrgetter("group", "number"),
    )
    return Parity(plan.count, tuple(group.members for group in plan.groups), tuple(files))


def _check_visible(store: Store, indexes: Mapping[int, IndexEntry], save_id: str) -> None:
    """Process 0 must see what the others wrote, or the checkpoint would be in pieces."""

    def look(process: int) -> None:
        name = f"{_format.shards_directory(save_id)}/{_format.index_name(process)}"
        try:
            data = store.get(name, indexes[process].size)
            seen = _format.digest(data) == indexes[process].digest
        except (FileNotFoundError, TooLarge):
            seen = False
        if not seen:
            raise ProcessFailed(
                process,
                f"process 0 can't see what it wrote ({store.location}/{name}): all "
                "processes must save to one shared file system",
            )

    others = [process for process in indexes if process != 0]
    run_all(look, others, threads=_LOOKERS, stop=StopSignal())


def _describe_writer() -> dict[str, str]:
    return {
        "ostraka": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
