"""A restore: open, match, plan, read, verify, place on devices."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ostraka._assemble import Assembler
from ostraka._capture import DtypeRule, check_dtype_rule
from ostraka._checkpoint import ATTEMPTS, open_at, overwritten
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._inplace import InPlace
from ostraka._lifetime import paused_gc
from ostraka._match import Choices, Matcher, Wanted
from ostraka._memory import detached
from ostraka._names_given import NamesLike
from ostraka._nodes import ArrayNumber, Branch, Leaf, rebuild
from ostraka._pattern import Patterns
from ostraka._place import Destination
from ostraka._record import OnRecord, Stopwatch, report, summarize
from ostraka._share import (
    Agreement,
    Reader,
    Replaced,
    ShareReads,
    agree_on_sharing,
    find_needs,
    least_hosts,
)
from ostraka._source import Source
from ostraka._spec import LeafSpec, numpy_dtype
from ostraka._tree import parse
from ostraka.errors import Damaged, RestoreFailed
from ostraka.sharding._mesh import as_mesh
from ostraka.storage import PathLike

_NOT_GIVEN: Any = object()


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
    on_record: OnRecord | None = None,
) -> Any:
    """Bring a checkpoint back, onto any devices.

    `path` is that of a checkpoint, of a run's directory (`runs`, its newest step) or of one of its
    steps by number (`runs/7`).

    `like` says what is wanted: NNX modules and optimizers, arrays, or abstract ones
    (`nnx.eval_shape`, `jax.ShapeDtypeStruct`) with their shardings, numpy arrays, numbers. The
    result has its types and lies where it lies. It may be a part of what was saved: of a dict of
    several things, some. `into` is the same, and NNX objects in it are changed in place, their old
    arrays let go as new ones arrive. Without either, the result has the containers, keys, types and
    dtypes that were saved, modules as dicts (with `as_state` as `nnx.State`); arrays go back onto
    the mesh they were on if there are as many devices, else onto one device.

    `mesh` puts the specs of `like`, or those that were saved, onto another mesh; axis sizes such as
    `{"data": 4}` make one. `specs` overrides them: a PartitionSpec, a tree of them whose entries
    hold for everything below, or rules and presets as `ostraka.sharding.spec_tree` takes them.

    `only` restores the leaves that match a pattern such as `"model/**"`, or all but those of
    `"!model/head/**"`, and leaves others as they are in `like`. `rename` maps paths in the
    checkpoint to paths in `like`, for parts that have moved. `names` says how the tensors of
    safetensors files make up the leaves of `like`: "hf" for the family of models that config.json
    names, a family such as "llama", rules from names of tensors to paths (to several for a fused
    tensor, which is cut), the path of a JSON file of them, or a function; docs/huggingface.md has
    it all. `strict=False` keeps what `like` has where the checkpoint has nothing or another shape,
    ignores what the checkpoint has beyond `like`, and warns of each (PartialRestore). `dtype` casts
    floating-point arrays: to one dtype, by path pattern, or with `"like"` to those of `like`.
    `on_record` is called with what was done and how long it took, which is also logged.

    With `share_reads`, what several processes need is read once: each reads a part and gets the
    rest from the others, by JAX's collectives. `True` needs all processes to call this, whatever
    is restored; "auto" is for arrays that span several processes, from object stores, and from
    directories if at least four hosts need the same.

    Every byte that is read is verified, unless its format has no digests. Raises Mismatch with all
    differences at once, Damaged for bytes that are not as written; with arrays that span several
    processes, the others raise RestoreFailed, which names the process that failed and its error.

    >>> state = ostraka.restore("runs/7", like=state)
    """
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
    choices = Choices(
        None if mesh is None else as_mesh(mesh),
        specs,
        strict,
        only,
        rename,
        dtype,
        as_state,
        in_place=into is not _NOT_GIVEN,
    )
    work = _Restore(path, names, choices, share_reads)
    together = share_reads is True or _spans_processes(given, mesh, specs)
    try:
        with (
            paused_gc(),
            Operation(f"restore of {path}", alone=not together, own_errors=True) as operation,
        ):
            if dtype != "like":
                check_dtype_rule(dtype)
            if into is not _NOT_GIVEN:
                # The parsed tree must not be kept here: it holds the arrays that are to be let go.
                work.place = InPlace(parse(into))
                work.template = work.place.template
            elif like is not _NOT_GIVEN:
                work.template = parse(like)
            result = work.run(operation)
    except ProcessFailed as failure:
        raise RestoreFailed(str(path), failure.process, failure.reason) from failure.__cause__
    report("restore", work.location, work.watch, work.summary, on_record)
    return result


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
    """The arrays of an opened checkpoint by their numbers, without a tree to compare it with.

    A leaf has the path that messages name, and what is wanted; an ArrayNumber for what was saved.
    Returns None, on all processes, if a save has replaced the checkpoint: open it again.
    """
    work = _Restore(source.location, None, Choices(dtype=dtype), "auto", asked=asked)
    together = _numbers_span_processes(source, asked)
    name = f"restore of {source.location}"
    try:
        with paused_gc(), Operation(name, alone=not together, own_errors=True) as operation:
            found = work.try_once(operation, source, 0)
    except ProcessFailed as failure:
        location, process, reason = source.location, failure.process, failure.reason
        raise RestoreFailed(location, process, reason) from failure.__cause__
    if found is None:
        return None
    report("restore", work.location, work.watch, work.summary, None)
    return found[0]


@dataclass(slots=True)
class _Restore:
    """A restore, and what it has done so far."""

    path: PathLike
    names: NamesLike | None
    choices: Choices
    share_reads: ShareReads
    template: Branch | Leaf | None = None
    """What is wanted; None for all that was saved."""
    place: InPlace | None = None
    """The objects that are changed, if there are any."""
    asked: Sequence[tuple[Leaf, int]] | None = None
    """Arrays by their numbers, in place of a template."""
    location: str = ""
    """Where the checkpoint really is: of a run, which step."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    bytes_read: int = 0
    summary: list[float] = field(default_factory=list[float])
    """What all processes have read, at the end."""

    def run(self, operation: Operation) -> Any:
        """Restore one checkpoint on all processes, even while a save replaces it.

        Whoever finds its files replaced says so, and all begin again with the new ones.
        """
        for attempt in range(ATTEMPTS):
            found = self.try_once(operation, open_at(self.path, self.names), attempt)
            if found is not None:
                return found[0]
        raise overwritten([self.location])

    def try_once(self, operation: Operation, source: Source, attempt: int) -> tuple[Any] | None:
        """The result; None, on all processes, if one of them has found another checkpoint."""
        self.location = source.location
        found = [source.saved.id, least_hosts(self.share_reads, source), socket.gethostname()]
        is_same, least, hosts = operation.exchange(f"open-{attempt}", found, _compare)
        self.watch.lap("open")
        if not is_same:
            return None
        agreement = Agreement(operation, str(attempt), least, hosts)
        result: Any = None
        replaced = False
        try:
            result = self._restore_from(source, agreement)
        except Replaced:
            replaced = True
        except Damaged as error:
            replaced = not source.is_current()
            if not replaced:
                if self.place is not None:
                    error.add_note("what was given as into= may have been changed in part")
                raise
            agreement.refuse_stage()
        done = [replaced, self.bytes_read, self.watch.phases.get("read", 0.0)]
        again, self.summary = operation.exchange(f"restored-{attempt}", done, _sum_up)
        self.watch.lap("agree")
        return None if again else (result,)

    def _restore_from(self, source: Source, agreement: Agreement) -> Any:
        matcher = Matcher(
            source,
            self.template,
            self.choices,
            process=jax.process_index(),
            process_count=jax.process_count(),
        )
        wanted = matcher.match() if self.asked is None else matcher.match_numbers(self.asked)
        self.watch.lap("match")
        values: dict[str, Any] = {}
        put = values.__setitem__ if self.place is None else self.place.put
        copies: dict[str, list[str]] = {}
        for path, first in wanted.copies:
            copies.setdefault(first, []).append(path)
        replaced = {path for path, _ in wanted.copies}
        known = ((path, wanted.values[path]) for path in wanted.values if path not in replaced)
        for path, value in chain(known, self._arrays(source, wanted, agreement)):
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
        self, source: Source, wanted: Wanted, agreement: Agreement
    ) -> Iterator[tuple[str, Any]]:
        """Each array as soon as its bytes are there, while others are still being read.

        All processes make them in the same order: one that is early waits for those before it.
        """
        turns = {leaf: turn for turn, leaf in enumerate(source.order())}
        destinations = sorted(wanted.arrays, key=lambda found: turns[found.number])
        needs = find_needs(source, destinations, agreement)
        casts = [found.cast for found in destinations]
        reader = Reader(source, needs, casts, agreement, self._add_bytes)
        assembler = Assembler()
        for arrays, destination in zip(reader.read(), destinations, strict=True):
            leaf = source.saved.leaves[destination.number]
            yield destination.path, _place(leaf, destination, arrays, assembler)

    def _add_bytes(self, nbytes: int) -> None:
        self.bytes_read += nbytes


