"""Resolve rules, presets, trees of specs or one spec to a spec for each leaf.

Everything that takes specs calls this: `spec_tree`, `check`, `place`, `init`, `ostraka.restore`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from jax.sharding import PartitionSpec, Sharding

from ostraka._capture import spec_entries
from ostraka._nnx import physical_axes
from ostraka._nodes import ROOT, leaves_of
from ostraka.errors import InvalidSharding
from ostraka.sharding._combine import Combined, Logical, Preset, combined
from ostraka.sharding._data import ArrayLeaf, from_partition, parse_state, to_spec
from ostraka.sharding._decide import (
    NOTHING,
    Decision,
    decide_by_paths,
    decide_by_table,
    explicit_specs,
    fill,
)
from ostraka.sharding._findings import Finding
from ostraka.sharding._mesh import AnyMesh, mesh_spec


@dataclass(frozen=True, slots=True)
class Resolved:
    """Specs by path, and errors."""

    said: dict[str, Any]
    """A PartitionSpec, or what the caller gave in its place: a Sharding, or None (not cut)."""
    unknown: list[Finding]
    """Entries that match no leaf."""
    missing: list[Finding]
    """Leaves that a mapping or a tree does not cover."""


def resolve(
    leaves: Sequence[ArrayLeaf],
    mesh: AnyMesh | None,
    specs: Any,
    *,
    known: Sequence[str] | None = None,
) -> Resolved:
    """Resolve `specs` for the arrays of a tree.

    `specs` is anything that `spec_tree` takes as rules. A leaf that is not covered is not in
    the result. Presets, and they alone, need the sizes of the mesh's axes; a mesh of None is the
    one that `jax.set_mesh` has set. `known` are the paths of all leaves, arrays or not.
    """
    rules = combined(specs)
    paths = [leaf.path for leaf in leaves] if known is None else known
    named = explicit_specs(leaves, rules, lambda rule: _decide(rule, paths))
    said = named.specs
    if rules.presets:
        fixed = {path: spec_entries(path, to_spec(path, spec)) for path, spec in said.items()}
        cut = [leaf for leaf in leaves if leaf.shape]
        filled = fill(cut, mesh_spec(mesh), fixed, rules.presets)
        said = said | {path: from_partition(partition) for path, partition in filled.items()}
    return Resolved(said, named.unknown, named.missing)


def is_rules(value: Any) -> bool:
    """Whether a value is rules for sure, rather than a tree of specs."""
    return isinstance(value, Combined | Logical | Preset | str) or inspect.isroutine(value)


def _decide(rule: Any, known: Sequence[str]) -> Decision[ArrayLeaf]:
    """Prepare one rule to be applied to leaves."""
    if _is_spec(rule):
        return Decision(lambda leaf: rule)
    if isinstance(rule, Logical):
        return Decision(lambda leaf: _named(leaf, rule.axes))
    if isinstance(rule, str) and rule == "metadata":
        return Decision(lambda leaf: NOTHING if leaf.named is None else leaf.named)
    if _is_table(rule):
        return cast("Decision[ArrayLeaf]", decide_by_table(rule, known))
    if inspect.isroutine(rule) or (callable(rule) and not _is_tree(rule)):
        return Decision(_called(rule))
    if not _is_tree(rule):
        raise InvalidSharding(
            f"rules is {rule!r}; it must be a function, a mapping of path patterns to specs, a "
            'tree of specs, "metadata", a preset such as fsdp("data"), or a combination of them'
        )
    entries = {leaf.path: leaf.value for leaf in leaves_of(parse_state(rule))}
    for path, spec in entries.items():
        to_spec(path, spec)
    return cast("Decision[ArrayLeaf]", decide_by_paths(entries, known))


def _named(leaf: ArrayLeaf, axes: Mapping[str, Any]) -> Any:
    return NOTHING if leaf.named is None else PartitionSpec(*physical_axes(leaf.named, axes))


def _called(function: Callable[..., Any]) -> Callable[[ArrayLeaf], Any]:
    takes_path = _takes_path(function)

    def decide(leaf: ArrayLeaf) -> Any:
        spec = function(leaf.path, leaf.value) if takes_path else function(leaf.value)
        return NOTHING if spec is None else spec

    return decide


def _takes_path(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    return len(required) == 2


def _is_spec(value: Any) -> bool:
    """Whether a value is the spec of a leaf; tuples and lists of axes are."""
    if isinstance(value, PartitionSpec | Sharding) or value is None:
        return True
    if not isinstance(value, tuple | list) or hasattr(value, "_fields"):
        return False
    return all(map(_is_axes, cast("Sequence[Any]", value)))


def _is_axes(entry: Any) -> bool:
    if entry is None or isinstance(entry, str):
        return True
    return isinstance(entry, tuple | list) and all(
        isinstance(axis, str) for axis in cast("Sequence[Any]", entry)
    )


def _is_table(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _is_spec(spec)
        for key, spec in cast("Mapping[Any, Any]", value).items()
    )


def _is_tree(value: Any) -> bool:
    """Whether a value has leaves below it, rather than being one."""
    parsed = parse_state(value)
    return [leaf.path for leaf in leaves_of(parsed)] != [ROOT]
