"""Bit for bit, from any sharding to any other, for every dtype, shape and kind of template."""

import functools
import itertools
import math
import uuid
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import define_prng_impl
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka import sharding as sharding_helpers
from ostraka.common.dtypes import DTYPES, numpy_dtype
from ostraka.errors import CheckpointNotFound, InvalidTree, Mismatch
from ostraka.storage import open_store
from ostraka.testing import run_processes

# Shardings


def mesh_of(shape, names, order: Sequence[int] = range(8)):
    devices = np.array(jax.devices())[list(order)][: math.prod(shape)]
    return Mesh(devices.reshape(shape), names)


def explicit_mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names))


PERMUTED = (5, 2, 7, 0, 3, 6, 1, 4)

SHARDINGS = {
    "single device": lambda: SingleDeviceSharding(jax.devices()[0]),
    "another single device": lambda: SingleDeviceSharding(jax.devices()[5]),
    "mesh of 1": lambda: NamedSharding(mesh_of((1,), ("x",)), P("x")),
    "8 by rows": lambda: NamedSharding(mesh_of((8,), ("x",)), P("x")),
    "explicit 8 by columns": lambda: NamedSharding(explicit_mesh((8,), ("m",)), P(None, "m")),
    "4x2 replicated": lambda: NamedSharding(mesh_of((4, 2), ("x", "y")), P()),
    "4x2": lambda: NamedSharding(mesh_of((4, 2), ("x", "y")), P("x", "y")),
    "4x2 both on one": lambda: NamedSharding(mesh_of((4, 2), ("x", "y")), P(("x", "y"))),
    "4x2 both, other order": lambda: NamedSharding(mesh_of((4, 2), ("x", "y")), P(("y", "x"))),
    "2x4 partly replicated": lambda: NamedSharding(mesh_of((2, 4), ("data", "model")), P("data")),
    "explicit 2x4": lambda: NamedSharding(explicit_mesh((2, 4), ("a", "b")), P("b", "a")),
    "2x2x2": lambda: NamedSharding(mesh_of((2, 2, 2), ("a", "b", "c")), P("c", ("b", "a"))),
    "permuted 2x4": lambda: NamedSharding(mesh_of((2, 4), ("p", "q"), PERMUTED), P("q", "p")),
    "4 of 8": lambda: NamedSharding(mesh_of((4,), ("s",), (6, 2, 5, 1)), P(None, "s")),
}


