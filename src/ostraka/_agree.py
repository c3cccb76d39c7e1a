"""The second stage of a save: what the processes must have alike, and what each of them alone has.

A leaf that lies in the memory of one process (a numpy array, an array on that process's devices) is
one array if all processes have it alike, and one array with a process dimension if they differ.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ostraka import _format
from ostraka._capture import Captured, DtypeRule, floating_dtype, may_cast
from ostraka._codec import CompressRule
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
    user: Mapping[str, Any]
    hosts: tuple[int, ...] = ()
    """The host of each process, numbered; only if asked for."""


def agree(
    operation: Operation,
    captured: Captured,
    *,
    location: str,
    dtype: DtypeRule,
    compress: CompressRule,
    parity: int,
    user: Mapping[str, Any],
    take_place: Callable[[], None],
    save_id: str | None = None,
) -> Agreed:
    """Have all processes agree on the tree, on the place and on a new save's id.

    `save_id` is that of an unfinished save that this one goes on with.

    With `parity`, they learn who is on which host, too. `take_place` is called on process 0 once
    all trees are known to be alike, and may refuse. Raises ProcessFailed on all processes, naming
    one whose tree differs.
    """
    several = operation.count > 1
    states: dict[str, list[Any]] = {}

    def decide(described: list[Any]) -> dict[str, Any]:
        joined = _compare(described, captured.leaves) if several else []
        for path in captured.states:
            states[path] = [mine["states"][path] for mine in described]
        take_place()
        answer: dict[str, Any] = {"id": save_id or secrets.token_hex(8), "joined": joined}
        if parity:
            answer["hosts"] = _number([mine["host"] for mine in described])
        return answer

    mine: dict[str, Any] = {"states": captured.states}
    if several:
        rest = (user, repr(dtype), repr(compress), parity)
        mine |= _describe(captured, location, rest, operation.process)
    if parity:
        mine["host"] = socket.gethostname()
    answer = operation.exchange("begin", mine, decide)
    leaves, meshes = captured.leaves, captured.meshes
    values = list(captured.values)
    if several:
        leaves = list(leaves)
        for number, own in answer["joined"]:
            leaves[number] = _join(leaves[number], operation.count, own=own)
            value = values[number]
            values[number] = HostValue(value.whole(), may_change=value.may_change, of_process=own)
        leaves, meshes = number_meshes(leaves, meshes)
    written: list[Value] = list(values)
    if dtype is not None:
        leaves = cast_leaves(leaves, dtype)
        written = [
            value if leaf.cast_from is None else CastValue(value, leaf.dtype)
            for leaf, value in zip(leaves, values, strict=True)
        ]
    tree = with_states(captured.tree, states) if states else captured.tree
    hosts = tuple(answer["hosts"]) if parity else ()
    return Agreed(answer["id"], tree, leaves, written, meshes, captured.process_of, user, hosts)


def _number(names: Sequence[str]) -> list[int]:
    """Names as numbers, in the order in which they first come."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _describe(captured: Captured, location: str, rest: Any, process: int) -> dict[str, Any]:
    """What one process says of its tree; `rest` is what else must be the same on all."""

    def digest(number: int) -> str:
        return _format.digest(flat_bytes(captured.values[number].whole()))

    return {
        "path": location,
        "tree": _fingerprint(captured, rest),
        "sole": [
            (number, owner, digest(number) if owner == process else None)
            for number, owner in captured.sole_process.items()
        ],
    }


def _fingerprint(captured: Captured, rest: Any) -> str:
    leaves: list[Any] = []
    for number, leaf in enumerate(captured.leaves):
        leaves.append((leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.prng))
        if number not in captured.sole_process:
            leaves.append((captured.meshes[leaf.mesh], leaf.partition))
    return _format.digest(repr((captured.tree, leaves, rest)).encode())


def _compare(described: list[Any], leaves: Sequence[LeafSpec]) -> list[tuple[int, bool]]:
    """On process 0: the leaves that each process holds for itself, and whether their values differ.

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


def _join(leaf: LeafSpec, process_count: int, *, own: bool) -> LeafSpec:
    """A leaf that each process holds for itself, as one that belongs to all.

    Of what all have alike, any process may write any part.
    """
    shape = (process_count, *leaf.shape) if own else leaf.shape
    return replace(leaf, mesh=HOST_LOCAL, partition=(), shape=shape, per_process=own)


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
    renumbered = [
        leaf if leaf.mesh == numbers[leaf.mesh] else replace(leaf, mesh=numbers[leaf.mesh])
        for leaf in leaves
    ]
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
