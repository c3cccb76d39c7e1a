"""A plan is what then happens: names, sizes and loads of a save; bytes and ranges of a restore."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
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
from nnx_models import Block, Sharded
from ostraka import sharding
from ostraka.errors import InvalidSharding, Mismatch
from ostraka.layout import metadata as _metadata
from ostraka.planner import Plan, plan
from ostraka.planner.sources import plan_checkpoint
from ostraka.reading import locate as _checkpoint
from ostraka.storage import MOST_BYTES, LocalStore
from ostraka.testing import run_processes

ZEROS = nnx.initializers.zeros_init()
"""For kernels: only shapes count here, and random numbers take long to compile."""


class Transformer(nnx.Module):
    """Embedding, attention, gated units, norms: what a decoder has."""

    def __init__(self, *, rngs: nnx.Rngs):
        width = 32
        self.embed = nnx.Embed(128, width, embedding_init=ZEROS, rngs=rngs)
        self.attention = nnx.List(
            [
                nnx.MultiHeadAttention(4, width, decode=False, kernel_init=ZEROS, rngs=rngs)
                for _ in range(2)
            ]
        )
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.up_proj = nnx.Linear(width, 4 * width, kernel_init=ZEROS, rngs=rngs)
        self.down_proj = nnx.Linear(4 * width, width, kernel_init=ZEROS, rngs=rngs)


class Cnn(nnx.Module):
    """Convolutions, running statistics, a random stream."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(4, 16, (3, 3), kernel_init=ZEROS, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(16, 8, kernel_init=ZEROS, rngs=rngs)


