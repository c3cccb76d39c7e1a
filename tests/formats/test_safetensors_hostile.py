"""Directories of safetensors files that are damaged, or made by a stranger."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import ostraka
from hostile_directories import INSTEAD, Make
from ostraka.errors import Damaged, OstrakaError
from peaks import extra_bytes

NAME = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"


def packed(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int, stop: int, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    sizes = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": sizes, "data_offsets": [start, stop]}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A good one, beside something that is none of its business."""
    path = tmp_path / "model"
    path.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(save({"secret": np.ones(3)}))
    (path / NAME).write_bytes(save({"w": np.arange(4)}))
    (path / INDEX).write_text(json.dumps({"weight_map": {"w": NAME}}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is no safetensors file"),
    "text": (b"hello, this is no tensor file", "it is no safetensors file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid x", "a pointer of Git LFS"),
    "huge length": (packed(b"{}", length=1 << 60), "its header would have"),
    "length beyond": (
        packed(b"{}", length=1000),
        "its header alone has 1,000",
    ),
    "not JSON": (packed(b"{nope"), "it can't be read as JSON"),
    "nested": (packed(b'{"a":' * 50_000), "it can't be read as JSON"),
    "nested lists": (packed(b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"), "nested too deep"),
    "twice": (
        packed(b'{"w":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"w":{}}', b"1"),
        "it has 'w' twice",
    ),
    "metadata": (packed({"__metadata__": {"a": 1}}), "must be text by name"),
    "no description": (packed({"w": 3}), "no sound description of tensor 'w'"),
    "surrogate": (packed({"\ud800": {}}), "no sound description of tensor"),
    "no dtype": (packed({"w": {"shape": [1], "data_offsets": [0, 1]}}, b"1"), "what can't be"),
    "floats": (packed({"w": tensor(0, 1, shape=[1.0])}, b"1"), "what can't be"),
    "negative": (packed({"w": tensor(0, 1, shape=[-1])}, b"1"), "what can't be"),
    "enormous": (packed({"w": tensor(0, 1, shape=[1 << 70])}, b"1"), "what can't be"),
    "overflow": (packed({"w": tensor(0, 1, shape=[1 << 62, 1 << 62])}, b"1"), "has 1 bytes, not"),
    "size": (packed({"w": tensor(0, 8, "F32", [4])}, b"1" * 8), "has 8 bytes, not 16"),
    "backwards": (packed({"w": tensor(3, 1, shape=[2])}, b"123"), "no sound offsets"),
    "hole": (packed({"w": tensor(2, 4)}, b"1234"), "comes after a hole"),
    "overlap": (packed({"w": tensor(0, 4), "v": tensor(2, 6)}, b"123456"), "shares bytes with"),
    "cut short": (packed({"w": tensor(0, 9)}, b"1234"), "it is cut short"),
    "trailing": (packed({"w": tensor(0, 2)}, b"1234"), "something is at its end"),
    "rank": (packed({"w": tensor(0, 1, shape=[1] * 100)}, b"1"), "no sound offsets or shape"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers(directory: Path, kind: str):
    data, message = HEADERS[kind]
    (directory / NAME).write_bytes(data)
    for path in (directory, directory / NAME):
        with pytest.raises(Damaged, match=message) as caught:
            ostraka.open(path)
        assert caught.value.problems[0].file == NAME


INDEXES: dict[str, tuple[Any, str]] = {
    "above": ({"w": "../outside.safetensors"}, "no safetensors file beside it"),
    "absolute": ({"w": "/etc/x.safetensors"}, "no safetensors file beside it"),
    "backslash": ({"w": "..\\outside.safetensors"}, "no safetensors file beside it"),
    "below": ({"w": "a/b.safetensors"}, "no safetensors file beside it"),
    "dots": ({"w": "...safetensors"}, "no safetensors file beside it"),
    "nul": ({"w": "a\0.safetensors"}, "no safetensors file beside it"),
    "number": ({"w": 3}, "no safetensors file beside it"),
    "other kind": ({"w": "config.json"}, "no safetensors file beside it"),
    "long": ({"w": "x" * 5000 + ".safetensors"}, "no safetensors file beside it"),
    "missing": ({"w": NAME, "v": "more.safetensors"}, "more.safetensors .leaf 'v'.: it is missing"),
    "not in it": ({"w": NAME, "v": NAME}, r"leaf 'v'.*has no such tensor"),
    "empty": ({}, "it has no weight_map"),
    "list": ([NAME], "it has no weight_map"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_indexes(directory: Path, kind: str):
    weight_map, message = INDEXES[kind]
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Damaged, match=message):
        ostraka.open(directory)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\xff", ""])
def test_json_files(directory: Path, name: str, text: str):
    (directory / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(Damaged, match=name):
        ostraka.open(directory)


def link_to_blobs(path: Path, outside: Path) -> None:
    """As in the hub's cache, but this is no snapshot of it."""
    blob = path.parents[2] / "blobs" / ("0" * 64)
    blob.parent.mkdir(exist_ok=True)
    shutil.copy(outside, blob)
    path.symlink_to(f"../../blobs/{blob.name}")


KINDS: dict[str, Make] = {
    "a link": lambda path, outside: path.symlink_to(outside),
    "a link to blobs": link_to_blobs,
    **{kind: INSTEAD[kind] for kind in ("a pipe", "a directory")},
}


@pytest.mark.parametrize("name", [NAME, INDEX, "config.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file(directory: Path, kind: str, name: str):
    """Nothing is followed, nothing waited for."""
    (directory / name).unlink()
    KINDS[kind](directory / name, directory.parent / "outside.safetensors")
    with pytest.raises((Damaged, OstrakaError), match=name):
        ostraka.open(directory)


def test_a_small_file_does_not_take_much_memory(directory: Path):
    """A header that is said to be long, in a file that is: holes on the disk cost nothing."""
    with open(directory / NAME, "wb") as file:
        file.write(packed(b"{", length=99_000_000))
        file.truncate(1 << 33)

    def read() -> None:
        with pytest.raises(Damaged, match="it can't be read as JSON"):
            ostraka.open(directory)

    assert extra_bytes(read) < 400 << 20


def test_a_file_that_changes_after_it_was_opened(directory: Path):
    opened = ostraka.open(directory)
    (directory / NAME).write_bytes(save({"w": np.arange(4), "v": np.arange(4)}))
    with pytest.raises(OstrakaError, match="was replaced by another save since it was opened"):
        opened["w"][...]
    shorter = (directory / NAME).read_bytes()[:-1]
    opened = ostraka.open(directory)
    (directory / NAME).write_bytes(shorter)
    with pytest.raises(OstrakaError, match=NAME):
        opened["w"][...]


def test_an_empty_tensor_of_an_enormous_shape(directory: Path):
    sizes = [0, 1 << 62, 1 << 62]
    (directory / NAME).write_bytes(packed({"w": tensor(0, 0, "F32", sizes)}))
    opened = ostraka.open(directory)
    with pytest.raises(OstrakaError, match="for which there is no memory"):
        opened["w"][...]
