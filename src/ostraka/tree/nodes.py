"""A tree taken apart: branches, leaves, and how to walk, cut and put them together. No JAX."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ostraka.errors import InvalidTree
from ostraka.tree.json_values import Unwritable, key_text

ROOT = "."
"""The path of a tree that is a single leaf."""

MAX_DEPTH = 200
"""The most containers inside each other that every reader can follow."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the tree: an array, or a value that `_METADATA` holds."""

    path: str
    value: Any
    spec: Any = None
    """A PartitionSpec that the tree itself names for this leaf, as NNX variables do."""


BranchKind = (
    Literal["dict", "ordered_dict", "defaultdict", "state", "list", "tuple"]
    | Literal["namedtuple", "dataclass", "node", "nnx", "variable"]
)
"""The containers that docs/reference/format.md lists."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A container with its items, and a function that makes another one like it."""

    kind: BranchKind
    path: str
    children: tuple[Node, ...]
    rebuild: Callable[[list[Any]], Any]
    keys: Sequence[Any] = ()
    """A key for each child. An only child at the path of its parent has none."""
    cls: tuple[str, str] | None = None
    """Module and name of its class, where the kind does not say it."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further entries in `_METADATA`, as JSON."""
    owner: Any = None
    """The NNX object itself, which other paths of the tree may share.

    In a template of `into=` also the dict or list itself.
    """
    rebuild_together: Callable[[list[Any], list[list[Any]]], list[Any]] | None = None
    """Makes several of this kind from owners and items, which share the same objects."""


Node = Branch | Leaf


@dataclass(frozen=True, slots=True)
class ArrayNumber:
    """Stands for an array leaf of the checkpoint."""

    number: int


@dataclass(frozen=True, slots=True)
class SavedStates:
    """Stands for an object with a state: the state that each process saved."""

    states: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stateful:
    """An object with `get_state` and `set_state`, such as a data iterator."""

    owner: Any


@dataclass(frozen=True, slots=True)
class Kept:
    """A function, or a node without values. It comes from the template, not from a checkpoint."""

    value: Any
    """The value in the template. A saved tree has None."""
    name: str
    """For people."""
    is_structure: bool


@dataclass(frozen=True, slots=True)
class UnreadableLeaf:
    """Stands for an unreadable leaf of a checkpoint in another format."""

    why: str
    shape: tuple[int, ...] = ()
    """The shape of an array, if it is known."""


# Walking


def leaves_of(node: Node) -> Iterator[Leaf]:
    """The leaves in tree order."""
    if isinstance(node, Leaf):
        yield node
        return
    for child in node.children:
        if isinstance(child, Leaf):  # most are, and a generator for each would cost more than it
            yield child
        else:
            yield from leaves_of(child)


def branches_of(node: Node) -> Iterator[Branch]:
    """The branches in tree order, each before those below it."""
    if isinstance(node, Branch):
        yield node
        for child in node.children:
            yield from branches_of(child)


def has_values(node: Node) -> bool:
    """True if a tree has an array, the state of an object, or a plain value other than None.

    An object of a class without fields counts: optax's EmptyState says that there is no state.
    """
    for leaf in leaves_of(node):
        if leaf.value is not None and not isinstance(leaf.value, Kept):
            return True
    return any(
        branch.about.get("static")
        or (branch.kind in ("namedtuple", "dataclass") and not branch.children)
        for branch in branches_of(node)
    )


def rebuild(node: Node, values: Mapping[str, Any]) -> Any:
    """The tree again, with other values by path. Shared objects stay shared."""
    made: dict[int, Any] = {}
    """By identity of the owner."""

    def make(node: Node) -> Any:
        if isinstance(node, Leaf):
            return values[node.path]
        if node.owner is not None and id(node.owner) in made:
            return made[id(node.owner)]
        found = node.rebuild([make(child) for child in node.children])
        if node.owner is not None:
            made[id(node.owner)] = found
        return found

    graphs = [branch for branch in branches_of(node) if branch.rebuild_together is not None]
    if len(graphs) > 1 and graphs[0].rebuild_together is not None:
        owners = [graph.owner for graph in graphs]
        items = [[make(child) for child in graph.children] for graph in graphs]
        made |= zip(map(id, owners), graphs[0].rebuild_together(owners, items), strict=True)
    return make(node)


def check_unique(leaves: Sequence[Leaf]) -> None:
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.path in seen:
            raise InvalidTree(
                f"two leaves have the path {leaf.path!r}: keys such as 0 and '0' in one dict look "
                "the same in a path; rename one"
            )
        seen.add(leaf.path)


def segment(key: Any, path: str) -> str:
    """A key as a part of a path. Raises InvalidTree for a key that can't be written."""
    if type(key) is str and key.isascii():
        return escape(key)
    try:
        if type(key) is int:
            return str(key)
        text = key_text(key)
        text.encode()
    except (Unwritable, ValueError) as error:  # a ValueError for surrogates, or too many digits
        shown = "a key" if isinstance(key, int) else f"the key {key!r:.80}"
        raise InvalidTree(
            f"the container at {path or ROOT!r} has {shown}, which can't be written "
            f"({error}); keys must be text, numbers, enum members, None, or tuples of those"
        ) from error
    return escape(text)


def escape(text: str) -> str:
    """The text of a key as a part of a path."""
    if text == "__metadata__":
        return f"~2{text}"  # safetensors has this name for something else
    if "~" not in text and "/" not in text:
        return text
    return text.replace("~", "~0").replace("/", "~1")


def unescape(segment: str) -> str:
    """The text of the key that `segment` names in a path."""
    if segment == "~":
        return ""  # an empty key at the top of the tree, see `join`
    return segment.removeprefix("~2").replace("~1", "/").replace("~0", "~")


