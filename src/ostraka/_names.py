"""How the leaves of a tree and the tensors of files correspond: names, axes, stacks. Pure.

A `Names` is a list of rules. It serves both directions: `compose` finds the leaves that tensors
make up, for reading; `decompose` finds the tensors that leaves are taken apart into, for writing.
Both give the same kind of value, a `Composition` for each leaf, so that whoever has one knows the
other side, too. `_view.renamed` makes a source of it; `_names_given.read_names` makes a `Names` of
what a user gives as `names=`.

    names = read_names("llama")
    names.compose({"model.norm.weight": (64,), …})      # tensors of files -> leaves
    names.decompose({"norm/scale": (64,), …})           # leaves of a tree -> tensors

A rule has a pattern for the names of tensors and a path. `{n}` in both stands for a part of a name
without dots and slashes, `{rest*}` for any number of parts, whose dots become slashes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from ostraka._name_patterns import compiled, filled
from ostraka._rearrange import Rearrangement, Shape, rearranged, restored
from ostraka.errors import Mismatch, count_of, name_few, nearest

MOST_STACKED = 1 << 20


@dataclass(frozen=True, slots=True)
class Form:
    """What becomes of a tensor's axes; as `rearranged` has it."""

    axes: tuple[int, ...] | Literal["reversed"] | None = None
    split: Mapping[int, tuple[int, ...]] | None = None
    merge: Mapping[int, tuple[int, ...]] | None = None

    def of_tensor(self, shape: Shape) -> Rearrangement:
        """From a tensor of this shape to a leaf. Raises ValueError if it does not fit."""
        return rearranged(shape, self._axes(len(shape)), self.split, self.merge)

    def of_leaf(self, shape: Shape) -> Rearrangement:
        """From a tensor to a leaf of this shape. Raises ValueError if it does not fit."""
        joined = sum(len(sizes) - 1 for sizes in (self.split or {}).values())
        parted = sum(len(sizes) - 1 for sizes in (self.merge or {}).values())
        return restored(shape, self._axes(len(shape) - joined + parted), self.split, self.merge)

    def _axes(self, rank: int) -> tuple[int, ...] | None:
        return tuple(reversed(range(rank))) if self.axes == "reversed" else self.axes


AS_IT_IS = Form()
TRANSPOSED = Form("reversed")


@dataclass(frozen=True, slots=True)
class Rule:
    """Which tensors become which leaf."""

    tensor: str
    """A pattern for their names."""
    path: str | None
    """Where the leaf is; None if they are left out."""
    form: Form = AS_IT_IS
    stack: tuple[str, ...] = ()
    """The placeholders of `tensor` that number the parts of one leaf: its first axes."""


class Match(NamedTuple):
    """What a tensor becomes."""

    path: str | None
    form: Form = AS_IT_IS
    at: tuple[int, ...] = ()
    """Which part of a leaf it is, if several are stacked."""
    rule: int = -1
    """Which rule says so."""


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


NameFunction = Callable[[str, Shape], Match | None]
"""From the name and the shape of what is read to what it becomes."""


