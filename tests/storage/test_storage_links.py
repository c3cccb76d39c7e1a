"""Files of a directory that others may write to: nothing is written, read or removed elsewhere.

The races are run twice: by a hook that swaps a directory for a link before each call of the system
in turn, and by another user's process that does so all the time.
"""

import errno
import gc
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import ostraka
from figures import Figures
from mounts import in_memory
from ostraka import Manager
from ostraka.errors import (
    Damaged,
    InvalidTree,
    OstrakaError,
    PathInTheWay,
    SaveFailed,
    StoreError,
    Unreadable,
)
from ostraka.saving import place as saving_place
from ostraka.saving.place import collect_garbage
from ostraka.storage import LocalStore, open_store
from ostraka.storage import file as _file

CALLS = (
    *("open", "close", "fsync", "fstat", "stat", "lstat", "mkdir", "rmdir", "unlink", "link"),
    *("replace", "utime", "scandir", "listdir", "pwritev", "read", "preadv"),
)


def tree_of(number: int) -> dict[str, Any]:
    return {"w": np.full((3, 4), number, np.float32), "n": np.int32(number)}


@contextmanager
def hooked(
    before: Callable[[str, int], None],
    calls: Sequence[str] = CALLS,
    only: threading.Thread | None = None,
) -> Generator[None]:
    """Call `before` with the name and the number of each call to the system, of one thread or all.

    What `before` itself calls does not count. If it raises, the call is not made, but a file is
    closed anyway.
    """
    number, is_inside = 0, False

    def hook(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal number, is_inside
            if is_inside or (only is not None and threading.current_thread() is not only):
                return real(*arguments, **options)
            number, is_inside = number + 1, True
            try:
                before(name, number)
            except OSError:
                if name == "close":
                    real(*arguments)
                raise
            finally:
                is_inside = False
            return real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in calls:
            patched.setattr(os, name, hook(name))
        yield


def describe(folder: Path) -> list[Any]:
    return [
        (str(path), path.lstat().st_mode, path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in (folder, *sorted(folder.rglob("*")))
    ]


def make_outside(folder: Path) -> Path:
    """What is to stay as it is, with the names that a save has."""
    outside = folder / "outside"
    ostraka.save(outside, tree_of(7))
    (next(outside.glob("shards-*")) / "precious").write_text("keep me")
    (outside / "precious").write_text("keep me")
    return outside


# Races, step by step


def swap_shards(place: Path, outside: Path) -> None:
    for shards in place.glob("shards-*"):
        if not shards.is_symlink():
            shards.rename(place.parent / f"moved-{os.urandom(4).hex()}")
            shards.symlink_to(outside)


def swap_files(place: Path, outside: Path) -> None:
    for file in [*place.glob("shards-*/*"), *place.glob("_*")]:
        if file.is_file() and not file.is_symlink():
            file.unlink()
            file.symlink_to(outside / "precious")


def swap_place(place: Path, outside: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        place.rename(place.parent / f"moved-{os.urandom(4).hex()}")
        place.symlink_to(outside)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as folder:
        yield folder


def delete_step(place: Path) -> None:
    with Manager(place.parent, asynchronous=False) as manager:
        manager.delete(2)


WORK: dict[str, Callable[[Path], Any]] = {
    "save": lambda place: ostraka.save(place, tree_of(2)),
    "delete": delete_step,
    "gc": lambda place: collect_garbage(open_store(place)),
    "copy": lambda place: ostraka.copy(place.parent / "1", place),
    "restore": lambda place: ostraka.restore(place.parent / "1"),
    "verify": lambda place: ostraka.verify(place.parent / "1"),
}
"""What is done to step 2 of a root, beside step 1."""


def prepare(root: Path, work: str) -> None:
    ostraka.save(root / "1", tree_of(1))
    if work != "copy":
        ostraka.save(root / "2", tree_of(1))
    if work == "gc":
        (root / "2" / "shards-0123456789abcdef" / "below").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("swap", [swap_shards, swap_files, swap_place])
@pytest.mark.parametrize("work", ["save", "delete", "gc", "copy"])
def test_a_swap_before_each_call(
    folder: Path, work: str, swap: Callable[[Path, Path], None], every: int
):
    """Whoever owns the directory may spoil a save, but not send it elsewhere.

    The place itself is swapped only once a save has made it its own, by its lock: until then its
    path says what is meant.
    """
    outside = make_outside(folder)
    before = describe(outside)
    at = 0
    is_swapped = True
    while is_swapped and at < 400:
        at += every
        place = folder / str(at) / "2"
        prepare(place.parent, work)
        if work == "copy" and at % 2:
            place.mkdir()
        is_swapped = is_locked = False

        def swap_at(name: str, number: int, at: int = at, place: Path = place) -> None:
            nonlocal is_swapped, is_locked
            is_locked = is_locked or (place.is_dir() and any(place.glob("_CLAIM-*")))
            if number >= at and not is_swapped and (swap is not swap_place or is_locked):
                is_swapped = True
                with suppress(OSError):
                    swap(place, outside)

        with hooked(swap_at), suppress(OstrakaError):
            WORK[work](place)
        assert describe(outside) == before, (at, is_swapped)
    assert 10 < at < 400


# Races with another user


SWAP_FOR_EVER = """
import os, sys
place, outside = sys.argv[1:]
os.setgid(65534)
os.setuid(65534)
print("ready", flush=True)
while True:
    for name in os.listdir(place):
        if not name.startswith(("shards-", "_METADATA.")) or name.endswith(".moved"):
            continue
        path = f"{place}/{name}"
        try:
            os.rename(path, f"{path}.moved")
            os.symlink(outside, path)
        except OSError:
            pass
        try:
            os.unlink(path)
            os.rename(f"{path}.moved", path)
        except OSError:
            pass
"""


@contextmanager
def another_user(place: Path, outside: Path) -> Generator[None]:
    """One who owns the place, and puts a link where shards are, and back, as fast as can be."""
    program = [sys.executable, "-S", "-c", SWAP_FOR_EVER, str(place), str(outside)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED HERE: another user. It needs root.")
@pytest.mark.parametrize("rounds", [25, pytest.param(2000, marks=pytest.mark.soak)])
def test_another_user_swaps_all_the_time(folder: Path, rounds: int, figures: Figures):
    folder.chmod(0o755)
    outside = make_outside(folder)
    place = folder / "theirs"
    place.mkdir()
    os.chown(place, 65534, 65534)
    before = describe(outside)
    failed = 0
    with another_user(place, outside):
        for number in range(rounds):
            try:
                ostraka.save(place, tree_of(number))
            except OstrakaError:
                failed += 1
    assert describe(outside) == before
    figures.add("saves while another user swaps directories", rounds)
    figures.add("of them refused", failed)


# What is not followed, and what is


def test_a_link_in_a_checkpoint_is_damage_with_a_remedy(tmp_path: Path):
    """As in the cache of Hugging Face, where all files are links to others."""
    ostraka.save(tmp_path / "real", tree_of(1))
    linked = tmp_path / "linked"
    for file in (tmp_path / "real").rglob("*"):
        if file.is_file():
            link = linked / file.relative_to(tmp_path / "real")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    with pytest.raises(Damaged, match=r"_METADATA: it is a symbolic link.*cp -rL"):
        ostraka.restore(linked)
    subprocess.run(["cp", "-rL", linked, tmp_path / "copied"], check=True)
    assert ostraka.restore(tmp_path / "copied")["n"] == 1


def test_links_on_the_way_to_a_checkpoint_are_the_users_own(tmp_path: Path):
    ostraka.save(tmp_path / "big" / "runs" / "step_00000100", tree_of(1))
    (tmp_path / "runs").symlink_to("big/runs")
    (tmp_path / "runs" / "latest").symlink_to("step_00000100")
    (tmp_path / "runs" / "step_00000200").symlink_to("step_00000100")
    assert ostraka.restore(tmp_path / "runs" / "latest")["n"] == 1
    assert ostraka.verify(tmp_path / "runs" / "step_00000200").ok
    ostraka.save(tmp_path / "runs" / "step_00000300", tree_of(3))
    assert Manager(tmp_path / "runs", read_only=True).steps() == [100, 200, 300]


def test_a_step_that_is_a_link_is_not_copied_to(tmp_path: Path):
    ostraka.save(tmp_path / "from" / "step_00000001", tree_of(1))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "step_00000001").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathInTheWay, match="step_00000001 is a link, and what it leads to is not"):
        ostraka.copy(tmp_path / "from", tmp_path / "to")
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(PathInTheWay, match="is a link"):
        LocalStore(str(tmp_path / "to")).at("step_00000001").lock()


def test_the_time_of_a_linked_file_is_not_set(tmp_path: Path):
    (tmp_path / "file").touch()
    os.utime(tmp_path / "file", (1, 1))
    (tmp_path / "marker").symlink_to("file")
    open_store(tmp_path).touch("marker", create=False)
    assert (tmp_path / "file").stat().st_mtime == 1


# Sizes


def test_a_file_with_holes_is_not_read(tmp_path: Path):
    store = open_store(tmp_path)
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"x" * 4096)
        file.truncate(64 << 20)
    with pytest.raises(Unreadable, match=r"it has a hole at byte 4,096 of its 67,108,864"):
        store.get("sparse")
    (tmp_path / "full").write_bytes(b"x" * (20 << 20))
    assert len(store.get("full")) == 20 << 20


def test_a_large_file_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_file, "_READ_BYTES", 1000)
    data = os.urandom(12_345)
    (tmp_path / "file").write_bytes(data)
    assert open_store(tmp_path).get("file") == data


