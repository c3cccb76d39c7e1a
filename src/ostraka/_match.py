"""Compare what is wanted with what was saved, and settle where each leaf goes.

All differences are found before anything is read, and raised as one `errors.Mismatch`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from ostraka._capture import DtypeRule, floating_dtype, may_cast
from ostraka._differences import Differences, hint_at_names, show_tolerated
from ostraka._fused import hint_at_fused
from ostraka._leaf_types import (
    Unfit,
    key_problem,
    kind_of,
    saved_as_wanted,
    show_value,
    type_problems,
)
from ostraka._nnx import as_state
from ostraka._nodes import (
    ArrayNumber,
    Branch,
    Kept,
    Leaf,
    Lost,
    Node,
    SavedStates,
    Stateful,
    branches_of,
    check_unique,
    find_shared,
    leaves_of,
    prune,
    unwrapped,
)
from ostraka._pattern import Patterns, rename_with, selects, split_patterns, unmatched
from ostraka._place import Destination, Placer, Unplaceable
from ostraka._source import CONFIG, Source
from ostraka._spec import LeafSpec, is_floating
from ostraka._tree import is_object
from ostraka.errors import Mismatch, PartialRestore, nearest, warn_caller
from ostraka.formats._safetensors import SafetensorsSource


@dataclass(frozen=True, slots=True)
class Wanted:
    """A settled restore: what to read, what is known already, how to put it together."""

    tree: Node
    arrays: tuple[Destination, ...]
    values: Mapping[str, Any]
    copies: tuple[tuple[str, str], ...] = ()
    """Leaves that are the same as another one, and that one."""
    states: tuple[tuple[Any, Any], ...] = ()
    """Stateful objects of `like`, and the state that each gets at the end."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller said about a restore, besides `like`."""

    mesh: Mesh | None = None
    specs: Any = None
    strict: bool = True
    only: Patterns | None = None
    rename: Mapping[str, str] | None = None
    dtype: DtypeRule = None
    as_state: bool = False
    in_place: bool = False
    """What is not restored is not touched, rather than taken over from `like`."""


