"""Shardings that cut arrays into as many parts as there are devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)

_tree: Any = jax.tree


def construct_maximal_shardings(abstract_state: Any, devices: Sequence[Any] | None = None) -> Any:
    """A tree of shardings: each array in as many parts as its shape and the devices allow."""
    where = list(jax.devices() if devices is None else devices)
    return _tree.map(lambda leaf: _maximal(tuple(leaf.shape), where), abstract_state)


def _maximal(shape: tuple[int, ...], devices: Sequence[Any]) -> NamedSharding:
    left = len(devices)
    parts = [1] * len(shape)
    for dimension in sorted(range(len(shape)), key=lambda d: -shape[d]):
        if shape[dimension]:
            parts[dimension] = math.gcd(shape[dimension], left)
            left //= parts[dimension]
    axes = [f"axis_{dimension}" for dimension in range(len(shape))]
    mesh = Mesh(np.array(devices).reshape(*parts, left), (*axes, "replica"))
    spec = (axis if count > 1 else None for axis, count in zip(axes, parts, strict=True))
    return NamedSharding(mesh, PartitionSpec(*spec))
