"""What code does with Orbax, written once: run against Orbax itself and against our drop-in.

Each scenario is a function of the library and an empty directory. `names` are those of Orbax that
it is about, `ours` what the same is in calls of our own. The page
docs/maintainers/orbax-scenarios.md has them as a table.
"""

# ruff: noqa: PT011 - the messages of the two libraries differ, the kinds of errors do not

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec


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


# One checkpoint at a path


@scenario("PyTreeCheckpointer", "ostraka.save(path, tree); ostraka.restore(path)")
def pytree_round_trip(ocp: Any, d: Path) -> None:
    """a tree is saved and restored; `save` returns None, and it is there at once"""
    checkpointer = ocp.PyTreeCheckpointer()
    assert checkpointer.save(d / "a", tree()) is None
    same(checkpointer.restore(d / "a"), tree())


@scenario("PyTreeCheckpointer.save(force=)", "ostraka.save(path, tree): replaces")
def save_over(ocp: Any, d: Path) -> None:
    """what is there raises ValueError, unless `force=True`"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", tree())
    with pytest.raises(ValueError, match="already exists"):
        checkpointer.save(d / "a", tree())
    checkpointer.save(d / "a", {"other": 1}, force=True)
    assert checkpointer.restore(d / "a") == {"other": 1}


@scenario("PyTreeCheckpointer.restore", "ostraka.restore: CheckpointNotFound")
def restore_missing(ocp: Any, d: Path) -> None:
    """a missing path raises FileNotFoundError"""
    with pytest.raises(FileNotFoundError, match="not found"):
        ocp.PyTreeCheckpointer().restore(d / "none")


class Pair(NamedTuple):
    left: Any
    right: Any


@scenario("restore without a template", "ostraka.restore(path): containers as they were")
def without_template(ocp: Any, d: Path) -> None:
    """tuples come back as lists, named tuples as dicts, EmptyState as None, int keys as text"""
    saved = {
        "tuple": (1, 2.5),
        "named": Pair(jnp.ones(2), 3),
        "empty": optax.EmptyState(),
        1: "text",
        "none": None,
        "dict": {},
        "list": [],
        "flag": True,
    }
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {str(k) if k != 1 else "k": v for k, v in saved.items()})
    checkpointer.save(d / "b", {1: 5})
    found = checkpointer.restore(d / "a")
    assert found["tuple"] == [1, 2.5]
    assert set(found["named"]) == {"left", "right"}
    assert found["empty"] is None
    assert found["none"] is None
    assert found["dict"] == {}
    assert found["list"] == []
    assert found["flag"] is True
    assert found["k"] == "text"
    assert checkpointer.restore(d / "b") == {"1": 5}


@scenario("PyTreeCheckpointer, single array", "ostraka.save(path, array)")
def single_array(ocp: Any, d: Path) -> None:
    """a single array is a tree too"""
    ocp.PyTreeCheckpointer().save(d / "a", jnp.ones(3))
    same(ocp.PyTreeCheckpointer().restore(d / "a"), jnp.ones(3))


@scenario("PyTreeCheckpointer.save", "ostraka.save: InvalidTree")
def refused_trees(ocp: Any, d: Path) -> None:
    """an empty tree, and a leaf that no handler knows, raise ValueError"""
    for bad in ({}, {"a": object()}, {"a": jax.ShapeDtypeStruct((1,), int)}):
        with pytest.raises(ValueError):
            ocp.PyTreeCheckpointer().save(d / "a", bad)


@scenario("restore(item=)", "ostraka.restore(path, like=item)")
def restore_item(ocp: Any, d: Path) -> None:
    """`item` gives the structure, and leaves come back as they were saved"""
    saved = {"pair": Pair(jnp.ones(2), (1, 2)), "state": optax.EmptyState()}
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", saved)
    found = checkpointer.restore(d / "a", item=saved)
    same(found, saved)
    assert isinstance(found["pair"], Pair)


@scenario("restore(item=)", "ostraka.restore: Mismatch")
def restore_item_that_differs(ocp: Any, d: Path) -> None:
    """a structure that differs raises ValueError"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", tree())
    for item in ({"w": 0}, {**tree(), "new": 0}):
        with pytest.raises(ValueError, match="do not match"):
            checkpointer.restore(d / "a", item=item)


@scenario("args.PyTreeSave, args.PyTreeRestore", "ostraka.save, ostraka.restore")
def pytree_args(ocp: Any, d: Path) -> None:
    """the same through `args=`"""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    checkpointer.save(d / "a", args=ocp.args.PyTreeSave(tree()))
    same(checkpointer.restore(d / "a", args=ocp.args.PyTreeRestore()), tree())
    same(checkpointer.restore(d / "a", args=ocp.args.PyTreeRestore(tree())), tree())


@scenario("args.PyTreeRestore(partial_restore=)", "like= with fewer entries, only=")
def partial_restore(ocp: Any, d: Path) -> None:
    """keys that are only saved are left out; what is only in the item stays as it is there"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {**tree(), "more": {"x": 1, "y": (jnp.ones(1), jnp.zeros(1))}})
    args = ocp.args.PyTreeRestore(item={"w": 0, "more": {"y": (0, 0)}}, partial_restore=True)
    found = checkpointer.restore(d / "a", args=args)
    same(found, {"w": tree()["w"], "more": {"y": (jnp.ones(1), jnp.zeros(1))}})


@scenario("restore(transforms={})", "like= with fewer entries, only=")
def empty_transforms(ocp: Any, d: Path) -> None:
    """`transforms={}` drops extra keys, and needs `restore_args`"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", tree())
    item = {"w": tree()["w"]}
    args = ocp.checkpoint_utils.construct_restore_args(item)
    same(checkpointer.restore(d / "a", item=item, transforms={}, restore_args=args), item)
    with pytest.raises(ValueError, match="restore_args"):
        checkpointer.restore(d / "a", item=item, transforms={})


