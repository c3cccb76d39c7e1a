"""Compare what is wanted with what was saved, and settle where each leaf goes.

All differences are found before anything is read, and raised as one `errors.Mismatch`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ostraka._box import Box, full
from ostraka._capture import (
    Devices,
    DtypeRule,
    describe_mesh,
    describe_sharding,
    floating_dtype,
    spec_entries,
)
from ostraka._checkpoint import Source
from ostraka._document import (
    ROOT,
    ArrayNumber,
    Branch,
    Leaf,
    SavedStates,
    Stateful,
    check_unique,
    leaves_of,
    prune,
    segment,
)
from ostraka._nnx import as_state
from ostraka._pattern import Patterns, matches, rename_with
from ostraka._spec import (
    DTYPES,
    HOST_LOCAL,
    LeafSpec,
    MeshSpec,
    device_boxes,
    dtype_name,
    is_floating,
    partition_problems,
)
from ostraka._tree import is_array, is_key, parse
from ostraka.errors import InvalidTree, Mismatch, PartialRestore, nearest, warn_caller

_config: Any = jax.config
"""JAX's flags, which its type declarations leave out."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where an array leaf of the checkpoint goes."""

    number: int
    path: str
    kind: str
    """"jax", "key", "numpy", "scalar", or "python" for a Python number."""
    sharding: Any
    """For JAX arrays."""
    boxes: tuple[Box, ...]
    """What this process needs of it, each once."""
    python: type | None = None
    cast: str | None = None
    """The dtype to cast it to, if that was asked for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A settled restore: what to read, what is known already, how to put it together."""

    tree: Branch | Leaf
    arrays: tuple[Destination, ...]
    values: Mapping[str, Any]
    states: tuple[tuple[Any, Any], ...] = ()
    """Stateful objects of `like`, and the state that each gets at the end."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller said about a restore, besides `like`."""

    mesh: Mesh | None = None
    specs: Any = None
    strict: bool = True
    only: Patterns | None = None
    rename: Mapping[str, str] | None = None
    dtype: DtypeRule = None
    as_state: bool = False
    in_place: bool = False
    """What is not restored is not touched, rather than taken over from `like`."""


