"""A checkpoint in a directory of a local or mounted file system."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from ostraka.errors import Busy, OstrakaError, PathInTheWay, StoreError, store_error
from ostraka.storage._base import ANYTHING, FileInfo, Parts, byte_views
from ostraka.storage._flock import DirectoryLock, lock_directory

_MAX_BUFFERS = 1024
"""What one vectored call takes (IOV_MAX)."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links say."""


class LocalStore:
    """Names are files below one directory."""

    parts = Parts()

    def __init__(self, directory: str):
        self.location = directory
        self._start = directory if directory.endswith(os.sep) else directory + os.sep

    def __str__(self) -> str:
        return self.location

    def at(self, name: str) -> LocalStore:
        return LocalStore(self._path(name))

    def prepare(self) -> bool:
        try:
            is_new = _make_directories(self.location)
        except (FileExistsError, NotADirectoryError) as error:
            raise PathInTheWay(
                f"can't make the directory {self.location}: a file of that name, or in the place "
                "of one of its parents, is in the way"
            ) from error
        except OSError as error:
            raise store_error("make the directory", self.location, error) from error
        if not os.access(self.location, os.W_OK | os.X_OK):
            reason = errno.EROFS if _is_read_only(self.location) else errno.EACCES
            refused = OSError(reason, os.strerror(reason))
            raise store_error("write to the directory", self.location, refused)
        return is_new

    def remove_if_empty(self) -> None:
        try:
            os.rmdir(self.location)
            _sync_directory(os.path.dirname(self.location))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise store_error("remove the directory", self.location, error) from error

    def exists(self) -> bool:
        return os.path.isdir(self.location)

    def lock(self) -> DirectoryLock | None:
        return lock_directory(self.location)

    def get(self, name: str) -> bytes:
        path = self._start + name
        try:
            with open(path, "rb", opener=_open_file) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        except OSError as error:
            raise store_error("read", path, error) from error

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], None] | None = None,
        durable: bool = True,
    ) -> None:
        path = self._start + name
        if not durable:
            _write_new(path, data)
            return
        temporary = f"{path}.{os.urandom(4).hex()}.tmp"
        try:
            try:
                file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                try:
                    _write_all(file, 0, [data])
                    os.fsync(file)
                finally:
                    os.close(file)
                if check is not None:
                    check()
                if replaces is ANYTHING:
                    os.replace(temporary, path)
                else:
                    self._replace(temporary, name, replaces)
            except BaseException:
                _unlink_quietly(temporary)
                raise
            _sync_directory(os.path.dirname(path))
        except OstrakaError:
            raise
        except OSError as error:
            raise _explain("write", path, len(data), error) from error

    def _replace(self, temporary: str, name: str, replaces: Any) -> None:
        path = self._path(name)
        try:
            if replaces is None:
                _create(temporary, path)
                return
            there = self.look(name)
            if there is None or there.version != replaces:
                raise _replaced_meanwhile(path)
            os.replace(temporary, path)
        except (FileExistsError, FileNotFoundError) as error:
            # Not found: the next writer, which took this one for dead, has deleted `temporary`.
            raise _replaced_meanwhile(path) from error

    def touch(self, name: str, *, create: bool) -> None:
        path = self._start + name
        try:
            if create:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            else:
                os.utime(path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # stale: another machine has deleted it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            raise store_error("write", path, error) from error

    def create(
        self, name: str, size: int, *, beside: int = 1, replace: bool = False
    ) -> _LocalWriter:
        path = self._start + name
        writer = _ReplacingWriter if replace else _LocalWriter
        try:
            try:
                return writer(path, size)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                return writer(path, size)
        except OSError as error:
            raise _explain("create", path, size, error) from error

    def open(self, name: str) -> _LocalReader:
        path = self._start + name
        try:
            return _LocalReader(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        except OSError as error:
            raise store_error("open", path, error) from error

    def look(self, name: str) -> FileInfo | None:
        path = self._path(name)
        # Of a link that leads nowhere, perhaps to a disk that is not mounted now, the link counts.
        for status_of in (os.stat, os.lstat):
            try:
                return _info(name, status_of(path))
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise store_error("look at", path, error) from error
        return None

    def list(self) -> list[str]:
        try:
            return sorted(os.listdir(self.location))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise store_error("list", self.location, error) from error

    def files(self, prefix: str) -> list[FileInfo]:
        directory, slash, start = prefix.rpartition("/")
        found: list[FileInfo] = []
        self._find_files(directory + slash, start, found)
        return sorted(found, key=attrgetter("name"))

    def is_link(self, name: str) -> bool:
        return os.path.islink(self._path(name))

    def sync(self, directory: str) -> None:
        try:
            _sync_directory(self._path(directory))
        except FileNotFoundError:
            return
        except OSError as error:
            raise store_error("sync", self._path(directory), error) from error

    def discard_uploads(self) -> None:
        pass

    def delete(self, name: str) -> None:
        path = self._start + name
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (IsADirectoryError, PermissionError) as error:
            self._delete_directory(path, error)
        except OSError as error:
            raise store_error("delete", path, error) from error

    def _delete_directory(self, path: str, refused: OSError) -> None:
        if os.path.islink(path) or not os.path.isdir(path):
            raise store_error("delete", path, refused) from refused
        try:
            shutil.rmtree(path, onerror=_unless_gone)
        except FileNotFoundError:
            return
        except OSError as error:
            raise store_error("delete", path, error) from error

    def _find_files(self, above: str, start: str, found: list[FileInfo]) -> None:
        """Add the files whose names begin with `start` in the directory `above`, and below it."""
        try:
            with os.scandir(self._path(above)) as entries:
                for entry in entries:
                    if not entry.name.startswith(start):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        self._find_files(f"{above}{entry.name}/", "", found)
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # deleted meanwhile
                    found.append(_info(above + entry.name, status))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise store_error("list", self._path(above), error) from error

    def _path(self, name: str) -> str:
        return self._start + name if name else self.location


class _LocalWriter:
    def __init__(self, path: str, size: int):
        self._path = path
        self._size = size
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        try:
            end = _write_all(self._file, offset, buffers)
        except OSError as error:
            raise _explain("write", self._path, self._size, error) from error
        _start_writing_out(self._file, offset, end - offset)

    def finish(self) -> None:
        file, self._file = self._file, -1
        try:
            try:
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise _explain("write", self._path, self._size, error) from error

    def abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _ReplacingWriter(_LocalWriter):
    """Writes under a temporary name, which is exchanged for the file's own at the end."""

    def __init__(self, path: str, size: int):
        self._name = path
        super().__init__(f"{path}.{os.urandom(8).hex()}.tmp", size)

    def finish(self) -> None:
        try:
            super().finish()
            try:
                os.replace(self._path, self._name)
                _sync_directory(os.path.dirname(self._name))
            except OSError as error:
                raise _explain("replace", self._name, self._size, error) from error
        except BaseException:
            _unlink_quietly(self._path)
            raise

    def abandon(self) -> None:
        if self._file >= 0:
            _unlink_quietly(self._path)
        super().abandon()


class _LocalReader:
    def __init__(self, path: str):
        self._path = path
        self._file = _open_file(path)
        self.size = os.fstat(self._file).st_size

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        try:
            return _read_all(self._file, offset, buffers)
        except OSError as error:
            raise store_error("read", self._path, error) from error

    def close(self) -> None:
        os.close(self._file)


def _open_file(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file to read it. Of a pipe, which would be waited for in vain, it says so."""
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(file).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(file)
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", path)
    return file


def _explain(action: str, path: str, size: int, error: OSError) -> StoreError:
    """Why a file of `size` bytes can't be written, with what it lacks if that is room."""
    mapped = store_error(action, path, error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return mapped
    needs = f"the file needs {size:,} bytes"
    if error.errno != errno.EFBIG:
        needs += _room_beside(path)
    return StoreError(f"{mapped} ({needs})", errno=error.errno, filename=path)


def _room_beside(path: str) -> str:
    """', … are free'; nothing where that can't be told, as of a directory that is gone."""
    with suppress(OSError):
        place = os.statvfs(os.path.dirname(path))
        if place.f_files and not place.f_favail:
            return ", and the file system takes no more files, however small"
        return f", {place.f_bavail * place.f_frsize:,} are free"
    return ""


def _write_all(file: int, offset: int, buffers: Sequence[Any]) -> int:
    """Write every byte, however the kernel cuts the calls short; returns the offset after them."""
    for at in range(0, len(buffers), _MAX_BUFFERS):
        pending = byte_views(buffers[at : at + _MAX_BUFFERS])
        left = sum(map(attrgetter("nbytes"), pending))
        while left:
            written = os.pwritev(file, pending, offset)
            offset += written
            left -= written
            if left:
                pending = _skip(pending, written)
    return offset


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


def _start_writing_out(file: int, offset: int, nbytes: int) -> None:
    """Have the disk work while the next blocks are made, not only in the fsync at the end.

    No promise is made by it: the fsync is what counts, and where this can't be done it is slower.
    """
    if _sync_file_range is not None and nbytes:
        _sync_file_range(file, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def _read_all(file: int, offset: int, buffers: Sequence[Any]) -> int:
    """Read until the buffers are full or the file ends; returns the bytes read."""
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


def _make_directories(path: str) -> bool:
    """Like os.makedirs, with every new name as durable as what will be put below it.

    Returns whether `path` was made by this call.
    """
    if os.path.isdir(path):
        return False
    parent = os.path.dirname(path)
    _make_directories(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return False  # another process was faster
    _sync_directory(parent)
    return True


def _is_read_only(path: str) -> bool:
    """Whether the file system is, which root's own permissions don't tell."""
    with suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def _unless_gone(function: Any, path: str, info: Any) -> None:
    if not isinstance(info[1], FileNotFoundError):  # else another process was faster
        raise info[1]


def _sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not a thing on some file systems
            raise
    finally:
        os.close(directory)


def _info(name: str, status: os.stat_result) -> FileInfo:
    # Every `put` is a rename: the file is another one each time.
    version = (status.st_ino, status.st_mtime_ns, status.st_size)
    return FileInfo(name, status.st_size, status.st_mtime, version)


def _create(temporary: str, path: str) -> None:
    """Give a file that is complete a name that must be free, in one event."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # as near as it gets without hard links
            raise FileExistsError(path) from error
        os.replace(temporary, path)
    else:
        os.unlink(temporary)


def _replaced_meanwhile(path: str) -> Busy:
    return Busy(f"another save has replaced {path} meanwhile, or is about to; try again")


def _write_new(path: str, data: bytes) -> None:
    """Write a file that nothing depends on, without any promise."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)
    except OSError as error:
        raise _explain("write", path, len(data), error) from error


def _unlink_quietly(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
