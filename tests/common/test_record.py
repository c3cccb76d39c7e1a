"""The record of each save and restore: to a callback, to logging, into the checkpoint."""

import logging
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.common.record import (
    MOST_PROCESSES,
    Extremes,
    Record,
    Stopwatch,
    Timeline,
    read_timeline,
    report,
    summarize,
    timeline,
)
from ostraka.testing import run_processes
from places import Place, in_the_way


def make_tree() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    value = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    array = jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, P("x")), lambda index: value[index]
    )
    return {"array": array, "host": np.arange(10)}


def shard_bytes(path: Place) -> int:
    return sum(file.stat().st_size for file in path.glob("*/*.safetensors"))


def check_record(record: Record, operation: str, path: Place, phases: list[str]) -> None:
    assert (record.operation, record.path) == (operation, str(path))
    assert list(record.phases) == phases
    assert all(seconds >= 0 for seconds in record.phases.values())
    assert sum(record.phases.values()) <= record.total_s
    assert 0 < record.blocked_s <= record.total_s
    assert 0 <= record.process_s.least <= record.process_s.most <= record.total_s
    assert record.bytes_per_s == record.bytes / record.total_s


def test_save_is_recorded(place: Place, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "ostraka")
    records: list[Record] = []
    ostraka.save(place / "c", make_tree(), on_record=records.append)
    (record,) = records
    phases = ["wait", "capture", "agree", "plan", "write", "commit"]
    check_record(record, "save", place / "c", phases)
    total = shard_bytes(place / "c")
    assert record.bytes == total
    assert record.process_bytes == Extremes(total, total)
    assert [entry.getMessage() for entry in caplog.records] == [str(record)]
    assert f"save {place / 'c'}: {total:,} bytes in " in str(record)
    kept = ostraka.open(place / "c").writer["timeline"]
    names = ["blocked_s", "bytes", "process_bytes", "process_write_s", "processes"]
    assert list(kept) == [*(f"{phase}_s" for phase in phases[:-1]), *names]
    assert (kept["bytes"], kept["process_bytes"]) == (total, [total, total])
    assert kept["processes"] == [[total, kept["process_write_s"][0]]]
    assert sum(kept[f"{phase}_s"] for phase in phases[:-1]) - 0.001 <= kept["blocked_s"]
    assert kept["blocked_s"] <= record.blocked_s + 0.001


def test_save_in_the_background_is_recorded(place: Place):
    records: list[Record] = []
    handle = ostraka.save_async(place / "c", make_tree(), on_record=records.append)
    handle.wait()
    assert records == [handle.record]
    assert records[0].blocked_s < records[0].total_s
    assert records[0].bytes == handle.bytes_total
    kept = ostraka.open(place / "c").writer["timeline"]
    assert kept["blocked_s"] == round(records[0].blocked_s, 4)


def test_failed_save_has_no_record(place: Place):
    records: list[Record] = []
    handle = ostraka.save_async(in_the_way(place / "c"), make_tree(), on_record=records.append)
    assert handle.exception() is not None
    assert handle.record is None
    assert records == []


@pytest.mark.parametrize("way", ["like", "into", "none"])
def test_restore_is_recorded(place: Place, way: str, caplog: pytest.LogCaptureFixture):
    tree = make_tree()
    if way == "into":
        tree = {name: nnx.Param(tree["array"]) for name in tree}
    ostraka.save(place / "c", tree)
    caplog.set_level(logging.INFO, "ostraka")
    records: list[Record] = []
    given: dict[str, Any] = {} if way == "none" else {way: tree}
    ostraka.restore(place / "c", **given, on_record=records.append)
    (record,) = records
    check_record(record, "restore", place / "c", ["open", "match", "read", "agree"])
    assert record.bytes == shard_bytes(place / "c")
    assert record.blocked_s == record.total_s
    assert [entry.getMessage() for entry in caplog.records] == [str(record)]
    if way == "none":
        ostraka.restore(place / "c", only="host", on_record=records.append)
        assert 0 < records[1].bytes < shard_bytes(place / "c")


