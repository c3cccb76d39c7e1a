"""The values of a tree's leaves: handles to their bytes, and refusals of unsavable ones.

The bytes of a JAX array come by shard, those in host memory by any box. Each refusal raises
InvalidTree with the leaf and the probable intention.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ostraka.common.dtypes import DTYPES, numpy_dtype
from ostraka.common.threads import RenewedLock
from ostraka.errors import InvalidTree
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.plan_write import BAND_BYTES
from ostraka.layout.spec import LeafSpec
from ostraka.live.parse import BUILTIN, text_at
from ostraka.tree.json_values import class_name, mro_lookup
from ostraka.tree.nodes import ROOT, Branch, Kept, Leaf, Node, branches_of, has_values, leaves_of

Array = np.ndarray[Any, Any]
Copy = tuple[Array, Array]
"""(destination, source)"""

_SMALL_BYTES = 1 << 20
"""A numpy array up to this size is copied by the caller: no thread would be faster."""
_COPIED_BYTES = 8 << 20
"""The part of a larger array that a thread copies at a time."""
HOST_BAND_BYTES = 4 << 20
"""Host memory is converted in pieces of this size, which stay in the cache."""
_CUT_BYTES = 8 << 20
"""Parts of larger shards are sliced on their device."""
_PATIENCE_S = 5.0
"""The time that a thread of the program may take to list the shards of an array."""
_MOST_DIMENSIONS = 63
"""One fewer than numpy has, for the dimension of processes that a per-process array gets."""


def check_savable(leaf: Leaf) -> None:
    """Raise InvalidTree for arrays without values to save."""
    value = leaf.value
    if isinstance(value, Tracer):
        raise InvalidTree(
            f"leaf {leaf.path!r} is a traced value: call save outside of jit and other transforms"
        )
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise InvalidTree(
                f"leaf {leaf.path!r} has been deleted or donated: its values are gone; save the "
                "arrays that the step returned"
            )
    elif isinstance(value, np.ndarray):
        if value.ndim > _MOST_DIMENSIONS:
            raise InvalidTree(
                f"leaf {leaf.path!r} has {value.ndim} dimensions; at most {_MOST_DIMENSIONS} can "
                "be saved"
            )
        if type(value) not in (np.ndarray, np.memmap):
            raise InvalidTree(
                f"leaf {leaf.path!r} is a {'.'.join(class_name(type(value)))}, which would come "
                "back as a plain numpy array: save np.asarray(…) of it"
            )
    elif isinstance(value, jax.ShapeDtypeStruct):
        raise InvalidTree(f"leaf {leaf.path!r} is abstract ({value}): it has no values to save")


class HostValue:
    """A value in host memory: any box can be had, whatever the device.

    With `of_process`, every process has its own value of the leaf. This process's value is a box
    of one element in dimension 0.
    """

    in_host_memory = True
    """True if reads return views, which need no memory."""
    band_bytes = HOST_BAND_BYTES
    """The best size of the parts in which to read and copy a box, or 0 to read it whole."""

    def __init__(self, array: Array, *, may_change: bool, of_process: bool = False):
        self._array = array
        self._of_process = of_process
        self.may_change = may_change
        """True if threads of the program may write to the memory of those views."""

    def read(self, device: int, box: Box) -> Array:
        """The elements of a box that `device` holds. A view if possible."""
        array = self._array
        if self._of_process:
            return array[_box.slices(box[1:], _box.full(array.shape))][np.newaxis]
        return array[_box.slices(box, _box.full(array.shape))]

    @property
    def copied_bytes(self) -> int:
        """The host memory that `hold` takes."""
        return self._array.nbytes

    def let_go(self) -> None:
        """Read no more."""
        self._array = np.empty(0, self._array.dtype)

    def hold(self) -> Sequence[Copy]:
        """Make the elements safe from all that happens later: donation, deletion, writing.

        They are, once the copies that this returns have been made.
        """
        given, self._array = self._array, np.empty_like(self._array)
        self.may_change = False
        if given.nbytes > _SMALL_BYTES:
            return _copies(self._array, given)
        np.copyto(self._array, given)
        return ()

    def whole(self) -> Array:
        """All elements, where all are on this process."""
        return self._array


@dataclass(frozen=True, slots=True)
class Placement:
    """The boxes on this process's devices for one sharding, shape and dtype."""

    shape: tuple[int, ...]
    devices: Sequence[Any]
    """In JAX's order."""
    index_of: Mapping[int, int]
    """By the number of a device, its place in that order."""
    boxes: Mapping[int, Box]
    """By the number of a device, the box that it holds."""
    gives_views: bool
    """True if the bytes are in host memory in the form of a file."""