class Matcher:
    """Settles one restore."""

    def __init__(
        self,
        source: Source,
        choices: Choices,
        *,
        process: int,
        process_count: int,
    ):
        self._metadata = source.metadata
        self._location = source.location
        self._mesh = choices.mesh
        self._choices = choices
        self._specs = SpecTree(choices.specs)
        self._process = process
        self._process_count = process_count
        self._devices = Devices()
        self._differences: list[str] = []
        self._saved_tree = source.tree
        self._rename = rename_with(choices.rename or {})
        self._saved = {self._rename(leaf.path): leaf.value for leaf in leaves_of(self._saved_tree)}
        self._tolerated: list[str] = []
        self._states: list[tuple[Any, Any]] = []
        self._settled: set[Any] = set()
        self._boxes: dict[Any, tuple[Box, ...]] = {}

    def match(self, tree: Branch | Leaf | None) -> Wanted:
        """Settle every leaf of a parsed `like`, or of all that was saved. Raises Mismatch."""
        wanted = tree or self._pruned(self._saved_tree)
        leaves = list(leaves_of(wanted))
        check_unique(leaves)
        arrays: list[Destination] = []
        values: dict[str, Any] = {}
        for leaf in leaves:
            path = self._rename(leaf.path) if tree is None else leaf.path
            if tree is not None and not self._is_chosen(path):
                self._keep(leaf, values)
            elif path not in self._saved:
                self._missing(leaf, values)
            elif isinstance(self._saved[path], ArrayNumber):
                arrays += self._array(leaf, self._saved[path].number)
            else:
                values[leaf.path] = self._value(leaf, self._saved[path])
        if tree is not None:
            self._unexpected({leaf.path for leaf in leaves}, tree)
        self._differences += self._specs.unused(self._saved)
        self._differences += self._unused_renames()
        if self._differences:
            what = "can't place checkpoint" if tree is None else "`like` does not fit checkpoint"
            raise Mismatch(f"{what} {self._location}", self._differences)
        if self._tolerated:
            listed = "; ".join(self._tolerated)
            warn_caller(PartialRestore(f"restored {self._location} in part: {listed}"))
        return Wanted(wanted, tuple(arrays), values, tuple(self._states))

    # Which leaves there are

    def _is_chosen(self, path: str) -> bool:
        return self._choices.only is None or matches(self._choices.only, path)

    def _keep(self, leaf: Leaf, values: dict[str, Any]) -> None:
        """Leave what `like` has, as far as it has a value."""
        if self._choices.in_place:
            return
        value = leaf.value.owner if isinstance(leaf.value, Stateful) else leaf.value
        if isinstance(value, jax.ShapeDtypeStruct):
            self._differences.append(
                f"{leaf.path!r} is not to be restored, and `like` has no value to keep for it"
            )
        values[leaf.path] = value

    def _missing(self, leaf: Leaf, values: dict[str, Any]) -> None:
        what = f"{leaf.path!r} is not in the checkpoint"
        valueless = isinstance(leaf.value, jax.ShapeDtypeStruct) and not self._choices.in_place
        if self._choices.strict or valueless:
            kept = "" if self._choices.strict else ", and `like` has no value to keep for it"
            found = nearest(leaf.path, list(self._saved))
            self._differences.append(f"{what}{kept}{found}")
            return
        self._tolerated.append(f"{what} and was kept")
        self._keep(leaf, values)

    def _unexpected(self, wanted: set[str], tree: Branch | Leaf) -> None:
        """Top-level entries may be left out where several things were saved in one dict."""
        left_out = self._top_level_left_out(tree)
        for path in self._saved:
            if path in wanted or path.split("/")[0] in left_out or not self._is_chosen(path):
                continue
            what = f"{path!r} is in the checkpoint but not in `like`"
            (self._differences if self._choices.strict else self._tolerated).append(what)

    def _unused_renames(self) -> list[str]:
        paths = [leaf.path for leaf in leaves_of(self._saved_tree)]
        unused = [
            f"rename has {old!r}, which is not in the checkpoint{nearest(old, paths)}"
            for old in self._choices.rename or {}
            if not any(path == old or path.startswith(f"{old}/") for path in paths)
        ]
        counts = Counter(self._rename(path) for path in paths)
        return unused + [
            f"rename gives the path {path!r} to {count} leaves of the checkpoint"
            for path, count in counts.items()
            if count > 1
        ]

    def _pruned(self, node: Branch | Leaf) -> Branch | Leaf:
        """The saved tree, with those leaves only that were asked for."""
        if self._choices.as_state:
            node = as_state(node)
        if self._choices.only is None:
            return node
        kept = prune(node, lambda path: self._is_chosen(self._rename(path)))
        if kept is None:
            self._differences.append(f"no leaf is matched by only={self._choices.only!r}")
            return node
        return kept

    def _top_level_left_out(self, tree: Branch | Leaf) -> set[str]:
        saved = self._saved_tree
        if not isinstance(saved, Branch) or not isinstance(tree, Branch):
            return set()
        several_things = "dict" in saved.kind and any(
            isinstance(child, Branch) for child in saved.children
        )
        if not several_things:
            return set()
        kinds = ("dict", "ordered_dict", "state", "keys")
        keys = next((tree.kind[k] for k in kinds if k in tree.kind), [])
        present = {segment(key, "") for key in keys}
        return {path.split("/")[0] for path in self._saved} - present

    # Values that live in _METADATA

    def _value(self, leaf: Leaf, saved: Any) -> Any:
        wanted = leaf.value
        if isinstance(saved, SavedStates):
            return self._state(leaf, saved)
        if type(wanted) is type(saved):
            return saved
        if type(saved) in (bool, int, float, complex) and _is_arraylike(wanted):
            return self._value_as_array(leaf, saved)
        self._differences.append(
            f"{leaf.path!r}: the checkpoint has {_show_value(saved)}, `like` has "
            f"{_show_value(wanted)}"
        )
        return None

    def _state(self, leaf: Leaf, saved: SavedStates) -> Any:
        """The state of a stateful object goes into the object of `like`, at the very end."""
        if len(saved.states) != self._process_count:
            self._differences.append(
                f"{leaf.path!r}: each of the {len(saved.states)} processes that saved it had a "
                f"state of its own; this run has {self._process_count}: restore with as many, or "
                "leave it out of `like` and set its position yourself"
            )
            return None
        state = saved.states[self._process]
        if isinstance(leaf.value, Stateful):
            self._states.append((leaf.value.owner, state))
            return leaf.value.owner
        if isinstance(leaf.value, SavedStates):
            return state
        self._differences.append(
            f"{leaf.path!r}: the checkpoint has the state of an object, `like` has "
            f"{_show_value(leaf.value)}, which has no set_state"
        )
        return None

    def _value_as_array(self, leaf: Leaf, saved: Any) -> Any:
        """A Python number where `like` has an array: fine if the array can hold it exactly."""
        wanted = leaf.value
        made = None if is_key(wanted) or wanted.shape != () else _exactly(saved, wanted.dtype)
        if made is None:
            self._differences.append(
                f"{leaf.path!r}: the checkpoint has {_show_value(saved)}, which `like`'s "
                f"{_show_value(wanted)} can't hold exactly"
            )
            return None
        if isinstance(wanted, np.ndarray | np.generic):
            return made if isinstance(wanted, np.ndarray) else made[()]
        return jax.device_put(made, getattr(wanted, "sharding", None))

    # Arrays

    def _array(self, leaf: Leaf, number: int) -> list[Destination]:
        spec = self._metadata.leaves[number].spec
        wanted = spec if isinstance(leaf.value, ArrayNumber) else leaf.value
        kind = _kind_of(wanted)
        if kind is None:
            self._differences.append(
                f"{leaf.path!r}: the checkpoint has an array {_show_spec(spec)}, `like` has "
                f"{_show_value(wanted)}"
            )
            return []
        cast = self._cast(spec, wanted, leaf.path)
        problems = [*self._type_problems(spec, wanted, kind, cast or spec.dtype)]
        self._differences += [f"{leaf.path!r}: {problem}" for problem in problems]
        if problems:
            return []
        if kind in ("numpy", "scalar", "python"):
            python = type(wanted) if kind == "python" else None
            boxes = (self._own_box(spec),)
            return [Destination(number, leaf.path, kind, None, boxes, python, cast)]
        try:
            sharding = self._sharding(spec, wanted, leaf)
        except _Unfit as error:
            self._differences += error.problems
            return []
        boxes = self._local_boxes(spec, sharding)
        return [Destination(number, leaf.path, kind, sharding, boxes, None, cast)]

    def _cast(self, spec: LeafSpec, wanted: Any, path: str) -> str | None:
        """The dtype to cast a leaf to: only floating-point arrays, only if asked."""
        rule = self._choices.dtype
        if rule is None or spec.kind not in ("jax", "numpy") or not is_floating(spec.dtype):
            return None
        if rule == "like":
            name = getattr(getattr(wanted, "dtype", None), "name", None)
            found = name if isinstance(name, str) and name in DTYPES and is_floating(name) else None
        else:
            found = floating_dtype(rule, path) if spec.shape else None
        return None if found == spec.dtype else found

    def _type_problems(self, spec: LeafSpec, wanted: Any, kind: str, dtype: str) -> Iterator[str]:
        if spec.per_process and self._process_count != self._metadata.process_count:
            yield (
                f"each of the {self._metadata.process_count} processes that saved it had its own "
                f"value; this run has {self._process_count}: restore with as many"
            )
        if wanted is spec:
            if spec.kind == "jax":
                yield from _x64_problems(dtype)
            if spec.kind == "key" and _key_words(spec.prng) != spec.shape[-1]:
                yield f"it is a {spec.prng} key, which this JAX does not know"
            return
        saved_shape = spec.shape[1:] if spec.per_process else spec.shape
        if spec.kind == "key" or kind == "key":
            yield from _key_problems(spec, saved_shape, wanted, kind)
            return
        if kind == "python":
            if saved_shape != () or _python_type(spec.dtype) is not type(wanted):
                yield f"saved as {_show_spec(spec)}, `like` has {_show_value(wanted)}"
            return
        if tuple(wanted.shape) != saved_shape:
            found = _show_shape(wanted.shape)
            yield f"saved with shape {_show_shape(saved_shape)}, `like` has {found}"
        if dtype_name(wanted.dtype) != dtype:
            was = f" (cast from {spec.cast_from} by the save)" if spec.cast_from else ""
            hint = ": pass dtype='like' to cast" if is_floating(wanted.dtype.name) else ""
            yield f"saved as {spec.dtype}{was}, `like` has {wanted.dtype.name}{hint}"
        elif kind == "jax":
            yield from _x64_problems(dtype)

    def _own_box(self, spec: LeafSpec) -> Box:
        box = full(spec.shape)
        return ((self._process, self._process + 1), *box[1:]) if spec.per_process else box

    def _local_boxes(self, spec: LeafSpec, sharding: Any) -> tuple[Box, ...]:
        key = (sharding, spec.shape, spec.per_process)
        found = self._boxes.get(key)
        if found is None:
            shape = spec.shape[1:] if spec.per_process else spec.shape
            mesh, partition = describe_sharding(spec.path, sharding, self._devices)
            by_device = device_boxes(shape, mesh, partition)
            here = sharding.addressable_devices
            boxes = dict.fromkeys(
                box for number, box in by_device.items() if self._devices.all[number] in here
            )
            if spec.per_process:
                boxes = {((self._process, self._process + 1), *box): None for box in boxes}
            found = self._boxes[key] = tuple(boxes)
        return found

    # Shardings

    def _sharding(self, spec: LeafSpec, wanted: Any, leaf: Leaf) -> Any:
        """`specs`, then the sharding of `like`, then what was saved; on `mesh` if it is given."""
        path = leaf.path
        given = self._specs.find(path)
        like = getattr(wanted, "sharding", None) if wanted is not spec else None
        if given is not None and not isinstance(given, PartitionSpec):
            return self._fitting(spec, path, given)
        if given is not None:
            mesh = self._mesh or _mesh_of(like)
            if mesh is None:
                raise _Unfit(f"leaf {path!r} has a spec in `specs` but no mesh: pass mesh=")
            return self._named(spec, path, mesh, given)
        if self._mesh is not None:
            return self._named(spec, path, self._mesh, self._spec_on_mesh(spec, like, leaf))
        if isinstance(like, NamedSharding) and isinstance(like.mesh, AbstractMesh):
            raise _Unfit(
                f"leaf {path!r} of `like` is sharded over an abstract mesh, which has no devices: "
                "pass mesh="
            )
        if like is not None:
            return self._fitting(spec, path, like)
        return self._as_saved(spec, path)

    def _spec_on_mesh(self, spec: LeafSpec, like: Any, leaf: Leaf) -> Any:
        assert self._mesh is not None
        if like is None and leaf.spec is not None:
            return leaf.spec
        if isinstance(like, NamedSharding) and set(like.mesh.axis_names) <= set(
            self._mesh.axis_names
        ):
            return like.spec
        return PartitionSpec(*(_entry(axes) for axes in spec.partition))

    def _fitting(self, spec: LeafSpec, path: str, sharding: Any) -> Any:
        """Check that a sharding fits the leaf; the same sharding is looked at once per shape."""
        shape = spec.shape[1:] if spec.per_process else spec.shape
        key = (sharding, shape)
        if key in self._settled:
            return sharding
        if isinstance(sharding, NamedSharding):
            self._check_fit(spec, path, sharding.mesh, sharding.spec)
        self._settled.add(key)
        return sharding

    def _named(self, spec: LeafSpec, path: str, mesh: Any, partition_spec: Any) -> Any:
        self._check_fit(spec, path, mesh, partition_spec)
        return NamedSharding(mesh, partition_spec)

    def _check_fit(self, spec: LeafSpec, path: str, mesh: Any, partition_spec: Any) -> None:
        shape = spec.shape[1:] if spec.per_process else spec.shape
        logical = shape[:-1] if spec.kind == "key" else shape
        entries = spec_entries(path, partition_spec)
        problems = partition_problems(path, logical, entries, describe_mesh(mesh, self._devices))
        if problems:
            raise _Unfit(*problems)

    def _as_saved(self, spec: LeafSpec, path: str) -> Any:
        """The mesh it was saved on if this run has as many devices; one device otherwise."""
        if spec.mesh == HOST_LOCAL:
            return self._default_device
        devices: Sequence[Any] = jax.devices()
        mesh = self._metadata.meshes[spec.mesh]
        if len(devices) == len(self._metadata.process_of):
            return self._rebuilt(mesh, spec, path, devices)
        if self._process_count == 1:
            return self._default_device
        raise _Unfit(
            f"leaf {path!r} was saved on {len(self._metadata.process_of)} devices and this run has "
            f"{len(devices)}: pass mesh= or like="
        )

    def _rebuilt(self, mesh: MeshSpec, spec: LeafSpec, path: str, devices: Sequence[Any]) -> Any:
        if not mesh.axis_names:
            return SingleDeviceSharding(devices[mesh.devices[0]])
        partition_spec = PartitionSpec(*map(_entry, spec.partition))
        return self._named(spec, path, self._mesh_again(mesh), partition_spec)

    def _mesh_again(self, mesh: MeshSpec) -> Mesh:
        devices = np.array(jax.devices(), dtype=object)[list(mesh.devices)]
        types = tuple(
            jax.sharding.AxisType[name.capitalize()]
            for name in mesh.axis_types or ("auto",) * len(mesh.axis_names)
        )
        return Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=types)

    @cached_property
    def _default_device(self) -> Any:
        return SingleDeviceSharding(_default_device())


