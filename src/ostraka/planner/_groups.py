"""What a state is made of: the bytes of its parts, and of which dtypes they are. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ostraka._spec import DTYPES, LeafSpec, is_floating

_TOP = "optimizer"
_WIDE = "float32"


def bytes_by_group(leaves: Sequence[LeafSpec]) -> dict[str, dict[str, int]]:
    """By topmost name, an optimizer's moments apart: the bytes of each dtype that is there."""
    groups: dict[str, dict[str, int]] = {}
    for leaf in leaves:
        group = groups.setdefault(_group_of(leaf.path), {})
        group[leaf.dtype] = group.get(leaf.dtype, 0) + leaf.nbytes
    return groups


def _group_of(path: str) -> str:
    """`optimizer mu` for `optimizer/opt_state/1/0/mu/kernel`; else the topmost name."""
    top, *names = path.split("/")
    if top != _TOP:
        return top
    # Transformations in a chain, and chains within them, have numbers.
    named = [name for name in names if name != "opt_state" and not name.isdigit()]
    return f"{top} {named[0]}" if len(named) > 1 else top


def bytes_in_float32(leaves: Sequence[LeafSpec], *, all_leaves: bool) -> int:
    """The bytes of all arrays if narrower floats, of the optimizer or of all, were float32."""
    return sum(
        DTYPES[_WIDE].nbytes(prod(leaf.shape))
        if _is_narrow(leaf) and (all_leaves or leaf.path.startswith(f"{_TOP}/"))
        else leaf.nbytes
        for leaf in leaves
    )


def _is_narrow(leaf: LeafSpec) -> bool:
    return is_floating(leaf.dtype) and DTYPES[leaf.dtype].bits < DTYPES[_WIDE].bits
