"""Checkpoints with compressed blocks: written and read everywhere as others are."""

import json
import re
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xxhash
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from cli_runs import run
from numbered import caught
from ostraka.common.dtypes import DTYPES, numpy_dtype
from ostraka.errors import Damaged, SaveFailed, StoreError, UnsupportedFormat
from ostraka.layout.shard_file import Entry
from ostraka.layout.spec import Target
from ostraka.saving import _write_compressed
from ostraka.saving._write_compressed import CompressedFile
from ostraka.storage import open_store
from ostraka.testing import FaultyStore
from places import copy_tree, flip
from same import assert_same, open_at
from sealed import change_index, change_metadata

MIB = 1 << 20


def weights(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def on_one(array: Any) -> jax.Array:
    """In one file, which the first device writes; others are shared out among all eight."""
    return jax.device_put(array, jax.devices()[0])


def stored_bytes(path: Any) -> dict[str, tuple[int, int]]:
    """By leaf: the bytes of its boxes, and what is stored of them."""
    source = open_at(path)
    found: dict[str, tuple[int, int]] = {}
    for number, leaf in enumerate(source.saved.leaves):
        boxes = source.boxes_of(number)
        found[leaf.path] = (sum(b.nbytes for b in boxes), sum(b.stored_bytes for b in boxes))
    return found


def is_compressed(path: Any) -> dict[str, bool]:
    return {leaf: stored < nbytes for leaf, (nbytes, stored) in stored_bytes(path).items()}


# There and back


def every_dtype() -> dict[str, Any]:
    numbers = np.random.default_rng(1)
    tree: dict[str, Any] = {}
    for name in DTYPES:
        dtype = numpy_dtype(name)
        per_element = DTYPES[name].bits / 8
        count = int(1.3 * MIB / per_element) // 7 * 7
        if name == "bool":
            values = numbers.random(count) < 0.1
        elif name.startswith(("int", "uint")):
            values = numbers.integers(0, 2, count)
        else:
            values = numbers.standard_normal(count)
        tree[name] = values.astype(dtype).reshape(-1, 7)
    return tree


def small_beside_large() -> dict[str, Any]:
    return {
        "large": weights(700, 1000),
        "empty": np.zeros((0, 5), np.float32),
        "scalar": jnp.float32(3.5),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 70_000),
        "small": [np.arange(n, dtype=np.int16) for n in (1, 7, 4096, 90_001)],
        "noise": np.random.default_rng(0).integers(0, 256, 3 * MIB, np.uint8),
        "int4": jnp.arange(3 * MIB).astype(jnp.int4),
        "number": 7,
        "text": "a",
    }


def not_contiguous() -> dict[str, Any]:
    base = weights(1200, 1100)
    return {"f": np.asfortranarray(base), "t": base.T, "step": base[::2, ::-1]}


@pytest.mark.parametrize(
    ("make", "compressed"),
    [
        (every_dtype, {*DTYPES}),
        (small_beside_large, {"large", "int4"}),
        (not_contiguous, {"f", "t", "step"}),
    ],
)
def test_there_and_back(tmp_path: Path, make: Callable[[], Any], compressed: set[str]):
    tree = make()
    ostraka.save(tmp_path / "c", tree, compress="zstd")
    assert_same(ostraka.restore(tmp_path / "c", like=tree), tree)
    assert ostraka.verify(tmp_path / "c").ok
    assert {path for path, is_it in is_compressed(tmp_path / "c").items() if is_it} == compressed


def test_sharded_and_onto_another_mesh(tmp_path: Path):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    both = weights(2048, 8192, dtype=ml_dtypes.bfloat16)
    tree = {
        "rows": jax.device_put(weights(2048, 4096), NamedSharding(mesh, P(("x", "y")))),
        "both": jax.device_put(both, NamedSharding(mesh, P("x", "y"))),
        "all": jax.device_put(weights(1031, 4096), NamedSharding(mesh, P())),
    }
    rules = {"rows": "zstd", "both": ("zstd", 1), "all": ("zstd", 9)}
    ostraka.save(tmp_path / "c", tree, compress=rules)
    assert all(is_compressed(tmp_path / "c").values())
    assert_same(ostraka.restore(tmp_path / "c", like=tree), tree)
    other = jax.make_mesh((2, 4), ("x", "y"))
    found = ostraka.restore(
        tmp_path / "c", mesh=other, specs={"rows": P("y"), "both": P(None, "x"), "all": P()}
    )
    assert found["both"].sharding.mesh.shape == {"x": 2, "y": 4}
    assert_same(found, tree)


