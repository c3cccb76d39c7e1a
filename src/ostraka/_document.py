"""The tree as `_METADATA` has it: branches, leaves and values to JSON and back. No JAX."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ostraka._nodes import (
    MAX_DEPTH,
    ROOT,
    ArrayNumber,
    Branch,
    Kept,
    Leaf,
    SavedStates,
    Stateful,
    dict_builder,
    escape,
    join,
    leaves_of,
)
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
    loaded_class,
    text_of_encoded,
)
from ostraka.errors import InvalidTree, UnsupportedFormat

_MOST_LEAVES_AGAIN = 1 << 20


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
