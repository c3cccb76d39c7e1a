"""The tree as `_METADATA` has it: branches, leaves and values as JSON. No JAX."""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ostraka.errors import InvalidTree

ROOT = "."
"""The path of a tree that is a single leaf."""

SCALARS = (bool, int, float, complex, str, bytes)
"""Values that are kept in `_METADATA` itself, as is None."""


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

    kind: Mapping[str, Any]
    """How `_METADATA` describes it; its items are under the key `items`."""
    children: tuple[Branch | Leaf, ...]
    rebuild: Callable[[list[Any]], Any]
    update: Callable[[list[Any]], None] | None = None
    """How to put other items into this very container; None if it can't be changed."""


def leaves_of(node: Branch | Leaf) -> Iterator[Leaf]:
    """The leaves in tree order."""
    if isinstance(node, Leaf):
        yield node
        return
    for child in node.children:
        yield from leaves_of(child)


def rebuild(node: Branch | Leaf, values: Mapping[str, Any]) -> Any:
    """The tree again, with other values by path."""
    if isinstance(node, Leaf):
        return values[node.path]
    return node.rebuild([rebuild(child, values) for child in node.children])


def check_unique(leaves: Sequence[Leaf]) -> None:
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.path in seen:
            raise InvalidTree(
                f"two leaves have the path {leaf.path!r}: keys such as 0 and '0' in one dict look "
                "the same in a path; rename one"
            )
        seen.add(leaf.path)


def segment(key: str | int, path: str) -> str:
    text = str(key)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTree(
            f"the dict at {path or ROOT!r} has a key that is not valid Unicode: {text!r}"
        ) from error
    if text == "__metadata__":
        return f"~2{text}"  # safetensors has this name for something else
    return text.replace("~", "~0").replace("/", "~1")


def join(path: str, segment: str) -> str:
    return f"{path}/{segment}" if path else segment or "~"


def prune(node: Branch | Leaf, wanted: Callable[[str], bool]) -> Branch | Leaf | None:
    """The tree with the wanted leaves only; None if there are none.

    A sequence that loses items becomes a dict of those that are left, by their numbers.
    """
    if isinstance(node, Leaf):
        return node if wanted(node.path) else None
    kept = [prune(child, wanted) for child in node.children]
    left = [(number, child) for number, child in enumerate(kept) if child is not None]
    if len(left) == len(kept):
        return Branch(node.kind, tuple(child for _, child in left), node.rebuild, node.update)
    if not left:
        return None
    names = next(
        (node.kind[k] for k in ("dict", "ordered_dict", "state", "keys") if k in node.kind), None
    )
    keys = [number if names is None else names[number] for number, _ in left]
    return Branch(
        {"dict": keys},
        tuple(child for _, child in left),
        lambda items: dict(zip(keys, items, strict=True)),
    )


def encode(node: Branch | Leaf, numbers: Mapping[str, int]) -> Any:
    """The tree as JSON; array leaves are their numbers."""
    if isinstance(node, Leaf):
        if isinstance(node.value, Stateful):
            return {"states": [], "path": node.path, "items": []}
        number = numbers.get(node.path)
        return encode_value(node) if number is None else number
    return {**node.kind, "items": [encode(child, numbers) for child in node.children]}


