"""Scenarios that run against Orbax itself and against the drop-in.

Each scenario is a function of the library and an empty directory. `names` are the names of Orbax
that it covers, `ours` the same with Ostraka's calls. docs/maintainers/orbax-scenarios.md has them
as a table.
"""

# ruff: noqa: PT011 - the messages of the two libraries differ, the kinds of errors do not

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


@dataclass(frozen=True)
class Scenario:
    names: str
    ours: str
    run: Callable[[Any, Path], None]

    @property
    def text(self) -> str:
        return (self.run.__doc__ or "").strip()


SCENARIOS: list[Scenario] = []


def scenario(names: str, ours: str) -> Callable[..., Any]:
    def add(run: Callable[[Any, Path], None]) -> Any:
        SCENARIOS.append(Scenario(names, ours, run))
        return run

    return add


def tree() -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3), "b": np.arange(3), "step": 4}


def abstract() -> dict[str, Any]:
    return {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": np.zeros(3, int), "step": 0}


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(b, jax.Array | np.ndarray):
            assert isinstance(a, jax.Array if isinstance(b, jax.Array) else np.ndarray)
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            assert type(a) is type(b)
            assert a == b


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:2]), ("x",))


def saved(ocp: Any, path: Path, item: Any, **options: Any) -> Any:
    """A PyTreeCheckpointer that has saved the item."""
    checkpointer = ocp.PyTreeCheckpointer()
    assert checkpointer.save(path, item, **options) is None
    return checkpointer


def saved_standard(ocp: Any, path: Path, item: Any, **options: Any) -> Any:
    """A StandardCheckpointer that has saved the item, in the background."""
    checkpointer = ocp.StandardCheckpointer()
    assert checkpointer.save(path, item, **options) is None
    checkpointer.wait_until_finished()
    return checkpointer


# One checkpoint at a path


@scenario("PyTreeCheckpointer", "ostraka.save(path, tree); ostraka.restore(path)")
def pytree_round_trip(ocp: Any, d: Path) -> None:
    """`save` returns once a tree or array is committed; a missing path: FileNotFoundError"""
    for name, item in (("tree", tree()), ("array", jnp.ones(3))):
        same(saved(ocp, d / name, item).restore(d / name), item)
    with pytest.raises(FileNotFoundError, match="not found"):
        ocp.PyTreeCheckpointer().restore(d / "none")


@scenario("PyTreeCheckpointer.save(force=)", "ostraka.save(path, tree): replaces; InvalidTree")
def save_over(ocp: Any, d: Path) -> None:
    """an existing path, an empty tree, unknown leaves: ValueError; `force=True` replaces"""
    checkpointer = saved(ocp, d / "a", tree())
    with pytest.raises(ValueError, match="already exists"):
        checkpointer.save(d / "a", tree())
    checkpointer.save(d / "a", {"other": 1}, force=True)
    assert checkpointer.restore(d / "a") == {"other": 1}
    for bad in ({}, {"a": object()}, {"a": jax.ShapeDtypeStruct((1,), int)}):
        with pytest.raises(ValueError):
            checkpointer.save(d / "b", bad)


class Pair(NamedTuple):
    left: Any
    right: Any


@scenario("restore without a template", "ostraka.restore(path): saved containers")
def without_template(ocp: Any, d: Path) -> None:
    """tuples become lists, named tuples dicts, EmptyState None, integer keys strings"""
    state = {"tuple": (1, 2.5), "named": Pair(1, 3), "empty": optax.EmptyState(), "k": "text"}
    plain = {"none": None, "dict": {}, "list": [], "flag": True}
    found = saved(ocp, d / "a", {**state, **plain}).restore(d / "a")
    named = {"left": 1, "right": 3}
    same(found, {"tuple": [1, 2.5], "named": named, "empty": None, "k": "text", **plain})
    assert saved(ocp, d / "b", {1: 5}).restore(d / "b") == {"1": 5}


@scenario("restore(item=), args.PyTreeSave, args.PyTreeRestore", "ostraka.restore(path, like=item)")
def restore_item(ocp: Any, d: Path) -> None:
    """`item` sets the structure, leaves keep saved dtypes; another structure: ValueError"""
    state = {"pair": Pair(jnp.ones(2), (1, 2)), "state": optax.EmptyState()}
    found = saved(ocp, d / "a", state).restore(d / "a", item=state)
    same(found, state)
    assert isinstance(found["pair"], Pair)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    checkpointer.save(d / "b", args=ocp.args.PyTreeSave(tree()))
    same(checkpointer.restore(d / "b", args=ocp.args.PyTreeRestore()), tree())
    same(checkpointer.restore(d / "b", args=ocp.args.PyTreeRestore(tree())), tree())
    for item in ({"w": 0}, {**tree(), "new": 0}):
        with pytest.raises(ValueError, match="do not match"):
            checkpointer.restore(d / "b", item=item)


@scenario("args.PyTreeRestore(partial_restore=)", "like= with fewer entries, only=, strict=False")
def partial_restore(ocp: Any, d: Path) -> None:
    """reads the keys that both have, keeps the item's others; a leaf for a tree: TypeError"""
    leaf = jax.ShapeDtypeStruct((1,), jnp.float32)
    pair = (jnp.ones(1), jnp.zeros(1))
    checkpointer = saved(ocp, d / "a", {**tree(), "more": {"x": 1, "y": pair}})

    def restore(item: Any) -> Any:
        args = ocp.args.PyTreeRestore(item=item, partial_restore=True)
        return checkpointer.restore(d / "a", args=args)

    found = restore({"w": 0, "more": {"y": (0, 0)}, "new": leaf})
    assert found.pop("new") is leaf
    same(found, {"w": tree()["w"], "more": {"y": pair}})
    for item in ({"more": leaf}, {"w": {"a": leaf}}):
        with pytest.raises(TypeError, match="Type mismatch at"):
            restore(item)


