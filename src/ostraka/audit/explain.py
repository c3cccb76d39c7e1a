"""Why a resumed run differs from the run that it resumes: the likely cause first. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, inf, isfinite, log, prod, sqrt

from ostraka.audit.journal import History, Line
from ostraka.audit.marks import (
    Mark,
    Table,
    are_comparable,
    are_same,
    distance,
    squared_distance,
)
from ostraka.errors import count_of, name_few
from ostraka.tree.blocks import Block, fold_blocks

_MOMENTS = re.compile(r"(^|/)(mu|nu|trace|momentum|velocity|sum_of_squares|m|v|vu|prev_\w+)(/|$)")
_OPTIMIZER = re.compile(r"(^|/)(opt\w*|tx\w*|optim\w*|solver\w*)(/|$)", re.IGNORECASE)
_WEIGHTS = re.compile(r"(^|/)(params|model|weights|variables|trainable\w*)(/|$)", re.IGNORECASE)
_COUNT = re.compile(
    r"(^|/)(count|\w*steps?|\w*_count|n_\w*|t|time|iterations?|\w*_index|position)$", re.IGNORECASE
)
_RNG = re.compile(r"(^|[/_])(rngs?|key|keys|prng\w*|seed|dropout)(/|_|$)", re.IGNORECASE)
_AVERAGE = re.compile(r"(^|[/_])(ema|polyak|swa|avg|averaged?|target|shadow)(/|_|$)", re.IGNORECASE)
_STATS = re.compile(
    r"(^|/)((batch_stats|running_\w+|moving_\w+|(mean|var)_ema)(/|$)|(mean|var|variance)$)", re.I
)
_DATA = re.compile(r"(^|[/_])(batch|batches|data|tokens|inputs?|examples?|x|y)(/|_|$)", re.I)
_NEAR = 0.5
"""The ratio of squared distances, below which weights look like those of the first step."""
_SLIGHT = 0.02
"""A smaller distance looks like other arithmetic, not like other values."""
_FAR, _USUAL = 9.0, 2.0
"""How many times the square of the first run's change is a jump, and how many still are usual."""
_SURE = 5.4
"""Three standard deviations of the logarithm of one leaf's jump: it has two projections."""
_ALIKE = 0.8
"""The squared cosine from which on two lists of projections are multiples of each other."""
_MOST = 1e6
_NOISE = 0.1
"""How small elements must be, relative to the mean of their slot, to count as noise."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step in which two runs differ."""

    step: int
    cause: str
    leaves: tuple[str, ...]
    """The paths of the leaves that differ."""
    user: tuple[str, ...]
    """The names of the user values that differ."""
    message: str


def find_divergence(
    then: Line,
    now: Line,
    *,
    history: History | None,
    rtol: float | None,
    is_moved: bool = False,
    base: Line | None = None,
) -> Divergence | None:
    """Compare a step with the same step of an earlier run. None if they are the same.

    `history` has the earlier steps. `is_moved` says that the mesh, the platform or a version is
    another one. `base` is the step that was resumed, as the earlier run had it.
    """
    if then.digest == now.digest and _user_differences(then, now, rtol) == []:
        return None
    if then.leaves is None or now.leaves is None:
        # Only digests are left, and those of inexact arithmetic differ.
        if then.digest == now.digest or rtol is not None:
            return None
        cause = "leaves differ, and their fingerprints were dropped from the journal"
        return Divergence(now.step, cause, (), (), f"step {now.step} differs: {cause}")
    floors = {} if rtol is None else _floors(then.leaves)
    leaves = [
        path
        for path in {**then.leaves, **now.leaves}
        if path not in then.leaves
        or path not in now.leaves
        or not are_same(then.leaves[path], now.leaves[path], rtol, floors.get(_slot(path), 0))
    ]
    user = _user_differences(then, now, rtol)
    if not leaves and not user:
        return None
    found = _Found(then, now, leaves, user, history or History([]), is_moved, base)
    cause = next(filter(None, (explain(found) for explain in _CAUSES)))
    return Divergence(now.step, cause, tuple(leaves), tuple(user), _message(found, cause))


def _user_differences(then: Line, now: Line, rtol: float | None) -> list[str]:
    """The user values that differ. A value that only one of them has says nothing."""
    return [
        name
        for name, mark in now.user.items()
        if name in then.user and not are_same(then.user[name], mark, rtol)
    ]


def _slot(path: str) -> str:
    """Leaves of one slot are of about one magnitude: all `mu`, or all weights."""
    found = _MOMENTS.search(path)
    return found[2] if found else "optimizer" if _OPTIMIZER.search(path) else ""


