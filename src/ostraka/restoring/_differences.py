"""How a template and a checkpoint differ, in few lines with the likely cause first.

A forgotten optimizer or a wrong top-level name makes hundreds of leaves differ. So a whole subtree
takes one line, and so do leaves that differ in the same way.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from ostraka.common.dtypes import dtype_name, is_floating, numpy_dtype
from ostraka.errors import Mismatch, PartialRestore, count_of, name_few, nearest, warn_caller
from ostraka.families.families import FAMILIES
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.source import CONFIG, Source
from ostraka.layout.casts import DtypeRule, may_cast
from ostraka.layout.spec import LeafKind, LeafSpec
from ostraka.live.parse import is_array, is_key, is_object
from ostraka.live.values import loose_functions
from ostraka.restoring.destinations import MissingAxes, is_committed
from ostraka.restoring.in_place import Outline
from ostraka.tree.json_values import decode_plain
from ostraka.tree.nodes import (
    ROOT,
    ArrayNumber,
    Branch,
    Kept,
    Node,
    branches_of,
    find_shared,
    is_shareable_branch,
    join,
    leaves_of,
)
from ostraka.tree.patterns import (
    Patterns,
    names_on,
    rename_with,
    selects,
    split_patterns,
    unmatched,
)

_NAMED_ONE_BY_ONE = 3
_MOST_RENAMED = 12
_MOST_STATIC = 3
"""Most static fields that a warning names."""
_config: Any = jax.config
"""JAX's flags, which its type declarations leave out."""

_NUMBERS = (bool, int, float, complex)
_SHARED_KINDS = {"variable": "variable", "list": "list", "dict": "dict"}
"""Names of objects that a template may have at several paths, for messages."""


@dataclass(slots=True)
class Differences:
    """The differences between a template and a checkpoint."""

    missing: list[str] = field(default_factory=list[str])
    """Leaves of the template that the checkpoint does not have."""
    unexpected: list[str] = field(default_factory=list[str])
    """Leaves of the checkpoint that the template does not have."""
    of_leaves: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Leaves that both have, and how each differs."""
    general: list[str] = field(default_factory=list[str])
    """Differences of the whole tree, as sentences."""
    missing_axes: list[MissingAxes] = field(default_factory=list[MissingAxes])
    """Leaves whose specs do not fit the axes of the mesh."""

    def __bool__(self) -> bool:
        return bool(
            self.missing or self.unexpected or self.of_leaves or self.general or self.missing_axes
        )

    def lines(self, wanted: Sequence[str], saved: Sequence[str]) -> list[str]:
        """A line for each difference. `wanted` and `saved` are the paths of all leaves."""
        cause = _likely_cause(self.missing, wanted, saved)
        named = sorted(_counted(saved).keys() - _counted(wanted))
        # `like` may leave out names at the top, so no other line lists these.
        tops = [name for name in named if "/" not in name]
        lines: list[str] = []
        for name, text in _subtrees([] if cause else self.missing, wanted, saved):
            hint = nearest(name, named)
            if not hint and tops and "/" not in name:
                hint = f" (it also has {name_few(tops)})"
            lines.append(f"{text} is not in the checkpoint{hint}")
        lines += _alike(self.of_leaves)
        lines += [
            f"{text} is in the checkpoint but not in `like`"
            for _, text in _subtrees(self.unexpected, saved, wanted)
        ]
        return [*cause, *self.general, *_missing_axes(self.missing_axes), *lines]


def _missing_axes(errors: Sequence[MissingAxes]) -> Iterator[str]:
    """A line for all leaves of a mesh, with the remedy."""
    by_mesh: dict[str, list[MissingAxes]] = {}
    for error in errors:
        by_mesh.setdefault(error.mesh, []).append(error)
    for mesh, alike in by_mesh.items():
        axes = [repr(axis) for axis in dict.fromkeys(axis for e in alike for axis in e.axes)]
        named = f"{'axis' if len(axes) == 1 else 'axes'} {' and '.join(axes)}"
        others = f" and {count_of(len(alike) - 1, 'leaf')} more" if len(alike) > 1 else ""
        yield (
            f"the mesh ({mesh}) has no {named}, which {alike[0].path!r}{others} "
            f"{'are' if others else 'is'} sharded on: pass specs= for this mesh, such as "
            f"specs=sharding.fsdp({mesh.partition('=')[0]!r}), or a mesh with the {named}"
        )


def _alike(of_leaves: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each leaf, or one for all leaves that differ in the same way."""
    by_text: dict[str, list[str]] = {}
    for path, text in of_leaves:
        by_text.setdefault(text, []).append(path)
    for text, paths in by_text.items():
        is_few = len(paths) <= _NAMED_ONE_BY_ONE
        more = "" if is_few else f" (and so {len(paths) - 1:,} more, such as {paths[1]!r})"
        yield from (f"{path!r}: {text}{more}" for path in (paths if is_few else paths[:1]))