def test_in_the_background_and_cast(tmp_path: Path):
    tree = {"a": weights(600, 1000)}
    expected = {"a": tree["a"].astype(ml_dtypes.bfloat16)}
    handle = ostraka.save_async(tmp_path / "c", tree, compress="zstd", dtype="bfloat16")
    tree["a"][:] = 0
    handle.wait()
    assert handle.bytes_written == handle.bytes_total > expected["a"].nbytes
    assert handle.record is not None
    assert handle.record.bytes < expected["a"].nbytes  # what was written
    assert_same(ostraka.restore(tmp_path / "c"), expected)
    assert is_compressed(tmp_path / "c") == {"a": True}


@pytest.mark.parametrize("place", ["memory", "bucket", "spooled to disk"])
def test_other_stores(request: pytest.FixtureRequest, monkeypatch: Any, place: str):
    path = "memory://compressed" if place == "memory" else request.getfixturevalue("bucket")
    if place == "spooled to disk":
        monkeypatch.setattr(_write_compressed, "_SPOOL_BYTES", 1000)
    # In a bucket the file of the first device is an upload in parts.
    large = on_one(weights(3000, 2048, seed=1))
    tree = {"a": weights(2100, 1024), "b": large, "small": np.arange(9)}
    for rule, is_large_compressed in (({"a": "zstd"}, False), ("zstd", True)):
        ostraka.save(path, tree, compress=rule)
        assert_same(ostraka.restore(path), tree)
        assert is_compressed(path) == {"a": True, "b": is_large_compressed, "small": False}
        assert ostraka.verify(path).ok


# What is asked for


def test_patterns(tmp_path: Path):
    tree = {"model": {"a": weights(600, 1000), "b": weights(600, 1000)}, "mu": weights(600, 1000)}
    rule = {"model/b": None, "model": "zstd"}
    ostraka.save(tmp_path / "c", tree, compress=rule)
    assert is_compressed(tmp_path / "c") == {"model/a": True, "model/b": False, "mu": False}
    assert_same(ostraka.restore(tmp_path / "c"), tree)
    with pytest.raises(ValueError, match=r"compress=.'modle/\*': .* \(did you mean 'model'\?\)"):
        ostraka.save(tmp_path / "d", tree, compress={"modle/*": "zstd"})
    assert not (tmp_path / "d").exists()


def test_only_what_is_compressed_has_a_new_version(tmp_path: Path):
    cases = (
        (np.arange(1000), None, 1),
        (np.arange(1000), "zstd", 1),
        (weights(600, 1000), "zstd", 2),
    )
    for array, rule, version in cases:
        ostraka.save(tmp_path / "c", {"a": array}, compress=rule)
        assert json.loads((tmp_path / "c" / "_METADATA").read_bytes())["version"] == version


