"""Restore into existing NNX objects by changing their variables in place.

Old arrays are freed as new ones arrive, so memory never holds all of the old and the new state.
Everything else is restored in the returned tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ostraka.errors import InvalidTree, name_few
from ostraka.live.nnx import put_items, put_value
from ostraka.tree.nodes import ROOT, Branch, Leaf, Node, leaves_of, mapped, rebuild, unwrapped


@dataclass(frozen=True, slots=True)
class Outline:
    """The shape, dtype and sharding of a JAX array, without keeping it alive."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    committed: bool
    format: Any = None


class InPlace:
    """The objects of a tree, ready to take new values by path."""

    def __init__(self, parsed: Node):
        objects = list(_changeable(parsed))
        self._variables = {o.children[0].path: o.owner for o in objects if _has_one_leaf(o)}
        self._others = [o for o in objects if not _has_one_leaf(o) and any(leaves_of(o))]
        """Objects that are changed at the end."""
        self._values = {
            leaf.path: unwrapped(leaf.value)
            for leaf in leaves_of(parsed)
            if leaf.path not in self._variables
        }
        """Current values of all leaves outside of variables, by path."""
        self._check_changeable()
        self._outer = _without_objects(parsed)
        self.template = _without_arrays(parsed)
        """The same tree without its arrays: it must not keep the old ones alive."""

    def put(self, path: str, value: Any) -> None:
        if path in self._variables:
            put_value(self._variables[path], value)
        else:
            self._values[path] = value

    def finish(self) -> Any:
        """Put the remaining values into their objects. Returns the tree.

        These are parts of a variable's value, plain arrays of a module, and plain values.
        """
        for branch in self._others:
            self._put_into(branch)
        return rebuild(self._outer, self._values)

    def _put_into(self, branch: Branch) -> None:
        put_items(branch, [rebuild(child, self._values) for child in branch.children])

    def _check_changeable(self) -> None:
        """Refuse objects that can't be changed, by writing their current values back to them."""
        for branch in self._others:
            try:
                self._put_into(branch)
            except (ValueError, TypeError, AttributeError) as error:
                paths = [leaf.path for leaf in leaves_of(branch)]
                raise InvalidTree(
                    f"into= can't change the object at {branch.path or ROOT!r} in place, which has "
                    f"values of its own besides variables (one of {name_few(paths)}): {error}; "
                    "restore it with like=, or make them variables"
                ) from error


def _changeable(node: Node) -> Iterator[Branch]:
    """The NNX objects to change: variables, and whole objects that have other leaves too."""
    if isinstance(node, Leaf):
        return
    if node.kind == "variable" or (node.owner is not None and not _all_in_variables(node)):
        yield node
        return
    for child in node.children:
        yield from _changeable(child)


def _all_in_variables(node: Node) -> bool:
    """True if every leaf below is the whole value of some variable."""
    if isinstance(node, Leaf) or node.kind == "variable":
        return isinstance(node, Branch) and _has_one_leaf(node)
    return all(_all_in_variables(child) for child in node.children)


def _has_one_leaf(branch: Branch) -> bool:
    """True for a variable whose value is a leaf, not a container of leaves."""
    return branch.kind == "variable" and isinstance(branch.children[0], Leaf)


def _without_objects(tree: Node) -> Node:
    """The tree, with each NNX object as one value."""

    def change(node: Node) -> Node:
        if isinstance(node, Leaf):
            return replace(node, value=None)
        if node.owner is None:
            return node
        owner = node.owner
        return Branch(node.kind, node.path, (), lambda _: owner)

    return mapped(tree, change)


def _without_arrays(tree: Node) -> Node:
    outlines: dict[int, Any] = {}
    """Outlines by the id of their array. A shared array has one outline."""

    def change(node: Node) -> Node:
        if isinstance(node, Branch):
            return node
        value = node.value
        if isinstance(value, jax.Array):
            layout = getattr(value, "format", None)
            value = Outline(value.shape, value.dtype, value.sharding, value.committed, layout)
        elif isinstance(value, np.ndarray):
            blank = np.broadcast_to(np.zeros((), value.dtype), value.shape)
            value = outlines.setdefault(id(value), blank)
        return replace(node, value=value)

    return mapped(tree, change)