def _subtrees(
    paths: Sequence[str], everything: Collection[str], others: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The largest subtrees that only this side has: their names, and the text for each."""
    there, here, elsewhere = _counted(everything), _counted(paths), _counted(others)

    def is_whole(name: str) -> bool:
        return here[name] == there[name] > 1 and name not in elsewhere

    for name in dict.fromkeys(next(filter(is_whole, names_on(path)), path) for path in paths):
        yield name, f"{name!r} ({count_of(here[name], 'leaf')})" if is_whole(name) else repr(name)


def _counted(paths: Collection[str]) -> Counter[str]:
    """How many leaves are at or below each name."""
    return Counter(name for path in paths for name in names_on(path))


def _likely_cause(missing: Sequence[str], wanted: Sequence[str], saved: Sequence[str]) -> list[str]:
    """Advice for a template that is one level too low or too high, all of it or a part.

    Passing only that part would leave the others out, so the advice for a part is `rename`.
    """
    if not missing or ROOT in wanted or ROOT in saved:
        return []
    there = set(saved)
    is_all = len(missing) == len(wanted)
    names = [name for name in _tops(saved) if all(f"{name}/{path}" in there for path in missing)]
    if names and is_all:
        under = " and under ".join(map(repr, names))
        which = repr(names[0]) if len(names) == 1 else "name"
        with_name = ", with the name of the one you want" if len(names) > 1 else ""
        how = f"pass like={{{which}: …}}{with_name}, and take [{which}] of the result"
        return [f"`like` looks like what was saved under {under}: {how}"]
    if names:
        what = f"a part of `like` ({name_few(_tops(missing))}) was saved under {names[0]!r}"
        how = _rename({f"{names[0]}/{top}": top for top in _tops(missing)}, missing, wanted)
        return [f"{what}: {how}"] if how else []
    name = missing[0].split("/")[0]
    below = [path.removeprefix(f"{name}/") for path in missing]
    if not there.issuperset(below) or not all(path.startswith(f"{name}/") for path in missing):
        return []
    how = f"pass what is under {name!r} itself"
    if not is_all:
        how = _rename({top: f"{name}/{top}" for top in _tops(below)}, missing, wanted)
    what = f"the checkpoint has at its top what `like` has under {name!r}"
    return [f"{what}: {how}"] if how else []


def _tops(paths: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(path.split("/")[0] for path in paths))


def _rename(table: Mapping[str, str], missing: Sequence[str], wanted: Sequence[str]) -> str:
    """Advice to move parts of a checkpoint. Empty if leaves that match would move along."""
    moved = tuple(f"{old}/" for old in table)
    found = {*wanted} - {*missing}
    if any(path in table or path.startswith(moved) for path in found):
        return ""
    if len(table) > _MOST_RENAMED:
        old, new = next(iter(table.items()))
        count = count_of(len(table), "name")
        return f"pass rename={{{old!r}: {new!r}, …}}, with an entry for each of {count}"
    return f"pass rename={dict(table)!r}"


def _hint_at_names(config: Any) -> str:
    """The advice for a template without the names of the tensors in files."""
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if isinstance(kind, str) and kind in FAMILIES:
        return (
            "the checkpoint has tensors under the names of Hugging Face: pass names='hf' to have "
            f"those of a {kind} model, or names= with rules of your own, which may cut a tensor "
            "into several leaves"
        )
    return (
        "the checkpoint has tensors under the names of their files: pass names= with rules that "
        "say which leaf each is, or which leaves it is cut into"
    )


@dataclass(frozen=True, slots=True)
class Choices:
    """The options of a restore, besides `like`."""

    mesh: Mesh | None = None
    specs: Any = None
    strict: bool = True
    only: Patterns | None = None
    rename: Mapping[str, str] | None = None
    dtype: DtypeRule = None
    as_state: bool = False
    in_place: bool = False
    """True if leaves that are not restored stay untouched, rather than taken from `like`."""


class TreeMatch:
    """The saved tree as a restore sees it, compared with that of a template."""

    def __init__(self, source: Source, tree: Node, choices: Choices):
        self._source = source
        self.tree = tree
        self.choices = choices
        self._rename = rename_with(choices.rename) if choices.rename else str
        self.saved = {self._rename(leaf.path): leaf.value for leaf in leaves_of(tree)}
        """The saved values, by their path in `like`."""
        self.found = Differences()
        self.tolerated: defaultdict[str, list[str]] = defaultdict(list)
        """Tolerated leaves, by a sentence about them with `{}` for their number."""
        self.static: list[str] = []
        """Sentences about static fields that differ."""
        self.copies: list[tuple[str, str]] = []
        """Pairs of a leaf and the earlier leaf that it shares its value with."""

    def is_chosen(self, path: str) -> bool:
        """True if `only` selects a leaf."""
        return self.choices.only is None or selects(self.choices.only, path)

    def raise_or_warn(self, like: Node | None, tree: Node) -> None:
        """Raise Mismatch for differences. Warn of tolerated ones. `tree` has all leaves."""
        location = self._source.location
        if self.found:
            what = "can't place checkpoint" if like is None else "`like` does not fit checkpoint"
            lines = self.found.lines([leaf.path for leaf in leaves_of(tree)], list(self.saved))
            if self.found.missing and isinstance(self._source, SafetensorsSource):
                # Tensors of files have names of their own, which no model has.
                lines.insert(0, _hint_at_names(self._source.saved.user.get(CONFIG)))
            if self.choices.in_place:
                what, *lines = [line.replace("`like`", "`into`") for line in (what, *lines)]
            raise Mismatch(f"{what} {location}", lines)
        if self.static:
            shown = ", ".join(self.static[:_MOST_STATIC])
            more = len(self.static) - _MOST_STATIC
            warn_caller(
                PartialRestore(
                    f"static fields of checkpoint {location} differ from the template's: "
                    f"{shown}{f' and {more} more' if more > 0 else ''}"
                )
            )
        if self.tolerated:
            found = "; ".join(
                f"{kind.format(count_of(len(paths), 'leaf'))} ({name_few(paths)})"
                for kind, paths in self.tolerated.items()
            )
            warn_caller(PartialRestore(f"restored {location} in part: {found}"))

    def find_useless_patterns(self, like: Node | None) -> None:
        """Refuse patterns that match nothing. Patterns after `!` may match leaves of `like`."""
        if self.choices.only is None and not isinstance(self.choices.dtype, Mapping):
            return
        saved = list(self.saved)
        known = saved + [leaf.path for leaf in (leaves_of(like) if like else ())]
        wanted, left_out = split_patterns(self.choices.only or ())
        dtype = self.choices.dtype if isinstance(self.choices.dtype, Mapping) else {}
        specs = self._source.saved.leaves
        castable = [
            path
            for path, value in self.saved.items()
            if isinstance(value, ArrayNumber) and may_cast(specs[value.number])
        ]
        for argument, patterns, paths, what in (
            ("only", wanted, saved, "leaf of the checkpoint"),
            ("only", left_out, known, "leaf of the checkpoint or of the template"),
            ("dtype", dtype, castable, "floating-point array of the checkpoint"),
        ):
            self.found.general += unmatched(argument, patterns, paths, what).values()

    def find_useless_renames(self) -> None:
        """Refuse entries of `rename` that move nothing, or several leaves to one path."""
        if not self.choices.rename:
            return
        paths = [leaf.path for leaf in leaves_of(self.tree)]
        self.found.general += [
            f"rename has {old!r}, which is not in the checkpoint{nearest(old, paths)}"
            for old in self.choices.rename
            if not any(path == old or path.startswith(f"{old}/") for path in paths)
        ]
        self.found.general += [
            f"rename gives the path {path!r} to {count} leaves of the checkpoint"
            for path, count in Counter(map(self._rename, paths)).items()
            if count > 1
        ]

    def compare_trees(self, like: Node) -> None:
        """Find what differs in the structure of a template, beside single leaves."""
        self._match_functions(like)
        self._match_unexpected(like)
        self._match_shared(like)
        self._match_static(like)

    def _match_functions(self, like: Node) -> None:
        """Refuse functions in place of what they return: a model, an optimizer."""
        if not any(isinstance(leaf.value, Kept) for leaf in leaves_of(like)):
            return
        for found in loose_functions(like):
            was_saved = any(isinstance(self.saved.get(path), Kept) for path in found.paths)
            if was_saved or not any(map(self.is_chosen, found.paths)):
                continue
            if self.choices.strict:
                self.found.general.append(str(found))
            else:
                self.tolerated["kept {} whose value is a function"] += found.paths

    def _match_unexpected(self, like: Node) -> None:
        """Refuse leaves that only the checkpoint has, except whole entries of a saved dict."""
        leaves = {leaf.path for leaf in leaves_of(like)}
        tops = {path.split("/")[0] for path in (*leaves, *(b.path for b in branches_of(like)))}
        is_part = False
        if isinstance(like, Branch) and isinstance(self.tree, Branch) and self.tree.kind == "dict":
            # A template without leaves, such as `{}`, must share an entry with the checkpoint.
            there = {self._rename(child.path).split("/")[0] for child in self.tree.children}
            is_part = bool(leaves or tops & there)
        for path, value in self.saved.items():
            is_left_out = is_part and path.split("/")[0] not in tops
            is_known = path in leaves or is_left_out or isinstance(value, Kept)
            if is_known or not self.is_chosen(path):
                continue
            if self.choices.strict:
                self.found.unexpected.append(path)
            else:
                self.tolerated["left out {} of the checkpoint"].append(path)

    def _match_static(self, like: Node) -> None:
        """Report static fields that differ. The result has those of the template."""
        kept = {b.path: b.about["static"] for b in branches_of(like) if b.about.get("static")}
        for branch in branches_of(self.tree) if kept else ():
            saved, path = branch.about.get("static", {}), self._rename(branch.path)
            if not any(self.is_chosen(self._rename(leaf.path)) for leaf in leaves_of(branch)):
                continue
            for name, value in kept.get(path, {}).items():
                if name in saved and saved[name] != value:
                    was, stays = decode_plain(saved[name]), decode_plain(value)
                    found = f"{join(path, name)!r} stays {stays!r:.40} (saved: {was!r:.40})"
                    self.static.append(found)

    def _match_shared(self, like: Node) -> None:
        """Check that shared objects stay shared, and that other variables stay separate."""
        branches = {b.path: b for b in branches_of(like) if is_shareable_branch(b)}
        for path, first in find_shared(like, is_object).variables.items():
            what = _SHARED_KINDS.get(branches[path].kind, "object")
            places = zip(leaves_of(branches[first]), leaves_of(branches[path]), strict=True)
            for leaf_of_first, leaf in places:
                self._match_one_object(what, leaf_of_first.path, leaf.path)
        variables = {path: b for path, b in branches.items() if b.kind == "variable"}
        for saved, saved_first in find_shared(self.tree, is_object).variables.items():
            path, first = self._rename(saved), self._rename(saved_first)
            is_here = all(p in variables and self.is_chosen(p) for p in (path, first))
            if not is_here or variables[path].owner is variables[first].owner:
                continue
            if self.choices.strict:
                text = (
                    f"it was saved as the same variable as {first!r}, and `like` has two: make "
                    "them one there too, or pass strict=False to have two"
                )
                self.found.of_leaves.append((path, text))
            else:
                what = "untied {} that were saved as one variable with another"
                self.tolerated[what].append(path)

    def _match_one_object(self, what: str, first: str, path: str) -> None:
        """Check that the checkpoint agrees on two paths of `like` with the same object."""
        if not self.is_chosen(path) or path not in self.saved:
            return
        if not self.is_chosen(first) or first not in self.saved:
            self.copies.append((first, path))
            return
        one, other = self.saved[path], self.saved[first]
        if type(one) is not type(other) or (one is not other and one != other):
            text = (
                f"`like` has the same {what} here as at {first!r}, and the checkpoint has two: "
                f"{leave_out(path)}, or make them two in `like`"
            )
            self.found.of_leaves.append((path, text))


def leave_out(path: str) -> str:
    return f"leave it out with only={f'!{path}'!r}"


# The type of a leaf


class Unfit(Exception):
    """A leaf can't be restored as `like` has it. `args` are the reasons."""


def kind_of(wanted: Any) -> LeafKind | Literal["python", "other"]:
    """The kind of value to make of an array for a leaf of the template."""
    if isinstance(wanted, LeafSpec):
        return wanted.kind
    if isinstance(wanted, jax.Array | jax.ShapeDtypeStruct | Outline):
        return "key" if is_key(wanted) else "jax"
    if isinstance(wanted, np.ndarray):
        return "numpy"
    if isinstance(wanted, np.generic):
        return "scalar"
    return "python" if type(wanted) in _NUMBERS else "other"


# Keys


def generator_of(spec: LeafSpec, wanted: Any) -> Any:
    """The generator of a template's keys if the saved keys have the same one, or None."""
    if kind_of(wanted) != "key" or isinstance(wanted, LeafSpec):
        return None
    own = wanted.dtype._impl
    return own if own.name == spec.prng else None


def key_problem(spec: LeafSpec, wanted: Any) -> str | None:
    """Why the data of saved keys can't become keys again, or None if they can."""
    own = generator_of(spec, wanted)
    words = _words_of(spec.prng or "") if own is None else own.key_shape
    if words is None:
        return (
            f"its keys are of the generator {spec.prng!r}, which JAX does not have: define it, and "
            "pass like= with keys of it"
        )
    if spec.shape[len(spec.logical_shape) - len(spec.own_shape) :] != words:
        return f"its keys of the generator {spec.prng!r} have the shape {spec.shape[-1:]}"
    return None


@cache
def _words_of(generator: str) -> tuple[int, ...] | None:
    """The shape of the data of one key, or None if JAX does not know the generator."""
    try:
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=generator)))
    except (TypeError, ValueError):
        return None
    return tuple(key.shape)