class _Unfit(Exception):
    """A leaf can't be placed."""

    def __init__(self, *problems: str):
        self.problems = list(problems)
        super().__init__(*problems)


class SpecTree:
    """`specs`: one spec for all, or a tree whose entries hold for all leaves below them."""

    def __init__(self, specs: Any):
        self._by_path = (
            {} if specs is None else {leaf.path: leaf.value for leaf in leaves_of(parse(specs))}
        )
        for path, value in self._by_path.items():
            if value is not None and not isinstance(value, PartitionSpec | jax.sharding.Sharding):
                raise InvalidTree(
                    f"specs has a {type(value).__name__} at {path!r}; it takes PartitionSpec, "
                    "Sharding or None; of rules, sharding.spec_tree makes a tree of them"
                )

    def find(self, path: str) -> Any:
        while True:
            if path in self._by_path:
                return self._by_path[path]
            if path == ROOT:
                return None
            path = path.rpartition("/")[0] or ROOT

    def unused(self, saved: Mapping[str, Any]) -> list[str]:
        """Entries that can't mean any leaf of the checkpoint."""
        known = {ROOT}
        for path in saved:
            parts = path.split("/")
            known.update("/".join(parts[: i + 1]) for i in range(len(parts)))
        return [
            f"specs has {path!r}, which is not in the checkpoint{nearest(path, list(known))}"
            for path in self._by_path
            if path not in known
        ]


