"""A tree taken apart: branches, leaves, and how to walk, cut and put them together. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ostraka._plain import Unwritable, key_text
from ostraka.errors import InvalidTree

ROOT = "."
"""The path of a tree that is a single leaf."""

MAX_DEPTH = 200
"""How deep containers may lie in each other: what a reader can follow, however it is called."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the tree: an array, or something that is written into `_METADATA` itself."""

    path: str
    value: Any
    spec: Any = None
    """A PartitionSpec that the tree itself names for this leaf, as NNX variables do."""


BranchKind = (
    Literal["dict", "ordered_dict", "defaultdict", "state", "list", "tuple"]
    | Literal["namedtuple", "dataclass", "node", "nnx", "variable"]
)
"""The containers that docs/format.md lists."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A container: what it is, what is in it, and how to make another one like it."""

    kind: BranchKind
    path: str
    children: tuple[Node, ...]
    rebuild: Callable[[list[Any]], Any]
    keys: Sequence[Any] = ()
    """A key for each child; none where the only child has the path of its parent."""
    cls: tuple[str, str] | None = None
    """Module and name of its class, where the kind does not say it."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else `_METADATA` has of it, as JSON."""
    owner: Any = None
    """An NNX object itself: other places of the tree may have the same one."""
    rebuild_together: Callable[[list[Any], list[list[Any]]], list[Any]] | None = None
    """How to make several of this kind, from owners and items, so that they share what those do."""


Node = Branch | Leaf


@dataclass(frozen=True, slots=True)
class ArrayNumber:
    """Stands for an array leaf of the checkpoint."""

    number: int


@dataclass(frozen=True, slots=True)
class SavedStates:
    """Stands for an object with a state of its own: the state that each process saved."""

    states: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stateful:
    """An object with `get_state` and `set_state`, such as a data iterator."""

    owner: Any


@dataclass(frozen=True, slots=True)
class Kept:
    """A function, or a node that is all structure: no checkpoint has it, the template does."""

    value: Any
    """What the template has; in a saved tree, None."""
    name: str
    """For people."""
    is_structure: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """Stands for a leaf that a checkpoint of another format names, and that can't be read."""

    why: str
    shape: tuple[int, ...] = ()
    """Of an array, if it is known."""


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


def rebuild(node: Node, values: Mapping[str, Any]) -> Any:
    """The tree again, with other values by path. What was one object becomes one object."""
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


def join(path: str, segment: str) -> str:
    return f"{path}/{segment}" if path else segment or "~"


def mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """The tree with every node changed, those below first."""
    if isinstance(node, Branch):
        children = tuple([mapped(child, change) for child in node.children])
        node = dataclasses.replace(node, children=children)
    return change(node)


def prune(node: Node, wanted: Callable[[Leaf], bool]) -> Node | None:
    """The tree with the wanted leaves only; None if there are none.

    A sequence that loses items becomes a dict of those that are left, by their numbers.
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
    """What a leaf of a parsed tree stands for."""
    if isinstance(value, Stateful):
        return value.owner
    return value.value if isinstance(value, Kept) else value


# What occurs at several places


@dataclass(frozen=True, slots=True)
class Shared:
    """What is one object in spite of its several places; each place but the first, to the first."""

    variables: Mapping[str, str]
    arrays: Mapping[str, str]
    """Also those of shared variables."""


def find_shared(node: Node, is_shareable: Callable[[Any], bool]) -> Shared:
    """Find the objects that a tree has at several places; `is_shareable` is asked of leaves."""
    places: dict[int, Node] = {}
    """By identity of an array or a variable, where it is first."""
    variables: dict[str, str] = {}
    arrays: dict[str, str] = {}

    def look(node: Node) -> None:
        if isinstance(node, Leaf):
            if is_shareable(node.value):
                first = places.setdefault(id(node.value), node)
                if first is not node:
                    arrays[node.path] = first.path
            return
        first = places.setdefault(id(node.owner), node) if node.kind == "variable" else node
        if first is node:
            for child in node.children:
                look(child)
            return
        variables[node.path] = first.path
        for here, there in zip(leaves_of(node), leaves_of(first), strict=True):
            arrays[here.path] = arrays.get(there.path, there.path)

    look(node)
    return Shared(variables, arrays)
