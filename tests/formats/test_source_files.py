"""Files without checksums that change while they are read, or differ between hosts."""

import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import ostraka
from figures import Figures
from orbax_cases import ocp, quiet
from ostraka.errors import Busy, Damaged, PathInTheWay
from ostraka.formats.source_files import OpenedFile, look_settled, sample, state_of
from ostraka.storage import LocalStore, MemoryStore, Traits
from ostraka.testing import FaultyStore, run_processes
from ostraka.transfer import _streamed
from ostraka.transfer.convert import _write_orbax, _write_ostraka
from ostraka.transfer.convert import work as _cut
from places import BucketPath
from replacing import (
    HOWS,
    LOOPS,
    MODEL_FILES,
    TARGETS,
    change_file,
    model_bytes,
    replacing_in_a_loop,
    write_model,
)


def values_of(arrays: Any) -> set[float]:
    """Which models the arrays are of."""
    return {float(value) for array in arrays for value in np.unique(np.asarray(array))}


# Opened, then replaced


@pytest.mark.parametrize("how", [*HOWS, "in a bucket"])
def test_a_file_that_changes_after_the_model_was_opened(
    tmp_path: Path, how: str, request: pytest.FixtureRequest
):
    is_bucket = how == "in a bucket"
    place = BucketPath(request.getfixturevalue("bucket")) if is_bucket else tmp_path
    write_model(place, 1.0)
    opened = ostraka.open(place)
    assert values_of([opened["k1"][...]]) == {1.0}
    for number, name in enumerate(MODEL_FILES):
        data = model_bytes(number, 2.0)
        if isinstance(place, Path):
            change_file(place / name, data, how)
        else:
            (place / name).write_bytes(data)
        if number == 0:
            with pytest.raises(Busy, match=f"{name} has changed since it was opened"):
                opened["k1"][:2]
            assert values_of([opened["k2"][...]]) == {1.0}
    assert values_of(array[...] for array in ostraka.open(place).values()) == {2.0}


def test_a_model_whose_shapes_are_read_by_another_configuration(tmp_path: Path):
    """The configuration says how tensors are understood, so it must be that of the weights."""
    write_model(tmp_path, 1.0)
    (tmp_path / "config.json").write_text('{"model_type": "old"}')

    def before(verb: str, name: str) -> None:
        if (verb, name) == ("open", MODEL_FILES[-1]):
            (tmp_path / "config.json").write_text('{"model_type": "new"}')

    with pytest.raises(Busy, match="was overwritten 10 times"):
        ostraka.open(FaultyStore(tmp_path, before=before))


def test_a_file_that_was_just_written_is_looked_at_again(tmp_path: Path):
    """Two changes within one tick of the clock have the same time."""
    store = LocalStore(str(tmp_path))
    (tmp_path / "a").write_bytes(b"1")
    found = look_settled(store, "a")
    with open(tmp_path / "a", "r+b") as file:
        file.write(b"2")
    assert state_of(store.look("a")) != state_of(found)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_an_orbax_checkpoint_that_changes_after_it_was_opened(tmp_path: Path, ocdbt: bool):
    for name, value in (("old", 1.0), ("new", 2.0)):
        tree = {"a": np.full((64, 64), value), "b": np.full((64, 64), value)}
        with quiet():
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
            ocp.Checkpointer(handler).save(tmp_path / name, args=ocp.args.PyTreeSave(tree))
    opened = ostraka.open(tmp_path / "old")
    assert values_of([opened["a"][...]]) == {1.0}
    if ocdbt:
        shutil.copytree(tmp_path / "new", tmp_path / "old", dirs_exist_ok=True)
    else:
        chunk = next(file for file in (tmp_path / "old" / "a").rglob("0*") if file.is_file())
        change_file(chunk, (tmp_path / "new" / chunk.relative_to(tmp_path / "old")).read_bytes())
    with pytest.raises(Busy, match="has changed since it was opened"):
        opened["a"][...]
    assert values_of(array[...] for array in ostraka.open(tmp_path / "new").values()) == {2.0}


# While it is read


