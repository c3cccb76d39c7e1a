"""From what a user writes as a path to the store that it means."""

from __future__ import annotations

import importlib
import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ostraka.errors import UnsupportedFormat
from ostraka.storage._base import Store
from ostraka.storage._local import LocalStore
from ostraka.storage._memory import MemoryStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore as ObstoreStore

    PathLike = str | os.PathLike[str] | Store | ObstoreStore
else:
    PathLike = str | os.PathLike[str] | Store
_CLOUD = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
_FOLDED_URL = re.compile(rf"(?:^|/)((?:{'|'.join((*_CLOUD, 'gcs', 'file', 'memory'))}):)/(.*)")
"""What pathlib and os.path make of a URL."""
_USER = re.compile(r"(?<!abfs)(?<!abfss)(:/+)[^/]*@")
"""With a password, perhaps. The `container@account` of abfs:// is no secret."""


def open_store(path: PathLike) -> Store:
    """The store at a path or URL; a store is returned as it is.

    Relative paths are made absolute here and now, so that a later change of the working directory
    does not move a checkpoint.
    """
    given: Any = path
    text: Any = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        if isinstance(given, Store):
            return given
        if _is_obstore(given):
            return _open_obstore(given)
        kind = type(given).__name__
        raise TypeError(f"a checkpoint's path must be text or a pathlib.Path, not {kind}")
    if not text:
        raise ValueError("the checkpoint's path is empty")
    scheme, separator, _ = text.partition("://")
    if "\0" in text and scheme not in _CLOUD:
        raise ValueError(f"the checkpoint's path {text!r:.200} has a null character in it")
    if not separator:
        if ":/" in text:
            _refuse_folded_url(text)
        return LocalStore(os.path.abspath(os.path.expanduser(text)))
    if scheme == "memory":
        return MemoryStore(text.partition("://")[2])
    if scheme == "file":
        return LocalStore(os.path.abspath(_path_of_file_url(text)))
    if scheme in _CLOUD:
        return _cloud(text).open_url(text)
    raise UnsupportedFormat(
        f"can't open {_without_password(text)}: this version of Ostraka has no store for "
        f"{scheme}://; use a local path, file://, memory://, s3://, gs:// or az://"
    )


def may_be_path(value: object) -> bool:
    """Whether something can be given where a path is wanted: text, a path or a store."""
    return isinstance(value, str | os.PathLike | Store) or _is_obstore(value)


def is_text(path: PathLike) -> bool:
    """Whether a path names its place: two stores may have one name, on two servers."""
    return isinstance(path, str | os.PathLike)


def open_above(store: Store) -> Store | None:
    """The place that a place is in; None for what was given as a store, which no name leads to."""
    above = store.location.rpartition("/")[0]
    if not above or above.endswith(":/") or not getattr(store, "is_named", True):
        return None
    try:
        return open_store(above)
    except UnsupportedFormat:  # a store of the caller's own kind
        return None


def _is_obstore(value: object) -> bool:
    return any(base.__module__.startswith("obstore") for base in type(value).__mro__)


def _open_obstore(given: Any) -> Store:
    kind = type(given).__name__
    if kind == "LocalStore":  # It has no conditional writes, and a directory needs no obstore.
        return LocalStore(os.path.abspath(given.prefix or "/"))
    return _cloud(kind).open_bucket(given)


def _without_password(url: str) -> str:
    return _USER.sub(r"\1…@", url)


def _refuse_folded_url(path: str) -> None:
    """Raise for `Path("s3://bucket/run")`: it would be a directory `s3:` on the local disk."""
    path = _without_password(path)
    folded = _FOLDED_URL.search(path)
    if folded is not None:
        scheme, rest = folded.groups()
        raise ValueError(
            f"{path!r} is what pathlib or os.path makes of a URL, and would be a local directory; "
            f"pass it as text: '{scheme}//{rest}'"
        )


def _cloud(what: str) -> Any:
    """The module for object stores, which needs an extra."""
    try:
        return importlib.import_module("ostraka.storage._cloud")
    except ImportError as error:
        raise UnsupportedFormat(
            f"can't open {what}: object stores need obstore, which is not installed; "
            "pip install 'ostraka[cloud]'"
        ) from error


def _path_of_file_url(url: str) -> str:
    host, slash, path = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise UnsupportedFormat(
            f"can't open {url}: a file URL has three slashes before its path, as in file:///data/run"
        )
    return f"/{unquote(path)}"
