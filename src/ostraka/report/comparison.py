"""How two checkpoints differ, or the steps along a run, as a document. No JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from ostraka.common.dtypes import is_inexact
from ostraka.common.text import json_number, show_shape
from ostraka.errors import CheckpointNotFound, OstrakaError, count_of
from ostraka.formats import open_source
from ostraka.formats.source import Source
from ostraka.layout.file_names import step_of
from ostraka.manager.steps import Root, Step, saved_at
from ostraka.reading.groups import OPTIMIZER, OTHER, PARAMETERS, groups_of
from ostraka.reading.locate import read_whole
from ostraka.report._flags import Candidate, by_layer, count_moved, find_flags
from ostraka.report._layers import ROLES, Place, places_of
from ostraka.report.compare import (
    CompareOptions,
    LeafComparison,
    Norms,
    TreeComparison,
    compare,
    measure_norms,
    open_named,
)
from ostraka.report.measure import Progress, unseen
from ostraka.report.schema import (
    SCHEMA,
    Coded,
    ComparisonAlong,
    ComparisonDocument,
    ComparisonFlag,
    ComparisonTable,
    Number,
)
from ostraka.report.steps import open_root
from ostraka.storage import PathLike

_DIGITS = 4
_GROUPS = (PARAMETERS, OPTIMIZER, OTHER)
_FLAGS = ("nan", "exploding", "dead", "frozen")
_STATES = ("the same", "different", "only in a", "only in b")
_MOST_PAIRS = 64
_MOST_CELLS = 60_000
"""Numbers by role along a run. If there were more, the layers alone are told."""


def describe_comparison(
    a: PathLike, b: PathLike, *, names: Any = None, progress: Progress = unseen
) -> ComparisonDocument:
    """The document of two checkpoints, whose arrays are read piece by piece and verified.

    Args:
        a: The checkpoint before: a path, or a directory of steps for the newest of them.
        b: The checkpoint after.
        names: As in `ostraka diff`, for tensors of files.
        progress: Shows how many bytes were compared.
    """
    return read_whole(
        [a, b],
        lambda found: _describe(found[0], found[1], progress),
        partial(open_named, names=names),
    )


def describe_changes(run: PathLike, *, progress: Progress = unseen) -> ComparisonDocument:
    """The document of the first and the last step of a run, with the steps between them.

    Each step is read at most twice, piece by piece. Steps that are deleted meanwhile, or can't be
    read, are left out with a note. Of many steps some are chosen evenly.

    Args:
        run: The run directory.
        progress: Shows how many bytes were compared.

    Raises:
        CheckpointNotFound: There are fewer than two readable steps.
    """
    root = open_root(run)
    notes: list[str] = []
    steps = [step for step in root.scan() if not step.is_aside]
    for step in steps:
        if not step.is_good:
            notes.append(f"step {step.step} is left out: {'; '.join(map(str, step.problems))}")
    steps = [step for step in steps if step.is_good]
    if len(steps) > _MOST_PAIRS + 1:
        every = (len(steps) - 1) / _MOST_PAIRS
        notes.append(
            f"{_MOST_PAIRS + 1} of {len(steps):,} steps are shown, evenly chosen; "
            "compare two checkpoints for the others"
        )
        steps = [steps[round(number * every)] for number in range(_MOST_PAIRS + 1)]
    while True:
        if len(steps) < 2:
            raise CheckpointNotFound(
                f"{root.location} has {count_of(len(steps), 'readable step')}; a comparison along "
                "a run needs two"
            )
        try:
            first, last = (_open_step(root, step) for step in (steps[0], steps[-1]))
            document = _describe(first, last, progress)
            break
        except (OstrakaError, OSError) as error:
            steps = _without_unreadable(root, steps, error, notes)
    document["along"] = _describe_along(root, steps, notes, progress)
    document["notes"] += notes
    return document


# Two checkpoints


def _describe(a: Source, b: Source, progress: Progress) -> ComparisonDocument:
    found = compare(a, b, CompareOptions(norms=True), progress)
    groups = _groups_by_path(b) | _groups_by_path(a)
    places, layers, separator = places_of(_shapes_of(found))
    leaves = _candidates(found, places, groups)
    flags = find_flags(leaves)
    flag_of = {path: flag for path, (flag, _) in flags.items()}
    moved, compared = count_moved(leaves)
    counts = Counter(leaf.state for leaf in found.leaves)
    notes = [
        f"container {path!r}: a has {one}, b has {other}" for path, one, other in found.containers
    ]
    if compared and not moved:
        notes.append("no parameter changed")
    elif 2 * moved < compared:
        notes.append(
            f"{compared - moved:,} of {compared:,} parameters did not change, which is more than "
            "half; unchanged ones are not flagged as frozen"
        )
    return {
        "schema": SCHEMA,
        "kind": "comparison",
        "a": _about(a),
        "b": _about(b),
        "same": found.same,
        "counts": {state: counts[state] for state in _STATES},
        "separator": separator,
        "moved": [moved, compared],
        "leaves": _table(found, places, groups, layers, flag_of),
        "flags": by_layer(flags, leaves),
        "along": None,
        "notes": notes,
    }


def _about(source: Source) -> dict[str, Any]:
    return {
        "path": source.location,
        "step": step_of(source.location.rpartition("/")[2]),
        "saved_at": saved_at(source.saved.writer),
    }


def _groups_by_path(source: Source) -> dict[str, str]:
    groups = groups_of(source)
    return {source.saved.leaves[number].path: group for number, group in groups.items()}


def _shapes_of(found: TreeComparison) -> dict[str, tuple[int, ...]]:
    there = ((leaf.path, leaf.a or leaf.b) for leaf in found.leaves)
    return {path: (one and one.shape) or () for path, one in there}


def _group_of(leaf: LeafComparison, groups: Mapping[str, str]) -> str:
    shared = (leaf.a and leaf.a.same_as) or (leaf.b and leaf.b.same_as)
    return groups.get(leaf.path) or groups.get(shared or "", OTHER)


def _candidates(
    found: TreeComparison, places: Mapping[str, Place], groups: Mapping[str, str]
) -> list[Candidate]:
    """The leaves that may have a flag. An array with several paths is one."""
    return [
        Candidate(
            leaf.path,
            places[leaf.path].layer,
            leaf.distance.elements,
            leaf.norms,
            _group_of(leaf, groups) == PARAMETERS,
        )
        for leaf in found.leaves
        if leaf.norms is not None and leaf.distance is not None and not _is_shared(leaf)
    ]


def _is_shared(leaf: LeafComparison) -> bool:
    return any(one is not None and one.same_as is not None for one in (leaf.a, leaf.b))


def _table(
    found: TreeComparison,
    places: Mapping[str, Place],
    groups: Mapping[str, str],
    layers: Sequence[str],
    flags: Mapping[str, str],
) -> ComparisonTable:
    leaves = found.leaves
    norms = [leaf.norms for leaf in leaves]
    nan = [0 if one is None else one.nan_b + one.infinite_b for one in norms]
    return {
        "layer": _code([places[leaf.path].layer for leaf in leaves], layers),
        "name": _code([places[leaf.path].name for leaf in leaves]),
        "role": _code([places[leaf.path].role for leaf in leaves], ROLES),
        "group": _code([_group_of(leaf, groups) for leaf in leaves], _GROUPS),
        "state": _code([", ".join(leaf.differs) or leaf.state for leaf in leaves]),
        "shape": _code([_shape_of(leaf) for leaf in leaves]),
        "equal": [
            None if leaf.distance is None else leaf.distance.elements - leaf.distance.changed
            for leaf in leaves
        ],
        "norm_a": [None if one is None else _shorten(one.a) for one in norms],
        "norm_b": [None if one is None else _shorten(one.b) for one in norms],
        "norm_delta": [None if one is None else _shorten(one.delta) for one in norms],
        "nan": {str(row): count for row, count in enumerate(nan) if count},
        "same_as": [row for row, leaf in enumerate(leaves) if _is_shared(leaf)],
        "flag": {
            str(row): flags[leaf.path] for row, leaf in enumerate(leaves) if leaf.path in flags
        },
    }


def _shape_of(leaf: LeafComparison) -> str | None:
    one = leaf.a or leaf.b
    return None if one is None or one.shape is None else show_shape(one.shape)


def _code(column: Sequence[str | None], order: Iterable[str] = ()) -> Coded:
    """A column of texts. Those in `order` come first, as far as they occur."""
    there = {*column}
    numbers = {text: number for number, text in enumerate(one for one in order if one in there)}
    codes = [-1 if text is None else numbers.setdefault(text, len(numbers)) for text in column]
    return {"texts": [*numbers], "codes": codes}


def _shorten(number: float) -> Number:
    return json_number(float(f"{number:.{_DIGITS}g}"))


# Along a run


def _open_step(root: Root, step: Step) -> Source:
    return open_source(root.at(step.names[0]))


def _without_unreadable(
    root: Root, steps: Sequence[Step], error: Exception, notes: list[str]
) -> list[Step]:
    """The steps without the first or last one, whichever can't be read, and a note about it.

    Raises the error if both can be read.
    """
    for step in (steps[0], steps[-1]):
        if (why := _why_unreadable(root, step, error)) is not None:
            notes.append(f"step {step.step} is left out: {why}")
            return [one for one in steps if one is not step]
    raise error


def _why_unreadable(root: Root, step: Step, error: Exception) -> str | None:
    """Why a step can't be read, after an error. None if the error is about another one."""
    try:
        source = _open_step(root, step)
    except CheckpointNotFound:
        return "it was deleted meanwhile"
    except (OstrakaError, OSError) as own:
        return str(own)
    return str(error) if source.location in str(error) else None


