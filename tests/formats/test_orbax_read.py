"""Checkpoints that Orbax wrote, read by us: bit for bit, as it reads them itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from nnx_models import ADAM, Block
from orbax_cases import (
    ALL_FORMS,
    FORMS,
    Form,
    bits,
    flat,
    make_arrays,
    make_local,
    make_values,
    mesh_of,
    ocp,
    quiet,
    read_with_orbax,
    write,
)
from ostraka.cli import main
from ostraka.errors import CheckpointNotFound, PathInTheWay, UnsupportedFormat
from ostraka.reading.locate import open_at
from ostraka.storage import MemoryStore, open_store


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    mesh = mesh_of(x=4, y=2)
    return {"arrays": make_arrays(mesh), "values": make_values(), "local": make_local()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> dict[Form, Path]:
    """By form, where the checkpoint is; written when it is first asked for."""
    root = tmp_path_factory.mktemp("orbax")

    class Written(dict[Form, Path]):
        def __missing__(self, form: Form) -> Path:
            self[form] = write(form, root / str(form), tree)
            return self[form]

    return Written()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_comes_back_as_orbax_gives_it_and_as_it_was(
    form: Form, written: dict[Form, Path], tree: Any
):
    theirs = read_with_orbax(form, written[form])
    ours = ostraka.restore(written[form])
    assert flat(ours) == flat(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if isinstance(one, jax.Array):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    # And with a template, all that Orbax has changed is as it was.
    assert flat(ostraka.restore(written[form], like=tree)) == flat(tree)


@pytest.mark.soak
@pytest.mark.parametrize("form", [form for form in ALL_FORMS if form not in FORMS], ids=str)
def test_all_other_forms(form: Form, written: dict[Form, Path], tree: Any):
    test_every_form_comes_back_as_orbax_gives_it_and_as_it_was(form, written, tree)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[5]], ids=str)
@pytest.mark.parametrize(
    ("sizes", "spec"),
    [({"x": 2, "y": 4}, None), ({"y": 2}, P("y")), ({"x": 1}, P()), ({"z": 8}, P("z"))],
    ids=str,
)
def test_other_meshes(
    form: Form, written: dict[Form, Path], tree: Any, sizes: dict[str, int], spec: P | None
):
    mesh = mesh_of(**sizes)
    names = ["cut", "params"] + (["columns", "rows", "small"] if spec is None else [])
    wanted = {"arrays": {name: tree["arrays"][name] for name in names}}
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), wanted)
    found = ostraka.restore(
        written[form], like=like, mesh=mesh, specs=spec, only=[f"arrays/{n}" for n in names]
    )
    assert flat(found) == flat(wanted)
    cut = found["arrays"]["cut"].sharding
    assert cut.is_equivalent_to(NamedSharding(mesh, P("x", "y") if spec is None else spec), 2)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4]], ids=str)
def test_any_slice_of_any_leaf(form: Form, written: dict[Form, Path], tree: Any):
    checkpoint = ostraka.open(written[form])
    cut = np.asarray(tree["arrays"]["cut"])
    for index in [(3,), (slice(1, 7), slice(5, None)), (-1, 2), (slice(0, 0),), (..., 11)]:
        found = checkpoint["arrays/cut"][index]
        assert found.tobytes() == cut[index].tobytes()
        assert found.shape == cut[index].shape
    lazy = checkpoint["arrays/cut"]
    assert lazy.spec == (("x",), ("y",))
    assert str(lazy.mesh) == "x=4, y=2"
    assert checkpoint["values/text"] == "größe"
    assert checkpoint["local/keys"].prng == "rbg"


@pytest.mark.parametrize("form", [FORMS[1], FORMS[3]], ids=str)
def test_the_files_of_boxes_are_there(form: Form, written: dict[Form, Path]):
    source = open_at(written[form])
    number = [leaf.path for leaf in source.saved.leaves].index("arrays/cut")
    boxes = source.boxes_of(number)
    assert len(boxes) == 8
    assert all((Path(source.location) / box.file).is_file() for box in boxes)


def test_a_model_and_its_optimizer(tmp_path: Path):
    def make(seed: int) -> dict[str, Any]:
        model = Block(rngs=nnx.Rngs(seed))
        return {"model": model, "optimizer": nnx.Optimizer(model, ADAM, wrt=nnx.Param)}

    saved = make(0)
    states = {name: nnx.state(value) for name, value in saved.items()}
    with quiet(), ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(states))
    with quiet(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "module", saved["model"])
    target = make(1)
    ostraka.restore(tmp_path / "run", into=target)
    assert all(flat(nnx.state(target[name])) == flat(states[name]) for name in states)
    abstract = nnx.eval_shape(lambda: make(2)["model"])
    found = ostraka.restore(tmp_path / "run", like={"model": abstract})["model"]
    assert flat(nnx.state(found)) == flat(states["model"])
    # A module that was given to Orbax itself, and one as a state that is plain dicts.
    found = ostraka.restore(tmp_path / "module", like=make(3)["model"])
    assert flat(nnx.state(found)) == flat(states["model"])


def test_a_step_with_several_items(tmp_path: Path):
    numpy_key: Any = np.random.RandomState(0).get_state()
    items = ocp.args.Composite(
        state=ocp.args.StandardSave({"w": jnp.arange(8.0)}),
        config=ocp.args.JsonSave({"layers": 2, "names": ["a", None, 0.5]}),
        array=ocp.args.ArraySave(jnp.arange(3)),
        key=ocp.args.JaxRandomKeySave(jax.random.key(4)),
        numpy_key=ocp.args.NumpyRandomKeySave(numpy_key),
    )
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with quiet(), ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(1, args=items, metrics={"loss": 1.5}, custom_metadata={"by": "me"})
        manager.save(12, args=items, metrics={"loss": 0.5}, custom_metadata={"by": "me"})
    found = ostraka.restore(tmp_path)
    assert found["config"] == {"layers": 2, "names": ["a", None, 0.5]}
    assert bits(found["array"]) == bits(jnp.arange(3))
    assert bits(found["state"]["w"]) == bits(jnp.arange(8.0))
    assert bits(found["key"]) == bits(jax.random.key(4))
    assert np.array_equal(found["numpy_key"][1], numpy_key[1])
    checkpoint = ostraka.open(tmp_path)
    assert checkpoint.path == str(tmp_path / "12")
    assert checkpoint.metadata == {"by": "me", "metrics": {"loss": 0.5}}
    assert ostraka.open(tmp_path / "01").metadata["metrics"] == {"loss": 1.5}
    like = {"state": {"w": np.zeros(8, np.float32)}}
    assert ostraka.restore(tmp_path, like=like)["state"]["w"].tolist() == [*range(8)]
    assert list(ostraka.open(tmp_path / "12" / "state")) == ["w"]


def test_the_state_of_a_data_iterator(tmp_path: Path):
    dataset = grain.MapDataset.range(10).to_iter_dataset()
    source: Any = grain.RangeDataSource(0, 10, 1)
    sampler = grain.IndexSampler(10, grain.NoSharding(), num_epochs=1, seed=3)
    loader = grain.DataLoader(data_source=source, sampler=sampler)
    saved: dict[str, Any] = {"dataset": iter(dataset), "loader": iter(loader)}
    after = {name: [next(iterator) for _ in range(4)][-1] for name, iterator in saved.items()}
    args = {name: grain.PyGrainCheckpointSave(iterator) for name, iterator in saved.items()}
    with quiet(), ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(**args))
    target: dict[str, Any] = {"dataset": iter(dataset), "loader": iter(loader)}
    ostraka.restore(tmp_path, like=target)
    for name, iterator in target.items():
        assert next(iterator) == after[name] + 1


# The commands, and a run that has steps of both


@pytest.fixture
def run_of_both(tmp_path: Path) -> Path:
    """Steps 1 and 2 are Orbax's, step 3 is ours."""
    state = {"w": jnp.arange(8.0), "bias": np.ones(2, np.float32)}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with quiet(), ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (1, 2):
            args = ocp.args.StandardSave({**state, "w": state["w"] + step})
            manager.save(step, args=args, metrics={"loss": 1 / step})
    ostraka.save(tmp_path / "run" / "3", {**state, "w": state["w"] + 2})
    return tmp_path / "run"


