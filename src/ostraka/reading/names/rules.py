"""Rules for names: how tensors become leaves, and the rule for a name. Pure.

A rule has a pattern for the names of tensors and a path, or several paths if a tensor is cut into
leaves. `{n}` in both stands for a part of a name without dots and slashes. `{rest*}` stands for any
number of parts. Their dots become slashes.

Its form transposes a tensor, splits axes, cuts one of them into parts that are leaves, and merges
axes, in this order. A tensor with queries, keys and values one after the other in its rows:

    Form("reversed", cut=TensorCut(1, ("q/kernel", "k/kernel", "v/kernel"), (4096, 1024, 1024)))
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product, zip_longest
from typing import NamedTuple

from ostraka.errors import Mismatch
from ostraka.reading.names.rearrange import (
    Axes,
    Rearrangement,
    Shape,
    Taken,
    rearranged,
    restored,
    unmerged,
)
from ostraka.tree.patterns import Compiled, Wildcard, compile_parts

# Patterns with placeholders, for names of tensors and paths of leaves. Pure.

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z_0-9]*\*?)\}")


def placeholders(pattern: str) -> list[str]:
    """The names of a pattern's placeholders, `rest*` with its star."""
    return _PLACEHOLDER.findall(pattern)


def match(pattern: str, text: str, *, is_path: bool) -> dict[str, str] | None:
    """The values of a pattern's placeholders in a name or a path. None if it does not match.

    Each takes as much as it can, the first one first. A repeated placeholder must have the same
    value each time. The pattern is not tried with other splits for that.
    """
    compiled, names = _compiled(pattern, is_path)
    values = compiled.values(text)
    if values is None:
        return None
    found = dict(zip(names, values, strict=True))
    is_same = all(found[name] == value for name, value in zip(names, values, strict=True))
    return found if is_same else None


@lru_cache(maxsize=4096)
def _compiled(pattern: str, is_path: bool) -> tuple[Compiled, list[str]]:
    """A pattern, and the names of its placeholders, in order, without stars."""
    split = _PLACEHOLDER.split(pattern)
    parts: list[str | Wildcard] = []
    for text, name in zip_longest(split[::2], split[1::2]):
        parts += [text] if text else []
        if name is not None:
            parts.append(Wildcard("" if name.endswith("*") else "/" if is_path else "./", 1))
    return compile_parts(parts), [name.rstrip("*") for name in split[1::2]]


def filled(pattern: str, values: Mapping[str, str], *, is_path: bool) -> str:
    """A pattern with its placeholders filled in, as a path or as the name of a tensor."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        text = values[name.rstrip("*")]
        if not name.endswith("*"):
            return text
        return text.replace(".", "/") if is_path else text.replace("/", ".")

    return _PLACEHOLDER.sub(fill, pattern)


@dataclass(frozen=True, slots=True)
class TensorCut:
    """An axis, cut into the parts that become leaves."""

    axis: int
    """The axis of the transposed and split tensor."""
    paths: tuple[str, ...]
    """Paths of the leaves, in the order of their parts."""
    sizes: tuple[int, ...] | None = None
    """Length of each part. One may be -1. None for one position each: then the axis is gone."""

    def part(self, number: int, extent: int) -> Taken:
        """A part of an axis of this extent. Raises ValueError, a sentence without its subject."""
        has = f"has {extent:,} elements along axis {self.axis}"
        if self.sizes is None:
            if extent != len(self.paths):
                raise ValueError(
                    f"{has} to cut, and {len(self.paths)} leaves are to have one each: split the "
                    "axis first, or give the size of each leaf"
                )
            return Taken(self.axis, number, number + 1, is_dropped=True)
        rest = extent - sum(size for size in self.sizes if size != -1)
        if rest < 1 if -1 in self.sizes else rest != 0:
            raise ValueError(f"{has}, which can't be cut into {list(self.sizes)}")
        ends = list(accumulate((rest if size == -1 else size for size in self.sizes), initial=0))
        return Taken(self.axis, ends[number], ends[number + 1], is_dropped=False)


@dataclass(frozen=True, slots=True)
class Form:
    """The way from a tensor's axes to those of its leaf. See `rearranged`."""

    axes: Axes = None
    split: Mapping[int, tuple[int, ...]] | None = None
    merge: Mapping[int, tuple[int, ...]] | None = None
    cut: TensorCut | None = None

    def of_tensor(self, shape: Shape, part: int = 0) -> Rearrangement:
        """From a tensor of this shape to a leaf, or to the leaf that a part of it becomes.

        Raises ValueError, a sentence without its subject, if the shape does not fit.
        """
        if self.cut is None:
            return rearranged(shape, self.axes, self.split, self.merge)
        wide = rearranged(shape, self.axes, self.split).shape_after
        if self.cut.axis >= len(wide):
            raise ValueError(
                f"has {len(wide)} axes when it is to be cut, of which none is number "
                f"{self.cut.axis}"
            )
        taken = self.cut.part(part, wide[self.cut.axis])
        return rearranged(shape, self.axes, self.split, self.merge, taken)

    def of_leaves(self, leaves: Sequence[tuple[str, Shape]]) -> list[Rearrangement]:
        """From a tensor to each of the leaves that it becomes, given their paths and shapes.

        There is one leaf unless the tensor is cut. Raises ValueError, a sentence that names the
        leaf.
        """
        ends, others = [0], list[list[int]]()
        for number, (path, shape) in enumerate(leaves if self.cut else ()):
            with about_leaf(path):
                extent, rest = self._extent(number, shape)
            ends.append(ends[-1] + extent)
            others.append(rest)
            if rest != others[0]:
                raise ValueError(
                    f"leaves {leaves[0][0]!r} and {path!r} can't be put together: they have the "
                    f"shapes {leaves[0][1]} and {shape}"
                )
        made: list[Rearrangement] = []
        for number, (path, shape) in enumerate(leaves):
            taken = None
            if self.cut is not None:
                is_dropped = self.cut.sizes is None
                taken = Taken(self.cut.axis, ends[number], ends[number + 1], is_dropped)
            with about_leaf(path):
                made.append(restored(shape, self.axes, self.split, self.merge, taken, ends[-1]))
        return made

    def _extent(self, number: int, shape: Shape) -> tuple[int, list[int]]:
        """The extent of a leaf along the axis that is cut, and those of its other axes."""
        assert self.cut is not None
        axis, sizes = self.cut.axis, self.cut.sizes
        wide = unmerged(shape, self.merge)
        if axis >= len(wide) + (sizes is None):
            raise ValueError(f"has the shape {shape}, which has no axis {axis}")
        if sizes is None:
            return 1, wide
        extent = wide.pop(axis)
        if sizes[number] not in (-1, extent):
            raise ValueError(
                f"has {extent:,} elements along axis {axis}, where its rule cuts off "
                f"{sizes[number]:,}"
            )
        return extent, wide


