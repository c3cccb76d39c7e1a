"""`ostraka.verify` beyond damage: what it proves without reading, notes, coverage, all steps."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import xxhash

import ostraka
from cli_runs import run
from ostraka.compat.orbax import PyTreeCheckpointer
from ostraka.errors import CheckpointNotFound, Damaged
from ostraka.integrity._coverage import find_gap
from ostraka.storage import open_store
from places import Place, copy_tree, flip
from sealed import change_index

AnyPlace = TypeVar("AnyPlace", bound=Place)
TREE = {"w": np.arange(24.0).reshape(4, 6), "b": np.ones(3, np.float32)}


def save(path: AnyPlace) -> AnyPlace:
    ostraka.save(path, TREE)
    return path


def shards_of(path: Place) -> list[Any]:
    return sorted(path.glob("shards-*/*.safetensors"))


# Without reading


@pytest.mark.parametrize("bucket", ["moto", "seaweed", "azurite"], indirect=True)
def test_a_bucket_proves_what_nobody_has_written_again(bucket: str):
    """One object that was put at once, and one that was uploaded in parts."""
    large = np.random.default_rng(1).standard_normal(3 << 20)
    ostraka.save(f"{bucket}/c", {"large": large, **TREE})
    store = open_store(f"{bucket}/c")
    shards = [file.name for file in store.files("") if file.name.endswith(".safetensors")]
    report = ostraka.verify(f"{bucket}/c", read=False)
    assert (report.ok, report.proven, report.notes) == (True, len(shards), ())
    assert report.bytes_read < 10_000
    assert f"{len(shards)} proven to be as they were saved" in str(report)
    data = bytearray(store.get(shards[0]))
    data[-1] ^= 1
    store.put(shards[0], bytes(data))
    (problem,) = ostraka.verify(f"{bucket}/c", read=False, raises=False).problems
    assert problem.file == shards[0]
    assert problem.leaves
    assert problem.found.startswith("it was written again since it was saved")
    with pytest.raises(Damaged, match="are not as they were written"):
        ostraka.verify(f"{bucket}/c")


def test_a_copy_proves_nothing_without_reading(bucket: str, tmp_path: Path):
    """Its objects are others than those that the save has uploaded, if of the same bytes."""
    ostraka.save(f"{bucket}/c", TREE)
    ostraka.copy(f"{bucket}/c", f"{bucket}/copy")
    ostraka.copy(f"{bucket}/c", tmp_path / "copy")
    for copy in (f"{bucket}/copy", tmp_path / "copy"):
        report = ostraka.verify(copy, read=False)
        assert (report.ok, report.proven) == (True, 0)
        assert {note.found for note in report.notes} == {"only reading tells if it is intact"}
        assert ostraka.verify(copy).ok


def test_without_reading_sizes_are_compared(place: Place):
    path = save(place / "c")
    file = shards_of(path)[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    (problem,) = ostraka.verify(path, read=False, raises=False).problems
    assert (problem.file, bool(problem.boxes)) == (str(file.relative_to(path)), True)
    assert "bytes where" in problem.found
    file.unlink()
    with pytest.raises(Damaged, match="it is missing"):
        ostraka.verify(path, read=False)
    assert run("verify", path, "--no-read").exit_code == 1
    file.write_bytes(whole)
    # The ETag of one put is the digest of its bytes, with S3 and its like.
    assert run("verify", path, "--no-read").exit_code == 0


# What lies beside


def test_foreign_files_are_noted_and_no_damage(tmp_path: Path):
    path = save(tmp_path / "c")
    (shards,) = path.glob("shards-*")
    (path / "notes.txt").write_text("mine")
    (shards / "stray.bin").write_text("mine")
    (path / "logs").mkdir()
    (path / "logs" / "a").write_text("1")
    (path / "logs" / "b").write_text("2")
    (path / "shards-0123456789abcdef").mkdir()
    (path / "shards-0123456789abcdef" / "shard_00000.safetensors").write_text("dead")
    (path / "_METADATA.01234567.tmp").write_text("dead")
    report = ostraka.verify(path)
    assert {note.file: note.found.partition(";")[0] for note in report.notes} == {
        "logs/": "2 files that the checkpoint does not know",
        "notes.txt": "a file that the checkpoint does not know",
        f"{shards.name}/stray.bin": "a file that the checkpoint does not know",
        "shards-0123456789abcdef/": "1 file of a save that died",
        "_METADATA.01234567.tmp": "of a save that died",
    }
    shown = run("verify", path)
    assert shown.exit_code == 0
    assert "  note: notes.txt: a file that the checkpoint does not know" in shown.stdout

    # Beside a claim they may be of a save that is under way.
    (path / f"_CLAIM-{'0' * 32}").touch()
    notes = {note.file: note.found for note in ostraka.verify(path).notes}
    assert notes[f"_CLAIM-{'0' * 32}"] == "a save is under way here, or died here"
    assert notes["shards-0123456789abcdef/"] == "1 file of a save that is under way, or died"


def test_a_second_copy_of_metadata_that_is_damaged_hurts_nobody(tmp_path: Path):
    """It is not synced: a crash may take the end of it, or all, and nothing else is damage."""
    path = save(tmp_path / "c")
    (copy,) = path.glob("shards-*/metadata.json")
    whole = copy.read_bytes()
    for position in range(0, len(whole), 97):
        flip(copy, position, 1)
        (problem,) = ostraka.verify(path, raises=False).problems
        assert (problem.file, problem.leaves) == (str(copy.relative_to(path)), ())
        copy.write_bytes(whole)
    assert (ostraka.restore(path)["b"] == TREE["b"]).all()
    copy.write_bytes(whole[:100])
    (note,) = ostraka.verify(path).notes
    assert note.file.endswith("/metadata.json")
    assert "is not complete; only a repair would need it" in note.found
    copy.unlink()
    assert ostraka.verify(path).notes == ()


# Headers


def change_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = shards_of(path)[0]
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed, separators=(",", ":")).encode()
    whole = data[:8] + text.ljust(length)
    file.write_bytes(whole + data[8 + length :])
    digest = xxhash.xxh3_64_hexdigest(whole)

    def change_digest(body: dict[str, Any]) -> None:
        described = body["files"][file.name]
        described["digests"] = digest + described["digests"][16:]

    change_index(path, change_digest)


def move_box(header: dict[str, Any]) -> None:
    about = header["__metadata__"]
    places = json.loads(about["DCP_SHARDING_INFO"])
    next(iter(places.values()))["saved_offsets"][0] += 1
    about["DCP_SHARDING_INFO"] = json.dumps(places)


def put_at(*offsets: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["w"].update(data_offsets=list(offsets))


def nested(header: dict[str, Any]) -> Any:
    deep: Any = []
    for _ in range(700):
        deep = [deep]
    return {"__metadata__": header["__metadata__"], "x": deep}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (move_box, "its header has the box"),
        (lambda h: h.pop(next(k for k in h if k != "__metadata__")) and None, "its header lacks"),
        (lambda h: h.update(other={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "other"),
        (lambda h: [], "its header is not a JSON object"),
        (lambda h: {**h, "__metadata__": 3}, "`__metadata__`"),
        (lambda h: {k: 1 for k in h if k != "__metadata__"}, "its header does not describe"),
        (nested, "its header has 'x'"),
        (put_at(), "its header has 'w' at []"),
        (put_at(1), "its header has 'w' at [1]"),
        (put_at(float("inf"), 0), "its header does not describe 'w'"),
    ],
)
def test_a_header_that_contradicts_metadata(tmp_path: Path, change: Any, said: str):
    """Its digest is right: whoever wrote it was wrong, and others' tools would read it wrong."""
    path = save(tmp_path / "c")
    change_header(path, change)
    (problem,) = ostraka.verify(path, raises=False).problems
    assert problem.file == str(shards_of(path)[0].relative_to(path))
    assert said in problem.found


