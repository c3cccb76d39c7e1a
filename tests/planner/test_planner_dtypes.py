"""Which dtypes are planned: those that optax really makes, shown, and what float32 would take."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import ostraka
from cli_runs import run
from ostraka import plan

LLAMA_70B = 70_553_706_496


def make(dtype: Any) -> nnx.Module:
    return nnx.eval_shape(lambda: nnx.Linear(256, 512, param_dtype=dtype, rngs=nnx.Rngs(0)))


def dtypes(planned: ostraka.Plan) -> dict[str, list[str]]:
    return {name: list(group) for name, group in planned.bytes_by_group.items()}


def test_what_70b_with_adamw_takes():
    planned = plan("llama-3.1-70b", mesh={"data": 64, "model": 8}, optimizer="adamw")
    assert dtypes(planned) == {
        "model": ["bfloat16"],
        "optimizer": ["int32", "uint32"],
        "optimizer mu": ["bfloat16"],
        "optimizer nu": ["bfloat16"],
    }
    assert planned.data_bytes == 3 * 2 * LLAMA_70B + 8
    moments = planned.data_bytes_in_float32(parameters=False)
    everything = planned.data_bytes_in_float32(parameters=True)
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
    result = run("plan", "llama-3.1-70b", "--optimizer", "adamw")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["model", "131.4", "GiB", "bfloat16"] in [line[:4] for line in lines]
    assert ["optimizer", "mu", "131.4", "GiB", "bfloat16"] in [line[:5] for line in lines]
    assert "with float32 moments       657.1 GiB  --optimizer-dtype float32" in result.stdout
    assert "all in float32             788.5 GiB  --dtype float32" in result.stdout
    wide = run("plan", "llama-3.1-70b", "--optimizer", "adamw", "--optimizer-dtype", "float32")
    assert "with float32 moments" not in wide.stdout
    assert "all in float32" in wide.stdout
    assert "in float32" not in run("plan", "gpt2", "--optimizer", "adamw").stdout
    result = run("plan", "llama-3.1-70b", "--optimizer", "adamw", "--json")
    found = json.loads(result.stdout)["variants"][0]
    size = 2 * LLAMA_70B
    assert found["groups"]["optimizer mu"] == {"bytes": size, "dtypes": {"bfloat16": size}}
    assert found["data_bytes_in_float32"] == {
        "optimizer": 10 * LLAMA_70B + 8,
        "everything": 12 * LLAMA_70B + 8,
    }
    weights = json.loads(run("plan", "llama-3.1-70b", "--json").stdout)["variants"][0]
    assert weights["data_bytes_in_float32"] is None


@pytest.mark.parametrize(
    "tree", [make("bfloat16"), {"w": jax.ShapeDtypeStruct((8, 4), "bfloat16")}]
)
def test_an_optimizer_in_float32_beside_a_model_in_bfloat16(tree: Any):
    planned = plan(tree, optimizer="adamw", optimizer_dtype="float32")
    found = dtypes(planned)
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
