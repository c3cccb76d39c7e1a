"""`ostraka.compat.orbax`: the scenarios, run against Orbax itself and against the drop-in."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from orbax.checkpoint._src.serialization import type_handler_registry

import orbax_user_scenarios as orbax_user_scenarios  # adds to the scenarios
import ostraka.compat.orbax
from orbax_scenarios import SCENARIOS, Scenario, as_table
from ostraka.compat.orbax._engine import Opened
from ostraka.compat.orbax._pytree import read_as_saved, read_standard

pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = [orbax.checkpoint, ostraka.compat.orbax]
DOC = Path(__file__).parents[1] / "docs" / "migrating.md"
KEY = jax.random.key(3)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


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
    item = Opened(tmp_path / "a").item(None)
    assert len(item.tree.leaves) == 2
    new = {"x": {"w": jnp.ones((4, 2)), "b": np.ones(3)}}
    checkpointer.save(tmp_path / "a", new, force=True)
    np.testing.assert_array_equal(read_as_saved(item)["x"]["b"], np.ones(3))
    item = Opened(tmp_path / "a").item(None)
    checkpointer.save(tmp_path / "a", jax.tree.map(lambda x: x + 1, new), force=True)
    found = read_standard(item, new)
    np.testing.assert_array_equal(found["x"]["w"], np.full((4, 2), 2.0))


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


@pytest.mark.parametrize(
    "like", [jnp.zeros((5, 7)), jax.ShapeDtypeStruct((3,), jnp.uint32), jax.random.split(KEY, 2)]
)
def test_a_template_of_another_shape_for_a_key(like: Any, tmp_path: Path):
    with ostraka.compat.orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"k": KEY})
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match="leaf 'k'.*not compatible with the stored shape"):
            checkpointer.restore(tmp_path / "a", {"k": like})


@pytest.mark.parametrize("saved", [np.zeros(()), 3, 2.5])
def test_a_key_is_asked_for_and_none_was_saved(saved: Any, tmp_path: Path):
    with ostraka.compat.orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"k": saved})
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match="leaf 'k': a PRNG key is asked for, and none was"):
            checkpointer.restore(tmp_path / "a", {"k": KEY})


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("checkpoint_manager", "CheckpointManager"),
        ("checkpoint_manager", "LocalCheckpointOptions"),
        ("replicator_checkpoint_manager", "ReplicatorCheckpointManager"),
        ("multi_tier_checkpointing.initialization", "initialize_multi_tier_checkpointing"),
    ],
)
def test_emergency_checkpoints_are_refused_by_name(module: str, name: str):
    start = "ostraka.compat.orbax.experimental.emergency"
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        getattr(importlib.import_module(f"{start}.{module}"), name)("somewhere")


def test_options_of_a_context_that_are_not_there():
    with pytest.raises(AttributeError, match="'deletion': if it is one of Orbax's"):
        _ = ostraka.compat.orbax.v1.Context().deletion


def test_private_modules_that_are_not_there():
    with pytest.raises(AttributeError, match=r"orbax.checkpoint._src.sharding_utils"):
        _ = importlib.import_module("ostraka.compat.orbax._src").sharding_utils
