"""Plans: each byte has one owner, owners hold what they write, loads are even, reads are exact."""

import hashlib
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraka.common.dtypes import DTYPES, from_bytes, numpy_dtype
from ostraka.layout import box as _box
from ostraka.layout import metadata as _metadata
from ostraka.layout import plan_read as _plan_read
from ostraka.layout import plan_write as _plan_write
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import Metadata
from ostraka.layout.plan_parity import planned_digests
from ostraka.layout.shard_file import FileDigests
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec, Target, device_boxes, partition_grid
from plans import bytes_by_process

MiB = 1 << 20

MESHES = (
    MeshSpec(("x", "y"), (4, 2), tuple(range(8))),
    MeshSpec(("z",), (8,), (3, 1, 2, 0, 7, 6, 5, 4), ("explicit",)),
    MeshSpec(("a", "b", "c"), (2, 2, 2), (7, 6, 5, 4, 3, 2, 1, 0)),
    MeshSpec(("w",), (2,), (2, 5)),
    MeshSpec((), (), (6,)),
)
PROCESS_OF = (0, 0, 1, 1, 2, 2, 3, 3)
PROCESSES = 4


@st.composite
def leaf_specs(draw, path, *, max_extent=5):
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    mesh = draw(st.integers(HOST_LOCAL, len(MESHES) - 1))
    rank = draw(st.integers(0, 4))
    shape = [draw(st.integers(0, max_extent)) for _ in range(rank)]
    if mesh == HOST_LOCAL:
        if draw(st.booleans()):
            return LeafSpec(path, "numpy", dtype, (PROCESSES, *shape), per_process=True)
        return LeafSpec(path, "numpy", dtype, tuple(shape))
    dimensions = [[] for _ in range(rank)]
    for axis in draw(st.permutations(MESHES[mesh].axis_names)):
        place = draw(st.integers(0, rank))
        if place < rank:
            dimensions[place].append(axis)
            shape[place] *= MESHES[mesh].size_of([axis])
    partition = tuple(tuple(axes) for axes in dimensions)
    return LeafSpec(path, "jax", dtype, tuple(shape), mesh, partition)


@st.composite
def plans(draw, max_leaves=10, names=None):
    if names is None:
        paths = [f"leaf{n}" for n in range(draw(st.integers(1, max_leaves)))]
    else:
        paths = draw(st.lists(names, min_size=1, max_size=max_leaves, unique=True))
    leaves = [draw(leaf_specs(path)) for path in paths]
    # Headers take a page: what a file may hold beyond that is a few elements, or many.
    cap = 4096 + draw(st.sampled_from([60, 500, 5000, _plan_write.MAX_FILE_BYTES]))
    return _plan_write.plan_write(leaves, MESHES, PROCESS_OF, max_file_bytes=cap), cap


def entries_of(plan):
    """Every box that is written, as `(file key, entry)`."""
    contents = _format.entries_by_file(plan.leaves, plan.layouts)
    return [(key, entry) for key, entries in contents.items() for entry in entries]


def pick(array, box):
    return array[(*(slice(start, stop) for start, stop in box), ...)]


def metadata_of(plan):
    return Metadata(
        id="0" * 16,
        writer={},
        process_of=plan.process_of,
        tree={"list": None, "items": list(range(len(plan.leaves)))},
        meshes=plan.meshes,
        layouts=plan.layouts,
        leaves=plan.leaves,
        files=plan.files,
        indexes={},
        user={},
    )


# Writing


@settings(max_examples=120)
@given(plans())
def test_each_byte_is_written_once_by_a_process_that_holds_it(planned):
    plan, cap = planned
    seen = [np.zeros(leaf.spec.shape, np.int64) for leaf in plan.leaves]
    sizes = dict.fromkeys([(file.device, file.part) for file in plan.files], 0)
    assert len(sizes) == len(plan.files)
    packed, in_file = 0, {key: set() for key in sizes}
    for key, entry in entries_of(plan):
        spec, device = plan.leaves[entry.leaf].spec, key[0]
        dtype = DTYPES[spec.dtype]
        pick(seen[entry.leaf], entry.box)[...] += 1
        assert entry.nbytes == dtype.nbytes(_box.count(entry.box))
        sizes[key] += entry.nbytes
        packed += dtype.packed
        assert entry.leaf not in in_file[key], "a file has one box of a leaf"
        in_file[key].add(entry.leaf)
        if entry.nbytes and spec.per_process:
            assert entry.box[0] == (PROCESS_OF[device], PROCESS_OF[device] + 1)
        elif entry.nbytes and spec.mesh != HOST_LOCAL:
            held = device_boxes(spec.shape, MESHES[spec.mesh], spec.partition)[device]
            assert _box.intersect(held, entry.box) == entry.box
    assert all((count == 1).all() for count in seen)
    assert set().union(*in_file.values()) == set(range(len(plan.leaves)))
    for file in plan.files:
        assert file.size - file.header_bytes == sizes[file.device, file.part]
        assert file.size <= cap
    written = sum(sizes.values())
    unique = sum(leaf.spec.nbytes for leaf in plan.leaves)
    # A box of a packed leaf ends with a whole byte; of all others each byte is there once.
    assert unique <= written <= unique + packed
    assert sum(bytes_by_process(plan)) == written


