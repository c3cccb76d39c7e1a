"""The tree as `_METADATA` has it: branches, leaves and values to JSON and back. No JAX."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields as fields_of
from functools import lru_cache, partial
from keyword import iskeyword
from operator import itemgetter
from types import MemberDescriptorType
from typing import Any
from unicodedata import normalize

from ostraka.common.threads import TooDeep, with_full_stack
from ostraka.errors import InvalidTree, printable
from ostraka.tree.json_values import (
    Unwritable,
    decode_key,
    decode_plain,
    decode_scalar,
    encode_key,
    encode_plain,
    encode_scalar,
    loaded_class,
    mro_lookup,
    text_of_encoded,
    unknown,
)
from ostraka.tree.nodes import (
    MAX_DEPTH,
    ROOT,
    ArrayNumber,
    Branch,
    BranchKind,
    Kept,
    Leaf,
    Node,
    SavedStates,
    Stateful,
    at_path,
    dict_builder,
    escape,
    join,
    leaves_of,
)

_MOST_LEAVES_AGAIN = 1 << 17
"""The most leaves of shared variables beyond the number of other leaves."""
_FREE_PATH_BYTES = 16 << 20
_PATH_BYTES = 256
"""The average allowed beyond that for each leaf: a long name above leaves is in all their paths."""
_MOST_TEXT = 500

_KEYED = ("dict", "ordered_dict", "defaultdict", "state")
_OF_CLASS = ("namedtuple", "dataclass", "node")
_WRAPPERS = ("nnx", "variable")
"""Objects with one item, at the same path."""
_KINDS = frozenset((*_KEYED, *_OF_CLASS, *_WRAPPERS, "list", "tuple"))

_dumps = json.JSONEncoder(allow_nan=False).encode


def encode_checked(
    node: Node, leaves: Sequence[Leaf], numbers: Mapping[str, int], variables: Mapping[str, str]
) -> Any:
    """As `encode`. Raises InvalidTree if a restore could not read the tree unchanged.

    `leaves` are those of the tree, in its order.
    """
    encoded = encode(node, numbers, variables)
    try:
        again = _decode(json.loads(_dumps(encoded)), len({*numbers.values()}))
    except ValueError as error:
        raise InvalidTree(f"the tree could not be read again: {error}") from error
    for leaf, found in zip(leaves, leaves_of(again), strict=True):
        number = getattr(found.value, "number", None)
        if leaf.path != found.path or numbers.get(leaf.path) != number:
            raise InvalidTree(f"leaf {leaf.path!r} could not be read again: it would be {found}")
    return encoded


def encode(node: Node, numbers: Mapping[str, int], variables: Mapping[str, str]) -> Any:
    """The tree as JSON. Array leaves are numbers, and `variables` are those that occur again."""
    if isinstance(node, Leaf):
        number = numbers.get(node.path)
        return _encode_leaf(node) if number is None else number
    if node.kind == "variable" and node.path in variables:
        return {"same_as": variables[node.path]}
    keys = [key if type(key) is str else encode_key(key) for key in node.keys]
    described = keys if node.kind in _KEYED else None if node.cls is None else list(node.cls)
    named = {"keys": keys} if node.kind in _OF_CLASS else {}
    items = [encode(child, numbers, variables) for child in node.children]
    return {node.kind: described, **node.about, **named, "items": items}


def _encode_leaf(leaf: Leaf) -> Any:
    if isinstance(leaf.value, Stateful):
        return {"states": [], "path": leaf.path, "items": []}
    if isinstance(leaf.value, SavedStates):
        states = [encode_state(leaf.path, state) for state in leaf.value.states]
        return {"states": states, "items": []}
    if isinstance(leaf.value, Kept):
        return {"kept": leaf.value.name, "structure": leaf.value.is_structure, "items": []}
    try:
        return encode_scalar(leaf.value)
    except Unwritable as error:
        raise InvalidTree(
            f"leaf {leaf.path!r} is {error}, which can't be saved; give an array, a number, a "
            "string, bytes or None, or register its type as a pytree"
        ) from error


# And back


def saved_tree(encoded: Any, paths: Sequence[str]) -> Node:
    """The tree in `_METADATA` as branches and leaves.

    Array leaves hold their number. Classes are used if they are loaded and fit. Otherwise a
    namedtuple becomes one of the same name, any other container a dict. No code is imported, no
    constructor called. Raises ValueError if it is malformed, or does not have every array.
    """
    tree = _decode(encoded, len(paths))
    arrays = [leaf for leaf in leaves_of(tree) if isinstance(leaf.value, ArrayNumber)]
    if not {(leaf.value.number, leaf.path) for leaf in arrays}.issuperset(enumerate(paths)):
        raise ValueError("its tree does not have every array at its path")
    return tree


def _decode(encoded: Any, arrays: int) -> Node:
    try:
        return with_full_stack(partial(_Decoder(arrays).decode, encoded, "", 0))
    except (LookupError, TypeError, AttributeError, ArithmeticError, TooDeep, InvalidTree) as error:
        found = printable(f"{type(error).__name__}: {error}"[:_MOST_TEXT])
        raise ValueError(f"its tree is malformed ({found})") from error


class _Decoder:
    """Decodes one tree. Keeps its variables by path, since they may occur again."""

    def __init__(self, arrays: int):
        self._arrays = range(arrays)
        self._variables: dict[str, Branch] = {}
        self._leaves_again = 0
        self._leaves = 0
        self._path_bytes = 0

    def _leaf(self, path: str, value: Any) -> Leaf:
        # A few bytes of a stranger's file must not become any number of long paths.
        self._leaves += 1
        self._path_bytes += len(path)
        if self._path_bytes > _FREE_PATH_BYTES + _PATH_BYTES * self._leaves:
            raise ValueError("the paths of its tree are longer than any tree needs")
        return Leaf(path or ROOT, value)

    def decode(self, encoded: Any, path: str, depth: int) -> Node:
        if type(encoded) is int:
            if encoded not in self._arrays:
                raise ValueError(f"its tree has an array {encoded}, which is not there")
            return self._leaf(path, ArrayNumber(encoded))
        if depth > MAX_DEPTH:
            raise ValueError(f"its tree is more than {MAX_DEPTH} containers deep")
        if encoded is not None and "same_as" in encoded and "items" not in encoded:
            return self._again(self._variables[encoded["same_as"]], path)
        if encoded is None or "items" not in encoded:
            return self._leaf(path, decode_scalar(encoded))
        if "states" in encoded:
            return self._leaf(path, SavedStates(tuple(map(decode_state, encoded["states"]))))
        if "kept" in encoded:
            is_structure = encoded.get("structure") is True
            return self._leaf(path, Kept(None, str(encoded["kept"]), is_structure))
        for kind in encoded:
            if kind in _KINDS:
                return self._branch(kind, encoded, path, depth)
        raise unknown(f"a container ({', '.join(encoded)[:80]!r})")

    def _branch(
        self, kind: BranchKind, encoded: Mapping[str, Any], path: str, depth: int
    ) -> Branch:
        items: list[Any] = encoded["items"]
        keys: Sequence[Any] = ()
        if kind in _WRAPPERS:
            (item,) = items
            children = [self.decode(item, path, depth + 1)]
        else:
            named = encoded[kind] if kind in _KEYED else encoded.get("keys", range(len(items)))
            texts = [key if type(key) is str else text_of_encoded(key) for key in named]
            children = [
                self.decode(item, join(path, escape(text)), depth + 1)
                for text, item in zip(texts, items, strict=True)
            ]
            keys = [key if type(key) is str else decode_key(key) for key in named]
            if len({*keys}) < len(keys):
                keys = texts  # Members of enums whose classes are not loaded, by the same value.
        cls = None
        if kind in _OF_CLASS or kind in _WRAPPERS:
            module, name = encoded[kind]
            if type(module) is not str or type(name) is not str:
                raise ValueError(f"its tree has a {kind} whose class has no name")
            cls = (module, name)
        about = {key: encoded[key] for key in ("static", "factory", "about") if key in encoded}
        if kind == "variable":
            decode_about(about)
        make = builder(kind, cls, keys, about)
        owner = object() if kind == "variable" else None
        branch = Branch(kind, path, tuple(children), make, keys, cls, about, owner=owner)
        if kind == "variable":
            self._variables[path] = branch
        return branch

    def _again(self, variable: Branch, path: str) -> Node:
        """The same variable at another path."""
        # A few bytes of a stranger's file must not become any number of leaves.
        for leaf in leaves_of(variable):
            self._leaves_again += 1
            self._path_bytes += len(path) + len(leaf.path)
        most = _MOST_LEAVES_AGAIN + self._leaves
        if self._leaves_again > most or self._path_bytes > _FREE_PATH_BYTES + _PATH_BYTES * most:
            raise ValueError("its tree has more shared variables than any tree needs")
        return at_path(variable, path)


def decode_about(about: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a variable. Raises ValueError if it is malformed."""
    given = about.get("about", {})
    if not isinstance(given, dict):
        raise ValueError("its tree has a variable of which nothing is known")
    return {str(key): _undescribe(value) for key, value in given.items()}


