"""The safetensors files at a path, and their headers, as checked values. No JAX.

A path is a single file, a directory with one or several files, or one with an index
(`*.safetensors.index.json`, the file of each tensor). Every value is checked before use: the files
may be untrusted. They have no digests. Instead, the versions of the files show that all bytes
belong to the opened model (`formats.source_files`).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import xxhash

from ostraka.common.dtypes import DTYPES
from ostraka.common.threads import StopSignal, run_all, with_full_stack
from ostraka.errors import Damaged, NotACheckpoint, Problem, UnsupportedFormat, name_few
from ostraka.formats.orbax.names import has_orbax_names
from ostraka.formats.ostraka.damage import damage_on_loss, damaged
from ostraka.formats.source import names_in
from ostraka.formats.source_files import OpenedFile, look_settled, refuse_changed, state_of
from ostraka.layout.shard_file import METADATA_NAME, is_shards_directory
from ostraka.storage import FileReader, LocalStore, Store, open_above

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
USUAL_INDEX = f"model{INDEX_SUFFIX}"
CONFIG_FILE = "config.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors package."""
_FIRST_BYTES = 64 << 10
_MOST_INDEX_BYTES = 256 << 20
_MOST_CONFIG_BYTES = 16 << 20
_MOST_DEPTH = 100
_MOST_NAME_BYTES = 255
_LFS = b"version https://git-lfs"
_LFS_POINTER = "it is a pointer of Git LFS, not the file itself: run git lfs pull"
_MOST_RANK = 64

