"""The plan of a checkpoint: what a save writes and what a restore reads, before either runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from ostraka import _account, _format
from ostraka._account import LostDisk, LostProcess, LostShard, Spread
from ostraka._checkpoint import load
from ostraka._format import FileEntry, Metadata
from ostraka._parallel import paused_gc
from ostraka._plan import MAX_FILE_BYTES, WritePlan, plan_write
from ostraka._record import Stopwatch, summarize, timeline
from ostraka._spec import HOST_LOCAL, LeafSpec, MeshSpec, check_partition
from ostraka._version import __version__
from ostraka.planner._restore import RestorePlan, Saved, plan_restore
from ostraka.planner._state import SAMPLED_PROCESSES, Problem, State, default_writers
from ostraka.storage import PathLike, open_store

_EXACT_ENTRIES = 200_000
"""Up to so many boxes the index of every process is worked out, rather than that of a few."""
_PHASES = ("wait", "capture", "agree", "plan", "write")
"""What `save` has timed when it writes `_METADATA`."""
_SOME_SECONDS = 0.1234
_MOST_BYTES = 1 << 62
_LEAST_FILE_BYTES = 2 * _format.PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """What a checkpoint is made of, to the byte."""

    write: WritePlan
    """The very plan that `save` executes."""
    metadata: Metadata
    """What `_METADATA` says, but for the id, the digests and the times."""
    metadata_bytes: int
    """The size of `_METADATA`; how long a save took is written there, give or take a few digits."""
    index_bytes: Mapping[int, int]
    """By process, the size of its index."""
    indexes_are_exact: bool
    """Whether each index was worked out; if not, those of all processes are like those of a few."""
    parameters: int | None
    problems: tuple[Problem, ...]

    @property
    def files(self) -> dict[str, int]:
        """Every file of the checkpoint with its size, but `_METADATA`.

        The names are those in the directory of shards, which is named after a random id.
        """
        files = {file.name: file.size for file in self.write.files}
        return files | {_format.index_name(p): n for p, n in self.index_bytes.items() if n}

    @property
    def data_bytes(self) -> int:
        """The bytes of all arrays, each counted once."""
        return sum(leaf.spec.nbytes for leaf in self.write.leaves)

    @property
    def total_bytes(self) -> int:
        """All that is written: shards, indexes and `_METADATA`."""
        shards = sum(file.size for file in self.write.files)
        return shards + sum(self.index_bytes.values()) + self.metadata_bytes

    @property
    def elements(self) -> int:
        return sum(prod(leaf.spec.shape) for leaf in self.write.leaves)

    @property
    def process_count(self) -> int:
        return max(self.write.process_of) + 1

    @property
    def bytes_by_process(self) -> list[int]:
        """What each process writes: its shards and its index."""
        shards = _account.file_bytes_by_process(self.write)
        return [size + self.index_bytes.get(p, 0) for p, size in enumerate(shards)]

    @property
    def process_spread(self) -> Spread:
        return _account.spread_of(self.bytes_by_process)

    @property
    def shard_spread(self) -> Spread:
        """The data bytes that the devices contribute."""
        return _account.spread_of(_account.bytes_by_device(self.write))

    @property
    def largest_file(self) -> FileEntry | None:
        return max(self.write.files, key=lambda file: file.size, default=None)

    def staging_bytes(self, *, on_accelerators: bool = True) -> int:
        """The most host memory that a save takes on one host, besides the state itself."""
        return _account.staging_bytes(
            self.write, writers=default_writers(), on_accelerators=on_accelerators
        )

    def lost_shard(self) -> LostShard | None:
        """What it takes to bring back the largest shard file."""
        return _account.lost_shard(self.write)

    def lost_process(self) -> LostProcess:
        """What it takes to bring back the host that holds the most."""
        return _account.lost_process(self.write)

    def lost_disk(self) -> LostDisk:
        """What it takes to bring back the shards of the process that wrote the most."""
        return _account.lost_disk(self.write)

    def restore(
        self,
        *,
        mesh: Any = None,
        specs: Any = None,
        processes: int | None = None,
        only: Any = None,
        sampled: Sequence[int] | None = None,
    ) -> RestorePlan:
        """What a restore of this checkpoint onto another mesh reads, process by process.

        `mesh`, `specs` and `only` are those of `ostraka.restore`; a mesh may be axis sizes, and
        specs rules. Without them all goes back to where it was. Of very many processes a few are
        worked out; `sampled` says which.

        >>> plan.restore(mesh={"data": 128, "model": 8}, processes=128).read_bytes.most
        """
        saved = Saved(self.metadata, self.metadata_bytes, self.index_bytes)
        with paused_gc():
            return plan_restore(saved, mesh, specs, processes, only, sampled)


def plan(
    tree: Any,
    *,
    mesh: Any = None,
    specs: Any = None,
    processes: int | None = None,
    optimizer: Any = None,
    dtype: Any = None,
    metadata: Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Plan:
    """What a save of `tree` will write, to the byte; no device is needed, nothing is written.

    `tree` is what `save` takes, or abstract: `nnx.eval_shape`, `jax.ShapeDtypeStruct`s. A path is
    a checkpoint that is there, planned as it is.

    `mesh` is where it will lie: a mesh, an abstract one, or axis sizes such as `{"data": 64}`.
    `specs` says how it is cut: a tree of specs, one spec, or rules such as `sharding.fsdp("data")`
    and, for patterns, `sharding.combine({"**/kernel": P("data"), "**": P()})`.
    Without them each array is where its own sharding says. `processes` share the devices evenly.

    `optimizer`, an optax transformation or the name of one, adds the state that it has for the
    model `tree`, under `optimizer` beside `model`, cut as the parameters are. `dtype`, `metadata`
    and `max_file_bytes` are those of `save`.

    Host arrays are taken to be the same on all processes, as `save` finds out.

    >>> plan(nnx.eval_shape(make), mesh={"data": 8}, specs=sharding.fsdp()).total_bytes
    """
    if isinstance(tree, str | os.PathLike):
        given = [mesh, specs, processes, optimizer, dtype, metadata]
        if any(value is not None for value in given) or max_file_bytes != MAX_FILE_BYTES:
            raise ValueError(
                "a checkpoint that is there is planned as it is; ask plan(path).restore(mesh=…) "
                "what bringing it onto another mesh reads"
            )
        return plan_checkpoint(cast(PathLike, tree))
    # Only trees need JAX.
    from ostraka.planner._tree import state_of_tree

    state = state_of_tree(
        tree,
        mesh=mesh,
        specs=specs,
        processes=processes,
        optimizer=optimizer,
        dtype=dtype,
        metadata=metadata or {},
    )
    return plan_state(state, max_file_bytes=max_file_bytes)


def plan_state(state: State, *, max_file_bytes: int) -> Plan:
    """The plan of a state. Raises InvalidSharding where a spec does not fit."""
    if max_file_bytes < _LEAST_FILE_BYTES:
        raise ValueError(
            f"max_file_bytes is {max_file_bytes:,}; it must be at least {_LEAST_FILE_BYTES:,}"
        )
    if sum(leaf.nbytes for leaf in state.leaves) > _MOST_BYTES:
        largest = max(state.leaves, key=lambda leaf: leaf.nbytes)
        raise ValueError(
            f"the state is too large to be planned: leaf {largest.path!r} {largest.shape} alone "
            f"has {largest.nbytes:,} bytes, and {_MOST_BYTES:,} is the most in all"
        )
    _check_fit(state.leaves, state.meshes)
    with paused_gc():
        write = plan_write(
            state.leaves, state.meshes, state.process_of, max_file_bytes=max_file_bytes
        )
        sizes, exact = _index_bytes(write)
    metadata = _account.describe_metadata(
        write, tree=state.tree, user=state.user, writer=_writer(write), indexes=sizes
    )
    size = len(_format.encode_metadata(metadata))
    return Plan(write, metadata, size, sizes, exact, state.parameters, state.problems)


def _check_fit(leaves: Sequence[LeafSpec], meshes: Sequence[MeshSpec]) -> None:
    checked: set[Any] = set()
    for leaf in leaves:
        key = (leaf.mesh, leaf.partition, leaf.shape)
        if leaf.mesh != HOST_LOCAL and key not in checked:
            logical = leaf.shape[:-1] if leaf.kind == "key" else leaf.shape
            check_partition(leaf.path, logical, leaf.partition, meshes[leaf.mesh])
            checked.add(key)


def _index_bytes(write: WritePlan) -> tuple[dict[int, int], bool]:
    """The size of each process's index; from a few of them if there are very many boxes."""
    writing = sorted({write.process_of[file.device] for file in write.files})
    boxes = sum(len(write.layouts[leaf.layout].owners) for leaf in write.leaves)
    if boxes <= _EXACT_ENTRIES or len(writing) <= SAMPLED_PROCESSES:
        return _account.index_bytes(write, set(writing)), True
    found = _account.index_bytes(write, {writing[0], writing[-1]})
    return dict.fromkeys(writing, max(found.values())), False


def _writer(write: WritePlan) -> dict[str, Any]:
    """What `_METADATA` says of its writer.

    Only how long the phases took is not known: each number of seconds may have a digit or two more
    or less than the one here.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        jax_version = version("jax")
    except PackageNotFoundError:
        jax_version = "0.10.0"
    sizes = _account.file_bytes_by_process(write)
    watch = Stopwatch(phases=dict.fromkeys(_PHASES, _SOME_SECONDS))
    written = [(size, _SOME_SECONDS) for size in sizes]
    return {
        "ostraka": __version__,
        "jax": jax_version,
        "python": platform.python_version(),
        "time": "2000-01-01T00:00:00.000+00:00",
        "timeline": timeline(watch, summarize(written)),
    }


def plan_checkpoint(path: PathLike) -> Plan:
    """A checkpoint that is there, as the plan that it was written by."""
    source = load(open_store(path))
    found = source.metadata
    write = WritePlan(found.meshes, found.layouts, found.leaves, found.files, found.process_of)
    sizes = {process: index.size for process, index in found.indexes.items()}
    return Plan(write, found, source.metadata_bytes, sizes, True, None, ())
