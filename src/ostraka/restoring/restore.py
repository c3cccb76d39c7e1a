"""A restore: open, match, plan, read, verify, place on devices."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
from jax._src.core import trace_state_clean
from jax.sharding import Mesh

from ostraka.common import keywords
from ostraka.common import progress as progress_of
from ostraka.common.dtypes import DTYPES
from ostraka.common.keywords import answering
from ostraka.common.record import OnRecord, Stopwatch, report, summarize
from ostraka.common.threads import paused_gc
from ostraka.errors import Damaged, RestoreFailed, SourceChanged
from ostraka.formats.buffers import Array
from ostraka.formats.source import OnBytes, Source
from ostraka.layout.box import count
from ostraka.layout.casts import DtypeRule, check_dtype_rule
from ostraka.layout.spec import Target
from ostraka.live.parse import parse
from ostraka.live.values import refuse_inside_jit
from ostraka.processes.operation import Operation, ProcessFailed
from ostraka.reading.locate import ATTEMPTS, open_at, overwritten
from ostraka.reading.names.given import NamesLike
from ostraka.restoring._assemble import Assembler
from ostraka.restoring._differences import Choices
from ostraka.restoring._match import Matcher, Wanted
from ostraka.restoring.destinations import Destination
from ostraka.restoring.in_place import InPlace
from ostraka.restoring.share import (
    Agreement,
    Replaced,
    SharedReader,
    ShareReads,
    SourceComparison,
    numbers_span_processes,
    spans_processes,
)
from ostraka.sharding.mesh import as_mesh
from ostraka.storage import PathLike, refuse_swapped
from ostraka.tree.nodes import Branch, Leaf, rebuild
from ostraka.tree.patterns import Patterns

Tree = TypeVar("Tree")
"""The type of a template. The restored tree has the same."""

_NOT_GIVEN: Any = object()
_IN_PART = "what was given as into= may have been changed in part"


class RestoreOptions(TypedDict, total=False):
    """The options of a restore besides its template, as `restore` documents them."""

    mesh: Mesh | Mapping[str, int] | None
    specs: Any
    strict: bool
    only: Patterns | None
    rename: Mapping[str, str] | None
    names: NamesLike | None
    dtype: DtypeRule
    as_state: bool
    share_reads: ShareReads
    progress: bool
    on_record: OnRecord | None


@overload
def restore(path: PathLike, like: Tree, **options: Unpack[RestoreOptions]) -> Tree: ...


@overload
def restore(path: PathLike, *, into: Tree, **options: Unpack[RestoreOptions]) -> Tree: ...


@overload
def restore(path: PathLike, **options: Unpack[RestoreOptions]) -> Any: ...


@answering(keywords.RESTORE)
def restore(
    path: PathLike,
    like: Any = _NOT_GIVEN,
    *,
    into: Any = _NOT_GIVEN,
    mesh: Mesh | Mapping[str, int] | None = None,
    specs: Any = None,
    strict: bool = True,
    only: Patterns | None = None,
    rename: Mapping[str, str] | None = None,
    names: NamesLike | None = None,
    dtype: DtypeRule = None,
    as_state: bool = False,
    share_reads: ShareReads = "auto",
    progress: bool = False,
    on_record: OnRecord | None = None,
) -> Any:
    """Restore a checkpoint onto any devices.

    Every byte that is read is verified. Formats without checksums are the exception: Ostraka
    compares the versions of their files before and after the read, and samples of them between
    hosts.

    Args:
        path: A checkpoint, a run directory (`runs` means its newest step), or a step by its number
            (`runs/7`). A store may stand for a path.
        like: A template: NNX modules and optimizers, arrays, numpy arrays, numbers, or abstract
            arrays (`nnx.eval_shape`, `jax.ShapeDtypeStruct`) with their shardings. The result has
            its types, dtypes and shardings. If a dict was saved, `like` may have only some of its
            top-level keys. Without `like` and `into`, the result has the saved containers, keys
            and dtypes, with modules as dicts. Its arrays go back onto their mesh if there are as
            many devices, else onto one device.
        into: Works like `like`, but updates the tree that you pass and returns it. Dicts, lists and
            NNX objects stay the same objects and get the new values. Tuples, named tuples,
            dataclasses and other immutable containers in them are replaced. Old arrays are freed
            as new ones arrive.
        mesh: Mesh to place arrays on, with the specs of `like` or the saved ones. Axis sizes such
            as `{"data": 4}` make a mesh.
        specs: Overrides these specs: a PartitionSpec, a tree of them whose entries hold for
            everything below, or rules and presets as `ostraka.sharding.spec_tree` takes them.
        strict: If False, leaves that the checkpoint lacks or has with another shape keep the value
            of `like`, leaves that only the checkpoint has are ignored, and a PartialRestore
            warning names both.
        only: Pattern, or list of patterns, of the leaves to restore, such as `"model/**"` or
            `"!model/head/**"`. Other leaves keep the value of `like`.
        rename: Paths in the checkpoint and their paths in `like`, for parts that have moved.
        names: How tensors of safetensors files make up the leaves of `like`: `"hf"` for the family
            that config.json names, a family such as `"llama"`, rules, the path of a JSON file of
            rules, or a function. docs/howto/name-rules.md has the details.
        dtype: Casts floating-point arrays to one dtype, by path pattern, or with `"like"` to the
            dtypes of `like`.
        as_state: Without `like` and `into`: modules are returned as `nnx.State`.
        share_reads: If several processes need the same bytes, each reads a part, and JAX's
            collectives exchange the parts. `True` needs all processes to call this, whatever is
            restored. `"auto"` shares arrays that span several processes: from object stores, and
            from directories if at least four hosts need the same bytes.
        progress: Show how far this process has come: a bar on a terminal or in a notebook, else a
            line in the log every 30 s. With several processes, process 0 shows it.
        on_record: Called with what was done and how long it took, which is also logged.

    Returns:
        The restored tree.

    Raises:
        Mismatch: `like` does not fit the checkpoint. It lists all differences.
        InvalidTree: A leaf of `into` can't change in place, as in a tuple of arrays.
        Damaged: Bytes are missing or not as they were written.
        Busy: Files were replaced again and again while they were read.
        RestoreFailed: Another process failed, or processes found different checkpoints. Raised
            if arrays span several processes. It names the process and its error.

    Example:
        >>> state = ostraka.restore("runs/7", like=state)
    """
    if not trace_state_clean():
        refuse_inside_jit("restore")
    if not isinstance(path, str | os.PathLike):
        refuse_swapped("restore(path, like)", path, like)
    if like is not _NOT_GIVEN and into is not _NOT_GIVEN:
        raise ValueError("give like= or into=, not both")
    given = like if into is _NOT_GIVEN else into
    if rename and given is _NOT_GIVEN:
        raise ValueError("rename= needs like= or into=, which have the new names")
    if as_state and given is not _NOT_GIVEN:
        raise ValueError("as_state= is for a restore without like= and into=")
    if share_reads not in (True, False, "auto"):
        raise ValueError(f"share_reads must be True, False or 'auto', not {share_reads!r}")
    _check_types(only, strict, on_record)
    made, in_place = None if mesh is None else as_mesh(mesh), into is not _NOT_GIVEN
    choices = Choices(made, specs, strict, only, rename, dtype, as_state, in_place)
    work = _Restore(path, names, choices, SourceComparison(path, share_reads))
    together = share_reads is True
    if not together and jax.process_count() > 1:
        is_as_saved = given is _NOT_GIVEN and mesh is None
        together = is_as_saved or spans_processes((given, specs), made)
    is_shown = progress and jax.process_index() == 0
    with (
        progress_of.shown(f"restore {path}", progress)
        if is_shown
        else nullcontext() as work.on_bytes,
        _operation(str(path), together) as operation,
    ):
        if dtype not in (None, "like"):
            check_dtype_rule(dtype)
        if in_place:
            work.place = InPlace(into, only)
            work.template = work.place.template
        elif like is not _NOT_GIVEN:
            work.template = parse(like)
        result = work.run(operation)
    report("restore", work.location, work.watch, work.summary, on_record)
    return result


@contextmanager
def _operation(path: str, together: bool) -> Generator[Operation]:
    """The operation of a restore, by this process alone or by all. Raises RestoreFailed."""
    name = f"restore of {path}"
    try:
        with paused_gc(), Operation(name, alone=not together, own_errors=True) as operation:
            yield operation
    except ProcessFailed as failure:
        raise RestoreFailed(path, failure.process, failure.reason) from failure.__cause__


def _check_types(only: Any, strict: Any, on_record: Any) -> None:
    listed = (only,) if isinstance(only, str) else only
    if listed is not None:
        if not isinstance(listed, Sequence) or not all(isinstance(p, str) for p in listed):
            raise TypeError(f"only must be a path pattern, or a list of them, not {only!r:.80}")
        if not listed:
            raise ValueError("only is empty, and would leave out everything; None restores all")
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, not {strict!r:.80}")
    if on_record is not None and not callable(on_record):
        raise TypeError(f"on_record must be a function, not {on_record!r:.80}")


def restore_leaves(
    source: Source, asked: Sequence[tuple[Leaf, int]], *, dtype: DtypeRule = None
) -> list[Any] | None:
    """Restore arrays of an opened checkpoint by their numbers, without a template tree.

    The value of a leaf is a template's, or an ArrayNumber to restore the saved array.
    Returns None, on all processes, if a save has replaced the checkpoint: open it again.
    """
    comparison = SourceComparison(source.store, "auto")
    work = _Restore(source.store, None, Choices(dtype=dtype), comparison, asked=asked)
    together = jax.process_count() > 1 and numbers_span_processes(source, asked)
    with _operation(source.location, together) as operation:
        found = work.try_once(operation, source, 0)
    if found is None:
        return None
    report("restore", work.location, work.watch, work.summary, None)
    return found[0]


@dataclass(slots=True)
class _Restore:
    """A restore and its progress."""

    path: PathLike
    names: NamesLike | None
    choices: Choices
    comparison: SourceComparison
    template: Branch | Leaf | None = None
    """The parsed template, or None to restore everything."""
    place: InPlace | None = None
    """The objects to change in place, if any."""
    asked: Sequence[tuple[Leaf, int]] | None = None
    """Arrays by their numbers, in place of a template."""
    location: str = ""
    """Location of the checkpoint: for a run directory, of its step."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    bytes_read: int = 0
    bytes_wanted: int = 0
    on_bytes: progress_of.OnBytes | None = None
    """Called with both, if the caller wants to see them."""
    summary: list[float] = field(default_factory=list[float])
    """Bytes and seconds of all processes, at the end."""

    def run(self, operation: Operation) -> Any:
        """Restore one checkpoint on all processes, even while a save replaces it.

        If one process finds its files replaced, all start again with the new ones.
        """
        for attempt in range(ATTEMPTS):
            found = self.try_once(operation, open_at(self.path, self.names), attempt)
            if found is not None:
                return found[0]
        error = overwritten([self.location])
        if self.place is not None:
            error.add_note(_IN_PART)
        raise error

    def try_once(self, operation: Operation, source: Source, attempt: int) -> tuple[Any] | None:
        """The result in a tuple. None, on all processes, if one found another checkpoint."""
        self.location = source.location
        agreement: Agreement | None = None
        if operation.count > 1:
            agreement = self.comparison.agree(operation, source, attempt)
            if agreement is None:
                return None
        self.watch.lap("open")
        result: Any = None
        replaced = False
        try:
            result = self._restore_from(source, operation, agreement)
        except Replaced:
            replaced = True
        except (Damaged, SourceChanged) as error:
            replaced = isinstance(error, SourceChanged) or not source.is_current()
            if not replaced:
                if self.place is not None:
                    error.add_note(_IN_PART)
                raise
            if agreement is not None and agreement.passed < agreement.stages:
                agreement.end_stage(False)
        done = [replaced, self.bytes_read, self.watch.phases.get("read", 0.0)]
        again, self.summary = operation.exchange(f"restored-{attempt}", done, _sum_up)
        self.watch.lap("agree")
        return None if again else (result,)

    def _restore_from(
        self, source: Source, operation: Operation, agreement: Agreement | None
    ) -> Any:
        matcher = Matcher(source, self.template, self.choices)
        wanted = matcher.match() if self.asked is None else matcher.match_numbers(self.asked)
        self.watch.lap("match")
        values: dict[str, Any] = {}
        put = values.__setitem__ if self.place is None else self.place.put
        copies: dict[str, list[str]] = {}
        for path, first in wanted.copies:
            copies.setdefault(first, []).append(path)
        replaced = {path for path, _ in wanted.copies}
        known = ((path, wanted.values[path]) for path in wanted.values if path not in replaced)
        for path, value in chain(known, self._arrays(source, wanted, operation, agreement)):
            places = [path]
            for place in places:  # which grows: a copy may have copies
                put(place, value)
                places += copies.get(place, [])
        result = rebuild(wanted.tree, values) if self.place is None else self.place.finish()
        for owner, state in wanted.states:
            owner.set_state(state)
        self.watch.lap("read")
        return result

    def _arrays(
        self, source: Source, wanted: Wanted, operation: Operation, agreement: Agreement | None
    ) -> Iterator[tuple[str, Any]]:
        """Yield each array as soon as its bytes have been read, while others are still being read.

        All processes make them in the same order.
        """
        destinations = list(wanted.arrays)
        if len(destinations) > 1:
            turns = {leaf: turn for turn, leaf in enumerate(source.order())}
            destinations.sort(key=lambda found: turns[found.number])
        if self.on_bytes is not None:
            self.bytes_wanted = sum(map(partial(_bytes_of, source), destinations))
        if agreement is None or agreement.least_hosts is None:
            read = _read_alone(source, destinations, operation, self._add_bytes)
        else:
            read = SharedReader(source, destinations, agreement, self._add_bytes).read()
        assembler = Assembler()
        for arrays, destination in zip(read, destinations, strict=True):
            leaf = source.saved.leaves[destination.number]
            yield destination.path, assembler.make(leaf, destination, arrays)

    def _add_bytes(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        if self.on_bytes is not None:
            self.on_bytes(min(self.bytes_read, self.bytes_wanted), self.bytes_wanted)


def _bytes_of(source: Source, destination: Destination) -> int:
    dtype = DTYPES[source.saved.leaves[destination.number].dtype]
    return sum(dtype.nbytes(count(box)) for box in destination.boxes)


def _read_alone(
    source: Source, destinations: Sequence[Destination], operation: Operation, on_bytes: OnBytes
) -> Iterator[list[Array]]:
    """Yield the arrays of each destination's boxes in turn, as soon as they have been read."""
    targets = [Target(one.number, box, one.cast) for one in destinations for box in one.boxes]
    reads = source.read(targets, on_bytes=on_bytes)
    there: dict[int, Array] = {}
    first = 0
    for destination in destinations:
        numbers = range(first, first + len(destination.boxes))
        first = numbers.stop
        for number in numbers:
            while number not in there:
                operation.check()
                read, there[read] = next(reads)
        yield [there.pop(number) for number in numbers]
    for _ in reads:  # to its end, which closes files
        pass


def _sum_up(posts: list[Any]) -> tuple[bool, list[float]]:
    """True if all must start again, and the bytes and seconds of all processes."""
    return any(replaced for replaced, *_ in posts), summarize([(b, s) for _, b, s in posts])
