"""Is this Orbax's? One answer for steps, items and hints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ostraka
from ostraka.errors import CheckpointNotFound
from ostraka.formats.orbax.names import has_orbax_names, is_orbax, is_step
from ostraka.formats.unknown import likely_steps
from ostraka.storage import open_store


def old_step(run: Path, step: str) -> None:
    """A step as Orbax wrote it before 0.6: a folder for each item, and nothing else."""
    item = run / step / "default"
    item.mkdir(parents=True)
    (item / "_METADATA").write_text('{"tree_metadata": {}}')
    (item / "manifest.ocdbt").touch()


@pytest.mark.parametrize(
    ("names", "written", "checkpoint"),
    [
        (["_CHECKPOINT_METADATA", "default"], True, True),
        (["commit_success.txt", "state"], True, True),
        (["_METADATA", "_sharding", "d", "manifest.ocdbt"], True, False),
        (["_METADATA", "ocdbt.process_3"], True, False),
        (["_METADATA", "array_metadatas"], True, False),
        (["default"], False, True),
        (["_METADATA", "shards-0123456789abcdef"], False, False),
        (["model.safetensors", "config.json"], False, False),
        ([], False, False),
    ],
)
def test_names(names: list[str], written: bool, checkpoint: bool):
    assert (has_orbax_names(names), is_orbax(names)) == (written, checkpoint)


def test_a_folder_called_default_is_looked_into(tmp_path: Path):
    (tmp_path / "default").mkdir()
    assert not is_step(open_store(tmp_path), ["default"])
    shutil.rmtree(tmp_path / "default")
    old_step(tmp_path, ".")
    assert is_step(open_store(tmp_path), ["default"])


def test_hints_know_the_steps_that_a_reader_knows(tmp_path: Path):
    """A reader found steps from before 0.6, and what is said of a step that is missing did not."""
    old_step(tmp_path / "run", "5")
    with pytest.raises(CheckpointNotFound, match=r"the steps in .*/run are 5"):
        ostraka.open(tmp_path / "run" / "7")
    assert likely_steps(open_store(tmp_path)) == (
        f"run holds steps; to go on from them, give the Manager {tmp_path}/run"
    )
