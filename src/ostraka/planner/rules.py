"""Rules for plain leaves: the presets of `ostraka.sharding` by name, or a file of patterns."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, cast

from ostraka.common.dtypes import DTYPES, numpy_dtype
from ostraka.errors import nearest, store_error
from ostraka.layout.spec import LeafSpec, MeshSpec, Partition
from ostraka.sharding.findings import (
    REPLICATED_LIMIT_BYTES,
    Finding,
    findings_of,
    raise_errors,
)
from ostraka.sharding.leaves import ShapedLeaf, without_trailing
from ostraka.sharding.presets import (
    FSDP_AXES,
    TENSOR_AXES,
    data_parallel,
    fsdp,
    tensor_parallel,
)
from ostraka.sharding.rules import Preset, combine, is_plain, resolve_plain
from ostraka.tree.nodes import nest, split

RULES = ("dp", "fsdp", "tp", "fsdp+tp")


Resolved = tuple[dict[str, Partition], tuple[Finding, ...]]
"""The partition of each leaf, and warnings."""


def resolve_rules(leaves: Sequence[LeafSpec], mesh: MeshSpec, rules: Any) -> Resolved:
    """Apply rules of `ostraka.sharding` to leaves that are plain data.

    JAX is imported only for rules that involve its types: functions and PartitionSpecs.
    """
    if not is_plain(rules):
        return _resolve_with_jax(leaves, mesh, rules)
    plain = [
        ShapedLeaf(
            leaf.path,
            leaf.logical_shape,
            max(DTYPES[leaf.dtype].bits, 8) // 8,  # in memory elements share no byte
            leaf.kind == "key",
        )
        for leaf in leaves
    ]
    partitions, findings = resolve_plain(plain, mesh, combine(rules))
    findings += findings_of(plain, mesh, partitions, replicated_limit_bytes=REPLICATED_LIMIT_BYTES)
    raise_errors(f"the rules do not fit the mesh ({mesh})", findings)
    return {path: without_trailing(p) for path, p in partitions.items()}, tuple(findings)


def _resolve_with_jax(leaves: Sequence[LeafSpec], mesh: MeshSpec, rules: Any) -> Resolved:
    import jax

    from ostraka.live.shardings import describe_spec
    from ostraka.sharding.specs import parse_state, resolve_checked

    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    abstract = nest(
        (split(leaf.path), jax.ShapeDtypeStruct(leaf.logical_shape, numpy_dtype(leaf.dtype)))
        for leaf in leaves
    )
    found, findings = resolve_checked(parse_state(abstract), sizes, rules)
    partitions = {path: describe_spec(path, spec) for path, spec in found.items()}
    raise_errors(f"the rules do not fit the mesh ({mesh})", findings)
    return partitions, tuple(findings)


def read_rules(text: Any, mesh: MeshSpec) -> Any:
    """The rules of `--rules`: the name of presets, or a JSON file of path patterns and specs.

    The default is FSDP over a data axis and tensor parallelism over a model axis, as far as the
    mesh has such axes. Rules that are no text stay unchanged.
    """
    if text is not None and not isinstance(text, str):
        return text
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
    loaded = read_json(name, "the rules in", "are")
    if not isinstance(loaded, dict):
        raise ValueError(f"the rules in {name} must be a JSON object of patterns and specs")
    table = cast("dict[str, Any]", loaded)
    # A mapping alone would be taken for a tree of specs.
    return combine({pattern: _partition(name, pattern, spec) for pattern, spec in table.items()})


def read_json(name: str, what: str, verb: str) -> Any:
    """The JSON in a file. Raises ValueError, as in `the config x is not JSON`."""
    try:
        with open(name, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise store_error(f"read {what}", name, error) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} {name} {verb} not JSON ({error})") from error


def _partition(name: str, pattern: str, spec: Any) -> Partition:
    """A spec as JSON: for each dimension an axis, several, or null. Null alone shards nothing."""
    entries: Any = [] if spec is None else spec
    listed: list[list[Any]] = [
        [] if entry is None else entry if isinstance(entry, list) else [entry]
        for entry in (entries if isinstance(entries, list) else [0])
    ]
    if not all(isinstance(axis, str) for axes in listed for axis in axes):
        raise ValueError(
            f"the rules in {name} have {spec!r} for {pattern!r}; a spec is a list with an axis, a "
            'list of axes or null for each dimension, such as [null, "model"]'
        )
    return tuple(map(tuple, listed))
