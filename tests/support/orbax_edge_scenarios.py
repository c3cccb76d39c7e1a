"""More scenarios: the edges of Orbax, where a drop-in gives wrong values before it fails."""

from __future__ import annotations

import asyncio
import datetime
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from orbax_scenarios import manager_of, mesh, same, save_steps, saved, scenario, tree


@scenario("transform_utils.merge_trees, intersect_trees, tree.to_flat_dict", "plain Python")
def trees_with_empty_nodes(ocp: Any, d: Path) -> None:
    """ignores empty nodes; lists become dicts without a target; shapes, flat dicts"""
    merge, intersect = ocp.transform_utils.merge_trees, ocp.transform_utils.intersect_trees
    one, two = {"a": 1, "b": {"c": 2}}, {"b": {"c": 3}, "d": 4}
    assert intersect(one, two) == {"b": {"c": 3}}
    assert merge(one, two) == {"a": 1, "b": {"c": 3}, "d": 4}
    for empty in ({}, None, []):
        assert merge({"a": 1}, empty) == {"a": 1}
        assert merge(empty, {"a": 1}) == {"a": 1}
        assert intersect({"a": 1}, empty) == {}
    assert merge({"a": 1, "b": {}}, {"b": {"c": 2}}) == {"a": 1, "b": {"c": 2}}
    assert merge({"b": {"c": 2}}, {"b": {}}) == {"b": {"c": 2}}
    assert merge({"a": 1}, {"a": None}) == {"a": 1}
    assert intersect({"a": None}, {"a": 1}) == {}
    assert merge([1, 2], [3]) == {"0": 3, "1": 2}
    assert merge({"a": 1}, {"b": 2}, target={"a": 0, "b": 0}) == {"a": 1, "b": 2}
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree())
    assert (shapes["w"].shape, shapes["w"].dtype) == ((2, 3), jnp.float32)
    nested = {"a": {"b": 1, "c": [2, 3]}}
    flat = ocp.tree.to_flat_dict(nested, sep="/")
    assert flat == {"a/b": 1, "a/c/0": 2, "a/c/1": 3}
    assert ocp.tree.from_flat_dict(flat, target=nested, sep="/") == nested
    assert ocp.tree.serialize_tree({"a": (1, 2)}, keep_empty_nodes=True) == {"a": [1, 2]}


@scenario("apply_transformations, transform_utils", "rename=, or plain Python")
def transformations(ocp: Any, d: Path) -> None:
    """keys are regular expressions; `use_fallback` takes the other tree"""
    original, fallback = {"a": 1, "b": 2, "c": {"d": 3}}, ocp.Transform(use_fallback=True)
    apply = ocp.apply_transformations
    renamed = {r"n(.*)": ocp.Transform(original_key=r"c/\1")}
    assert apply(original, renamed, {"a": 0, "nd": 0}) == {"a": 1, "nd": 3}
    assert apply(original, {"a": fallback}, {"a": 10, "b": 20}) == {"a": 10, "b": 2}
    assert apply(original, {"a": fallback}, {"a": 10, "b": 20}, False) == {"a": 1, "b": 20}
    with pytest.raises(ValueError, match="use_fallback"):
        apply(original, {"z": fallback}, {"z": 10}, False)
    assert apply(original, {}, {"z": 10, "a": 0}) == {"z": 10, "a": 1}
    assert apply(original, {}, {"a": None, "b": 0, "e": {}}) == {"a": None, "b": 2, "e": {}}
    assert apply(original, {}, {}) == {}
    subtree = {"n": ocp.Transform(original_key="c")}
    assert apply(original, subtree, {"n": {"d": 0}}) == {"n": {"d": 0}}
    several = {r"(.*)": ocp.Transform(multi_value_fn=lambda key, of: (key, of["a"] + of["b"]))}
    assert apply(original, several, {"x": {"y": 0}}) == {"x": {"y": ("x/y", 3)}}


