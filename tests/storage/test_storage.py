"""Directories, and from paths to stores. `test_conformance` has what every store does."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
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
    Store,
    Traits,
    claimed,
    is_fence,
    is_inside,
    is_temporary,
    open_store,
)
from ostraka.testing import FaultyStore


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "place"))
    made.prepare()
    return made


def write_file(store: Store, name: str, data: bytes) -> None:
    writer = store.create(name, len(data))
    writer.write(0, [data])
    writer.finish()


@pytest.mark.parametrize("kind", ["local", "memory", "bucket"])
def test_a_file_that_was_replaced_is_named(kind: str, request: pytest.FixtureRequest):
    store: Store
    if kind == "memory":
        store = MemoryStore("replaced")
    else:
        given = request.getfixturevalue(kind)
        store = given if kind == "local" else open_store(given)
    store.put("note", b"1", replaces=None)
    told = f"another save has replaced {store.location}/note meanwhile"
    refused = pytest.raises(Busy, match=told + "(, or is about to)?(; try again)?$")
    with refused:
        store.put("note", b"2", replaces=None)
    with refused:
        store.delete("note", version="of another")


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


def test_a_full_disk_is_told_with_what_was_needed_and_what_is_free(local):
    writer = local.create("file", 123_456)
    told = "No space left.*needs 123,456 bytes, [0-9,]+ are free"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch("os.pwritev", side_effect=full), pytest.raises(StoreError, match=told) as caught:
        writer.write(0, [b"x"])
    writer.abandon()
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("verb", "name", "told"),
    [
        ("get", "dir", "can't read .*/place/dir: it is a directory, not a file"),
        ("put", "no/such", "can't write .*/no/such: No such file or directory"),
        ("create", "file/below", "can't create .*/file/below: "),
        ("put", "n" * 300, "can't write .*n{300}: File name too long"),
        ("delete_link", "file", "can't delete the link .*place/file: it is no link any more"),
        ("get", "../file", r"can't use the name '../file' in .*/place: it leads out of the dir"),
        ("files", "a/../../", r"can't use the name 'a/../../' in .*/place: it leads out"),
        ("is_link", "/etc/passwd", r"can't use the name '/etc/passwd' in .*: it leads out"),
        ("at", "..", r"can't use the name '..' in .*: it leads out"),
    ],
    ids=lambda value: value[:12],
)
def test_refusals_are_sentences_with_the_path(local, verb: str, name: str, told: str):
    local.put("file", b"1")
    write_file(local, "dir/file", b"1")
    data = {"put": [b"1"], "create": [1]}.get(verb, [])
    with pytest.raises(StoreError, match=told):
        getattr(local, verb)(name, *data)
    assert [file.name for file in local.files("")] == ["dir/file", "file"]
    assert local.at("dir..").list() == []


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
    assert store.prepare()
    assert store.exists()
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


@pytest.mark.parametrize(
    ("path", "location", "kind"),
    [
        ("~/runs", "/somewhere/runs", LocalStore),
        ("file:///tmp/a%20b", "/tmp/a b", LocalStore),
        ("file:///tmp/run#3", "/tmp/run#3", LocalStore),
        ("file:///tmp/run?3", "/tmp/run?3", LocalStore),
        ("file:///tmp/run;3", "/tmp/run;3", LocalStore),
        ("memory://some/run", "memory://some/run", MemoryStore),
    ],
)
def test_a_path_is_a_place(path: str, location: str, kind: type, monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    store = open_store(path)
    assert (store.location, type(store)) == (location, kind)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("file://elsewhere/run", "file://elsewhere/run"),
        ("ftp://host/run", "no store for ftp://; .*local path, .*memory://"),
        (Path("s3://bucket/run"), "makes of a URL.*pass it as text: 's3://bucket"),
        (Path("gs://bucket/run"), "makes of a URL.*pass it as text: 'gs://bucket"),
        (os.path.abspath("az://bucket/run"), "makes of a URL.*pass it as text: 'az://bucket"),
        ("a\0b", r"path 'a\\x00b' has a null character in it"),
        ("", "path is empty"),
    ],
)
def test_a_path_that_is_none_is_refused(path: Path | str, told: str):
    with pytest.raises((ValueError, UnsupportedFormat), match=told):
        open_store(path)


# Two places that overlap


@pytest.mark.parametrize(
    ("act", "to", "told"),
    [
        ("copy", "link", "can't be copied onto itself"),
        ("copy", "link/below", "can't be copied to .*/link/below, which is inside it"),
        ("merge", "link", "is a source, or inside one"),
        ("merge", "link/below", "is a source, or inside one"),
    ],
)
def test_a_link_does_not_lead_into_the_source(tmp_path: Path, act: str, to: str, told: str):
    for name in "ab":
        ostraka.save(tmp_path / name, {"w": np.arange(3.0)})
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    sources: Any = tmp_path / "a" if act == "copy" else [tmp_path / "a", tmp_path / "b"]
    with pytest.raises((PathInTheWay, ValueError), match=told):
        getattr(ostraka, act)(sources, tmp_path / to)
    assert sorted(tmp_path.rglob("*")) == before


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