def test_long_names_make_large_headers_and_count_as_well():
    names = ["short", *("long" * n for n in (900, 1000, 1100, 5000))]
    leaves = [LeafSpec(name, "jax", "int8", (60_000,), 4) for name in names]
    plan = _plan_write.plan_write(leaves, MESHES, PROCESS_OF, max_file_bytes=64 << 10)
    assert max(file.size for file in plan.files) <= 64 << 10


@pytest.mark.parametrize("data_bytes", range(0, 4096, 97))
def test_many_small_leaves_fill_files_up_to_the_cap(data_bytes):
    """Headers grow a page at a time, so the last leaf may cost a whole one."""
    leaves = [LeafSpec(f"leaf{n}", "jax", "int8", (1,), 4) for n in range(60)]
    leaves.append(LeafSpec("rest", "jax", "int8", (data_bytes,), 4))
    for cap in (8192, 12288, 16000):
        plan = _plan_write.plan_write(leaves, MESHES, PROCESS_OF, max_file_bytes=cap)
        assert max(file.size for file in plan.files) <= cap


def test_parts_are_numbered_from_zero_without_gaps():
    leaves = [LeafSpec(f"w{n}", "jax", "int8", (64, 64), 0, (("x",),)) for n in range(10)]
    plan = _plan_write.plan_write(leaves, MESHES, PROCESS_OF, max_file_bytes=4096 + 1000)
    for device in range(8):
        parts = [file.part for file in plan.files if file.device == device]
        assert parts == sorted(parts)
        assert len(parts) > 3
    assert {file.part for file in plan.files} == set(range(max(f.part for f in plan.files) + 1))


