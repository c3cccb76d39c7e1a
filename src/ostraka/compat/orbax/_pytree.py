"""Trees as items: saved, and restored by `item`, `restore_args`, `transforms` or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ostraka.common.threads import paused_gc
from ostraka.compat.orbax import tree as tree_lib
from ostraka.compat.orbax._engine import Item, Payload
from ostraka.compat.orbax._leaves import (
    PLACEHOLDER,
    STANDARD_TYPES,
    Template,
    WantedLeaf,
    is_cut_by_jax,
    prepare_leaf,
    template_of,
    want_of,
)
from ostraka.compat.orbax.checkpoint_utils import restore_args_of
from ostraka.compat.orbax.tree import ARRAY_TYPES, FlatTree, Keys, as_saved, flatten, is_empty
from ostraka.compat.orbax.type_handlers import GLOBAL_REGISTRY
from ostraka.layout.spec import LeafSpec


@paused_gc()
def pytree_payload(item: Any, save_args: Any, handler: str) -> Payload:
    """Return a tree as an item. Raises ValueError if it is empty or a leaf can't be saved."""
    if is_empty(item):
        raise ValueError("Found empty item.")
    if save_args is None or _says_nothing(save_args, item):
        tree = as_saved(item, prepare_leaf, () if GLOBAL_REGISTRY.has_custom else ARRAY_TYPES)
    else:
        flat = flatten(item)
        given = dict(zip(flat.keys, _matching(save_args, flat), strict=True))
        tree = as_saved(item, lambda keys, leaf: prepare_leaf(keys, leaf, given[keys]))
    if isinstance(tree, dict | list) and not tree:
        raise ValueError("Found empty item.")
    return Payload("pytree", tree, handler)


def check_standard(item: Any) -> None:
    """Raise ValueError for a tree that `StandardSave` does not take."""
    leaves = jax.tree_util.tree_leaves(item)
    if len(leaves) == 1 and leaves[0] is item:
        raise ValueError(
            "StandardCheckpointHandler / StandardSave does not support single arrays or scalars. "
            "Use ArrayCheckpointHandler / ArraySave"
        )
    kinds = {type(leaf): leaf for leaf in leaves}
    if all(isinstance(leaf, STANDARD_TYPES) for leaf in kinds.values()):
        return
    for keys, leaf in flatten(item).by_keys.items():
        if not is_empty(leaf) and not isinstance(leaf, STANDARD_TYPES):
            raise ValueError(f"Unsupported type: {type(leaf)} for key: {keys}.")


def _says_nothing(save_args: Any, item: Any) -> bool:
    """True if a tree of args, as Flax makes it, has one for each leaf and asks for nothing."""
    if GLOBAL_REGISTRY.has_custom:
        return False  # Custom handlers receive the args.
    args, structure = jax.tree_util.tree_flatten(save_args)
    asks = [getattr(arg, "dtype", None) is not None or not _is_leaf_args(arg) for arg in args]
    return not any(asks) and structure == jax.tree_util.tree_structure(item)


def _is_leaf_args(node: Any) -> bool:
    # A variable of NNX has the attributes of its value, and is no leaf.
    known = hasattr(node, "restore_type") or hasattr(node, "aggregate")
    return known and jax.tree_util.all_leaves([node])


def _matching(args: Any, flat: FlatTree) -> list[Any]:
    """Return the args of each leaf of a template."""
    if not _is_leaf_args(args):
        # The usual tree has one for each leaf. JAX compares the two faster than we walk one.
        each, structure = jax.tree_util.tree_flatten(args)
        if len(each) == len(flat.leaves) and structure == jax.tree_util.tree_structure(flat.tree):
            return each
    return _args_of(args, flat.keys, flat.leaves)


