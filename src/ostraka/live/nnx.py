"""Flax NNX in a tree: modules, optimizers, states and variables to branches and back.

This module never imports Flax: only the program that made the objects does. Without Flax in the
process there are no NNX objects.

A module is parsed as its state: nested keys down to variables, each of which stands for its value.
The path of a leaf is thus the path of the attribute, such as `model/layers/0/kernel`. A variable in
several places of one module has one leaf, and the rebuilt module shares it again. Variables and
submodules that several modules of a tree share are found by identity and rebuilt as one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ostraka.tree.json_tree import decode_about
from ostraka.tree.json_values import class_name, encode_writable, loaded_class, mro_lookup
from ostraka.tree.nodes import Branch, Leaf, Node, dict_builder, join, mapped, segment

Parse = Callable[[Any, str, int], Node]


def parse_nnx(value: Any, path: str, depth: int, parse: Parse) -> Branch | None:
    """The branch of an NNX object, or None if the value is not one."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    if isinstance(value, nnx.Variable):
        return _Parser(nnx, parse).variable(value, path, depth)
    if isinstance(value, nnx.State):
        return _Parser(nnx, parse).state(value, path, depth)
    if isinstance(value, nnx.Pytree):
        return _Parser(nnx, parse).graph(value, path, depth)
    return None


class _Parser:
    """Parses NNX objects, and hands any other value to `parse`."""

    def __init__(self, nnx: Any, parse: Parse):
        self._nnx = nnx
        self._parse = parse

    def graph(self, value: Any, path: str, depth: int) -> Branch:
        """A module, an optimizer, Rngs, List, Dict: its structure apart from its state."""
        graphdef, state = _split(self._nnx, value)
        return Branch(
            "nnx",
            path,
            (self.state(state, path, depth + 1),),
            lambda items: self._nnx.merge(graphdef, items[0]),
            cls=class_name(type(value)),
            owner=value,
            rebuild_together=_merge_together,
        )

    def state(self, state: Any, path: str, depth: int) -> Branch:
        keys, children = self._entries(state.raw_mapping, path, depth)
        make = dict_builder(keys, self._nnx.State)
        return Branch("state", path, children, make, keys, owner=state)

    def _entries(
        self, entries: Mapping[Any, Any], path: str, depth: int
    ) -> tuple[list[Any], tuple[Node, ...]]:
        children = [
            self._entry(entry, join(path, segment(key, path)), depth + 1)
            for key, entry in entries.items()
        ]
        return list(entries), tuple(children)

    def _entry(self, entry: Any, path: str, depth: int) -> Node:
        """Parse an entry of a state. Below its top a state consists of dicts."""
        nnx = self._nnx
        if issubclass(type(entry), nnx.Variable):
            return self.variable(entry, path, depth)
        if isinstance(entry, Mapping) and not isinstance(entry, nnx.State):
            keys, children = self._entries(entry, path, depth)
            return Branch("dict", path, children, dict_builder(keys), keys)
        value = entry.shape_and_dtype if isinstance(entry, _Blank) else entry
        return self._parse(value, path, depth)

    def variable(self, variable: Any, path: str, depth: int) -> Branch:
        metadata = variable.get_metadata()
        # What is stored, not what a class of the user's makes of it on the way in and out. If it is
        # a reference: what it refers to.
        is_reference = variable.hijax or variable.ref
        value = variable.get_value() if is_reference else variable.get_raw_value()
        child = self._parse(value, path, depth + 1)
        about: Mapping[str, Any] = _NOTHING
        if not metadata.keys() <= _FLAX_INTERNAL:
            about = {"about": _describe(metadata)}
            if isinstance(child, Leaf):
                child = replace(child, spec=named_spec(metadata))
        return Branch(
            "variable",
            path,
            (child,),
            lambda items: variable.replace(items[0]),
            cls=class_name(type(variable)),
            about=about,
            owner=variable,
        )


_NOTHING: Mapping[str, Any] = {"about": {}}
"""The `about` of a variable without metadata."""


def _merge_together(owners: list[Any], items: list[list[Any]]) -> list[Any]:
    """Modules from new states. They share submodules and variables as the old ones do."""
    from flax import nnx

    graphdef, together = _split(nnx, tuple(owners))
    states = [item[0] for item in items]
    # What was met before, in another module or under another name, is not in the state again.
    paths: list[Any] = [path for path, _ in nnx.to_flat_state(together)]
    flat = {path: reduce(getitem, path, states) for path in paths}
    return list(nnx.merge(graphdef, nnx.from_flat_state(flat)))


class _Blank(np.ndarray[Any, Any]):
    """Stands for a shape where NNX takes only arrays for state."""

    shape_and_dtype: Any