def _undescribe(value: Any) -> Any:
    """A plain value, or the names of axes for each dimension."""
    if not isinstance(value, list):
        return decode_plain(value)
    axes = [axis for entry in value for axis in (entry if isinstance(entry, list) else [entry])]
    if not all(axis is None or type(axis) is str for axis in axes):
        raise ValueError("its tree has a variable with a spec that is none")
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value)


_FACTORIES: Mapping[str, Any] = {
    kind.__name__: kind for kind in (dict, list, set, tuple, int, float, complex, bool, str, bytes)
}


def encode_factory(factory: Any, path: str) -> str | None:
    """The factory of a defaultdict, if it is one of Python's own types."""
    if factory is None:
        return None
    if _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise InvalidTree(
            f"the defaultdict at {path or ROOT!r} has the default_factory {factory!r:.80}, which "
            f"can't be saved; only {', '.join(_FACTORIES)} and None can: save dict(…) of it"
        )
    return factory.__name__


Rebuild = Callable[[list[Any]], Any]


def builder(
    kind: BranchKind, cls: tuple[str, str] | None, keys: Sequence[Any], about: Mapping[str, Any]
) -> Rebuild:
    """Return a function that makes a container of items, of its class if loaded and fitting."""
    if kind in _WRAPPERS:
        return itemgetter(0)
    loaded = None if cls is None else loaded_class(*cls)
    match kind:
        case "list":
            return list
        case "tuple":
            return tuple
        case "ordered_dict":
            return dict_builder(keys, OrderedDict)
        case "defaultdict":
            factory = None if about["factory"] is None else _FACTORIES[about["factory"]]
            return dict_builder(keys, partial(defaultdict, factory))
        case "namedtuple":
            return _namedtuple_builder(loaded, "" if cls is None else cls[1], keys)
        case "dataclass":
            return _dataclass_builder(loaded, keys, about.get("static", {}))
        case _:
            frozen = loaded if cls == ("flax.core.frozen_dict", "FrozenDict") else None
            return dict_builder(keys, frozen or dict)