@scenario("RestoreTransform", "rename=, or plain Python")
def restores_with_transforms(ocp: Any, d: Path) -> None:
    """functions receive what their RestoreArgs ask for; their results are kept"""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    checkpointer.save(d / "a", {"a": np.arange(4), "b": np.arange(2), "c": {"d": np.ones(1)}})
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    zeros, fallback = np.zeros(3), ocp.Transform(use_fallback=True)

    def restore(item: Any, transforms: Any, args: Any = as_numpy, default: bool = True) -> Any:
        asked = ocp.args.PyTreeRestore(
            item, dict.fromkeys(item, args), transforms, transforms_default_to_original=default
        )
        return checkpointer.restore(d / "a", args=asked)

    both = {"a": zeros, "z": zeros}
    same(restore(both, {}), {"a": np.arange(4), "z": zeros})
    same(restore(both, {}, default=False), both)
    same(restore({"a": zeros}, {"a": fallback}, default=False), {"a": np.arange(4)})
    with pytest.raises(ValueError, match="use_fallback"):
        restore({"z": zeros}, {"z": fallback}, default=False)

    seen: list[Any] = []

    def halve(value: Any) -> Any:
        seen.append(value.dtype)
        return value / 2

    small = ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.int8)
    found = restore({"a": zeros}, {"a": ocp.Transform(value_fn=halve)}, small)
    same(found, {"a": np.arange(4).astype(np.int8) / 2})
    assert seen == [np.int8]

    def total(key: str, tree: Any, args: Any) -> Any:
        assert (key, args) == ("z", small)
        return tree["c"]["d"] + tree["b"]

    inputs = {"b": as_numpy, "c/.*": as_numpy}
    several = ocp.RestoreTransform(multi_value_fn=total, multi_value_fn_input_args=inputs)
    same(restore({"z": zeros}, {"z": several}, small), {"z": np.array([1.0, 2.0])})
    for lacking in (ocp.Transform, ocp.RestoreTransform):
        with pytest.raises(ValueError, match="RestoreTransform|multi_value_fn_input_args"):
            restore({"z": zeros}, {"z": lacking(multi_value_fn=total)})


@scenario("v1.metadata, pytree_metadata, checkpointables_metadata", "ostraka.open(path)")
def v1_loads_what_metadata_says(ocp: Any, d: Path) -> None:
    """a template with NumPy, 64-bit values, numbers, strings, keys and shardings"""
    v1 = ocp.v1
    where = NamedSharding(mesh(), PartitionSpec("x"))
    state = {
        "wide": np.array([2**40, 3]),
        "exact": np.array([0.1]),
        "jax": jax.device_put(jnp.arange(4.0), where),
        "int": 5,
        "float": 0.5,
        "text": "t",
    }
    v1.save(d / "a", state, custom_metadata={"x": 1})
    about = v1.metadata(d / "a")
    assert (about.metadata["wide"].shape, about.metadata["wide"].dtype) == ((2,), np.int64)
    assert about.metadata["jax"].sharding == where
    assert about.custom_metadata == {"x": 1}
    assert set(v1.checkpointables_metadata(d / "a").metadata) == {"state"}
    assert v1.pytree_metadata(d / "a").metadata["wide"].shape == (2,)
    for module in (v1, ocp):
        outline = module.arrays.to_shape_dtype_struct(jnp.ones((2, 3)))
        assert (outline.shape, outline.dtype) == ((2, 3), jnp.float32)
    assert {k: v for k, v in about.metadata.items() if k in ("int", "float", "text")} == {
        "int": 0,
        "float": 0.0,
        "text": "string",
    }
    for asked in (about, about.metadata):
        found = v1.load(d / "a", asked)
        same(found, state)
        assert found["jax"].sharding == where
    v1.save(d / "k", {"key": jax.random.key(3)})
    found = v1.load(d / "k", v1.metadata(d / "k"))
    assert jnp.issubdtype(found["key"].dtype, jax.dtypes.prng_key)


