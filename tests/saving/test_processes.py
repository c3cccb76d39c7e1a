"""Saves and restores across process and device counts, with real processes."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.errors import Mismatch
from ostraka.testing import run_processes
from places import Place, names_of

SPECS = {
    "sharded": P("x", "y"),
    "rows": P("x"),
    "columns": P(None, "x"),
    "replicated": P(),
    "partly": P(None, "y"),
    "both axes": P(("x", "y")),
    "both, turned": P(None, ("y", "x")),
    "scalar": P(),
    "empty": P(None, "x"),
    "int4": P("x"),
    "int4, replicated": P(),
    "complex": P("y"),
    "keys": P("x"),
    "key": P(),
    "rbg": P("y"),
}
"""The leaves that lie on a mesh over all devices."""

KEY_NAMES = {"keys": "threefry2x32", "key": "threefry2x32", "rbg": "rbg"}
PYTHON_VALUES = {
    "int": 2**70,
    "float": 0.1,
    "complex": 1 - 2j,
    "true": True,
    "text": "ὄστρακα",
    "bytes": b"\x00\xff",
    "nothing": None,
}


@cache
def sources() -> dict[str, np.ndarray]:
    """The whole value of every array leaf; for keys their data."""
    rng = np.random.default_rng(7)

    def noise(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def data(seed: int, name: str, *shape: int) -> np.ndarray:
        return np.asarray(
            jax.random.key_data(jax.random.split(jax.random.key(seed, impl=name), shape))
        )

    return {
        "sharded": noise(24, 48),
        "rows": noise(48, 7),
        "columns": noise(3, 24),
        "replicated": noise(35, 11),
        "partly": noise(48, 6).astype(ml_dtypes.bfloat16),
        "both axes": rng.integers(-(2**31), 2**31, (48, 10), dtype=np.int32),
        "both, turned": noise(5, 48).astype(np.float16),
        "scalar": np.asarray(np.float32(-0.0)),
        "empty": np.empty((0, 24), np.float32),
        "int4": rng.integers(-8, 8, (24, 5)).astype(ml_dtypes.int4),
        "int4, replicated": rng.integers(-8, 8, (7, 3)).astype(ml_dtypes.int4),
        "complex": (noise(48, 2) + 1j * noise(48, 2)).astype(np.complex64),
        "keys": data(1, "threefry2x32", 24),
        "key": data(2, "threefry2x32"),
        "rbg": data(3, "rbg", 48),
        "local": noise(9, 9),
        "one process": noise(8, 4),
        "one device": noise(5),
        "numpy f64": rng.standard_normal((13, 3)),
        "numpy fortran": np.asfortranarray(rng.integers(0, 2**63, (6, 5), dtype=np.int64)),
        "numpy 0-d": np.asarray(np.uint16(65535)),
        "numpy bool": rng.integers(0, 2, 17).astype(bool),
        "numpy scalar": np.asarray(np.float64(np.pi)),
    }


def grid(count: int) -> tuple[int, int]:
    return (count, 1) if count % 2 or count == 1 else (count // 2, 2)


def make_mesh(*, turned: bool = False) -> Mesh:
    devices = np.array(jax.devices())
    if turned:
        devices = devices[::-1]
    return Mesh(devices.reshape(grid(len(devices))), ("x", "y"))


def place(value: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def on_mesh(name: str, mesh: Mesh) -> jax.Array:
    array = place(sources()[name], NamedSharding(mesh, SPECS[name]))
    return jax.random.wrap_key_data(array, impl=KEY_NAMES[name]) if name in KEY_NAMES else array


def on_one_process(process: int) -> dict[str, jax.Array]:
    """Arrays on the devices of one process, which the others know of but don't hold."""
    devices = [device for device in jax.devices() if device.process_index == process]
    mesh = Mesh(np.array(devices), ("z",))
    return {
        "one process": place(sources()["one process"], NamedSharding(mesh, P("z"))),
        "one device": place(sources()["one device"], SingleDeviceSharding(devices[-1])),
    }


def host_values() -> dict[str, Any]:
    values = {name: sources()[name] for name in sources() if name.startswith("numpy")}
    return {**values, "numpy scalar": values["numpy scalar"][()]}


def make_tree() -> dict[str, Any]:
    mesh = make_mesh()
    return {
        "arrays": {name: on_mesh(name, mesh) for name in SPECS},
        "sole": on_one_process(jax.process_count() - 1),
        "host": {"local": jnp.asarray(sources()["local"]), **host_values()},
        "python": PYTHON_VALUES,
    }


