"""The bytes on disk, read back by us and by the safetensors package."""

import json
import math
import uuid
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import numpy as np
import pytest
import xxhash
from hypothesis import example as of_note
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from fuzz import seal
from ostraka.common.dtypes import DTYPES
from ostraka.errors import Damaged, NotACheckpoint, UnsupportedFormat
from ostraka.formats.ostraka.damage import boxes_between
from ostraka.layout import box as _box
from ostraka.layout import metadata as _metadata
from ostraka.layout import plan_write as _plan_write
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import IndexEntry
from ostraka.layout.runs import (
    BYTES_FOR_EACH,
    FREE_BYTES,
    Allowance,
    decode_runs,
    encode_runs,
)
from ostraka.layout.shard_file import Entry, FileDigests, StoredRange
from ostraka.layout.spec import LeafSpec, StoredLeaf
from ostraka.storage import MemoryStore
from test_plan import MESHES, PROCESS_OF, leaf_specs, metadata_of, plans

ID = "0123456789abcdef"

paths = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('/"\\\n\x00é漢🜲~'),
    min_size=1,
    max_size=30,
).filter(lambda text: text != "__metadata__")


# Runs of integers


@given(
    st.lists(st.integers(0, 2)) | st.lists(st.integers(-5, 5) | st.integers(-(1 << 60), 1 << 60))
)
@of_note([2, 1, 0, -1])  # none of the small numbers that many lists share
def test_runs_decode_to_what_was_encoded(numbers):
    runs = encode_runs(numbers)
    assert decode_runs(runs) == tuple(numbers)
    assert len(runs) <= len(numbers)


@given(start=st.integers(), step=st.integers(), count=st.integers(1, 1000))
def test_an_arithmetic_sequence_is_one_run(start, step, count):
    numbers = [start + step * i for i in range(count)]
    assert len(encode_runs(numbers)) == 1


def test_sixteen_thousand_devices_in_mesh_order_are_a_few_runs():
    order = np.arange(16384).reshape(8, 2048).T.reshape(-1).tolist()
    assert len(json.dumps(encode_runs(order))) < 64 << 10
    assert len(encode_runs(range(16384))) == 1


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ([[0, 0, 1 << 40]], "longer than any checkpoint needs"),
        ([[0, 0, 1 << 26], [0, 0, 1]], "longer than any checkpoint needs"),
        # Few digits of such a run, and a digest of 16 for each, would be ints of 200 bytes each.
        ([[10**400, 10**400, 1000]], "too large"),
        ([[1 << 63, 0, 1]], "too large"),
        ([[0, 0, -5], [0, 0, 5]], "something else in it"),
        ([[7, 0, 0]], "something else in it"),
    ],
)
def test_runs_that_no_checkpoint_needs_are_refused_before_they_are_built(runs, sentence):
    with pytest.raises(ValueError, match=sentence):
        decode_runs(runs)


def test_an_allowance_grows_once_with_the_files():
    allowance = Allowance(lambda: FREE_BYTES)
    allowance.take(FREE_BYTES + 1)
    allowance.take(BYTES_FOR_EACH * FREE_BYTES - 1)
    with pytest.raises(ValueError, match="longer than any checkpoint needs"):
        allowance.take(1)


# Digests and blocks


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_the_digest_of_pieces_is_that_of_the_whole(pieces):
    whole = b"".join(pieces)
    assert _format.block_digest(pieces) == xxhash.xxh3_64_hexdigest(whole)
    assert len(_format.block_digest(pieces)) == 16
    assert len(_format.digest(whole)) == 32


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=8), st.data())
def test_regroup_cuts_a_stream_without_losing_a_byte(pieces, data):
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole)))) | {len(whole)})
    lengths = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    views = [np.frombuffer(piece, np.uint8) for piece in pieces]
    blocks = [b"".join(map(bytes, block)) for block in _format.regroup(iter(views), lengths)]
    assert [len(block) for block in blocks] == lengths
    assert b"".join(blocks) == whole