@scenario("Transform, restore(transforms=)", "ostraka.restore(rename=)")
def transforms(ocp: Any, d: Path) -> None:
    """a key that was renamed, and a value that is computed"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"old": jnp.ones(2), "x": jnp.ones(2)})
    item = {"new": jnp.zeros(2), "x": jnp.zeros(2)}
    rules = {
        "new": ocp.Transform(original_key="old"),
        "x": ocp.Transform(value_fn=lambda value: value * 3),
    }
    args = ocp.checkpoint_utils.construct_restore_args(item)
    found = checkpointer.restore(d / "a", item=item, transforms=rules, restore_args=args)
    np.testing.assert_array_equal(found["new"], np.ones(2))
    np.testing.assert_array_equal(found["x"], np.full(2, 3.0))


@scenario("apply_transformations, transform_utils", "rename=, or plain Python")
def apply_transformations(ocp: Any, d: Path) -> None:
    """a tree is transformed without a checkpoint; keys may be regular expressions"""
    original = {"a": 1, "b": {"c": 2}}
    rules = {r"n(.*)": ocp.Transform(original_key=r"b/\1")}
    found = ocp.apply_transformations(original, rules, {"a": 0, "nc": 0})
    assert found == {"a": 1, "nc": 2}


@scenario("RestoreArgs(restore_type=)", "numpy arrays in like=")
def restore_as_numpy(ocp: Any, d: Path) -> None:
    """`restore_type=np.ndarray` gives numpy arrays"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"w": jnp.ones(3), "x": jnp.zeros(2)})
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), {"w": 0, "x": 0})
    same(
        checkpointer.restore(d / "a", restore_args=args),
        {"w": np.ones(3, "f4"), "x": np.zeros(2, "f4")},
    )


@scenario("RestoreArgs(dtype=), ArrayRestoreArgs(dtype=)", "dtype=")
def restore_cast(ocp: Any, d: Path) -> None:
    """`dtype` casts, floats and integers alike"""
    checkpointer = ocp.PyTreeCheckpointer()
    saved = {"w": jnp.ones(3), "i": jnp.arange(3)}
    checkpointer.save(d / "a", saved)
    args = {
        "w": ocp.ArrayRestoreArgs(dtype=np.dtype(jnp.bfloat16)),
        "i": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype("float32")),
    }
    found = checkpointer.restore(d / "a", item=saved, restore_args=args)
    assert found["w"].dtype == jnp.bfloat16
    assert isinstance(found["w"], jax.Array)
    assert found["i"].dtype == np.float32
    assert isinstance(found["i"], np.ndarray)


@scenario("ArrayRestoreArgs(sharding=)", "shardings in like=, or mesh= and specs=")
def restore_sharded(ocp: Any, d: Path) -> None:
    """onto a sharding, given as such or as `mesh` and `mesh_axes`"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"w": jnp.arange(4.0)})
    sharding = NamedSharding(mesh(), PartitionSpec("x"))
    for args in (
        ocp.ArrayRestoreArgs(sharding=sharding),
        ocp.ArrayRestoreArgs(mesh=mesh(), mesh_axes=PartitionSpec("x")),
    ):
        found = checkpointer.restore(d / "a", item={"w": 0}, restore_args={"w": args})
        assert found["w"].sharding.is_equivalent_to(sharding, 1)
        np.testing.assert_array_equal(found["w"], np.arange(4.0))


@scenario("ArrayRestoreArgs(global_shape=, strict=)", "none: shapes must agree")
def restore_other_shape(ocp: Any, d: Path) -> None:
    """another shape raises ValueError; with `strict=False` it is cut or padded with zeros"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"w": jnp.arange(4.0)})
    item = {"w": 0}
    with pytest.raises(ValueError, match="not compatible"):
        checkpointer.restore(
            d / "a", item=item, restore_args={"w": ocp.ArrayRestoreArgs(global_shape=(6,))}
        )
    for shape, expected in (((6,), [0, 1, 2, 3, 0, 0]), ((2,), [0, 1])):
        args = {"w": ocp.ArrayRestoreArgs(global_shape=shape, strict=False)}
        found = checkpointer.restore(d / "a", item=item, restore_args=args)
        np.testing.assert_array_equal(found["w"], expected)


@scenario("type_handlers.ArrayRestoreArgs", "the same")
def names_in_type_handlers(ocp: Any, d: Path) -> None:
    """the args are the same classes under `type_handlers`"""
    for name in ("ArrayRestoreArgs", "RestoreArgs", "SaveArgs"):
        assert getattr(ocp.type_handlers, name) is getattr(ocp, name)


@scenario("SaveArgs(dtype=)", "ostraka.save(dtype=)")
def save_cast(ocp: Any, d: Path) -> None:
    """`SaveArgs(dtype=)` casts on the way to disk"""
    checkpointer = ocp.PyTreeCheckpointer()
    args = {"w": ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16)), "b": ocp.SaveArgs()}
    checkpointer.save(d / "a", {"w": jnp.ones(3), "b": jnp.ones(2)}, save_args=args)
    found = checkpointer.restore(d / "a")
    assert found["w"].dtype == jnp.bfloat16
    assert found["b"].dtype == jnp.float32


@scenario("flax.training.orbax_utils", "not needed")
def flax_save_args(ocp: Any, d: Path) -> None:
    """Flax's `save_args_from_target` and its like, which make Orbax's own objects"""
    from flax.training import orbax_utils

    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", tree(), save_args=orbax_utils.save_args_from_target(tree()))
    args = orbax_utils.restore_args_from_target(tree())
    same(checkpointer.restore(d / "a", item=tree(), restore_args=args), tree())


@scenario("checkpoint_utils.construct_restore_args", "like=")
def construct_restore_args(ocp: Any, d: Path) -> None:
    """arrays become ArrayRestoreArgs with sharding and shape, numpy and numbers RestoreArgs"""
    found = ocp.checkpoint_utils.construct_restore_args(tree())
    assert isinstance(found["w"], ocp.ArrayRestoreArgs)
    assert found["w"].sharding is not None
    assert found["w"].global_shape == (2, 3)
    assert found["w"].dtype == jnp.float32
    assert not isinstance(found["b"], ocp.ArrayRestoreArgs)
    assert found["b"].restore_type is np.ndarray
    assert found["step"].restore_type is int
    sharding = NamedSharding(mesh(), PartitionSpec())
    moved = ocp.checkpoint_utils.construct_restore_args({"w": tree()["w"]}, {"w": sharding})
    assert moved["w"].sharding == sharding


