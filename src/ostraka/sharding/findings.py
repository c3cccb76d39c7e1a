"""Errors and warnings about how leaves are sharded. No JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ostraka.errors import InvalidSharding, headed_list
from ostraka.layout.spec import MeshSpec, Partition, iter_misfits, show_partition
from ostraka.sharding.leaves import (
    Leaves,
    Partitions,
    ShapedLeaf,
    cut_as,
    every_dimension,
    kernel_of,
)

REPLICATED_LIMIT_BYTES = 64 << 20
"""Warn about larger leaves if every device holds the whole leaf. In bytes."""

LARGE_BYTES = 1 << 20
"""Warn about leaves of this size or more if presets leave them whole."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An error or a warning about one leaf, as `check` returns it.

    After an error the leaf can't be placed. After a warning it can, at a cost.
    """

    severity: Literal["error", "warning"]
    path: str
    message: str

    def __str__(self) -> str:
        return self.message


def findings_of(
    leaves: Leaves, mesh: MeshSpec, partitions: Partitions, *, replicated_limit_bytes: int
) -> list[Finding]:
    """Return an error for each spec that does not fit, then warnings about the other leaves."""
    findings: list[Finding] = []
    fits: set[object] = set()  # a model has few shapes, and many leaves
    for leaf in leaves:
        case = (leaf.shape, partitions[leaf.path])
        if case not in fits:
            found = list(iter_misfits(leaf.path, leaf.shape, mesh, partitions[leaf.path]))
            for misfit in found:
                size = misfit.nearest_size
                remedy = "" if size is None else f"; the nearest size that does is {size}"
                findings.append(Finding("error", leaf.path, misfit.message + remedy))
            if not found:
                fits.add(case)
    wrong = {finding.path for finding in findings}
    fitting = [leaf for leaf in leaves if leaf.path not in wrong]
    findings += _disagreements(fitting, partitions)
    findings += [
        Finding(
            "warning",
            leaf.path,
            f"leaf {leaf.path!r} {leaf.shape} has {leaf.nbytes:,} bytes and is whole on each "
            f"of {len(mesh.devices)} devices",
        )
        for leaf in fitting
        if leaf.nbytes > replicated_limit_bytes and _is_replicated(mesh, partitions[leaf.path])
    ]
    return findings


def raise_errors(subject: str, findings: Sequence[Finding]) -> None:
    """Raise InvalidSharding with a list of the errors, if there are any."""
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        raise InvalidSharding(headed_list(subject, errors))


def _disagreements(leaves: Leaves, partitions: Partitions) -> Iterator[Finding]:
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    for leaf in leaves:
        kernel = kernel_of(leaf.path, leaf.shape, shapes)
        if kernel is None:
            continue
        path, dimensions = kernel
        entries = every_dimension(partitions[path], len(shapes[path]))
        expected = cut_as(entries, dimensions)
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


def _is_replicated(mesh: MeshSpec, partition: Partition) -> bool:
    """Return True if there are several devices, and each holds the whole array."""
    axes = [axis for axes in partition for axis in axes]
    return len(mesh.devices) > 1 and mesh.size_of(axes) == 1


def left_whole(leaves: Leaves, mesh: MeshSpec, partitions: Partitions) -> Iterator[Finding]:
    """Yield a warning for large leaves that presets left whole, one for the leaf of all layers."""
    alike: dict[object, list[ShapedLeaf]] = {}
    for leaf in leaves:
        is_large = len(leaf.shape) > 1 and leaf.nbytes >= LARGE_BYTES
        if is_large and _is_replicated(mesh, partitions[leaf.path]):
            alike.setdefault((re.sub(r"\d+", "*", leaf.path), leaf.shape), []).append(leaf)
    for group in alike.values():
        first, nbytes = group[0], sum(leaf.nbytes for leaf in group)
        others = f" and {len(group) - 1} like it have" if len(group) > 1 else " has"
        yield Finding(
            "warning",
            first.path,
            f"leaf {first.path!r} {first.shape}{others} {nbytes:,} bytes, which the presets leave "
            f"whole on each of {len(mesh.devices)} devices: no dimension that they would cut "
            "divides, or they do not know the layer; a pattern in front of them, or "
            "tensor_parallel(column=…, row=…), says how to cut it",
        )
