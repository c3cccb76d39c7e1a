"""Who reads what of that which several processes need."""

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraka.common.dtypes import numpy_dtype
from ostraka.layout import box as _box
from ostraka.layout import plan_restore as _plan_share
from ostraka.layout.plan_restore import (
    Need,
    StoredCells,
    Unit,
    plan_stages,
    processes_by_cell,
)
from ostraka.layout.spec import LeafSpec, MeshSpec, Partition, needed_boxes

MIB = 1 << 20
Plan = list[list[_plan_share.Gather]]


def need_of(
    number: int, leaf: LeafSpec, mesh: MeshSpec, process_of: list[int], process: int
) -> Need:
    """As `restoring.share` makes it of a leaf's sharding."""
    cells = processes_by_cell(mesh, leaf.partition, len(leaf.shape), process_of)
    here = [device for device, owner in enumerate(process_of) if owner == process]
    shared = [members for members in cells if len(members) > 1]
    most = max((sum(p in members for members in shared) for p in set(process_of)), default=0)
    nbytes = prod(leaf.shape) // len(cells) * numpy_dtype(leaf.dtype).itemsize
    return Need(
        number,
        needed_boxes(leaf, mesh, here, process),
        tuple(members for members in cells if process in members),
        most * nbytes,
        max(map(len, cells)),
    )


def plans_of(
    leaves: list[LeafSpec], stored: list[StoredCells], mesh: MeshSpec, process_of: list[int]
) -> tuple[dict[int, list[Need]], dict[int, Plan]]:
    needs = {
        process: [
            need_of(number, leaf, mesh, process_of, process) for number, leaf in enumerate(leaves)
        ]
        for process in set(process_of)
    }
    return needs, {process: plan_stages(needs[process], stored, process) for process in needs}


def units_of(plan: Plan) -> list[Unit]:
    return [
        unit for gathers in plan for gather in gathers for part in gather.parts for unit in part
    ]