def replace_at(path: Path, name: str, value: float = 2.0) -> Callable[[str, str], None]:
    """All files are replaced when one of them is opened for the second time: the first time, its
    header is read."""
    opened: list[str] = []

    def before(verb: str, file: str) -> None:
        if verb == "open":
            opened.append(file)
            if opened.count(name) == 2 and file == name:
                write_model(path, value)

    return before


def always_replace(path: Path) -> Callable[[str, str], None]:
    """Replace one file whenever another is read."""

    def before(verb: str, name: str) -> None:
        if (verb, name) == ("read_into", MODEL_FILES[2]):
            change_file(path / MODEL_FILES[1], model_bytes(1, 2.0))

    return before


def test_reads_while_files_are_replaced(tmp_path: Path, bucket: str):
    """A restore and a copy begin again, a merge is refused; nothing is left of what failed."""
    model, copied = tmp_path / "a", tmp_path / "b"
    write_model(model, 1.0)
    write_model(tmp_path / "other", 1.0)
    store = FaultyStore(model, before=replace_at(model, MODEL_FILES[2], 2.0))
    assert values_of(ostraka.restore(store).values()) == {2.0}
    ostraka.copy(FaultyStore(model, before=replace_at(model, MODEL_FILES[2], 3.0)), copied)
    files = [load_file(copied / name) for name in MODEL_FILES]
    assert values_of(array for file in files for array in file.values()) == {3.0}
    store = FaultyStore(model, before=replace_at(model, MODEL_FILES[2], 4.0))
    with pytest.raises(Busy, match="has changed since it was opened"):
        ostraka.merge([store, tmp_path / "other"], tmp_path / "c")
    assert not (tmp_path / "c").exists()
    store = FaultyStore(model, before=always_replace(model))
    with pytest.raises(Busy, match="was overwritten 10 times while it was being read"):
        ostraka.restore(store)
    for target in (tmp_path / "d", BucketPath(bucket) / "d"):
        with pytest.raises(Busy, match="was overwritten 10 times"):
            ostraka.copy(store, target)
        assert not target.exists()


def test_a_copy_of_a_model_that_has_other_values_by_now(tmp_path: Path):
    """Names, sizes and headers are those of the copy that is there, the values are not."""
    write_model(tmp_path / "a", 1.0)
    ostraka.copy(tmp_path / "a", tmp_path / "b")
    assert ostraka.copy(tmp_path / "a", tmp_path / "b").skipped == 1
    write_model(tmp_path / "a", 2.0)
    with pytest.raises(PathInTheWay, match="has something else in it"):
        ostraka.copy(tmp_path / "a", tmp_path / "b")


