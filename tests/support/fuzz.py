"""Fuzzers: hostile input for every reader, and what a reader may do with it.

Whatever the input: only errors of ours, no crash, no more than 5 s, no memory beyond ten times the
input and 64 MiB. A target is one reader; add one to `TARGETS` to have it fuzzed in the suite and in
`make soak`.
"""

import enum
import gc
import json
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import click.testing
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save as save_tensors

import ostraka
from mutations import Mutator
from ostraka.cli import _tree, main
from ostraka.errors import OstrakaError
from ostraka.formats.ostraka.shard_reader import ShardFile
from ostraka.formats.ostraka.source import OstrakaSource, open_ostraka
from ostraka.layout import codec
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import IndexEntry, Metadata, decode_metadata, shard_contents
from ostraka.layout.runs import decode_runs
from ostraka.layout.shard_file import digest
from ostraka.reading.groups import groups_of
from ostraka.storage import MemoryStore

MOST_SECONDS = 5.0
MOST_MEMORY = 64 << 20
MEMORY_PER_BYTE = 10


# What is attacked


@jax.tree_util.register_dataclass
@dataclass
class Settings:
    rate: Any = 0.5
    scale: Any = field(default=1, metadata={"static": True})
    made = 0

    def __post_init__(self):
        type(self).made += 1


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1


