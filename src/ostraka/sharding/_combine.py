"""Several rules as one, and what they say of leaves together. No JAX.

Rules that name specs are asked first, one after the other; presets fill in the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from ostraka import _pattern
from ostraka._document import ROOT, segment
from ostraka._spec import MeshSpec, Partition
from ostraka.errors import nearest
from ostraka.sharding._findings import Finding
from ostraka.sharding._leaf import ShapedLeaf, every_dimension, kernel_of
from ostraka.sharding._presets import Preset

Rules = Any
"""A function, a mapping of patterns, a tree of specs, one spec, "metadata", logical axes, a preset,
or several of them."""

NOTHING: Any = object()
"""What a rule says that says nothing of a leaf. None is something: the leaf is whole."""

L = TypeVar("L", bound=ShapedLeaf)


@dataclass(frozen=True, slots=True)
class Decision(Generic[L]):
    """What one rule says of a tree's leaves."""

    of: Callable[[L], Any]
    """The spec of a leaf, or NOTHING."""
    unknown: tuple[Finding, ...] = ()
    """Entries that mean no leaf."""
    entries: Mapping[str, Any] | None = None
    """Of a mapping or a tree: its entries."""


@dataclass(frozen=True, slots=True)
class Said:
    """What all rules that name specs say together: by path what holds, and what is amiss."""

    of: dict[str, Any]
    unknown: list[Finding]
    missing: list[Finding]
    """Leaves of which nothing is said, where mappings and trees are all there is."""


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
) -> tuple[dict[str, Partition], list[Finding]]:
    """By path the partition of each leaf, by presets and by patterns that have partitions.

    Also what of the patterns means no leaf, and which leaves they leave out.

    `settle` does the same for JAX's arrays, where rules may be of every kind.
    """
    cut = [leaf for leaf in leaves if leaf.shape]
    known = [leaf.path for leaf in leaves]
    said = ask(leaves, rules, lambda rule: decide_by_table(rule, known))
    found: dict[str, Partition] = {path: spec or () for path, spec in said.of.items()}
    if rules.presets:
        found |= fill(cut, found, rules.presets, mesh)
    partitions = {leaf.path: found.get(leaf.path, ()) for leaf in leaves}
    return partitions, [*said.missing, *said.unknown]


def ask(leaves: Sequence[L], rules: Combined, decider: Callable[[Any], Decision[L]]) -> Said:
    """What the first of the explicit rules that has a say in a leaf says of it.

    What has no dimensions is whole, whatever is said of all that lies around it.
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
    return Said(found, unknown, _missing(missing, entries) if must_be_complete else [])


def decide_by_table(table: Mapping[str, Any], known: Sequence[str]) -> Decision[ShapedLeaf]:
    """What a mapping from patterns over paths to specs says: the first that matches.

    A key that is a name at the top of the tree is that name, whatever characters it has. `known`
    are the paths of all leaves, arrays or not.
    """
    tops = {path.split("/")[0] for path in known}
    entries = {
        name if (name := segment(key, "")) in tops else key: spec for key, spec in table.items()
    }
    if not any(is_pattern(key) and key not in tops for key in entries):
        return decide_by_paths(entries, known)
    patterns = {_literally(key) if key in tops else key: spec for key, spec in entries.items()}
    unknown = [
        Finding("error", key, f"no leaf matches the pattern {key!r}{nearest(key, known)}")
        for key in patterns
        if key != "**" and not any(_pattern.matches(key, path) for path in known)
    ]

    def decide(leaf: ShapedLeaf) -> Any:
        matching = (spec for key, spec in patterns.items() if _pattern.matches(key, leaf.path))
        return next(matching, NOTHING)

    return Decision(decide, tuple(unknown), patterns)


def decide_by_paths(entries: Mapping[str, Any], known: Sequence[str]) -> Decision[ShapedLeaf]:
    """What a tree of specs says, by path: the nearest entry at a leaf or at a name above it."""
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
    """Whether what looks like a spec without axes may mirror a tuple or list without leaves."""
    if not isinstance(spec, tuple | list):
        return False
    return all(entry is None or entry in ((), []) for entry in cast("Sequence[Any]", spec))


def is_pattern(key: str) -> bool:
    return "*" in key or "?" in key


def _literally(name: str) -> str:
    """A pattern for what has the characters of one in its name."""
    return re.sub(r"[*?]", "?", name)


def _above(path: str) -> Iterator[str]:
    """The path and the names above it, up to the root."""
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
    names = ", ".join(map(repr, paths[:3]))
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    remedy = "add one, or '**' with P() to leave the rest whole"
    return [Finding("error", paths[0], f"no pattern matches {names}{more}: {remedy}")]


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
