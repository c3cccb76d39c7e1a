"""`ostraka.copy`: a checkpoint, or all steps of a directory, from one store to another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ostraka._checkpoint import locate, open_at, read_whole
from ostraka._foreign import names_in
from ostraka._format import METADATA_NAME
from ostraka._parallel import StopSignal, run_all
from ostraka._source import Source
from ostraka._step_names import steps_among
from ostraka._units import human_bytes
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    PathInTheWay,
    Problem,
    UnsupportedFormat,
    count_of,
)
from ostraka.formats import has_finished_checkpoint, is_checkpoint
from ostraka.formats._orbax import OrbaxSource
from ostraka.formats._ostraka import OstrakaSource
from ostraka.formats._safetensors import SafetensorsSource
from ostraka.storage import PathLike, Store, is_text, open_store
from ostraka.transfer._checkpoint import copy_checkpoint, total_bytes
from ostraka.transfer._files import Tally
from ostraka.transfer._orbax import copy_orbax, total_bytes_of_orbax
from ostraka.transfer._safetensors import copy_safetensors, total_bytes_of_safetensors

OnBytes = Callable[[int, int], None]
"""Told of progress: the bytes that are in the target so far, and those that will be."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What `copy` did."""

    source: str
    target: str
    copied: int
    """Checkpoints that are in the target by this copy."""
    skipped: int
    """Checkpoints that were there already."""
    bytes_copied: int
    bytes_skipped: int
    """Bytes that were there already: of whole checkpoints, or of files of an unfinished copy."""
    time_s: float

    def __str__(self) -> str:
        text = f"{count_of(self.copied, 'checkpoint')}, {human_bytes(self.bytes_copied)}"
        if self.bytes_skipped:
            were = f"{count_of(self.skipped, 'checkpoint')}, " if self.skipped else ""
            text += f"; already there: {were}{human_bytes(self.bytes_skipped)}"
        return f"{self.source} to {self.target}: {text} ({self.time_s:.2f} s)"


@dataclass(frozen=True, slots=True)
class _Done:
    """The copy of one checkpoint."""

    source: str
    is_new: bool
    copied: int
    skipped: int


def copy(source: PathLike, target: PathLike, *, on_bytes: OnBytes | None = None) -> CopyReport:
    """Copy a checkpoint, or all steps of a directory of steps, to another place or store.

    The copy is the same checkpoint, byte for byte, and appears as one event when all of it is
    there. Every byte is compared with its digest on the way: what is damaged raises Damaged, and is
    not copied; the other steps are. A copy that was interrupted goes on where it ended if it is
    started again. A checkpoint that is there already is not read again (`verify` does that); a
    different one is not replaced: it raises PathInTheWay. A checkpoint of Orbax, and a directory of
    safetensors files with what lies beside them, is copied file by file; it has no digests to
    compare with.

    `source` may be `runs/7` for step 7 of `runs`; `target` is taken as it is. Steps keep the names
    of their directories; pins are not copied. `on_bytes` is called now and then, from threads, with
    the bytes done so far and the bytes that there are. Of several processes, one should call it.

    >>> print(ostraka.copy("runs", "s3://bucket/runs"))
    """
    begin = time.perf_counter()
    root, place = open_store(source), open_store(target)
    # Stores that were given as such may have one name on two servers.
    are_paths = is_text(source) and is_text(target)
    if are_paths and root.location == place.location:
        raise PathInTheWay(f"{root.location} can't be copied onto itself; give another place")
    if are_paths and place.location.startswith(f"{root.location.rstrip('/')}/"):
        raise PathInTheWay(
            f"{root.location} can't be copied to {place.location}, which is inside it; give "
            "another place"
        )
    tell = on_bytes or (lambda done, total: None)
    names = _steps_in(root)
    done = _copy_steps(root, place, names, tell) if names else [_copy_one(source, place, tell)]
    return CopyReport(
        source=root.location if names else done[0].source,
        target=place.location,
        copied=sum(one.is_new for one in done),
        skipped=sum(not one.is_new for one in done),
        bytes_copied=sum(one.copied for one in done),
        bytes_skipped=sum(one.skipped for one in done),
        time_s=time.perf_counter() - begin,
    )


