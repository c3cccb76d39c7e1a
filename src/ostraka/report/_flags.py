"""What a person should look at in a comparison: NaN, exploding, dead and frozen parameters. Pure.

`schema.ComparisonFlag` says when a leaf gets a flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from ostraka.errors import count_of
from ostraka.report.compare import Norms
from ostraka.report.schema import ComparisonFlag

Flag = Literal["nan", "exploding", "dead", "frozen"]
"""The worst first."""

_GROWN = 10.0
"""A norm this many times as large is exploding by itself."""
_DOUBLED = 2.0
_MOVED = 0.5
_OUTLIER = 30.0
"""So many times the median relative change is an outlier."""
_LARGE = 3.0
"""Elements of an exploding leaf are so many times as large as those of all parameters."""
_DEAD = 1e-3
_MOST = 100


@dataclass(frozen=True, slots=True)
class Candidate:
    """A floating-point leaf that both checkpoints have in one shape."""

    path: str
    layer: str
    elements: int
    norms: Norms
    is_parameter: bool


@dataclass(frozen=True, slots=True)
class _Usual:
    """What is usual for the parameters of a model."""

    mean_square: float
    """The value for all elements in a."""
    relative: float
    """The median relative change of those that moved."""
    moved: int
    compared: int


def count_moved(leaves: Sequence[Candidate]) -> tuple[int, int]:
    """How many parameters changed, and how many were compared."""
    compared = [leaf for leaf in leaves if leaf.is_parameter and leaf.elements]
    return sum(bool(leaf.norms.squares_delta) for leaf in compared), len(compared)


def find_flags(leaves: Sequence[Candidate]) -> dict[str, tuple[Flag, str]]:
    """The flag of each leaf that has one, by path, and why."""
    parameters = [leaf for leaf in leaves if leaf.is_parameter and leaf.elements]
    finite = [leaf for leaf in parameters if math.isfinite(leaf.norms.squares_a)]
    relative = [leaf.norms.relative for leaf in finite if leaf.norms.squares_delta]
    squares, elements = (
        sum(leaf.norms.squares_a for leaf in finite),
        sum(leaf.elements for leaf in finite),
    )
    usual = _Usual(
        squares / elements if elements else 0.0,
        median([one for one in relative if math.isfinite(one)] or [0.0]),
        *count_moved(leaves),
    )
    found: dict[str, tuple[Flag, str]] = {}
    for leaf in leaves:
        flag = _nan_flag(leaf) or (_flag_of(leaf, usual) if leaf.is_parameter else None)
        if flag is not None:
            found[leaf.path] = flag
    return found


def _nan_flag(leaf: Candidate) -> tuple[Flag, str] | None:
    norms = leaf.norms
    if not norms.nan_b and norms.infinite_b <= norms.infinite_a:
        return None
    shown = [
        f"{count:,} {name}"
        for count, name in ((norms.nan_b, "NaN"), (norms.infinite_b, "infinite"))
        if count
    ]
    before = "; it had some in a already" if norms.nan_a + norms.infinite_a else ""
    return "nan", f"has {' and '.join(shown)} of {count_of(leaf.elements, 'element')}{before}"


def _flag_of(leaf: Candidate, usual: _Usual) -> tuple[Flag, str] | None:
    norms = leaf.norms
    if not leaf.elements or not math.isfinite(norms.squares_a + norms.squares_b):
        return None
    if not norms.squares_delta:
        if 2 * usual.moved < usual.compared:
            return None
        share = f"{usual.moved:,} of {usual.compared:,} parameters changed"
        zero = " and is all zero" if not norms.squares_b else ""
        return "frozen", f"did not change{zero}, while {share}"
    if not norms.squares_a:
        return None  # It is new: nothing to compare it with.
    grown = norms.b / norms.a
    if grown < _DEAD:
        return "dead", f"shrank to {grown:.2g} of its norm, from {norms.a:.3g} to {norms.b:.3g}"
    is_large = norms.squares_b / leaf.elements > _LARGE**2 * usual.mean_square
    is_outlier = norms.relative > max(_MOVED, _OUTLIER * usual.relative) and grown > _DOUBLED
    if is_large and (grown > _GROWN or is_outlier):
        return "exploding", (
            f"grew to {grown:.3g} times its norm, from {norms.a:.3g} to {norms.b:.3g}; "
            f"the median parameter changed by {usual.relative:.2g} of its norm"
        )
    return None


_BADNESS: dict[Flag, Callable[[Candidate], float]] = {
    "nan": lambda leaf: leaf.norms.nan_b + leaf.norms.infinite_b,
    "exploding": lambda leaf: leaf.norms.b / leaf.norms.a,
    "dead": lambda leaf: leaf.elements,
    "frozen": lambda leaf: leaf.elements,
}
"""By which the leaf that stands for its layer is chosen."""


def by_layer(
    found: Mapping[str, tuple[Flag, str]],
    leaves: Sequence[Candidate],
    steps: tuple[int, int] | None = None,
) -> list[ComparisonFlag]:
    """One flag of each kind for each layer, the worst kind first, in the order of the leaves."""
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for leaf in leaves:
        if leaf.path in found:
            groups.setdefault((found[leaf.path][0], leaf.layer), []).append(leaf)
    flags: list[ComparisonFlag] = []
    for flag in get_args(Flag):
        for (own, layer), some in groups.items():
            if own != flag:
                continue
            worst = max(some, key=_BADNESS[flag])
            flags.append(
                {
                    "flag": flag,
                    "layer": layer,
                    "path": worst.path,
                    "leaves": len(some),
                    "why": found[worst.path][1],
                    "steps": None if steps is None else [*steps],
                }
            )
    return flags[:_MOST]