def make_like(sharding_of: Any, sole: Any) -> dict[str, Any]:
    """What `make_tree` makes, abstract, with other shardings."""

    def abstract(name: str) -> jax.ShapeDtypeStruct:
        value = sources()[name]
        shape, dtype = value.shape, value.dtype
        if name in KEY_NAMES:
            shape, dtype = shape[:-1], jax.random.key(0, impl=KEY_NAMES[name]).dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(name))

    def abstract_sole(name: str) -> jax.ShapeDtypeStruct:
        value = sources()[name]
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sole)

    here = SingleDeviceSharding(jax.local_devices()[-1])
    return {
        "arrays": {name: abstract(name) for name in SPECS},
        "sole": {name: abstract_sole(name) for name in ("one process", "one device")},
        "host": {
            "local": jax.ShapeDtypeStruct((9, 9), np.float32, sharding=here),
            **{name: np.zeros_like(value) for name, value in host_values().items()},
            "numpy scalar": np.float64(0),
        },
        "python": {
            name: type(value)() if value is not None else None
            for name, value in PYTHON_VALUES.items()
        },
    }


def wrong_leaves(tree: dict[str, Any]) -> list[str]:
    """The leaves of a restored tree that differ in any bit from the sources, on this process."""
    wrong = [name for name, value in PYTHON_VALUES.items() if not same(tree["python"][name], value)]
    for part in ("arrays", "sole", "host"):
        for name, value in tree[part].items():
            if name in KEY_NAMES:
                if str(jax.random.key_impl(value)) != KEY_NAMES[name]:
                    wrong.append(f"{name}: {jax.random.key_impl(value)}")
                value = jax.random.key_data(value)
            source = sources()[name]
            if not (value.shape == source.shape and value.dtype == source.dtype):
                wrong.append(f"{name}: {value.dtype}{value.shape}")
            elif isinstance(value, jax.Array):
                wrong += [
                    f"{name} on {shard.device}"
                    for shard in value.addressable_shards
                    if np.asarray(shard.data).tobytes() != source[shard.index].tobytes()
                ]
            elif value.tobytes() != source.tobytes():
                wrong.append(name)
    kinds = [("numpy f64", np.ndarray), ("numpy 0-d", np.ndarray), ("numpy scalar", np.float64)]
    wrong += [name for name, kind in kinds if type(tree["host"][name]) is not kind]
    if not isinstance(tree["host"]["local"], jax.Array):
        wrong.append("local is no jax.Array")
    return wrong


def same(found: Any, value: Any) -> bool:
    return type(found) is type(value) and found == value


def misplaced_leaves(tree: dict[str, Any], like: dict[str, Any]) -> list[str]:
    return [
        name
        for part in ("arrays", "sole", "host")
        for name, wanted in like[part].items()
        if isinstance(wanted, jax.ShapeDtypeStruct)
        and not tree[part][name].sharding.is_equivalent_to(wanted.sharding, len(wanted.shape))
    ]


# What the processes run


def save_tree(path: str) -> int:
    ostraka.save(path, make_tree(), metadata={"from": jax.process_count()})
    return jax.process_index()


def restore_every_way(path: str) -> dict[str, list[str]]:
    """Restore with several kinds of targets; what is wrong with each."""
    mesh, turned = make_mesh(), make_mesh(turned=True)
    everywhere = NamedSharding(mesh, P())
    likes = {
        "the same specs": make_like(lambda name: NamedSharding(mesh, SPECS[name]), everywhere),
        "devices turned round": make_like(
            lambda name: NamedSharding(turned, SPECS[name]), NamedSharding(turned, P())
        ),
        "replicated": make_like(lambda name: everywhere, everywhere),
        "other specs": make_like(lambda name: NamedSharding(mesh, other_spec(name)), everywhere),
    }
    if jax.process_count() == 1:
        last = SingleDeviceSharding(jax.devices()[-1])
        likes["one device"] = make_like(lambda name: last, last)
        likes["two of the devices"] = two_devices()
    wrong: dict[str, list[str]] = {}
    for way, like in likes.items():
        tree = ostraka.restore(path, like=like)
        wrong[way] = wrong_leaves(tree) + misplaced_leaves(tree, like)
    wrong["no template"] = wrong_without_template(path)
    placed = ostraka.restore(path, mesh=turned, specs={"sole": P()})
    wrong["saved specs on another mesh"] = wrong_leaves(placed) + [
        f"{name} lies as {array.sharding}"
        for name, array in placed["arrays"].items()
        if not array.sharding.is_equivalent_to(NamedSharding(turned, SPECS[name]), array.ndim)
    ]
    return wrong