@settings(max_examples=30)
@given(plans(names=paths))
def test_blocks_cover_a_file_and_none_is_empty_or_large(planned):
    plan, _ = planned
    contents = _format.entries_by_file(plan.leaves, plan.layouts)
    for file in plan.files:
        lengths = _format.block_lengths(file.header_bytes, contents[file.device, file.part])
        assert lengths[0] == file.header_bytes
        assert sum(lengths) == file.size
        assert all(0 < length <= _format.BLOCK_BYTES for length in lengths[1:])


@pytest.mark.parametrize(
    ("shape", "itemsize"),
    [
        ((4096, 4096), 4),
        ((3, 5, 1 << 20), 4),
        ((7, 3_000_001), 1),
        ((1 << 25,), 2),
        ((9, 1 << 24), 1),
    ],
)
def test_blocks_of_a_large_box_hold_whole_rows_where_rows_fit(shape, itemsize):
    nbytes = math.prod(shape) * itemsize
    (entry,) = [Entry(0, _box.full(shape), 0, nbytes)]
    header, *lengths = _format.block_lengths(4096, [entry])
    assert header == 4096
    assert sum(lengths) == nbytes
    assert max(lengths) <= _format.BLOCK_BYTES
    row = nbytes
    for extent in shape:
        if row <= _format.BLOCK_BYTES:
            break
        row //= extent
    if row <= _format.BLOCK_BYTES:
        assert all(length % row == 0 for length in lengths)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([1 << 20, 100, 200, 1 << 22, 300], [1 << 20, 300, 1 << 22, 300]),
        ([1 << 19] * 9, [1 << 22, 1 << 19]),
    ],
)
def test_small_boxes_share_a_block_and_large_ones_do_not(sizes, blocks):
    ends = accumulate(sizes)
    entries = [
        Entry(number, ((0, size),), end - size, size)
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    assert _format.block_lengths(4096, entries) == [4096, *blocks]


# Names


def test_files_are_named_after_device_part_and_process():
    assert _format.shard_name(3, 0) == "shard_00003.safetensors"
    assert _format.shard_name(16383, 12) == "shard_16383-00012.safetensors"
    assert _format.index_name(7) == "process_00007.json"
    assert _format.is_shards_directory(_format.shards_directory(ID))


@pytest.mark.parametrize(
    "name", ["shards-", "shards-xyz", "shards-0123456789ABCDEF", f"shards-{ID}\n"]
)
def test_other_names_are_not_taken_for_shards(name):
    assert not _format.is_shards_directory(name)


# Headers


@settings(max_examples=60)
@given(st.lists(paths, min_size=1, max_size=8, unique=True), st.booleans(), st.data())
def test_a_header_never_outgrows_its_plan(names, compressed, data):
    """Huge shapes and offsets: the headers of files that no machine here could hold."""
    leaves, entries = [], []
    offset = 0
    for number, name in enumerate(names):
        spec = data.draw(leaf_specs(name, max_extent=1 << 11))
        grid = tuple(data.draw(st.integers(1, max(n, 1))) for n in spec.shape)
        cell = data.draw(st.integers(0, math.prod(grid) - 1))
        box = _box.cell(spec.shape, grid, cell)
        nbytes = DTYPES[spec.dtype].nbytes(_box.count(box))
        leaves.append(StoredLeaf(spec, 0, 0))
        entries.append(Entry(number, box, offset, nbytes))
        offset += nbytes
    capacity = sum(
        _format.header_capacity(leaf.spec, "zstd" if compressed else "") for leaf in leaves
    )
    planned = _format.header_bytes_for(capacity)
    stored = {n: StoredRange(10**14, 2 * 10**14, compressed) for n in range(len(leaves))}
    header = _format.encode_header(
        entries, leaves, ID, planned, stored=stored if compressed else None
    )
    assert len(header) == planned
    assert int.from_bytes(header[:8], "little") == planned - 8
    assert json.loads(header[8:]).keys() == {"__metadata__", *names}


def test_a_subset_of_devices_gives_the_same_entries():
    leaves = [LeafSpec(f"w{i}", "jax", "float32", (8, i + 2), 0, (("x", "y"),)) for i in range(20)]
    plan = _plan_write.plan_write(leaves, MESHES, PROCESS_OF, max_file_bytes=4300)
    everything = _format.entries_by_file(plan.leaves, plan.layouts)
    some = _format.entries_by_file(plan.leaves, plan.layouts, {1, 6})
    assert some == {key: entries for key, entries in everything.items() if key[0] in (1, 6)}


def test_the_leaves_between_two_offsets_are_named():
    leaves = [LeafSpec(name, "jax", "uint8", (10,), 4) for name in "abc"]
    plan = _plan_write.plan_write(leaves, MESHES, PROCESS_OF)
    entries = _format.entries_by_file(plan.leaves, plan.layouts)[6, 0]

    def named(start: int, stop: int) -> list[str]:
        return list(map(str, boxes_between(plan.leaves, entries, start, stop)))

    assert named(0, 10) == ["'a'"]
    assert named(9, 11) == ["'a'[9:10]", "'b'[0:1]"]
    assert named(25, 30) == ["'c'[5:10]"]
    assert named(10, 10) == []


# Process indexes


@given(
    st.dictionaries(
        st.text(max_size=10), st.lists(st.integers(1, 1 << 40), min_size=1, max_size=9), max_size=5
    )
)
def test_an_index_decodes_to_what_was_encoded(blocks):
    files = {
        name: FileDigests(
            sum(lengths), tuple(lengths), tuple(f"{n:016x}" for n in range(len(lengths)))
        )
        for name, lengths in blocks.items()
    }
    assert _format.decode_index(_format.encode_index(ID, 3, files)) == files


def test_an_index_of_compressed_blocks_decodes_to_what_was_encoded():
    assert _format.decode_index(_format.encode_index(ID, 0, {"shard": INDEX})) == {"shard": INDEX}
    assert [block[:4] for block in INDEX.blocks()] == [
        (-10, 0, 0, 10),
        (0, 30, 10, 30),
        (30, 35, 30, 35),
        (35, 85, 35, 60),
    ]
    assert [block.result for block in INDEX.blocks()] == ["", "a" * 16, "", "b" * 16]


INDEX = FileDigests(60, (10, 20, 5, 25), ("0" * 16,) * 4, (10, 30, 5, 50), ("a" * 16, "b" * 16))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"data": [[10, 0, 3]]}, "do not fit|shorter"),
        ({"data": [[10, 0, 1], [30, 0, 1], [5, 0, 1], [24, 0, 1]]}, "do not fit"),
        ({"data": [[11, 0, 1], [30, 0, 1], [5, 0, 1], [25, 0, 1]]}, "do not fit"),
        ({"data": [[10, 0, 1], [30, 0, 1], [5, 0, 1], [25, 0, 1]]}, "do not fit"),
        ({"data": [[10, 0, 1], [1 << 40, 0, 1], [5, 0, 1], [50, 0, 1]]}, "1,099,511,627,776 bytes"),
        ({"results": "a" * 16}, "do not fit"),
        ({"size": 61}, "blocks of shard do not add up"),
        ({"blocks": [[10, 0, 1], [70, 0, 1], [-20, 0, 1]], "digests": "0" * 48}, "do not add up"),
        ({"blocks": [[10, 0, 1], [0, 0, 1], [50, 0, 1]], "digests": "0" * 48}, "do not add up"),
    ],
)
def test_an_index_of_impossible_blocks_is_refused(fields, found):
    body = json.loads(_format.encode_index(ID, 0, {"shard": INDEX}))
    body["files"]["shard"] |= fields
    with pytest.raises(ValueError, match=found):
        _format.decode_index(json.dumps(body).encode())