# Conversions


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have conversions work in small pieces."""
    monkeypatch.setattr(_cut, "_TOGETHER_BYTES", 1 << 12)
    monkeypatch.setattr(_write_orbax, "_TOGETHER_BYTES", 1 << 12)
    monkeypatch.setattr(_write_ostraka, "MAX_FILE_BYTES", 1 << 14)
    monkeypatch.setattr(_streamed, "_SMALL_BYTES", 0)


def interrupt_at(hundredths: float) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        if 100 * done >= hundredths * total:
            raise KeyboardInterrupt("enough")

    return tell


def converted(path: Path | str, to: str) -> dict[str, set[float]]:
    """Which model each tensor of a result is of."""
    if to == "npz":
        with np.load(path) as found:
            return {name: values_of([found[name]]) for name in found}
    return {name: values_of([array[...]]) for name, array in ostraka.open(path).items()}


NEW = {f"k{number}": {2.0} for number in range(1, 5)}


@pytest.mark.parametrize(
    ("to", "is_bucket"), [*((to, False) for to in TARGETS), ("hf", True)], ids=str
)
def test_a_conversion_that_goes_on_with_another_source(
    tmp_path: Path,
    to: Any,
    is_bucket: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    cut_small(monkeypatch)
    write_model(tmp_path / "a", 1.0)
    target = request.getfixturevalue("bucket") if is_bucket else tmp_path / TARGETS[to]
    if is_bucket:
        monkeypatch.setattr("ostraka.transfer.convert._tensor_files.MAX_FILE_BYTES", 1 << 12)
    # One file after the other, so that some are finished.
    slow = FaultyStore(target, traits=Traits(at_once=1)) if to == "ostraka" else target
    with pytest.raises(KeyboardInterrupt, match="enough"):
        ostraka.convert(tmp_path / "a", slow, to=to, on_bytes=interrupt_at(40))
    write_model(tmp_path / "a", 2.0)
    with caplog.at_level(logging.WARNING, "ostraka"):
        report = ostraka.convert(tmp_path / "a", target, to=to)
    assert converted(target, to) == NEW
    assert report.bytes_kept == 0
    told = [record.message for record in caplog.records if "starts over" in record.message]
    assert len(told) == 1
    assert str(target) in told[0]


@pytest.mark.parametrize("to", TARGETS)
def test_a_conversion_whose_source_changes(
    tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
):
    cut_small(monkeypatch)
    write_model(tmp_path / "a", 1.0)
    target = tmp_path / TARGETS[to]
    source = FaultyStore(tmp_path / "a", before=replace_at(tmp_path / "a", MODEL_FILES[2]))
    with pytest.raises(Busy, match="has changed since it was opened"):
        ostraka.convert(source, target, to=to)
    assert os.listdir(tmp_path) == ["a"]


def test_a_tokenizer_of_another_model(tmp_path: Path):
    """What lies beside the weights is copied after them, and must be of the same model."""
    write_model(tmp_path / "a", 1.0)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")

    def tell(done: int, total: int) -> None:
        if done == total:
            write_model(tmp_path / "a", 2.0)
            (tmp_path / "a" / "tokenizer.json").write_text('{"new": 1}')

    with pytest.raises(Busy, match="has changed since it was opened"):
        ostraka.convert(tmp_path / "a", tmp_path / "b", to="hf", on_bytes=tell)
    assert os.listdir(tmp_path) == ["a"]


# The cache of the Hugging Face hub


def test_blobs_that_are_elsewhere_are_not_followed(tmp_path: Path):
    root = tmp_path / "cache" / "models--a--b"
    snapshot = root / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (root / "blobs").symlink_to(tmp_path / "elsewhere")
    for number, name in enumerate(("model.safetensors", "config.json")):
        data = model_bytes(0, 1.0) if not number else b"{}"
        (tmp_path / "elsewhere" / (str(number) * 40)).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{str(number) * 40}")
    with pytest.raises(Damaged, match="links in a checkpoint are not followed"):
        ostraka.open(snapshot)
    with pytest.raises(Damaged, match="links in a checkpoint are not followed"):
        ostraka.copy(snapshot, tmp_path / "copied")
    (root / "blobs").unlink()
    (tmp_path / "elsewhere").rename(root / "blobs")
    assert values_of([ostraka.open(snapshot)["k1"][...]]) == {1.0}


# Samples


def test_a_sample_reads_little(tmp_path: Path):
    data = np.zeros(8 << 20, np.uint8)
    parts = [(start, 1000) for start in range(5_000, 8_000_000, 100_003)]
    digests: set[str] = set()
    for at in (None, 0, 1 << 20, (8 << 20) - 1, parts[30][0] + 500):
        changed = data.copy()
        if at is not None:
            changed[max(at - 150_000, 0) : at + 150_000] = 1
        (tmp_path / "a").write_bytes(changed.tobytes())
        store = FaultyStore(tmp_path)
        digests.add(sample(OpenedFile(store, "a", None), data.size, parts, "by version"))
        assert len([call for call in store.calls if call[0] == "read_into"]) <= 64
    assert len(digests) == 5


# Several processes


def failure_of(work: Callable[[], Any]) -> str:
    try:
        found = work()
    except ostraka.errors.OstrakaError as error:
        return str(error)
    arrays = [np.asarray(array.addressable_data(0)) for array in found.values()]
    return str(sorted(values_of(arrays)))


def work_on_own_paths(root: str, downloads: list[float]) -> dict[str, str]:
    """The error of each work on a path of this process's own, or the values that it got."""
    import jax

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    process = jax.process_index()

    def own(one: str, other: str) -> str:
        return f"{root}/{other if process == 1 else one}"

    def restore(path: str) -> Any:
        return ostraka.restore(path, mesh=mesh, specs=P(), share_reads=False)

    store = MemoryStore("downloads")
    for number, name in enumerate(MODEL_FILES):
        store.put(name, model_bytes(number, downloads[process] if number == 2 else 1.0))
    axes = {"data": len(jax.devices())}
    works: dict[str, Callable[[], Any]] = {
        "downloads": lambda: restore("memory://downloads"),
        "same models": lambda: restore(own("model1", "model2")),
        "other models": lambda: restore(own("model1", "model3")),
        "checkpoints": lambda: restore(own("a", "b")),
        "axes": lambda: ostraka.restore(own("a", "b"), mesh=axes),
        "repair": lambda: ostraka.repair(own("c", "d"), {"x": np.arange(3)}),
    }
    return {name: failure_of(work) for name, work in works.items()}


