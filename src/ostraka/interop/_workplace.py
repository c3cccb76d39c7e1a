"""Where a conversion works until it is finished, and how the result appears in one event.

For a target `out` in a file system that is the directory `out.converting` beside it:

    work.json    which conversion this is; one of something else begins anew
    journal      a line for each piece that is written, with its digest
    files/       the result, which is renamed to `out`

A conversion that was killed leaves the directory, and the next one of the same goes on with it.
What the journal says is believed only after the bytes that it is about were compared with their
digest.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import suppress

from ostraka.errors import PathInTheWay, store_error
from ostraka.storage import Claim, LocalStore

_SUFFIX = ".converting"
_WORK, _JOURNAL, _FILES = "work.json", "journal", "files"


class Workplace:
    """The directory of one conversion, held by this process from `take` until `release`."""

    def __init__(self, target: str, work_id: str, *, is_file: bool = False):
        self.target = target
        self._is_file = is_file
        self._id = work_id
        self._directory = target + _SUFFIX
        self._claim = Claim(LocalStore(self._directory))
        self.files = LocalStore(os.path.join(self._directory, _FILES))
        self.journal = Journal(os.path.join(self._directory, _JOURNAL))

    def take(self) -> None:
        """Hold the place; what another conversion left there is removed.

        Raises PathInTheWay if the target is there, Busy if this conversion is under way elsewhere.
        """
        refuse_existing(self.target, is_file=self._is_file)
        LocalStore(self._directory).prepare()
        self._claim.take(wait=True)
        try:
            refuse_existing(
                self.target, is_file=self._is_file
            )  # Another may have finished it meanwhile.
            if not self._is_same():
                self.journal.forget()
                shutil.rmtree(self.files.location, ignore_errors=True)
                LocalStore(self._directory).put(_WORK, json.dumps({"id": self._id}).encode())
            self.files.prepare()
        except BaseException:
            self.release()
            raise

    def _is_same(self) -> bool:
        try:
            found = json.loads(LocalStore(self._directory).get(_WORK))
        except (OSError, ValueError):
            return False
        return found == {"id": self._id}

    def commit(self, name: str = "") -> None:
        """Give the result its name: all files, or the one of this name."""
        made = os.path.join(self.files.location, name) if name else self.files.location
        self._claim.check()
        try:
            if name:
                _name_file(made, self.target)
            else:
                os.rename(made, self.target)
        except OSError as error:
            refuse_existing(self.target, is_file=self._is_file)
            raise store_error("give its name to the result", self.target, error) from error
        LocalStore(os.path.dirname(self.target)).sync("")
        self.discard()

    def discard(self) -> None:
        """Remove all that the conversion has written, but for a result that has its name."""
        self.journal.close()
        for name in (_FILES, _JOURNAL, _WORK):
            with suppress(OSError):
                LocalStore(self._directory).delete(name)

    def release(self) -> None:
        """Let others have the place; it is removed if nothing is in it."""
        self.journal.close()
        self._claim.release()
        with suppress(OSError):
            os.rmdir(self._directory)


def _name_file(made: str, target: str) -> None:
    """Give a file a name that must be free."""
    try:
        os.link(made, target)
    except PermissionError:  # no links on this file system
        refuse_existing(target, is_file=True)
        os.rename(made, target)


def refuse_existing(target: str, *, is_file: bool) -> None:
    """Raise PathInTheWay if something is at a path; an empty directory is not in a directory's."""
    try:
        if is_file or os.path.islink(target) or not os.path.isdir(target):
            is_there = os.path.lexists(target)
        else:
            is_there = bool(os.listdir(target))
    except OSError as error:
        raise store_error("look at", target, error) from error
    if is_there:
        raise PathInTheWay(
            f"{target} is there already, and nothing is overwritten; remove it, or give another "
            "path"
        )


class Journal:
    """Lines that are added as pieces are written; one that was cut short does not count."""

    def __init__(self, path: str):
        self._path = path
        self._file: int | None = None
        self._lock = threading.Lock()

    def read(self) -> dict[int, str]:
        """By the number of each piece, the digest that was noted of it last."""
        found: dict[int, str] = {}
        try:
            with open(self._path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise store_error("read", self._path, error) from error
        for line in data.split(b"\n")[:-1]:
            with suppress(ValueError):
                number, digest = line.decode().split()
                found[int(number)] = digest
        return found

    def note(self, number: int, digest: str) -> None:
        line = f"{number} {digest}\n".encode()
        try:
            with self._lock:
                if self._file is None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                    self._file = os.open(self._path, flags, 0o666)
                os.write(self._file, line)
        except OSError as error:
            raise store_error("write", self._path, error) from error

    def forget(self) -> None:
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def close(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)
