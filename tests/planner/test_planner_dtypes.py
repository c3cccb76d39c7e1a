"""Which dtypes are planned: those that optax really makes, shown, and what float32 would take."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import ostraka
from cli_runs import planned, run
from ostraka import plan
from ostraka.common.units import human_bytes

LLAMA_70B = 70_553_706_496


def make(dtype: Any) -> nnx.Module:
    return nnx.eval_shape(lambda: nnx.Linear(256, 512, param_dtype=dtype, rngs=nnx.Rngs(0)))


def dtypes(planned: ostraka.Plan) -> dict[str, list[str]]:
    return {name: list(group) for name, group in planned.bytes_by_group.items()}


def test_what_70b_with_adamw_takes():
    made = plan("llama-3.1-70b", mesh={"data": 64, "model": 8}, optimizer="adamw")
    assert dtypes(made) == {
        "model": ["bfloat16"],
        "optimizer": ["int32", "uint32"],
        "optimizer mu": ["bfloat16"],
        "optimizer nu": ["bfloat16"],
    }
    assert made.data_bytes == 3 * 2 * LLAMA_70B + 8
    moments = made.data_bytes_in_float32(parameters=False)
    everything = made.data_bytes_in_float32(parameters=True)
    assert (moments, everything) == (10 * LLAMA_70B + 8, 12 * LLAMA_70B + 8)
    asked = plan(
        "llama-3.1-70b",
        mesh={"data": 64, "model": 8},
        optimizer="adamw",
        optimizer_dtype=jnp.float32,
    )
    assert asked.data_bytes == moments
    assert plan("llama-3.1-70b", dtype="float32", optimizer="adamw").data_bytes == everything


def test_the_text_and_the_json_say_so():
    small = ("llama-3.2-1b", "--optimizer", "adamw")
    count = plan("llama-3.2-1b").parameters
    assert count is not None
    moments, everything = 10 * count + 8, 12 * count + 8
    text = run("plan", *small).stdout
    lines = [line.split() for line in text.splitlines()]
    size = human_bytes(2 * count).split()
    assert ["model", *size, "bfloat16"] in [line[:4] for line in lines]
    assert ["optimizer", "mu", *size, "bfloat16"] in [line[:5] for line in lines]
    assert f"with float32 moments{human_bytes(moments):>15}  --optimizer-dtype float32" in text
    assert f"all in float32{human_bytes(everything):>21}  --dtype float32" in text
    wide = run("plan", *small, "--optimizer-dtype", "float32")
    assert "with float32 moments" not in wide.stdout
    assert "all in float32" in wide.stdout
    assert "in float32" not in run("plan", "gpt2", "--optimizer", "adamw").stdout
    found = planned(*small)
    assert found["groups"]["optimizer mu"] == {
        "bytes": 2 * count,
        "dtypes": {"bfloat16": 2 * count},
    }
    assert found["data_bytes_in_float32"] == {"optimizer": moments, "everything": everything}
    assert planned("llama-3.2-1b")["data_bytes_in_float32"] is None


@pytest.mark.parametrize(
    "tree", [make("bfloat16"), {"w": jax.ShapeDtypeStruct((8, 4), "bfloat16")}]
)
def test_an_optimizer_in_float32_beside_a_model_in_bfloat16(tree: Any):
    made = plan(tree, optimizer="adamw", optimizer_dtype="float32")
    found = dtypes(made)
    assert (found["model"], found["optimizer mu"]) == (["bfloat16"], ["float32"])
    wide = plan(tree, optimizer="adamw", optimizer_dtype="float32", dtype="float16")
    assert (dtypes(wide)["model"], dtypes(wide)["optimizer nu"]) == (["float16"], ["float32"])
    by_path = plan(
        tree, optimizer="adamw", optimizer_dtype="float32", dtype={"model/**": "float16"}
    )
    assert dtypes(by_path) == dtypes(wide)


def test_one_moment_in_a_dtype_of_its_own():
    """`mu_dtype` is about mu alone, and a chain has its moments deeper."""
    chain = optax.chain(optax.clip(1.0), optax.adamw(1e-3, mu_dtype=jnp.float32))
    found = dtypes(plan(make("bfloat16"), optimizer=chain))
    assert (found["optimizer mu"], found["optimizer nu"]) == (["float32"], ["bfloat16"])
