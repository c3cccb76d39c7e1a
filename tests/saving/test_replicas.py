"""`check_replicas`: a flipped bit in one replica is found before the commit, and named."""

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.testing import run_processes

DTYPES = ["float32", "bfloat16", "int8", "bool", "float8_e4m3fn", "int4"]


def flipped(array: Any, device: Any, rng: random.Random) -> Any:
    """The same array, with one bit flipped on one device."""
    shards: list[Any] = []
    for shard in array.addressable_shards:
        data = shard.data
        if shard.device == device:
            values = np.array(data)
            if values.dtype.name == "bool":
                element = rng.randrange(values.size)
                values.reshape(-1)[element] ^= True
            elif values.dtype.name == "int4":
                element = rng.randrange(values.size)
                as_int = values.astype(np.int8).reshape(-1)
                as_int[element] ^= 1 << rng.randrange(3)
                values = as_int.reshape(values.shape).astype(values.dtype)
            else:
                stored = values.reshape(-1).view(np.uint8)
                stored[rng.randrange(stored.size)] ^= 1 << rng.randrange(8)
            data = jax.device_put(values, shard.device)
        shards.append(data)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def plant(rng: random.Random, devices: list[Any], own: list[Any]) -> tuple[Any, Any, int]:
    """A tree with one flipped bit, the device that has it, and the number of replicas."""
    replicas = rng.randint(2, len(devices))
    devices = devices[: len(devices) // replicas * replicas]
    grid = np.array(devices).reshape(replicas, -1)
    sharding = NamedSharding(Mesh(grid, ("r", "s")), P("s"))
    dtype = rng.choice(DTYPES)
    values = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 2, (24, 9))
    make = lambda index: jnp.asarray(values[index]).astype(dtype)  # noqa: E731
    array = jax.make_array_from_callback(values.shape, sharding, make, dtype=dtype)
    device = rng.choice(devices)
    own_rng = random.Random(rng.randrange(1 << 30))  # All processes must draw alike.
    hurt = flipped(array, device, own_rng) if device in own else array
    return {"params": {"w": hurt}, "step": 3}, device, replicas


def check_named(error: ostraka.errors.ReplicasDiffer, device: Any, replicas: int) -> None:
    (difference,) = error.differences
    assert difference.box.leaf == "params/w"
    assert sum(map(len, difference.groups)) == replicas
    assert difference.has_majority == (replicas > 2)
    odd = {one.device for one in difference.groups[-1]}
    assert device.id in ({one.device for group in difference.groups for one in group})
    if replicas > 2:
        assert odd == {device.id}
        assert [one.process for one in difference.groups[-1]] == [device.process_index]


def save_and_wait(path: Path, tree: Any, **options: Any) -> None:
    ostraka.save_async(path, tree, **options).wait()


def flip_and_save(root: Path, seed: int, rounds: int) -> int:
    """Plant flips, and save each in turn. Returns how many were found."""
    rng, found = random.Random(seed), 0
    devices = list(jax.devices())
    for number in range(rounds):
        tree, device, replicas = plant(rng, devices, jax.local_devices())
        path = root / f"{seed}-{number}"
        save = ostraka.save if rng.random() < 0.5 else save_and_wait
        with pytest.raises(ostraka.errors.ReplicasDiffer, match="'params/w'.* differ") as caught:
            save(path, tree, check_replicas=True)
        check_named(caught.value, device, replicas)
        assert not (path / "_METADATA").exists()
        found += 1
    return found


def test_flips_in_one_process_are_found(tmp_path: Path):
    assert flip_and_save(tmp_path, 1, 40) == 40


def work(root: str, rounds: int) -> int:
    return flip_and_save(Path(root), 2, rounds)


def test_flips_are_found_on_every_process(tmp_path: Path):
    done = run_processes(work, str(tmp_path), 12, processes=2, devices_per_process=4)
    assert [one.value for one in done] == [12, 12]


def test_equal_replicas_are_saved(tmp_path: Path):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("r", "s"))
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("s")))
    tree = {"w": array, "key": jax.random.key(3), "n": np.arange(3), "packed": array.astype("int4")}
    ostraka.save(tmp_path / "a", tree, check_replicas=True)
    assert (np.asarray(ostraka.restore(tmp_path / "a")["w"]) == np.asarray(array)).all()


def test_a_background_save_compares_the_captured_values(tmp_path: Path):
    """A step that donates the array runs before the background save compares it."""
    rng = random.Random(5)
    tree, device, replicas = plant(rng, list(jax.devices()), jax.devices())
    donate = jax.jit(jnp.zeros_like, donate_argnums=0)
    handle = ostraka.save_async(tmp_path / "a", dict(tree), check_replicas=True)
    donate(tree["params"]["w"])
    with pytest.raises(ostraka.errors.ReplicasDiffer, match="nothing was saved") as caught:
        handle.wait()
    check_named(caught.value, device, replicas)


@pytest.mark.soak
@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 4), (4, 2)])
def test_thousands_of_flips_are_found(processes: int, devices: int, tmp_path: Path, figures: Any):
    rounds = 3334
    given = {"processes": processes, "devices_per_process": devices, "timeout_s": 7200.0}
    done = run_processes(work, str(tmp_path), rounds, **given)
    assert [one.value for one in done] == [rounds] * processes
    figures.add("flips found before the commit", rounds)
