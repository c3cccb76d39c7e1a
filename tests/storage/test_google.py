"""Checkpoints in a store with the conditions of Google's: `tests/support/gcs_server.py`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from gcs_server import Controls
from ostraka import Manager
from ostraka.errors import Busy, StoreError
from ostraka.saving import place as _place
from ostraka.storage import _claim, is_claim, open_store
from ostraka.storage._object import ObjectStore
from servers import Server

pytestmark = pytest.mark.parametrize("bucket", ["google"], indirect=True)
TREE = {"w": np.arange(100_000, dtype=np.float32), "v": np.ones(3)}


@pytest.fixture
def controls(servers: Callable[[str], Server]) -> Iterator[Controls]:
    controls = servers("google").client()
    yield controls
    controls.limit()
    assert controls.state()["faults"] == 0  # None is left for others.


def assert_same(found: Any, expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def account_of(path: str, tmp_path: Path, **changes: Any) -> Path:
    """Write another file of a service account, with something else in it."""
    file = tmp_path / "account.json"
    file.write_text(json.dumps(json.loads(Path(path).read_text()) | changes))
    return file


# Where the server is, and who asks


def test_the_endpoint_is_in_the_file_of_the_account(
    bucket: str, servers: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server = servers("google")
    monkeypatch.delenv("GOOGLE_BASE_URL")
    path = server.environment["GOOGLE_SERVICE_ACCOUNT"]
    account = account_of(path, tmp_path, gcs_base_url=server.endpoint)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    ostraka.save(bucket, TREE)
    assert_same(ostraka.restore(bucket), TREE)
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", account.read_text())
    assert_same(ostraka.restore(bucket), TREE)


def test_an_account_that_the_store_does_not_know(
    bucket: str, servers: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = servers("google").environment["GOOGLE_SERVICE_ACCOUNT"]
    account = account_of(path, tmp_path, client_email="nobody@example.com")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    for call in (ostraka.restore, lambda path: ostraka.save(path, TREE)):
        with pytest.raises(StoreError, match="does not know these credentials"):
            call(bucket)


def test_without_an_account_nothing_is_signed(
    bucket: str, servers: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """obstore would ask Google's own server to sign."""
    path = servers("google").environment["GOOGLE_SERVICE_ACCOUNT"]
    for changes, signs in (({}, True), ({"disable_oauth": True}, False)):
        account = account_of(path, tmp_path, **changes)
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        monkeypatch.setenv("GOOGLE_NOTE", str(changes))  # It is opened once for one environment.
        store = open_store(bucket)
        assert isinstance(store, ObjectStore)
        assert store._contact.can_sign == signs


# Conditions


@pytest.mark.buckets
def test_a_dead_save_is_taken_over(bucket: str, monkeypatch: pytest.MonkeyPatch):
    """Its marker is seen in a list, which in obstore has no generation."""
    store = open_store(bucket)
    store.touch(f"_CLAIM-{'0' * 32}", create=True)
    store.put("shards-0123456789abcdef/shard_00000.safetensors", b"left")
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", -1.0)
    monkeypatch.setattr(_place, "GONE_AFTER_S", -5.0)
    ostraka.save(bucket, TREE)
    assert_same(ostraka.restore(bucket), TREE)
    assert not list(filter(is_claim, store.list()))


def test_what_a_list_has_seen_is_replaced_and_no_other(bucket: str, controls: Controls):
    store = open_store(bucket)
    store.put("note", b"1")
    (seen,) = store.files("note")
    store.put("note", b"2", replaces=seen.version)
    with pytest.raises(Busy, match="another save has replaced .*/note meanwhile"):
        store.put("note", b"3", replaces=seen.version)
    store.delete("note")
    with pytest.raises(Busy, match="another save has replaced .*/note meanwhile"):
        store.put("note", b"3", replaces=seen.version)
    assert store.list() == []
    assert f"{bucket.rpartition('/')[2]}/note" not in controls.state()["generations"]


# Limits and trouble


def test_lists_come_in_pages(bucket: str, controls: Controls):
    controls.limit(most_listed=2)
    with Manager(f"{bucket}/run", keep=2) as manager:
        for step in range(5):
            manager.save(step, TREE)
        manager.wait()
        assert manager.steps() == [3, 4]
    store = open_store(f"{bucket}/run")
    assert store.list() == ["_RUN", "step_00000003", "step_00000004"]
    assert len(store.files("")) > 4
    store.delete("step_00000003")
    assert store.list() == ["_RUN", "step_00000004"]
    assert_same(ostraka.restore(f"{bucket}/run"), TREE)


@pytest.mark.parametrize(
    "status", [429, *(pytest.param(status, marks=pytest.mark.buckets) for status in (500, 503))]
)
def test_a_store_in_trouble_is_asked_again(bucket: str, controls: Controls, status: int):
    requests = sum(controls.state()["requests"].values())
    with Manager(bucket, keep=1) as manager:
        for step in range(3):
            controls.fail(status, times=2)
            manager.save(step, TREE)
            manager.wait()
        assert manager.steps() == [2]
    controls.fail(status, times=2)
    assert_same(ostraka.restore(bucket), TREE)
    assert sum(controls.state()["requests"].values()) > requests + 8


@pytest.mark.buckets
def test_an_object_that_may_change_once_a_second(bucket: str, controls: Controls):
    """So Google says. The marker of a save is written more often."""
    controls.limit(writes_per_s=1)
    with Manager(bucket, keep=2) as manager:
        for step in range(3):
            manager.save(step, TREE)
        manager.wait()
        assert manager.steps() == [1, 2]
    ostraka.save(f"{bucket}/c", TREE)
    ostraka.save(f"{bucket}/c", TREE | {"v": np.zeros(3)})
    assert_same(ostraka.restore(f"{bucket}/c"), TREE | {"v": np.zeros(3)})
