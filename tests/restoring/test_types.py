"""The types that a type checker sees: a restored tree has the type of its template.

`make check` compares each `assert_type` with what pyright infers.
"""

from pathlib import Path
from typing import Any, assert_type

import jax
import jax.numpy as jnp
from flax import nnx

import ostraka


class Net(nnx.Module):
    def __init__(self, value: float = 0.0):
        self.kernel = nnx.Param(jnp.full(2, value))


def test_restore_has_the_type_of_its_template(tmp_path: Path):
    path, tree = tmp_path / "c", {"w": jnp.ones(2)}
    ostraka.save(path, tree)
    assert_type(ostraka.restore(path, tree), dict[str, jax.Array])
    by_like = assert_type(ostraka.restore(path, like=tree, strict=True), dict[str, jax.Array])
    by_into = assert_type(ostraka.restore(path, into=tree, only="w"), dict[str, jax.Array])
    assert type(by_like) is type(by_into) is dict
    without = assert_type(ostraka.restore(path, mesh={"x": 2}), Any)
    assert without["w"].sharding.mesh.shape == {"x": 2}


def test_a_module_is_restored_as_one(tmp_path: Path):
    ostraka.save(tmp_path / "c", Net(1.0))
    made = assert_type(ostraka.restore(tmp_path / "c", like=nnx.eval_shape(Net)), Net)
    assert type(made) is Net
    filled = assert_type(ostraka.restore(tmp_path / "c", into=Net()), Net)
    assert filled.kernel[...].tolist() == [1, 1]


def test_the_restore_of_a_manager_has_the_same_types(tmp_path: Path):
    model = Net(1.0)
    with ostraka.Manager(tmp_path) as manager:
        manager.save(3, model)
        assert type(assert_type(manager.restore(like=Net()), Net)) is Net
        assert type(assert_type(manager.restore(3, like=Net(), fallback=True), Net)) is Net
        assert assert_type(manager.restore(into=model, strict=False), Net) is model
        assert type(assert_type(manager.restore(3), Any)) is dict
        assert assert_type(manager.resume(model), int) == 3
    assert assert_type(ostraka.latest(tmp_path), int | None) == 3
    checkpoint = ostraka.open(tmp_path)
    assert assert_type(checkpoint.num_params, int) == 2
    assert assert_type(checkpoint.abstract(), Any)["kernel"].shape == (2,)
