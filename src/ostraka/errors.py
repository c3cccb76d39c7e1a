"""The exceptions that Ostraka raises, and how their messages are built.

OstrakaError
├── InvalidTree            the tree holds something that can't be saved        (TypeError)
├── Mismatch               `like` and the checkpoint differ; lists every way   (ValueError)
├── InvalidSharding        a spec does not fit its leaf or its mesh            (ValueError)
├── CheckpointNotFound     there is no checkpoint at that path                 (FileNotFoundError)
├── NotACheckpoint         something else is at that path                      (ValueError)
├── PathInTheWay           saving there would overwrite what is not ours       (FileExistsError)
├── UnsupportedFormat      written by a newer version, or a store we lack      (ValueError)
├── StoreError             the operating system or the store refused           (OSError)
├── Busy                   another save is under way, or came in between       (OSError)
├── Damaged                bytes are lost or changed; names file and leaf      (ValueError)
├── SaveFailed             a process failed, died or timed out during a save   (RuntimeError)
├── RestoreFailed          a process failed, died or timed out during a restore (RuntimeError)
└── RepairFailed           a process failed, died or timed out during a repair (RuntimeError)

In brackets: the builtin error that each is too. A message is one sentence that says what, where,
what was expected and found, and what to do.
"""

from __future__ import annotations

import errno
import inspect
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Any

__all__ = [
    "Busy",
    "CheckpointNotFound",
    "Damaged",
    "DegradedRead",
    "InvalidSharding",
    "InvalidTree",
    "LostBox",
    "Mismatch",
    "NotACheckpoint",
    "OstrakaError",
    "PartialRestore",
    "PathInTheWay",
    "Problem",
    "RepairFailed",
    "RestoreFailed",
    "SaveFailed",
    "StoreError",
    "UnsupportedFormat",
]


_LOST = frozenset({errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)})


def printable(text: str) -> str:
    """Text that may come from a stranger's checkpoint, for a terminal.

    All that is no visible character is escaped: control codes, line breaks, marks that turn the
    direction of writing, characters that have no width.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same, for text that is ours and has lines."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


class OstrakaError(Exception):
    """Whatever Ostraka raises on purpose.

    Its message may name what is in a checkpoint: as text it has no control characters but its own
    line breaks.
    """

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class InvalidTree(OstrakaError, TypeError):
    """The tree holds a value, a key or a container that can't be saved."""


class Mismatch(OstrakaError, ValueError):
    """What was asked for and what was saved differ; `differences` has one line for each way."""

    def __init__(self, subject: str, differences: Sequence[str]):
        self.subject = subject
        self.differences = tuple(differences)
        super().__init__(headed_list(subject, self.differences))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.subject, self.differences)


class InvalidSharding(OstrakaError, ValueError):
    """A partition spec does not fit its leaf or its mesh."""


class CheckpointNotFound(OstrakaError, FileNotFoundError):
    """No checkpoint is there."""


class NotACheckpoint(OstrakaError, ValueError):
    """Something is there, and it is not an Ostraka checkpoint."""


class PathInTheWay(OstrakaError, FileExistsError):
    """A save would have to overwrite something that is not an Ostraka checkpoint."""


class UnsupportedFormat(OstrakaError, ValueError):
    """The checkpoint needs a newer Ostraka, or the path a store that is not there."""


class StoreError(OstrakaError, OSError):
    """The file system or the object store refused; `errno` is what it said."""

    def __init__(self, message: str, *, errno: int | None = None, filename: str | None = None):
        super().__init__(message)
        self.message = message
        self.errno = errno
        self.filename = filename

    @property
    def loss(self) -> str | None:
        """The message for bytes that the disk can't read any more; None for other errors."""
        if self.errno is None or self.errno not in _LOST:
            return None
        return f"it can't be read: {os.strerror(self.errno)}"

    def __str__(self) -> str:
        return printable_lines(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,), {"errno": self.errno, "filename": self.filename}


class Unreadable(StoreError):
    """What is there can't be a file of ours: a link, a pipe, a device; nothing of it is read."""

    def __init__(self, path: str, found: str):
        super().__init__(f"can't read {path}: {found}", errno=errno.EINVAL, filename=path)
        self.found = found

    @property
    def loss(self) -> str | None:
        return self.found

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.filename, self.found)


class TooLarge(Unreadable):
    """A file is larger than it may be; nothing of it is read."""

    def __init__(self, path: str, size: int, most_bytes: int):
        super().__init__(path, f"it has {size:,} bytes, and may have {most_bytes:,} at most")
        self.size = size
        self.most_bytes = most_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.filename, self.size, self.most_bytes)


class OutcomeUnknown(StoreError):
    """The store did not answer, and whether it has done what it was asked can't be told."""


class NotDurable(OutcomeUnknown):
    """It was done, and a power failure may undo it."""


class Busy(OstrakaError, OSError):
    """Another save to the same path has not finished, or has replaced what was being read."""