def test_processes_that_work_on_different_paths(tmp_path: Path):
    for number, value in ((1, 1.0), (2, 1.0), (3, 2.0)):
        write_model(tmp_path / f"model{number}", value)
    for name in "abcd":
        ostraka.save(tmp_path / name, {"x": np.arange(3)})
    for name in "cd":
        next((tmp_path / name).rglob("shard_*")).unlink()
    results = run_processes(work_on_own_paths, str(tmp_path), [1.0, 2.0, 1.0, 2.0], processes=4)
    same = "give all processes the same path"
    expected = {
        "downloads": [
            f"{MODEL_FILES[2]} of memory://downloads is another file",
            "on processes 1, 3 than on process 0; give all hosts the same files",
        ],
        "same models": ["[1.0]"],
        "other models": [
            same,
            f"(processes 0, 2, 3: {tmp_path}/model1; process 1: {tmp_path}/model3)",
        ],
        "checkpoints": [f"it restores {tmp_path}/b while process 0 restores {tmp_path}/a"],
        "axes": [f"it restores {tmp_path}/b while process 0 restores {tmp_path}/a"],
        "repair": [f"it repairs {tmp_path}/d while process 0 repairs {tmp_path}/c", same],
    }
    for result in results:
        for name, sentences in expected.items():
            assert all(text in result.value[name] for text in sentences), result.value[name]


# At random


READS = ("restore", "open", "copy", "merge", "convert")


def read_somehow(rng: random.Random, model: Any, place: Path) -> list[float]:
    """Read a model in one of many ways; returns which model each file is of, as far as it is one.

    A merge is one with a model of zeros.
    """
    what = rng.choice(READS)
    target = place / "result"
    times = 1.0
    try:
        if what == "restore":
            found: Any = ostraka.restore(model)
        elif what == "open":
            opened = ostraka.open(model)
            found = {name: opened[name][...] for name in rng.sample(list(opened), len(opened))}
        elif what == "merge":
            ostraka.merge([model, place / "zeros"], target)
            found, times = ostraka.restore(target), 2.0
        elif what == "copy":
            ostraka.copy(model, target)
            found = ostraka.restore(target)
        else:
            to: Any = rng.choice(["ostraka", "safetensors", "hf"])
            ostraka.convert(model, target, to=to)
            found = ostraka.restore(target)
        values = [np.unique(np.asarray(found[name])) * times for name in sorted(found)]
        return [float(one[0]) if one.size == 1 else float("nan") for one in values]
    finally:
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(f"{target}.converting", ignore_errors=True)


def count_reads(
    rng: random.Random, model: Any, place: Path, rounds: int, stood_still: Callable[..., bool]
) -> Counter[str]:
    """What came of reads of a model that is being replaced: each is of one model, or refused.

    One thing can't be noticed: a replacement that stands still half-way while a model is opened and
    read, as on a busy machine it does at times.
    """
    counts: Counter[str] = Counter()
    for _ in range(rounds):
        begin = time.monotonic_ns()
        try:
            found = read_somehow(rng, model, place)
        except Busy:
            counts["refused"] += 1
            continue
        if found in ([1.0] * 4, [2.0] * 4):
            counts["whole"] += 1
        else:
            counts["half-way" if stood_still(found, begin) else "mixed"] += 1
    print(dict(counts))
    assert not counts["mixed"]
    assert counts["whole"]
    return counts