@scenario("RestoreArgs(restore_type=type(x))", "like=")
def restore_types(ocp: Any, d: Path) -> None:
    """`type(x)` of an array means `jax.Array` with its sharding; other types raise"""
    where = NamedSharding(mesh(), PartitionSpec("x"))
    x = jax.device_put(jnp.arange(4.0), where)
    checkpointer = saved(ocp, d / "a", {"x": x})
    for args in (
        ocp.RestoreArgs(restore_type=type(x)),
        ocp.ArrayRestoreArgs(restore_type=type(x), sharding=where),
    ):
        for item in (None, {"x": x}):
            found = checkpointer.restore(d / "a", item=item, restore_args={"x": args})
            same(found, {"x": x})
            assert found["x"].sharding == where
    checkpointer.save(d / "n", {"n": np.array(3), "s": "text"})

    def restore(**kinds: Any) -> Any:
        args = {k: ocp.RestoreArgs(restore_type=v) for k, v in kinds.items()}
        asked = ocp.args.PyTreeRestore(dict.fromkeys(kinds, 0), args, partial_restore=True)
        return checkpointer.restore(d / "n", args=asked)

    assert restore(n=np.float32)["n"] == np.float32(3)
    assert type(restore(n=np.float32)["n"]) is np.float32
    for wrong in ({"n": list}, {"n": object}, {"n": str}, {"s": int}, {"s": np.ndarray}):
        with pytest.raises(ValueError, match="TypeHandler lookup failed|NOT_FOUND|was saved, and"):
            restore(**wrong)


@scenario("SaveArgs(dtype=) under jax.set_mesh", "ostraka.save(dtype=)")
def casts_under_a_mesh(ocp: Any, d: Path) -> None:
    """`dtype` casts arrays on other devices than those of the current mesh"""
    where = [
        NamedSharding(mesh(), PartitionSpec("x")),
        NamedSharding(Mesh(np.array(jax.devices()[4:]), ("y",)), PartitionSpec("y")),
        SingleDeviceSharding(jax.devices()[5]),
    ]
    state = {f"{n}": jax.device_put(jnp.arange(4.0), at) for n, at in enumerate(where)}
    checkpointer = ocp.PyTreeCheckpointer()
    short, small = jnp.dtype("bfloat16"), jnp.dtype("int8")
    with jax.set_mesh(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])):
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(dtype=short), state)
        checkpointer.save(d / "a", state, save_args=save_args)
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(dtype=small), state)
        found = checkpointer.restore(d / "a", restore_args=restore_args)
    same(checkpointer.restore(d / "a"), jax.tree.map(lambda x: x.astype(short), state))
    same(found, jax.tree.map(lambda x: x.astype(small), state))
    assert [found[f"{n}"].sharding for n in range(3)] == where


@scenario(
    "checkpoint_utils.checkpoints_iterator, wait_for_new_checkpoint",
    "manager.watch(newest_only=True)",
)
def waits_for_a_checkpoint(ocp: Any, d: Path) -> None:
    """the newest step, then newer ones; `until_step`; `timeout`, `timeout_fn`"""
    wait, iterate = (
        ocp.checkpoint_utils.wait_for_new_checkpoint,
        ocp.checkpoint_utils.checkpoints_iterator,
    )
    root = epath.Path(d / "m")
    with wait(root, timeout=0) as step:
        assert step == -1
    assert list(iterate(d / "none", timeout=0.1)) == []
    asked: list[int] = []

    def is_over() -> bool:
        asked.append(1)
        return len(asked) > 1

    with manager_of(ocp, d / "m", enable_async_checkpointing=False) as manager:
        save_steps(ocp, manager, [0, 5])
        with wait(root) as step:
            assert step == 5
            assert manager.restore(step)["s"].shape == (2,)
        with wait(root, until_step=5, timeout=0) as step:
            assert step == 5
        last = {"timeout": 0, "timeout_fn": is_over, "seconds_to_sleep": 0}
        with wait(root, until_step=6, **last) as step:
            assert step == -1
        assert len(asked) == 2
        seen: list[int] = []
        for step in iterate(d / "m", timeout=0.1, timeout_fn=lambda: len(seen) == 2):
            if not seen:
                save_steps(ocp, manager, [6])
            seen.append(step)
        assert seen == [5, 6]