def test_an_index_of_another_size_is_not_read(tmp_path: Path):
    ostraka.save(tmp_path / "one", tree_of(1))
    index = next((tmp_path / "one").glob("shards-*/process_*"))
    size = index.stat().st_size
    with index.open("r+b") as file:
        file.truncate(30 << 30)
    with pytest.raises(Damaged, match=f"it has 32,212,254,720 bytes where {size:,} were written"):
        ostraka.restore(tmp_path / "one")


def test_a_description_that_could_not_be_read_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ostraka.save(tmp_path / "one", tree_of(1))
    monkeypatch.setattr(saving_place, "MOST_BYTES", 500)
    with pytest.raises(InvalidTree, match=r"no more than 500 are read again; save parts of it"):
        ostraka.save(tmp_path / "one", tree_of(2))
    assert ostraka.restore(tmp_path / "one")["n"] == 1


# Permissions


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o027, 0o000])
def test_the_umask_decides_who_may_read(tmp_path: Path, mask: int):
    before = os.umask(mask)
    try:
        with Manager(tmp_path / "root", asynchronous=False) as manager:
            manager.save(1, tree_of(1))
            manager.pin(1)
        ostraka.save(tmp_path / "compressed", {"w": np.zeros(1 << 17, np.float32)}, compress="zstd")
        ostraka.copy(tmp_path / "root", tmp_path / "copy")
    finally:
        os.umask(before)
    seen = 0
    for top in ("root", "compressed", "copy"):
        for path in (tmp_path / top, *(tmp_path / top).rglob("*")):
            wanted = (0o777 if path.is_dir() else 0o666) & ~mask
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path
            seen += 1
    assert seen > 10


