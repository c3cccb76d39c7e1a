"""Checkpoints that Orbax itself writes, in its many forms, and what it gives back of them."""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import orbax.checkpoint.experimental.v1
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_models import Block

# Their types say less than they take.
ocp: Any = orbax.checkpoint
v1: Any = orbax.checkpoint.experimental.v1

logging.getLogger("absl").setLevel(logging.CRITICAL)


class Pair(NamedTuple):
    first: Any
    second: Any


class Form(NamedTuple):
    """One way to write a checkpoint."""

    api: str
    zarr3: bool
    ocdbt: bool
    compressed: bool

    def __str__(self) -> str:
        words = (
            "zarr3" if self.zarr3 else "zarr2",
            "ocdbt" if self.ocdbt else "plain",
            "zstd" if self.compressed else "raw",
        )
        return "-".join((self.api, *words))


_BOTH = (True, False)
ALL_FORMS = [Form(*form) for form in product(("tree", "step", "v1"), _BOTH, _BOTH, _BOTH)]
FORMS = [Form(*form) for form in [
    ("tree", False, True, True),
    ("tree", True, False, False),
    ("step", True, True, False),
    ("step", False, False, True),
    ("v1", True, True, True),
    ("v1", False, False, False),
]]  # fmt: skip
"""Each two settings together in at least one."""


def mesh_of(**sizes: int) -> Mesh:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


def put(array: Any, mesh: Mesh, *axes: Any) -> jax.Array:
    """An array of which every process has all, over the devices of all."""
    array = np.asarray(array)
    sharding = NamedSharding(mesh, P(*axes))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bits, as far as a dtype takes all."""
    rng = np.random.default_rng([seed, *shape])
    if np.dtype(dtype) == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


OPTIMIZER = optax.chain(optax.clip(1.0), optax.adamw(1e-3))


def make_arrays(mesh: Mesh) -> dict[str, Any]:
    """Arrays over a mesh `x`, `y`, of many dtypes."""
    kernel = numbers((8, 16), np.float32)
    params = {"kernel": put(kernel, mesh, "x", "y")}
    moments = OPTIMIZER.init({"kernel": kernel})
    return {
        "cut": put(numbers((8, 12), np.float32, 1), mesh, "x", "y"),
        "rows": put(numbers((16, 3), jnp.bfloat16), mesh, ("x", "y")),
        "columns": put(numbers((3, 8), np.int8), mesh, None, "x"),
        "replicated": put(numbers((5,), np.uint16), mesh),
        "flags": put(numbers((8,), np.bool_), mesh, "x"),
        "small": put(numbers((8, 2), jnp.float8_e4m3fn), mesh, "x"),
        "complex": put(numbers((8,), np.complex64), mesh, "y"),
        "zero-d": put(np.float32(2.5), mesh),
        "params": params,
        "optimizer": jax.tree.map(lambda leaf: put(leaf, mesh), moments),
    }


def make_values() -> dict[str, Any]:
    """All that is no array over several devices."""
    return {
        "numpy": numbers((3, 5), np.float64),
        "wide": np.arange(4, dtype=np.int64),
        "int": 7,
        "float": 0.1,
        "bool": True,
        "text": "größe",
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "list": [np.arange(2), {"deep": [np.ones(1, np.float32)] * 12}],
        "tuple": (np.zeros(1), (np.ones(2),)),
        "named": Pair(np.arange(3), optax.EmptyState()),
        "numbered": {3: np.ones(1), 11: np.zeros(2)},
        "odd/name": {"a b": np.ones(1), "~": np.zeros(1)},
    }


def make_local() -> dict[str, Any]:
    """What lives on devices of one process."""
    model = Block(rngs=nnx.Rngs(3))
    return {
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6, impl="rbg"), 4),
        "raw key": jax.random.key_data(jax.random.key(7)),
        "model": nnx.state(model),
        "second device": jax.device_put(jnp.ones(3), jax.devices()[1]),
    }


@contextmanager
def quiet() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(form: Form, path: Path, tree: Any) -> Path:
    """Have Orbax write a tree; returns the path of the checkpoint."""
    saving = {
        "use_zarr3": form.zarr3,
        "use_ocdbt": form.ocdbt,
        "use_compression": form.compressed,
    }
    with quiet():
        if form.api == "v1":
            context = v1.Context()
            for name, value in saving.items():
                setattr(context.array.saving, name, value)
            with context:
                v1.save(path, tree)
            return path
        handler = ocp.PyTreeCheckpointHandler(**saving)
        if form.api == "tree":
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(path, tree)
            return path
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add("default", ocp.args.PyTreeSave, handler)
        with ocp.CheckpointManager(path, handler_registry=registry) as manager:
            manager.save(7, args=ocp.args.Composite(default=ocp.args.PyTreeSave(tree)))
        return path / "7"


def read_with_orbax(form: Form, path: Path) -> Any:
    """What Orbax gives back without a template."""
    with quiet():
        if form.api == "v1":
            return v1.load(path)
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path / "default" if form.api == "step" else path)


def bits(leaf: Any) -> tuple[Any, ...]:
    """What a leaf is: its type, dtype, shape and bytes, as far as this process has them."""
    if not hasattr(leaf, "dtype"):
        return type(leaf), leaf
    kind = jax.Array if isinstance(leaf, jax.Array) else type(leaf)
    name = str(leaf.dtype)
    if name.startswith("key<"):
        leaf = jax.random.key_data(leaf)
    if kind is jax.Array and not leaf.is_fully_addressable:
        shards = {(str(s.index), np.asarray(s.data).tobytes()) for s in leaf.addressable_shards}
        return kind, name, leaf.shape, sorted(shards)
    return kind, name, leaf.shape, np.asarray(leaf).tobytes()


def flat(tree: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    """The structure of a tree, and the bits of its leaves."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    return structure, [bits(leaf) for leaf in leaves]
