"""`ostraka.compat.orbax`: the scenarios, run against Orbax itself and against the drop-in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orbax.checkpoint
import pytest

import ostraka.compat.orbax
from orbax_scenarios import SCENARIOS, Scenario, as_table

pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = [orbax.checkpoint, ostraka.compat.orbax]
DOC = Path(__file__).parents[1] / "docs" / "migrating.md"


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("found", SCENARIOS, ids=lambda s: s.run.__name__)
@pytest.mark.parametrize("ocp", LIBRARIES, ids=["orbax", "ostraka"])
def test_scenario(ocp: Any, found: Scenario, tmp_path: Path):
    found.run(ocp, tmp_path)


def test_the_table_in_the_docs_is_that_of_the_scenarios():
    assert len(SCENARIOS) >= 60
    assert as_table() in DOC.read_text()