def test_temporary_names_can_not_be_guessed(tmp_path: Path):
    names: list[str] = []

    def note(path: Any, flags: int = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) -> None:
        if str(path).endswith(".tmp") and flags & os.O_CREAT:
            assert flags & os.O_EXCL
            assert flags & os.O_NOFOLLOW
            names.append(str(path).split(".")[-2])

    def opened(path: Any, flags: int, *arguments: Any, real: Any = os.open, **options: Any) -> int:
        note(path, flags)
        return real(path, flags, *arguments, **options)

    def made(path: Any, *arguments: Any, real: Any = os.mkdir, **options: Any) -> None:
        note(path)
        real(path, *arguments, **options)

    with patch("os.open", opened), patch("os.mkdir", made):
        for _ in range(3):
            ostraka.save(tmp_path / "one", tree_of(1))
    assert len(set(names)) == len(names) >= 3
    assert all(len(name) == 32 for name in names)


# Refusals of the system


REFUSALS = [errno.EIO, errno.EACCES, errno.ENOSPC]
IN_PLACE = "the new checkpoint is in place, but may not survive a power failure"


@contextmanager
def refused(at: int, code: int, raised: list[str]) -> Generator[None]:
    """Have call number `at` fail, and with it what it would have done."""

    def refuse(name: str, number: int) -> None:
        if number == at:
            raised.append(name)
            raise OSError(code, os.strerror(code))

    # The interpreter calls lstat on its own, and another thread renews a claim.
    calls = [name for name in CALLS if name != "lstat"]
    with hooked(refuse, calls, only=threading.current_thread()):
        yield