class ShardedValue:
    """A jax.Array: each local device returns elements of its own shard."""

    __slots__ = (
        "_array",
        "_at",
        "_held",
        "_is_on_its_way",
        "_shards",
        "in_host_memory",
        "may_change",
    )

    def __init__(self, array: jax.Array, at: Placement):
        self._array: jax.Array | None = array
        self._at = at
        self._shards: Sequence[jax.Array] | None = None
        self._held: dict[Box, Array] | None = None
        self._is_on_its_way = False
        """True if the shards are twins whose copies have begun."""
        self.in_host_memory = at.gives_views
        self.may_change = False

    def read(self, device: int, box: Box) -> Array:
        at = self._at
        outer = at.boxes[device]
        if self._held is not None:
            shard = self._held[outer]
        else:
            shards = self._shards or self._list_shards()
            data = shards[at.index_of[device]]
            if not at.gives_views and box != outer and _can_be_cut(data):
                return _host_copy(_cut(data, _box.slices(box, outer)))
            if at.gives_views:
                shard = np.asarray(data)
            else:
                shard = _host_copy(data if self._is_on_its_way else _twin(data))
        return shard if box == outer else shard[_box.slices(box, outer)]

    @property
    def band_bytes(self) -> int:
        if self._held is not None or self._at.gives_views:
            return HOST_BAND_BYTES
        shards = self._shards or self._list_shards()
        return BAND_BYTES if all(map(_can_be_cut, shards)) else 0

    @property
    def copied_bytes(self) -> int:
        """The host memory that `hold` takes. Views take none."""
        if self._at.gives_views:
            return 0
        return self._item_bytes() * sum(map(_box.count, self.held_boxes()))

    @property
    def largest_bytes(self) -> int:
        """The memory of the largest shard."""
        return self._item_bytes() * max(map(_box.count, self.held_boxes()), default=0)

    def _item_bytes(self) -> int:
        assert self._array is not None
        return self._array.dtype.itemsize

    def let_go(self) -> None:
        """Read no more."""
        self._array = self._shards = self._held = None

    def start_copying(self) -> None:
        """Begin to bring from an accelerator what `hold` will wait for."""
        if not self._at.gives_views:
            twins = list(map(_twin, self._shards or self._list_shards()))
            for device in self.held_boxes().values():
                twins[self._at.index_of[device]].copy_to_host_async()
            self._shards, self._is_on_its_way = twins, True

    def hold(self) -> Sequence[Copy]:
        # A view is enough in host memory: XLA does not reuse what somebody looks at.
        self._held = self._by_box()
        self._array = self._shards = None
        # JAX takes over aligned memory of numpy, dlpack and others without a copy, nothing tells
        # these arrays from its own, and the program goes on while they are written.
        self.may_change = self._at.gives_views
        self.in_host_memory = True
        return ()

    def whole(self) -> Array:
        shards = self._held or self._by_box()
        if len(shards) == 1:
            return next(iter(shards.values()))
        whole = np.empty(self._at.shape, next(iter(shards.values())).dtype)
        for box, shard in shards.items():
            whole[_box.slices(box, _box.full(self._at.shape))] = shard
        return whole

    @property
    def boxes(self) -> Mapping[int, Box]:
        """By the number of a device of any process, the box that it holds."""
        return self._at.boxes

    @property
    def is_replicated(self) -> bool:
        """True if several devices, of any process, hold the same box."""
        return len(set(self._at.boxes.values())) < len(self._at.boxes)

    def replicas(self) -> Iterator[tuple[int, Any, bool]]:
        """The number of each local device, its shard, and True if numpy can view the shard."""
        shards = self._shards or self._list_shards()
        for device, index in self._at.index_of.items():
            yield device, shards[index], self._at.gives_views

    def held_boxes(self) -> dict[Box, int]:
        """Each box on this process's devices, and the number of one device that has it."""
        return {self._at.boxes[device]: device for device in self._at.index_of}

    def _by_box(self) -> dict[Box, Array]:
        return {box: self.read(device, box) for box, device in self.held_boxes().items()}

    def _list_shards(self) -> Sequence[jax.Array]:
        assert self._array is not None
        self._shards = shards_of(self._array, self._at.devices)
        return self._shards


class CastValue:
    """A value that is saved as another dtype."""

    in_host_memory = False
    may_change = False

    def __init__(self, value: Value, dtype: str):
        self._value = value
        self._dtype = numpy_dtype(dtype)

    def read(self, device: int, box: Box) -> Array:
        return self._value.read(device, box).astype(self._dtype)

    @property
    def band_bytes(self) -> int:
        return self._value.band_bytes


