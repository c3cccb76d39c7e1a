"""v1 with `CheckpointLayout.SAFETENSORS`: a file, or a directory of files, as a flat dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka._spec import numpy_dtype
from ostraka.compat.orbax._engine import Item
from ostraka.compat.orbax._place import as_path, store_at
from ostraka.compat.orbax._pytree import read_standard
from ostraka.compat.orbax.v1 import errors
from ostraka.errors import NotACheckpoint
from ostraka.formats._safetensors import open_safetensors


@dataclass(frozen=True, slots=True)
class Tensors:
    """What is at a path. `custom` is what the files say of themselves."""

    item: Item
    custom: dict[str, Any]
    path: Any


def open_tensors(path: Any) -> Tensors:
    """Raises InvalidLayoutError for what are no safetensors files."""
    try:
        source = open_safetensors(store_at(path))
    except NotACheckpoint as error:
        raise _no_tensors(path) from error
    if source is None:
        raise _no_tensors(path)
    where = as_path(path)
    return Tensors(Item(source, None, where, "pytree"), dict(source.saved.user), where)


def load_tensors(path: Any, abstract: Any) -> dict[str, Any]:
    """Numpy arrays as saved; of those in `abstract` JAX arrays, on all devices if it does not say.

    Raises KeyError for a name that is not there, ValueError for another shape.
    """
    item = open_tensors(path).item
    names = {keys[0] for keys in item.tree.leaves}
    if abstract is None:
        return read_standard(item, {name: _numpy(item, name) for name in names})
    if not isinstance(abstract, Mapping) or not all(map(jax.tree_util.all_leaves, _rows(abstract))):
        raise ValueError("the tree must be a flat dict: the name of each tensor, and its shape")
    given: dict[str, Any] = dict(abstract)
    lost = sorted(given.keys() - names)
    if lost:
        raise KeyError(f"Tensor {lost[0]!r} not found in {path}.")
    like = {name: _jax_array(leaf) for name, leaf in given.items()}
    return read_standard(item, like, partial=True)


def tensors_metadata(item: Item) -> dict[str, Any]:
    return {keys[0]: _abstract(item, keys[0]) for keys in item.tree.leaves}


def _rows(abstract: Mapping[str, Any]) -> list[list[Any]]:
    return [[leaf] for leaf in abstract.values()]


def _abstract(item: Item, name: str) -> jax.ShapeDtypeStruct:
    saved = item.saved((name,))
    return jax.ShapeDtypeStruct(saved.shape, numpy_dtype(saved.dtype))


def _numpy(item: Item, name: str) -> Any:
    found = _abstract(item, name)
    return np.broadcast_to(np.zeros((), found.dtype), found.shape)


def _jax_array(leaf: Any) -> jax.ShapeDtypeStruct:
    where = getattr(leaf, "sharding", None)
    if where is None:
        where = NamedSharding(Mesh(np.array(jax.devices()), ("replica",)), PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _no_tensors(path: Any) -> errors.InvalidLayoutError:
    return errors.InvalidLayoutError(
        f"{path} has no safetensors files: give the path of one, or of a directory of them"
    )