def _steps_in(root: Store) -> list[str]:
    """The names of the committed steps in a place, ascending; none if it is a checkpoint itself."""
    names = names_in(root)
    if is_checkpoint(names):
        return []
    steps = [name for of_step in steps_among(names).values() for name in of_step]
    return [name for name in steps if has_finished_checkpoint(root.at(name))]


def _copy_one(source: PathLike, target: Store, on_bytes: OnBytes) -> _Done:
    names = names_in(target)
    if METADATA_NAME not in names and steps_among(names):
        own_name = locate(source).location.rpartition("/")[2]
        raise PathInTheWay(
            f"{target.location} is a directory of steps, and one checkpoint is to be copied; give "
            f"a path of its own, as {target.location}/{own_name}"
        )
    return _copy_to(source, target, on_bytes)


def _copy_to(path: PathLike, target: Store, on_bytes: OnBytes) -> _Done:
    """Copy the checkpoint that a path means, also while saves replace it."""

    def work(sources: Sequence[Source]) -> _Done:
        source = sources[0]
        total = _total_bytes(source)
        tally = Tally(lambda done: on_bytes(done, total))
        if isinstance(source, OrbaxSource):
            is_new = copy_orbax(source, target, tally)
        elif isinstance(source, SafetensorsSource):
            is_new = copy_safetensors(source, target, tally)
        else:
            is_new = copy_checkpoint(_ours(source), target, tally)
        return _Done(source.location, is_new, tally.copied, tally.skipped)

    return read_whole([path], work)


def _copy_steps(root: Store, target: Store, names: Sequence[str], on_bytes: OnBytes) -> list[_Done]:
    if METADATA_NAME in target.list():
        raise PathInTheWay(
            f"{target.location} is a checkpoint, and {root.location} a directory of steps; give a "
            "directory for its steps"
        )
    problems: list[Problem] = []
    sizes = _sizes_of(root, names, problems)
    if not sizes and not problems:
        open_at(root)  # Raises, and says what is there instead.
    total, before = sum(sizes.values()), 0
    done: list[_Done] = []

    def tell_from(start: int) -> OnBytes:
        return lambda now, _: on_bytes(start + now, total)

    for name, size in sizes.items():
        try:
            done.append(_copy_to(root.at(name), target.at(name), tell_from(before)))
        except CheckpointNotFound:
            pass  # Its run has deleted it meanwhile.
        except Damaged as error:
            if error.path != root.at(name).location:
                raise
            problems += _below(name, error)
        before += size
    if problems:
        raise Damaged(root.location, problems)
    return done


def _sizes_of(root: Store, names: Sequence[str], problems: list[Problem]) -> dict[str, int]:
    """The bytes of each step; what can't be read is added to `problems`."""

    def look(name: str) -> int | None:
        try:
            return _total_bytes(open_at(root.at(name)))
        except (CheckpointNotFound, NotACheckpoint):
            return None  # Deleted meanwhile, or another program's.
        except Damaged as error:
            problems.extend(_below(name, error))
            return None

    found = run_all(look, names, threads=root.parts.reads_at_once, stop=StopSignal())
    return {name: size for name, size in zip(names, found, strict=True) if size is not None}


def _below(name: str, error: Damaged) -> list[Problem]:
    """The problems of a step, with the names of files as its root has them."""
    return [Problem(f"{name}/{one.file}", one.found, one.leaves) for one in error.problems]


def _total_bytes(source: Source) -> int:
    if isinstance(source, OrbaxSource):
        return total_bytes_of_orbax(source)
    if isinstance(source, SafetensorsSource):
        return total_bytes_of_safetensors(source)
    return total_bytes(_ours(source))


def _ours(source: Source) -> OstrakaSource:
    if not isinstance(source, OstrakaSource):
        raise UnsupportedFormat(
            f"can't copy {source.location}: Ostraka did not write it, and it has no digests to "
            "compare with"
        )
    return source
