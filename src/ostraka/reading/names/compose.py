"""How the leaves of a tree and the tensors of files correspond: names, axes, stacks. Pure.

A `Names` is a list of rules. It serves both directions: `compose` finds the leaves that tensors
make up, for reading. `decompose` finds the tensors that leaves are taken apart into, for writing.
Both return a `Composition` for each leaf, which describes both sides. `reading.view.renamed` makes
a source of it. `reading.names.given.read_names` makes a `Names` of the argument `names=`.

    names = read_names("llama")
    names.compose({"model.norm.weight": (64,), …})      # tensors of files -> leaves
    names.decompose({"norm/scale": (64,), …})           # leaves of a tree -> tensors

One tensor may become several leaves, and several tensors one leaf (`reading.names.rules.TensorCut`,
`Rule.stack`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from math import prod
from typing import Any

from ostraka.errors import Mismatch, count_of, name_few, nearest
from ostraka.reading.names.rearrange import Shape
from ostraka.reading.names.rules import (
    Composition,
    Finder,
    Match,
    Rule,
    filled,
    indices_of,
    match_path,
)
from ostraka.tree.nodes import MAX_DEPTH

_HINTS = (
    (".lora_", "it is a LoRA adapter, not a whole model: open it without names="),
    (".weight_scale", "it is quantized, and there are no rules for its scales"),
    (".qweight", "it is quantized, and there are no rules for that"),
    (".absmax", "it is quantized, and there are no rules for that"),
)
_MOST_STACKED = 1 << 20

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
