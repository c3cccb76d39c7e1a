"""Rules for names: which tensors become which leaves, and the rule that fits a name. Pure.

A rule has a pattern for the names of tensors and a path, or the paths of the leaves that a tensor
is cut into. `{n}` in both stands for a part of a name without dots and slashes, `{rest*}` for any
number of parts, whose dots become slashes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ostraka._form import AS_IT_IS, Form
from ostraka._name_patterns import compiled, filled
from ostraka._rearrange import Rearrangement, Shape
from ostraka.errors import Mismatch


@dataclass(frozen=True, slots=True)
class Rule:
    """Which tensors become which leaf, or which leaves."""

    tensor: str
    """A pattern for their names."""
    path: str | None
    """Where the leaf is; None if they are left out, or cut: then the form has the paths."""
    form: Form = AS_IT_IS
    stack: tuple[str, ...] = ()
    """The placeholders of `tensor` that number the parts of one leaf: its first axes."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the leaves that a tensor becomes."""
        if self.form.cut is not None:
            return self.form.cut.paths
        return () if self.path is None else (self.path,)


class Match(NamedTuple):
    """What a tensor, or a part of it, becomes."""

    path: str | None
    form: Form = AS_IT_IS
    at: tuple[int, ...] = ()
    """Which part of a leaf it is, if several are stacked."""
    rule: int = -1
    """Which rule says so."""
    part: int = 0
    """Which part of the tensor, if the form cuts it."""
    of_tensor: bool = False
    """Whether this is said of a leaf that is a part of the tensor `path`, to be written."""


@dataclass(frozen=True, slots=True)
class Composition:
    """A leaf of a tree, and the tensors that it is made of."""

    path: str
    tensors: tuple[str, ...]
    """The only one; or those that are stacked along new first axes, row-major."""
    form: Rearrangement
    """From a tensor, which is the arrangement before, to the leaf or its part, after."""
    stack: Shape = ()
    """The first axes of the leaf, which number the tensors; none if there is but one."""
    optional: bool = False
    """Whether a tree may be without this leaf, as a model with tied embeddings has no head."""

    @property
    def shape(self) -> Shape:
        return (*self.stack, *self.form.shape_after)

    @property
    def tensor_shape(self) -> Shape:
        return self.form.shape_before


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


class Finder:
    """Finds the first rule for each tensor; names that differ in their numbers have the same."""

    def __init__(self, rules: Sequence[Rule], prefixes: Sequence[tuple[str, str]]):
        self._rules = rules
        self._prefixes = prefixes
        self._known: dict[str, tuple[int, str, str] | None] = {}
        self._may_reuse = not any(_NUMBER.search(rule.tensor) for rule in rules)

    def find(self, name: str, shape: Shape) -> tuple[Match, ...] | None:
        """What becomes of a tensor; None if no rule says so."""
        key = _NUMBER.sub("0", name) if self._may_reuse else name
        if key not in self._known:
            self._known[key] = self._first(key)
        known = self._known[key]
        if known is None:
            return None
        number, old, new = known
        rule = self._rules[number]
        matched = compiled(rule.tensor, is_path=False).fullmatch(f"{new}{name[len(old) :]}")
        assert matched is not None
        values = matched.groupdict()
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
                if compiled(rule.tensor, is_path=False).fullmatch(renamed):
                    return number, old, new
        return None


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Mismatch(
            "names does not fit the tensors",
            [f"tensor {name!r} is to be stacked by {text!r}, which is no number"],
        )
    return int(text)


class PathMatch(NamedTuple):
    """The rule that a leaf is written by."""

    rule: int
    part: int
    """Which of its paths it is."""
    values: Mapping[str, str]
    """Of the placeholders."""


def match_path(rules: Sequence[Rule], path: str) -> PathMatch | None:
    """The first rule that has a path like this."""
    for number, rule in enumerate(rules):
        for part, pattern in enumerate(rule.paths):
            matched = compiled(pattern, is_path=True).fullmatch(path)
            if matched is not None:
                return PathMatch(number, part, matched.groupdict())
    return None
