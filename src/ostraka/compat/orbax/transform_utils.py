"""A saved tree as another one: keys that were renamed, values that are computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from ostraka.compat.orbax._tree import FlatTree, Keys, flatten, is_empty, nest


@dataclass
class Transform:
    """The origin of a leaf: `original_key`, `value_fn` of it, or `use_fallback`.

    `multi_value_fn(key, original_tree)` computes the leaf at `key`. `use_fallback` takes the leaf
    from the other tree: from the new one by default.
    """

    original_key: str | tuple[str, ...] | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None


@dataclass
class RestoreTransform(Transform):
    """A transform for restores.

    It calls `multi_value_fn(key, tree, restore_args)`. The tree has the leaves that
    `multi_value_fn_input_args` names, each with its RestoreArgs.
    """

    multi_value_fn_input_args: Any = None


def rules_of(transformations: Any) -> dict[str, Any]:
    """Return the transforms of a tree by the patterns that their keys are."""
    found = flatten(transformations, lambda node: hasattr(node, "original_key")).by_keys
    return {"/".join(keys): rule for keys, rule in found.items() if not is_empty(rule)}


def transformed(
    new: FlatTree,
    original: Container[str],
    rules: Mapping[str, Any],
    default_to_original: bool,
    read: Callable[[Mapping[str, str]], tuple[Mapping[str, Any], Any]],
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """Return a new tree with values of an original one.

    `read` receives the keys of the original tree that are needed, each with the path it is for. It
    returns their values, and the tree for functions of several values. `extra` has a further
    argument of these functions for each path.
    """
    paths = ["/".join(keys) for keys in new.keys]
    origins = [
        (None, None) if is_empty(leaf) else _origin_of(path, original, rules, default_to_original)
        for path, leaf in zip(paths, new.leaves, strict=True)
    ]
    needed = {key: path for (_, key), path in zip(origins, paths, strict=True) if key is not None}
    values, tree = read(needed)
    results: list[Any] = []
    for (rule, key), path, leaf in zip(origins, paths, new.leaves, strict=True):
        if key is not None:
            value_fn: Any = None if rule is None else rule.value_fn
            results.append(values[key] if value_fn is None else value_fn(values[key]))
        elif rule is not None and rule.multi_value_fn is not None:
            more = () if extra is None else (extra.get(path),)
            results.append(rule.multi_value_fn(path, tree, *more))
        else:
            results.append(leaf)
    return new.rebuild(results)


def _origin_of(
    path: str, original: Container[str], rules: Mapping[str, Any], default_to_original: bool
) -> tuple[Any, str | None]:
    """Return the transform of a leaf, and its key in the original tree, each None if it has none.

    Raises ValueError for a key that the original tree lacks.
    """
    for pattern, rule in rules.items():
        match = re.fullmatch(pattern, path)
        if match is None:
            continue
        if rule.multi_value_fn is not None or (rule.use_fallback and default_to_original):
            return rule, None
        key = path if rule.original_key is None else rule.original_key
        key = match.expand(key if isinstance(key, str) else "/".join(key))
        if key not in original:
            why = " (`use_fallback` requested)" if rule.use_fallback else ""
            raise ValueError(f"Transformation key {key!r} is not in the original tree{why}")
        return rule, key
    return None, path if default_to_original and path in original else None


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool = True
) -> Any:
    """Return `new_tree` with values of `original_tree`.

    The keys of the tree of `Transform` are regular expressions over paths. A leaf without a
    transform comes from the original tree if that has it, else from `new_tree`. With
    `default_to_original=False` it comes from `new_tree`, and `use_fallback` takes it from the
    original tree.
    """
    values = {"/".join(keys): leaf for keys, leaf in flatten(original_tree).by_keys.items()}
    rules = rules_of(transformations)
    new = flatten(new_tree)
    return transformed(new, values, rules, default_to_original, lambda _: (values, original_tree))


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """Merge the leaves of several trees. At one path the last tree wins.

    Without a target the result has dicts alone, and no empty nodes.
    """
    found: dict[Keys, Any] = {}
    for tree in trees:
        found.update(_leaves(tree))
    return _as_tree(found, target)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """Return the leaves at paths that all trees have, with the values of the last one."""
    flats = [_leaves(tree) for tree in trees]
    common = set(flats[0]).intersection(*flats[1:])
    return _as_tree({keys: leaf for keys, leaf in flats[-1].items() if keys in common}, target)


def _leaves(tree: Any) -> dict[Keys, Any]:
    """Return the leaves of a tree by their keys, without empty nodes."""
    return {keys: leaf for keys, leaf in flatten(tree).by_keys.items() if not is_empty(leaf)}


def _as_tree(found: dict[Keys, Any], target: Any) -> Any:
    if target is None:
        return nest((keys, (False,) * len(keys), leaf) for keys, leaf in found.items())
    flat = flatten(target)
    return flat.rebuild(found[keys] for keys in flat.keys)
