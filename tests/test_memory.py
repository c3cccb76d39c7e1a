"""Memory to read into: where it begins, that buffers don't overlap, and which pages it is on."""

import mmap
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from ostraka import _memory
from ostraka._memory import ALIGNMENT, LARGE_BYTES, HugePages, Supply

HUGE = 2 << 20
linux_only = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"),
    reason="NOT TESTED HERE: huge pages, which are Linux's",
)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, HUGE - 1, HUGE, HUGE + 1, 9 << 20])
def test_memory_is_aligned_and_can_be_written(nbytes: int):
    memory = Supply().allocate(nbytes)
    assert memory.size == nbytes
    assert not nbytes or memory.ctypes.data % ALIGNMENT == 0
    memory[:] = 7
    assert memory.flags.writeable


@linux_only
def test_large_memory_begins_where_a_huge_page_can():
    supply = Supply()
    assert [supply.allocate(HUGE + n).ctypes.data % HUGE for n in (0, 1, 12345)] == [0, 0, 0]


def test_buffers_of_an_arena_do_not_overlap():
    supply = Supply()
    sizes = np.random.default_rng(1).integers(1, 600_000, 300).tolist()
    cuts = [supply.cut(size) for size in sizes]
    for number, ((arena, start), size) in enumerate(zip(cuts, sizes, strict=True)):
        assert (arena.ctypes.data + start) % ALIGNMENT == 0
        arena[start : start + size] = number % 251
    for number, ((arena, start), size) in enumerate(zip(cuts, sizes, strict=True)):
        assert (arena[start : start + size] == number % 251).all()
    assert len({id(arena) for arena, _ in cuts}) < 12  # they grow


def test_little_takes_little():
    arena, _ = Supply().cut(10)
    assert arena.size < HUGE


def test_a_buffer_as_large_as_can_be_has_room_in_an_arena():
    supply = Supply()
    arena, start = supply.cut(LARGE_BYTES - 1)
    assert start + LARGE_BYTES - 1 <= arena.size


# Huge pages


def flags_at(address: int) -> list[str]:
    """What the kernel says of the memory at an address: `hg` for asked for, `nh` for declined."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no memory there")


@linux_only
def test_huge_pages_are_asked_for():
    memory = Supply().allocate(4 << 20)
    assert "hg" in flags_at(memory.ctypes.data)


class Clock:
    """Each huge page takes as long as the next number says."""

    def __init__(self, *pages_s: float):
        self.now_s = 0.0
        self.pages_s = list(pages_s)
        self.is_before = True

    def __call__(self) -> float:
        if not self.is_before:
            self.now_s += self.pages_s.pop(0)
        self.is_before = not self.is_before
        return self.now_s


def provide(*pages_s: float) -> tuple[int, list[str]]:
    """How many pages were asked for, and the flags of other memory of the same supply then."""
    clock = Clock(*pages_s)
    with (
        patch.object(_memory, "small_pages_s", lambda: 1.0),
        patch.object(_memory.time, "thread_time", clock),
    ):
        supply = Supply()
        other = supply.allocate(4 << 20)
        supply.make_ready(supply.allocate(len(pages_s) * HUGE))
        return len(pages_s) - len(clock.pages_s), flags_at(other.ctypes.data)


@linux_only
def test_quick_pages_are_asked_for_to_the_end():
    asked, flags = provide(*[0.2] * 12)
    assert asked == 12
    assert "hg" in flags


@linux_only
def test_a_slow_page_among_quick_ones_is_forgiven():
    asked, flags = provide(0.2, 0.2, 4.0, *[0.2] * 9)
    assert asked == 12
    assert "hg" in flags


@linux_only
def test_slow_pages_are_not_asked_for_any_more():
    asked, flags = provide(*[3.5] * 12)
    assert asked == 2
    assert "nh" in flags


@linux_only
def test_pages_that_become_slow_are_not_asked_for_any_more():
    asked, flags = provide(*[0.1] * 12, *[3.5] * 12)
    assert asked == 14
    assert "nh" in flags
    # What was quick before is no reason to go on for long.
    assert HugePages.CREDIT < 14


@linux_only
def test_a_kernel_without_huge_pages():
    with patch.object(_memory, "_HUGE", 9999):
        supply = Supply()
        memory = supply.allocate(4 << 20)
        supply.make_ready(memory)
    assert "hg" not in flags_at(memory.ctypes.data)
    memory[:] = 1


def test_elsewhere_memory_is_numpys():
    with patch.object(_memory, "_PRIVATE", 0), patch.object(_memory, "_HUGE", None):
        supply = Supply()
        memory = supply.allocate(4 << 20)
        supply.make_ready(memory)
        assert memory.ctypes.data % ALIGNMENT == 0


def test_what_small_pages_cost_is_measured_once():
    first = _memory.small_pages_s()
    assert first > 0
    assert _memory.small_pages_s() == first