def two_devices() -> dict[str, Any]:
    few = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharding = NamedSharding(few, P())
    return make_like(lambda name: sharding, sharding)


def other_spec(name: str) -> P:
    """Cut along other dimensions than when saved."""
    turned = {
        "sharded": P("y", "x"),
        "rows": P(),
        "columns": P(),
        "partly": P("x"),
        "both axes": P("y"),
        "both, turned": P(None, ("x", "y")),
        "complex": P(("y", "x")),
        "keys": P("y"),
        "rbg": P("x"),
    }
    return turned.get(name, P())


def wrong_without_template(path: str) -> list[str]:
    """With as many devices everything lies as it was saved; a single process takes it anyhow."""
    if jax.process_count() > 1 and jax.device_count() != 8:
        return []
    tree = ostraka.restore(path)
    wrong = wrong_leaves(tree)
    if jax.device_count() == 8:
        saved = ostraka.open(path)
        for name, array in tree["arrays"].items():
            spec = saved[f"arrays/{name}"].spec
            if spec != tuple(
                axes if isinstance(axes, tuple) else (axes,) * (axes is not None)
                for axes in SPECS[name]
            ):
                wrong.append(f"{name} was saved as {spec}")
            if not array.sharding.is_equivalent_to(
                NamedSharding(make_mesh(), SPECS[name]), array.ndim
            ):
                wrong.append(f"{name} lies as {array.sharding}")
    return wrong


def all_right(results: list[Any]) -> bool:
    found = {r.process: {way: w for way, w in r.value.items() if w} for r in results}
    assert not any(found.values()), found
    return all("the same specs" in r.value for r in results)


# Process and device counts


@pytest.fixture(scope="module")
def saved_by_two(new_place: Callable[[str], Place]) -> Place:
    path = new_place("two") / "checkpoint"
    run_processes(save_tree, str(path), processes=2, devices_per_process=4)
    return path


def test_two_processes_to_four(saved_by_two: Place):
    assert all_right(
        run_processes(restore_every_way, str(saved_by_two), processes=4, devices_per_process=2)
    )


def test_two_processes_to_two(saved_by_two: Place):
    assert all_right(
        run_processes(restore_every_way, str(saved_by_two), processes=2, devices_per_process=4)
    )


def test_two_processes_to_one_with_eight_devices(saved_by_two: Place):
    wrong = restore_every_way(str(saved_by_two))
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("devices", [1, 3])
def test_two_processes_to_one_with_fewer_devices(saved_by_two: Place, devices: int):
    ways = restore_few if devices == 1 else restore_every_way
    assert all_right(
        run_processes(ways, str(saved_by_two), processes=1, devices_per_process=devices)
    )


def restore_few(path: str) -> dict[str, list[str]]:
    """On one device all shardings are the same."""
    mesh = make_mesh()
    like = make_like(lambda name: NamedSharding(mesh, SPECS[name]), NamedSharding(mesh, P()))
    only = SingleDeviceSharding(jax.devices()[0])
    return {
        "the same specs": wrong_leaves(ostraka.restore(path, like=like)),
        "one device": wrong_leaves(ostraka.restore(path, like=make_like(lambda name: only, only))),
        "no template": wrong_leaves(ostraka.restore(path)),
        "no template, a mesh": wrong_leaves(ostraka.restore(path, mesh=mesh, specs={"sole": P()})),
    }


def test_four_processes_to_two(place: Place):
    path = str(place / "checkpoint")
    run_processes(save_tree, path, processes=4, devices_per_process=2)
    assert all_right(run_processes(restore_every_way, path, processes=2, devices_per_process=4))


def test_one_process_to_two(place: Place):
    path = str(place / "checkpoint")
    save_tree(path)
    assert all_right(run_processes(restore_every_way, path, processes=2, devices_per_process=4))


def test_every_shard_verifies(saved_by_two: Place):
    report = ostraka.verify(saved_by_two)
    assert report.ok
    assert ostraka.open(saved_by_two).metadata == {"from": 2}


# What is in the files


def read_shards(path: Place) -> dict[str, dict[str, dict[str, Any]]]:
    """Every shard as the safetensors package reads it: file, tensor, its dtype, shape and bytes."""
    return {
        file.name: dict(safetensors.deserialize(file.read_bytes()))
        for file in sorted(path.glob("shards-*/*.safetensors"))
    }


