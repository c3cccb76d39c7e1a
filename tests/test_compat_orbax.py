"""`ostraka.compat.orbax`: the scenarios, run against Orbax itself and against the drop-in."""

from __future__ import annotations

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
