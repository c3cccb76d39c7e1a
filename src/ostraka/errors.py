"""The exceptions of Ostraka, and helpers for their messages.

OstrakaError
├── InvalidTree            the tree holds a value of an unsupported type       (TypeError)
├── Mismatch               `like` and the checkpoint differ, lists every way   (ValueError)
├── InvalidSharding        a spec does not fit its leaf or its mesh            (ValueError)
├── CheckpointNotFound     the path has no checkpoint                          (FileNotFoundError)
├── NotACheckpoint         the path has something other than a checkpoint      (ValueError)
├── PathInTheWay           a save would overwrite files of others              (FileExistsError)
├── UnsupportedFormat      needs a newer version, or a missing store           (ValueError)
├── StoreError             the operating system or the store refused           (OSError)
├── Busy                   another save is under way, or files were replaced   (OSError)
├── Damaged                bytes are lost or changed; names file and leaf      (ValueError)
├── SaveFailed             a process failed, died or timed out during a save   (RuntimeError)
├── RestoreFailed          a process failed, died or timed out during a restore (RuntimeError)
└── RepairFailed           a process failed, died or timed out during a repair (RuntimeError)

Preempted                  the run was told to end (SIGTERM), and has saved    (SystemExit)

In brackets: the builtin error that each also is. Preempted is no error: `except Exception` lets it
pass, and the program ends with exit code 143, as with SIGTERM. A message is one sentence: the event
and its path, the expected and the found value, and the remedy.
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
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
    "Preempted",
    "Problem",
    "RepairFailed",
    "RestoreFailed",
    "SaveFailed",
    "StoreError",
    "UnsupportedFormat",
]


_LOST = frozenset({errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)})


def printable(text: str) -> str:
    """Text from an untrusted checkpoint, safe for a terminal.

    Escapes every invisible character: control codes, line breaks, marks for the direction of
    writing, characters without width.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """As `printable`, but keeps line breaks."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


_USER = re.compile(r"(?<!abfs)(?<!abfss)(?<=[A-Za-z0-9+.-])(:/{1,2})[^/\s]*@")
"""The user, perhaps with a password. The `container@account` of abfs:// is no secret."""
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^\s?'\"<>()]*)\?[^\s'\"<>()]*")
"""The query of a URL, which in presigned URLs and shared access signatures is a secret."""
_SECRET_NAMES = re.compile(r"(AWS|AZURE|GOOGLE)_\w*(KEY|TOKEN|SECRET|PASSWORD|SAS)")
_LEAST_SECRET = 16
"""Shorter values of the environment may be words of a message."""


def without_secrets(text: str) -> str:
    """Text without the users, passwords and queries of URLs and without keys of the environment."""
    if "@" in text:
        text = _USER.sub(r"\1…@", text)
    if "?" in text:
        text = _QUERY.sub(r"\1?…", text)
    for name, value in os.environ.items():
        if len(value) >= _LEAST_SECRET and value in text and _SECRET_NAMES.fullmatch(name):
            text = text.replace(value, "…")
    return text


