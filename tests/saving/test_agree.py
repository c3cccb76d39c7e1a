"""What becomes of a captured tree once the processes agree: a new value, the old one as it was."""

import secrets
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ostraka.common.record import Stopwatch
from ostraka.layout.casts import cast_leaf
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec
from ostraka.processes.operation import Operation, ProcessFailed
from ostraka.saving.agree import RunningSave, SaveHooks, agree, number_meshes
from ostraka.saving.capture import capture
from ostraka.saving.place import Place
from ostraka.saving.save import SaveOptions
from ostraka.storage import MemoryStore


class Data:
    def get_state(self) -> Mapping[str, Any]:
        return {"at": 3}

    def set_state(self, state: Mapping[str, Any]) -> None: ...


def agree_alone(tree: Any, *, dtype: Any = None, check_place: Any = None) -> tuple[Any, Any]:
    captured = capture(tree)
    place = Place(MemoryStore(secrets.token_hex(4)))
    with Operation("test", alone=True) as operation:
        options, hooks = SaveOptions(dtype=dtype), SaveHooks(check_place=check_place)
        save = RunningSave("test", options, hooks, operation, place, Stopwatch())
        agreed = agree(save, captured)
    assert place.is_ready
    return captured, agreed


def test_what_was_captured_stays_as_it_was():
    tree = {"w": jnp.ones((4, 4)), "n": np.arange(3), "data": Data()}
    captured, agreed = agree_alone(tree, dtype="bfloat16")
    assert [leaf.dtype for leaf in captured.leaves] == ["float32", "int64"]
    assert [leaf.dtype for leaf in agreed.leaves] == ["bfloat16", "int64"]
    assert agreed.leaves[0].cast_from == "float32"
    assert captured.values[0] is not agreed.values[0]
    assert captured.values[1] is agreed.values[1]
    assert captured.tree["items"][2] == {"states": [], "path": "data", "items": []}
    assert agreed.tree["items"][2] == {"states": [{"json": {"at": 3}}], "items": []}


def test_two_saves_have_two_ids():
    ids = {agree_alone({"x": 1})[1].save_id for _ in range(3)}
    assert len(ids) == 3
    assert {len(save_id) for save_id in ids} == {16}


def test_the_place_may_refuse():
    def refuse() -> None:
        raise ProcessFailed(0, "taken")

    with pytest.raises(ProcessFailed, match="process 0: taken"):
        agree_alone({"x": 1}, check_place=refuse)


ONE, TWO = MeshSpec((), (), (0,)), MeshSpec(("x",), (2,), (0, 1))


def test_meshes_are_numbered_in_the_order_of_the_leaves():
    leaves = [
        LeafSpec("a", "jax", "float32", (4,), 1),
        LeafSpec("b", "numpy", "float32", (4,), HOST_LOCAL),
        LeafSpec("c", "jax", "float32", (4,), 1),
    ]
    renumbered, meshes = number_meshes(leaves, [ONE, TWO])
    assert [leaf.mesh for leaf in renumbered] == [0, HOST_LOCAL, 0]
    assert meshes == [TWO]
    assert number_meshes(renumbered, meshes) == (renumbered, meshes)


def test_only_floating_point_arrays_are_cast():
    leaves = [
        LeafSpec("array", "jax", "float32", (4,)),
        LeafSpec("integers", "numpy", "int32", (4,)),
        LeafSpec("scalar", "jax", "float32", ()),
        LeafSpec("as it is", "jax", "bfloat16", (4,)),
    ]
    cast = [cast_leaf(leaf, "bfloat16") for leaf in leaves]
    assert [(leaf.dtype, leaf.cast_from) for leaf in cast] == [
        ("bfloat16", "float32"),
        ("int32", None),
        ("float32", None),
        ("bfloat16", None),
    ]
    assert [cast_leaf(leaf, {"none/**": "bfloat16"}) for leaf in leaves] == leaves
