"""Names in a directory, by its handle: links are not followed, and only regular files are read.

Whoever may write to a directory can put anything under a name in it, at any moment. So a name is
opened relative to a handle, without following a link in its place (`O_NOFOLLOW`), without waiting
for a pipe (`O_NONBLOCK`), and what was opened is asked what it is before anything is read of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from ostraka.errors import TooLarge, Unreadable

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
BELOW = DIRECTORY | os.O_NOFOLLOW
"""A directory that must not be a link."""
MOST_DEEP = 64
"""So many directories in each other are looked into; a checkpoint has one."""
_SURELY_REAL_BYTES = 16 << 20
"""Up to this size a file may have holes: it is read, and found wrong by its digest."""
_READ_BYTES = 64 << 20
"""What is read at a time."""
_IS_A_LINK = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR)
"""What systems say of a link that is not followed."""
A_LINK = (
    "a symbolic link, and links in a checkpoint are not followed: if you trust whoever made it, "
    "copy the checkpoint with cp -rL, which puts files in their place"
)
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
    """Open a regular file to read it; returns its handle and its size.

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
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    mode = entry.stat(follow_symlinks=False).st_mode
                    raise Unreadable(entry.path, _describe(mode))


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
    """Open a directory below another one; no part of `path` may be a link.

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
    """Remove a directory with all in it; what another process removes meanwhile is gone, too.

    Unlike `shutil.rmtree`, it can't be made to wait for a pipe that is put in a directory's place.
    """
    _refuse_depth(depth)
    try:
        directory = Directory(os.open(name, BELOW, dir_fd=above))
        with os.scandir(directory.file) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry, is_directory in found:
            if is_directory:
                remove_tree(entry, directory.file, depth + 1)
                continue
            with suppress(FileNotFoundError):
                os.unlink(entry, dir_fd=directory.file)
        os.rmdir(name, dir_fd=above)
    except FileNotFoundError:
        return


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
