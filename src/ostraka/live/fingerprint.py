"""Fingerprints of arrays, computed on the devices that hold them.

Each device sums up its own shard, and the host adds the sums of the shards, each box once. A sum
does not depend on the order, so a fingerprint does not depend on the sharding. No device waits for
another one.

An element adds a mix of its bits and its global index to three lanes of 32 bits: the exact part.
It detects a flipped bit, swapped elements and swapped leaves. The numeric part is the sum of all
magnitudes and two random projections, sums in which an index decides the sign of its element.

Functions are compiled once for each shape, dtype and sharding, and once for each batch of small
arrays. XLA reads an array two or three times, through its cache, and keeps no copy.
Only small arrays are stacked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ostraka.common.dtypes import dtype_name
from ostraka.errors import InvalidTree
from ostraka.live.parse import is_key

LANES = 3
"""The lanes of 32 bits in the exact part."""
NUMBERS = 3
"""The numbers in the numeric part: the sum of magnitudes, then two projections."""
_WIDTH = LANES + NUMBERS
_SMALL_BYTES = 256 << 10
"""A shard up to this size is stacked with others of its kind: a call would cost more."""
_STACKED_BYTES = 8 << 20
"""The most bytes that are stacked in one call."""
_MOST_ARGUMENTS = 256
"""The most arrays of one call: XLA compiles functions of thousands of arrays slowly."""
_ROW = 4096
"""Long vectors are summed up in rows of this length, which keeps the rounding error small."""
_LARGE, _LEAST_ROW, _MOST_ROW = 1 << 10, 16, 1 << 16
"""From so many floats on, the numeric part is computed in vector registers, by such rows."""

_GOLDEN, _MIX, _SPREAD = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_SECOND, _THIRD, _OVER = np.uint32(0x27D4EB2F), np.uint32(0x165667B1), 0x9E3779B9
_ALL_BITS = (1 << 32) - 1
_COLUMNS = (np.uint32(0x2545F491), np.uint32(0x61C88647))
"""The salts of the signs of columns, one for each projection."""


class Sums(NamedTuple):
    """The fingerprint of an array, or the part of some shards."""

    lanes: tuple[int, ...]
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The fingerprint of one shard on one device of this process."""

    device: Any
    index: tuple[slice, ...]
    is_first: bool
    """True if it counts: the first replica of its box, on any process."""
    sums: Sums


class Pending:
    """Fingerprints that devices compute. `collect` waits for them."""

    def __init__(self, count: int):
        self._count = count
        self._waiting: list[tuple[_Group, Sequence[Any]]] = []

    def add(self, group: _Group, tables: Sequence[Any]) -> None:
        self._waiting.append((group, tables))

    def collect(self) -> list[list[Part]]:
        """Return the parts on this process's devices, by array."""
        parts: list[list[Part]] = [[] for _ in range(self._count)]
        with jax.transfer_guard("allow"):
            for group, tables in self._waiting:
                _unpack(group, tables, parts)
        self._waiting.clear()
        return parts


def add_parts(parts: Sequence[Sums]) -> Sums:
    """Add up parts of one array."""
    if len(parts) == 1:
        return parts[0]
    lanes = tuple(sum(part.lanes[lane] for part in parts) % (1 << 32) for lane in range(LANES))
    return Sums(lanes, tuple(sum(part.numbers[n] for part in parts) for n in range(NUMBERS)))


def begin_fingerprints(arrays: Sequence[jax.Array]) -> Pending:
    """Have devices compute the fingerprints of JAX arrays, and return at once.

    The arrays may be deleted or donated afterwards. PRNG keys count as their words.
    """
    arrays = [jax.random.key_data(array) if is_key(array) else array for array in arrays]
    pending = Pending(len(arrays))
    with jax.transfer_guard("allow"):
        for group in _plan(tuple(map(_describe, arrays))):
            pending.add(group, group.run([arrays[number] for number in group.numbers]))
    return pending


# Plans: which function is called with which arrays


class _Kind(NamedTuple):
    """All that a compiled function depends on."""

    shape: tuple[int, ...]
    dtype: str
    sharding: Any

    @property
    def shard_bytes(self) -> int:
        local = self.sharding.shard_shape(self.shape)
        return prod(local) * np.dtype(jnp.dtype(self.dtype)).itemsize


