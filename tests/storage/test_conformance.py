"""Every store passes the public suite, one of a user's own included; broken ones do not."""

import posixpath
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostraka import testing
from ostraka.storage import (
    ANYTHING,
    FileInfo,
    LocalStore,
    MemoryStore,
    Store,
    Traits,
    _claim,
    open_store,
)
from ostraka.testing import FaultyStore, StoreTests
from programs import run_quietly
from user_store import Reader, SqliteStore, Writer


class TestLocal(StoreTests):
    def make_store(self, directory: Path) -> Store:
        return LocalStore(str(directory / "place"))


class TestMemory(StoreTests):
    def make_store(self, directory: Path) -> Store:
        return MemoryStore(f"conformance{directory}")


class TestFaulty(StoreTests):
    def make_store(self, directory: Path) -> Store:
        return FaultyStore(directory / "place")


class InBuckets(StoreTests):
    kind: str

    @pytest.fixture(autouse=True)
    def _bucket(self, servers, monkeypatch: pytest.MonkeyPatch) -> None:
        server = servers(self.kind)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        self.url = server.url
        # Whoever finds a claim waits until it is renewed. A bucket tells times in whole seconds.
        monkeypatch.setattr(_claim, "RENEW_EVERY_S", 1.5)

    def make_store(self, directory: Path) -> Store:
        return open_store(f"{self.url}/conformance{directory}/place")


class TestMoto(InBuckets):
    kind = "moto"


class TestSeaweed(InBuckets):
    kind = "seaweed"


class TestAzurite(InBuckets):
    kind = "azurite"


class TestGoogle(InBuckets):
    kind = "google"


class TestUsers(StoreTests):
    def make_store(self, directory: Path) -> Store:
        return SqliteStore(directory / "files.db")


# Stores that are wrong in one thing


class CreatesOver(SqliteStore):
    def write(self, name: str, data: bytes, replaces: Any = ANYTHING) -> bool:
        return super().write(name, data, ANYTHING if replaces is None else replaces)