# A number that was saved, where the template may have an array


def saved_as_wanted(saved: Any, wanted: Any) -> Any:
    """A saved value, converted to the template's type. Raises Unfit."""
    if isinstance(wanted, Kept) and isinstance(saved, Kept):
        return wanted.value
    if type(wanted) is type(saved):
        return saved
    if type(saved) in _NUMBERS and _is_arraylike(wanted):
        return _as_array(saved, wanted)
    raise Unfit(f"the checkpoint has {show_value(saved)}, `like` has {show_value(wanted)}")


def _as_array(saved: complex, wanted: Any) -> Any:
    """A Python number as the array of the template. Raises Unfit if that would change it."""
    made = None if is_key(wanted) or wanted.shape != () else exactly(saved, wanted.dtype)
    if made is None:
        raise Unfit(
            f"the checkpoint has {show_value(saved)}, which `like`'s {show_value(wanted)} can't "
            "hold exactly"
        )
    if isinstance(wanted, np.ndarray | np.generic):
        return made if isinstance(wanted, np.ndarray) else made[()]
    return jax.device_put(made, wanted.sharding if is_committed(wanted) else None)


def exactly(value: complex, dtype: Any) -> np.ndarray[Any, Any] | None:
    """A Python number as a 0-d array of a dtype, or None if that would change it."""
    if isinstance(value, bool) != (dtype == np.bool_):
        return None
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of imaginary parts that it drops
            made = np.asarray(value).astype(dtype)
    except (OverflowError, TypeError, ValueError):
        return None
    same = made.item() == value or (made.item() != made.item() and value != value)
    return made if same else None


