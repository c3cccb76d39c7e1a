"""A restore: open, match, plan, read, verify, place on devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ostraka._assemble import Assembler
from ostraka._capture import DtypeRule, check_dtype_rule
from ostraka._checkpoint import open_at
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._inplace import InPlace
from ostraka._lifetime import paused_gc
from ostraka._match import Choices, Matcher, Wanted
from ostraka._memory import detached
from ostraka._nodes import Branch, Leaf, rebuild
from ostraka._pattern import Patterns
from ostraka._place import Destination
from ostraka._record import OnRecord, Stopwatch, report, summarize
from ostraka._source import Source
from ostraka._spec import Target, numpy_dtype
from ostraka._tree import parse
from ostraka.errors import Busy, Damaged, RestoreFailed
from ostraka.sharding._mesh import as_mesh
from ostraka.storage import PathLike

_ATTEMPTS = 10
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
    dtype: DtypeRule = None,
    as_state: bool = False,
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
    checkpoint to paths in `like`, for parts that have moved. `strict=False` keeps what `like` has
    where the checkpoint has nothing or another shape, ignores what the checkpoint has beyond
    `like`, and warns of each (PartialRestore). `dtype` casts floating-point arrays: to one dtype,
    by path pattern, or with `"like"` to those of `like`. `on_record` is called with what was done
    and how long it took, which is also logged.

    Every byte that is read is verified. Raises Mismatch with all differences at once, Damaged for
    bytes that are not as written; with arrays that span several processes, the others raise
    RestoreFailed, which names the process that failed and its error.

    >>> state = ostraka.restore("runs/7", like=state)
    """
    if like is not _NOT_GIVEN and into is not _NOT_GIVEN:
        raise ValueError("give like= or into=, not both")
    given = like if into is _NOT_GIVEN else into
    if rename and given is _NOT_GIVEN:
        raise ValueError("rename= needs like= or into=, which have the new names")
    if as_state and given is not _NOT_GIVEN:
        raise ValueError("as_state= is for a restore without like= and into=")
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
    together = _spans_processes(given, mesh, specs)
    tally = _Tally()
    try:
        with (
            paused_gc(),
            Operation(f"restore of {path}", alone=not together, own_errors=True) as operation,
        ):
            if dtype != "like":
                check_dtype_rule(dtype)
            if into is not _NOT_GIVEN:
                # The parsed tree must not be kept here: it holds the arrays that are to be let go.
                result = _restore(path, operation, None, choices, InPlace(parse(into)), tally)
            else:
                tree = None if like is _NOT_GIVEN else parse(like)
                result = _restore(path, operation, tree, choices, None, tally)
    except ProcessFailed as failure:
        raise RestoreFailed(str(path), failure.process, failure.reason) from failure.__cause__
    report("restore", tally.location, tally.watch, tally.summary, on_record)
    return result


@dataclass(slots=True)
class _Tally:
    """What a restore has done so far, for its record."""

    watch: Stopwatch = field(default_factory=Stopwatch)
    bytes: int = 0
    location: str = ""
    """Where the checkpoint really is: of a run, which step."""
    summary: list[float] = field(default_factory=lambda: summarize([(0, 0.0)]))
    """Of all processes, at the end."""

    def add_bytes(self, nbytes: int) -> None:
        self.bytes += nbytes

    def post(self) -> tuple[int, float]:
        """What this process tells the others."""
        return self.bytes, self.watch.phases.get("read", 0.0)


def _restore(
    path: PathLike,
    operation: Operation,
    tree: Branch | Leaf | None,
    choices: Choices,
    place: InPlace | None,
    tally: _Tally,
) -> Any:
    """Restore one checkpoint on all processes, even while a save replaces it.

    Whoever finds its files replaced says so, and all begin again with the new ones.
    """
    for attempt in range(_ATTEMPTS):
        source = open_at(path)
        tally.location = source.location
        is_same = operation.exchange(
            f"open-{attempt}", source.saved.id, lambda ids: len(set(ids)) == 1
        )
        tally.watch.lap("open")
        if not is_same:
            continue
        result: Any = None
        replaced = False
        try:
            result = _restore_once(source, operation, tree, choices, place, tally)
        except Damaged as error:
            replaced = not source.is_current()
            if not replaced:
                if place is not None:
                    error.add_note("what was given as into= may have been changed in part")
                raise
        again, tally.summary = operation.exchange(
            f"restored-{attempt}", [replaced, *tally.post()], _sum_up
        )
        tally.watch.lap("agree")
        if not again:
            return result
    raise Busy(
        f"{tally.location} was overwritten {_ATTEMPTS} times while it was being restored; wait for "
        "the saves to end"
    )


