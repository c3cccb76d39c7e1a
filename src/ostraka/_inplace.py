"""Restore into objects that are there already: NNX variables are changed in place.

Old arrays are let go as new ones arrive, so that old and new state are never both whole in memory.
What is not part of an NNX object comes back in the tree that is returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ostraka._nnx import put_items, put_value
from ostraka._nodes import ROOT, Branch, Leaf, Node, leaves_of, mapped, rebuild, unwrapped
from ostraka.errors import InvalidTree, name_few


@dataclass(frozen=True, slots=True)
class Outline:
    """What a restore needs to know of a JAX array that it replaces, without keeping it alive."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    committed: bool


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
        """Of what is no variable. Starts with what is there: what is not restored stays."""
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
        """Put what is not the whole value of a variable; returns the tree.

        That is parts of a variable's value, plain arrays of a module, and what is no NNX object.
        """
        for branch in self._others:
            self._put_into(branch)
        return rebuild(self._outer, self._values)

    def _put_into(self, branch: Branch) -> None:
        put_items(branch, [rebuild(child, self._values) for child in branch.children])

    def _check_changeable(self) -> None:
        """Refuse before anything is changed: put the same values back, as `finish` will others."""
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
    """Whether every leaf below is the whole value of some variable."""
    if isinstance(node, Leaf) or node.kind == "variable":
        return isinstance(node, Branch) and _has_one_leaf(node)
    return all(_all_in_variables(child) for child in node.children)


def _has_one_leaf(branch: Branch) -> bool:
    """Whether it is a variable whose value is a leaf, not a container of some."""
    return branch.kind == "variable" and isinstance(branch.children[0], Leaf)


def _without_objects(tree: Node) -> Node:
    """The tree with NNX objects as they are, whatever is in them."""

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
    """By identity: an array that is at several places has one outline."""

    def change(node: Node) -> Node:
        if isinstance(node, Branch):
            return node
        value = node.value
        if isinstance(value, jax.Array):
            value = Outline(value.shape, value.dtype, value.sharding, value.committed)
        elif isinstance(value, np.ndarray):
            blank = np.broadcast_to(np.zeros((), value.dtype), value.shape)
            value = outlines.setdefault(id(value), blank)
        return replace(node, value=value)

    return mapped(tree, change)
