"""Trees compared bit for bit, and checkpoints opened as the library does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ostraka.formats.ostraka.source import OstrakaSource, open_ostraka
from ostraka.storage import open_store


def data_of(leaf: Any) -> Any:
    """The data of a key, and any other leaf as it is."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def assert_same(found: Any, expected: Any) -> None:
    """The same dtypes, shapes and bits, in whatever containers and wherever they lie."""
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    for (path, one), other in zip(paths, jax.tree.leaves(found), strict=True):
        a, b = np.asarray(data_of(one)), np.asarray(data_of(other))
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


def open_at(path: Any) -> OstrakaSource:
    source = open_ostraka(open_store(path))
    assert source is not None
    return source
