"""What `ostraka plan` makes of its source: trees of all kinds, saved dtypes, names, odd sizes."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from cli_runs import assert_fails, run
from cli_runs import planned as answer
from ostraka import sharding


def make_all_kinds() -> dict[str, Any]:
    """A whole state, as it is saved: numbers and text beside arrays and a model."""
    return {
        "model": nnx.Linear(16, 8, rngs=nnx.Rngs(0)),
        "ema": jnp.zeros((16, 8)),
        "table": np.ones(5, np.int16),
        "step": 3,
        "rate": np.float32(0.5),
        "note": "héllo",
        "nothing": None,
        "shape": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16),
    }


def test_a_factory_may_return_whatever_can_be_saved(tmp_path: Path):
    factory = f"{Path(__file__).stem}:make_all_kinds"
    planned = answer(factory, "--mesh", "data=8", "--hosts", "1", "--rules", "fsdp")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tree = make_all_kinds() | {"shape": jnp.zeros((8, 4), jnp.bfloat16)}
    on_mesh = {name: tree[name] for name in ("model", "ema", "shape")}
    ostraka.save(tmp_path / "c", tree | sharding.place(on_mesh, mesh, sharding.fsdp("data")))
    saved = ostraka.plan(tmp_path / "c")
    assert planned["arrays"] == len(saved._write.leaves) == 6
    assert planned["data_bytes"] == saved.data_bytes
    assert planned["host_bytes"]["most"] == saved.bytes_by_process[0]
    assert planned["metadata_bytes"] == pytest.approx(saved.metadata_bytes, rel=0.01)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    kernel = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P("data", "model")))
    tree = {"kernel": kernel, **{f"bias_{n}": np.ones(5, np.float32) for n in range(30)}}
    path = tmp_path_factory.mktemp("source") / "c"
    ostraka.save(path, tree)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_saved_anew_in_a_dtype(tmp_path: Path, source: Path, dtype: str):
    planned = answer(source, "--mesh", "data=4,model=2", "--dtype", dtype)
    ostraka.save(tmp_path / "anew", ostraka.restore(source), dtype=dtype)
    saved = ostraka.plan(tmp_path / "anew")
    assert planned["host_bytes"]["most"] == saved.bytes_by_process[0]
    assert planned["metadata_bytes"] == pytest.approx(saved.metadata_bytes, rel=0.01)


def test_a_checkpoint_saved_anew_in_dtypes_by_path(tmp_path: Path, source: Path):
    """`plan` takes every rule that `save` takes, and makes the same of it."""
    rule = {"kernel": "bfloat16", "bias_*": jnp.float16}
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    planned = ostraka.plan(source, mesh=mesh, dtype=rule)
    ostraka.save(tmp_path / "anew", ostraka.restore(source), dtype=rule)
    assert planned.bytes_by_process == ostraka.plan(tmp_path / "anew").bytes_by_process
    with pytest.raises(ValueError, match=r"dtype=\{'kernels': …\} matches no floating"):
        ostraka.plan(source, mesh=mesh, dtype={"kernels": "bfloat16"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--mesh", "data=4,model=2", "--dtype", "int8"],
            "dtype is 'int8'; it must be a floating-point dtype, as bfloat16 is",
        ),
        (["--mesh", "x=8"], "has no axis 'data'; without rules everything is cut as it was"),
        (["--onto", "x=8"], "has no axis 'data'; a restore keeps the specs: name the axes as"),
        (["--onto", "data=3,model=2"], "into 3 parts along data of the mesh (data=3, model=2); a"),
        (["--compare", "--rules 'x"], "has a quote that is not closed"),
        (["--optimizer", "adam"], "has the optimizer that it was saved with"),
        (["--hosts", "2"], "to plan saving it anew, give a mesh, too (--mesh, mesh=)"),
        (["--max-file-bytes", "1MiB"], "to plan saving it anew, give a mesh, too (--mesh, mesh=)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_fit_a_checkpoint(source: Path, arguments: list[str], message: str):
    assert_fails(run("plan", source, *arguments), message)


def test_no_optimizer_is_none_for_a_checkpoint_too(source: Path):
    assert answer(source, "--optimizer", "none") == answer(source)


def test_names_are_there_for_scripts(source: Path):
    names = run("plan", "--names").stdout.split()
    for arguments in (["--names", "--json"], ["--json", "--names"]):
        assert json.loads(run("plan", *arguments).stdout) == {"schema": 1, "names": names}
    assert "llama-3.1-405b" in names


def test_a_state_that_no_computer_holds():
    with pytest.raises(ValueError, match="too large to be planned: leaf 'x' .* alone has"):
        ostraka.plan({"x": jax.ShapeDtypeStruct((10**15, 10**15), jnp.float32)})


def test_a_config_that_can_not_be_read(tmp_path: Path):
    (tmp_path / "config.json").mkdir()
    result = run("plan", tmp_path)
    expected = f"ostraka: can't read the config {tmp_path}/config.json: Is a directory\n"
    assert (result.exit_code, result.stderr) == (2, expected)
