"""`ostraka.convert`: write a checkpoint in another format."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

import xxhash

from ostraka._version import __version__
from ostraka.common import html
from ostraka.common.dtypes import DTYPES
from ostraka.common.progress import Count, OnBytes, shown
from ostraka.common.record import logger
from ostraka.common.units import human_bytes
from ostraka.errors import InvalidTree, count_of, headed_list, name_few
from ostraka.formats.source import CONFIG
from ostraka.layout.casts import DtypeRule, may_cast
from ostraka.layout.codec import CompressRule, check_compress
from ostraka.reading.locate import open_at
from ostraka.reading.names.given import NamesLike
from ostraka.reading.view import (
    find_random_state,
    moved,
    rename_leaves,
    renamed,
    select,
    with_config,
    without_random_state,
)
from ostraka.storage import PathLike, open_store, refuse_overlap
from ostraka.transfer.convert._tensor_files import read_config
from ostraka.transfer.convert._workplace import require_directory
from ostraka.transfer.convert._write_files import write_files
from ostraka.transfer.convert._write_orbax import write_orbax
from ostraka.transfer.convert._write_ostraka import write_ostraka
from ostraka.transfer.convert.work import RESERVED, Work, choose, keys_of
from ostraka.tree.nodes import prune, split
from ostraka.tree.patterns import Patterns

Format = Literal["ostraka", "orbax", "safetensors", "hf", "npz"]
FORMATS: tuple[str, ...] = get_args(Format)
_NUMPY = frozenset(
    {"bool", "float16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_OF_TREES = ("ostraka", "orbax")


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of `convert`.

    Attributes:
        source: The location of the source.
        target: The location of the result.
        to: The format of the result.
        arrays: Number of arrays.
        nbytes: Bytes of all arrays in the target.
        bytes_kept: Bytes that an interrupted conversion had written already.
        duration_s: Duration in seconds.
        left_out: Paths of omitted RNG state: PRNG keys, and the counts beside them.
        notes: Remarks on the result, in sentences.
    """

    source: str
    target: str
    to: str
    arrays: int
    nbytes: int
    bytes_kept: int
    duration_s: float
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        kept = f"; already there: {human_bytes(self.bytes_kept)}" if self.bytes_kept else ""
        done = (
            f"{self.source} to {self.target} ({self.to}): {count_of(self.arrays, 'array')}, "
            f"{human_bytes(self.nbytes)}{kept} ({self.duration_s:.2f} s)"
        )
        return "\n".join([done, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        entries = {
            "source": self.source,
            "format": self.to,
            "arrays": f"{self.arrays:,}",
            "size": html.size(self.nbytes),
            "already there": html.size(self.bytes_kept) if self.bytes_kept else None,
            "duration": f"{self.duration_s:.2f} s",
        }
        return html.frame(
            "ConvertReport",
            self.target,
            html.facts(entries),
            html.sentences("note", self.notes),
            html.sentences("omitted path", self.left_out),
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
    rename: Mapping[str, str] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    progress: bool = False,
    on_bytes: OnBytes | None = None,
) -> ConvertReport:
    """Write a checkpoint in another format, in bounded memory.

    Everything is read back and compared with the source. The target appears atomically when it is
    complete. If a conversion is interrupted, run the same call again: bytes that are written
    already are compared and kept. If files of the source have changed in between, it starts over.
    Call it from one process.

    Formats:

    - `"ostraka"`: an Ostraka checkpoint, with the tree and the shards of the source.
    - `"orbax"`: a directory for Orbax. If its name is that of a step (`100`, `step_100`), it is a
      step of a CheckpointManager.
    - `"safetensors"`: whole tensors by leaf path, in one file if `target` ends in `.safetensors`,
      else in a directory.
    - `"hf"`: a Hugging Face directory, with files of at most 5 GB and their index. Without `names`,
      tensors have the paths of leaves with dots in place of slashes.
    - `"npz"`: one file for `numpy.load`.

    The last three hold tensors alone. They leave out RNG state (PRNG keys, and the counts that Flax
    NNX has beside them). The report, its notes and the log name it.

    Args:
        source: A checkpoint of any format that Ostraka reads.
        target: The path of the result, where nothing may be yet.
        to: The format to write.
        names: The mapping between the leaves of a tree and the tensors of files, as in `restore`.
            It maps tensors to a tree if `to` is `"ostraka"` or `"orbax"`, else leaves to tensors.
            Leaves that a rule splits from one tensor are put together again.
        only: Path patterns. Other leaves are left out. With `names` on the way to tensors,
            `only="model"` means the model itself, whose paths begin below that name.
        dtype: Cast floating-point arrays, as in `save`.
        compress: Compress the files of `to="ostraka"`, as in `save`.
        key_data: Write RNG state to formats of tensors, with keys as their integers.
        rename: Beginnings of paths and their replacements, for formats of tensors. The empty string
            drops a beginning. It is applied before `names`.
        config: The config.json for `to="hf"`, as a dict, a file or a directory that has one. The
            default is the one of the source.
        progress: Show how far it has come: a bar on a terminal or in a notebook, else a line in the
            log every 30 s.
        on_bytes: Called now and then, from threads, with the bytes done and the bytes in all.

    Returns:
        A report with the number of arrays and bytes, and notes.

    Raises:
        InvalidTree: The format can't hold some leaves. Nothing was written.
        PathInTheWay: The target exists, or lies in the source.
        Damaged: The source is damaged.
        Busy: The source changed while it was read, or another process converts to this target.

    Example:
        >>> print(ostraka.convert("runs/7", "weights", to="hf", only="model", dtype="bfloat16"))
    """
    begin = time.perf_counter()
    if to not in FORMATS:
        raise ValueError(f"to is {to!r}; it must be one of {', '.join(FORMATS)}")
    if compress is not None and to != "ostraka":
        raise ValueError(f"compress is for to='ostraka' alone, and to is {to!r}")
    if rename is not None and to in _OF_TREES:
        raise ValueError(f"rename is for to='safetensors', 'hf' and 'npz' alone, and to is {to!r}")
    if config is not None and to != "hf":
        raise ValueError(f"config is for to='hf' alone, and to is {to!r}")
    given_config = None if config is None else read_config(config)
    place = open_store(target)
    opened = open_at(source)
    # A source may be one file in a place.
    whole = opened.location.removeprefix(opened.store.location).strip("/")
    refuse_overlap(opened.store.at(whole) if whole else opened.store, place, "converted")
    found = opened if given_config is None else with_config(opened, given_config)
    left_out: list[str] = []
    if to in _OF_TREES:
        found = found if names is None else renamed(found, names)
        work = choose(found, only=only, dtype=dtype)
    elif names is None:
        work = choose(found, only=only, dtype=dtype)
        if not key_data:
            left_out = find_random_state(work.tree, found.saved.leaves)
            omitted = {*left_out}
            tree = prune(work.tree, lambda leaf: leaf.path not in omitted) or work.tree
            items = tuple(item for item in work.items if item.path not in omitted)
            work = replace(work, tree=tree, items=items)
        work = _with_names(work, rename, dots=to == "hf")
    else:
        found = found if only is None else select(found, only)
        if not key_data:
            found, left_out = without_random_state(found)
        if rename:
            found = moved(found, rename)
        work = choose(renamed(found, names, back=True), only=None, dtype=dtype)
    if compress is not None:
        check_compress(compress, [item.spec for item in work.items])
    work_id = _id_of(work, to, compress, key_data)
    with shown(f"convert {opened.location}", progress, on_bytes) as tell:
        if tell is not None:
            # Every byte is written and read back: both count for half.
            count = Count(2 * work.nbytes, lambda done, total: tell(done // 2, total // 2))
            work = replace(work, progress=count)
        if to == "ostraka":
            write_ostraka(work, place, work_id, compress=compress)
        elif to == "orbax":
            write_orbax(work, require_directory(place, to), work_id)
        else:
            _refuse_others(work, to, left_out)
            write_files(work, place, to, work_id)
    notes: list[str] = []
    if left_out:
        leaves = count_of(len(left_out), "leaf")
        notes.append(
            f"RNG state was left out: {leaves} ({name_few(left_out)}); key_data has it written"
        )
    if to == "hf" and not isinstance(work.source.saved.user.get(CONFIG), dict):
        notes.append("there is no config.json, which transformers needs to load this; give config")
    for note in notes:
        logger.info("%s: %s", place.location, note)
    return ConvertReport(
        source=opened.location,
        target=place.location,
        to=to,
        arrays=len(work.items),
        nbytes=work.nbytes,
        bytes_kept=work.kept.done,
        duration_s=time.perf_counter() - begin,
        left_out=tuple(left_out),
        notes=tuple(notes),
    )


def _id_of(work: Work, to: str, compress: CompressRule, key_data: bool) -> str:
    """An id that two calls share if, and only if, they write the same."""
    specs = attrgetter("spec.dtype", "spec.shape", "spec.cast_from")
    items = [(item.path, item.name, item.number, *specs(item)) for item in work.items]
    others = [(leaf.path, repr(leaf.value)) for leaf in work.other_leaves]
    source = (work.source.saved.id, work.source.version)
    text = repr((source, to, items, others, repr(compress), key_data, __version__))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _with_names(work: Work, rename: Mapping[str, str] | None, *, dots: bool) -> Work:
    """The same work with new names of tensors, by `rename` and with dots in place of slashes.

    Keys of a flat dict keep their slashes. Raises InvalidTree if two leaves would get one name.
    """
    names = [item.name for item in work.items]
    if rename:
        names = rename_leaves(names, rename, work.source.location)
    is_flat = bool(keys_of(work.tree))
    if dots and not is_flat:
        names = [".".join(split(name)) for name in names]
    items = tuple(item._replace(name=name) for item, name in zip(work.items, names, strict=True))
    first: dict[str, str] = {}
    for item in items:
        other = first.setdefault(item.name, item.path)
        if other != item.path:
            raise InvalidTree(
                f"leaves {other!r} and {item.path!r} would both be tensor {item.name!r}; give one "
                "of them another name with rename"
            )
        if item.name == RESERVED:
            raise InvalidTree(
                f"leaf {item.path!r} would be tensor {item.name!r}, which safetensors has for "
                "something else; give it another name with rename"
            )
    return replace(work, items=items)


def _refuse_others(work: Work, to: str, left_out: Sequence[str]) -> None:
    """Raise InvalidTree for leaves that a format of tensors can't hold."""
    reasons: list[str] = []
    bad = [leaf.path for leaf in work.other_leaves]
    if bad:
        reasons.append(f"{name_few(bad)}: Python values, which are no arrays")
    local = [item.path for item in work.items if item.spec.per_process]
    if local:
        reasons.append(f"{name_few(local)}: a value for each process")
        bad += local
    unnamed: dict[tuple[str, bool], list[str]] = {}
    for item in work.items:
        dtype = item.spec.dtype
        if dtype not in _NUMPY if to == "npz" else DTYPES[dtype].opaque:
            unnamed.setdefault((dtype, may_cast(item.spec)), []).append(item.path)
    for (dtype, is_castable), paths in unnamed.items():
        remedy = "; cast it with dtype='float32'" if is_castable else ""
        reasons.append(f"{name_few(paths)}: {dtype}, for which it has no name{remedy}")
        bad += [] if is_castable else paths
    if not work.items:
        but = f" but RNG state ({name_few(left_out)}); key_data has it written" if left_out else ""
        reasons.append(f"there is no array at all{but}")
    if reasons:
        what = "a .npz file" if to == "npz" else "safetensors"
        head = f"{what} can't hold what is to be converted"
        if bad:
            # Seen through names, leaves have the names of tensors, and only has their paths.
            shown = "" if work.source.saved.seen else f": {name_few([f'!{path}' for path in bad])}"
            head += f"; leave out what it can't hold with ! in only{shown}"
        raise InvalidTree(headed_list(head, reasons))
