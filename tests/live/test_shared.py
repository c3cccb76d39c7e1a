"""What is one object at several places of a tree is written once, and comes back as one."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import ostraka
from ostraka.errors import Mismatch, PartialRestore


class Net(nnx.Module):
    def __init__(self, seed: int = 0):
        self.inner = nnx.Linear(3, 4, rngs=nnx.Rngs(seed))
        self.outer = nnx.Linear(4, 2, rngs=nnx.Rngs(seed + 1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(jax.nn.relu(self.inner(x)))


def make(seed: int = 0) -> dict[str, Any]:
    model = Net(seed)
    return {
        "model": model,
        "optimizer": nnx.ModelAndOptimizer(model, optax.adam(1e-2)),
        "decayed": [model.inner.kernel, model.outer.kernel],
        "inner": model.inner,
        "state": nnx.state(model, nnx.Param),
    }


def loss(model: Net) -> jax.Array:
    return jnp.mean((model(jnp.ones((5, 3))) - 1.0) ** 2)


def train(tree: dict[str, Any], steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        value, grads = nnx.value_and_grad(loss)(tree["optimizer"].model)
        tree["optimizer"].update(grads)
        losses.append(float(loss(tree["model"])))
        del value
    return losses


def assert_tied(tree: dict[str, Any]) -> None:
    model = tree["model"]
    assert tree["optimizer"].model is model
    assert tree["inner"] is model.inner
    assert tree["decayed"][0] is model.inner.kernel
    assert tree["decayed"][1] is model.outer.kernel
    assert tree["state"]["inner"]["bias"] is model.inner.bias


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    path = tmp_path_factory.mktemp("shared") / "c"
    tree = make()
    train(tree, 2)
    ostraka.save(path, tree)
    return path, train(tree, 3)


def test_it_is_written_once(saved: Any):
    path, _ = saved
    checkpoint = ostraka.open(path)
    model = make()["model"]
    parameters = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    assert checkpoint.nbytes == 3 * parameters + 4 + 4  # and two moments, count and step
    assert np.array_equal(checkpoint["decayed/0"][...], checkpoint["model/inner/kernel"][...])


@pytest.mark.parametrize("mode", ["like", "abstract", "into"])
def test_it_comes_back_as_one_and_trains_on(saved: Any, mode: str):
    path, expected = saved
    tree: Any = nnx.eval_shape(make) if mode == "abstract" else make(7)
    restored = ostraka.restore(path, **{"into" if mode == "into" else "like": tree})
    assert (restored["model"] is tree["model"]) == (mode == "into")
    assert_tied(restored)
    assert train(restored, 3) == expected


def test_without_a_template_arrays_are_one(saved: Any):
    path, _ = saved
    restored = ostraka.restore(path)
    assert restored["decayed"][0] is restored["model"]["inner"]["kernel"]
    assert restored["optimizer"]["model"]["inner"]["kernel"] is restored["decayed"][0]
    states = ostraka.restore(path, as_state=True)
    assert isinstance(states["decayed"][0], nnx.Param)
    assert states["decayed"][0] is states["model"]["inner"]["kernel"]
    assert states["decayed"][0] is states["optimizer"]["model"]["inner"]["kernel"]


def test_a_part_that_has_only_the_later_place(saved: Any):
    path, _ = saved
    whole = ostraka.restore(path, like=make(7))
    part = ostraka.restore(path, like={"optimizer": make(7)["optimizer"]})
    found = part["optimizer"].model.inner.kernel[...]
    assert np.array_equal(found, whole["model"].inner.kernel[...])


def test_two_variables_of_a_template_that_were_one(saved: Any):
    path, _ = saved
    like = {"model": Net(7), "inner": Net(7).inner}
    with pytest.raises(Mismatch, match="'inner/bias': it was saved as the same variable as 'model"):
        ostraka.restore(path, into=like)
    with pytest.warns(PartialRestore, match="untied 2 leaves that were saved as one variable"):
        restored = ostraka.restore(path, like=like, strict=False)
    assert restored["inner"].kernel is not restored["model"].inner.kernel
    assert np.array_equal(restored["inner"].kernel[...], restored["model"].inner.kernel[...])


def test_plain_arrays(tmp_path: Path):
    jax_array, numpy_array = jnp.arange(3.0), np.arange(4)
    tree = {"a": jax_array, "b": [jax_array, numpy_array], "c": numpy_array}
    ostraka.save(tmp_path / "c", tree)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree["a"])
    for restored in (
        ostraka.restore(tmp_path / "c"),
        ostraka.restore(tmp_path / "c", like=tree),
        ostraka.restore(tmp_path / "c", into={**tree, "b": [*tree["b"]]}),
        ostraka.restore(tmp_path / "c", like={**tree, "a": shapes, "b": [shapes, numpy_array]}),
    ):
        assert restored["a"] is restored["b"][0]
        assert restored["c"] is restored["b"][1]
    # A template with arrays of their own gets arrays of their own, which may be donated apart.
    own = {"a": jnp.zeros(3), "b": [jnp.zeros(3), np.zeros(4, int)], "c": np.zeros(4, int)}
    restored = ostraka.restore(tmp_path / "c", like=own)
    assert restored["a"] is not restored["b"][0]
    assert restored["c"] is not restored["b"][1]
    assert np.array_equal(restored["b"][0], jax_array)
    assert np.array_equal(restored["c"], numpy_array)


def test_arrays_that_a_template_shares_and_the_run_does_not_any_more(tmp_path: Path):
    start = jnp.zeros(2)
    ostraka.save(tmp_path / "c", {"params": jnp.ones(2), "ema": jnp.full(2, 0.5)})
    restored = ostraka.restore(tmp_path / "c", like={"params": start, "ema": start})
    assert restored["params"].tolist() == [1, 1]
    assert restored["ema"].tolist() == [0.5, 0.5]


def test_a_plan_counts_it_once(tmp_path: Path):
    tree = make()
    planned = ostraka.plan(tree)
    ostraka.save(tmp_path / "c", tree)
    assert planned.data_bytes == ostraka.open(tmp_path / "c").nbytes
    assert planned.parameters == sum(x.size for x in jax.tree.leaves(nnx.state(tree["model"])))


def test_only_the_later_place_without_a_template(saved: Any):
    path, _ = saved
    restored = ostraka.restore(path, only="decayed/**")
    assert [x.shape for x in restored["decayed"]] == [(3, 4), (4, 2)]
