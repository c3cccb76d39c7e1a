"""Directories and files of a local file system, by their handles.

Links are not followed, and only regular files are read.

Whoever may write to a directory can put anything under a name in it, at any moment. So a name is
opened relative to a handle, without following a link in its place (`O_NOFOLLOW`), without waiting
for a pipe (`O_NONBLOCK`), and what was opened is asked what it is before anything is read of it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import stat
import struct
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any

import xxhash

from ostraka.common.threads import after_fork
from ostraka.errors import Busy, PathInTheWay, StoreError, TooLarge, Unreadable, store_error
from ostraka.storage._base import ANYTHING, FileInfo, byte_views

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock
    fcntl = None


READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
BELOW = DIRECTORY | os.O_NOFOLLOW
"""A directory that must not be a link."""
MOST_DEEP = 64
"""The depth to which directories are searched. A checkpoint has one level."""
_SURELY_REAL_BYTES = 16 << 20
"""Up to this size a file may have holes: it is read, and found wrong by its digest."""
_ATTEMPTS = 10
"""How often a directory that others write to is emptied."""
_READ_BYTES = 64 << 20
"""The most that is read at a time."""
_MAX_BUFFERS = 1024
"""The most buffers of one vectored call (IOV_MAX)."""
_IS_A_LINK = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR)
"""The errors of systems for a link that is not followed."""
A_LINK = (
    "a symbolic link, and links in a checkpoint are not followed: if you trust whoever made it, "
    "copy the checkpoint with cp -rL, which puts files in their place"
)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""The errors of file systems without hard links."""
_KINDS = {
    stat.S_IFLNK: A_LINK,
    stat.S_IFDIR: "a directory, not a file",
    stat.S_IFIFO: "a pipe, not a file",
    stat.S_IFSOCK: "a socket, not a file",
    stat.S_IFCHR: "a device, not a file",
    stat.S_IFBLK: "a device, not a file",
}


class Directory:
    """The handle of a directory, which is closed when nothing refers to this object any more.

    Whoever uses `file` keeps the object meanwhile: then no other thread can close it, and no other
    file get its number.
    """

    def __init__(self, file: int | None):
        self.file = file

    def __del__(self, close_file: Callable[[int], None] = os.close) -> None:
        # At the very end of a program modules have been emptied, `os` among them: hence the default
        # argument. Nothing was written through it: an error can't lose anything.
        file, self.file = self.file, -1
        if file is not None and file >= 0:
            try:  # noqa: SIM105 - by what is there at the very end
                close_file(file)
            except OSError:
                pass


BY_PATH = Directory(None)
"""No handle: names are whole paths."""


def open_file(name: str, above: int | None, path: str) -> tuple[int, int]:
    """Open a regular file to read it. Returns its handle and its size.

    `path` is for messages. Raises Unreadable for anything else that is there.
    """
    try:
        file = os.open(name, READ, dir_fd=above)
    except OSError as error:
        if error.errno in (*_IS_A_LINK, errno.ENXIO, errno.ENODEV):
            refuse_other_kinds(name, above, path)
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(path, _describe(status.st_mode))
    except BaseException:
        os.close(file)
        raise
    return file, status.st_size


def refuse_other_kinds(name: str, above: int | None, path: str) -> None:
    """Raise Unreadable if what is there is neither a regular file nor a directory."""
    mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise Unreadable(path, _describe(mode))


def refuse_other_kinds_below(top: str) -> None:
    """Raise Unreadable for anything below a directory that is neither a file nor a directory.

    For what another library opens: it would follow links, and wait for pipes.
    """
    waiting = [top]
    try:
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif not entry.is_file(follow_symlinks=False):
                        mode = entry.stat(follow_symlinks=False).st_mode
                        raise Unreadable(entry.path, _describe(mode))
    except Unreadable:
        raise
    except OSError as error:
        raise store_error("list", top, error) from error


def _describe(mode: int) -> str:
    return f"it is {_KINDS.get(stat.S_IFMT(mode), 'not a regular file')}"