@scenario("PLACEHOLDER", "only=")
def placeholder(ocp: Any, d: Path) -> None:
    """a leaf that is `...` is not read, and stays"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"w": jnp.ones(2), "x": jnp.ones(3)})
    found = checkpointer.restore(d / "a", item={"w": jnp.zeros(2), "x": ocp.PLACEHOLDER})
    assert found["x"] is ...
    np.testing.assert_array_equal(found["w"], np.ones(2))


@scenario("StandardCheckpointer", "handle = ostraka.save_async(path, tree); handle.wait()")
def standard_round_trip(ocp: Any, d: Path) -> None:
    """saves in the background; `wait_until_finished`; a template's dtype is cast to silently"""
    with ocp.StandardCheckpointer() as checkpointer:
        assert checkpointer.save(d / "a", tree()) is None
        checkpointer.wait_until_finished()
        same(checkpointer.restore(d / "a"), tree())
        like = {**abstract(), "w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}
        assert checkpointer.restore(d / "a", like)["w"].dtype == jnp.bfloat16


@scenario("StandardCheckpointer.restore", "ostraka.restore: Mismatch")
def standard_refusals(ocp: Any, d: Path) -> None:
    """another shape, another tree, text and single arrays raise ValueError; `args=` TypeError"""
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(d / "a", tree())
    checkpointer.wait_until_finished()
    with pytest.raises(ValueError):
        checkpointer.restore(d / "a", {**abstract(), "w": jax.ShapeDtypeStruct((9,), jnp.float32)})
    with pytest.raises(ValueError):
        checkpointer.restore(d / "a", {"w": abstract()["w"]})
    for bad in ({"a": "text"}, jnp.ones(2)):
        with pytest.raises(ValueError):
            ocp.StandardCheckpointer().save(d / "b", bad)
    with pytest.raises(TypeError):
        checkpointer.save(d / "c", args=ocp.args.StandardSave(tree()))
    checkpointer.close()


@scenario("StandardCheckpointer.restore, shardings", "shardings in like=")
def standard_sharded(ocp: Any, d: Path) -> None:
    """a template's sharding is where the array goes"""
    sharding = NamedSharding(mesh(), PartitionSpec(None))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(d / "a", tree())
        checkpointer.wait_until_finished()
        like = {**abstract(), "w": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)}
        assert checkpointer.restore(d / "a", like)["w"].sharding.is_equivalent_to(sharding, 2)


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
    """saves in the background, with a timeout; `check_for_errors`, `close`"""
    options = ocp.AsyncOptions(timeout_secs=60)
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
    checkpointer.save(d / "a", args=ocp.args.PyTreeSave(tree()))
    checkpointer.check_for_errors()
    checkpointer.wait_until_finished()
    same(checkpointer.restore(d / "a"), tree())
    checkpointer.close()
    assert isinstance(checkpointer, ocp.Checkpointer)


@scenario("AsyncCheckpointer: values at the call", "ostraka.save_async")
def async_keeps_values(ocp: Any, d: Path) -> None:
    """numpy arrays may be written to as soon as `save` has returned"""
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    array = np.ones(1000)
    checkpointer.save(d / "a", args=ocp.args.PyTreeSave({"a": array}))
    array[:] = 7
    checkpointer.wait_until_finished()
    np.testing.assert_array_equal(checkpointer.restore(d / "a")["a"], np.ones(1000))
    checkpointer.close()


@scenario("JsonCheckpointHandler, args.JsonSave, args.JsonRestore", "values in the tree")
def json_item(ocp: Any, d: Path) -> None:
    """JSON: tuples are lists; `JsonRestore()` needs no template"""
    checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    checkpointer.save(d / "a", args=ocp.args.JsonSave({"a": (1, 2), "b": {"c": None, "d": "x"}}))
    expected = {"a": [1, 2], "b": {"c": None, "d": "x"}}
    assert checkpointer.restore(d / "a", args=ocp.args.JsonRestore()) == expected
    checkpointer.save(d / "b", {"x": 1.5})
    assert checkpointer.restore(d / "b") == {"x": 1.5}


@scenario("ArrayCheckpointHandler, args.ArraySave", "an array in the tree")
def array_item(ocp: Any, d: Path) -> None:
    """one array, and one number"""
    checkpointer = ocp.Checkpointer(ocp.ArrayCheckpointHandler())
    checkpointer.save(d / "a", args=ocp.args.ArraySave(jnp.arange(3)))
    same(checkpointer.restore(d / "a", args=ocp.args.ArrayRestore()), jnp.arange(3))


@scenario("args.NumpyRandomKeySave", "the state in the tree")
def numpy_random_key(ocp: Any, d: Path) -> None:
    """numpy's random state"""
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    state: Any = np.random.RandomState(3).get_state()
    checkpointer.save(d / "a", args=ocp.args.Composite(rng=ocp.args.NumpyRandomKeySave(state)))
    args = ocp.args.Composite(rng=ocp.args.NumpyRandomKeyRestore())
    found: Any = checkpointer.restore(d / "a", args=args).rng
    np.testing.assert_array_equal(found[1], state[1])
    assert found[0] == state[0]
    assert list(found[2:]) == list(state[2:])


@scenario("CompositeCheckpointHandler, args.Composite", "one dict")
def composite(ocp: Any, d: Path) -> None:
    """several items by name, all or some of them; one that is not there raises KeyError"""
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler("state", "config"))
    args = ocp.args
    checkpointer.save(
        d / "a",
        args=args.Composite(state=args.StandardSave(tree()), config=args.JsonSave({"lr": 0.1})),
    )
    found = checkpointer.restore(d / "a")
    same(found.state, tree())
    assert found["config"] == {"lr": 0.1}
    some = checkpointer.restore(d / "a", args=args.Composite(config=args.JsonRestore()))
    assert list(some.keys()) == ["config"]
    with pytest.raises(KeyError):
        checkpointer.restore(d / "a", args=args.Composite(none=args.JsonRestore()))


@scenario("args.Composite", "one dict")
def composite_object(ocp: Any, d: Path) -> None:
    """attributes and keys; both raise KeyError for what is missing, `.get` gives None"""
    found = ocp.args.Composite(a=1, b=2)
    assert found.a == 1
    assert found["b"] == 2
    assert "a" in found
    assert len(found) == 2
    assert dict(found.items()) == {"a": 1, "b": 2}
    assert found.get("c") is None
    with pytest.raises(KeyError):
        _ = found.c
    with pytest.raises(KeyError):
        _ = found["c"]


@scenario("Checkpointer.metadata", "ostraka.open(path)")
def checkpointer_metadata(ocp: Any, d: Path) -> None:
    """shapes and dtypes without reading; subscripted, or `.tree`; empty for a missing path"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {**tree(), "s": "text", "t": (jnp.ones(2), 1)})
    found = checkpointer.metadata(d / "a").item_metadata
    assert found["w"].shape == (2, 3)
    assert found["w"].dtype == jnp.float32
    assert found.tree["t"][0].shape == (2,)
    assert isinstance(found["w"], ocp.metadata.ArrayMetadata)
    missing = checkpointer.metadata(d / "none")
    assert missing.item_metadata is None
    assert missing.custom_metadata == {}


@scenario("save(custom_metadata=)", "ostraka.save(metadata=)")
def custom_metadata(ocp: Any, d: Path) -> None:
    """metadata of the caller's comes back with `metadata(path)`"""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(d / "a", tree(), custom_metadata={"run": "x", "n": 3})
        checkpointer.wait_until_finished()
        assert checkpointer.metadata(d / "a").custom_metadata == {"run": "x", "n": 3}


