"""Rules to spec trees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jax.sharding import PartitionSpec

from ostraka import _pattern
from ostraka._document import Branch, Leaf, leaves_of, rebuild
from ostraka._nnx import physical_axes
from ostraka.errors import InvalidSharding, nearest
from ostraka.sharding._data import (
    AnyMesh,
    ArrayLeaf,
    array_leaves,
    from_partition,
    kernel_of,
    mesh_spec,
    parse_state,
    partition_of,
    to_spec,
)
from ostraka.sharding._presets import Preset, check_axis

Rules = Any
"""A function, a mapping of patterns, "metadata", logical axes, a preset, or several of them."""


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


def combine(*rules: Rules) -> Rules:
    """Several rules as one.

    Where a function, a mapping or variable metadata names a spec, that holds; for the other leaves
    the presets fill it in together: tensor parallelism first, then FSDP in what is left whole.

        combine({"embed/**": P()}, fsdp("data"), tensor_parallel("model"))
    """
    explicit: list[Any] = []
    presets: list[Preset] = []
    for rule in rules:
        if isinstance(rule, _Combined):
            explicit += rule.explicit
            presets += rule.presets
        elif isinstance(rule, Preset):
            presets.append(rule)
        else:
            explicit.append(rule)
    return _Combined(tuple(explicit), tuple(sorted(presets, key=lambda preset: preset.order)))


@dataclass(frozen=True, slots=True)
class _Combined:
    explicit: tuple[Any, ...]
    presets: tuple[Preset, ...]

    def __or__(self, other: Any) -> Any:
        return combine(self, other)

    def __ror__(self, other: Any) -> Any:
        return combine(other, self)


@dataclass(frozen=True, slots=True)
class _Logical:
    axes: Mapping[str, Any]

    def __or__(self, other: Any) -> Any:
        return combine(self, other)

    def __ror__(self, other: Any) -> Any:
        return combine(other, self)


def logical(axes: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Rules:
    """What the NNX variables themselves say, in names of which `axes` gives the mesh's axes.

    An axis of None leaves the dimension whole, a tuple cuts it along several. Names that are not in
    `axes` are axes of the mesh themselves. Variables that say nothing stay whole, or are left to
    the rules that this is combined with.

        init(make_model, mesh, logical({"embed": None, "mlp": "model", "batch": ("data", "fsdp")}))
    """
    return _Logical(dict(axes))


def is_rules(value: Any) -> bool:
    """Whether a value is rules for sure, rather than a tree of specs."""
    return isinstance(value, _Combined | _Logical | Preset | str) or inspect.isroutine(value)


def settle(parsed: Branch | Leaf, rules: Rules, mesh: AnyMesh | None) -> dict[str, PartitionSpec]:
    """By path, the spec of each array."""
    leaves = list(array_leaves(parsed))
    cut = [leaf for leaf in leaves if leaf.shape]
    specs = {leaf.path: PartitionSpec() for leaf in leaves if not leaf.shape}
    combined = cast(_Combined, combine(rules))
    for rule in combined.explicit:
        decide = _decider(rule, cut)
        for leaf in cut:
            found = decide(leaf) if leaf.path not in specs else None
            if found is not None:
                specs[leaf.path] = to_spec(leaf.path, found)
    rest = [leaf for leaf in cut if leaf.path not in specs]
    if combined.presets:
        specs.update(_fill(rest, cut, specs, combined.presets, mesh))
    elif any(isinstance(rule, Mapping) for rule in combined.explicit):
        _raise_unmatched(rest)
    # In the order of the tree.
    return {leaf.path: specs.get(leaf.path, PartitionSpec()) for leaf in leaves}


def _decider(rule: Any, leaves: list[ArrayLeaf]) -> Callable[[ArrayLeaf], Any]:
    """What one rule says of a leaf; None if nothing."""
    if isinstance(rule, PartitionSpec):
        return lambda leaf: rule
    if isinstance(rule, Mapping):
        table = cast("Mapping[str, Any]", rule)
        _check_patterns(table, leaves)
        whole = {pattern: PartitionSpec() if v is None else v for pattern, v in table.items()}
        return lambda leaf: _pattern.lookup(whole, leaf.path)
    if isinstance(rule, _Logical):
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


def _check_patterns(table: Mapping[str, Any], leaves: list[ArrayLeaf]) -> None:
    paths = [leaf.path for leaf in leaves]
    for pattern in table:
        if pattern != "**" and not any(_pattern.matches(pattern, path) for path in paths):
            raise InvalidSharding(
                f"no leaf with dimensions matches the pattern {pattern!r}{nearest(pattern, paths)}"
            )


def _raise_unmatched(leaves: list[ArrayLeaf]) -> None:
    if leaves:
        names = ", ".join(repr(leaf.path) for leaf in leaves[:3])
        more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
        raise InvalidSharding(
            f"no pattern matches {names}{more}: add one, or '**' with P() to leave the rest whole"
        )


def _fill(
    rest: list[ArrayLeaf],
    leaves: list[ArrayLeaf],
    settled: Mapping[str, PartitionSpec],
    presets: tuple[Preset, ...],
    mesh: AnyMesh | None,
) -> dict[str, PartitionSpec]:
    sizes = mesh_spec(mesh)
    for preset in presets:
        check_axis(preset, sizes)
        if any(len(leaf.shape) > 1 for leaf in rest) and not any(map(preset.knows, rest)):
            raise InvalidSharding(
                "tensor_parallel knows none of the layers by name, such as "
                f"{rest[0].path!r}: name them with column= and row="
            )
    partitions = {
        leaf.path: partition_of(leaf.path, settled[leaf.path], len(leaf.shape))
        for leaf in leaves
        if leaf.path in settled
    }
    for leaf in rest:
        partition = ((),) * len(leaf.shape)
        for preset in presets:
            partition = preset.fill(leaf, partition, sizes)
        partitions[leaf.path] = partition
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    for leaf in rest:
        kernel = kernel_of(leaf.path, leaf.shape, shapes)
        if kernel is not None:
            path, dimensions = kernel
            partitions[leaf.path] = tuple(partitions[path][d] for d in dimensions)
    return {leaf.path: from_partition(partitions[leaf.path]) for leaf in rest}