def _args_of(args: Any, keys: list[Keys], leaves: list[Any]) -> list[Any]:
    """Return the args of each leaf, from a tree of args or from one for all."""
    if _is_leaf_args(args):
        return [args] * len(keys)
    found = flatten(args, _is_leaf_args).by_keys
    for key, leaf in zip(keys, leaves, strict=True):
        if key not in found and not is_empty(leaf):
            raise ValueError(
                f"the tree of args has nothing at {'/'.join(key)!r}: its structure must be that of "
                "the item"
            )
    return [found.get(key) for key in keys]


@paused_gc()
def read_as_saved(item: Item, restore_args: Any = None) -> Any:
    """Restore the whole item without a template."""
    leaves = item.tree.leaves
    if restore_args is None:
        wants = {keys: _want_as_saved(item, keys) for keys in leaves}
    else:
        args = _args_of(restore_args, list(leaves), list(leaves.values()))
        wants = {k: want_of(k, item.saved(k), a) for k, a in zip(leaves, args, strict=True)}
    return item.tree.nested(item.read(wants).values())


def _want_as_saved(item: Item, keys: Keys) -> WantedLeaf | Template:
    saved = item.saved(keys)
    if type(saved) is LeafSpec and not (saved.kind == "jax" and is_cut_by_jax(saved.dtype)):
        return item.tree.leaves[keys]
    return WantedLeaf(keys, saved)


@paused_gc()
def read_like(item: Item, like: Any, restore_args: Any = None, *, partial: bool = False) -> Any:
    """Restore the item with the structure of a template. Raises ValueError where they differ."""
    flat = flatten(like)
    args = [None] * len(flat.leaves) if restore_args is None else _matching(restore_args, flat)
    return _read_flat(
        item, flat, partial, lambda n, keys, saved: want_of(keys, saved, args[n], flat.leaves[n])
    )


@paused_gc()
def read_standard(
    item: Item,
    like: Any,
    *,
    partial: bool = False,
    strict: bool = True,
    fallback_sharding: Any = None,
) -> Any:
    """Restore the item with the structure, types, dtypes, shapes and shardings of a template."""
    flat = flatten(like)

    def want(number: int, keys: Keys, saved: Any) -> WantedLeaf | Template:
        leaf = flat.leaves[number]
        if type(leaf) is jax.ShapeDtypeStruct or isinstance(leaf, jax.Array):
            where = fallback_sharding if leaf.sharding is None else leaf.sharding
            found = template_of(saved, leaf.dtype, leaf.shape, where)
            if found is not None:
                return found
        made = restore_args_of(leaf, strict=strict)
        if fallback_sharding is not None and getattr(made, "sharding", "") is None:
            made.sharding = fallback_sharding
        is_open = type(leaf) is jax.ShapeDtypeStruct and made.sharding is None
        if is_open and not (isinstance(saved, LeafSpec) and saved.kind in ("jax", "key")):
            made.restore_type = np.ndarray
        return want_of(keys, saved, made)

    return _read_flat(item, flat, partial, want)


def _read_flat(
    item: Item,
    flat: FlatTree,
    partial: bool,
    want: Callable[[int, Keys, Any], WantedLeaf | Template],
) -> Any:
    """Restore the leaves that template and checkpoint have. `want` tells how."""
    _check_structure(item, flat, partial)
    wants = {
        keys: want(number, keys, item.saved(keys))
        for number, (keys, leaf) in enumerate(zip(flat.keys, flat.leaves, strict=True))
        if leaf is not PLACEHOLDER and not is_empty(leaf) and keys in item.tree.leaves
    }
    return flat.rebuild(map(item.read(wants).get, flat.keys, flat.leaves))


