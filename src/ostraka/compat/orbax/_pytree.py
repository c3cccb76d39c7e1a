"""Trees: to an item and back, by `item`, `restore_args`, `transforms` or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ostraka._lifetime import paused_gc
from ostraka._spec import LeafSpec
from ostraka.compat.orbax._engine import Item, Payload
from ostraka.compat.orbax._leaves import (
    PLACEHOLDER,
    STANDARD_TYPES,
    Template,
    Want,
    dtype_of_jax,
    is_cut_by_jax,
    prepare_leaf,
    template_of,
    want_array,
    want_key,
)
from ostraka.compat.orbax._tree import ARRAY_TYPES, Flat, Keys, as_saved, flatten, is_empty
from ostraka.compat.orbax.transform_utils import apply_transformations
from ostraka.compat.orbax.type_handlers import RestoreArgs, has_own_handlers


@paused_gc()
def pytree_payload(item: Any, save_args: Any, handler: str) -> Payload:
    """A tree as an item. Raises ValueError for an empty one, or leaves that can't be saved."""
    if is_empty(item):
        raise ValueError("Found empty item.")
    if save_args is None or _says_nothing(save_args, item):
        tree = as_saved(item, prepare_leaf, () if has_own_handlers() else ARRAY_TYPES)
    else:
        flat = flatten(item)
        args = _matching(save_args, flat)
        leaves = map(prepare_leaf, flat.keys, flat.leaves, args)
        tree = flat.nested(leaves)
    if isinstance(tree, dict | list) and not tree:
        raise ValueError("Found empty item.")
    return Payload("pytree", tree, handler)


def check_standard(item: Any) -> None:
    """What `StandardSave` takes. Raises ValueError."""
    leaves = jax.tree_util.tree_leaves(item)
    if len(leaves) == 1 and leaves[0] is item:
        raise ValueError(
            "StandardCheckpointHandler / StandardSave does not support single arrays or scalars. "
            "Use ArrayCheckpointHandler / ArraySave"
        )
    kinds = {type(leaf): leaf for leaf in leaves}
    if all(isinstance(leaf, STANDARD_TYPES) for leaf in kinds.values()):
        return
    flat = flatten(item)
    for keys, leaf in zip(flat.keys, flat.leaves, strict=True):
        if not is_empty(leaf) and not isinstance(leaf, STANDARD_TYPES):
            raise ValueError(f"Unsupported type: {type(leaf)} for key: {keys}.")


def _says_nothing(save_args: Any, item: Any) -> bool:
    """Whether a tree of args, as Flax makes it, has one for each leaf and asks for nothing."""
    if has_own_handlers():
        return False  # which get them
    args, structure = jax.tree_util.tree_flatten(save_args)
    asks = [getattr(arg, "dtype", None) is not None or not _is_leaf_args(arg) for arg in args]
    return not any(asks) and structure == jax.tree_util.tree_structure(item)


def _is_leaf_args(node: Any) -> bool:
    # A variable of NNX has the attributes of its value, and is no leaf.
    known = hasattr(node, "restore_type") or hasattr(node, "aggregate")
    return known and jax.tree_util.all_leaves([node])


def _matching(args: Any, flat: Flat) -> list[Any]:
    """The args of each leaf: of a tree of them, or one for all."""
    if _is_leaf_args(args):
        return [args] * len(flat.leaves)
    # The usual tree has one for each leaf: JAX compares the two faster than we walk through one.
    each, structure = jax.tree_util.tree_flatten(args)
    if len(each) == len(flat.leaves) and structure == jax.tree_util.tree_structure(flat.tree):
        return each
    given = flatten(args, _is_leaf_args)
    found = dict(zip(given.keys, given.leaves, strict=True))
    wanted = [k for k, leaf in zip(flat.keys, flat.leaves, strict=True) if not is_empty(leaf)]
    missing = [keys for keys in wanted if keys not in found]
    if missing:
        raise ValueError(
            f"the tree of args has nothing at {'/'.join(missing[0])!r}: its structure must be that "
            "of the item"
        )
    return [found.get(keys) for keys in flat.keys]


