"""Bytes to seconds: the slower of host and storage counts; how often to save, against a search."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka.errors import StoreError
from ostraka.planner.time import Bandwidths, advise_interval, probe, work_out_times


def test_the_slower_of_host_and_storage_counts():
    both = Bandwidths(host_write=100.0, host_read=200.0, storage=400.0)
    assert both.write_s(1000, 1000) == 10.0
    assert both.write_s(1000, 8000) == 20.0
    assert both.read_s(1000, 1000) == 5.0
    assert (both.peak_write(2), both.peak_write(8), both.peak_read(3)) == (200.0, 400.0, 400.0)
    assert Bandwidths(storage=400.0).write_s(1000, 8000) == 20.0
    assert Bandwidths().write_s(1000, 8000) is None
    assert Bandwidths().peak_read(4) is Bandwidths().peak_write(4) is None


def lost_share(interval_s: float, blocked_s: float, mtbf_s: float) -> float:
    """Of all time, for exponential failures, without restoring: exactly, not to first order."""
    total = mtbf_s * math.expm1((interval_s + blocked_s) / mtbf_s)
    return 1 - interval_s / total


@given(st.floats(0.1, 600), st.floats(3600, 1e6))
def test_no_interval_loses_much_less(blocked_s: float, mtbf_s: float):
    advised = advise_interval(blocked_s, 0.0, 0.0, mtbf_s).interval_s
    least = min(lost_share(advised * 2.0**n, blocked_s, mtbf_s) for n in (-2, -1, 0, 1, 2))
    assert lost_share(advised, blocked_s, mtbf_s) <= least + 1e-12


def test_saves_that_take_longer_than_a_failure():
    advice = advise_interval(1000.0, 0.0, 0.0, 100.0)
    assert (advice.daly_s, advice.lost_share) == (100.0, 1.0)


def test_a_save_in_the_background_costs_only_what_it_blocks():
    """By simulation: what is lost on the way to so many failures, with the advised interval."""
    blocked_s, write_s, restore_s, mtbf_s = 2.0, 60.0, 30.0, 4 * 3600.0
    advice = advise_interval(blocked_s, write_s, restore_s, mtbf_s)
    assert advice.interval_s == advice.daly_s < advise_interval(write_s, 0, 0, mtbf_s).daly_s
    assert advice.young_s == pytest.approx(math.sqrt(2 * blocked_s * mtbf_s))
    fails = np.random.default_rng(0).exponential(mtbf_s, 20_000)
    period = advice.interval_s + blocked_s
    durable = np.floor(np.maximum(fails - blocked_s - write_s, 0) / period)
    worked = durable * advice.interval_s
    lost = 1 - worked.sum() / (fails.sum() + len(fails) * restore_s)
    assert advice.lost_share == pytest.approx(lost, rel=0.05)


def test_saves_in_the_background_do_not_come_faster_than_they_are_written():
    advice = advise_interval(0.0, 60.0, 0.0, 4 * 3600.0)
    assert (advice.daly_s, advice.interval_s) == (0.0, 60.0)
    assert advice.lost_share == pytest.approx(90 / (4 * 3600))


@given(st.floats(0, 100), st.floats(0, 1000), st.floats(0, 1000), st.floats(1, 1e6))
def test_advice_is_possible(blocked_s: float, background_s: float, restore_s: float, mtbf_s: float):
    advice = advise_interval(blocked_s, background_s, restore_s, mtbf_s)
    assert advice.interval_s >= background_s
    assert 0 <= advice.lost_share <= 1
    assert advice.blocked_s == blocked_s


def test_times_that_are_not_known_are_none():
    known = Bandwidths(host_write=100.0)
    times = work_out_times(known, save_s=10.0, restore_s=None, held_bytes=50, mtbf_s=3600.0)
    assert (times.save_s, times.save_async_blocked_s, times.restore_s) == (10.0, None, None)
    assert times.save_every is not None
    assert times.save_async_every is None
    bare = work_out_times(known, save_s=10.0, restore_s=1.0, held_bytes=50, mtbf_s=None)
    assert bare.save_every is None


def test_a_probe_measures_and_tidies_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.planner.time._PROBE_BYTES", 1 << 20)
    found = probe(str(tmp_path))
    assert found.host_write is not None
    assert found.host_read is not None
    assert found.host_write > 0 < found.host_read
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="can't measure the speed of"):
        probe(str(tmp_path / "nowhere"))