def encode_value(leaf: Leaf) -> Any:
    """A value that lives in `_METADATA`, with its type; exact for every value."""
    value = leaf.value
    kind = type(value)
    if value is None:
        return None
    if kind is bool or kind is str:
        return {kind.__name__: value}
    if kind is int:
        return {"int": value if abs(value) < 1 << 53 else hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise InvalidTree(
        f"leaf {leaf.path!r} is a {kind.__module__}.{kind.__qualname__}, which can't be saved; "
        "give an array, a number, a string, bytes or None, or register its type as a pytree"
    )


def decode_value(value: Any) -> Any:
    """The value again. Raises ValueError or TypeError for what `encode_value` does not write."""
    if value is None:
        return None
    ((kind, content),) = value.items()
    if kind in ("bool", "str", "int") and type(content).__name__ == kind:
        return content
    match kind:
        case "int":
            return int(content, 16)
        case "float":
            return float.fromhex(content)
        case "complex":
            real, imaginary = content
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "bytes":
            return base64.b64decode(content, validate=True)
        case _:
            raise ValueError(f"{content!r} is no value of the kind {kind!r}")


_VALUE_KINDS = {"int", "float", "complex", "bytes", "bool", "str"}


def saved_tree(encoded: Any, paths: Sequence[str]) -> Branch | Leaf:
    """What `_METADATA` says of the tree, in the form of a parsed one.

    Array leaves hold their number. Classes are used if they are loaded and fit; a namedtuple
    otherwise becomes one of the same name, any other container a dict. No code is imported. Raises
    ValueError if it is malformed, or does not have every array once.
    """
    try:
        tree = _saved(encoded, paths, "")
    except (KeyError, IndexError, TypeError, AttributeError, InvalidTree) as error:
        raise ValueError(f"its tree is malformed ({type(error).__name__}: {error})") from error
    arrays = [leaf.value.number for leaf in leaves_of(tree) if isinstance(leaf.value, ArrayNumber)]
    if sorted(arrays) != list(range(len(paths))):
        raise ValueError("its tree does not have every array once")
    return tree


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


def encode_state(path: str, state: Any) -> Any:
    """A state as JSON: what `get_state` gives is plain JSON values, or bytes."""
    if isinstance(state, bytes):
        return encode_value(Leaf(path, state))
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
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


def fill_in_states(encoded: Any, states: Mapping[str, Sequence[Any]]) -> None:
    """Put the states of all processes, by path, into an encoded tree that has place for them."""
    if not isinstance(encoded, dict):
        return
    node: dict[str, Any] = encoded
    if "states" in node:
        node["states"] = list(states[node.pop("path")])
    for item in node.get("items", ()):
        fill_in_states(item, states)


def decode_state(encoded: Any) -> Any:
    return encoded["json"] if "json" in encoded else decode_value(encoded)


def _only_item(items: list[Any]) -> Any:
    return items[0]


def _saved(encoded: Any, paths: Sequence[str], path: str) -> Branch | Leaf:
    if isinstance(encoded, int):
        return Leaf(paths[encoded], ArrayNumber(encoded))
    if encoded is None or _VALUE_KINDS & encoded.keys():
        return Leaf(path or ROOT, decode_value(encoded))
    described: dict[str, Any] = {k: v for k, v in encoded.items() if k != "items"}
    items: list[Any] = encoded["items"]
    keys: list[Any] = next(
        (described[k] for k in ("dict", "ordered_dict", "state", "keys") if k in described),
        list(range(len(items))),
    )
    if "nnx" in described or "variable" in described:
        (item,) = items
        return Branch(described, (_saved(item, paths, path),), _only_item)
    if "states" in described:
        return Leaf(path or ROOT, SavedStates(tuple(map(decode_state, described["states"]))))
    if not all(type(key) in (str, int) for key in keys):
        raise ValueError("a container has keys that are neither text nor integers")
    children = tuple(
        _saved(item, paths, join(path, segment(key, path)))
        for key, item in zip(keys, items, strict=True)
    )
    return Branch(described, children, _builder(described, keys))


def _builder(described: Mapping[str, Any], keys: list[Any]) -> Callable[[list[Any]], Any]:
    if "list" in described:
        return list
    if "tuple" in described:
        return tuple
    if "ordered_dict" in described:
        return lambda items: OrderedDict(zip(keys, items, strict=True))
    if "namedtuple" in described:
        module, name = described["namedtuple"]
        return _namedtuple_builder(module, name, keys)
    if "dataclass" in described:
        module, name = described["dataclass"]
        return _dataclass_builder(module, name, keys, described.get("static", {}))
    if "dict" in described or "node" in described or "state" in described:
        return lambda items: dict(zip(keys, items, strict=True))
    raise ValueError(f"its tree has a container of an unknown kind ({', '.join(described)})")


def loaded_class(module: str, qualname: str) -> Any:
    # Names are looked up, not asked for: a module or a class may run code when asked.
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        names = found.__dict__ if isinstance(found, ModuleType | type) else {}
        found = names.get(name)
    return found if isinstance(found, type) else None


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
    """The dataclass itself if it is loaded, a pytree to JAX, and all its fields are here."""
    kind = loaded_class(module, qualname)
    given = {name: decode_value(value) for name, value in static.items()}
    fits = _is_pytree_with_fields(kind, {*fields, *given})

    def build(items: list[Any]) -> Any:
        plain = dict(zip(fields, items, strict=True))
        if not fits:
            return plain
        return kind(**plain, **given)

    return build


def _is_pytree_with_fields(kind: Any, names: set[str]) -> bool:
    if not dataclasses.is_dataclass(kind):
        return False
    if {field.name for field in dataclasses.fields(kind) if field.init} != names:
        return False
    import jax

    # A checkpoint may come from a stranger: only types that this program has registered as pytrees
    # are ever called.
    blank: Any = object.__new__
    return not jax.tree_util.all_leaves([blank(kind)])
