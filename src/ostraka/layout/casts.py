"""The casts of `dtype=`: the leaves and their dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ostraka.common.dtypes import DTYPES, is_floating
from ostraka.layout.spec import LeafSpec
from ostraka.tree import patterns

DtypeRule = Any
"""A dtype for all floating-point arrays, or a mapping from path patterns to dtypes."""


def check_dtype_rule(rule: DtypeRule, leaves: Sequence[LeafSpec] | None = None) -> None:
    """Raise ValueError if a rule names something else than floating-point dtypes.

    Given the leaves, also if one of its patterns matches no floating-point array.
    """
    for found in patterns.rules_in(rule):
        floating_dtype(found, "")
    if leaves is not None and isinstance(rule, Mapping):
        paths = [leaf.path for leaf in leaves if may_cast(leaf)]
        table, what = cast("Mapping[str, Any]", rule), "floating-point array of the tree"
        patterns.refuse_unmatched("dtype", table, paths, what)


def may_cast(spec: LeafSpec) -> bool:
    """True if `dtype=` may cast this leaf. Scalars keep their dtype."""
    return spec.kind in ("jax", "numpy") and is_floating(spec.dtype) and bool(spec.shape)


def cast_leaf(spec: LeafSpec, rule: DtypeRule) -> LeafSpec:
    """The leaf as `dtype=` has it saved. Only floating-point arrays change."""
    wanted = floating_dtype(rule, spec.path)
    if wanted is None or wanted == spec.dtype or not may_cast(spec):
        return spec
    return replace(spec, dtype=wanted, cast_from=spec.dtype)


def floating_dtype(rule: DtypeRule, path: str) -> str | None:
    """The dtype that a rule gives to a path. Raises ValueError for what is not floating-point."""
    found = patterns.lookup(rule, path)
    if found is None:
        return None
    try:
        name = found if isinstance(found, str) else np.dtype(found).name
    except TypeError as error:
        raise TypeError(f"dtype is {found!r:.80}; it must be a dtype, as bfloat16 is") from error
    if name not in DTYPES or not is_floating(name):
        raise ValueError(f"dtype is {name!r}; it must be a floating-point dtype, as bfloat16 is")
    return name
