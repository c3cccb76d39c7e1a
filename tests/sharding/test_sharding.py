"""Spec trees, presets, checks, placement, sharded initialization, pictures."""

import resource
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ostraka.errors import InvalidSharding, InvalidTree
from ostraka.sharding import (
    Finding,
    check,
    combine,
    fsdp,
    init,
    logical,
    picture,
    place,
    show,
    spec_tree,
)
from ostraka.sharding import data_parallel as dp
from ostraka.sharding import tensor_parallel as tp
from ostraka.sharding._place import prepare
from ostraka.testing import run_processes

SIZES = {"data": 2, "model": 4}


def mesh_of(*, explicit: bool = False) -> Mesh:
    if explicit:
        return jax.make_mesh((2, 4), ("data", "model"))
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(12, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def make_model() -> Model:
    return Model(nnx.Rngs(0))


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.second.kernel = self.first.kernel


def linear(din: int = 16, dout: int = 8) -> nnx.Linear:
    return nnx.Linear(din, dout, rngs=nnx.Rngs(0))


def annotated() -> nnx.Linear:
    make = nnx.with_partitioning
    return nnx.Linear(
        16,
        8,
        rngs=nnx.Rngs(0),
        kernel_init=make(nnx.initializers.lecun_normal(), (None, "model")),
        bias_init=make(nnx.initializers.zeros_init(), ("model",)),
    )


def pick_spec(leaf: Any) -> P:
    return P(None, "model") if leaf.ndim == 2 else P("model")


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a state, by the names above them."""
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys]
        found["/".join(name for name in names if name != "value")] = leaf
    return found


def values(tree: Any) -> list[np.ndarray]:
    arrays = jax.tree.leaves(nnx.state(tree, nnx.Param))
    return [np.asarray(array) for array in arrays]


# Spec trees


def test_a_spec_tree_mirrors_the_state():
    model = nnx.eval_shape(make_model)
    optimizer = nnx.Optimizer(make_model(), optax.adam(1e-3), wrt=nnx.Param)
    for node in (model, nnx.state(model), optimizer):
        specs = spec_tree(node, pick_spec)
        assert isinstance(specs, nnx.State)
        own = node if isinstance(node, nnx.State) else nnx.state(node)
        assert jax.tree.structure(specs) == jax.tree.structure(own)
    params = {"Dense_0": {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}}
    plain = {
        "model": nnx.state(model),
        "rest": [np.ones(3), None, 4, ()],
        "t": (1.0, "a"),
        "linen": TrainState.create(apply_fn=print, params=params, tx=optax.adam(1e-3)),
    }
    specs = spec_tree(plain, pick_spec)
    assert jax.tree.structure(specs) == jax.tree.structure(plain)
    assert (specs["model"]["up"]["kernel"], specs["model"]["up"]["bias"]) == (
        P(None, "model"),
        P("model"),
    )
    assert specs["rest"] == [P("model"), None, P(), ()]
    assert specs["linen"].opt_state[0].mu["Dense_0"]["kernel"] == P(None, "model")
    assert specs["linen"].step == P()


def test_patterns_and_functions_of_path_and_leaf():
    layer = {"kernel": np.ones((8, 8)), "bias": np.ones(8)}
    rules = {"layers/1/**": P("model"), "**/kernel": P(None, "model"), "**": None}
    assert spec_tree({"layers": [layer, layer]}, rules) == {
        "layers": [
            {"kernel": P(None, "model"), "bias": P()},
            {"kernel": P("model"), "bias": P("model")},
        ]
    }
    specs = spec_tree(layer, lambda path, leaf: P("model") if path == "bias" else None)
    assert specs == {"kernel": P(), "bias": P("model")}


class Logical(nnx.Module):
    """Variables that name dimensions after what they are, not after axes of a mesh."""

    def __init__(self, *, grouped: bool = True, **metadata: Any):
        def param(shape: tuple[int, ...], *names: Any) -> nnx.Param:
            return nnx.Param(jnp.ones(shape), out_sharding=names, **metadata)

        self.up = param((8, 16), "embed", "mlp")
        self.down = param((16, 8), "mlp", "embed")
        if grouped:  # Flax itself does not resolve the names of a group
            self.both = param((8, 4), ("embed", "mlp"), None)


LOGICAL = {"up": P(None, "model"), "down": P("model", None), "both": P("model", None)}
LOGICAL_RULES = (("embed", None), ("mlp", "model"))


def unplaced(**metadata: Any) -> Logical:
    return Logical(eager_sharding=False, **metadata)


def test_logical_names_by_rules_given_here():
    assert by_path(spec_tree(unplaced(), logical(LOGICAL_RULES))) == LOGICAL
    rules = logical({"embed": ("data", "model"), "mlp": None})
    assert by_path(spec_tree(unplaced(), rules)) == {
        "up": P(("data", "model"), None),
        "down": P(None, ("data", "model")),
        "both": P(("data", "model"), None),
    }
    found = by_path(
        spec_tree({"m": unplaced(), "x": np.ones(8)}, rules | fsdp(min_size=1), mesh=SIZES)
    )
    assert found["x"] == P("data")
    assert check(unplaced(), SIZES, logical(LOGICAL_RULES)) == []


def test_logical_names_by_the_rules_of_flax():
    own = unplaced(sharding_rules=LOGICAL_RULES)
    assert by_path(spec_tree(own, "metadata")) == LOGICAL
    with nnx.logical_axis_rules(LOGICAL_RULES):
        tree = {"m": unplaced(), "x": np.ones(8)}
        found = by_path(spec_tree(tree, "metadata"))
    assert found == {f"m/{name}": spec for name, spec in LOGICAL.items()} | {"x": P()}
    assert by_path(spec_tree(unplaced(), "metadata"))["up"] == P("embed", "mlp")
    messages = [str(finding) for finding in check(unplaced(), SIZES, "metadata")]
    assert "leaf 'up', dimension 0: the mesh (data=2, model=4) has no axis 'embed'" in messages


@pytest.mark.parametrize(
    ("how", "explicit"), [("given", False), ("of the variables", True), ("in force", True)]
)
def test_init_by_logical_names(how: str, explicit: bool):
    mesh = mesh_of(explicit=explicit)
    metadata = {"sharding_rules": LOGICAL_RULES} if how == "of the variables" else {}
    rules = logical(LOGICAL_RULES) if how == "given" else None
    with nnx.logical_axis_rules(LOGICAL_RULES if how == "in force" else ()):
        model, optimizer = init(
            lambda: Logical(grouped=how == "given", **metadata),
            mesh,
            rules,
            optax.sgd(1e-3, 0.9),
            explicit=explicit,
        )
    moments = optimizer.opt_state[0].trace
    for name in by_path(nnx.state(model)):
        assert getattr(model, name)[...].sharding == NamedSharding(mesh, LOGICAL[name])
        assert moments[name][...].sharding == NamedSharding(mesh, LOGICAL[name])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (lambda leaf: "model", "leaf 'bias' is given a str as its spec"),
        ({"kernel": 3, "bias": P()}, "leaf 'kernel' is given a int as its spec"),
        ("metdata", "rules is 'metdata'; it must be a function"),
        (42, "rules is 42; it must be a function, a mapping"),
        (fsdp("dta"), "the axis 'dta', which the mesh .data=2, model=4. does not have .*'data'"),
        (tp(), "tensor_parallel knows none of the layers by name or shape, such as 'kernel'"),
    ],
    ids=["no spec", "number in a mapping", "word", "number", "axis", "names"],
)
def test_rules_that_are_wrong(rules: Any, message: str):
    with pytest.raises(InvalidSharding, match=message):
        spec_tree(linear(), rules, mesh=SIZES)


def test_presets_need_a_mesh():
    with pytest.raises(InvalidSharding, match="give mesh=, or call under jax.set_mesh"):
        spec_tree(linear(), fsdp())
    with jax.set_mesh(mesh_of()):
        assert by_path(spec_tree(linear(), fsdp(min_size=1)))["kernel"] == P("data", None)
    abstract = AbstractMesh((2, 4), ("data", "model"))
    assert by_path(spec_tree(linear(), dp(), mesh=abstract)) == {"kernel": P(), "bias": P()}


# Presets


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, 6), P(None, "data")),
        ((4, 7), P("data", None)),
        ((3, 7), P()),
        ((8, 8), P("data", None)),
        ((2, 9, 6), P(None, None, "data")),
        ((3,), P()),
        ((0, 4), P(None, "data")),
    ],
)
def test_fsdp_takes_the_largest_dimension_that_divides(shape: tuple[int, ...], spec: P):
    tree = {"a": np.ones(shape)}
    size = tree["a"].size
    assert spec_tree(tree, fsdp(min_size=size), mesh=SIZES) == {"a": spec}
    assert spec_tree(tree, fsdp(min_size=size + 1), mesh=SIZES) == {"a": P()}


@pytest.mark.parametrize("turn", [1, -1])
def test_fsdp_with_tensor_parallel_and_patterns(turn: int):
    first, second = (fsdp("data", min_size=64), tp("model"))[::turn]
    model = nnx.eval_shape(make_model)
    rules = combine({"embed/**": P()}, first) | second
    assert by_path(spec_tree(model, rules, mesh=SIZES)) == {
        "embed/embedding": P(),
        "norm/scale": P(),
        "norm/bias": P(),
        "up/kernel": P("data", "model"),
        "up/bias": P("model"),
        "down/kernel": P("model", "data"),
        "down/bias": P("data"),
        "dropout/rngs/count": P(),
        "dropout/rngs/key": P(),
    }
    assert check(model, SIZES, rules) == []


@given(
    shape=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    name=st.sampled_from(["kernel", "up/kernel", "out/kernel", "embedding", "bias"]),
)
@settings(max_examples=100)
def test_presets_always_fit(shape: list[int], sizes: tuple[int, int], name: str):
    tree = {"q_proj": jax.ShapeDtypeStruct((12, 12), jnp.float32)}
    tree[name.replace("/", "_")] = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    mesh = {"data": sizes[0], "model": sizes[1]}
    assert check(tree, mesh, fsdp("data", min_size=1) | tp("model")) == []


# Checks


def test_check_lists_everything():
    tree = {
        "axis": np.ones(4),
        "rank": np.ones(4),
        "size": np.ones((4, 10)),
        "twice": np.ones((8, 8)),
        "lost": np.ones(4),
    }
    specs = {
        "axis": P("modle"),
        "rank": P(None, "model"),
        "size": P(None, "model"),
        "twice": P("model", "model"),
        "other": P(),
    }
    findings = {finding.path: finding for finding in check(tree, SIZES, specs)}
    assert {finding.severity for finding in findings.values()} == {"error"}
    assert {path: str(finding) for path, finding in findings.items()} == {
        "axis": "leaf 'axis', dimension 0: the mesh (data=2, model=4) has no axis 'modle'",
        "rank": "leaf 'rank' has 1 dimensions (4,), but its spec P(None, 'model') has 2 entries",
        "size": "leaf 'size', dimension 1: 10 elements do not divide into 4 parts along model of "
        "the mesh (data=2, model=4); the nearest size that does is 12",
        "twice": "leaf 'twice', dimension 1: axis 'model' is used twice in P('model', 'model')",
        "lost": "leaf 'lost' has no spec",
        "other": "specs has 'other', which is no leaf",
    }


@pytest.mark.parametrize(("size", "closest"), [(9, 8), (11, 12), (10, 12), (1, 4), (3, 4), (5, 4)])
def test_the_nearest_size(size: int, closest: int):
    (finding,) = check({"a": np.ones(size)}, SIZES, P("model"))
    assert finding.message.endswith(f"the nearest size that does is {closest}")


def test_a_bias_and_its_kernel_that_disagree():
    (finding,) = check(linear(), SIZES, {"kernel": P(None, "model"), "bias": P()})
    assert finding == Finding(
        "warning",
        "bias",
        "leaf 'bias' is cut as P() and its kernel 'kernel' as P(None, 'model'): each step moves "
        "data to add them; P('model') goes with it",
    )
    assert check(linear(), SIZES, {"kernel": P("model", None), "bias": P()}) == []
    assert check(linear(), SIZES, {"kernel": P("data"), "bias": P(None)}) == []


def test_huge_leaves_that_are_whole():
    tree = {"a": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    (finding,) = check(tree, SIZES, P(), replicated_limit_bytes=1 << 20)
    assert str(finding) == (
        "leaf 'a' (1024, 1024) has 4,194,304 bytes and is whole on each of 8 devices"
    )
    assert finding.severity == "warning"
    assert check(tree, SIZES, P()) == []
    assert check(tree, SIZES, P("data"), replicated_limit_bytes=1) == []
    assert check(tree, {"data": 1}, P(), replicated_limit_bytes=1) == []


# Placement


def tree_to_place() -> dict[str, Any]:
    model = make_model()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-3, 0.9), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "host": np.arange(8.0, dtype=np.float32)}


def test_placing_a_module_and_its_optimizer():
    mesh, tree = mesh_of(), {**tree_to_place(), "step": 3}
    model = tree["model"]
    placed = place(tree, mesh, fsdp("data", min_size=64) | tp("model"))
    assert type(placed["model"]) is Model
    assert type(placed["optimizer"]) is nnx.Optimizer
    assert placed["step"] == 3
    kernel = placed["model"].up.kernel[...]
    assert kernel.sharding == NamedSharding(mesh, P("data", "model"))
    assert placed["model"].dropout.rngs.key[...].sharding == NamedSharding(mesh, P())
    for old, new in zip(values(model), values(placed["model"]), strict=True):
        assert np.array_equal(old, new)
    assert len(model.up.kernel[...].sharding.device_set) == 1


def test_tied_and_annotated_variables():
    placed = place(Tied(nnx.Rngs(0)), mesh_of(), P("model"))
    assert placed.first.kernel is placed.second.kernel
    placed = place(unplaced(), mesh_of(), P("data", "model"))
    assert placed.up[...].sharding.spec == P("data", "model")


def test_placing_plain_and_abstract_trees():
    mesh = mesh_of()
    tree = {"a": np.ones((4, 8), np.float32), "b": [jax.ShapeDtypeStruct((8,), jnp.int32), None]}
    placed = place(tree, mesh, {"a": P("data"), "b": P("model")})
    assert placed["a"].sharding == NamedSharding(mesh, P("data"))
    assert placed["b"][0].sharding == NamedSharding(mesh, P("model"))
    assert placed["b"][1] is None


def test_placing_lists_all_that_does_not_fit():
    tree = {"a": np.ones((5, 4), np.float32), "b": np.ones(8)}
    with pytest.raises(InvalidSharding, match="for 3 reasons:") as caught:
        place(tree, mesh_of(), {"a": P("data", "mdl"), "b": P("model")})
    message = str(caught.value)
    assert "can't place the tree on the mesh (data=2, model=4)" in message
    assert "the nearest size that does is 6" in message
    assert "no axis 'mdl'" in message
    assert "leaf 'b' is float64 and would become float32: cast it" in message


def place_in_processes() -> tuple[dict[str, list[tuple[str, bytes]]], list[bytes]]:
    """A model that each process has, on a mesh of all; then cut otherwise. One that is made."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    placed = place(tree_to_place(), mesh, fsdp("data", min_size=4))
    assert not placed["host"].is_fully_addressable
    kernel = placed["model"].up.kernel[...]
    assert kernel.sharding == NamedSharding(mesh, P(None, "data"))
    placed = place(placed, mesh, fsdp("data", min_size=4) | tp("model"))
    assert kernel.sharding.spec != placed["model"].up.kernel[...].sharding.spec
    with pytest.raises(InvalidTree, match="is not the same on all of them"):
        place({"a": np.full(4, jax.process_index(), np.int32)}, mesh, P("data"))
    found = {
        path: sorted((str(s.index), np.asarray(s.data).tobytes()) for s in _words(x))
        for path, x in by_path(placed).items()
    }
    return found, init_with_keys()


def _words(array: jax.Array) -> Any:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return (jax.random.key_data(array) if is_key else array).addressable_shards


def test_placing_and_init_in_several_processes():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    tree = tree_to_place()
    alone = by_path(place(tree, mesh, fsdp("data", min_size=4) | tp("model")))
    results = run_processes(place_in_processes, processes=2, devices_per_process=2)
    for path, array in alone.items():
        expected = {(str(s.index), np.asarray(s.data).tobytes()) for s in _words(array)}
        assert {shard for result in results for shard in result.value[0][path]} == expected, path
    key = np.asarray(jax.random.key_data(tree["model"].dropout.rngs.key[...])).tobytes()
    assert [result.value[1] for result in results] == [[key, key]] * 2


# Sharded initialization


def test_init_with_rules_for_another_mesh_than_the_annotations():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    model = init(annotated, mesh, fsdp("data", min_size=1))
    assert model.kernel[...].sharding == NamedSharding(mesh, P("data", None))
    with pytest.raises(InvalidSharding, match="for 2 reasons:(.|\n)*no axis 'model'"):
        init(annotated, mesh)


class Wide(nnx.Module):
    def __init__(self, kernel_init: Any, bias_init: Any):
        inits = {"kernel_init": kernel_init, "bias_init": bias_init, "rngs": nnx.Rngs(0)}
        self.up = nnx.Linear(128, 256, **inits)
        self.square = nnx.Linear(128, 128, **inits)


@pytest.mark.parametrize(
    ("both", "is_annotated"),
    [(False, False), (True, True)],
    ids=["two objects by rules", "one object by annotations"],
)
def test_factored_moments_are_cut_in_the_dimensions_that_they_have(both: bool, is_annotated: bool):
    """Flax gives them the annotations of the parameter, which do not fit, and would raise."""
    mesh = mesh_of()
    transform = optax.adafactor(1e-3)
    kernel_init, bias_init = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
    rules: Any = {"**/kernel": P("data", "model"), "**/bias": P("model")}
    if is_annotated:
        rules = None
        kernel_init = nnx.with_partitioning(kernel_init, ("data", "model"))
        bias_init = nnx.with_partitioning(bias_init, ("model",))

    def make() -> Wide:
        return Wide(kernel_init, bias_init)

    optimizer: Any
    if both:
        optimizer = init(
            lambda: nnx.ModelAndOptimizer(make(), transform, wrt=nnx.Param), mesh, rules
        )
        assert type(optimizer) is nnx.ModelAndOptimizer
        model: Any = optimizer.model
        update: Any = optimizer.update
    else:
        model, optimizer = init(make, mesh, rules, transform)
        update = partial(optimizer.update, model)
    before = model.up.kernel[...]
    assert before.sharding == NamedSharding(mesh, P("data", "model"))
    by_kind = {
        tuple(path.split("/")[-3:]): leaf.sharding.spec
        for path, leaf in by_path(nnx.state(optimizer)).items()
    }
    # Each has the dimension that is left when the other has been averaged away.
    assert by_kind["v_row", "up", "kernel"] == P("data")
    assert by_kind["v_col", "up", "kernel"] == P("model")
    assert by_kind["v_row", "square", "kernel"] == P("data")
    assert by_kind["v_col", "square", "kernel"] == P("model")
    assert by_kind["v", "up", "bias"] == P("model")
    assert by_kind["v", "up", "kernel"] == P()
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    update(grads)
    assert not np.array_equal(before, model.up.kernel[...])


def test_init_of_model_and_optimizer_in_one():
    mesh = mesh_of(explicit=True)

    def make() -> nnx.ModelAndOptimizer:
        return nnx.ModelAndOptimizer(make_model(), optax.adam(1e-3), wrt=nnx.Param)

    both = init(make, mesh, combine({"embed/**": P("data")}, tp("model")), explicit=True)
    assert type(both) is nnx.ModelAndOptimizer
    assert both.model.embed.embedding[...].sharding == NamedSharding(mesh, P("data"))
    for kernel in (both.model.up.kernel, both.opt_state[0].nu["up"]["kernel"]):
        assert kernel[...].sharding == NamedSharding(mesh, P(None, "model"))
    assert both.step[...].sharding == NamedSharding(mesh, P())
    for alone, sharded in zip(values(make_model()), values(both.model), strict=True):
        np.testing.assert_allclose(alone, sharded, rtol=1e-6, atol=1e-6)
    with pytest.raises(InvalidTree, match="which has its optimizer: leave out optimizer="):
        init(make, mesh, dp(), optax.adam(1e-3))


def test_init_that_can_not_be():
    outer = nnx.Rngs(0)
    with pytest.raises(InvalidTree, match="make it inside model_fn"):
        init(lambda: nnx.Linear(4, 4, rngs=outer), mesh_of(), dp())
    with pytest.raises(InvalidSharding, match="no variable of the model says how it is cut"):
        init(linear, mesh_of())
    with pytest.raises(InvalidTree, match="model_fn returns a dict; it must return an nnx.Module"):
        init(dict, mesh_of(), dp())
    with pytest.raises(InvalidSharding, match="can't make the model on the mesh .*'bias'.* axis"):
        init(linear, mesh_of(), {"kernel": P(), "bias": P("x")})


class Deep(nnx.Module):
    def __init__(self, width: int, depth: int):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])


