"""Refusals of trees with unsavable values, without values, or with functions.

Each function raises InvalidTree with the leaf and the probable intention.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from ostraka.errors import InvalidTree
from ostraka.live.parse import BUILTIN, text_at
from ostraka.live.values import check_savable
from ostraka.tree.json_values import class_name, mro_lookup
from ostraka.tree.nodes import ROOT, Branch, Kept, Leaf, Node, branches_of, has_values, leaves_of


def refuse_inside_jit(call: str, leaves: Sequence[Leaf] = ()) -> None:
    """Raise InvalidTree where JAX traces a function, naming a traced leaf if there is one.

    There, `call` would run once, when the function is compiled, and values are not known.
    """
    if not isinstance(jnp.zeros(()), Tracer):  # in grad and vmap alone, values are known
        return
    for leaf in leaves:
        check_savable(leaf)
    raise InvalidTree(
        f"{call} is called inside jit, or inside another transform that traces a function: call "
        "it outside, and pass arrays to the function as arguments"
    )


# Trees that a save refuses because they are hardly what was meant


def refuse_empty(tree: Node) -> None:
    """Raise InvalidTree for a tree that has no value at all."""
    if has_values(tree):
        return
    if isinstance(tree, Leaf):
        is_none = tree.value is None
        found = "the tree is None" if is_none else f"the tree is a {tree.value.name} alone"
        intent = "did you forget to return the state?" if is_none else "did you mean its state?"
        raise InvalidTree(f"there is nothing to save: {found}; {intent}")
    empty = next(
        node.path
        for node in (*leaves_of(tree), *branches_of(tree))
        if isinstance(node, Leaf) or not node.children
    )
    found = f"holds only None and empty containers, as at {empty!r}" if empty else "is empty"
    raise InvalidTree(
        f"there is nothing to save: the tree {found}; was it made before the model was "
        "initialised, or by a filter that matches nothing?"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LooseFunctions:
    """A function, or a named tuple of functions, outside of any class."""

    paths: tuple[str, ...]
    """The paths of its leaves."""
    where: str
    what: str
    intent: str

    def __str__(self) -> str:
        return f"{self.where!r} is {self.what} ({self.intent})"


def refuse_functions(tree: Node) -> None:
    """Raise InvalidTree for functions that are not part of a module or of another class.

    A class with functions in it (a module of Equinox, a registered dataclass) comes back by a
    template that has them. In a dict or a list they are a slip: a function in place of its result,
    an optimizer in place of its state.
    """
    found = list(loose_functions(tree))
    if not found:
        return
    few = ", ".join(map(str, found[:3]))
    rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
    raise InvalidTree(f"functions can't be saved: {few}{rest}; leave functions out of the tree")


def loose_functions(node: Node) -> Iterator[LooseFunctions]:
    """The functions in plain containers, and named tuples of functions."""
    if isinstance(node, Leaf):
        if isinstance(node.value, Kept) and not node.value.is_structure:
            yield LooseFunctions((node.path,), node.path, *_describe_function(node.value.value))
    elif _is_plain(node):
        below = [found for child in node.children for found in loose_functions(child)]
        init = next((key for key in node.keys if str(key).startswith("init")), None)
        if node.kind != "namedtuple" or init is None or len(below) < len(node.children):
            yield from below
            return
        is_optax = init == "init" and "update" in node.keys
        intent = f"did you mean {'tx.init(params)' if is_optax else f'its .{init}(…)'}?"
        paths = tuple(path for found in below for path in found.paths)
        what = f"a named tuple of functions, {node.cls[1] if node.cls else ''}"
        yield LooseFunctions(paths, node.path or ROOT, what, intent)


def _is_plain(branch: Branch) -> bool:
    """True for Python's containers and mappings, False for other classes."""
    if branch.kind != "node":
        return branch.kind in ("namedtuple", *BUILTIN.values())
    rebuild: Any = branch.rebuild  # as `_parse_registered` makes it
    kind, _ = rebuild.args[0].node_data()
    return issubclass(kind, Mapping)


def _describe_function(function: Any) -> tuple[str, str]:
    """A description of a callable, and of the value that was probably meant."""
    kind = type(function)
    has = partial(mro_lookup, kind)
    if callable(has("init")) and callable(has("apply")):
        return f"a {kind.__qualname__}, which holds no values", "did you mean its .init(…)?"
    if kind is partial:
        what, intent = _describe_function(function.func)
        return f"a partial of {what}", intent
    name = text_at(function, "__name__")
    if name is None:
        return f"a {'.'.join(class_name(kind))}, which can be called", "did you mean its values?"
    if not name.isidentifier():
        return "a lambda", "did you mean its result?"
    return f"the function {name}", f"did you mean {name}({_arguments_of(function)})?"


def _arguments_of(function: Any) -> str:
    with suppress(Exception):
        return "…" if inspect.signature(function).parameters else ""
    return "…"
