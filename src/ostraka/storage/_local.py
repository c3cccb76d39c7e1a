"""A checkpoint in a directory of a local or mounted file system."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

from ostraka.errors import Busy, NotDurable, OstrakaError, StoreError, store_error
from ostraka.layout.shard_file import METADATA_NAME
from ostraka.storage import file as _file
from ostraka.storage._base import ANYTHING, MOST_BYTES, FileInfo, Traits


class LocalStore:
    """Names are files below one directory.

    The way to the directory is the user's own, and links in it are followed. Below it nothing is:
    neither links, nor pipes and devices in the place of files. While the place is locked by `lock`,
    all names are those in the directory that was locked, wherever its path leads meanwhile.

    A place below another (`at`) is written to only if it is no link itself.
    """

    traits = Traits()

    def __init__(self, directory: str, *, follow: bool = True, direct: bool = False):
        self.location = directory
        self._start = directory if directory.endswith(os.sep) else directory + os.sep
        self._follow = follow
        self._direct = direct
        self._lock: _file.DirectoryLock | None = None
        self._written: tuple[str, _file.Directory] | None = None
        """The directory below that was last written to: a save has one for all of its files."""

    def __str__(self) -> str:
        return self.location

    def at(self, name: str) -> LocalStore:
        if not name:
            return LocalStore(self.location)
        self._refuse_outside(name)
        return LocalStore(self._start + name, follow=False)

    def direct(self) -> LocalStore:
        """Return the same place, whose new files are written past the page cache if they can be."""
        return LocalStore(self.location, follow=self._follow, direct=True)

    def prepare(self) -> bool:
        return _file.make_place(self.location, follow=self._follow)

    def remove_if_empty(self) -> None:
        try:
            os.rmdir(self.location)
            _file.sync_directory(os.path.dirname(self.location))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise store_error("remove the directory", self.location, error) from error

    def exists(self) -> bool:
        return os.path.isdir(self.location)

    def space(self) -> tuple[int, int]:
        """Return the bytes that are free for this user on the file system, and all of its bytes."""
        with _Refusals("look at", self.location):
            found = os.statvfs(self.location)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def lock(self) -> _file.DirectoryLock | None:
        self._lock = _file.lock_directory(self.location, follow=self._follow)
        return self._lock

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        path = self._start + name
        with _Refusals("read", path):
            above, leaf = self._find(name)
            file, size = _file.open_file(leaf, above.file, path)
            try:
                return _file.read_whole(file, size, path, most_bytes=most_bytes)
            finally:
                os.close(file)

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], Any] | None = None,
        durable: bool = True,
    ) -> None:
        path = self._start + name
        try:
            above, leaf = self._find(name, to_write=True)
            if not durable:
                _file.write_new(leaf, above.file, data, durable=False)
                return
            temporary = f"{leaf}.{os.urandom(16).hex()}.tmp"
            try:
                _file.write_new(temporary, above.file, data)
                if check is not None:
                    check()
                if replaces is ANYTHING:
                    os.replace(temporary, leaf, src_dir_fd=above.file, dst_dir_fd=above.file)
                else:
                    _file.give_name(temporary, leaf, above.file, path, replaces)
            except BaseException:
                _file.unlink_quietly(temporary, above.file)
                raise
        except OstrakaError:
            raise
        except OSError as error:
            raise _file.explain("write", path, len(data), error) from error
        assert above.file is not None
        try:
            _file.sync_directory(above.file)
        except OSError as error:
            refused = store_error("sync the directory of", path, error)
            raise NotDurable(refused.message, errno=error.errno, filename=path) from error

    def touch(self, name: str, *, create: bool, note: bytes = b"") -> None:
        path = self._start + name
        try:
            above, leaf = self._find(name)
            if create:
                file = os.open(leaf, _file.CREATE, 0o666, dir_fd=above.file)
                try:
                    os.write(file, note)
                except OSError:
                    pass  # A disk that is full has room for names.
                finally:
                    os.close(file)
            else:
                os.utime(leaf, dir_fd=above.file, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # stale: another machine has deleted it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            raise store_error("write", path, error) from error

    def create(
        self, name: str, size: int, *, beside: int = 1, replace: bool = False
    ) -> _file.LocalWriter:
        path = self._start + name
        suffix = f".{os.urandom(16).hex()}.tmp" if replace else ""
        try:
            above, leaf = self._find(name, to_write=True, make=True)
            try:
                file = os.open(leaf + suffix, _file.CREATE, 0o666, dir_fd=above.file)
            except FileNotFoundError:  # Its directory was deleted since it was last written to.
                self._written = None
                above, leaf = self._find(name, to_write=True, make=True)
                file = os.open(leaf + suffix, _file.CREATE, 0o666, dir_fd=above.file)
        except OstrakaError:
            raise
        except OSError as error:
            raise _file.explain("create", path, size, error) from error
        if replace:
            return _file.ReplacingWriter(file, path, size, above, leaf + suffix)
        return _file.LocalWriter(file, path, size, direct=self._direct)

    def open(self, name: str, first_bytes: int = 0) -> _file.LocalReader:
        path = self._start + name
        with _Refusals("open", path):
            above, leaf = self._find(name)
            return _file.LocalReader(*_file.open_file(leaf, above.file, path), path)

    def look(self, name: str) -> FileInfo | None:
        try:
            above, leaf = self._find(name)
            return _file.info_of(name, os.stat(leaf, dir_fd=above.file, follow_symlinks=False))
        except OstrakaError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise store_error("look at", self._start + name, error) from error

    def list(self) -> list[str]:
        with suppress(FileNotFoundError), _Refusals("list", self.location):
            return sorted(os.listdir(self.location))
        return []

    def files(self, prefix: str) -> list[FileInfo]:
        self._refuse_outside(prefix)
        directory, slash, start = prefix.rpartition("/")
        place = _file.BY_PATH if self._lock is None else self._lock.directory
        found: list[tuple[str, os.stat_result]] = []
        with suppress(FileNotFoundError), _Refusals("list", self._start + directory):
            if directory:
                above = _file.open_below(directory, place.file, self._start)
            else:
                above = os.open(self.location, _file.DIRECTORY)
            try:
                _file.find_files(above, directory + slash, start, found)
            finally:
                os.close(above)
            return [_file.info_of(*file) for file in sorted(found, key=itemgetter(0))]
        return []

    def is_link(self, name: str) -> bool:
        self._refuse_outside(name)
        return os.path.islink(self._start + name)

    def sync(self, directory: str) -> None:
        with suppress(FileNotFoundError), _Refusals("sync", self._start + directory):
            if not directory:
                place = _file.BY_PATH if self._lock is None else self._lock.directory
                _file.sync_directory(self.location if place.file is None else place.file)
                return
            above, leaf = self._find(directory)
            file = os.open(leaf, _file.READ, dir_fd=above.file)
            try:
                _file.sync_directory(file)
            finally:
                os.close(file)

    def discard_uploads(self) -> None:
        pass

    def delete(
        self, name: str, *, version: Any = ANYTHING, check: Callable[[], Any] | None = None
    ) -> None:
        self._written = None
        with suppress(FileNotFoundError), _Refusals("delete", self._start + name):
            above, leaf = self._find(name)
            if check is not None:
                self._move_out(name, leaf, above.file, version, check)
                return
            if version is not ANYTHING:
                _file.refuse_other_version(leaf, above.file, self._start + name, version)
            _file.remove(leaf, above.file)

    def _move_out(
        self, name: str, leaf: str, above: int | None, version: Any, check: Callable[[], Any]
    ) -> None:
        """Remove a name by way of a directory of its own, without which it stays: the fence.

        Whoever takes the place over deletes that directory first, and nothing can be moved into it
        from then on.
        """
        path = self._start + name
        _file.refuse_other_version(leaf, above, path, version)  # Or there is nothing to do.
        place, fence = self._find(f"{METADATA_NAME}.{os.urandom(16).hex()}.tmp")
        try:
            os.mkdir(fence, dir_fd=place.file)
        except OSError:
            # A disk that is full has no room for a directory, and must be cleared nevertheless.
            check()
            _file.refuse_other_version(leaf, above, path, version)
            _file.remove(leaf, above)
            return
        try:
            check()
            _file.refuse_other_version(leaf, above, path, version)
            try:
                os.rename(leaf, f"{fence}/removed", src_dir_fd=above, dst_dir_fd=place.file)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESTALE):
                    os.lstat(leaf, dir_fd=above)  # Another may have removed it meanwhile.
                    raise Busy(
                        f"{path} is not deleted: this process stood still, and another has taken "
                        "its place"
                    ) from error
                check()  # Some file systems can't move a directory into another.
                _file.remove(leaf, above)
        finally:
            _file.remove_tree(fence, place.file)

    def delete_link(self, name: str) -> None:
        with suppress(FileNotFoundError), _Refusals("delete the link", self._start + name):
            above, leaf = self._find(name)
            if not stat.S_ISLNK(os.lstat(leaf, dir_fd=above.file).st_mode):
                raise StoreError(
                    f"can't delete the link {self._start}{name}: it is no link any more",
                    errno=errno.EINVAL,
                )
            os.unlink(leaf, dir_fd=above.file)

    def _refuse_outside(self, name: str) -> None:
        """Raise StoreError for a name that would lead out of the place."""
        if name.startswith("/") or (".." in name and ".." in name.split("/")):
            raise StoreError(
                f"can't use the name {name!r} in {self.location}: it leads out of the directory; "
                "give a name below it, without '..'",
                errno=errno.EINVAL,
            )

    def _find(
        self, name: str, *, to_write: bool = False, make: bool = False
    ) -> tuple[_file.Directory, str]:
        """Where a name is: the handle of its directory, and what it is called there.

        Without a handle it is called by its whole path. There is always a handle `to_write`, since
        the directory has to be synced then. With `make` a directory below the place is made.
        """
        if ".." in name or name[:1] == "/":
            self._refuse_outside(name)
        directory, _, leaf = name.rpartition("/")
        place = _file.BY_PATH if self._lock is None else self._lock.directory
        if not directory:
            if place is not _file.BY_PATH and name:
                return place, name
            if to_write:
                return _file.Directory(os.open(self.location, _file.DIRECTORY)), name
            return _file.BY_PATH, self._start + name if name else self.location
        if not to_write:
            return _file.Directory(_file.open_below(directory, place.file, self._start)), leaf
        written = self._written
        if written is None or written[0] != directory:
            below = _file.Directory(_file.open_below(directory, place.file, self._start, make=make))
            written = self._written = (directory, below)
        return written[1], leaf


class _Refusals(NamedTuple):
    """Makes a missing file a FileNotFoundError, and any other refusal a StoreError."""

    action: str
    path: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, OstrakaError) or not isinstance(error, OSError):
            return
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            # No name for it: it would keep the caller's values until the garbage collector comes.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path) from error
        raise store_error(self.action, self.path, error) from error