def _namedtuple_builder(kind: Any, qualname: str, fields: Sequence[str]) -> Rebuild:
    made: Any = kind
    is_it = kind is not None and issubclass(kind, tuple) and not mro_lookup(made, "__del__")
    names: Any = mro_lookup(made, "_fields") if is_it else None
    if type(names) is not tuple or names != (*fields,):
        made = _namedtuple_class(qualname.rsplit(".", 1)[-1], tuple(map(str, fields)))
    return lambda items: tuple.__new__(made, items)


@lru_cache(maxsize=1024)
def _namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    """A class with the fields that can be names in Python. Others have their numbers."""
    # Python takes different spellings of a name for the same one, as no class of ours may.
    seen: dict[str, str] = {}
    for field in fields:
        seen.setdefault(normalize("NFKC", field), field)
    kept = [field if field in seen.values() else "" for field in fields]
    is_name = name.isidentifier() and not iskeyword(name)
    make_class: Any = namedtuple
    return make_class(name if is_name else "Saved", kept, rename=True)


def _dataclass_builder(kind: Any, fields: Sequence[str], static: Mapping[str, Any]) -> Rebuild:
    """The dataclass itself if it is loaded, a pytree to JAX, and all its fields are here.

    No code of the class runs: its constructor may want other arguments than the fields, or do
    things with what a stranger has written. Where that can't be had, the result is a dict.
    """
    given = {name: decode_plain(value) for name, value in static.items()}
    names = {*fields, *given}
    if kind is None or _runs_code(kind, names) or not _is_pytree_with_fields(kind, names):
        return dict_builder(fields)

    def build(items: list[Any]) -> Any:
        made: Any = object.__new__(kind)
        for name, item in (*zip(fields, items, strict=True), *given.items()):
            object.__setattr__(made, name, item)
        return made

    return build


def _runs_code(kind: type, names: set[str]) -> bool:
    """True if setting these fields, or deleting the object, runs code of the class."""
    if mro_lookup(kind, "__del__") is not None:
        return True
    found = (type(mro_lookup(kind, name)) for name in names)
    return any(
        mro_lookup(there, "__set__") is not None and there is not MemberDescriptorType
        for there in found
    )


def _is_pytree_with_fields(kind: Any, names: set[str]) -> bool:
    fields: Any = mro_lookup(kind, "__dataclass_fields__")
    if type(fields) is not dict or {field.name for field in fields_of(kind)} != names:
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
    """A state as JSON: what `get_state` gives is bytes, or plain values such as JSON has."""
    if isinstance(state, bytes):
        return encode_scalar(state)
    with suppress(TypeError, ValueError, RecursionError):
        written = json.loads(json.dumps(state, allow_nan=False))
        if written == state:
            return {"json": written}
    try:
        return encode_plain(state)  # which keeps tuples, numpy scalars and keys of any type
    except (Unwritable, RecursionError) as error:
        raise InvalidTree(
            f"leaf {path!r}: get_state() gives {type(state).__name__}, which is neither JSON nor "
            f"bytes ({error})"
        ) from error


def decode_state(encoded: Any) -> Any:
    """The state that `encode_state` was given."""
    return encoded["json"] if "json" in encoded else decode_plain(encoded)


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
