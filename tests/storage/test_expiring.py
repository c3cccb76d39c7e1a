"""Deletions in a bucket end with the claim of who makes them."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import numpy as np
import obstore
import pytest

import ostraka
from ostraka.errors import Busy
from ostraka.manager.retain import remove_step
from ostraka.manager.steps import Root
from ostraka.storage import Claim, _object, claimed, is_claim, open_store
from ostraka.storage._object import ObjectStore
from ostraka.testing import FaultyStore
from suspended import LONG_S, Suspended, hurry

BUCKETS = pytest.mark.parametrize(
    "bucket",
    ["moto", "seaweed", pytest.param("google", marks=pytest.mark.buckets)],
    indirect=True,
)
TREE = {"w": np.arange(100), "v": np.ones(3)}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast as signed requests allow, which end at whole seconds."""
    hurry(monkeypatch, 0.3, 4.5, look_every_s=0.05)


def remove(store: FaultyStore) -> None:
    remove_step(Root(store), 7, even_if_read=True)


def make_again(path: str, beside: str, *, without: str) -> None:
    """Take the place over, and make the very checkpoint that was there.

    `without` is what is lost before, so that there is something to do.
    """
    store = open_store(path)
    if without:
        store.delete(next(file.name for file in store.files("") if without in file.name))
    if without == ".safetensors":
        ostraka.repair(path, sources=beside)
    else:
        ostraka.copy(beside, path)


@BUCKETS
def test_a_removal_that_stood_still_deletes_nothing_of_a_copy_of_the_same_save(
    bucket: str, hurried: None, caplog: pytest.LogCaptureFixture
):
    """Between the check of its claim and the request: the copy has the same names and bytes."""

    def check(case: tuple[str, str, str]) -> None:
        place, name, without = case
        ostraka.save(f"{bucket}/{place}/7", TREE)
        ostraka.copy(f"{bucket}/{place}/7", f"{bucket}/{place}-beside")
        is_next = re.compile(f"remove 7/{name}").fullmatch
        removal = Suspended(
            f"{bucket}/{place}", remove, lambda verb, name: is_next(f"{verb} {name}") is not None
        )
        make_again(f"{bucket}/{place}/7", f"{bucket}/{place}-beside", without=without)
        assert isinstance(removal.finish(), Busy), (case, removal.outcome)
        assert ostraka.verify(f"{bucket}/{place}/7").ok, case

    cases = [
        ("a", "_METADATA", "_METADATA"),
        ("b", "_METADATA", ".safetensors"),
        ("c", "shards-[0-9a-f]+", ""),
    ]
    with ThreadPoolExecutor() as pool:  # Each waits for a claim to expire.
        list(pool.map(check, cases))
    assert "put back" not in caplog.text  # It was there all the time.


@BUCKETS
def test_a_request_that_was_signed_in_time_and_sent_too_late_deletes_nothing(
    bucket: str, hurried: None, monkeypatch: pytest.MonkeyPatch
):
    ostraka.save(f"{bucket}/run/7", TREE)
    ostraka.copy(f"{bucket}/run/7", f"{bucket}/beside")
    send = _object.send_deletions
    removals: Queue[Suspended] = Queue()

    def send_late(urls: Any, e_tag: Any) -> Any:
        if urls and "_METADATA?" in urls[0]:
            monkeypatch.setattr(_object, "send_deletions", send)
            removals.get(timeout=LONG_S).stop()
        return send(urls, e_tag)

    monkeypatch.setattr(_object, "send_deletions", send_late)
    removal = Suspended(f"{bucket}/run", remove)
    removals.put(removal)
    removal.run_until_stopped()
    assert removal.outcome is None
    make_again(f"{bucket}/run/7", f"{bucket}/beside", without=".safetensors")
    assert isinstance(removal.finish(), Busy), removal.outcome
    assert ostraka.verify(f"{bucket}/run/7").ok


@BUCKETS
def test_a_signed_deletion_ends_at_its_time(bucket: str):
    store = open_store(bucket)
    assert isinstance(store, ObjectStore)
    for name in ("in time", "late"):
        store.put(name, b"data")
    prefix = bucket.rpartition("/")[2]
    keys = [f"{prefix}/{name}" for name in ("in time", "late")]
    client = store._contact.client
    in_time, late = _object.sign_deletions(client, keys, time.time() + 2)
    (status,) = _object.send_deletions([in_time], None)
    assert _object.is_gone(status)
    time.sleep(2.5)
    (status,) = _object.send_deletions([late], None)
    assert 400 <= status < 500
    assert status not in (404, 408, 429)
    assert store.list() == ["late"]
    assert _object.sign_deletions(client, keys, time.time() + 0.9) == []


@pytest.mark.parametrize("bucket", ["moto", "seaweed"], indirect=True)
def test_a_deletion_by_version_is_conditional(bucket: str, monkeypatch: pytest.MonkeyPatch):
    """What is replaced after the last look stays, whoever replaces it."""
    store = open_store(bucket)
    store.put("_METADATA", b"old")
    seen = store.look("_METADATA")
    assert seen is not None
    send = _object.send_deletions

    def replace_and_send(urls: Any, e_tag: Any) -> Any:
        store.put("_METADATA", b"new")
        return send(urls, e_tag)

    with claimed(store) as claim:
        with monkeypatch.context() as patched:
            patched.setattr(_object, "send_deletions", replace_and_send)
            with pytest.raises(Busy, match="another save has replaced"):
                claim.delete("_METADATA", version=seen.version)
        assert store.get("_METADATA") == b"new"
        now = store.look("_METADATA")
        assert now is not None
        claim.delete("_METADATA", version=now.version)
        claim.delete("_METADATA", version=now.version)  # Gone is as good as deleted.
        assert store.look("_METADATA") is None


