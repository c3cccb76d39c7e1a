"""Pytrees to leaves and back: the only place that captures values.

A tree is parsed into branches and leaves, each leaf at a path such as `model/layers/0/kernel`. The
same parse serves a save (leaves become specs and values) and a restore (the leaves of `like` say
what is wanted, its branches how to put the result together).
"""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from ostraka.errors import InvalidTree

ROOT = "."
"""The path of a tree that is a single leaf."""

_SCALARS = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the tree: an array, or something that is written into `_METADATA` itself."""

    path: str
    value: Any


@dataclass(frozen=True, slots=True)
class Branch:
    """A container: what it is, what is in it, and how to make another one like it."""

    kind: Mapping[str, Any]
    """How `_METADATA` describes it; its items are under the key `items`."""
    children: tuple[Branch | Leaf, ...]
    rebuild: Callable[[list[Any]], Any]


def parse(tree: Any) -> Branch | Leaf:
    """Take a tree apart. Raises InvalidTree, naming the path, for keys that can't be written."""
    return _parse(tree, "")


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


def is_array(value: Any) -> bool:
    """Whether a leaf goes into shard files, rather than into `_METADATA`."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _parse(value: Any, path: str) -> Branch | Leaf:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return _parse_dict(cast("dict[Any, Any]", value), path)
    if kind is list or kind is tuple:
        items = tuple(_parse(v, _join(path, str(i))) for i, v in enumerate(value))
        return Branch({kind.__name__: None}, items, kind)
    if value is None or kind in _SCALARS or is_array(value) or _is_abstract(value):
        return Leaf(path or ROOT, value)
    return _parse_registered(value, path)


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _parse_dict(value: dict[Any, Any], path: str) -> Branch:
    keys = list(value)
    for key in keys:
        if type(key) not in (str, int):
            raise InvalidTree(
                f"the dict at {path or ROOT!r} has the key {key!r} of type {type(key).__name__}; "
                "keys must be str or int"
            )
    children = tuple(_parse(v, _join(path, _segment(k, path))) for k, v in value.items())
    kind = type(value)

    def rebuild(items: list[Any]) -> Any:
        return kind(zip(keys, items, strict=True))

    name = "dict" if kind is dict else "ordered_dict"
    return Branch({name: keys}, children, rebuild)


def _parse_registered(value: Any, path: str) -> Branch | Leaf:
    """Anything that JAX knows how to flatten: namedtuples, dataclasses, classes of other libraries."""
    kind = type(value)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    if len(pairs) == 1 and pairs[0][1] is value:
        return Leaf(path or ROOT, value)
    names = [_key_of(keys[0]) for keys, _ in pairs]
    children = tuple(
        _parse(child, _join(path, _segment(name, path)))
        for name, (_, child) in zip(names, pairs, strict=True)
    )

    def rebuild(items: list[Any]) -> Any:
        return jax.tree_util.tree_unflatten(treedef, items)

    where = [kind.__module__, kind.__qualname__]
    described: dict[str, Any] = {"node": where, "keys": names}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        described = {"namedtuple": where, "keys": names}
    elif dataclasses.is_dataclass(value):
        static = {
            field.name: encode_value(Leaf(field.name, getattr(value, field.name)))
            for field in dataclasses.fields(value)
            if field.name not in names
            and isinstance(getattr(value, field.name, ...), (*_SCALARS, type(None)))
        }
        described = {"dataclass": where, "keys": names, "static": static}
    return Branch(described, children, rebuild)


def _key_of(key: Any) -> str | int:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            found = getattr(key, attribute)
            return found if isinstance(found, int) else str(found)
    return str(key)


def _segment(key: str | int, path: str) -> str:
    text = str(key)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTree(
            f"the dict at {path or ROOT!r} has a key that is not valid Unicode: {text!r}"
        ) from error
    return text.replace("~", "~0").replace("/", "~1")


def _join(path: str, segment: str) -> str:
    return f"{path}/{segment}" if path else segment or "~"


# Into _METADATA and back


def encode(node: Branch | Leaf, numbers: Mapping[str, int]) -> Any:
    """The tree as JSON; array leaves are their numbers."""
    if isinstance(node, Leaf):
        number = numbers.get(node.path)
        return encode_value(node) if number is None else number
    return {**node.kind, "items": [encode(child, numbers) for child in node.children]}


def encode_value(leaf: Leaf) -> Any:
    """A value that lives in `_METADATA`, with its type; exact for every value."""
    value = leaf.value
    match value:
        case None:
            return None
        case bool():
            return {"bool": value}
        case int():
            return {"int": value if abs(value) < 1 << 53 else hex(value)}
        case float():
            return {"float": value.hex()}
        case complex():
            return {"complex": [value.real.hex(), value.imag.hex()]}
        case str():
            return {"str": value}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case _:
            raise InvalidTree(unsupported(leaf))


def unsupported(leaf: Leaf) -> str:
    if _is_abstract(leaf.value):
        return f"leaf {leaf.path!r} is abstract ({leaf.value}): it has no values to save"
    if isinstance(leaf.value, jax.core.Tracer):
        return (
            f"leaf {leaf.path!r} is a traced value: call save outside of jit and other transforms"
        )
    kind = type(leaf.value)
    return (
        f"leaf {leaf.path!r} is a {kind.__module__}.{kind.__qualname__}, which can't be saved; "
        "give an array, a number, a string, bytes or None, or register its type as a pytree"
    )


def decode_value(value: Any) -> Any:
    if value is None:
        return None
    ((kind, content),) = value.items()
    match kind:
        case "int":
            return int(content, 16) if isinstance(content, str) else content
        case "float":
            return float.fromhex(content)
        case "complex":
            return complex(float.fromhex(content[0]), float.fromhex(content[1]))
        case "bytes":
            return base64.b64decode(content)
        case "bool" | "str":
            return content
        case _:
            raise ValueError(f"unknown kind of value {kind!r}")


_VALUE_KINDS = {"int", "float", "complex", "bytes", "bool", "str"}


def saved_tree(encoded: Any, paths: Sequence[str]) -> Branch | Leaf:
    """What `_METADATA` says of the tree, in the form of a parsed one.

    Array leaves hold their number. Classes are used if they are loaded and fit; a namedtuple
    otherwise becomes one of the same name, any other container a dict. No code is imported.
    """
    return _saved(encoded, paths, "")


@dataclass(frozen=True, slots=True)
class ArrayNumber:
    """Stands for an array leaf of the checkpoint."""

    number: int


def _saved(encoded: Any, paths: Sequence[str], path: str) -> Branch | Leaf:
    if isinstance(encoded, int):
        return Leaf(paths[encoded], ArrayNumber(encoded))
    if encoded is None or _VALUE_KINDS & encoded.keys():
        return Leaf(path or ROOT, decode_value(encoded))
    described: dict[str, Any] = {k: v for k, v in encoded.items() if k != "items"}
    items: list[Any] = encoded["items"]
    keys: list[Any] = next(
        (described[k] for k in ("dict", "ordered_dict", "keys") if k in described),
        list(range(len(items))),
    )
    children = tuple(
        _saved(item, paths, _join(path, _segment(key, path)))
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
        return _namedtuple_builder(*described["namedtuple"], fields=keys)
    if "dataclass" in described:
        return _dataclass_builder(*described["dataclass"], keys, described.get("static", {}))
    return lambda items: dict(zip(keys, items, strict=True))


def _loaded_class(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else None


def _namedtuple_builder(
    module: str, qualname: str, *, fields: list[str]
) -> Callable[[list[Any]], Any]:
    kind = _loaded_class(module, qualname)
    if kind is None or not issubclass(kind, tuple) or list(getattr(kind, "_fields", ())) != fields:
        name = qualname.rsplit(".", 1)[-1]
        kind = namedtuple(name if name.isidentifier() else "Saved", fields, rename=True)  # noqa: PYI024
    return lambda items: tuple.__new__(kind, items)


def _dataclass_builder(
    module: str, qualname: str, fields: list[str], static: Mapping[str, Any]
) -> Callable[[list[Any]], Any]:
    """The dataclass itself if it is loaded, known to JAX as a pytree, and all its fields are here."""
    kind = _loaded_class(module, qualname)
    known = {*fields, *static}

    fits = (
        kind is not None
        and dataclasses.is_dataclass(kind)
        and {f.name for f in dataclasses.fields(kind) if f.init} == known
        # A checkpoint may come from a stranger: only types that this program has registered as
        # pytrees are ever called.
        and not jax.tree_util.all_leaves([object.__new__(kind)])
    )

    def build(items: list[Any]) -> Any:
        plain = dict(zip(fields, items, strict=True))
        if not fits:
            return plain
        return kind(**plain, **{name: decode_value(value) for name, value in static.items()})

    return build
