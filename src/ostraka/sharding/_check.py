"""What is wrong, or unwise, about a tree of specs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import PartitionSpec

from ostraka._capture import describe_spec, spec_entries
from ostraka._document import ROOT, Branch, Leaf, leaves_of
from ostraka._spec import MeshSpec, Partition, partition_problems, show_partition
from ostraka.errors import InvalidSharding, nearest
from ostraka.sharding._data import (
    AnyMesh,
    ArrayLeaf,
    array_leaves,
    kernel_of,
    mesh_spec,
    parse_state,
    partition_of,
    to_spec,
)
from ostraka.sharding._rules import is_rules, settle


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a spec: an error can't be placed, a warning can and costs something."""

    severity: Literal["error", "warning"]
    path: str
    message: str

    def __str__(self) -> str:
        return self.message


def check(
    state: Any, specs: Any, mesh: AnyMesh, *, replicated_limit_bytes: int = 64 << 20
) -> list[Finding]:
    """Everything that is wrong or unwise about `specs`, errors first; an empty list is good news.

    Errors: a leaf without spec, a spec without leaf, unknown axes, more entries than dimensions, an
    axis used twice, dimensions that do not divide (with the nearest size that does). Warnings: a
    bias that is cut otherwise than its kernel, and leaves above `replicated_limit_bytes` that are
    whole on every device.

    `specs` is a tree as `spec_tree` makes it, a spec for all leaves below a name, or rules. Only
    the shapes of `state` and the sizes of the mesh's axes are looked at (`{"data": 2, "model": 4}`
    will do for a mesh).

        for finding in check(model, specs, mesh):
            print(finding.severity, finding)
    """
    parsed = parse_state(state)
    sizes = mesh_spec(mesh)
    found, findings = specs_by_path(parsed, specs, mesh)
    leaves = [leaf for leaf in array_leaves(parsed) if leaf.path in found]
    for leaf in leaves:
        findings += _misfits(leaf, found[leaf.path], sizes)
    wrong = {finding.path for finding in findings}
    fitting = [leaf for leaf in leaves if leaf.path not in wrong]
    findings += _disagreements(fitting, found)
    findings += _replicated(fitting, found, sizes, replicated_limit_bytes)
    return findings


def raise_errors(subject: str, findings: Sequence[Finding]) -> None:
    """Raise InvalidSharding that lists every error, if there are any."""
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if len(errors) == 1:
        raise InvalidSharding(f"{subject}: {errors[0]}")
    if errors:
        shown = [f"  {error}" for error in errors[:50]]
        if len(errors) > 50:
            shown.append(f"  … and {len(errors) - 50} more")
        raise InvalidSharding("\n".join([f"{subject}, for {len(errors)} reasons:", *shown]))


def specs_by_path(
    parsed: Branch | Leaf, specs: Any, mesh: AnyMesh
) -> tuple[dict[str, PartitionSpec], list[Finding]]:
    """The spec of each array, and what is wrong with the tree of specs itself."""
    if is_rules(specs):
        return settle(parsed, specs, mesh), []
    given = {leaf.path: leaf.value for leaf in leaves_of(parse_state(specs))}
    found: dict[str, PartitionSpec] = {}
    findings: list[Finding] = []
    used: set[str] = set()
    for leaf in leaves_of(parsed):
        entry = next((path for path in _above(leaf.path) if path in given), None)
        if entry is not None:
            used.add(entry)
    for leaf in array_leaves(parsed):
        entry = next((path for path in _above(leaf.path) if path in given), None)
        if entry is None:
            message = f"leaf {leaf.path!r} has no spec{nearest(leaf.path, list(given))}"
            findings.append(Finding("error", leaf.path, message))
            continue
        found[leaf.path] = to_spec(leaf.path, given[entry])
    paths = [leaf.path for leaf in leaves_of(parsed)]
    findings += [
        Finding("error", path, f"specs has {path!r}, which is no leaf{nearest(path, paths)}")
        for path in given
        if path not in used
    ]
    return found, findings


def _above(path: str) -> Iterator[str]:
    """The path and the names above it, up to the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ROOT


def _misfits(leaf: ArrayLeaf, spec: PartitionSpec, mesh: MeshSpec) -> Iterator[Finding]:
    partition = spec_entries(leaf.path, spec)
    for sentence in partition_problems(leaf.path, leaf.shape, partition, mesh):
        message = sentence + _nearest_size(sentence, leaf, partition, mesh)
        yield Finding("error", leaf.path, message)


def _nearest_size(sentence: str, leaf: ArrayLeaf, partition: Partition, mesh: MeshSpec) -> str:
    for dimension, (size, axes) in enumerate(zip(leaf.shape, partition, strict=False)):
        if f"dimension {dimension}: {size} elements do not divide" in sentence:
            parts = mesh.size_of(axes)
            below = size // parts * parts
            closest = below if below and size - below < below + parts - size else below + parts
            return f"; the nearest size that does is {closest}"
    return ""


def _disagreements(
    leaves: Sequence[ArrayLeaf], specs: Mapping[str, PartitionSpec]
) -> Iterator[Finding]:
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    for leaf in leaves:
        kernel = kernel_of(leaf.path, leaf.shape, shapes)
        if kernel is None:
            continue
        path, dimensions = kernel
        entries = partition_of(path, specs[path], len(shapes[path]))
        expected = tuple(entries[dimension] for dimension in dimensions)
        actual = partition_of(leaf.path, specs[leaf.path], len(leaf.shape))
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
    leaves: Sequence[ArrayLeaf],
    specs: Mapping[str, PartitionSpec],
    mesh: MeshSpec,
    limit_bytes: int,
) -> Iterator[Finding]:
    devices = len(mesh.devices)
    for leaf in leaves:
        partition = describe_spec(leaf.path, specs[leaf.path])
        parts = mesh.size_of([axis for axes in partition for axis in axes])
        if devices > 1 and parts == 1 and leaf.nbytes > limit_bytes:
            yield Finding(
                "warning",
                leaf.path,
                f"leaf {leaf.path!r} {leaf.shape} has {leaf.nbytes:,} bytes and is whole on each "
                f"of {devices} devices",
            )