class Mlp(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up_proj = nnx.Linear(64, 256, kernel_init=ZEROS, rngs=rngs)
        self.down_proj = nnx.Linear(256, 64, kernel_init=ZEROS, rngs=rngs)


MODELS: dict[str, Callable[..., Any]] = {
    "transformer": Transformer,
    "mlp": Mlp,
    "cnn": Cnn,
    "block": Block,
}
RULES: dict[str, Callable[[], Any]] = {
    "dp": sharding.data_parallel,
    "fsdp": lambda: sharding.fsdp("data", min_size=16),
    "tp": lambda: sharding.tensor_parallel("model"),
    "fsdp+tp": lambda: sharding.fsdp("data", min_size=16) | sharding.tensor_parallel("model"),
}
OPTIMIZERS = {"adam": optax.adam, "adafactor": optax.adafactor, "lion": optax.lion}

# model, optimizer, rules, mesh
STATES = [
    ("transformer", "adam", "fsdp", {"data": 8}),
    ("transformer", "adam", "fsdp+tp", {"data": 4, "model": 2}),
    ("transformer", "adafactor", "tp", {"data": 2, "model": 4}),
    ("transformer", None, "dp", {"data": 8}),
    ("mlp", "adam", "dp", {"data": 8}),
    ("mlp", "adafactor", "fsdp", {"data": 8}),
    ("mlp", "lion", "tp", {"data": 2, "model": 4}),
    ("cnn", "adam", "dp", {"data": 8}),
    ("cnn", "adam", "fsdp", {"data": 4}),
    ("cnn", "adafactor", "fsdp", {"data": 8}),
    ("block", "adam", "fsdp", {"data": 8}),
]
NAMES = ["-".join([model, str(tx), rules]) for model, tx, rules, _ in STATES]


def mesh_of(sizes: dict[str, int]) -> Mesh:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


@cache
def live(number: int) -> Any:
    """The state of that number; nobody changes it."""
    return make_live(*STATES[number])


def make_live(model: str, optimizer: str | None, rules: str, sizes: dict[str, int]) -> Any:
    """What a program would save: initialised onto the mesh, as `sharding.init` does."""
    transformation = None if optimizer is None else OPTIMIZERS[optimizer](1e-3)
    made = sharding.init(
        lambda: MODELS[model](rngs=nnx.Rngs(0)), mesh_of(sizes), RULES[rules](), transformation
    )
    return made if optimizer is None else {"model": made[0], "optimizer": made[1]}


def plan_abstract(
    model: str, optimizer: str | None, rules: str, sizes: dict[str, int], processes: int = 1
) -> Plan:
    """The plan from shapes alone; the mesh is no more than its sizes."""
    abstract = nnx.eval_shape(lambda: MODELS[model](rngs=nnx.Rngs(0)))
    transformation = None if optimizer is None else OPTIMIZERS[optimizer](1e-3)
    return plan(
        abstract, mesh=sizes, specs=RULES[rules](), processes=processes, optimizer=transformation
    )


def written(path: Path) -> dict[str, int]:
    """Every file that is there, by its name in its directory.

    But for the second copy of `_METADATA`.
    """
    (shards,) = path.glob("shards-*")
    found = {file.name: file.stat().st_size for file in shards.iterdir()}
    assert found.pop("metadata.json") == (path / "_METADATA").stat().st_size
    return found


def assert_metadata_as_planned(planned: Plan, data: bytes) -> None:
    """To the byte, but for the digits of how long the save took."""
    metadata = _metadata.decode_metadata(data)
    timeline = planned._metadata.writer["timeline"]
    assert metadata.writer["timeline"].keys() == timeline.keys()
    for name in ("bytes", "process_bytes"):
        assert metadata.writer["timeline"][name] == timeline[name]
    same_times = replace(metadata, writer={**metadata.writer, "timeline": timeline})
    assert len(_metadata.encode_metadata(same_times)) == planned.metadata_bytes
    assert abs(len(data) - planned.metadata_bytes) <= max(0.01 * len(data), 24)


def assert_as_planned(planned: Plan, path: Path) -> None:
    found = written(path)
    assert planned.files == found
    assert_metadata_as_planned(planned, (path / "_METADATA").read_bytes())
    assert planned.total_bytes == sum(found.values()) + 2 * planned.metadata_bytes
    process_of = plan_checkpoint(path)._write.process_of
    totals = [0] * (max(process_of) + 1)
    for name, size in found.items():
        number = int(name.split("_")[1].split(".")[0].split("-")[0])
        totals[number if name.startswith("process") else process_of[number]] += size
    assert planned.bytes_by_process == totals


@pytest.mark.parametrize("number", range(len(STATES)), ids=NAMES)
def test_a_save_writes_what_was_planned(tmp_path: Path, number: int):
    planned = plan_abstract(*STATES[number])
    ostraka.save(tmp_path / "c", live(number))
    # A run may have more devices than the mesh: those write nothing.
    if len(planned._write.process_of) == 8:
        assert_as_planned(planned, tmp_path / "c")
    assert_as_planned(plan(live(number)), tmp_path / "c")
    assert planned.files == written(tmp_path / "c")


SAVED_BY_FOUR = [NAMES[number] for number in (1, 3, 5, 6, 7)]


def save_states(path: str) -> dict[str, int]:
    for name, case in zip(NAMES, STATES, strict=True):
        if name in SAVED_BY_FOUR:
            ostraka.save(f"{path}/{name}", make_live(*case))
    host = {"table": np.arange(1000.0), "key": jax.random.key(1), "n": 3}
    ostraka.save(f"{path}/host", host)
    return plan(host).files


def test_four_processes_write_what_was_planned(tmp_path: Path):
    results = run_processes(save_states, str(tmp_path), processes=4, devices_per_process=2)
    for name, case in zip(NAMES, STATES, strict=True):
        if name in SAVED_BY_FOUR:
            assert_as_planned(plan_abstract(*case, processes=4), tmp_path / name)
    # What each process has alike is shared out, and each of them knows how.
    assert [result.value for result in results] == [written(tmp_path / "host")] * 4


def test_options_of_a_save(tmp_path: Path):
    state = live(5)
    options: dict[str, Any] = {
        "dtype": {"model/**": "bfloat16"},
        "metadata": {"run": "first"},
        "max_file_bytes": 20_000,
    }
    ostraka.save(tmp_path / "c", state, **options)
    planned = plan(state, **options)
    assert_as_planned(planned, tmp_path / "c")
    assert max(planned.files.values()) <= 20_000


def test_all_kinds_of_leaves(tmp_path: Path):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    tree = {
        "cut": jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P("fsdp", "tp"))),
        "keys": jax.random.split(jax.random.key(7), 3),
        "rbg": jax.random.key(7, impl="rbg"),
        "table": np.ones((3, 5), np.int8),
        "scalar": np.float32(2),
        "small": jnp.arange(10, dtype=jnp.int4),
        "empty": jnp.zeros((0, 4)),
        "values": [1, 2.5, "text", None, b"bytes"],
        "iterator": Counter(41),
    }
    ostraka.save(tmp_path / "c", tree)
    assert_as_planned(plan(tree), tmp_path / "c")