class WritesInTwoEvents(SqliteStore):
    def write(self, name: str, data: bytes, replaces: Any = ANYTHING) -> bool:
        done = super().write(name, data[: len(data) // 2], replaces)
        time.sleep(0.02)
        return done and super().write(name, data)


class RemovesWhatItReplaces(SqliteStore):
    def create(self, name: str, size: int, **options: Any) -> Writer:
        self.delete(name)
        return super().create(name, size, **options)


class DropsTheEnd(SqliteStore):
    def create(self, name: str, size: int, **options: Any) -> Writer:
        class Short(Writer):
            def finish(self) -> None:
                del self.data[16 << 20 :]
                super().finish()

        return Short(self, name)


class ReadsShort(SqliteStore):
    def open(self, name: str, first_bytes: int = 0) -> Reader:
        class Short(Reader):
            def read_into(self, offset: int, buffers: Any) -> int:
                return super().read_into(offset, [memoryview(b)[:4096] for b in buffers])

        return Short(super().open(name).data)


class FindsEmptyFiles(SqliteStore):
    def open(self, name: str, first_bytes: int = 0) -> Reader:
        return super().open(name) if self.look(name) else Reader(b"")


class ReadsAnySize(SqliteStore):
    def get(self, name: str, most_bytes: int = 0) -> bytes:
        return super().get(name)


class ListsLate(SqliteStore):
    def list(self) -> list[str]:
        newest = max(self.files(""), key=lambda file: file.changed_s, default=None)
        return [name for name in super().list() if newest is None or name != newest.name]


class ListsInAnyOrder(SqliteStore):
    def files(self, prefix: str) -> list[FileInfo]:
        return sorted(super().files(prefix), key=lambda file: file.changed_s)


class HasVersionsBySize(SqliteStore):
    def files(self, prefix: str) -> list[FileInfo]:
        return [replace(file, version=file.size) for file in super().files(prefix)]


class KeepsOldTimes(SqliteStore):
    def touch(self, name: str, *, create: bool, note: bytes = b"") -> float | None:
        return super().touch(name, create=True, note=note) if create else None


class DeletesByPrefix(SqliteStore):
    def delete(self, name: str, **conditions: Any) -> None:
        super().delete(name, **conditions)
        for file in self.files(name):
            super().delete(file.name)


class DeletesWhatIsThereOnly(SqliteStore):
    def delete(self, name: str, **conditions: Any) -> None:
        if not self.files(name):
            raise FileNotFoundError(name)
        super().delete(name, **conditions)


class DeletesAnyVersion(SqliteStore):
    def delete(self, name: str, *, version: Any = ANYTHING, check: Any = None) -> None:
        super().delete(name, check=check)


class ChecksLate(SqliteStore):
    def put(self, name: str, data: bytes, *, check: Any = None, **conditions: Any) -> None:
        super().put(name, data, **conditions)
        if check is not None:
            check()


class DeletesUnchecked(SqliteStore):
    def delete(self, name: str, *, version: Any = ANYTHING, check: Any = None) -> None:
        super().delete(name, version=version)


class PromisesFences(SqliteStore):
    traits = Traits(in_any_order=False)


class FollowsDots(SqliteStore):
    def open(self, name: str, first_bytes: int = 0) -> Reader:
        path = posixpath.normpath(self.prefix + name)
        return SqliteStore(self.database).open(path) if self.prefix else super().open(name)


class LacksVerbs(SqliteStore):
    sync = property()  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("broken", "check", "text"),
    [
        (CreatesOver, "a_put_that_must_be_the_first", "DID NOT RAISE"),
        (CreatesOver, "of_many_first_puts_one_wins", "assert .* == "),
        (CreatesOver, "touch_makes_a_file_and_sets_its_time", "DID NOT RAISE"),
        (WritesInTwoEvents, "readers_see_one_whole_put_or_the_other", r"assert \["),
        (RemovesWhatItReplaces, "a_file_is_replaced_as_one_event", "/file"),
        (DropsTheEnd, "a_file_is_replaced_as_one_event", "assert "),
        (ReadsShort, "a_file_is_written_and_read_in_any_order", "assert 4096 == 10000"),
        (FindsEmptyFiles, "a_missing_name_raises_file_not_found", "DID NOT RAISE"),
        (ReadsAnySize, "a_file_that_is_too_large_is_not_read", "DID NOT RAISE"),
        (ListsLate, "put_then_get", r"assert \[\] == \['note'\]"),
        (ListsInAnyOrder, "files_by_prefix", "assert "),
        (HasVersionsBySize, "a_version_changes_with_the_file_alone", "assert 1 != 1"),
        (KeepsOldTimes, "touch_makes_a_file_and_sets_its_time", "DID NOT RAISE"),
        (DeletesByPrefix, "delete_removes_a_file_or_all_of_a_directory_and_nothing_else", "'ab'"),
        (DeletesWhatIsThereOnly, "a_place_does_not_exist_until_it_is_prepared", "nothing"),
        (DeletesAnyVersion, "a_version_is_deleted_and_no_other", "DID NOT RAISE"),
        (ChecksLate, "a_put_is_checked_before_it_shows", "assert b'2' == b'1'"),
        (DeletesUnchecked, "a_deletion_is_checked_before_it_happens", "DID NOT RAISE"),
        (PromisesFences, "who_takes_a_place_over_has_the_last_word", "happened after a takeover"),
        (FollowsDots, "no_name_leads_out_of_a_place", "DID NOT RAISE"),
        (LacksVerbs, "it_has_every_verb", r"assert \['sync'\] == \[\]"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_store_fails(broken: type[SqliteStore], check: str, text: str, tmp_path: Path):
    class Suite(StoreTests):
        def make_store(self, directory: Path) -> Store:
            return broken(directory / "files.db")  # pyright: ignore[reportReturnType]

    suite = Suite()
    suite.directory = tmp_path
    with pytest.raises((Exception, pytest.fail.Exception), match=text):
        getattr(suite, f"test_{check}")(suite.again())


def test_pytest_is_imported_with_the_suite_only(tmp_path: Path):
    run_quietly(
        "import sys, ostraka.testing as t; assert 'pytest' not in sys.modules; "
        "t.StoreTests; assert 'pytest' in sys.modules",
        tmp_path,
    )
    with pytest.raises(AttributeError, match="'ostraka.testing' has no attribute 'StoreTest'"):
        _ = testing.StoreTest  # pyright: ignore
