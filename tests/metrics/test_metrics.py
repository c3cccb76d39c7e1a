"""Records as numbers: a real loop, and the tools' own parsers and readers."""

import re
import struct
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families
from tensorboardX import SummaryWriter
from tensorboardX.proto import event_pb2

import ostraka
from ostraka.common.record import OnRecord, Record, RunStats
from ostraka.common.threads import StopSignal, run_all
from ostraka.metrics import scalars, to_opentelemetry, to_prometheus, to_tensorboard, to_wandb


def run_loop(root: Path, on_record: OnRecord) -> None:
    """Five steps, of which two are saved, copied and repeated. Each is audited."""
    options: dict[str, Any] = {"every": 2, "mirror": root.parent / "copy", "audit_every": 1}
    state = {"x": jnp.ones(1000), "step": 0}
    for last in (5, 6):
        with ostraka.Manager(root, on_record=on_record, **options) as manager:
            for step in range(manager.resume(state) + 1, last + 1):
                state["x"] = state["x"] * 1.5
                manager.save(step, state)


def read_prometheus(path: Path) -> dict[tuple[str, ...], float]:
    """By name and labels."""
    families = text_string_to_metric_families(path.read_text())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_loop_in_a_file_for_prometheus(tmp_path: Path):
    records: list[Record] = []
    write = to_prometheus(tmp_path / "run.prom", {"run": 'a "b"\n'})

    def tell(record: Record) -> None:
        records.append(record)
        write(record)

    run_loop(tmp_path / "run", tell)
    found = read_prometheus(tmp_path / "run.prom")
    run = 'a "b"\n'
    counts = {"save": 3, "restore": 1, "mirror": 3, "audit": 7}
    for operation, count in counts.items():
        mine = [record for record in records if record.operation == operation]
        assert len(mine) == count
        assert found["ostraka_operations_total", operation, run] == count
        assert found["ostraka_bytes_total", operation, run] == sum(one.bytes for one in mine)
        total_s = sum(one.total_s for one in mine)
        assert found["ostraka_duration_seconds_total", operation, run] == pytest.approx(total_s)
        assert abs(found["ostraka_last_time_seconds", operation, run] - time.time()) < 600
    assert found["ostraka_last_step", "save", run] == 6
    assert found["ostraka_last_step", "restore", run] == 4
    assert found["ostraka_audit_differences_total", run] == 0
    assert found["ostraka_phase_seconds_total", "save", "write", run] > 0
    assert 0 < found["ostraka_run_lost_share", run] <= 1
    audits = [(one.step, one.differs) for one in records if one.operation == "audit"]
    assert audits == [*((step, None) for step in range(1, 6)), (5, False), (6, None)]
    assert [file.name for file in tmp_path.glob("run.prom*")] == ["run.prom"]


def test_what_can_not_be_a_target_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"run.txt must end with .prom: node_exporter reads no"):
        to_prometheus(tmp_path / "run.txt")
    with pytest.raises(TypeError, match="is no writer of TensorBoard: it has no add_scalar"):
        to_tensorboard(tmp_path)
    with pytest.raises(TypeError, match="is no run of W&B: it has no log"):
        to_wandb(tmp_path)


def test_readers_of_the_file_see_it_whole(tmp_path: Path):
    path = tmp_path / "run.prom"
    write = to_prometheus(path)
    record = a_record()
    write(record)
    done = StopSignal()

    def work(number: int) -> int:
        if number % 2:
            for _ in range(100):
                write(record)
            return 0
        return min(len(read_prometheus(path)) for _ in range(50))

    sizes = run_all(work, range(8), threads=8, stop=done)
    assert set(sizes[::2]) == {len(read_prometheus(path))}
    assert read_prometheus(path)["ostraka_operations_total", "save"] == 401


def a_record(**more: Any) -> Record:
    records: list[Record] = []
    ostraka.save("memory://metrics", {"x": jnp.ones(10)}, on_record=records.append)
    return Record(**{name: getattr(records[0], name) for name in Record.__slots__} | more)


def test_a_loop_in_opentelemetry(tmp_path: Path):
    reader = InMemoryMetricReader()
    meter = MeterProvider(metric_readers=[reader]).get_meter("test")
    run_loop(tmp_path / "run", to_opentelemetry(meter))
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    found = {
        (metric.name, *point.attributes.values()): (point.value, metric.unit)
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert found["ostraka.operations", "audit"] == (7, "1")
    assert found["ostraka.operations", "mirror"] == (3, "1")
    assert found["ostraka.bytes", "restore"][0] > 4000
    assert found["ostraka.last_step", "save"] == (6, "1")
    assert found["ostraka.run_lost", "repeated"][0] > 0
    assert found["ostraka.duration", "save"][1] == "s"
    to_opentelemetry()(a_record())  # of the provider that the program has, here none


def test_a_loop_in_tensorboard(tmp_path: Path):
    with SummaryWriter(str(tmp_path / "log")) as writer:
        run_loop(tmp_path / "run", to_tensorboard(writer))
        to_tensorboard(writer)(a_record())
    points = list(read_events(tmp_path / "log"))
    steps = {tag: [step for name, step, _ in points if name == tag] for tag, _, _ in points}
    assert steps["save/total_s"] == [2, 4, 6, 1]
    assert steps["audit/blocked_s"] == [1, 2, 3, 4, 5, 5, 6]
    assert steps["audit/differs"] == [5]
    assert sorted(steps["mirror/bytes"]) == [2, 4, 6]
    assert all(0 <= value <= 1 for tag, _, value in points if tag == "run/lost_share")


def read_events(directory: Path) -> Any:
    """The numbers in files of TensorBoard: a length, its check, an event, its check, and so on."""
    for file in directory.iterdir():
        proto: Any = event_pb2
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = proto.Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            yield from ((one.tag, event.step, one.simple_value) for one in event.summary.value)


def test_a_loop_in_a_writer_of_clu_and_in_wandb(tmp_path: Path):
    """Both packages are larger than all others: these objects have the methods that we call."""

    class Writer:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def write_scalars(self, step: int, found: dict[str, float]) -> None:
            self.calls.append((step, found))

        def define_metric(self, name: str, *, step_metric: str) -> None:
            assert re.fullmatch(r"\w+/\*", name)
            assert step_metric == "ostraka/step"

        def log(self, data: dict[str, float], *, commit: bool) -> None:
            assert not commit
            self.calls.append((data.pop("ostraka/step"), data))

    record = a_record(step=7, run=RunStats(10.0, 0.5, 0.25, 0.0, 0.0, 1.25))
    for make in (to_tensorboard, to_wandb):
        writer = Writer()
        make(writer)(record)
        assert writer.calls == [(7, scalars(record))]
    assert scalars(record)["run/lost_share"] == 0.2
    assert scalars(record)["run/lost/repeated_s"] == 1.25
