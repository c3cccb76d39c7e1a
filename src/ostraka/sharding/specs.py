"""Resolve rules, presets, trees of specs or one spec to a spec for each leaf.

Everything that takes specs calls this: `spec_tree`, `check`, `place`, `init`, `ostraka.restore`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ostraka.errors import InvalidSharding
from ostraka.layout.spec import Partition
from ostraka.live.nnx import physical_axes
from ostraka.live.parse import is_array, is_key, parse
from ostraka.live.shardings import spec_entries
from ostraka.sharding.findings import (
    REPLICATED_LIMIT_BYTES,
    Finding,
    findings_of,
    left_whole,
    raise_errors,
)
from ostraka.sharding.leaves import ShapedLeaf, cut_as, every_dimension, follow
from ostraka.sharding.mesh import AnyMesh, mesh_spec, refuse_swapped
from ostraka.sharding.rules import (
    NOTHING,
    CombinedRules,
    Decision,
    Logical,
    Preset,
    ResolvedSpecs,
    SpecRules,
    combine,
    decide_by_paths,
    decide_by_table,
    explicit_specs,
    fill,
)
from ostraka.tree.nodes import ROOT, Leaf, Node, check_unique, leaves_of, rebuild

Specs = dict[str, PartitionSpec]
"""Specs by path."""
_Checked = tuple[Specs, list[Finding]]

# Make spec trees from rules.


def spec_tree(state: Any, rules: SpecRules, *, mesh: AnyMesh | None = None) -> Any:
    """Return the PartitionSpec of every leaf, in a tree that mirrors `state` leaf by leaf.

    NNX modules and optimizers are mirrored by their `nnx.State`, so that the result fits
    `nnx.state(model)` in `jax.tree.map`. `rules` is one of these:

    - A function of the leaf, or of path and leaf. It returns a PartitionSpec, or None for a leaf
      that stays whole.
    - A mapping of path patterns to specs, such as `{"**/kernel": P(None, "model"), "**": P()}`. The
      first match wins. `*` is any name, `**/` any number of names. Each leaf must be matched, and
      each pattern must match a leaf.
    - A tree of specs, as this function returns it. A spec may hold for all leaves below a name.
    - One spec for all leaves.
    - `"metadata"`: the annotations of NNX variables (`out_sharding`). Logical names are resolved by
      their `sharding_rules` and `nnx.logical_axis_rules`. Other variables stay whole.
    - `logical({"embed": "data", "mlp": "model"})`: the same, with more rules for logical names.
    - `data_parallel()`, `fsdp(…)`, `tensor_parallel(…)`, which need the sizes of the mesh's axes.
    - Several of these: `fsdp("data") | tensor_parallel("model")`, `combine(…)`.

    Values without dimensions can't be sharded. No rule is asked, and their spec is `P()`.

    Args:
        state: The tree of arrays, which may be abstract.
        rules: The rules.
        mesh: The mesh or its axis sizes, for presets. Default: the mesh of `jax.set_mesh`.

    Returns:
        The tree of specs.

    Raises:
        InvalidSharding: The rules do not fit the tree.

    Example:
        >>> specs = spec_tree(model, lambda leaf: P(None, "model") if leaf.ndim == 2 else P())
    """
    refuse_swapped("spec_tree(state, rules, mesh=mesh)", rules)
    parsed = parse_state(state)
    specs, findings = resolve_all(parsed, mesh, rules)
    raise_errors("the rules do not fit the tree", findings)
    # To JAX None is no leaf: a spec in its place would break `jax.tree.map` over both.
    values = {
        leaf.path: None if leaf.value is None else specs.get(leaf.path, PartitionSpec())
        for leaf in leaves_of(parsed)
    }
    return rebuild(parsed, values)


def resolve_all(parsed: Node, mesh: AnyMesh | None, rules: SpecRules) -> _Checked:
    """Return the spec by path of each array that has one, and the errors of the rules."""
    leaves = list(array_leaves(parsed))
    known = [leaf.path for leaf in leaves_of(parsed)]
    resolved = resolve(leaves, mesh, rules, known=known)
    lost = {finding.path for finding in resolved.missing}
    specs = {
        leaf.path: to_spec(leaf.path, resolved.specs.get(leaf.path))
        for leaf in leaves
        if leaf.path not in lost
    }
    return specs, [*resolved.missing, *resolved.unknown]


def follow_specs(
    leaves: Iterable[ArrayLeaf], parameters: Sequence[ArrayLeaf], specs: Specs
) -> Specs:
    """Return the specs of arrays that belong to parameters with these specs (see `follow`)."""
    found: Specs = {}
    for path, (parameter, dimensions) in follow(leaves, parameters).items():
        found[path] = specs[parameter.path]  # exactly as it was written
        if dimensions != tuple(range(len(parameter.shape))):
            entries = spec_entries(parameter.path, found[path])
            found[path] = from_partition(cut_as(entries, dimensions))
    return found


# Trees, leaves and specs of callers, converted to plain data.


@dataclass(frozen=True, slots=True)
class ArrayLeaf(ShapedLeaf):
    """A leaf of a live tree that has a shape."""

    value: Any
    named: Any
    """The PartitionSpec that its NNX variable names, or None."""


def array_leaf(path: str, shape: tuple[int, ...], value: Any, named: Any) -> ArrayLeaf:
    is_a_key = is_key(value)
    return ArrayLeaf(path, shape, 0 if is_a_key else value.dtype.itemsize, is_a_key, value, named)


def parse_state(tree: Any) -> Node:
    """Parse a tree. Modules become their `nnx.State`, as in a tree of specs."""
    parsed = _states(parse(tree))
    check_unique(list(leaves_of(parsed)))
    return parsed


def _states(node: Node) -> Node:
    if isinstance(node, Leaf):
        return node
    if node.kind == "nnx":
        return _states(node.children[0])
    children = tuple(_states(child) for child in node.children)
    return replace(node, children=children)


def has_shape(value: Any) -> bool:
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct | Tracer)


def array_leaves(parsed: Node) -> Iterator[ArrayLeaf]:
    for leaf in leaves_of(parsed):
        if has_shape(leaf.value):
            yield array_leaf(leaf.path, tuple(leaf.value.shape), leaf.value, leaf.spec)


def to_spec(path: str, given: Any) -> PartitionSpec:
    """Return the spec that a rule or a tree of specs gives a leaf. Raises InvalidSharding."""
    if given is None:
        return PartitionSpec()
    if isinstance(given, PartitionSpec):
        return given
    if isinstance(given, NamedSharding):
        return given.spec
    if isinstance(given, tuple | list):
        return PartitionSpec(*given)
    raise InvalidSharding(
        f"leaf {path!r} is given a {type(given).__name__} as its spec; it must be a PartitionSpec, "
        "or None for a leaf that is whole on every device"
    )


def partition_of(path: str, spec: Any, rank: int) -> Partition:
    """Return a spec as data, with an entry for every dimension."""
    return every_dimension(spec_entries(path, spec), rank)


def from_partition(partition: Partition) -> PartitionSpec:
    if not any(partition):
        return PartitionSpec()
    return PartitionSpec(
        *(None if not axes else axes[0] if len(axes) == 1 else axes for axes in partition)
    )


def resolve(
    leaves: Sequence[ArrayLeaf],
    mesh: AnyMesh | None,
    specs: Any,
    *,
    known: Sequence[str] | None = None,
) -> ResolvedSpecs:
    """Resolve `specs` for the arrays of a tree.

    `specs` are rules as `spec_tree` takes them. The result lacks leaves that no rule covers. Only
    presets need the sizes of the mesh's axes. A mesh of None is the mesh of `jax.set_mesh`. `known`
    are the paths of all leaves, arrays or not.
    """
    rules = combine(specs)
    paths = [leaf.path for leaf in leaves] if known is None else known
    found = explicit_specs(leaves, rules, lambda rule: _decide(rule, paths))
    if rules.presets:
        fixed = {path: spec_entries(path, to_spec(path, s)) for path, s in found.specs.items()}
        filled = fill(leaves, mesh_spec(mesh), fixed, rules.presets)
        found.specs.update((path, from_partition(partition)) for path, partition in filled.items())
    return found


def is_rules(value: Any) -> bool:
    """Return True if a value must be rules and can't be a tree of specs."""
    return isinstance(value, CombinedRules | Logical | Preset | str) or inspect.isroutine(value)


