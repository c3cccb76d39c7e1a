"""Files of other programs are named, with what to do; none of them is read."""

import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import ostraka
from hf_python import TORCH_PYTHON as TORCH
from ostraka.cli import main
from ostraka.errors import NotACheckpoint
from ostraka.formats.unknown import describe_file

FLAX = "a msgpack file, such as flax.serialization.to_bytes .*msgpack_restore, .* ostraka.save"


def flax_file(path: Path, tree: Any) -> None:
    path.write_bytes(flax.serialization.to_bytes(tree))


def keras_file(path: Path) -> None:
    """As Keras 3 writes it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", b"\x89HDF\r\n\x1a\n")


def torch_file(path: Path) -> None:
    """As torch.save lays it out: the pickle comes first."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr(f"{path.stem}/data/0", bytes(12))


def numpy_files(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, w=np.ones(3))


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "checkpoint_0": (lambda path: flax_file(path, {"params": {"w": jnp.ones(3)}, "step": 3}), FLAX),
    "state.msgpack": (lambda path: flax_file(path, {"x" * 40: np.ones(3)}), FLAX),
    "many.msgpack": (lambda path: flax_file(path, {f"k{n}": n for n in range(40)}), FLAX),
    "model.pt": (torch_file, r"a file of torch.save, .*weights_only=True.*safetensors"),
    "old.bin": (
        lambda path: path.write_bytes(bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")),
        "a file of torch.save",
    ),
    "state.pkl": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "a pickle, which runs"),
    "model.h5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n\0\0"), "an HDF5 file.*h5py"),
    "model.keras": (keras_file, r"a model of Keras.*load_model"),
    "model.gguf": (lambda path: path.write_bytes(b"GGUF\x03\0\0\0"), "a GGUF file.*safetensors"),
    "arrays.npz": (numpy_files, r"a \.npz file of numpy.*numpy\.load.*ostraka\.save"),
    "array.npy": (lambda path: np.save(path, np.ones(3)), r"a \.npy file of numpy"),
}


@pytest.mark.parametrize("name", FILES)
def test_each_call_names_the_file_and_the_remedy(name: str, tmp_path: Path):
    write, said = FILES[name]
    write(tmp_path / name)
    for call in (
        lambda: ostraka.restore(tmp_path / name),
        lambda: ostraka.open(tmp_path / name),
        lambda: ostraka.convert(tmp_path / name, tmp_path / "out", to="ostraka"),
    ):
        with pytest.raises(NotACheckpoint, match=f"{name} is {said}"):
            call()
    shown = CliRunner().invoke(main, ["show", str(tmp_path / name)])
    assert shown.exit_code != 0
    assert len(shown.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(NotACheckpoint, match=f"holds no .* reads: {name} is {said}"):
        ostraka.restore(tmp_path)


def test_what_flax_itself_writes_by_its_older_calls(tmp_path: Path):
    from flax.training import checkpoints

    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", False)
    try:
        with pytest.warns(DeprecationWarning, match="Flax Checkpointing"):
            checkpoints.save_checkpoint(str(tmp_path), {"w": np.ones(3)}, step=5)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)
    with pytest.raises(NotACheckpoint, match=f"checkpoint_5 is {FLAX}"):
        ostraka.restore(tmp_path)
    # And the remedy works.
    found = flax.serialization.msgpack_restore((tmp_path / "checkpoint_5").read_bytes())
    ostraka.save(tmp_path / "ours", found)
    np.testing.assert_array_equal(ostraka.restore(tmp_path / "ours")["w"], np.ones(3))


@pytest.mark.skipif(not TORCH.exists(), reason="PyTorch is not installed in .venv-torch")
def test_what_torch_itself_writes(tmp_path: Path):
    program = """
import sys, torch
for number in (0, 1):
    torch.save({"w": torch.ones(3)}, sys.argv[1] + f"/{number}.bin",
               _use_new_zipfile_serialization=bool(number))
"""
    subprocess.run([TORCH, "-c", program, tmp_path], check=True)
    for number in (0, 1):
        with pytest.raises(NotACheckpoint, match=rf"{number}\.bin is a file of torch\.save"):
            ostraka.restore(tmp_path / f"{number}.bin")


def test_other_bytes_are_not_guessed():
    for start in (b"", b"\x80", b"PK\x03\x04", b"text", b"\x81\x01", b"\xde\x00", b"\xff" * 40):
        assert describe_file(start) is None
    assert describe_file(b"\x81\xa1\x00\x01") is None  # no text that one could read


def test_a_checkpoint_beside_such_a_file_is_found(tmp_path: Path):
    ostraka.save(tmp_path / "run" / "step_3", {"w": np.ones(3, ml_dtypes.bfloat16)})
    flax_file(tmp_path / "run" / "checkpoint_0", {"w": np.ones(3)})
    assert ostraka.restore(tmp_path / "run")["w"].shape == (3,)
