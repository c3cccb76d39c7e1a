"""The files of a checkpoint: their states, the damage, and what parity can make up for. No JAX."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from ostraka.errors import Problem, UnsupportedFormat
from ostraka.formats.ostraka.damage import MISSING, other_size
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.formats.source import Source
from ostraka.integrity import verify
from ostraka.layout.metadata import Metadata
from ostraka.layout.shard_file import METADATA_COPY, METADATA_NAME, index_name
from ostraka.reading.show import hosts_of
from ostraka.report.measure import Progress
from ostraka.report.schema import FileState, FileTable, Integrity, ParityGroups
from ostraka.report.texts import encode_texts

_MOST_PROBLEMS = 200


def describe_files(
    source: Source, path: str, verified: bool, progress: Progress
) -> tuple[FileTable, Integrity]:
    """The table of files, and what is known about them.

    Without `verified`, files are compared with a listing: their names and sizes. Else every byte is
    read and compared.
    """
    metadata = source.metadata if isinstance(source, OstrakaSource) else None
    names = [file.name for file in source.files()]
    sizes = [file.nbytes for file in source.files()]
    kinds = ["parity" if file.device is None else "shard" for file in source.files()]
    processes: list[int | None] = [file.process for file in source.files()]
    if isinstance(source, OstrakaSource):
        for process, index in sorted(source.metadata.indexes.items()):
            names.append(source.shards.path_of(index_name(process)))
            sizes.append(index.size)
            kinds.append("index")
            processes.append(process)
        names.append(METADATA_NAME)
        sizes.append(source.metadata_bytes)
        kinds.append("metadata")
        processes.append(0)
    problems = [] if metadata is None else _by_listing(source, names, sizes)
    state_of_others: FileState = "present"
    unread: frozenset[str] = frozenset()
    has_checksums, is_read = metadata is not None, False
    if verified:
        try:
            with progress(f"verifying {path}", sum(sizes)) as bar:
                report = verify(source.store, raises=False, on_bytes=bar)
        except UnsupportedFormat:
            has_checksums = False
        else:
            has_checksums = is_read = report.has_digests
            problems, unread = list(report.problems), frozenset(report.unchecked)
            state_of_others = "verified" if is_read else "present"
    found = {problem.file: problem for problem in reversed(problems)}

    def state_of(name: str) -> FileState:
        if name in found:
            return "missing" if found[name].found == MISSING else "damaged"
        return "unread" if name in unread else state_of_others

    hosts = hosts_of(source.saved)
    table = FileTable(
        name=names,
        bytes=sizes,
        kind=encode_texts(kinds),
        process=processes,
        host=encode_texts(None if p is None else hosts.get(p) for p in processes),
        state=encode_texts(map(state_of, names)),
        problem={str(row): found[name].found for row, name in enumerate(names) if name in found},
    )
    is_covered = None if not problems or metadata is None else _covers(metadata, problems)
    state = "damaged" if problems else "verified" if is_read else "committed"
    quoted = shlex.quote(path)
    sentences = [problem.explain() for problem in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        sentences.append(f"… and {len(problems) - _MOST_PROBLEMS:,} more")
    integrity = Integrity(
        state=state,
        read=is_read,
        has_checksums=has_checksums,
        problems=sentences,
        parity=None if metadata is None else _parity_groups(metadata, names),
        restorable=is_covered,
        verify=f"ostraka verify {quoted}" if has_checksums and not is_read else None,
        repair=None
        if not problems
        else f"ostraka repair {quoted}"
        + ("" if _mends(is_covered, problems) else " --from OTHER_COPY"),
    )
    return table, integrity


def _by_listing(source: Source, names: Sequence[str], sizes: Sequence[int]) -> list[Problem]:
    """The files that a listing lacks, or has in another size."""
    listed = {file.name: file.size for file in source.store.files("")}
    return [
        Problem(name, MISSING if name not in listed else other_size(listed[name], size))
        for name, size in zip(names, sizes, strict=True)
        if listed.get(name) != size
    ]


def _parity_groups(metadata: Metadata, names: Sequence[str]) -> ParityGroups | None:
    """Groups as rows of the table: shard files come first, in the order of `_METADATA`."""
    parity = metadata.parity
    if parity is None:
        return None
    first = len(metadata.files)
    groups = [
        [*members, *range(first + group * parity.count, first + (group + 1) * parity.count)]
        for group, members in enumerate(parity.groups)
    ]
    return {"count": parity.count, "groups": groups}


def _mends(is_covered: bool | None, problems: Iterable[Problem]) -> bool:
    """True if `repair` needs no other copy: of indexes it makes new ones from the shards."""
    return bool(is_covered) or all(_is_beside(problem.file) for problem in problems)


def _is_beside(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last == METADATA_COPY or (last.startswith("process_") and last.endswith(".json"))


def _covers(metadata: Metadata, problems: Sequence[Problem]) -> bool:
    """True if no byte of a group is lost in more files than it has parity files."""
    if metadata.parity is None:
        return False
    group_of = {
        metadata.files[row].name: (group, 0)
        for group, members in enumerate(metadata.parity.groups)
        for row in members
    }
    # Parity has a header of its own, before the sums of the bytes of its members.
    group_of |= {file.name: (file.group, file.header_bytes) for file in metadata.parity.files}
    sizes = {file.name: file.size for file in (*metadata.files, *metadata.parity.files)}
    ends: dict[int, list[tuple[int, int]]] = {}
    for name, spans in _spans(problems, sizes).items():
        if name not in group_of:
            if _is_beside(name):
                continue
            return False
        group, header_bytes = group_of[name]
        for start, stop in spans:
            ends.setdefault(group, []).append((start - header_bytes, 1))
            ends[group].append((stop - header_bytes, -1))
    for marks in ends.values():
        depth = 0
        for _, step in sorted(marks):
            depth += step
            if depth > metadata.parity.count:
                return False
    return True


def _spans(
    problems: Iterable[Problem], sizes: Mapping[str, int]
) -> Mapping[str, Sequence[tuple[int, int]]]:
    """The damaged bytes of each file by its name in its directory, each counted once."""
    found: dict[str, list[tuple[int, int]]] = {}
    for problem in problems:
        name = problem.file.rpartition("/")[2]
        found.setdefault(name, []).append(problem.span or (0, sizes.get(name, 0)))
    for spans in found.values():
        spans.sort()
        merged: list[tuple[int, int]] = []
        for start, stop in spans:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        spans[:] = merged
    return found