@pytest.mark.parametrize(
    ("shape", "boxes", "said"),
    [
        ((4, 6), [((0, 2), (0, 6)), ((2, 4), (0, 6))], None),
        ((4, 6), [((0, 2), (0, 6))], "dimension 0 of 4 elements is cut into 0:2"),
        ((4, 6), [((0, 2), (0, 6)), ((0, 2), (0, 6))], "a box is there twice"),
        ((4, 6), [((0, 3), (0, 6)), ((2, 4), (0, 6))], "dimension 0 .* is cut into 0:3, 2:4"),
        ((4, 4), [((0, 2), (0, 2)), ((2, 4), (2, 4))], "2 of 4 boxes are there"),
        ((), [()], None),
        ((), [], "0 of 1 boxes are there"),
        ((0, 3), [((0, 0), (0, 3))], None),
        ((0, 3), [], "it is in no file"),
    ],
)
def test_boxes_that_are_all_of_an_array(shape: Any, boxes: Any, said: str | None):
    found = find_gap(shape, boxes)
    assert found is None if said is None else re.search(said, found or "")


# Files that only an index names


def test_files_that_an_index_names_are_compared_too(tmp_path: Path):
    path = save(tmp_path / "c")
    (directory,) = path.glob("shards-*")
    data = np.random.default_rng(2).bytes(5 << 20)
    (directory / "parity_00000.safetensors").write_bytes(data)
    cuts = [data[: 4 << 20], data[4 << 20 :]]
    described = {
        "size": len(data),
        "blocks": [[len(cut), 0, 1] for cut in cuts],
        "digests": "".join(map(xxhash.xxh3_64_hexdigest, cuts)),
    }
    change_index(path, lambda body: body["files"].update({"parity_00000.safetensors": described}))
    report = ostraka.verify(path)
    assert (report.ok, report.notes) == (True, ())
    assert report.bytes_read > len(data)
    flip(directory / "parity_00000.safetensors", 5_000_000, 4)
    (problem,) = ostraka.verify(path, raises=False).problems
    assert problem.file == f"{directory.name}/parity_00000.safetensors"
    assert (problem.process, problem.span, problem.leaves) == (0, (4 << 20, 5 << 20), ())
    (directory / "parity_00000.safetensors").unlink()
    with pytest.raises(Damaged, match="parity_00000.safetensors: it is missing"):
        ostraka.verify(path)


