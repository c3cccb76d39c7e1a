"""`ostraka.merge`: average checkpoints, add a LoRA to its base, or pick leaves from several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ostraka.common import html
from ostraka.common.dtypes import is_inexact, numpy_dtype
from ostraka.common.progress import Count, OnBytes
from ostraka.common.units import human_bytes
from ostraka.errors import InvalidTree, Mismatch, count_of, name_few, nearest_path
from ostraka.formats.source import Source
from ostraka.layout.box import Box
from ostraka.layout.casts import DtypeRule, cast_leaf
from ostraka.layout.codec import CompressRule
from ostraka.reading.locate import open_at
from ostraka.saving.save import SaveOptions
from ostraka.storage import PathLike, is_inside, open_store
from ostraka.transfer._streamed import Array, BoxReader, StreamedValue, save_streamed, source_reader
from ostraka.tree import patterns as _pattern
from ostraka.tree.nodes import ArrayNumber, join, leaves_of
from ostraka.tree.patterns import Patterns, selects

# Which kernel of a base an adapter belongs to, by the names that Flax NNX gives them. No JAX.

_A, _B = "lora_a", "lora_b"
_MOMENTS = {"opt_state", "mu", "nu"}
"""Names above the arrays that an optimizer keeps for each parameter."""


def find_adapters(
    base: Source, adapters: Source, only: Patterns | None
) -> dict[int, tuple[int, int]]:
    """By the number of each kernel with an adapter, the numbers of the adapter's two leaves.

    `only` selects leaves of the adapters. The arrays of an optimizer never count. Raises Mismatch
    for an adapter without a kernel, and for shapes that do not fit.
    """
    ours, theirs = numbers_by_path(base), numbers_by_path(adapters)
    differences: list[str] = []
    pairs: dict[int, tuple[int, int]] = {}
    for path in theirs:
        above, _, name = path.rpartition("/")
        if name not in (_A, _B) or not _MOMENTS.isdisjoint(above.split("/")):
            continue
        if only is not None and not selects(only, path):
            continue
        other = join(above, _B if name == _A else _A)
        kernel = next(filter(ours.__contains__, _kernels_of(above)), None)
        if other not in theirs:
            differences.append(f"{path!r} has no {other!r} beside it in {adapters.location}")
        elif kernel is None:
            names = " or ".join(map(repr, _kernels_of(above)))
            differences.append(f"{path!r} is the adapter of {names}, and {base.location} has none")
        elif name == _A:
            pair = (theirs[path], theirs[other])
            differences += _misfits(base, ours[kernel], adapters, pair)
            pairs[ours[kernel]] = pair
    if differences:
        raise Mismatch("the adapters do not fit the base", differences)
    return pairs


def _kernels_of(above: str) -> list[str]:
    """Possible paths of a kernel, as `nnx.LoRALinear` and `nnx.LoRA` have it."""
    module, _, last = above.rpartition("/")
    if last != "lora":
        module = above
    return [join(module, "kernel"), join(module, "base_module/kernel")]


def _misfits(base: Source, kernel: int, adapters: Source, pair: tuple[int, int]) -> Iterator[str]:
    leaf = base.saved.leaves[kernel]
    a, b = (adapters.saved.leaves[number] for number in pair)
    shapes = (leaf.shape, a.shape, b.shape)
    fit = all(len(shape) == 2 for shape in shapes) and a.shape[1] == b.shape[0]
    if not fit or (a.shape[0], b.shape[1]) != leaf.shape:
        yield (
            f"{leaf.path!r} has the shape {leaf.shape}, its adapter {a.shape} and {b.shape}: "
            "expected (rows, rank) and (rank, columns)"
        )
    for one in (leaf, a, b):
        if not is_inexact(one.dtype) or one.dtype.startswith("complex"):
            yield f"{one.path!r} is {one.dtype}; it must be floating-point"


def numbers_by_path(source: Source) -> dict[str, int]:
    """The numbers of a checkpoint's arrays by path. A shared array has several paths."""
    return {
        leaf.path: leaf.value.number
        for leaf in leaves_of(source.tree)
        if isinstance(leaf.value, ArrayNumber)
    }


