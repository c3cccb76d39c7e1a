"""Helpers for tests, as in `orbax.checkpoint.test_utils`."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax import type_handlers
from ostraka.compat.orbax._files import as_path
from ostraka.compat.orbax._names import absent
from ostraka.compat.orbax.multihost import sync_global_processes as sync_global_processes
from ostraka.compat.orbax.path import TMP_DIR_SUFFIX
from ostraka.compat.orbax.path import create_tmp_directory as create_tmp_directory
from ostraka.compat.orbax.tree import to_flat_dict
from ostraka.live.parse import is_key

_log = logging.getLogger("ostraka")


def erase_and_create_empty(directory: Any) -> Any:
    """Make an empty directory at a path, delete what was there, and return it."""
    path = as_path(directory)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


empty_directory = absent("test_utils.empty_directory", "use erase_and_create_empty")


def assert_tree_equal(testclass: Any, expected: Any, actual: Any) -> None:
    """Raise AssertionError unless two trees have the same leaves at the same paths."""
    assert to_flat_dict(expected).keys() == to_flat_dict(actual).keys()
    jax.tree.map(lambda a, b: assert_array_equal(testclass, a, b), expected, actual)


def assert_array_equal(testclass: Any, v_expected: Any, v_actual: Any) -> None:
    """Raise AssertionError unless two leaves have the same type, dtype, shards and values."""
    assert isinstance(v_actual, type(v_expected))
    if hasattr(v_expected, "dtype"):
        assert v_expected.dtype == v_actual.dtype
    if not isinstance(v_expected, jax.Array):
        np.testing.assert_array_equal(v_actual, v_expected)
        return
    if is_key(v_expected):
        v_expected, v_actual = jax.random.key_data(v_expected), jax.random.key_data(v_actual)
    shards = (v_expected.addressable_shards, v_actual.addressable_shards)
    assert len(shards[0]) == len(shards[1])
    for wanted, found in zip(*shards, strict=True):
        np.testing.assert_array_equal(np.asarray(found.data), np.asarray(wanted.data))


def assert_tree_same_structure(testclass: Any, expected: Any, actual: Any) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(actual)


# Trees to test with


def is_leaf(x: Any) -> bool:
    return jax.tree_util.all_leaves([x])


def setup_pytree(add: int = 0) -> Any:
    """Return a tree of four integer arrays, all larger by `add`."""
    return {
        "a": np.arange(8) + add,
        "b": np.arange(16) * 2 + add,
        "c": {
            "a": np.arange(8).reshape(2, 4) * 3 + add,
            "e": np.arange(16).reshape(4, 4) * 4 + add,
        },
    }


def create_sharded_array(arr: Any, mesh: Any, mesh_axes: Any) -> jax.Array:
    array = np.asarray(arr)
    where = jax.sharding.NamedSharding(mesh, mesh_axes)
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def setup_sharded_pytree(
    pytree: Any = None, reverse_devices: bool = False, devices: Any = None
) -> tuple[Any, Any, Any]:
    """Return a tree sharded over the devices, its meshes and its axes."""
    found = list(jax.devices() if devices is None else devices)
    order = np.array(found[::-1] if reverse_devices else found)
    line = jax.sharding.Mesh(order, ("x",))
    square = jax.sharding.Mesh(order.reshape(2, -1), ("x", "y"))
    meshes = {"a": line, "b": line, "c": {"a": square, "e": square}}
    both = jax.P("x", "y")
    axes = {"a": jax.P(None), "b": jax.P("x"), "c": {"a": both, "e": both}}
    given = setup_pytree() if pytree is None else pytree
    return jax.tree.map(create_sharded_array, given, meshes, axes), meshes, axes


def apply_function(tree: Any, function: Any) -> Any:
    """Apply a function to each array on its devices."""
    return jax.tree.map(jax.jit(function), tree)


replicate_sharded_array = absent("test_utils.replicate_sharded_array", "use jax.device_put")


# Directories


def print_directory(directory: Any, level: int = 0) -> None:
    """Log the files below a directory. Raises ValueError if it is none."""
    path = as_path(directory)
    if not path.is_dir():
        raise ValueError(f"Directory {path} does not exist, or is none.")
    for child in sorted(path.rglob("*")):
        _log.info("%s", child.relative_to(path))


def save_fake_tmp_dir(
    directory: Any,
    step: int,
    item: str,
    subdirs: list[str] | None = None,
    step_prefix: str | None = None,
) -> Any:
    """Make the directories that an interrupted Orbax save leaves. Return the item's."""
    root = as_path(directory) / f"{step_prefix or ''}{step}{TMP_DIR_SUFFIX}"
    made = create_tmp_directory(root, root) / f"{item}{TMP_DIR_SUFFIX}"
    made.mkdir()
    for name in subdirs or ():
        (made / name).mkdir(parents=True)
    return made


# Settings within a test


@contextlib.contextmanager
def ocdbt_checkpoint_context(use_ocdbt: bool, ts_context: Any) -> Generator[None]:
    """Do nothing: it is about Orbax's own files."""
    yield


@contextlib.contextmanager
def register_type_handler(ty: Any, handler: Any, func: Any = None) -> Generator[None]:
    """Register a type handler for the time of a test."""
    with global_type_handler_registry_context():
        type_handlers.register_type_handler(ty, handler, func, override=True)
        yield


@contextlib.contextmanager
def global_type_handler_registry_context() -> Generator[None]:
    """Forget the type handlers that are registered inside."""
    before = type_handlers.GLOBAL_REGISTRY.handlers
    try:
        yield
    finally:
        type_handlers.GLOBAL_REGISTRY.replace(before)