def _compare(posts: list[Any]) -> tuple[bool, int | None, list[str]]:
    """Whether all have opened the same checkpoint, and how they share their reads."""
    ids, least, hosts = zip(*posts, strict=True)
    return len(set(ids)) == 1, agree_on_sharing(least, hosts), list(hosts)


def _sum_up(posts: list[Any]) -> tuple[bool, list[float]]:
    """Whether all must begin again, and what they have read."""
    return any(replaced for replaced, *_ in posts), summarize([(b, s) for _, b, s in posts])


def _place(
    leaf: LeafSpec,
    destination: Destination,
    arrays: list[np.ndarray[Any, Any]],
    assembler: Assembler,
) -> Any:
    """The bytes of a leaf as what was asked for."""
    boxes = destination.boxes
    if leaf.per_process:
        boxes = tuple(box[1:] for box in boxes)
        arrays = [array[0] for array in arrays]
    if destination.cast is not None:  # Most sources have done so on the way.
        arrays = [array.astype(numpy_dtype(destination.cast), copy=False) for array in arrays]
    match destination.kind:
        case "numpy":
            return detached(arrays[0])
        case "scalar":
            return arrays[0][()]
        case "python":
            return arrays[0].item()
        case kind:
            made = assembler.make(
                leaf.own_shape,
                destination.cast or leaf.dtype,
                destination.sharding,
                boxes,
                arrays,
                committed=destination.committed,
                weak=destination.weak,
            )
            return jax.random.wrap_key_data(made, impl=leaf.prng) if kind == "key" else made


def _spans_processes(like: Any, mesh: Any, specs: Any) -> bool:
    """Whether the result has arrays on several processes, so that one failure concerns all."""
    if jax.process_count() == 1:
        return False
    if like is _NOT_GIVEN and mesh is None:
        return True
    shardings = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves((like, specs))]
    meshes = [mesh, *(getattr(sharding, "mesh", None) for sharding in shardings)]
    return any(
        len({device.process_index for device in found.devices.flat}) > 1
        for found in meshes
        if isinstance(found, Mesh)
    )


def _numbers_span_processes(source: Source, asked: Sequence[tuple[Leaf, int]]) -> bool:
    if jax.process_count() == 1:
        return False
    saved = source.saved
    as_saved = [saved.leaves[n] for leaf, n in asked if isinstance(leaf.value, ArrayNumber)]
    meshes = {leaf.mesh for leaf in as_saved if leaf.kind in ("jax", "key") and leaf.mesh >= 0}
    devices = [saved.meshes[mesh].devices for mesh in meshes]
    if any(len({saved.process_of[number] for number in found}) > 1 for found in devices):
        return True
    return _spans_processes([leaf.value for leaf, _ in asked], None, None)