@scenario("Transform, restore(transforms=)", "ostraka.restore(rename=), only=")
def transforms(ocp: Any, d: Path) -> None:
    """renames keys, computes values, drops the others; needs `restore_args`"""
    checkpointer = saved(ocp, d / "a", {"old": jnp.ones(2), "x": jnp.ones(2), "y": 1})
    item = {"new": jnp.zeros(2), "x": jnp.zeros(2)}
    rules = {
        "new": ocp.Transform(original_key="old"),
        "x": ocp.Transform(value_fn=lambda value: value * 3),
    }
    args = ocp.checkpoint_utils.construct_restore_args(item)
    found = checkpointer.restore(d / "a", item=item, transforms=rules, restore_args=args)
    same(jax.tree.map(np.asarray, found), {"new": np.ones(2, "f4"), "x": np.full(2, 3, "f4")})
    with pytest.raises(ValueError, match="restore_args"):
        checkpointer.restore(d / "a", item=item, transforms={})


@scenario("SaveArgs(dtype=), RestoreArgs(dtype=, restore_type=)", "dtype=, numpy arrays in like=")
def casts(ocp: Any, d: Path) -> None:
    """`dtype` casts while saving or restoring; `restore_type=np.ndarray` returns NumPy arrays"""
    state = {"w": jnp.ones(3), "i": jnp.arange(3), "b": jnp.ones(2), "n": jnp.zeros(2)}
    short = np.dtype(jnp.bfloat16)
    save_args = {**dict.fromkeys(state, ocp.SaveArgs()), "b": ocp.SaveArgs(dtype=short)}
    checkpointer = saved(ocp, d / "a", state, save_args=save_args)
    args = {
        "w": ocp.ArrayRestoreArgs(dtype=short),
        "i": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype("float32")),
        "b": ocp.RestoreArgs(),
        "n": ocp.RestoreArgs(restore_type=np.ndarray),
    }
    expected = {
        "w": state["w"].astype(short),
        "i": np.arange(3, dtype=np.float32),
        "b": state["b"].astype(short),
        "n": np.zeros(2, np.float32),
    }
    same(checkpointer.restore(d / "a", item=state, restore_args=args), expected)


@scenario("ArrayRestoreArgs(sharding=)", "shardings in like=, or mesh= and specs=")
def restore_sharded(ocp: Any, d: Path) -> None:
    """a sharding, or `mesh` and `mesh_axes`; dtype and shape come from the item"""
    checkpointer = saved(ocp, d / "a", {"w": jnp.arange(4.0)})
    sharding = NamedSharding(mesh(), PartitionSpec("x"))
    given = ocp.ArrayRestoreArgs(sharding=sharding)
    for args in (given, ocp.ArrayRestoreArgs(mesh=mesh(), mesh_axes=PartitionSpec("x"))):
        found = checkpointer.restore(d / "a", item={"w": 0}, restore_args={"w": args})
        assert found["w"].sharding.is_equivalent_to(sharding, 1)
        np.testing.assert_array_equal(found["w"], np.arange(4.0))
    like = {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}
    found = checkpointer.restore(d / "a", item=like, restore_args={"w": given})["w"]
    assert (found.dtype, found.sharding) == (jnp.bfloat16, sharding)
    wide = {"w": ocp.ArrayRestoreArgs(sharding=sharding, dtype=np.float64)}
    assert checkpointer.restore(d / "a", restore_args=wide)["w"].dtype == jnp.float32
    number = {"w": ocp.RestoreArgs(restore_type=int)}
    with pytest.raises(ValueError, match="int|scalar|size 1"):
        checkpointer.restore(d / "a", restore_args=number)


@scenario("ArrayRestoreArgs(global_shape=, strict=)", "none: shapes must agree")
def restore_other_shape(ocp: Any, d: Path) -> None:
    """another shape: ValueError; `strict=False` truncates or pads; no check with `transforms`"""
    checkpointer = saved(ocp, d / "a", {"w": jnp.arange(4.0)})

    def restore(item: Any = 0, how: Any = None, **args: Any) -> Any:
        restore_args = {"w": ocp.ArrayRestoreArgs(**args)}
        options = {"item": {"w": item}, "restore_args": restore_args, **(how or {})}
        return checkpointer.restore(d / "a", **options)["w"]

    with pytest.raises(ValueError, match="not compatible"):
        restore(global_shape=(6,))
    for shape, expected in (((6,), [0, 1, 2, 3, 0, 0]), ((2,), [0, 1])):
        np.testing.assert_array_equal(restore(global_shape=shape, strict=False), expected)
    where = SingleDeviceSharding(jax.devices()[0])
    other = jnp.zeros((2, 3), jnp.bfloat16)
    for item in (other, np.ones((2, 3)), jax.ShapeDtypeStruct((3,), jnp.float32)):
        with pytest.raises(ValueError, match="not compatible with the stored"):
            restore(item, sharding=where)
    for found in (
        restore(other, {"transforms": {}}, sharding=where),
        restore(other, sharding=where, strict=False),
    ):
        assert (found.shape, found.dtype) == ((4,), jnp.float32)