def test_an_index_leads_to_no_file_outside(tmp_path: Path):
    path = save(tmp_path / "c")
    (tmp_path / "secret").write_bytes(b"x")
    named = {"size": 1, "blocks": [[1, 0, 1]], "digests": "0" * 16}
    change_index(path, lambda body: body["files"].update({"../../secret": named, "a/b": named}))
    assert ostraka.verify(path).ok


# All steps


def test_a_report_of_damaged_metadata(tmp_path: Path):
    path = save(tmp_path / "c")
    (path / "_METADATA").write_bytes(b'{"format":"ostraka"')
    report = ostraka.verify(path, raises=False)
    assert not report.ok
    assert report.damaged_files == ("_METADATA",)
    assert str(report) == f"{path}: 1 problem: _METADATA"
    with pytest.raises(Damaged, match="_METADATA"):
        ostraka.verify(path)
    shown = run("verify", path, "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["problems"][0]["file"] == "_METADATA"


def test_all_steps_of_a_root(tmp_path: Path):
    root = tmp_path / "runs"
    for step in (1, 2, 3):
        save(root / f"step_{step:08d}")
    (root / "step_00000009").mkdir()
    report = ostraka.verify(root, all_steps=True)
    assert report.ok
    assert [step.path for step in report.steps] == [
        str(root / f"step_{step:08d}") for step in (1, 2, 3)
    ]
    assert str(report).endswith("3 steps, none of them damaged")
    flip(shards_of(root / "step_00000001")[0], 9, 1)
    (root / "step_00000003" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    report = ostraka.verify(root, all_steps=True, raises=False)
    assert [step.ok for step in report.steps] == [False, True, False]
    assert [problem.file.split("/")[0] for problem in report.problems] == [
        "step_00000001",
        "step_00000003",
    ]
    with pytest.raises(Damaged, match="for 2 reasons:\n  step_00000001/shards-"):
        ostraka.verify(root, all_steps=True)
    shown = run("verify", root)
    assert shown.exit_code == 1
    rows = [line for line in shown.stdout.splitlines() if "  damaged  " in line]
    assert len(rows) == 2
    assert "1 of 8  0 of 2  0" in rows[0]
    assert rows[1].endswith("_METADATA")
    assert shown.stdout.endswith("3 checkpoints, 2 of them damaged\n")


def test_a_root_without_steps(tmp_path: Path):
    with pytest.raises(CheckpointNotFound, match="there are no steps in .* to verify"):
        ostraka.verify(tmp_path, all_steps=True)


# What is told


def test_long_lists_are_short_but_in_json(tmp_path: Path):
    path = tmp_path / "c"
    ostraka.save(path, {"x": np.zeros((64, 1 << 16), np.uint8)})
    copies = tmp_path / "many"
    copy_tree(path, copies)
    for number in range(30):
        shutil.copytree(path, copies / f"dir{number:02d}")
    shown = run("verify", copies).stdout
    assert "  … and 10 more; --json has them all" in shown
    assert len(json.loads(run("verify", copies, "--json").stdout)["notes"]) == 30


def test_json_has_process_bytes_and_boxes(tmp_path: Path):
    path = save(tmp_path / "c")
    shards_of(path)[0].unlink()
    document = json.loads(run("verify", path, "--json").stdout)
    (problem,) = document["problems"]
    assert (problem["process"], problem["bytes"], bool(problem["host"])) == (0, None, True)
    assert {"leaf": "w", "box": [[0, 4], [0, 1]], "shape": [4, 6]} in problem["boxes"]
    assert document["damaged_leaves"]["w"] == pytest.approx(4 / 24)


# Without anything in it


def test_a_checkpoint_with_nothing_in_it_is_intact_and_said_to_be_empty(tmp_path: Path):
    PyTreeCheckpointer().save(tmp_path / "empty", {"opt": None, "model": {}})
    report = ostraka.verify(tmp_path / "empty")
    assert (report.ok, report.is_empty) == (True, True)
    assert "intact, but there is nothing in it (0 arrays in 0 files" in str(report)
    assert "there is nothing in it" in run("verify", tmp_path / "empty").stdout
    ostraka.save(tmp_path / "number", {"step": 0})
    report = ostraka.verify(tmp_path / "number")
    assert (report.ok, report.is_empty) == (True, False)
