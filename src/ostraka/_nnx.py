"""Flax NNX in a tree: modules, optimizers, states and variables to branches and back.

Flax is imported by whoever made the objects, never by us: without it in the process there is
nothing here to do.

A module is parsed as its state: nested keys down to variables, each of which stands for its value.
The path of a leaf is thus that of the attribute, such as `model/layers/0/kernel`. A variable that
is used in several places of one module has one leaf, and is shared again in what is rebuilt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from ostraka._document import (
    Branch,
    Leaf,
    decode_value,
    encode_value,
    join,
    loaded_class,
    segment,
)

Parse = Callable[[Any, str], "Branch | Leaf"]


def parse_nnx(value: Any, path: str, parse: Parse) -> Branch | None:
    """The branch of an NNX object; None if the value is none."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    if isinstance(value, nnx.Variable):
        return _parse_variable(value, path, parse)
    if isinstance(value, nnx.State):
        return _parse_state(nnx, value, path, parse)
    if isinstance(value, nnx.Pytree):
        return _parse_graph(nnx, value, path, parse)
    return None


def _parse_graph(nnx: Any, value: Any, path: str, parse: Parse) -> Branch:
    """A module, an optimizer, Rngs, List, Dict: its structure apart from its state."""
    graphdef, state = nnx.split(value)

    def rebuild(items: list[Any]) -> Any:
        return nnx.merge(graphdef, items[0])

    def update(items: list[Any]) -> None:
        nnx.update(value, items[0])

    children = (_parse_state(nnx, state, path, parse),)
    return Branch({"nnx": _type_name(type(value))}, children, rebuild, update)


def _parse_state(nnx: Any, state: Any, path: str, parse: Parse) -> Branch:
    keys, children = _parse_entries(nnx, state.raw_mapping, path, parse)

    def update(items: list[Any]) -> None:
        _put_entries(nnx, state.raw_mapping, dict(zip(keys, items, strict=True)))

    return Branch({"state": keys}, children, _state_builder(nnx, keys), update)


def _put_entries(nnx: Any, entries: Any, new: Mapping[Any, Any]) -> None:
    """Change a state in place: its variables, which a model may have too, and its plain arrays."""
    for key, item in new.items():
        entry = entries[key]
        if isinstance(entry, nnx.State):
            _put_entries(nnx, entry.raw_mapping, item.raw_mapping)
        elif isinstance(entry, nnx.Variable):
            _put_value(entry, _value_of(item))
        elif isinstance(entry, dict):
            _put_entries(nnx, entry, item)
        else:
            entries[key] = item


def _parse_entries(
    nnx: Any, entries: Mapping[Any, Any], path: str, parse: Parse
) -> tuple[list[Any], tuple[Branch | Leaf, ...]]:
    keys = list(entries)
    children = tuple(
        [
            _parse_entry(nnx, entry, join(path, segment(key, path)), parse)
            for key, entry in entries.items()
        ]
    )
    return keys, children


def _parse_entry(nnx: Any, entry: Any, path: str, parse: Parse) -> Branch | Leaf:
    """What is in a state. Below its top a state is made of dicts, and JAX tells the two apart."""
    if issubclass(type(entry), nnx.Variable):
        return _parse_variable(entry, path, parse)
    if isinstance(entry, Mapping) and not isinstance(entry, nnx.State):
        keys, children = _parse_entries(nnx, entry, path, parse)
        return Branch({"dict": keys}, children, _dict_builder(keys))
    return parse(entry, path)


# What is stored, not what a class of the user's makes of it on the way in and out; where the stored
# thing is a reference, what it refers to.


def _value_of(variable: Any) -> Any:
    return variable.get_value() if variable.hijax or variable.ref else variable.get_raw_value()


def _put_value(variable: Any, value: Any) -> None:
    write = variable.set_value if variable.hijax or variable.ref else variable.set_raw_value
    write(value)


