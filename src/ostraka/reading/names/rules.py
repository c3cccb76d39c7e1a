"""How the leaves of a tree and the tensors of files correspond: names, axes, stacks. Pure.

A rule has a pattern for the names of tensors and a path, or several paths if a tensor is cut into
leaves. `{n}` in both stands for a part of a name without dots and slashes. `{rest*}` stands for any
number of parts. Their dots become slashes.

Its form transposes a tensor, splits axes, cuts one of them into parts that are leaves, and merges
axes, in this order. A tensor with queries, keys and values one after the other in its rows:

    Form("reversed", cut=TensorCut(1, ("q/kernel", "k/kernel", "v/kernel"), (4096, 1024, 1024)))

A `Names` is a list of rules. It serves both directions: `compose` finds the leaves that tensors
make up, for reading. `decompose` finds the tensors that leaves are taken apart into, for writing.
Both return a `Composition` for each leaf, which describes both sides. `reading.view.renamed` makes
a source of it. `reading.names.given.read_names` makes a `Names` of the argument `names=`.

    names = read_names("llama")
    names.compose({"model.norm.weight": (64,), …})      # tensors of files -> leaves
    names.decompose({"norm/scale": (64,), …})           # leaves of a tree -> tensors

One tensor may become several leaves, and several tensors one leaf (`TensorCut`, `Rule.stack`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise, product, zip_longest
from math import prod
from typing import Any, NamedTuple

from ostraka.errors import Mismatch, count_of, name_few, nearest
from ostraka.reading.names.rearrange import (
    Axes,
    Rearrangement,
    Shape,
    Taken,
    rearranged,
    restored,
    unmerged,
)
from ostraka.tree.nodes import MAX_DEPTH
from ostraka.tree.patterns import Compiled, Wildcard, compile_parts

_HINTS = (
    (".lora_", "it is a LoRA adapter, not a whole model: open it without names="),
    (".weight_scale", "it is quantized, and there are no rules for its scales"),
    (".qweight", "it is quantized, and there are no rules for that"),
    (".absmax", "it is quantized, and there are no rules for that"),
)
_MOST_STACKED = 1 << 20

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


# Rules applied

NameFunction = Callable[[str, Shape], tuple[Match, ...] | None]
"""From the name and the shape of a tensor to what it becomes: one leaf, or several."""


@dataclass(frozen=True, slots=True)
class Names:
    """How leaves and tensors correspond."""

    given: str
    """The argument of the caller, for messages, such as `names='llama'`."""
    rules: tuple[Rule, ...] = ()
    """The first that matches decides."""
    required: int | None = None
    """How many rules, the first ones, must match something. None for all of them.

    The rules of a family need not match: they are for all its models.
    """
    prefixes: tuple[tuple[str, str], ...] = ()
    """Beginnings of names in files and in the rules. They are tried in turn."""
    stand_ins: tuple[Rule, ...] = ()
    """Rules for leaves that share the tensor of another leaf, unless they have their own."""
    optional: frozenset[str] = field(default_factory=frozenset[str])
    """Paths of leaves that a tree may be without."""
    function: NameFunction | None = None
    """In the place of rules."""

    def compose(self, tensors: Mapping[str, Shape], where: str = "the files") -> list[Composition]:
        """The leaves that tensors make up, in the order of their first tensors.

        Raises Mismatch with a line for each problem: tensors without a rule, rules without a
        tensor, tensors that would be the same leaf, missing parts of a stack.
        """
        find = self.function or Finder(self.rules, self.prefixes).find
        found: dict[str, list[tuple[Match, str]]] = {}
        problems = _Problems(tensors, "tensor", "rule" if self.function is None else "function")
        used: set[int] = set()
        for name, shape in tensors.items():
            matches = find(name, shape)
            if matches is None:
                problems.unnamed.append(name)
            for match in matches or ():
                if match.of_tensor:
                    problems.lines.append(
                        f"tensor {name!r} is given a 'tensor', which is for leaves that are written"
                    )
                    continue
                used.add(match.rule)
                if match.path is not None:
                    found.setdefault(match.path, []).append((match, name))
        problems.unused += [
            rule.tensor
            for number, rule in enumerate(self.rules[: self.required])
            if number not in used
        ]
        leaves: list[Composition] = []
        for path, parts in found.items():
            try:
                made = _assemble(path, parts, tensors)
            except ValueError as error:
                problems.lines.append(str(error))
            else:
                leaves.append(replace(made, optional=path in self.optional))
        leaves += self._stand_ins(tensors, {leaf.path for leaf in leaves})
        problems.lines += _find_nested([leaf.path for leaf in leaves])
        problems.check(f"{self.given} does not fit {where}")
        return leaves

    def decompose(self, leaves: Mapping[str, Shape], where: str = "the tree") -> list[Composition]:
        """The tensors that leaves are taken apart into, leaf by leaf.

        Leaves that a tensor is cut into are put together: all must be in the tree. A function is
        asked for the names of tensors, given the paths and shapes of leaves. Raises Mismatch as
        `compose` does.
        """
        problems = _Problems(leaves, "leaf", "rule" if self.function is None else "function")
        groups: dict[Any, _TensorGroup] = {}
        made: list[list[Composition]] = []
        if self.function is None:
            self._group_by_rules(leaves, groups, problems)
        else:
            alone = self._group_by(self.function, leaves, groups, problems, where)
            made += [[leaf] for leaf in alone]
        for group in groups.values():
            try:
                made.append(group.take_apart())
            except ValueError as error:
                problems.lines.append(str(error))
        problems.lines += _find_twice(made)
        problems.check(f"{self.given} does not fit {where}")
        found = (leaf for group in made for leaf in group)
        return [replace(leaf, optional=leaf.path in self.optional) for leaf in found]

    def _group_by_rules(
        self, leaves: Mapping[str, Shape], groups: dict[Any, _TensorGroup], problems: _Problems
    ) -> None:
        used: set[int] = set()
        for path, shape in leaves.items():
            found = match_path(self.rules, path)
            if found is None:
                problems.unnamed.append(path)
                continue
            number, part, values = found
            used.add(number)
            key = (number, *sorted(values.items()))
            group = groups.setdefault(key, _TensorGroup(self.rules[number], values))
            group.parts[part] = (path, shape)
        problems.unused += [
            rule.paths[0]
            for number, rule in enumerate(self.rules[: self.required])
            if rule.paths and number not in used
        ]

    def _group_by(
        self,
        function: NameFunction,
        leaves: Mapping[str, Shape],
        groups: dict[Any, _TensorGroup],
        problems: _Problems,
        where: str,
    ) -> list[Composition]:
        """The tensors of leaves that are whole tensors. The other leaves go to `groups`."""
        said = {path: function(path, shape) for path, shape in leaves.items()}
        others: dict[str, Shape] = {}
        for path, shape in leaves.items():
            match = (said[path] or (Match(None),))[0]
            if not match.of_tensor or match.path is None:
                others[path] = shape
                continue
            rule = Rule(match.path, None, match.form)
            group = groups.setdefault(match.path, _TensorGroup(rule, {}))
            if group.rule != rule:
                first, _ = next(iter(group.parts.values()))
                problems.lines.append(
                    f"tensor {match.path!r} is cut in one way for leaf {first!r}, and in another "
                    f"for {path!r}"
                )
            group.parts[match.part] = (path, shape)
        made = replace(self, function=lambda path, shape: said[path]).compose(others, where)
        for tensor in made:
            if tensor.stack:
                raise Mismatch(
                    f"{self.given} does not fit {where}",
                    [f"rules can't stack leaves into {tensor.path!r}; give each leaf a tensor"],
                )
        return [Composition(t.tensors[0], (t.path,), t.form.inverse()) for t in made]

    def _stand_ins(self, tensors: Mapping[str, Shape], there: set[str]) -> Iterator[Composition]:
        finder = Finder(self.stand_ins, self.prefixes)
        for name, shape in tensors.items() if self.stand_ins else ():
            for match in finder.find(name, shape) or ():
                if match.path is not None and match.path not in there:
                    form = match.form.of_tensor(shape)
                    yield Composition(match.path, (name,), form, optional=True)


def _assemble(
    path: str, parts: Sequence[tuple[Match, str]], tensors: Mapping[str, Shape]
) -> Composition:
    """A leaf of its parts. Raises ValueError, a sentence that names it."""
    if len({len(match.at) for match, _ in parts}) > 1 or (not parts[0][0].at and len(parts) > 1):
        names = [name for _, name in parts]
        raise ValueError(f"tensors {name_few(names)} would all be leaf {path!r}")
    ordered = sorted(parts, key=lambda part: part[0].at)
    for (match, name), (after, other) in pairwise(ordered):
        if match.at == after.at:
            raise ValueError(
                f"tensors {name_few([name, other])} would be the same part of leaf {path!r}"
            )
    stack = tuple(max(axis) + 1 for axis in zip(*(m.at for m, _ in parts), strict=True))
    first, name = ordered[0]
    if prod(stack) != len(ordered):
        there = {match.at for match, _ in ordered}
        missing = next(index for index in indices_of(stack) if index not in there)
        at = missing[0] if len(missing) == 1 else missing
        raise ValueError(
            f"leaf {path!r} is stacked of {count_of(len(ordered), 'tensor')}, such as {name!r}, "
            f"and there is none with the number {at}"
        )
    alike = (str(first.form), first.part, tensors[name])
    for match, other in ordered:
        if (str(match.form), match.part, tensors[other]) != alike:
            raise ValueError(
                f"leaf {path!r} is stacked of tensors that are not alike: {name!r} has the shape "
                f"{tensors[name]}, {other!r} has {tensors[other]}"
                + (", or other rules" if tensors[name] == tensors[other] else "")
            )
    try:
        form = first.form.of_tensor(tensors[name], first.part)
    except ValueError as error:
        raise ValueError(f"tensor {name!r} {error}") from error
    return Composition(path, tuple(name for _, name in ordered), form, stack)


@dataclass(slots=True)
class _TensorGroup:
    """The leaves that are written as the same tensors: one, or all that those are cut into."""

    rule: Rule
    values: Mapping[str, str]
    """Values of the placeholders."""
    parts: dict[int, tuple[str, Shape]] = field(default_factory=dict[int, tuple[str, Shape]])
    """Leaves by their number in the rule: path and shape."""

    def take_apart(self) -> list[Composition]:
        """The tensors of each leaf. Raises ValueError, a sentence that names the leaf or tensor."""
        paths = [filled(path, self.values, is_path=True) for path in self.rule.paths]
        missing = [path for number, path in enumerate(paths) if number not in self.parts]
        if missing:
            tensor = self._name([f"{{{name}}}" for name in self.rule.stack])
            raise ValueError(
                f"tensor {tensor!r} is put together of {count_of(len(paths), 'leaf')}, of which "
                f"there is no {name_few(missing)}"
            )
        leaves = [leaf for _, leaf in sorted(self.parts.items())]
        rank = len(self.rule.stack)
        first, stack = leaves[0][0], leaves[0][1][:rank]
        for path, shape in leaves:
            if len(shape) < rank:
                raise ValueError(
                    f"leaf {path!r} has the shape {shape}, which has no {count_of(rank, 'axis')} "
                    "to unstack"
                )
            if shape[:rank] != stack:
                raise ValueError(
                    f"leaves {first!r} and {path!r} can't be put together: they are stacks "
                    f"of {stack} and {shape[:rank]}"
                )
        if prod(stack) > _MOST_STACKED:
            raise ValueError(f"leaf {first!r} would be taken apart into {prod(stack):,} tensors")
        if not prod(stack):
            shape = leaves[0][1]
            raise ValueError(f"leaf {first!r} has the shape {shape}, which is a stack of nothing")
        names = tuple(self._name(index) for index in indices_of(stack))
        forms = self.rule.form.of_leaves([(path, shape[rank:]) for path, shape in leaves])
        return [
            Composition(path, names, form, stack)
            for (path, _), form in zip(leaves, forms, strict=True)
        ]

    def _name(self, index: Sequence[int | str]) -> str:
        """The name of a tensor of the stack."""
        numbers = dict(zip(self.rule.stack, map(str, index), strict=True))
        return filled(self.rule.tensor, {**self.values, **numbers}, is_path=False)


@dataclass(slots=True)
class _Problems:
    """The names that do not correspond, as the lines of one error."""

    there: Mapping[str, Shape]
    noun: str
    giver: str
    unnamed: list[str] = field(default_factory=list[str])
    unused: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])

    def check(self, subject: str) -> None:
        lines = dict.fromkeys([*self._of_names(), *self.lines])
        if lines:
            raise Mismatch(subject, list(lines))

    def _of_names(self) -> Iterator[str]:
        unused, few = self.unused, name_few(self.unnamed)
        if self.unnamed and self.noun == "tensor":
            hints = (h for part, h in _HINTS if any(part in name for name in self.unnamed))
            yield from islice(hints, 1)
        if self.unnamed and len(self.unnamed) == len(self.there) and unused:
            first, unused = unused[0], []
            yield f"no rule names any {self.noun}, such as {few}; the first is for {first!r}"
        elif self.unnamed:
            yield (
                f"no {self.giver} names {count_of(len(self.unnamed), self.noun)} ({few}): give "
                "one, or None to leave out what it matches"
            )
        for pattern in unused[:5]:
            hint = nearest(pattern, list(self.there)[:10_000])
            yield f"the rule for {pattern!r} matches no {self.noun} that is left for it{hint}"
        if len(unused) > 5:
            yield f"{count_of(len(unused) - 5, 'rule')} more match nothing"


def _find_twice(groups: Iterable[Sequence[Composition]]) -> Iterator[str]:
    """Problems with leaves of different groups that would be the same tensor."""
    first: dict[str, tuple[int, str]] = {}
    for number, group in enumerate(groups):
        for leaf in group:
            for name in leaf.tensors:
                found, path = first.setdefault(name, (number, leaf.path))
                if found != number:
                    yield f"leaves {path!r} and {leaf.path!r} would both be tensor {name!r}"


def _find_nested(paths: Sequence[str]) -> Iterator[str]:
    """Problems with paths that have a leaf above them, or that are too deep."""
    there = set(paths)
    for path in paths:
        depth = path.count("/")
        if depth > MAX_DEPTH:
            yield (
                f"{path[:80]!r}… would be a leaf in {depth:,} containers; a tree has at most "
                f"{MAX_DEPTH}"
            )
            continue
        above = path
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in there:
                yield f"{above!r} would be a leaf, and hold the leaf {path!r}, too"
                break
