"""The tree of an Orbax checkpoint: as Ostraka's JSON, and as a template expects it. No JAX.

Without a template the tree is the one that Orbax itself restores. Tuples are lists, named tuples
are dicts, `optax.EmptyState()` is None, keys of dicts are strings, and an NNX variable is a dict
with one entry, `value`. A template supplies what Orbax has lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ostraka.formats.orbax.files import Entry, Key
from ostraka.tree.nodes import (
    MAX_DEPTH,
    ROOT,
    Branch,
    Leaf,
    Node,
    SavedStates,
    Stateful,
    escape,
    join,
    leaves_of,
    mapped,
)

_EMPTY: dict[str, Any] = {
    "Dict": {"dict": [], "items": []},
    "List": {"list": None, "items": []},
    "Tuple": {"tuple": None, "items": []},
}
EMPTY_TYPES = frozenset({*_EMPTY, "None", "NamedTuple"})
ARRAY_TYPES = ("jax.Array", "np.ndarray")


@dataclass(slots=True)
class _Node:
    """A container under construction."""

    children: dict[str, _Node | Entry] = field(default_factory=dict[str, "_Node | Entry"])
    in_sequence: bool = True
    """True if all of its keys are positions in a list or tuple."""


def path_of(keys: Iterable[Key], above: str = "") -> str:
    """The path of a leaf in the tree."""
    path = above
    for key in keys:
        path = join(path, escape(key.text))
    return path or ROOT


def encode_tree(entries: Sequence[Entry], encode_leaf: Callable[[Entry], Any]) -> Any:
    """The tree of an item as JSON, in the form of Ostraka's `_METADATA`. Raises ValueError."""
    if len(entries) == 1 and not entries[0].keys:
        return encode_leaf(entries[0])
    root = _Node()
    for entry in entries:
        if not 0 < len(entry.keys) < MAX_DEPTH:
            raise ValueError(f"a leaf is {len(entry.keys)} levels deep")
        node = root
        for key in entry.keys[:-1]:
            node.in_sequence &= key.in_sequence
            found = node.children.setdefault(key.text, _Node())
            if isinstance(found, Entry):
                raise ValueError(f"{path_of(entry.keys)!r} is below another leaf")
            node = found
        last = entry.keys[-1]
        node.in_sequence &= last.in_sequence
        if node.children.setdefault(last.text, entry) is not entry:
            raise ValueError(f"{path_of(entry.keys)!r} is there twice")
    return _encode(root, encode_leaf)


def _encode(node: _Node | Entry, encode_leaf: Callable[[Entry], Any]) -> Any:
    if isinstance(node, Entry):
        empty = _EMPTY.get(node.value_type)
        return encode_leaf(node) if empty is None else empty
    numbers = [str(number) for number in range(len(node.children))]
    if node.in_sequence and node.children.keys() == {*numbers}:
        items = [_encode(node.children[number], encode_leaf) for number in numbers]
        return {"list": None, "items": items}
    items = [_encode(child, encode_leaf) for child in node.children.values()]
    return {"dict": list(node.children), "items": items}


# With a template


def fit_to(saved: Node, like: Node) -> Node:
    """The saved tree with the paths of `like`, where Orbax has changed them.

    The entry `value` of an NNX variable becomes the variable itself. A None disappears where `like`
    has a container without leaves, such as `optax.EmptyState()` or a masked node.
    """
    return _fit(saved, like, "") or Branch("dict", "", (), dict)


def _fit(saved: Node, like: Node, path: str) -> Node | None:
    while isinstance(like, Branch) and like.kind in ("nnx", "variable"):
        is_variable = like.kind == "variable"
        like = like.children[0]
        if is_variable and isinstance(saved, Branch) and list(saved.keys) == ["value"]:
            saved = saved.children[0]
    if isinstance(saved, Leaf):
        is_nothing = saved.value is None and isinstance(like, Branch)
        if is_nothing and next(leaves_of(like), None) is None:
            return None
        return _fit_states(replace(saved, path=path or ROOT), like)
    known = {child.path: child for child in like.children} if isinstance(like, Branch) else {}
    keys: list[Any] = []
    children: list[Node] = []
    for key, child in zip(saved.keys, saved.children, strict=True):
        below = join(path, escape(str(key)))
        fitted: Node | None = None
        if below in known:
            fitted = _fit(child, known[below], below)
        elif not _is_flax_state(str(key), child):
            fitted = _moved(child, below)
        if fitted is not None:
            keys.append(key)
            children.append(fitted)
    return replace(saved, path=path, keys=keys, children=tuple(children))


def _fit_states(saved: Leaf, like: Node) -> Leaf:
    """The states of a data iterator. Orbax has strings, but some iterators want bytes."""
    wanted = like.value if isinstance(like, Leaf) else None
    if not isinstance(saved.value, SavedStates) or not isinstance(wanted, Stateful):
        return saved
    if not isinstance(wanted.owner.get_state(), bytes):
        return saved
    states = [json.dumps(state, indent=4).encode() for state in saved.value.states]
    return replace(saved, value=SavedStates(tuple(states)))


def _is_flax_state(key: str, child: Node) -> bool:
    """True for an internal field of Flax. Orbax writes it if it saves a module, not its state."""
    return key.startswith("_pytree__") and isinstance(child, Leaf) and child.value is None


def _moved(node: Node, path: str) -> Node:
    """The same tree at another path."""
    above = len(node.path)
    return mapped(node, lambda below: replace(below, path=path + below.path[above:]))
