"""Which leaves of a checkpoint are parameters, which are the optimizer's, and the rest. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from ostraka.common.dtypes import is_inexact
from ostraka.formats.source import Saved, Source
from ostraka.layout.spec import LeafSpec
from ostraka.tree.nodes import ArrayNumber, Branch, Leaf

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


def totals_by_group(source: Source, groups: Mapping[int, str]) -> dict[str, Total]:
    """The totals of the `groups_of` a source that have arrays."""
    members: dict[str, list[LeafSpec]] = {PARAMETERS: [], OPTIMIZER: [], OTHER: []}
    for number, group in groups.items():
        members[group].append(source.saved.leaves[number])
    return {
        group: Total(
            len(leaves),
            sum(prod(leaf.shape) for leaf in leaves),
            sum(leaf.nbytes for leaf in leaves),
            frozenset(leaf.dtype for leaf in leaves),
        )
        for group, leaves in members.items()
        if leaves
    }


def groups_of(source: Source) -> dict[int, str]:
    """The group of each array, by its number, which an array with several paths has once.

    If the tree has `nnx.Param`s, those are the parameters. Else all floating-point arrays are that
    do not belong to an optimizer.
    """
    kinds: dict[int, str] = {}
    _note_kinds(source.saved, source.tree, "", "", kinds)
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


def _note_kinds(
    saved: Saved, node: Branch | Leaf, above: str, name: str, kinds: dict[int, str]
) -> None:
    """Note for each array below a node: `optimizer`, the class of its NNX variable, or nothing.

    At the first of its paths: later ones only repeat it.
    """
    is_optimizer = above == OPTIMIZER or name.lower() in _OPTIMIZERS
    if isinstance(node, Leaf):
        if isinstance(node.value, ArrayNumber):
            number = node.value.number
            if node.path == saved.leaves[number].path:
                kinds[number] = OPTIMIZER if is_optimizer else above
        return
    module, cls = node.cls or ("", "")
    kind = above
    if is_optimizer or module.startswith("optax"):
        kind = OPTIMIZER
    elif node.kind == "variable":
        kind = OPTIMIZER if cls.startswith("Opt") else cls
    for child in node.children:
        own = child.path.rpartition("/")[2] if len(child.path) > len(node.path) else name
        _note_kinds(saved, child, kind, own, kinds)
