"""Rules for plain leaves: the presets of `ostraka.sharding` by name, or a file of patterns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ostraka._spec import LeafSpec, MeshSpec, Partition
from ostraka.errors import nearest, store_error
from ostraka.planner._state import Problem

RULES = ("dp", "fsdp", "tp", "fsdp+tp")
_DATA_AXES = ("data", "fsdp", "dp")
_MODEL_AXES = ("model", "tp", "tensor")


@dataclass(frozen=True, slots=True)
class Settled:
    """Where each leaf is cut, and what is wrong or unwise about it."""

    partitions: Mapping[str, Partition]
    problems: tuple[Problem, ...]


def settle_rules(leaves: Sequence[LeafSpec], rules: Any, mesh: MeshSpec) -> Settled:
    """Apply rules, as `ostraka.sharding` knows them, to leaves that are plain data.

    Rules and checks live there, on JAX's types; here is only the way there and back.
    """
    from ostraka._capture import describe_spec
    from ostraka.sharding._check import check, raise_errors, specs_by_path
    from ostraka.sharding._data import parse_state

    tree = _abstract_tree(leaves)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    found, _ = specs_by_path(parse_state(tree), rules, sizes)
    findings = check(tree, rules, sizes)
    raise_errors(f"the rules do not fit the mesh ({mesh})", findings)
    problems = [Problem(f.severity, f.path, f.message) for f in findings]
    partitions = {path: describe_spec(path, spec) for path, spec in found.items()}
    return Settled(partitions, tuple(problems))


def _abstract_tree(leaves: Sequence[LeafSpec]) -> Any:
    import jax

    from ostraka._document import ROOT
    from ostraka._spec import numpy_dtype

    root: dict[str, Any] = {}
    for leaf in leaves:
        value = jax.ShapeDtypeStruct(leaf.shape, numpy_dtype(leaf.dtype))
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
    data = next((axis for axis in _DATA_AXES if axis in mesh.axis_names), None)
    model = next((axis for axis in _MODEL_AXES if axis in mesh.axis_names), None)
    if text is None:
        text = "fsdp+tp" if data and model else "tp" if model else "fsdp" if data else "dp"
    if text not in RULES:
        return _read_file(text)
    from ostraka import sharding

    if text == "dp":
        return sharding.data_parallel()
    rules: list[Any] = []
    if "fsdp" in text:
        rules.append(sharding.fsdp(data or _missing(text, mesh, _DATA_AXES)))
    if "tp" in text.split("+"):
        rules.append(sharding.tensor_parallel(model or _missing(text, mesh, _MODEL_AXES)))
    return sharding.combine(*rules)


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
    from jax.sharding import PartitionSpec

    from ostraka.sharding import combine

    try:
        with open(name, encoding="utf-8") as file:
            loaded: Any = json.load(file)
    except OSError as error:
        raise store_error("read the rules in", name, error) from error
    except ValueError as error:
        raise ValueError(f"the rules in {name} are not JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"the rules in {name} must be a JSON object of patterns and specs")
    table = cast("dict[str, Any]", loaded)
    specs = {pattern: PartitionSpec(*_entries(name, pattern, v)) for pattern, v in table.items()}
    # A mapping alone would be taken for a tree of specs.
    return combine(specs)


def _entries(name: str, pattern: str, value: Any) -> list[Any]:
    """A spec as JSON: for each dimension an axis, several, or null."""
    entries = cast("list[Any]", value) if isinstance(value, list) else []
    made = [tuple(cast("list[str]", e)) if isinstance(e, list) else e for e in entries]
    texts = [axis for e in made for axis in (e if isinstance(e, tuple) else (e,))]
    if value is not None and not isinstance(value, list):
        texts = [0]
    if not all(axis is None or isinstance(axis, str) for axis in texts):
        raise ValueError(
            f"the rules in {name} have {value!r} for {pattern!r}; a spec is a list with an axis, a "
            'list of axes or null for each dimension, such as [null, "model"]'
        )
    return made