def _parse_variable(variable: Any, path: str, parse: Parse) -> Branch:
    def rebuild(items: list[Any]) -> Any:
        return variable.replace(items[0])

    def update(items: list[Any]) -> None:
        _put_value(variable, items[0])

    metadata = variable.get_metadata()
    child = parse(_value_of(variable), path)
    kind = _bare_kind(type(variable))
    if not metadata.keys() <= _FLAX_INTERNAL:
        kind = {**kind, "about": _describe(metadata)}
        if isinstance(child, Leaf):
            child = Leaf(child.path, child.value, named_spec(metadata))
    return Branch(kind, (child,), rebuild, update)


@lru_cache(maxsize=256)
def _bare_kind(kind: type) -> Mapping[str, Any]:
    """How a variable is described of which no more is known than its type."""
    return {"variable": _type_name(kind), "about": {}}


def named_spec(metadata: Mapping[str, Any]) -> Any:
    """The PartitionSpec that a variable's metadata names, under any of the names Flax has had.

    Logical names become axes by the rules of the variable and those that are set in Flax.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    for name in ("out_sharding", "sharding_names", "sharding"):
        names = metadata.get(name)
        if isinstance(names, NamedSharding):
            names = names.spec
        if isinstance(names, tuple | list | PartitionSpec):
            rules = {**_rules_in_force(), **dict(metadata.get("sharding_rules") or ())}
            return PartitionSpec(*physical_axes(names, rules)) if rules else PartitionSpec(*names)
    return None


def _rules_in_force() -> dict[str, Any]:
    """What `nnx.logical_axis_rules` has set, if anything."""
    spmd: Any = sys.modules.get("flax.core.spmd")
    return dict(spmd.get_logical_axis_rules()) if spmd is not None else {}


def physical_axes(names: Iterable[Any], rules: Mapping[str, Any]) -> list[Any]:
    """The entries of a spec, with those names replaced that the rules have."""
    return [
        _joined(physical_axes(name, rules)) if isinstance(name, tuple) else rules.get(name, name)
        for name in names
    ]


def _joined(entries: Iterable[Any]) -> Any:
    """Several axes for one dimension."""
    axes: list[Any] = []
    for entry in entries:
        axes += entry if isinstance(entry, tuple | list) else [] if entry is None else [entry]
    return tuple(axes) or None


def as_state(node: Branch | Leaf) -> Branch | Leaf:
    """A saved tree whose NNX parts are rebuilt as nnx.State with the variables that were saved."""
    if isinstance(node, Leaf):
        return node
    from flax import nnx

    children = tuple(as_state(child) for child in node.children)
    if "state" in node.kind:
        return Branch(node.kind, children, _state_builder(nnx, node.kind["state"]))
    if "variable" in node.kind:
        return Branch(node.kind, children, _variable_builder(nnx, node.kind))
    return Branch(node.kind, children, node.rebuild)


def _state_builder(nnx: Any, keys: list[Any]) -> Callable[[list[Any]], Any]:
    return lambda items: nnx.State(dict(zip(keys, items, strict=True)))


def _dict_builder(keys: list[Any]) -> Callable[[list[Any]], Any]:
    return lambda items: dict(zip(keys, items, strict=True))


def _variable_builder(nnx: Any, described: Mapping[str, Any]) -> Callable[[list[Any]], Any]:
    found = loaded_class(*described["variable"])
    kind: Any = found if found is not None and issubclass(found, nnx.Variable) else nnx.Variable
    about = {key: _undescribe(value) for key, value in described.get("about", {}).items()}
    return lambda items: kind.from_metadata(items[0], {**_FLAX_DEFAULTS, **about})


def _undescribe(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return decode_value(value)


def _describe(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What of a variable's metadata can be written: plain values, tuples of them, and specs."""
    from jax.sharding import PartitionSpec

    described: dict[str, Any] = {}
    for name, value in metadata.items():
        if name in _FLAX_INTERNAL:
            continue
        if isinstance(value, tuple | list | PartitionSpec):
            items = [list(item) if isinstance(item, tuple) else item for item in value]
            if all(_is_plain(item) or isinstance(item, list) for item in items):
                described[name] = items
        elif _is_plain(value):
            described[name] = encode_value(Leaf(name, value))
    return described


_FLAX_DEFAULTS = {"hijax": False, "ref": False, "eager_sharding": True}
_FLAX_INTERNAL = _FLAX_DEFAULTS.keys()


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _type_name(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]
