"""v1 with `CheckpointLayout.SAFETENSORS`: a file, or a directory of files, as a flat dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka.common.dtypes import numpy_dtype
from ostraka.compat.orbax._engine import Item
from ostraka.compat.orbax._files import as_path
from ostraka.compat.orbax._pytree import read_standard
from ostraka.compat.orbax.v1 import errors
from ostraka.errors import NotACheckpoint
from ostraka.formats.safetensors.source import open_safetensors
from ostraka.storage import open_store


def open_tensors(path: Any) -> Item:
    """Open the safetensors files at a path. Raises InvalidLayoutError if there are none."""
    try:
        source = open_safetensors(open_store(path))
    except NotACheckpoint as error:
        raise _no_tensors(path) from error
    if source is None:
        raise _no_tensors(path)
    return Item(source, None, as_path(path), "pytree")


def load_tensors(path: Any, abstract: Any) -> dict[str, Any]:
    """Load tensors as numpy arrays, or those in `abstract` as JAX arrays.

    An abstract array without a sharding is loaded on all devices. Raises KeyError for a name that
    does not exist, ValueError for another shape.
    """
    item = open_tensors(path)
    saved = tensors_metadata(item)
    if abstract is None:
        zeros = {name: np.zeros((), spec.dtype) for name, spec in saved.items()}
        like = {name: np.broadcast_to(zeros[name], spec.shape) for name, spec in saved.items()}
        return read_standard(item, like)
    is_flat = isinstance(abstract, Mapping) and jax.tree_util.all_leaves(abstract.values())
    if not is_flat:
        raise ValueError("the tree must be a flat dict: the name of each tensor, and its shape")
    lost = sorted(abstract.keys() - saved.keys())
    if lost:
        raise KeyError(f"Tensor {lost[0]!r} not found in {path}.")
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("replica",)), PartitionSpec())
    wanted = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or everywhere
        )
        for name, leaf in abstract.items()
    }
    return read_standard(item, wanted, partial=True)


def tensors_metadata(item: Item) -> dict[str, jax.ShapeDtypeStruct]:
    specs = {keys[0]: item.saved(keys) for keys in item.tree.leaves}
    return {n: jax.ShapeDtypeStruct(s.shape, numpy_dtype(s.dtype)) for n, s in specs.items()}


def _no_tensors(path: Any) -> errors.InvalidLayoutError:
    return errors.InvalidLayoutError(
        f"{path} has no safetensors files: give the path of one, or of a directory of them"
    )