def _describe_along(
    root: Root, steps: Sequence[Step], notes: list[str], progress: Progress
) -> ComparisonAlong:
    """The relative change of the parameters between each step and the next that can be read."""
    pairs: dict[tuple[int, int], _Changes] = {}
    before = steps[0]
    for step in steps[1:]:
        try:
            found = _changes_between(_open_step(root, before), _open_step(root, step), progress)
        except (OstrakaError, OSError) as error:
            why = _why_unreadable(root, before, error)
            gone = step if why is None else before
            why = why or _why_unreadable(root, step, error) or str(error)
            notes.append(f"step {gone.step} is left out: {why}")
            before = step if gone is before else before
        else:
            pairs[before.step, step.step] = found
            before = step
    return _join_pairs(pairs)


def _join_pairs(pairs: Mapping[tuple[int, int], _Changes]) -> ComparisonAlong:
    shapes = {path: shape for found in pairs.values() for path, (shape, _) in found.items()}
    places, layers, _ = places_of(shapes)
    cells = sorted(
        {(place.layer, place.role) for place in places.values()},
        key=lambda cell: (layers.index(cell[0]), ROLES.index(cell[1])),
    )
    roles = [role for role in ROLES if any(role == own for _, own in cells)]
    is_small = len(cells) * len(pairs) <= _MOST_CELLS
    rows: dict[Any, list[Number | None]] = {one: [] for one in (*layers, *cells)}
    flags: dict[tuple[str, str], ComparisonFlag] = {}
    for steps, found in pairs.items():
        sums: dict[Any, Norms] = {}
        leaves: list[Candidate] = []
        for path, (shape, norms) in found.items():
            place = places[path]
            for key in (place.layer, (place.layer, place.role)):
                sums[key] = sums.get(key, Norms()) + norms
            leaves.append(Candidate(path, place.layer, prod(shape), norms, True))
        for key, row in rows.items():
            row.append(_shorten(sums[key].relative) if key in sums else None)
        for flag in by_layer(find_flags(leaves), leaves, steps):
            flags.setdefault((flag["flag"], flag["layer"]), flag)
    order = {layer: number for number, layer in enumerate(layers)}
    return {
        "pairs": [[*steps] for steps in pairs],
        "layers": layers,
        "relative": [rows[layer] for layer in layers],
        "roles": roles,
        "cells": [[order[cell[0]], roles.index(cell[1])] for cell in cells] if is_small else [],
        "by_role": [rows[cell] for cell in cells] if is_small else [],
        "flags": sorted(flags.values(), key=lambda flag: _FLAGS.index(flag["flag"])),
    }


_Changes = dict[str, tuple[tuple[int, ...], Norms]]
"""The shape and the norms of each parameter that two steps have in one shape, by path."""


def _changes_between(a: Source, b: Source, progress: Progress) -> _Changes:
    in_a, in_b = _parameters_of(a), _parameters_of(b)
    pairs = {
        path: (number, in_b[path])
        for path, number in in_a.items()
        if path in in_b and a.saved.leaves[number].shape == b.saved.leaves[in_b[path]].shape
    }
    norms = measure_norms(a, b, sorted({*pairs.values()}), progress)
    return {
        path: (a.saved.leaves[numbers[0]].shape, norms[numbers]) for path, numbers in pairs.items()
    }


def _parameters_of(source: Source) -> dict[str, int]:
    groups = groups_of(source)
    return {
        source.saved.leaves[number].path: number
        for number, group in groups.items()
        if group == PARAMETERS and is_inexact(source.saved.leaves[number].dtype)
    }