class Layer(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(np.ones((4, 2), np.float32), note="a", axes=("x", None))
        self.tied = self.kernel


@dataclass(frozen=True, eq=False)
class Seed:
    """A checkpoint, as the files of a store."""

    files: Mapping[str, bytes]
    document: Any
    """Its `_METADATA`, without the digest."""

    @property
    def shards(self) -> str:
        return f"shards-{self.document['id']}"

    def named(self, ending: str) -> list[str]:
        return sorted(name for name in self.files if name.endswith(ending))


def seal(text: bytes) -> bytes:
    """`_METADATA` with the digest that fits."""
    return text[:-1] + b',"digest":"' + digest(text[:-1]).encode() + b'"}\n'


@cache
def seeds() -> tuple[Seed, ...]:
    """Checkpoints that hold something of everything."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    sharded = jax.device_put(
        np.arange(64, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("x"))
    )
    tree = {
        "w": sharded,
        3: [np.arange(5, dtype=np.int16), np.float64(2), (None, True, 7, "text", b"\x00", 1.5, 2j)],
        Colour.RED: np.zeros((0, 3)),
        "p": Point(1, jax.random.key(0)),
        "s": Settings(jax.device_put(np.ones(4, np.int8), NamedSharding(mesh, P())), 3),
        "m": Layer(),
        "f": Settings(len, 3),
        "n": np.arange(6).astype("int4").reshape(2, 3),
    }
    weights = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    packed = {"w": weights, "z": np.zeros(70_000, np.uint8)}
    packed = {name: jax.device_put(array, jax.devices()[0]) for name, array in packed.items()}
    timeline = {"ostraka.manager": {"step": 3, "metrics": {"loss": 0.5}}, "note": "a"}
    return (
        saved("plain", tree, metadata=timeline),
        saved("packed", packed, compress="zstd"),
    )


def saved(name: str, tree: Any, **options: Any) -> Seed:
    ostraka.save(f"memory://fuzz-{name}", tree, **options)
    store = MemoryStore(f"fuzz-{name}")
    names = [file.name for file in store.files("")]
    # Without the copy of `_METADATA`, which would not fit what is changed.
    files = {name: store.get(name) for name in names if not name.endswith("/metadata.json")}
    document = json.loads(files["_METADATA"])
    del document["digest"]
    return Seed(files, document)


def put_files(place: str, files: Mapping[str, bytes]) -> MemoryStore:
    """A checkpoint of these files, at a place of its own."""
    store = MemoryStore(place)
    for name in store.list():
        store.delete(name)
    for name, data in files.items():
        store.put(name, data)
    return store


def resealed(seed: Seed, changed: Mapping[str, bytes], document: Any = None) -> dict[str, bytes]:
    """A seed with other shards and indexes, and digests that fit all the same."""
    document = json.loads(json.dumps(seed.document if document is None else document))
    files = {**seed.files, **changed}
    indexes = {name: json.loads(files[name]) for name in seed.named(".json") if name not in changed}
    for name, data in changed.items():
        if name.endswith(".safetensors"):
            _redigest(indexes, name.rpartition("/")[2], data)
    files |= {name: _format.dumps(index).encode() for name, index in indexes.items()}
    described: list[Any] = []
    for process, _, _ in seed.document["indexes"]:
        data = files[f"{seed.shards}/process_{process:05d}.json"]
        described.append([process, len(data), digest(data)])
    document["indexes"] = described
    return {**files, "_METADATA": seal(_format.dumps(document).encode())}


def _redigest(indexes: Mapping[str, Any], name: str, data: bytes) -> None:
    for index in indexes.values():
        file = index["files"].get(name)
        if file is not None:
            lengths = decode_runs(file["blocks"])
            starts = np.cumsum([0, *lengths])
            blocks = [data[a:b] for a, b in pairwise(starts)]
            file["digests"] = "".join(_format.block_digest([block]) for block in blocks)


# The targets


@dataclass(frozen=True)
class Target:
    """One reader: makes an input, and reads it. Only `allowed` errors may come out."""

    make: Callable[[Mutator], Any]
    read: Callable[[Any], None]
    allowed: tuple[type[BaseException], ...] = (OstrakaError,)
    share: float = 1.0
    """How many of a thousand inputs it gets, beside others: slow ones get few."""


def _seed(mutator: Mutator) -> Seed:
    return mutator.random.choice(seeds())


def make_metadata(mutator: Mutator) -> bytes:
    text = mutator.text(mutator.document(_seed(mutator).document))
    if mutator.random.random() < 0.1:
        text = mutator.bytes(text)
    return seal(text) if text else text


def read_metadata(data: bytes) -> None:
    store = put_files("fuzz-metadata", {"_METADATA": data})
    source = open_ostraka(store)
    if source is None:
        return
    rows = _tree.rows_of(source)
    _tree.describe(source, rows, rows, {})
    _tree.totals_lines(source, rows)
    _tree.title_lines(source)
    _tree.parameters_lines(source, groups_of(source))
    _tree.files_table(source)


def make_index(mutator: Mutator) -> bytes:
    seed = _seed(mutator)
    index = json.loads(seed.files[mutator.random.choice(seed.named(".json"))])
    text = mutator.text(mutator.document(index))
    return mutator.bytes(text) if mutator.random.random() < 0.1 else text


def read_index(data: bytes) -> None:
    for seed in seeds():
        metadata, contents = _contents(seed)
        metadata = replace(metadata, indexes={0: IndexEntry(len(data), digest(data))})
        store = put_files("fuzz-index", {f"{seed.shards}/process_00000.json": data})
        source = OstrakaSource(store, metadata, 0)
        for file, entries in contents:
            with suppress(OstrakaError):
                _ = ShardFile(source.shards, file, entries).blocks


@cache
def _contents(seed: Seed) -> tuple[Metadata, list[Any]]:
    metadata = decode_metadata(seed.files["_METADATA"])
    return metadata, list(shard_contents(metadata).values())


def make_block(mutator: Mutator) -> bytes:
    return mutator.bytes(mutator.random.choice(_blocks()))


@cache
def _blocks() -> list[bytes]:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(4096).astype(np.float32), np.zeros(4096, np.uint16)]
    found: list[bytes] = []
    for array in arrays:
        pieces = codec.Zstd(3).encode(array.view(np.uint8), array.dtype.itemsize)
        assert pieces is not None
        found.append(b"".join(bytes(piece) for piece in pieces))
    return found


def read_block(data: bytes) -> None:
    if data:  # no block is empty: lengths are checked before
        codec.decode(np.frombuffer(data, np.uint8), np.empty(16384, np.uint8))


def make_checkpoint(mutator: Mutator) -> dict[str, bytes]:
    """A whole checkpoint with one file changed, and digests that fit."""
    seed = _seed(mutator)
    what = mutator.random.randrange(4)
    if what == 3:
        text = mutator.text(mutator.document(seed.document)) or b" "
        return {**seed.files, "_METADATA": seal(text)}
    name = mutator.random.choice(seed.named(".json" if what == 0 else ".safetensors"))
    data = seed.files[name]
    if what == 0:
        data = mutator.text(mutator.document(json.loads(data)))
    else:
        data = _other_header(mutator, data) if what == 1 else mutator.bytes(data)
    return resealed(seed, {name: data})


def _other_header(mutator: Mutator, data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = mutator.random.choice((mutator.text(mutator.document(header)), b"null", b"[" * 2000))
    if len(text) <= length:
        return data[:8] + text.ljust(length) + data[8 + length :]
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def open_all(place: str) -> None:
    checkpoint = ostraka.open(place)
    for path in checkpoint:
        found = checkpoint[path]
        if hasattr(found, "shape"):
            np.asarray(found)


def restore_as_saved(place: str) -> None:
    ostraka.restore(place)


def restore_as_state(place: str) -> None:
    ostraka.restore(place, as_state=True)


def restore_like(place: str) -> None:
    like = {"w": np.zeros((8, 8), np.float32), "p": Point(0, jax.random.key(1))}
    ostraka.restore(place, like=like, strict=False)


def verify(place: str) -> None:
    ostraka.verify(place, raises=False)


def without_colours(text: str) -> str:
    return re.sub("\x1b\\[(0|1|2|1;[0-9]+|[39][0-9])m", "", text)


def call(*arguments: str) -> None:
    """The command; what it calls a bug is one."""
    result = click.testing.CliRunner().invoke(main, arguments)
    assert result.exit_code in (0, 1, 2), (arguments, result.exit_code, result.output)
    assert "-v shows where it comes from" not in result.stderr, (arguments, result.stderr)
    assert result.output.replace("\n", "").isprintable(), (arguments, result.output)


def commands(place: str) -> Iterator[Callable[[], None]]:
    for arguments in (
        ("show", place),
        ("show", place, "w", "--stats", "--slice", "0"),
        ("show", place, "--nan"),
        ("show", place, "--files", "--json"),
        ("verify", place),
        ("diff", place, "memory://fuzz-plain"),
        ("diff", place, place, "--json"),
        ("plan", place),
        ("ls", place.rpartition("/")[0]),
    ):
        yield lambda arguments=arguments: call(*arguments)


def read_checkpoint(files: Mapping[str, bytes]) -> None:
    place = "memory://fuzz-root/step_3"
    put_files("fuzz-root/step_3", files)
    made = Settings.made
    work = [open_all, restore_as_saved, restore_as_state, restore_like, verify]
    for read in work:
        with suppress(OstrakaError):
            read(place)
    for command in commands(place):
        command()
    assert Settings.made == made, "a restore has called a class of the program's"


# Directories of safetensors files


@cache
def hf_seed() -> Mapping[str, bytes]:
    """A small model of two files, with an index and a config."""
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "tie_word_embeddings": True,
        "architectures": ["LlamaForCausalLM"],
        "transformers_version": "5.0.0",
    }
    first = {"model.embed_tokens.weight": np.ones((16, 8), np.float32)}
    second = {
        "model.norm.weight": np.ones(8, np.float16),
        "model.layers.0.self_attn.q_proj.weight": np.ones((12, 8), np.float32),
        "model.layers.0.input_layernorm.weight": np.zeros((0,), np.int64),
    }
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    parts = dict(zip(names, (first, second), strict=True))
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return {
        **{name: save_tensors(part, {"format": "pt"}) for name, part in parts.items()},
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": json.dumps(config).encode(),
    }


def make_safetensors(mutator: Mutator) -> dict[str, bytes]:
    """The directory with one file changed; now and then without its index."""
    files = dict(hf_seed())
    name = mutator.random.choice(sorted(files))
    if name.endswith(".json"):
        files[name] = mutator.text(mutator.document(json.loads(files[name])))
    elif mutator.random.random() < 0.7:
        files[name] = _other_header(mutator, files[name])
    else:
        files[name] = mutator.bytes(files[name])
    if mutator.random.random() < 0.2:
        del files["model.safetensors.index.json"]
    return files


def read_safetensors(files: Mapping[str, bytes]) -> None:
    place = "memory://fuzz-hf/model"
    put_files("fuzz-hf/model", files)
    work = [
        lambda: open_all(place),
        lambda: ostraka.restore(place),
        lambda: ostraka.restore(place, names="llama"),
        lambda: ostraka.restore(place, names=lambda name, shape: f"a/{len(shape)}/{len(name)}"),
        lambda: ostraka.verify(place, raises=False),
        lambda: ostraka.restore(f"{place}/model-00002-of-00002.safetensors"),
    ]
    for read in work:
        with suppress(OstrakaError):
            read()
    for arguments in (
        ("show", place),
        ("show", place, "--files", "--json"),
        ("verify", place),
        ("diff", place, place, "--json"),
        ("plan", place),
    ):
        call(*arguments)


TARGETS: dict[str, Target] = {
    "metadata": Target(make_metadata, read_metadata, share=500),
    "index": Target(make_index, read_index, share=150),
    "block": Target(make_block, read_block, (codec.Undecodable,), share=350),
    "checkpoint": Target(make_checkpoint, read_checkpoint, share=8),
    "safetensors": Target(make_safetensors, read_safetensors, share=16),
}


# The harness


class Hang(BaseException):
    """A reader took too long; no reader may catch it."""


@contextmanager
def watchdog(seconds: float) -> Generator[None]:
    """Raise Hang after so much time of the processor: others may be using the machine, too."""

    def bark(*_: object) -> None:
        raise Hang(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, bark)
    # Again and again: what is raised inside a callback of the garbage collector is ignored there.
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class MemoryMeter:
    """How far the memory of this process rises above what it was, by the kernel's own count."""

    def __init__(self) -> None:
        self._reset()

    def rise(self) -> int:
        """Bytes since the last rise that was worth a look."""
        found = _peak_bytes() - self._floor
        if found > 8 << 20:
            gc.collect()
            self._reset()
        return found

    def _reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._floor = _peak_bytes()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def size_of(given: Any) -> int:
    return len(given) if isinstance(given, bytes) else sum(map(len, given.values()))


@dataclass
class Tally:
    """What was done."""

    inputs: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    slowest: int = 0
    """The seed of that one's mutator."""
    most_bytes: int = 0
    failures: dict[str, tuple[str, int, Any]] = field(default_factory=dict)
    """By what went wrong: all of it, the seed of its mutator, and the input."""

    def __str__(self) -> str:
        return (
            f"{self.inputs:,} inputs, {self.refused:,} refused, {len(self.failures)} failures, "
            f"slowest {self.slowest_s:.2f} s, most memory {self.most_bytes >> 20} MiB"
        )


def fuzz(name: str, count: int, seed: int) -> Tally:
    """Read many inputs of one target; go on after failures, of each kind the first is kept."""
    target, tally, meter = TARGETS[name], Tally(), MemoryMeter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(seed, seed + count):
            fuzz_one(target, number, tally, meter)
    return tally


def fuzz_one(
    target: Target,
    number: int,
    tally: Tally,
    meter: MemoryMeter,
    *,
    most_seconds: float = MOST_SECONDS,
) -> None:
    """Make the input of one number, read it, and note what happened."""
    given = target.make(Mutator(number))
    meter.rise()
    begin = time.process_time()
    try:
        with watchdog(most_seconds):
            target.read(given)
    except target.allowed:
        tally.refused += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
        tally.failures.setdefault(kind, (traceback.format_exc(), number, given))
    rise = meter.rise()
    if rise > MOST_MEMORY + MEMORY_PER_BYTE * size_of(given):
        tally.failures.setdefault("memory", (f"{rise >> 20} MiB", number, given))
    tally.inputs += 1
    taken = time.process_time() - begin
    if taken > tally.slowest_s:
        tally.slowest_s, tally.slowest = taken, number
    tally.most_bytes = max(tally.most_bytes, rise)


def shares(count: int) -> dict[str, int]:
    """How many inputs each target gets of so many in all, or a few more."""
    total = sum(target.share for target in TARGETS.values())
    return {name: ceil(count * target.share / total) for name, target in TARGETS.items()}