def command(*arguments: Any, exit_code: int = 0) -> Any:
    found = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert found.exit_code == exit_code, found.output
    return json.loads(found.stdout)


def test_the_commands(run_of_both: Path):
    steps = command("ls", run_of_both)["steps"]
    assert [(s["step"], s["format"]) for s in steps] == [(1, "orbax"), (2, "orbax"), (3, "ostraka")]
    assert steps[1]["metrics"] == {"loss": 0.5}
    assert all(step["bytes"] > 40 and step["saved_at"] > 1e9 for step in steps)
    shown = command("show", run_of_both / "2", "--stats")
    assert shown["writer"]["library"] == "Orbax"
    assert {leaf["path"]: leaf["statistics"]["most"] for leaf in shown["leaves"]} == {
        "bias": 1.0,
        "w": 9.0,
    }
    assert command("show", run_of_both / "2", "w", "--slice", "2:4")["slice"]["values"] == [4, 5]
    found = command("diff", run_of_both / "1", run_of_both / "2", exit_code=1)
    assert {leaf["path"]: leaf["differs"] for leaf in found["leaves"]} == {
        "bias": [],
        "w": ["value"],
    }
    assert ostraka.plan(str(run_of_both / "2")).data_bytes == 8 * 4 + 2 * 4
    assert ostraka.open(run_of_both).path == str(run_of_both / "3")


