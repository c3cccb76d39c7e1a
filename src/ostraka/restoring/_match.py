"""Compare a template with the saved tree, and settle the destination of each leaf.

All differences are found before anything is read, and raised as one `errors.Mismatch`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from ostraka.common.dtypes import dtype_name, is_floating
from ostraka.errors import nearest
from ostraka.formats.source import Source
from ostraka.layout.casts import floating_dtype, may_cast
from ostraka.layout.spec import LeafSpec
from ostraka.live.nnx import as_state
from ostraka.live.parse import is_object
from ostraka.restoring._differences import (
    Choices,
    TreeMatch,
    Unfit,
    generator_of,
    key_problem,
    kind_of,
    leave_out,
    saved_as_wanted,
    show_value,
    type_problems,
)
from ostraka.restoring.destinations import (
    Destination,
    MissingAxes,
    Placer,
    Unplaceable,
    layout_of,
    resolve_specs,
)
from ostraka.tree.json_tree import encode_state
from ostraka.tree.nodes import (
    ArrayNumber,
    Branch,
    Kept,
    Leaf,
    Node,
    SavedStates,
    Stateful,
    UnreadableLeaf,
    branches_of,
    check_unique,
    leaves_of,
    prune,
    unwrapped,
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A settled restore: the arrays to read, the known values, the tree to build."""

    tree: Node
    arrays: tuple[Destination, ...]
    values: Mapping[str, Any]
    copies: tuple[tuple[str, str], ...] = ()
    """Pairs of a leaf and the earlier leaf that it shares its value with."""
    states: tuple[tuple[Any, Any], ...] = ()
    """Stateful objects of `like`, each with its new state. They are updated at the end."""