@pytest.mark.parametrize("code", REFUSALS, ids=lambda code: errno.errorcode[code])
def test_each_call_of_a_save_may_be_refused(folder: Path, code: int):
    """One of the two is there, the error is a sentence of ours, and says which it is."""
    place = folder / "checkpoint"
    outcomes: dict[str, int] = {"old": 0, "new": 0, "in place": 0}
    for at in range(1, 200):
        ostraka.save(place, tree_of(1))
        said, raised = "", []
        try:
            with refused(at, code, raised):
                ostraka.save(place, tree_of(2))
        except OstrakaError as error:
            said = str(error)
            assert "\n" not in said
        if not raised:
            break
        found = int(ostraka.restore(place)["n"])
        assert ostraka.verify(place).ok
        expected = 2 if not said or IN_PLACE in said else 1
        assert found == expected, (at, raised, said)
        outcomes["in place" if IN_PLACE in said else "old" if said else "new"] += 1
    else:
        pytest.fail("a save makes more calls than this test expects")
    assert all(outcomes.values()), outcomes


@pytest.mark.parametrize("work", ["restore", "gc", "delete", "copy", "verify"])
def test_each_call_of_other_work_may_be_refused(folder: Path, work: str):
    for at in range(1, 300):
        root = folder / (str(at) if work == "copy" else "root")
        prepare(root, work)
        raised: list[str] = []
        with suppress(OstrakaError), refused(at, errno.EIO, raised):
            WORK[work](root / "2")
        if not raised:
            break
        assert ostraka.verify(root / "1").ok
    else:
        pytest.fail("it makes more calls than this test expects")


@pytest.mark.parametrize("how", ["save", "save_async", "Manager", "Manager in the background"])
def test_a_commit_that_can_not_be_synced_is_told_as_such(tmp_path: Path, how: str):
    place = tmp_path / "root" / "step_00000001"
    ostraka.save(place, tree_of(1))
    old = next(place.glob("shards-*"))
    syncs: list[int | str] = []

    def sync(directory: int | str, real: Any = _file.sync_directory) -> None:
        real(directory)
        if threading.current_thread().name == "ostraka-run-file":
            return  # of `_RUN`, beside the save
        syncs.append(directory)
        if len(syncs) > 2:  # after the commit
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def save() -> None:
        if how == "save":
            ostraka.save(place, tree_of(2))
        elif how == "save_async":
            ostraka.save_async(place, tree_of(2)).wait()
        else:
            with Manager(place.parent, asynchronous="back" in how) as manager:
                manager.save(1, tree_of(2))
                manager.wait()

    failing = patch.object(_file, "sync_directory", sync)
    with failing, pytest.raises(SaveFailed, match=IN_PLACE) as caught:
        save()
    assert "can't sync the directory of" in str(caught.value)
    assert ostraka.restore(place)["n"] == 2
    # A power failure may bring back what was there: its shards are kept until the next save.
    assert list(old.glob("shard_*"))
    ostraka.save(place, tree_of(3))
    assert ostraka.restore(place)["n"] == 3
    assert len(list(place.glob("shards-*"))) == 1


def test_a_lock_that_can_not_be_opened_is_a_sentence(tmp_path: Path):
    ostraka.save(tmp_path / "one", tree_of(1))
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="can't lock .*file: Not a directory"):
        open_store(tmp_path / "file").lock()


def test_nothing_is_left_open(tmp_path: Path):
    def opened() -> int:
        gc.collect()  # A copy's stores refer to each other, and are closed when they are collected.
        return len(os.listdir("/proc/self/fd"))

    if not sys.platform.startswith("linux"):
        pytest.skip("NOT TESTED HERE: open files. It needs /proc.")
    before = 0
    for number in range(8):
        if number == 2:  # Threads and their like have come by then.
            before = opened()
        ostraka.save(tmp_path / "one", tree_of(number))
        ostraka.restore(tmp_path / "one")
        ostraka.verify(tmp_path / "one")
        ostraka.copy(tmp_path / "one", tmp_path / f"copy-{number}")
    assert opened() <= before
