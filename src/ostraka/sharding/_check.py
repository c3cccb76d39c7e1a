"""What is wrong, or unwise, about a tree of specs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from ostraka._capture import spec_entries
from ostraka._document import ROOT, Branch, Leaf, leaves_of
from ostraka.errors import nearest
from ostraka.sharding._data import AnyMesh, array_leaves, mesh_spec, parse_state, to_spec
from ostraka.sharding._findings import REPLICATED_LIMIT_BYTES, Finding, find_problems
from ostraka.sharding._rules import is_rules, settle


def check(
    state: Any, specs: Any, mesh: AnyMesh, *, replicated_limit_bytes: int = REPLICATED_LIMIT_BYTES
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
    _, findings = settle_checked(parse_state(state), specs, mesh, replicated_limit_bytes)
    return findings


def settle_checked(
    parsed: Branch | Leaf,
    specs: Any,
    mesh: AnyMesh,
    replicated_limit_bytes: int = REPLICATED_LIMIT_BYTES,
) -> tuple[dict[str, PartitionSpec], list[Finding]]:
    """The spec of each array that has one, and everything that is wrong or unwise about them."""
    sizes = mesh_spec(mesh)
    found, findings = _specs_by_path(parsed, specs, mesh)
    leaves = [leaf for leaf in array_leaves(parsed) if leaf.path in found]
    partitions = {leaf.path: spec_entries(leaf.path, found[leaf.path]) for leaf in leaves}
    findings += find_problems(
        leaves, partitions, sizes, replicated_limit_bytes=replicated_limit_bytes
    )
    return found, findings


def _specs_by_path(
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
        Finding("error", path, f"specs has {path!r}, which is no leaf{_hint(path, paths)}")
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


def _hint(path: str, paths: Sequence[str]) -> str:
    if "*" in path:
        return ": a mapping alone is a tree of specs; make patterns of it with sharding.combine"
    return nearest(path, paths)
