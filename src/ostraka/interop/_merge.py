"""`ostraka.merge`: one checkpoint of several: averaged, a LoRA added to its base, leaves picked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ostraka import _box, _pattern
from ostraka._box import Box
from ostraka._capture import DtypeRule
from ostraka._checkpoint import open_at
from ostraka._codec import CompressRule
from ostraka._pattern import Patterns
from ostraka._source import Source
from ostraka._spec import LeafSpec, is_floating, numpy_dtype
from ostraka._units import human_bytes
from ostraka.errors import InvalidTree, Mismatch, count_of, name_few, nearest_path
from ostraka.interop._lora import find_adapters, numbers_by_path
from ostraka.interop._streamed import Array, LeafReader, OnBytes, save_streamed
from ostraka.storage import PathLike, is_text, open_store

_ALIKE = ("kind", "dtype", "shape", "prng")
"""What a leaf must have the same in all checkpoints that it is averaged over."""
_MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What `merge` did."""

    target: str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    """Of each source in the average; they add up to 1."""
    averaged: int
    """How many arrays are averages."""
    adapted: int
    """How many arrays have a LoRA added to them."""
    taken: tuple[int, ...]
    """How many arrays come as they are from each source."""
    nbytes: int
    time_s: float

    def __str__(self) -> str:
        parts = [
            f"{count_of(number, 'array')} {what}"
            for number, what in ((self.averaged, "averaged"), (self.adapted, "adapted"))
            if number
        ]
        parts += [
            f"{count_of(number, 'array')} of {source}"
            for number, source in zip(self.taken, self.sources, strict=True)
            if number
        ]
        return (
            f"{self.target}: {', '.join(parts)} ({human_bytes(self.nbytes)}, {self.time_s:.2f} s)"
        )


def merge(
    sources: Sequence[PathLike],
    target: PathLike,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    lora: float | None = None,
    take: Mapping[str, int] | None = None,
    only: Patterns | None = None,
    dtype: DtypeRule = None,
    compress: CompressRule = None,
    metadata: Mapping[str, Any] | None = None,
    on_bytes: OnBytes | None = None,
) -> MergeReport:
    """Write one checkpoint that is made of several, without holding any of them in memory.

    Floating-point arrays are averaged: equally, by `weights` (scaled so that they add up to 1), or
    as an exponential moving average over sources from the oldest to the newest, with `ema` as its
    decay. Sums are formed in float64, and rounded once, to the dtype that the array has. All other
    leaves (integers, PRNG keys, Python values), and the tree itself, are those of the last source.

    `take` says by path pattern which source (from 0) a leaf comes from, as it is; the first pattern
    that matches counts: `{"head/**": 1, "**": 0}`.

    With `lora`, the sources are a base and its adapters: to each kernel for which the adapters have
    `lora_a` and `lora_b`, `lora · lora_a @ lora_b` is added. Everything else is the base's; what an
    optimizer keeps of the adapters is ignored.

    `only` are path patterns, as `restore` takes them: other leaves are not averaged, or are no
    adapters.

    The sources must have the same leaves, with the same shapes and dtypes: raises Mismatch. The
    result is saved as by `save`, with the shards of the last source (of the base): atomically, and
    never to the place of a source. Call it from one process.

    >>> ostraka.merge(["runs/90", "runs/95", "runs/100"], "runs/soup")
    >>> ostraka.merge(["base", "adapters"], "merged", lora=2.0)
    """
    begin = time.perf_counter()
    if isinstance(sources, str):
        raise ValueError(f"merge takes a list of checkpoints first, not {sources!r}")
    if len(sources) < 2:
        raise ValueError(f"merge needs two checkpoints or more, and got {len(sources)}")
    opened = [open_at(source) for source in sources]
    location = open_store(target).location
    # Stores that were given as such may have one name on two servers.
    named = [one.location for one, path in zip(opened, sources, strict=True) if is_text(path)]
    if is_text(target) and location in named:
        raise ValueError(f"{location} is a source; the result needs a place of its own")
    if lora is not None:
        if weights is not None or ema is not None or take is not None or len(opened) != 2:
            raise ValueError(
                "lora takes two sources, the base and the adapters, and neither weights, ema nor "
                "take"
            )
        merging = _add_lora(opened[0], opened[1], lora, only)
    else:
        merging = _average(opened, _weights(len(opened), weights, ema), take or {}, only)
    save_streamed(
        target,
        merging.base,
        merging.work_out,
        dtype=dtype,
        compress=compress,
        metadata=metadata,
        on_bytes=on_bytes,
    )
    return MergeReport(
        target=location,
        sources=tuple(source.location for source in opened),
        weights=merging.weights,
        averaged=merging.averaged,
        adapted=merging.adapted,
        taken=merging.taken,
        nbytes=sum(leaf.nbytes for leaf in merging.base.saved.leaves),
        time_s=time.perf_counter() - begin,
    )


