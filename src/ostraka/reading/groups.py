"""Which arrays of a checkpoint are parameters, which are the optimizer's, and the rest. No JAX."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ostraka.common.dtypes import is_inexact
from ostraka.formats.source import Saved, Source
from ostraka.tree.nodes import ArrayNumber, Leaf, Node

PARAMETERS = "parameters"
OPTIMIZER = "optimizer"
OTHER = "other"

_OPTIMIZERS = frozenset({"optimizer", "opt_state", "optimizer_state", "opt", "optim", "mu", "nu"})
"""Names above the arrays of an optimizer."""


class Total(NamedTuple):
    """The arrays of one group."""

    arrays: int = 0
    elements: int = 0
    nbytes: int = 0
    dtypes: frozenset[str] = frozenset()


def totals_by_group(source: Source) -> dict[str, Total]:
    """The totals of the groups that have arrays. An array with several paths counts once."""
    found = {group: Total() for group in (PARAMETERS, OPTIMIZER, OTHER)}
    for number, group in groups_of(source).items():
        leaf = source.saved.leaves[number]
        total = found[group]
        found[group] = Total(
            total.arrays + 1,
            total.elements + prod(leaf.shape),
            total.nbytes + leaf.nbytes,
            total.dtypes | {leaf.dtype},
        )
    return {group: total for group, total in found.items() if total.arrays}


def groups_of(source: Source) -> dict[int, str]:
    """The group of each array, by its number.

    If the tree has `nnx.Param`s, those are the parameters. Else all floating-point arrays are that
    do not belong to an optimizer.
    """
    kinds = dict(_kinds_below(source.saved, source.tree, "", ""))
    has_params = "Param" in kinds.values()
    found: dict[int, str] = {}
    for number, kind in kinds.items():
        group = OTHER
        if kind == OPTIMIZER:
            group = OPTIMIZER
        elif kind == "Param" or (not has_params and is_inexact(source.saved.leaves[number].dtype)):
            group = PARAMETERS
        found[number] = group
    return found


def _kinds_below(saved: Saved, node: Node, above: str, name: str) -> Iterator[tuple[int, str]]:
    """For each array below a node: `optimizer`, or the class of its NNX variable, or nothing.

    At the first of its paths: later ones only repeat it.
    """
    if isinstance(node, Leaf):
        if isinstance(node.value, ArrayNumber):
            number = node.value.number
            if node.path == saved.leaves[number].path:
                kind = OPTIMIZER if name.lower() in _OPTIMIZERS else above
                yield number, kind
        return
    kind = above
    if above != OPTIMIZER:
        module, cls = node.cls or ("", "")
        if name.lower() in _OPTIMIZERS or module.startswith("optax"):
            kind = OPTIMIZER
        elif node.kind == "variable":
            kind = OPTIMIZER if cls.startswith("Opt") else cls
    for child in node.children:
        own = child.path[len(node.path) :].lstrip("/") if node.path else child.path
        yield from _kinds_below(saved, child, kind, own or name)