class OstrakaError(Exception):
    """The base of all errors that Ostraka raises on purpose.

    Catch it to handle any of them. Its message has no control characters but line breaks, and no
    secrets from URLs or the environment.
    """

    def __str__(self) -> str:
        # Not that of OSError, which would add the number and the file.
        return printable_lines(without_secrets(BaseException.__str__(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        # All attributes, as few classes take their message as the only argument.
        state = {**vars(self), "args": self.args}
        if isinstance(self, OSError):
            state |= {"errno": self.errno, "filename": self.filename}
        return type(self).__new__, (type(self), *self.args), state


class InvalidTree(OstrakaError, TypeError):
    """Raised if a tree is empty, or has a value or key of an unsupported type: change that leaf."""


class Mismatch(OstrakaError, ValueError):
    """Raised if the template or an argument does not fit the checkpoint: see `differences`."""

    def __init__(self, subject: str, differences: Sequence[str]):
        self.subject = subject
        self.differences = tuple(differences)
        super().__init__(headed_list(subject, self.differences))


class InvalidSharding(OstrakaError, ValueError):
    """Raised if a partition spec does not fit its leaf or its mesh: change the spec or the mesh."""


class CheckpointNotFound(OstrakaError, FileNotFoundError):
    """Raised if there is no checkpoint at a path: pass the path of a save."""


class NotACheckpoint(OstrakaError, ValueError):
    """Raised if a path holds something other than a checkpoint: pass another path."""


class PathInTheWay(OstrakaError, FileExistsError):
    """Raised if a save would overwrite files that Ostraka did not write: save to another path."""


class UnsupportedFormat(OstrakaError, ValueError):
    """Raised if a checkpoint needs a newer Ostraka, or a path needs a store: install that."""


class StoreError(OstrakaError, OSError):
    """Raised if the file system or the object store refuses: `errno` says why, if known."""

    def __init__(self, message: str, *, errno: int | None = None, filename: str | None = None):
        super().__init__(message)
        self.message = message
        self.errno = errno
        self.filename = filename

    @property
    def loss(self) -> str | None:
        """The message for bytes that a disk can't read any more, or None for other errors."""
        if self.errno is None or self.errno not in _LOST:
            return None
        return f"it can't be read: {os.strerror(self.errno)}"


class Unreadable(StoreError):
    """Raised, before any read, for a link, a pipe or a device in place of a file: remove it."""

    def __init__(self, path: str, found: str):
        super().__init__(f"can't read {path}: {found}", errno=errno.EINVAL, filename=path)
        self.found = found

    @property
    def loss(self) -> str | None:
        return self.found


class TooLarge(Unreadable):
    """Raised, before any read, for a file that is larger than the format allows: remove it."""

    def __init__(self, path: str, size: int, most_bytes: int):
        super().__init__(path, f"it has {size:,} bytes, and may have {most_bytes:,} at most")
        self.size = size


class OutcomeUnknown(StoreError):
    """Raised if a store does not answer a write, which it may have done: look before you retry."""


class NotDurable(OutcomeUnknown):
    """Raised if a write succeeded, but a power failure may undo it: check the disk."""


class Busy(OstrakaError, OSError):
    """Raised if another save to the path is running, or replaced the files being read: retry."""


class SourceChanged(Busy):
    """Raised if a file without checksums was rewritten while it was read: retry."""


class PartialRestore(UserWarning):
    """The warning of a restore that kept some values of the template. It lists them.

    With `strict=False` it keeps leaves that are missing in the checkpoint or have another shape.
    It always keeps static fields, and lists those whose saved value differs.
    """

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class DegradedRead(UserWarning):
    """The warning that parity replaced lost data of a damaged checkpoint: repair it."""


@dataclass(frozen=True, slots=True)
class LostBox:
    """The smallest box around the lost elements of a leaf, as `'params/w'[0:128, :]`."""

    leaf: str
    box: tuple[tuple[int, int], ...]
    """`(start, stop)` in every dimension."""
    shape: tuple[int, ...]
    """The shape of the whole leaf."""

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
    """One damaged place in a file of a checkpoint."""

    file: str
    found: str
    leaves: tuple[str, ...] = ()
    boxes: tuple[LostBox, ...] = ()
    """The affected box of each leaf."""
    span: tuple[int, int] | None = None
    """The damaged bytes `[start, stop)`, or None for the whole file."""
    process: int | None = None
    """The process that wrote the file, or None if several did."""
    host: str | None = None
    """The host of that process, if known."""

    @property
    def writer(self) -> str:
        """The process with its host for a message, or an empty string."""
        if self.process is None:
            return ""
        return f"process {self.process}" + (f" on {self.host}" if self.host else "")

    def __str__(self) -> str:
        where = f" (leaf {name_few(self.leaves)})" if self.leaves else ""
        return f"{self.file}{where}: {self.found}"

    def explain(self) -> str:
        """As `str`, with the box of each leaf, its share of the leaf, and who wrote the file."""
        leaves = name_few(self.leaves)
        if self.boxes:
            leaves = name_few([f"{box}{_share_of(box)}" for box in self.boxes], show=str)
        where = f" (leaf {leaves})" if leaves else ""
        by = f", written by {self.writer}" if self.process is not None else ""
        return f"{self.file}{where}{by}: {self.found}"


def problems_to_json(problems: Sequence[Problem]) -> list[Any]:
    """Return problems as JSON, to send them to another process."""
    return [astuple(problem) for problem in problems]


def problems_from_json(sent: Sequence[Any]) -> tuple[Problem, ...]:
    """Return the problems that other processes sent, each once."""
    found: dict[Problem, None] = {}
    for file, what, leaves, sent_boxes, span, *writer in sent:
        boxes = [LostBox(n, tuple((a, b) for a, b in box), tuple(s)) for n, box, s in sent_boxes]
        span = None if span is None else (span[0], span[1])
        found[Problem(file, what, tuple(leaves), tuple(boxes), span, *writer)] = None
    return tuple(found)


class Damaged(OstrakaError, ValueError):
    """Raised if bytes of a checkpoint are lost or changed: see `problems`, run `ostraka.repair`."""

    def __init__(self, path: str, problems: Sequence[Problem]):
        self.path = path
        self.problems = tuple(problems)
        super().__init__(
            headed_list(f"checkpoint {path} is damaged", [str(p) for p in self.problems])
        )


class _ProcessFailure(OstrakaError, RuntimeError):
    """Raised on all processes if one of them fails."""

    verb = ""

    def __init__(self, path: str, process: int | None, cause: str):
        self.path = path
        self.process = process
        self.cause = cause
        who = "" if process is None else f" on process {process}"
        super().__init__(f"{self.verb} {path} failed{who}: {cause}")


class SaveFailed(_ProcessFailure):
    """Raised on all processes if a save fails on one: fix the `cause` and save again.

    The path is unchanged, unless `cause` says that the new checkpoint is or may be committed.
    """

    verb = "saving"


class SaveCancelled(SaveFailed):
    """Raised for a save that was cancelled. The path is unchanged.

    `SaveHandle.cancel` and `Manager(if_running="cancel")` cancel saves.
    """


class RestoreFailed(_ProcessFailure):
    """Raised on all processes if a restore fails on one: fix the `cause` and restore again."""

    verb = "restoring"


class RepairFailed(_ProcessFailure):
    """Raised on all processes if a repair fails on one: fix the `cause` and repair again.

    Files that were repaired before stay repaired.
    """

    verb = "repairing"


class Preempted(SystemExit):
    """Raised to end a run that is being preempted (SIGTERM), after `with` and `finally` blocks.

    `Manager.save` raises it on all processes once the step is committed. `Manager.close` raises it
    if SIGTERM came after the last save. A second SIGTERM raises it in the main thread.
    """

    code: int = 128 + signal.SIGTERM  # pyright: ignore[reportIncompatibleVariableOverride]
    """The exit code of a program that SIGTERM has ended."""


def describe(error: BaseException) -> str:
    """An exception as one line, for another process or a log."""
    if isinstance(error, OstrakaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{type(error).__name__}: {error.strerror}{where}"
    return f"{type(error).__name__}: {without_secrets(' '.join(str(error).split()))}"


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
    """The refusal of a store as a StoreError with its error number."""
    name = os.fspath(path)
    message = f"can't {action} {name}: {error.strerror or error}"
    return StoreError(message, errno=error.errno, filename=name)


_PLURALS = {"leaf": "leaves", "process": "processes"}


def count_of(number: int, noun: str) -> str:
    """'1 array', '1,250 arrays', '2 processes', '3 leaves'."""
    return f"{number:,} {noun if number == 1 else _PLURALS.get(noun, f'{noun}s')}"


_LONGEST_COMPARED = 500
_SHORT_NAME = 3
"""Two swapped letters in a name of this length leave 2/3 of it alike."""


def nearest(name: str, names: Sequence[str]) -> str:
    """' (did you mean …?)' for the most similar name, or nothing."""
    # To compare two names takes the product of their lengths.
    short = [known for known in names if len(known) <= _LONGEST_COMPARED]
    cutoff = 0.75 if len(name) > _SHORT_NAME else 0.6
    close = get_close_matches(name[:_LONGEST_COMPARED], short, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def name_few(names: Sequence[str], limit: int = 3, show: Callable[[str], str] = repr) -> str:
    """The first names in quotes, and the number of further ones."""
    shown = ", ".join(map(show, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _share_of(box: LostBox) -> str:
    if box.is_whole:
        return ""
    share = 100 * box.elements / prod(box.shape)
    return f" ({share:.0f} % of it)" if share >= 1 else " (less than 1 % of it)"


def headed_list(head: str, lines: Sequence[str], limit: int = 50) -> str:
    """A sentence with its only reason, or with a list of the first `limit` reasons."""
    if len(lines) == 1:
        return f"{head}: {lines[0]}"
    shown = [f"  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  … and {len(lines) - limit} more")
    return "\n".join([f"{head}, for {len(lines)} reasons:", *shown])
