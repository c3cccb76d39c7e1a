"""The second stage of a save: all processes agree on one tree, one location and one id.

Each process may hold a leaf for itself (a numpy array, an array on its own devices). If all
processes have the same values, the checkpoint has one array, else one with a process dimension.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ostraka.common.dtypes import to_bytes
from ostraka.common.progress import Count, OnBytes
from ostraka.common.record import OnRecord, Stopwatch
from ostraka.layout import shard_file
from ostraka.layout.casts import cast_leaf
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec
from ostraka.live.values import CastValue, HostValue, Value
from ostraka.processes.operation import Operation, ProcessFailed, refuse_different_paths
from ostraka.saving.capture import Captured
from ostraka.saving.limit import HostLimit
from ostraka.saving.place import Place
from ostraka.storage import PathLike
from ostraka.tree.json_tree import decode_state, encode_state, with_states

if TYPE_CHECKING:
    from ostraka.saving.save import SaveOptions


@dataclass(frozen=True, slots=True)
class SaveHooks:
    """Functions of the caller."""

    on_record: OnRecord | None = None
    on_commit: Callable[[], None] | None = None
    on_bytes: OnBytes | None = None
    check_place: Callable[[], None] | None = None
    """Called on process 0 before the first write. It may refuse the save."""
    check_no_arrays: Callable[[], None] | None = None
    """As `check_place`, for a tree that has no arrays."""


@dataclass(frozen=True, slots=True)
class RunningSave:
    """A save that this process has entered."""

    path: PathLike
    options: SaveOptions
    """Checked, and with `max_file_bytes` as a number."""
    hooks: SaveHooks
    operation: Operation
    place: Place
    watch: Stopwatch
    progress: Count = field(default_factory=Count)
    limit: HostLimit | None = None
    """The limit of the host memory, if the save has one."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The tree to save: the same on all processes, but for values, states and host names."""

    save_id: str
    tree: Any
    """The tree as `_METADATA` has it. It is complete on process 0, which writes it."""
    leaves: Sequence[LeafSpec]
    values: list[Value]
    """In the order of the leaves. Emptied when the save has ended."""
    meshes: Sequence[MeshSpec]
    process_of: tuple[int, ...]
    hosts: tuple[int, ...]
    """The host of each process, numbered."""
    host_names: Sequence[str]
    """The host name of each process, on process 0."""


def agree(save: RunningSave, captured: Captured) -> Agreed:
    """Have all processes agree on the tree, the place and the save's id.

    Process 0 first compares the trees, then takes the place. The options must have the same repr on
    all processes. Raises ProcessFailed on all processes, naming one that differs.
    """
    operation, place, hooks, options = save.operation, save.place, save.hooks, save.options
    several = operation.count > 1
    states: dict[str, list[Any]] = {}
    host_names: list[str] = []

    def decide(described: list[Any]) -> dict[str, Any]:
        joined = _compare(described, captured.leaves) if several else []
        for path in captured.states:
            found = [mine["states"][path] for mine in described]
            join = captured.joins.get(path)
            if join is not None:
                found = [encode_state(path, join(list(map(decode_state, found))))]
            states[path] = found
        host_names.extend(map(itemgetter("host"), described))
        if hooks.check_no_arrays is not None and not captured.leaves:
            hooks.check_no_arrays()
        if hooks.check_place is not None:
            hooks.check_place()
        place.take()
        chosen = options.save_id or secrets.token_hex(8)
        place.make_room(shard_file.shards_directory(chosen))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(host_names))}
        return {"id": chosen, "joined": joined, "hosts": [numbers[name] for name in host_names]}

    mine: dict[str, Any] = {"states": captured.states, "host": socket.gethostname()}
    if several:
        mine["path"] = place.store.location
        mine["tree"] = _fingerprint(captured, options)
        sole = captured.sole_process.items()
        digests = {
            number: shard_file.digest(to_bytes(captured.values[number].whole()))
            for number, owner in sole
            if owner == operation.process
        }
        mine["sole"] = [(number, owner, digests.get(number)) for number, owner in sole]
    answer = operation.exchange("begin", mine, decide)
    leaves, meshes = captured.leaves, captured.meshes
    values: list[Value] = list(captured.values)
    if several:
        leaves = list(leaves)
        for number, own in answer["joined"]:
            # One leaf of all processes. If all have the same values, any may write any part.
            shape = (operation.count, *leaves[number].shape) if own else leaves[number].shape
            leaves[number] = replace(
                leaves[number], mesh=HOST_LOCAL, partition=(), shape=shape, per_process=own
            )
            value = captured.values[number]
            values[number] = HostValue(value.whole(), may_change=value.may_change, of_process=own)
        leaves, meshes = number_meshes(leaves, meshes)
    if options.dtype is not None:
        leaves = [cast_leaf(leaf, options.dtype) for leaf in leaves]
        for number, leaf in enumerate(leaves):
            if leaf.cast_from is not None:
                values[number] = CastValue(values[number], leaf.dtype)
    return Agreed(
        answer["id"],
        with_states(captured.tree, states) if states else captured.tree,
        leaves,
        values,
        meshes,
        captured.process_of,
        tuple(answer["hosts"]),
        host_names,
    )


def _fingerprint(captured: Captured, options: SaveOptions) -> str:
    leaves: list[Any] = []
    for number, leaf in enumerate(captured.leaves):
        leaves.append((leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.prng))
        if number not in captured.sole_process:
            leaves.append((captured.meshes[leaf.mesh], leaf.partition))
    return shard_file.digest(repr((captured.tree, leaves, options)).encode())


def _compare(described: list[Any], leaves: Sequence[LeafSpec]) -> list[tuple[int, bool]]:
    """On process 0: the leaves that each process holds for itself, and whether their values differ.

    Raises ProcessFailed for the first process that differs from process 0.
    """
    first = described[0]
    refuse_different_paths("saves to", [mine["path"] for mine in described])
    for process, mine in enumerate(described):
        if mine["tree"] != first["tree"]:
            raise ProcessFailed(
                process,
                "its tree differs from that of process 0: structure, shapes, dtypes, shardings, "
                "Python values, metadata and options must be the same on all processes",
            )
    joined: list[tuple[int, bool]] = []
    # The trees are alike, so all processes list the same leaves.
    for found in zip(*(mine["sole"] for mine in described), strict=True):
        numbers, owners, digests = zip(*found, strict=True)
        if owners == tuple(range(len(described))):
            joined.append((numbers[0], len(set(digests)) > 1))
        elif len(set(owners)) > 1:
            odd = next(p for p, owner in enumerate(owners) if owner not in (p, owners[0]))
            path = leaves[numbers[0]].path
            raise ProcessFailed(odd, f"leaf {path!r} lies on other devices there than on process 0")
    return joined


def number_meshes(
    leaves: Sequence[LeafSpec], meshes: Sequence[MeshSpec]
) -> tuple[Sequence[LeafSpec], Sequence[MeshSpec]]:
    """Number the meshes in the order of the leaves, and drop unused ones.

    A leaf of this process alone may have been on a mesh that the other processes lack.
    """
    numbers = {HOST_LOCAL: HOST_LOCAL}
    for leaf in leaves:
        numbers.setdefault(leaf.mesh, len(numbers) - 1)
    renumbered = [
        leaf if leaf.mesh == numbers[leaf.mesh] else replace(leaf, mesh=numbers[leaf.mesh])
        for leaf in leaves
    ]
    return renumbered, [meshes[old] for old in numbers if old != HOST_LOCAL]
