"""Loops in the style of Orbax's large users, roots that both libraries write to, own limits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training import train_state

import ostraka
import ostraka.compat.orbax

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet")]

OURS: Any = ostraka.compat.orbax
REAL: Any = orbax.checkpoint
both = pytest.mark.parametrize("ocp", [REAL, OURS], ids=["orbax", "ostraka"])


def state_at(step: int) -> dict[str, Any]:
    params = {"w": jnp.full((2, 2), float(step))}
    return {"params": params, "opt": optax.adam(0.1).init(params), "step": jnp.asarray(step)}


def equal(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


# In the style of the large users


@both
def test_a_loop_as_maxtext_has_it(ocp: Any, tmp_path: Path):
    import grain.python as grain

    source: Any = list(range(50))

    def make_iterator() -> Any:
        sampler = grain.SequentialSampler(50, grain.NoSharding())
        return iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))

    def make_manager() -> Any:
        handlers = {
            "items": ocp.PyTreeCheckpointHandler(
                save_concurrent_gb=8, restore_concurrent_gb=8, use_ocdbt=True, use_zarr3=True
            ),
            "iter": grain.PyGrainCheckpointHandler(),
        }
        return ocp.CheckpointManager(
            root,
            item_names=("items", "iter"),
            item_handlers=handlers,
            options=ocp.CheckpointManagerOptions(
                create=True,
                save_interval_steps=2,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(timeout_secs=60),
            ),
        )

    root = ocp.test_utils.erase_and_create_empty(tmp_path / "run")
    manager, data = make_manager(), make_iterator()
    for step in range(5):
        next(data)
        args = ocp.args.Composite(
            items=ocp.args.PyTreeSave(
                item=state_at(step),
                save_args=jax.tree.map(
                    lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), state_at(0)
                ),
                ocdbt_target_data_file_size=1 << 21,
            ),
            iter=grain.PyGrainCheckpointSave(data),
        )
        saved = manager.save(step, args=args, force=False)
        assert saved == (step % 2 == 0)
        assert not manager.reached_preemption(step)
    expected = next(data)
    manager.wait_until_finished()
    manager.close()

    manager, data = make_manager(), make_iterator()
    step = manager.latest_step()
    assert step == 4
    like = jax.eval_shape(lambda: state_at(0))
    restore_args = jax.tree.map(
        lambda leaf: ocp.type_handlers.ArrayRestoreArgs(
            sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            global_shape=leaf.shape,
            dtype=leaf.dtype,
        ),
        like,
    )
    restored = manager.restore(
        step,
        args=ocp.args.Composite(
            items=ocp.args.PyTreeRestore(item=like, restore_args=restore_args),
            iter=grain.PyGrainCheckpointRestore(data),
        ),
    )
    equal(restored.items if not callable(restored.items) else restored["items"], state_at(4))
    assert next(restored["iter"]) == expected
    manager.close()


@both
def test_a_manager_as_openpi_has_it(ocp: Any, tmp_path: Path):
    class CallbackHandler(ocp.AsyncCheckpointHandler):
        def save(self, directory: Any, args: Any) -> None:
            args.callback(directory)

        async def async_save(self, directory: Any, args: Any) -> list[Any]:
            work = asyncio.to_thread(self.save, directory, args)
            return [ocp.future.CommitFutureAwaitingContractedSignals(work)]

        def restore(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("only saves")

    @ocp.args.register_with_handler(CallbackHandler, for_save=True)
    class CallbackSave(ocp.args.CheckpointArgs):
        def __init__(self, callback: Any):
            self.callback = callback

    @ocp.args.register_with_handler(CallbackHandler, for_restore=True)
    class CallbackRestore(ocp.args.CheckpointArgs):
        pass

    def make_manager() -> Any:
        return ocp.CheckpointManager(
            tmp_path / "run",
            item_handlers={
                "assets": CallbackHandler(),
                "train_state": ocp.PyTreeCheckpointHandler(),
                "params": ocp.PyTreeCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=1,
                keep_period=5,
                create=False,
                async_options=ocp.AsyncOptions(timeout_secs=60),
            ),
        )

    (tmp_path / "run").mkdir()
    manager = make_manager()
    for step in (4, 5, 6, 7):
        state = state_at(step)
        params = state.pop("params")
        items = {
            "assets": lambda directory: (directory / "norm.json").write_text("{}"),
            "train_state": state,
            "params": {"params": params},
        }
        manager.save(
            step,
            args=ocp.args.Composite(
                assets=CallbackSave(items["assets"]),
                train_state=ocp.args.PyTreeSave(items["train_state"]),
                params=ocp.args.PyTreeSave(items["params"]),
            ),
        )
    manager.wait_until_finished()
    assert manager.all_steps() == [5, 7]
    like = state_at(0)
    like_params = {"params": like.pop("params")}
    found = manager.restore(7, items={"train_state": like, "params": like_params})
    equal(found["params"]["params"], state_at(7)["params"])
    # By its own path, as for inference.
    with ocp.PyTreeCheckpointer() as checkpointer:
        path = tmp_path / "run" / "7" / "params"
        metadata = checkpointer.metadata(path)
        item = {"params": metadata.item_metadata.tree["params"]}
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=jax.tree.map(
                lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), item
            ),
        )
        params = checkpointer.restore(path, args)["params"]
    equal(params, state_at(7)["params"])
    manager.close()


@both
def test_a_guide_of_flax(ocp: Any, tmp_path: Path):
    from flax.training import orbax_utils

    state = train_state.TrainState.create(
        apply_fn=print, params={"w": jnp.ones((2, 2))}, tx=optax.sgd(0.1, momentum=0.9)
    )
    checkpoint = {"model": state, "config": {"dimensions": np.array([5, 3])}, "data": [jnp.ones(3)]}
    save_args = orbax_utils.save_args_from_target(checkpoint)
    checkpointer = ocp.PyTreeCheckpointer()
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    manager = ocp.CheckpointManager(tmp_path / "run", checkpointer, options)
    for step in range(5):
        manager.save(step, checkpoint, save_kwargs={"save_args": save_args})
    assert manager.all_steps() == [3, 4]
    raw = manager.restore(manager.latest_step())
    assert set(raw["model"]) == {"step", "params", "opt_state"}
    assert isinstance(raw["model"]["opt_state"], list)
    empty = state.replace(params=jax.tree.map(jnp.zeros_like, state.params))
    target = {"model": empty, "config": {"dimensions": np.array([0, 0])}, "data": [jnp.zeros(3)]}
    restore_args = orbax_utils.restore_args_from_target(target)
    restored = manager.restore(4, items=target, restore_kwargs={"restore_args": restore_args})
    assert isinstance(restored["model"], train_state.TrainState)
    equal(restored["model"].params, state.params)
    manager.close()


@both
def test_flax_checkpoints_take_a_checkpointer(ocp: Any, tmp_path: Path):
    from flax.training import checkpoints

    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    checkpoints.save_checkpoint(
        tmp_path / "run", state_at(3), step=3, orbax_checkpointer=checkpointer, overwrite=True
    )
    found = checkpointer.restore(tmp_path / "run" / "checkpoint_3", item=state_at(0))
    equal(found, state_at(3))


# One root, both libraries


def save_with(ocp: Any, root: Path, steps: Any, **options: Any) -> list[int]:
    options.setdefault("max_to_keep", None)
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step in steps:
            assert manager.save(step, args=ocp.args.StandardSave(state_at(step)))
        manager.wait_until_finished()
        return manager.all_steps()


def test_both_libraries_in_one_run(tmp_path: Path):
    """Ours lists, restores and retains the steps of Orbax, which goes on beside ours."""
    root = tmp_path / "run"
    save_with(REAL, root, [1, 2])
    assert save_with(OURS, root, [3]) == [1, 2, 3]
    with OURS.CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            args = OURS.args.StandardRestore(state_at(0))
            equal(manager.restore(step, args=args), state_at(step))
        assert manager.item_metadata(1)["params"]["w"].shape == (2, 2)
    with REAL.CheckpointManager(root) as manager:
        args = REAL.args.StandardRestore(state_at(0))
        equal(manager.restore(2, args=args), state_at(2))
        with pytest.raises((KeyError, ValueError, FileNotFoundError)):
            manager.restore(3, args=args)
        assert manager.save(4, args=REAL.args.StandardSave(state_at(4)))
        manager.wait_until_finished()
        equal(manager.restore(4, args=args), state_at(4))
    assert save_with(OURS, root, [5], max_to_keep=2) == [4, 5]
    assert sorted(path.name for path in root.iterdir()) == ["4", "5"]


def test_composites_of_orbax_are_restored(tmp_path: Path):
    args = REAL.args
    options = REAL.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with REAL.CheckpointManager(tmp_path / "run", options=options) as manager:
        items = args.Composite(state=args.StandardSave(state_at(1)), config=args.JsonSave({"x": 1}))
        manager.save(1, args=items, metrics={"loss": 2.0}, custom_metadata={"y": 3})
    with OURS.CheckpointManager(tmp_path / "run") as manager:
        args = OURS.args
        wanted = args.Composite(state=args.StandardRestore(state_at(0)), config=args.JsonRestore())
        found = manager.restore(1, args=wanted)
        equal(found.state, state_at(1))
        assert found.config == {"x": 1}
        assert manager.metadata(1).custom_metadata == {"y": 3}
        assert manager.metrics(1) == {"loss": 2.0}


def test_what_the_drop_in_saved_opens_with_our_own_calls(tmp_path: Path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with OURS.CheckpointManager(tmp_path / "run") as manager:
        tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        manager.save(7, args=OURS.args.StandardSave(tree), metrics={"loss": 0.5})
    with ostraka.Manager(tmp_path / "run", read_only=True) as own:
        assert own.steps() == [7]
        assert own.metrics(7) == {"loss": 0.5}
    other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    ostraka.restore(tmp_path / "run", into={"model": other})
    np.testing.assert_array_equal(other.kernel[...], model.kernel[...])
    assert ostraka.verify(tmp_path / "run" / "7").ok


# Limits and errors


def test_a_failed_save_in_the_background_is_no_step(tmp_path: Path):
    root = tmp_path / "run"
    args = OURS.args.StandardSave(state_at(1))
    with OURS.CheckpointManager(root) as manager:
        assert manager.save(1, args=args)
        manager.wait_until_finished()
        (root / "2").write_text("in the way")

        def save_and_wait() -> None:
            manager.save(2, args=args)
            manager.wait_until_finished()

        with pytest.raises(OSError, match="run/2"):
            save_and_wait()
        assert manager.all_steps() == [1]
        (root / "2").unlink()
        assert manager.save(2, args=args)
    assert OURS.CheckpointManager(root).all_steps() == [1, 2]


def test_orbax_is_not_needed(tmp_path: Path):
    program = f"""
import sys
for name in ("orbax", "orbax.checkpoint", "etils", "etils.epath", "flax", "grain", "tensorstore"):
    sys.modules[name] = None
import ostraka.compat.orbax as ocp
from ostraka.compat.orbax import v1, type_handlers
import pathlib, numpy as np
with ocp.CheckpointManager({str(tmp_path)!r} + "/run") as manager:
    manager.save(0, args=ocp.args.StandardSave({{"a": np.ones(2)}}))
    manager.wait_until_finished()
    assert manager.restore(0)["a"].tolist() == [1, 1]
    assert isinstance(manager.directory, pathlib.Path)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
