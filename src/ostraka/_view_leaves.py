"""The leaves of a view, and what of its source each is made of. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ostraka import _box
from ostraka._name_rules import Composition
from ostraka._nodes import ArrayNumber, Branch, Leaf, Lost, escape, leaves_of
from ostraka._rearrange import Rearrangement, Shape
from ostraka._source import Source


class Part(NamedTuple):
    """A part of a leaf of the view, or all of it, and what it is in the source."""

    at: Shape
    """Which part of the leaf: positions along its first axes."""
    leaf: int
    """The leaf of the source."""
    within: Shape
    """Which part of that: positions along its first axes."""
    form: Rearrangement
    """From the source to the view."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A leaf of the view."""

    path: str
    key: str
    """Its key in a flat dict."""
    shape: Shape
    parts: tuple[Part, ...]
    """Row-major over their indices, if it is a stack; else all that it is put together of."""
    stack: Shape = ()
    optional: bool = False
    stands_in: bool = False

    @property
    def is_same(self) -> bool:
        """Whether it is a leaf of the source as it is."""
        part = self.parts[0]
        return len(self.parts) == 1 and not (part.at or part.within) and part.form.is_identity


def named_leaves(source: Source) -> dict[str, Leaf]:
    """By name: by the keys of a flat dict, such as tensors of files are, else by path."""
    tree = source.tree
    if isinstance(tree, Branch) and tree.kind == "dict":
        children = tree.children
        if all(isinstance(c, Leaf) for c in children) and all(type(k) is str for k in tree.keys):
            return {
                key: child
                for key, child in zip(tree.keys, children, strict=True)
                if isinstance(child, Leaf)
            }
    return {leaf.path: leaf for leaf in leaves_of(tree)}


def shape_of(value: Any, source: Source) -> Shape:
    if isinstance(value, ArrayNumber):
        return source.saved.leaves[value.number].shape
    return value.shape if isinstance(value, Lost) else ()


def put_together(compositions: Sequence[Composition]) -> Iterator[tuple[Seen, tuple[str, ...]]]:
    """Leaves of a tree, and the tensors of each."""
    seen: set[str] = set()
    for found in compositions:
        parts = tuple(Part(at, -1, (), found.form) for at in _indices(found.stack))
        stands_in = found.optional and found.tensors[0] in seen
        seen.update(found.tensors)
        leaf = Seen(
            found.path,
            found.path,
            found.shape,
            tuple(parts),
            found.stack,
            found.optional,
            stands_in,
        )
        yield leaf, found.tensors


def taken_apart(compositions: Sequence[Composition]) -> Iterator[tuple[Seen, tuple[str, ...]]]:
    """Tensors, and the leaves of each: one, or those that it is put together of."""
    parts: dict[str, list[Part]] = {}
    paths: dict[str, list[str]] = {}
    shapes: dict[str, Shape] = {}
    for found in compositions:
        form = found.form.inverse()
        for index, name in zip(_indices(found.stack), found.tensors, strict=True):
            parts.setdefault(name, []).append(Part((), -1, index, form))
            paths.setdefault(name, []).append(found.path)
            shapes[name] = found.tensor_shape
    for name, shape in shapes.items():
        yield Seen(escape(name), name, shape, tuple(parts[name])), tuple(paths[name])


def _indices(stack: Shape) -> list[Shape]:
    cells = (_box.cell(stack, stack, number) for number in range(prod(stack)))
    return [tuple(start for start, _ in cell) for cell in cells]
