"""From what a user writes as a path to the store that it means."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ostraka.errors import PathInTheWay, UnsupportedFormat, without_secrets
from ostraka.storage._base import Store
from ostraka.storage._local import LocalStore
from ostraka.storage._memory import MemoryStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore as ObstoreStore

    PathLike = str | os.PathLike[str] | Store | ObstoreStore
else:
    PathLike = str | os.PathLike[str] | Store
_CLOUD = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
_FOREIGN = ("gcs", "http", "https", "hf")
"""Schemes that people write, and no store has."""
# To add a store, write a module with its class and list its scheme here.
_SCHEMES: dict[str, Callable[[str], Store]] = {
    "file": lambda url: LocalStore(os.path.abspath(_path_of_file_url(url))),
    "memory": lambda url: MemoryStore(url.partition("://")[2]),
    **dict.fromkeys(_CLOUD, lambda url: _cloud(url).open_url(url)),
}
"""By the scheme of a URL, the function that opens its store."""
_FOLDED_URL = re.compile(rf"(?:^|/)((?:{'|'.join((*_SCHEMES, *_FOREIGN))}):)/(.*)")
"""A URL after pathlib or os.path have folded its slashes."""


def open_store(path: PathLike) -> Store:
    """Return the store at a path or URL. A store is returned unchanged.

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
    if scheme in _SCHEMES:
        return _SCHEMES[scheme](text)
    if scheme == "hf":
        repo = "/".join(text.partition("://")[2].split("/")[:2])
        raise UnsupportedFormat(
            f"can't open {text}: Ostraka does not read from the Hugging Face Hub; run "
            f"`hf download {repo} --local-dir DIR` and pass DIR"
        )
    raise UnsupportedFormat(
        f"can't open {text}: this version of Ostraka has no store for "
        f"{scheme}://; use a local path, file://, memory://, s3://, gs:// or az://"
    )


def may_be_path(value: object) -> bool:
    """Return True if something can be given where a path is wanted: text, a path or a store."""
    return isinstance(value, str | os.PathLike | Store) or _is_obstore(value)


def refuse_swapped(call: str, path: object, tree: object) -> None:
    """Raise TypeError if a tree was given as the path and a path as the tree."""
    if not may_be_path(path) and may_be_path(tree):
        raise TypeError(
            f"the arguments are swapped: the path comes first, as in {call}, and here a "
            f"{type(path).__name__} does"
        )


def is_text(path: PathLike) -> bool:
    """Return True if a path names its place: two stores may have one name, on two servers."""
    return isinstance(path, str | os.PathLike)


def open_above(store: Store) -> Store | None:
    """Return the place above a place, or None if the caller gave a store without a path."""
    above = store.location.rpartition("/")[0]
    if not above or above.endswith(":/") or not getattr(store, "is_named", True):
        return None
    try:
        return open_store(above)
    except UnsupportedFormat:  # a store of the caller's own kind
        return None


def is_inside(inner: Store, outer: Store) -> bool:
    """True if a place is another one, or lies in it, by their names and with links followed.

    Buckets that a caller has opened are never taken for others: two servers may have one name.
    """
    names = [_real_name(store) for store in (inner, outer)]
    return None not in names and f"{names[0]}/".startswith(f"{names[1]}/")


def refuse_overlap(source: Store, target: Store, done: str) -> None:
    """Raise PathInTheWay for a target that is the source, or would become a part of it.

    `done` is the participle of what is to be done, for the message.
    """
    if is_inside(target, source):
        whole = is_inside(source, target)
        where = "onto itself" if whole else f"to {target.location}, which is inside it"
        raise PathInTheWay(
            f"{source.location} can't be {done} {where}; give {'another' if whole else 'a'} path"
            f"{'' if whole else ' beside it'}"
        )


def _real_name(store: Store) -> str | None:
    """Return the one name of a place, or None if it can't be told."""
    if isinstance(store, LocalStore):
        return os.path.realpath(store.location).rstrip("/")
    return store.location.rstrip("/") if getattr(store, "is_named", False) else None


def _is_obstore(value: object) -> bool:
    return any(base.__module__.startswith("obstore") for base in type(value).__mro__)


def _open_obstore(given: Any) -> Store:
    kind = type(given).__name__
    if kind == "LocalStore":  # It has no conditional writes, and a directory needs no obstore.
        return LocalStore(os.path.abspath(given.prefix or "/"))
    return _cloud(kind).open_bucket(given)


def _refuse_folded_url(path: str) -> None:
    """Raise for `Path("s3://bucket/run")`: it would be a directory `s3:` on the local disk."""
    path = without_secrets(path)
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
            "pip install obstore boto3"
        ) from error


def _path_of_file_url(url: str) -> str:
    host, slash, path = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise UnsupportedFormat(
            f"can't open {url}: a file URL has three slashes before its path, as in file:///data/run"
        )
    return f"/{unquote(path)}"