class Matcher:
    """Settles one restore."""

    def __init__(
        self,
        source: Source,
        like: Node | None,
        choices: Choices,
        *,
        process: int,
        process_count: int,
    ):
        self._like = like
        self._source = source
        self._checkpoint = source.saved
        self._location = source.location
        self._choices = choices
        self._placer = Placer(
            source.saved, mesh=choices.mesh, process=process, process_count=process_count
        )
        self._process = process
        self._process_count = process_count
        self._source = source
        self._rename = rename_with(choices.rename or {})
        self._differences = Differences()
        self._tolerated: defaultdict[str, list[str]] = defaultdict(list)
        self._arrays: list[Destination] = []
        self._values: dict[str, Any] = {}
        self._copies: list[tuple[str, str]] = []
        self._states: list[tuple[Any, Any]] = []
        self._places: dict[int, list[tuple[Destination, int | None]]] = {}
        """Of each array: where it goes, and which object of `like` stands there."""

    @cached_property
    def _saved_tree(self) -> Node:
        return self._source.tree if self._like is None else self._source.tree_for(self._like)

    @cached_property
    def _saved(self) -> Mapping[str, Any]:
        """By the path in `like`, what was saved."""
        return {self._rename(leaf.path): leaf.value for leaf in leaves_of(self._saved_tree)}

    def match_numbers(self, asked: Sequence[tuple[Leaf, int]]) -> Wanted:
        """Settle arrays of the checkpoint by their numbers, in place of a tree. Raises Mismatch.

        The value of a leaf is what is wanted, or an ArrayNumber for what was saved.
        """
        for leaf, number in asked:
            try:
                self._match_array(leaf, number)
            except Unplaceable as error:
                self._differences.general += error.args
            except Unfit as error:
                self._differences.of_leaves += [(leaf.path, text) for text in error.args]
        leaves = tuple(leaf for leaf, _ in asked)
        self._raise_or_warn(None, [leaf.path for leaf in leaves])
        tree = Branch("list", "", leaves, list)
        return Wanted(tree, tuple(self._arrays), self._values, tuple(self._copies))

    def match(self) -> Wanted:
        """Settle every leaf of a parsed `like`, or of all that was saved. Raises Mismatch."""
        like = self._like
        general = self._differences.general
        general += self._useless_patterns(like)
        tree = like or self._restorable_part()
        leaves = list(leaves_of(tree))
        check_unique(leaves)
        general += self._resolve_specs(leaves, tree)
        for leaf in leaves:
            try:
                self._match_leaf(leaf)
            except Unplaceable as error:
                general += error.args
            except Unfit as error:
                self._differences.of_leaves += [(leaf.path, text) for text in error.args]
        if like is not None:
            self._match_unexpected(like)
            self._match_shared(like)
        general += self._useless_renames()
        self._raise_or_warn(like, [leaf.path for leaf in leaves])
        return Wanted(
            tree, tuple(self._arrays), self._values, tuple(self._copies), tuple(self._states)
        )

    def _raise_or_warn(self, like: Node | None, paths: Sequence[str]) -> None:
        if self._differences:
            what = "can't place checkpoint" if like is None else "`like` does not fit checkpoint"
            lines = self._differences.lines(paths, list(self._saved))
            if like is not None and self._differences.missing:
                lines = [*self._names_hint(), *self._fused_hint(like), *lines]
            raise Mismatch(f"{what} {self._location}", lines)
        if self._tolerated:
            found = show_tolerated(self._tolerated)
            warn_caller(PartialRestore(f"restored {self._location} in part: {found}"))

    def _names_hint(self) -> Iterator[str]:
        """Tensors of files have names of their own, which no model has."""
        if isinstance(self._source, SafetensorsSource):
            yield hint_at_names(self._checkpoint.user.get(CONFIG))

    def _fused_hint(self, like: Node) -> Iterator[str]:
        """Leaves that are missing because the checkpoint has them in one array."""
        wanted = {
            leaf.path: tuple(leaf.value.shape)
            for leaf in leaves_of(like)
            if kind_of(leaf.value) in ("jax", "numpy") and self._is_chosen(leaf.path)
        }
        numbers = {p: v.number for p, v in self._saved.items() if isinstance(v, ArrayNumber)}
        saved = {path: self._checkpoint.leaves[n].shape for path, n in numbers.items()}
        return hint_at_fused(wanted, saved)

    # What the arguments say

    def _is_chosen(self, path: str) -> bool:
        return self._choices.only is None or selects(self._choices.only, path)

    def _useless_patterns(self, like: Node | None) -> Iterator[str]:
        """Patterns that match nothing are mistakes; what is left out may be new in `like`."""
        saved = list(self._saved)
        known = saved + [leaf.path for leaf in (leaves_of(like) if like else ())]
        wanted, left_out = split_patterns(self._choices.only or ())
        dtype = self._choices.dtype if isinstance(self._choices.dtype, dict) else {}
        castable = [path for path in saved if dtype and self._is_castable(self._saved[path])]
        for argument, patterns, paths, what in (
            ("only", wanted, saved, "leaf of the checkpoint"),
            ("only", left_out, known, "leaf"),
            ("dtype", dtype, castable, "floating-point array of the checkpoint"),
        ):
            for pattern in unmatched(patterns, paths):
                yield f"{argument} has {pattern}, which matches no {what}"

    def _is_castable(self, saved: Any) -> bool:
        return isinstance(saved, ArrayNumber) and may_cast(self._checkpoint.leaves[saved.number])

    def _useless_renames(self) -> Iterator[str]:
        paths = [leaf.path for leaf in leaves_of(self._saved_tree)]
        for old in self._choices.rename or ():
            if not any(path == old or path.startswith(f"{old}/") for path in paths):
                yield f"rename has {old!r}, which is not in the checkpoint{nearest(old, paths)}"
        for path, count in Counter(map(self._rename, paths)).items():
            if count > 1:
                yield f"rename gives the path {path!r} to {count} leaves of the checkpoint"

    def _resolve_specs(self, leaves: Sequence[Leaf], tree: Node) -> list[str]:
        placed: list[tuple[str, LeafSpec, Any]] = []
        for leaf in leaves:
            saved = self._saved.get(leaf.path)
            if isinstance(saved, ArrayNumber):
                spec = self._checkpoint.leaves[saved.number]
                if spec.kind == "key" and key_problem(spec) is not None:
                    continue  # which is said where the leaf is matched
                if kind_of(self._wanted(leaf, spec)) in ("jax", "key"):
                    placed.append((leaf.path, spec, leaf.spec))
        return self._placer.resolve(
            placed,
            self._choices.specs,
            [getattr(leaf.value, "sharding", None) for leaf in leaves],
            list(self._saved),
            has_modules=any(branch.kind == "nnx" for branch in branches_of(tree)),
        )

    # Which leaves there are

    def _restorable_part(self) -> Node:
        """The saved tree, with those leaves only that were asked for and can come back."""
        tree = as_state(self._saved_tree) if self._choices.as_state else self._saved_tree
        kept = prune(tree, self._can_come_back)
        if kept is not None:
            return kept
        if self._choices.only is not None and not self._differences:
            text = f"no leaf is selected by only={self._choices.only!r}"
            self._differences.general.append(text)
        return Branch("dict", tree.path, (), dict)

    def _can_come_back(self, leaf: Leaf) -> bool:
        if not self._is_chosen(leaf.path):
            return False
        if isinstance(leaf.value, Lost):
            text = f"{leaf.value.why}: {_leave_out(leaf.path)}"
            self._differences.of_leaves.append((leaf.path, text))
            return False
        if not isinstance(leaf.value, Kept):
            return True
        if leaf.value.is_structure:
            text = f"it is a {leaf.value.name}, of which a checkpoint has nothing: pass like=, or "
            self._differences.of_leaves.append((leaf.path, f"{text}{_leave_out(leaf.path)}"))
        else:
            self._tolerated["left out {} whose value is a function"].append(leaf.path)
        return False

    def _match_unexpected(self, like: Node) -> None:
        """Refuse what only the checkpoint has, but for whole entries of a dict that was saved."""
        leaves = {leaf.path for leaf in leaves_of(like)}
        tops = {path.split("/")[0] for path in (*leaves, *(b.path for b in branches_of(like)))}
        saved = self._saved_tree
        is_part = isinstance(saved, Branch) and saved.kind == "dict" and isinstance(like, Branch)
        for path, value in self._saved.items():
            is_left_out = is_part and path.split("/")[0] not in tops
            if path in leaves or is_left_out or isinstance(value, Kept):
                continue
            if not self._is_chosen(path):
                continue
            if self._choices.strict:
                self._differences.unexpected.append(path)
            else:
                self._tolerated["left out {} of the checkpoint"].append(path)

    # Variables that are one object

    def _match_shared(self, like: Node) -> None:
        """A variable of several places stays one, and several variables don't become one."""
        variables = {b.path: b for b in branches_of(like) if b.kind == "variable"}
        for path, first in find_shared(like, is_object).variables.items():
            places = zip(leaves_of(variables[first]), leaves_of(variables[path]), strict=True)
            for leaf_of_first, leaf in places:
                self._match_one_variable(leaf_of_first.path, leaf.path)
        for saved, saved_first in find_shared(self._saved_tree, is_object).variables.items():
            path, first = self._rename(saved), self._rename(saved_first)
            if not all(p in variables and self._is_chosen(p) for p in (path, first)):
                continue
            if variables[path].owner is variables[first].owner:
                continue
            if self._choices.strict:
                text = (
                    f"it was saved as the same variable as {first!r}, and `like` has two: make "
                    "them one there too, or pass strict=False to have two"
                )
                self._differences.of_leaves.append((path, text))
            else:
                self._tolerated["untied {} that were saved as one variable with another"].append(
                    path
                )

    def _match_one_variable(self, first: str, path: str) -> None:
        """Two places of `like` that are the same variable: the checkpoint must agree."""
        if not self._is_chosen(path) or path not in self._saved:
            return
        if not self._is_chosen(first) or first not in self._saved:
            self._copies.append((first, path))
        elif not _is_same_value(self._saved[path], self._saved[first]):
            text = (
                f"`like` has the same variable here as at {first!r}, and the checkpoint has two: "
                f"{_leave_out(path)}, or make them two in `like`"
            )
            self._differences.of_leaves.append((path, text))

    # One leaf

    def _match_leaf(self, leaf: Leaf) -> None:
        path = leaf.path
        if not self._is_chosen(path):
            self._keep(leaf)
        elif path not in self._saved:
            self._match_missing(leaf)
        elif isinstance(self._saved[path], ArrayNumber):
            self._match_array(leaf, self._saved[path].number)
        elif isinstance(self._saved[path], Lost):
            raise Unfit(f"{self._saved[path].why}: {_leave_out(path)}")
        elif isinstance(self._saved[path], SavedStates):
            self._values[path] = self._state(leaf, self._saved[path].states)
        else:
            self._values[path] = saved_as_wanted(self._saved[path], leaf.value)

    def _keep(self, leaf: Leaf) -> None:
        """Leave what `like` has, as far as it has a value."""
        if self._choices.in_place:
            return
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            raise Unfit("it is not to be restored, and `like` has no value to keep for it")
        self._values[leaf.path] = unwrapped(leaf.value)

    def _has_value(self, leaf: Leaf) -> bool:
        return self._choices.in_place or not isinstance(leaf.value, jax.ShapeDtypeStruct)

    def _match_missing(self, leaf: Leaf) -> None:
        if isinstance(leaf.value, Kept):
            self._keep(leaf)
        elif self._choices.strict:
            self._differences.missing.append(leaf.path)
        elif self._has_value(leaf):
            self._tolerated["kept {} that the checkpoint does not have"].append(leaf.path)
            self._keep(leaf)
        else:
            found = nearest(leaf.path, list(self._saved))
            raise Unfit(
                f"it is not in the checkpoint, and `like` has no value to keep for it{found}"
            )

    def _state(self, leaf: Leaf, states: Sequence[Any]) -> Any:
        """The state of a stateful object goes into the object of `like`, at the very end."""
        remedy = " and set its position yourself"
        self._check_processes(leaf.path, len(states), "a state of its own", remedy)
        state = states[self._process]
        if isinstance(leaf.value, SavedStates):
            return state
        if not isinstance(leaf.value, Stateful):
            raise Unfit(
                f"the checkpoint has the state of an object, `like` has {show_value(leaf.value)}, "
                "which has no set_state"
            )
        self._states.append((leaf.value.owner, state))
        return leaf.value.owner

    def _check_processes(self, path: str, saved: int, what: str, remedy: str) -> None:
        if saved != self._process_count:
            raise Unfit(
                f"each of the {saved} processes that saved it had {what}; this run has "
                f"{self._process_count}: restore with as many, or {_leave_out(path)}{remedy}"
            )

    # Arrays

    def _wanted(self, leaf: Leaf, spec: LeafSpec) -> Any:
        """What the template has; without one, the spec of what was saved."""
        return spec if isinstance(leaf.value, ArrayNumber) else leaf.value

    def _match_array(self, leaf: Leaf, number: int) -> None:
        spec = self._checkpoint.leaves[number]
        wanted = self._wanted(leaf, spec)
        if spec.per_process:
            self._check_processes(leaf.path, self._checkpoint.process_count, "its own value", "")
        dtype = self._asked_dtype(spec, wanted, leaf.path)
        kind = kind_of(wanted)
        if spec.kind == "key" and (problem := key_problem(spec)) is not None:
            raise Unfit(problem)
        problems = list(type_problems(spec, wanted, kind, dtype))
        if not problems:
            self._add_array(self._destination(leaf, number, wanted, kind, dtype), leaf.value)
        elif not self._choices.strict and self._may_keep(spec, wanted, leaf):
            self._tolerated["kept {} whose shape differs"].append(leaf.path)
            self._keep(leaf)
        else:
            raise Unfit(*problems)

    def _may_keep(self, spec: LeafSpec, wanted: Any, leaf: Leaf) -> bool:
        """Whether a leaf differs in its shape, and there is another value for it."""
        shape = tuple(getattr(wanted, "shape", ()))
        return wanted is not spec and shape != spec.logical_shape and self._has_value(leaf)

    def _asked_dtype(self, spec: LeafSpec, wanted: Any, path: str) -> str | None:
        """The dtype that `dtype=` gives to a leaf; None if it does not mean this one."""
        rule = self._choices.dtype
        if rule is None or spec.kind not in ("jax", "numpy") or not is_floating(spec.dtype):
            return None
        if rule != "like":
            return floating_dtype(rule, path) if may_cast(spec) else None
        name = getattr(getattr(wanted, "dtype", None), "name", "")
        return name if is_floating(name) else None

    def _destination(
        self, leaf: Leaf, number: int, wanted: Any, kind: str, dtype: str | None
    ) -> Destination:
        spec = self._checkpoint.leaves[number]
        sharding, committed, weak = None, True, False
        if kind in ("jax", "key"):
            sharding, committed = self._placer.sharding(spec, wanted, leaf)
            weak = spec.weak
        boxes = self._placer.local_boxes(spec, sharding)
        cast = None if dtype == spec.dtype else dtype
        return Destination(number, leaf.path, kind, sharding, boxes, cast, committed, weak)

    def _add_array(self, found: Destination, value: Any) -> None:
        """Have it read, unless an earlier one is the same, in the checkpoint and in `like`."""
        identity = id(value) if is_object(value) else None
        earlier = self._places.setdefault(found.number, [])
        for first, of_first in earlier if found.kind not in ("scalar", "python") else ():
            if of_first == identity and replace(first, path=found.path) == found:
                self._copies.append((found.path, first.path))
                return
        earlier.append((found, identity))
        self._arrays.append(found)


def _leave_out(path: str) -> str:
    return f"leave it out with only={f'!{path}'!r}"


def _is_same_value(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one is other or one == other)
