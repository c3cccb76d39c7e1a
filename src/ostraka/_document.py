"""The tree as `_METADATA` has it: branches, leaves and values as JSON. No JAX."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ostraka._parallel import with_full_stack
from ostraka._plain import (
    Unwritable,
    decode_key,
    decode_plain,
    decode_scalar,
    encode_key,
    encode_plain,
    encode_scalar,
    is_plain,
    key_text,
    loaded_class,
    text_of_encoded,
)
from ostraka.errors import InvalidTree, UnsupportedFormat

ROOT = "."
"""The path of a tree that is a single leaf."""

_MOST_LEAVES_AGAIN = 1 << 20
MAX_DEPTH = 200
"""How deep containers may lie in each other: what a reader can follow, however it is called."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the tree: an array, or something that is written into `_METADATA` itself."""

    path: str
    value: Any
    spec: Any = None
    """A PartitionSpec that the tree itself names for this leaf, as NNX variables do."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A container: what it is, what is in it, and how to make another one like it."""

    kind: str
    """One of the containers that docs/format.md lists: "dict", "namedtuple", "variable", …"""
    path: str
    children: tuple[Branch | Leaf, ...]
    rebuild: Callable[[list[Any]], Any]
    keys: Sequence[Any] = ()
    """A key for each child; none where the only child has the path of its parent."""
    cls: tuple[str, str] | None = None
    """Module and name of its class, where the kind does not say it."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else `_METADATA` has of it, as JSON."""
    update: Callable[[list[Any]], None] | None = None
    """How to put other items into this very container; None if it can't be changed."""
    owner: Any = None
    """The object itself, if other places of the tree may have the same one."""
    rebuild_together: Callable[[list[Any], list[list[Any]]], list[Any]] | None = None
    """How to make several of this kind, from owners and items, so that they share what those do."""


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
    """An object with `get_state` and `set_state`, such as a data iterator, and its state then."""

    owner: Any
    state: Any


@dataclass(frozen=True, slots=True)
class Kept:
    """A function, or a node that is all structure: no checkpoint has it, the template does."""

    value: Any
    """What the template has; in a saved tree, None."""
    name: str
    """For people."""
    is_structure: bool


# Walking


def leaves_of(node: Branch | Leaf) -> Iterator[Leaf]:
    """The leaves in tree order."""
    if isinstance(node, Leaf):
        yield node
        return
    for child in node.children:
        if isinstance(child, Leaf):  # most are, and a generator for each would cost more than it
            yield child
        else:
            yield from leaves_of(child)


def branches_of(node: Branch | Leaf) -> Iterator[Branch]:
    """The branches in tree order, each before those below it."""
    if isinstance(node, Branch):
        yield node
        for child in node.children:
            yield from branches_of(child)


def rebuild(node: Branch | Leaf, values: Mapping[str, Any]) -> Any:
    """The tree again, with other values by path. What was one object becomes one object."""
    made: dict[int, Any] = {}
    """By identity of the owner."""

    def make(node: Branch | Leaf) -> Any:
        if isinstance(node, Leaf):
            return values[node.path]
        if node.owner is None:
            return node.rebuild([make(child) for child in node.children])
        found = made.get(id(node.owner))
        if found is None:
            found = made[id(node.owner)] = node.rebuild([make(child) for child in node.children])
        return found

    graphs = [branch for branch in branches_of(node) if branch.rebuild_together is not None]
    if len(graphs) > 1:
        together = graphs[0].rebuild_together
        assert together is not None
        items = [[make(child) for child in graph.children] for graph in graphs]
        built = together([graph.owner for graph in graphs], items)
        made |= {id(graph.owner): item for graph, item in zip(graphs, built, strict=True)}
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
    where = f"the container at {path or ROOT!r}"
    try:
        text = key_text(key)
        text.encode()
    except Unwritable as error:
        raise InvalidTree(
            f"{where} has the key {key!r:.80}, which is or has {error}; keys must be text, "
            "numbers, enum members, None, or tuples of those"
        ) from error
    except UnicodeEncodeError as error:
        raise InvalidTree(f"{where} has a key that is not valid Unicode: {key!r}") from error
    except ValueError as error:  # an integer of more digits than Python writes
        raise InvalidTree(f"{where} has a key that is too long: {error}") from error
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


def prune(node: Branch | Leaf, wanted: Callable[[Leaf], bool]) -> Branch | Leaf | None:
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
    keys: Sequence[Any], kind: Callable[[Iterable[tuple[Any, Any]]], Any] = dict
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


