"""Orbax directories that are damaged or made by a stranger: our errors only, nothing outside read.

Also those that Orbax itself never finished, or whose leaves it mixed up.
"""

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuzz
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


def open_and_read_all(path: Path) -> None:
    """Everything that a checkpoint has."""
    checkpoint = ostraka.open(path)
    for leaf in checkpoint:
        with suppress(UnsupportedFormat):  # A leaf of an unknown kind; the others are to be had.
            value = checkpoint[leaf]
            if isinstance(value, ostraka.LazyArray) and value.nbytes > 16 << 20:
                value = value[(slice(0, 1 << 20),) * (value.ndim > 0)]
            if hasattr(value, "shape"):
                value[...]


FORMS = {
    "zarr2": Form("tree", zarr3=False, ocdbt=False, compressed=True),
    "zarr3": Form("v1", zarr3=True, ocdbt=False, compressed=True),
    "ocdbt": Form("step", zarr3=False, ocdbt=True, compressed=True),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("orbax")
    return {name: write(form, root / name, make_tree()) for name, form in FORMS.items()}


@pytest.fixture
def work(originals: dict[str, Path], tmp_path: Path, name: str) -> Path:
    """A copy of the original of a form, to be harmed."""
    return Path(shutil.copytree(originals[name], tmp_path / "c"))


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


def fuzz_json(work: Path, rounds: int, seed: int) -> fuzz.Tally:
    """Change one JSON file at a time, and cut some in half."""
    every = {file: file.read_bytes() for file in work.rglob("*") if file.is_file()}
    files = sorted(file for file, data in every.items() if data[:1] == b"{" and len(data) > 2)

    def make(mutator: Mutator) -> dict[Path, bytes]:
        file = mutator.random.choice(files)
        changed = mutator.text(mutator.document(json.loads(every[file])))
        is_cut = mutator.random.random() < 0.1
        return {file: changed[: len(changed) // 2] if is_cut else changed}

    def read(changed: dict[Path, bytes]) -> None:
        ((file, data),) = changed.items()
        file.write_bytes(data)
        try:
            open_and_read_all(work)
        finally:
            file.write_bytes(every[file])

    tally, meter = fuzz.Tally(), fuzz.MemoryMeter()
    for number in range(1_000_000 * seed, 1_000_000 * seed + rounds):
        fuzz.fuzz_one(fuzz.Target(make, read), number, tally, meter)
    assert not tally.failures, tally.failures
    open_and_read_all(work)
    return tally


@of(*FORMS)
def test_changed_json(work: Path):
    tally = fuzz_json(work, 70, seed=1)
    assert 18 < tally.refused < 66


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
@of(*FORMS)
def test_changed_json_for_long(work: Path, seed: int):
    fuzz_json(work, 3000, seed)


@of("zarr2", "ocdbt")
def test_files_that_are_gone_cut_short_or_flipped(work: Path, name: str):
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


@of("zarr2")
def test_a_chunk_that_is_missing_is_not_zeros(work: Path):
    (work / "cut" / "1.0").unlink()
    with pytest.raises(Damaged, match=r"cut \(leaf 'cut'\): it is missing"):
        ostraka.restore(work)
    assert ostraka.open(work)["cut"][0].tolist() == [*range(8)]


@of("zarr2")
@pytest.mark.parametrize("key", ["../secret", "/etc", "a/../../secret", ".", "a//b", "\0"])
def test_no_name_leads_outside(work: Path, key: str):
    shutil.copytree(work / "cut", work.parent / "secret")
    text = (work / "_METADATA").read_text()
    (work / "_METADATA").write_text(text.replace('[{"key": "cut"', f'[{{"key": {json.dumps(key)}'))
    with pytest.raises(Damaged, match="_METADATA: it is not what Orbax writes"):
        open_and_read_all(work)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@of(*FORMS)
def test_links_and_pipes_lead_nowhere(work: Path, kind: str):
    """TensorStore would follow the links, and wait for the pipes for ever."""
    outside = work.parent / "outside"
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


@of("zarr2")
def test_a_huge_array_is_not_filled_with_nothing(work: Path):
    """Petabytes without a chunk are neither allocated nor planned chunk by chunk."""
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


@of("zarr3")
def test_without_tensorstore(work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    import_tensorstore.cache_clear()
    said = "reading an Orbax checkpoint needs TensorStore, which is not installed.*pip install tens"
    for call in (
        ostraka.open,
        ostraka.restore,
        partial(ostraka.convert, target="out", to="ostraka"),
    ):
        with pytest.raises(UnsupportedFormat, match=said):
            call(work)
    assert re.search(said, run("show", work).stderr)
    ostraka.save(tmp_path / "ours", {"a": 1})
    assert ostraka.open(tmp_path / "ours")["a"] == 1
    monkeypatch.undo()
    import_tensorstore.cache_clear()
