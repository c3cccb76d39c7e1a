"""PyTorch's distributed checkpoint reader on our shards: the right bytes, or an error."""

import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-torch" / "bin" / "python"
RANKS = 2
SHARED = (
    *("float32", "float16", "bfloat16", "bool", "complex64"),
    *("int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
"""The dtypes that both have; those of 64 bits are numpy's."""
FOREIGN = ("float8_e3m4", "float8_e4m3b11fnuz", "int4", "uint4", "float4_e2m1fn", "int2")

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="NOT TESTED HERE: PyTorch. `make torch` installs it into .venv-torch",
)


def make_tree() -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    rng = np.random.default_rng(0)
    specs = [P("x", "y"), P("y"), P(None, "x"), P(), P(("x", "y"))]

    def array(dtype: str, spec: P) -> jax.Array:
        return jax.device_put(
            jnp.asarray(rng.integers(0, 2, (16, 8)) * 3 - 1).astype(dtype),
            NamedSharding(mesh, spec),
        )

    tree: dict[str, Any] = {
        dtype: array(dtype, specs[n % len(specs)]) for n, dtype in enumerate([*SHARED, *FOREIGN])
    }
    tree["nested"] = {"list": [array("float32", specs[0]), array("bfloat16", specs[3])]}
    tree["scalar"] = jnp.float32(0.5)
    tree |= {name: rng.integers(-9, 9, (8, 4)).astype(name) for name in ("int64", "float64")}
    tree["uint64"] = np.full((3,), 2**63, np.uint64)
    tree["complex128"] = np.full((4, 4), 1j)
    tree["compressed"] = jax.device_put(
        jnp.ones((1024, 256), jnp.float32), NamedSharding(mesh, P("x"))
    )
    return tree


def test_two_ranks_with_another_sharding_read_every_dtype_that_both_have(tmp_path: Path):
    tree = make_tree()
    ostraka.save(tmp_path / "c", tree, compress={"compressed": "zstd"})
    task: dict[str, Any] = {"arrays": {}, "foreign": {}}
    (shards,) = (tmp_path / "c").glob("shards-*")
    task["directory"] = str(shards)
    checkpoint = ostraka.open(tmp_path / "c")
    for number, path in enumerate(checkpoint):
        leaf = checkpoint[path]
        if path in FOREIGN or path in ("complex128", "compressed"):
            task["foreign"][path] = leaf.shape
            continue
        expected = np.asarray(leaf)
        file = tmp_path / f"{number}.npy"
        np.save(file, np.frombuffer(expected.tobytes(), np.uint8))
        task["arrays"][path] = (leaf.shape, str(leaf.dtype), str(file))
    answers = run_ranks(task, tmp_path / "meeting")
    assert [answer["wrong"] for answer in answers] == [[]] * RANKS
    for answer in answers:
        assert answer["raised"].keys() == {*FOREIGN, "complex128", "compressed"}
        assert all("Size mismatch" in message for message in answer["raised"].values())


def run_ranks(task: dict[str, Any], meeting: Path) -> list[dict[str, Any]]:
    program = [str(PYTHON), "-W", "ignore", str(ROOT / "tests" / "support" / "torch_rank.py")]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(RANKS), str(meeting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(json.dumps(task))
        rank.stdin.close()
        rank.stdin = None
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    failed = {n: outputs[n][1][-3000:] for n, rank in enumerate(ranks) if rank.returncode}
    assert not failed
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]