def test_another_interpreter_gives_the_same_plan():
    script = "import sys; sys.path[:0] = sys.argv[1:]; import test_plan as t;print(t.fingerprint())"
    here = os.path.dirname(__file__)
    found = {
        subprocess.run(
            [sys.executable, "-c", script, here, os.path.join(here, "..", "support")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {fingerprint()}


def mixed_leaves(seed, count=200, mesh=0):
    """Replicated and sharded leaves from a few bytes to some MiB."""
    rng = random.Random(seed)
    specs = [(), (("x",),), (("y",),), (("x",), ("y",)), ((), ("x", "y")), (("y", "x"),)]
    leaves = []
    for number in range(count):
        partition = rng.choice([(), *specs])
        elements = int(math.exp(rng.uniform(math.log(4), math.log(MiB))))
        grid = partition_grid(MESHES[mesh], partition, 2)
        columns = rng.choice([1, 3, 16, 128, 1000])
        rows = max(elements // columns, 1)
        shape = (-(-rows // grid[0]) * grid[0], -(-columns // grid[1]) * grid[1])
        dtype = rng.choice(["float32", "bfloat16", "int8"])
        leaves.append(LeafSpec(f"leaf{number}", "jax", dtype, shape, mesh, partition))
    return leaves


def fingerprint():
    plan = _plan_write.plan_write(mixed_leaves(3), MESHES, PROCESS_OF)
    return hashlib.sha256(repr(plan).encode()).hexdigest()


def assert_even(leaves):
    loads = bytes_by_process(_plan_write.plan_write(leaves, MESHES, PROCESS_OF))
    mean = sum(loads) / PROCESSES
    assert max(abs(load - mean) for load in loads) <= 0.05 * mean, loads


@pytest.mark.parametrize("seed", range(12))
def test_processes_write_the_same_amount_within_five_percent(seed):
    assert_even(mixed_leaves(seed))


@pytest.mark.parametrize(
    "shapes",
    [
        [(7919, 1021)],
        [(7919, 1021), (3, 1_000_003), (1_000_003,), (1, 1, 999_983)],
        [(17,)] * 1000,
        [(4099, 1013), *[(33,)] * 500],
        [(1024, 1024)] * 7,
        [(1, 50_021)] * 5,
    ],
    ids=["one odd", "odd", "small", "one large, many small", "equal", "one row each"],
)
@pytest.mark.parametrize("mesh", [0, 1, HOST_LOCAL])
def test_replicas_share_the_writing_evenly(shapes, mesh):
    assert_even([LeafSpec(f"w{n}", "jax", "float32", s, mesh) for n, s in enumerate(shapes)])


def test_an_uneven_start_is_made_up_for():
    """One device holds a large leaf alone: what is replicated goes to the others."""
    shared = [LeafSpec(f"shared{n}", "jax", "int8", (100_003,), 0) for n in range(200)]
    assert_even([*shared, LeafSpec("alone", "jax", "int8", (4 * MiB,), 4)])


def test_a_leaf_of_every_process_is_written_by_each():
    leaf = LeafSpec("rng", "numpy", "int64", (PROCESSES, 3), per_process=True)
    plan = _plan_write.plan_write([leaf], MESHES, PROCESS_OF)
    assert bytes_by_process(plan) == [24] * PROCESSES


def test_an_empty_tree_has_no_files():
    plan = _plan_write.plan_write([], [], PROCESS_OF)
    assert plan.files == ()
    assert bytes_by_process(plan) == [0] * PROCESSES


def test_an_empty_leaf_is_in_some_file():
    plan = _plan_write.plan_write(
        [LeafSpec("w", "jax", "float32", (0, 8), 0, (("x",),))], MESHES, [0] * 8
    )
    assert len(plan.files) == 1
    assert plan.files[0].size == plan.files[0].header_bytes


# The size of _METADATA


def large_plan(layers, mesh_shape):
    """A transformer with two moments for each parameter, sharded in the usual ways."""
    data, model = mesh_shape
    count = data * model
    mesh = MeshSpec(("data", "model"), mesh_shape, tuple(range(count)))
    kinds = {
        "attention/query/kernel": ((16384, 16384), (("data",), ("model",))),
        "attention/key/kernel": ((16384, 1024), (("data",), ("model",))),
        "attention/value/kernel": ((16384, 1024), (("data",), ("model",))),
        "attention/out/kernel": ((16384, 16384), (("model",), ("data",))),
        "mlp/gate/kernel": ((16384, 53248), (("data",), ("model",))),
        "mlp/up/kernel": ((16384, 53248), (("data",), ("model",))),
        "mlp/down/kernel": ((53248, 16384), (("model",), ("data",))),
        "norm_1/scale": ((16384,), ()),
        "norm_2/scale": ((16384,), (("model",),)),
    }
    leaves = [
        LeafSpec(f"{group}/layers/{layer}/{name}", "jax", "float32", shape, 0, partition)
        for group in ("model", "optimizer/mu", "optimizer/nu")
        for layer in range(layers)
        for name, (shape, partition) in kinds.items()
    ]
    return _plan_write.plan_write(leaves, [mesh], [device // 4 for device in range(count)])


def metadata_bytes(plan):
    return len(_metadata.encode_metadata(metadata_of(plan)))


def test_3400_leaves_on_16384_devices_fit_in_four_mebibytes():
    plan = large_plan(126, (2048, 8))
    assert len(plan.leaves) == 3402
    assert metadata_bytes(plan) < 4 * MiB
    loads = np.array(bytes_by_process(plan))
    assert loads.size == 4096
    assert abs(loads - loads.mean()).max() <= 0.05 * loads.mean()


def test_metadata_grows_with_leaves_plus_devices_not_with_their_product():
    small, more_leaves = large_plan(8, (32, 8)), large_plan(32, (32, 8))
    more_devices, both = large_plan(8, (512, 8)), large_plan(32, (512, 8))
    leaves = len(both.leaves) - len(small.leaves)
    least = metadata_bytes(small)
    for_leaves, for_devices = (metadata_bytes(plan) - least for plan in (more_leaves, more_devices))
    assert for_leaves < 300 * leaves
    assert metadata_bytes(both) - least < 1.2 * (for_leaves + for_devices)


# Reading


def stored_bytes(plan, arrays):
    """What a save would put into each file, as `{key: bytes}`."""
    contents = _format.entries_by_file(plan.leaves, plan.layouts)
    files = {}
    for file in plan.files:
        data = bytearray(b"\xee" * file.header_bytes)
        for entry in contents[file.device, file.part]:
            spec = plan.leaves[entry.leaf].spec
            picked = np.ascontiguousarray(pick(arrays[entry.leaf], entry.box)).reshape(-1)
            if DTYPES[spec.dtype].packed:
                data += packed_bytes(picked, DTYPES[spec.dtype].bits)
            else:
                data += picked.view(np.uint8).tobytes()
        assert len(data) == file.size
        files[file.device, file.part] = bytes(data)
    return files


def packed_bytes(elements, bits):
    """First element in the lowest bits, written out plainly."""
    codes = elements.view(np.uint8).tolist()
    number = sum(code % (1 << bits) << (bits * i) for i, code in enumerate(codes))
    return number.to_bytes((elements.size * bits + 7) // 8, "little")


def random_arrays(plan, rng):
    return [
        rng.integers(0, 2, leaf.spec.shape).astype(numpy_dtype(leaf.spec.dtype))
        if DTYPES[leaf.spec.dtype].packed
        else rng.integers(
            0, 256, (*leaf.spec.shape, numpy_dtype(leaf.spec.dtype).itemsize), np.uint8
        )
        .view(numpy_dtype(leaf.spec.dtype))
        .reshape(leaf.spec.shape)
        for leaf in plan.leaves
    ]


@st.composite
def targets_for(draw, plan):
    targets = []
    for number, leaf in enumerate(plan.leaves):
        for _ in range(draw(st.integers(0, 3))):
            box = []
            for extent in leaf.spec.shape:
                start = draw(st.integers(0, extent))
                box.append((start, draw(st.integers(start, extent))))
            targets.append(Target(number, tuple(box)))
    return targets


def random_blocks(file, rng):
    """Blocks that nobody would choose: any lengths."""
    rest = file.size - file.header_bytes
    cuts = sorted({int(c) for c in rng.integers(1, rest, 6)} | {rest}) if rest > 1 else [rest]
    lengths = [b - a for a, b in zip([0, *cuts], cuts, strict=False) if b > a]
    lengths = (file.header_bytes, *lengths)
    return FileDigests(file.size, lengths, ("0" * 16,) * len(lengths)).blocks()


@settings(max_examples=100)
@given(planned=plans(max_leaves=5), data=st.data(), seed=st.integers(0, 1 << 30))
def test_every_wanted_byte_arrives_exactly_once(planned, data, seed):
    plan, _ = planned
    rng = np.random.default_rng(seed)
    arrays = random_arrays(plan, rng)
    files = stored_bytes(plan, arrays)
    targets = data.draw(targets_for(plan))[::-1]
    chunk_bytes = data.draw(st.sampled_from([16, 64, 1000, 8 * MiB]))
    metadata = metadata_of(plan)
    buffers = [np.zeros(_box.shape_of(t.box), arrays[t.leaf].dtype) for t in targets]
    seen = [np.zeros(_box.shape_of(t.box), np.int64) for t in targets]
    for read in _plan_read.plan_read(metadata, targets):
        offsets = [piece.entry.offset for piece in read.pieces]
        assert offsets == sorted(offsets), "the file is read from its beginning to its end"
        stored = files[read.file.device, read.file.part][read.file.header_bytes :]
        blocks = random_blocks(read.file, rng)
        with patch.object(_plan_read, "CHUNK_BYTES", chunk_bytes):
            chunks = _plan_read.plan_chunks(read.pieces, blocks)
        for chunk in chunks:
            whole = blocks[chunk.first_block : chunk.last_block]
            assert (chunk.start, chunk.stop) == (whole[0].start, whole[-1].stop)
            assert chunk.start < chunk.stop
            for move in chunk.moves:
                assert chunk.start <= move.start < move.stop <= chunk.stop
                execute(move, stored, targets, buffers, seen, metadata)
    for target, buffer, count in zip(targets, buffers, seen, strict=True):
        assert (count == 1).all()
        expected = np.ascontiguousarray(pick(arrays[target.leaf], target.box))
        assert buffer.tobytes() == expected.tobytes()


def execute(move, stored, targets, buffers, seen, metadata):
    """Carry out a move as its docstring says, with plain numpy."""
    data = np.frombuffer(stored[move.start : move.stop], np.uint8)
    buffer, target = buffers[move.buffer], targets[move.buffer]
    if move.buffer_start is not None:
        size = buffer.dtype.itemsize
        first, last = move.buffer_start // size, -(-(move.buffer_start + data.size) // size)
        buffer.reshape(-1).view(np.uint8)[move.buffer_start :][: data.size] = data
        whole = move.buffer_start % size == 0 and data.size % size == 0
        seen[move.buffer].reshape(-1)[first:last] += 1
        assert whole
        return
    name = metadata.leaves[target.leaf].spec.dtype
    count = _box.count(move.box)
    elements = from_bytes(data, name, (count,))
    rows = elements.reshape(_box.shape_of(move.box))
    place = (*_box.slices(move.shared, target.box), ...)
    buffer[place] = rows[(*_box.slices(move.shared, move.box), ...)]
    seen[move.buffer][place] += 1


def planned_blocks(read):
    """The header, and the blocks that a save makes."""
    return planned_digests(read.file, read.entries).blocks()


def blocks_read(plan, targets):
    """How often each block is read, with the blocks that a save makes: `{file: [count, …]}`."""
    metadata = metadata_of(plan)
    counts = {}
    moved = 0
    for read in _plan_read.plan_read(metadata, targets):
        header, *blocks = planned_blocks(read)
        count = counts[read.file.device, read.file.part] = [0] * len(blocks)
        for chunk in _plan_read.plan_chunks(read.pieces, [header, *blocks]):
            moved += chunk.stop - chunk.start
            for block in range(chunk.first_block, chunk.last_block):
                count[block - 1] += 1
    return counts, moved


def resharded(shape, dtype, source, destination, mesh=0):
    leaf = LeafSpec("w", "jax", dtype, shape, mesh, source)
    plan = _plan_write.plan_write([leaf], MESHES, [0] * 8)
    boxes = device_boxes(shape, MESHES[mesh], destination)
    targets = [Target(0, box) for box in dict.fromkeys(boxes.values())]
    return plan, targets


ROWS, COLUMNS, BOTH = (("x", "y"),), ((), ("x", "y")), (("x",), ("y",))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((8192, 8192), "float32"),
        ((512, 1 << 20), "float32"),
        ((64, 24, 4096), "float32"),
        ((8192, 1000), "float32"),
        ((1024, 393_216), "float32"),
        ((96, 3_145_728), "float32"),
        ((4096, 4096), "int4"),
        ((32768, 16384), "int4"),
    ],
)
@pytest.mark.parametrize(
    ("source", "destination"),
    [(ROWS, COLUMNS), (COLUMNS, ROWS), (ROWS, BOTH), (BOTH, COLUMNS), (ROWS, ()), ((), COLUMNS)],
)
def test_resharding_reads_each_block_once(shape, dtype, source, destination):
    plan, targets = resharded(shape, dtype, source, destination)
    counts, moved = blocks_read(plan, targets)
    assert all(set(count) == {1} for count in counts.values())
    assert moved == plan.leaves[0].spec.nbytes


def test_reading_a_part_reads_only_the_blocks_under_it():
    plan, _ = resharded((4096, 4096), "float32", (), ())
    counts, moved = blocks_read(plan, [Target(0, ((0, 10), (0, 4096)))])
    assert sum(sum(count) for count in counts.values()) == 1
    assert moved == 4 * MiB
    counts, moved = blocks_read(plan, [Target(0, ((1000, 1001), (17, 18)))])
    assert moved == 4 * MiB


def test_small_neighbours_are_read_in_one_go():
    leaves = [LeafSpec(f"w{n}", "jax", "float32", (1000 + n,), 4) for n in range(500)]
    plan = _plan_write.plan_write(leaves, MESHES, PROCESS_OF)
    targets = [Target(n, ((0, 1000 + n),)) for n in range(500)]
    (read,) = _plan_read.plan_read(metadata_of(plan), targets)
    (chunk,) = _plan_read.plan_chunks(read.pieces, planned_blocks(read))
    assert len(chunk.moves) == 500


def test_chunks_stay_near_their_size():
    plan, targets = resharded((16384, 8192), "float32", ROWS, ())
    for read in _plan_read.plan_read(metadata_of(plan), targets):
        chunks = _plan_read.plan_chunks(read.pieces, planned_blocks(read))
        assert [chunk.stop - chunk.start for chunk in chunks] == [8 * MiB] * 8


def test_nothing_wanted_reads_nothing():
    plan, _ = resharded((64, 64), "float32", ROWS, ())
    assert _plan_read.plan_read(metadata_of(plan), []) == []


def test_an_empty_target_still_names_its_file():
    plan, _ = resharded((0, 64), "float32", (), ())
    (read,) = _plan_read.plan_read(metadata_of(plan), [Target(0, ((0, 0), (0, 64)))])
    assert read.pieces == ()
    assert read.file == plan.files[0]


def test_a_file_table_that_contradicts_the_layouts_is_a_value_error():
    plan, targets = resharded((64, 64), "float32", ROWS, ())
    short = replace(metadata_of(plan), files=plan.files[1:])
    with pytest.raises(ValueError, match="disagree about shard_00000.safetensors"):
        _plan_read.plan_read(short, targets)
