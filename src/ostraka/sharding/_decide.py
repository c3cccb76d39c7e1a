"""Apply rules to the leaves of a tree. No JAX.

Rules that name specs are asked first, one after the other; presets fill in the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from ostraka import _pattern
from ostraka._nodes import ROOT, segment
from ostraka._spec import MeshSpec, Partition
from ostraka.errors import name_few, nearest
from ostraka.sharding._combine import Combined, Preset
from ostraka.sharding._findings import Finding
from ostraka.sharding._leaf import ShapedLeaf, every_dimension, kernel_of

NOTHING: Any = object()
"""The result of a rule that does not cover a leaf. (None means: not cut.)"""

L = TypeVar("L", bound=ShapedLeaf)


@dataclass(frozen=True, slots=True)
class Decision(Generic[L]):
    """One rule, applied to the leaves of a tree."""

    of: Callable[[L], Any]
    """The spec of a leaf, or NOTHING."""
    unknown: tuple[Finding, ...] = ()
    """Entries that match no leaf."""
    entries: Mapping[str, Any] | None = None
    """The entries, if the rule is a mapping or a tree."""


@dataclass(frozen=True, slots=True)
class ExplicitSpecs:
    """The result of all rules that name specs: specs by path, and errors."""

    specs: dict[str, Any]
    unknown: list[Finding]
    missing: list[Finding]
    """Leaves without a spec, if there are only mappings and trees, which must be complete."""


def resolve_plain(
    leaves: Sequence[ShapedLeaf], mesh: MeshSpec, rules: Combined
) -> tuple[dict[str, Partition], list[Finding]]:
    """The partition of each leaf by path, from presets and patterns with partitions.

    Also errors: patterns that match no leaf, leaves that no pattern matches.

    `resolve` in `_specs` does the same for JAX's arrays, where rules may be of every kind.
    """
    cut = [leaf for leaf in leaves if leaf.shape]
    known = [leaf.path for leaf in leaves]
    named = explicit_specs(leaves, rules, lambda rule: decide_by_table(rule, known))
    found: dict[str, Partition] = {path: spec or () for path, spec in named.specs.items()}
    if rules.presets:
        found |= fill(cut, mesh, found, rules.presets)
    partitions = {leaf.path: found.get(leaf.path, ()) for leaf in leaves}
    return partitions, [*named.missing, *named.unknown]


def explicit_specs(
    leaves: Sequence[L], rules: Combined, decider: Callable[[Any], Decision[L]]
) -> ExplicitSpecs:
    """For each leaf, the spec from the first explicit rule that covers it.

    A leaf without dimensions is covered only by an entry of its own path.
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
    return ExplicitSpecs(found, unknown, _missing(missing, entries) if must_be_complete else [])


def decide_by_table(table: Mapping[str, Any], known: Sequence[str]) -> Decision[ShapedLeaf]:
    """Apply a mapping of path patterns to specs; the first match wins.

    A key that is a name at the top of the tree means that name, even with `*` or `?` in it.
    `known` are the paths of all leaves, arrays or not.
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
    """Whether a spec without axes may stand for an empty tuple or list of the tree."""
    if not isinstance(spec, tuple | list):
        return False
    return all(entry is None or entry in ((), []) for entry in cast("Sequence[Any]", spec))


def is_pattern(key: str) -> bool:
    return "*" in key or "?" in key


def _literally(name: str) -> str:
    """A pattern that matches a name with `*` or `?` in it."""
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
    remedy = "add one, or '**' with P() to leave the rest whole"
    return [Finding("error", paths[0], f"no pattern matches {name_few(paths)}: {remedy}")]


def fill(
    leaves: Sequence[ShapedLeaf],
    mesh: MeshSpec,
    fixed: Mapping[str, Partition],
    presets: Sequence[Preset],
) -> dict[str, Partition]:
    """The partitions, by path, that presets give to leaves that have none in `fixed`."""
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
            path, dimensions = kernel
            whole = every_dimension(partitions[path], len(shapes[path]))
            partitions[leaf.path] = tuple(whole[d] for d in dimensions)
    return {leaf.path: partitions[leaf.path] for leaf in rest}