@scenario("EveryNSteps, EveryNStepsClosest, LatestDuration, BestN", "keep_every=, when=")
def policies_that_keep(ocp: Any, d: Path) -> None:
    """the steps that each policy keeps"""
    managers = ocp.checkpoint_managers
    policies = managers.preservation_policy
    now = datetime.datetime.now(tz=datetime.UTC)
    steps = [0, 3, 7, 10, 11, 19, 20, 33]
    infos = [
        SimpleNamespace(
            step=step,
            time=now - datetime.timedelta(hours=len(steps) - n),
            metrics={"x": step % 7} if n % 3 else None,
        )
        for n, step in enumerate(steps)
    ]

    def kept(policy: Any, count: int = len(steps)) -> list[int]:
        context = policies.PreservationContext()
        stays = policy.should_preserve(infos[:count], context=context)
        return [step for step, stay in zip(steps, stays, strict=False) if stay]

    assert kept(managers.EveryNSteps(10)) == [0, 10, 20]
    assert kept(managers.EveryNSteps(10, max_to_keep=2)) == [10, 20]
    assert kept(managers.EveryNSteps(7, exact_interval=False)) == [0, 7, 19, 33]
    assert kept(managers.EveryNSteps(7, False, 2)) == [19, 33]
    assert kept(managers.EveryNSteps(7, False, 0)) == [0, 7, 19, 33]
    assert kept(managers.EveryNStepsClosest(10)) == [0, 10, 20, 33]
    assert kept(managers.EveryNStepsClosest(4, max_to_keep=3)) == [11, 20, 33]
    assert kept(managers.EveryNStepsClosest(10), 6) == [0, 10, 19]
    assert kept(managers.LatestDuration(datetime.timedelta(hours=3.5))) == [19, 20, 33]
    assert kept(managers.LatestDuration(datetime.timedelta(minutes=1))) == []
    assert kept(managers.LatestDuration(datetime.timedelta(minutes=1)), 0) == []

    def best(**options: Any) -> Any:
        return managers.BestN(get_metric_fn=lambda m: m["x"], **options)

    assert kept(best(n=0)) == []
    assert kept(best(n=None)) == steps
    assert kept(best(n=9, keep_checkpoints_without_metrics=False)) == steps
    assert kept(best(n=2, keep_checkpoints_without_metrics=False)) == [19, 33]
    assert kept(best(n=1, reverse=True)) == [0, 7, 10, 20]
    with pytest.raises(ValueError, match="interval_steps must not be 0"):
        kept(managers.EveryNSteps(0))