@scenario("metadata as a template, tree.to_shape_dtype_struct", "ostraka.restore(path)")
def restore_by_metadata(ocp: Any, d: Path) -> None:
    """what `metadata` gives becomes a template for `restore`"""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(d / "a", {"w": jnp.arange(4.0)})
        checkpointer.wait_until_finished()
        meta = checkpointer.metadata(d / "a").item_metadata
        like = jax.tree.map(ocp.tree.to_shape_dtype_struct, meta.tree)
        same(checkpointer.restore(d / "a", like), {"w": jnp.arange(4.0)})


@scenario("PyTreeCheckpointHandler options", "none")
def handler_options(ocp: Any, d: Path) -> None:
    """options about Orbax's files are taken; an unknown one raises TypeError"""
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, save_concurrent_gb=8, restore_concurrent_gb=8
    )
    checkpointer = ocp.Checkpointer(handler)
    args = ocp.args.PyTreeSave(tree(), ocdbt_target_data_file_size=2 << 20)
    checkpointer.save(d / "a", args=args)
    same(checkpointer.restore(d / "a"), tree())
    with pytest.raises(TypeError):
        ocp.PyTreeCheckpointHandler(nonsense=1)


@scenario("PRNG keys", "the key in the tree")
def prng_keys(ocp: Any, d: Path) -> None:
    """typed keys come back as keys"""
    checkpointer = ocp.PyTreeCheckpointer()
    key = jax.random.key(3)
    checkpointer.save(d / "a", {"k": key, "w": jnp.ones(1)})
    found = checkpointer.restore(d / "a")["k"]
    assert jax.random.key_data(found).tolist() == jax.random.key_data(key).tolist()


@flax.struct.dataclass
class Train:
    params: Any
    step: int
    apply: Any = flax.struct.field(pytree_node=False)


@scenario("flax.struct dataclasses, optax states", "ostraka.restore(path, like=state)")
def train_state(ocp: Any, d: Path) -> None:
    """a train state with static fields and an optax state, into a template of it"""
    params = {"w": jnp.ones((2, 2))}
    tx = optax.adam(0.1)
    state = {"train": Train(params, 3, print), "opt": tx.init(params)}
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", state)
    same(checkpointer.restore(d / "a", item=state), state)
    found = checkpointer.restore(d / "a")
    assert set(found["train"]) == {"params", "step"}
    assert isinstance(found["opt"], list)


@scenario("NNX state", "ostraka.save(path, model); ostraka.restore(path, into=model)")
def nnx_state(ocp: Any, d: Path) -> None:
    """`nnx.state` into an abstract one; without a template it gains a level, `value`"""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    _, state = nnx.split(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(d / "a", state)
        checkpointer.wait_until_finished()
        like = nnx.state(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1))))
        found = checkpointer.restore(d / "a", like)
        np.testing.assert_array_equal(found["kernel"][...], model.kernel[...])
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
    """save, restore by step and without, `latest_step`, `all_steps`, `directory`"""
    with ocp.CheckpointManager(d / "m") as manager:
        assert save_steps(ocp, manager, [0, 1]) == [True, True]
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1]
        assert manager.latest_step() == 1
        same(manager.restore(1), {"s": jnp.full(2, 1)})
        same(manager.restore(None, args=ocp.args.StandardRestore()), {"s": jnp.full(2, 1)})
        like = {"s": jax.ShapeDtypeStruct((2,), int)}
        same(manager.restore(0, args=ocp.args.StandardRestore(like)), {"s": jnp.full(2, 0)})
        assert str(manager.directory) == str(d / "m")
        assert (manager.directory / "1").exists()


@scenario("CheckpointManager, empty", "manager.latest() is None")
def manager_empty(ocp: Any, d: Path) -> None:
    """nothing there: None and [], and FileNotFoundError"""
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


@scenario("CheckpointManager.save", "manager.save: replaces; a lower step raises")
def manager_same_step(ocp: Any, d: Path) -> None:
    """the same and a lower step return False; the same with `force` raises a ValueError"""
    with ocp.CheckpointManager(d / "m") as manager:
        assert save_steps(ocp, manager, [5, 5, 3]) == [True, False, False]
        with pytest.raises(ocp.checkpoint_manager.StepAlreadyExistsError):
            save_steps(ocp, manager, [5], force=True)
        assert issubclass(ocp.checkpoint_manager.StepAlreadyExistsError, ValueError)
        assert save_steps(ocp, manager, [3], force=True) == [True]
        assert sorted(manager.all_steps()) == [3, 5]


@scenario("CheckpointManager.save, wrong arguments", "TypeError")
def manager_wrong_arguments(ocp: Any, d: Path) -> None:
    """args by position, and no args at all, raise ValueError"""
    with ocp.CheckpointManager(d / "m") as manager:
        with pytest.raises(ValueError):
            manager.save(0, ocp.args.StandardSave(tree()))
        with pytest.raises(ValueError):
            manager.save(0)
        assert manager.all_steps() == []


@scenario("max_to_keep", "keep=2")
def max_to_keep(ocp: Any, d: Path) -> None:
    """the last ones stay, in memory and on disk"""
    with manager_of(ocp, d / "m", max_to_keep=2) as manager:
        save_steps(ocp, manager, range(4))
        assert manager.all_steps() == [2, 3]
    assert sorted(p.name for p in (d / "m").iterdir() if p.name.isdigit()) == ["2", "3"]


@scenario("keep_period", "keep=1, keep_every=2")
def keep_period(ocp: Any, d: Path) -> None:
    """multiples stay as well"""
    with manager_of(ocp, d / "m", max_to_keep=1, keep_period=2) as manager:
        save_steps(ocp, manager, range(4))
        assert manager.all_steps() == [0, 2, 3]


@scenario("save_interval_steps, should_save", "every=3; manager.should_save(step)")
def save_interval(ocp: Any, d: Path) -> None:
    """multiples are saved, and the first; `should_save` says so before"""
    with manager_of(ocp, d / "m", save_interval_steps=3) as manager:
        asked: list[bool] = []
        saved: list[bool] = []
        for step in range(1, 8):
            asked.append(manager.should_save(step))
            saved += save_steps(ocp, manager, [step])
        assert asked == saved == [True, False, True, False, False, True, False]


