"""Hostile input for every reader, in numbers: `fuzz.py` says what a reader may do with it."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuzz
from figures import Figures
from mutations import Mutator
from ostraka.errors import OstrakaError
from ostraka.tree.json_tree import saved_tree

IN_THE_SUITE = 5_000
IN_SOAK = 1_000_000


def check(name: str, count: int, seed: int, kept: Path) -> None:
    tally = fuzz.fuzz(name, count, seed)
    print(f"fuzzed {name} from seed {seed}: {tally}")
    for kind, (text, number, hostile) in tally.failures.items():
        # A seed alone may not do it again: what is changed has ids and digests of its own.
        kept.write_text(repr(hostile))
        pytest.fail(f"seed {number}: {kind}\n{text}\nthe input is in {kept}")
    assert tally.inputs == count


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_readers_withstand_hostile_input(name, tmp_path: Path):
    check(name, fuzz.shares(IN_THE_SUITE)[name], 0, tmp_path / "input")


@pytest.mark.soak
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_readers_withstand_a_million_hostile_inputs(name, tmp_path: Path, figures: Figures):
    new = bool(os.environ.get("OSTRAKA_NEW_EXAMPLES"))
    count = fuzz.shares(IN_SOAK)[name]
    check(name, count, time.time_ns() if new else IN_SOAK, tmp_path / "input")
    figures.add("hostile inputs", count)


def test_the_harness_finds_what_it_looks_for():
    """A reader that raises an error of others, one that hangs, and one that hoards."""

    def hang(_: bytes) -> None:
        while True:
            pass

    def hoard(_: bytes) -> None:
        bytearray(os.urandom(1 << 20) * 100)

    # Only the reader that hangs has little time: on a busy machine 100 MiB take a while.
    readers = {"ValueError": (int, 60), "Hang": (hang, 0.5), "memory": (hoard, 60)}
    for kind, (read, most_seconds) in readers.items():
        target = fuzz.Target(lambda mutator: mutator.bytes(b"x" * 99), read)
        tally, meter = fuzz.Tally(), fuzz.MemoryMeter()
        fuzz.fuzz_one(target, 1, tally, meter, most_seconds=most_seconds)
        assert [name.split()[0] for name in tally.failures] == [kind]


@given(st.integers(0, 1 << 64), st.integers(0, 3))
def test_a_tree_of_anything_is_decoded_or_refused(seed, arrays):
    """Shrinks to a small seed; the trees are those of no real checkpoint."""
    mutator = Mutator(seed)
    tree = {"list": None, "items": [mutator.value() for _ in range(4)]}
    with suppress(ValueError, OstrakaError):
        saved_tree(tree, [str(number) for number in range(arrays)])