@scenario("todelete_subdir", "none: steps are deleted")
def steps_that_are_put_aside(ocp: Any, d: Path) -> None:
    """moves deleted steps to a directory, unless it has one of the same name"""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, todelete_subdir="gone")
    with ocp.CheckpointManager(d / "m", options=options) as manager:
        for step in (0, 1, 2):
            manager.save(step, args=ocp.args.StandardSave({"a": np.full(2, step)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
        manager.delete(2)
        assert sorted(child.name for child in (d / "m" / "gone").iterdir()) == ["0", "1", "2"]
        manager.save(2, args=ocp.args.StandardSave({"a": np.full(2, 7)}))
        manager.wait_until_finished()
        with pytest.raises(OSError, match="gone/2"):
            manager.delete(2)
    with ocp.CheckpointManager(d / "m" / "gone") as manager:
        assert manager.all_steps() == [0, 1, 2]
        np.testing.assert_array_equal(manager.restore(2)["a"], np.full(2, 2))


@scenario("handlers: async_save, and subclasses that call it", "ostraka.save_async")
def handlers_that_save_in_the_background(ocp: Any, d: Path) -> None:
    """`async_save` returns futures; a subclass changes the saved and restored values"""
    handler = ocp.PyTreeCheckpointHandler()
    assert isinstance(handler, ocp.AsyncCheckpointHandler)
    (d / "a").mkdir()
    directory = epath.Path(d / "a")
    for future in asyncio.run(handler.async_save(directory, args=ocp.args.PyTreeSave(tree()))):
        future.result()
    handler.finalize(directory)
    same(handler.restore(directory), tree())

    class Doubling(ocp.PyTreeCheckpointHandler):
        async def async_save(self, directory: Any, args: Any) -> Any:
            doubled = jax.tree.map(lambda x: x * 2, args.item)
            return await super().async_save(directory, args=ocp.args.PyTreeSave(doubled))

        def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().restore(directory, *args, **kwargs)
            return {"found": found}

    expected = {"found": jax.tree.map(lambda x: x * 2, tree())}
    save_args: Any = type("Save", (ocp.args.PyTreeSave,), {})
    restore_args: Any = type("Restore", (ocp.args.PyTreeRestore,), {})
    ocp.args.register_with_handler(Doubling, for_save=True)(save_args)
    ocp.args.register_with_handler(Doubling, for_restore=True)(restore_args)
    with ocp.AsyncCheckpointer(Doubling()) as checkpointer:
        checkpointer.save(d / "x", args=save_args(tree()))
        checkpointer.wait_until_finished()
        same(checkpointer.restore(d / "x", args=restore_args()), expected)
    with ocp.CheckpointManager(d / "m", item_handlers=Doubling()) as manager:
        manager.save(0, args=save_args(tree()))
        manager.wait_until_finished()
        same(manager.restore(0, args=restore_args()), expected)


@scenario("args.ArraySave, NumpyRandomKeySave, JaxRandomKeySave, their handlers", "in the tree")
def handlers_by_position(ocp: Any, d: Path) -> None:
    """accepts file names by position and ignores them"""
    args, state = ocp.args, np.random.RandomState(3).get_state()
    key = jax.random.key(3)
    made: Any = {
        "json": (ocp.JsonCheckpointHandler("x.json"), args.JsonSave({"a": [1]})),
        "array": (ocp.ArrayCheckpointHandler("x"), args.ArraySave(jnp.arange(3))),
        "numpy": (ocp.NumpyRandomKeyCheckpointHandler("x"), args.NumpyRandomKeySave(state)),
        "jax": (ocp.JaxRandomKeyCheckpointHandler("x"), args.JaxRandomKeySave(key)),
        "tree": (ocp.PyTreeCheckpointHandler("x"), args.PyTreeSave(tree())),
    }
    handlers = {name: handler for name, (handler, _) in made.items()}
    with ocp.CheckpointManager(d / "m", item_handlers=handlers) as manager:
        manager.save(0, args=args.Composite(**{name: save for name, (_, save) in made.items()}))
        manager.wait_until_finished()
        wanted = {
            "json": args.JsonRestore(),
            "array": args.ArrayRestore(),
            "numpy": args.NumpyRandomKeyRestore(),
            "jax": args.JaxRandomKeyRestore(None),
            "tree": args.PyTreeRestore(),
        }
        found = manager.restore(0, args=args.Composite(**wanted))
    assert (found.json, found.jax) == ({"a": [1]}, key)
    same(found.array, jnp.arange(3))
    same(list(found.numpy), list(state))
    same(found.tree, tree())


@scenario("grain.checkpoint.CheckpointSave, CheckpointRestore", "the iterator in the tree")
def grain_args_of_ones_own(ocp: Any, d: Path) -> None:
    """Grain's args, and a subclass with a custom handler, as in MaxText"""
    import grain.python as grain

    class Handler(grain.PyGrainCheckpointHandler):
        def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
            (directory / "where.json").write_text(args.item.get_state().decode())

        def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
            args.item.set_state((directory / "where.json").read_text().encode())
            return args.item

    @ocp.args.register_with_handler(Handler, for_save=True)
    class Save(grain.PyGrainCheckpointSave):
        pass

    @ocp.args.register_with_handler(Handler, for_restore=True)
    class Restore(grain.PyGrainCheckpointRestore):
        pass

    def make() -> Any:
        source: Any = range(20)
        loader = grain.DataLoader(
            data_source=source,
            sampler=grain.SequentialSampler(20, grain.NoSharding()),
            worker_count=0,
        )
        return iter(loader)

    data = make()
    assert [next(data) for _ in range(3)] == [0, 1, 2]
    with ocp.CheckpointManager(d / "m", item_names=("state", "data")) as manager:
        both = ocp.args.Composite(state=ocp.args.PyTreeSave(tree()), data=Save(data))
        manager.save(0, args=both)
        manager.wait_until_finished()
        found = manager.restore(0, args=ocp.args.Composite(data=Restore(make())))
        assert next(found.data) == 3
    with ocp.CheckpointManager(d / "n") as manager:
        manager.save(0, args=ocp.args.Composite(data=grain.PyGrainCheckpointSave(data)))
        manager.wait_until_finished()
        wanted = ocp.args.Composite(data=grain.PyGrainCheckpointRestore(make()))
        assert next(manager.restore(0, args=wanted).data) == 3


@scenario("multihost", "jax.distributed")
def questions_about_processes(ocp: Any, d: Path) -> None:
    """the process index, barriers, and what Keras and MaxText call"""
    assert ocp.multihost.process_index() == 0
    assert ocp.multihost.is_primary_host(0)
    ocp.multihost.sync_global_processes("here")
    multihost = importlib.import_module(f"{ocp.__name__}._src.multihost.multihost")
    assert not multihost.is_jax_distributed_client_initialized()
    with pytest.raises(ValueError, match=r"jax\.distributed\.initialize"):
        multihost.get_jax_distributed_client()
    assert not multihost.is_pathways_backend()
    assert not multihost.is_pathways_controller()
    assert multihost.should_skip_process_sync()
    multihost.get_barrier_sync_fn(processes={0})(key="a", timeout_ms=1)
    multihost.sync_global_processes("b", timeout=1, processes={0}, barrier_sync_fn=None)
    assert multihost.unique_barrier_key("k", prefix="p", suffix="s") == "p_k.s"
    assert multihost.unique_processes_from_devices(np.array(jax.devices())) == {0}
    assert multihost.process_index_from_device(jax.devices()[1]) == 0
    assert multihost.coordination_timeout() == 300
    assert multihost.global_max([3, 1]) == [3, 1]


@scenario("CheckpointManager(logger=)", "on_record=")
def loggers(ocp: Any, d: Path) -> None:
    """a logger receives an entry for each save and restore"""
    entries: list[Any] = []

    class Own(ocp.logging.AbstractLogger):
        def log_entry(self, entry: Any) -> None:
            entries.append(entry)

    logger = ocp.logging.CompositeLogger(Own(), ocp.logging.StandardLogger())
    with ocp.CheckpointManager(d / "m", logger=logger) as manager:
        manager.save(3, args=ocp.args.StandardSave({"a": np.ones(2)}))
        manager.wait_until_finished()
        manager.restore(3)
    found = [entry for entry in entries if isinstance(entry, dict) and "event_type" in entry]
    assert [(entry["event_type"], entry["step"]) for entry in found] == [
        ("save", 3),
        ("restore", 3),
    ]
    assert found[0]["checkpoint_manager_blocking_duration_secs"] > 0
    assert found[1]["checkpoint_manager_duration_secs"] > 0


@scenario("type_handlers.register_type_handler, TypeHandler, ScalarHandler", "get_state, set_state")
def own_types(ocp: Any, d: Path) -> None:
    """a leaf of a custom type, with a custom handler or a subclass of a built-in one"""

    class Word:
        def __init__(self, text: str):
            self.text = text

    for base in (ocp.type_handlers.TypeHandler, ocp.type_handlers.ScalarHandler):

        class Handler(base):
            def typestr(self) -> str:
                return "Word"

            async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
                for value, info in zip(values, infos, strict=True):
                    (info.parent_dir / f"{info.name}.txt").write_text(value.text)
                return []

            async def deserialize(self, infos: Any, args: Any = None) -> Any:
                return [Word((info.parent_dir / f"{info.name}.txt").read_text()) for info in infos]

            async def metadata(self, infos: Any) -> Any:
                return [None] * len(infos)

        with ocp.test_utils.global_type_handler_registry_context():
            ocp.type_handlers.register_type_handler(Word, Handler(), override=True)
            path = d / base.__name__
            checkpointer = saved(ocp, path, {"word": Word("hello"), "x": jnp.ones(2)})
            args = {"word": ocp.RestoreArgs(restore_type=Word), "x": ocp.RestoreArgs()}
            for found in (
                checkpointer.restore(path),
                checkpointer.restore(path, restore_args=args),
            ):
                assert found["word"].text == "hello"
                np.testing.assert_array_equal(found["x"], np.ones(2))


@scenario("type_handlers, utils, step: small questions", "none")
def small_questions(ocp: Any, d: Path) -> None:
    """questions of T5X, Pax and others about values, names, keys and steps"""
    types, utils, step = ocp.type_handlers, ocp.utils, ocp.step
    assert [types.is_supported_empty_value(v) for v in (None, {}, [], (), 0, "", {"a": 1})] == [
        *[True] * 4,
        *[False] * 3,
    ]
    context = types.get_ts_context(file_io_concurrency_limit=4)
    types.register_standard_handlers_with_options(use_ocdbt=True, ts_context=context)
    assert types.create_type_handler_registry((int, types.ScalarHandler())).has(int)
    for text in (utils.leaf_placeholder("a.b"), "AGGREGATED://a.b"):
        assert utils.leaf_is_placeholder(text)
        assert utils.name_from_leaf_placeholder(text) == "a.b"
    assert not utils.leaf_is_placeholder("a.b")
    with pytest.raises(ValueError, match="prefix|does not begin with"):
        utils.name_from_leaf_placeholder("a.b")
    path, _ = jax.tree_util.tree_flatten_with_path({"a": [1]})[0][0]
    assert [utils.is_dict_key(key) for key in path] == [True, False]
    assert [utils.is_sequence_key(key) for key in path] == [False, True]
    assert [utils.get_key_name(key) for key in path] == ["a", 0]
    assert utils.tuple_path_from_keypath(path) == ocp.tree.str_keypath(path) == ("a", "0")
    with ocp.CheckpointManager(d / "m") as manager:
        for number in (3, 5):
            manager.save(number, args=ocp.args.StandardSave({"a": np.ones(2)}))
        assert ocp.checkpoint_manager.METADATA_ITEM_NAME == "metadata"
    naming = step.standard_name_format()
    assert step.latest_step_metadata(d / "m", naming).step == 5
    assert step.maybe_find_step_metadata(d / "m", naming, step=3).path.name == "3"
    assert step.maybe_find_step_metadata(d / "m", naming, step=4) is None
    assert not types.is_ocdbt_checkpoint(d)
    made = list(step.build_step_metadatas([d, d / "x"], lambda p: p if p == d else None))
    assert made == [d]
    assert ocp.checkpoint_manager.is_async_checkpointer(ocp.StandardCheckpointer())
    assert not ocp.checkpoint_manager.is_async_checkpointer(ocp.PyTreeCheckpointer())


@scenario("test_utils", "none")
def helpers_of_tests(ocp: Any, d: Path) -> None:
    """trees over devices, empty directories, files of an interrupted save"""
    (d / "x").mkdir()
    (d / "x" / "file").write_text("a")
    made = ocp.test_utils.erase_and_create_empty(d / "x")
    assert list((d / "x").iterdir()) == []
    assert (made / "y").name == "y"
    utils, case = ocp.test_utils, absltest.TestCase()
    plain = utils.setup_pytree(add=2)
    assert plain["c"]["e"].shape == (4, 4)
    assert plain["a"][0] == 2
    sharded, meshes, axes = utils.setup_sharded_pytree()
    assert sharded["b"].sharding == NamedSharding(meshes["b"], axes["b"])
    utils.assert_array_equal(case, sharded["b"], sharded["b"])
    larger = utils.apply_function(sharded, lambda x: x + 1)
    utils.assert_tree_equal(case, jax.tree.map(lambda x: x + 1, sharded), larger)
    with pytest.raises(AssertionError, match="not equal"):
        utils.assert_tree_equal(case, sharded, larger)
    left = utils.save_fake_tmp_dir(epath.Path(d / "m"), 7, "params", ["sub"])
    assert (left / "sub").is_dir()
    assert left.parent.name == "7.orbax-checkpoint-tmp"
    with ocp.CheckpointManager(d / "m") as manager:
        assert manager.all_steps() == []


@scenario("v1.handlers, v1.options.CheckpointablesOptions", "values and objects in the tree")
def v1_handlers(ocp: Any, d: Path) -> None:
    """JSON items by name, custom handlers for a name or a type"""
    v1 = ocp.v1

    class Word:
        def __init__(self, text: str):
            self.text = text

    class WordHandler(v1.handlers.CheckpointableHandler):
        async def save(self, directory: Any, checkpointable: Any) -> Any:
            async def write() -> None:
                path = await directory.await_creation()
                (path / "word.txt").write_text(checkpointable.text)

            return write()

        async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
            async def read() -> Any:
                return Word((directory / "word.txt").read_text())

            return read()

        async def metadata(self, directory: Any) -> Any:
            return "a word"

        def is_handleable(self, checkpointable: Any) -> bool:
            return isinstance(checkpointable, Word)

        def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
            return isinstance(abstract_checkpointable, Word)

    registry = v1.handlers.local_registry()
    registry.add(WordHandler)
    registry.add(v1.handlers.JsonHandler, checkpointable_name="config")
    context = v1.Context()
    context.checkpointables.registry = registry
    config = {"name": "a", "flags": [True, None, {"x": 0.5}], "big": 2**70, "empty": {}}
    items = {"state": {"x": np.arange(2)}, "config": config, "word": Word("hello")}
    with context:
        v1.save_checkpointables(d / "a", items)
        found = v1.load_checkpointables(d / "a")
        about = v1.checkpointables_metadata(d / "a").metadata
        some = v1.load_checkpointables(d / "a", {"config": None})
    assert found["config"] == config
    assert found["word"].text == "hello"
    same(found["state"], items["state"])
    assert (about["config"], about["word"]) == (None, "a word")
    assert some == {"config": config}
    # Without a handler: keys of several types make no tree, but JSON.
    v1.save_checkpointables(d / "b", {"state": {"x": np.arange(2)}, "mixed": {"a": True, 1: "b"}})
    assert v1.load_checkpointables(d / "b")["mixed"] == {"a": True, "1": "b"}
    with v1.training.Checkpointer(d / "m", context=context) as checkpointer:
        checkpointer.save_checkpointables(0, items)
        assert checkpointer.load_checkpointables(0)["config"] == config
