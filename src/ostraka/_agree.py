"""The second stage of a save: what the processes must have alike, and what each of them alone has.

A leaf that lies in the memory of one process (a numpy array, an array on that process's devices) is
one array if all processes have it alike, and one array with a process dimension if they differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostraka import _format
from ostraka._capture import Captured, DtypeRule, floating_dtype, may_cast
from ostraka._coordinate import Operation, ProcessFailed
from ostraka._document import with_states
from ostraka._spec import HOST_LOCAL, LeafSpec, MeshSpec
from ostraka._values import CastValue, HostValue, Value, flat_bytes


@dataclass(frozen=True, slots=True)
class Agreed:
    """What is saved: the same on all processes, but for the values and the states in the tree."""

    save_id: str
    tree: Any
    """The tree as `_METADATA` has it; complete on process 0, which writes that."""
    leaves: Sequence[LeafSpec]
    values: list[Value]
    """In the order of the leaves. Emptied when the save has ended."""
    meshes: Sequence[MeshSpec]
    process_of: tuple[int, ...]


def agree(
    operation: Operation,
    captured: Captured,
    *,
    location: str,
    dtype: DtypeRule,
    user: Any,
    take_place: Callable[[], None],
) -> Agreed:
    """Have all processes agree on the tree, on the place and on a new save's id.

    `take_place` is called on process 0 once all trees are known to be alike, and may refuse. Raises
    ProcessFailed on all processes, naming one whose tree differs.
    """
    states: dict[str, list[Any]] = {}

    def decide(described: list[Any]) -> dict[str, Any]:
        common, per_process = _compare(described) if len(described) > 1 else ([], [])
        for path in captured.states:
            states[path] = [mine["states"][path] for mine in described]
        take_place()
        return {"id": secrets.token_hex(8), "common": common, "per_process": per_process}

    several = operation.count > 1
    mine = {"states": captured.states}
    if several:
        mine |= _describe(captured, location, (user, repr(dtype)), operation.process)
    answer = operation.exchange("begin", mine, decide)
    leaves, values, meshes = captured.leaves, captured.values, captured.meshes
    if several:
        leaves, values = _join(leaves, values, answer, operation.count)
        leaves, meshes = number_meshes(leaves, meshes)
    if dtype is not None:
        leaves = cast_leaves(leaves, dtype)
        values = [
            value if leaf.cast_from is None else CastValue(value, leaf.dtype)
            for leaf, value in zip(leaves, values, strict=True)
        ]
    tree = with_states(captured.tree, states) if states else captured.tree
    return Agreed(answer["id"], tree, leaves, values, meshes, captured.process_of)


def _describe(captured: Captured, location: str, rest: Any, process: int) -> dict[str, Any]:
    """What one process says of its tree; `rest` is what else must be the same on all."""
    sole = captured.sole_process
    return {
        "path": location,
        "tree": _fingerprint(captured, rest),
        "paths": [captured.leaves[number].path for number in sole],
        "sole": list(sole.items()),
        "digests": [
            (number, _format.digest(flat_bytes(captured.values[number].whole())))
            for number, owner in sole.items()
            if owner == process
        ],
    }


def _fingerprint(captured: Captured, rest: Any) -> str:
    leaves: list[Any] = []
    for number, leaf in enumerate(captured.leaves):
        leaves.append((leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.prng))
        if number not in captured.sole_process:
            leaves.append((captured.meshes[leaf.mesh], leaf.partition))
    return _format.digest(repr((captured.tree, leaves, rest)).encode())


def _compare(described: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """On process 0: the leaves that all hold alike, and those of which each has its own value.

    Raises ProcessFailed for the first process that differs from process 0.
    """
    first = described[0]
    for process, mine in enumerate(described):
        if mine["path"] != first["path"]:
            raise ProcessFailed(
                process, f"it saves to {mine['path']} while process 0 saves to {first['path']}"
            )
        if mine["tree"] != first["tree"]:
            raise ProcessFailed(
                process,
                "its tree differs from that of process 0: structure, shapes, dtypes, shardings, "
                "Python values and metadata must be the same on all processes",
            )
    return _sort_out_sole(described)


def _sort_out_sole(described: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Of the leaves that live on one process alone: those all have alike, those each has its own.

    The rest lie on the devices of one process that all others know of.
    """
    owners = [dict(mine["sole"]) for mine in described]
    digests = [dict(mine["digests"]) for mine in described]
    paths = dict(zip(owners[0], described[0]["paths"], strict=True))
    common: list[int] = []
    per_process: list[int] = []
    for number in owners[0]:
        named = [owner[number] for owner in owners]
        if named == list(range(len(described))):
            alike = len({found[number] for found in digests}) == 1
            (common if alike else per_process).append(number)
        elif len(set(named)) > 1:
            odd = next(p for p, owner in enumerate(named) if owner not in (p, named[0]))
            raise ProcessFailed(
                odd, f"leaf {paths[number]!r} lies on other devices there than on process 0"
            )
    return common, per_process


def _join(
    leaves: Sequence[LeafSpec], values: list[Value], answer: dict[str, Any], process_count: int
) -> tuple[list[LeafSpec], list[Value]]:
    """Leaves that each process holds for itself, as leaves that belong to all."""
    leaves, values = list(leaves), list(values)
    for number in (*answer["common"], *answer["per_process"]):
        leaf, value = leaves[number], values[number]
        own = number in answer["per_process"]
        values[number] = HostValue(value.whole(), may_change=value.may_change, of_process=own)
        # Of what all have alike, any process may write any part.
        shape = (process_count, *leaf.shape) if own else leaf.shape
        leaves[number] = replace(leaf, mesh=HOST_LOCAL, partition=(), shape=shape, per_process=own)
    return leaves, values


def number_meshes(
    leaves: Sequence[LeafSpec], meshes: Sequence[MeshSpec]
) -> tuple[Sequence[LeafSpec], Sequence[MeshSpec]]:
    """Number the meshes in the order in which leaves use them, dropping those that none does.

    What was on this process alone may have been on a mesh of its own, which the other processes
    don't have.
    """
    numbers = {HOST_LOCAL: HOST_LOCAL}
    for leaf in leaves:
        numbers.setdefault(leaf.mesh, len(numbers) - 1)
    if all(old == new for old, new in numbers.items()) and len(numbers) > len(meshes):
        return leaves, meshes
    renumbered = [replace(leaf, mesh=numbers[leaf.mesh]) for leaf in leaves]
    return renumbered, [meshes[old] for old in numbers if old != HOST_LOCAL]


def cast_leaves(leaves: Sequence[LeafSpec], dtype: DtypeRule) -> Sequence[LeafSpec]:
    """Floating-point arrays as another dtype; scalars and others stay as they are."""
    cast: list[LeafSpec] = []
    for leaf in leaves:
        wanted = floating_dtype(dtype, leaf.path)
        if wanted is not None and wanted != leaf.dtype and may_cast(leaf):
            leaf = replace(leaf, dtype=wanted, cast_from=leaf.dtype)
        cast.append(leaf)
    return cast
