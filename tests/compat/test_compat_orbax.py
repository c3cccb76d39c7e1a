"""`ostraka.compat.orbax`: the scenarios, run against Orbax itself and against the drop-in."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import type_handler_registry

import orbax_edge_scenarios as orbax_edge_scenarios  # adds to the scenarios
import orbax_suite_scenarios as orbax_suite_scenarios  # adds to the scenarios
import orbax_user_scenarios as orbax_user_scenarios  # so does this
import ostraka.compat.orbax
from orbax_scenarios import SCENARIOS, Scenario, as_table
from ostraka.compat.orbax._engine import OpenCheckpoint
from ostraka.compat.orbax._pytree import read_as_saved, read_standard

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet")]

LIBRARIES = [orbax.checkpoint, ostraka.compat.orbax]
DOC = Path(__file__).parents[2] / "docs" / "maintainers" / "orbax-scenarios.md"
DATA = Path(__file__).parents[1] / "data"
KEY = jax.random.key(3)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch):
    """`import orbax.checkpoint.multihost` puts another module in the place of the one there."""
    monkeypatch.setattr(orbax.checkpoint, "multihost", multihost)


@pytest.fixture(autouse=True)
def registry():
    """What a scenario tells Orbax of types holds for itself alone: others read with Orbax, too."""
    of_orbax: Any = type_handler_registry.GLOBAL_TYPE_HANDLER_REGISTRY
    by_type, by_name = list(of_orbax._type_registry), dict(of_orbax._typestr_registry)
    yield
    of_orbax._type_registry[:] = by_type
    of_orbax._typestr_registry.clear()
    of_orbax._typestr_registry.update(by_name)


@pytest.mark.parametrize("found", SCENARIOS, ids=lambda s: s.run.__name__)
@pytest.mark.parametrize("ocp", LIBRARIES, ids=["orbax", "ostraka"])
def test_scenario(ocp: Any, found: Scenario, tmp_path: Path):
    found.run(ocp, tmp_path)


def test_the_table_in_the_docs_is_that_of_the_scenarios():
    assert len(SCENARIOS) >= 60
    assert as_table() in DOC.read_text()


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path: Path):
    """What was opened before another save is read from what that save has put there."""
    checkpointer = ostraka.compat.orbax.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "a", {"x": {"w": jnp.zeros((4, 2)), "b": np.zeros(3)}})
    item = OpenCheckpoint(tmp_path / "a").item(None)
    assert len(item.tree.leaves) == 2
    new = {"x": {"w": jnp.ones((4, 2)), "b": np.ones(3)}}
    checkpointer.save(tmp_path / "a", new, force=True)
    np.testing.assert_array_equal(read_as_saved(item)["x"]["b"], np.ones(3))
    item = OpenCheckpoint(tmp_path / "a").item(None)
    checkpointer.save(tmp_path / "a", jax.tree.map(lambda x: x + 1, new), force=True)
    found = read_standard(item, new)
    np.testing.assert_array_equal(found["x"]["w"], np.full((4, 2), 2.0))
    item = OpenCheckpoint(tmp_path / "a").item(None)
    assert len(item.tree.leaves) == 2
    checkpointer.save(tmp_path / "a", {"x": {**new["x"], "w": jnp.ones((8, 2))}}, force=True)
    with pytest.raises(ValueError, match="leaf 'x/w'.*a save has replaced the checkpoint"):
        read_as_saved(item)


def test_a_step_of_another_program_with_a_name_format_of_orbax(tmp_path: Path):
    """The step was saved after the manager was made, which looks for it again."""
    ocp: Any = ostraka.compat.orbax
    naming = orbax.checkpoint.path.step.standard_name_format(step_prefix="run")
    options = ocp.CheckpointManagerOptions(step_name_format=naming)
    with ocp.CheckpointManager(tmp_path, options=options) as reader:
        with ocp.CheckpointManager(tmp_path, options=options) as writer:
            writer.save(3, args=ocp.args.StandardSave({"x": np.arange(3)}))
        np.testing.assert_array_equal(reader.restore(3)["x"], np.arange(3))


def test_keys_that_are_one_text_are_refused(tmp_path: Path):
    checkpointer = ostraka.compat.orbax.PyTreeCheckpointer()
    with pytest.raises(ValueError, match="can't be compared"):
        checkpointer.save(tmp_path / "a", {"x": {1: jnp.ones(1), "1": jnp.ones(1)}})
    with pytest.raises(ValueError, match="two keys of the tree are 'x/1' as text"):
        checkpointer.save(tmp_path / "a", {"x": {1: jnp.ones(1), _One(): 0}})


class _One(int):
    """Another key that is written as 1."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return self is other

    def __str__(self) -> str:
        return "1"

    def __lt__(self, other: object) -> bool:
        return True