def _sum_up(posts: list[Any]) -> tuple[bool, list[float]]:
    """Whether all must begin again, and what they have read."""
    return any(replaced for replaced, *_ in posts), summarize([(b, s) for _, b, s in posts])


def _restore_once(
    source: Source,
    operation: Operation,
    tree: Branch | Leaf | None,
    choices: Choices,
    place: InPlace | None,
    tally: _Tally,
) -> Any:
    matcher = Matcher(
        source, choices, process=jax.process_index(), process_count=jax.process_count()
    )
    wanted = matcher.match(tree if place is None else place.template)
    tally.watch.lap("match")
    arrays = _with_copies(_read_arrays(source, wanted, operation, tally), wanted)
    if place is None:
        values = {**wanted.values, **dict(arrays)}
        result = rebuild(wanted.tree, values)
    else:
        for path, value in wanted.values.items():
            place.put(path, value)
        for path, value in arrays:
            place.put(path, value)
        result = place.finish()
    for owner, state in wanted.states:
        owner.set_state(state)
    tally.watch.lap("read")
    return result


def _with_copies(arrays: Iterator[tuple[str, Any]], wanted: Wanted) -> Iterator[tuple[str, Any]]:
    """Each array, and again for each place that has the same one."""
    places: dict[str, list[str]] = {}
    for path, first in wanted.copies:
        places.setdefault(first, []).append(path)

    def again(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        for other in places.get(path, ()):
            yield other, value
            yield from again(other, value)

    for path, value in wanted.values.items():
        yield from again(path, value)
    for path, array in arrays:
        yield path, array
        yield from again(path, array)


def _read_arrays(
    source: Source, wanted: Wanted, operation: Operation, tally: _Tally
) -> Iterator[tuple[str, Any]]:
    """Each array as soon as its bytes are there, while others are still being read.

    All processes make them in the same order: one that is early waits for those before it.
    """
    turns = {leaf: turn for turn, leaf in enumerate(source.order())}
    destinations = sorted(wanted.arrays, key=lambda found: turns[found.number])
    targets = [Target(found.number, box) for found in destinations for box in found.boxes]
    owner = [number for number, found in enumerate(destinations) for _ in found.boxes]
    left = [len(found.boxes) for found in destinations]
    there: dict[int, np.ndarray[Any, Any]] = {}
    reads = source.read(targets, on_bytes=tally.add_bytes)
    assembler = Assembler()
    first = 0
    for number, destination in enumerate(destinations):
        while left[number]:
            operation.check()
            target, there[target] = next(reads)
            left[owner[target]] -= 1
        own = range(first, first + len(destination.boxes))
        first = own.stop
        arrays = [there.pop(target) for target in own]
        yield destination.path, _place(source, destination, arrays, assembler)
    for _ in reads:  # to its end, which closes files
        pass


def _place(
    source: Source,
    destination: Destination,
    arrays: list[np.ndarray[Any, Any]],
    assembler: Assembler,
) -> Any:
    """The bytes of a leaf as what was asked for."""
    spec = source.saved.leaves[destination.number]
    shape = spec.own_shape
    boxes = destination.boxes
    if spec.per_process:
        boxes = tuple(box[1:] for box in boxes)
        arrays = [array[0] for array in arrays]
    if destination.cast is not None:
        arrays = [array.astype(numpy_dtype(destination.cast)) for array in arrays]
    match destination.kind:
        case "numpy":
            return detached(arrays[0])
        case "scalar":
            return arrays[0][()]
        case "python":
            return arrays[0].item()
        case _:
            made = assembler.make(
                shape,
                destination.cast or spec.dtype,
                destination.sharding,
                boxes,
                arrays,
                committed=destination.committed,
                weak=destination.weak,
            )
            if destination.kind == "key":
                return jax.random.wrap_key_data(made, impl=spec.prng)
            return made


def _spans_processes(like: Any, mesh: Any, specs: Any) -> bool:
    """Whether the result has arrays on several processes, so that one failure concerns all."""
    if jax.process_count() == 1:
        return False
    if like is _NOT_GIVEN and mesh is None:
        return True
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((like, specs))]
    shardings += [
        leaf for leaf in jax.tree.leaves(specs) if isinstance(leaf, jax.sharding.Sharding)
    ]
    meshes = [mesh, *(getattr(sharding, "mesh", None) for sharding in shardings)]
    return any(
        len({device.process_index for device in found.devices.flat}) > 1
        for found in meshes
        if isinstance(found, Mesh)
    )
