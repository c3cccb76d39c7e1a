"""Several rules as one, and what they say of leaves together. No JAX.

Rules that name specs are asked first, one after the other; presets fill in the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ostraka import _pattern
from ostraka._spec import MeshSpec, Partition
from ostraka.errors import InvalidSharding, nearest
from ostraka.sharding._leaf import ShapedLeaf, every_dimension, kernel_of
from ostraka.sharding._presets import Preset

Rules = Any
"""A function, a mapping of patterns, "metadata", logical axes, a preset, or several of them."""

L = TypeVar("L", bound=ShapedLeaf)
Decide = Callable[[L], Any]
"""What a rule says of a leaf: a spec, or None if it says nothing."""


def combine(*rules: Rules) -> Rules:
    """Several rules as one.

    Where a function, a mapping or variable metadata names a spec, that holds; for the other leaves
    the presets fill it in together: tensor parallelism first, then FSDP in what is left whole.

        combine({"embed/**": P()}, fsdp("data"), tensor_parallel("model"))
    """
    return combined(*rules)


def combined(*rules: Rules) -> Combined:
    """`combine`, for those who look into the result."""
    explicit: list[Any] = []
    presets: list[Preset] = []
    for rule in rules:
        if isinstance(rule, Combined):
            explicit += rule.explicit
            presets += rule.presets
        elif isinstance(rule, Preset):
            presets.append(rule)
        else:
            explicit.append(rule)
    return Combined(tuple(explicit), tuple(sorted(presets, key=lambda preset: preset.order)))


@dataclass(frozen=True, slots=True)
class Combined:
    """Rules that name specs, first come first served, and presets, those by names first."""

    explicit: tuple[Any, ...]
    presets: tuple[Preset, ...]

    def __or__(self, other: Any) -> Any:
        return combine(self, other)

    def __ror__(self, other: Any) -> Any:
        return combine(other, self)


@dataclass(frozen=True, slots=True)
class Logical:
    """What variables say in names, and the mesh's axes for these names."""

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
    return Logical(dict(axes))


def settle_plain(
    leaves: Sequence[ShapedLeaf], rules: Combined, mesh: MeshSpec
) -> dict[str, Partition]:
    """By path the partition of each leaf, by presets and by patterns that have partitions.

    `settle` does the same for JAX's arrays, where rules may be of every kind.
    """
    cut = [leaf for leaf in leaves if leaf.shape]
    found: dict[str, Partition] = ask(cut, rules, by_patterns)
    if rules.presets:
        found |= fill(cut, found, rules.presets, mesh)
    return {leaf.path: found.get(leaf.path, ()) for leaf in leaves}


def ask(
    leaves: Sequence[L],
    rules: Combined,
    decider: Callable[[Any, Sequence[L]], Decide[L]],
) -> dict[str, Any]:
    """By path, what the first of the explicit rules that has a say in a leaf says of it.

    Raises InvalidSharding if nobody has a say in a leaf, and patterns are all there is.
    """
    found: dict[str, Any] = {}
    for rule in rules.explicit:
        decide = decider(rule, leaves)
        for leaf in leaves:
            spec = decide(leaf) if leaf.path not in found else None
            if spec is not None:
                found[leaf.path] = spec
    if not rules.presets and any(isinstance(rule, Mapping) for rule in rules.explicit):
        _raise_unmatched([leaf.path for leaf in leaves if leaf.path not in found])
    return found


def by_patterns(table: Mapping[str, Any], leaves: Sequence[ShapedLeaf]) -> Decide[ShapedLeaf]:
    """What a mapping of path patterns says: that of the first pattern that matches."""
    paths = [leaf.path for leaf in leaves]
    for pattern in table:
        if pattern != "**" and not any(_pattern.matches(pattern, path) for path in paths):
            raise InvalidSharding(
                f"no leaf with dimensions matches the pattern {pattern!r}{nearest(pattern, paths)}"
            )
    whole = {pattern: () if spec is None else spec for pattern, spec in table.items()}
    return lambda leaf: _pattern.lookup(whole, leaf.path)


def _raise_unmatched(paths: Sequence[str]) -> None:
    if paths:
        names = ", ".join(map(repr, paths[:3]))
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        raise InvalidSharding(
            f"no pattern matches {names}{more}: add one, or '**' with P() to leave the rest whole"
        )


def fill(
    leaves: Sequence[ShapedLeaf],
    settled: Mapping[str, Partition],
    presets: Sequence[Preset],
    mesh: MeshSpec,
) -> dict[str, Partition]:
    """By path, what the presets say of the leaves that are not settled already."""
    rest = [leaf for leaf in leaves if leaf.path not in settled]
    fillers = [preset.filler(rest, leaves, mesh) for preset in presets]
    partitions = dict(settled)
    for leaf in rest:
        partition: Partition = ((),) * len(leaf.shape)
        for fill_in in fillers:
            partition = fill_in(leaf, partition)
        partitions[leaf.path] = partition
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    for leaf in rest:
        kernel = kernel_of(leaf.path, leaf.shape, shapes)
        if kernel is not None:
            path, dimensions = kernel
            whole = every_dimension(partitions[path], len(shapes[path]))
            partitions[leaf.path] = tuple(whole[d] for d in dimensions)
    return {leaf.path: partitions[leaf.path] for leaf in rest}


def is_plain(rules: Rules) -> bool:
    """Whether rules are presets and patterns with partitions, for which `settle_plain` will do."""
    return isinstance(rules, Preset | Combined) and all(
        isinstance(rule, Mapping)
        and all(map(_is_partition, cast("Mapping[str, Any]", rule).values()))
        for rule in combined(rules).explicit
    )


def _is_partition(spec: Any) -> bool:
    return type(spec) is tuple and all(type(axes) is tuple for axes in cast("tuple[Any]", spec))