def _floors(leaves: Table) -> dict[str, float]:
    """By slot, a magnitude of elements that counts as noise.

    Some gradients are zero but for rounding, such as that of a bias before a batch norm.
    """
    sums: dict[str, tuple[float, int]] = {}
    for path, mark in leaves.items():
        if "float" in mark.dtype and mark.numbers and isfinite(mark.numbers[0]):
            magnitude, size = sums.get(_slot(path), (0.0, 0))
            sums[_slot(path)] = (magnitude + mark.numbers[0], size + prod(mark.shape))
    return {slot: _NOISE * magnitude / max(size, 1) for slot, (magnitude, size) in sums.items()}


@dataclass(frozen=True, slots=True)
class _Found:
    then: Line
    now: Line
    leaves: Sequence[str]
    user: Sequence[str]
    history: History
    is_moved: bool
    base: Line | None

    def pair(self, path: str) -> tuple[Mark, Mark] | None:
        """The fingerprints of a leaf that both steps have."""
        then, now = (self.then.leaves or {}).get(path), (self.now.leaves or {}).get(path)
        return None if then is None or now is None else (then, now)

    def of(self, *roles: str) -> list[str]:
        return [path for path in self.leaves if self.role(path) in roles]

    def role(self, path: str) -> str:
        mark = (self.now.leaves or {}).get(path) or (self.then.leaves or {}).get(path)
        if mark is not None and mark.dtype == "state":
            return "data"
        dtype, shape = ("", ()) if mark is None else (mark.dtype, mark.shape)
        is_words = dtype == "uint32" and shape[-1:] in ((2,), (4,))
        if dtype == "key" or is_words or ("int" in dtype and _RNG.search(path)):
            return "rng"
        if "int" in dtype and (_COUNT.search(path) or (not shape and _OPTIMIZER.search(path))):
            return "count"
        if _STATS.search(path):
            return "stats"
        # The outermost name decides: "mu/target/kernel" are moments.
        patterns = {"average": _AVERAGE, "moments": _MOMENTS, "optimizer": _OPTIMIZER}
        matches = {
            role: match.start()
            for role, pattern in {**patterns, "weights": _WEIGHTS}.items()
            if (match := pattern.search(path))
        }
        if not matches:
            return "other" if any(map(_WEIGHTS.search, self.now.leaves or {})) else "weights"
        role = min(matches, key=lambda role: matches[role])
        return "moments" if role == "optimizer" else role

    def jump(self, path: str) -> float | None:
        """How far a leaf went since the resumed step, relative to the first run, squared."""
        pair = self.pair(path)
        begun = None if self.base is None else (self.base.leaves or {}).get(path)
        if pair is None or begun is None or not are_comparable(begun, *pair):
            return None
        usual, went = (squared_distance(begun, one) for one in pair)
        if usual == went:
            return 1.0
        return min(max(went / usual, 1 / _MOST), _MOST) if usual else _MOST

    def mean_jump(self, paths: Sequence[str]) -> float | None:
        jumps = [jump for path in paths if (jump := self.jump(path)) is not None]
        return exp(sum(map(log, jumps)) / len(jumps)) if jumps else None

    def has_jumped(self, paths: Sequence[str]) -> bool:
        """True if leaves went so far that it is no chance."""
        jump = self.mean_jump(paths)
        return jump is not None and log(jump) > max(log(_FAR), _SURE / sqrt(len(paths)))

    def earlier(self, marks: Callable[[Line], Mark | None], now: Mark) -> int | None:
        """An earlier step at which a value was just as it is now."""
        for line in self.history.lines():
            mark = marks(line) if line.step != self.now.step else None
            if mark is not None and mark.bits == now.bits and mark.dtype == now.dtype:
                return line.step
        return None


def _other_leaves(found: _Found) -> str | None:
    then, now = found.then.leaves or {}, found.now.leaves or {}
    missing = [path for path in then if path not in now]
    new = [path for path in now if path not in then]
    if missing and new:
        return f"leaves were renamed or replaced: {_few(missing)} became {_few(new)}"
    if missing:
        return f"leaves are missing now: {_few(missing)}"
    return f"leaves are new: {_few(new)}" if new else None


def _other_types(found: _Found) -> str | None:
    for path in found.leaves:
        pair = found.pair(path)
        if pair is not None and pair[0].dtype != pair[1].dtype:
            return f"a dtype changed: {path!r} was {pair[0].dtype} and is {pair[1].dtype} now"
        if pair is not None and pair[0].shape != pair[1].shape:
            return f"a shape changed: {path!r} was {pair[0].shape} and is {pair[1].shape} now"
    return None