def find_shared(node: Branch | Leaf, is_shareable: Callable[[Any], bool]) -> Shared:
    """Find the objects that a tree has at several places; `is_shareable` is asked of leaves."""
    first_variable: dict[int, Branch] = {}
    first_array: dict[int, Leaf] = {}
    variables: dict[str, str] = {}
    arrays: dict[str, str] = {}

    def look(node: Branch | Leaf) -> None:
        if isinstance(node, Leaf):
            if is_shareable(node.value):
                first = first_array.setdefault(id(node.value), node)
                if first is not node:
                    arrays[node.path] = first.path
            return
        if node.kind == "variable" and node.owner is not None:
            first = first_variable.setdefault(id(node.owner), node)
            if first is not node:
                variables[node.path] = first.path
                places = zip(leaves_of(node), leaves_of(first), strict=True)
                arrays.update({here.path: arrays.get(at.path, at.path) for here, at in places})
                return
        for child in node.children:
            look(child)

    look(node)
    return Shared(variables, arrays)


# To JSON


def encode_checked(
    node: Branch | Leaf,
    leaves: Sequence[Leaf],
    numbers: Mapping[str, int],
    variables: Mapping[str, str],
) -> Any:
    """As `encode`. Raises InvalidTree for what a restore could not read again as it is.

    `leaves` are those of the tree, in its order.
    """
    encoded = encode(node, numbers, variables)
    try:
        again = with_full_stack(partial(_decode_again, encoded, len({*numbers.values()})))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidTree(f"the tree could not be read again ({error})") from error
    for leaf, found in zip(leaves, leaves_of(again), strict=True):
        path, value = leaf.path, found.value
        number = numbers.get(path)
        is_array = isinstance(value, ArrayNumber)
        if path != found.path or (number is not None and not (is_array and value.number == number)):
            raise InvalidTree(f"leaf {leaf.path!r} could not be read again: it would be {found}")
    return encoded


_dumps = json.JSONEncoder(allow_nan=False).encode
_KEYED = ("dict", "ordered_dict", "state", "defaultdict")
_NAMED = ("namedtuple", "dataclass", "node")
_SEQUENCES = ("list", "tuple")
_CONTAINERS = frozenset((*_KEYED, *_NAMED, *_SEQUENCES))


def _decode_again(encoded: Any, arrays: int) -> Branch | Leaf:
    read = json.loads(_dumps(encoded))
    return _Decoder(arrays).decode(read, "", 0)


def encode(node: Branch | Leaf, numbers: Mapping[str, int], variables: Mapping[str, str]) -> Any:
    """The tree as JSON; array leaves are their numbers, `variables` those that occur again."""
    if isinstance(node, Leaf):
        number = numbers.get(node.path)
        return _encode_leaf(node) if number is None else number
    if node.kind == "variable" and node.path in variables:
        return {"same_as": variables[node.path]}
    items: list[Any] = []
    for child in node.children:
        number = numbers.get(child.path) if isinstance(child, Leaf) else None
        items.append(encode(child, numbers, variables) if number is None else number)
    if node.kind in _KEYED:
        keys = [key if type(key) is str else encode_key(key) for key in node.keys]
        return {node.kind: keys, **node.about, "items": items}
    described = {node.kind: None if node.cls is None else list(node.cls), **node.about}
    if node.kind in _NAMED:
        described["keys"] = [encode_key(key) for key in node.keys]
    return {**described, "items": items}


def _encode_leaf(leaf: Leaf) -> Any:
    if isinstance(leaf.value, Stateful):
        return {"states": [], "path": leaf.path, "items": []}
    if isinstance(leaf.value, Kept):
        return {"kept": leaf.value.name, "structure": leaf.value.is_structure, "items": []}
    try:
        return encode_scalar(leaf.value)
    except Unwritable as error:
        raise InvalidTree(
            f"leaf {leaf.path!r} is {error}, which can't be saved; give an array, a number, a "
            "string, bytes or None, or register its type as a pytree"
        ) from error