@scenario("save_on_steps, should_save_fn", "at=[3], when=function")
def save_on_steps(ocp: Any, d: Path) -> None:
    """given steps, or what a function of the step says"""
    with manager_of(ocp, d / "a", save_interval_steps=5, save_on_steps=[3]) as manager:
        assert save_steps(ocp, manager, range(1, 6)) == [True, False, True, False, True]
    with manager_of(ocp, d / "b", should_save_fn=lambda step, last: step == 2) as manager:
        assert save_steps(ocp, manager, range(4)) == [False, False, True, False]


@scenario("best_fn, best_mode, save(metrics=)", "keep_best=ostraka.Best(…)")
def best(ocp: Any, d: Path) -> None:
    """with `max_to_keep=1` the best stays and the latest goes; a step without metrics stays"""
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


@scenario("step_prefix, step_format_fixed_length", "none: step_00000007")
def step_names(ocp: Any, d: Path) -> None:
    """how steps are called on disk"""
    options = {"step_prefix": "ckpt", "step_format_fixed_length": 4}
    with manager_of(ocp, d / "m", **options) as manager:
        save_steps(ocp, manager, [7])
    assert (d / "m" / "ckpt_0007").is_dir()
    with manager_of(ocp, d / "m", **options) as manager:
        assert manager.all_steps() == [7]


@scenario("read_only", "read_only=True")
def read_only(ocp: Any, d: Path) -> None:
    """steps are read, and `save` returns False"""
    with ocp.CheckpointManager(d / "m") as manager:
        save_steps(ocp, manager, [1])
    with manager_of(ocp, d / "m", read_only=True) as manager:
        assert manager.all_steps() == [1]
        assert save_steps(ocp, manager, [2]) == [False]
        same(manager.restore(1, args=ocp.args.StandardRestore()), {"s": jnp.full(2, 1)})


@scenario("enable_async_checkpointing=False", "asynchronous=False")
def synchronous(ocp: Any, d: Path) -> None:
    """the step is there when `save` returns"""
    manager = manager_of(ocp, d / "m", enable_async_checkpointing=False)
    save_steps(ocp, manager, [1])
    assert ocp.utils.checkpoint_steps(d / "m") == [1]
    manager.close()


@scenario("async_options, create, cleanup_tmp_directories and others", "none")
def other_options(ocp: Any, d: Path) -> None:
    """options about Orbax's threads and files are taken; an unknown one raises TypeError"""
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
    with pytest.raises(TypeError):
        ocp.CheckpointManagerOptions(nonsense=1)
    with pytest.raises(ValueError):
        ocp.CheckpointManagerOptions(best_mode="best", best_fn=len)
    with pytest.raises(ValueError):
        ocp.CheckpointManagerOptions(max_to_keep=-1)


@scenario("CheckpointManager, args.Composite, item_names", "one dict")
def manager_composite(ocp: Any, d: Path) -> None:
    """several items; all, or some; names that were not announced raise ValueError"""
    args = ocp.args
    with ocp.CheckpointManager(d / "m", item_names=("state", "config")) as manager:
        both = args.Composite(state=args.StandardSave(tree()), config=args.JsonSave({"x": 1}))
        assert manager.save(0, args=both) is True
        found = manager.restore(0)
        same(found.state, tree())
        assert found.config == {"x": 1}
        some = manager.restore(0, args=args.Composite(config=args.JsonRestore()))
        assert some.get("state") is None
        assert some.config == {"x": 1}
        with pytest.raises(KeyError):
            manager.restore(0, args=args.Composite(none=args.JsonRestore()))
        with pytest.raises(ValueError):
            manager.save(1, args=args.StandardSave(tree()))


@scenario("CheckpointManager, fresh", "ostraka.Manager(root).restore()")
def manager_fresh(ocp: Any, d: Path) -> None:
    """a new manager finds what another one saved, single items and several"""
    args = ocp.args
    with ocp.CheckpointManager(d / "a") as manager:
        save_steps(ocp, manager, [4])
    with ocp.CheckpointManager(d / "a") as manager:
        same(manager.restore(4, args=args.StandardRestore()), {"s": jnp.full(2, 4)})
    with ocp.CheckpointManager(d / "b") as manager:
        manager.save(1, args=args.Composite(a=args.JsonSave([1]), b=args.StandardSave(tree())))
    with ocp.CheckpointManager(d / "b") as manager:
        wanted = args.Composite(b=args.StandardRestore(abstract()), a=args.JsonRestore())
        found = manager.restore(manager.latest_step(), args=wanted)
        same(found["b"], tree())
        assert found["a"] == [1]