def _weights(found: _Found) -> str | None:
    """The weights are near those of the first step, and far from those that are expected."""
    first = found.history.first()
    paths = found.of("weights")
    if first is None or first.leaves is None or first.step >= found.now.step or not paths:
        return None
    to_first = to_then = to_base = 0.0
    for path in paths:
        pair, begun = found.pair(path), first.leaves.get(path)
        if pair is not None and begun is not None:
            to_first += squared_distance(begun, pair[1])
            to_then += squared_distance(pair[0], pair[1])
            base = None if found.base is None else (found.base.leaves or {}).get(path)
            to_base += inf if base is None else squared_distance(base, pair[1])
    if not to_first < _NEAR * min(to_then, to_base):
        return None
    if _dropped(found, found.of("moments")) and not found.has_jumped(paths):
        return None  # Without old moments a step is a first step, and resembles it.
    return f"the weights were not restored: they are near those of step {first.step}"


def _rng(found: _Found) -> str | None:
    paths = found.of("rng")
    if not paths:
        return None
    path = paths[0]
    pair = found.pair(path)
    step = None if pair is None else found.earlier(lambda at: (at.leaves or {}).get(path), pair[1])
    only = "only " if len(paths) == len(found.leaves) and not found.user else ""
    if step is not None:
        return f"{only}{path!r} differs: the RNG started over, it is that of step {step}"
    return f"{only}{path!r} differs: the RNG was not restored"


def _data(found: _Found) -> str | None:
    names = [name for name in found.user if _DATA.search(name)]
    states = found.of("data")
    if not names and not states:
        return None
    agree = "" if found.of("weights") else "the weights agree, "
    if not names:
        return f"{agree}the data iterator {states[0]!r} is at another position"
    mark = found.now.user[names[0]]
    step = found.earlier(lambda line: line.user.get(names[0]), mark)
    if step is None:
        return f"{agree}{names[0]!r} differs: the data iterator is at another position"
    started = step < found.now.step - 1
    why = "the data iterator started over" if started else "the data iterator is off by one"
    return f"{agree}{names[0]!r} differs: {why}, it is that of step {step}"


def _moments(found: _Found) -> str | None:
    paths = found.of("moments")
    if not paths:
        return None
    pairs = [pair for pair in map(found.pair, paths) if pair is not None]
    if pairs and all(now.is_zero and not then.is_zero for then, now in pairs):
        return f"the optimizer state was not restored: {_few(paths)} are all zero now"
    restarted = next((t for now, then, t in _counts(found, _OPTIMIZER) if now < then - 1), None)
    # One step after the resume, the same weights and batch change the same moments alike.
    is_next = found.base is not None and found.now.step == found.base.step + 1
    jump, dropped = found.mean_jump(paths), _dropped(found, paths)
    if dropped and restarted is None:
        return f"the optimizer's moments were not restored: {_few(dropped)} lack their old values"
    if jump is not None and jump < _USUAL and not dropped and not (is_next and restarted):
        return None
    if restarted is not None:
        return f"the optimizer state was not restored: {restarted}, and {_few(paths)} differ"
    is_far = sum(distance(then, now) > _SLIGHT for then, now in pairs)
    if 2 * is_far < len(pairs) or _are_slight(found):
        return None
    return f"the optimizer's moments were not restored: {_few(paths)} differ"


def _dropped(found: _Found, paths: Sequence[str]) -> list[str]:
    """The moments that differ by a multiple of what they were at the resumed step.

    Moments are sums of older moments, times a factor, and gradients. Projections are linear.
    """
    slots: dict[str, list[str]] = {}
    for path in paths:
        if found.jump(path) is not None:
            slots.setdefault(_slot(path), []).append(path)
    dropped: list[str] = []
    for slot in slots.values():
        lacking, old = list[float](), list[float]()
        for path in slot:
            pair, base = found.pair(path), found.base and found.base.leaves
            if pair is not None and base and pair[1].bits != base[path].bits:
                then, now = (one.numbers[1:] for one in pair)
                lacking += [a - b for a, b in zip(then, now, strict=True)]
                old += base[path].numbers[1:]
        product, squares = _product(lacking, old), _product(lacking, lacking) * _product(old, old)
        if len(slot) > 1 and product > 0 and product**2 > _ALIKE * squares:
            dropped += slot
    return dropped


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _counts(found: _Found, within: re.Pattern[str] | None = None) -> list[tuple[float, float, str]]:
    """The counts that differ, the farthest first: now, then, and both as text."""
    counts: list[tuple[float, float, str]] = []
    for path in found.of("count"):
        pair = found.pair(path)
        if pair is None or (within is not None and not within.search(path)):
            continue
        then, now = (  # of several counts in a leaf, the mean
            mark.numbers[0] / prod(mark.shape) if mark.shape and mark.numbers else mark.value
            for mark in pair
        )
        if isinstance(then, int | float) and isinstance(now, int | float) and then != now:
            counts.append((now, then, f"{path!r} is {now:g} and was {then:g}"))
    return sorted(counts, key=lambda count: -abs(count[0] - count[1]))