def want_of(keys: Keys, saved: Any, args: Any, like: Any = None) -> Want | Template:
    """How a leaf comes back, by its RestoreArgs, Orbax's own or ours.

    What ArrayRestoreArgs leave open, dtype and shape, is that of `like`, the leaf of a template.
    """
    if args is None:
        return Want(keys, saved)
    sharding, kind, dtype = _sharding_of(args), args.restore_type, args.dtype
    shape = getattr(args, "global_shape", None)
    if shape is None:
        shape = getattr(args, "shape", None)
    is_open = (dtype is None or shape is None) and hasattr(args, "global_shape")
    if is_open and hasattr(like, "dtype"):
        shape = like.shape if shape is None else shape
        dtype = like.dtype if dtype is None else dtype
    shape = None if shape is None else tuple(shape)
    if kind is None or kind is jax.Array:
        found = template_of(saved, dtype, shape, sharding)
        if found is None:
            dtype = dtype_of_jax(dtype)
            found = template_of(saved, dtype, shape, sharding)
        if found is not None:
            return found
    strict = getattr(args, "strict", True)
    if isinstance(saved, LeafSpec) and saved.kind == "key":
        return want_key(keys, saved, kind, dtype, sharding, shape)
    return want_array(Want(keys, saved, kind, dtype, sharding, shape, strict, args))


def _sharding_of(args: Any) -> Any:
    sharding: Any = getattr(args, "sharding", None)
    if isinstance(sharding, jax.sharding.Sharding):
        return sharding
    if hasattr(sharding, "to_jax_sharding"):
        return sharding.to_jax_sharding()
    mesh = getattr(args, "mesh", None)
    if sharding is None and mesh is not None:
        return NamedSharding(mesh, getattr(args, "mesh_axes", None) or jax.P())
    return sharding


@paused_gc()
def read_as_saved(item: Item, restore_args: Any = None) -> Any:
    """The whole item, without a template."""
    keys = list(item.tree.leaves)
    if restore_args is None:
        return item.tree.nested(item.read(keys, [_want_as_saved(item, k) for k in keys]))
    args: list[Any] = [None] * len(keys)
    if _is_leaf_args(restore_args):
        args = [restore_args] * len(keys)
    else:
        given = flatten(restore_args, _is_leaf_args)
        found = dict(zip(given.keys, given.leaves, strict=True))
        missing = [k for k in keys if k not in found and not is_empty(item.tree.leaves[k])]
        if missing:
            raise ValueError(
                f"restore_args has nothing for {'/'.join(missing[0])!r}, which is in the "
                "checkpoint; its structure must be that of the checkpoint"
            )
        args = [found.get(k) for k in keys]
    wants = [want_of(k, item.saved(k), _plain_args(a)) for k, a in zip(keys, args, strict=True)]
    return item.tree.nested(item.read(keys, wants))


def _want_as_saved(item: Item, keys: Keys) -> Want | Template:
    saved = item.saved(keys)
    if type(saved) is LeafSpec and not (saved.kind == "jax" and is_cut_by_jax(saved.dtype)):
        return item.tree.leaves[keys]
    return Want(keys, saved)


def _plain_args(args: Any) -> Any:
    return args if hasattr(args, "restore_type") else None


