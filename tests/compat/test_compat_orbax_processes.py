"""The drop-in for Orbax in two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ostraka.compat.orbax as ocp
from ostraka.testing import run_processes


class Own(ocp.CheckpointHandler):
    """Writes a file a process, as Grain's does."""

    def save(self, directory: Any, item: Any) -> None:  # pyright: ignore
        (directory / f"process_{jax.process_index()}").write_text(item)

    def restore(self, directory: Any, item: Any = None) -> Any:  # pyright: ignore
        names = sorted(path.name for path in directory.iterdir())
        return names, (directory / f"process_{jax.process_index()}").read_text()


class Halving(ocp.PyTreeCheckpointHandler):
    """A handler of Orbax's that was changed: each process has a directory of its own."""

    async def async_save(self, directory: Any, item: Any = None, save_args: Any = None) -> Any:  # pyright: ignore
        halves = jax.tree.map(lambda x: x / 2, item)
        return await super().async_save(directory, halves, save_args=save_args)


def train(root: str) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    whole = np.arange(8.0, dtype=np.float32)
    array = jax.make_array_from_callback((8,), sharding, lambda index: whole[index])
    tree = {"w": array, "step": 3}
    checkpointers = {"state": ocp.PyTreeCheckpointer(), "own": ocp.Checkpointer(Own())}
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(Path(root) / "m", checkpointers, options) as manager:
        text = f"of {jax.process_index()}"
        saved = [manager.save(step, {"state": tree, "own": text}) for step in (1, 2, 3, 3)]
        manager.wait_until_finished()
        steps = manager.all_steps()
        args = {"state": {"restore_args": ocp.checkpoint_utils.construct_restore_args(tree)}}
        found = manager.restore(3, items={"state": tree, "own": None}, restore_kwargs=args)
        shards = [np.asarray(shard.data).tolist() for shard in found.state["w"].addressable_shards]
        manager.delete(2)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(Path(root) / "one", {"w": array})
    checkpointer.wait_until_finished()
    try:
        checkpointer.save(Path(root) / "one", {"w": array})
        refused = False
    except ValueError:
        refused = True
    with ocp.CheckpointManager(Path(root) / "m") as manager:
        left = manager.all_steps()
    like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    again = checkpointer.restore(Path(root) / "one", like)["w"]
    assert again.sharding.is_equivalent_to(sharding, 1)
    own = {jax.process_index()}
    ocp.multihost.sync_global_processes("alone", processes=own)
    if jax.process_index() == 1:
        ocp.multihost.sync_global_processes("one of two", processes=own)
    ocp.multihost.sync_global_processes("both", processes={0, 1})
    wait = ocp.multihost.get_barrier_sync_fn()
    ocp.multihost.sync_global_processes("all", barrier_sync_fn=wait)
    assert ocp.multihost.is_jax_distributed_client_initialized()
    assert ocp.multihost.global_max([jax.process_index(), 1 - jax.process_index()]) == [1, 1]
    halved = ocp.AsyncCheckpointer(Halving())
    halved.save(Path(root) / "halved", tree)
    halved.wait_until_finished()
    half = halved.restore(Path(root) / "halved", restore_args=args["state"]["restore_args"])["w"]
    assert half.sharding.is_equivalent_to(sharding, 1)
    return {
        "half": [np.asarray(shard.data).tolist() for shard in half.addressable_shards],
        "saved": saved,
        "steps": steps,
        "own": found.own,
        "shards": shards,
        "refused": refused,
        "left": left,
    }


def test_a_run_of_two_processes(tmp_path: Path):
    results = run_processes(train, str(tmp_path), processes=2, devices_per_process=2)
    for process, result in enumerate(results):
        found = result.value
        assert found["saved"] == [True, True, True, False]
        assert found["steps"] == [2, 3]
        assert found["own"] == (["process_0", "process_1"], f"of {process}")
        first = process * 4.0
        assert found["shards"] == [[first, first + 1], [first + 2, first + 3]]
        assert found["half"] == [[first / 2, (first + 1) / 2], [first / 2 + 1, first / 2 + 1.5]]
        assert found["refused"] is True
        assert found["left"] == [3]
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert names == ["3"]