@dataclass(frozen=True, slots=True)
class _Merging:
    base: Source
    """Whose tree and shards the result has."""
    work_out: Mapping[int, Callable[[Box], Array]]
    weights: tuple[float, ...]
    taken: tuple[int, ...]
    averaged: int = 0
    adapted: int = 0


def _weights(count: int, weights: Sequence[float] | None, ema: float | None) -> tuple[float, ...]:
    """The weight of each source; their sum need not be 1."""
    if weights is not None and ema is not None:
        raise ValueError("weights and ema are two ways to say the same; give one of them")
    if ema is not None:
        if not 0 <= ema < 1:
            raise ValueError(f"ema is {ema}; it must be at least 0 and less than 1")
        return tuple((1 - ema if n else 1.0) * ema ** (count - 1 - n) for n in range(count))
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count:
        raise ValueError(f"there are {len(given)} weights for {count_of(count, 'checkpoint')}")
    if not all(map(math.isfinite, given)) or math.fsum(given) == 0:
        raise ValueError(f"weights are {given}; they must be numbers whose sum is not 0")
    return tuple(given)


def _average(
    sources: Sequence[Source],
    weights: tuple[float, ...],
    take: Mapping[str, int],
    only: Patterns | None,
) -> _Merging:
    base = sources[-1]
    leaves = base.saved.leaves
    paths = [leaf.path for leaf in leaves]
    _check_take(take, len(sources), paths)
    for pattern in _pattern.unmatched([only] if isinstance(only, str) else only or [], paths):
        raise ValueError(f"only has {pattern}, which matches no array of {base.location}")
    chosen = [_pattern.lookup(take, path) for path in paths]
    if only is not None:
        last = len(sources) - 1
        chosen = [
            last if choice is None and not _pattern.selects(only, path) else choice
            for choice, path in zip(chosen, paths, strict=True)
        ]
    numbers = _matched(sources, chosen)
    readers = [
        LeafReader(source, [own for row in numbers if (own := row[at]) is not None])
        for at, source in enumerate(sources)
    ]
    work_out: dict[int, Callable[[Box], Array]] = {}
    taken = [0] * len(sources)
    for number, (leaf, row) in enumerate(zip(leaves, numbers, strict=True)):
        used = [(readers[at], own, weights[at]) for at, own in enumerate(row) if own is not None]
        if len(used) == 1:
            taken[next(at for at, own in enumerate(row) if own is not None)] += 1
            work_out[number] = partial(used[0][0].read, used[0][1])
        else:
            work_out[number] = partial(_mean, used, numpy_dtype(leaf.dtype))
    whole = math.fsum(weights)
    shares = tuple(weight / whole for weight in weights)
    return _Merging(base, work_out, shares, tuple(taken), averaged=len(leaves) - sum(taken))


def _check_take(take: Mapping[str, int], count: int, paths: Sequence[str]) -> None:
    for pattern, number in take.items():
        if type(number) is not int or not 0 <= number < count:
            raise ValueError(
                f"take has {number!r} for {pattern!r}; it must be the number of a source, from 0 "
                f"to {count - 1}"
            )
    for pattern in _pattern.unmatched(take, paths):
        raise ValueError(f"take has {pattern}, which matches no array of the last source")