@scenario("CheckpointManager(directory, checkpointers, options)", "ostraka.Manager(root)")
def old_form_dict(ocp: Any, d: Path) -> None:
    """a dict of checkpointers, `items`, `save_kwargs`, `restore_kwargs`; restores a Composite"""
    checkpointers = {
        "state": ocp.PyTreeCheckpointer(),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    manager = ocp.CheckpointManager(d / "m", checkpointers, options)
    items = {"state": tree(), "config": {"x": 1}}
    save_args = {"save_args": jax.tree.map(lambda _: ocp.SaveArgs(), tree())}
    assert manager.save(0, items, save_kwargs={"state": save_args}) is True
    found = manager.restore(0)
    same(found["state"], tree())
    assert found["config"] == {"x": 1}
    restore_args = {"restore_args": ocp.checkpoint_utils.construct_restore_args(tree())}
    some = manager.restore(0, items={"state": tree()}, restore_kwargs={"state": restore_args})
    same(some["state"], tree())
    assert "config" not in some
    manager.close()


@scenario("CheckpointManager(directory, checkpointer)", "ostraka.Manager(root)")
def old_form_single(ocp: Any, d: Path) -> None:
    """one checkpointer: `save(step, tree)`, `restore(step, items=template)`"""
    manager = ocp.CheckpointManager(
        d / "m", ocp.PyTreeCheckpointer(), ocp.CheckpointManagerOptions(max_to_keep=1)
    )
    assert manager.save(3, tree()) is True
    same(manager.restore(3), tree())
    same(manager.restore(3, items=tree()), tree())
    args = ocp.checkpoint_utils.construct_restore_args(tree())
    same(manager.restore(3, items=tree(), restore_kwargs={"restore_args": args}), tree())
    manager.close()


@scenario("CheckpointManager(item_handlers=)", "none")
def item_handlers(ocp: Any, d: Path) -> None:
    """a handler for each item, so that `restore` needs no args"""
    handlers = {"a": ocp.StandardCheckpointHandler(), "b": ocp.JsonCheckpointHandler()}
    args = ocp.args
    with ocp.CheckpointManager(d / "m", item_handlers=handlers) as manager:
        manager.save(0, args=args.Composite(a=args.StandardSave(tree()), b=args.JsonSave({"x": 1})))
        manager.wait_until_finished()
    with ocp.CheckpointManager(d / "m", item_handlers=handlers) as manager:
        found = manager.restore(0)
        same(found.a, tree())
        assert found.b == {"x": 1}
    single = ocp.CheckpointManager(d / "s", item_handlers=ocp.PyTreeCheckpointHandler())
    single.save(0, args=ocp.args.PyTreeSave(tree()))
    single.wait_until_finished()
    same(single.restore(0), tree())
    single.close()


@scenario("CheckpointManager.metadata, item_metadata", "ostraka.open(manager.path(step))")
def manager_metadata(ocp: Any, d: Path) -> None:
    """of a step, of its items, and of the root"""
    args = ocp.args
    with ocp.CheckpointManager(d / "m", metadata={"lang": "en"}) as manager:
        both = args.Composite(a=args.StandardSave(tree()), b=args.JsonSave({"x": 1}))
        manager.save(2, args=both, custom_metadata={"lr": 0.5})
        manager.wait_until_finished()
        assert manager.metadata(2).custom_metadata == {"lr": 0.5}
        assert manager.metadata().custom_metadata == {"lang": "en"}
        assert manager.item_metadata(2)["a"]["w"].shape == (2, 3)
        assert manager.metadata(2).item_metadata.a["w"].dtype == jnp.float32


@scenario("CheckpointManager.delete, reload", "manager.delete(step)")
def delete_and_reload(ocp: Any, d: Path) -> None:
    """a step is deleted; another manager sees that after `reload`"""
    with ocp.CheckpointManager(d / "m") as manager, ocp.CheckpointManager(d / "m") as other:
        save_steps(ocp, manager, [1, 2])
        manager.wait_until_finished()
        other.reload()
        assert other.all_steps() == [1, 2]
        manager.delete(1)
        assert manager.all_steps() == [2]
        assert other.all_steps(read=True) == [2]


@scenario("reached_preemption, check_for_errors, wait_until_finished, close", "the same, wait()")
def manager_calls(ocp: Any, d: Path) -> None:
    """calls that a loop makes at each step"""
    manager = ocp.CheckpointManager(d / "m")
    assert manager.reached_preemption(1) is False
    save_steps(ocp, manager, [1])
    manager.check_for_errors()
    assert manager.wait_until_finished() is None
    assert manager.is_saving_in_progress() is False
    assert manager.close() is None


@scenario("subclasses of CheckpointManager", "wrap ostraka.Manager")
def manager_subclass(ocp: Any, d: Path) -> None:
    """`save` and `restore` are overridden, and call super"""

    class Mine(ocp.CheckpointManager):
        def save(self, step: int, state: Any) -> bool:
            return super().save(step, args=ocp.args.StandardSave(state))

        def restore(self, step: int) -> Any:
            return super().restore(step, args=ocp.args.StandardRestore())

    with Mine(d / "m", options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        assert manager.save(1, tree())
        assert manager.save(2, tree())
        same(manager.restore(2), tree())
        assert manager.all_steps() == [2]


def policy_steps(ocp: Any, d: Path, **options: Any) -> list[int]:
    with manager_of(ocp, d, **options) as manager:
        for step in range(6):
            save_steps(ocp, manager, [step], metrics={"l": float((step * 3) % 5)})
        return manager.all_steps()


@scenario("preservation_policy: LatestN, EveryNSteps, AnyPreservationPolicy", "keep=, keep_every=")
def preservation_policies(ocp: Any, d: Path) -> None:
    """policies of what stays"""
    p = ocp.checkpoint_managers
    latest = p.LatestN(1)
    assert policy_steps(ocp, d / "a", preservation_policy=latest) == [5]
    either = p.AnyPreservationPolicy([latest, p.EveryNSteps(3)])
    assert policy_steps(ocp, d / "b", preservation_policy=either) == [0, 3, 5]


@scenario("preservation_policy: BestN, CustomSteps", "keep_best=, keep_if=")
def best_policy(ocp: Any, d: Path) -> None:
    """the best by a metric, or given steps"""
    p = ocp.checkpoint_managers
    best_two = p.BestN(get_metric_fn=lambda m: m["l"], n=2)
    assert policy_steps(ocp, d / "a", preservation_policy=best_two) == [1, 3]
    lowest = p.BestN(get_metric_fn=lambda m: m["l"], reverse=True, n=1)
    assert policy_steps(ocp, d / "b", preservation_policy=lowest) == [5]
    assert policy_steps(ocp, d / "c", preservation_policy=p.CustomSteps([1, 2])) == [1, 2]


@scenario("save_decision_policy: FixedIntervalPolicy and others", "every=, at=, when=")
def decision_policies(ocp: Any, d: Path) -> None:
    """policies of when to save"""
    p = ocp.checkpoint_managers
    for number, (policy, expected) in enumerate(
        [
            (p.FixedIntervalPolicy(3), [3, 6]),
            (p.SpecificStepsPolicy([1, 4]), [1, 4]),
            (p.AnySavePolicy([p.FixedIntervalPolicy(4), p.InitialSavePolicy()]), [1, 4]),
        ]
    ):
        with manager_of(ocp, d / str(number), save_decision_policy=policy) as manager:
            save_steps(ocp, manager, range(1, 8))
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


@scenario("CheckpointHandler, register_with_handler, args.CheckpointArgs", "get_state, set_state")
def own_handler(ocp: Any, d: Path) -> None:
    """a handler of one's own with its args, alone and as an item of a step"""
    handler, save, restore = text_handler(ocp)
    checkpointer = ocp.Checkpointer(handler())
    checkpointer.save(d / "a", args=save("hello"))
    assert checkpointer.restore(d / "a", args=restore()) == "hello"
    args = ocp.args
    with ocp.CheckpointManager(d / "m") as manager:
        manager.save(0, args=args.Composite(s=args.StandardSave(tree()), t=save("step")))
        found = manager.restore(0, args=args.Composite(t=restore()))
        assert found.t == "step"


@scenario("CheckpointHandler without args", "get_state, set_state")
def legacy_handler(ocp: Any, d: Path) -> None:
    """a handler that has no args registered: `save(directory, item)`"""

    class Legacy(ocp.CheckpointHandler):
        def save(self, directory: Any, item: Any, upper: bool = False) -> None:
            (directory / "x").write_text(item.upper() if upper else item)

        def restore(self, directory: Any, item: Any = None) -> Any:
            return (directory / "x").read_text()

    checkpointer = ocp.Checkpointer(Legacy())
    checkpointer.save(d / "a", "text", upper=True)
    assert checkpointer.restore(d / "a") == "TEXT"


@scenario("CheckpointHandlerRegistry, DefaultCheckpointHandlerRegistry", "none")
def handler_registry(ocp: Any, d: Path) -> None:
    """a registry says which handler is for which item and args"""
    handler, save, restore = text_handler(ocp)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("note", save, handler())
    registry.add("note", restore, handler())
    args = ocp.args
    with ocp.CheckpointManager(d / "m", handler_registry=registry) as manager:
        manager.save(0, args=args.Composite(note=save("x"), state=args.StandardSave(tree())))
        wanted = args.Composite(note=restore(), state=args.StandardRestore(abstract()))
        found = manager.restore(0, args=wanted)
        assert found.note == "x"
        same(found.state, tree())


@scenario("grain.checkpoint.CheckpointSave, CheckpointRestore", "the iterator in the tree")
def grain_iterator(ocp: Any, d: Path) -> None:
    """Grain's own args, which are registered with Orbax, beside ours"""
    import grain.python as grain

    source: Any = list(range(20))

    def iterator() -> Any:
        loader = grain.DataLoader(
            data_source=source,
            sampler=grain.SequentialSampler(20, grain.NoSharding()),
            worker_count=0,
        )
        return iter(loader)

    data = iterator()
    [next(data) for _ in range(3)]
    args = ocp.args
    with ocp.CheckpointManager(d / "m") as manager:
        both = args.Composite(
            state=args.StandardSave(tree()), data=grain.PyGrainCheckpointSave(data)
        )
        assert manager.save(0, args=both)
        manager.wait_until_finished()
        expected = next(data)
        other = iterator()
        wanted = args.Composite(data=grain.PyGrainCheckpointRestore(other))
        found = manager.restore(0, args=wanted)
        assert next(found.data) == expected


class Point:
    def __init__(self, x: int):
        self.x = x


@scenario("type_handlers.register_type_handler, TypeHandler", "get_state, set_state")
def own_type(ocp: Any, d: Path) -> None:
    """a leaf of a type of one's own, by a handler of one's own"""

    class PointHandler(ocp.type_handlers.TypeHandler):
        def typestr(self) -> str:
            return "Point"

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            for value, info in zip(values, infos, strict=True):
                (info.parent_dir / f"{info.name}.txt").write_text(str(value.x))
            return []

        async def deserialize(self, infos: Any, args: Any = None) -> Any:
            return [Point(int((i.parent_dir / f"{i.name}.txt").read_text())) for i in infos]

        async def metadata(self, infos: Any) -> Any:
            return [None for _ in infos]

    ocp.type_handlers.register_type_handler(Point, PointHandler(), override=True)
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"p": Point(4), "w": jnp.ones(2)})
    args = {"p": ocp.RestoreArgs(restore_type=Point), "w": ocp.RestoreArgs()}
    found = checkpointer.restore(d / "a", restore_args=args)
    assert found["p"].x == 4
    np.testing.assert_array_equal(found["w"], np.ones(2))