def _default_device() -> Any:
    device = _config.jax_default_device
    if device is not None and not isinstance(device, str):
        return device
    return jax.local_devices(backend=device)[0] if device else jax.local_devices()[0]


def _mesh_of(sharding: Any) -> Mesh | None:
    mesh = getattr(sharding, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def _entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _exactly(value: complex, dtype: Any) -> np.ndarray[Any, Any] | None:
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


def _is_arraylike(value: Any) -> bool:
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct)


def _kind_of(wanted: Any) -> str | None:
    if isinstance(wanted, LeafSpec):
        return wanted.kind
    if is_key(wanted):
        return "key"
    if isinstance(wanted, jax.Array | jax.ShapeDtypeStruct):
        return "jax"
    if isinstance(wanted, np.ndarray):
        return "numpy"
    if isinstance(wanted, np.generic):
        return "scalar"
    return "python" if type(wanted) in (bool, int, float, complex) else None


def _python_type(dtype: str) -> type | None:
    """The Python number that a 0-d array of this dtype is, exactly."""
    if dtype == "bool":
        return bool
    if dtype.startswith(("int", "uint")):
        return int
    if dtype.startswith(("float", "bfloat")):
        return float
    return complex if dtype.startswith("complex") else None


def _x64_problems(dtype: str) -> Iterator[str]:
    if dtype in ("int64", "uint64", "float64", "complex128") and not _config.jax_enable_x64:
        yield (
            f"saved as {dtype}, which JAX would cut to 32 bits: set jax_enable_x64, or give a "
            "numpy array in `like`"
        )


