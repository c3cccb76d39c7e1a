"""A saved tree as another one: keys that were renamed, values that are computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax._tree import flatten, nest

__getattr__ = refuse(__name__)


@dataclass
class Transform:
    """Where a leaf comes from: `original_key`, `value_fn` of it, or `use_fallback`."""

    original_key: str | tuple[str, ...] | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None


@dataclass
class RestoreTransform(Transform):
    multi_value_fn_input_args: Any = None


def apply_transformations(
    original_tree: Any,
    transformations: Any,
    new_tree: Any,
    default_to_original: bool | None = True,
) -> Any:
    """`new_tree` with the values of `original_tree`, by a tree of `Transform` whose keys are
    regular expressions over paths.

    Where no transform matches, the leaf of that path is taken; with `default_to_original=False`
    that of `new_tree`.
    """
    original = flatten(original_tree)
    values = {"/".join(k): v for k, v in zip(original.keys, original.leaves, strict=True)}
    rules = flatten(transformations, lambda node: hasattr(node, "original_key"))
    patterns = ["/".join(keys) for keys in rules.keys]
    new = flatten(new_tree)
    results: list[Any] = []
    for keys, fallback in zip(new.keys, new.leaves, strict=True):
        path = "/".join(keys)
        for pattern, rule in zip(patterns, rules.leaves, strict=True):
            match = re.fullmatch(pattern, path)
            if match:
                results.append(_transformed(rule, match, path, values, original_tree, fallback))
                break
        else:
            if default_to_original is False:
                results.append(fallback)
            elif path in values:
                results.append(values[path])
            elif default_to_original is None:
                results.append(fallback)
            else:
                raise ValueError(f"{path!r} is not in the original tree, and has no transform")
    return new.rebuild(results)


def _transformed(
    rule: Any, match: Any, path: str, values: dict[str, Any], original: Any, fallback: Any
) -> Any:
    if rule.use_fallback:
        return fallback
    if rule.multi_value_fn is not None:
        return rule.multi_value_fn(original)
    key = path if rule.original_key is None else rule.original_key
    key = match.expand(key if isinstance(key, str) else "/".join(key))
    if key not in values:
        raise ValueError(f"Transformation key {key!r} is not in the original tree")
    return values[key] if rule.value_fn is None else rule.value_fn(values[key])


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """All leaves of several trees; of several at one path, that of the last tree."""
    found: dict[Any, tuple[Any, Any]] = {}
    for tree in trees:
        flat = flatten(tree)
        for keys, flags, leaf in zip(flat.keys, flat.in_sequence, flat.leaves, strict=True):
            found[keys] = (flags, leaf)
    if target is None:
        return nest((keys, flags, leaf) for keys, (flags, leaf) in found.items())
    flat = flatten(target)
    return flat.rebuild(found[keys][1] for keys in flat.keys)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """The leaves at paths that all trees have, with the values of the last one."""
    flats = [flatten(tree) for tree in trees]
    common = set(flats[0].keys).intersection(*[flat.keys for flat in flats[1:]])
    last = flats[-1]
    kept = [
        entry
        for entry in zip(last.keys, last.in_sequence, last.leaves, strict=True)
        if entry[0] in common
    ]
    if target is None:
        return nest(kept)
    values = {keys: leaf for keys, _, leaf in kept}
    flat = flatten(target)
    return flat.rebuild(values[keys] for keys in flat.keys)
