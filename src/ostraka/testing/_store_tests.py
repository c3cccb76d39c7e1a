"""The checks that every store must pass, as a class for pytest.

`import ostraka.testing` does not import this module: it needs pytest.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostraka.errors import Busy, SaveFailed, StoreError, TooLarge
from ostraka.integrity import verify
from ostraka.layout.shard_file import METADATA_NAME
from ostraka.manager import Manager
from ostraka.planner import plan
from ostraka.reading.lazy import open_checkpoint
from ostraka.restoring.restore import restore
from ostraka.saving.save import save, save_async
from ostraka.storage import Store, Traits, claimed, is_fence, open_store
from ostraka.testing._stores import FaultyStore
from ostraka.transfer import copy

_THREADS = 8
_DEADLINE_S = 60.0
_TAKEOVER_S = 0.2
"""How long a check waits for a thread that a store may rightly keep waiting."""
_TREE: dict[str, Any] = {"w": np.arange(3000, dtype=np.float32), "n": 1}


class StoreTests:
    """The conformance suite of stores: subclass it, and pytest runs every check on your store.

    Define `make_store`. Each check gets a directory of its own.

    Example:
        >>> class TestShelfStore(ostraka.testing.StoreTests):
        ...     def make_store(self, directory):
        ...         return ShelfStore(directory / "shelf")
    """

    directory: Path
    """The directory of the running check, as `make_store` receives it."""

    def make_store(self, directory: Path) -> Store:
        """Return a store. Two calls with one directory return two objects for the same store.

        Args:
            directory: An empty directory that no other check uses. Put your files there, or take
                its name for a name of your own. The store must not exist yet, so don't call
                `prepare`.
        """
        raise NotImplementedError(f"define {type(self).__name__}.make_store")

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """The store of a check."""
        self.directory = tmp_path
        return self.make_store(tmp_path)

    def again(self) -> Store:
        """Return another object for the store of this check, as another process would have."""
        return self.make_store(self.directory)

    # The place

    def test_it_has_every_verb(self, store: Store):
        verbs = (name for name in vars(Store) if name[0] != "_")
        assert [name for name in verbs if not hasattr(store, name)] == []
        assert open_store(store) is store
        assert str(store) == store.location
        assert isinstance(store.traits, Traits)
        assert store.traits.at_once >= 1
        assert store.traits.reads_at_once >= 1

    def test_a_place_does_not_exist_until_it_is_prepared(self, store: Store):
        assert not store.exists()
        assert store.list() == store.files("") == []
        assert store.look("note") is None
        store.delete("nothing")
        store.remove_if_empty()
        assert not store.exists()
        assert store.prepare()
        assert store.list() == []
        # A store such as a bucket exists with its first file.
        assert store.prepare() is not store.exists()
        store.put("note", b"")
        assert store.exists()
        assert not store.prepare()
        assert self.again().list() == ["note"]

    def test_a_place_is_removed_if_it_is_empty(self, store: Store):
        store.prepare()
        write(store, "d/file", b"kept")
        store.remove_if_empty()
        assert read(store, "d/file") == b"kept"
        store.delete("d")
        store.remove_if_empty()
        assert not store.exists()
        assert names_in(store) == []
        assert store.prepare()

    def test_a_place_below(self, store: Store):
        store.prepare()
        below = store.at("step_1")
        assert below.location == f"{store.location}/step_1" == str(below)
        assert not below.exists()
        assert below.prepare()
        assert store.list() == (["step_1"] if below.exists() else [])
        below.put("note", b"1")
        assert store.get("step_1/note") == b"1"
        assert self.again().at("step_1").list() == ["note"]
        assert store.at("step").list() == []
        store.delete("step_1")
        assert not below.exists()
        assert names_in(store) == []

    def test_no_name_leads_out_of_a_place(self, store: Store):
        store.prepare()
        store.put("kept", b"1")
        inner = store.at("inner")
        inner.prepare()
        inner.put("mine", b"2")
        for name in ("../kept", "none/../../kept", "..", "/kept"):
            for reading in (inner.get, inner.open, lambda name: inner.at(name).get("kept")):
                with pytest.raises((OSError, ValueError), match=r"\S"):
                    reading(name)
            for changing in (
                lambda name: inner.look(name) and fail(f"look({name!r}) found a file outside"),
                lambda name: inner.put(name, b"3"),
                lambda name: write(inner, name, b"3"),
                lambda name: write(inner, name, b"3", replace=True),
                lambda name: inner.touch(name, create=False),
                inner.delete,
            ):
                with suppress(OSError, ValueError):
                    changing(name)
            outside = [file.name for file in store.files("") if file.name[:6] != "inner/"]
            assert (name, outside, store.get("kept")) == (name, ["kept"], b"1")
            assert [name for name in store.list() if name != "inner"] == ["kept"]

    # Small files

    def test_put_then_get(self, store: Store):
        store.prepare()
        for data in (b"", b"\x00\xff", b"x" * 3_000_000):
            store.put("note", data)
            assert store.get("note") == self.again().get("note") == data
        assert store.list() == ["note"]

    def test_a_missing_name_raises_file_not_found(self, store: Store):
        for verb in (store.get, store.open):
            with pytest.raises(FileNotFoundError, match="nothing"):
                verb("nothing")
        store.prepare()
        store.put("file", b"1")
        for name in ("nothing", "no/such", "file/below"):
            for verb in (store.get, store.open):
                with pytest.raises(FileNotFoundError, match=name):
                    verb(name)
            assert store.look(name) is None

    def test_a_file_that_is_too_large_is_not_read(self, store: Store):
        store.prepare()
        store.put("file", b"x" * 1000)
        assert len(store.get("file", 1000)) == 1000
        with pytest.raises(TooLarge, match="file: it has 1,000 bytes, and may have 999"):
            store.get("file", 999)

    def test_a_file_that_nothing_depends_on(self, store: Store):
        store.prepare()
        write(store, "dir/file", b"")
        for data in (b"", b"some text", os.urandom(100_000)):
            store.put("dir/note", data, durable=False)
            assert store.get("dir/note") == data
            store.delete("dir/note")

    def test_readers_see_one_whole_put_or_the_other(self, store: Store):
        store.prepare()
        choices = [bytes([n]) * size for n, size in ((1, 70_000), (2, 90_000))]
        store.put("note", choices[0])
        stop = threading.Event()
        odd: list[Any] = []

        def look_on(reader: Store) -> None:
            while not stop.is_set() and not odd:
                try:
                    found = reader.get("note")
                except Exception as error:
                    odd.append(error)
                else:
                    odd.extend([] if found in choices else [len(found)])

        readers = [threading.Thread(target=look_on, args=(self.again(),)) for _ in range(2)]
        for thread in readers:
            thread.start()
        try:
            for n in range(60):
                store.put("note", choices[n % 2])
        finally:
            stop.set()
            for thread in readers:
                thread.join()
        assert odd == []
        assert store.list() == ["note"]

    # The conditions of a put

    def test_a_put_that_must_be_the_first(self, store: Store):
        store.prepare()
        store.put("note", b"1", replaces=None)
        with pytest.raises(Busy, match="note"):
            store.put("note", b"2", replaces=None)
        assert store.get("note") == b"1"
        assert store.list() == ["note"]

    def test_a_put_that_replaces_what_was_seen(self, store: Store):
        store.prepare()
        store.put("note", b"1")
        seen = found(store, "note").version
        store.put("note", b"2", replaces=seen)
        assert store.get("note") == b"2"
        with pytest.raises(Busy, match="note"):
            store.put("note", b"3", replaces=seen)
        store.delete("note")
        with pytest.raises(Busy, match="note"):
            store.put("note", b"3", replaces=seen)
        assert store.list() == []

    def test_of_many_first_puts_one_wins(self, store: Store):
        store.prepare()
        won: list[bytes] = []
        barrier = threading.Barrier(_THREADS)

        def put(number: int) -> None:
            mine = self.again()
            barrier.wait(_DEADLINE_S)
            with suppress(Busy):
                mine.put("note", b"%d" % number, replaces=None)
                won.append(b"%d" % number)

        in_threads(put, range(_THREADS))
        assert [store.get("note")] == won

    def test_a_put_is_checked_before_it_shows(self, store: Store):
        store.prepare()
        store.put("note", b"1")

        def refuse() -> None:
            assert store.get("note") == b"1"  # A check may use the store.
            store.put("other", b"2")
            raise ValueError("not now")

        with pytest.raises(ValueError, match="not now"):
            store.put("note", b"2", check=refuse)
        assert store.get("note") == b"1"
        assert store.list() == ["note", "other"]

    def test_a_version_changes_with_the_file_alone(self, store: Store):
        store.prepare()
        store.put("note", b"1")
        seen = found(store, "note")
        assert (seen.name, seen.size) == ("note", 1)
        store.put("other", b"1")
        assert found(self.again(), "note").version == seen.version
        store.put("note", b"2")
        assert found(store, "note").version != seen.version

    def test_touch_makes_a_file_and_sets_its_time(self, store: Store):
        store.prepare()
        with pytest.raises(FileNotFoundError, match="mark"):
            store.touch("mark", create=False)
        store.touch("mark", create=True)
        first = found(store, "mark")
        with pytest.raises(StoreError, match="mark"):
            store.touch("mark", create=True)
        deadline_s = time.monotonic() + _DEADLINE_S
        while (now := found(store, "mark")).changed_s <= first.changed_s:
            assert time.monotonic() < deadline_s, "touch does not set the time of a file"
            assert store.touch("mark", create=False) in (None, now.changed_s)
            time.sleep(0.005)
        assert now.version != first.version
        if not store.traits.deletes_fence:
            store.put("mark", b"", replaces=now.version)
            with pytest.raises(FileNotFoundError, match="mark"):
                store.touch("mark", create=False)
        store.delete("mark")
        with pytest.raises(FileNotFoundError, match="mark"):
            store.touch("mark", create=False)
        assert store.list() == []

    # Large files

    def test_a_file_is_written_and_read_in_any_order(self, store: Store):
        store.prepare()
        data = os.urandom(10_000)
        writer = store.create("dir/file", len(data))
        starts = (0, 200, 5_000)
        for at in reversed(starts) if store.traits.in_any_order else starts:
            stop = {0: 200, 200: 5_000}.get(at, len(data))
            writer.write(at, [data[at : at + 100], data[at + 100 : stop]])
        writer.finish()
        assert read(store, "dir/file") == store.get("dir/file") == data
        reader = store.open("dir/file", 300)
        for start, stop in ((5_000, 5_001), (0, 300), (299, 9_999)):
            buffer = bytearray(stop - start)
            assert reader.read_into(start, [buffer]) == stop - start
            assert buffer == data[start:stop]
        reader.close()

    def test_a_file_ends_with_its_last_byte(self, store: Store):
        store.prepare()
        store.create("empty", 0).finish()
        assert read(store, "empty") == store.get("empty") == b""
        if store.traits.in_any_order:  # Then its size is an upper bound.
            writer = store.create("file", 100)
            writer.write(0, [b"abc"])
            writer.finish()
            assert read(store, "file") == store.get("file") == b"abc"

    def test_reading_stops_at_the_end_of_a_file(self, store: Store):
        store.prepare()
        write(store, "file", b"0123456789")
        reader = store.open("file")
        assert reader.size == 10
        first, second = bytearray(4), bytearray(b"\xee" * 8)
        assert reader.read_into(2, [first, second]) == 8
        assert (bytes(first), bytes(second)) == (b"2345", b"6789\xee\xee\xee\xee")
        assert reader.read_into(10, [bytearray(1)]) == 0
        assert reader.read_into(99, [bytearray(1)]) == 0
        reader.close()

    def test_any_contiguous_buffer_is_written(self, store: Store):
        store.prepare()
        data = os.urandom(600)
        kinds: dict[str, Callable[[bytes], Any]] = {
            "bytes": bytes,
            "bytearray": bytearray,
            "memoryview": memoryview,
            "an array": lambda data: np.frombuffer(data, np.uint8),
            "an array of rows": lambda data: np.frombuffer(data, np.uint16).reshape(2, -1),
        }
        for kind, make in kinds.items():
            write(store, kind, make(data), size=600)
            assert (kind, store.get(kind)) == (kind, data)

    def test_empty_buffers_are_nothing(self, store: Store):
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

    def test_thousands_of_buffers_go_at_once(self, store: Store):
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

    def test_threads_write_and_read(self, store: Store):
        store.prepare()
        data = os.urandom(800_000)
        parts = range(0, len(data), 100_000)
        if store.traits.in_any_order:
            writer = store.create("file", len(data))
            in_threads(lambda at: writer.write(at, [data[at : at + 100_000]]), parts)
            writer.finish()
        else:
            write(store, "file", data)
        in_threads(lambda at: write(store, f"d/{at}", data[at : at + 100_000]), parts)
        view = memoryview(bytearray(len(data)))
        reader = store.open("file")
        in_threads(lambda at: reader.read_into(at, [view[at : at + 100_000]]), parts)
        reader.close()
        assert view == data
        assert b"".join(store.get(f"d/{at}") for at in parts) == data

    def test_a_file_is_replaced_as_one_event(self, store: Store):
        store.prepare()
        old = b"what was there"
        for size in (10_000, 20 << 20):
            new = os.urandom(size)
            name = f"{size}/file"
            write(store, name, old)
            for finish in (False, True):
                writer = store.create(name, size, replace=True)
                writer.write(0, [new[: size // 2]])
                assert read(store, name) == old
                writer.write(size // 2, [new[size // 2 :]])
                assert store.get(name) == old
                writer.finish() if finish else writer.abandon()
                assert store.get(name) == (new if finish else old)
                assert [file.name for file in store.files(f"{size}/")] == [name]
            before = found(store, name).version
            write(store, name, old, replace=True)
            assert read(self.again(), name) == old
            assert found(store, name).version != before
        write(store, "new/file", b"first", replace=True)
        assert store.get("new/file") == b"first"

    def test_an_abandoned_file_can_be_written_again(self, store: Store):
        store.prepare()
        writer = store.create("dir/file", 10)
        writer.write(0, [b"123"])
        writer.abandon()
        self.again().delete("dir")  # as another process does
        write(store, "dir/file", b"whole")
        assert store.get("dir/file") == b"whole"
        store.sync("dir/file")
        store.sync("dir")
        store.sync("")
        store.discard_uploads()
        assert store.get("dir/file") == b"whole"

    def test_to_abandon_a_finished_file_does_no_harm(self, store: Store):
        store.prepare()
        writer = store.create("file", 3)
        writer.write(0, [b"abc"])
        identity = writer.finish()
        assert (identity or "") == found(store, "file").identity
        writer.abandon()
        assert store.get("file") == b"abc"

    # Lists

    def test_a_directory_comes_with_its_first_file_and_is_listed_once(self, store: Store):
        store.prepare()
        write(store, "b/2", b"2")
        write(store, "b/1", b"1")
        store.put("b/index", b"0")
        store.put("a", b"a")
        assert store.list() == ["a", "b"]

    def test_files_by_prefix(self, store: Store):
        store.prepare()
        for name in ("b/3", "a/1", "a/b/2", "ab", "_x-1", "_x-2"):
            write(store, name, b"x" * len(name))
        expected = {
            "": ["_x-1", "_x-2", "a/1", "a/b/2", "ab", "b/3"],
            "a": ["a/1", "a/b/2", "ab"],
            "a/": ["a/1", "a/b/2"],
            "a/b/": ["a/b/2"],
            "a/b/2": ["a/b/2"],
            "_x-": ["_x-1", "_x-2"],
            "nothing/": [],
            "ab/": [],
        }
        assert {p: [file.name for file in store.files(p)] for p in expected} == expected
        assert {file.size - len(file.name) for file in store.files("")} == {0}
        assert store.files("ab")[0].version == found(store, "ab").version

    def test_files_are_no_links(self, store: Store):
        store.prepare()
        store.put("file", b"1")
        write(store, "dir/file", b"2")
        for name in ("file", "dir", "dir/file"):
            assert not store.is_link(name)
            with pytest.raises(StoreError, match=name):
                store.delete_link(name)
        assert store.get("file") + store.get("dir/file") == b"12"

    # Deletions

    def test_delete_removes_a_file_or_all_of_a_directory_and_nothing_else(self, store: Store):
        store.prepare()
        for name in ("a/1", "a/b/2", "ab/3", "a.tmp"):
            write(store, name, b"x")
        for name in ("nothing", "no/such", "a.tmp/below"):
            store.delete(name)
        store.delete("a")
        assert names_in(store) == ["a.tmp", "ab"]
        assert store.get("ab/3") == b"x"
        store.delete("a.tmp")
        store.delete("ab/3")
        with pytest.raises(FileNotFoundError, match="ab/3"):
            store.get("ab/3")
        assert self.again().files("") == []

    def test_a_version_is_deleted_and_no_other(self, store: Store):
        store.prepare()
        store.put("a", b"one")
        seen = found(store, "a")
        store.put("a", b"two")
        with pytest.raises(Busy, match="a"):
            store.delete("a", version=seen.version)
        assert store.get("a") == b"two"
        store.delete("a", version=found(store, "a").version)
        assert store.look("a") is None
        store.delete("a", version=seen.version)  # It is gone already.

    def test_a_deletion_is_checked_before_it_happens(self, store: Store):
        store.prepare()
        store.put("a", b"one")
        write(store, "d/b", b"two")

        def refuse() -> None:
            assert store.get("a") == b"one"
            raise ValueError("not now")

        for name in ("a", "d"):
            with pytest.raises(ValueError, match="not now"):
                store.delete(name, check=refuse)
        assert store.list() == ["a", "d"]
        assert store.get("d/b") == b"two"
        for name in ("d", "a"):
            store.delete(name, check=lambda: None)
            assert name not in names_in(store)

    def test_who_takes_a_place_over_has_the_last_word(self, store: Store):
        """A `put` or a `delete` that was checked before a takeover must not happen after it."""
        store.prepare()
        if not store.traits.deletes_fence:
            return  # The touch of an emptied marker fails instead.
        store.put(METADATA_NAME, b"old")

        def take_over() -> None:
            other = self.again()
            for fence in filter(is_fence, other.list()):
                other.delete(fence)
            other.put(METADATA_NAME, b"theirs")

        taking: list[threading.Thread] = []

        def check() -> None:
            taking.append(threading.Thread(target=take_over))
            taking[-1].start()
            taking[-1].join(_TAKEOVER_S)

        remedy = (
            "an event happened after a takeover: make a check and its event exclude other writers, "
            "write through a temporary file (`is_temporary`), or set Traits(deletes_fence=False)"
        )
        seen = found(store, METADATA_NAME).version
        with suppress(Busy):
            store.put(METADATA_NAME, b"ours", replaces=seen, check=check)
        taking[-1].join()
        assert store.get(METADATA_NAME) == b"theirs", remedy
        with suppress(Busy):
            store.delete(METADATA_NAME, check=check)
        taking[-1].join()
        assert store.look(METADATA_NAME) is not None, remedy
        assert [name for name in store.list() if is_fence(name)] == []

    # One writer at a time

    def test_a_lock_excludes_others(self, store: Store):
        store.prepare()
        lock = store.lock()
        if lock is None:
            return
        assert re.fullmatch("[0-9a-f]{16}", lock.scope)
        assert lock.is_in_place()
        with pytest.raises(Busy, match=re.escape(store.location)):
            self.again().lock()
        lock.release()
        lock.release()
        other = self.again().lock()
        assert other is not None
        assert other.scope == lock.scope
        other.release()

    def test_one_writer_holds_a_place(self, store: Store):
        store.prepare()
        location = re.escape(store.location)
        busy = pytest.raises(Busy, match=f"another save to {location} is under way")
        with claimed(store):
            with busy, claimed(self.again()):
                pass
            self.again().put("note", b"1")
            assert self.again().get("note") == b"1"
            for other in ("below", "below-other"):
                store.at(other).prepare()
            with claimed(store.at("below")), claimed(store.at("below-other")):
                pass
        with pytest.raises(ValueError, match="stop"), claimed(self.again()):
            raise ValueError("stop")
        with claimed(store) as claim:
            claim.check()
            claim.delete("note")
        assert store.files("") == []

    def test_of_many_writers_one_holds_the_place(self, store: Store):
        store.prepare()
        barrier = threading.Barrier(_THREADS)
        outcomes: list[str] = []

        def hold(_: int) -> None:
            mine = self.again()
            barrier.wait(_DEADLINE_S)
            try:
                with claimed(mine):
                    outcomes.append("held")
                    wait_until(lambda: len(outcomes) == _THREADS)
            except Exception as error:
                outcomes.append("busy" if isinstance(error, Busy) else repr(error))

        in_threads(hold, range(_THREADS))
        assert sorted(outcomes) == ["busy"] * (_THREADS - 1) + ["held"]

    # Checkpoints

    def test_checkpoints_are_saved_and_restored(self, store: Store):
        save(store, _TREE)
        assert restore(self.again())["n"] == 1
        save_async(store, {**_TREE, "n": 2}).wait()
        checkpoint = open_checkpoint(self.again())
        assert (checkpoint["n"], checkpoint.path) == (2, store.location)
        assert checkpoint["w"][:3].tolist() == [0, 1, 2]
        assert verify(store).ok
        assert plan(store).total_bytes == plan(self.again()).total_bytes
        copy(store, self.directory / "copied to a disk")
        copy(self.directory / "copied to a disk", store.at("copied back"))
        assert restore(store.at("copied back"))["w"].tolist() == _TREE["w"].tolist()

    def test_a_save_to_a_place_that_is_held_is_busy(self, store: Store):
        save(store, _TREE)
        with claimed(self.again()):
            with pytest.raises(Busy, match="another save to .* is under way; wait for it"):
                save(store, {"n": 2})
            assert restore(store)["n"] == 1
        save(store, {"n": 2})
        assert restore(store) == {"n": 2}

    def test_a_save_that_fails_leaves_the_old_checkpoint(self, store: Store):
        save(store, _TREE)
        for verb in ("finish", "publish"):
            broken = FaultyStore(self.again(), fail={verb: OSError(5, "broken here")})
            with pytest.raises(SaveFailed, match="broken here"):
                save(broken, {**_TREE, "n": 2})
            assert restore(store)["n"] == 1
            assert verify(store).ok
        save(store, {**_TREE, "n": 3})
        assert restore(store)["n"] == 3
        assert len(names_in(store)) == 2  # `_METADATA`, and the directory of its shards.

    def test_a_manager_keeps_its_steps(self, store: Store):
        with Manager(store, keep=2) as manager:
            for step in (1, 2, 3):
                manager.save(step, {**_TREE, "n": step})
            manager.wait()
        with Manager(self.again(), keep=2) as manager:
            assert manager.steps() == [2, 3]
            assert manager.restore()["n"] == 3
            manager.delete(3)
            assert manager.latest() == 2
        assert verify(store).ok


def fail(message: str) -> None:
    raise AssertionError(message)


def found(store: Store, name: str) -> Any:
    """Look at a file that is there."""
    info = store.look(name)
    assert info is not None, f"look({name!r}) does not find the file"
    return info


def write(
    store: Store, name: str, data: Any, *, size: int | None = None, replace: bool = False
) -> None:
    writer = store.create(name, len(data) if size is None else size, replace=replace)
    writer.write(0, [data])
    writer.finish()


def read(store: Store, name: str) -> bytes:
    reader = store.open(name)
    try:
        data = bytearray(reader.size)
        assert reader.read_into(0, [data]) == reader.size
        return bytes(data)
    finally:
        reader.close()


def names_in(store: Store) -> list[str]:
    """Return the names in a place but for empty directories, which some buckets list for long."""
    return [name for name in store.list() if store.look(name) or store.files(f"{name}/")]


def in_threads(work: Callable[[int], Any], items: Iterable[int]) -> None:
    """Call a function in a thread for each item. Raises the first error."""
    errors: list[BaseException] = []

    def run(item: int) -> None:
        try:
            work(item)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
