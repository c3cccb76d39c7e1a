"""Restored arrays work where the saved ones did: commitment, weak types, memory, the set mesh."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.errors import Mismatch
from ostraka.testing import run_processes


def make_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def make_state(mesh: Mesh) -> dict[str, Any]:
    return {
        "w": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data", "model"))),
        "key": jax.random.key(0),
        "step": jnp.zeros((), jnp.int32),
        "rate": jnp.asarray(0.5),
        "bound": jax.device_put(jnp.ones(2), jax.devices()[3]),
    }


@jax.jit
def step(w: Any, key: Any, step: Any, rate: Any) -> Any:
    """Little to compile, from arrays that are bound to devices and arrays that are free."""
    return w + rate * jax.random.key_data(key).sum(), key, step + 1


def run_step(state: dict[str, Any]) -> Any:
    return step(*(state[name] for name in ("w", "key", "step", "rate")))


def commitment(state: dict[str, Any]) -> dict[str, bool]:
    return {name: value.committed for name, value in state.items()}


MODES = ["none", "like", "abstract", "into"]


def restore(path: Path, mode: str, template: Any) -> Any:
    if mode == "none":
        return ostraka.restore(path)
    if mode == "abstract":
        names = ("w", "bound", "bound, weak")
        sharded = {name: template[name].sharding for name in names}
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded.get(name))
            for name, x in template.items()
        }
        return ostraka.restore(path, like=shapes)
    return ostraka.restore(path, **{mode: template})


def weak_arrays() -> dict[str, Any]:
    state: dict[str, Any] = {}
    for dtype in (jnp.float32, jnp.int32, jnp.complex64):
        for shape in ((), (3,), (0, 2)):
            weak = jnp.broadcast_to(jnp.asarray(dtype(2).item()), shape) + 1
            state[f"{dtype.__name__}{shape}"] = weak
    return {**state, "bound, weak": jax.device_put(weak, jax.devices()[1])}


@pytest.mark.parametrize("mode", MODES)
def test_what_was_free_is_free_again_and_weak_types_come_back(tmp_path: Path, mode: str):
    state = {**make_state(make_mesh()), **weak_arrays()}
    ostraka.save(tmp_path / "c", state)
    restored = restore(tmp_path / "c", mode, dict(state))
    assert commitment(restored) == commitment(state)
    for name in ("bound", "bound, weak"):
        assert restored[name].devices() == state[name].devices(), name
    for one, other in zip(run_step(restored), run_step(state), strict=True):
        assert jnp.array_equal(one, other)
        assert one.sharding == other.sharding
    for name in state.keys() - {"key"}:
        value, saved = restored[name], state[name]
        weak = name not in ("w", "bound", "step")
        assert (value.weak_type, value.dtype) == (weak, saved.dtype), name
    added = restored["float32(3,)"] + jnp.ones((), jnp.bfloat16)
    assert added.dtype == jnp.bfloat16  # A weak type gives way.


def test_the_commitment_of_a_template_decides(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"x": jnp.ones(3), "n": 7})
    bound = jax.device_put(jnp.zeros(3), jax.devices()[2])
    restored = ostraka.restore(tmp_path / "c", like={"x": bound})["x"]
    assert restored.committed
    assert restored.devices() == {jax.devices()[2]}
    ostraka.save(tmp_path / "d", {"x": bound})
    assert not ostraka.restore(tmp_path / "d", like={"x": jnp.zeros(3)})["x"].committed
    assert ostraka.restore(tmp_path / "d")["x"].devices() == {jax.devices()[2]}
    assert not ostraka.restore(tmp_path / "c", like={"n": jnp.zeros((), int)})["n"].committed


def test_a_mesh_takes_what_was_free_along(tmp_path: Path):
    ostraka.save(tmp_path / "c", make_state(make_mesh()))
    restored = ostraka.restore(tmp_path / "c", mesh={"data": 2}, specs={"w": P("data")})
    assert restored["w"].sharding.spec == P("data")
    assert {len(x.sharding.device_set) for x in restored.values()} == {2}
    run_step(restored)


def test_the_kind_of_memory_comes_back(tmp_path: Path):
    kinds = ("pinned_host", "unpinned_host")
    state: dict[str, Any] = {}
    for kind in kinds:
        named = NamedSharding(make_mesh(), P("data"), memory_kind=kind)
        single = SingleDeviceSharding(jax.devices()[1], memory_kind=kind)
        state[kind] = jax.device_put([jnp.ones(8), jnp.ones(3)], [named, single])
    ostraka.save(tmp_path / "c", state)
    other = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    moved = ostraka.restore(tmp_path / "c", mesh=other)
    for restored in (ostraka.restore(tmp_path / "c"), ostraka.restore(tmp_path / "c", like=state)):
        for kind in kinds:
            assert {x.sharding.memory_kind for x in restored[kind]} == {kind}
            found = moved[kind][0].sharding
            assert (found.mesh, found.memory_kind) == (other, kind)


def make_annotated() -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0), kernel_init=init)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_abstract_template_goes_onto_the_mesh_that_is_set(tmp_path: Path, kind: AxisType):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        model = nnx.jit(make_annotated)()
        abstract = nnx.eval_shape(make_annotated)
        ostraka.save(tmp_path / "c", model)
        restored = ostraka.restore(tmp_path / "c", like=abstract)
    assert restored.kernel[...].sharding == model.kernel[...].sharding
    assert jnp.array_equal(restored.kernel[...], model.kernel[...])
    with pytest.raises(Mismatch, match="abstract mesh, .* or restore under jax.set_mesh"):
        ostraka.restore(tmp_path / "c", like=abstract)
    other = jax.make_mesh((8,), ("else",))
    with jax.set_mesh(other), pytest.raises(Mismatch, match="abstract mesh, which has no devices"):
        ostraka.restore(tmp_path / "c", like=abstract)


def test_a_model_on_auto_axes_stays_on_such(tmp_path: Path):
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    placed = ostraka.sharding.place(model, make_mesh(), {"kernel": P("data"), "bias": P()})
    ostraka.save(tmp_path / "c", {"model": placed})
    explicit = jax.make_mesh((4, 2), ("data", "model"))
    every: list[dict[str, Any]] = [{}, {"like": {"model": placed}}, {"into": {"model": model}}]
    for choices in every:
        with pytest.warns(ostraka.sharding.ExplicitAxes, match="same devices with Auto axes"):
            restored = ostraka.restore(tmp_path / "c", mesh=explicit, **choices)["model"]
        kernel = restored["kernel"] if isinstance(restored, dict) else restored.kernel[...]
        assert set(kernel.sharding.mesh.axis_types) == {AxisType.Auto}
    meant = ostraka.sharding.place(
        model, explicit, {"kernel": P("data"), "bias": P()}, explicit=True
    )
    restored = ostraka.restore(tmp_path / "c", like={"model": meant}, mesh=explicit)["model"]
    assert restored.kernel[...].sharding.mesh == explicit


def test_numbers_as_arrays_on_a_mesh(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"step": 3})
    sharding = NamedSharding(make_mesh(), P())
    like = jax.device_put(jnp.zeros((), jnp.int32), sharding)
    restored = ostraka.restore(tmp_path / "c", like={"step": like})["step"]
    assert restored.sharding == sharding
    assert np.asarray(restored) == 3


# Several processes


def make_state_of_all() -> dict[str, Any]:
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    w, key = jax.make_array_from_callback((8, 4), sharding, whole.__getitem__), jax.random.key(3)
    free = {"step": jnp.asarray(7, jnp.int32), "rate": jnp.asarray(0.5)}
    return {"w": w, "key": key, **free, "same": w, "keys": [key]}


def restore_and_step(path: str, is_saving: bool) -> list[Any]:
    state = make_state_of_all()
    if is_saving:
        ostraka.save(path, state)
    expected, _, _ = run_step(state)
    found: list[Any] = []
    ways: list[Any] = [{"like": state}, {}] if is_saving else [{"like": state}]
    for options in ways:
        restored = ostraka.restore(path, **options)
        w, _, step_count = run_step(restored)
        shards = zip(w.addressable_shards, expected.addressable_shards, strict=True)
        found.append(
            (
                commitment({name: restored[name] for name in FREE}),
                restored["rate"].weak_type,
                restored["same"] is restored["w"] and restored["keys"][0] is restored["key"],
                int(step_count),
                all(np.array_equal(one.data, other.data) for one, other in shards),
            )
        )
    return found


FREE = {"w": True, "key": False, "step": False, "rate": False}


def test_several_processes_and_others_after_them(tmp_path: Path):
    path = str(tmp_path / "c")
    expected = (FREE, True, True, 8, True)
    saving = run_processes(restore_and_step, path, True, processes=2, devices_per_process=2)
    assert [result.value for result in saving] == [[expected] * 2] * 2
    more = run_processes(restore_and_step, path, False, processes=4, devices_per_process=1)
    assert [result.value for result in more] == [[expected]] * 4
    alone = ostraka.restore(path)
    assert alone["same"] is alone["w"]
    assert commitment({name: alone[name] for name in FREE}) == FREE