@dataclass(frozen=True, slots=True)
class Names:
    """How leaves and tensors correspond."""

    given: str
    """What the caller gave, for messages, such as `names='llama'`."""
    rules: tuple[Rule, ...] = ()
    """The first that matches decides."""
    is_complete: bool = True
    """Whether every rule must match something; those of a family are for all its models."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """How names may begin in files, and how the rules have that; tried in turn."""
    stand_ins: tuple[Rule, ...] = ()
    """For leaves that no tensor makes otherwise: of a tensor that another leaf has, too."""
    optional: frozenset[str] = field(default_factory=frozenset[str])
    """Paths of leaves that a tree may be without."""
    function: NameFunction | None = None
    """In the place of rules."""

    def compose(self, tensors: Mapping[str, Shape], where: str = "the files") -> list[Composition]:
        """The leaves that tensors make up, in the order of their first tensors.

        Raises Mismatch, which names what does not correspond: tensors that no rule names, rules
        that name none, tensors that would be the same leaf, parts of a stack that are missing.
        """
        find = self.function or _Finder(self).find
        found: dict[str, list[tuple[Match, str]]] = {}
        problems = _Problems(tensors, "tensor", "rule" if self.function is None else "function")
        used: set[int] = set()
        for name, shape in tensors.items():
            match = find(name, shape)
            if match is None:
                problems.unnamed.append(name)
                continue
            used.add(match.rule)
            if match.path is not None:
                found.setdefault(match.path, []).append((match, name))
        if self.is_complete:
            unused = set(range(len(self.rules))) - used
            problems.unused += [self.rules[number].tensor for number in sorted(unused)]
        leaves: list[Composition] = []
        for path, parts in found.items():
            try:
                made = _assemble(path, parts, tensors)
            except ValueError as error:
                problems.lines.append(str(error))
            else:
                leaves.append(_optional(made, path in self.optional))
        leaves += self._stand_ins(tensors, {leaf.path for leaf in leaves})
        problems.lines += _nested([leaf.path for leaf in leaves])
        problems.check(f"{self.given} does not fit {where}")
        return leaves

    def decompose(self, leaves: Mapping[str, Shape], where: str = "the tree") -> list[Composition]:
        """The tensors that leaves are taken apart into, leaf by leaf.

        A function is asked for the names of tensors, given the paths and shapes of leaves. Raises
        Mismatch as `compose` does.
        """
        if self.function is not None:
            made = self.compose(leaves, where)
            for tensor in made:
                if tensor.stack:
                    raise Mismatch(
                        f"{self.given} does not fit {where}",
                        [f"tensor {tensor.path!r} would be stacked of leaves, which has no form"],
                    )
            return [
                Composition(tensor.tensors[0], (tensor.path,), tensor.form.inverse())
                for tensor in made
            ]
        problems = _Problems(leaves, "leaf", "rule")
        found: list[Composition] = []
        used: set[int] = set()
        for path, shape in leaves.items():
            match = _match_path(self.rules, path)
            if match is None:
                problems.unnamed.append(path)
                continue
            number, values = match
            used.add(number)
            try:
                made = _taken_apart(self.rules[number], path, shape, values)
            except ValueError as error:
                problems.lines.append(f"leaf {path!r} {error}")
            else:
                found.append(_optional(made, path in self.optional))
        if self.is_complete:
            unused = [n for n, rule in enumerate(self.rules) if rule.path and n not in used]
            problems.unused += [str(self.rules[number].path) for number in unused]
        problems.lines += _twice((c.path, name) for c in found for name in c.tensors)
        problems.check(f"{self.given} does not fit {where}")
        return found

    def _stand_ins(self, tensors: Mapping[str, Shape], there: set[str]) -> Iterator[Composition]:
        finder = _Finder(Names(self.given, self.stand_ins, prefixes=self.prefixes))
        for name, shape in tensors.items() if self.stand_ins else ():
            match = finder.find(name, shape)
            if match is not None and match.path is not None and match.path not in there:
                yield Composition(match.path, (name,), match.form.of_tensor(shape), optional=True)


def _optional(made: Composition, optional: bool) -> Composition:
    return Composition(made.path, made.tensors, made.form, made.stack, optional)


# Patterns

_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


class _Finder:
    """Finds the first rule for each tensor; names that differ in their numbers have the same."""

    def __init__(self, names: Names):
        self._names = names
        self._known: dict[str, tuple[int, str, str] | None] = {}
        numbered = any(_NUMBER.search(rule.tensor) for rule in names.rules)
        self._may_reuse = not numbered

    def find(self, name: str, shape: Shape) -> Match | None:
        key = _NUMBER.sub("0", name) if self._may_reuse else name
        if key not in self._known:
            self._known[key] = self._first(key)
        known = self._known[key]
        if known is None:
            return None
        number, old, new = known
        rule = self._names.rules[number]
        matched = compiled(rule.tensor, is_path=False).fullmatch(f"{new}{name[len(old) :]}")
        assert matched is not None
        if rule.path is None:
            return Match(None, rule=number)
        values = matched.groupdict()
        index = tuple(_number(name, values[placeholder]) for placeholder in rule.stack)
        return Match(filled(rule.path, values, is_path=True), rule.form, index, number)

    def _first(self, name: str) -> tuple[int, str, str] | None:
        """The number of the rule, and how the name begins in the file and in the rule."""
        for old, new in (("", ""), *self._names.prefixes):
            if not name.startswith(old):
                continue
            renamed = f"{new}{name[len(old) :]}"
            for number, rule in enumerate(self._names.rules):
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


def _match_path(rules: Sequence[Rule], path: str) -> tuple[int, dict[str, str]] | None:
    for number, rule in enumerate(rules):
        if rule.path is not None:
            matched = compiled(rule.path, is_path=True).fullmatch(path)
            if matched is not None:
                return number, matched.groupdict()
    return None


# Leaves


def _assemble(
    path: str, parts: Sequence[tuple[Match, str]], tensors: Mapping[str, Shape]
) -> Composition:
    """A leaf of its parts. Raises ValueError, a sentence that names it."""
    if len({len(match.at) for match, _ in parts}) > 1 or (not parts[0][0].at and len(parts) > 1):
        names = [name for _, name in parts]
        raise ValueError(f"tensors {name_few(names)} would all be leaf {path!r}")
    ordered = sorted(parts, key=lambda part: part[0].at)
    stack = tuple(max(axis) + 1 for axis in zip(*(m.at for m, _ in parts), strict=True))
    _check_stack(path, stack, ordered)
    first, name = ordered[0]
    forms = {(str(match.form), tensors[name]) for match, name in ordered}
    if len(forms) > 1:
        other = next(n for m, n in ordered if (m.form, tensors[n]) != (first.form, tensors[name]))
        raise ValueError(
            f"leaf {path!r} is stacked of tensors that are not alike: {name!r} has the shape "
            f"{tensors[name]}, {other!r} has {tensors[other]}"
        )
    try:
        form = first.form.of_tensor(tensors[name])
    except ValueError as error:
        raise ValueError(f"tensor {name!r} {error}") from error
    return Composition(path, tuple(name for _, name in ordered), form, stack)


def _check_stack(path: str, stack: Shape, ordered: Sequence[tuple[Match, str]]) -> None:
    indices = [match.at for match, _ in ordered]
    for number, index in enumerate(indices[1:], start=1):
        if index == indices[number - 1]:
            names = [name for match, name in ordered if match.at == index]
            raise ValueError(f"tensors {name_few(names)} would be the same part of leaf {path!r}")
    if prod(stack) != len(ordered):
        there = set(indices)
        missing = next(i for i in _indices(stack) if i not in there)
        at = missing[0] if len(missing) == 1 else missing
        raise ValueError(
            f"leaf {path!r} is stacked of {count_of(len(ordered), 'tensor')}, such as "
            f"{ordered[0][1]!r}, and there is none with the number {at}"
        )


def _indices(stack: Shape) -> Iterator[tuple[int, ...]]:
    for number in range(prod(stack)):
        index: list[int] = []
        for size in reversed(stack):
            number, at = divmod(number, size)
            index.append(at)
        yield tuple(reversed(index))


def _taken_apart(rule: Rule, path: str, shape: Shape, values: Mapping[str, str]) -> Composition:
    """The tensors of a leaf. Raises ValueError, a sentence without its subject."""
    rank = len(rule.stack)
    if len(shape) < rank:
        raise ValueError(f"has the shape {shape}, which has no {count_of(rank, 'axis')} to unstack")
    stack, form = shape[:rank], rule.form.of_leaf(shape[rank:])
    if prod(stack) > MOST_STACKED:
        raise ValueError(f"would be taken apart into {prod(stack):,} tensors")
    names = [
        filled(
            rule.tensor,
            {**values, **dict(zip(rule.stack, map(str, i), strict=True))},
            is_path=False,
        )
        for i in _indices(stack)
    ]
    if not names:
        raise ValueError(f"has the shape {shape}, which is a stack of nothing")
    return Composition(path, tuple(names), form, stack)


# What does not correspond

_HINTS = (
    (".lora_", "it is a LoRA adapter, not a whole model: open it without names="),
    (".weight_scale", "it is quantized, and there are no rules for its scales"),
    (".qweight", "it is quantized, and there are no rules for that"),
    (".absmax", "it is quantized, and there are no rules for that"),
)


@dataclass(slots=True)
class _Problems:
    there: Mapping[str, Shape]
    noun: str
    giver: str
    unnamed: list[str] = field(default_factory=list[str])
    unused: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])

    def check(self, subject: str) -> None:
        lines = [*self._of_unnamed(), *self._of_unused(), *self.lines]
        if lines:
            raise Mismatch(subject, lines)

    def _of_unnamed(self) -> Iterator[str]:
        if not self.unnamed:
            return
        for part, hint in _HINTS if self.noun == "tensor" else ():
            if any(part in name for name in self.unnamed):
                yield hint
                break
        few = name_few(self.unnamed)
        if len(self.unnamed) == len(self.there) and self.unused:
            first = self.unused[0]
            yield f"no rule names any {self.noun}, such as {few}; the first is for {first!r}"
            self.unused.clear()
            return
        yield (
            f"no {self.giver} names {count_of(len(self.unnamed), self.noun)} ({few}): give one, or "
            f"None to leave out what it matches"
        )

    def _of_unused(self) -> Iterator[str]:
        for pattern in self.unused[:5]:
            hint = nearest(pattern, list(self.there)[:10_000])
            yield f"the rule for {pattern!r} matches no {self.noun} that is left for it{hint}"
        if len(self.unused) > 5:
            yield f"{count_of(len(self.unused) - 5, 'rule')} more match nothing"


def _twice(pairs: Iterator[tuple[str, str]]) -> Iterator[str]:
    first: dict[str, str] = {}
    for path, name in pairs:
        if first.setdefault(name, path) != path:
            yield f"leaves {first[name]!r} and {path!r} would both be tensor {name!r}"


def _nested(paths: Sequence[str]) -> Iterator[str]:
    """A path that is a leaf can't have leaves below it."""
    there = set(paths)
    for path in paths:
        above = path
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in there:
                yield f"{above!r} would be a leaf, and hold the leaf {path!r}, too"
                break
