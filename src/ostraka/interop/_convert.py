"""`ostraka.convert`: a checkpoint in another format, or in ours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import xxhash

from ostraka._capture import DtypeRule, may_cast
from ostraka._checkpoint import open_at
from ostraka._codec import CompressRule, check_compress
from ostraka._names_given import NamesLike
from ostraka._pattern import Patterns
from ostraka._source import Source
from ostraka._spec import DTYPES
from ostraka._units import human_bytes
from ostraka._version import __version__
from ostraka._view import renamed
from ostraka.errors import (
    Damaged,
    InvalidTree,
    PathInTheWay,
    UnsupportedFormat,
    count_of,
    headed_list,
    name_few,
)
from ostraka.interop._beside import copy_beside
from ostraka.interop._npz import plan_npz
from ostraka.interop._orbax_plan import plan_orbax
from ostraka.interop._read_back import (
    check_files,
    check_places,
    find_in_npz,
    find_in_safetensors,
    places_in,
)
from ostraka.interop._selected import select
from ostraka.interop._tensor_files import INDEX, PlannedFile, plan_safetensors
from ostraka.interop._to_orbax import check_orbax, import_tensorstore, is_step, write_orbax
from ostraka.interop._to_ostraka import write_ostraka
from ostraka.interop._work import Item, OnBytes, Tally, Work, choose
from ostraka.interop._workplace import Workplace
from ostraka.interop._write_files import finish_files, write_in_directory, write_in_order
from ostraka.storage import Claim, LocalStore, PathLike, Store, open_store

Format = Literal["ostraka", "orbax", "safetensors", "hf", "npz"]
FORMATS: tuple[str, ...] = get_args(Format)
_NUMPY = frozenset(
    {"bool", "float16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_OF_TREES = ("ostraka", "orbax")
_NOTES = "_converting-"


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What `convert` did."""

    source: str
    target: str
    to: str
    arrays: int
    nbytes: int
    """Of all arrays, as the target has them."""
    bytes_kept: int
    """Of those, what an unfinished conversion had written already."""
    time_s: float

    def __str__(self) -> str:
        kept = f"; already there: {human_bytes(self.bytes_kept)}" if self.bytes_kept else ""
        return (
            f"{self.source} to {self.target} ({self.to}): {count_of(self.arrays, 'array')}, "
            f"{human_bytes(self.nbytes)}{kept} ({self.time_s:.2f} s)"
        )


def convert(
    source: PathLike,
    target: PathLike,
    *,
    to: Format,
    names: NamesLike | None = None,
    only: Patterns | None = None,
    dtype: DtypeRule = None,
    compress: CompressRule = None,
    key_data: bool = False,
    on_bytes: OnBytes | None = None,
) -> ConvertReport:
    """Write a checkpoint in another format, without holding it in memory.

    `source` is a checkpoint of any format that Ostraka reads. `to` says what is written:

    - `"ostraka"`: a checkpoint of ours, with the tree and the shards of the source.
    - `"orbax"`: a directory that Orbax restores; a step of its CheckpointManager, if its name is
      that of a step (`100`, `step_100`).
    - `"safetensors"`: whole tensors by leaf path, in one file if `target` ends in `.safetensors`,
      else in a directory.
    - `"hf"`: a directory as Hugging Face writes it, with files of at most 5 GB and their index.
    - `"npz"`: one file that `numpy.load` reads.

    `names` says how the leaves of a tree and the tensors of files correspond, as in `restore`: from
    tensors to a tree if `to` is `"ostraka"` or `"orbax"`, else back. Leaves that a rule cuts out of
    one tensor are put together again; all of them must be there.

    `only` are path patterns: other leaves are left out. With `names` on the way back,
    `only="model"` means the model itself: its paths begin below that name. `dtype` casts
    floating-point arrays, as in `save`; `compress` is for `to="ostraka"` alone. What the target
    can't hold raises InvalidTree before anything is written; `key_data=True` has PRNG keys written
    as their integers where there are no keys.

    Everything is read back and compared with what the source had. The target appears when all of it
    is there, and must not be there before: raises PathInTheWay. If a conversion is killed, the same
    call goes on with what it has written. Raises Damaged for a source that is damaged. `on_bytes`
    is called now and then, from threads, with the bytes done and the bytes that there are. Call it
    from one process.

    >>> print(ostraka.convert("runs/7", "weights", to="hf", only="model", dtype="bfloat16"))
    """
    begin = time.perf_counter()
    if to not in FORMATS:
        raise ValueError(f"to is {to!r}; it must be one of {', '.join(FORMATS)}")
    if compress is not None and to != "ostraka":
        raise ValueError(f"compress is for to='ostraka' alone, and to is {to!r}")
    place = open_store(target)
    opened = open_at(source)
    _refuse_place(opened, place)
    renaming = opened
    if names is not None and to in _OF_TREES:
        renaming = renamed(opened, names)
    elif names is not None:
        renaming = renamed(opened if only is None else select(opened, only), names, back=True)
        only = None
    work = choose(renaming, only=only, dtype=dtype)
    if compress is not None:
        check_compress(compress, [item.spec for item in work.items])
    tally = Tally(work.nbytes, on_bytes)
    work_id = _id_of(work, to, compress, key_data)
    if to == "ostraka":
        write_ostraka(work, place, work_id, compress=compress, tally=tally)
    elif to == "orbax":
        _to_orbax(work, _local(place, to), work_id, tally)
    else:
        _to_files(_tensors_only(work, to, key_data=key_data), place, to, work_id, tally)
    return ConvertReport(
        source=opened.location,
        target=place.location,
        to=to,
        arrays=len(work.items),
        nbytes=work.nbytes,
        bytes_kept=tally.kept,
        time_s=time.perf_counter() - begin,
    )


