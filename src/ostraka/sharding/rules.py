"""The kinds of rules, and how they are combined. No JAX."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ostraka.errors import name_few, nearest
from ostraka.layout.spec import MeshSpec, Partition
from ostraka.sharding.findings import Finding
from ostraka.sharding.leaves import Leaves, Partitions, ShapedLeaf, cut_as, kernel_of
from ostraka.tree import patterns as _pattern
from ostraka.tree.nodes import ROOT, segment

SpecRules = Any
"""A function, a mapping of patterns, a tree of specs, one spec, "metadata", logical axes, a preset,
or several of these."""

Fill = Callable[[ShapedLeaf, Partition], Partition]
"""Takes a leaf and its partition, and returns the partition with more dimensions sharded."""


class _Joinable:
    """Makes `a | b` the same as `combine(a, b)`."""

    __slots__ = ()

    def __or__(self, other: Any) -> Any:
        return combine(self, other)

    def __ror__(self, other: Any) -> Any:
        return combine(other, self)


class Preset(_Joinable, ABC):
    """A way to shard a model. `a | b` is both: `fsdp("data") | tensor_parallel("model")`."""

    __slots__ = ()

    order: int
    """The position among presets: those that go by names are applied first."""

    @abstractmethod
    def axis_on(self, mesh: MeshSpec) -> str | None:
        """Return the mesh axis that it shards along, if any. Raises InvalidSharding if missing."""

    @abstractmethod
    def filler(self, leaves: Leaves, around: Leaves, mesh: MeshSpec) -> Fill:
        """Return a function that fills in the partitions of `leaves`.

        `around` are all leaves of the tree. Raises InvalidSharding if the preset can't be applied
        to these leaves on this mesh.
        """


def combine(*rules: SpecRules) -> CombinedRules:
    """Combine several rules into one.

    If a function, a mapping or the metadata of a variable names a spec, that holds. For the other
    leaves the presets fill it in together: tensor parallelism first, then FSDP in dimensions that
    are left whole.

    Args:
        *rules: Rules as `spec_tree` takes them. The first that names a spec for a leaf wins.

    Returns:
        The combined rules. For presets and combined rules `a | b` means `combine(a, b)`.

    Example:
        >>> combine({"embed/**": P()}, fsdp("data"), tensor_parallel("model"))
    """
    explicit: list[Any] = []
    presets: list[Preset] = []
    for rule in rules:
        if isinstance(rule, CombinedRules):
            explicit += rule.explicit
            presets += rule.presets
        elif isinstance(rule, Preset):
            presets.append(rule)
        else:
            explicit.append(rule)
    return CombinedRules(tuple(explicit), tuple(sorted(presets, key=lambda preset: preset.order)))


@dataclass(frozen=True, slots=True)
class CombinedRules(_Joinable):
    """Rules that name specs (the first match wins), and presets in the order they are applied."""

    explicit: tuple[Any, ...]
    presets: tuple[Preset, ...]


@dataclass(frozen=True, slots=True)
class Logical(_Joinable):
    """Uses the logical axis names of NNX variables. `axes` maps them to axes of the mesh."""

    axes: Mapping[str, Any]


def logical(axes: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> SpecRules:
    """Shard NNX variables by their annotations, with logical names mapped to mesh axes.

    Variables without annotation stay whole, or are left to the rules that this is combined with.

    Args:
        axes: The mesh axis of each logical name. None leaves the dimension whole. A tuple shards it
            along several axes. Other names are axes of the mesh themselves.

    Returns:
        The rules.

    Example:
        >>> init(make_model, mesh, logical({"embed": None, "mlp": "model"}))
    """
    return Logical(dict(axes))


def is_plain(rules: SpecRules) -> bool:
    """Return True if rules are presets and patterns with partitions, as for `resolve_plain`."""
    return isinstance(rules, Preset | CombinedRules) and all(
        isinstance(rule, Mapping)
        and all(
            type(spec) is tuple and all(type(axes) is tuple for axes in cast("tuple[Any]", spec))
            for spec in cast("Mapping[str, Any]", rule).values()
        )
        for rule in combine(rules).explicit
    )


# Apply rules to the leaves of a tree. No JAX.


NOTHING: Any = object()
"""The result of a rule that does not cover a leaf. (None means that the leaf is whole.)"""


@dataclass(frozen=True, slots=True)
class Decision:
    """One rule, applied to the leaves of a tree."""

    of: Callable[[Any], Any]
    """Returns the spec of a leaf, or NOTHING."""
    unknown: tuple[Finding, ...] = ()
    """Entries that match no leaf."""
    entries: Mapping[str, Any] | None = None
    """The entries of a mapping or a tree. None for other rules."""


@dataclass(frozen=True, slots=True)
class ResolvedSpecs:
    """The specs of leaves by path, and errors."""

    specs: dict[str, Any]
    """A spec in the form that the rule has it. None means that the leaf is whole."""
    unknown: list[Finding]
    """Entries that match no leaf."""
    missing: list[Finding]
    """Leaves without a spec. Mappings and trees must be complete unless there are presets."""


def resolve_plain(
    leaves: Leaves, mesh: MeshSpec, rules: CombinedRules
) -> tuple[dict[str, Partition], list[Finding]]:
    """Return the partition of each leaf by path, from presets and patterns with partitions.

    Also returns errors: patterns without a leaf, and leaves without a pattern. `specs.resolve` does
    the same for JAX arrays and rules of every kind.
    """
    known = [leaf.path for leaf in leaves]
    named = explicit_specs(leaves, rules, lambda rule: decide_by_table(rule, known))
    found: dict[str, Partition] = {path: spec or () for path, spec in named.specs.items()}
    if rules.presets:
        found |= fill(leaves, mesh, found, rules.presets)
    partitions = {leaf.path: found.get(leaf.path, ()) for leaf in leaves}
    return partitions, [*named.missing, *named.unknown]


def explicit_specs(
    leaves: Leaves, rules: CombinedRules, decider: Callable[[Any], Decision]
) -> ResolvedSpecs:
    """Return the spec of each leaf from the first explicit rule that covers it.

    Only an entry of its own path covers a leaf without dimensions.
    """
    found: dict[str, Any] = {}
    decisions = [decider(rule) for rule in rules.explicit]
    for decision in decisions:
        for leaf in leaves:
            own = leaf.shape or leaf.path in (decision.entries or ())
            spec = decision.of(leaf) if own and leaf.path not in found else NOTHING
            if spec is not NOTHING:
                found[leaf.path] = spec
    unknown = [finding for decision in decisions for finding in decision.unknown]
    entries = [entry for decision in decisions for entry in decision.entries or ()]
    must_be_complete = not rules.presets and any(d.entries is not None for d in decisions)
    missing = [leaf.path for leaf in leaves if leaf.shape and leaf.path not in found]
    return ResolvedSpecs(found, unknown, _missing(missing, entries) if must_be_complete else [])


def decide_by_table(table: Mapping[str, Any], known: Sequence[str]) -> Decision:
    """Apply a mapping of path patterns to specs. The first match wins.

    A name at the top of the tree means that name, even with `*` or `?` in it. `known` are the paths
    of all leaves, arrays or not.
    """
    tops = {path.split("/")[0] for path in known}
    entries = {
        name if (name := segment(key, "")) in tops else key: spec for key, spec in table.items()
    }
    if not any(is_pattern(key) and key not in tops for key in entries):
        return decide_by_paths(entries, known)
    # A top name with `*` or `?` in it is matched by `?` in their place.
    patterns = {
        re.sub(r"[*?]", "?", key) if key in tops else key: spec for key, spec in entries.items()
    }
    unknown = [
        Finding("error", key, sentence)
        for key, sentence in _pattern.unmatched("specs", patterns, known, "leaf").items()
        if key != "**"
    ]

    def decide(leaf: ShapedLeaf) -> Any:
        matching = (spec for key, spec in patterns.items() if _pattern.matches(key, leaf.path))
        return next(matching, NOTHING)

    return Decision(decide, tuple(unknown), patterns)


def decide_by_paths(entries: Mapping[str, Any], known: Sequence[str]) -> Decision:
    """Apply a tree of specs: the entry at a leaf, or at the nearest name above it."""
    names = {name for path in known for name in _above(path)}
    unknown = [
        Finding("error", path, f"specs has {path!r}, which is no leaf{nearest(path, known)}")
        for path, spec in entries.items()
        if path not in names and not _may_be_a_tuple(spec)
    ]

    def decide(leaf: ShapedLeaf) -> Any:
        return next((entries[name] for name in _above(leaf.path) if name in entries), NOTHING)

    return Decision(decide, tuple(unknown), entries)


def _may_be_a_tuple(spec: Any) -> bool:
    """Return True if a spec without axes may be an empty tuple or list of the tree."""
    if not isinstance(spec, tuple | list):
        return False
    return all(entry is None or entry in ((), []) for entry in cast("Sequence[Any]", spec))


def is_pattern(key: str) -> bool:
    return "*" in key or "?" in key


def _above(path: str) -> Iterator[str]:
    """Yield the path and the names above it, up to the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ROOT