class Counter:
    def __init__(self, position: int):
        self.position = position

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_variables_that_name_their_own_sharding(tmp_path: Path):
    sizes = {"fsdp": 4, "tp": 2}
    mesh = mesh_of(sizes)
    made = sharding.init(lambda: Sharded(rngs=nnx.Rngs(0)), mesh)
    ostraka.save(tmp_path / "c", made)
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: Sharded(rngs=nnx.Rngs(0)))
    assert_as_planned(plan(abstract, mesh=sizes), tmp_path / "c")
    abstract_mesh = AbstractMesh((4, 2), ("fsdp", "tp"))
    assert plan(abstract, mesh=abstract_mesh).files == plan(abstract, mesh=mesh).files


def test_structs_with_shardings_on_an_abstract_mesh(tmp_path: Path):
    mesh = jax.make_mesh((8,), ("x",))
    array = jax.device_put(jnp.ones((16, 3)), NamedSharding(mesh, P("x")))
    ostraka.save(tmp_path / "c", [array])
    struct = jax.ShapeDtypeStruct(
        (16, 3), jnp.float32, sharding=NamedSharding(mesh.abstract_mesh, P("x"))
    )
    assert_as_planned(plan([struct]), tmp_path / "c")


def test_a_plain_tree_with_an_optimizer(tmp_path: Path):
    params = {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}
    sharded = sharding.place(params, mesh_of({"data": 8}), P())
    state = sharding.place(optax.adam(1e-3).init(params), mesh_of({"data": 8}), P())
    ostraka.save(tmp_path / "c", {"model": sharded, "optimizer": state})
    planned = plan(params, mesh={"data": 8}, specs=P(), optimizer="adam")
    assert_as_planned(planned, tmp_path / "c")


# A checkpoint that is there


def test_a_checkpoint_is_its_own_plan(tmp_path: Path):
    ostraka.save(tmp_path / "c", live(0))
    assert_as_planned(plan(tmp_path / "c"), tmp_path / "c")
    assert plan(str(tmp_path / "c"))._write == plan(live(0))._write


# Restoring


class CountingStore:
    """A store that counts what is read of shard files, and of all others."""

    def __init__(self, store: LocalStore):
        self._store = store
        self.shard_bytes = self.other_bytes = self.reads = self.opened = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        data = self._store.get(name, most_bytes)
        with self._lock:
            self.other_bytes += len(data)
        return data

    def open(self, name: str, first_bytes: int = 0) -> Any:
        with self._lock:
            self.opened += 1
        return CountingReader(self, self._store.open(name, first_bytes))

    def count(self, size: int) -> None:
        with self._lock:
            self.shard_bytes += size
            self.reads += 1


class CountingReader:
    def __init__(self, store: CountingStore, reader: Any):
        self._store = store
        self._reader = reader
        self.size = reader.size

    def read_into(self, offset: int, buffers: Any) -> int:
        count = self._reader.read_into(offset, buffers)
        self._store.count(count)
        return count

    def close(self) -> None:
        self._reader.close()


def read_by_restore(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> CountingStore:
    store = CountingStore(LocalStore(str(path)))
    with monkeypatch.context() as patched:
        patched.setattr(_checkpoint, "locate", lambda _: store)
        ostraka.restore(path, **options)
    return store


@pytest.mark.parametrize(
    "sizes", [{"data": 8}, {"data": 4, "model": 2}, {"data": 2}, {"model": 4, "data": 1}], ids=str
)
@pytest.mark.parametrize("number", [0, 1, 8], ids=lambda number: NAMES[number])
def test_a_restore_reads_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, sizes: dict[str, int]
):
    ostraka.save(tmp_path / "c", live(number))
    full = {"data": 1, "model": 1} | sizes
    expected = plan(tmp_path / "c").restore(mesh=full)
    assert plan_abstract(*STATES[number]).restore(mesh=full).read_bytes == expected.read_bytes
    store = read_by_restore(tmp_path / "c", monkeypatch, mesh=mesh_of(full))
    (account,) = expected.processes
    assert store.shard_bytes == account.read_bytes
    assert (store.reads, store.opened) == (account.ranges, account.files)
    assert store.other_bytes == expected.opening_bytes[0]
    assert expected.over_read >= 0