# _METADATA

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def metadata(draw):
    plan, _ = draw(plans(names=paths))
    texts = st.text(max_size=8)
    return replace(
        metadata_of(plan),
        writer={"ostraka": "0"},
        tree={"dict": [], "items": draw(st.lists(st.integers(0, 9), max_size=3))},
        indexes={p: IndexEntry(draw(st.integers(0, 1 << 40)), "0" * 32) for p in range(4)},
        user=draw(st.dictionaries(texts, json_values, max_size=3)),
        unknown=draw(st.dictionaries(texts.map("new_".__add__), json_values, max_size=2)),
    )


@settings(max_examples=40)
@given(metadata())
def test_metadata_decodes_to_what_was_encoded(metadata):
    data = _metadata.encode_metadata(metadata)
    assert _metadata.metadata_is_intact(data)
    assert _metadata.decode_metadata(data) == metadata
    assert _metadata.encode_metadata(_metadata.decode_metadata(data)) == data
    assert json.loads(data)["digest"] in data.decode()


def example_metadata():
    leaves = [
        LeafSpec("layers/0/kernel", "jax", "bfloat16", (16, 8), 0, (("x",), ("y",))),
        LeafSpec('é"\\', "jax", "int4", (5,), 1),
        LeafSpec("k", "key", "uint32", (8, 2), 0, (("x",),), prng="threefry2x32"),
        LeafSpec("n", "numpy", "float64", (3,)),
        LeafSpec("s", "scalar", "int8", ()),
        LeafSpec("p", "numpy", "int64", (4, 2), per_process=True),
    ]
    plan = _plan_write.plan_write(leaves, MESHES, PROCESS_OF)
    indexes = {0: IndexEntry(10, "0" * 32)}
    return replace(metadata_of(plan), indexes=indexes, user={"note": "…"})