def test_copies(run_of_both: Path, tmp_path: Path):
    report = ostraka.copy(run_of_both, tmp_path / "there")
    assert (report.copied, report.skipped) == (3, 0)
    for step in ("1", "2"):
        roots = run_of_both / step, tmp_path / "there" / step
        here, there = [sorted(p.relative_to(root) for p in root.rglob("*")) for root in roots]
        assert here == there
    with quiet(), ocp.CheckpointManager(tmp_path / "there") as manager:
        w = manager.restore(2, args=ocp.args.StandardRestore())["w"]
        assert w.tolist() == [float(n + 2) for n in range(8)]
    report = ostraka.copy(run_of_both, tmp_path / "there")
    assert (report.copied, report.skipped) == (0, 3)
    with pytest.raises(PathInTheWay, match="has something else in it"):
        ostraka.copy(run_of_both / "1", tmp_path / "there" / "2")
    # What a copy that was killed has left is no checkpoint, and does not stop the next one.
    left = tmp_path / "new.orbax-checkpoint-tmp"
    shutil.copytree(run_of_both / "1", left)
    (left / "rest").write_text("of another copy")
    with pytest.raises(CheckpointNotFound, match="Orbax never finished it"):
        ostraka.open(left)
    ostraka.copy(run_of_both / "1", tmp_path / "new")
    assert not (tmp_path / "new" / "rest").exists()
    assert ostraka.open(tmp_path / "new")["w"][0] == 1.0


def test_a_bucket(written: dict[Form, Path], tree: Any, bucket: str):
    ostraka.copy(written[FORMS[0]], f"{bucket}/run/7")
    cut = {"arrays": {"cut": tree["arrays"]["cut"]}}
    assert flat(ostraka.restore(f"{bucket}/run", like=cut, only="arrays/cut")) == flat(cut)
    assert ostraka.open(f"{bucket}/run")["values/text"] == "größe"
    open_store(f"{bucket}/run/7").delete("commit_success.txt")
    with pytest.raises(CheckpointNotFound, match="Orbax never finished it"):
        ostraka.open(f"{bucket}/run/7")


def test_stores_that_tensorstore_lacks(written: dict[Form, Path]):
    store = MemoryStore("orbax/c")
    ostraka.copy(written[FORMS[0]], store)
    with pytest.raises(UnsupportedFormat, match="TensorStore reads directories, s3:// and gs://"):
        ostraka.open(store)