class Matcher:
    """Settles one restore."""

    def __init__(self, source: Source, like: Node | None, choices: Choices):
        self._like = like
        self._checkpoint = source.saved
        self._choices = choices
        self._placer = Placer(source.saved, choices.mesh)
        tree = source.tree if like is None else source.tree_for(like)
        self._trees = TreeMatch(source, tree, choices)
        self._saved = self._trees.saved
        self._arrays: list[Destination] = []
        self._values: dict[str, Any] = {}
        self._states: list[tuple[Any, Any]] = []
        self._places: dict[int, list[tuple[Destination, int | None]]] = {}
        """By array, its destinations, each with the id of the object that `like` has there."""

    def match_numbers(self, asked: Sequence[tuple[Leaf, int]]) -> Wanted:
        """Settle arrays of the checkpoint by their numbers, in place of a tree. Raises Mismatch.

        The value of a leaf is a template's, or an ArrayNumber to restore the saved array.
        """
        for leaf, number in asked:
            with self._noting_problems(leaf):
                self._match_array(leaf, number)
        return self._settle(Branch("list", "", tuple(leaf for leaf, _ in asked), list))

    def match(self) -> Wanted:
        """Settle every leaf of a parsed `like`, or of the saved tree. Raises Mismatch."""
        trees = self._trees
        trees.find_useless_patterns(self._like)
        tree = self._like or self._restorable_part()
        leaves = list(leaves_of(tree))
        check_unique(leaves)
        trees.found.general += self._resolve_specs(leaves, tree)
        for leaf in leaves:
            with self._noting_problems(leaf):
                self._match_leaf(leaf)
        if self._like is not None:
            trees.compare_trees(self._like)
        trees.find_useless_renames()
        return self._settle(tree)

    @contextmanager
    def _noting_problems(self, leaf: Leaf) -> Generator[None]:
        try:
            yield
        except MissingAxes as error:
            self._trees.found.missing_axes.append(error)
        except Unplaceable as error:
            self._trees.found.general += error.args
        except Unfit as error:
            self._trees.found.of_leaves += [(leaf.path, text) for text in error.args]

    def _settle(self, tree: Node) -> Wanted:
        self._trees.raise_or_warn(self._like, tree)
        copies = tuple(self._trees.copies)
        return Wanted(tree, tuple(self._arrays), self._values, copies, tuple(self._states))

    # What the arguments say

    def _resolve_specs(self, leaves: Sequence[Leaf], tree: Node) -> list[str]:
        placed: list[tuple[str, LeafSpec, Any]] = []
        for leaf in leaves:
            saved = self._saved.get(leaf.path)
            if isinstance(saved, ArrayNumber):
                spec, wanted, kind = self._wanted(leaf, saved.number)
                # A problem with keys is said where the leaf is matched.
                has_problem = spec.kind == "key" and key_problem(spec, wanted) is not None
                if kind in ("jax", "key") and not has_problem:
                    placed.append((leaf.path, spec, leaf.spec))
        arrays = (leaf.value for leaf in leaves if kind_of(leaf.value) in ("jax", "key"))
        like = [getattr(array, "sharding", None) for array in arrays]
        has_modules = any(branch.kind == "nnx" for branch in branches_of(tree))
        mesh = self._placer.settle_mesh(like, has_modules=has_modules)
        known = list(self._saved)
        self._placer.specs, unknown = resolve_specs(placed, self._choices.specs, mesh, known)
        return unknown

    # Which leaves there are

    def _restorable_part(self) -> Node:
        """The saved tree, reduced to the selected leaves that can be restored."""
        tree = as_state(self._trees.tree) if self._choices.as_state else self._trees.tree
        kept = prune(tree, self._can_come_back)
        if kept is not None:
            return kept
        if self._choices.only is not None and not self._trees.found:
            text = f"no leaf is selected by only={self._choices.only!r}"
            self._trees.found.general.append(text)
        return Branch("dict", tree.path, (), dict)

    def _can_come_back(self, leaf: Leaf) -> bool:
        if not self._trees.is_chosen(leaf.path):
            return False
        if isinstance(leaf.value, UnreadableLeaf):
            text = f"{leaf.value.why}: {leave_out(leaf.path)}"
            self._trees.found.of_leaves.append((leaf.path, text))
            return False
        if not isinstance(leaf.value, Kept):
            return True
        if leaf.value.is_structure:
            text = f"it is a {leaf.value.name}, of which a checkpoint has nothing: pass like=, or "
            self._trees.found.of_leaves.append((leaf.path, f"{text}{leave_out(leaf.path)}"))
        else:
            self._trees.tolerated["left out {} whose value is a function"].append(leaf.path)
        return False

    # One leaf

    def _match_leaf(self, leaf: Leaf) -> None:
        path = leaf.path
        if not self._trees.is_chosen(path):
            self._keep(leaf)
        elif path not in self._saved:
            self._match_missing(leaf)
        elif isinstance(self._saved[path], ArrayNumber):
            self._match_array(leaf, self._saved[path].number)
        elif isinstance(self._saved[path], UnreadableLeaf):
            raise Unfit(f"{self._saved[path].why}: {leave_out(path)}")
        elif isinstance(self._saved[path], SavedStates):
            self._values[path] = self._state(leaf, self._saved[path].states)
        else:
            self._values[path] = saved_as_wanted(self._saved[path], leaf.value)

    def _keep(self, leaf: Leaf) -> None:
        """Keep the value of `like`, if it has one."""
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
            self._trees.found.missing.append(leaf.path)
        elif self._has_value(leaf):
            self._trees.tolerated["kept {} that the checkpoint does not have"].append(leaf.path)
            self._keep(leaf)
        else:
            found = nearest(leaf.path, list(self._saved))
            raise Unfit(
                f"it is not in the checkpoint, and `like` has no value to keep for it{found}"
            )

    def _state(self, leaf: Leaf, states: Sequence[Any]) -> Any:
        """The object of `like`, which receives its state at the very end, or the state alone."""
        if len({repr(encode_state("", state)) for state in states}) == 1:
            states = (states[0],) * jax.process_count()  # Any number of processes can restore it.
        remedy = (
            " and set its position yourself; for data that fits any number of processes, use "
            "ostraka.data.ElasticIterator"
        )
        _check_processes(leaf.path, len(states), "a state of its own", remedy)
        state = states[jax.process_index()]
        if isinstance(leaf.value, SavedStates):
            return state
        if not isinstance(leaf.value, Stateful):
            raise Unfit(
                f"the checkpoint has the state of an object, `like` has {show_value(leaf.value)}, "
                "which has no set_state"
            )
        self._states.append((leaf.value.owner, state))
        return leaf.value.owner

    # Arrays

    def _wanted(self, leaf: Leaf, number: int) -> tuple[LeafSpec, Any, str]:
        """The saved spec, the template's value (without one, the spec again), and its kind."""
        spec = self._checkpoint.leaves[number]
        wanted = spec if isinstance(leaf.value, ArrayNumber) else leaf.value
        return spec, wanted, kind_of(wanted)

    def _match_array(self, leaf: Leaf, number: int) -> None:
        spec, wanted, kind = self._wanted(leaf, number)
        if spec.per_process:
            _check_processes(leaf.path, self._checkpoint.process_count, "its own value", "")
        dtype = self._asked_dtype(spec, wanted, kind, leaf.path)
        if spec.kind == "key" and (problem := key_problem(spec, wanted)) is not None:
            raise Unfit(problem)
        problems = list(type_problems(spec, wanted, kind, dtype))
        shape = () if kind in ("python", "other") else tuple(wanted.shape)
        may_keep = wanted is not spec and shape != spec.logical_shape and self._has_value(leaf)
        if problems and not (may_keep and not self._choices.strict):
            raise Unfit(*problems)
        if problems:
            self._trees.tolerated["kept {} whose shape differs"].append(leaf.path)
            self._keep(leaf)
            return
        about: dict[str, Any] = {"cast": None if dtype == spec.dtype else dtype}
        sharding = None
        if kind in ("jax", "key"):
            sharding, about["committed"] = self._placer.sharding(spec, wanted, leaf)
            about |= {"weak": spec.weak, "layout": layout_of(wanted)}
            about["generator"] = generator_of(spec, wanted)
        elif kind != "python" and wanted is not spec and not wanted.dtype.isnative:
            about["host_dtype"] = wanted.dtype
        boxes = self._placer.local_boxes(spec, sharding)
        self._add_array(Destination(number, leaf.path, kind, sharding, boxes, **about), leaf.value)

    def _asked_dtype(self, spec: LeafSpec, wanted: Any, kind: str, path: str) -> str | None:
        """The dtype that `dtype=` gives to a leaf, or None if it leaves the leaf alone."""
        rule = self._choices.dtype
        if rule is None or spec.kind not in ("jax", "numpy") or not is_floating(spec.dtype):
            return None
        if rule != "like":
            return floating_dtype(rule, path) if may_cast(spec) else None
        if wanted is spec or kind in ("python", "other"):
            return None
        name = dtype_name(wanted.dtype)
        return name if is_floating(name) else None

    def _add_array(self, found: Destination, value: Any) -> None:
        """Add an array, unless an earlier leaf shares it in the checkpoint and in `like`."""
        identity = id(value) if is_object(value) else None
        earlier = self._places.setdefault(found.number, [])
        for first, of_first in earlier if found.kind not in ("scalar", "python") else ():
            if of_first == identity and replace(first, path=found.path) == found:
                self._trees.copies.append((found.path, first.path))
                return
        earlier.append((found, identity))
        self._arrays.append(found)


def _check_processes(path: str, saved: int, what: str, remedy: str) -> None:
    if saved != jax.process_count():
        raise Unfit(
            f"each of the {saved} processes that saved it had {what}; this run has "
            f"{jax.process_count()}: restore with as many, or {leave_out(path)}{remedy}"
        )
