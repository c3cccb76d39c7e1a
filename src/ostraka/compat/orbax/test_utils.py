"""What tests take from `orbax.checkpoint.test_utils`."""

from __future__ import annotations

import shutil
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._place import as_path
from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


def erase_and_create_empty(directory: Any) -> Any:
    """An empty directory at a path, whatever was there; returns it."""
    path = as_path(directory)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def empty_directory(directory: Any) -> None:
    path = as_path(directory)
    for child in path.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink()


def assert_tree_equal(testclass: Any, expected: Any, actual: Any) -> None:
    """Raise AssertionError unless two trees have the same leaves at the same places."""

    def check(a: Any, b: Any) -> None:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(check, expected, actual)
