"""Meshes of both types of axes: what `init` makes trains, and so does what is restored of it."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from compiled import compiled_in
from ostraka.errors import InvalidSharding, InvalidTree
from ostraka.sharding import (
    ExplicitAxes,
    check,
    fsdp,
    init,
    make_mesh,
    picture,
    place,
    spec_tree,
    tensor_parallel,
)
from ostraka.testing import run_processes

pytestmark = pytest.mark.usefixtures("compile_cache")

SIZES = {"fsdp": 4, "tp": 2}
# One object, since a step is compiled anew for each. It has moments, and little to compile.
MOMENTUM = optax.sgd(1e-2, momentum=0.9)
KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def mesh_of(kind: str) -> Mesh:
    types = (KINDS[kind],) * 2
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=types)


class Plain(nnx.Module):
    """As users write them: an embedding, attention, a norm, a pair of layers, dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 128, rngs=rngs)
        self.down = nnx.Linear(128, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.embed(words)
        x = x + self.attention(self.norm(x))
        return self.dropout(self.down(nnx.relu(self.up(self.norm(x)))))


class Annotated(nnx.Module):
    """Variables that say how they are cut; a model that knows nothing of Explicit axes."""

    def __init__(self, rngs: nnx.Rngs, **metadata: Any):
        kernel = rngs.params.normal((32, 64)) * 0.1
        self.table = nnx.Param(rngs.params.normal((64, 32)), out_sharding=("tp", "fsdp"))
        self.kernel = nnx.Param(kernel, out_sharding=("fsdp", "tp"), **metadata)

    def __call__(self, words: jax.Array) -> jax.Array:
        return jnp.take(self.table[...], words, axis=0) @ self.kernel[...]


class Written(nnx.Module):
    """A model that is written for Explicit axes: it says where its arrays and results are."""

    def __init__(self, rngs: nnx.Rngs):
        sharding = P("fsdp", "tp")
        self.w = nnx.Param(jax.random.normal(rngs.params(), (16, 32), out_sharding=sharding))
        self.b = nnx.Param(jnp.zeros((32,), out_sharding=P("tp")))
        self.scale = nnx.Param(jnp.ones((16,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        whole = jax.sharding.reshard(self.w[...], P(None, "tp"))
        scaled = x * self.scale[...]
        return jnp.einsum("bd,df->bf", scaled, whole, out_sharding=P("fsdp", "tp")) + self.b[...]


def plain() -> Plain:
    return Plain(nnx.Rngs(0))


def linear() -> nnx.Linear:
    return nnx.Linear(64, 128, rngs=nnx.Rngs(0))


def annotated() -> Annotated:
    return Annotated(nnx.Rngs(0))


def written() -> Written:
    return Written(nnx.Rngs(0))


def warned(kind: str) -> AbstractContextManager[Any]:
    return pytest.warns(ExplicitAxes) if kind == "explicit" else nullcontext()


@nnx.jit
def train(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def words() -> np.ndarray:
    return (np.arange(8 * 16, dtype=np.int32) % 64).reshape(8, 16)


RULES = fsdp(min_size=64) | tensor_parallel()


def restored_losses(path: str, cache_dir: str) -> dict[str, list[float]]:
    """In a process of its own: what was saved, restored in three ways, and two steps of each."""
    with compiled_in(cache_dir):
        return {way: losses for kind in KINDS for way, losses in restored_on(kind, path).items()}


def restored_on(kind: str, path: str) -> dict[str, list[float]]:
    with warned(kind):
        model, optimizer = init(plain, mesh_of(kind), RULES, MOMENTUM)
        batch = place(words(), mesh_of(kind), P("fsdp"), explicit=False)
    tree = {"model": model, "optimizer": optimizer}

    def steps(of: dict[str, Any]) -> list[float]:
        return [float(train(of["model"], of["optimizer"], batch)) for _ in range(2)]

    found = {f"{kind}, like": steps(ostraka.restore(path, like=tree))}
    found[f"{kind}, into"] = steps(ostraka.restore(path, into=tree))
    saved = ostraka.restore(path, as_state=True)
    nnx.update(model, saved["model"])
    nnx.update(optimizer, saved["optimizer"])
    found[f"{kind}, no template"] = steps(tree)
    return found


@cache
def losses_alone() -> list[float]:
    """On one device."""
    model = plain()
    optimizer = nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)
    return [float(train(model, optimizer, jnp.asarray(words()))) for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_model_trains_after_init_and_after_a_restore_in_a_new_process(
    kind: str, tmp_path: Path, compile_cache: str
):
    mesh = mesh_of(kind)
    with warned(kind):
        model, optimizer = init(plain, mesh, RULES, MOMENTUM)
    with warned(kind):
        batch = place(words(), mesh, P("fsdp"))
    first = float(train(model, optimizer, batch))
    ostraka.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    expected = [float(train(model, optimizer, batch)) for _ in range(2)]
    assert expected[1] < first
    np.testing.assert_allclose([first, *expected], losses_alone(), rtol=1e-4)
    (result,) = run_processes(
        restored_losses, str(tmp_path / "step"), compile_cache, processes=1, devices_per_process=8
    )
    assert result.value == {
        f"{to}, {way}": expected for to in KINDS for way in ("like", "into", "no template")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_annotated_model_trains_after_init(kind: str):
    mesh = mesh_of(kind)
    with warned(kind):
        model, optimizer = init(annotated, mesh, optimizer=MOMENTUM)
    sharding = NamedSharding(make_mesh(mesh), P("fsdp", "tp"))
    for kernel in (model.kernel, optimizer.opt_state[0].trace["kernel"]):
        assert kernel[...].sharding == sharding
    losses = [float(train(model, optimizer, jnp.asarray(words()))) for _ in range(3)]
    assert losses[2] < losses[0]


def losses_of_written(path: str) -> list[float]:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    model, optimizer = init(written, mesh, optimizer=MOMENTUM)
    tree = ostraka.restore(path, like={"model": model, "optimizer": optimizer})
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        return [float(train(tree["model"], tree["optimizer"], x)) for _ in range(2)]


@pytest.mark.parametrize(
    ("rules", "is_set"),
    [(None, False), (None, True), ({"w": P("fsdp", "tp"), "b": P("tp"), "scale": P()}, True)],
    ids=["own", "own under a mesh", "given under a mesh"],
)
def test_a_model_written_for_explicit_axes_keeps_them(rules: Any, is_set: bool, tmp_path: Path):
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh) if is_set else nullcontext():
        model, optimizer = init(written, mesh, rules, MOMENTUM)
    assert model.w[...].sharding == NamedSharding(mesh, P("fsdp", "tp"))
    assert model.b[...].sharding == NamedSharding(mesh, P("tp"))
    assert optimizer.opt_state[0].trace["w"][...].sharding == NamedSharding(mesh, P("fsdp", "tp"))
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        assert train(model, optimizer, x) > 0
        ostraka.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
        expected = [float(train(model, optimizer, x)) for _ in range(2)]
    if rules is None and not is_set:
        (result,) = run_processes(
            losses_of_written, str(tmp_path / "step"), processes=1, devices_per_process=8
        )
        assert result.value == expected


def test_a_model_written_for_explicit_axes_needs_them():
    message = "model_fn makes arrays with explicit shardings, and the mesh .* has Auto axes"
    with pytest.raises(InvalidSharding, match=message):
        init(written, mesh_of("auto"))


def test_the_warning_says_what_to_do():
    with pytest.warns(ExplicitAxes) as caught:
        init(linear, mesh_of("explicit"), fsdp())
    (warning,) = caught
    assert "use mesh = sharding.make_mesh({'fsdp': 4, 'tp': 2}) here and for batches" in str(
        warning.message
    )
    assert warning.filename == __file__


def test_explicit_axes_that_are_meant():
    mesh = mesh_of("explicit")
    model = init(linear, mesh, fsdp(), explicit=True)
    assert model.kernel[...].sharding.mesh == mesh
    placed = place({"a": np.ones(8, np.float32)}, mesh, P("fsdp"), explicit=True)
    assert placed["a"].sharding == NamedSharding(mesh, P("fsdp"))


def test_explicit_axes_stay_where_such_a_mesh_is_set():
    """JAX refuses arrays of other axes there, so that Auto ones would not work at all."""
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        with pytest.warns(ExplicitAxes, match=r"jax\.set_mesh has set such a mesh"):
            model = init(linear, mesh, fsdp())
        assert model.kernel[...].sharding.mesh == mesh
        assert float(jnp.sum(model.bias[...])) == 0
    with jax.set_mesh(make_mesh(mesh)):
        with pytest.warns(ExplicitAxes, match="with Auto axes"):
            model = init(linear, mesh, fsdp())
        assert model.kernel[...].sharding.mesh == make_mesh(mesh)


def test_a_constraint_in_the_model_does_not_hinder_init():
    class Constrained(nnx.Module):
        def __init__(self, width: int = 16):  # a class without needs is a function, too
            ones = jax.lax.with_sharding_constraint(jnp.ones((8, width)), P("fsdp", "tp"))
            self.w = nnx.Param(ones)

    model = init(Constrained, mesh_of("auto"), P("fsdp"))
    assert model.w[...].sharding.spec == P("fsdp")


def test_under_an_abstract_mesh():
    mesh = mesh_of("auto")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        model = init(annotated, mesh)
        specs = spec_tree(linear(), fsdp())
    assert model.kernel[...].sharding == NamedSharding(mesh, P("fsdp", "tp"))
    assert check(linear(), mesh, specs) == []


# Meshes as callers give them


def test_axis_sizes_make_a_mesh():
    model = init(linear, SIZES, fsdp())
    assert model.kernel[...].sharding.mesh == make_mesh(SIZES)
    placed = place({"a": np.ones(8, np.float32)}, {"data": 2}, P("data"))
    assert len(placed["a"].sharding.device_set) == 2
    assert set(make_mesh(SIZES).axis_types) == {AxisType.Auto}
    assert make_mesh(mesh_of("explicit")) == make_mesh(SIZES)


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        ((4, 2), TypeError, r"mesh is \(4, 2\), sizes without names: name the axes, as in {"),
        (8, TypeError, "mesh is 8, sizes without names"),
        ("data", TypeError, "mesh is a str; it must be a jax.sharding.Mesh, or axis sizes"),
        ({"data": 0}, InvalidSharding, "the mesh axis 'data' has the size 0"),
        (
            {"data": 4096},
            InvalidSharding,
            r"the mesh \(data=4096\) needs 4,096 devices, but JAX sees 8; .*XLA_FLAGS=.*=4096$",
        ),
        (
            AbstractMesh((2,), ("data",)),
            InvalidSharding,
            "the mesh has no devices to put arrays on",
        ),
    ],
    ids=["tuple", "number", "word", "size", "too many", "abstract"],
)
def test_meshes_that_are_none(mesh: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        init(linear, mesh, P())
    with pytest.raises(error, match=message):
        place({"a": np.ones(8, np.float32)}, mesh, P())
    if not isinstance(mesh, AbstractMesh) and mesh != {"data": 4096}:
        with pytest.raises(error, match=message):
            check(linear(), mesh, P())
        with pytest.raises(error, match=message):
            spec_tree(linear(), fsdp(), mesh=mesh)
        with pytest.raises(error, match=message):
            picture((8,), mesh, P())


@pytest.mark.parametrize(
    ("preset", "sizes", "axis"),
    [
        (fsdp, {"fsdp": 2, "data": 2}, "fsdp"),
        (fsdp, {"model": 2, "data": 2}, "data"),
        (fsdp, {"dp": 2, "tp": 2}, "dp"),
        (fsdp, {"x": 2}, "x"),
        (tensor_parallel, {"tp": 2, "model": 2}, "tp"),
        (tensor_parallel, {"data": 2, "model": 2}, "model"),
        (tensor_parallel, {"x": 2}, "x"),
    ],
)
def test_the_axis_of_a_preset(preset: Any, sizes: dict[str, int], axis: str):
    expected = P(axis, None) if preset is fsdp else P(None, axis)
    assert spec_tree({"up": np.ones((64, 64))}, preset(), mesh=sizes) == {"up": expected}


def test_an_axis_that_can_not_be_told():
    message = (
        r"fsdp\(\) can't tell which axis of the mesh \(x=2, y=4\) to cut along, since none is "
        r"named fsdp, data or dp: name it, as in fsdp\('x'\)"
    )
    with pytest.raises(InvalidSharding, match=message):
        check(linear(), {"x": 2, "y": 4}, fsdp())


# What init is given


def adamw() -> None:
    """Something with a name of optax's."""


@pytest.mark.parametrize(
    ("model_fn", "optimizer", "message"),
    [
        (Plain, None, r"Plain needs rngs: give lambda: Plain\(rngs=nnx.Rngs\(0\)\)"),
        (
            nnx.Linear,
            None,
            r"Linear needs in_features, out_features, rngs: give lambda: Linear\(in_features=…, ",
        ),
        ("model", None, "model_fn is a str; it must be a function that makes the model"),
        (plain, "adamw", r"optimizer is 'adamw', .*: give the transformation, such as optax.adamw"),
        (plain, adamw, r"optimizer is the function adamw, .*: call it, as in optax.adamw\(1e-3\)"),
        (plain, 1e-3, "optimizer is a float, and no optax transformation"),
        ("made", None, "model_fn is a Plain that is made already: .* with sharding.place"),
        (plain, "made", "optimizer is an nnx.Optimizer, .* that it is made of"),
    ],
    ids=["class", "class of Flax", "word", "name", "function", "number", "model", "optimizer"],
)
def test_arguments_of_init_that_are_wrong(model_fn: Any, optimizer: Any, message: str):
    if model_fn == "made":
        model_fn = plain()
    if optimizer == "made":
        optimizer = nnx.Optimizer(plain(), optax.adam(1e-3), wrt=nnx.Param)
    with pytest.raises(InvalidTree, match=message):
        init(model_fn, SIZES, fsdp(), optimizer)
