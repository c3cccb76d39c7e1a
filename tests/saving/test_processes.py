"""Saves and restores across process and device counts, with real processes."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from numbered import caught
from ostraka.errors import Mismatch
from ostraka.testing import run_processes
from places import names_of

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


def put(value: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def on_mesh(name: str, mesh: Mesh) -> jax.Array:
    array = put(sources()[name], NamedSharding(mesh, SPECS[name]))
    return jax.random.wrap_key_data(array, impl=KEY_NAMES[name]) if name in KEY_NAMES else array


def on_one_process(process: int) -> dict[str, jax.Array]:
    """Arrays on the devices of one process, which the others know of but don't hold."""
    devices = [device for device in jax.devices() if device.process_index == process]
    mesh = Mesh(np.array(devices), ("z",))
    return {
        "one process": put(sources()["one process"], NamedSharding(mesh, P("z"))),
        "one device": put(sources()["one device"], SingleDeviceSharding(devices[-1])),
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


def make_like(mesh: Mesh, specs: Mapping[str, P], sole: Any = None) -> dict[str, Any]:
    """What `make_tree` makes, abstract, with other shardings."""

    def abstract(name: str, sharding: Any) -> jax.ShapeDtypeStruct:
        value = sources()[name]
        shape, dtype = value.shape, value.dtype
        if name in KEY_NAMES:
            shape, dtype = shape[:-1], jax.random.key(0, impl=KEY_NAMES[name]).dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    here = SingleDeviceSharding(jax.local_devices()[-1])
    arrays = {name: NamedSharding(mesh, specs.get(name, P())) for name in SPECS}
    return {
        "arrays": {name: abstract(name, sole or sharding) for name, sharding in arrays.items()},
        "sole": {
            name: abstract(name, sole or NamedSharding(mesh, P()))
            for name in ("one process", "one device")
        },
        "host": {
            "local": abstract("local", here),
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
    wrong = [
        name
        for name, value in PYTHON_VALUES.items()
        if type(tree["python"][name]) is not type(value) or tree["python"][name] != value
    ]
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


def misplaced_leaves(tree: dict[str, Any], like: dict[str, Any]) -> list[str]:
    return [
        name
        for part in ("arrays", "sole", "host")
        for name, wanted in like[part].items()
        if isinstance(wanted, jax.ShapeDtypeStruct)
        and not tree[part][name].sharding.is_equivalent_to(wanted.sharding, len(wanted.shape))
    ]


# What the processes run

OTHER_SPECS = {
    "sharded": P("y", "x"),
    "partly": P("x"),
    "both axes": P("y"),
    "both, turned": P(None, ("x", "y")),
    "complex": P(("y", "x")),
    "keys": P("y"),
    "rbg": P("x"),
}
"""Cut along other dimensions than when saved; all others are replicated."""


def restore_every_way(path: str) -> dict[str, list[str]]:
    """Restore with several kinds of targets; what is wrong with each."""
    mesh, turned = make_mesh(), make_mesh(turned=True)
    likes = {"the same specs": make_like(mesh, SPECS)}
    if jax.device_count() > 1:
        likes["devices turned round"] = make_like(turned, SPECS)
        likes["replicated"] = make_like(mesh, {})
        likes["other specs"] = make_like(mesh, OTHER_SPECS)
    if jax.process_count() == 1:
        likes["one device"] = make_like(mesh, {}, SingleDeviceSharding(jax.devices()[-1]))
        likes["two of the devices"] = make_like(Mesh(np.array(jax.devices()[:2]), ("x",)), {})
    wrong: dict[str, list[str]] = {}
    for way, like in likes.items():
        tree = ostraka.restore(path, like=like)
        wrong[way] = wrong_leaves(tree) + misplaced_leaves(tree, like)
    placed = ostraka.restore(path, mesh=turned, specs={"sole": P()})
    wrong["saved specs on another mesh"] = wrong_leaves(placed) + not_as_saved(placed, turned)
    if jax.process_count() == 1 or jax.device_count() == 8:
        tree = ostraka.restore(path)
        wrong["no template"] = wrong_leaves(tree)
    if jax.device_count() == 8:  # then all arrays have the shardings that they were saved with
        wrong["no template"] += not_as_saved(tree, mesh)  # pyright: ignore[reportPossiblyUnboundVariable]
        saved = ostraka.open(path)
        for name, spec in SPECS.items():
            axes = [a if isinstance(a, tuple) else (a,) * (a is not None) for a in spec]
            if saved[f"arrays/{name}"].spec != tuple(axes):
                wrong["no template"].append(f"{name} was saved as {spec}")
    return wrong


def not_as_saved(tree: dict[str, Any], mesh: Mesh) -> list[str]:
    return [
        f"{name} lies as {array.sharding}"
        for name, array in tree["arrays"].items()
        if not array.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), array.ndim)
    ]


def restore_all(root: str, *names: str) -> dict[str, list[str]]:
    """What is wrong with each way to restore these checkpoints."""
    return {
        f"{name}, {way}": wrong
        for name in names
        for way, wrong in restore_every_way(f"{root}/{name}").items()
        if wrong
    }


def save_in_four(root: str) -> None:
    ostraka.save(f"{root}/four", make_tree())


def work_in_two(root: str) -> dict[str, Any]:
    ostraka.save(f"{root}/two", make_tree(), metadata={"from": jax.process_count()})
    return {
        "wrong": restore_all(root, "one", "two", "four"),
        "locals": wrong_locals(f"{root}/locals"),
        "said": {way: save_in_disagreement(f"{root}/disagree/{way}", way) for way in WAYS},
    }


def restore_in_four(root: str) -> tuple[dict[str, list[str]], tuple[str, str]]:
    return restore_all(root, "two"), caught(lambda: ostraka.restore(f"{root}/locals"))


def test_from_one_two_and_four_processes_to_others(tmp_path: Path):
    """What is in the files, `test_format_doc` and `test_damage_matrix` read with other readers."""
    root = str(tmp_path)
    ostraka.save(tmp_path / "one", make_tree())
    run_processes(save_in_four, root, processes=4, devices_per_process=2)
    for result in run_processes(work_in_two, root, processes=2, devices_per_process=4):
        assert (result.value["wrong"], result.value["locals"]) == ({}, [])
        said = result.value["said"]
        assert said.pop("nothing") == ("", "nothing was raised")
        for way, (kind, message) in said.items():
            assert kind == "SaveFailed", way
            differs = "it saves to" if way == "path" else "its tree differs from that of process 0"
            assert f"process 1: {differs}" in message, way
            assert way == "path" or "metadata and options must be the same" in message, way
            assert way == "path" or f"{root}/disagree/{way}" in message, way
    assert names_of(tmp_path / "disagree") == ["nothing"]
    assert ostraka.verify(tmp_path / "two").ok
    assert ostraka.open(tmp_path / "two").metadata == {"from": 2}
    for result in run_processes(restore_in_four, root, processes=4, devices_per_process=2):
        wrong, (_, message) = result.value
        assert wrong == {}
        assert "each of the 2 processes" in message
        assert "this run has 4" in message
    assert restore_all(root, "two") == {}
    for devices in (3, 1):
        for result in run_processes(
            restore_all, root, "one", "four", processes=1, devices_per_process=devices
        ):
            assert result.value == {}, devices
    check_locals(tmp_path / "locals")


# Values that each process has for itself


def wrong_locals(path: str) -> list[str]:
    """Save and restore such values; the names of those that are not this process's own."""
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
    back, plain = ostraka.restore(path, like=tree), ostraka.restore(path)
    return [
        f"{way} {name}"
        for way, found in (("like", back), ("plain", plain))
        for name in tree
        if type(found[name]) is not type(tree[name])
        or found[name].shape != tree[name].shape
        or not np.array_equal(numbers(found[name]), numbers(tree[name]))
    ]


def numbers(value: Any) -> Any:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def check_locals(path: Path) -> None:
    """Own values are stored for each process, and need as many processes."""
    stored = 0
    for file in path.glob("shards-*/*.safetensors"):
        data = file.read_bytes()
        stored += len(data) - 8 - int.from_bytes(data[:8], "little")
    assert stored == 2 * (6 * 4 + 6 * 8 + 2 * 4 + 4) + 1000 * 4 + 500 * 8
    with pytest.raises(Mismatch, match="each of the 2 processes .* this run has 1") as raised:
        ostraka.restore(path)
    named = ["own", "own numpy", "own key", "own scalar"]
    assert [d.split(":")[0] for d in raised.value.differences] == [repr(name) for name in named]
    assert ostraka.open(path)["own numpy"][1].tolist() == [[0, 2, 4], [6, 8, 10]]


# Processes that disagree

WAYS = ["path", "structure", "value", "shape", "sharding", "kind", "options", "nothing"]


def save_in_disagreement(path: str, way: str) -> tuple[str, str]:
    tree: dict[str, Any] = {"a": on_mesh("rows", make_mesh()), "b": 1, "c": np.zeros(3)}
    other: dict[str, Callable[[], Any]] = {
        "structure": lambda: {"d": 2},
        "value": lambda: {"b": 2},
        "shape": lambda: {"c": np.zeros(4)},
        "sharding": lambda: {"a": on_mesh("rows", make_mesh(turned=True))},
        "kind": lambda: {"c": on_mesh("replicated", make_mesh())},
    }
    if jax.process_index() == 1:
        path += "-other" * (way == "path")
        tree |= other.get(way, dict)()
    compress = "zstd" if way == "options" and jax.process_index() else None
    return caught(lambda: ostraka.save(path, tree, compress=compress))
