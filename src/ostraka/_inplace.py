"""Restore into objects that are there already: NNX variables are changed in place.

Old arrays are let go as new ones arrive, so that old and new state are never both whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ostraka._document import Branch, Leaf, Stateful, leaves_of, rebuild
from ostraka.errors import InvalidTree


class InPlace:
    """The variables of a tree, ready to take new values by path."""

    def __init__(self, parsed: Branch | Leaf):
        self._variables: dict[str, Callable[[list[Any]], None]] = {}
        self._rest: list[tuple[Branch, list[str]]] = []
        self._values: dict[str, Any] = {}
        """Starts with what is there: what is not restored stays."""
        for branch in _updatable(parsed):
            self._collect(branch)
        self._check_reached(parsed)
        self.template = _without_arrays(parsed)
        """The same tree with shapes instead of arrays: it must not keep the old ones alive."""

    def put(self, path: str, value: Any) -> None:
        update = self._variables.get(path)
        if update is None:
            self._values[path] = value
        else:
            update([value])

    def finish(self) -> None:
        """Put what is not the whole value of a variable: parts of one, plain arrays of a module."""
        for branch, _ in self._rest:
            assert branch.update is not None
            branch.update([rebuild(child, self._values) for child in branch.children])

    def _collect(self, branch: Branch) -> None:
        assert branch.update is not None
        only = branch.children[0] if len(branch.children) == 1 else None
        if isinstance(only, Leaf):
            self._variables[only.path] = branch.update
            return
        leaves = list(leaves_of(branch))
        if leaves:
            self._rest.append((branch, [leaf.path for leaf in leaves]))
            self._values.update({leaf.path: leaf.value for leaf in leaves})

    def _check_reached(self, parsed: Branch | Leaf) -> None:
        reached = {*self._variables, *(path for _, paths in self._rest for path in paths)}
        for leaf in leaves_of(parsed):
            if leaf.path not in reached and not isinstance(leaf.value, Stateful):
                raise InvalidTree(
                    f"into= changes NNX modules, optimizers and variables in place; leaf "
                    f"{leaf.path!r} is not part of one: leave it out, or use like="
                )


def _updatable(node: Branch | Leaf) -> Iterator[Branch]:
    """The outermost branches that can be changed in place, as fine as they reach every leaf."""
    if isinstance(node, Leaf):
        return
    if node.update is not None and not _all_in_variables(node):
        yield node
        return
    if node.update is not None and "variable" in node.kind:
        yield node
        return
    for child in node.children:
        yield from _updatable(child)


def _all_in_variables(node: Branch | Leaf) -> bool:
    """Whether every leaf below is the whole value of some variable."""
    if isinstance(node, Leaf):
        return False
    if "variable" in node.kind:
        return isinstance(node.children[0], Leaf)
    return all(_all_in_variables(child) for child in node.children)


def _without_arrays(node: Branch | Leaf) -> Branch | Leaf:
    if isinstance(node, Branch):
        return replace(node, children=tuple(_without_arrays(child) for child in node.children))
    value = node.value
    if isinstance(value, jax.Array):
        value = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    elif isinstance(value, np.ndarray):
        value = np.broadcast_to(np.zeros((), value.dtype), value.shape)
    return replace(node, value=value)
