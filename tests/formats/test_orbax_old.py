"""Steps that older versions of Orbax wrote, and items of `ArraySave` by any: read bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
import ostraka.compat.orbax as dropin
from cli_runs import run
from orbax_cases import mesh_of, ocp, quiet
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
def test_all_items_of_a_step_as_they_were(version: str, tmp_path: Path):
    step, wanted = DATA / version / "7", contents()
    same(ostraka.restore(step), wanted)
    found = ostraka.open(DATA / version)
    assert found.path == str(step), found.path
    same(np.asarray(found["table"]), wanted["table"])
    same(np.asarray(found["state/params/layers/0"]), wanted["state"]["params"]["layers"][0])
    shown = run("show", DATA / version)
    assert shown.exit_code == 0, shown.output
    assert "table" in shown.output
    sharding = NamedSharding(mesh_of(x=2), P("x"))
    like = {"table": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=sharding)}
    table = ostraka.restore(step, like=like, only="table")["table"]
    assert table.sharding.is_equivalent_to(sharding, 2)
    same(np.asarray(table), wanted["table"])
    for to in ("ostraka", "orbax"):
        ostraka.convert(step, tmp_path / to, to=to)
        same(ostraka.restore(tmp_path / to), wanted)


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


def test_arrays_of_the_orbax_that_is_installed(tmp_path: Path):
    """`ArraySave` in a step, alone in one, and by itself, read by us and by the drop-in."""
    table, args = np.arange(24, dtype=np.float32).reshape(4, 6), dropin.args
    with quiet():
        with ocp.CheckpointManager(tmp_path / "several") as manager:
            items = {"table": jnp.asarray(table), "counts": np.arange(5), "number": 7}
            saved = {name: ocp.args.ArraySave(item) for name, item in items.items()}
            manager.save(3, args=ocp.args.Composite(**saved))
        with ocp.CheckpointManager(tmp_path / "one") as manager:
            manager.save(1, args=ocp.args.ArraySave(jnp.asarray(table[0])))
        checkpointer = ocp.Checkpointer(ocp.ArrayCheckpointHandler())
        checkpointer.save(tmp_path / "alone", args=ocp.args.ArraySave(jnp.ones((2, 3))))
    ostraka.convert(tmp_path / "alone", tmp_path / "ours", to="ostraka")
    with dropin.CheckpointManager(tmp_path / "several") as manager:
        wanted = {name: args.ArrayRestore() for name in items}
        several = manager.restore(3, args=args.Composite(**wanted))
    with dropin.CheckpointManager(tmp_path / "one") as manager:
        one = manager.restore(1, args=args.ArrayRestore())
    alone = dropin.Checkpointer(dropin.ArrayCheckpointHandler()).restore(tmp_path / "alone")
    for found in (ostraka.restore(tmp_path / "several" / "3"), several):
        same(np.asarray(found["table"]), table)
        same(np.asarray(found["counts"]), np.arange(5))
        assert found["number"] == 7
    for found in (ostraka.restore(tmp_path / "one" / "1"), one):
        same(np.asarray(found), table[0])
    for found in (ostraka.restore(tmp_path / "alone"), ostraka.restore(tmp_path / "ours"), alone):
        same(np.asarray(found), np.ones((2, 3), np.float32))
