"""A restore: open, match, plan, read, verify, place on devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ostraka._box import Box
from ostraka._checkpoint import Source, load
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._document import rebuild
from ostraka._fetch import FetchJob, detached
from ostraka._match import Destination, Matcher, Wanted
from ostraka._parallel import StopSignal, paused_gc
from ostraka._plan import Target
from ostraka._spec import numpy_dtype
from ostraka.errors import Busy, Damaged, RestoreFailed
from ostraka.storage import PathLike, Store, open_store

_ATTEMPTS = 10
_NO_LIKE: Any = object()


def restore(
    path: PathLike,
    *,
    like: Any = _NO_LIKE,
    mesh: Mesh | None = None,
    specs: Any = None,
) -> Any:
    """Bring a checkpoint back, onto any devices.

    `like` says what is wanted: arrays or `jax.ShapeDtypeStruct`s with their shardings, numpy
    arrays, numbers. The result has its types and lies where it lies. It may be a part of what was
    saved: of a dict of several things, some. Without `like` the result has the containers, keys,
    types and dtypes that were saved; arrays go back onto the mesh they were on if there are as many
    devices, else onto one device.

    `mesh` puts the specs of `like`, or those that were saved, onto another mesh. `specs` overrides
    them: a PartitionSpec, or a tree of them whose entries hold for everything below.

    Every byte that is read is verified. Raises Mismatch with all differences at once, Damaged for
    bytes that are not as written; with arrays that span several processes, the others raise
    RestoreFailed, which names the process that failed and its error.

    >>> state = ostraka.restore("runs/7", like=state)
    """
    with_like = like is not _NO_LIKE
    together = _spans_processes(like if with_like else None, mesh, specs, with_like)
    try:
        with (
            paused_gc(),
            Operation(f"restore of {path}", alone=not together, own_errors=True) as operation,
        ):
            store = open_store(path)
            return _restore(store, operation, like, mesh, specs, templated=with_like)
    except ProcessFailed as failure:
        raise RestoreFailed(str(path), failure.process, failure.reason) from failure.__cause__


def _restore(
    store: Store, operation: Operation, like: Any, mesh: Any, specs: Any, *, templated: bool
) -> Any:
    """Restore one checkpoint on all processes, even while a save replaces it.

    Whoever finds its files replaced says so, and all begin again with the new ones.
    """
    for attempt in range(_ATTEMPTS):
        source = load(store)
        ids = operation.exchange(f"open-{attempt}", source.metadata.id, lambda ids: ids)
        if len(set(ids)) > 1:
            continue
        result: Any = None
        replaced = False
        try:
            result = _restore_once(source, operation, like, mesh, specs, templated=templated)
        except Damaged:
            replaced = not source.is_still_there()
            if not replaced:
                raise
        if not operation.exchange(f"restored-{attempt}", replaced, any):
            return result
    raise Busy(
        f"{store.location} was overwritten {_ATTEMPTS} times while it was being restored; wait for "
        "the saves to end"
    )


def _restore_once(
    source: Source, operation: Operation, like: Any, mesh: Any, specs: Any, *, templated: bool
) -> Any:
    matcher = Matcher(
        source,
        mesh=mesh,
        specs=specs,
        process=jax.process_index(),
        process_count=jax.process_count(),
    )
    wanted = matcher.match(like, templated=templated)
    values = {**wanted.values, **dict(_read_arrays(source, wanted, operation))}
    return rebuild(wanted.tree, values)


def _read_arrays(source: Source, wanted: Wanted, operation: Operation) -> Iterator[tuple[str, Any]]:
    """Each array as soon as its bytes are there, while others are still being read."""
    targets: list[Target] = []
    owner: list[int] = []
    first: list[int] = []
    for number, destination in enumerate(wanted.arrays):
        first.append(len(targets))
        for box in destination.boxes:
            targets.append(Target(destination.number, box))
            owner.append(number)
    job = FetchJob(source, targets, shared_memory=True)
    waiting = [len(destination.boxes) for destination in wanted.arrays]
    yield from (
        (destination.path, _place(source, destination, []))
        for destination in wanted.arrays
        if not destination.boxes
    )
    for target in job.run(StopSignal()):
        operation.check()
        number = owner[target]
        waiting[number] -= 1
        if waiting[number] == 0:
            destination = wanted.arrays[number]
            start = first[number]
            arrays = job.arrays[start : start + len(destination.boxes)]
            yield destination.path, _place(source, destination, arrays)


def _place(source: Source, destination: Destination, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """The bytes of a leaf as what was asked for."""
    spec = source.metadata.leaves[destination.number].spec
    shape = spec.shape
    boxes = destination.boxes
    if spec.per_process:
        shape = shape[1:]
        boxes = tuple(box[1:] for box in boxes)
        arrays = [array[0] for array in arrays]
    match destination.kind:
        case "numpy":
            return detached(arrays[0])
        case "scalar":
            return arrays[0][()]
        case "python":
            return arrays[0].item()
        case _:
            made = _jax_array(shape, spec.dtype, destination.sharding, boxes, arrays)
            if destination.kind == "key":
                return jax.random.wrap_key_data(made, impl=spec.prng)
            return made


def _jax_array(
    shape: tuple[int, ...],
    dtype: str,
    sharding: Any,
    boxes: tuple[Box, ...],
    arrays: list[np.ndarray[Any, Any]],
) -> jax.Array:
    by_box = dict(zip(boxes, arrays, strict=True))

    def shard(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        box = tuple(
            (s.start or 0, n if s.stop is None else s.stop)
            for s, n in zip(index or (), shape, strict=True)
        )
        return by_box[box]

    if not boxes:
        # All of it is on other processes' devices; JAX would ask for a shard all the same.
        return jax.make_array_from_single_device_arrays(
            shape, sharding, [], dtype=numpy_dtype(dtype)
        )
    return jax.make_array_from_callback(shape, sharding, shard, dtype=numpy_dtype(dtype))


def _spans_processes(like: Any, mesh: Any, specs: Any, with_like: bool) -> bool:
    """Whether the result has arrays on several processes, so that one failure concerns all."""
    if jax.process_count() == 1:
        return False
    if not with_like and mesh is None:
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