def _matched(
    sources: Sequence[Source], chosen: Sequence[int | None]
) -> list[tuple[int | None, ...]]:
    """For each leaf of the last source, its number in each source that it is made of; else None.

    Raises Mismatch for leaves that are not alike in all of these.
    """
    by_path = [numbers_by_path(source) for source in sources]
    differences: list[str] = []
    rows: list[tuple[int | None, ...]] = []
    last = len(sources) - 1
    leaves = sources[-1].saved.leaves
    for number, (leaf, choice) in enumerate(zip(leaves, chosen, strict=True)):
        if choice is None:
            wanted = range(len(sources)) if _is_averaged(leaf) else [last]
        else:
            wanted = [choice]
        row: list[int | None] = [None] * len(sources)
        for at in wanted:
            row[at] = number if at == last else by_path[at].get(leaf.path)
            differences += _differences(leaf, sources[at], row[at], list(by_path[at]))
        rows.append(tuple(row))
    for at in range(last):
        extra = [path for path in by_path[at] if path not in by_path[-1]]
        if extra and None in chosen:
            where = sources[at].location
            differences.append(f"{name_few(extra)}: in {where}, not in {sources[-1].location}")
    if differences:
        raise Mismatch("the checkpoints can't be merged", differences[:_MOST_LINES])
    return rows


def _is_averaged(leaf: LeafSpec) -> bool:
    return is_floating(leaf.dtype) or leaf.dtype.startswith("complex")


def _differences(
    leaf: LeafSpec, source: Source, number: int | None, paths: Sequence[str]
) -> list[str]:
    """How a leaf differs from that of the same path in a source."""
    if number is None:
        return [f"{leaf.path!r} is not in {source.location}{nearest_path(leaf.path, list(paths))}"]
    other = source.saved.leaves[number]
    return [
        f"{leaf.path!r}: its {name} is {getattr(leaf, name)}, and in {source.location} "
        f"{getattr(other, name)}"
        for name in _ALIKE
        if getattr(leaf, name) != getattr(other, name)
    ]


def _mean(used: Sequence[tuple[LeafReader, int, float]], dtype: np.dtype[Any], box: Box) -> Array:
    wide = np.complex128 if dtype.kind == "c" else np.float64
    total = np.zeros(_box.shape_of(box), wide)
    for reader, number, weight in used:
        total += reader.read(number, box).astype(wide) * weight
    # Divided last: with weights that are whole numbers, all before it is exact for most dtypes.
    return (total / math.fsum(weight for _, _, weight in used)).astype(dtype)


def _add_lora(base: Source, adapters: Source, scale: float, only: Patterns | None) -> _Merging:
    if not math.isfinite(scale):
        raise ValueError(f"lora is {scale}; it must be a number")
    leaves = base.saved.leaves
    pairs = find_adapters(base, adapters, only)
    if not pairs:
        raise InvalidTree(
            f"{adapters.location} has no adapters: leaves that are called lora_a and lora_b"
        )
    ours = LeafReader(base, range(len(leaves)))
    theirs = LeafReader(adapters, [number for pair in pairs.values() for number in pair])
    work_out: dict[int, Callable[[Box], Array]] = {}
    for number, leaf in enumerate(leaves):
        read = partial(ours.read, number)
        if number in pairs:
            dtype = numpy_dtype(leaf.dtype)
            read = partial(_adapted, read, theirs, adapters, pairs[number], scale, dtype)
        work_out[number] = read
    taken = (len(leaves) - len(pairs), 0)
    return _Merging(base, work_out, (), taken, adapted=len(pairs))


def _adapted(
    read: Callable[[Box], Array],
    theirs: LeafReader,
    adapters: Source,
    pair: tuple[int, int],
    scale: float,
    dtype: np.dtype[Any],
    box: Box,
) -> Array:
    """A box of a kernel with its adapter: only the rows and columns that it needs are read."""
    rows, columns = box
    rank = adapters.saved.leaves[pair[0]].shape[1]
    a = theirs.read(pair[0], (rows, (0, rank))).astype(np.float64)
    b = theirs.read(pair[1], ((0, rank), columns)).astype(np.float64)
    return (read(box).astype(np.float64) + scale * (a @ b)).astype(dtype)
