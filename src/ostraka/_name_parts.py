"""Leaves that are made of tensors, and tensors that leaves are taken apart into. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ostraka._name_patterns import filled
from ostraka._name_rules import Composition, Match, Rule
from ostraka._rearrange import Rearrangement, Shape
from ostraka.errors import count_of, name_few

MOST_STACKED = 1 << 20


def assemble(
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


@dataclass(slots=True)
class Written:
    """The leaves that are written as the same tensors: one, or all that those are cut into."""

    rule: Rule
    values: Mapping[str, str]
    """Of the placeholders."""
    parts: dict[int, tuple[str, Shape]] = field(default_factory=dict[int, tuple[str, Shape]])
    """Leaves by their number in the rule: path and shape."""

    def take_apart(self) -> list[Composition]:
        """The tensors of each leaf. Raises ValueError, a sentence that names what is wrong."""
        self._check_all_there()
        leaves = [leaf for _, leaf in sorted(self.parts.items())]
        rank = len(self.rule.stack)
        for path, shape in leaves:
            if len(shape) < rank:
                raise ValueError(
                    f"leaf {path!r} has the shape {shape}, which has no {count_of(rank, 'axis')} "
                    "to unstack"
                )
            if shape[:rank] != leaves[0][1][:rank]:
                raise ValueError(
                    f"leaves {leaves[0][0]!r} and {path!r} can't be put together: they are stacks "
                    f"of {leaves[0][1][:rank]} and {shape[:rank]}"
                )
        stack = leaves[0][1][:rank]
        names = self._names(*leaves[0], stack)
        forms = self._forms([(path, shape[rank:]) for path, shape in leaves])
        return [
            Composition(path, names, form, stack)
            for (path, _), form in zip(leaves, forms, strict=True)
        ]

    def _check_all_there(self) -> None:
        paths = [filled(path, self.values, is_path=True) for path in self.rule.paths]
        missing = [path for number, path in enumerate(paths) if number not in self.parts]
        if missing:
            stacked = {name: f"{{{name}}}" for name in self.rule.stack}
            tensor = filled(self.rule.tensor, {**self.values, **stacked}, is_path=False)
            raise ValueError(
                f"tensor {tensor!r} is put together of {count_of(len(paths), 'leaf')}, of which "
                f"there is no {name_few(missing)}"
            )

    def _forms(self, leaves: Sequence[tuple[str, Shape]]) -> list[Rearrangement]:
        if self.rule.form.cut is not None:
            return self.rule.form.of_leaves(leaves)
        ((path, shape),) = leaves
        try:
            return [self.rule.form.of_leaf(shape)]
        except ValueError as error:
            raise ValueError(f"leaf {path!r} {error}") from error

    def _names(self, path: str, shape: Shape, stack: Shape) -> tuple[str, ...]:
        """Of the tensors, row-major over their stack."""
        if prod(stack) > MOST_STACKED:
            raise ValueError(f"leaf {path!r} would be taken apart into {prod(stack):,} tensors")
        if not prod(stack):
            raise ValueError(f"leaf {path!r} has the shape {shape}, which is a stack of nothing")
        return tuple(
            filled(
                self.rule.tensor,
                {**self.values, **dict(zip(self.rule.stack, map(str, index), strict=True))},
                is_path=False,
            )
            for index in _indices(stack)
        )
