"""A checkpoint in a directory of a local or mounted file system."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from typing import Any

from ostraka.errors import (
    Busy,
    NotDurable,
    OstrakaError,
    PathInTheWay,
    store_error,
)
from ostraka.storage._base import ANYTHING, MOST_BYTES, FileInfo, Parts
from ostraka.storage._directory import (
    BY_PATH,
    CREATE,
    DIRECTORY,
    READ,
    Directory,
    find_files,
    open_below,
    open_file,
    read_whole,
    refuse_other_kinds_below,
    remove_tree,
)
from ostraka.storage._file import LocalReader, LocalWriter, explain, write_all
from ostraka.storage._flock import DirectoryLock, link_in_the_way, lock_directory

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links say."""


class LocalStore:
    """Names are files below one directory.

    The way to the directory is the user's own, and links in it are followed. Below it nothing is:
    neither links, nor pipes and devices in the place of files. While the place is locked by `lock`,
    all names are those in the directory that was locked, wherever its path leads meanwhile.

    A place below another (`at`) is written to only if it is no link itself.
    """

    parts = Parts()

    def __init__(self, directory: str, *, follow: bool = True):
        self.location = directory
        self._start = directory if directory.endswith(os.sep) else directory + os.sep
        self._follow = follow
        self._lock: DirectoryLock | None = None
        self._written: tuple[str, Directory] | None = None
        """The directory below that was last written to: a save has one for all of its files."""

    def __str__(self) -> str:
        return self.location

    def at(self, name: str) -> LocalStore:
        return LocalStore(self._start + name, follow=False) if name else LocalStore(self.location)

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
        if not self._follow and os.path.islink(self.location):
            raise link_in_the_way(self.location)
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
        self._lock = lock_directory(self.location, follow=self._follow)
        return self._lock

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        path = self._start + name
        try:
            above, leaf = self._find(name)
            file, size = open_file(leaf, above.file, path)
            try:
                return read_whole(file, size, path, most_bytes=most_bytes)
            finally:
                os.close(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        except OstrakaError:
            raise
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
        try:
            above, leaf = self._find(name, to_write=True)
            if not durable:
                _write_new(leaf, above.file, data, durable=False)
                return
            temporary = f"{leaf}.{os.urandom(16).hex()}.tmp"
            try:
                _write_new(temporary, above.file, data)
                if check is not None:
                    check()
                if replaces is ANYTHING:
                    os.replace(temporary, leaf, src_dir_fd=above.file, dst_dir_fd=above.file)
                else:
                    _replace(temporary, leaf, above.file, path, replaces)
            except BaseException:
                _unlink_quietly(temporary, above.file)
                raise
        except OstrakaError:
            raise
        except OSError as error:
            raise explain("write", path, len(data), error) from error
        assert above.file is not None
        try:
            _sync_directory(above.file)
        except OSError as error:
            refused = store_error("sync the directory of", path, error)
            raise NotDurable(refused.message, errno=error.errno, filename=path) from error

    def touch(self, name: str, *, create: bool) -> None:
        path = self._start + name
        try:
            above, leaf = self._find(name)
            if create:
                os.close(os.open(leaf, CREATE, 0o666, dir_fd=above.file))
            else:
                os.utime(leaf, dir_fd=above.file, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # stale: another machine has deleted it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            raise store_error("write", path, error) from error

    def create(
        self, name: str, size: int, *, beside: int = 1, replace: bool = False
    ) -> LocalWriter:
        path = self._start + name
        suffix = f".{os.urandom(16).hex()}.tmp" if replace else ""
        try:
            above, leaf = self._find(name, to_write=True, make=True)
            try:
                file = os.open(leaf + suffix, CREATE, 0o666, dir_fd=above.file)
            except FileNotFoundError:  # Its directory was deleted since it was last written to.
                self._written = None
                above, leaf = self._find(name, to_write=True, make=True)
                file = os.open(leaf + suffix, CREATE, 0o666, dir_fd=above.file)
        except OstrakaError:
            raise
        except OSError as error:
            raise explain("create", path, size, error) from error
        if replace:
            return _ReplacingWriter(file, path, size, above, leaf + suffix)
        return LocalWriter(file, path, size)

    def open(self, name: str, first_bytes: int = 0) -> LocalReader:
        path = self._start + name
        try:
            above, leaf = self._find(name)
            return LocalReader(*open_file(leaf, above.file, path), path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        except OstrakaError:
            raise
        except OSError as error:
            raise store_error("open", path, error) from error

    def look(self, name: str) -> FileInfo | None:
        try:
            above, leaf = self._find(name)
            return _info(name, os.stat(leaf, dir_fd=above.file, follow_symlinks=False))
        except OstrakaError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise store_error("look at", self._start + name, error) from error

    def list(self) -> list[str]:
        try:
            return sorted(os.listdir(self.location))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise store_error("list", self.location, error) from error

    def files(self, prefix: str) -> list[FileInfo]:
        directory, slash, start = prefix.rpartition("/")
        place = BY_PATH if self._lock is None else self._lock.directory
        found: list[tuple[str, os.stat_result]] = []
        try:
            if directory:
                above = open_below(directory, place.file, self._start)
            else:
                above = os.open(self.location, DIRECTORY)
            try:
                find_files(above, directory + slash, start, found)
            finally:
                os.close(above)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OstrakaError:
            raise
        except OSError as error:
            raise store_error("list", self._start + directory, error) from error
        return [_info(*file) for file in sorted(found, key=itemgetter(0))]

    def refuse_other_kinds(self) -> None:
        """Raise Unreadable for anything in this place that is neither a file nor a directory."""
        try:
            refuse_other_kinds_below(self.location)
        except OstrakaError:
            raise
        except OSError as error:
            raise store_error("list", self.location, error) from error

    def is_link(self, name: str) -> bool:
        return os.path.islink(self._start + name)

    def sync(self, directory: str) -> None:
        try:
            if not directory:
                held = None if self._lock is None else self._lock.directory
                _sync_directory(self.location if held is None or held.file is None else held.file)
                return
            above, leaf = self._find(directory)
            file = os.open(leaf, READ, dir_fd=above.file)
            try:
                _sync_directory(file)
            finally:
                os.close(file)
        except FileNotFoundError:
            return
        except OstrakaError:
            raise
        except OSError as error:
            raise store_error("sync", self._start + directory, error) from error

    def discard_uploads(self) -> None:
        pass

    def delete(self, name: str) -> None:
        self._written = None
        try:
            above, leaf = self._find(name)
            try:
                os.unlink(leaf, dir_fd=above.file)
            except (IsADirectoryError, PermissionError):
                if not stat.S_ISDIR(os.lstat(leaf, dir_fd=above.file).st_mode):
                    raise
                remove_tree(leaf, above.file)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OstrakaError:
            raise
        except OSError as error:
            raise store_error("delete", self._start + name, error) from error

    def _find(
        self, name: str, *, to_write: bool = False, make: bool = False
    ) -> tuple[Directory, str]:
        """Where a name is: the handle of its directory, and what it is called there.

        Without a handle it is called by its whole path; `to_write` there is always one, since the
        directory has to be synced then. With `make` a directory below the place is made.
        """
        directory, _, leaf = name.rpartition("/")
        place = BY_PATH if self._lock is None else self._lock.directory
        if not directory:
            if place is not BY_PATH and name:
                return place, name
            if to_write:
                return Directory(os.open(self.location, DIRECTORY)), name
            return BY_PATH, self._start + name if name else self.location
        if not to_write:
            return Directory(open_below(directory, place.file, self._start)), leaf
        written = self._written
        if written is None or written[0] != directory:
            below = Directory(open_below(directory, place.file, self._start, make=make))
            written = self._written = (directory, below)
        return written[1], leaf


class _ReplacingWriter(LocalWriter):
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
                _sync_directory(above)
            except OSError as error:
                raise explain("replace", self._path, self._size, error) from error
        except BaseException:
            _unlink_quietly(self._temporary, above)
            raise

    def abandon(self) -> None:
        if self._file >= 0:
            _unlink_quietly(self._temporary, self._above.file)
        super().abandon()


def _write_new(name: str, above: int | None, data: bytes, *, durable: bool = True) -> None:
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
    _sync_directory(parent)
    return True


def _is_read_only(path: str) -> bool:
    """Whether the file system is, which root's own permissions don't tell."""
    with suppress(OSError):
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def _sync_directory(directory: int | str) -> None:
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


def _info(name: str, status: os.stat_result) -> FileInfo:
    # Every `put` is a rename: the file is another one each time.
    version = (status.st_ino, status.st_mtime_ns, status.st_size)
    return FileInfo(name, status.st_size, status.st_mtime, version)


def _replace(temporary: str, name: str, above: int | None, path: str, replaces: Any) -> None:
    """Give a file that is complete its name, if what has it is still what `replaces` says."""
    try:
        if replaces is None:
            _create(temporary, name, above)
            return
        there = os.stat(name, dir_fd=above, follow_symlinks=False)
        if _info(name, there).version != replaces:
            raise _replaced_meanwhile(path)
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


def _unlink_quietly(name: str, above: int | None) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=above)