# An array that was saved


def type_problems(spec: LeafSpec, wanted: Any, kind: str, dtype: str | None) -> Iterator[str]:
    """The differences between a leaf of the template and the saved array.

    Without a template, `wanted` is the saved spec and `kind` its kind. `dtype` is the dtype to cast
    to.
    """
    if wanted is spec:
        if kind == "jax":
            yield from _x64_problems(dtype or spec.dtype)
    elif kind == "other":
        yield f"the checkpoint has an array {_show_spec(spec)}, `like` has {show_value(wanted)}"
    elif (kind == "key") != (spec.kind == "key"):
        yield f"saved as {_show_spec(spec)}, `like` has {show_value(wanted)}"
    elif kind == "python":
        if spec.own_shape or type(numpy_dtype(spec.dtype).type(0).item()) is not type(wanted):
            yield f"saved as {_show_spec(spec)}, `like` has {show_value(wanted)}"
    else:
        yield from _array_problems(spec, wanted, kind, dtype)


def _array_problems(spec: LeafSpec, wanted: Any, kind: str, dtype: str | None) -> Iterator[str]:
    if tuple(wanted.shape) != spec.logical_shape:
        what = "as keys of" if kind == "key" else "with"
        yield f"saved {what} shape {spec.logical_shape}, `like` has {tuple(wanted.shape)}"
    if kind == "key":
        if generator_of(spec, wanted) is None:
            yield f"saved as a {spec.prng} key, `like` has a {wanted.dtype._impl.name} key"
    elif dtype is None and dtype_name(wanted.dtype) != spec.dtype:
        was = f" (cast from {spec.cast_from} by the save)" if spec.cast_from else ""
        is_float = is_floating(wanted.dtype.name) and is_floating(spec.dtype)
        hint = ": pass dtype='like' to cast" if is_float else ""
        yield f"saved as {spec.dtype}{was}, `like` has {wanted.dtype.name}{hint}"
    elif kind == "jax":
        yield from _x64_problems(dtype or spec.dtype)


def _x64_problems(dtype: str) -> Iterator[str]:
    if dtype in ("int64", "uint64", "float64", "complex128") and not _config.jax_enable_x64:
        yield (
            f"saved as {dtype}, which JAX would cut to 32 bits: set jax_enable_x64, or give a "
            "numpy array in `like`"
        )


# In words


def _show_spec(spec: LeafSpec) -> str:
    if spec.kind == "key":
        return f"a {spec.prng} key"
    return f"{spec.dtype}[{','.join(str(n) for n in spec.shape)}]"


def _is_arraylike(value: Any) -> bool:
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct | Outline)


def show_value(value: Any) -> str:
    if _is_arraylike(value):
        if is_key(value):
            return "a PRNG key"
        return f"{value.dtype.name}[{','.join(str(n) for n in value.shape)}]"
    if isinstance(value, Kept):
        return f"the {'structure' if value.is_structure else 'function'} {value.name}"
    return "None" if value is None else f"the {type(value).__name__} {str(value)[:40]!r}"