@paused_gc()
def read_like(item: Item, like: Any, restore_args: Any = None, *, partial: bool = False) -> Any:
    """The item with the structure of a template. Raises ValueError where they differ."""
    flat = flatten(like)
    args = [None] * len(flat.leaves) if restore_args is None else _matching(restore_args, flat)
    return _read_flat(
        item,
        flat,
        partial,
        lambda n, keys, saved: want_of(keys, saved, _plain_args(args[n]), flat.leaves[n]),
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
    """As `read_like`, each leaf with the type, dtype, shape and sharding that the template has."""
    flat = flatten(like)

    def want(number: int, keys: Keys, saved: Any) -> Want | Template:
        leaf = flat.leaves[number]
        if type(leaf) is jax.ShapeDtypeStruct or isinstance(leaf, jax.Array):
            where = fallback_sharding if leaf.sharding is None else leaf.sharding
            found = template_of(saved, leaf.dtype, leaf.shape, where)
            if found is not None:
                return found
        made = args_of_template(leaf, strict=strict, fallback_sharding=fallback_sharding)
        is_open = type(leaf) is jax.ShapeDtypeStruct and made.sharding is None
        if is_open and not (isinstance(saved, LeafSpec) and saved.kind in ("jax", "key")):
            made.restore_type = np.ndarray
        return want_of(keys, saved, _plain_args(made))

    return _read_flat(item, flat, partial, want)


def _read_flat(
    item: Item, flat: Flat, partial: bool, want: Callable[[int, Keys, Any], Want | Template]
) -> Any:
    """Read what a template has and the checkpoint too; `want` says how each leaf comes back."""
    _check_structure(item, flat, partial)
    results: list[Any] = list(flat.leaves)
    there = item.tree.leaves
    numbers = [
        number
        for number, leaf in enumerate(flat.leaves)
        if leaf is not PLACEHOLDER and not is_empty(leaf) and flat.keys[number] in there
    ]
    keys = [flat.keys[number] for number in numbers]
    wants = [want(n, k, item.saved(k)) for n, k in zip(numbers, keys, strict=True)]
    for number, value in zip(numbers, item.read(keys, wants), strict=True):
        results[number] = value
    return flat.rebuild(results)


def _check_structure(item: Item, flat: Flat, partial: bool) -> None:
    if partial:
        _check_branches(item, flat)
        return
    saved = item.tree.leaves
    if flat.keys == list(saved) and not any(map(is_empty, (*flat.leaves, *saved.values()))):
        return
    pairs = list(zip(flat.keys, flat.leaves, strict=True))
    wanted = {keys for keys, leaf in pairs if not is_empty(leaf)}
    there = {keys for keys, value in item.tree.leaves.items() if not is_empty(value)}
    placeholders = {keys for keys, leaf in pairs if leaf is PLACEHOLDER}
    covered = {keys for keys in there if any(keys[: len(p)] == p for p in placeholders)}
    missing = sorted(wanted - there - placeholders)
    extra = sorted(there - wanted - covered)
    if missing or extra:
        lines = [f"{'/'.join(k)}: not in the checkpoint" for k in missing]
        lines += [f"{'/'.join(k)}: in the checkpoint only" for k in extra]
        raise ValueError(
            "User-provided restore item and on-disk value metadata tree structures do not match: "
            f"{'; '.join(lines[:20])}. If this mismatch is intentional, pass partial_restore=True."
        )


def _check_branches(item: Item, flat: Flat) -> None:
    """Raise TypeError for a leaf in the place of a branch: it would be neither found nor new."""
    pairs = zip(flat.keys, flat.leaves, strict=True)
    wanted = {keys for keys, leaf in pairs if not (is_empty(leaf) or leaf is PLACEHOLDER)}
    there = {keys for keys, value in item.tree.leaves.items() if not is_empty(value)}
    if wanted <= there:
        return
    for leaves, paths, where in ((wanted, there, "saved"), (there, wanted, "wanted")):
        above = {path[:depth] for path in paths for depth in range(len(path))}
        for keys in sorted(leaves & above):
            raise TypeError(
                f"Type mismatch at {'/'.join(keys) or 'the root'!r}: what is {where} there is a "
                "tree, and the other one has a leaf"
            )


def args_of_template(like: Any, *, strict: bool = True, fallback_sharding: Any = None) -> Any:
    """The RestoreArgs that `StandardRestore(item)` implies."""
    from ostraka.compat.orbax.checkpoint_utils import restore_args_of

    def make(leaf: Any) -> Any:
        if is_empty(leaf) or leaf is PLACEHOLDER:
            return RestoreArgs()
        args = restore_args_of(leaf, strict=strict)
        if fallback_sharding is not None and getattr(args, "sharding", "") is None:
            args.sharding = fallback_sharding
        return args

    return jax.tree.map(make, like, is_leaf=lambda n: is_empty(n) or n is PLACEHOLDER)


def read_pytree(item: Item, args: Any) -> Any:
    """What `PyTreeRestore` asks for."""
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
    if not args.transforms:
        flat = flatten(args.item)
        missing = [
            k
            for k, leaf in zip(flat.keys, flat.leaves, strict=True)
            if not is_empty(leaf) and k not in item.tree.leaves
        ]
        if missing and not args.transforms_default_to_original:
            raise ValueError(f"{'/'.join(missing[0])!r} is not in the checkpoint")
        return read_like(item, args.item, args.restore_args, partial=True)
    original = read_as_saved(item)
    # What neither the checkpoint nor a transform has stays as it is in the item.
    default = None if args.transforms_default_to_original else False
    changed = apply_transformations(original, args.transforms, args.item, default)
    flat = flatten(changed)
    given = flatten(args.restore_args, _is_leaf_args)
    found = dict(zip(given.keys, given.leaves, strict=True))
    return flat.rebuild(
        leaf if is_empty(leaf) else _restored_as(keys, leaf, found.get(keys))
        for keys, leaf in zip(flat.keys, flat.leaves, strict=True)
    )


def _restored_as(keys: Keys, value: Any, args: Any) -> Any:
    """A value that is there already, as its RestoreArgs want it."""
    want = want_of(keys, value, _plain_args(args))
    assert isinstance(want, Want), "templates are for arrays of a checkpoint"
    return Want(keys, None, want.kind, want.dtype, want.sharding).finish(
        np.asarray(value) if want.kind is np.ndarray else value
    )