NAMES = {dtype.code: name for name, dtype in DTYPES.items() if not dtype.opaque} | {
    "F4": "float4_e2m1fn"
}
"""Ostraka's names of the dtypes that it reads."""
_BITS = {code: DTYPES[name].bits for code, name in NAMES.items()} | {"F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of each safetensors dtype."""


class Tensor(NamedTuple):
    """A tensor as a header describes it."""

    code: str
    """The dtype, under its safetensors name."""
    shape: tuple[int, ...]
    start: int
    """The offset of its first byte, counted from the end of the header."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file with its header."""

    name: str
    """Its name in the directory."""
    opened: OpenedFile
    """Its location, and its state before it was opened."""
    size: int
    header_bytes: int
    header_digest: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorListing:
    """The safetensors files at a path."""

    location: str
    files: tuple[TensorFile, ...]
    file_of: Mapping[str, int]
    """The number of the file of each tensor."""
    config: Mapping[str, Any] | None
    beside: Mapping[str, OpenedFile]
    """By name, the other files that describe the tensors: the index, config.json."""


def has_safetensors(names: Sequence[str]) -> bool:
    """True if a directory with these names may hold safetensors files, and no checkpoint."""
    if METADATA_NAME in names or any(map(is_shards_directory, names)) or has_orbax_names(names):
        return False
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def find_files(store: Store) -> TensorListing | None:
    """The safetensors files at a path, or None if there are none.

    Raises Damaged for files that contradict themselves or each other, and UnsupportedFormat for
    files with another purpose.
    """
    names = names_in(store)
    if names:
        return _in_directory(store, names) if has_safetensors(names) else None
    name = store.location.rpartition("/")[2]
    above = open_above(store) if name.endswith((SUFFIX, INDEX_SUFFIX)) else None
    if above is None or above.look(name) is None:
        return None
    if name.endswith(INDEX_SUFFIX):
        return _by_index(store, above, name)
    if is_shards_directory(above.location.rpartition("/")[2]):
        return None
    return _of_names(store, above, [name])


def _in_directory(store: Store, names: Sequence[str]) -> TensorListing:
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1 and USUAL_INDEX not in indexes:
        raise UnsupportedFormat(
            f"{store.location} has {len(indexes)} indexes of safetensors files, "
            f"{name_few(indexes)}: give the path of the one that is meant"
        )
    if indexes:
        return _by_index(store, store, USUAL_INDEX if USUAL_INDEX in indexes else indexes[0])
    chosen = [name for name in names if name.endswith(SUFFIX)]
    if "model.safetensors" in chosen:
        # Mistral publishes the same weights in both, under other names.
        chosen = [name for name in chosen if not name.startswith("consolidated")]
    _check_numbered(store, chosen)
    return _of_names(store, store, chosen)


def _of_names(store: Store, place: Store, names: Sequence[str]) -> TensorListing:
    """The files of these names, without an index."""
    beside = {CONFIG_FILE: _look(place, CONFIG_FILE)}
    config = _config(place, beside[CONFIG_FILE])
    files = _read_headers(place, names)
    refuse_changed(beside.values())
    file_of: dict[str, int] = {}
    for number, file in enumerate(files):
        for tensor in file.tensors:
            if file_of.setdefault(tensor, number) != number:
                raise UnsupportedFormat(
                    f"{store.location} has tensor {tensor!r} in both {files[file_of[tensor]].name} "
                    f"and {file.name}, and no index that says which is meant: give the path of one "
                    "file"
                )
    return TensorListing(store.location, tuple(files), file_of, config, beside)


_NUMBERED = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors", re.DOTALL)


def _check_numbered(store: Store, names: Sequence[str]) -> None:
    """Raise Damaged if names such as `model-00001-of-00003.safetensors` are incomplete."""
    counts: dict[tuple[str, int], set[int]] = {}
    for matched in filter(None, map(_NUMBERED.fullmatch, names)):
        counts.setdefault((matched[1], int(matched[3])), set()).add(int(matched[2]))
    for (stem, count), there in counts.items():
        missing = next((n for n in range(1, count + 1) if n not in there), None)
        if missing is not None:
            name = f"{stem}-{missing:05}-of-{count:05}{SUFFIX}"
            text = f"it is missing: {len(there)} of {count} files are there, and no index"
            raise damaged(store, name, text)


def _by_index(store: Store, place: Store, index: str) -> TensorListing:
    """The files that an index lists. It decides between files with the same tensor."""
    beside = {name: _look(place, name) for name in (index, CONFIG_FILE)}
    config = _config(place, beside[CONFIG_FILE])
    document = _read_json(place, index, _MOST_INDEX_BYTES)
    mapped = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(mapped, dict) or not mapped:
        raise damaged(place, index, "it has no weight_map, which says where tensors are")
    listed = cast("dict[str, Any]", mapped)
    for tensor, name in listed.items():
        if not _is_plain(name) or not _is_text(tensor):
            text = f"it says that the tensor is in {name!r}, which is no safetensors file beside it"
            raise damaged(place, index, text, (tensor,))
    names = sorted(set(listed.values()))
    files = _read_headers(place, names, listed)
    refuse_changed(beside.values())
    numbers = {name: number for number, name in enumerate(names)}
    file_of = {t: number for number, file in enumerate(files) for t in file.tensors}
    problems: list[Problem] = []
    for tensor, name in listed.items():
        if tensor not in files[numbers[name]].tensors:
            problems.append(Problem(name, f"it has no such tensor, as {index} says", (tensor,)))
        file_of[tensor] = numbers[name]
    if problems:
        raise Damaged(place.location, problems)
    return TensorListing(store.location, tuple(files), file_of, config, beside)


def _look(store: Store, name: str) -> OpenedFile:
    """A file that is about to be read. It must not change before all headers have been read."""
    place, stored_as = resolve(store, name)
    with damage_on_loss(partial(damaged, store, name)):
        return OpenedFile(place, stored_as, state_of(look_settled(place, stored_as)))


def _is_plain(name: Any) -> bool:
    """True for the name of a file in the directory itself."""
    if not isinstance(name, str) or not name.endswith(SUFFIX) or name == SUFFIX:
        return False
    is_plain = not any(sign in name for sign in "/\\\0") and not name.startswith("..")
    return is_plain and _is_text(name) and len(name.encode()) <= _MOST_NAME_BYTES


def _config(store: Store, file: OpenedFile) -> Mapping[str, Any] | None:
    if file.state is None:
        return None
    document = _read_json(store, CONFIG_FILE, _MOST_CONFIG_BYTES)
    if not isinstance(document, dict):
        raise damaged(store, CONFIG_FILE, "it has no JSON object at its top")
    return cast("dict[str, Any]", document)


# Files


_BLOB = re.compile(r"(?:\.\./){2}blobs/([0-9a-f]{40}|[0-9a-f]{64})")


def resolve(store: Store, name: str) -> tuple[Store, str]:
    """The real location of a file. The cache of Hugging Face's hub has links to its own blobs.

    Only links from `snapshots/REVISION/name` to `blobs/DIGEST` beside `snapshots` are followed. If
    `blobs` is itself a link, it is not followed out of the cache.
    """
    if not isinstance(store, LocalStore) or not store.is_link(name):
        return store, name
    place = os.path.realpath(store.location)
    try:
        matched = _BLOB.fullmatch(os.readlink(os.path.join(place, name)))
    except OSError:
        return store, name
    root, snapshots = os.path.split(os.path.dirname(place))
    if matched is None or snapshots != "snapshots":
        return store, name
    return LocalStore(root), f"blobs/{matched[1]}"


def _read_json(store: Store, name: str, most_bytes: int) -> Any:
    place, stored_as = resolve(store, name)
    with damage_on_loss(partial(damaged, store, name)):
        data = place.get(stored_as, most_bytes)
    return _decode(store, name, data)


def _decode(store: Store, name: str, data: bytes) -> Any:
    def decode() -> Any:
        found = json.loads(data, object_pairs_hook=_unique)
        _check_depth(found, _MOST_DEPTH)
        return found

    try:
        return with_full_stack(decode)
    except (ValueError, RecursionError) as error:
        why = f"it can't be read as JSON ({' '.join(str(error).split())[:200]})"
        why = _LFS_POINTER if data.startswith(_LFS) else why
        raise damaged(store, name, why) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has {twice[:100]!r} twice")
    return found


def _check_depth(value: Any, left: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not left:
        raise ValueError("it is nested too deep")
    nested: Any = value
    for child in nested.values() if isinstance(value, dict) else nested:
        _check_depth(child, left - 1)


def _read_headers(
    store: Store, names: Sequence[str], listed: Mapping[str, str] | None = None
) -> list[TensorFile]:
    """The headers of files, in the order of their names."""

    def read(name: str) -> TensorFile:
        try:
            return _read_header(store, name)
        except Damaged as error:
            tensors = tuple(t for t, file in (listed or {}).items() if file == name)
            problems = [replace(one, leaves=one.leaves or tensors) for one in error.problems]
            raise Damaged(error.path, problems) from error

    return run_all(read, sorted(names), threads=store.traits.reads_at_once, stop=StopSignal())


def _read_header(store: Store, name: str) -> TensorFile:
    def fill(file: FileReader, offset: int, data: bytearray) -> bytearray:
        if file.read_into(offset, [data]) != len(data):
            raise damaged(store, name, "it has become shorter while it was read")
        return data

    opened = _look(store, name)
    with (
        damage_on_loss(partial(damaged, store, name)),
        closing(opened.store.open(opened.stored_as)) as file,
    ):
        size = file.size
        data = fill(file, 0, bytearray(min(size, _FIRST_BYTES)))
        length = int.from_bytes(data[:8], "little")
        _check_length(store, name, size, length, bytes(data[:32]))
        if 8 + length > len(data):
            data += fill(file, len(data), bytearray(8 + length - len(data)))
    header = bytes(data[8 : 8 + length])
    document = _decode(store, name, header)
    if not isinstance(document, dict):
        raise damaged(store, name, "its header is no JSON object")
    fields = cast("dict[str, Any]", document)
    try:
        metadata = _metadata(fields.pop("__metadata__", None))
        tensors = {tensor: _tensor(tensor, about) for tensor, about in fields.items()}
        _check_places(tensors, size - 8 - length)
    except ValueError as error:
        raise damaged(store, name, str(error)) from error
    _refuse_shards(store, name, metadata)
    tensors = {t: about._replace(start=about.start + 8 + length) for t, about in tensors.items()}
    digest = xxhash.xxh3_128_hexdigest(header)
    return TensorFile(name, opened, size, 8 + length, digest, tensors)


def _check_length(store: Store, name: str, size: int, length: int, start: bytes) -> None:
    if start.startswith(_LFS):
        raise damaged(store, name, _LFS_POINTER)
    if size < 8 or start[8:9] not in (b"{", b""):
        raise damaged(store, name, "it is no safetensors file")
    if length > MAX_HEADER_BYTES:
        text = f"its header would have {length:,} bytes, more than {MAX_HEADER_BYTES:,}"
        raise damaged(store, name, text)
    if 8 + length > size or length < 2:
        text = f"it has {size:,} bytes, and its header alone has {length:,}: it is cut short"
        raise damaged(store, name, text)


def _refuse_shards(store: Store, name: str, metadata: Mapping[str, str]) -> None:
    if "ostraka" in metadata:
        raise NotACheckpoint(
            f"{store.location}/{name} is a part of an Ostraka checkpoint; give the directory that "
            "the save was given"
        )
    if "DCP_SHARDING_INFO" in metadata:
        raise UnsupportedFormat(
            f"{store.location}/{name} is a shard of PyTorch's distributed checkpoint, which has "
            "parts of tensors: put them together with PyTorch's consolidate_safetensors_files first"
        )


# Headers. Each function raises ValueError, a sentence about "its header".


def _is_text(name: str) -> bool:
    """True if a name can be written. JSON can escape halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        if all(isinstance(text, str) for text in found.values()):
            return found
    raise ValueError("the __metadata__ of its header must be text by name")


def _tensor(name: str, about: Any) -> Tensor:
    if not isinstance(about, dict) or not _is_text(name):
        raise ValueError(f"its header has no sound description of tensor {name[:200]!r}")
    fields = cast("dict[str, Any]", about)
    code: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(code, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise ValueError(
            f"its header says of tensor {name[:200]!r} what can't be: dtype, shape and "
            "data_offsets must be text and lists of sizes"
        )
    sizes, (start, stop) = tuple(shape), (offsets if len(offsets) == 2 else (1, 0))
    if start > stop or len(sizes) > _MOST_RANK:
        raise ValueError(f"its header has no sound offsets or shape for tensor {name[:200]!r}")
    if code in _BITS:
        bits = prod(sizes) * _BITS[code]
        if bits % 8 or bits // 8 != stop - start:
            raise ValueError(
                f"its header says that tensor {name[:200]!r}, {code} of the shape "
                f"{list(sizes)}, has {stop - start:,} bytes, not {bits / 8:,.0f}"
            )
    return Tensor(code, sizes, start, stop - start)


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(n) is int and 0 <= n < 1 << 63 for n in cast("list[Any]", value))


def _check_places(tensors: Mapping[str, Tensor], data_bytes: int) -> None:
    """Check that tensors fill the file, without holes, and share no bytes."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != position:
            what = "shares bytes with another" if tensor.start < position else "comes after a hole"
            raise ValueError(f"its header says that tensor {name[:200]!r} {what}")
        position += tensor.nbytes
    if position != data_bytes:
        what = "it is cut short" if position > data_bytes else "something is at its end"
        raise ValueError(
            f"its tensors have {position:,} bytes, and the file has {data_bytes:,} for them: {what}"
        )
