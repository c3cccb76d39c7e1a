"""A checkpoint in a bucket, through obstore: Amazon's, Google's and Azure's stores, and their like.

A place is a prefix of keys. Every `put` is one atomic event and may be conditional, so there are no
locks, no temporary files and nothing to sync. Large files are multipart uploads: they appear when
they are complete, or never.

obstore retries failed requests. The answer to a conditional `put` may be lost on its way, and the
next try is refused then. So after a refusal the store compares the object with the data.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from http.client import HTTPException
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore

from ostraka.common.record import logger as log
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Busy, OutcomeUnknown, StoreError, TooLarge
from ostraka.storage import _refusals
from ostraka.storage._base import ANYTHING, MOST_BYTES, FileInfo, Traits, byte_views
from ostraka.storage._memory import MemoryWriter
from ostraka.storage.requests import AHEAD_BYTES, PART_BYTES, part_bytes_of

_PARTS_IN_FLIGHT = 24
"""The most parts in memory, of all uploads of a process."""
_QUEUED_BYTES = 8 << 20
"""The most bytes of one upload that wait for their turn."""
_KEYS_AT_ONCE = 1000
"""The most keys that one request can delete."""
_RETRY_FOR_S = 60.0
"""obstore does not ask again when an answer breaks off in the middle."""

_SENT_AT_ONCE = 16
_TIMEOUT_S = 30.0
_OTHER_VERSION = 412
"""The status for an object that has other bytes than the request names, or is gone."""
_NO_CONDITIONS = 501
"""The status of a store without conditional deletions."""

T = TypeVar("T")
_NO_BYTES = np.empty(0, np.uint8)
_user: list[int] = []
"""The process that has used obstore, whose threads don't survive a fork."""


class Contact:
    """Two clients: `lasting` retries for long, `first` gives up soon and may be None."""

    def __init__(self, lasting: Any, first: Any = None):
        self.lasting = lasting
        self._first = first
        self.signer = lasting if first is None else first
        """For signatures, which may take a request: a deletion is done without them as well."""
        self.can_sign = not dict(getattr(lasting, "config", None) or {}).get("skip_signature")
        """True if URLs can be signed, as far as is known."""
        self.is_googles = isinstance(lasting, GCSStore)
        """True if a condition is a generation, and a deletion by a signed URL can have none."""

    @property
    def client(self) -> Any:
        """For what may be asked twice."""
        return self.lasting if self._first is None else self._first

    def is_made(self) -> None:
        """The store has answered."""
        self._first = None

    def may_ask_longer(self, error: Exception) -> bool:
        """After an error: whether `client` is now one that asks for longer, and should be asked."""
        if self._first is None or _refusals.never_connected(error):
            return False
        self._first = None
        return _refusals.is_transient(error)