def _missing(paths: Sequence[str], entries: Sequence[str]) -> list[Finding]:
    if not paths or not any(map(is_pattern, entries)):
        return [
            Finding("error", path, f"leaf {path!r} has no spec{nearest(path, entries)}")
            for path in paths
        ]
    remedy = "add one, or '**' with P() to leave the rest whole"
    return [Finding("error", paths[0], f"no pattern matches {name_few(paths)}: {remedy}")]


def fill(
    leaves: Leaves, mesh: MeshSpec, fixed: Partitions, presets: Sequence[Preset]
) -> dict[str, Partition]:
    """Return the partitions by path of leaves that have none in `fixed`, from presets."""
    leaves = [leaf for leaf in leaves if leaf.shape]
    rest = [leaf for leaf in leaves if leaf.path not in fixed]
    fillers = [preset.filler(rest, leaves, mesh) for preset in presets]
    partitions = dict(fixed)
    for leaf in rest:
        partition: Partition = ((),) * len(leaf.shape)
        for fill_in in fillers:
            partition = fill_in(leaf, partition)
        partitions[leaf.path] = partition
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    for leaf in rest:
        kernel = kernel_of(leaf.path, leaf.shape, shapes)
        if kernel is not None:
            partitions[leaf.path] = cut_as(partitions[kernel[0]], kernel[1])
    return {leaf.path: partitions[leaf.path] for leaf in rest}