def test_a_manager(tmp_path: Path):
    tree = {"a": weights(600, 1000)}
    with pytest.raises(ValueError, match="compress is 'lz4'"):
        ostraka.Manager(tmp_path / "run", compress="lz4")
    with ostraka.Manager(tmp_path / "run", compress="zstd", keep=3) as manager:
        manager.save(1, tree)
        manager.save(2, tree, compress=None)
        manager.save(3, tree, compress=("zstd", 2))
        manager.wait()
        assert_same(manager.restore(1), tree)
        found = [is_compressed(manager.path(step))["a"] for step in (1, 2, 3)]
    assert found == [True, False, True]


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = {"a": weights(600, 1000), "b": np.arange(5)}
    ostraka.save(tmp_path / "c", tree, compress="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    wanted = r"compression needs zstandard, .*; pip install zstandard"
    with pytest.raises(UnsupportedFormat, match=wanted):
        ostraka.save(tmp_path / "d", tree, compress="zstd")
    assert not (tmp_path / "d").exists()
    for read in (ostraka.restore, ostraka.verify):
        with pytest.raises(UnsupportedFormat, match=wanted):
            read(tmp_path / "c")
    assert ostraka.open(tmp_path / "c")["b"][2] == 2  # of a block that is not compressed
    ostraka.copy(tmp_path / "c", "memory://copied without the extra")
    monkeypatch.undo()
    assert_same(ostraka.restore("memory://copied without the extra"), tree)


# Plans


def test_plans(tmp_path: Path):
    """An estimate for a tree, and the sizes themselves for a checkpoint."""
    mesh = jax.make_mesh((8,), ("x",))
    cut, small = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
    tree = {
        "bf16": jax.device_put(weights(2048, 1024, dtype=ml_dtypes.bfloat16), cut),
        "f32": jax.device_put(weights(2048, 1024), cut),
        "cut small": jax.device_put(weights(100, 1024), small),
    }
    planned, plain = ostraka.plan(tree, compress="zstd"), ostraka.plan(tree)
    ostraka.save(tmp_path / "c", tree, compress="zstd")
    found = sum(file.stat().st_size for file in (tmp_path / "c").rglob("*") if file.is_file())
    known = ostraka.plan(str(tmp_path / "c"))
    assert plain.compressed is None
    assert planned.compressed is not None
    assert known.compressed is not None
    assert planned.compressed.is_estimate
    assert planned.compressed.total_bytes == pytest.approx(found, rel=0.02)
    assert [file.header_bytes for file in planned._write.files] == [
        file.header_bytes for file in open_at(tmp_path / "c").metadata.files
    ]
    assert (known.compressed.total_bytes, known.compressed.is_estimate) == (found, False)
    assert known.lost_disk().held_elsewhere_bytes >= 0
    assert known.restore().read_bytes == plain.restore().read_bytes
    one = ostraka.plan(tree, compress={"f32": "zstd"})
    assert one.compressed is not None
    assert one.total_bytes - one.compressed.total_bytes == round(8 * MIB * 0.16)
    with pytest.raises(ValueError, match=r"compress=.'f23': .* \(did you mean 'f32'\?\)"):
        ostraka.plan(tree, compress={"f23": "zstd"})


# Parts of it


def test_a_part_takes_only_the_blocks_it_needs(tmp_path: Path):
    array = weights(8192, 1024)  # 32 MiB, in 8 blocks of 1,024 rows
    ostraka.save(tmp_path / "c", {"a": on_one(array)}, compress="zstd")
    source = open_at(tmp_path / "c")
    whole = stored_bytes(tmp_path / "c")["a"][1]

    def read(*box: tuple[int, int]) -> int:
        counts: list[int] = []
        ((_, found),) = source.read([Target(0, box)], on_bytes=counts.append)
        assert_same(found, array[tuple(slice(*pair) for pair in box)])
        return sum(counts) - 4096  # the header

    assert 0.1 < read((5000, 5003), (7, 9)) / whole < 0.15  # one of eight
    assert 0.2 < read((1023, 1025), (0, 1024)) / whole < 0.3  # two
    assert read((0, 8192), (0, 1024)) == whole
    # And blocks do not need each other.
    (file,) = (tmp_path / "c").glob("shards-*/*.safetensors")
    flip(file, 4096 + (file.stat().st_size - 4096) * 3 // 16)  # in the second block
    found = ostraka.open(tmp_path / "c")["a"]
    assert_same(found[:1024], array[:1024])
    assert_same(found[2048:], array[2048:])
    with pytest.raises(Damaged, match="'a'"):
        found[1024]


# Damage


def change_block(path: Path, offset: int, data: bytes) -> None:
    """Let the second block, which follows the header, have other bytes and their digest."""
    (file,) = path.glob("shards-*/*.safetensors")
    whole = bytearray(file.read_bytes())
    whole[4096 + offset : 4096 + offset + len(data)] = data
    file.write_bytes(whole)
    digest = xxhash.xxh3_64_hexdigest(bytes(whole[4096:]))
    digests = described_file(path)["digests"][:16] + digest
    change_index(path, describing(digests=digests))


def described_file(path: Path) -> dict[str, Any]:
    """What the index says of the only file."""
    (index,) = path.glob("shards-*/process_*.json")
    (described,) = json.loads(index.read_bytes())["files"].values()
    return described


def describing(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Let the index say something else of the only file."""
    return lambda index: next(iter(index["files"].values())).update(fields)


def flip_kept_group(path: Path) -> None:
    (file,) = path.glob("shards-*/*.safetensors")
    change_block(path, 100, bytes([file.read_bytes()[4196] ^ 1]))


def claim_more(path: Path) -> None:
    files = json.loads((path / "_METADATA").read_bytes())["files"]
    change_metadata(path, files={**files, "size": [[2 * MIB + 4097, 0, 1]]})


def put_data(length: int) -> Callable[[Path], None]:
    return lambda path: change_index(path, describing(data=[[4096, 0, 1], [length, 0, 1]]))


NOT_WHAT_IT_WAS = "'a'.* do not decompress to what was saved"
NOT_DECODED = "'a'.* can't be decompressed"
IN_THE_INDEX = r"process_00000\.json: it (can't be read|does not describe)"
FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "block": (flip_kept_group, NOT_WHAT_IT_WAS),
    "result": (
        lambda path: change_index(path, describing(results="0123456789abcdef")),
        NOT_WHAT_IT_WAS,
    ),
    "no groups": (lambda path: change_block(path, 0, b"\0"), NOT_DECODED),
    "length": (lambda path: change_block(path, 1, struct.pack("<I", 5)), NOT_DECODED),
    **{f"data {n}": (put_data(n), IN_THE_INDEX) for n in (1 << 40, 2 * MIB + 4, 2 * MIB - 4)},
    "file table": (claim_more, "the file table and the layouts disagree"),
}


def test_forgeries_with_right_digests_are_refused(tmp_path: Path):
    """Of single blocks, `test_codec` has more."""
    tree = {"a": on_one(weights(512, 1024))}
    ostraka.save(tmp_path / "whole", tree, compress="zstd")
    for number, (name, (forge, found)) in enumerate(FORGERIES.items()):
        path = tmp_path / str(number)
        copy_tree(tmp_path / "whole", path)
        change_block(path, 0, b"")
        assert_same(ostraka.restore(path), tree)  # so digests are as they should be
        forge(path)
        for read in (ostraka.restore, ostraka.verify, lambda path: ostraka.open(path)["a"][3]):
            kind, said = caught(lambda read=read, path=path: read(path))
            assert kind == "Damaged", (name, said)
            assert re.search(found, said, re.DOTALL), (name, said)


# The command


def test_the_command_says_both_sizes(tmp_path: Path):
    """In a list, `test_cli_names` has them."""
    tree = {"a": on_one(weights(2048, 1024)), "b": np.arange(7)}
    ostraka.save(tmp_path / "c", tree, compress="zstd")
    path = str(tmp_path / "c")
    document = json.loads(run("show", path, "a", "--json").stdout)
    (box,) = document["boxes"]
    assert (document["bytes"], box["bytes"]) == (8 * MIB, 8 * MIB)
    assert (8 * MIB, box["stored_bytes"]) == stored_bytes(path)["a"]
    for arguments, said in (
        (("show", path, "a"), f"{box['stored_bytes']:,}"),
        (("diff", path, path), "no difference in 2 leaves"),
        (("verify", path), "intact"),
        (("plan", path), "before compression"),
        (("plan", "gpt2", "--compress", "zstd"), "an estimate: 0.84, for normal weights"),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert said in result.output, arguments


# Failures while it is written


@pytest.mark.parametrize("verb", ["create", "write", "finish", "put"])
def test_a_save_that_fails_leaves_what_was_there(verb: str):
    tree = {"a": weights(600, 1000), "b": weights(4000, 1000)}
    place = f"memory://compressed and failing/{verb}"
    ostraka.save(place, tree, compress="zstd")
    before = [file.name for file in open_store(place).files("")]

    def fail(called: str, name: str) -> None:
        if called == verb and "shards-" in name:
            raise StoreError("the disk is gone")

    faulty = FaultyStore(open_store(place), before=fail)
    with pytest.raises(SaveFailed, match="the disk is gone"):
        ostraka.save(faulty, {"a": tree["b"]}, compress="zstd")
    assert [file.name for file in open_store(place).files("")] == before
    assert_same(ostraka.restore(place), tree)


def test_no_room_for_temporary_files(bucket: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(_write_compressed, "_SPOOL_BYTES", 1000)
    with pytest.raises(SaveFailed, match=r"directory for temporary files, .*gone: No such file"):
        ostraka.save(bucket, {"a": weights(600, 1000)}, compress="zstd")
    assert not open_store(bucket).exists()


class Recorder:
    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}
        self.is_finished = False

    def write(self, offset: int, buffers: Any) -> None:
        self.written[offset] = b"".join(bytes(buffer) for buffer in buffers)

    def finish(self) -> None:
        self.is_finished = True

    def abandon(self) -> None:
        raise AssertionError


def give_up() -> None:
    raise InterruptedError("while it waits")


def small_file(blocks: int, check: Callable[[], None]) -> tuple[CompressedFile, Recorder]:
    recorder = Recorder()
    entries = [Entry(0, ((0, 4 * blocks),), 0, 4 * blocks)]
    lengths = [6, *[4] * blocks]
    file = CompressedFile(
        entries, lengths, (), {}, lambda stored: b"header", lambda: recorder, check
    )
    return file, recorder


def test_blocks_are_placed_in_order_whoever_is_first():
    file, recorder = small_file(3, give_up)
    data = [np.full(4, number, np.uint8) for number in range(4)]
    file.write(3, [data[3]])
    file.write(2, [data[2]])
    assert recorder.written == {}
    file.write(1, [data[1]])
    assert recorder.written == {6: b"\1" * 4, 10: b"\2" * 4, 14: b"\3" * 4, 0: b"header"}
    assert recorder.is_finished
    assert file.digests().size == 18


def test_no_more_blocks_than_a_few_wait_for_one_before_them():
    data = [np.zeros(4, np.uint8)]
    file, recorder = small_file(20, give_up)
    for number in range(2, 9):
        file.write(number, data)
    with pytest.raises(InterruptedError, match="while it waits"):
        file.write(9, data)
    assert recorder.written == {}
    # As threads do it: the ninth goes on once the first is there.
    waiting = threading.Event()
    file, recorder = small_file(9, waiting.set)
    ninth = threading.Thread(target=file.write, args=(9, data))
    ninth.start()
    assert waiting.wait(60)
    for number in range(8, 0, -1):
        file.write(number, data)
    ninth.join(60)
    assert recorder.is_finished
    assert sorted(recorder.written) == [0, *range(6, 42, 4)]