OTHER_SHAPE = "leaf 'k'.*not compatible with the stored shape"
NO_KEY = "leaf 'k': a PRNG key is asked for, and none was"


@pytest.mark.parametrize(
    ("saved", "like", "message"),
    [
        (KEY, jnp.zeros((5, 7)), OTHER_SHAPE),
        (KEY, jax.ShapeDtypeStruct((3,), jnp.uint32), OTHER_SHAPE),
        (KEY, jax.random.split(KEY, 2), OTHER_SHAPE),
        (np.zeros(()), KEY, NO_KEY),
        (3, KEY, NO_KEY),
        (2.5, KEY, NO_KEY),
    ],
)
def test_templates_that_do_not_fit_keys(saved: Any, like: Any, message: str, tmp_path: Path):
    with ostraka.compat.orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"k": saved})
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match=message):
            checkpointer.restore(tmp_path / "a", {"k": like})


def test_integers_that_jax_would_cut_off_are_refused(tmp_path: Path):
    """Orbax restores 2**40 as 0 here."""
    checkpointer = ostraka.compat.orbax.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "a", {"n": np.array([2**40, 3])})
    for dtype in (None, np.int64, np.int32):
        args = {"n": ostraka.compat.orbax.ArrayRestoreArgs(dtype=dtype)}
        with pytest.raises(ValueError, match="leaf 'n' holds integers that int32 can't hold"):
            checkpointer.restore(tmp_path / "a", restore_args=args)


def lookup(root: str, name: str) -> Any:
    """What a dotted name below a package is, modules that have to be imported included."""
    found, where = importlib.import_module(root), root
    for part in name.split("."):
        where = f"{where}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(where)
    return found


@pytest.mark.parametrize("root", ["orbax.checkpoint", "ostraka.compat.orbax"])
def test_names_that_public_programs_use(root: str):
    """Found in the syntax trees of 32 programs; those that Orbax itself no longer has left out."""
    names = (DATA / "orbax_names.txt").read_text().split()
    assert len(names) > 200
    for name in names:
        lookup(root, name)


PATHS = [line.split() for line in (DATA / "orbax_paths.txt").read_text().splitlines()]
"""Module paths, each with its public names."""


@pytest.mark.parametrize(("module", "names"), [(m, n) for m, *n in PATHS], ids=str)
def test_module_paths(module: str, names: list[str]):
    """Modules are imported by path, are attributes of their parents, and have their names."""
    found = importlib.import_module(f"ostraka.compat.{module}")
    parts = module.split(".")
    assert lookup("ostraka.compat", module) is found
    for name in names:
        assert getattr(found, name) is lookup("ostraka.compat", ".".join([*parts, name]))


FIRST_IMPORTS = [
    "import ostraka.compat.orbax.experimental.emergency.checkpoint_manager as found",
    "from ostraka.compat.orbax.experimental import v1 as found",
    "import ostraka.compat.orbax._src.arrays.sharding as found",
    "from ostraka.compat.orbax._src.futures.future import NoopFuture as found",
    "import ostraka.compat.orbax.checkpoint_args as found",
    "from ostraka.compat.orbax.path.step import NameFormat as found",
    "from ostraka.compat.orbax.checkpoint_managers import preservation_policy as found",
]
IMPORT_EACH = """
import os, sys, warnings
import jax, optax
assert "ostraka" not in sys.modules
warnings.simplefilter("ignore")  # JAX's own word on forks
for statement in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(statement + "; assert found")
        os._exit(0)
    assert not os.waitpid(child, 0)[1], statement
"""