def test_metadata_that_was_flipped_cut_short_or_grew_shows():
    metadata = example_metadata()
    data = _metadata.encode_metadata(metadata)
    assert _metadata.metadata_is_intact(data)
    assert _metadata.decode_metadata(data) == metadata
    assert metadata.process_count == 4
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        assert not _metadata.metadata_is_intact(bytes(flipped)), position
        assert not _metadata.metadata_is_intact(data[:position]), position
    assert not _metadata.metadata_is_intact(data + b"\n")
    assert not _metadata.metadata_is_intact(b" " + data)


NOT_JSON = "its _METADATA is not JSON"
FOREIGN = "was not written by Ostraka"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [(data, NOT_JSON) for data in (b"", b"\xff\xfe", b"PK\x03\x04", b"not json", b'{"format":')]
    + [(data, FOREIGN) for data in (b"[]", b"3", b"null", b"{}", b'{"format":"orbax","version":1}')]
    + [(b"[" * 200_000, "_METADATA|nest")],
)
def test_what_is_not_a_checkpoint(data, sentence):
    with pytest.raises(NotACheckpoint, match=sentence):
        _metadata.decode_metadata(data)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"id": "../../../etc"}, "is not 16 hexadecimal digits"),
        ({"id": 7}, "malformed"),
        ({"layouts": [{"grid": [2], "owners": [[0, 1, 3]]}] * 9}, "has 3 cells"),
        ({"layouts": []}, "malformed|layout"),
        ({"leaves": [{}]}, "missing or malformed"),
        ({"leaves": 3}, "malformed"),
        ({"files": {"device": [[0, 1, 2]]}}, "malformed"),
        ({"process_of": [[0, 0, 1 << 40]]}, "longer than any checkpoint needs"),
        *(
            ({"leaf": {field: value}}, "leaf|malformed|layout")
            for field, values in {
                "dtype": ["float1024", []],
                "layout": [99, -1, "0"],
                "mesh": [99],
                "shape": [[16], [16, -8], ["16", 8], [16.5, 8]],
                "spec": [[["nonesuch"]]],
                "part": [-1],
            }.items()
            for value in values
        ),
    ],
)
def test_contradictions_are_value_errors(fields, sentence):
    body = json.loads(_metadata.encode_metadata(example_metadata()))
    body["leaves"][0] |= fields.pop("leaf", {})
    with pytest.raises(ValueError, match=sentence):
        _metadata.decode_metadata(json.dumps(body | fields).encode())