def _refuse_place(source: Source, target: Store) -> None:
    """Raise PathInTheWay for a target that is the source, or would become a part of it."""
    inner, outer = target.location.rstrip("/"), source.location.rstrip("/")
    if isinstance(target, LocalStore) and isinstance(source.store, LocalStore):
        inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    if inner == outer:
        raise PathInTheWay(f"{target.location} can't be converted onto itself; give another path")
    if inner.startswith(f"{outer}/"):
        raise PathInTheWay(
            f"{target.location} lies in {source.location}, which is to be converted, and would "
            "become a part of it; give a path beside it"
        )


def _id_of(work: Work, to: str, compress: CompressRule, key_data: bool) -> str:
    """The same for two calls that write the same, and only for those."""
    items = [
        (item.path, item.number, item.spec.dtype, item.spec.shape, item.spec.cast_from)
        for item in work.items
    ]
    others = [(leaf.path, repr(leaf.value)) for leaf in work.other_leaves]
    text = repr((work.source.saved.id, to, items, others, repr(compress), key_data, __version__))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _local(store: Store, to: str) -> LocalStore:
    if not isinstance(store, LocalStore):
        raise UnsupportedFormat(
            f"can't write {store.location}: to={to!r} writes directories of a file system alone; "
            "convert to one, and copy it from there"
        )
    return store


# Orbax


def _to_orbax(work: Work, target: LocalStore, work_id: str, tally: Tally) -> None:
    import_tensorstore()
    plan = plan_orbax(work)
    as_step = is_step(target.location)
    place = Workplace(target.location, work_id)

    def write() -> None:
        digests = write_orbax(work, plan, place, as_step=as_step, tally=tally)
        check_orbax(work, plan, place, digests, tally)

    _in_place(place, write)


def _in_place(place: Workplace, write: Callable[[], None], name: str = "") -> None:
    """Have a result written and checked, and give it its name."""
    place.take()
    try:
        write()
        place.commit(name)
    except Damaged:
        place.discard()  # It can't become a result, so nobody has to clean it up.
        raise
    finally:
        place.release()


# Files of whole tensors


def _tensors_only(work: Work, to: str, *, key_data: bool) -> Work:
    """The same work for a target that has nothing but tensors. Raises InvalidTree if it can't."""
    reasons: list[str] = []
    others = [leaf.path for leaf in work.other_leaves]
    if others:
        reasons.append(f"{name_few(others)}: Python values, which are no arrays")
    keys = [item.path for item in work.items if item.spec.kind == "key"]
    if keys and not key_data:
        reasons.append(f"{name_few(keys)}: PRNG keys; ask for their integers with key_data")
    local = [item.path for item in work.items if item.spec.per_process]
    if local:
        reasons.append(f"{name_few(local)}: a value for each process")
    reasons += _dtype_refusals(work.items, to)
    if not work.items:
        reasons.append("there is no array at all")
    if reasons:
        what = "a .npz file" if to == "npz" else "safetensors"
        head = f"{what} can't hold what is to be converted; choose leaves with only, as 'model/**'"
        raise InvalidTree(headed_list(head, reasons))
    return replace(work, is_whole=False)