def _split(nnx: Any, value: Any) -> tuple[Any, Any]:
    """As `nnx.split`, but shapes outside of variables count as state, like arrays."""
    graphdef, state = nnx.split(value)
    attributes = [getattr(attribute, "value", None) for _, attribute in graphdef.attributes]
    if not any(isinstance(attribute, jax.ShapeDtypeStruct) for attribute in attributes):
        return graphdef, state

    def fill_in(_: Any, part: Any) -> Any:
        if not isinstance(part, jax.ShapeDtypeStruct):
            return part
        blank = np.zeros(0).view(_Blank)
        blank.shape_and_dtype = part
        return blank

    return nnx.split(nnx.recursive_map(fill_in, value))


def put_value(variable: Any, value: Any) -> None:
    """Give a variable another value."""
    write = variable.set_value if variable.hijax or variable.ref else variable.set_raw_value
    write(value)


def put_items(branch: Branch, items: list[Any]) -> None:
    """Put other items into the NNX object that a branch was parsed from."""
    from flax import nnx

    if branch.kind == "variable":
        put_value(branch.owner, items[0])
    else:
        nnx.update(branch.owner, items[0] if branch.kind == "nnx" else branch.rebuild(items))


def named_spec(metadata: Mapping[str, Any]) -> Any:
    """The PartitionSpec in the metadata of a variable, under any name that Flax has used.

    Logical names become axes by the rules of the variable and those that are set in Flax.
    """
    for name in ("out_sharding", "sharding_names", "sharding"):
        names = metadata.get(name)
        if isinstance(names, NamedSharding):
            names = names.spec
        if isinstance(names, tuple | list | PartitionSpec):
            spmd: Any = sys.modules.get("flax.core.spmd")
            rules: dict[str, Any] = {} if spmd is None else dict(spmd.get_logical_axis_rules())
            rules.update(metadata.get("sharding_rules") or ())
            return PartitionSpec(*physical_axes(names, rules)) if rules else PartitionSpec(*names)
    return None


def physical_axes(names: Iterable[Any], rules: Mapping[str, Any]) -> list[Any]:
    """The entries of a spec, with names replaced by the rules."""
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


def as_state(tree: Node) -> Node:
    """A saved tree that rebuilds NNX parts as nnx.State with the saved variables."""
    from flax import nnx

    def change(node: Node) -> Node:
        if isinstance(node, Branch) and node.kind == "state":
            return replace(node, rebuild=dict_builder(node.keys, nnx.State))
        if isinstance(node, Branch) and node.kind == "variable":
            return replace(node, rebuild=_variable_builder(nnx, node))
        return node

    return mapped(tree, change)


def _variable_builder(nnx: Any, node: Branch) -> Callable[[list[Any]], Any]:
    """Return a function that makes a variable, of its class if loaded and only Flax code runs."""
    assert node.cls is not None
    kind: Any = loaded_class(*node.cls)
    if kind is None or not issubclass(kind, nnx.Variable) or not _is_made_by_flax(nnx, kind):
        kind = nnx.Variable
    given = decode_about(node.about)
    about = {name: value for name, value in given.items() if name not in _NEVER_SAVED}
    return lambda items: kind.from_metadata(items[0], {**_FLAX_DEFAULTS, **about})


def _is_made_by_flax(nnx: Any, kind: type) -> bool:
    """True if making such a variable runs no code of the program. The class name is untrusted."""
    makers = ("from_metadata", "_new", "__new__", "__setattr__", "__del__")
    return all(mro_lookup(kind, name) is mro_lookup(nnx.Variable, name) for name in makers)


def _describe(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The writable metadata of a variable: plain values, and specs as lists of names."""
    known = {name: value for name, value in metadata.items() if name not in _FLAX_INTERNAL}
    specs = {
        name: [list(axes) if isinstance(axes, tuple) else axes for axes in value]
        for name, value in known.items()
        if _is_spec(value)
    }
    return {**encode_writable(known), **specs}


_FLAX_DEFAULTS = {"hijax": False, "ref": False, "eager_sharding": True}
_FLAX_INTERNAL = _FLAX_DEFAULTS.keys()
_HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")
_NEVER_SAVED = frozenset((*_FLAX_INTERNAL, *_HOOKS))
"""Flags and hooks of Flax. No save writes them, and a restore ignores them."""


def _is_spec(value: Any) -> bool:
    """True if each entry is an axis, several axes, or None."""
    if not isinstance(value, tuple | PartitionSpec):
        return False
    axes = [axis for entry in value for axis in (entry if isinstance(entry, tuple) else [entry])]
    return all(axis is None or type(axis) is str for axis in axes)
