"""Huge pages are asked for while there are free ones, for whole ones only."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ostraka.common import huge_pages
from ostraka.formats.buffers import aligned, map_pages

MIB = 1 << 20
BUDDYINFO = """\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal     10     10     10     10     10     10     10     10     10     5    100
"""


@pytest.fixture(autouse=True)
def fresh_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_free", huge_pages._Free())
    monkeypatch.setattr(huge_pages, "_LOOK_S", 60.0)


def set_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(huge_pages, "free_bytes", lambda: nbytes)


def asked_bytes(memory: np.ndarray) -> int:
    """The bytes of this memory that the kernel was asked to put into huge pages."""
    start, stop = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    return sum(
        min(stop, last) - max(start, first)
        for first, last, flags in mappings()
        if first < stop and last > start and "hg" in flags
    )


def mappings() -> Iterator[tuple[int, int, list[str]]]:
    span = (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            first, last = word.split("-")
            span = int(first, 16), int(last, 16)
        elif word == "VmFlags:":
            yield span[0], span[1], rest


def test_large_memory_has_huge_pages_while_there_are_free_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huge_pages, "_SLOW_S", 60.0)
    set_free(monkeypatch, 272 * MIB)  # 16 MiB more than is left to others
    first, second = aligned(9 * MIB), aligned(9 * MIB)
    for memory in (first, second):
        assert memory.nbytes == 9 * MIB
        assert memory.ctypes.data % huge_pages.HUGE_BYTES == 0
        assert asked_bytes(memory) == 0
    map_pages(first[: 5 * MIB])
    assert asked_bytes(first) == 4 * MIB
    map_pages(first)
    map_pages(second)
    assert asked_bytes(first) == 8 * MIB  # The last MiB would take a whole page.
    assert asked_bytes(second) == 0
    first[:] = 7
    assert int(first[-1]) == 7


@pytest.mark.parametrize(("nbytes", "free_mib"), [(MIB, 1000), (3 * MIB, 257), (9 * MIB, 0)])
def test_small_memory_and_full_machines_do_without(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, free_mib: int
):
    set_free(monkeypatch, free_mib * MIB)
    # Not by its mapping: numpy's own memory may be where another array asked before.
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *call: asked.append(call))
    map_pages(aligned(nbytes))
    assert asked == []


def test_after_a_slow_page_none_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    set_free(monkeypatch, 1000 * MIB)
    monkeypatch.setattr(huge_pages, "_SLOW_S", -1.0)
    monkeypatch.setattr(huge_pages, "_PAUSES", 1e9)
    memory = aligned(8 * MIB)
    map_pages(memory)
    assert asked_bytes(memory) == huge_pages.HUGE_BYTES
    assert huge_pages.map_huge(8 * MIB) is None


def test_a_process_has_few_such_mappings(monkeypatch: pytest.MonkeyPatch):
    set_free(monkeypatch, 1000 * MIB)
    monkeypatch.setattr(huge_pages, "_MOST_MAPPINGS", len(huge_pages._mappings) + 1)
    held = huge_pages.map_huge(2 * MIB)
    assert held is not None
    assert huge_pages.map_huge(2 * MIB) is None
    del held
    assert huge_pages.map_huge(2 * MIB) is not None


@pytest.mark.parametrize(
    ("enabled", "huge_bytes", "buddyinfo", "free_mib"),
    [
        ("always [madvise] never", "2097152", BUDDYINFO, 2 + 12 + 10 + 400),
        ("[always] madvise never", "2097152", BUDDYINFO, 0),
        ("always madvise [never]", "2097152", BUDDYINFO, 0),
        ("always [madvise] never", "536870912", BUDDYINFO, 0),
        ("always [madvise] never", "2097152", "Node 0, zone DMA many", 0),
        ("always [madvise] never", "2097152", None, 0),
        (None, "2097152", BUDDYINFO, 0),
    ],
)
def test_free_pages_are_those_that_the_kernel_tells(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    enabled: str | None,
    huge_bytes: str,
    buddyinfo: str | None,
    free_mib: int,
):
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    monkeypatch.setattr(huge_pages, "_BUDDYINFO", tmp_path / "buddyinfo")
    monkeypatch.setattr(huge_pages.mmap, "PAGESIZE", 4096)
    named = {"enabled": enabled, "hpage_pmd_size": huge_bytes, "buddyinfo": buddyinfo}
    for name, text in named.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    assert huge_pages.free_bytes() == free_mib * MIB


def test_a_look_counts_for_a_moment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huge_pages, "_LOOK_S", 0.01)
    set_free(monkeypatch, 0)
    assert huge_pages.map_huge(2 * MIB) is None
    set_free(monkeypatch, 1000 * MIB)
    time.sleep(0.02)
    assert huge_pages.map_huge(2 * MIB) is not None