def _check_structure(item: Item, flat: FlatTree, partial: bool) -> None:
    """Raise ValueError if a template and an item have leaves at different paths.

    A partial restore may differ. TypeError tells of a leaf where the other has a branch, because
    it would be neither found nor new.
    """
    saved = item.tree.leaves
    if flat.keys == list(saved) and not any(map(is_empty, (*flat.leaves, *saved.values()))):
        return
    there = {keys for keys, value in saved.items() if not is_empty(value)}
    leaves = {keys: leaf for keys, leaf in flat.by_keys.items() if not is_empty(leaf)}
    placeholders = {keys for keys, leaf in leaves.items() if leaf is PLACEHOLDER}
    wanted = leaves.keys() - placeholders
    if partial and wanted <= there:
        return
    if partial:
        for some, others, where in ((wanted, there, "saved"), (there, wanted, "wanted")):
            branches = {keys[:depth] for keys in others for depth in range(len(keys))}
            for keys in sorted(some & branches):
                raise TypeError(
                    f"Type mismatch at {'/'.join(keys) or 'the root'!r}: what is {where} there is "
                    "a tree, and the other one has a leaf"
                )
        return
    covered = {keys for keys in there if any(keys[: len(p)] == p for p in placeholders)}
    lines = [f"{'/'.join(k)}: not in the checkpoint" for k in sorted(wanted - there)]
    lines += [f"{'/'.join(k)}: in the checkpoint only" for k in sorted(there - wanted - covered)]
    if lines:
        raise ValueError(
            "User-provided restore item and on-disk value metadata tree structures do not match: "
            f"{'; '.join(lines[:20])}. If this mismatch is intentional, pass partial_restore=True."
        )


def read_pytree(item: Item, args: Any) -> Any:
    """Restore an item as `PyTreeRestore` asks for it."""
    if args.legacy_transform_fn is not None:
        raise NotImplementedError("PyTreeRestore(legacy_transform_fn=) is not supported")
    if args.transforms is not None:
        return _read_transformed(item, args)
    if args.item is None:
        if args.partial_restore and args.restore_args is not None:
            return read_like(item, args.restore_args, args.restore_args, partial=True)
        return read_as_saved(item, args.restore_args)
    return read_like(item, args.item, args.restore_args, partial=args.partial_restore)


def _read_transformed(item: Item, args: Any) -> Any:
    if args.restore_args is None:
        raise ValueError(
            "If providing `transforms`, must provide `restore_args` matching structure of expected "
            "result."
        )
    if args.item is None:
        raise ValueError("If providing `transforms`, must provide `item`.")
    there = {"/".join(keys): keys for keys in item.tree.leaves}
    given = {"/".join(k): a for k, a in flatten(args.restore_args, _is_leaf_args).by_keys.items()}
    rules = tree_lib.rules_of(args.transforms)
    inputs = _inputs_of(rules, there)
    flat = flatten(args.item)
    origins = tree_lib.origins_of(flat, there, rules, args.transforms_default_to_original)
    paths = map("/".join, flat.keys)
    needed = {
        k: given.get(path) for (_, k), path in zip(origins, paths, strict=True) if k is not None
    }
    inputs = needed | inputs
    wants = {there[p]: want_of(there[p], item.saved(there[p]), a) for p, a in inputs.items()}
    values = dict(zip(inputs, item.read(wants).values(), strict=True))
    # A leaf that no function asks for is not read.
    tree = item.tree.nested(values.get(path, PLACEHOLDER) for path in there)
    return tree_lib.transformed(flat, origins, values, tree, given)


def _inputs_of(rules: Mapping[str, Any], there: Mapping[str, Keys]) -> dict[str, Any]:
    """Return the leaves that functions of several values ask for, each with its RestoreArgs.

    Raises ValueError for a function that does not name its inputs.
    """
    inputs: dict[str, Any] = {}
    for pattern, rule in rules.items():
        if rule.multi_value_fn is None:
            continue
        asked = getattr(rule, "multi_value_fn_input_args", None)
        if asked is None:
            raise ValueError(
                f"the transform {pattern!r} has `multi_value_fn`: for a restore, make it a "
                "RestoreTransform with `multi_value_fn_input_args`, which names its inputs"
            )
        for wanted, args in asked.items():
            for path in there:
                if re.fullmatch(wanted, path):
                    inputs.setdefault(path, args)
    return inputs