def fit(sharding, shape):
    """The sharding as far as a shape takes it: entries that do not divide are left out."""
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    sizes = dict(sharding.mesh.shape)
    entries = []
    for axes, extent in zip(sharding.spec, shape, strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        divides = extent % math.prod(sizes[name] for name in names) == 0
        entries.append(axes if divides else None)
    return NamedSharding(sharding.mesh, P(*entries))


# Values

JAX_DTYPES = sorted(set(DTYPES) - {"float6_e2m3fn", "float6_e3m2fn"})
SPECIAL_BITS = {
    "float16": [0x7E01, 0x7C01, 0xFE55, 0x8000, 0x0001, 0x7C00, 0xFC00],
    "bfloat16": [0x7FC1, 0x7F81, 0xFFD5, 0x8000, 0x0001, 0x7F80, 0xFF80],
    "float32": [0x7FC12345, 0x7F800001, 0xFFC00055, 0x80000000, 0x00000001, 0x7F800000, 0xFF800000],
    "float64": [
        0x7FF8123456789ABC,
        0x7FF0000000000001,
        0xFFF8000000000055,
        1 << 63,
        1,
        0x7FF << 52,
    ],
}


def random_bits(name, shape, seed=0) -> Any:
    """An array of any bits that the dtype has: NaN payloads, denormals and all."""
    dtype = numpy_dtype(name)
    rng = np.random.default_rng([seed, *name.encode(), *shape])
    if name == "bool":
        return rng.integers(0, 2, shape, np.uint8).view(dtype)
    if DTYPES[name].packed:
        return rng.integers(0, 1 << DTYPES[name].bits, shape, np.uint8).view(dtype)
    raw = rng.integers(0, 256, (math.prod(shape), dtype.itemsize), np.uint8)
    array = raw.view(dtype).reshape(shape)
    special = SPECIAL_BITS.get(name, [])[: array.size]
    if special:
        array.reshape(-1)[: len(special)].view(f"u{dtype.itemsize}")[:] = special
    return array


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_bits(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(bits(found), bits(expected))


def assert_placed(found, expected, sharding):
    """Every shard, replicas too, has the right bits on the right device."""
    assert isinstance(found, jax.Array)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.sharding == sharding
    for shard in found.addressable_shards:
        assert np.array_equal(bits(np.asarray(shard.data)), bits(expected[shard.index]))


def mixed_values():
    """All dtypes in one shape, and all kinds of shapes."""
    values = {name: random_bits(name, (8, 16)) for name in JAX_DTYPES}
    shapes = {
        "0-d": (),
        "one": (1,),
        "odd": (7, 5),
        "prime": (8191,),
        "empty": (0,),
        "empty rows": (8, 0),
        "empty columns": (0, 16, 3),
        "rank 1": (64,),
        "rank 3": (8, 8, 3),
        "rank 4": (16, 8, 1, 5),
        "rank 5": (8, 16, 1, 3, 2),
        "half odd": (8, 3),
    }
    for number, (label, shape) in enumerate(shapes.items()):
        for name in ("float32", ["bfloat16", "int4", "bool", "uint2"][number % 4]):
            values[f"{label} {name}"] = random_bits(name, shape)
    return values


@pytest.fixture(scope="module")
def values():
    return mixed_values()


@pytest.fixture(scope="module")
def saved(values, new_bucket):
    """Makes a checkpoint of a source sharding, in memory or in a bucket."""

    def save(where, source):
        place = new_memory() if where == "memory" else str(new_bucket("moto"))
        if (where, source) not in places:
            sharding = SHARDINGS[source]()
            with jax.enable_x64(True):
                tree = {k: jax.device_put(v, fit(sharding, v.shape)) for k, v in values.items()}
                ostraka.save(place, tree)
            places[where, source] = place
        return places[where, source]

    places = {}
    yield save
    for (where, _), place in places.items():
        if where == "memory":
            clear(place)


def new_memory():
    return f"memory://roundtrip-{uuid.uuid4().hex}"


def clear(place):
    store = open_store(place)
    for name in store.list():
        store.delete(name)


@pytest.fixture
def place():
    made = new_memory()
    yield made
    clear(made)


def abstract(values, sharding):
    return {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=fit(sharding, v.shape))
        for k, v in values.items()
    }


# Source × destination


NAMES = list(SHARDINGS)


def steps_on(number: int, steps: int) -> tuple[str, str]:
    return NAMES[number], NAMES[(number + steps) % len(NAMES)]


# Each sharding goes to those 1, 4 and 9 further on: 42 of 196 pairs. The property below draws from
# all pairs, and without a template each goes to itself. In a bucket there are five.
PAIRS = [
    *(("memory", *steps_on(n, steps)) for n in range(len(NAMES)) for steps in (1, 4, 9)),
    *(("bucket", *steps_on(n, 3)) for n in range(0, len(NAMES), 3)),
]


@pytest.mark.parametrize(("where", "source", "destination"), PAIRS)
def test_every_dtype_from_any_sharding_to_any_other(saved, values, where, source, destination):
    sharding = SHARDINGS[destination]()
    with jax.enable_x64(True):
        found = ostraka.restore(saved(where, source), like=abstract(values, sharding))
    assert found.keys() == values.keys()
    for key, value in values.items():
        assert_placed(found[key], value, fit(sharding, value.shape))


@pytest.mark.parametrize("source", SHARDINGS)
def test_without_a_template_arrays_go_back_where_they_were_or_become_numpy_arrays(
    saved, values, source
):
    sharding = SHARDINGS[source]()
    with jax.enable_x64(True):
        found = ostraka.restore(saved("memory", source))
    assert list(found) == list(values)
    for key, value in values.items():
        kept = fit(sharding, value.shape)
        assert found[key].sharding.is_equivalent_to(kept, value.ndim)
        assert isinstance(found[key].sharding, type(kept))
        if isinstance(kept, NamedSharding):
            assert found[key].sharding.mesh == kept.mesh
        assert_placed(found[key], value, found[key].sharding)
    like = {k: np.empty_like(v) for k, v in values.items()}
    found = ostraka.restore(saved("memory", source), like=like)
    for key, value in values.items():
        assert type(found[key]) is np.ndarray
        assert found[key].flags.writeable
        assert_bits(found[key], value)


@pytest.mark.parametrize("source", ["4x2", "single device"])
def test_verify_and_lazy_reading_agree(saved, values, source):
    place = saved("memory", source)
    assert ostraka.verify(place).ok
    checkpoint = ostraka.open(place)
    for key, value in values.items():
        assert_bits(np.asarray(checkpoint[key]), value)
        if value.ndim:
            assert_bits(checkpoint[key][1:], value[1:])
        if value.ndim > 1:
            assert_bits(checkpoint[key][::2, ::-1], value[::2, ::-1])


@settings(max_examples=60)
@given(
    source=st.sampled_from(sorted(SHARDINGS)),
    destination=st.sampled_from(sorted(SHARDINGS)),
    leaves=st.lists(
        st.tuples(
            st.sampled_from(["float32", "int8", "bfloat16", "int4", "complex64"]),
            st.lists(st.integers(0, 4) | st.sampled_from([8, 24]), max_size=4).map(tuple),
        ),
        min_size=1,
        max_size=6,
    ),
    cap=st.sampled_from([8192, 20_000, 1 << 32]),
)
def test_any_shapes_and_any_file_size(source, destination, leaves, cap):
    place = new_memory()
    sharding = SHARDINGS[source]()
    arrays = [random_bits(name, shape, seed) for seed, (name, shape) in enumerate(leaves)]
    tree = [jax.device_put(array, fit(sharding, array.shape)) for array in arrays]
    ostraka.save(place, tree, max_file_bytes=cap)
    wanted = SHARDINGS[destination]()
    like = list(abstract(dict(enumerate(arrays)), wanted).values())
    found = ostraka.restore(place, like=like)
    clear(place)
    for array, value in zip(found, arrays, strict=True):
        assert_placed(array, value, fit(wanted, value.shape))


# Sizes that take every way of reading


def large_values():
    return {
        "boxes above 16 MiB": random_bits("float32", (1536, 4096)),
        "rows above 8 MiB": random_bits("uint8", (2, 9 << 20)),
        "rows of 1.5 MiB": random_bits("bfloat16", (16, 786_432)),
        "packed": random_bits("int4", (4096, 4096)),
        "odd": random_bits("float32", (2_500_009,)),
        "deep": random_bits("int16", (2, 24, 8, 16, 512)),
        "small": random_bits("float32", (3, 5)),
    }


LARGE = ["single device", "8 by rows", "explicit 8 by columns", "4x2 replicated", "4x2"]


@pytest.fixture(scope="module")
def large(tmp_path_factory, new_bucket):
    """The values, and what makes a checkpoint of a source sharding; one with small files."""
    values = large_values()

    def save(where, source):
        folder = tmp_path_factory.mktemp("large") if where == "disk" else new_bucket(where)
        if (where, source) not in places:
            sharding = SHARDINGS[source]()
            tree = {k: jax.device_put(v, fit(sharding, v.shape)) for k, v in values.items()}
            cap = 5 << 20 if source == "4x2 replicated" else 4 << 30
            ostraka.save(folder / "checkpoint", tree, max_file_bytes=cap)
            places[where, source] = folder / "checkpoint"
        return places[where, source]

    places = {}
    return values, save


@pytest.mark.parametrize(
    ("where", "source", "destination"),
    [
        ("disk", "single device", "8 by rows"),
        ("disk", "8 by rows", "explicit 8 by columns"),
        ("disk", "8 by rows", "4x2 replicated"),
        ("disk", "explicit 8 by columns", "numpy"),
        ("disk", "explicit 8 by columns", "single device"),
        ("disk", "4x2 replicated", "4x2"),
        ("moto", "8 by rows", "explicit 8 by columns"),
        ("moto", "4x2 replicated", "4x2"),
        ("seaweed", "8 by rows", "explicit 8 by columns"),
        ("azurite", "4x2 replicated", "4x2"),
    ],
)
def test_large_arrays(large, where, source, destination):
    values, save = large
    place = save(where, source)
    if destination == "numpy":
        found = ostraka.restore(place, like={k: np.empty_like(values[k]) for k in values})
        for key, value in values.items():
            assert_bits(found[key], value)
        return
    sharding = SHARDINGS[destination]()
    found = ostraka.restore(place, like=abstract(values, sharding))
    for key, value in values.items():
        assert_placed(found[key], value, fit(sharding, value.shape))


@pytest.mark.parametrize("where", ["disk", "moto"])
def test_parts_of_large_arrays_are_read_lazily_and_small_files_are_small(large, where):
    values, save = large
    for source in LARGE if where == "disk" else ["8 by rows", "4x2 replicated"]:
        checkpoint = ostraka.open(save(where, source))
        rows = values["boxes above 16 MiB"]
        assert_bits(checkpoint["boxes above 16 MiB"][1000:1100, ::7], rows[1000:1100, ::7])
        assert_bits(checkpoint["packed"][-3:, 17:3001], values["packed"][-3:, 17:3001])
        assert_bits(checkpoint["odd"][2_499_999:], values["odd"][2_499_999:])
    files = list(save(where, "4x2 replicated").rglob("*.safetensors"))
    assert len(files) > 8
    assert max(file.stat().st_size for file in files) <= 5 << 20


# PRNG keys


@functools.cache
def some_keys():
    return {
        "threefry": jax.random.key(1, impl="threefry2x32"),
        "rbg": jax.random.key(2, impl="rbg"),
        "unsafe": jax.random.key(3, impl="unsafe_rbg"),
        "many": jax.random.split(jax.random.key(4), 8),
        "raw": jax.random.PRNGKey(3),
        "matrix": jax.random.split(jax.random.key(5, impl="rbg"), (8, 16)),
        "none": jax.random.split(jax.random.key(6), 0),
    }


def key_trees(sharding):
    return {k: jax.device_put(v, fit(sharding, v.shape)) for k, v in some_keys().items()}


def assert_keys(found, expected, sharding):
    assert found.keys() == expected.keys()
    for name, key in expected.items():
        assert found[name].dtype == key.dtype
        assert found[name].shape == key.shape
        assert found[name].sharding.is_equivalent_to(fit(sharding, key.shape), key.ndim)
        data = (jax.random.key_data(x) if name != "raw" else x for x in (found[name], key))
        assert_bits(*map(np.asarray, data))


KEY_SHARDINGS = ["single device", "4x2", "explicit 2x4", "permuted 2x4", "4x2 replicated"]


@pytest.mark.parametrize(
    ("source", "destination"), [*itertools.pairwise([*KEY_SHARDINGS, "4x2", "4x2"])]
)
def test_keys_from_any_sharding_to_any_other(place, source, destination):
    sharding, wanted = SHARDINGS[source](), SHARDINGS[destination]()
    keys = key_trees(sharding)
    ostraka.save(place, keys)
    assert_keys(ostraka.restore(place, like=key_trees(wanted)), keys, wanted)
    assert_keys(ostraka.restore(place, like=abstract(keys, wanted)), keys, wanted)
    found = ostraka.restore(place)
    assert_keys(found, keys, sharding)
    draws = [jax.random.normal(tree["threefry"], (4,)) for tree in (keys, found)]
    assert_bits(np.asarray(draws[1]), np.asarray(draws[0]))


# numpy


def test_numpy_arrays_of_every_dtype(place):
    arrays = {name: random_bits(name, (5, 7)) for name in DTYPES}
    tree = {
        name: {"array": array, "scalar": array[2, 3], "0-d": np.array(array[2, 3])}
        for name, array in arrays.items()
    }
    ostraka.save(place, tree)
    for found in (ostraka.restore(place), ostraka.restore(place, like=tree)):
        for name, expected in tree.items():
            for kind, value in expected.items():
                assert type(found[name][kind]) is type(value), name
                assert_bits(np.array(found[name][kind]), np.array(value))


def test_numpy_arrays_in_any_memory_order(place):
    array = random_bits("float32", (6, 8, 10))
    views = {
        "transposed": array.T,
        "fortran": np.asfortranarray(array),
        "strided": array[::2, 1:7:3, ::-1],
        "broadcast": np.broadcast_to(array[0, 0], (3, 4, 10)),
        "read-only": np.frombuffer(array.tobytes(), np.float32),
        "packed strided": random_bits("int4", (9, 9))[::2, ::3],
        "large transposed": (large := random_bits("uint16", (1500, 3501))).T,
        "large strided": large[::-1, 1::2],
    }
    ostraka.save(place, views)
    found = ostraka.restore(place)
    for key, view in views.items():
        assert_bits(found[key], np.ascontiguousarray(view))


def test_big_endian_arrays_keep_their_values(place):
    dtypes = [">f8", ">f4", ">i2", ">u8", ">c16", ">f2"]
    native = {d: np.arange(12).reshape(3, 4).astype(np.dtype(d).newbyteorder("=")) for d in dtypes}
    swapped = {d: array.astype(d) for d, array in native.items()}
    tree = {"a": swapped, "s": {d: swapped[d][1, 1] for d in dtypes}}
    tree["view"] = {d: swapped[d].T for d in dtypes}
    ostraka.save(place, tree)
    like = {"a": swapped, "s": tree["s"], "view": {d: native[d].T for d in dtypes}}
    for found, expected in (
        (ostraka.restore(place), native),
        (ostraka.restore(place, like=like), swapped),
    ):
        for d in dtypes:
            assert_bits(found["a"][d], expected[d])
            assert_bits(found["view"][d], np.ascontiguousarray(native[d].T))
            assert found["s"][d] == native[d][1, 1]


def test_numpy_arrays_are_writable_and_share_nothing(place):
    arrays = {f"a{n}": random_bits("float32", (n + 1, 3)) for n in range(20)}
    arrays["large"] = random_bits("float32", (1500, 1000))
    ostraka.save(place, arrays)
    first, second = ostraka.restore(place), ostraka.restore(place)
    for found in [*first.values(), *second.values()]:
        assert found.flags.writeable
        assert found.flags.c_contiguous
    everything = [*first.values(), *second.values()]
    for a, b in itertools.combinations(everything, 2):
        assert not np.shares_memory(a, b)
    for found in first.values():
        found.reshape(-1).view(np.uint8)[:] = 0xAB
    for key, array in arrays.items():
        assert_bits(second[key], array)
        assert_bits(ostraka.restore(place)[key], array)


def test_saving_does_not_change_what_is_saved(place):
    array = random_bits("float32", (8, 16))
    sharded = jax.device_put(array, SHARDINGS["4x2"]())
    kept = array.copy()
    ostraka.save(place, {"n": array, "j": sharded})
    assert_bits(array, kept)
    assert_placed(sharded, kept, SHARDINGS["4x2"]())


# Templates


@pytest.fixture
def example(place):
    """Sharded, replicated, single-device and host leaves in one checkpoint."""
    mesh = mesh_of((4, 2), ("x", "y"))
    tree = {
        "w": jax.device_put(random_bits("float32", (8, 16)), NamedSharding(mesh, P("x", "y"))),
        "b": {"c": jax.device_put(random_bits("float32", (16,)), NamedSharding(mesh, P("y")))},
        "s": jax.device_put(random_bits("float32", ()), NamedSharding(mesh, P())),
        "one": jax.device_put(random_bits("int32", (8,)), jax.devices()[3]),
        "host": random_bits("float32", (8, 4)),
    }
    ostraka.save(place, tree)
    return place, tree, mesh


def struct(*shape, sharding=None, dtype: Any = np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def placed_cases(tree, mesh):
    """By case, the options of a restore, and some leaves with their shardings; None: in memory."""
    permuted = mesh_of((2, 4), ("x", "y"), PERMUTED)
    explicit = explicit_mesh((2, 4), ("x", "y"))
    cube = mesh_of((2, 2, 2), ("a", "b", "c"))
    single = SingleDeviceSharding(jax.devices()[7])
    both = NamedSharding(mesh, P(("y", "x")))
    abstract_w = {**tree, "w": struct(8, 16, sharding=NamedSharding(mesh.abstract_mesh, P("y")))}
    as_numpy = {"w": np.zeros((8, 16), np.float32), "b": {"c": np.zeros(16, np.float32)}}
    as_jax = {"one": struct(8, dtype=np.int32, sharding=both), "host": struct(8, 4, sharding=both)}
    branches = {"w": P("a", ("b", "c")), "b": P("c"), "s": None, "one": single, "host": P("a")}
    leaves = {"w": P(), "b": {"c": P(("a", "c"))}, "s": P(), "one": P("b"), "host": None}
    own = {"w": tree["w"].sharding, "c": tree["b"]["c"].sharding, "one": tree["one"].sharding}
    first = SingleDeviceSharding(jax.devices()[0])
    return {
        "a live template": ({"like": tree}, {**own, "host": None}),
        "shapes": ({"like": jax.eval_shape(lambda: tree)}, {**own, "host": first}),
        "numpy": ({"like": as_numpy}, {"w": None, "c": None}),
        "jax": ({"like": as_jax}, {"one": both, "host": both}),
        "saved specs on a mesh": (
            {"mesh": permuted},
            {
                "w": NamedSharding(permuted, P("x", "y")),
                "c": NamedSharding(permuted, P("y")),
                "s": NamedSharding(permuted, P()),
                "one": NamedSharding(permuted, P()),
                "host": None,
            },
        ),
        "specs of the template on a mesh": (
            {
                "like": {**tree, "w": struct(8, 16, sharding=NamedSharding(mesh, P(None, "x")))},
                "mesh": explicit,
            },
            {"w": NamedSharding(explicit, P(None, "x")), "c": NamedSharding(explicit, P("y"))},
        ),
        "a template on axes that the mesh lacks": (
            {"like": {"w": struct(8, 16, sharding=NamedSharding(cube, P("a")))}, "mesh": permuted},
            {"w": NamedSharding(permuted, P("x", "y"))},
        ),
        "an abstract mesh": (
            {"like": abstract_w, "mesh": mesh},
            {"w": NamedSharding(mesh, P("y"))},
        ),
        "branches": (
            {"mesh": cube, "specs": branches},
            {
                "w": NamedSharding(cube, P("a", ("b", "c"))),
                "c": NamedSharding(cube, P("c")),
                "s": NamedSharding(cube, P()),
                "one": single,
            },
        ),
        "leaves": (
            {"mesh": cube, "specs": leaves},
            {"w": NamedSharding(cube, P()), "c": NamedSharding(cube, P(("a", "c")))},
        ),
        "specs before the template": (
            {"like": tree, "mesh": mesh, "specs": {"w": P("y")}},
            {**own, "w": NamedSharding(mesh, P("y")), "one": NamedSharding(mesh, P())},
        ),
        "specs on the template's mesh": (
            {"like": tree, "specs": {"w": P(None, "x")}},
            {**own, "w": NamedSharding(mesh, P(None, "x"))},
        ),
        "one spec for all": (
            {"mesh": mesh, "specs": P(None), "only": ["b", "one"]},
            {"c": NamedSharding(mesh, P(None)), "one": NamedSharding(mesh, P(None))},
        ),
    }


def test_where_arrays_go(example):
    place, tree, mesh = example
    values = {"c": tree["b"]["c"], **tree}
    for case, (options, expected) in placed_cases(tree, mesh).items():
        found = ostraka.restore(place, **options)
        found["c"] = found.get("b", {}).get("c")
        for name, sharding in expected.items():
            value = np.asarray(values[name])
            if sharding is None:
                assert type(found[name]) is np.ndarray, (case, name)
                assert_bits(found[name], value)
            else:
                assert found[name].sharding.is_equivalent_to(sharding, value.ndim), (case, name)
                assert getattr(found[name].sharding, "mesh", 0) == getattr(sharding, "mesh", 0)
                assert_placed(found[name], value, found[name].sharding)


def test_a_donated_template_still_says_what_is_wanted(example):
    place, tree, _ = example
    expected = np.asarray(tree["w"]).copy()
    sharding = tree["w"].sharding
    jax.jit(lambda x: x + 1, donate_argnums=0)(tree["w"])
    tree["one"].delete()
    assert_placed(ostraka.restore(place, like=tree)["w"], expected, sharding)


def test_the_default_device_takes_host_arrays(example):
    place, tree, _ = example
    with jax.default_device(jax.devices()[6]):
        found = ostraka.restore(place, like={"host": struct(8, 4), "s": np.float32(0)})
    assert_placed(found["host"], tree["host"], SingleDeviceSharding(jax.devices()[6]))
    assert type(found["s"]) is np.float32


def test_rules_and_presets_are_specs_too(place):
    mesh = mesh_of((4, 2), ("fsdp", "tp"))
    tree = {"a": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}, "n": np.ones(3), "s": 1}
    ostraka.save(place, tree)
    restored = ostraka.restore(place, mesh=mesh, specs={"**/kernel": P("fsdp", "tp")})
    assert restored["a"]["kernel"].sharding == NamedSharding(mesh, P("fsdp", "tp"))
    assert restored["a"]["bias"].sharding == NamedSharding(mesh, P())
    restored = ostraka.restore(place, like=tree, mesh=mesh, specs=sharding_helpers.fsdp(min_size=1))
    assert restored["a"]["kernel"].sharding.spec == P("fsdp", None)


# What happens to the arrays afterwards


@pytest.mark.parametrize("shape", [(16,), (64, 64), (2048, 1024)])
def test_restored_arrays_survive_donation_of_their_neighbours(place, shape):
    values = {f"a{n}": random_bits("int32", shape, n) for n in range(12)}
    sharding = SHARDINGS["8 by rows"]()
    ostraka.save(place, {k: jax.device_put(v, fit(sharding, shape)) for k, v in values.items()})
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    first = ostraka.restore(place)
    for _ in range(3):
        for key in list(first)[::2]:
            first[key] = step(first[key])
    second = ostraka.restore(place)
    for number, (key, value) in enumerate(values.items()):
        assert_bits(np.asarray(first[key]), value + np.int32(0 if number % 2 else 3))
        assert_bits(np.asarray(second[key]), value)


def test_restored_arrays_outlive_the_checkpoint(tmp_path):
    folder = tmp_path
    value = random_bits("float32", (512, 512))
    ostraka.save(folder / "c", {"a": jax.device_put(value, SHARDINGS["4x2"]())})
    found = ostraka.restore(folder / "c")["a"]
    for file in (folder / "c").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert_placed(found, value, found.sharding)


def test_a_restored_tree_can_be_saved_and_restored_again(place, values):
    sharding = SHARDINGS["2x2x2"]()
    with jax.enable_x64(True):
        tree = {k: jax.device_put(v, fit(sharding, v.shape)) for k, v in values.items()}
        for _ in range(3):
            ostraka.save(place, tree)
            tree = ostraka.restore(place)
    for key, value in values.items():
        assert_placed(tree[key], value, tree[key].sharding)


def test_a_run_with_fewer_devices_needs_no_template(tmp_path):
    """Eight devices saved it, three restore it: onto one device, or onto any mesh of theirs."""
    folder = tmp_path
    mesh = mesh_of((4, 2), ("x", "y"))
    value = np.arange(96, dtype=np.int32).reshape(8, 12)
    tree = {
        "w": jax.device_put(value, NamedSharding(mesh, P("x", "y"))),
        "one": jax.device_put(value, jax.devices()[7]),
        "key": jax.device_put(jax.random.key(3), NamedSharding(mesh, P())),
        "step": 7,
    }
    ostraka.save(folder / "c", tree)
    run_processes(restore_on_three_devices, str(folder / "c"), processes=1, devices_per_process=3)


def restore_on_three_devices(path: str) -> None:
    value, devices = np.arange(96, dtype=np.int32).reshape(8, 12), jax.devices()
    assert len(devices) == 3
    found = ostraka.restore(path)
    for name in ("w", "one"):
        assert found[name].sharding.device_set == {devices[0]}, found[name].sharding
        np.testing.assert_array_equal(found[name], value)
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(3))).all()
    assert found["step"] == 7
    mesh = Mesh(np.array(devices), ("m",))
    found = ostraka.restore(path, mesh=mesh, specs={"w": P(None, "m"), "one": P(), "key": P()})
    assert found["w"].sharding == NamedSharding(mesh, P(None, "m"))
    np.testing.assert_array_equal(found["w"], value)