def _decide(rule: Any, known: Sequence[str]) -> Decision:
    """Prepare one rule to be applied to leaves."""
    if _is_spec(rule):
        return Decision(lambda leaf: rule)
    if isinstance(rule, Logical):
        return Decision(lambda leaf: _physical(leaf, rule.axes))
    if isinstance(rule, str) and rule == "metadata":
        return Decision(lambda leaf: NOTHING if leaf.named is None else leaf.named)
    if _is_table(rule):
        return decide_by_table(rule, known)
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
    return decide_by_paths(entries, known)


def _physical(leaf: ArrayLeaf, axes: Mapping[str, Any]) -> Any:
    return NOTHING if leaf.named is None else PartitionSpec(*physical_axes(leaf.named, axes))


def _called(function: Callable[..., Any]) -> Callable[[ArrayLeaf], Any]:
    """Return a decision that calls a function of the leaf, or of path and leaf."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    takes_path = sum(p.kind in kinds and p.default is p.empty for p in parameters) == 2

    def decide(leaf: ArrayLeaf) -> Any:
        spec = function(leaf.path, leaf.value) if takes_path else function(leaf.value)
        return NOTHING if spec is None else spec

    return decide


def _is_spec(value: Any) -> bool:
    """Return True if a value is the spec of a leaf. Tuples and lists of axes are."""
    if isinstance(value, PartitionSpec | Sharding) or value is None:
        return True
    if not isinstance(value, tuple | list) or hasattr(value, "_fields"):
        return False
    entries = [
        cast("Sequence[Any]", entry) if isinstance(entry, tuple | list) else [entry]
        for entry in cast("Sequence[Any]", value)
        if entry is not None
    ]
    return all(isinstance(axis, str) for axes in entries for axis in axes)


def _is_table(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _is_spec(spec)
        for key, spec in cast("Mapping[Any, Any]", value).items()
    )


def _is_tree(value: Any) -> bool:
    """Return True if a value has leaves below it and is no leaf itself."""
    return [leaf.path for leaf in leaves_of(parse_state(value))] != [ROOT]


# Check a tree of specs: errors and warnings.


def check(
    state: Any, mesh: AnyMesh, specs: Any, *, replicated_limit_bytes: int = REPLICATED_LIMIT_BYTES
) -> list[Finding]:
    """Return all errors and warnings about `specs`.

    Errors are a leaf without spec, a spec without leaf, unknown axes, more entries than dimensions,
    an axis used twice, and dimensions that do not divide (with the nearest size to use).
    Warnings are a bias with another sharding than its kernel, large leaves that are whole on every
    device, and leaves from a mebibyte on that presets have left whole.

    Args:
        state: The tree of arrays. Only their shapes matter.
        mesh: The mesh, or axis sizes such as `{"data": 2, "model": 4}`.
        specs: A tree as `spec_tree` returns it, or rules as it takes them.
        replicated_limit_bytes: Warn about larger leaves that are whole on every device.

    Returns:
        The findings, errors first. An empty list means that all is well.

    Example:
        >>> for finding in check(model, mesh, specs):
        ...     print(finding.severity, finding)
    """
    refuse_swapped("check(state, mesh, specs)", specs)
    parsed = parse_state(state)
    found, findings = resolve_checked(parsed, mesh, specs, replicated_limit_bytes)
    sizes = mesh_spec(mesh)
    if any(preset.axis_on(sizes) is not None for preset in combine(specs).presets):
        known = {finding.path for finding in findings}
        leaves = [leaf for leaf in array_leaves(parsed) if leaf.path not in known]
        partitions = {leaf.path: spec_entries(leaf.path, found[leaf.path]) for leaf in leaves}
        findings += left_whole(leaves, sizes, partitions)
    return findings


def resolve_checked(
    parsed: Node, mesh: AnyMesh, specs: Any, limit_bytes: int = REPLICATED_LIMIT_BYTES
) -> _Checked:
    """Return the spec of each array that has one, and all errors and warnings about them."""
    sizes = mesh_spec(mesh)
    found, findings = resolve_all(parsed, mesh, specs)
    leaves = [leaf for leaf in array_leaves(parsed) if leaf.path in found]
    partitions = {leaf.path: spec_entries(leaf.path, found[leaf.path]) for leaf in leaves}
    findings += findings_of(leaves, sizes, partitions, replicated_limit_bytes=limit_bytes)
    return found, findings
