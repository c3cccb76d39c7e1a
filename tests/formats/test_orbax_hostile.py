"""Orbax directories that are damaged or made by a stranger: our errors only, nothing outside read.

Also those that Orbax itself never finished, or whose leaves it mixed up.
"""

import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from cli_runs import run
from mutations import Mutator
from orbax_cases import Form, mesh_of, ocp, put, quiet, write
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    Mismatch,
    NotACheckpoint,
    OstrakaError,
    StoreError,
    UnsupportedFormat,
)
from ostraka.formats.orbax._read import import_tensorstore


def make_tree() -> dict[str, Any]:
    mesh = mesh_of(x=4, y=2)
    return {
        "cut": put(np.arange(64, dtype=np.float32).reshape(8, 8), mesh, "x", "y"),
        "list": [np.arange(5), 7, "text", None, {}],
        "key": jax.random.key(1),
    }


def open_and_read_all(path: Path) -> list[Any]:
    """Everything that a checkpoint has: the entry for a fuzzer."""
    checkpoint = ostraka.open(path)
    found: list[Any] = []
    for leaf in checkpoint:
        try:
            value = checkpoint[leaf]
            if isinstance(value, ostraka.LazyArray) and value.nbytes > 1 << 32:
                value = value[(slice(0, 1 << 20),) * (value.ndim > 0)]
            found.append(value if not hasattr(value, "shape") else value[...])
        except UnsupportedFormat:
            pass  # A leaf of an unknown kind; the others are to be had.
    return found


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("orbax")
    forms = {
        "zarr2": Form("tree", zarr3=False, ocdbt=False, compressed=True),
        "zarr3": Form("v1", zarr3=True, ocdbt=False, compressed=True),
        "ocdbt": Form("step", zarr3=False, ocdbt=True, compressed=True),
    }
    return {name: write(form, root / name, make_tree()) for name, form in forms.items()}


def json_files(path: Path) -> list[Path]:
    """The files of a checkpoint that are JSON objects."""
    return [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.read_bytes()[:1] == b"{" and file.stat().st_size > 2
    ]


