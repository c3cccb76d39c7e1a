"""Why a resumed run differs from the run that it resumes: the likely cause first. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ostraka.audit.journal import History, Line
from ostraka.audit.marks import Mark, are_same, distance, squared_distance
from ostraka.errors import count_of, name_few
from ostraka.tree.blocks import Block, fold_blocks

_MOMENTS = re.compile(r"(^|/)(mu|nu|trace|momentum|velocity|sum_of_squares|m|v|vu|prev_\w+)(/|$)")
_OPTIMIZER = re.compile(r"(^|/)(opt\w*|tx\w*|optim\w*)(/|$)", re.IGNORECASE)
_COUNT = re.compile(r"(^|/)(count|step|steps|\w*_step|\w*_count|n_\w*|t|iteration)$", re.IGNORECASE)
_RNG = re.compile(r"(^|[/_])(rngs?|key|keys|prng\w*|seed|dropout)(/|_|$)", re.IGNORECASE)
_AVERAGE = re.compile(r"(^|[/_])(ema|polyak|swa|averaged?|target|shadow)(/|_|$)", re.IGNORECASE)
_STATS = re.compile(r"(^|/)(batch_stats|running_\w+|moving_\w+|bn\w*|batchnorm\w*)(/|$)", re.I)
_DATA = re.compile(r"(^|[/_])(batch|batches|data|tokens|inputs?|examples?|x|y)(/|_|$)", re.I)
_NEAR = 0.5
"""The ratio of squared distances, below which weights look like those of the first step."""
_SLIGHT = 0.02
"""A smaller distance looks like other arithmetic, not like other values."""


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
    then: Line, now: Line, *, history: History | None, rtol: float | None, is_moved: bool = False
) -> Divergence | None:
    """Compare a step with the same step of an earlier run. None if they are the same.

    `history` has the earlier steps. `is_moved` says that the mesh, the platform or a version is
    another one.
    """
    if then.digest == now.digest and _user_differences(then, now, rtol) == []:
        return None
    if then.leaves is None or now.leaves is None:
        # Only digests are left, and those of inexact arithmetic differ.
        if then.digest == now.digest or rtol is not None:
            return None
        cause = "leaves differ, and their fingerprints were dropped from the journal"
        return Divergence(now.step, cause, (), (), f"step {now.step} differs: {cause}")
    leaves = [
        path
        for path in {**then.leaves, **now.leaves}
        if path not in then.leaves
        or path not in now.leaves
        or not are_same(then.leaves[path], now.leaves[path], rtol)
    ]
    user = _user_differences(then, now, rtol)
    if not leaves and not user:
        return None
    found = _Found(then, now, leaves, user, history or History([]), is_moved)
    cause = next(filter(None, (explain(found) for explain in _CAUSES)))
    return Divergence(now.step, cause, tuple(leaves), tuple(user), _message(found, cause))


def _user_differences(then: Line, now: Line, rtol: float | None) -> list[str]:
    """The user values that differ. A value that only one of them has says nothing."""
    return [
        name
        for name, mark in now.user.items()
        if name in then.user and not are_same(then.user[name], mark, rtol)
    ]


@dataclass(frozen=True, slots=True)
class _Found:
    then: Line
    now: Line
    leaves: Sequence[str]
    user: Sequence[str]
    history: History
    is_moved: bool

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
        if mark is not None and (mark.dtype == "key" or _RNG.search(path)):
            return "rng"
        is_whole = mark is not None and "int" in mark.dtype and not mark.shape
        if is_whole and (_COUNT.search(path) or _OPTIMIZER.search(path)):
            return "count"
        if _STATS.search(path):
            return "stats"
        if _AVERAGE.search(path):
            return "average"
        if _MOMENTS.search(path) or _OPTIMIZER.search(path):
            return "moments"
        return "weights"

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
    to_first = to_then = 0.0
    for path in paths:
        pair, begun = found.pair(path), first.leaves.get(path)
        if pair is not None and begun is not None:
            to_first += squared_distance(begun, pair[1])
            to_then += squared_distance(pair[0], pair[1])
    if not to_first < _NEAR * to_then:
        return None
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
    restarted = _restarted(found)
    if pairs and all(now.is_zero and not then.is_zero for then, now in pairs):
        return f"the optimizer state was not restored: {_few(paths)} are all zero now"
    if restarted is not None:
        return f"the optimizer state was not restored: {restarted}, and {_few(paths)} differ"
    is_far = sum(distance(then, now) > _SLIGHT for then, now in pairs)
    if 2 * is_far < len(pairs) or _are_slight(found):
        return None
    return f"the optimizer's moments were not restored: {_few(paths)} differ"


def _restarted(found: _Found) -> str | None:
    for path in found.of("count"):
        pair = found.pair(path)
        if pair is not None and isinstance(pair[0].value, int | float):
            then, now = pair[0].value, pair[1].value
            if isinstance(now, int | float) and now != then:
                return f"{path!r} is {now:g} and was {then:g}"
    return None


def _count(found: _Found) -> str | None:
    restarted = _restarted(found)
    if restarted is None:
        return None
    for path in found.of("count"):
        pair = found.pair(path)
        if pair is None:
            continue
        then, now = pair[0].value, pair[1].value
        if isinstance(then, int | float) and isinstance(now, int | float):
            if abs(then - now) == 1:
                return f"a step is off by one: {restarted}"
            if now < then:
                return f"the schedule or step count started over: {restarted}"
    return f"a step count differs: {restarted}"


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


def _user_only(found: _Found) -> str | None:
    if found.leaves:
        return None
    return f"the state agrees, only {_few(found.user)} of audit= differ"


def _rest(found: _Found) -> str:
    paths = [*found.of("weights"), *found.leaves]
    return f"{_few(list(dict.fromkeys(paths)))} differ"


_CAUSES: tuple[Callable[[_Found], str | None], ...] = (
    *(_other_leaves, _other_types, _weights, _rng, _data, _moments, _count, _average, _stats),
    *(_user_only, _slight, _rest),
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