def encode_statics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those static fields that can be written; the others only a template has."""
    return {name: encode_plain(value) for name, value in values.items() if is_plain(value)}


# And back


def saved_tree(encoded: Any, paths: Sequence[str]) -> Branch | Leaf:
    """What `_METADATA` says of the tree, in the form of a parsed one.

    Array leaves hold their number. Classes are used if they are loaded and fit; a namedtuple
    otherwise becomes one of the same name, any other container a dict. No code is imported, no
    constructor called. Raises ValueError if it is malformed, or does not have every array.
    """
    try:
        tree = with_full_stack(lambda: _Decoder(len(paths)).decode(encoded, "", 0))
    except (KeyError, IndexError, TypeError, AttributeError, InvalidTree) as error:
        raise ValueError(f"its tree is malformed ({type(error).__name__}: {error})") from error
    found = {(leaf.value.number, leaf.path) for leaf in leaves_of(tree) if _is_number(leaf.value)}
    if not found.issuperset(enumerate(paths)):
        raise ValueError("its tree does not have every array at its path")
    return tree


def _is_number(value: Any) -> bool:
    return isinstance(value, ArrayNumber)


class _Decoder:
    """Decodes one tree; knows its variables by path, for those that occur again."""

    def __init__(self, arrays: int):
        self._arrays = range(arrays)
        self._variables: dict[str, Branch] = {}
        self._leaves_again = 0

    def decode(self, encoded: Any, path: str, depth: int) -> Branch | Leaf:
        if depth > MAX_DEPTH:
            raise ValueError(f"its tree is more than {MAX_DEPTH} containers deep")
        if type(encoded) is int:
            if encoded not in self._arrays:
                raise ValueError(f"its tree has an array {encoded}, which is not there")
            return Leaf(path or ROOT, ArrayNumber(encoded))
        if encoded is None:
            return Leaf(path or ROOT, None)
        if "items" in encoded:
            return self._node(encoded, path, depth)
        if "same_as" in encoded:
            return self._again(self._variables[encoded["same_as"]], path)
        return Leaf(path or ROOT, decode_scalar(encoded))

    def _node(self, encoded: Mapping[str, Any], path: str, depth: int) -> Branch | Leaf:
        for kind in encoded:
            if kind in _CONTAINERS:
                return self._container(kind, encoded, path, depth)
        if "states" in encoded:
            return Leaf(path or ROOT, SavedStates(tuple(map(decode_state, encoded["states"]))))
        if "kept" in encoded:
            kept = Kept(None, str(encoded["kept"]), encoded.get("structure") is True)
            return Leaf(path or ROOT, kept)
        if "nnx" in encoded or "variable" in encoded:
            return self._wrapper(encoded, path, depth)
        raise UnsupportedFormat(
            f"its tree has a container that this Ostraka does not know ({', '.join(encoded)}); "
            "install a newer ostraka"
        )

    def _again(self, variable: Branch, path: str) -> Branch:
        # A few bytes of a stranger's file must not become any number of leaves.
        self._leaves_again += sum(1 for _ in leaves_of(variable))
        if self._leaves_again > _MOST_LEAVES_AGAIN:
            raise ValueError("its tree has more shared variables than any tree needs")
        return moved(variable, path)

    def _wrapper(self, encoded: Mapping[str, Any], path: str, depth: int) -> Branch:
        (item,) = encoded["items"]
        kind = "nnx" if "nnx" in encoded else "variable"
        child = self.decode(item, path, depth + 1)
        about = {"about": encoded.get("about", {})} if kind == "variable" else {}
        owner = object() if kind == "variable" else None
        cls = _class_name(encoded[kind])
        found = Branch(kind, path, (child,), _only_item, cls=cls, about=about, owner=owner)
        if kind == "variable":
            self._variables[path] = found
        return found

    def _container(self, kind: str, encoded: Mapping[str, Any], path: str, depth: int) -> Branch:
        items: list[Any] = encoded["items"]
        named = encoded[kind] if kind in _KEYED else encoded.get("keys", range(len(items)))
        texts: list[str] = []
        children: list[Branch | Leaf] = []
        for key, item in zip(named, items, strict=True):
            text = key if type(key) is str else text_of_encoded(key)
            texts.append(text)
            at = join(path, escape(text))
            if type(item) is int and item in self._arrays and depth < MAX_DEPTH:
                children.append(Leaf(at, ArrayNumber(item)))  # as `decode` would; most are arrays
            else:
                children.append(self.decode(item, at, depth + 1))
        keys = [key if type(key) is str else decode_key(key) for key in named]
        if len({*keys}) < len(keys):
            # Members of enums whose classes are not loaded, by the same value.
            keys = texts
        cls = _class_name(encoded[kind]) if kind in _NAMED else None
        about = {}
        if kind not in ("dict", "list", "tuple"):
            about = {key: encoded[key] for key in ("static", "factory") if key in encoded}
        make = _builder(kind, cls, keys, about)
        return Branch(kind, path, tuple(children), make, keys, cls, about)


def _class_name(named: Any) -> tuple[str, str]:
    module, name = named
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a class is named by something else than text")
    return module, name


def moved(node: Branch | Leaf, path: str) -> Any:
    """The same thing at another path."""
    before = node.path

    def move(node: Branch | Leaf) -> Branch | Leaf:
        here = (path + node.path[len(before) :]) if node.path != ROOT else path or ROOT
        if isinstance(node, Leaf):
            return dataclasses.replace(node, path=here)
        return dataclasses.replace(
            node, path=here, children=tuple(move(child) for child in node.children)
        )

    return move(node)


def _only_item(items: list[Any]) -> Any:
    return items[0]


_FACTORIES: Mapping[str, Any] = {
    kind.__name__: kind for kind in (dict, list, set, tuple, int, float, complex, bool, str, bytes)
}


def encode_factory(factory: Any, path: str) -> str | None:
    """What makes the missing entries of a defaultdict, if it is one of Python's own types."""
    if factory is None:
        return None
    if _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise InvalidTree(
            f"the defaultdict at {path or ROOT!r} has the default_factory {factory!r:.80}, which "
            f"can't be saved; only {', '.join(_FACTORIES)} and None can: save dict(…) of it"
        )
    return factory.__name__


