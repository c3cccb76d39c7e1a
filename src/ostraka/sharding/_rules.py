"""Rules to spec trees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from jax.sharding import PartitionSpec

from ostraka._capture import spec_entries
from ostraka._document import Branch, Leaf, leaves_of, rebuild
from ostraka._nnx import physical_axes
from ostraka.errors import InvalidSharding
from ostraka.sharding._combine import Combined, Logical, Rules, ask, by_patterns, combined, fill
from ostraka.sharding._data import (
    AnyMesh,
    ArrayLeaf,
    array_leaves,
    from_partition,
    mesh_spec,
    parse_state,
    to_spec,
)
from ostraka.sharding._follow import cut_as, follow
from ostraka.sharding._presets import Preset


def spec_tree(state: Any, rules: Rules, mesh: AnyMesh | None = None) -> Any:
    """The PartitionSpec of every leaf, in a tree that mirrors `state` leaf by leaf.

    NNX modules and optimizers are mirrored by their `nnx.State`, so that the result goes along with
    `nnx.state(model)` in `jax.tree.map`. `state` may be abstract. `rules` is one of

    - a function of the leaf, or of path and leaf, that returns a PartitionSpec (or None: whole);
    - a mapping of path patterns to specs, of which the first that matches counts, such as
      `{"**/kernel": P(None, "model"), "**": P()}` (`*` is any name, `**/` any number of names, none
      included); each leaf must be matched, and each pattern must match a leaf;
    - `"metadata"`: what the NNX variables themselves say (`out_sharding`), logical names resolved
      by their `sharding_rules` and `nnx.logical_axis_rules`; the others stay whole;
    - `logical({"embed": "data", "mlp": "model"})`: the same, with more rules for logical names;
    - `data_parallel()`, `fsdp(…)`, `tensor_parallel(…)`, which need the sizes of the mesh's axes
      (from `mesh`, or the mesh that `jax.set_mesh` has set);
    - several of these: `fsdp("data") | tensor_parallel("model")`, `combine(…)`.

    A value without dimensions has nothing to cut: no rule is asked, its spec is `P()`.

        specs = spec_tree(model, lambda leaf: P(None, "model") if leaf.ndim == 2 else P("model"))
    """
    parsed = parse_state(state)
    specs = settle(parsed, rules, mesh)
    # None is no leaf to JAX: a spec in its place would not go along with it.
    values = {
        leaf.path: None if leaf.value is None else specs.get(leaf.path, PartitionSpec())
        for leaf in leaves_of(parsed)
    }
    return rebuild(parsed, values)


def is_rules(value: Any) -> bool:
    """Whether a value is rules for sure, rather than a tree of specs."""
    return isinstance(value, Combined | Logical | Preset | str) or inspect.isroutine(value)


def settle(parsed: Branch | Leaf, rules: Rules, mesh: AnyMesh | None) -> dict[str, PartitionSpec]:
    """By path, the spec of each array."""
    leaves = list(array_leaves(parsed))
    cut = [leaf for leaf in leaves if leaf.shape]
    together = combined(rules)
    said = ask(cut, together, _decider)
    specs = {path: to_spec(path, spec) for path, spec in said.items()}
    if together.presets:
        settled = {path: spec_entries(path, spec) for path, spec in specs.items()}
        filled = fill(cut, settled, together.presets, mesh_spec(mesh))
        specs |= {path: from_partition(partition) for path, partition in filled.items()}
    # In the order of the tree.
    return {leaf.path: specs.get(leaf.path, PartitionSpec()) for leaf in leaves}


def _decider(rule: Any, leaves: Sequence[ArrayLeaf]) -> Callable[[ArrayLeaf], Any]:
    """What one rule says of a leaf; None if nothing."""
    if isinstance(rule, PartitionSpec):
        return lambda leaf: rule
    if isinstance(rule, Mapping):
        return by_patterns(cast("Mapping[str, Any]", rule), leaves)
    if isinstance(rule, Logical):
        return lambda leaf: (
            None if leaf.named is None else PartitionSpec(*physical_axes(leaf.named, rule.axes))
        )
    if rule == "metadata":
        return lambda leaf: leaf.named
    if callable(rule):
        if _takes_path(rule):
            return lambda leaf: rule(leaf.path, leaf.value)
        return lambda leaf: rule(leaf.value)
    raise InvalidSharding(
        f"rules is {rule!r}; it must be a function, a mapping of path patterns to specs, "
        '"metadata", a preset such as fsdp("data"), or a combination of them'
    )


def _takes_path(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    return len(required) == 2


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
            found[path] = spec  # word for word
        else:
            entries = spec_entries(followed.path, spec)
            found[path] = from_partition(cut_as(entries, followed.dimensions))
    return found