@scenario("type_handlers.SingleReplicaArrayHandler", "share_reads=")
def single_replica_handler(ocp: Any, d: Path) -> None:
    """registered for jax.Array, as MaxText does; a second time needs `override`"""
    handlers = ocp.type_handlers
    with pytest.raises(ValueError):
        handlers.register_type_handler(jax.Array, handlers.ArrayHandler())
    assert handlers.get_type_handler(jax.Array) is not None
    handlers.SingleReplicaArrayHandler(replica_axis_index=0, broadcast_memory_limit_bytes=1 << 20)
    handlers.register_type_handler(jax.Array, handlers.ArrayHandler(), override=True)
    ocp.PyTreeCheckpointer().save(d / "a", tree())
    same(ocp.PyTreeCheckpointer().restore(d / "a"), tree())


# Tools


@scenario("checkpoint_utils.checkpoints_iterator", "manager.watch(newest_only=True)")
def checkpoints_iterator(ocp: Any, d: Path) -> None:
    """an evaluator: the newest step, then newer ones; ends by `timeout` and `timeout_fn`"""
    manager = manager_of(ocp, d / "m", enable_async_checkpointing=False)
    save_steps(ocp, manager, [0, 1])
    done = threading.Event()

    def train() -> None:
        time.sleep(0.3)
        save_steps(ocp, manager, [2])
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    iterate = ocp.checkpoint_utils.checkpoints_iterator
    seen = list(iterate(d / "m", timeout=0.5, timeout_fn=done.is_set))
    thread.join()
    assert seen == [1, 2]
    assert list(iterate(d / "none", timeout=0.1)) == []
    manager.close()


@scenario("utils.checkpoint_steps, any_checkpoint_step, step_from_checkpoint_name", "ostraka ls")
def step_tools(ocp: Any, d: Path) -> None:
    """which steps are there, what a name says"""
    with manager_of(ocp, d / "m", step_prefix="ck") as manager:
        save_steps(ocp, manager, [3, 5])
    assert sorted(ocp.utils.checkpoint_steps(d / "m")) == [3, 5]
    assert ocp.utils.any_checkpoint_step(d / "m") in (3, 5)
    assert ocp.utils.step_from_checkpoint_name("ck_12") == 12
    assert ocp.utils.is_checkpoint_finalized(d / "m" / "ck_3")
    assert ocp.utils.TMP_DIR_SUFFIX == ".orbax-checkpoint-tmp"


@scenario("path.step, step: standard_name_format, build_step_path", "manager.path(step)")
def step_paths(ocp: Any, d: Path) -> None:
    """the names of steps, and the steps of names"""
    naming = ocp.path.step.standard_name_format(step_prefix="a", step_format_fixed_length=3)
    assert naming.build_name(7) == "a_007"
    assert str(ocp.step.build_step_path(d, naming, 7)) == str(d / "a_007")
    with ocp.CheckpointManager(
        d / "m", options=ocp.CheckpointManagerOptions(step_name_format=naming)
    ) as manager:
        save_steps(ocp, manager, [7])
    assert [found.step for found in naming.find_all(d / "m")] == [7]
    assert naming.find_step(d / "m", 7).path.name == "a_007"
    with pytest.raises(ValueError):
        naming.find_step(d / "m", 8)