# Keys of a generator that JAX does not have


def generator(name: str, words: tuple[int, ...] = (3,)) -> Any:
    """One that counts; as good as any to be saved."""
    return define_prng_impl(
        key_shape=words,
        seed=lambda seed: jnp.full(words, seed, jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, *words)) + jnp.uint32(1),
        random_bits=lambda key, _, shape: jnp.broadcast_to(key.ravel()[0], shape),
        fold_in=lambda key, data: key + jnp.uint32(data),
        name=name,
        tag="test",
    )


def test_keys_of_a_generator_of_the_users_own_come_back_by_a_template(place: str):
    mine = generator("counting")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    key = jax.random.key(7, impl=mine)
    spread = jax.device_put(jax.random.split(key, 8), NamedSharding(mesh, P("x")))
    tree = {"key": key, "rngs": nnx.Rngs(jax.random.key(3, impl=mine)), "keys": spread}
    ostraka.save(place, tree)
    assert ostraka.verify(place).ok
    then = jax.random.key_data(tree["rngs"].default())

    def fresh() -> Any:
        other = jax.random.key(0, impl=mine)
        keys = jax.device_put(jax.random.split(other, 8), spread.sharding)
        return {"key": other, "rngs": nnx.Rngs(other), "keys": keys}

    for found in (
        ostraka.restore(place, like=fresh()),
        ostraka.restore(place, into=fresh()),
        ostraka.restore(place, like=fresh(), mesh=mesh, specs={"keys": P()}),
        ostraka.restore(place, like={**fresh(), "key": jax.eval_shape(lambda: key)}),
    ):
        for name in ("key", "keys"):
            assert found[name].dtype == tree[name].dtype
            before, after = (jax.random.key_data(t[name]) for t in (tree, found))
            assert np.array_equal(before, after)
        assert np.array_equal(jax.random.key_data(found["rngs"].default()), then)
    with pytest.raises(
        Mismatch, match=r"'counting', which JAX does not have: define .* pass like="
    ):
        ostraka.restore(place)
    for other, match in (
        (generator("other"), "'counting', which JAX does not have"),
        (generator("counting", (4,)), "have the shape"),
        ("rbg", "'counting', which JAX does not have"),
    ):
        with pytest.raises(Mismatch, match=match):
            ostraka.restore(place, like={"key": jax.random.key(0, impl=other)})


@pytest.mark.parametrize(("name", "words"), [("<unnamed>", (3,)), ("rbg", (4,)), ("flat", (2, 2))])
def test_keys_whose_generator_could_not_be_found_again_are_refused(
    place: str, name: str, words: tuple[int, ...]
):
    key = jax.random.key(7, impl=generator(name, words))
    with pytest.raises(InvalidTree, match="'key' has keys of the generator key<test>, which could"):
        ostraka.save(place, {"key": key})
    with pytest.raises(CheckpointNotFound, match="memory://"):
        ostraka.open(place)