@cache
def _key_words(impl: str) -> int | None:
    """How many words a key of this implementation has; None if there is no such one."""
    try:
        return jax.random.key_data(jax.random.key(0, impl=impl)).shape[-1]
    except (ValueError, TypeError):
        return None


def _key_problems(
    spec: LeafSpec, saved_shape: tuple[int, ...], wanted: Any, kind: str
) -> Iterator[str]:
    if spec.kind != "key" or kind != "key":
        yield f"saved as {_show_spec(spec)}, `like` has {_show_value(wanted)}"
        return
    impl = str(wanted.dtype._impl.name)
    if impl != spec.prng:
        yield f"saved as a {spec.prng} key, `like` has a {impl} key"
    elif tuple(wanted.shape) != saved_shape[:-1]:
        yield (
            f"saved as keys of shape {_show_shape(saved_shape[:-1])}, `like` has "
            f"{_show_shape(wanted.shape)}"
        )


def _show_shape(shape: Sequence[int]) -> str:
    return f"({', '.join(str(n) for n in shape)}{',' if len(shape) == 1 else ''})"


def _show_spec(spec: LeafSpec) -> str:
    if spec.kind == "key":
        return f"a {spec.prng} key"
    return f"{spec.dtype}[{','.join(str(n) for n in spec.shape)}]"


def _show_value(value: Any) -> str:
    if _is_arraylike(value):
        if is_key(value):
            return "a PRNG key"
        return f"{value.dtype.name}[{','.join(str(n) for n in value.shape)}]"
    return "None" if value is None else f"the {type(value).__name__} {str(value)[:40]!r}"