@pytest.mark.parametrize("bucket", ["moto", "seaweed", "google"], indirect=True)
def test_a_deletion_by_version_leaves_what_was_replaced_before_its_claim_was_checked(bucket: str):
    """From the check on, nobody else writes there."""
    store = open_store(bucket)
    store.put("_METADATA", b"old")
    seen = store.look("_METADATA")
    assert seen is not None

    def replace_and_check() -> float:
        store.put("_METADATA", b"new")
        return time.time() + 20

    with pytest.raises(Busy, match="another save has replaced"):
        store.delete("_METADATA", version=seen.version, check=replace_and_check)
    assert store.get("_METADATA") == b"new"


@pytest.mark.parametrize("bucket", ["moto", "azurite", "google"], indirect=True)
def test_a_file_that_is_gone_already_leaves_no_other_file(bucket: str):
    """Without a signature all are deleted at once, and some stores stop at what is gone."""
    store, other = open_store(bucket), open_store(bucket)
    for number in range(30):
        store.put(f"directory/{number:02}", b"data")
    store.put("directory2", b"data")
    store.delete("directory", check=lambda: other.delete("directory/03"))
    assert store.list() == ["directory2"]


@pytest.mark.buckets
def test_a_store_that_signs_slowly_deletes_all_in_time(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Each signature may be a request to another server."""
    store = open_store(bucket)
    for number in range(40):
        store.put(f"directory/{number}", b"data")
    sign = obstore.sign

    def sign_slowly(bucket: Any, method: Any, key: Any, lifetime: Any) -> Any:
        time.sleep(0.1)
        return sign(bucket, method, key, lifetime)

    monkeypatch.setattr(obstore, "sign", sign_slowly)
    monkeypatch.setattr(_object, "_SENT_AT_ONCE", 1)
    checks: list[float] = []

    def check() -> float:
        """As of a claim that ends in 6 s, while all signatures take 4 s."""
        checks.append(time.time())
        return checks[-1] + 6

    store.delete("directory", check=check)
    assert store.list() == []
    assert len(checks) > 1
    assert not caplog.records


@BUCKETS
def test_a_marker_that_is_renewed_at_the_last_moment_is_not_taken(bucket: str, hurried: None):
    """Its owner may have signed deletions by the new time."""
    other = Claim(open_store(bucket))
    stands_still = threading.Event()

    def before(verb: str, name: str) -> None:
        if verb == "touch" and stands_still.is_set():
            raise OSError("stands still")

    owner = Claim(FaultyStore(bucket, before=before))
    owner.take(wait=True)
    stands_still.set()

    def renew(verb: str, name: str) -> None:
        # The other has found the marker too old, and is about to remove it.
        if verb in ("put", "delete") and owner._marker.name in name and stands_still.is_set():
            stands_still.clear()
            owner.check()

    other = Claim(FaultyStore(bucket, before=renew))
    with pytest.raises(Busy, match="is under way"):
        other.take(wait=True)
    owner.check()
    owner.release()
    other.take(wait=True)
    other.release()
    assert not list(filter(is_claim, open_store(bucket).list()))


def test_a_marker_that_another_has_ended_is_not_renewed(bucket: str):
    store = open_store(bucket)
    claim = Claim(store)
    claim.take(wait=True)
    (marker,) = filter(is_claim, store.list())
    store.put(marker, b"")
    with pytest.raises(Busy, match="took this one for dead"):
        claim.check()
    assert store.get(marker) == b""


@pytest.mark.parametrize("can_sign", [True, False])
def test_a_store_deletes_directories_whether_it_signs_or_not(
    bucket: str, can_sign: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: Any) -> Any:
        raise obstore.exceptions.GenericError("no key to sign with")

    store = open_store(bucket)
    assert isinstance(store, ObjectStore)
    monkeypatch.setattr(store._contact, "can_sign", True)
    if not can_sign:
        monkeypatch.setattr(obstore, "sign", refuse)
    for name in ("a", *(f"b/{number}" for number in range(60))):
        store.put(name, b"data")
    with claimed(store) as claim:
        claim.delete("a")
        claim.delete("b")
    assert store.list() == []
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if can_sign else 1)  # It is said once.
    assert can_sign or "can't be fenced: no key to sign with" in said[0]


@pytest.mark.parametrize("ahead_s", [-500.0, 15.0, 3600.0])
def test_a_machine_whose_clock_is_wrong_deletes_in_time(
    bucket: str, ahead_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The end of a request is a time of the store; only a clock far ahead leaves none."""
    store = open_store(bucket)
    store.put("file", b"data")
    lifetimes_s: list[float] = []
    sign, now = obstore.sign, time.time

    def sign_then(bucket: Any, method: Any, keys: Any, lifetime: Any) -> Any:
        lifetimes_s.append(lifetime.total_seconds())
        return sign(bucket, method, keys, lifetime)

    with claimed(store) as claim, monkeypatch.context() as patched:
        patched.setattr(obstore, "sign", sign_then)
        patched.setattr(_object.time, "time", lambda: now() + ahead_s)
        claim.delete("file")
    assert store.list() == []
    if ahead_s > 20:
        assert not lifetimes_s
        assert "clock is ahead" in caplog.text
    else:
        assert 20 - ahead_s - 3 <= lifetimes_s[0] <= 20 - ahead_s
        assert not caplog.records