def read_whole(file: int, size: int, path: str, *, most_bytes: int) -> bytes:
    """All bytes of an open file of this size. Raises TooLarge, before memory is taken for it."""
    if size > most_bytes:
        raise TooLarge(path, size, most_bytes)
    if size > _SURELY_REAL_BYTES:
        _refuse_holes(file, size, path)
    data = os.read(file, min(size, _READ_BYTES) + 1)
    if len(data) == size:
        return data
    # The kernel may give less at a time, and the file may grow meanwhile.
    pieces = [data]
    total = len(data)
    while pieces[-1] and total <= most_bytes:
        pieces.append(os.read(file, _READ_BYTES))
        total += len(pieces[-1])
    if total > most_bytes:
        raise TooLarge(path, total, most_bytes)
    return b"".join(pieces)


def _refuse_holes(file: int, size: int, path: str) -> None:
    """A few blocks on the disk may be terabytes of zeros: such a file is not one of ours.

    Where a file system can't tell, it says that there are none.
    """
    if not hasattr(os, "SEEK_HOLE"):  # pragma: no cover - Linux, macOS and FreeBSD have it
        return
    try:
        hole = os.lseek(file, 0, os.SEEK_HOLE)
        os.lseek(file, 0, os.SEEK_SET)
    except OSError:
        return
    if hole < size:
        raise Unreadable(path, f"it has a hole at byte {hole:,} of its {size:,}: no save wrote it")


def open_below(path: str, above: int | None, start: str, *, make: bool = False) -> int:
    """Open a directory below another one. No part of `path` may be a link.

    With `make` those that are not there are made. `start` is put before `path` if there is no
    handle `above`, and in messages. Returns the handle, which is the caller's to close.
    """
    opened: int | None = None
    for name in path.split("/"):
        if above is None:
            name = start + name
        try:
            file = os.open(name, BELOW, dir_fd=above)
        except OSError as error:
            file = _make_or_refuse(name, above, start, error, make=make)
        finally:
            if opened is not None:
                os.close(opened)
        above = opened = file
    assert opened is not None
    return opened


def _make_or_refuse(name: str, above: int | None, start: str, error: OSError, *, make: bool) -> int:
    if make and error.errno == errno.ENOENT:
        if above is None:
            os.makedirs(name, exist_ok=True)
        else:
            with suppress(FileExistsError):  # Then another process was faster.
                os.mkdir(name, dir_fd=above)
        return os.open(name, BELOW, dir_fd=above)
    if error.errno in _IS_A_LINK:
        refuse_other_kinds(name, above, name if above is None else start + name)
    raise error


def remove_tree(name: str, above: int | None, depth: int = 0) -> None:
    """Remove a directory with all in it, even while another process removes it too.

    Unlike `shutil.rmtree`, it can't be made to wait for a pipe that is put in a directory's place.
    """
    _refuse_depth(depth)
    with suppress(FileNotFoundError):
        directory = Directory(os.open(name, BELOW, dir_fd=above))
        for attempt in range(_ATTEMPTS):
            with os.scandir(directory.file) as entries:
                found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for entry, is_directory in found:
                if is_directory:
                    remove_tree(entry, directory.file, depth + 1)
                    continue
                with suppress(FileNotFoundError):
                    os.unlink(entry, dir_fd=directory.file)
            try:
                os.rmdir(name, dir_fd=above)
                return
            except OSError as error:  # Another process has put something in meanwhile.
                if error.errno != errno.ENOTEMPTY or attempt == _ATTEMPTS - 1:
                    raise