def test_callback_of_a_restore_that_raises_is_logged(
    place: Place, caplog: pytest.LogCaptureFixture
):
    def call_back(record: Record) -> None:
        raise OSError("of the callback's own")

    ostraka.save(place / "c", {"x": 5})
    assert ostraka.restore(place / "c", on_record=call_back) == {"x": 5}
    assert "of the callback's own" in caplog.text


def save_and_restore(path: str) -> list[Record]:
    records: list[Record] = []
    tree = make_tree()
    # More for one process than for the other.
    tree["own"] = jax.device_put(np.ones((8, 1 << 16)), jax.local_devices()[0])
    tree["own"] = tree["own"] * (1 + jax.process_index())
    ostraka.save_async(path, tree, on_record=records.append).wait()
    ostraka.restore(path, like=tree, on_record=records.append)
    return records


def test_records_of_several_processes_compare_them(place: Place):
    results = run_processes(save_and_restore, str(place), processes=2, devices_per_process=2)
    saves, restores = zip(*(result.value for result in results), strict=True)
    for records in (saves, restores):
        assert records[0].bytes == records[1].bytes
        assert records[0].process_bytes == records[1].process_bytes
        assert records[0].process_s == records[1].process_s
        assert 0 < records[0].process_bytes.least <= records[0].process_bytes.most
        assert records[0].process_s.least <= records[0].process_s.most
    assert saves[0].bytes == shard_bytes(place)
    kept = ostraka.open(place).writer["timeline"]
    assert kept["process_bytes"] == [saves[0].process_bytes.least, saves[0].process_bytes.most]
    sizes, seconds = zip(*kept["processes"], strict=True)
    assert (sum(sizes), min(sizes), max(sizes)) == (saves[0].bytes, *kept["process_bytes"])
    assert (min(seconds), max(seconds)) == tuple(kept["process_write_s"])


def test_summary_has_the_least_and_the_most():
    assert summarize([(5, 1.0), (7, 0.5), (6, 2.0)]) == [18, 5, 7, 0.5, 2.0]


def test_phase_that_comes_twice_adds_up():
    watch = Stopwatch()
    watch.lap("a")
    watch.lap("b")
    watch.lap("a")
    assert list(watch.phases) == ["a", "b"]
    assert list(timeline(watch, [1, 1, 1, 0.0, 0.0], [(1, 0.0)]))[:2] == ["a_s", "b_s"]


def test_timeline_of_very_many_processes_lists_none():
    def kept(processes: int) -> dict[str, Any]:
        reports = [(5, 1.0)] * processes
        return timeline(Stopwatch(), summarize(reports), reports)

    assert kept(MOST_PROCESSES)["processes"] == [[5, 1.0]] * MOST_PROCESSES
    assert "processes" not in kept(MOST_PROCESSES + 1)


def test_timeline_is_read_back():
    watch = Stopwatch(phases={"capture": 0.5, "write": 2.0}, blocked_s=0.75)
    reports = [(5, 1.0), (7, 2.0)]
    found = read_timeline({"timeline": timeline(watch, summarize(reports), reports)})
    assert found is not None
    assert found == Timeline({"capture": 0.5, "write": 2.0}, 0.75, 12, tuple(reports))
    assert (found.total_s, found.background_s) == (2.5, 1.75)


@pytest.mark.parametrize("value", [None, [], "x", {}, {"write_s": "1"}, {"write_s": -1.0}])
def test_timeline_of_others_may_be_anything(value: Any):
    assert read_timeline({"timeline": value}) is None


@pytest.mark.parametrize("processes", ["x", [[1]], [[-1, 0.0]], [[1, "2"]], [1], [[10**400, 1.0]]])
def test_processes_of_others_may_be_anything(processes: Any):
    found = read_timeline({"timeline": {"write_s": 1.0, "bytes": -1, "processes": processes}})
    assert found == Timeline({"write": 1.0}, None, None, ())


def test_record_of_nothing_has_no_throughput():
    record = report("restore", "here", Stopwatch(start=0.0), summarize([(0, 0.0)]), None)
    assert (record.bytes, record.bytes_per_s) == (0, 0.0)
