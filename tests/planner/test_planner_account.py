"""Numbers from plans: they add up, and agree with what is counted device by device."""

import json

import numpy as np

from ostraka.layout import box as _box
from ostraka.layout import metadata as _metadata
from ostraka.layout import shard_file
from ostraka.layout.plan_write import plan_write
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec, device_boxes
from ostraka.planner._restore_plan import (
    Spread,
    account_read,
    count_pieces,
    local_targets,
    spread_of,
)
from ostraka.planner._save_plan import (
    file_bytes_by_process,
    held_by_process,
    plan_state,
)
from ostraka.planner.state import PlanOptions, State
from plans import bytes_by_process

MESH = MeshSpec(("data", "model"), (4, 2), tuple(range(8)))
PROCESS_OF = (0, 0, 1, 1, 2, 2, 3, 3)
LEAVES = (
    LeafSpec("cut", "jax", "float32", (64, 32), 0, (("data",), ("model",))),
    LeafSpec("rows", "jax", "bfloat16", (64, 32), 0, (("data",),)),
    LeafSpec("columns", "jax", "float32", (64, 32), 0, ((), ("model",))),
    LeafSpec("whole", "jax", "float32", (40,), 0),
    LeafSpec("host", "numpy", "int8", (100,)),
    LeafSpec("own", "numpy", "int8", (4, 10), per_process=True),
)
PLAN = plan_write(LEAVES, [MESH], PROCESS_OF)


def planned_of(leaves=LEAVES, meshes=(MESH,), process_of=PROCESS_OF):
    tree = list(range(len(leaves)))
    return plan_state(State(tuple(leaves), meshes, process_of, tree), PlanOptions())


PLANNED = planned_of()
METADATA = PLANNED._metadata  # pyright: ignore[reportPrivateUsage]


def test_bytes_add_up():
    total = sum(leaf.nbytes for leaf in LEAVES)
    assert PLANNED.shard_spread.mean * 8 == sum(bytes_by_process(PLAN)) == total
    assert sum(file_bytes_by_process(PLAN)) == sum(file.size for file in PLAN.files)


def test_a_spread():
    assert spread_of([1, 2, 6]) == Spread(1, 3.0, 6)
    assert Spread(1, 3.0, 6).skew == 1.0
    assert spread_of([]).skew == 0.0


def test_what_processes_hold_is_what_their_devices_hold():
    held, sole = held_by_process(PLAN)
    holders: dict[tuple[str, _box.Box], set[int]] = {}
    for leaf in LEAVES:
        if leaf.per_process:
            boxes = [(p, ((p, p + 1), (0, 10))) for p in range(4)]
        elif leaf.mesh == HOST_LOCAL:
            boxes = [(p, _box.full(leaf.shape)) for p in range(4)]
        else:
            by_device = device_boxes(leaf.shape, MESH, leaf.partition)
            boxes = [(PROCESS_OF[device], box) for device, box in by_device.items()]
        for process, box in boxes:
            holders.setdefault((leaf.path, box), set()).add(process)
    sizes = {leaf.path: leaf.nbytes // int(np.prod(leaf.shape)) for leaf in LEAVES}
    expected_held, expected_sole = [0] * 4, [0] * 4
    for (path, box), processes in holders.items():
        for process in processes:
            expected_held[process] += sizes[path] * _box.count(box)
            expected_sole[process] += sizes[path] * _box.count(box) * (len(processes) == 1)
    assert (held, sole) == (expected_held, expected_sole)


def test_what_a_loss_costs():
    shard = PLANNED.lost_shard()
    assert shard is not None
    sizes = {file.name: file.size for file in PLAN.files}
    assert shard.size_bytes == sizes[shard.file] == max(sizes.values())
    entries = shard_file.entries_by_file(PLAN.leaves, PLAN.layouts)
    named = {shard_file.shard_name(*key): found for key, found in entries.items()}[shard.file]
    assert shard.leaves == len({entry.leaf for entry in named})
    # Only `cut`, and what a process has of its own, are on one device alone.
    alone = sum(e.nbytes for e in named if LEAVES[e.leaf].path in ("cut", "own"))
    assert shard.held_elsewhere_bytes == sum(e.nbytes for e in named) - alone
    process, disk = PLANNED.lost_process(), PLANNED.lost_disk()
    held, sole = held_by_process(PLAN)
    assert process.held_bytes == max(held)
    assert disk.written_bytes == max(file_bytes_by_process(PLAN))
    written = bytes_by_process(PLAN)[disk.process]
    assert disk.held_elsewhere_bytes == written - sole[disk.process]


def test_nothing_to_lose():
    empty = planned_of((), (), (0,))
    assert empty.lost_shard() is None
    assert empty.lost_process().held_bytes == 0
    assert empty.lost_disk().written_bytes == 0
    assert empty.staging_bytes(on_accelerators=True) == 0
    assert empty.index_bytes == {}


def test_all_processes_together_need_everything_once_or_more():
    numbered = list(enumerate(LEAVES))
    seen = [np.zeros(leaf.shape, int) for leaf in LEAVES]
    for process in range(4):
        targets = local_targets(numbered, [MESH], PROCESS_OF, process)
        assert len(set(targets)) == len(targets)
        for target in targets:
            seen[target.leaf][tuple(slice(*pair) for pair in target.box)] += 1
        account = account_read(METADATA, process, targets)
        assert account.needed_bytes == held_by_process(PLAN)[0][process]
        assert account.read_bytes >= account.needed_bytes
        pieces = count_pieces(METADATA, targets)
        assert pieces >= len(targets)
    assert all((count >= 1).all() for count in seen)
    assert (seen[0] == 1).all()


def test_metadata_can_be_read_back():
    data = _metadata.encode_metadata(METADATA)
    assert _metadata.decode_metadata(data).leaves == PLAN.leaves
    assert json.loads(data)["indexes"][0][1] == PLANNED.index_bytes[0]


def test_staging_grows_with_what_is_staged():
    def staged(shape, partition, *, accelerators=True):
        planned = planned_of([LeafSpec("w", "jax", "float32", shape, 0, partition)])
        return planned.staging_bytes(on_accelerators=accelerators)

    cut = (("data",), ("model",))
    blocks = 2 * shard_file.BLOCK_BYTES
    assert staged((1024, 1024), cut) == blocks + 2 * (4 << 20) // 8
    assert staged((1024, 1024), cut, accelerators=False) == blocks
    # Each holder of a whole array copies all of it, to write its share.
    assert staged((1024, 1024), ()) == blocks + 2 * (4 << 20)