def fuzz(original: Path, work: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Change one file at a time; returns how many were refused, and how many could be read."""
    refused = read = 0
    shutil.copytree(original, work)
    files = json_files(work)
    for number in range(rounds):
        mutator = Mutator(1_000_000 * seed + number)
        file = mutator.random.choice(files)
        before = file.read_bytes()
        changed = mutator.text(mutator.document(json.loads(before)))
        is_cut = mutator.random.random() < 0.1
        file.write_bytes(changed[: len(changed) // 2] if is_cut else changed)
        try:
            open_and_read_all(work)
            read += 1
        except OstrakaError:
            refused += 1
        file.write_bytes(before)
    open_and_read_all(work)
    return refused, read


@pytest.mark.parametrize("name", ["zarr2", "zarr3", "ocdbt"])
def test_changed_json(originals: dict[str, Path], tmp_path: Path, name: str):
    refused, read = fuzz(originals[name], tmp_path / "c", 150, seed=1)
    assert refused > 40
    assert read > 10


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", ["zarr2", "zarr3", "ocdbt"])
def test_changed_json_for_long(originals: dict[str, Path], tmp_path: Path, name: str, seed: int):
    fuzz(originals[name], tmp_path / "c", 3000, seed)


@pytest.mark.parametrize("name", ["zarr2", "ocdbt"])
def test_files_that_are_gone_cut_short_or_flipped(
    originals: dict[str, Path], tmp_path: Path, name: str
):
    work = tmp_path / "c"
    shutil.copytree(originals[name], work)
    noticed = 0
    files = [file for file in sorted(work.rglob("*")) if file.is_file()]
    for file in files:
        data = file.read_bytes()
        for changed in (None, data[: len(data) // 2], bytes([*data[:-1], data[-1] ^ 1])):
            file.unlink()
            if changed is not None:
                file.write_bytes(changed)
            try:
                open_and_read_all(work)
            except OstrakaError:
                noticed += 1
            file.write_bytes(data)
    # OCDBT leaves files, more or fewer of them, that nothing refers to any more.
    assert noticed > (len(files) // 2 if name == "ocdbt" else len(files))


def test_a_chunk_that_is_missing_is_not_zeros(originals: dict[str, Path], tmp_path: Path):
    work = tmp_path / "c"
    shutil.copytree(originals["zarr2"], work)
    (work / "cut" / "1.0").unlink()
    with pytest.raises(Damaged, match=r"cut \(leaf 'cut'\): it is missing"):
        ostraka.restore(work)
    assert ostraka.open(work)["cut"][0].tolist() == [*range(8)]


@pytest.mark.parametrize("name", ["../secret", "/etc", "a/../../secret", ".", "a//b", "\0"])
def test_no_name_leads_outside(originals: dict[str, Path], tmp_path: Path, name: str):
    work = tmp_path / "c"
    shutil.copytree(originals["zarr2"], work)
    shutil.copytree(work / "cut", tmp_path / "secret")
    text = (work / "_METADATA").read_text()
    key = json.dumps(name)
    (work / "_METADATA").write_text(text.replace('[{"key": "cut"', f'[{{"key": {key}'))
    with pytest.raises(Damaged, match="_METADATA: it is not what Orbax writes"):
        open_and_read_all(work)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["zarr2", "zarr3", "ocdbt"])
def test_links_and_pipes_lead_nowhere(
    originals: dict[str, Path], tmp_path: Path, name: str, kind: str
):
    """TensorStore would follow the links, and wait for the pipes for ever."""
    work, outside = tmp_path / "c", tmp_path / "outside"
    shutil.copytree(originals[name], work)
    refused = 0
    for place in sorted(work.rglob("*")):
        if place.name in ("commit_success.txt", "orbax.checkpoint"):  # nothing of them is read
            continue
        if kind == "pipe" and place.is_dir():
            continue
        place.rename(outside)
        if kind == "link":
            place.symlink_to(outside)
        else:
            os.mkfifo(place)
        with pytest.raises((Damaged, NotACheckpoint, CheckpointNotFound), match="it is|no ") as e:
            open_and_read_all(work)
        refused += "a symbolic link" in str(e.value) or "a pipe" in str(e.value)
        place.unlink()
        outside.rename(place)
    assert refused > 5
    open_and_read_all(work)


def test_a_huge_array_is_not_filled_with_nothing(originals: dict[str, Path], tmp_path: Path):
    """Petabytes without a chunk are neither allocated nor planned chunk by chunk."""
    work = tmp_path / "c"
    shutil.copytree(originals["zarr2"], work)
    about = json.loads((work / "list.0" / ".zarray").read_text())
    about["shape"], about["chunks"] = [1 << 50], [1]
    (work / "list.0" / ".zarray").write_text(json.dumps(about))
    with pytest.raises((Damaged, StoreError), match=r"list/0"):
        ostraka.open(work)["list/0"][...]


# What Orbax itself leaves behind


def test_names_that_orbax_mixes_up(tmp_path: Path):
    tree = {"a.b": np.ones(2), "a": {"b": np.zeros(2)}, "c": np.arange(2)}
    with quiet(), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", tree)
    why = "Orbax wrote it to the same place as 'a.b', so one of them is gone"
    path = tmp_path / "c"
    for restore in (partial(ostraka.restore, path), partial(ostraka.restore, path, tree)):
        with pytest.raises(Mismatch, match=why) as caught:
            restore()
        assert len(caught.value.differences) == 2
    found = ostraka.restore(tmp_path / "c", only=["!a.b", "!a/b"])
    assert found["c"].tolist() == [0, 1]
    with pytest.raises(UnsupportedFormat, match=why):
        ostraka.open(tmp_path / "c")["a/b"]


def test_a_save_that_never_finished(tmp_path: Path):
    with quiet(), ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave({"step": jnp.full(2, step)}))
    root = tmp_path / "run"
    (root / "3").rename(root / "3.orbax-checkpoint-tmp")
    about = json.loads((root / "2" / "_CHECKPOINT_METADATA").read_text())
    assert ostraka.open(root).path == str(root / "2")
    # Versions before 0.12.3 had no such file in a directory.
    (root / "2" / "commit_success.txt").unlink()
    assert ostraka.open(root).path == str(root / "2")
    about["commit_timestamp_nsecs"] = None
    (root / "2" / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
    assert ostraka.open(root).path == str(root / "1")
    for name in ("2", "3.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp/default"):
        with pytest.raises(CheckpointNotFound, match="Orbax never finished it"):
            ostraka.open(root / name)


def test_an_item_of_an_unknown_handler(tmp_path: Path):
    args = ocp.args.Composite(
        state=ocp.args.StandardSave({"w": jnp.ones(2)}), other=ocp.args.JsonSave({"a": 1})
    )
    with quiet(), ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args)
    (tmp_path / "1" / "other" / "metadata").rename(tmp_path / "1" / "other" / "data.bin")
    with pytest.raises(Mismatch, match="it is an item of JsonCheckpointHandler, which only that"):
        ostraka.restore(tmp_path)
    like = {"state": {"w": jnp.zeros(2)}}
    assert ostraka.restore(tmp_path, like=like)["state"]["w"].tolist() == [1, 1]


def test_without_tensorstore(
    originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    import_tensorstore.cache_clear()
    said = "reading an Orbax checkpoint needs TensorStore, which is not installed.*pip install tens"
    work = (ostraka.open, ostraka.restore, partial(ostraka.convert, target="out", to="ostraka"))
    for call in work:
        with pytest.raises(UnsupportedFormat, match=said):
            call(originals["zarr3"])
    assert re.search(said, run("show", originals["zarr3"]).stderr)
    ostraka.save(tmp_path / "c", {"a": 1})
    assert ostraka.open(tmp_path / "c")["a"] == 1
    monkeypatch.undo()
    import_tensorstore.cache_clear()