@scenario("checkpoint_utils.construct_restore_args", "like=, numpy arrays in like=")
def construct_restore_args(ocp: Any, d: Path) -> None:
    """from arrays, metadata or shapes without shardings; the result has that type"""
    make = ocp.checkpoint_utils.construct_restore_args
    found = make(tree())
    assert isinstance(found["w"], ocp.ArrayRestoreArgs)
    assert found["w"].sharding is not None
    assert (found["w"].global_shape, found["w"].dtype) == ((2, 3), jnp.float32)
    assert not isinstance(found["b"], ocp.ArrayRestoreArgs)
    kinds = {"w": jax.Array, "b": np.ndarray, "step": int}
    sharding = NamedSharding(mesh(), PartitionSpec())
    assert make({"w": tree()["w"]}, {"w": sharding})["w"].sharding == sharding
    state = {**tree(), "b": np.array([2**40, 3])}
    checkpointer = saved(ocp, d / "a", state)
    about = checkpointer.metadata(d / "a").item_metadata.tree
    for args in (found, make(about)):
        assert {name: args[name].restore_type for name in args} == kinds
    same(checkpointer.restore(d / "a", item=about, restore_args=make(about)), state)
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), about)
    plain = checkpointer.restore(d / "a", ocp.args.PyTreeRestore(restore_args=as_numpy), item=None)
    assert {type(value) for value in plain.values()} == {np.ndarray}
    shapes = {
        "w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((2,), jnp.int32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    args = make(shapes)
    assert {a.restore_type for a in args.values()} == {np.ndarray}
    assert not any(isinstance(a, ocp.ArrayRestoreArgs) for a in args.values())
    found = checkpointer.restore(d / "a", item=shapes, restore_args=args)
    assert all(isinstance(a, np.ndarray) for a in found.values())
    assert {name: a.dtype for name, a in found.items()} == {n: a.dtype for n, a in shapes.items()}


@scenario("PLACEHOLDER", "only=")
def placeholder(ocp: Any, d: Path) -> None:
    """a leaf `...` is not read and stays `...`"""
    checkpointer = saved(ocp, d / "a", {"w": jnp.ones(2), "x": jnp.ones(3)})
    found = checkpointer.restore(d / "a", item={"w": jnp.zeros(2), "x": ocp.PLACEHOLDER})
    assert found["x"] is ...
    np.testing.assert_array_equal(found["w"], np.ones(2))


@scenario("StandardCheckpointer", "handle = ostraka.save_async(path, tree); handle.wait()")
def standard_round_trip(ocp: Any, d: Path) -> None:
    """saves in the background; casts silently to the template's dtype, uses its sharding"""
    with saved_standard(ocp, d / "a", tree(), custom_metadata={"run": "x"}) as checkpointer:
        same(checkpointer.restore(d / "a"), tree())
        about = checkpointer.metadata(d / "a")
        assert about.custom_metadata == {"run": "x"}
        like = jax.tree.map(ocp.tree.to_shape_dtype_struct, about.item_metadata.tree)
        same(checkpointer.restore(d / "a", like)["w"], tree()["w"])
        sharding = NamedSharding(mesh(), PartitionSpec(None))
        like = {
            "w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16, sharding=sharding),
            "b": jax.ShapeDtypeStruct((3,), jnp.float32),
            "step": jax.ShapeDtypeStruct((), jnp.int32),
        }
        found = checkpointer.restore(d / "a", like)
        assert found["w"].sharding.is_equivalent_to(sharding, 2)
        # What was no JAX array is numpy, if the template does not say where it goes.
        kinds = [isinstance(found[name], np.ndarray) for name in like]
        assert kinds == [False, True, True]
        assert [found[name].dtype for name in like] == [jnp.bfloat16, jnp.float32, jnp.int32]


@scenario("StandardCheckpointer.restore", "ostraka.restore: Mismatch")
def standard_refusals(ocp: Any, d: Path) -> None:
    """another shape or tree, strings, single arrays: ValueError; `args=`: TypeError"""
    checkpointer = saved_standard(ocp, d / "a", tree())
    w = jax.ShapeDtypeStruct((9,), jnp.float32)
    for like in ({**abstract(), "w": w}, {"w": abstract()["w"]}):
        with pytest.raises(ValueError):
            checkpointer.restore(d / "a", like)
    for bad in ({"a": "text"}, jnp.ones(2)):
        with pytest.raises(ValueError):
            ocp.StandardCheckpointer().save(d / "b", bad)
    with pytest.raises(TypeError):
        checkpointer.save(d / "c", args=ocp.args.StandardSave(tree()))


@scenario("Checkpointer, StandardCheckpointHandler, args.Standard*", "ostraka.save")
def checkpointer_forms(ocp: Any, d: Path) -> None:
    """args by keyword or position, a plain tree, `item=`; unknown keywords raise TypeError"""
    checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    checkpointer.save(d / "a", args=ocp.args.StandardSave(tree()))
    checkpointer.save(d / "b", ocp.args.StandardSave(tree()))
    checkpointer.save(d / "c", tree())
    checkpointer.save(d / "e", item=tree())
    for name in "abce":
        same(checkpointer.restore(d / name, args=ocp.args.StandardRestore(abstract())), tree())
    same(checkpointer.restore(d / "a"), tree())
    with pytest.raises(TypeError):
        checkpointer.restore(d / "a", nonsense=1)


@scenario("AsyncCheckpointer, AsyncOptions", "ostraka.save_async")
def async_checkpointer(ocp: Any, d: Path) -> None:
    """saves the values at the call in the background; `check_for_errors`, `close`"""
    options = ocp.AsyncOptions(timeout_secs=60)
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
    array = np.ones(1000)
    checkpointer.save(d / "a", args=ocp.args.PyTreeSave({**tree(), "a": array}))
    array[:] = 7
    checkpointer.check_for_errors()
    checkpointer.wait_until_finished()
    same(checkpointer.restore(d / "a"), {**tree(), "a": np.ones(1000)})
    checkpointer.close()
    assert isinstance(checkpointer, ocp.Checkpointer)


@scenario("JsonCheckpointHandler, args.JsonSave, args.JsonRestore", "values in the tree")
def json_item(ocp: Any, d: Path) -> None:
    """JSON turns tuples into lists; `JsonRestore()` needs no template"""
    checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    checkpointer.save(d / "a", args=ocp.args.JsonSave({"a": (1, 2), "b": {"c": None, "d": "x"}}))
    expected = {"a": [1, 2], "b": {"c": None, "d": "x"}}
    assert checkpointer.restore(d / "a", args=ocp.args.JsonRestore()) == expected
    checkpointer.save(d / "b", {"x": 1.5})
    assert checkpointer.restore(d / "b") == {"x": 1.5}


@scenario("CompositeCheckpointHandler, args.Composite", "one dict")
def composite(ocp: Any, d: Path) -> None:
    """several items by name, all or some; a missing one: KeyError, `.get` returns None"""
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler("state", "config"))
    args = ocp.args
    both = args.Composite(state=args.StandardSave(tree()), config=args.JsonSave({"lr": 0.1}))
    checkpointer.save(d / "a", args=both)
    found = checkpointer.restore(d / "a")
    same(found.state, tree())
    assert found["config"] == {"lr": 0.1}
    some = checkpointer.restore(d / "a", args=args.Composite(config=args.JsonRestore()))
    assert dict(some.items()) == {"config": {"lr": 0.1}}
    assert (list(some.keys()), len(some), "config" in some) == (["config"], 1, True)
    assert some.get("state") is None
    with pytest.raises(KeyError):
        checkpointer.restore(d / "a", args=args.Composite(none=args.JsonRestore()))
    with pytest.raises(KeyError):
        _ = some.state
    with pytest.raises(KeyError):
        _ = some["state"]