def stored_in(leaf: LeafSpec, grid: tuple[int, ...]) -> StoredCells:
    return StoredCells(leaf, grid, [(cell, 0) for cell in range(prod(grid))])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[LeafSpec], list[StoredCells], MeshSpec, list[int]]:
    sizes = draw(st.sampled_from([(4, 1), (2, 2), (4, 2), (1, 4), (2, 3)]))
    count = prod(sizes)
    order = draw(st.permutations(range(count)))
    mesh = MeshSpec(("a", "b"), sizes, tuple(order))
    processes = draw(st.integers(1, count))
    process_of = [device * processes // count for device in range(count)]
    leaves: list[LeafSpec] = []
    stored: list[StoredCells] = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(12 * n for n in draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
        axes: list[tuple[str, ...]] = [(), ("a",), ("b",), ("a", "b")]
        first = draw(st.sampled_from(axes))
        second = draw(st.sampled_from([a for a in axes if not {*a} & {*first}]))
        partition: Partition = (first, second)[: len(shape)]
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int4", "bool"]))
        if any(n % mesh.size_of(a) for n, a in zip(shape, partition, strict=True)):
            partition = ()
        leaves.append(LeafSpec(str(number), "jax", dtype, shape, partition=partition))
        grid = tuple(draw(st.integers(1, 5)) for _ in shape)
        stored.append(stored_in(leaves[-1], grid))
    return leaves, stored, mesh, process_of


@given(cases(), st.integers(1, 4000), st.integers(4, 500))
@settings(max_examples=100, deadline=None)
def test_all_processes_plan_the_same_and_get_all(case: Any, stage_bytes: int, block_bytes: int):
    leaves, stored, mesh, process_of = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan_share, "STAGE_BYTES", stage_bytes)
        patch.setattr(_plan_share, "BLOCK_BYTES", block_bytes)
        patch.setattr(_plan_share, "WORTH_BYTES", 1)
        needs, plans = plans_of(leaves, stored, mesh, process_of)
    assert len({len(plan) for plan in plans.values()}) == 1
    stages = len(plans[0])
    for stage in range(stages):
        # Who gathers with others finds the same gather, in the same order, in their plans.
        found: dict[tuple[int, ...], Any] = {}
        for process, plan in plans.items():
            shared = [gather for gather in plan[stage] if len(gather.members) > 1]
            members = [gather.members for gather in shared]
            assert members == sorted(members)
            for gather in shared:
                assert process in gather.members
                # Which of a process's own boxes a unit is in is its own affair.
                parts = [[unit._replace(box=0) for unit in part] for part in gather.parts]
                assert found.setdefault(gather.members, parts) == parts
        for members in found:
            for process in members:
                assert members in [gather.members for gather in plans[process][stage]]
    for process, plan in plans.items():
        for number, need in enumerate(needs[process]):
            for box, wanted in enumerate(need.boxes):
                units = [u for u in units_of(plan) if (u.need, u.box) == (number, box)]
                if len(need.members[box]) == 1:
                    assert not units
                elif units:
                    count = np.zeros(_box.shape_of(wanted), int)
                    for unit in units:
                        count[_box.slices(unit.part, wanted)] += 1
                    assert (count == 1).all()
                else:  # A packed cell is not cut, and may be too large to be shared.
                    assert leaves[number].dtype == "int4"


def replicated(count: int, shape: tuple[int, ...], grid: tuple[int, ...], processes: int) -> Plan:
    mesh = MeshSpec(("x",), (processes,), tuple(range(processes)))
    leaves = [LeafSpec(str(n), "jax", "float32", shape) for n in range(count)]
    stored = [stored_in(leaf, grid) for leaf in leaves]
    return plans_of(leaves, stored, mesh, list(range(processes)))[1][0]


def bytes_of(units: Any) -> int:
    return sum(unit.nbytes for unit in units)


@pytest.mark.parametrize(("count", "shape"), [(1, (128, MIB)), (4, (32, MIB)), (4096, (32, 1024))])
def test_stages_are_bounded_and_parts_are_even(count: int, shape: tuple[int, ...]):
    plan = replicated(count, shape, (4, 1), processes=4)
    assert bytes_of(units_of(plan)) == 512 * MIB
    assert len(plan) == 4
    for gathers in plan:
        (gather,) = gathers
        for number, part in enumerate(gather.parts):
            assert bytes_of(part) == pytest.approx(32 * MIB, abs=4 * MIB)
            # A process reads one file: no block is read by two.
            assert {unit.file for unit in part} == {(number, 0)}


@pytest.mark.parametrize(
    ("grid", "processes", "times"),
    [
        ((4, 1), [(0,), (1,), (2,), (3,)], 1),  # as it was saved
        ((1, 4), [(0,), (1,), (2,), (3,)], 4),  # columns
        ((2, 2), [(0,), (1,), (2,), (3,)], 2),
        ((1, 2), [(0, 1), (2, 3)], 2),  # columns, each read by two together
        ((1, 2), [(0,), (0,)], 1),  # both by one process
    ],
)
def test_how_often_blocks_are_read(
    grid: tuple[int, ...], processes: list[tuple[int, ...]], times: int
):
    stored = stored_in(LeafSpec("w", "jax", "float32", (64, MIB)), (4, 1))
    found = _plan_share.times_read(stored, grid, processes, lambda members: len(members) > 1)
    assert found == times


def test_a_leaf_is_shared_whole():
    """Each of four that need a column gets all rows, and reads a quarter of them."""
    leaf = LeafSpec("w", "jax", "float32", (64, MIB))
    nbytes, everybody = 256 * MIB, (0, 1, 2, 3)
    plans = {
        process: plan_stages(
            [Need(0, (((0, 64), (0, 1)),), (everybody,), nbytes, 4, is_whole=True)],
            [stored_in(leaf, (4, 1))],
            process,
        )
        for process in everybody
    }
    assert len({repr(plan) for plan in plans.values()}) == 1
    assert bytes_of(units_of(plans[0])) == nbytes
    for gathers in plans[0]:
        (gather,) = gathers
        assert [bytes_of(part) for part in gather.parts] == [32 * MIB] * 4


def test_large_boxes_are_cut_where_blocks_end():
    plan = replicated(1, (1000, 3, 1000), (1, 1, 1), processes=3)
    (gather,), *_ = plan
    starts = {unit.part[0][0] for part in gather.parts for unit in part}
    assert all(start % (4 * MIB // 12_000) == 0 for start in starts)
    assert all(unit.part[1:] == ((0, 3), (0, 1000)) for part in gather.parts for unit in part)


def test_small_boxes_of_a_block_are_read_by_one_process():
    plan = replicated(64, (64, 1024), (1, 1), processes=4)
    (gather,), *_ = plan
    for part in gather.parts:
        numbers = [unit.need for unit in part]
        assert numbers == list(range(numbers[0], numbers[0] + 16))  # 16 of them are a block


def test_what_is_less_than_a_block_is_not_shared():
    assert replicated(3, (256, 1024), (4, 1), processes=4) == []
    assert len(replicated(4, (256, 1024), (4, 1), processes=4)) == 1


def test_a_few_bytes_for_other_members_are_read_by_each():
    mesh = MeshSpec(("x", "y"), (2, 2), (0, 1, 2, 3))
    large = LeafSpec("large", "jax", "float32", (16, MIB))
    small = LeafSpec("small", "jax", "float32", (16,), partition=(("x",),))
    stored = [stored_in(large, (1, 1)), stored_in(small, (1,))]
    _, plans = plans_of([large, small], stored, mesh, [0, 1, 2, 3])
    assert [gather.members for gather in plans[2][0]] == [(0, 1, 2, 3), (2,)]


def test_a_packed_cell_that_is_too_large_is_not_shared():
    mesh = MeshSpec(("x",), (4,), (0, 1, 2, 3))
    leaf = LeafSpec("packed", "jax", "int4", (40, MIB))
    for grid, is_shared in (((1, 1), False), ((4, 1), True)):
        _, plans = plans_of([leaf], [stored_in(leaf, grid)], mesh, [0, 1, 2, 3])
        assert bool(units_of(plans[0])) is is_shared


def test_the_processes_of_cells():
    mesh = MeshSpec(("x", "y"), (2, 4), tuple(range(8)))
    process_of = [0, 0, 1, 1, 2, 2, 3, 3]
    assert processes_by_cell(mesh, (("x",),), 1, process_of) == [(0, 1), (2, 3)]
    assert processes_by_cell(mesh, (("y",),), 1, process_of) == [(0, 2), (0, 2), (1, 3), (1, 3)]
    assert processes_by_cell(mesh, (), 2, process_of) == [(0, 1, 2, 3)]
