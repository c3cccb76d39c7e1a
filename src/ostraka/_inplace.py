"""Restore into objects that are there already: NNX variables are changed in place.

Old arrays are let go as new ones arrive, so that old and new state are never both whole in memory.
What is not part of an NNX object comes back in the tree that is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ostraka._nodes import ROOT, Branch, Leaf, Node, leaves_of, mapped, rebuild, unwrapped
from ostraka.errors import InvalidTree


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
        self._variables: dict[str, Callable[[list[Any]], None]] = {}
        self._rest: list[Branch] = []
        for branch in _updatable(parsed):
            self._collect(branch)
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
        update = self._variables.get(path)
        if update is None:
            self._values[path] = value
        else:
            update([value])

    def finish(self) -> Any:
        """Put what is not the whole value of a variable; returns the tree.

        That is parts of a variable's value, plain arrays of a module, and what is no NNX object.
        """
        for branch in self._rest:
            _update(branch, self._values)
        return rebuild(self._outer, self._values)

    def _collect(self, branch: Branch) -> None:
        assert branch.update is not None
        only = branch.children[0] if len(branch.children) == 1 else None
        if branch.kind == "variable" and isinstance(only, Leaf):
            self._variables[only.path] = branch.update
        elif any(True for _ in leaves_of(branch)):
            self._rest.append(branch)

    def _check_changeable(self) -> None:
        """Refuse before anything is changed: put the same values back, as `finish` will others."""
        for branch in self._rest:
            try:
                _update(branch, self._values)
            except (ValueError, TypeError, AttributeError) as error:
                paths = [leaf.path for leaf in leaves_of(branch)]
                shown = ", ".join(repr(path) for path in paths[:3])
                raise InvalidTree(
                    f"into= can't change the object at {branch.path or ROOT!r} in place, which has "
                    f"values of its own besides variables (one of {shown}): {error}; restore it "
                    "with like=, or make them variables"
                ) from error


def _update(branch: Branch, values: dict[str, Any]) -> None:
    assert branch.update is not None
    branch.update([rebuild(child, values) for child in branch.children])


def _updatable(node: Node) -> Iterator[Branch]:
    """The outermost branches that can be changed in place, as fine as they reach every leaf."""
    if isinstance(node, Leaf):
        return
    if node.update is not None and (node.kind == "variable" or not _all_in_variables(node)):
        yield node
        return
    for child in node.children:
        yield from _updatable(child)


def _all_in_variables(node: Node) -> bool:
    """Whether every leaf below is the whole value of some variable."""
    if isinstance(node, Leaf):
        return False
    if node.kind == "variable":
        return isinstance(node.children[0], Leaf)
    return all(_all_in_variables(child) for child in node.children)


def _without_objects(tree: Node) -> Node:
    """The tree with NNX objects as they are, whatever is in them."""

    def change(node: Node) -> Node:
        if isinstance(node, Leaf):
            return replace(node, value=None)
        if node.update is None:
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