@dataclass(frozen=True, slots=True)
class _Group:
    """The arrays on one mesh, or on one device."""

    numbers: tuple[int, ...]
    """Their places in the list of all arrays."""
    kinds: tuple[_Kind, ...]
    calls: tuple[tuple[tuple[int, ...], Callable[..., Any]], ...]
    """Which arrays each function sums up, as places in this group."""
    join: Callable[..., Any]
    mesh: Mesh | None
    order: tuple[int, ...]
    """The row of each array in the tables, one after the other."""

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            found = [call(*[arrays[place] for place in places]) for places, call in self.calls]
            pieces = [found[n : n + _MOST_ARGUMENTS] for n in range(0, len(found), _MOST_ARGUMENTS)]
            tables = [self.join(*piece) if len(piece) > 1 else piece[0] for piece in pieces]
        for table in tables:
            for shard in table.addressable_shards:
                shard.data.copy_to_host_async()
        return tables


def _describe(array: Any) -> _Kind:
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
        raise InvalidTree(
            f"an array has a {type(sharding).__name__}; only NamedSharding and "
            "SingleDeviceSharding can be audited: put it on a mesh with jax.device_put first"
        )
    return _Kind(array.shape, dtype_name(array.dtype), sharding)


@lru_cache(maxsize=64)
def _plan(kinds: tuple[_Kind, ...]) -> list[_Group]:
    by_place: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        if prod(kind.shape):
            sharding = kind.sharding
            is_named = isinstance(sharding, NamedSharding)
            place = sharding.mesh if is_named else next(iter(sharding.device_set))
            by_place.setdefault(place, []).append(number)
    return [_plan_group(place, numbers, kinds) for place, numbers in by_place.items()]


def _plan_group(place: Any, numbers: Sequence[int], kinds: Sequence[_Kind]) -> _Group:
    mesh = place if isinstance(place, Mesh) else None
    mine = tuple(kinds[number] for number in numbers)
    alike: dict[_Kind, list[int]] = {}
    for at, kind in enumerate(mine):
        alike.setdefault(kind, []).append(at)
    calls: list[tuple[tuple[int, ...], Callable[..., Any]]] = []
    for batch in _batches(alike):
        places = tuple(at for _, together in batch for at in together)
        counts = tuple((kind, len(together)) for kind, together in batch)
        calls.append((places, _compile(mesh, counts)))
    listed = [at for places, _ in calls for at in places]
    row_of = {at: row for row, at in enumerate(listed)}
    order = tuple(row_of[at] for at in range(len(mine)))
    return _Group(tuple(numbers), mine, tuple(calls), _joiner(mesh), mesh, order)


