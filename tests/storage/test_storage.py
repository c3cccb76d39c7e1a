"""What every store must do, on all of them; and what is special about directories."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import ostraka
from mounts import mounted
from ostraka.errors import Busy, PathInTheWay, StoreError, UnsupportedFormat
from ostraka.storage import (
    LocalStore,
    MemoryStore,
    Traits,
    claimed,
    is_fence,
    is_inside,
    is_temporary,
    open_store,
)
from ostraka.storage._object import ObjectStore
from ostraka.testing import FaultyStore
from servers import KINDS


@pytest.fixture(params=["local", "memory", "wrapped", "moto", "seaweed", "azurite"])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore(f"test-{uuid.uuid4().hex}")
    if request.param in KINDS:
        server = request.getfixturevalue("servers")(request.param)
        patch = request.getfixturevalue("monkeypatch")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        return open_store(f"{server.url}/{uuid.uuid4().hex}/place")
    local = LocalStore(str(tmp_path / "place"))
    return local if request.param == "local" else FaultyStore(local)


@pytest.fixture
def local(tmp_path):
    made = LocalStore(str(tmp_path / "place"))
    made.prepare()
    return made


def again(store):
    """Another object for the same place."""
    return open_store(store.location)


def write_file(store, name, data):
    writer = store.create(name, len(data))
    writer.write(0, [data])
    writer.finish()


def read_file(store, name):
    reader = store.open(name)
    try:
        data = bytearray(reader.size)
        assert reader.read_into(0, [data]) == reader.size
        return bytes(data)
    finally:
        reader.close()


def names_in(store):
    """Without empty directories, which SeaweedFS goes on listing for some time."""
    return [name for name in store.list() if store.look(name) or store.files(f"{name}/")]


# Conformance


def test_a_place_is_not_there_until_it_is_prepared(store):
    assert not store.exists()
    assert store.list() == []
    assert store.prepare()
    assert store.list() == []
    if not isinstance(store, ObjectStore):  # There is nothing empty in a bucket.
        assert not store.prepare()
    store.put("note", b"")
    assert not store.prepare()
    assert again(store).list() == ["note"]


def test_a_place_is_removed_if_it_is_empty(store):
    store.remove_if_empty()
    store.prepare()
    write_file(store, "d/file", b"kept")
    store.remove_if_empty()
    assert read_file(store, "d/file") == b"kept"
    store.delete("d")
    store.remove_if_empty()
    assert not store.exists()
    assert names_in(store) == []
    assert store.prepare()


def test_put_then_get(store):
    store.prepare()
    for data in (b"", b"\x00\xff", b"x" * 3_000_000):
        store.put("note", data)
        assert store.get("note") == data
        assert again(store).get("note") == data
    assert store.list() == ["note"]


@pytest.mark.parametrize("verb", ["get", "open"])
@pytest.mark.parametrize("name", ["nothing", "no/such", "file/below"])
def test_a_missing_name_is_not_found(store, verb, name):
    store.prepare()
    store.put("file", b"1")
    with pytest.raises(FileNotFoundError, match=name):
        getattr(store, verb)(name)


@pytest.mark.parametrize("verb", ["get", "open"])
def test_nothing_is_found_in_a_place_that_is_not_there(store, verb):
    with pytest.raises(FileNotFoundError, match="nothing"):
        getattr(store, verb)("nothing")


def test_readers_see_one_whole_put_or_the_other(store):
    store.prepare()
    choices = [bytes([n]) * size for n, size in ((1, 70_000), (2, 90_000))]
    store.put("note", choices[0])
    stop = threading.Event()
    odd = []

    def read():
        while not stop.is_set():
            found = again(store).get("note")
            if found not in choices:
                odd.append(len(found))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for n in range(60):
        store.put("note", choices[n % 2])
    stop.set()
    for thread in readers:
        thread.join()
    assert odd == []
    assert store.list() == ["note"]


def test_a_file_is_written_in_any_order(store):
    store.prepare()
    data = os.urandom(10_000)
    writer = store.create("dir/file", len(data))
    writer.write(5_000, [data[5_000:]])
    writer.write(0, [data[:100], data[100:200]])
    writer.write(200, [data[200:5_000]])
    writer.finish()
    assert read_file(store, "dir/file") == data
    assert store.get("dir/file") == data


def test_a_directory_comes_with_its_first_file_and_is_listed_once(store):
    store.prepare()
    write_file(store, "b/2", b"2")
    write_file(store, "b/1", b"1")
    store.put("b/index", b"0")
    store.put("a", b"a")
    assert store.list() == ["a", "b"]


@pytest.mark.parametrize("size", [10_000, 20 << 20])
def test_a_file_is_replaced_as_one_event(store, size):
    store.prepare()
    old, new = b"what was there", os.urandom(size)
    write_file(store, "dir/file", old)
    for finish in (False, True):
        writer = store.create("dir/file", size, replace=True)
        writer.write(0, [new[: size // 2]])
        assert read_file(store, "dir/file") == old
        writer.write(size // 2, [new[size // 2 :]])
        assert store.get("dir/file") == old
        writer.finish() if finish else writer.abandon()
        assert store.get("dir/file") == (new if finish else old)
        assert [file.name for file in store.files("dir/")] == ["dir/file"]
    before = store.look("dir/file").version
    write_file_over(store, "dir/file", old)
    assert read_file(again(store), "dir/file") == old
    assert store.look("dir/file").version != before
    write_file_over(store, "new/file", new[:100])  # and if there is nothing
    assert store.get("new/file") == new[:100]


def write_file_over(store, name, data):
    writer = store.create(name, len(data), replace=True)
    writer.write(0, [data])
    writer.finish()


def test_a_small_file_that_nothing_depends_on(store):
    store.prepare()
    write_file(store, "dir/file", b"")
    for data in (b"", b"some text", os.urandom(100_000)):
        store.put("dir/note", data, durable=False)
        assert store.get("dir/note") == data
        store.delete("dir/note")


@pytest.mark.parametrize(
    "kind",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: np.frombuffer(data, np.uint16).reshape(2, -1),
    ],
)
def test_any_contiguous_buffer_is_written(store, kind):
    store.prepare()
    data = os.urandom(600)
    write = store.create("file", 600)
    write.write(0, [kind(data)])
    write.finish()
    assert store.get("file") == data


def test_empty_buffers_are_nothing(store):
    store.prepare()
    writer = store.create("file", 3)
    writer.write(0, [b"", np.empty(0, np.uint8), b"abc", np.empty((0, 4), np.uint8)])
    writer.write(3, [])
    writer.finish()
    reader = store.open("file")
    first, second = bytearray(1), bytearray(2)
    assert reader.read_into(0, [bytearray(0), first, np.empty((3, 0), np.uint8), second]) == 3
    assert reader.read_into(0, []) == 0
    reader.close()
    assert (bytes(first), bytes(second)) == (b"a", b"bc")


def test_an_empty_file_is_a_file(store):
    store.prepare()
    store.create("file", 0).finish()
    reader = store.open("file")
    assert reader.size == 0
    reader.close()
    assert store.get("file") == b""
    assert store.list() == ["file"]


def test_thousands_of_buffers_go_at_once(store):
    store.prepare()
    pieces = [os.urandom(n % 7 + 1) for n in range(3_000)]
    whole = b"".join(pieces)
    writer = store.create("file", len(whole))
    writer.write(0, pieces)
    writer.finish()
    buffers = [bytearray(len(piece)) for piece in pieces]
    reader = store.open("file")
    assert reader.read_into(0, buffers) == len(whole)
    reader.close()
    assert buffers == pieces


def test_reading_stops_at_the_end_of_the_file(store):
    store.prepare()
    write_file(store, "file", b"0123456789")
    reader = store.open("file")
    assert reader.size == 10
    first, second = bytearray(4), bytearray(b"\xee" * 8)
    assert reader.read_into(2, [first, second]) == 8
    assert (bytes(first), bytes(second)) == (b"2345", b"6789\xee\xee\xee\xee")
    assert reader.read_into(10, [bytearray(1)]) == 0
    assert reader.read_into(99, [bytearray(1)]) == 0
    reader.close()


def test_threads_write_and_read_one_file(store):
    store.prepare()
    data = os.urandom(800_000)
    step = 10_000
    writer = store.create("file", len(data))
    in_threads(lambda at: writer.write(at, [data[at : at + step]]), range(0, len(data), step))
    writer.finish()
    found = bytearray(len(data))
    reader = store.open("file")
    view = memoryview(found)
    in_threads(lambda at: reader.read_into(at, [view[at : at + step]]), range(0, len(data), step))
    reader.close()
    assert found == data


def in_threads(work, items):
    threads = [threading.Thread(target=work, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_delete_removes_a_file_or_all_of_a_directory_and_nothing_else(store):
    store.prepare()
    for name in ("a/1", "a/b/2", "ab/3", "a.tmp"):
        write_file(store, name, b"x")
    store.delete("a")
    assert names_in(store) == ["a.tmp", "ab"]
    assert store.get("ab/3") == b"x"
    store.delete("a.tmp")
    store.delete("ab/3")
    with pytest.raises(FileNotFoundError, match="ab/3"):
        store.get("ab/3")


@pytest.mark.parametrize("name", ["nothing", "no/such", "file/below"])
def test_deleting_what_is_not_there_is_fine(store, name):
    store.prepare()
    store.put("file", b"1")
    store.delete(name)
    assert store.list() == ["file"]


def test_deleting_where_there_is_no_place_is_fine(store):
    store.delete("nothing")
    assert not store.exists()
    assert store.list() == []


def test_a_version_is_deleted_and_no_other(store):
    store.prepare()
    store.put("a", b"one")
    seen = store.look("a")
    store.put("a", b"two")
    with pytest.raises(Busy, match="another save has replaced .*a meanwhile"):
        store.delete("a", version=seen.version)
    assert store.get("a") == b"two"
    store.delete("a", version=store.look("a").version)
    assert store.look("a") is None
    store.delete("a", version=seen.version)  # It is gone already.


@pytest.mark.parametrize("name", ["a", "d"])
def test_a_deletion_is_checked_before_it_happens(store, name):
    class Refused(Exception):
        pass

    def refuse() -> None:
        raise Refused("no")

    store.prepare()
    store.put("a", b"one")
    write_file(store, "d/b", b"two")
    with pytest.raises(Refused, match="no"):
        store.delete(name, check=refuse)
    assert store.list() == ["a", "d"]
    assert store.get("d/b") == b"two"
    store.delete(name, check=lambda: None)
    assert names_in(store) == [other for other in ("a", "d") if other != name]


@pytest.mark.parametrize("name", ["_METADATA", "d", "d/b"])
def test_a_deletion_fails_once_its_fence_is_gone(local, name):
    """As whoever takes the place over does, after the check."""

    def take_over() -> None:
        (fence,) = filter(is_fence, local.list())
        local.delete(fence)

    local.prepare()
    local.put("_METADATA", b"one")
    write_file(local, "d/b", b"two")
    with pytest.raises(Busy, match="is not deleted: this process stood still"):
        local.delete(name, check=take_over)
    assert local.list() == ["_METADATA", "d"]
    assert local.get("d/b") == b"two"


def test_an_abandoned_file_can_be_deleted_and_written_again(store):
    store.prepare()
    writer = store.create("dir/file", 10)
    writer.write(0, [b"123"])
    writer.abandon()
    store.delete("dir")
    write_file(store, "dir/file", b"whole")
    assert store.get("dir/file") == b"whole"


def test_abandoning_a_finished_file_does_no_harm(store):
    store.prepare()
    writer = store.create("file", 3)
    writer.write(0, [b"abc"])
    writer.finish()
    writer.abandon()
    assert store.get("file") == b"abc"


# What may be replaced


def test_a_put_that_must_be_the_first(store):
    store.prepare()
    store.put("note", b"1", replaces=None)
    with pytest.raises(Busy, match="another save has replaced .*/note meanwhile"):
        store.put("note", b"2", replaces=None)
    assert store.get("note") == b"1"
    assert store.list() == ["note"]


def test_a_put_that_replaces_what_was_seen(store):
    store.prepare()
    store.put("note", b"1")
    seen = store.look("note").version
    store.put("note", b"2", replaces=seen)
    assert store.get("note") == b"2"
    with pytest.raises(Busy, match="another save has replaced .*/note meanwhile"):
        store.put("note", b"3", replaces=seen)
    store.delete("note")
    with pytest.raises(Busy, match="another save has replaced .*/note meanwhile"):
        store.put("note", b"3", replaces=seen)
    assert store.list() == []


def test_of_many_puts_that_must_be_the_first_one_is(store):
    store.prepare()
    barrier = threading.Barrier(8)
    outcomes = []

    def put(number):
        barrier.wait()
        try:
            again(store).put("note", b"%d" % number, replaces=None)
            outcomes.append(number)
        except Busy:
            pass

    in_threads(put, range(8))
    assert [store.get("note")] == [b"%d" % number for number in outcomes]


def test_a_put_is_checked_before_it_shows(store):
    store.prepare()
    store.put("note", b"1")

    def refuse():
        assert store.get("note") == b"1"
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        store.put("note", b"2", check=refuse)
    assert store.get("note") == b"1"
    assert store.list() == ["note"]


def test_a_version_changes_with_the_file_alone(store):
    store.prepare()
    assert store.look("note") is None
    store.put("note", b"1")
    seen = store.look("note")
    assert (seen.name, seen.size) == ("note", 1)
    store.put("other", b"1")
    found = again(store).look("note")
    assert found is not None
    assert found.version == seen.version
    store.put("note", b"2")
    assert store.look("note").version != seen.version


def test_touch_makes_a_file_and_sets_its_time(store):
    store.prepare()
    store.touch("mark", create=True)
    first = store.look("mark")
    with pytest.raises(StoreError, match="mark"):
        store.touch("mark", create=True)

    def is_later():
        store.touch("mark", create=False)
        return store.look("mark").changed_s > first.changed_s

    wait_until(is_later)
    assert store.look("mark").version != first.version
    store.delete("mark")
    with pytest.raises(FileNotFoundError, match="mark"):
        store.touch("mark", create=False)
    assert store.list() == []


# What is there


def test_files_by_prefix(store):
    store.prepare()
    for name in ("a/1", "a/b/2", "ab", "b/3", "_x-1", "_x-2"):
        write_file(store, name, b"x" * len(name))
    found = {prefix: [f.name for f in store.files(prefix)] for prefix in ("", "a", "a/", "_x-")}
    assert found == {
        "": ["_x-1", "_x-2", "a/1", "a/b/2", "ab", "b/3"],
        "a": ["a/1", "a/b/2", "ab"],
        "a/": ["a/1", "a/b/2"],
        "_x-": ["_x-1", "_x-2"],
    }
    assert [f.name for f in store.files("a/b/")] == ["a/b/2"]
    assert [f.name for f in store.files("a/b/2")] == ["a/b/2"]
    assert {f.size - len(f.name) for f in store.files("")} == {0}
    assert store.files("nothing/") == store.files("ab/") == []
    assert store.files("ab")[0].version == store.look("ab").version


def test_a_place_that_is_not_there_has_no_files(store):
    assert store.files("") == []
    assert store.look("note") is None


def test_a_place_below(store):
    store.prepare()
    below = store.at("step_1")
    assert below.location == f"{store.location}/step_1" == str(below)
    assert not below.exists()
    assert below.prepare()
    if not isinstance(store, ObjectStore):
        assert store.list() == ["step_1"]
    below.put("note", b"1")
    assert store.get("step_1/note") == b"1"
    assert store.at("step_1").list() == ["note"]
    with claimed(store), claimed(below):
        pass
    assert not store.is_link("step_1")
    store.delete("step_1")
    assert not below.exists()
    assert names_in(store) == []


def test_a_store_says_how_it_likes_to_be_written(store):
    assert store.traits.at_once >= 1


def test_a_store_may_stand_where_a_path_may(store):
    tree = {"w": np.arange(1000), "n": 1}
    ostraka.save(store, tree)
    assert ostraka.restore(store)["n"] == 1
    ostraka.save_async(store, {**tree, "n": 2}).wait()
    checkpoint = ostraka.open(store)
    assert (checkpoint["n"], checkpoint.path) == (2, store.location)
    assert checkpoint["w"][:3].tolist() == [0, 1, 2]
    assert ostraka.verify(store).ok
    assert ostraka.plan(store).total_bytes == ostraka.plan(store.location).total_bytes
    assert open_store(store) is store


def test_the_writer_keeps_to_what_the_store_likes(tmp_path):
    """In order, each file by one thread."""
    written = {}

    class Writer:
        def __init__(self, name, writer):
            self.name, self.writer = name, writer

        def write(self, offset, buffers):
            size = sum(memoryview(buffer).nbytes for buffer in buffers)
            with lock:
                order = written.setdefault(self.name, [])
                order.append((offset, size, threading.get_ident()))
            self.writer.write(offset, buffers)

        def __getattr__(self, name):
            return getattr(self.writer, name)

    class Watched(FaultyStore):
        def create(self, name, size, *, beside=1, replace=False) -> Any:
            return Writer(name, super().create(name, size, beside=beside, replace=replace))

    lock = threading.Lock()
    tree = {str(n): np.ones(3_000_000, np.float32) for n in range(8)}
    store = Watched(tmp_path / "in-order", traits=Traits(at_once=3, in_any_order=False))
    ostraka.save(store, tree)
    for order in written.values():
        assert [offset for offset, _, _ in order] == sorted(offset for offset, _, _ in order)
        assert len({thread for _, _, thread in order}) == 1
    assert ostraka.verify(tmp_path / "in-order").ok


# One writer at a time


def test_one_writer_holds_a_place(store):
    store.prepare()
    busy = pytest.raises(Busy, match=f"another save to {store.location} is under way")
    with claimed(store), busy, claimed(again(store)):
        pass
    with claimed(again(store)):
        pass


def test_the_hold_ends_with_an_error(store):
    store.prepare()

    class Interrupted(Exception):
        pass

    with pytest.raises(Interrupted, match="stop"), claimed(store):
        raise Interrupted("stop")
    with claimed(store):
        pass


def test_of_many_threads_one_holds_the_place(store):
    store.prepare()
    barrier = threading.Barrier(8)
    outcomes = []

    def hold(_):
        barrier.wait()
        try:
            with claimed(again(store)):
                outcomes.append("held")
                # Nobody lets go before all have tried.
                wait_until(lambda: len(outcomes) == 8)
        except Busy:
            outcomes.append("busy")

    in_threads(hold, range(8))
    assert sorted(outcomes) == ["busy"] * 7 + ["held"]


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_other_places_are_not_held(store):
    other = open_store(f"{store.location}-other")
    store.prepare()
    other.prepare()
    with claimed(store), claimed(other):
        pass


def test_what_is_held_can_be_read_and_written(store):
    store.prepare()
    with claimed(store):
        again(store).put("note", b"1")
        assert again(store).get("note") == b"1"


def test_a_save_to_a_place_that_is_held_is_busy(store):
    ostraka.save(store.location, {"a": 1})
    with claimed(store):
        with pytest.raises(Busy, match="another save to .* is under way; wait for it"):
            ostraka.save(store.location, {"a": 2})
        assert ostraka.restore(store.location) == {"a": 1}
    ostraka.save(store.location, {"a": 2})
    assert ostraka.restore(store.location) == {"a": 2}


# Directories

HOLD = """
import sys
from ostraka.storage import LocalStore, claimed
with claimed(LocalStore(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

HOLD_AND_FORK = """
import os, sys, time
from ostraka.storage import LocalStore, claimed
with claimed(LocalStore(sys.argv[1])):
    if os.fork() == 0:
        print("held", flush=True)
        os.close(1)
        sys.stdin.read()  # outlives its parent, as a data worker may, until the test ends
        os._exit(0)
    time.sleep(600)
"""


@contextmanager
def holder(location, script=HOLD):
    """Another process that holds a place until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, location],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("script", [HOLD, HOLD_AND_FORK], ids=["alone", "with a child"])
def test_another_process_holds_a_place_until_it_is_killed(local, script):
    with holder(local.location, script) as process:
        with pytest.raises(Busy, match="another save to"), claimed(local):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with claimed(local):
            pass
    assert local.list() == []


def test_a_put_leaves_nothing_else_behind(local):
    local.put("note", b"1")
    local.put("note", b"2")
    assert os.listdir(local.location) == ["note"]


def test_a_failed_put_leaves_what_was_there(local):
    local.put("note", b"before")
    with (
        limited_file_size(10),
        pytest.raises(StoreError, match="can't write .*note: File too large"),
    ):
        local.put("note", b"x" * 100)
    assert local.get("note") == b"before"
    assert local.list() == ["note"]


@contextmanager
def limited_file_size(nbytes):
    """The kernel writes up to the limit, then refuses: as a disk does that runs full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_a_write_that_the_kernel_cuts_short_goes_on_and_then_fails(local):
    writer = local.create("file", 30_000)
    refused = pytest.raises(StoreError, match="can't write .*file: File too large")
    with limited_file_size(10_000), refused as caught:
        writer.write(0, [b"a" * 6_000, b"b" * 6_000, b"c" * 18_000])
    writer.abandon()
    assert caught.value.errno == errno.EFBIG
    assert local.get("file") == b"a" * 6_000 + b"b" * 4_000


def test_short_writes_and_reads_are_completed(local, monkeypatch):
    """No file system here cuts calls short, so the calls themselves do."""
    pwritev, preadv = os.pwritev, os.preadv

    def cut(buffers, nbytes):
        first = memoryview(buffers[0])
        return [first[:nbytes]]

    monkeypatch.setattr(os, "pwritev", lambda f, b, at: pwritev(f, cut(b, 7), at))
    monkeypatch.setattr(os, "preadv", lambda f, b, at: preadv(f, cut(b, 5), at))
    pieces = [os.urandom(n) for n in (1, 7, 20, 3, 16)]
    writer = local.create("file", 47)
    writer.write(0, pieces)
    writer.finish()
    buffers = [bytearray(n) for n in (13, 1, 33)]
    reader = local.open("file")
    assert reader.read_into(0, buffers) == 47
    reader.close()
    assert b"".join(buffers) == b"".join(pieces)


def test_a_full_disk_is_told_with_what_was_needed_and_what_is_free(local, monkeypatch):
    def refuse(file, buffers, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = local.create("file", 123_456)
    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(
        StoreError, match="No space left.*needs 123,456 bytes, [0-9,]+ are free"
    ) as e:
        writer.write(0, [b"x"])
    writer.abandon()
    assert e.value.errno == errno.ENOSPC


def test_refusals_are_sentences_with_the_path(local, tmp_path):
    os.mkdir(tmp_path / "place" / "dir")
    with pytest.raises(StoreError, match="can't read .*/place/dir: it is a directory, not a file"):
        local.get("dir")
    with pytest.raises(StoreError, match="can't write .*/no/such: No such file or directory"):
        local.put("no/such", b"1")
    local.put("file", b"1")
    with pytest.raises(StoreError, match="can't create .*/file/below: "):
        local.create("file/below", 1)
    with pytest.raises(StoreError, match="can't write .*n{300}: File name too long"):
        local.put("n" * 300, b"1")


def test_a_file_that_is_too_large_is_not_read(store):
    store.prepare()
    store.put("file", b"x" * 1000)
    assert len(store.get("file", 1000)) == 1000
    with pytest.raises(StoreError, match="can't read .*file: it has 1,000 bytes, and may have 999"):
        store.get("file", 999)
    again(store).delete("file")


@pytest.mark.parametrize("below", ["", "/below", "/below/deeper"])
def test_a_file_in_the_way_is_named(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PathInTheWay, match=f"can't make the directory .*/file{below}: a file"):
        LocalStore(f"{tmp_path}/file{below}").prepare()
    assert (tmp_path / "file").read_text() == "mine"


PREPARE_AS_NOBODY = """
import os, sys
from ostraka.errors import StoreError
from ostraka.storage import LocalStore
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)  # root may write anywhere
try:
    LocalStore(sys.argv[1]).prepare()
except StoreError as error:
    print(error)
"""


def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    tmp_path.chmod(0o711)
    said = subprocess.run(
        # From within: the directories above are not for everybody, and not for this test to open.
        [sys.executable, "-c", PREPARE_AS_NOBODY, closed.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == "can't write to the directory closed: Permission denied\n"


def test_a_file_system_that_may_not_be_written_is_named(tmp_path):
    with mounted(tmp_path / "sealed", options="ro", for_what="a read-only disk") as place:
        with pytest.raises(
            StoreError, match="can't write to the directory .*sealed: Read-only file system"
        ):
            LocalStore(str(place)).prepare()
        with pytest.raises(
            StoreError, match="can't make the directory .*sealed/c: Read-only file system"
        ):
            LocalStore(str(place / "c")).prepare()


def test_a_place_that_its_last_holder_has_removed_is_not_held(local):
    real = fcntl.flock

    def removed_meanwhile(held: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            os.rmdir(local.location)
        real(held, how)

    with (
        patch.object(fcntl, "flock", removed_meanwhile),
        pytest.raises(Busy, match="another save has just removed .*place; try again"),
        claimed(local),
    ):
        raise AssertionError("it is held")


def test_parents_are_made(tmp_path):
    store = LocalStore(str(tmp_path / "a" / "b" / "c"))
    store.prepare()
    assert store.list() == []


def test_a_file_is_no_place(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert not LocalStore(str(tmp_path / "file")).exists()


def test_a_link_is_deleted_and_what_it_points_to_is_not(local, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").write_text("mine")
    os.symlink(target, tmp_path / "place" / "link")
    local.delete("link")
    assert local.list() == []
    assert (target / "kept").read_text() == "mine"


def test_a_replacement_that_is_not_finished(local):
    write_file(local, "d/file", b"old")
    writer = local.create("d/file", 3, replace=True)
    writer.write(0, [b"new"])
    (left,) = [file.name for file in local.files("d/") if file.name != "d/file"]
    assert is_temporary(left, "d/file")  # As after a kill.
    assert local.get("d/file") == b"old"
    with (
        patch("os.replace", side_effect=OSError(errno.EIO, "Input/output error")),
        pytest.raises(StoreError, match="can't replace .*d/file: Input/output error"),
    ):
        writer.finish()
    assert [file.name for file in local.files("d/")] == ["d/file"]
    assert local.get("d/file") == b"old"


# From paths to stores


def test_a_relative_path_is_fixed_when_it_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("runs/7")
    monkeypatch.chdir("/")
    assert store.location == str(tmp_path / "runs" / "7")
    assert open_store(Path("runs")).location == "/runs"


def test_the_home_directory_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert open_store("~/runs").location == "/somewhere/runs"


def test_a_file_url_is_a_path():
    assert open_store("file:///tmp/a%20b").location == "/tmp/a b"
    assert isinstance(open_store("file:///tmp/a"), LocalStore)


@pytest.mark.parametrize("name", ["run#3", "run?3", "run;3"])
def test_a_file_url_never_means_another_path(name):
    assert open_store(f"file:///tmp/{name}").location == f"/tmp/{name}"


def test_a_file_url_of_another_host_is_refused():
    with pytest.raises(ValueError, match="file://elsewhere/run"):
        open_store("file://elsewhere/run")


def test_a_memory_url_is_a_name():
    store = open_store("memory://some/run")
    assert isinstance(store, MemoryStore)
    assert store.location == "memory://some/run"


def test_an_unknown_store_is_named_with_those_there_are():
    with pytest.raises(UnsupportedFormat, match="no store for ftp://; .*local path, .*memory://"):
        open_store("ftp://host/run")


@pytest.mark.parametrize(
    "path", [Path("s3://bucket/run"), Path("gs://bucket/run"), os.path.abspath("az://bucket/run")]
)
def test_a_url_that_became_a_path_is_refused(path: Path | str):
    with pytest.raises(ValueError, match=r"makes of a URL.*pass it as text: '(s3|gs|az)://bucket"):
        open_store(path)


def test_a_path_with_a_null_character_is_refused():
    with pytest.raises(ValueError, match=r"path 'a\\x00b' has a null character in it"):
        open_store("a\0b")


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="path is empty"):
        open_store("")


# Two places that overlap


def test_a_copy_through_a_link_does_not_get_into_its_source(tmp_path: Path):
    ostraka.save(tmp_path / "run", {"w": np.arange(3)})
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PathInTheWay, match="can't be copied onto itself"):
        ostraka.copy(tmp_path / "run", tmp_path / "link")
    with pytest.raises(PathInTheWay, match="can't be copied to .*/link/below, which is inside it"):
        ostraka.copy(tmp_path / "run", tmp_path / "link" / "below")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_merge_through_a_link_does_not_replace_its_source(tmp_path: Path):
    for name in "ab":
        ostraka.save(tmp_path / name, {"w": np.arange(3.0)})
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    for target in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(ValueError, match="is a source, or inside one"):
            ostraka.merge([tmp_path / "a", tmp_path / "b"], target)
    assert sorted(tmp_path.rglob("*")) == before


def test_stores_of_one_name_on_two_servers_do_not_overlap(servers: Callable[[str], Any]):
    from obstore.store import S3Store

    options: Any = {
        "client_options": {"allow_http": True},
        "prefix": os.urandom(8).hex(),
        "access_key_id": "testing",
        "secret_access_key": "testing",
        "region": "us-east-1",
    }
    here, there = (
        S3Store("ostraka-tests", endpoint=servers(kind).endpoint, **options)
        for kind in ("moto", "seaweed")
    )
    ostraka.save(here, {"w": np.arange(3)})
    assert ostraka.convert(here, there, to="ostraka").arrays == 1
    assert ostraka.restore(there)["w"].tolist() == [0, 1, 2]


def test_places_that_overlap(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    local, memory = LocalStore(str(tmp_path / "a")), MemoryStore("a")
    assert is_inside(local.at("b"), local)
    assert is_inside(local, local)
    assert is_inside(LocalStore(str(tmp_path / "link" / "b")), local)
    assert not is_inside(local, local.at("b"))
    assert not is_inside(LocalStore(f"{tmp_path}/ab"), local)
    assert is_inside(memory.at("b"), memory)
    assert not is_inside(MemoryStore("ab"), memory)
    assert not is_inside(memory, local)
    assert not is_inside(local, memory)
    assert is_inside(local, LocalStore("/"))