def find_files(
    directory: int,
    above: str,
    start: str,
    found: list[tuple[str, os.stat_result]],
    depth: int = 0,
) -> None:
    """Add all that is no directory, and whose name begins with `start`, in a directory and below.

    `above` is put before the names.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(start):
                continue
            try:
                if not entry.is_dir(follow_symlinks=False):
                    found.append((above + entry.name, entry.stat(follow_symlinks=False)))
                    continue
                _refuse_depth(depth)
                below = os.open(entry.name, BELOW, dir_fd=directory)
                try:
                    find_files(below, f"{above}{entry.name}/", "", found, depth + 1)
                finally:
                    os.close(below)
            except (FileNotFoundError, NotADirectoryError):
                continue  # deleted or replaced meanwhile


def _refuse_depth(depth: int) -> None:
    if depth > MOST_DEEP:
        raise OSError(errno.ENAMETOOLONG, f"more than {MOST_DEEP} directories are in each other")


# Changes to a directory


def make_place(path: str, *, follow: bool) -> bool:
    """Make a directory that can be written to. Returns True if it was not there before.

    Raises PathInTheWay for a file in its place, or for a link unless `follow`.
    """
    try:
        is_new = _make_directories(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise PathInTheWay(
            f"can't make the directory {path}: a file of that name, or in the place "
            "of one of its parents, is in the way"
        ) from error
    except OSError as error:
        raise store_error("make the directory", path, error) from error
    if not follow and os.path.islink(path):
        raise link_in_the_way(path)
    if not os.access(path, os.W_OK | os.X_OK):
        reason = errno.EACCES
        with suppress(OSError):  # Root's own permissions don't tell.
            if os.statvfs(path).f_flag & os.ST_RDONLY:
                reason = errno.EROFS
        refused = OSError(reason, os.strerror(reason))
        raise store_error("write to the directory", path, refused)
    return is_new


def _make_directories(path: str) -> bool:
    """Like os.makedirs, with every new name as durable as what will be put below it.

    Returns whether `path` was made by this call.
    """
    if os.path.isdir(path):
        return False
    parent = os.path.dirname(path)
    try:
        try:
            os.mkdir(path)
        except FileNotFoundError:
            _make_directories(parent)
            os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return False  # another process was faster
    sync_directory(parent)
    return True


def sync_directory(directory: int | str) -> None:
    """By its handle, or by its path."""
    file = os.open(directory, DIRECTORY) if isinstance(directory, str) else directory
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not a thing on some file systems
            raise
    finally:
        if file is not directory:
            os.close(file)


def info_of(name: str, status: os.stat_result) -> FileInfo:
    # Every `put` is a rename: the file is another one each time.
    version = (status.st_ino, status.st_mtime_ns, status.st_size)
    size, changed_s = status.st_size, status.st_mtime
    return FileInfo(name, size, changed_s, version, changed_ns=status.st_ctime_ns)


def give_name(temporary: str, name: str, above: int | None, path: str, replaces: Any) -> None:
    """Give a file that is complete its name, if what has it is still what `replaces` says."""
    try:
        if replaces is None:
            _create(temporary, name, above)
            return
        refuse_other_version(name, above, path, replaces)
        os.replace(temporary, name, src_dir_fd=above, dst_dir_fd=above)
    except (FileExistsError, FileNotFoundError) as error:
        # Not found: the next writer, which took this one for dead, has deleted `temporary`.
        raise _replaced_meanwhile(path) from error


def _create(temporary: str, name: str, above: int | None) -> None:
    """Give a file that is complete a name that must be free, in one event."""
    try:
        os.link(temporary, name, src_dir_fd=above, dst_dir_fd=above, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with suppress(FileNotFoundError):  # as near as it gets without hard links
            os.stat(name, dir_fd=above, follow_symlinks=False)
            raise FileExistsError(name) from error
        os.replace(temporary, name, src_dir_fd=above, dst_dir_fd=above)
    else:
        os.unlink(temporary, dir_fd=above)


def _replaced_meanwhile(path: str) -> Busy:
    return Busy(f"another save has replaced {path} meanwhile, or is about to; try again")


def refuse_other_version(name: str, above: int | None, path: str, version: Any) -> None:
    """Raise Busy if a file is not the one that was seen."""
    there = os.stat(name, dir_fd=above, follow_symlinks=False)
    if version is not ANYTHING and info_of(name, there).version != version:
        raise _replaced_meanwhile(path)


def remove(name: str, above: int | None) -> None:
    """Remove a file, a link, or a directory with all in it."""
    try:
        os.unlink(name, dir_fd=above)
    except (IsADirectoryError, PermissionError):
        if not stat.S_ISDIR(os.lstat(name, dir_fd=above).st_mode):
            raise
        remove_tree(name, above)


def unlink_quietly(name: str, above: int | None) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=above)


# Files that are open to be written or read


class LocalWriter:
    """Writes a new file. If it is `direct`, large blocks go to the disk past the page cache.

    A direct write takes less CPU time: the kernel neither copies the bytes nor looks for pages to
    hold them. But it waits for the disk.
    """

    def __init__(self, file: int, path: str, size: int, *, direct: bool = False):
        self._file = file
        self._path = path
        self._size = size
        self._direct = _open_direct(file) if direct and size >= _LEAST_DIRECT_BYTES else None

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        try:
            if self._direct is not None:
                _write_past_cache(self._file, self._direct, offset, buffers)
                return
            end = write_all(self._file, offset, buffers)
        except OSError as error:
            raise explain("write", self._path, self._size, error) from error
        # Have the disk work while the next blocks are made, not only in the fsync at the end. No
        # promise is made by it: the fsync is what counts, and where this can't be done it is
        # slower.
        if _sync_file_range is not None and end > offset:
            _sync_file_range(self._file, offset, end - offset, _SYNC_FILE_RANGE_WRITE)

    def write_runs(self, starts: Sequence[int], data: Any, run_bytes: int) -> None:
        """Write runs of bytes that follow each other in `data`, each to a place of its own.

        Those between them may come later: so the disk is not asked to begin with any.
        """
        view = memoryview(data)
        try:
            for number, start in enumerate(starts):
                run = view[number * run_bytes : (number + 1) * run_bytes]
                written = os.pwrite(self._file, run, start)
                if written < run_bytes:
                    write_all(self._file, start + written, [run[written:]])
        except OSError as error:
            raise explain("write", self._path, self._size, error) from error

    def finish(self) -> None:
        file, self._file = self._file, -1
        try:
            try:
                if self._direct is not None:
                    os.close(self._direct)
                    self._direct = None
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise explain("write", self._path, self._size, error) from error

    def abandon(self) -> None:
        file, self._file = self._file, -1
        direct, self._direct = self._direct, None
        for opened in (file, direct):
            if opened is not None and opened >= 0:
                with suppress(OSError):  # Nothing is promised of it.
                    os.close(opened)


class LocalReader:
    def __init__(self, file: int, size: int, path: str):
        self._file = file
        self._path = path
        self.size = size

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        try:
            return _read_all(self._file, offset, buffers)
        except OSError as error:
            raise store_error("read", self._path, error) from error

    def close(self) -> None:
        file, self._file = self._file, -1
        try:
            os.close(file)
        except OSError as error:
            raise store_error("close", self._path, error) from error


def explain(action: str, path: str, size: int, error: OSError) -> StoreError:
    """Why a file of `size` bytes can't be written, with what it lacks if that is room."""
    mapped = store_error(action, path, error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return mapped
    needs = f"the file needs {size:,} bytes"
    if error.errno != errno.EFBIG:
        needs += _room_beside(path)
    return StoreError(f"{mapped} ({needs})", errno=error.errno, filename=path)


def _room_beside(path: str) -> str:
    """Return ', … are free', or nothing if it can't be told, as for a directory that is gone."""
    with suppress(OSError):
        place = os.statvfs(os.path.dirname(path))
        if place.f_files and not place.f_favail:
            return ", and the file system takes no more files, however small"
        return f", {place.f_bavail * place.f_frsize:,} are free"
    return ""


def write_all(file: int, offset: int, buffers: Sequence[Any]) -> int:
    """Write every byte, even if the kernel writes in parts. Returns the offset after them."""
    for at in range(0, len(buffers), _MAX_BUFFERS):
        pending = list(map(memoryview, buffers[at : at + _MAX_BUFFERS]))
        left = sum(map(attrgetter("nbytes"), pending))
        while left:
            written = os.pwritev(file, pending, offset)
            offset += written
            left -= written
            if left:
                pending = _skip(byte_views(pending), written)
    return offset


_LEAST_DIRECT_BYTES = 1 << 20
"""Smaller files and blocks go through the page cache."""
_DIRECT_BYTES = 4 << 20
"""The most that a direct write takes at a time."""
_PAGE_BYTES = 4096
"""Direct writes begin and end at multiples of it, on the disk and in memory."""
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_direct_memory = threading.local()


def _open_direct(file: int) -> int | None:
    """Open a file once more, to write past the page cache.

    None where the file system does not name an alignment for that: most network file systems don't,
    and kernels before Linux 6.1.
    """
    try:
        status = ctypes.create_string_buffer(256)
        failed = ctypes.CDLL(None).statx(file, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, status)
        known = int.from_bytes(status[:4], sys.byteorder)
        alignments = struct.unpack_from("=II", status, 0x98)  # of memory, and of offsets
        if failed or not known & _STATX_DIOALIGN or not 0 < max(alignments) <= _PAGE_BYTES:
            return None
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None


def _write_past_cache(file: int, direct: int, offset: int, buffers: Sequence[Any]) -> None:
    """Write the whole pages of a block with the handle `direct`, and what is left with `file`.

    No other block has bytes in these pages, so the page cache never has an old copy of them.
    """
    import numpy as np  # only here: a look at a tree does without

    pieces = byte_views(buffers)
    if sum(map(len, pieces)) < _LEAST_DIRECT_BYTES:
        write_all(file, offset, pieces)
        return
    views = [np.frombuffer(piece, np.uint8) for piece in pieces]
    if len(views) == 1 and (views[0].ctypes.data - offset) % _PAGE_BYTES == 0:
        _write_pages(file, direct, offset, views[0])
        return
    memory = getattr(_direct_memory, "memory", None)
    if memory is None:  # at the beginning of a page, with room for a block that begins within one
        memory = np.frombuffer(mmap.mmap(-1, _DIRECT_BYTES + _PAGE_BYTES), np.uint8)
        _direct_memory.memory = memory
    start = stop = offset % _PAGE_BYTES
    for view in views:
        while view.size:
            taken = min(view.size, memory.size - stop)
            memory[stop : stop + taken] = view[:taken]
            view, stop = view[taken:], stop + taken
            if stop == memory.size:
                _write_pages(file, direct, offset, memory[start:])
                offset, start, stop = offset + stop - start, 0, 0
    _write_pages(file, direct, offset, memory[start:stop])


def _write_pages(file: int, direct: int, offset: int, data: Any) -> None:
    """Write data at `offset`. It begins as far within a page as `offset` does."""
    first = min(-offset % _PAGE_BYTES, data.size)
    last = max((offset + data.size) // _PAGE_BYTES * _PAGE_BYTES - offset, first)
    write_all(file, offset, [data[:first]])
    if last > first:
        with suppress(OSError):  # The cache may take what the disk did not, or meets it again.
            first += os.pwrite(direct, data[first:last], offset + first)
    write_all(file, offset + first, [data[first:]])


def _find_sync_file_range() -> Any:
    """The system call that has the kernel write pages out now, without waiting for it."""
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (AttributeError, OSError):  # pragma: no cover - only Linux has it
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()
_SYNC_FILE_RANGE_WRITE = 2


def _read_all(file: int, offset: int, buffers: Sequence[Any]) -> int:
    """Read until the buffers are full or the file ends. Returns the bytes read."""
    total = 0
    for at in range(0, len(buffers), _MAX_BUFFERS):
        pending = byte_views(buffers[at : at + _MAX_BUFFERS])
        while pending:
            count = os.preadv(file, pending, offset + total)
            if count == 0:
                return total
            total += count
            pending = _skip(pending, count)
    return total


def _skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    for number, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[number + 1 :]]
        count -= buffer.nbytes
    return []


class ReplacingWriter(LocalWriter):
    """Writes under a temporary name, which is exchanged for the file's own at the end."""

    def __init__(self, file: int, path: str, size: int, above: Directory, temporary: str):
        super().__init__(file, path, size)
        self._above = above
        self._temporary = temporary

    def finish(self) -> None:
        above = self._above.file
        assert above is not None
        try:
            super().finish()
            try:
                name = os.path.basename(self._path)
                os.replace(self._temporary, name, src_dir_fd=above, dst_dir_fd=above)
                sync_directory(above)
            except OSError as error:
                raise explain("replace", self._path, self._size, error) from error
        except BaseException:
            unlink_quietly(self._temporary, above)
            raise

    def abandon(self) -> None:
        if self._file >= 0:
            unlink_quietly(self._temporary, self._above.file)
        super().abandon()


def write_new(name: str, above: int | None, data: bytes, *, durable: bool = True) -> None:
    """Write a small file, durable but for its name."""
    file = os.open(name, CREATE, 0o666, dir_fd=above)
    try:
        write_all(file, 0, [data])
        if durable:
            os.fsync(file)
    finally:
        os.close(file)


# A lock on a directory, which the kernel ends with its process


class DirectoryLock:
    """A lock on the directory itself: no lock file is left behind."""

    def __init__(self, directory: str, flags: int):
        self._path = directory
        file = os.open(directory, flags)
        self.directory = Directory(file)
        """No handle any more once it is released."""
        self._file = file
        self.scope = _scope(os.fstat(file).st_dev)
        _locks.add(self)

    def take(self) -> None:
        """Raise BlockingIOError if another has it, another OSError if there are no locks."""
        if fcntl is None:  # pragma: no cover
            raise OSError
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Unlock it, and let go of the directory as soon as no other thread uses it."""
        file, self._file = self._file, -1
        if file >= 0 and fcntl is not None:
            with suppress(OSError):
                # By name: a process that was forked meanwhile may still have a copy.
                fcntl.flock(file, fcntl.LOCK_UN)
        self.directory = BY_PATH

    def close(self) -> None:
        """Let go of it at once, without unlocking: in a child, its parent's lock stays."""
        file, self._file = self._file, -1
        directory, self.directory = self.directory, BY_PATH
        if file >= 0:
            directory.file = -1
            os.close(file)


def lock_directory(directory: str, *, follow: bool) -> DirectoryLock | None:
    """Lock a directory. Returns None where the system or the file system has no locks.

    Raises Busy if another process, or another thread, has it; FileNotFoundError if it has gone;
    without `follow` PathInTheWay if it is a link.
    """
    try:
        lock = DirectoryLock(directory, DIRECTORY if follow else BELOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        if not follow and os.path.islink(directory):
            raise link_in_the_way(directory) from error
        raise store_error("lock", directory, error) from error
    try:
        lock.take()
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            raise Busy(
                f"another save to {directory} is under way; wait for it, or save elsewhere"
            ) from error
        return None  # Some network file systems can't lock.
    return lock


def link_in_the_way(directory: str) -> PathInTheWay:
    return PathInTheWay(
        f"{directory} is a link, and what it leads to is not written to under this name; give the "
        "path that it leads to, or remove the link"
    )


@cache
def _scope(device: int) -> str:
    """Return 16 hex digits that name this running kernel and this mount.

    All containers of a kernel are alike. Two mounts of one network file system are not: each may
    have locks of its own.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            kernel = file.read()
    except OSError:  # pragma: no cover - only Linux has it
        kernel = f"{platform.node()}-{uuid.getnode()}".encode()
    return xxhash.xxh3_64_hexdigest(kernel + str(device).encode())


_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_after_fork() -> None:
    """A child that outlives its parent, such as a data worker, must not hold what that one held."""
    for lock in list(_locks):
        lock.close()


after_fork(_close_after_fork)
