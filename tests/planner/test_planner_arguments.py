"""Arguments of `plan` that make no sense, and numbers that are easily a few bytes off."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka import plan
from ostraka.errors import InvalidSharding, Mismatch

TREE = {"x": jnp.ones((8, 8))}


ROWS = {"w": jax.ShapeDtypeStruct((12, 8), jnp.float32)}
UNNAMED = "mesh is .*, sizes without names; name the axes, such as mesh="
NO_OPTIMIZER = "it must be an optax transformation, or the name of one"
UNEVEN = "8 devices do not divide evenly among"


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (ROWS, {"mesh": {"data": 8}, "specs": P("data")}, ValueError, "12 elements do not divide"),
        (ROWS, {"mesh": {"data": 4}, "processes": 3}, ValueError, "among 3 processes; .* is 2"),
        (TREE, {"mesh": {"data": 8}, "processes": 0}, ValueError, UNEVEN),
        (TREE, {"mesh": {"data": 8}, "processes": -1}, ValueError, UNEVEN),
        (ROWS, {"specs": P()}, ValueError, "specs needs mesh="),
        (TREE, {"mesh": 8}, TypeError, f'{UNNAMED}{{"data": 8}}'),
        (TREE, {"mesh": [8]}, TypeError, f'{UNNAMED}{{"data": 8}}'),
        (TREE, {"mesh": (4, 2)}, TypeError, f'{UNNAMED}{{"data": 4, "model": 2}}'),
        ("gpt2", {"mesh": (2, 2, 2)}, TypeError, '{"data": 2, "model": 2, "axis2": 2}'),
        (TREE, {"mesh": {"data": 0}}, ValueError, "the mesh axis 'data' has the size 0; it must"),
        (TREE, {"mesh": {"data": 8.0}}, ValueError, "the mesh axis 'data' has the size 8.0"),
        (TREE, {"mesh": {"data": "8"}}, ValueError, "the mesh axis 'data' has the size '8'"),
        (TREE, {"mesh": {"data": True}}, ValueError, "the mesh axis 'data' has the size True"),
        (TREE, {"max_file_bytes": 5}, ValueError, "max_file_bytes is 5; it must be at least 8,192"),
        (TREE, {"max_file_bytes": "10B"}, ValueError, "max_file_bytes is 10; it must be at least"),
        (TREE, {"max_file_bytes": "1Gb"}, ValueError, "'1Gb' may mean bits or bytes; write 1GB"),
        (TREE, {"parity": 5}, ValueError, "parity is 5; it must be 0, 1 or 2"),
        (TREE, {"optimizer": "adamm"}, ValueError, "which optax does not have"),
        (TREE, {"optimizer": 3}, TypeError, NO_OPTIMIZER),
        (TREE, {"optimizer": "apply_updates"}, TypeError, NO_OPTIMIZER),
        (TREE, {"optimizer": "contrib"}, TypeError, NO_OPTIMIZER),
        (TREE, {"optimizer": optax.adam}, TypeError, NO_OPTIMIZER),
        ("gpt2", {"optimizer": optax.adam(1e-3)}, ValueError, "by name or config is given by its"),
        ("gpt2", {"optimizer": "adamm"}, ValueError, "there is no optimizer 'adamm'"),
        ("llama-3.1-70", {}, ValueError, r"there is no model.*\(did you mean 'llama-3.1-70b'\?\)"),
        (Path("/no/gpt2"), {}, FileNotFoundError, "there is no checkpoint at"),
        (TREE, {"optimizer_dtype": "float32"}, ValueError, "optimizer_dtype needs optimizer="),
        (
            TREE,
            {"optimizer": "adam", "optimizer_dtype": "int8"},
            ValueError,
            "it must be a floating-point dtype",
        ),
        (
            "gpt2",
            {"optimizer": "adam", "optimizer_dtype": "float33"},
            ValueError,
            "there is no dtype 'float33'",
        ),
        ("gpt2", {"dtype": {"model/**": "bfloat16"}}, TypeError, "is no dtype; give one such as"),
    ],
)
def test_arguments_that_make_no_sense(
    source: Any, options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        plan(source, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"processes": 2}, ValueError, "specs and processes need mesh="),
        ({"mesh": {"data": 2}}, InvalidSharding, "the mesh .data=2. has no axis 'x'"),
        ({"mesh": {"x": 4}, "processes": 0}, ValueError, "4 devices do not divide evenly among"),
        ({"mesh": 8}, TypeError, f'{UNNAMED}{{"data": 8}}'),
        ({"only": "x"}, Mismatch, "only='x' matches no array of the checkpoint"),
    ],
)
def test_restores_that_make_no_sense(options: dict[str, Any], error: type[Exception], message: str):
    planned = plan(ROWS, mesh={"x": 4}, specs=P("x"))
    with pytest.raises(error, match=message):
        planned.restore(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "times need a bandwidth, such as write_bandwidth='2GB/s'"),
        (
            {"read_bandwidth": "1GB/s", "mtbf_s": 3600},
            ValueError,
            "mtbf_s needs to know how long a save takes: give write_",
        ),
        (
            {"write_bandwidth": "1GB/s", "mtbf_s": "4h"},
            TypeError,
            "mtbf_s is '4h'; it must be a number of seconds",
        ),
        ({"write_bandwidth": "5Gb"}, ValueError, "write_bandwidth: '5Gb' may mean bits or bytes"),
    ],
)
def test_times_that_can_not_be_told(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        plan(TREE).times(**options)
    with pytest.raises(ValueError, match="give read_bandwidth or storage_bandwidth"):
        plan(TREE).restore().duration_s()


def test_elements_of_less_than_a_byte_do_not_share_one_between_devices():
    """Three elements of half a byte take two bytes on each device, and in each file."""
    mesh = jax.make_mesh((8,), ("data",))
    sharded = NamedSharding(mesh, P("data"))
    planned = plan({"x": jax.ShapeDtypeStruct((8, 3), jnp.int4, sharding=sharded)})
    lost = planned.lost_process()
    assert lost.held_bytes == lost.sole_bytes == planned.restore().needed_bytes.most == 16
    assert planned.lost_disk().held_elsewhere_bytes == 0


def test_specs_of_a_restore_may_leave_leaves_out(tmp_path: Path):
    """As in `ostraka.restore`: an entry holds for all below it, and the rest is cut as it was."""
    mesh = jax.make_mesh((8,), ("data",))
    halves = NamedSharding(mesh, P("data"))
    tree = {
        "params": {"w": jax.device_put(jnp.ones((64, 64)), halves), "b": jnp.ones(16)},
        "moments": jax.device_put(jnp.ones((64, 32)), halves),
        "table": np.ones(5),
        "key": jax.random.key(0),
    }
    ostraka.save(tmp_path / "c", tree)
    planned = plan(tmp_path / "c")
    specs = {"params": P(None, "data"), "key": None}
    with pytest.raises(ValueError, match="'params/b'"):
        planned.restore(mesh=mesh, specs=specs)
    with pytest.raises(ValueError, match="'params/b'"):
        ostraka.restore(tmp_path / "c", mesh=mesh, specs=specs)
    specs = {"params": {"w": P(None, "data")}}
    restored = ostraka.restore(tmp_path / "c", mesh=mesh, specs=specs)
    targets = planned.restore(mesh=mesh, specs=specs)
    assert restored["params"]["w"].sharding.spec == P(None, "data")
    assert restored["moments"].sharding.spec == P("data")
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf is not tree["key"]) + 8
    assert targets.needed_bytes.most == held
    w = 64 * 64 * 4
    assert planned.restore(mesh=mesh, specs=specs, only="params/w").needed_bytes.most == w
    with pytest.raises(ValueError, match="specs has 'parms', which is no leaf"):
        planned.restore(mesh=mesh, specs={"parms": P()})
    with pytest.raises(ValueError, match="specs has a NamedSharding for 'moments', not a spec"):
        planned.restore(mesh=mesh, specs={"moments": halves})
