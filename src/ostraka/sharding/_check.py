"""Check a tree of specs: errors and warnings."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from ostraka._capture import spec_entries
from ostraka._nodes import Branch, Leaf
from ostraka.sharding._combine import combined
from ostraka.sharding._data import array_leaves, parse_state
from ostraka.sharding._findings import REPLICATED_LIMIT_BYTES, Finding, findings_of, left_whole
from ostraka.sharding._mesh import AnyMesh, mesh_spec, refuse_swapped
from ostraka.sharding._rules import resolve_all


def check(
    state: Any, mesh: AnyMesh, specs: Any, *, replicated_limit_bytes: int = REPLICATED_LIMIT_BYTES
) -> list[Finding]:
    """All errors and warnings about `specs`, errors first; an empty list means that all is well.

    Errors: a leaf without spec, a spec without leaf, unknown axes, more entries than dimensions, an
    axis used twice, dimensions that do not divide (with the nearest size that does). Warnings: a
    bias that is cut otherwise than its kernel, leaves above `replicated_limit_bytes` that are whole
    on every device, and from a mebibyte on what presets have left whole.

    `specs` is a tree as `spec_tree` makes it, or rules as it takes them. Only
    the shapes of `state` and the sizes of the mesh's axes are looked at (`{"data": 2, "model": 4}`
    will do for a mesh).

        for finding in check(model, mesh, specs):
            print(finding.severity, finding)
    """
    refuse_swapped("check(state, mesh, specs)", specs)
    parsed = parse_state(state)
    found, findings = resolve_checked(parsed, mesh, specs, replicated_limit_bytes)
    sizes = mesh_spec(mesh)
    if any(preset.axis_on(sizes) is not None for preset in combined(specs).presets):
        known = {finding.path for finding in findings}
        leaves = [leaf for leaf in array_leaves(parsed) if leaf.path not in known]
        partitions = {leaf.path: spec_entries(leaf.path, found[leaf.path]) for leaf in leaves}
        findings += left_whole(leaves, sizes, partitions)
    return findings


def resolve_checked(
    parsed: Branch | Leaf,
    mesh: AnyMesh,
    specs: Any,
    replicated_limit_bytes: int = REPLICATED_LIMIT_BYTES,
) -> tuple[dict[str, PartitionSpec], list[Finding]]:
    """The spec of each array that has one, and all errors and warnings about them."""
    sizes = mesh_spec(mesh)
    found, findings = resolve_all(parsed, mesh, specs)
    leaves = [leaf for leaf in array_leaves(parsed) if leaf.path in found]
    partitions = {leaf.path: spec_entries(leaf.path, found[leaf.path]) for leaf in leaves}
    findings += findings_of(
        leaves, sizes, partitions, replicated_limit_bytes=replicated_limit_bytes
    )
    return found, findings