@scenario("Checkpointer.metadata", "ostraka.open(path)")
def checkpointer_metadata(ocp: Any, d: Path) -> None:
    """shapes and dtypes without reading arrays; by key or `.tree`; empty for a missing path"""
    checkpointer = saved(ocp, d / "a", {**tree(), "s": "text", "t": (jnp.ones(2), 1)})
    found = checkpointer.metadata(d / "a").item_metadata
    assert found["w"].shape == (2, 3)
    assert found["w"].dtype == jnp.float32
    assert found.tree["t"][0].shape == (2,)
    assert isinstance(found["w"], ocp.metadata.ArrayMetadata)
    missing = checkpointer.metadata(d / "none")
    assert missing.item_metadata is None
    assert missing.custom_metadata == {}


@scenario("NNX state", "ostraka.save(path, model); ostraka.restore(path, into=model)")
def nnx_state(ocp: Any, d: Path) -> None:
    """restores `nnx.state` into an abstract state; without a template adds a level `value`"""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    checkpointer = saved_standard(ocp, d / "a", nnx.state(model))
    like = nnx.state(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1))))
    sharding = NamedSharding(mesh(), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)
    for template in (like, placed):
        found = checkpointer.restore(d / "a", template)
        np.testing.assert_array_equal(found["kernel"][...], model.kernel[...])
    assert found["kernel"][...].sharding.is_equivalent_to(sharding, 2)
    plain = checkpointer.restore(d / "a")
    np.testing.assert_array_equal(plain["kernel"]["value"], model.kernel[...])


# The manager


def manager_of(ocp: Any, d: Path, **options: Any) -> Any:
    return ocp.CheckpointManager(d, options=ocp.CheckpointManagerOptions(**options))


def save_steps(ocp: Any, manager: Any, steps: Any, **kwargs: Any) -> list[bool]:
    return [
        manager.save(s, args=ocp.args.StandardSave({"s": jnp.full(2, s)}), **kwargs) for s in steps
    ]


@scenario("CheckpointManager", "with ostraka.Manager(root) as manager")
def manager_round_trip(ocp: Any, d: Path) -> None:
    """saves and restores with and without a step; a new manager finds the steps"""
    args = ocp.args
    with ocp.CheckpointManager(d / "m") as manager:
        assert save_steps(ocp, manager, [0, 1]) == [True, True]
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]
        assert manager.latest_step() == 1
        same(manager.restore(1), {"s": jnp.full(2, 1)})
        same(manager.restore(None, args=args.StandardRestore()), {"s": jnp.full(2, 1)})
        like = {"s": jax.ShapeDtypeStruct((2,), int)}
        same(manager.restore(0, args=args.StandardRestore(like)), {"s": jnp.full(2, 0)})
        assert str(manager.directory) == str(d / "m")
        assert (manager.directory / "1").exists()
    with ocp.CheckpointManager(d / "m") as manager:
        same(manager.restore(1, args=args.StandardRestore()), {"s": jnp.full(2, 1)})
    with ocp.CheckpointManager(d / "b") as manager:
        manager.save(1, args=args.Composite(a=args.JsonSave([1]), b=args.StandardSave(tree())))
    with ocp.CheckpointManager(d / "b") as manager:
        wanted = args.Composite(b=args.StandardRestore(abstract()), a=args.JsonRestore())
        found = manager.restore(manager.latest_step(), args=wanted)
        same(found["b"], tree())
        assert found["a"] == [1]


@scenario("CheckpointManager, empty", "manager.latest() is None")
def manager_empty(ocp: Any, d: Path) -> None:
    """no steps: None, [], FileNotFoundError; positional or missing args: ValueError"""
    with ocp.CheckpointManager(d / "m") as manager:
        assert manager.latest_step() is None
        assert manager.best_step() is None
        assert manager.all_steps() == []
        for call in (
            lambda: manager.restore(None),
            lambda: manager.restore(3),
            lambda: manager.delete(3),
            lambda: manager.metadata(3),
        ):
            with pytest.raises(FileNotFoundError):
                call()
        with pytest.raises(ValueError):
            manager.save(0, ocp.args.StandardSave(tree()))
        with pytest.raises(ValueError):
            manager.save(0)
        assert manager.all_steps() == []