def join(path: str, segment: str) -> str:
    """The path of an item, from the path of its container and the segment of its key."""
    return f"{path}/{segment}" if path else segment or "~"


def split(path: str) -> list[str]:
    """The keys on the way to a leaf, as text."""
    return [unescape(segment) for segment in path.split("/")]


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """The tree with every node changed, those below first."""
    if isinstance(node, Branch):
        children = tuple([mapped(child, change) for child in node.children])
        node = dataclasses.replace(node, children=children)
    return change(node)


def at_path(branch: Branch, path: str) -> Node:
    """The same branch at another path. An empty path makes it a tree by itself."""

    def move(node: Node) -> Node:
        below = "" if node.path == ROOT else node.path[len(branch.path) :]
        here = f"{path}{below}" if path else below.removeprefix("/")
        return dataclasses.replace(node, path=here or ROOT if isinstance(node, Leaf) else here)

    return mapped(branch, move)


def prune(node: Node, wanted: Callable[[Leaf], bool]) -> Node | None:
    """The tree with the wanted leaves only, or None if there are none.

    A sequence that loses items becomes a dict of the remaining ones, by their numbers.
    """
    if isinstance(node, Leaf):
        return node if wanted(node) else None
    kept = [prune(child, wanted) for child in node.children]
    left = [(number, child) for number, child in enumerate(kept) if child is not None]
    children = tuple(child for _, child in left)
    if len(left) == len(kept):
        return dataclasses.replace(node, children=children)
    if not left:
        return None
    keys = [node.keys[number] for number, _ in left]
    return Branch("dict", node.path, children, dict_builder(keys), keys)


def dict_builder(
    keys: Iterable[Any], kind: Callable[[Iterator[tuple[Any, Any]]], Any] = dict
) -> Callable[[list[Any]], Any]:
    return lambda items: kind(zip(keys, items, strict=True))


def unwrapped(value: Any) -> Any:
    """The object that a leaf of a parsed tree stands for."""
    if isinstance(value, Stateful):
        return value.owner
    return value.value if isinstance(value, Kept) else value


# What occurs at several places


@dataclass(frozen=True, slots=True)
class Shared:
    """Objects that a tree has several times: from each further path to the first."""

    variables: Mapping[str, str]
    """Variables, and containers that a restore changes in place."""
    arrays: Mapping[str, str]
    """Including the arrays of shared variables."""


def is_shareable_branch(branch: Branch) -> bool:
    """True for a variable, and for a container that a restore changes in place."""
    return branch.owner is not None and branch.kind not in ("nnx", "state")


def find_shared(node: Node, is_shareable: Callable[[Any], bool]) -> Shared:
    """Find objects at several paths of a tree, among the leaves that pass `is_shareable`."""
    places: dict[int, Node] = {}
    """The first node of each array or variable, by identity."""
    variables: dict[str, str] = {}
    arrays: dict[str, str] = {}

    def look(node: Node) -> None:
        if isinstance(node, Leaf):
            if is_shareable(node.value):
                first = places.setdefault(id(node.value), node)
                if first is not node:
                    arrays[node.path] = first.path
            return
        first = places.setdefault(id(node.owner), node) if is_shareable_branch(node) else node
        if first is node:
            for child in node.children:
                look(child)
            return
        variables[node.path] = first.path
        for here, there in zip(leaves_of(node), leaves_of(first), strict=True):
            arrays[here.path] = arrays.get(there.path, there.path)

    look(node)
    return Shared(variables, arrays)


# Trees from paths


def nest(entries: Iterable[tuple[Sequence[str], Any]]) -> Any:
    """Dicts in dicts, from the keys on the way to each value. A value without keys is the tree.

    Raises InvalidTree if two values have the same keys, or one lies above another.
    """
    root: dict[str, Any] = {}
    for keys, value in entries:
        if not keys:
            return value
        node: Any = root
        for key in keys[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or keys[-1] in node:
            raise InvalidTree(
                f"a tree can't have a leaf at {'/'.join(keys)!r} and another at, above or below "
                "that path; rename one"
            )
        node[keys[-1]] = value
    return root


def natural_order(name: str) -> tuple[list[str | int], str]:
    """A sort key that compares numbers in names by their value: layer 2 before layer 10."""
    parts = _NUMBER.split(name)
    return [int(part) if n % 2 else part for n, part in enumerate(parts)], name


_NUMBER = re.compile(r"([0-9]{1,9})")


def flat_tree(leaves: Mapping[str, tuple[str, Any]]) -> Branch:
    """One dict, from the key and the value of each leaf by path."""
    keys = [key for key, _ in leaves.values()]
    children = tuple(Leaf(path, value) for path, (_, value) in leaves.items())
    return Branch("dict", "", children, dict_builder(keys), keys)


def nested_tree(leaves: Mapping[str, tuple[str, Any]]) -> Node:
    """Dicts in dicts in natural order. A number becomes an int key, as in NNX lists.

    Raises InvalidTree if one leaf lies above another.
    """

    def build(node: Any, path: str) -> Node:
        if isinstance(node, Leaf):
            return node
        names = sorted(node, key=natural_order)
        keys = [_key(name) for name in names]
        children = tuple([build(node[name], join(path, name)) for name in names])
        return Branch("dict", path, children, dict_builder(keys), keys)

    found = {path: Leaf(path, value) for path, (_, value) in leaves.items()}
    if [*found] == [ROOT]:
        return found[ROOT]
    return build(nest((path.split("/"), leaf) for path, leaf in found.items()), "")


def _key(name: str) -> str | int:
    """The key that a segment of a path stands for."""
    if name.isascii() and name.isdigit() and (name == "0" or name[0] != "0") and len(name) < 10:
        return int(name)
    return unescape(name)
