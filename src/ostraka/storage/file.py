"""Files of a local file system, open to be written or read."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from ostraka.errors import StoreError, store_error
from ostraka.storage._base import byte_views
from ostraka.storage._directory import CREATE, Directory, sync_directory, unlink_quietly

_MAX_BUFFERS = 1024
"""The most buffers of one vectored call (IOV_MAX)."""


class LocalWriter:
    def __init__(self, file: int, path: str, size: int):
        self._file = file
        self._path = path
        self._size = size

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        try:
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
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise explain("write", self._path, self._size, error) from error

    def abandon(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with suppress(OSError):  # Nothing is promised of it.
                os.close(file)


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
        written = os.pwritev(file, [data], 0)
        if written < len(data):
            write_all(file, written, [memoryview(data)[written:]])
        if durable:
            os.fsync(file)
    finally:
        os.close(file)