@scenario("CheckpointManager.save", "manager.save: replaces; a lower step raises")
def manager_same_step(ocp: Any, d: Path) -> None:
    """the same or a lower step: False; the same step with `force`: ValueError"""
    with ocp.CheckpointManager(d / "m") as manager:
        assert save_steps(ocp, manager, [5, 5, 3]) == [True, False, False]
        with pytest.raises(ocp.checkpoint_manager.StepAlreadyExistsError):
            save_steps(ocp, manager, [5], force=True)
        assert issubclass(ocp.checkpoint_manager.StepAlreadyExistsError, ValueError)
        assert save_steps(ocp, manager, [3], force=True) == [True]
        assert sorted(manager.all_steps()) == [3, 5]


@scenario("best_fn, best_mode, save(metrics=)", "keep_best=ostraka.Best(…)")
def best(ocp: Any, d: Path) -> None:
    """`max_to_keep=1` keeps the best, deletes the latest; keeps steps without metrics"""
    options = {"best_fn": lambda m: m["loss"], "best_mode": "min", "max_to_keep": 1}
    with manager_of(ocp, d / "m", **options) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0]):
            assert save_steps(ocp, manager, [step], metrics={"loss": loss}) == [True]
        assert manager.all_steps() == [1]
        assert manager.best_step() == 1
        assert manager.metrics(1) == {"loss": 1.0}
        save_steps(ocp, manager, [3])
        assert manager.all_steps() == [1, 3]
        assert manager.best_step() == 1
    with manager_of(ocp, d / "m", **options) as manager:
        assert manager.best_step() == 1
        assert manager.latest_step() == 3


@scenario("enable_async_checkpointing, read_only, reached_preemption", "asynchronous=, read_only=")
def read_only(ocp: Any, d: Path) -> None:
    """`save` returns after the commit; read-only managers; calls made at every step"""
    manager = manager_of(ocp, d / "m", enable_async_checkpointing=False)
    assert manager.reached_preemption(1) is False
    save_steps(ocp, manager, [1])
    assert ocp.utils.checkpoint_steps(d / "m") == [1]
    manager.check_for_errors()
    assert manager.wait_until_finished() is None
    assert manager.is_saving_in_progress() is False
    assert manager.close() is None
    with manager_of(ocp, d / "m", read_only=True) as manager:
        assert manager.all_steps() == [1]
        assert save_steps(ocp, manager, [2]) == [False]
        same(manager.restore(1, args=ocp.args.StandardRestore()), {"s": jnp.full(2, 1)})


@scenario("async_options, create, cleanup_tmp_directories and others", "none")
def other_options(ocp: Any, d: Path) -> None:
    """accepts options about Orbax's threads and files; an unknown option: TypeError"""
    options = {
        "async_options": ocp.AsyncOptions(timeout_secs=60),
        "create": True,
        "cleanup_tmp_directories": True,
        "enable_background_delete": True,
        "file_options": ocp.options.FileOptions(),
        "lightweight_initialize": False,
    }
    with manager_of(ocp, d / "m", **options) as manager:
        assert save_steps(ocp, manager, [1]) == [True]
    for kind in (ocp.CheckpointManagerOptions, ocp.PyTreeCheckpointHandler):
        with pytest.raises(TypeError):
            kind(nonsense=1)
    with pytest.raises(ValueError):
        ocp.CheckpointManagerOptions(best_mode="best", best_fn=len)
    with pytest.raises(ValueError):
        ocp.CheckpointManagerOptions(max_to_keep=-1)