@pytest.mark.parametrize("explicit", [False, True])
def test_no_device_holds_more_than_its_part(explicit: bool):
    """By XLA's own account: results and scratch space of each device."""
    mesh = jax.make_mesh((8,), ("data",)) if explicit else Mesh(np.array(jax.devices()), "data")
    prepared = prepare(lambda: Deep(256, 6), mesh, fsdp("data"), optax.adam(1e-3), None)
    used = prepared.compiled().memory_analysis()
    model_bytes = 6 * 256 * 256 * 4
    assert used.output_size_in_bytes < 1.1 * 3 * model_bytes / 8
    assert used.temp_size_in_bytes < model_bytes / 8


def memory_bytes(name: str) -> int:
    """A line of /proc/self/status; `ru_maxrss` would begin at the peak of the parent process."""
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def measure_init(width: int, depth: int, cap_bytes: int) -> int:
    """Initialize under a cap on further memory; by how much the peak exceeds what was used."""
    # As users have it, since it computes much. A variable would keep it from being forked.
    jax.config.update("jax_disable_most_optimizations", False)
    mesh = Mesh(np.array(jax.devices()), "data")
    init(lambda: Deep(64, 1), mesh, fsdp("data"))
    cap = memory_bytes("VmData") + cap_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    before = memory_bytes("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as peak:
        peak.write("5")  # the peak is counted from here
    model = init(lambda: Deep(width, depth), mesh, fsdp("data"))
    jax.block_until_ready(nnx.state(model))
    assert model.layers[0].kernel[...].addressable_shards[0].data.shape[0] == width // 4
    return memory_bytes("VmHWM") - before


def init_with_keys() -> list[bytes]:
    """The mesh that `jax.make_mesh` gives, whose axes are explicit, and a model with keys."""
    mesh = jax.make_mesh((4,), ("data",))
    rules = fsdp("data", min_size=4)
    model, optimizer = init(make_model, mesh, rules, optax.adam(1e-3), explicit=True)
    assert model.dropout.rngs is not None
    key = model.dropout.rngs.key[...]
    assert key.sharding == NamedSharding(mesh, P())
    assert model.up.kernel[...].sharding == NamedSharding(mesh, P(None, "data"))
    assert optimizer.opt_state[0].mu["up"]["kernel"][...].sharding.mesh == mesh
    return [np.asarray(shard.data).tobytes() for shard in _words(key)]


def test_init_of_a_model_that_no_process_could_hold():
    """Two processes, each with half of 256 MiB and a cap below the whole.

    Devices of one process share its memory, so that only several processes show that no host has
    all of it.
    """
    model_bytes = 2048 * 2048 * 4 * 16
    results = run_processes(
        measure_init,
        2048,
        16,
        int(0.9 * model_bytes),
        processes=2,
        devices_per_process=2,
    )
    for result in results:
        assert 0.5 * model_bytes <= result.value < 0.85 * model_bytes, result.value / model_bytes


# Pictures


def test_a_picture_of_two_dimensions():
    assert picture((8, 4), {"data": 2, "model": 2}, P("data", "model")) == "\n".join(
        [
            "(8, 4) P('data', 'model') on data=2, model=2",
            "      0:2   2:4",
            "    ┌─────┬─────┐",
            "0:4 │  0  │  1  │",
            "    ├─────┼─────┤",
            "4:8 │  2  │  3  │",
            "    └─────┴─────┘",
        ]
    )


def test_pictures_of_one_dimension():
    one = picture((8,), {"data": 2, "model": 2}, P("model")).splitlines()
    assert one[1].split() == ["0:4", "4:8"]
    assert one[3].strip() == "│ 0 2 │ 1 3 │"
    with pytest.raises(InvalidSharding, match="5 elements do not divide into 2 parts"):
        picture((5,), SIZES, P("data"))


def test_showing_a_tree():
    model = place(linear(), mesh_of(), pick_spec)
    lines = show({"model": model, "host": np.ones((2, 2), np.float32)}).splitlines()
    assert lines[0].split() == ["leaf", "shape", "spec", "bytes", "a", "device", "mesh"]
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "model/bias (8,) P('model') 8 data=2, model=4",
        "model/kernel (16, 8) P(None, 'model') 128 data=2, model=4",
        "host (2, 2) host 16",
    ]
    assert "host" in show(np.ones((2, 2)))
    assert show(model.kernel) == picture((16, 8), SIZES, P(None, "model"))
