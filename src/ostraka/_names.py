"""How the leaves of a tree and the tensors of files correspond: names, axes, stacks. Pure.

A `Names` is a list of rules. It serves both directions: `compose` finds the leaves that tensors
make up, for reading; `decompose` finds the tensors that leaves are taken apart into, for writing.
Both give the same kind of value, a `Composition` for each leaf, so that whoever has one knows the
other side, too. `_view.renamed` makes a source of it; `_names_given.read_names` makes a `Names` of
what a user gives as `names=`.

    names = read_names("llama")
    names.compose({"model.norm.weight": (64,), …})      # tensors of files -> leaves
    names.decompose({"norm/scale": (64,), …})           # leaves of a tree -> tensors

One tensor may become several leaves, and several tensors one leaf (`_form.Cut`, `Rule.stack`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ostraka._name_parts import Written, assemble
from ostraka._name_problems import Problems, find_nested, find_twice
from ostraka._name_rules import Composition, Finder, Match, Rule, match_path
from ostraka._rearrange import Shape
from ostraka.errors import Mismatch

NameFunction = Callable[[str, Shape], tuple[Match, ...] | None]
"""From the name and the shape of what is read to what it becomes: one leaf, or several."""


@dataclass(frozen=True, slots=True)
class Names:
    """How leaves and tensors correspond."""

    given: str
    """What the caller gave, for messages, such as `names='llama'`."""
    rules: tuple[Rule, ...] = ()
    """The first that matches decides."""
    required: int | None = None
    """How many rules, the first ones, must match something; all of them if None. Those of a family
    are for all its models."""
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
        find = self.function or Finder(self.rules, self.prefixes).find
        return self._compose(tensors, find, where)

    def _compose(
        self, tensors: Mapping[str, Shape], find: NameFunction, where: str
    ) -> list[Composition]:
        found: dict[str, list[tuple[Match, str]]] = {}
        problems = Problems(tensors, "tensor", "rule" if self.function is None else "function")
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
        unused = set(range(len(self.rules[: self.required]))) - used
        problems.unused += [self.rules[number].tensor for number in sorted(unused)]
        leaves: list[Composition] = []
        for path, parts in found.items():
            try:
                made = assemble(path, parts, tensors)
            except ValueError as error:
                problems.lines.append(str(error))
            else:
                leaves.append(replace(made, optional=path in self.optional))
        leaves += self._stand_ins(tensors, {leaf.path for leaf in leaves})
        problems.lines += find_nested([leaf.path for leaf in leaves])
        problems.check(f"{self.given} does not fit {where}")
        return leaves

    def decompose(self, leaves: Mapping[str, Shape], where: str = "the tree") -> list[Composition]:
        """The tensors that leaves are taken apart into, leaf by leaf.

        Leaves that a tensor is cut into are put together: all must be there. A function is asked
        for the names of tensors, given the paths and shapes of leaves. Raises Mismatch as `compose`
        does.
        """
        if self.function is not None:
            return self._decompose_by(self.function, leaves, where)
        problems = Problems(leaves, "leaf", "rule")
        groups: dict[Any, Written] = {}
        used: set[int] = set()
        for path, shape in leaves.items():
            match = match_path(self.rules, path)
            if match is None:
                problems.unnamed.append(path)
                continue
            used.add(match.rule)
            key = (match.rule, *sorted(match.values.items()))
            group = groups.setdefault(key, Written(self.rules[match.rule], match.values))
            group.parts[match.part] = (path, shape)
        problems.unused += [
            rule.paths[0]
            for number, rule in enumerate(self.rules[: self.required])
            if rule.paths and number not in used
        ]
        return self._taken_apart(groups.values(), problems, where)

    def _decompose_by(
        self, function: NameFunction, leaves: Mapping[str, Shape], where: str
    ) -> list[Composition]:
        said = {path: function(path, shape) for path, shape in leaves.items()}
        groups: dict[str, Written] = {}
        others: dict[str, Shape] = {}
        problems = Problems(leaves, "leaf", "function")
        for path, shape in leaves.items():
            match = (said[path] or (Match(None),))[0]
            if not match.of_tensor or match.path is None:
                others[path] = shape
                continue
            rule = Rule(match.path, None, match.form)
            group = groups.setdefault(match.path, Written(rule, {}))
            if group.rule != rule:
                first, _ = next(iter(group.parts.values()))
                problems.lines.append(
                    f"tensor {match.path!r} is cut in one way for leaf {first!r}, and in another "
                    f"for {path!r}"
                )
            group.parts[match.part] = (path, shape)
        made = self._compose(others, lambda path, shape: said[path], where)
        for tensor in made:
            if tensor.stack:
                raise Mismatch(
                    f"{self.given} does not fit {where}",
                    [f"tensor {tensor.path!r} would be stacked of leaves, which has no form"],
                )
        alone = [
            Composition(tensor.tensors[0], (tensor.path,), tensor.form.inverse()) for tensor in made
        ]
        return self._taken_apart(groups.values(), problems, where, alone)

    def _taken_apart(
        self,
        groups: Collection[Written],
        problems: Problems,
        where: str,
        alone: Sequence[Composition] = (),
    ) -> list[Composition]:
        made: list[list[Composition]] = [[leaf] for leaf in alone]
        for group in groups:
            try:
                made.append(group.take_apart())
            except ValueError as error:
                problems.lines.append(str(error))
        problems.lines += find_twice(made)
        problems.check(f"{self.given} does not fit {where}")
        found = (leaf for group in made for leaf in group)
        return [replace(leaf, optional=leaf.path in self.optional) for leaf in found]

    def _stand_ins(self, tensors: Mapping[str, Shape], there: set[str]) -> Iterator[Composition]:
        finder = Finder(self.stand_ins, self.prefixes)
        for name, shape in tensors.items() if self.stand_ins else ():
            for match in finder.find(name, shape) or ():
                if match.path is not None and match.path not in there:
                    form = match.form.of_tensor(shape)
                    yield Composition(match.path, (name,), form, optional=True)