def test_a_path_is_the_first_import_of_a_program():
    """Each in a new process, where no other import has loaded the modules."""
    subprocess.run([sys.executable, "-c", IMPORT_EACH, *FIRST_IMPORTS], check=True)


def test_objects_from_other_paths_are_pickled():
    path: Any = importlib.import_module("ostraka.compat.orbax._src.path.step")
    made = [path.NameFormat("run"), ostraka.compat.orbax.checkpoint_args.CheckpointArgs()]
    assert pickle.loads(pickle.dumps(made)) == made


EMERGENCY = "experimental.emergency"
MULTI_TIER = f"{EMERGENCY}.multi_tier_checkpointing"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("aggregate_handlers.MsgpackHandler", "puts small leaves together"),
        ("args.ProtoSave", "as bytes in the tree"),
        ("logging.CloudLogger", "subclass logging.AbstractLogger"),
        ("msgpack_utils.msgpack_serialize", "use flax.serialization"),
        ("type_handlers.get_json_tspec_read", "ostraka.open reads them"),
        ("utils.pytree_structure", r"ostraka\.open\(path\)"),
        (f"{EMERGENCY}.checkpoint_manager.CheckpointManager", ""),
        (f"{EMERGENCY}.checkpoint_manager.LocalCheckpointOptions", ""),
        (f"{EMERGENCY}.replicator_checkpoint_manager.ReplicatorCheckpointManager", ""),
        (f"{MULTI_TIER}.initialization.initialize_multi_tier_checkpointing", ""),
    ],
)
def test_names_that_are_there_and_refuse_to_be_used(name: str, instead: str):
    found = lookup("ostraka.compat.orbax", name)
    shown = name.rpartition(".")[2] if EMERGENCY in name else name
    with pytest.raises(NotImplementedError, match=f"{shown} is not supported.*{instead}"):
        found("something")


@pytest.mark.parametrize(
    "module", ["", ".args", ".handlers", ".utils", ".path.step", ".v1", ".v1.training", ".tree"]
)
def test_names_that_are_not_there(module: str):
    found = importlib.import_module(f"ostraka.compat.orbax{module}")
    with pytest.raises(AttributeError, match="no 'NoSuchThing'.*docs/from/orbax.md"):
        _ = found.NoSuchThing
    with pytest.raises(AttributeError, match=r"orbax.checkpoint._src.sharding_utils"):
        _ = importlib.import_module("ostraka.compat.orbax._src").sharding_utils
    with pytest.raises(AttributeError, match="'no_such': if it is one of Orbax's"):
        _ = ostraka.compat.orbax.v1.Context().no_such


def test_options_that_are_not_supported(tmp_path: Path):
    ocp: Any = ostraka.compat.orbax
    with pytest.raises(NotImplementedError, match="todelete_full_path"):
        ocp.CheckpointManagerOptions(todelete_full_path="gone")
    ocp.PyTreeCheckpointer().save(tmp_path / "a", {"a": 1})
    with pytest.raises(NotImplementedError, match="legacy_transform_fn"):
        ocp.PyTreeCheckpointer().restore(tmp_path / "a", legacy_transform_fn=print)
    context = ocp.v1.Context()
    context.deletion.gcs_deletion_options.todelete_full_path = "trash"
    with pytest.raises(NotImplementedError, match=r"todelete_full_path=\) is not supported"):
        ocp.v1.training.Checkpointer(tmp_path / "m", context=context)


@pytest.mark.parametrize(
    "item", [{"model": {}}, {"a": None}, {"opt": (optax.EmptyState(),)}], ids=str
)
def test_trees_without_values_are_saved_as_orbax_saves_them(item: Any, tmp_path: Path):
    found: list[Any] = []
    for library in LIBRARIES:
        place = tmp_path / library.__name__
        library.PyTreeCheckpointer().save(place / "sync", item)
        with library.CheckpointManager(place / "run") as manager:
            manager.save(0, args=library.args.StandardSave(item))
            manager.wait_until_finished()
            found.append((library.PyTreeCheckpointer().restore(place / "sync"), manager.restore(0)))
    assert found[0] == found[1]