@contextmanager
def about_leaf(path: str) -> Generator[None]:
    """Make a leaf the subject of a sentence that has none."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"leaf {path!r} {error}") from error


AS_IT_IS = Form()
TRANSPOSED = Form("reversed")


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern of tensors, and the leaf or the leaves that each becomes."""

    tensor: str
    """A pattern for their names."""
    path: str | None
    """The leaf's path. None if tensors are left out, or cut: then the form has the paths."""
    form: Form = AS_IT_IS
    stack: tuple[str, ...] = ()
    """The placeholders of `tensor` that number the parts of one leaf: its first axes."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the leaves that a tensor becomes."""
        if self.form.cut is not None:
            return self.form.cut.paths
        return () if self.path is None else (self.path,)


class Match(NamedTuple):
    """The leaf that a tensor, or a part of it, becomes."""

    path: str | None
    form: Form = AS_IT_IS
    at: tuple[int, ...] = ()
    """Its position in the leaf, if several tensors are stacked."""
    rule: int = -1
    """The number of the rule."""
    part: int = 0
    """The number of the tensor's part, if the form cuts it."""
    of_tensor: bool = False
    """True for a leaf that is to be written as a part of the tensor `path`."""


@dataclass(frozen=True, slots=True)
class Composition:
    """A leaf of a tree, and the tensors that it is made of."""

    path: str
    tensors: tuple[str, ...]
    """One tensor, or several that are stacked along new first axes, row-major."""
    form: Rearrangement
    """From a tensor to the leaf, or to its part of the stack."""
    stack: Shape = ()
    """The first axes of the leaf: one position each per tensor. Empty for a single tensor."""
    optional: bool = False
    """True if a tree may lack this leaf, as a model with tied embeddings has no head."""

    @property
    def shape(self) -> Shape:
        return (*self.stack, *self.form.shape_after)


def indices_of(stack: Shape) -> Iterator[Shape]:
    """The positions of the parts of a stack, row-major. A single tensor is at `()`."""
    return product(*map(range, stack))


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


class Finder:
    """Finds the first rule for each tensor. Names that differ in numbers alone share a rule."""

    def __init__(self, rules: Sequence[Rule], prefixes: Sequence[tuple[str, str]]):
        self._rules = rules
        self._prefixes = prefixes
        self._known: dict[str, tuple[int, str, str] | None] = {}
        self._may_reuse = not any(_depends_on_numbers(rule.tensor) for rule in rules)

    def find(self, name: str, shape: Shape) -> tuple[Match, ...] | None:
        """The leaves that a tensor becomes. None if no rule names it."""
        key = _NUMBER.sub("0", name) if self._may_reuse else name
        if key not in self._known:
            self._known[key] = self._first(key)
        known = self._known[key]
        if known is None:
            return None
        number, old, new = known
        rule = self._rules[number]
        values = match(rule.tensor, f"{new}{name[len(old) :]}", is_path=False)
        assert values is not None
        index = tuple(_number(name, values[placeholder]) for placeholder in rule.stack)
        found = tuple(
            Match(filled(path, values, is_path=True), rule.form, index, number, part)
            for part, path in enumerate(rule.paths)
        )
        return found or (Match(None, rule=number),)

    def _first(self, name: str) -> tuple[int, str, str] | None:
        """The number of the rule, and how the name begins in the file and in the rule."""
        for old, new in (("", ""), *self._prefixes):
            if not name.startswith(old):
                continue
            renamed = f"{new}{name[len(old) :]}"
            for number, rule in enumerate(self._rules):
                if match(rule.tensor, renamed, is_path=False) is not None:
                    return number, old, new
        return None


def _depends_on_numbers(pattern: str) -> bool:
    """True if a pattern may match only one of two names that differ in numbers alone."""
    names = [name.rstrip("*") for name in placeholders(pattern)]
    is_repeated = len({*names}) < len(names)
    text = filled(pattern, dict.fromkeys(names, "."), is_path=False)
    return is_repeated or "}{" in pattern or _NUMBER.search(text) is not None


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Mismatch(
            "names does not fit the tensors",
            [f"tensor {name!r} is to be stacked by {text!r}, which is no number"],
        )
    return int(text)


def match_path(rules: Sequence[Rule], path: str) -> tuple[int, int, dict[str, str]] | None:
    """The first rule that has a path like this: its number, the number of the path, the values.

    The values are those of the placeholders. None if no rule has such a path.
    """
    for number, rule in enumerate(rules):
        for part, pattern in enumerate(rule.paths):
            values = match(pattern, path, is_path=True)
            if values is not None:
                return number, part, values
    return None