def _builder(
    kind: str, cls: tuple[str, str] | None, keys: list[Any], about: Mapping[str, Any]
) -> Callable[[list[Any]], Any]:
    if kind in _SEQUENCES:
        return list if kind == "list" else tuple
    if kind == "ordered_dict":
        return dict_builder(keys, OrderedDict)
    if kind == "defaultdict":
        factory = None if about["factory"] is None else _FACTORIES[about["factory"]]
        return dict_builder(keys, partial(collections.defaultdict, factory))
    if kind == "namedtuple" and cls is not None:
        return _namedtuple_builder(*cls, keys)
    if kind == "dataclass" and cls is not None:
        return _dataclass_builder(*cls, keys, about.get("static", {}))
    frozen = loaded_class(*_FROZEN_DICT) if cls == _FROZEN_DICT else None
    return dict_builder(keys, frozen or dict)


_FROZEN_DICT = ("flax.core.frozen_dict", "FrozenDict")


def _namedtuple_builder(
    module: str, qualname: str, fields: list[str]
) -> Callable[[list[Any]], Any]:
    kind = loaded_class(module, qualname)
    if kind is None or not issubclass(kind, tuple) or list(getattr(kind, "_fields", ())) != fields:
        name = qualname.rsplit(".", 1)[-1]
        make_class: Any = collections.namedtuple
        kind = make_class(name if name.isidentifier() else "Saved", fields, rename=True)
    return lambda items: tuple.__new__(kind, items)


def _dataclass_builder(
    module: str, qualname: str, fields: list[str], static: Mapping[str, Any]
) -> Callable[[list[Any]], Any]:
    """The dataclass itself if it is loaded, a pytree to JAX, and all its fields are here.

    Its constructor is not called: that may want other arguments than the fields, or do things.
    """
    kind = loaded_class(module, qualname)
    given = {name: decode_plain(value) for name, value in static.items()}
    if not _is_pytree_with_fields(kind, {*fields, *given}):
        return dict_builder(fields)

    def build(items: list[Any]) -> Any:
        made: Any = object.__new__(kind)
        for name, item in (*zip(fields, items, strict=True), *given.items()):
            object.__setattr__(made, name, item)
        return made

    return build


def _is_pytree_with_fields(kind: Any, names: set[str]) -> bool:
    if not dataclasses.is_dataclass(kind):
        return False
    if {field.name for field in dataclasses.fields(kind)} != names:
        return False
    import jax

    # A checkpoint may come from a stranger: only types that this program has registered as pytrees
    # are ever made.
    blank: Any = object.__new__
    try:
        return not jax.tree_util.all_leaves([blank(kind)])
    except TypeError:  # It is also a tuple, a dict, … which are not made of fields alone.
        return False


# States of data iterators and their like


def encode_state(path: str, state: Any) -> Any:
    """A state as JSON: what `get_state` gives is plain JSON values, or bytes."""
    if isinstance(state, bytes):
        return encode_scalar(state)
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidTree(
            f"leaf {path!r}: get_state() gives {type(state).__name__}, which is neither JSON nor "
            f"bytes ({error})"
        ) from error
    if json.loads(text) != state:
        raise InvalidTree(
            f"leaf {path!r}: get_state() gives values that JSON would change, such as tuples or "
            "keys that are not text"
        )
    return {"json": json.loads(text)}


def with_states(encoded: Any, states: Mapping[str, Sequence[Any]]) -> Any:
    """An encoded tree with the states of all processes, by path, where it has place for them."""
    if not isinstance(encoded, dict):
        return encoded
    node: dict[str, Any] = {**encoded}
    if "states" in node:
        node["states"] = list(states[node.pop("path")])
    if "items" in node:
        node["items"] = [with_states(item, states) for item in node["items"]]
    return node


def decode_state(encoded: Any) -> Any:
    return encoded["json"] if "json" in encoded else decode_scalar(encoded)