class ObjectStore:
    """Names are keys below one prefix of a bucket.

    `url` names the bucket in messages. `is_named` is False if the caller made the client, which may
    have another server and other credentials than the URL. `discard_uploads` removes incomplete
    multipart uploads below a prefix.
    """

    traits = Traits(
        at_once=8,
        in_any_order=False,
        reads_at_once=16,
        look_every_s=1.0,
        deletes_fence=False,
        is_remote=True,
    )

    def __init__(
        self,
        contact: Contact,
        url: str,
        prefix: str,
        discard_uploads: Callable[[str], None],
        *,
        is_named: bool,
    ):
        self._contact = contact
        if contact.is_googles:  # It limits changes of one object to one a second.
            self.traits = replace(self.traits, touch_every_s=1.0)
        self.is_named = is_named
        self._url = url
        self._prefix = prefix.strip("/")
        self._start = f"{self._prefix}/" if self._prefix else ""
        self._discard_uploads = discard_uploads
        self.location = f"{url}/{self._prefix}" if self._prefix else url

    def __str__(self) -> str:
        return self.location

    def at(self, name: str) -> ObjectStore:
        start, discard = self._start, self._discard_uploads
        return ObjectStore(self._contact, self._url, start + name, discard, is_named=self.is_named)

    def prepare(self) -> bool:
        return not self.exists()

    def exists(self) -> bool:
        def look() -> bool:
            found = obstore.list(self._contact.client, self._prefix, chunk_size=1)
            return bool(next(iter(found), []))

        return self._retry("list", "", look)

    def remove_if_empty(self) -> None:
        pass  # Nothing is there that could be empty.

    def lock(self) -> None:
        return None

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        key = self._start + name

        def read() -> bytes:
            found = obstore.get(self._contact.client, key)
            if found.meta["size"] > most_bytes:  # told with the answer, before its bytes
                raise TooLarge(self._path(name), found.meta["size"], most_bytes)
            return bytes(found.bytes())

        return self._retry("read", name, read)

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], Any] | None = None,
        durable: bool = True,
    ) -> None:
        if check is not None:
            check()
        if replaces is ANYTHING:
            self._put(name, data, "overwrite")
        else:
            mode = "create" if replaces is None else self._update_of(name, replaces)
            if mode is None or not self._put(name, data, mode):
                raise Busy(f"another save has replaced {self._path(name)} meanwhile; try again")

    def _update_of(self, name: str, version: Any) -> dict[str, str] | None:
        """Return the mode that replaces a version only, or None if there is another one."""
        if not self._contact.is_googles:
            return dict(version)
        # obstore's lists lack the generation. The object that has it has this version for ever.
        meta = self._head(name)
        return _update(meta) if meta is not None and _info(name, meta).version == version else None

    def upload(self, name: str, data: memoryview) -> str | None:
        """Write a file as one object. Returns its identity."""
        _refuse_after_fork()
        try:
            done = obstore.put(self._contact.lasting, self._start + name, data, use_multipart=False)
        except (BaseError, FileNotFoundError) as error:
            raise _refusals.refusal("write", self._path(name), error) from error
        return _identity(done)

    def _put(self, name: str, data: bytes, mode: Any) -> bool:
        """Returns whether the condition of `mode` was met."""
        _refuse_after_fork()
        key = self._start + name
        try:
            obstore.put(self._contact.lasting, key, data, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return self._holds(name, data)
        except (BaseError, FileNotFoundError) as error:
            if _refusals.is_missing(error):
                return False
            refused = _refusals.refusal("write", self._path(name), error)
            if _refusals.is_transient(error) and mode != "overwrite":
                if self._holds(name, data):
                    return True
                raise OutcomeUnknown(refused.message, errno=refused.errno) from error
            raise refused from error
        return True

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self.get(name, len(data)) == data
        except (FileNotFoundError, TooLarge):
            return False

    def touch(self, name: str, *, create: bool, note: bytes = b"") -> float | None:
        # The version is a digest of the content with many stores.
        content = note + os.urandom(8)
        if create:
            if not self._put(name, content, "create"):
                raise StoreError(f"{self._path(name)} is there", errno=errno.EEXIST)
            return None
        there = self._head(name)
        if there is not None and there["size"]:
            changed_s = _info(name, there).changed_s
            if self._put(name, content, _update(there)):
                return changed_s
            now = self.look(name)
            if now is not None and now.size:  # Another thread has touched it just now.
                return changed_s
        raise _not_found(self._path(name))

    def create(
        self, name: str, size: int, *, beside: int = 1, replace: bool = False
    ) -> _Upload | MemoryWriter:
        # With `replace` or without: an upload appears when it is complete, whatever was there.
        if size <= PART_BYTES:
            data = bytearray(size)
            return MemoryWriter(data, lambda: self.upload(name, memoryview(data)))
        part_bytes = part_bytes_of(size)
        at_once = max(_PARTS_IN_FLIGHT * PART_BYTES // part_bytes // beside, 2)
        return _Upload(
            self._contact.lasting, self._start + name, self._path(name), part_bytes, at_once
        )

    def open(self, name: str, first_bytes: int = 0) -> _ObjectReader:
        """Its size comes with its first bytes, which are on their way when this returns."""
        key = self._start + name
        stop = max(first_bytes, AHEAD_BYTES)

        def begin() -> tuple[Any, int]:
            try:
                found = obstore.get(self._contact.client, key, options={"range": (0, stop)})
                return found, found.meta["size"]
            except BaseError as error:
                if _refusals.is_past_the_end(error):  # It is empty.
                    return None, obstore.head(self._contact.client, key)["size"]
                raise

        return _ObjectReader(self, name, *self._retry("read", name, begin), stop)

    def read(self, name: str, start: int, stop: int) -> Any:
        """Return a range of a file as a buffer, shorter if the file is."""
        key = self._start + name

        def read() -> Any:
            try:
                return obstore.get_range(self._contact.client, key, start=start, end=stop)
            except BaseError as error:
                if _refusals.is_past_the_end(error):
                    return b""
                raise

        return self._retry("read", name, read)

    def look(self, name: str) -> FileInfo | None:
        meta = self._head(name)
        return None if meta is None else _info(name, meta)

    def _head(self, name: str) -> Any:
        key = self._start + name
        try:
            return self._retry("look at", name, lambda: obstore.head(self._contact.client, key))
        except FileNotFoundError:
            return None

    def list(self) -> list[str]:
        found = self._retry(
            "list", "", lambda: obstore.list_with_delimiter(self._contact.client, self._prefix)
        )
        keys = [*found["common_prefixes"], *(file["path"] for file in found["objects"])]
        return sorted({key[len(self._start) :].rstrip("/") for key in keys} - {""})

    def files(self, prefix: str) -> list[FileInfo]:
        directory = (self._start + prefix).rpartition("/")[0]
        found = self._retry(
            "list",
            prefix,
            lambda: obstore.list(self._contact.client, directory, chunk_size=1000).collect(),
        )
        infos = [_info(file["path"][len(self._start) :], file) for file in found]
        return sorted(
            (info for info in infos if info.name.startswith(prefix)), key=lambda info: info.name
        )

    def is_link(self, name: str) -> bool:
        return False

    def sync(self, directory: str) -> None:
        pass

    def delete(
        self, name: str, *, version: Any = ANYTHING, check: Callable[[], Any] | None = None
    ) -> None:
        names = [file.name for file in self.files(f"{name}/" if name else "")]
        if name and not names:
            if not self._has_version(name, version):
                return
            names = [name]
        for start in range(0, len(names), _KEYS_AT_ONCE):
            some = names[start : start + _KEYS_AT_ONCE]
            if check is not None:
                some = self._delete_in_time(some, version, check)
            if some:
                self._delete(some, version, check)

    def _delete_in_time(
        self, names: Sequence[str], version: Any, check: Callable[[], Any]
    ) -> Sequence[str]:
        """Delete by requests that expire when the claim does. Returns the names that are left."""
        has_condition = version is not ANYTHING and not self._contact.is_googles
        e_tag = dict(version).get("e_tag") if has_condition else None
        pauses_s = iter((0.0, 0.5, 2.0))
        while True:
            until_s = check() if self._contact.can_sign else None
            if until_s is None:
                return names
            # Until then nobody else writes there: to look does for a condition.
            if e_tag is None and not self._has_version(names[0], version):
                return []
            try:
                urls = sign_deletions(
                    self._contact.signer, [self._start + name for name in names], until_s
                )
            except (BaseError, ValueError) as error:
                self._contact.can_sign = False
                _refusals.redact(error)
                log.warning("deletions in %s can't be fenced: %s", self._url, error)
                return names
            answers = send_deletions(urls, e_tag)
            if _OTHER_VERSION in answers and not self._has_version(names[0], version):
                return []
            if _NO_CONDITIONS in answers:
                e_tag = None
            gone = {name for name, a in zip(names, answers, strict=False) if is_gone(a)}
            names = [name for name in names if name not in gone]
            if not names:
                return []
            if gone:
                continue  # To sign may take requests, and there was no time for the others.
            pause_s = next(pauses_s, None)
            if pause_s is None:
                break
            if urls:  # Else the claim had not been renewed for some time, and has been now.
                time.sleep(pause_s)
        log.warning(
            "a deletion in %s is not fenced: the store does not take signed requests, or this "
            "machine's clock is ahead of the store's",
            self._url,
        )
        return names

    def _has_version(self, name: str, version: Any) -> bool:
        """Return True if a file is there. Raises Busy if it has another version."""
        if version is ANYTHING:
            return True
        there = self.look(name)
        if there is not None and there.version != version:
            raise Busy(f"another save has replaced {self._path(name)} meanwhile; try again")
        return there is not None

    def _delete(self, names: Sequence[str], version: Any, check: Callable[[], Any] | None) -> None:
        """By one request, which obstore can't make conditional: checked each time it is made."""

        def delete() -> None:
            if check is not None:
                check()
            if self._has_version(names[0], version):
                obstore.delete(self._contact.client, [self._start + name for name in names])

        while names:
            try:
                self._retry("delete", names[0], delete)
                return
            except FileNotFoundError:  # Some stores say so, and leave the others. Some don't.
                above = os.path.commonpath(names) if len(names) > 1 else names[0]
                there = {file.name for file in self.files(f"{above}/" if above else "")}
                names = [name for name in names if name in there]

    def delete_link(self, name: str) -> None:
        raise StoreError(f"{self._path(name)} is no link")

    def discard_uploads(self) -> None:
        _refuse_after_fork()
        self._discard_uploads(self._start)

    def _path(self, name: str) -> str:
        return f"{self._url}/{self._start}{name}".rstrip("/")

    def _retry(self, action: str, name: str, ask: Callable[[], T]) -> T:
        """Ask what may be asked twice, until there is an answer or a refusal."""
        _refuse_after_fork()
        end_s, pause_s = time.monotonic() + _RETRY_FOR_S, 0.1
        while True:
            try:
                answer = ask()
                self._contact.is_made()
                return answer
            except (BaseError, FileNotFoundError) as error:
                if _refusals.is_missing(error):
                    self._contact.is_made()
                    _refusals.redact(error)
                    raise _not_found(self._path(name)) from error
                if self._contact.may_ask_longer(error):
                    continue
                if not _refusals.broke_off(error) or time.monotonic() + pause_s > end_s:
                    raise _refusals.refusal(action, self._path(name), error) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)


class _Upload:
    """A multipart upload, by a thread that takes the bytes from a queue.

    obstore pulls them from an iterator; if that raises, the upload is discarded in the store, too.
    """

    def __init__(self, bucket: Any, key: str, path: str, part_bytes: int, at_once: int):
        self._path = path
        self._queue: deque[Any] = deque()
        self._queued_bytes = 0
        self._written_bytes = 0
        self._is_complete = False
        self._identity: str | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run,
            args=(bucket, key, part_bytes, at_once),
            name="ostraka upload",
            daemon=True,
        )
        _refuse_after_fork()
        self._thread.start()

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        if offset != self._written_bytes:
            raise ValueError(f"{self._path} is written in order, not at {offset:,}")
        for view in byte_views(buffers):
            with self._changed:
                self._changed.wait_for(lambda: self._error or self._queued_bytes < _QUEUED_BYTES)
                self._raise_error()
                self._queue.append(view)
                self._queued_bytes += view.nbytes
                self._changed.notify_all()
            self._written_bytes += view.nbytes

    def finish(self) -> str | None:
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_error()
        return self._identity

    def abandon(self) -> None:
        with self._changed:
            self._error = self._error or _Abandoned()
            self._changed.notify_all()
        self._thread.join()

    def _raise_error(self) -> None:
        error = self._error
        if isinstance(error, BaseError | FileNotFoundError):
            raise _refusals.refusal("write", self._path, error) from error
        if error is not None:
            raise error

    def _run(self, bucket: Any, key: str, part_bytes: int, at_once: int) -> None:
        try:
            done = obstore.put(
                bucket,
                key,
                self._pull(),
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=at_once,
            )
            self._identity = _identity(done)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._queue.clear()
                self._changed.notify_all()

    def _pull(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_complete or self._error)
                if self._error is not None:
                    raise self._error
                if not self._queue:
                    return
                view = self._queue.popleft()
                self._queued_bytes -= view.nbytes
                self._changed.notify_all()
            yield view