def _batches(alike: Mapping[_Kind, list[int]]) -> Iterator[list[tuple[_Kind, list[int]]]]:
    """The arrays that one function sums up, by kind. Large arrays have a call of their own."""
    batch: list[tuple[_Kind, list[int]]] = []
    count = nbytes = 0
    for kind, places in alike.items():
        if kind.shard_bytes > _SMALL_BYTES:
            yield from ([(kind, [at])] for at in places)
            continue
        most = min(_MOST_ARGUMENTS, _STACKED_BYTES // max(kind.shard_bytes, 1))
        for start in range(0, len(places), most):
            together = places[start : start + most]
            count += len(together)
            nbytes += len(together) * kind.shard_bytes
            if batch and (count > _MOST_ARGUMENTS or nbytes > _STACKED_BYTES):
                yield batch
                batch, count, nbytes = [], len(together), len(together) * kind.shard_bytes
            batch.append((kind, together))
    if batch:
        yield batch


@lru_cache(maxsize=1024)
def _compile(mesh: Mesh | None, counts: tuple[tuple[_Kind, int], ...]) -> Callable[..., Any]:
    """A function of as many arrays as `counts` says, kind by kind.

    It returns a table by device, array and lane. All numbers are integers by their bits.
    """

    def sum_shards(*shards: Any) -> Any:
        given, rows = iter(shards), list[Any]()
        for kind, count in counts:
            block = jnp.stack([next(given) for _ in range(count)])
            wide = block.dtype.itemsize >= 8
            with jax.enable_x64(True) if wide else nullcontext():
                rows.append(_sum_block(block, kind.shape, _starts(kind, block.shape[1:])))
        return jnp.concatenate(rows)[None]

    if mesh is None:
        return jax.jit(sum_shards)
    specs = tuple(kind.sharding.spec for kind, count in counts for _ in range(count))
    out = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(sum_shards, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(mapped)


@lru_cache(maxsize=64)
def _joiner(mesh: Mesh | None) -> Callable[..., Any]:
    def join(*tables: Any) -> Any:
        return jnp.concatenate(tables, axis=1)

    if mesh is None:
        return jax.jit(join)
    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(join, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


@lru_cache(maxsize=4096)
def _firsts(kind: _Kind) -> dict[Any, tuple[tuple[slice, ...], bool]]:
    """By device, the box that it holds, and True for the first device of a box."""
    seen: set[tuple[tuple[int | None, int | None], ...]] = set()
    found: dict[Any, tuple[tuple[slice, ...], bool]] = {}
    for device, index in kind.sharding.devices_indices_map(kind.shape).items():
        box = tuple((part.start, part.stop) for part in index)
        found[device] = (tuple(index), box not in seen)
        seen.add(box)
    return found


def _unpack(group: _Group, tables: Sequence[Any], parts: list[list[Part]]) -> None:
    for shards in zip(*[table.addressable_shards for table in tables], strict=True):
        shard = shards[0]
        rows = np.concatenate([np.asarray(one.data)[0] for one in shards])
        lanes = rows[:, :LANES].tolist()
        numbers = rows[:, LANES:].copy().view(np.float32).tolist()
        for place, row in enumerate(group.order):
            index, is_first = _firsts(group.kinds[place])[shard.device]
            sums = Sums(tuple(lanes[row]), tuple(numbers[row]))
            parts[group.numbers[place]].append(Part(shard.device, index, is_first, sums))


# The sums of one block. It runs inside jit.


def _starts(kind: _Kind, local: Sequence[int]) -> list[Any]:
    """In each dimension, the global index of the first element of this device."""
    if isinstance(kind.sharding, SingleDeviceSharding):
        return [0] * len(local)
    starts: list[Any] = []
    spec = tuple(kind.sharding.spec)
    for dimension, extent in enumerate(local):
        axes = spec[dimension] if dimension < len(spec) else None
        if axes is None or axes == ():
            starts.append(0)
        else:
            starts.append(lax.axis_index(axes).astype(jnp.uint32) * np.uint32(extent))
    return starts


def _sum_block(block: Any, shape: tuple[int, ...], starts: Sequence[Any]) -> Any:
    """Sum up each of the stacked shards: a row of lanes and numbers for each.

    The way depends on the global shape and the dtype, and never on the sharding.
    """
    is_fast = dtype_name(block.dtype) in ("float32", "bfloat16") and prod(shape) >= _LARGE
    if is_fast:
        lanes = _reduce_all(_terms(block, _indices(block.shape[1:], shape, starts))[:LANES])
        numbers = _sum_floats(block, shape, starts)
    else:
        lanes, numbers = _sum_in_one(block, shape, starts)
    whole = [*lanes, *(lax.bitcast_convert_type(number, jnp.uint32) for number in numbers)]
    return jnp.stack(whole, axis=1)


def _sum_floats(block: Any, shape: tuple[int, ...], starts: Sequence[Any]) -> list[Any]:
    """The numeric part of large floats, in vector registers.

    The sign of an element is that of its row by that of its column. If rows are too long or too
    short, it is that of the element's place in a row of `_ROW`.
    """
    if len(shape) > 1 and _LEAST_ROW <= shape[-1] <= _MOST_ROW:
        columns = lax.iota(jnp.uint32, block.shape[-1]) + _uint32(starts[-1])
        rows = _mix(_indices(block.shape[1:-1], shape[:-1], starts[:-1]))
        return _project(block, columns, rows)
    if block.shape[2:] != shape[1:] or prod(shape) > 1 << 32:
        place = _indices(block.shape[1:], shape, starts) % np.uint32(_ROW)
        return _project(block[..., None], place[..., None], None)
    start = _uint32(starts[0] if starts else 0) * np.uint32(prod(shape[1:]) & _ALL_BITS)
    flat = block.reshape(len(block), -1)
    whole = flat.shape[1] // _ROW * _ROW
    columns = (lax.iota(jnp.uint32, _ROW) + start) % np.uint32(_ROW)
    numbers: list[list[Any]] = []
    if whole:
        rows = flat[:, :whole].reshape(len(flat), -1, _ROW)
        numbers.append(_project(rows, columns, None))
    if whole < flat.shape[1]:
        numbers.append(_project(flat[:, whole:], columns[: flat.shape[1] - whole], None))
    return [sum(column[1:], start=column[0]) for column in zip(*numbers, strict=True)]


def _project(block: Any, columns: Any, rows: Any) -> list[Any]:
    """The sum of magnitudes and the projections, of each of the stacked blocks.

    `columns` are the indices of columns, or of all elements. `rows` are mixed indices of rows.
    """

    def sum_up(sums: Any) -> Any:
        return jnp.sum(sums.reshape(len(block), -1), axis=1)

    # In its own dtype until it is summed up: XLA would keep a converted copy.
    numbers = [sum_up(jnp.sum(jnp.abs(block).astype(jnp.float32), axis=-1))]
    signs = [_sign(_mix(columns ^ salt), 0).astype(block.dtype) for salt in _COLUMNS]
    row_signs: list[Any] = [1.0 if rows is None else _sign(rows, bit) for bit in range(len(signs))]
    if block.dtype == jnp.float32 and columns.ndim == 1:
        dot = jnp.matmul(block, jnp.stack(signs, axis=1), precision=lax.Precision.HIGHEST)
        return numbers + [sum_up(dot[..., n] * one) for n, one in enumerate(row_signs)]
    for of_columns, of_rows in zip(signs, row_signs, strict=True):
        # One after the other: XLA would join the sums, and then compute element by element.
        block, _ = lax.optimization_barrier((block, numbers[-1]))
        sums = jnp.sum((block * of_columns).astype(jnp.float32), axis=-1)
        numbers.append(sum_up(sums * of_rows))
    return numbers


def _sum_in_one(block: Any, shape: tuple[int, ...], starts: Sequence[Any]) -> tuple[Any, Any]:
    """Both parts in one reduction, of any dtype and shape."""
    is_flat = prod(shape) <= 1 << 32 and block.shape[2:] == shape[1:]
    if not is_flat:
        sums = [_reduce_all(_terms(block, _indices(block.shape[1:], shape, starts)))]
    else:  # The elements follow each other.
        flat = block.reshape(len(block), -1)
        start = _uint32(starts[0] if starts else 0) * np.uint32(prod(shape[1:]) & _ALL_BITS)
        size = flat.shape[1]
        whole = size // _ROW * _ROW
        sums: list[Any] = []
        if whole:
            rows = flat[:, :whole].reshape(len(flat), -1, _ROW)
            sums.append(_reduce_all(_terms(rows, start + _indices(rows.shape[1:]))))
        if whole < size:
            index = start + np.uint32(whole) + _indices((size - whole,))
            sums.append(_reduce_all(_terms(flat[:, whole:], index)))
    added = [sum(column[1:], start=column[0]) for column in zip(*sums, strict=True)]
    return added[:LANES], added[LANES:]


def _uint32(number: Any) -> Any:
    return jnp.asarray(number, jnp.uint32)


def _indices(
    local: Sequence[int], shape: Sequence[int] | None = None, starts: Sequence[Any] | None = None
) -> Any:
    """The global index of each element of a shard, modulo 2**32, with one dimension before it."""
    index: Any = jnp.zeros((1,) * (len(local) + 1), jnp.uint32)
    extents, stride = local if shape is None else shape, 1
    for at in reversed(range(len(local))):
        own = lax.broadcasted_iota(jnp.uint32, (1, *local), at + 1)
        if starts is not None:
            own = own + _uint32(starts[at])
        # Where 2**32 is exceeded, elements 2**32 apart must differ.
        is_over = stride * extents[at] > 1 << 32
        index = index + own * np.uint32((stride + is_over * _OVER) & _ALL_BITS)
        stride *= extents[at]
    return index


def _mix(index: Any) -> Any:
    mixed = index * _GOLDEN
    mixed = (mixed ^ (mixed >> 15)) * _MIX
    return mixed ^ (mixed >> 13)


def _sign(mixed: Any, bit: int) -> Any:
    return jnp.where((mixed >> (31 - bit)) & 1 == 0, np.float32(1), np.float32(-1))


def _terms(block: Any, index: Any) -> list[Any]:
    """For each element, what it adds to the lanes and to the numbers."""
    words = _split(block)
    added: list[list[Any]] = []
    for number, (bits, value) in enumerate(words):
        own = index if len(words) == 1 else index * np.uint32(len(words)) + np.uint32(number)
        key, mixed = own * _GOLDEN, _mix(own)
        one = (bits ^ mixed) * _SPREAD
        one = one ^ (one >> 16)
        two = (one + mixed) * _SECOND
        two = two ^ (two >> 15)
        three = (two ^ key) * _THIRD
        three = three ^ (three >> 16)
        signed = [value * _sign(mixed, bit) for bit in range(NUMBERS - 1)]
        added.append([one, two, three, jnp.abs(value), *signed])
    return [sum(column[1:], start=column[0]) for column in zip(*added, strict=True)]


def _split(block: Any) -> list[tuple[Any, Any]]:
    """The 32-bit words of elements, each with its number. Only one word has the number."""
    if jnp.issubdtype(block.dtype, jnp.complexfloating):
        return [*_split(lax.real(block)), *_split(lax.imag(block))]
    name = dtype_name(block.dtype)
    value = block.astype(jnp.float32)
    if jnp.issubdtype(block.dtype, jnp.floating):
        bits = 4 if name.startswith("float4") else block.dtype.itemsize * 8
        block = lax.bitcast_convert_type(block, jnp.dtype(f"uint{bits}"))
    if block.dtype.itemsize == 8:
        wide = block.astype(jnp.uint64)
        high = (wide >> np.uint64(32)).astype(jnp.uint32)
        return [(wide.astype(jnp.uint32), value), (high, jnp.zeros_like(value))]
    # Through int32: a conversion of a negative number to uint32 is not the same everywhere.
    is_signed = jnp.issubdtype(block.dtype, jnp.signedinteger)
    return [((block.astype(jnp.int32) if is_signed else block).astype(jnp.uint32), value)]


def _reduce_all(terms: Sequence[Any]) -> list[Any]:
    """The sums of arrays over all but their first dimension, in one pass over memory.

    XLA fuses one reduction of several arrays with their producers, but copies before several
    reductions.
    """
    shape = jnp.broadcast_shapes(*(term.shape for term in terms))
    sums = tuple(jnp.broadcast_to(term, shape) for term in terms)
    zeros = tuple(np.zeros((), term.dtype) for term in terms)

    def add(left: Any, right: Any) -> Any:
        return tuple(a + b for a, b in zip(left, right, strict=True))

    # The last dimension first: long sums of floats would lose their last digits.
    for axes in ((len(shape) - 1,) if len(shape) > 1 else (), tuple(range(1, len(shape) - 1))):
        if axes:
            sums = lax.reduce(sums, zeros, add, axes)
    return list(sums)


# Host memory


_SIGNS = np.where(np.random.default_rng(7).random((2, _ROW)) < 0.5, -1.0, 1.0)


def numbers_of(array: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """The numeric part of a numpy array. It compares only with that of another numpy array."""
    if array.dtype.kind not in "biufcV" or not array.size:
        return (0.0,) * NUMBERS
    try:
        flat = array.reshape(-1).astype(np.float32, copy=False)
    except (TypeError, ValueError):
        return (0.0,) * NUMBERS
    with np.errstate(all="ignore"):
        whole = len(flat) // _ROW * _ROW
        folded = flat[:whole].reshape(-1, _ROW).sum(axis=0, dtype=np.float64)
        folded[: len(flat) - whole] += flat[whole:]
        magnitude = float(np.abs(flat).sum(dtype=np.float64))
        return (magnitude, *(float(folded @ signs) for signs in _SIGNS))


def value_of(array: np.ndarray[Any, Any]) -> float | int | str | None:
    """The only element of an array as JSON, or None."""
    if array.size != 1 or array.dtype.kind not in "biuf":
        return None
    value = array.reshape(-1)[0].item()
    return value if not isinstance(value, float) or isfinite(value) else repr(value)