class BandsOnce:
    """A value that a save reads from where it lies, each band once and in little memory."""

    in_host_memory = False
    may_change = False

    def __init__(
        self,
        value: Value,
        leaf: LeafSpec,
        most_bytes: int,
        read: Callable[[int, Box], Array],
    ):
        """A band takes `most_bytes` of memory. `read` is to return a `copy`, old or new."""
        self._value = value
        self.read = read
        stored = DTYPES[leaf.dtype]
        self._item_bytes = numpy_dtype(leaf.dtype).itemsize
        # A band may be in memory as it was, cast, and packed: by JAX, and for the file.
        element_bytes = self._item_bytes + (2 * stored.bits / 8 if stored.packed else 0)
        if leaf.cast_from is not None:
            element_bytes += numpy_dtype(leaf.cast_from).itemsize
        stored_bytes = int(most_bytes / element_bytes * stored.bits / 8)
        self.band_bytes = min(value.band_bytes, max(stored_bytes, 1))

    def memory_bytes(self, box: Box) -> int:
        """The memory of a copy of a box."""
        return _box.count(box) * self._item_bytes

    def copy(self, device: int, box: Box) -> Array:
        """The elements of a box, which the program can't change."""
        array = self._value.read(device, box)
        return np.array(array, order="C") if self._value.may_change else array


CapturedValue = HostValue | ShardedValue
"""A leaf's bytes as the tree has them, as far as this process holds them."""
Value = CapturedValue | CastValue | BandsOnce
"""A leaf's bytes as they are written."""

_taking_apart = RenewedLock()


def shards_of(array: Any, devices: Sequence[Any]) -> Sequence[jax.Array]:
    """The shards on this process's devices, in the order of the mesh.

    JAX lists the shards at the first access. If two threads access them at once, both append to
    the same list, or one sees the unfinished list of the other. Threads of Ostraka take turns. A
    list that threads of the program mixed up has the wrong length or order: each thread starts
    with the first device and appends a shard per device. This function then asks each shard for
    its device, or asks a twin, which shares the buffers and has its own list. JAX makes no twin of
    an array that spans processes. There the list of the other thread is complete in a moment.
    """
    with _taking_apart.lock:
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            shards = _listed(array)
            # To ask each shard for its device would cost a third of a leaf's time.
            if len(shards) == len(devices) and (not shards or shards[-1].device == devices[-1]):
                return shards
            by_device = {shard.device: shard for shard in shards}
            if len(by_device) == len(devices):
                return [by_device[device] for device in devices]
            if array.is_fully_addressable:
                array = array.clone()
            elif time.monotonic() > give_up_s:
                raise RuntimeError(
                    f"JAX lists {len(shards)} shards on {len(devices)} devices for an array of the "
                    f"shape {array.shape}: two threads of this program have first looked at it at "
                    "the same time; save a copy of it"
                )
            else:
                time.sleep(0.001)


def _listed(array: Any) -> Sequence[jax.Array]:
    shards = getattr(array, "_arrays", None)
    return [shard.data for shard in array.addressable_shards] if shards is None else shards