@scenario("utils.to_shape_dtype_struct, tree.to_flat_dict, from_flat_dict", "jax.eval_shape")
def tree_tools(ocp: Any, d: Path) -> None:
    """trees as shapes and as flat dicts"""
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree())
    assert shapes["w"].shape == (2, 3)
    assert shapes["w"].dtype == jnp.float32
    nested = {"a": {"b": 1, "c": [2, 3]}}
    flat = ocp.tree.to_flat_dict(nested, sep="/")
    assert flat == {"a/b": 1, "a/c/0": 2, "a/c/1": 3}
    assert ocp.tree.from_flat_dict(flat, target=nested, sep="/") == nested
    assert ocp.tree.serialize_tree({"a": (1, 2)}, keep_empty_nodes=True) == {"a": [1, 2]}


@scenario("transform_utils.intersect_trees, merge_trees", "plain Python")
def intersect(ocp: Any, d: Path) -> None:
    """what trees have in common, and all that they have"""
    one, two = {"a": 1, "b": {"c": 2}}, {"b": {"c": 3}, "d": 4}
    assert ocp.transform_utils.intersect_trees(one, two) == {"b": {"c": 3}}
    assert ocp.transform_utils.merge_trees(one, two) == {"a": 1, "b": {"c": 3}, "d": 4}


@scenario("test_utils.erase_and_create_empty", "none")
def erase_and_create_empty(ocp: Any, d: Path) -> None:
    """an empty directory, whatever was there; returns its path"""
    (d / "x").mkdir()
    (d / "x" / "file").write_text("a")
    made = ocp.test_utils.erase_and_create_empty(d / "x")
    assert list((d / "x").iterdir()) == []
    assert (made / "y").name == "y"


@scenario("multihost", "not needed")
def multihost(ocp: Any, d: Path) -> None:
    """which process this is, and waiting for the others"""
    assert ocp.multihost.process_index() == 0
    assert ocp.multihost.is_primary_host(0)
    ocp.multihost.sync_global_processes("here")


@scenario("import forms", "import ostraka")
def import_forms(ocp: Any, d: Path) -> None:
    """submodules are there under their names"""
    for name in [
        "args",
        "checkpoint_args",
        "checkpoint_manager",
        "checkpoint_managers",
        "checkpoint_utils",
        "checkpointers",
        "handlers",
        "metadata",
        "multihost",
        "options",
        "path",
        "test_utils",
        "transform_utils",
        "tree",
        "type_handlers",
        "utils",
        "abstract_checkpoint_manager",
    ]:
        module = importlib.import_module(f"{ocp.__name__}.{name}")
        assert getattr(ocp, name) is module
    assert ocp.checkpoint_manager.CheckpointManager is ocp.CheckpointManager
    assert ocp.v1.training.Checkpointer is not None
    with pytest.raises(AttributeError):
        _ = ocp.nonsense


# Version 1


@scenario("v1.save, v1.load", "ostraka.save, ostraka.restore")
def v1_round_trip(ocp: Any, d: Path) -> None:
    """a tree at a path; `overwrite`; a template"""
    v1 = ocp.v1
    assert v1.save(d / "a", tree()) is None
    same(v1.load(d / "a"), tree())
    with pytest.raises(ValueError):
        v1.save(d / "a", tree())
    v1.save(d / "a", {"x": 2}, overwrite=True)
    assert v1.load(d / "a") == {"x": 2}
    v1.save(d / "b", tree())
    found = v1.load(d / "b", {**abstract(), "w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)})
    assert found["w"].dtype == jnp.bfloat16
    with pytest.raises(ValueError):
        v1.load(d / "b", {"w": abstract()["w"]})
    with pytest.raises(ValueError):
        v1.load(d / "none")


@scenario("v1.save_async, save_pytree, load_pytree", "ostraka.save_async")
def v1_async(ocp: Any, d: Path) -> None:
    """in the background; `result()` waits. The older names work too"""
    response = ocp.v1.save_async(d / "a", tree())
    assert response.result() is None
    same(ocp.v1.load_pytree(d / "a"), tree())
    ocp.v1.save_pytree(d / "b", tree())
    same(ocp.v1.load(d / "b"), tree())


@scenario("v1.save_checkpointables, load_checkpointables", "one dict")
def v1_checkpointables(ocp: Any, d: Path) -> None:
    """several by name, all or some; a missing one raises KeyError"""
    v1 = ocp.v1
    v1.save_checkpointables(d / "a", {"state": tree(), "extra": {"x": 1}})
    found = v1.load_checkpointables(d / "a")
    same(found["state"], tree())
    assert found["extra"] == {"x": 1}
    assert list(v1.load_checkpointables(d / "a", {"extra": None})) == ["extra"]
    with pytest.raises(KeyError):
        v1.load_checkpointables(d / "a", {"none": None})
    same(v1.load(d / "a"), tree())


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


@scenario("v1.pytree_metadata, checkpointables_metadata", "ostraka.open(path)")
def v1_metadata(ocp: Any, d: Path) -> None:
    """shapes and dtypes without reading; `custom_metadata`"""
    ocp.v1.save(d / "a", tree(), custom_metadata={"x": 1})
    found = ocp.v1.pytree_metadata(d / "a")
    assert found.metadata["w"].shape == (2, 3)
    assert found.metadata["w"].dtype == jnp.float32
    assert found.custom_metadata == {"x": 1}
    assert set(ocp.v1.checkpointables_metadata(d / "a").metadata) == {"state"}


@scenario("v1.training.Checkpointer", "ostraka.Manager(root)")
def v1_training(ocp: Any, d: Path) -> None:
    """save, load, latest; FileExistsError for a step that is there, FileNotFoundError else"""
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


@scenario("v1.Context", "arguments of the calls")
def v1_context(ocp: Any, d: Path) -> None:
    """options for the calls inside: a partial load"""
    v1 = ocp.v1
    v1.save(d / "a", tree())
    loading = v1.options.PyTreeOptions(loading=v1.options.PyTreeOptions.Loading(partial_load=True))
    with v1.Context(pytree_options=loading):
        found = v1.load(d / "a", {"w": abstract()["w"]})
    same(found, {"w": tree()["w"]})


def as_table() -> str:
    """The scenarios as Markdown."""
    lines = ["| Orbax | scenario | with our own calls |", "| --- | --- | --- |"]
    lines += [f"| `{s.names}` | {s.text} | `{s.ours}` |" for s in SCENARIOS]
    return "\n".join(lines)