class _Abandoned(Exception):
    """The reason why an upload was discarded."""


class _ObjectReader:
    """A file whose first `stop` bytes are `arriving`, or None for an empty file."""

    def __init__(self, store: ObjectStore, name: str, arriving: Any, size: int, stop: int):
        self._store = store
        self._name = name
        self._arriving = arriving
        self._first = _NO_BYTES
        self._first_stop = 0 if arriving is None else min(stop, size)
        """How many bytes `_first` has, or will have."""
        self._lock = threading.Lock()
        self.size = size

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        views = byte_views(buffers)
        total = sum(view.nbytes for view in views)
        if not total:
            return 0
        data = self._of_first(offset, offset + total)
        if data is None:
            data = np.frombuffer(self._store.read(self._name, offset, offset + total), np.uint8)
        start = 0
        for view in views:
            found = data[start : start + view.nbytes]
            # By numpy, since it copies without holding the interpreter's lock.
            np.frombuffer(view, np.uint8)[: found.size] = found
            start += found.size
        return start

    def _of_first(self, start: int, stop: int) -> Any:
        """Return a range of the bytes that came with opening, or None if it reaches beyond them."""
        if stop > self._first_stop:
            return None
        with self._lock:
            if self._arriving is not None:
                try:
                    data = self._arriving.bytes()
                except BaseError:  # The answer broke off.
                    data = self._store.read(self._name, 0, self._first_stop)
                self._first, self._arriving = np.frombuffer(data, np.uint8), None
            first = self._first
            if stop > first.size:
                return None
            if stop == first.size > AHEAD_BYTES:
                # Whoever asked for more than usual has it now: not to be held for every open file.
                self._first = first[:AHEAD_BYTES].copy()
                self._first_stop = AHEAD_BYTES
            return first[start:stop]

    def close(self) -> None:
        self._arriving, self._first, self._first_stop = None, _NO_BYTES, 0