@pytest.mark.soak
@pytest.mark.parametrize("how", LOOPS)
def test_reads_while_files_are_replaced_in_a_loop(tmp_path: Path, how: str, figures: Figures):
    write_model(tmp_path / "zeros", 0.0, 1 << 18)
    model = tmp_path / "model"
    with replacing_in_a_loop(model, how) as replacing:
        counts = count_reads(random.Random(how), model, tmp_path, 100, replacing.stood_still)
    figures.add("models read while their files were replaced", counts.total())
    figures.add("such reads that gave one model", counts["whole"])
    figures.add("such reads that raised Busy", counts["refused"])


@pytest.mark.soak
def test_reads_while_objects_are_replaced(tmp_path: Path, bucket: str, figures: Figures):
    rng = random.Random(0)
    model = BucketPath(bucket) / "model"
    write_model(model, 1.0)
    write_model(tmp_path / "zeros", 0.0)
    stop, changes_ns = threading.Event(), [0, 0]  # begun and ended

    def replace() -> None:
        value = 2.0
        while not stop.is_set():
            for number, name in enumerate(MODEL_FILES):
                changes_ns[0] = time.monotonic_ns()
                (model / name).write_bytes(model_bytes(number, value))
                changes_ns[1] = time.monotonic_ns()
            value = 3.0 - value
            stop.wait(rng.uniform(0, 1.0))

    def stood_still(found: list[float], begin_ns: int) -> bool:
        begun, ended = changes_ns
        return begun <= ended < begin_ns

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        counts = count_reads(random.Random(1), model, tmp_path, 40, stood_still)
    finally:
        stop.set()
        thread.join()
    figures.add("models read while their objects were replaced", counts.total())


CONVERT_AND_DIE = """
import os, signal, sys
from ostraka.transfer import _streamed
from ostraka.transfer.convert import _write_orbax, _write_ostraka, convert, work
work._TOGETHER_BYTES = _write_orbax._TOGETHER_BYTES = 1 << 12
_write_ostraka.MAX_FILE_BYTES, _streamed._SMALL_BYTES = 1 << 14, 0
print("ready", flush=True)
for line in sys.stdin:
    source, target, to, kill_at = line.split()
    def tell(done, total):
        if 1000 * done >= int(kill_at) * total:
            os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()  # No thread has been started: all is done by children.
    if not child:
        convert(source, target, to=to, on_bytes=tell)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.soak
@pytest.mark.parametrize("to", TARGETS)
def test_conversions_that_go_on_with_a_source_that_was_replaced(
    tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch, figures: Figures
):
    cut_small(monkeypatch)
    rng = random.Random(to)
    source, target = tmp_path / "a", tmp_path / TARGETS[to]
    counts: Counter[str] = Counter()
    command = [sys.executable, "-c", CONVERT_AND_DIE]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdout.readline()
        for _ in range(60):
            elements = rng.choice([1 << 10, 1 << 14, 1 << 18])
            write_model(source, 1.0, elements)
            kill_at = rng.randrange(1, 1000)
            if rng.random() < 0.5:
                program.stdin.write(f"{source} {target} {to} {kill_at}\n")
                program.stdin.flush()
                program.stdout.readline()
                counts["killed with -9"] += 1
            else:
                with suppress(KeyboardInterrupt):
                    tell = interrupt_at(kill_at / 10)
                    ostraka.convert(source, target, to=to, on_bytes=tell)
                counts["interrupted"] += 1
            how = rng.choice(HOWS)
            chosen = (
                MODEL_FILES if rng.random() < 0.5 else rng.sample(MODEL_FILES, rng.randint(1, 3))
            )
            for number, name in enumerate(MODEL_FILES):
                if name in chosen:
                    change_file(source / name, model_bytes(number, 2.0, elements), how)
            now = {f"k{n + 1}": {1.0 + (name in chosen)} for n, name in enumerate(MODEL_FILES)}
            is_over = False
            try:
                ostraka.convert(source, target, to=to)
            except PathInTheWay:
                is_over = True  # It was killed after its commit.
            found = converted(target, to)
            is_old = is_over and set(map(tuple, found.values())) == {(1.0,)}
            counts["right" if is_old or (found == now and not is_over) else "mixed"] += 1
            subprocess.run(["rm", "-r", str(target)], check=True)
        program.stdin.close()
    print(to, dict(counts))
    assert not counts["mixed"]
    figures.add("conversions that went on with a replaced source", counts["right"])