@scenario("CheckpointManager(item_names=, item_handlers=), args.Composite", "one dict")
def manager_composite(ocp: Any, d: Path) -> None:
    """several items, all or some; left out: None; not declared: ValueError; args optional"""
    args = ocp.args
    items = {"state": args.StandardSave(tree()), "config": args.JsonSave({"x": 1})}
    with ocp.CheckpointManager(d / "m", item_names=("state", "config")) as manager:
        assert manager.save(0, args=args.Composite(**items)) is True
        manager.save(1, args=args.Composite(state=items["state"]))
        manager.wait_until_finished()
        found = manager.restore(0)
        same(found.state, tree())
        assert found.config == {"x": 1}
        assert [list(manager.restore(step)) for step in (0, 1)] == [["config", "state"], ["state"]]
        some = manager.restore(0, args=args.Composite(config=args.JsonRestore()))
        assert some.get("state") is None
        assert some.config == {"x": 1}
        with pytest.raises(KeyError):
            manager.restore(0, args=args.Composite(none=args.JsonRestore()))
        with pytest.raises(ValueError):
            manager.save(2, args=args.StandardSave(tree()))
    with ocp.CheckpointManager(d / "n") as manager:
        manager.save(0, args=args.Composite(**items))
        manager.save(1, args=args.Composite(**{**items, "config": None}))
        manager.wait_until_finished()
        assert [manager.restore(step).config for step in (0, 1)] == [{"x": 1}, None]
    handlers = {"state": ocp.StandardCheckpointHandler(), "config": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(d / "m", item_handlers=handlers) as manager:
        found = manager.restore(0)
        same(found.state, tree())
        assert found.config == {"x": 1}
    single = ocp.PyTreeCheckpointHandler()
    with ocp.CheckpointManager(d / "s", item_handlers=single) as manager:
        manager.save(0, args=args.PyTreeSave(tree()))
        manager.wait_until_finished()
        same(manager.restore(0), tree())


@scenario("CheckpointManager(directory, checkpointers, options)", "ostraka.Manager(root)")
def old_form_dict(ocp: Any, d: Path) -> None:
    """one checkpointer or a dict of them, `items`, `save_kwargs`, `restore_kwargs`"""
    checkpointers = {
        "state": ocp.PyTreeCheckpointer(),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    save_args = {"save_args": jax.tree.map(lambda _: ocp.SaveArgs(), tree())}
    restore_args = {"restore_args": ocp.checkpoint_utils.construct_restore_args(tree())}
    with ocp.CheckpointManager(d / "m", checkpointers, options) as manager:
        items = {"state": tree(), "config": {"x": 1}}
        assert manager.save(0, items, save_kwargs={"state": save_args}) is True
        found = manager.restore(0)
        same(found["state"], tree())
        assert found["config"] == {"x": 1}
        some = manager.restore(0, items={"state": tree()}, restore_kwargs={"state": restore_args})
        same(some["state"], tree())
        assert "config" not in some
    with ocp.CheckpointManager(d / "s", ocp.PyTreeCheckpointer(), options) as manager:
        assert manager.save(3, tree()) is True
        same(manager.restore(3), tree())
        same(manager.restore(3, items=tree()), tree())
        same(manager.restore(3, items=tree(), restore_kwargs=restore_args), tree())


@scenario(
    "CheckpointManager.metadata, metadata.get_step_metadata", "ostraka.open(manager.path(step))"
)
def manager_metadata(ocp: Any, d: Path) -> None:
    """metadata of a step, its items and the run directory; ValueError if there is none"""
    args = ocp.args
    with ocp.CheckpointManager(d / "m", metadata={"lang": "en"}) as manager:
        both = args.Composite(a=args.StandardSave(tree()), b=args.JsonSave({"x": 1}))
        manager.save(2, args=both, custom_metadata={"lr": 0.5})
        manager.wait_until_finished()
        assert manager.metadata(2).custom_metadata == {"lr": 0.5}
        assert manager.metadata().custom_metadata == {"lang": "en"}
        assert manager.item_metadata(2)["a"]["w"].shape == (2, 3)
        assert manager.metadata(2).item_metadata.a["w"].dtype == jnp.float32
    found = ocp.metadata.get_step_metadata(d / "m" / "2")
    assert found.custom_metadata == {"lr": 0.5}
    assert found.commit_timestamp_nsecs > 10**18
    with pytest.raises(ValueError, match="not found"):
        ocp.metadata.get_step_metadata(d / "m" / "4")


@scenario("CheckpointManager.delete, reload", "manager.delete(step)")
def delete_and_reload(ocp: Any, d: Path) -> None:
    """deletes a step; another manager sees it after `reload`"""
    with ocp.CheckpointManager(d / "m") as manager, ocp.CheckpointManager(d / "m") as other:
        save_steps(ocp, manager, [1, 2])
        manager.wait_until_finished()
        other.reload()
        assert other.all_steps() == [1, 2]
        manager.delete(1)
        assert manager.all_steps() == [2]
        assert other.all_steps(read=True) == [2]


@scenario(
    "max_to_keep, keep_period, preservation_policy", "keep=, keep_every=, keep_best=, keep_if="
)
def which_steps_stay(ocp: Any, d: Path) -> None:
    """keeps the last, multiples, the best by a metric, listed steps; in memory and on disk"""
    p = ocp.checkpoint_managers

    def metric(metrics: Any) -> float:
        return metrics["l"]

    either = p.AnyPreservationPolicy([p.LatestN(1), p.EveryNSteps(3)])
    cases: Any = [
        ({"max_to_keep": 2}, [4, 5]),
        ({"max_to_keep": 1, "keep_period": 2}, [0, 2, 4, 5]),
        ({"preservation_policy": p.LatestN(1)}, [5]),
        ({"preservation_policy": either}, [0, 3, 5]),
        ({"preservation_policy": p.BestN(get_metric_fn=metric, n=2)}, [1, 3]),
        ({"preservation_policy": p.BestN(get_metric_fn=metric, reverse=True, n=1)}, [5]),
        ({"preservation_policy": p.CustomSteps([1, 2])}, [1, 2]),
    ]
    for number, (options, expected) in enumerate(cases):
        with manager_of(ocp, d / str(number), **options) as manager:
            for step in range(6):
                save_steps(ocp, manager, [step], metrics={"l": float((step * 3) % 5)})
            assert manager.all_steps() == expected, options
        names = [path.name for path in (d / str(number)).iterdir() if path.name.isdigit()]
        assert sorted(names) == [str(step) for step in expected], options


@scenario(
    "save_interval_steps, save_on_steps, save_decision_policy", "every=3, at=[3], when=function"
)
def which_steps_are_saved(ocp: Any, d: Path) -> None:
    """saves multiples and the first, listed steps, or by function or policy; `should_save`"""
    p = ocp.checkpoint_managers
    either = p.AnySavePolicy([p.FixedIntervalPolicy(4), p.InitialSavePolicy()])
    cases: Any = [
        ({"save_interval_steps": 3}, [1, 3, 6]),
        ({"save_interval_steps": 5, "save_on_steps": [3]}, [1, 3, 5]),
        ({"should_save_fn": lambda step, last: step == 2}, [2]),
        ({"save_decision_policy": p.FixedIntervalPolicy(3)}, [3, 6]),
        ({"save_decision_policy": p.SpecificStepsPolicy([1, 4])}, [1, 4]),
        ({"save_decision_policy": either}, [1, 4]),
    ]
    for number, (options, expected) in enumerate(cases):
        with manager_of(ocp, d / str(number), **options) as manager:
            for step in range(1, 8):
                asked = manager.should_save(step)
                assert save_steps(ocp, manager, [step]) == [asked] == [step in expected], options
            assert manager.all_steps() == expected


# Handlers and types of one's own


def text_handler(ocp: Any) -> Any:
    class TextHandler(ocp.CheckpointHandler):
        def save(self, directory: Any, args: Any) -> None:
            (directory / "text.txt").write_text(args.item)

        def restore(self, directory: Any, args: Any = None) -> str:
            return (directory / "text.txt").read_text()

    @ocp.args.register_with_handler(TextHandler, for_save=True)
    @dataclass
    class TextSave(ocp.args.CheckpointArgs):
        item: str

    @ocp.args.register_with_handler(TextHandler, for_restore=True)
    @dataclass
    class TextRestore(ocp.args.CheckpointArgs):
        item: Any = None

    return TextHandler, TextSave, TextRestore


@scenario("CheckpointHandler without args", "get_state, set_state")
def legacy_handler(ocp: Any, d: Path) -> None:
    """a handler without registered args: `save(directory, item)`"""

    class Legacy(ocp.CheckpointHandler):
        def save(self, directory: Any, item: Any, upper: bool = False) -> None:
            (directory / "x").write_text(item.upper() if upper else item)

        def restore(self, directory: Any, item: Any = None) -> Any:
            return (directory / "x").read_text()

    checkpointer = ocp.Checkpointer(Legacy())
    checkpointer.save(d / "a", "text", upper=True)
    assert checkpointer.restore(d / "a") == "TEXT"


@scenario(
    "CheckpointHandler, register_with_handler, CheckpointHandlerRegistry", "get_state, set_state"
)
def own_handler(ocp: Any, d: Path) -> None:
    """a custom handler with its args: alone, as an item of a step, or from a registry"""
    handler, save, restore = text_handler(ocp)
    checkpointer = ocp.Checkpointer(handler())
    checkpointer.save(d / "a", args=save("hello"))
    assert checkpointer.restore(d / "a", args=restore()) == "hello"
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("note", save, handler())
    registry.add("note", restore, handler())
    args = ocp.args
    for name, options in (("plain", {}), ("registry", {"handler_registry": registry})):
        with ocp.CheckpointManager(d / name, **options) as manager:
            manager.save(0, args=args.Composite(note=save("x"), state=args.StandardSave(tree())))
            wanted = args.Composite(note=restore(), state=args.StandardRestore(abstract()))
            found = manager.restore(0, args=wanted)
            assert found.note == "x"
            same(found.state, tree())


@scenario("type_handlers.SingleReplicaArrayHandler", "share_reads=")
def single_replica_handler(ocp: Any, d: Path) -> None:
    """registered for jax.Array, as in MaxText; registering again needs `override`"""
    handlers = ocp.type_handlers
    with pytest.raises(ValueError):
        handlers.register_type_handler(jax.Array, handlers.ArrayHandler())
    assert handlers.get_type_handler(jax.Array) is not None
    handlers.SingleReplicaArrayHandler(replica_axis_index=0, broadcast_memory_limit_bytes=1 << 20)
    handlers.register_type_handler(jax.Array, handlers.ArrayHandler(), override=True)
    ocp.PyTreeCheckpointer().save(d / "a", tree())
    same(ocp.PyTreeCheckpointer().restore(d / "a"), tree())


# Tools


@scenario(
    "step_prefix, path.step: standard_name_format, utils.checkpoint_steps", "manager.path(step)"
)
def step_paths(ocp: Any, d: Path) -> None:
    """names of steps, and steps from names"""
    naming = ocp.path.step.standard_name_format(step_prefix="a", step_format_fixed_length=3)
    assert naming.build_name(7) == "a_007"
    assert str(ocp.step.build_step_path(d, naming, 7)) == str(d / "a_007")
    named = {"step_prefix": "a", "step_format_fixed_length": 3}
    with manager_of(ocp, d / "m", **named) as manager:
        save_steps(ocp, manager, [5])
    assert (d / "m" / "a_005").is_dir()
    with manager_of(ocp, d / "m", step_name_format=naming) as manager:
        assert manager.all_steps() == [5]
        save_steps(ocp, manager, [7])
    assert sorted(found.step for found in naming.find_all(d / "m")) == [5, 7]
    assert naming.find_step(d / "m", 7).path.name == "a_007"
    with pytest.raises(ValueError):
        naming.find_step(d / "m", 8)
    utils = ocp.utils
    assert sorted(utils.checkpoint_steps(d / "m")) == [5, 7]
    assert utils.any_checkpoint_step(d / "m") in (5, 7)
    assert utils.step_from_checkpoint_name("ck_12") == 12
    assert utils.is_checkpoint_finalized(d / "m" / "a_007")
    assert utils.TMP_DIR_SUFFIX == ".orbax-checkpoint-tmp"


MODULES = """
    args checkpoint_args checkpoint_manager checkpoint_managers checkpoint_utils checkpointers
    handlers metadata multihost options path test_utils transform_utils tree type_handlers utils
    abstract_checkpoint_manager
"""


@scenario("import forms, experimental.v1, pathways, path.atomicity", "import ostraka")
def import_forms(ocp: Any, d: Path) -> None:
    """submodules keep their names; `type_handlers` has the same args classes"""
    for name in MODULES.split():
        assert importlib.import_module(f"{ocp.__name__}.{name}") is getattr(ocp, name)
    assert ocp.checkpoint_manager.CheckpointManager is ocp.CheckpointManager
    assert ocp.v1.training.Checkpointer is not None
    assert importlib.import_module(f"{ocp.__name__}.experimental.v1").load is ocp.v1.load
    for name in ("ArrayRestoreArgs", "RestoreArgs", "SaveArgs"):
        assert getattr(ocp.type_handlers, name) is getattr(ocp, name)
    with pytest.raises(AttributeError):
        _ = ocp.nonsense
    impl = ocp.pathways.CheckpointingImpl
    assert impl.from_options(use_persistence_array_handler=False) is impl.NO_DISPATCHER
    commit = ocp.path.atomicity.CommitFileTemporaryPath
    with manager_of(ocp, d / "m", temporary_path_class=commit) as manager:
        assert save_steps(ocp, manager, [1]) == [True]
    assert ocp.__version__ == "0.12.8"


# Version 1


@scenario("v1.save, v1.load, save_async, save_pytree, load_pytree", "ostraka.save, ostraka.restore")
def v1_round_trip(ocp: Any, d: Path) -> None:
    """a tree at a path, `overwrite`, a template, in the background; the older names too"""
    v1 = ocp.v1
    assert v1.save(d / "a", tree()) is None
    same(v1.load(d / "a"), tree())
    with pytest.raises(ValueError):
        v1.save(d / "a", tree())
    v1.save(d / "a", {"x": 2}, overwrite=True)
    assert v1.load(d / "a") == {"x": 2}
    assert v1.save_async(d / "b", tree()).result() is None
    same(v1.load_pytree(d / "b"), tree())
    v1.save_pytree(d / "c", tree())
    found = v1.load(d / "c", {**abstract(), "w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)})
    assert found["w"].dtype == jnp.bfloat16
    with pytest.raises(ValueError):
        v1.load(d / "c", {"w": abstract()["w"]})
    with pytest.raises(ValueError):
        v1.load(d / "none")


@scenario("v1.save_checkpointables, load_checkpointables", "one dict; ostraka.restore: Mismatch")
def v1_checkpointables(ocp: Any, d: Path) -> None:
    """several by name, all or some; KeyError if one is missing or does not fit (Tunix)"""
    v1 = ocp.v1
    v1.save_checkpointables(d / "a", {"state": tree(), "extra": {"x": jnp.ones(2)}})
    found = v1.load_checkpointables(d / "a")
    same(found["state"], tree())
    same(found["extra"], {"x": jnp.ones(2)})
    assert list(v1.load_checkpointables(d / "a", {"extra": None})) == ["extra"]
    same(v1.load(d / "a"), tree())
    with pytest.raises(KeyError, match="not found"):
        v1.load_checkpointables(d / "a", {"none": None})
    leaf, other = (jax.ShapeDtypeStruct((size,), jnp.float32) for size in (2, 3))
    for like in ({"x": leaf, "y": leaf}, {}, {"x": {"z": leaf}}, [leaf], {"x": other}):
        with pytest.raises(KeyError, match="checkpointable"):
            v1.load_checkpointables(d / "a", {"extra": like})
    with pytest.raises(ValueError, match="do not match"):
        v1.load(d / "a", {"x": leaf, "y": leaf}, checkpointable_name="extra")


@scenario("v1.StatefulCheckpointable", "get_state, set_state")
def v1_stateful(ocp: Any, d: Path) -> None:
    """an object that saves and loads itself"""

    class Counter:
        def __init__(self, value: int):
            self.value = value

        async def save(self, directory: Any) -> Any:
            value = self.value

            async def write() -> None:
                path = await directory.await_creation()
                (path / "value").write_text(str(value))

            return write()

        async def load(self, directory: Any) -> Any:
            async def read() -> None:
                self.value = int((directory / "value").read_text())

            return read()

    ocp.v1.save_checkpointables(d / "a", {"counter": Counter(7), "state": tree()})
    other = Counter(0)
    ocp.v1.load_checkpointables(d / "a", {"counter": other})
    assert other.value == 7


@scenario("v1.training.Checkpointer", "ostraka.Manager(root)")
def v1_training(ocp: Any, d: Path) -> None:
    """save, load, latest; FileExistsError, FileNotFoundError; a skipped save"""
    training: Any = ocp.v1.training
    policy = training.preservation_policies.LatestN(2)
    with training.Checkpointer(d / "m", preservation_policy=policy) as checkpointer:
        assert checkpointer.latest is None
        assert checkpointer.save(0, tree()) is True
        with pytest.raises(FileExistsError):
            checkpointer.save(0, tree())
        assert checkpointer.save(1, tree(), metrics={"loss": 1.0})
        assert checkpointer.save_async(2, tree()).result() is True
        latest: Any = checkpointer.latest
        assert latest.step == 2
        assert [found.step for found in checkpointer.checkpoints] == [1, 2]
        same(checkpointer.load(), tree())
        same(checkpointer.load(1, abstract()), tree())
        with pytest.raises(FileNotFoundError):
            checkpointer.load(9)
        assert checkpointer.pytree_metadata(1).metadata["w"].shape == (2, 3)
        checkpointer.save_checkpointables(3, {"state": tree(), "extra": {"x": 1}})
        assert checkpointer.load_checkpointables(3)["extra"] == {"x": 1}
    every = training.save_decision_policies.FixedIntervalPolicy(10)
    with training.Checkpointer(d / "n", save_decision_policy=every) as checkpointer:
        assert [checkpointer.save(step, tree()) for step in (0, 1)] == [True, False]
        assert checkpointer.save_async(2, tree()) is None
        assert checkpointer.save_checkpointables_async(3, {"state": tree()}) is None
        assert checkpointer.save_async(10, tree()).result() is True


def as_table() -> str:
    """The scenarios as Markdown."""
    lines = ["| Orbax | scenario | Ostraka |", "| --- | --- | --- |"]
    lines += [f"| `{s.names}` | {s.text} | `{s.ours}` |" for s in SCENARIOS]
    return "\n".join(lines)