def _count(found: _Found) -> str | None:
    for now, then, text in _counts(found):
        if abs(then - now) == 1:
            return f"a step is off by one: {text}"
        if now < then:
            return f"the schedule or step count started over: {text}"
        return f"a step count differs: {text}"
    return None


def _average(found: _Found) -> str | None:
    paths = found.of("average")
    if not paths or found.of("weights"):
        return None
    return f"the weights agree, their moving average was not restored: {_few(paths)} differ"


def _stats(found: _Found) -> str | None:
    paths = found.of("stats")
    if not paths or found.of("weights"):
        return None
    return f"the weights agree, the batch statistics were not restored: {_few(paths)} differ"


def _jumped(*roles: str) -> Callable[[_Found], str | None]:
    """Some leaves went much farther since the resumed step than they did in the first run."""

    def explain(found: _Found) -> str | None:
        groups: dict[str, list[str]] = {}
        for path in found.of(*roles):
            groups.setdefault(path.rpartition("/")[0], []).append(path)
        far = [path for group in groups.values() if found.has_jumped(group) for path in group]
        if found.has_jumped(found.of(*roles)):
            far = found.of(*roles)
        if not far or found.base is None:
            return None
        what = "the weights" if roles == ("weights",) else _few(far)
        which = f"{_few(far)} are" if roles == ("weights",) else "they are"
        return (
            f"{what} were not restored: {which} much farther from step {found.base.step} than in "
            "the first run"
        )

    return explain


def _are_slight(found: _Found) -> bool:
    pairs = [pair for pair in map(found.pair, found.leaves) if pair is not None]
    return bool(pairs) and all(distance(then, now) <= _SLIGHT for then, now in pairs)


def _slight(found: _Found) -> str | None:
    if not _are_slight(found):
        return None
    if found.is_moved:
        return (
            "all differ slightly: another mesh, platform or version changes the arithmetic; pass "
            "audit_rtol=, such as 1e-3"
        )
    return (
        "all differ slightly: a random value or a batch that is not part of the state differs, or "
        "the arithmetic is not repeatable; pass audit={'batch': …} to tell, or audit_rtol="
    )


def _unlike(found: _Found) -> str | None:
    """All went about as far as in the first run, but elsewhere."""
    jump = found.mean_jump(found.leaves)
    if jump is None or not 1 / _FAR < jump < _FAR or not found.of("weights"):
        return None
    return (
        f"{_few(found.of('weights'))} differ, and went as far as in the first run: a random value "
        "or a batch that is not part of the state differs; pass audit={'batch': …} to tell"
    )


def _user_only(found: _Found) -> str | None:
    if found.leaves:
        return None
    return f"the state agrees, only {_few(found.user)} of audit= differ"


def _rest(found: _Found) -> str:
    paths = [*found.of("weights"), *found.leaves]
    return f"{_few(list(dict.fromkeys(paths)))} differ"


_CAUSES: tuple[Callable[[_Found], str | None], ...] = (
    *(_other_leaves, _other_types, _weights, _rng, _data, _average, _stats),
    *(_jumped("average", "stats", "other"), _moments, _count),
    *(_user_only, _slight, _jumped("weights"), _unlike, _rest),
)


def _message(found: _Found, cause: str) -> str:
    count = len(found.leaves)
    where = f" in {count_of(count, 'leaf')}" if count else ""
    listed = f" (all that differ: {_few(found.leaves, 6)})" if count > 1 else ""
    return f"step {found.now.step} differs from the first run{where}: {cause}{listed}"


def _few(paths: Sequence[str], limit: int = 3) -> str:
    """Paths by their patterns, such as 'layers/0..23/kernel'."""
    tree = fold_blocks(list(paths), [""] * len(paths), "/")
    names = list(chain.from_iterable(_names(child, "") for child in tree.children))
    return name_few(names, limit)


def _names(block: Block, above: str) -> Iterator[str]:
    name = f"{above}{block.name}"
    if block.leaf is not None:
        yield name
    for child in block.children:
        yield from _names(child, f"{name}/")
