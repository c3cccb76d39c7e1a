"""Make spec trees from rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from ostraka._capture import spec_entries
from ostraka._nodes import Branch, Leaf, leaves_of, rebuild
from ostraka.sharding._combine import SpecRules
from ostraka.sharding._data import ArrayLeaf, array_leaves, from_partition, parse_state, to_spec
from ostraka.sharding._findings import Finding, raise_errors
from ostraka.sharding._follow import cut_as, follow
from ostraka.sharding._mesh import AnyMesh, refuse_swapped
from ostraka.sharding._specs import resolve


def spec_tree(state: Any, rules: SpecRules, *, mesh: AnyMesh | None = None) -> Any:
    """The PartitionSpec of every leaf, in a tree that mirrors `state` leaf by leaf.

    NNX modules and optimizers are mirrored by their `nnx.State`, so that the result fits
    `nnx.state(model)` in `jax.tree.map`. `state` may be abstract. `rules` is one of

    - a function of the leaf, or of path and leaf, that returns a PartitionSpec (or None: whole);
    - a mapping of path patterns to specs, of which the first match wins, such as
      `{"**/kernel": P(None, "model"), "**": P()}` (`*` is any name, `**/` any number of names, none
      included); each leaf must be matched, and each pattern must match a leaf;
    - a tree of specs, as this function makes it, or one in which a spec holds for all below a name;
    - one spec for all leaves;
    - `"metadata"`: the annotations of NNX variables (`out_sharding`), logical names resolved
      by their `sharding_rules` and `nnx.logical_axis_rules`; the others stay whole;
    - `logical({"embed": "data", "mlp": "model"})`: the same, with more rules for logical names;
    - `data_parallel()`, `fsdp(…)`, `tensor_parallel(…)`, which need the sizes of the mesh's axes
      (from `mesh`, or the mesh that `jax.set_mesh` has set);
    - several of these: `fsdp("data") | tensor_parallel("model")`, `combine(…)`.

    A value without dimensions has nothing to cut: no rule is asked, its spec is `P()`.

        specs = spec_tree(model, lambda leaf: P(None, "model") if leaf.ndim == 2 else P("model"))
    """
    refuse_swapped("spec_tree(state, rules, mesh=mesh)", rules)
    parsed = parse_state(state)
    specs = specs_by_path(parsed, mesh, rules)
    # To JAX None is no leaf: a spec in its place would break `jax.tree.map` over both.
    values = {
        leaf.path: None if leaf.value is None else specs.get(leaf.path, PartitionSpec())
        for leaf in leaves_of(parsed)
    }
    return rebuild(parsed, values)


def specs_by_path(
    parsed: Branch | Leaf, mesh: AnyMesh | None, rules: SpecRules
) -> dict[str, PartitionSpec]:
    """By path, the spec of each array. Raises InvalidSharding."""
    specs, findings = resolve_all(parsed, mesh, rules)
    raise_errors("the rules do not fit the tree", findings)
    return specs


def resolve_all(
    parsed: Branch | Leaf, mesh: AnyMesh | None, rules: SpecRules
) -> tuple[dict[str, PartitionSpec], list[Finding]]:
    """The spec, by path, of each array that has one, and the errors of the rules."""
    leaves = list(array_leaves(parsed))
    known = [leaf.path for leaf in leaves_of(parsed)]
    resolved = resolve(leaves, mesh, rules, known=known)
    lost = {finding.path for finding in resolved.missing}
    specs = {
        leaf.path: to_spec(leaf.path, resolved.said.get(leaf.path))
        for leaf in leaves
        if leaf.path not in lost
    }
    return specs, [*resolved.missing, *resolved.unknown]


def follow_specs(
    leaves: Iterable[ArrayLeaf],
    parameters: Sequence[ArrayLeaf],
    specs: Mapping[str, PartitionSpec],
) -> dict[str, PartitionSpec]:
    """The specs of what belongs to parameters with these specs; see `follow`."""
    shapes = {leaf.path: leaf.shape for leaf in parameters}
    found: dict[str, PartitionSpec] = {}
    for path, followed in follow(leaves, parameters).items():
        spec = specs[followed.path]
        if followed.dimensions == tuple(range(len(shapes[followed.path]))):
            found[path] = spec  # exactly as it was written
        else:
            entries = spec_entries(followed.path, spec)
            found[path] = from_partition(cut_as(entries, followed.dimensions))
    return found