def test_a_restore_of_large_leaves_with_other_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mesh = mesh_of({"data": 4, "model": 2})
    state = {
        "w": jax.device_put(jnp.ones((4096, 2048)), NamedSharding(mesh, P("data", "model"))),
        "table": np.ones((100, 100)),
    }
    ostraka.save(tmp_path / "c", state)
    for spec in (P(None, ("data", "model")), P("model"), P("model", "data")):
        expected = plan(state).restore(
            mesh={"data": 4, "model": 2}, specs={"w": spec, "table": P()}
        )
        store = read_by_restore(tmp_path / "c", monkeypatch, mesh=mesh, specs={"w": spec})
        (account,) = expected.processes
        assert store.shard_bytes == account.read_bytes
        assert account.needed_bytes == 4096 * 2048 * 4 + 80_000


def test_a_restore_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = live(5)
    ostraka.save(tmp_path / "c", state)
    expected = plan(state).restore(only="model/**")
    store = read_by_restore(tmp_path / "c", monkeypatch, only="model/**")
    assert store.shard_bytes == expected.processes[0].read_bytes
    with pytest.raises(Mismatch, match="only='x' matches no array of the checkpoint"):
        plan(state).restore(only="x")


def restore_counted(path: str, sizes: dict[str, int]) -> tuple[int, int]:
    store = CountingStore(LocalStore(path))
    _checkpoint.locate = lambda _: store  # pyright: ignore[reportAttributeAccessIssue]
    ostraka.restore(path, mesh=mesh_of(sizes))
    return store.shard_bytes, store.reads


def test_each_of_four_processes_reads_what_was_planned(tmp_path: Path):
    ostraka.save(tmp_path / "c", live(1))
    sizes = {"data": 2, "model": 4}
    results = run_processes(
        restore_counted, str(tmp_path / "c"), sizes, processes=4, devices_per_process=2
    )
    expected = plan_abstract(*STATES[1]).restore(mesh=sizes, processes=4)
    assert [result.value for result in results] == [
        (account.read_bytes, account.ranges) for account in expected.processes
    ]


# What does not fit


def test_arguments_that_make_no_sense():
    tree = {"w": jax.ShapeDtypeStruct((12, 8), jnp.float32)}
    with pytest.raises(InvalidSharding, match="12 elements do not divide into 8 parts"):
        plan(tree, mesh={"data": 8}, specs=P("data"))
    with pytest.raises(InvalidSharding, match="do not divide evenly among 3 processes; .* is 2"):
        plan(tree, mesh={"data": 4}, processes=3)
    with pytest.raises(ValueError, match="specs needs mesh="):
        plan(tree, specs=P())
    with pytest.raises(TypeError, match="mesh is 8, sizes without names"):
        plan(tree, mesh=8)
    with pytest.raises(ValueError, match="the mesh axis 'data' has the size 0"):
        plan(tree, mesh={"data": 0})
    with pytest.raises(ValueError, match="max_file_bytes is 5; it must be at least 8,192"):
        plan(tree, max_file_bytes=5)
    with pytest.raises(ValueError, match="which optax does not have"):
        plan(tree, optimizer="adamm")
    with pytest.raises(ValueError, match="specs and processes need mesh="):
        plan(tree).restore(processes=2)
    with pytest.raises(InvalidSharding, match="the mesh .data=2. has no axis 'x'"):
        plan(tree, mesh={"x": 4}, specs=P("x")).restore(mesh={"data": 2})


def test_findings_of_the_check_are_part_of_the_plan():
    tree = {"kernel": jax.ShapeDtypeStruct((64 << 20, 2), jnp.float32)}
    planned = plan(tree, mesh={"data": 8}, specs=P())
    (finding,) = planned.findings
    assert finding.severity == "warning"
    assert "is whole on each of 8 devices" in str(finding)
    assert plan(tree, mesh={"data": 8}, specs=P("data")).findings == ()


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]):
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "planner.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    exec(compile(block, "docs/explanation/planner.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 9
