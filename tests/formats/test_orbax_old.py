"""Steps that older versions of Orbax wrote, and items of `ArraySave` by any: read bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
import ostraka.compat.orbax as dropin
from orbax_cases import mesh_of, ocp, quiet
from ostraka.cli import main
from record_orbax import contents

DATA = Path(__file__).parents[1] / "data"
OLD = ["orbax-0.6.4", "orbax-0.11.6"]


def same(found: Any, wanted: Any) -> None:
    """The same structure; arrays bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert np.asarray(one).tobytes() == other.tobytes()
        else:
            assert (type(one), one) == (type(other), other)


@pytest.mark.parametrize("version", OLD)
def test_all_items_of_a_step_as_they_were(version: str):
    same(ostraka.restore(DATA / version / "7"), contents())
    found = ostraka.open(DATA / version / "7")
    same(np.asarray(found["table"]), contents()["table"])
    same(np.asarray(found["state/params/layers/0"]), contents()["state"]["params"]["layers"][0])


@pytest.mark.parametrize("version", OLD)
def test_the_latest_step_of_a_root(version: str):
    shown = CliRunner().invoke(main, ["show", str(DATA / version)])
    assert shown.exit_code == 0, shown.output
    assert "table" in shown.output


@pytest.mark.parametrize("version", OLD)
def test_onto_a_mesh(version: str):
    mesh = mesh_of(x=2)
    specs = {"table": P("x"), "state": {"params": {"kernel": P(None, "x")}}}
    like = {
        "table": jax.ShapeDtypeStruct(
            (4, 6), jnp.float32, sharding=NamedSharding(mesh, specs["table"])
        )
    }
    found = ostraka.restore(DATA / version / "7", like=like, only="table")
    assert found["table"].sharding.is_equivalent_to(like["table"].sharding, 2)
    same(np.asarray(found["table"]), contents()["table"])


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("to", ["ostraka", "orbax"])
def test_converted(version: str, to: Any, tmp_path: Path):
    ostraka.convert(DATA / version / "7", tmp_path / "out", to=to)
    same(ostraka.restore(tmp_path / "out"), contents())


@pytest.mark.parametrize("version", OLD)
def test_the_drop_in_goes_on_with_the_root(version: str, tmp_path: Path):
    shutil.copytree(DATA / version, tmp_path / "run")
    wanted = contents()
    args = dropin.args
    with dropin.CheckpointManager(tmp_path / "run", item_names=tuple(wanted)) as manager:
        assert manager.all_steps() == [7]
        found = manager.restore(
            7,
            args=args.Composite(
                state=args.StandardRestore(),
                averages=args.PyTreeRestore(),
                table=args.ArrayRestore(),
                counts=args.ArrayRestore(),
                about=args.JsonRestore(),
            ),
        )
        same({name: found[name] for name in wanted}, wanted)
        manager.save(8, args=args.Composite(table=args.ArraySave(jnp.ones(3))))
        manager.wait_until_finished()
        assert manager.all_steps() == [7, 8]


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """What the Orbax that is installed makes of `ArraySave`: in a step, alone in one, by itself."""
    with quiet():
        with ocp.CheckpointManager(tmp_path / "several") as manager:
            items = {"table": jnp.arange(24.0).reshape(4, 6), "counts": np.arange(5), "number": 7}
            saved = {name: ocp.args.ArraySave(item) for name, item in items.items()}
            manager.save(3, args=ocp.args.Composite(**saved))
        with ocp.CheckpointManager(tmp_path / "one") as manager:
            manager.save(1, args=ocp.args.ArraySave(jnp.arange(6.0)))
        checkpointer = ocp.Checkpointer(ocp.ArrayCheckpointHandler())
        checkpointer.save(tmp_path / "alone", args=ocp.args.ArraySave(jnp.ones((2, 3))))
    return tmp_path


def test_arrays_of_the_orbax_that_is_installed(arrays: Path):
    found = ostraka.restore(arrays / "several" / "3")
    same(found["counts"], np.arange(5))
    same(np.asarray(found["table"]), np.arange(24, dtype=np.float32).reshape(4, 6))
    assert found["number"] == 7
    same(np.asarray(ostraka.restore(arrays / "one" / "1")), np.arange(6, dtype=np.float32))
    same(np.asarray(ostraka.restore(arrays / "alone")), np.ones((2, 3), np.float32))
    ostraka.convert(arrays / "alone", arrays / "ours", to="ostraka")
    same(np.asarray(ostraka.restore(arrays / "ours")), np.ones((2, 3), np.float32))


def test_arrays_of_the_orbax_that_is_installed_by_the_drop_in(arrays: Path):
    args = dropin.args
    with dropin.CheckpointManager(arrays / "one") as manager:
        found = manager.restore(1, args=args.ArrayRestore())
    same(np.asarray(found), np.arange(6, dtype=np.float32))
    with dropin.CheckpointManager(arrays / "several") as manager:
        wanted = {name: args.ArrayRestore() for name in ("table", "counts", "number")}
        several = manager.restore(3, args=args.Composite(**wanted))
    same(np.asarray(several["counts"]), np.arange(5))
    assert several["number"] == 7
    found = dropin.Checkpointer(dropin.ArrayCheckpointHandler()).restore(arrays / "alone")
    same(np.asarray(found), np.ones((2, 3), np.float32))
