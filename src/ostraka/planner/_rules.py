"""Rules for plain leaves: the presets of `ostraka.sharding` by name, or a file of patterns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ostraka._spec import DTYPES, LeafSpec, MeshSpec, Partition
from ostraka.errors import nearest, store_error
from ostraka.sharding._combine import Preset, combine, combined, is_plain
from ostraka.sharding._decide import resolve_plain
from ostraka.sharding._findings import (
    REPLICATED_LIMIT_BYTES,
    Finding,
    findings_of,
    raise_errors,
)
from ostraka.sharding._leaf import PlainLeaf, without_trailing
from ostraka.sharding._presets import (
    FSDP_AXES,
    TENSOR_AXES,
    data_parallel,
    fsdp,
    tensor_parallel,
)

RULES = ("dp", "fsdp", "tp", "fsdp+tp")


@dataclass(frozen=True, slots=True)
class ResolvedRules:
    """The partition of each leaf, and warnings."""

    partitions: Mapping[str, Partition]
    findings: tuple[Finding, ...]


def resolve_rules(leaves: Sequence[LeafSpec], mesh: MeshSpec, rules: Any) -> ResolvedRules:
    """Apply rules, as `ostraka.sharding` knows them, to leaves that are plain data.

    JAX is imported only for rules that involve its types: functions and PartitionSpecs.
    """
    if not is_plain(rules):
        return _resolve_with_jax(leaves, mesh, rules)
    plain = [_plain_leaf(leaf) for leaf in leaves]
    partitions, findings = resolve_plain(plain, mesh, combined(rules))
    findings += findings_of(plain, mesh, partitions, replicated_limit_bytes=REPLICATED_LIMIT_BYTES)
    described = {path: without_trailing(p) for path, p in partitions.items()}
    return _without_errors(mesh, described, findings)


def _resolve_with_jax(leaves: Sequence[LeafSpec], mesh: MeshSpec, rules: Any) -> ResolvedRules:
    from ostraka._capture import describe_spec
    from ostraka.sharding._check import resolve_checked
    from ostraka.sharding._data import parse_state

    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    found, findings = resolve_checked(parse_state(_abstract_tree(leaves)), sizes, rules)
    partitions = {path: describe_spec(path, spec) for path, spec in found.items()}
    return _without_errors(mesh, partitions, findings)


def _without_errors(
    mesh: MeshSpec, partitions: Mapping[str, Partition], findings: Sequence[Finding]
) -> ResolvedRules:
    raise_errors(f"the rules do not fit the mesh ({mesh})", findings)
    return ResolvedRules(partitions, tuple(findings))


def _plain_leaf(leaf: LeafSpec) -> PlainLeaf:
    item_bytes = max(DTYPES[leaf.dtype].bits, 8) // 8  # in memory elements share no byte
    return PlainLeaf(leaf.path, leaf.logical_shape, item_bytes, leaf.kind == "key")


def _abstract_tree(leaves: Sequence[LeafSpec]) -> Any:
    import jax

    from ostraka._document import ROOT
    from ostraka._spec import numpy_dtype

    root: dict[str, Any] = {}
    for leaf in leaves:
        value = jax.ShapeDtypeStruct(leaf.logical_shape, numpy_dtype(leaf.dtype))
        if leaf.path == ROOT:
            return value
        *above, name = map(_key_of_segment, leaf.path.split("/"))
        node = root
        for key in above:
            node = node.setdefault(key, {})
        node[name] = value
    return root


def _key_of_segment(segment: str) -> str:
    """The key that a name in a path was made from."""
    if segment.startswith("~2"):
        return segment[2:]
    return segment.replace("~1", "/").replace("~0", "~")


def read_rules(text: str | None, mesh: MeshSpec) -> Any:
    """What `--rules` says: the name of presets, or a JSON file of path patterns and specs.

    Without it: FSDP over a data axis and tensor parallelism over a model axis, as far as there are
    such axes.
    """
    data = next((axis for axis in FSDP_AXES if axis in mesh.axis_names), None)
    model = next((axis for axis in TENSOR_AXES if axis in mesh.axis_names), None)
    if text is None:
        text = "fsdp+tp" if data and model else "tp" if model else "fsdp" if data else "dp"
    if text not in RULES:
        return _read_file(text)
    if text == "dp":
        return data_parallel()
    rules: list[Preset] = []
    if "fsdp" in text:
        rules.append(fsdp(data or _missing(text, mesh, FSDP_AXES)))
    if "tp" in text.split("+"):
        rules.append(tensor_parallel(model or _missing(text, mesh, TENSOR_AXES)))
    return combine(*rules)


def _missing(rules: str, mesh: MeshSpec, names: Sequence[str]) -> str:
    raise ValueError(
        f"the rules {rules!r} need a mesh axis named {' or '.join(names)}, and the mesh has "
        f"{mesh}: rename an axis, or write the rules into a file"
    )


def _read_file(name: str) -> Any:
    if not os.path.exists(name):
        raise ValueError(
            f"there are no rules {name!r}{nearest(name, RULES)}: give {', '.join(RULES)}, or a "
            "JSON file of path patterns and specs"
        )
    try:
        with open(name, encoding="utf-8") as file:
            loaded: Any = json.load(file)
    except OSError as error:
        raise store_error("read the rules in", name, error) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the rules in {name} are not JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"the rules in {name} must be a JSON object of patterns and specs")
    table = cast("dict[str, Any]", loaded)
    # A mapping alone would be taken for a tree of specs.
    return combine({pattern: _partition(name, pattern, spec) for pattern, spec in table.items()})


def _partition(name: str, pattern: str, spec: Any) -> Partition:
    """A spec as JSON: for each dimension an axis, several, or null; null alone is a whole leaf."""
    entries: Any = [] if spec is None else spec
    listed = [_axes(entry) for entry in entries] if isinstance(entries, list) else [None]
    partition = tuple(axes for axes in listed if axes is not None)
    if len(partition) < len(listed):
        raise ValueError(
            f"the rules in {name} have {spec!r} for {pattern!r}; a spec is a list with an axis, a "
            'list of axes or null for each dimension, such as [null, "model"]'
        )
    return partition


def _axes(entry: Any) -> tuple[str, ...] | None:
    """The axes that a dimension is cut along; None if the entry is invalid."""
    listed = [] if entry is None else entry if isinstance(entry, list) else [entry]
    axes = tuple(axis for axis in cast("list[Any]", listed) if isinstance(axis, str))
    return axes if len(axes) == len(cast("list[Any]", listed)) else None