def _dtype_refusals(items: tuple[Item, ...], to: str) -> list[str]:
    found: dict[tuple[str, bool], list[str]] = {}
    for item in items:
        dtype = item.spec.dtype
        if dtype not in _NUMPY if to == "npz" else DTYPES[dtype].opaque:
            found.setdefault((dtype, may_cast(item.spec)), []).append(item.path)
    return [
        f"{name_few(paths)}: {dtype}, for which it has no name"
        + ("; cast it with dtype='float32'" if is_castable else "")
        for (dtype, is_castable), paths in found.items()
    ]


def _to_files(work: Work, target: Store, to: str, work_id: str, tally: Tally) -> None:
    location = target.location.rstrip("/")
    name = location.rpartition("/")[2]
    is_single = to == "npz" or (to == "safetensors" and name.endswith(".safetensors"))
    index: bytes | None = None
    if to == "npz":
        if not name.endswith(".npz"):
            raise ValueError(f"the target is {location}; a file for numpy.load must end in .npz")
        files = [plan_npz(name, work.items)]
    else:
        single = name if is_single else None
        files, index = plan_safetensors(work.items, for_hugging_face=to == "hf", single=single)
    if isinstance(target, LocalStore):
        place = Workplace(target.location, work_id, is_file=is_single)

        def write() -> None:
            digests = write_in_directory(work, files, place, tally)
            if to == "npz":
                _check_npz(work, files, place, digests, tally)
            else:
                _check(work, files, place.files, digests, tally)
            if to == "hf":
                copy_beside(work.source, place.files)
            if index is not None:
                place.files.put(INDEX, index)

        _in_place(place, write, name if is_single else "")
    elif is_single:
        _local(target, "npz" if to == "npz" else "a single .safetensors file")
    else:
        _to_bucket(work, files, index, target, to, work_id, tally)


def _check(
    work: Work, files: list[PlannedFile], store: Store, digests: Mapping[Any, str], tally: Tally
) -> None:
    places = find_in_safetensors(store, [file.name for file in files])
    check_files(work, digests, store, places, tally)


def _check_npz(
    work: Work,
    files: list[PlannedFile],
    place: Workplace,
    digests: Mapping[Any, str],
    tally: Tally,
) -> None:
    """Its directory has checksums of what it holds: it is written once all was read back."""
    planned = places_in(work, files)
    crcs = check_files(work, digests, place.files, planned, tally, with_crcs=True)
    finish_files(files, place, crcs)
    check_places(work, place.files, find_in_npz(place.files, files[0].name), planned)


def _to_bucket(
    work: Work,
    files: list[PlannedFile],
    index: bytes | None,
    target: Store,
    to: str,
    work_id: str,
    tally: Tally,
) -> None:
    """As in a directory, but for the names: what makes it a result comes last."""
    notes = f"{_NOTES}{work_id}"
    last = files[0].name if index is None else INDEX
    target.prepare()
    claim = Claim(target)
    claim.take(wait=True)
    try:
        _refuse_others(target, {notes}, {file.name for file in files}, last)
        digests = write_in_order(work, files, target, notes, tally)
        try:
            _check(work, files, target, digests, tally)
        except Damaged:
            for file in files:
                target.delete(file.name)
            target.delete(notes)
            raise
        if to == "hf":
            copy_beside(work.source, target)
        claim.check()
        if index is not None:
            target.put(INDEX, index, replaces=None)
        with suppress(OSError):
            target.delete(notes)
            if claim.found_dead:
                target.discard_uploads()
    finally:
        claim.release()


def _refuse_others(target: Store, notes: set[str], files: set[str], last: str) -> None:
    """Raise PathInTheWay for what no earlier call of the same conversion has put there."""
    names = target.list()
    is_same = any(name in notes for name in names)
    others = [name for name in names if name not in notes and not name.startswith("_CLAIM-")]
    if (not is_same and others) or (last in others and last not in files):
        raise PathInTheWay(
            f"{target.location} has something in it already ({name_few(others)}), and nothing is "
            "overwritten; remove it, or give another path"
        )