def _info(name: str, meta: Any) -> FileInfo:
    """The version is the ETag alone, if there is one: lists know no more."""
    changed_s = meta["last_modified"].timestamp()
    known = _identity(meta)
    version = _update(meta) if known is None else {"e_tag": f'"{known}"'}
    return FileInfo(name, meta["size"], changed_s, tuple(version.items()), known or "")


def _update(meta: Any) -> dict[str, str]:
    """Return the mode of a put that replaces just what was seen."""
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key) is not None}


def _identity(meta: Any) -> str | None:
    """The ETag, without its quotes, which Azure's lists lack."""
    e_tag = meta.get("e_tag")
    return None if e_tag is None else e_tag.strip('"')


def _not_found(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _refuse_after_fork() -> None:
    if not _user:
        _user.append(os.getpid())
    elif _user[0] != os.getpid():
        raise StoreError(
            "this process was forked from one that uses object stores, and connections to them do "
            "not survive a fork: start it with the method 'spawn' or 'forkserver'"
        )


# Deletions that the bucket itself refuses after some time. A signed URL has a time after which the
# store refuses it, by its own clock. So a process may stand still at any moment before it sends
# one: it deletes in time, or not at all. Amazon, Google and Azure document this, and SeaweedFS and
# MinIO do the same.


def is_gone(status: int) -> bool:
    """Return True if the object of a deletion with this answer is not there any more."""
    return 200 <= status < 300 or status == 404


def sign_deletions(bucket: Any, keys: Sequence[str], until_s: float) -> Sequence[str]:
    """Return URLs that delete keys until a time of the store's clock, or none after that time.

    Fewer URLs than keys if to sign takes more than half of that time: on Google's machines it is a
    request for each key. Raises what obstore does if it can't sign.
    """
    stop_s = (time.time() + until_s) / 2

    def sign(key: str) -> str:
        while True:
            now_s = time.time()
            lifetime_s = int(until_s - now_s)
            if lifetime_s < 1 or now_s > stop_s:
                return ""
            # It begins now, by this machine's clock: wherever that is, `until_s` is the end.
            url: str = obstore.sign(bucket, "DELETE", key, timedelta(seconds=lifetime_s))
            if 0 <= time.time() - now_s < 1:  # Else the clock was set, or this process stood still.
                return url

    urls = run_all(sign, keys, threads=_SENT_AT_ONCE, stop=StopSignal())
    return list(takewhile(bool, urls))


def send_deletions(urls: Sequence[str], e_tag: str | None) -> list[int]:
    """Send deletions. Returns the status of each answer, 0 if there was none.

    With an `e_tag`, only an object that has it is deleted.
    """
    headers = {} if e_tag is None else {"If-Match": e_tag}
    work = partial(_send, headers=headers)
    return run_all(work, urls, threads=_SENT_AT_ONCE, stop=StopSignal())


def _send(url: str, headers: dict[str, str]) -> int:
    request = urllib.request.Request(url, method="DELETE", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, HTTPException):
        return 0
