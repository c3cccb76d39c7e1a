"""An item's arrays as TensorStore opens them: in plain directories, or in an OCDBT database.

TensorStore is imported here, when a checkpoint of Orbax is opened, and nowhere else at the top.
Where to read is said by names that have been checked, never by what a file says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any
from urllib.parse import urlsplit

from ostraka._damage import damaged
from ostraka.errors import OstrakaError, Unreadable, UnsupportedFormat
from ostraka.formats._orbax_files import MANIFEST, TreeMetadata, decode_json, malformed
from ostraka.formats._orbax_read import StoredArray, explained
from ostraka.formats._orbax_zarr import ZARR2, ZARR3, parse_zarr2, parse_zarr3
from ostraka.storage import LocalStore, Store

_NODE_CACHE_BYTES = 64 << 20
"""For the nodes of OCDBT's tree, each of which many arrays have in common."""
_FILES_AT_ONCE = 32


class Item:
    """The place of one item with arrays."""

    def __init__(self, store: Store, metadata: TreeMetadata):
        self.store = store
        self.metadata = metadata
        self._opened: dict[str, Any] = {}

    @cached_property
    def _context(self) -> Any:
        # Chunks are read once, so none are kept. A context of its own: another checkpoint may come
        # to lie at the same place.
        settings = {
            "cache_pool": {"total_bytes_limit": 0},
            "cache_pool#nodes": {"total_bytes_limit": _NODE_CACHE_BYTES},
            "file_io_concurrency": {"limit": _FILES_AT_ONCE},
            "data_copy_concurrency": {"limit": "shared"},
        }
        return import_tensorstore().Context(settings)

    @cached_property
    def _kvstore(self) -> dict[str, Any]:
        base = _base_of(self.store)
        if not self.metadata.use_ocdbt:
            return base
        return {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#nodes"}

    def find_arrays(self, names: Sequence[str]) -> list[StoredArray]:
        """The arrays of these names, their metadata read together. Raises Damaged."""
        self._check_names(names)
        self._refuse_other_kinds()
        file, parse = (ZARR3, parse_zarr3) if self.metadata.use_zarr3 else (ZARR2, parse_zarr2)
        try:
            kvstore = import_tensorstore().KvStore.open(self._kvstore, context=self._context)
            opened = kvstore.result()
            reads = [opened.read(_join(name, file)) for name in names]
        except Exception as error:
            name = MANIFEST if self.metadata.use_ocdbt else file
            raise self.explained(error, name, ()) from error
        found: list[StoredArray] = []
        for name, read in zip(names, reads, strict=True):
            where = _join(name, file)
            try:
                result = read.result()
            except Exception as error:
                raise self.explained(error, where, (name,)) from error
            if result.state != "value":
                raise self.explained(ValueError("NOT_FOUND"), where, (name,))
            with malformed(self.store, where):
                zarr = parse(decode_json(self.store, where, result.value))
            found.append(StoredArray(self, name, zarr))
        return found

    def open_array(self, array: StoredArray) -> Any:
        """A TensorStore to read an array from; nothing is read for it."""
        opened = self._opened.get(array.name)
        if opened is None:
            spec = {
                "driver": array.zarr.driver,
                "kvstore": {**self._kvstore, "path": self._path_of(array.name)},
                "metadata": array.zarr.metadata,
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
                "fill_missing_data_reads": not self.metadata.has_all_chunks,
            }
            future = import_tensorstore().open(
                spec, context=self._context, read=True, open=True, assume_metadata=True
            )
            opened = self._opened[array.name] = future.result()
        return opened

    def explained(self, error: Exception, name: str, leaves: tuple[str, ...]) -> OstrakaError:
        if isinstance(error, OstrakaError):
            return error
        return explained(error, self.store.location, name, leaves)

    def _path_of(self, name: str) -> str:
        above = "" if self.metadata.use_ocdbt else _base_of(self.store)["path"]
        return above + (f"{name}/" if name else "")

    def _refuse_other_kinds(self) -> None:
        """TensorStore would follow links out of the checkpoint, and wait for pipes for ever."""
        if not isinstance(self.store, LocalStore):
            return
        try:
            self.store.refuse_other_kinds()
        except Unreadable as error:
            name = os.path.relpath(str(error.filename), self.store.location)
            raise damaged(self.store, name, error.found) from error

    def _check_names(self, names: Sequence[str]) -> None:
        """Of arrays in directories: that no name leads out of the item's own."""
        with malformed(self.store, "_METADATA"):
            for name in names if not self.metadata.use_ocdbt else ():
                parts = name.split("/") if name else []
                if any(part in ("", ".", "..") or "\0" in part for part in parts):
                    raise ValueError(f"the name {name!r:.80} can't be that of a directory")


def _join(name: str, file: str) -> str:
    return f"{name}/{file}" if name else file


@cache
def import_tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise UnsupportedFormat(
            "reading an Orbax checkpoint needs TensorStore, which is not installed; "
            "pip install 'ostraka[orbax]'"
        ) from error
    return tensorstore


def _base_of(store: Store) -> dict[str, Any]:
    """The place of a store, for TensorStore."""
    if isinstance(store, LocalStore):
        return {"driver": "file", "path": f"{store.location.rstrip('/')}/"}
    url = urlsplit(store.location)
    is_named = getattr(store, "is_named", True)  # Else it may be on another server.
    if url.scheme not in ("s3", "gs") or not url.netloc or not is_named:
        raise UnsupportedFormat(
            f"can't read the Orbax checkpoint {store.location}: TensorStore reads directories, "
            "s3:// and gs:// only; copy it to one of those"
        )
    path = f"{url.path.strip('/')}/"
    if url.scheme == "gs":
        return {"driver": "gcs", "bucket": url.netloc, "path": path}
    base: dict[str, Any] = {"driver": "s3", "bucket": url.netloc, "path": path}
    for key, names in (
        ("endpoint", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
        ("aws_region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
    ):
        found = next(filter(None, map(os.environ.get, names)), None)
        if found is not None:
            base[key] = found
    return base
