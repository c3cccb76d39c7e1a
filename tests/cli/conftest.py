"""Checkpoints that the tests of the command share."""

import shutil
from pathlib import Path

import pytest

from cli_runs import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `save_model`, which no test changes."""
    return save_model(tmp_path_factory.mktemp("model") / "checkpoint")


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test that changes it."""
    return Path(shutil.copytree(model, tmp_path / "checkpoint"))