def saved_offsets(file: Place) -> dict[str, list[int]]:
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    sharding = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
    assert sorted(header) == sorted(sharding)
    assert sorted(name for name, _ in safetensors.deserialize(data)) == sorted(sharding)
    return {name: info["saved_offsets"] for name, info in sharding.items()}


def data_bytes(file: Place) -> int:
    data = file.read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def stored_bytes(value: np.ndarray) -> int:
    return -(-value.size // 2) if value.dtype == ml_dtypes.int4 else value.nbytes


def leaf_sources() -> dict[str, np.ndarray]:
    parts = {**dict.fromkeys(SPECS, "arrays"), "one process": "sole", "one device": "sole"}
    return {f"{parts.get(name, 'host')}/{name}": value for name, value in sources().items()}


def test_each_byte_is_stored_once(saved_by_two: Place):
    files = list(saved_by_two.glob("shards-*/*.safetensors"))
    stored = sum(data_bytes(file) for file in files)
    # A packed leaf that is cut rounds each piece up to a byte; int4 in four pieces of 30 is exact.
    assert stored == sum(stored_bytes(value) for value in sources().values())
    assert stored == sum(
        len(tensor["data"])
        for shard in read_shards(saved_by_two).values()
        for tensor in shard.values()
    )


def test_shards_hold_slices_of_the_sources(saved_by_two: Place):
    seen = {path: np.zeros(value.shape, int) for path, value in leaf_sources().items()}
    for file in saved_by_two.glob("shards-*/*.safetensors"):
        offsets = saved_offsets(file)
        for path, tensor in safetensors.deserialize(file.read_bytes()):
            source = leaf_sources()[path]
            if source.dtype == ml_dtypes.int4:
                assert tensor["dtype"] == "U8"
                continue
            box = tuple(
                slice(start, start + extent)
                for start, extent in zip(offsets[path], tensor["shape"], strict=True)
            )
            assert source[box].shape == tuple(tensor["shape"]), path
            assert source[box].tobytes() == bytes(tensor["data"]), path
            seen[path][box] += 1
    for path, times in seen.items():
        if leaf_sources()[path].dtype != ml_dtypes.int4:
            assert (times == 1).all(), path


def test_dtypes_in_the_files(saved_by_two: Place):
    found = {
        path: tensor["dtype"]
        for shard in read_shards(saved_by_two).values()
        for path, tensor in shard.items()
    }
    assert set(found) == set(leaf_sources())
    expected = {
        "arrays/sharded": "F32",
        "arrays/partly": "BF16",
        "arrays/both axes": "I32",
        "arrays/both, turned": "F16",
        "arrays/complex": "C64",
        "arrays/keys": "U32",
        "host/numpy f64": "F64",
        "host/numpy fortran": "I64",
        "host/numpy bool": "BOOL",
        "host/numpy 0-d": "U16",
    }
    assert {path: found[path] for path in expected} == expected


# Balance


def save_many_leaves(path: str) -> int:
    rng = np.random.default_rng(3)
    mesh = make_mesh()
    specs = [P(), P("x"), P(None, "y"), P(("x", "y")), P("x", "y")]
    tree: dict[str, Any] = {}
    for number in range(200):
        rows, columns = 8 * int(rng.integers(1, 40)), 8 * int(rng.integers(1, 40))
        value = np.full((rows, columns), number, np.float32)
        # Three in five are replicated, some of odd shapes.
        spec = specs[number % 5] if number % 2 else P()
        if spec == P():
            value = value[: int(rng.integers(1, rows + 1))]
        tree[f"leaf {number}"] = place(value, NamedSharding(mesh, spec))
    ostraka.save(path, tree)
    return sum(array.nbytes for array in tree.values())


def test_processes_write_alike(place: Place):
    path = place / "checkpoint"
    results = run_processes(save_many_leaves, str(path), processes=4, devices_per_process=2)
    by_process: list[int] = []
    for process in range(4):
        (index,) = path.glob(f"shards-*/process_{process:05d}.json")
        files = json.loads(index.read_bytes())["files"]
        by_process.append(sum(data_bytes(index.parent / name) for name in files))
    assert sum(by_process) == results[0].value
    mean = sum(by_process) / 4
    assert all(abs(nbytes - mean) <= 0.05 * mean for nbytes in by_process), by_process


# Values that each process has for itself


def save_and_restore_local(path: str) -> dict[str, bool]:
    me = jax.process_index()
    mine = np.arange(6, dtype=np.float32).reshape(2, 3) * (me + 1)
    tree = {
        "own": jnp.asarray(mine),
        "own numpy": mine.astype(np.int64),
        "own key": jax.random.key(me),
        "own scalar": np.float32(me),
        "alike": jnp.arange(1000.0),
        "alike numpy": np.arange(500),
    }
    ostraka.save(path, tree)
    back = ostraka.restore(path, like=tree)
    plain = ostraka.restore(path)
    return {
        f"{way} {name}": type(found[name]) is type(tree[name])
        and np.array_equal(numbers(found[name]), numbers(tree[name]))
        and found[name].shape == tree[name].shape
        for way, found in (("like", back), ("plain", plain))
        for name in tree
    }


def numbers(value: Any) -> Any:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def restore_numpy(path: str) -> Any:
    return ostraka.restore(path, like={"own numpy": np.zeros((2, 3), np.int64)})


@pytest.fixture(scope="module")
def saved_locals(new_place: Callable[[str], Place]) -> Place:
    path = new_place("local") / "checkpoint"
    results = run_processes(save_and_restore_local, str(path), processes=2)
    for result in results:
        assert all(result.value.values()), result.value
    return path


def test_each_process_gets_its_own_value_back(saved_locals: Place):
    stored = sum(data_bytes(file) for file in saved_locals.glob("shards-*/*.safetensors"))
    own = 2 * (6 * 4 + 6 * 8 + 2 * 4 + 4)
    alike = 1000 * 4 + 500 * 8
    assert stored == own + alike


def test_own_values_need_as_many_processes(saved_locals: Place):
    with pytest.raises(Mismatch, match="each of the 2 processes .* this run has 1") as caught:
        ostraka.restore(saved_locals)
    named = ["own", "own numpy", "own key", "own scalar"]
    assert [d.split(":")[0] for d in caught.value.differences] == [repr(name) for name in named]
    assert ostraka.open(saved_locals)["own numpy"][1].tolist() == [[0, 2, 4], [6, 8, 10]]


def restore_own_on_three(path: str) -> str:
    try:
        ostraka.restore(path)
    except (ostraka.errors.Mismatch, ostraka.errors.RestoreFailed) as error:
        return str(error)
    return "restored"


def test_own_values_on_more_processes(saved_locals: Place):
    for result in run_processes(restore_own_on_three, str(saved_locals), processes=3):
        assert "each of the 2 processes" in result.value
        assert "this run has 3" in result.value


# Processes that disagree


def save_and_catch(path: str, way: str) -> str:
    tree: dict[str, Any] = {"a": on_mesh("rows", make_mesh()), "b": 1, "c": np.zeros(3)}
    if jax.process_index() == 1:
        if way == "path":
            path += "-other"
        elif way == "structure":
            tree["d"] = 2
        elif way == "value":
            tree["b"] = 2
        elif way == "shape":
            tree["c"] = np.zeros(4)
        elif way == "sharding":
            tree["a"] = on_mesh("rows", make_mesh(turned=True))
        elif way == "kind":
            tree["c"] = on_mesh("replicated", make_mesh())
    try:
        ostraka.save(path, tree)
    except ostraka.errors.SaveFailed as error:
        return str(error)
    return "saved"


def disagree(root: str, ways: list[str]) -> list[str]:
    return [save_and_catch(f"{root}/{way}", way) for way in ways]


def test_processes_that_disagree(place: Place):
    ways = ["path", "structure", "value", "shape", "sharding", "kind", "nothing"]
    results = run_processes(disagree, str(place), ways, processes=2, devices_per_process=2)
    for result in results:
        messages = dict(zip(ways, result.value, strict=True))
        assert messages.pop("nothing") == "saved"
        assert "process 1: it saves to" in messages.pop("path")
        for way, message in messages.items():
            assert f"{place}/{way}" in message, way
            assert "process 1: its tree differs from that of process 0" in message, way
    assert names_of(place) == ["nothing"]


def save_twice_over(path: str) -> list[Any]:
    """Overwrite a checkpoint from several processes, and read each version back."""
    mesh = make_mesh()
    found = []
    for number in range(3):
        value = np.full((8, 4), number, np.float32)
        tree = {"a": place(value, NamedSharding(mesh, P("x"))), "step": number}
        ostraka.save(path, tree)
        back = ostraka.restore(path, like=tree)
        local = [np.asarray(shard.data) for shard in back["a"].addressable_shards]
        found.append((back["step"], all((data == number).all() for data in local)))
    return found


def test_overwrite(place: Place):
    path = place / "checkpoint"
    for result in run_processes(save_twice_over, str(path), processes=2, devices_per_process=2):
        assert result.value == [(0, True), (1, True), (2, True)]
    assert len(list(path.iterdir())) == 2