class PartialRestore(UserWarning):
    """A restore with `strict=False` found leaves missing or unexpected, and says which."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class DegradedRead(UserWarning):
    """A checkpoint is damaged, and what is lost of it was taken from its parity."""


@dataclass(frozen=True, slots=True)
class LostBox:
    """What of a leaf is lost or can't be trusted: the smallest box around those elements.

    `str` of it is what Python would call it: `'params/w'[0:128, :]`.
    """

    leaf: str
    box: tuple[tuple[int, int], ...]
    """`(start, stop)` in every dimension."""
    shape: tuple[int, ...]
    """Of the whole leaf."""

    @property
    def elements(self) -> int:
        return prod(stop - start for start, stop in self.box)

    @property
    def is_whole(self) -> bool:
        return self.box == tuple((0, extent) for extent in self.shape)

    def __str__(self) -> str:
        if self.is_whole:
            return repr(self.leaf)
        ranges = zip(self.box, self.shape, strict=True)
        texts = [":" if (a, b) == (0, n) else f"{a}:{b}" for (a, b), n in ranges]
        return f"{self.leaf!r}[{', '.join(texts)}]"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint's bytes."""

    file: str
    found: str
    leaves: tuple[str, ...] = ()
    boxes: tuple[LostBox, ...] = ()
    """What of each leaf lies there."""
    span: tuple[int, int] | None = None
    """The bytes of the file that it is about, `[start, stop)`; None if that is all of it."""
    process: int | None = None
    """Which process wrote the file; None if none did alone."""
    host: str | None = None
    """The host of that process, if it is known."""

    @property
    def writer(self) -> str:
        """The process with its host, for a message; empty if it is not known."""
        if self.process is None:
            return ""
        return f"process {self.process}" + (f" on {self.host}" if self.host else "")

    def __str__(self) -> str:
        where = f" (leaf {name_few(self.leaves)})" if self.leaves else ""
        return f"{self.file}{where}: {self.found}"

    def explain(self) -> str:
        """As `str`, with the box of each leaf, how much of it that is, and who wrote the file."""
        leaves = _few_boxes(self.boxes) if self.boxes else name_few(self.leaves)
        where = f" (leaf {leaves})" if leaves else ""
        by = f", written by {self.writer}" if self.process is not None else ""
        return f"{self.file}{where}{by}: {self.found}"


class Damaged(OstrakaError, ValueError):
    """Bytes of a checkpoint are lost or changed; `problems` says which."""

    def __init__(self, path: str, problems: Sequence[Problem]):
        self.path = path
        self.problems = tuple(problems)
        super().__init__(
            headed_list(f"checkpoint {path} is damaged", [str(p) for p in self.problems])
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # With `args`, what was added to the message later, such as a remedy.
        return type(self), (self.path, self.problems), {"args": self.args}


class _ProcessFailure(OstrakaError, RuntimeError):
    """One process failed, so all processes raise."""

    verb = ""

    def __init__(self, path: str, process: int | None, cause: str):
        self.path = path
        self.process = process
        self.cause = cause
        who = "" if process is None else f" on process {process}"
        super().__init__(f"{self.verb} {path} failed{who}: {cause}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.process, self.cause)


class SaveFailed(_ProcessFailure):
    """A save failed, on all processes; `process` and `cause` say where and why.

    What was there before is still there, unless `cause` says that the new checkpoint is in place,
    or may be.
    """

    verb = "saving"


class RestoreFailed(_ProcessFailure):
    """A restore failed on some process, so it failed on all; `process` and `cause` say why."""

    verb = "restoring"


class RepairFailed(_ProcessFailure):
    """A repair failed on some process, so it failed on all; `process` and `cause` say why.

    Files that were mended before stay so.
    """

    verb = "repairing"


def describe(error: BaseException) -> str:
    """An exception as one line, for another process or a log."""
    if isinstance(error, OstrakaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{type(error).__name__}: {error.strerror}{where}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def nearest_path(path: str, paths: Sequence[str]) -> str:
    """As `nearest`, for a leaf or a name above leaves: `parms`, or `kernel` of `model/kernel`."""
    ends = [known for known in paths if known.endswith(f"/{path}")]
    if ends:
        return f" (did you mean {ends[0]!r}?)"
    names = (known.split("/") for known in paths)
    above = ("/".join(parts[:depth]) for parts in names for depth in range(1, len(parts)))
    return nearest(path.rstrip("/"), [*paths, *dict.fromkeys(above)])


def warn_caller(warning: Warning) -> None:
    """Warn at the line that called Ostraka, however far above it is."""
    frame = inspect.currentframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "ostraka":
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def store_error(action: str, path: str | os.PathLike[str], error: OSError) -> StoreError:
    """The store's refusal as a sentence; the error number stays on the exception."""
    name = os.fspath(path)
    message = f"can't {action} {name}: {error.strerror or error}"
    return StoreError(message, errno=error.errno, filename=name)


_PLURALS = {"leaf": "leaves", "process": "processes"}


def count_of(number: int, noun: str) -> str:
    """'1 array', '1,250 arrays', '2 processes', '3 leaves'."""
    return f"{number:,} {noun if number == 1 else _PLURALS.get(noun, f'{noun}s')}"


def nearest(name: str, names: Sequence[str]) -> str:
    """' (did you mean …?)' for the most similar name, or nothing."""
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def name_few(names: Sequence[str], limit: int = 3) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(repr(n) for n in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _few_boxes(boxes: Sequence[LostBox], limit: int = 3) -> str:
    shown = ", ".join(f"{box}{_share_of(box)}" for box in boxes[:limit])
    return shown if len(boxes) <= limit else f"{shown} and {len(boxes) - limit} more"


def _share_of(box: LostBox) -> str:
    if box.is_whole:
        return ""
    share = 100 * box.elements / prod(box.shape)
    return f" ({share:.0f} % of it)" if share >= 1 else " (less than 1 % of it)"


def headed_list(head: str, lines: Sequence[str], limit: int = 50) -> str:
    """A sentence with its one reason, or with a list of the first reasons."""
    if len(lines) == 1:
        return f"{head}: {lines[0]}"
    shown = [f"  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  … and {len(lines) - limit} more")
    return "\n".join([f"{head}, for {len(lines)} reasons:", *shown])