_ALIKE = ("kind", "dtype", "shape", "prng")
"""Attributes of a leaf that must be equal in all averaged checkpoints."""
_MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The result of `merge`.

    Attributes:
        target: The location of the result.
        sources: The locations of the sources.
        weights: The weight of each source in the average, with a sum of 1.
        averaged: Number of averaged arrays.
        adapted: Number of arrays with an added LoRA.
        taken: Number of arrays that come unchanged from each source.
        nbytes: Bytes of all arrays.
        duration_s: Duration in seconds.
    """

    target: str
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    averaged: int
    adapted: int
    taken: tuple[int, ...]
    nbytes: int
    duration_s: float

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
        size = f"{human_bytes(self.nbytes)}, {self.duration_s:.2f} s"
        return f"{self.target}: {', '.join(parts)} ({size})"

    def _repr_html_(self) -> str:
        entries = {
            "averaged": count_of(self.averaged, "array") if self.averaged else None,
            "adapted": count_of(self.adapted, "array") if self.adapted else None,
            "size": html.size(self.nbytes),
            "duration": f"{self.duration_s:.2f} s",
        }
        weights = [f"{weight:g}" for weight in self.weights] or [""] * len(self.sources)
        unchanged = [count_of(number, "array") if number else "" for number in self.taken]
        rows = list(zip(self.sources, weights, unchanged, strict=True))
        head = ("source", "weight", "unchanged")
        sources = html.table(count_of(len(rows), "source"), head, rows)
        return html.frame("MergeReport", self.target, html.facts(entries), sources)


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
    """Write one checkpoint that is made of several, in bounded memory.

    Floating-point and complex arrays of every dtype are averaged: equally, by `weights`, or with
    `ema` as an exponential moving average. Sums are formed in float64 and rounded once, to the
    dtype of the result. All other leaves (integers, bools, PRNG keys, Python values) and the tree
    itself come from the last source. The result is saved as by `save`, with the shards of the last
    source. Call it from one process.

    With `lora`, the sources are a base and its adapters. `lora · lora_a @ lora_b` is added to each
    kernel with such adapters. Everything else comes from the base.

    Args:
        sources: Two or more checkpoints with the same leaves, shapes and dtypes.
        target: The path of the result, outside of all sources.
        weights: A weight for each source. They are scaled to a sum of 1.
        ema: The decay of an exponential moving average over sources from the oldest to the newest.
        lora: The factor of the adapters.
        take: By path pattern, the number of the source (from 0) to take a leaf from, unchanged. The
            first matching pattern counts: `{"head/**": 1, "**": 0}`.
        only: Path patterns, as in `restore`. Other leaves are not averaged, or are no adapters.
        dtype: Write floating-point arrays as another dtype, as in `save`.
        compress: Compress the result, as in `save`.
        metadata: Metadata of the result, as in `save`.
        on_bytes: Called now and then with the bytes done and the bytes in all.

    Returns:
        A report with the origin of all arrays.

    Raises:
        Mismatch: The sources have other leaves, shapes or dtypes, or adapters that do not fit.
        InvalidTree: There is nothing to average and no `take`, or there are no adapters.
        ValueError: The arguments contradict each other, or the target is in a source.

    Example:
        >>> ostraka.merge(["runs/90", "runs/95", "runs/100"], "runs/soup")
        >>> ostraka.merge(["base", "adapters"], "merged", lora=2.0)
    """
    begin = time.perf_counter()
    if isinstance(sources, str):
        raise ValueError(f"merge takes a list of checkpoints first, not {sources!r}")
    if len(sources) < 2:
        raise ValueError(f"merge needs two checkpoints or more, and got {len(sources)}")
    opened = [open_at(source) for source in sources]
    place = open_store(target)
    if any(is_inside(place, one.store) for one in opened):
        raise ValueError(
            f"{place.location} is a source, or inside one; the result needs a place of its own"
        )
    if lora is not None:
        if weights is not None or ema is not None or take is not None or len(opened) != 2:
            raise ValueError(
                "lora takes two sources, the base and the adapters, and neither weights, ema nor "
                "take"
            )
        base, shares = opened[0], ()
        work_out, taken = _add_lora(base, opened[1], lora, only, dtype)
    else:
        base, given = opened[-1], _weights(len(opened), weights, ema)
        shares = tuple(weight / math.fsum(given) for weight in given)
        work_out, taken = _average(opened, given, take or {}, only, dtype)
    leaves = base.saved.leaves
    progress = Count(sum(leaf.nbytes for leaf in leaves), on_bytes)

    def read(number: int, box: Box) -> Array:
        array = work_out[number](box)
        progress.add(array.nbytes)
        return array

    values = [
        StreamedValue(leaf.shape, partial(read, number)) for number, leaf in enumerate(leaves)
    ]
    options = SaveOptions(dtype=dtype, compress=compress, metadata=metadata)
    save_streamed(target, base.saved, values, options)
    made = len(leaves) - sum(taken)
    return MergeReport(
        target=place.location,
        sources=tuple(source.location for source in opened),
        weights=shares,
        averaged=made if lora is None else 0,
        adapted=0 if lora is None else made,
        taken=taken,
        nbytes=progress.total,
        duration_s=time.perf_counter() - begin,
    )


ReadBox = Callable[[Box], Array]
"""Computes a box of a leaf of the result."""


def _weights(count: int, weights: Sequence[float] | None, ema: float | None) -> tuple[float, ...]:
    """The weight of each source, not scaled yet."""
    if weights is not None and ema is not None:
        raise ValueError("weights and ema are two ways to say the same; give one of them")
    if ema is not None:
        if not 0 <= ema < 1:
            raise ValueError(f"ema is {ema}; it must be at least 0 and less than 1")
        return tuple((1 - ema if n else 1.0) * ema ** (count - 1 - n) for n in range(count))
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count:
        raise ValueError(f"there are {len(given)} weights for {count_of(count, 'checkpoint')}")
    total = sum(given)
    if not all(map(math.isfinite, (*given, total))) or math.fsum(given) == 0:
        raise ValueError(f"weights are {given}; they must be numbers whose sum is not 0")
    return tuple(given)


def _average(
    sources: Sequence[Source],
    weights: Sequence[float],
    take: Mapping[str, int],
    only: Patterns | None,
    dtype: DtypeRule,
) -> tuple[list[ReadBox], tuple[int, ...]]:
    """How to read each leaf of the result, and the number of unchanged leaves of each source."""
    base, last = sources[-1], len(sources) - 1
    leaves = base.saved.leaves
    paths = [leaf.path for leaf in leaves]
    for pattern, number in take.items():
        if type(number) is not int or not 0 <= number <= last:
            raise ValueError(
                f"take has {number!r} for {pattern!r}; it must be the number of a source, from 0 "
                f"to {last}"
            )
    _pattern.refuse_unmatched("take", take, paths, "array of the last source")
    _pattern.refuse_unmatched("only", only or (), paths, f"array of {base.location}")
    chosen = [_pattern.lookup(take, path) for path in paths]
    if only is not None:
        chosen = [
            last if choice is None and not selects(only, path) else choice
            for choice, path in zip(chosen, paths, strict=True)
        ]
    rows = _matched(sources, chosen)
    if not take and all(len(row) == 1 for row in rows):
        raise InvalidTree(
            f"there is nothing to average: {base.location} has no floating-point array"
            + ("" if only is None else f" that only={only!r} selects")
            + ", and all other leaves come from the last source; say with take which source each "
            "leaf comes from"
        )
    readers = [
        source_reader(source, [row[at] for row in rows if at in row])
        for at, source in enumerate(sources)
    ]
    work_out: list[ReadBox] = []
    taken = [0] * len(sources)
    for leaf, row in zip(leaves, rows, strict=True):
        used = [(readers[at], own, weights[at]) for at, own in row.items()]
        if len(row) == 1:
            taken[next(iter(row))] += 1
            work_out.append(partial(used[0][0].read, used[0][1]))
        else:
            work_out.append(partial(_mean, used, numpy_dtype(cast_leaf(leaf, dtype).dtype)))
    return work_out, tuple(taken)


def _matched(sources: Sequence[Source], chosen: Sequence[int | None]) -> list[dict[int, int]]:
    """For each leaf of the last source, its number in each source that it uses, by source.

    Raises Mismatch for leaves that differ between these sources.
    """
    by_path = [numbers_by_path(source) for source in sources]
    differences: list[str] = []
    rows: list[dict[int, int]] = []
    last = len(sources) - 1
    leaves = sources[-1].saved.leaves
    for number, (leaf, choice) in enumerate(zip(leaves, chosen, strict=True)):
        wanted = range(len(sources)) if is_inexact(leaf.dtype) else [last]
        rows.append({})
        for at in wanted if choice is None else [choice]:
            own = number if at == last else by_path[at].get(leaf.path)
            if own is None:
                near = nearest_path(leaf.path, list(by_path[at]))
                differences.append(f"{leaf.path!r} is not in {sources[at].location}{near}")
                continue
            rows[-1][at] = own
            other = sources[at].saved.leaves[own]
            differences += [
                f"{leaf.path!r}: its {name} is {getattr(leaf, name)}, and in "
                f"{sources[at].location} {getattr(other, name)}"
                for name in _ALIKE
                if getattr(leaf, name) != getattr(other, name)
            ]
    for at in range(last):
        extra = [path for path in by_path[at] if path not in by_path[-1]]
        if extra and None in chosen:
            where = sources[at].location
            differences.append(f"{name_few(extra)}: in {where}, not in {sources[-1].location}")
    if differences:
        raise Mismatch("the checkpoints can't be merged", differences[:_MOST_LINES])
    return rows


def _mean(used: Sequence[tuple[BoxReader, int, float]], dtype: np.dtype[Any], box: Box) -> Array:
    total: Any = None
    for reader, number, weight in used:
        if weight:  # NaN times 0 is NaN: a source of no weight has no part in the average.
            part = _as_float64(reader.read(number, box)) * weight
            total = part if total is None else total + part
    # Divided last: with weights that are whole numbers, all before it is exact for most dtypes.
    mean = total / math.fsum(weight for _, _, weight in used)
    if dtype.kind == "c":
        return mean.view(np.complex128)[..., 0].astype(dtype)
    return _rounded(mean, dtype)


def _as_float64(array: Array) -> Array:
    """Cast to float64. Complex numbers get a last axis of two, so that infinities stay such."""
    if array.dtype.kind != "c":
        return array.astype(np.float64)
    return array.astype(np.complex128, order="C").reshape(*array.shape, 1).view(np.float64)


def _rounded(values: Array, dtype: np.dtype[Any]) -> Array:
    """Round values of float64 once to another dtype.

    ml_dtypes casts float64 to its own dtypes by way of float32, and so rounds twice. The second
    rounding is right if the first one rounds to odd: it truncates inexact values and sets their
    last bit. This needs two extra bits, and float32 has more.
    """
    if dtype.isbuiltin == 1:
        return values.astype(dtype)
    values = np.asarray(values)
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    bits = near.view(np.uint32)
    bits -= np.abs(near) > np.abs(values)
    bits |= (near != values) & ~np.isnan(values)
    return near.astype(dtype)


def _add_lora(
    base: Source, adapters: Source, scale: float, only: Patterns | None, dtype: DtypeRule
) -> tuple[list[ReadBox], tuple[int, ...]]:
    """As `_average`, for a base and its adapters."""
    if not math.isfinite(scale):
        raise ValueError(f"lora is {scale}; it must be a number")
    leaves = base.saved.leaves
    pairs = find_adapters(base, adapters, only)
    if not pairs:
        raise InvalidTree(
            f"{adapters.location} has no adapters: leaves that are called lora_a and lora_b"
        )
    ours = source_reader(base, range(len(leaves)))
    theirs = source_reader(adapters, [number for pair in pairs.values() for number in pair])
    work_out: list[ReadBox] = [partial(ours.read, number) for number in range(len(leaves))]

    def adapted(number: int, pair: tuple[int, int], box: Box) -> Array:
        """A box of a kernel with its adapter. It reads only the rows and columns of the box."""
        rows, columns = box
        rank = adapters.saved.leaves[pair[0]].shape[1]
        a = theirs.read(pair[0], (rows, (0, rank))).astype(np.float64)
        b = theirs.read(pair[1], ((0, rank), columns)).astype(np.float64)
        kernel = ours.read(number, box).astype(np.float64)
        dtype_to = numpy_dtype(cast_leaf(leaves[number], dtype).dtype)
        return _rounded(kernel + scale * (a @ b), dtype_to)

    for number, pair in pairs.items():
        work_out[number] = partial(adapted, number, pair)
    return work_out, (len(leaves) - len(pairs), 0)