# Whole checkpoints that someone has tampered with, and sealed again


@pytest.fixture
def example():
    """A checkpoint in memory: its store, and its _METADATA without the digest."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    w = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("x")))
    store = MemoryStore(uuid.uuid4().hex)
    ostraka.save(store.location, {"w": w, "a": np.float32(1), "b": np.float32(2)})
    body = json.loads(store.get("_METADATA"))
    del body["digest"]
    return store, body


def tree_with(*items):
    return lambda body: {"tree": {"list": None, "items": [body["tree"], *items]}}


NEWER = {
    "version": (
        lambda body: {"version": 3},
        ".*version 3 and this Ostraka reads versions up to 2; i",
    ),
    "dtype": (lambda body: body["leaves"][0].update(dtype="float3_e1m1"), ".*float3_e1m1"),
    "container": (lambda body: {"tree": {"ring": 1, "items": [body["tree"]]}}, ".*ring"),
    "value": (tree_with({"decimal": "1.5"}), ".*decimal.*install a newer"),
    "key": (
        tree_with({"dict": [{"numpy": ["float3_e1m1", "00"]}], "items": [None]}),
        ".*float3.*install a newer",
    ),
    "axis": (lambda body: body["meshes"][0].update(types=["woven"] * 2), ".*woven.*a newer"),
}


@pytest.mark.parametrize("kind", NEWER)
@pytest.mark.parametrize("read", [ostraka.open, ostraka.verify, ostraka.restore])
def test_what_a_newer_version_wrote_is_not_damage(example: Any, read: Any, kind: str):
    store, body = example
    change, sentence = NEWER[kind]
    store.put("_METADATA", seal(_format.dumps(body | (change(body) or {})).encode()))
    with pytest.raises(UnsupportedFormat, match=f"can't read {store.location}: {sentence}"):
        read(store.location)


IMPOSSIBLE = {
    # It is otherwise like one that is right.
    "leaf": (
        lambda body: next(leaf for leaf in body["leaves"] if leaf["path"] == "b").update(
            per_process=True
        ),
        "leaf 'b' has no dimension for its processes",
    ),
    # Their product is the number of devices.
    "mesh": (
        lambda body: body["meshes"][0].update(shape=[-size for size in body["meshes"][0]["shape"]]),
        "the axes of the mesh .* don't fit each other",
    ),
    "index": (
        lambda body: body["indexes"][0].__setitem__(1, -1),
        "the table of process indexes is malformed",
    ),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_what_can_not_be_is_damage(example: Any, kind: str):
    store, body = example
    change, sentence = IMPOSSIBLE[kind]
    change(body)
    store.put("_METADATA", seal(_format.dumps(body).encode()))
    with pytest.raises(Damaged, match=sentence):
        ostraka.open(store.location)


def test_a_tree_that_contradicts_its_arrays_is_not_intact(example: Any):
    store, body = example
    store.delete(f"shards-{body['id']}/metadata.json")
    store.put(
        "_METADATA", seal(_format.dumps({**body, "tree": {"list": None, "items": []}}).encode())
    )
    with pytest.raises(Damaged, match="_METADATA: it contradicts itself: its tree") as caught:
        ostraka.verify(store.location)
    assert [problem.file for problem in caught.value.problems] == ["_METADATA"]


def test_fields_of_a_newer_writer_are_kept(example: Any):
    store, body = example
    store.put("_METADATA", seal(_format.dumps({**body, "compression": {"level": 3}}).encode()))
    metadata = _metadata.decode_metadata(store.get("_METADATA"))
    assert metadata.unknown == {"compression": {"level": 3}}
    assert ostraka.restore(store.location)["a"] == 1
