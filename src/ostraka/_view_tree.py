"""Trees of leaves by their paths: dicts in dicts, or a flat one. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostraka._nodes import ROOT, Branch, Leaf, Node, dict_builder


def flat_tree(leaves: Mapping[str, tuple[str, Any]]) -> Branch:
    keys = [key for key, _ in leaves.values()]
    children = tuple(Leaf(path, value) for path, (_, value) in leaves.items())
    return Branch("dict", "", children, dict_builder(keys), keys)


def nested_tree(leaves: Mapping[str, tuple[str, Any]]) -> Node:
    """Dicts in dicts; a name that is a number is one, as NNX has it for lists."""
    if ROOT in leaves and len(leaves) == 1:
        return Leaf(ROOT, leaves[ROOT][1])
    top: dict[str, Any] = {}
    for path, (_, value) in leaves.items():
        *above, last = path.split("/")
        node = top
        for name in above:
            node = node.setdefault(name, {})
        node[last] = Leaf(path, value)

    def build(node: dict[str, Any], path: str) -> Branch:
        names = sorted(node, key=_order_of)
        keys = [_key(name) for name in names]
        children = [
            build(node[name], f"{path}/{name}" if path else name)
            if isinstance(node[name], dict)
            else node[name]
            for name in names
        ]
        return Branch("dict", path, tuple(children), dict_builder(keys), keys)

    return build(top, "")


def _order_of(name: str) -> tuple[bool, int, str]:
    """By name, numbers by their value: the order of `nnx.State`."""
    is_number = isinstance(_key(name), int)
    return (not is_number, int(name) if is_number else 0, name)


def _key(name: str) -> str | int:
    """The key that a part of a path stands for."""
    if name.isascii() and name.isdigit() and (name == "0" or name[0] != "0") and len(name) < 10:
        return int(name)
    return name.removeprefix("~2").replace("~1", "/").replace("~0", "~")
