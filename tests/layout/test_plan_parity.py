"""Groups of parity: whatever is lost together, no group loses more than it stands."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka.layout.plan_parity import GROUP_FILES, ParityPlan, check_parity, plan_parity
from ostraka.layout.shard_file import FileEntry


def files_of(process_of: list[int], sizes: list[int]) -> list[FileEntry]:
    return [
        FileEntry(d, p, 4096, 4096 + s)
        for d, _ in enumerate(process_of)
        for p, s in [(0, sizes[d % len(sizes)]), *([(1, sizes[-1])] if d % 3 == 0 else [])]
    ]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[FileEntry], list[int], list[int], int]:
    hosts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    hosts = [sorted(set(hosts)).index(host) for host in hosts]
    devices = draw(st.integers(1, 4))
    process_of = [process for process in range(len(hosts)) for _ in range(devices)]
    sizes = draw(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=5))
    return files_of(process_of, sizes), process_of, hosts, draw(st.integers(1, 2))


@given(runs())
def test_no_group_loses_more_than_it_stands(run) -> None:
    files, process_of, hosts, count = run
    plan = plan_parity(files, process_of, hosts, count=count)
    rows = [row for group in plan.groups for row in group.members]
    assert sorted(rows) == list(range(len(files)))
    for group in plan.groups:
        assert len(group.writers) == count
        assert 1 <= len(group.members) <= GROUP_FILES
    assert plan.covers == (
        "hosts"
        if len(set(hosts)) > max(count, 1)
        else "processes"
        if len(hosts) > max(count, 1)
        else "files"
    )
    if plan.covers == "files":
        return
    owner = hosts if plan.covers == "hosts" else list(range(len(hosts)))
    for lost in combinations(sorted(set(owner)), count):
        for group in plan.groups:
            members = [owner[process_of[files[row].device]] for row in group.members]
            files_lost = sum(of in lost for of in members)
            files_lost += sum(owner[writer] in lost for writer in group.writers)
            assert files_lost <= count, (group, lost)


def plan_of(processes: int, devices: int, count: int, *, hosts: int = 1) -> ParityPlan:
    process_of = [p for p in range(processes) for _ in range(devices)]
    on = [p * hosts // processes for p in range(processes)]
    files = [FileEntry(d, 0, 4096, 1 << 20) for d in range(len(process_of))]
    return plan_parity(files, process_of, on, count=count)


def test_one_process_adds_an_eighth() -> None:
    assert [len(group.members) for group in plan_of(1, 8, 1).groups] == [8]
    assert [len(group.members) for group in plan_of(1, 9, 2).groups] == [8, 1]


def test_many_hosts_write_alike() -> None:
    plan = plan_of(2048, 8, 1, hosts=2048)
    assert plan.covers == "hosts"
    assert {len(group.members) for group in plan.groups} == {8}
    written = Counter(writer for group in plan.groups for writer in group.writers)
    assert max(written.values()) <= 2


def test_files_of_similar_size_come_together() -> None:
    files = [FileEntry(d, p, 4096, 1 << (12 + 8 * p)) for d in range(8) for p in range(2)]
    plan = plan_parity(files, [0] * 8, [0], count=1)
    assert [{files[row].size for row in group.members} for group in plan.groups] == [
        {1 << 20},
        {1 << 12},
    ]


def test_too_few_hosts_are_said() -> None:
    assert plan_of(2, 4, 1, hosts=2).covers == "hosts"
    assert plan_of(4, 2, 2, hosts=2).covers == "processes"
    assert plan_of(2, 4, 2, hosts=2).covers == "files"
    assert plan_of(1, 4, 1).covers == "files"


@pytest.mark.parametrize("parity", [-1, 3, True, 1.0, "1", None])
def test_what_parity_may_be(parity) -> None:
    with pytest.raises(ValueError, match="it must be 0, 1 or 2"):
        check_parity(parity)