def _copies(to: Array, given: Array) -> list[Copy]:
    """Pairs of parts to copy, each contiguous in memory."""
    axis = int(np.argmax(np.abs(given.strides)))
    rows = given.shape[axis]
    step = max(_COPIED_BYTES * rows // given.nbytes, 1)
    whole = (slice(None),) * axis
    parts = [(*whole, slice(start, start + step)) for start in range(0, rows, step)]
    return [(to[part], given[part]) for part in parts]


def _can_be_cut(array: Any) -> bool:
    """True if slicing a shard on its device is cheaper than copying all of it.

    A cut must be compiled, once for each kind of array. Not every platform computes with what it
    keeps elsewhere than in the memory of the device.
    """
    return (
        array.nbytes > _CUT_BYTES
        and max(array.shape) < 1 << 31
        and array.sharding.memory_kind in (None, array.device.default_memory().kind)
    )


def _cut(array: Any, within: Sequence[slice]) -> Any:
    starts = [part.start for part in within]
    sizes = [part.stop - part.start for part in within]
    with jax.transfer_guard("allow"):  # for the numbers; what the program forbids is its own
        return jax.lax.dynamic_slice(array, starts, sizes)


def _twin(array: Any) -> Any:
    """An array with the same buffers, and with host copies of its own.

    JAX keeps what it had to copy for as long as the array lives. So a save would leave a copy of
    the whole state behind in host memory.
    """
    return array.clone()


def _host_copy(array: Any) -> Array:
    """A copy in host memory. Like `np.asarray`, but the array keeps none that it can view."""
    copy = getattr(array, "_single_device_array_to_np_array_did_copy", None)
    return np.asarray(array) if copy is None else copy()[0]


# Refusals of trees that trace, have no value, or have functions


def refuse_inside_jit(call: str, leaves: Sequence[Leaf] = ()) -> None:
    """Raise InvalidTree where JAX traces a function, naming a traced leaf if there is one.

    There, `call` would run once, when the function is compiled, and values are not known.
    """
    if not isinstance(jnp.zeros(()), Tracer):  # in grad and vmap alone, values are known
        return
    for leaf in leaves:
        check_savable(leaf)
    raise InvalidTree(
        f"{call} is called inside jit, or inside another transform that traces a function: call "
        "it outside, and pass arrays to the function as arguments"
    )


# Trees that a save refuses because they are hardly what was meant


def refuse_empty(tree: Node) -> None:
    """Raise InvalidTree for a tree that has no value at all."""
    if has_values(tree):
        return
    if isinstance(tree, Leaf):
        is_none = tree.value is None
        found = "the tree is None" if is_none else f"the tree is a {tree.value.name} alone"
        intent = "did you forget to return the state?" if is_none else "did you mean its state?"
        raise InvalidTree(f"there is nothing to save: {found}; {intent}")
    empty = next(
        node.path
        for node in (*leaves_of(tree), *branches_of(tree))
        if isinstance(node, Leaf) or not node.children
    )
    found = f"holds only None and empty containers, as at {empty!r}" if empty else "is empty"
    raise InvalidTree(
        f"there is nothing to save: the tree {found}; was it made before the model was "
        "initialised, or by a filter that matches nothing?"
    )


@dataclass(frozen=True, slots=True)
class LooseFunctions:
    """A function, or a named tuple of functions, outside of any class."""

    paths: tuple[str, ...]
    """The paths of its leaves."""
    where: str
    what: str
    intent: str

    def __str__(self) -> str:
        return f"{self.where!r} is {self.what} ({self.intent})"


def refuse_functions(tree: Node) -> None:
    """Raise InvalidTree for functions that are not part of a module or of another class.

    A class with functions in it (a module of Equinox, a registered dataclass) comes back by a
    template that has them. In a dict or a list they are a slip: a function in place of its result,
    an optimizer in place of its state.
    """
    found = list(loose_functions(tree))
    if not found:
        return
    few = ", ".join(map(str, found[:3]))
    rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
    raise InvalidTree(f"functions can't be saved: {few}{rest}; leave functions out of the tree")


def loose_functions(node: Node) -> Iterator[LooseFunctions]:
    """The functions in plain containers, and named tuples of functions."""
    if isinstance(node, Leaf):
        if isinstance(node.value, Kept) and not node.value.is_structure:
            yield LooseFunctions((node.path,), node.path, *_describe_function(node.value.value))
    elif _is_plain(node):
        below = [found for child in node.children for found in loose_functions(child)]
        init = next((key for key in node.keys if str(key).startswith("init")), None)
        if node.kind != "namedtuple" or init is None or len(below) < len(node.children):
            yield from below
            return
        is_optax = init == "init" and "update" in node.keys
        intent = f"did you mean {'tx.init(params)' if is_optax else f'its .{init}(…)'}?"
        paths = tuple(path for found in below for path in found.paths)
        what = f"a named tuple of functions, {node.cls[1] if node.cls else ''}"
        yield LooseFunctions(paths, node.path or ROOT, what, intent)


def _is_plain(branch: Branch) -> bool:
    """True for Python's containers and mappings, False for other classes."""
    if branch.kind != "node":
        return branch.kind in ("namedtuple", *BUILTIN.values())
    rebuild: Any = branch.rebuild  # as `_parse_registered` makes it
    kind, _ = rebuild.args[0].node_data()
    return issubclass(kind, Mapping)


def _describe_function(function: Any) -> tuple[str, str]:
    """A description of a callable, and of the value that was probably meant."""
    kind = type(function)
    has = partial(mro_lookup, kind)
    if callable(has("init")) and callable(has("apply")):
        return f"a {kind.__qualname__}, which holds no values", "did you mean its .init(…)?"
    if kind is partial:
        what, intent = _describe_function(function.func)
        return f"a partial of {what}", intent
    name = text_at(function, "__name__")
    if name is None:
        return f"a {'.'.join(class_name(kind))}, which can be called", "did you mean its values?"
    if not name.isidentifier():
        return "a lambda", "did you mean its result?"
    return f"the function {name}", f"did you mean {name}({_arguments_of(function)})?"


def _arguments_of(function: Any) -> str:
    with suppress(Exception):
        return "…" if inspect.signature(function).parameters else ""
    return "…"
