"""Errors and warnings about how leaves are cut. No JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ostraka._spec import MeshSpec, Partition, find_misfits, show_partition
from ostraka.errors import InvalidSharding, headed_list
from ostraka.sharding._leaf import ShapedLeaf, every_dimension, kernel_of

REPLICATED_LIMIT_BYTES = 64 << 20
"""From this size on, a leaf that is whole on every device is worth a warning."""

LARGE_BYTES = 1 << 20
"""From this size on, a leaf that presets leave whole is worth a warning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An error (the leaf can't be placed) or a warning (it can, at a cost) about one leaf."""

    severity: Literal["error", "warning"]
    path: str
    message: str

    def __str__(self) -> str:
        return self.message


def findings_of(
    leaves: Sequence[ShapedLeaf],
    mesh: MeshSpec,
    partitions: Mapping[str, Partition],
    *,
    replicated_limit_bytes: int,
) -> list[Finding]:
    """Errors for specs that do not fit, then warnings about the leaves that do."""
    findings: list[Finding] = []
    fits: set[object] = set()  # a model has few shapes, and many leaves
    for leaf in leaves:
        case = (leaf.shape, partitions[leaf.path])
        if case not in fits:
            found = list(_misfits(leaf, mesh, partitions[leaf.path]))
            findings += found
            if not found:
                fits.add(case)
    wrong = {finding.path for finding in findings}
    fitting = [leaf for leaf in leaves if leaf.path not in wrong]
    findings += _disagreements(fitting, partitions)
    findings += _replicated(fitting, mesh, partitions, replicated_limit_bytes)
    return findings


def raise_errors(subject: str, findings: Sequence[Finding]) -> None:
    """Raise InvalidSharding that lists every error, if there are any."""
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        raise InvalidSharding(headed_list(subject, errors))


def _misfits(leaf: ShapedLeaf, mesh: MeshSpec, partition: Partition) -> Iterator[Finding]:
    for message, size in find_misfits(leaf.path, leaf.shape, mesh, partition):
        remedy = "" if size is None else f"; the nearest size that does is {size}"
        yield Finding("error", leaf.path, message + remedy)


def _disagreements(
    leaves: Sequence[ShapedLeaf], partitions: Mapping[str, Partition]
) -> Iterator[Finding]:
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    for leaf in leaves:
        kernel = kernel_of(leaf.path, leaf.shape, shapes)
        if kernel is None:
            continue
        path, dimensions = kernel
        entries = every_dimension(partitions[path], len(shapes[path]))
        expected = tuple(entries[dimension] for dimension in dimensions)
        actual = every_dimension(partitions[leaf.path], len(leaf.shape))
        if actual != expected:
            yield Finding(
                "warning",
                leaf.path,
                f"leaf {leaf.path!r} is cut as {_shown(actual)} and its kernel {path!r} as "
                f"{_shown(entries)}: each step moves data to add them; "
                f"{_shown(expected)} goes with it",
            )


def _shown(partition: Partition) -> str:
    return show_partition(partition if any(partition) else ())


def _replicated(
    leaves: Sequence[ShapedLeaf],
    mesh: MeshSpec,
    partitions: Mapping[str, Partition],
    limit_bytes: int,
) -> Iterator[Finding]:
    devices = len(mesh.devices)
    for leaf in leaves:
        if devices == 1 or leaf.nbytes <= limit_bytes:
            continue
        if mesh.size_of([axis for axes in partitions[leaf.path] for axis in axes]) == 1:
            yield Finding(
                "warning",
                leaf.path,
                f"leaf {leaf.path!r} {leaf.shape} has {leaf.nbytes:,} bytes and is whole on each "
                f"of {devices} devices",
            )


def left_whole(
    leaves: Sequence[ShapedLeaf], mesh: MeshSpec, partitions: Mapping[str, Partition]
) -> Iterator[Finding]:
    """Warnings for large leaves that presets left whole, one for the same leaf of all layers."""
    devices = len(mesh.devices)
    alike: dict[object, list[ShapedLeaf]] = {}
    for leaf in leaves:
        is_large = len(leaf.shape) > 1 and leaf.nbytes >= LARGE_BYTES
        axes = [axis for cut in partitions[leaf.path] for axis in cut]
        if devices > 1 and is_large and mesh.size_of(axes) == 1:
            name = re.sub(r"\d+", "*", leaf.path)
            alike.setdefault((name, leaf.shape), []).append(leaf)
    for group in alike.values():
        first = group[0]
        nbytes = sum(leaf.nbytes for leaf in group)
        others = f" and {len(group) - 1} like it have" if len(group) > 1 else " has"
        yield Finding(
            "warning",
            first.path,
            f"leaf {first.path!r} {first.shape}{others} {nbytes:,} bytes, which the presets leave "
            f"whole on each of {devices} devices: no dimension that they would cut divides, or "
            "they do not know the layer; a pattern in front of them, or "
            "tensor_parallel(column=…, row=…), says how to cut it",
        )
