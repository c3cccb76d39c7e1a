"""Restore into existing dicts, lists and NNX objects by changing them in place.

A mutable container keeps its identity and gets the new values. An immutable one, such as a tuple or
a state of optax, is rebuilt and put into the nearest mutable container above it. Old arrays are
freed as new ones arrive, so memory never holds all of the old and the new state.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from ostraka.errors import InvalidTree, name_few
from ostraka.live.nnx import put_items, put_value
from ostraka.live.parse import BUILTIN, is_array, parse
from ostraka.tree.nodes import (
    ROOT,
    Branch,
    Kept,
    Leaf,
    Node,
    Stateful,
    leaves_of,
    mapped,
    rebuild,
    unwrapped,
)
from ostraka.tree.patterns import Patterns, selects


@dataclass(frozen=True, slots=True)
class Outline:
    """The shape, dtype and sharding of a JAX array, without keeping it alive."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    committed: bool
    format: Any = None


class _Slot(NamedTuple):
    """A place in a mutable container."""

    container: Any
    key: Any


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """An immutable container, which is made anew at the end."""

    slot: _Slot
    branch: Node
    """Every object below that keeps its identity is one value."""
    paths: frozenset[str]
    """The leaves that change with it."""


class InPlace:
    """A tree, ready to take new values by path.

    Raises InvalidTree for a leaf that `only` selects and that can't change in place.
    """

    def __init__(self, tree: Any, only: Patterns | None = None):
        parsed = parse(tree)
        self._root = tree
        self._slots: dict[str, _Slot] = {}
        """The places of leaves in dicts and lists, by path."""
        self._rebuilt: list[_Rebuilt] = []
        self._values: dict[str, Any] = {}
        """Current values of leaves that only a rebuilt container or object changes, by path."""
        self._last: dict[str, Any] = {}
        """New plain values of slots. They change at the end, when all arrays are in place."""
        self._changed: set[str] = set()
        self._containers: dict[str, Any] = {}
        objects: list[Branch] = []
        without: list[Leaf] = []
        self._look(parsed, tree, objects, without)
        _refuse_immutable([leaf for leaf in without if only is None or selects(only, leaf.path)])
        self._variables = {o.children[0].path: o.owner for o in objects if _has_one_leaf(o)}
        self._others = [o for o in objects if not _has_one_leaf(o) and any(leaves_of(o))]
        """Objects that are changed at the end."""
        self._values |= {
            leaf.path: unwrapped(leaf.value) for o in self._others for leaf in leaves_of(o)
        }
        self._check_changeable()
        self.template = self._without_arrays(parsed)
        """The same tree without its arrays: it must not keep the old ones alive."""

    def put(self, path: str, value: Any) -> None:
        if path in self._variables:
            put_value(self._variables[path], value)
        elif path not in self._slots:
            if self._values[path] is not value:
                self._values[path] = value
                self._changed.add(path)
        elif is_array(value):
            container, key = self._slots[path]
            container[key] = value
        else:
            self._last[path] = value

    def finish(self) -> Any:
        """Put the remaining values into their objects. Returns the tree.

        These are parts of a variable's value, plain arrays of a module, immutable containers, and
        plain values.
        """
        for branch in self._others:
            self._put_into(branch)
        for made in self._rebuilt:
            if made.paths & self._changed:
                container, key = made.slot
                container[key] = rebuild(made.branch, self._values)
        for path, value in self._last.items():
            container, key = self._slots[path]
            container[key] = value
        return self._root

    def _look(self, node: Node, value: Any, objects: list[Branch], held: list[Leaf]) -> Node:
        """Note how each leaf changes: in a slot, by an object, or with the container around it.

        Adds NNX objects to `objects`, and leaves of the last kind to `held`. Returns the node with
        each object that keeps its identity as one value.
        """
        if isinstance(node, Leaf):
            held.append(node)
            self._values[node.path] = unwrapped(node.value)
            return replace(node, value=None)
        if node.owner is not None:
            objects += _changeable(node)
            return _constant(node, node.owner)
        items = _items_of(node, value)
        if not _is_mutable(node, value, items):
            below = zip(node.children, items, strict=True)
            children = tuple([self._look(child, item, objects, held) for child, item in below])
            return replace(node, children=children)
        self._containers[node.path] = value
        for key, child, item in zip(node.keys, node.children, items, strict=True):
            slot = _Slot(value, key)
            if isinstance(child, Leaf):
                self._slots[child.path] = slot
                continue
            inside: list[Leaf] = []
            made = self._look(child, item, objects, inside)
            if inside:
                paths = frozenset(leaf.path for leaf in inside)
                self._rebuilt.append(_Rebuilt(slot, made, paths))
        return _constant(node, value)

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

    def _without_arrays(self, tree: Node) -> Node:
        """The tree with outlines of its arrays. Mutable containers are owners of their branches."""
        blanks: dict[int, Any] = {}
        """Blank arrays by the id of a numpy array. A shared array has one."""

        def change(node: Node) -> Node:
            if isinstance(node, Branch):
                container = self._containers.get(node.path)
                is_one = node.owner is None and container is not None
                return replace(node, owner=container) if is_one else node
            value = node.value
            if isinstance(value, jax.Array):
                layout = getattr(value, "format", None)
                value = Outline(value.shape, value.dtype, value.sharding, value.committed, layout)
            elif isinstance(value, np.ndarray):
                blank = np.broadcast_to(np.zeros((), value.dtype), value.shape)
                value = blanks.setdefault(id(value), blank)
            return replace(node, value=value)

        return mapped(tree, change)


def _refuse_immutable(leaves: list[Leaf]) -> None:
    """Raise InvalidTree for leaves without a mutable container above them.

    None stays None, and functions and objects with a state stay the same objects.
    """
    paths = [
        leaf.path
        for leaf in leaves
        if leaf.value is not None and not isinstance(leaf.value, Kept | Stateful)
    ]
    if paths:
        what = "the tree itself" if paths == [ROOT] else f"leaf {paths[0]!r}"
        rest = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        raise InvalidTree(
            f"into= can't change {what}{rest} in place: no dict, list or NNX object is above it to "
            "take the new value; write state = ostraka.restore(path, like=state)"
        )


def _items_of(branch: Branch, value: Any) -> list[Any]:
    """The items of a container, in the order of the children of its branch."""
    if isinstance(value, dict):
        return list(value.values())
    if type(value) in BUILTIN:
        return list(value)
    return jax.tree_util.tree_flatten(value, is_leaf=lambda item: item is not value)[0]


def _is_mutable(branch: Branch, value: Any, items: list[Any]) -> bool:
    """True if the items of a container can be replaced by their keys."""
    if type(value) in BUILTIN:
        return branch.kind != "tuple"
    if not isinstance(value, MutableMapping):
        return False
    # A class of the program. JAX knows its items by any keys, maybe not by those of the mapping.
    return list(value) == list(branch.keys) and all(
        value[key] is item for key, item in zip(branch.keys, items, strict=True)
    )


def _constant(branch: Branch, value: Any) -> Branch:
    """A branch that rebuilds as the same object."""
    return Branch(branch.kind, branch.path, (), lambda _: value)


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
