"""What the processes of a save must have alike, and whose the leaves are that one alone holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostraka import _format
from ostraka._capture import Captured, host_digests
from ostraka._coordinate import ProcessFailed


@dataclass(frozen=True, slots=True)
class Compared:
    """What process 0 found in what all processes said of their trees."""

    common: list[int]
    """Leaves that each process holds for itself, and all have alike."""
    per_process: list[int]
    """Leaves that each process holds for itself, and has its own value of."""
    states: dict[str, list[Any]]
    """The states of stateful objects on all processes."""


def describe_tree(
    captured: Captured, location: str, rest: Any, process: int, *, several: bool
) -> dict[str, Any]:
    """What one process says of its tree; `rest` is what else must be the same on all."""
    return {
        "path": location,
        "tree": _fingerprint(captured, rest) if several else "",
        "paths": [captured.leaves[number].path for number in captured.sole_process],
        "sole": list(captured.sole_process.items()),
        "states": captured.states,
        "digests": list(host_digests(captured, process).items()),
    }


def compare_trees(described: list[dict[str, Any]]) -> Compared:
    """On process 0. Raises ProcessFailed for the first process that differs from it."""
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
    common, per_process = _sort_out_sole(described)
    states = {path: [mine["states"][path] for mine in described] for path in first["states"]}
    return Compared(common, per_process, states)


def _fingerprint(captured: Captured, rest: Any) -> str:
    leaves: list[Any] = []
    for number, leaf in enumerate(captured.leaves):
        leaves.append((leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.prng))
        if number not in captured.sole_process:
            leaves.append((captured.meshes[leaf.mesh], leaf.partition))
    return _format.digest(repr((captured.encoded, leaves, rest)).encode())


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
