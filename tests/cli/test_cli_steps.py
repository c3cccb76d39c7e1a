"""Directories of steps: `ostraka ls`, `rm`, `gc`, and what `show` and `verify` make of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ostraka
from cli_runs import as_json, assert_fails, closed, flip, run
from ostraka import Manager
from ostraka.storage import LocalStore, claimed
from ostraka.testing import FaultyStore

LEFT = "shards-0123456789abcdef"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, of which the first is pinned."""
    path = tmp_path_factory.mktemp("made") / "runs"
    with Manager(path, every=None, keep=None, asynchronous=False) as manager:
        for step in (100, 200, 300):
            manager.save(step, {"x": np.full(1000, step)}, metrics={"loss": 30 / step})
        manager.pin(100)
    return path


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != "_RUN")


def leave_behind(directory: Path, name: str = LEFT) -> Path:
    """What a save that was killed leaves."""
    left = directory / name
    left.mkdir(parents=True)
    (left / "shard_00000.safetensors").write_bytes(b"x" * 2048)
    return left


# ls


def test_ls(root: Path):
    leave_behind(root / "step_00000200")  # It does not mislead.
    result = run("ls", root)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == str(root)
    assert lines[2].split() == ["step", "size", "saved", "metrics", "pinned", "state"]
    first, second, third = (line.split() for line in lines[3:6])
    assert first[0] == "100"
    assert {"loss=0.3", "pinned", "complete"} <= set(first)
    assert (second[0], third[0]) == ("200", "300")
    assert "pinned" not in second
    assert result.stdout.count("complete") == 3
    assert lines[-1].startswith("3 steps, ")
    document = as_json("ls", root)
    assert document["root"] == str(root)
    first = document["steps"][0]
    size = sum(path.stat().st_size for path in Path(first["path"]).glob("shards-*/*.safetensors"))
    assert first["bytes"] == size
    assert (first["step"], first["pinned"], first["verified"]) == (100, True, False)
    assert (first["metrics"], first["problems"]) == ({"loss": 0.3}, [])
    assert_fails(
        run("ls", root / "step_00000100"),
        "is a checkpoint, not a directory of steps; give the directory above",
    )


def test_ls_can_verify(root: Path):
    assert run("ls", root, "--verify").stdout.count(" intact") == 3
    flip(root / "step_00000200")
    assert run("ls", root).exit_code == 0
    result = run("ls", root, "--verify")
    assert result.exit_code == 1
    assert result.stdout.count(" intact") == 2
    assert result.stdout.count(" damaged: shards-") == 1
    steps = as_json("ls", root, "--verify")["steps"]
    assert [bool(step["problems"]) for step in steps] == [False, True, False]


def test_ls_tells_of_missing_files(root: Path):
    shard = next((root / "step_00000200").glob("shards-*/*.safetensors"))
    size = shard.stat().st_size
    shard.unlink()
    result = run("ls", root)
    assert result.exit_code == 1
    assert result.stdout.count("complete") == 2
    (row,) = (line for line in result.stdout.splitlines() if line.startswith(" 200"))
    assert row.endswith("damaged: 1 file missing")
    steps = as_json("ls", root)["steps"]
    name = f"{shard.parent.name}/{shard.name}"
    assert [step["problems"] for step in steps] == [[], [f"{name}: it is missing"], []]
    shard.write_bytes(b"x" * (size - 1))
    assert f"damaged: {name}: " in run("ls", root, COLUMNS=None).stdout


def test_ls_reads_no_shard(root: Path):
    for shard in root.glob("*/shards-*/*.safetensors"):
        size = shard.stat().st_size
        shard.write_bytes(b"x" * size)
    assert run("ls", root).stdout.count("complete") == 3


def test_ls_tells_of_a_step_that_can_not_be_read(root: Path):
    (root / "step_00000200" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    result = run("ls", root)
    assert result.exit_code == 1
    assert "damaged: _METADATA: its digest is not" in result.stdout


def test_ls_does_not_take_a_lack_of_permission_for_damage(root: Path):
    assert run("ls", root).exit_code == 0
    with closed(root, "step_00000200") as path:
        result = run("ls", path)
    assert (result.exit_code, result.stderr) == (2, "")
    assert "forbidden: _METADATA: PermissionError" in result.stdout
    assert "damaged" not in result.stdout


def test_ls_of_an_empty_directory(tmp_path: Path):
    result = run("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}\nno steps\n")


# show and verify


def test_show_of_steps_shows_the_newest(root: Path):
    shown = run("show", root)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"{root}/step_00000300  saved ")
    assert as_json("show", root)["path"] == f"{root}/step_00000300"
    assert run("show", root, "x", "--slice", "0").stdout.endswith("[0]\n300\n")


def test_a_step_by_its_number(made: Path):
    step = f"{made}/step_00000200"
    for name in ("200", "0200", "step_200", "step_00000200"):
        assert run("show", made / name).stdout.startswith(f"{step}  saved ")
        assert run("verify", made / name).stdout.startswith(f"{step}: intact")
        document = as_json("verify", made / name)
        assert (document["path"], document["ok"]) == (step, True)
    assert_fails(run("show", made / "250"), f"the steps in {made} are 100, 200, 300")


def test_verify_of_steps(root: Path):
    result = run("verify", root)
    assert result.exit_code == 0
    assert result.stdout.count(": intact (") == 3
    assert result.stdout.endswith("3 checkpoints, none of them damaged\n")
    (root / "step_00000100" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    flip(root / "step_00000300")
    result = run("verify", root, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert [step["ok"] for step in document["checkpoints"]] == [False, True, False]


def test_verify_of_a_single_step_gives_a_list_too(tmp_path: Path):
    ostraka.save(tmp_path / "7", {"x": 1})
    (step,) = as_json("verify", tmp_path)["checkpoints"]
    one = as_json("verify", tmp_path / "7")
    assert one.keys() == {"schema", *step}


def test_verify_knows_pins(root: Path):
    assert run("verify", root).stdout.count("\n") == 4
    assert as_json("verify", root / "100")["notes"] == []
    (root / "step_00000100" / "notes.txt").write_text("mine")
    assert "  note: notes.txt: a file that" in run("verify", root).stdout


# rm


def test_rm(root: Path):
    before = names(root)
    result = run("rm", root, 200, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"would go from {root}\n")
    assert "step_00000200" in result.stdout
    assert result.stdout.endswith("\nnothing was removed\n")
    document = as_json("rm", root, 200, "--dry-run")
    assert document["removed"] is False
    assert document["steps"][0]["paths"] == [str(root / "step_00000200")]
    assert names(root) == before
    ostraka.save(root / "400", {"x": 1})
    result = run("rm", root, "step_00000200", 300, "--yes")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"removed from {root}\n")
    assert names(root) == ["400", "step_00000100"]
    assert as_json("rm", root, 100, "--yes", "--force")["removed"] is True
    assert names(root) == ["400"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((200, 300), "step 300 in {root} is the newest good one"),
        ((200, 100), "step 100 in {root} is pinned"),
    ],
)
def test_rm_protects(root: Path, steps: tuple[int, ...], message: str):
    before = names(root)
    result = run("rm", root, *steps, "--yes")
    assert result.exit_code == 2
    assert message.format(root=root) in result.stderr
    assert "--force removes it, too" in result.stderr
    assert names(root) == before
    assert run("rm", root, *steps, "--yes", "--force").exit_code == 0
    assert len(names(root)) == 1


def test_rm_protects_the_newest_that_can_be_read(root: Path):
    (root / "step_00000300" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    result = run("rm", root, 200, "--yes")
    assert "step 200" in result.stderr
    assert "the newest good one" in result.stderr
    assert run("rm", root, 300, "--yes").exit_code == 0
    assert names(root) == ["step_00000100", "step_00000200"]


def test_rm_of_what_is_not_there(made: Path):
    for step, message in (
        ("250", f"there is no step 250 in {made}; it has 100, 200, 300"),
        ("latest", "'latest' is no step; give its number, as ostraka ls shows it"),
    ):
        assert_fails(run("rm", made, 200, step, "--yes"), message)
        assert len(names(made)) == 3


def test_rm_leaves_a_step_alone_that_is_being_written(root: Path):
    with claimed(LocalStore(str(root / "step_00000200"))):
        assert_fails(run("rm", root, 200, "--yes"), "is under way")
    assert run("verify", root / "step_00000200").exit_code == 0


# gc


def test_gc_only_shows_with_dry_run(root: Path):
    result = run("gc", root, "--yes")
    assert (result.exit_code, result.stdout) == (0, f"{root}: nothing was left behind\n")
    left = leave_behind(root / "step_00000400")
    result = run("gc", root, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"would go from {root}\n")
    assert f"step_00000400  {LEFT}  2.0 KiB  nothing" in result.stdout
    assert result.stdout.endswith("\nnothing was removed\n")
    assert left.exists()


def test_gc_removes_what_dead_saves_left_and_nothing_else(root: Path):
    leave_behind(root / "step_00000400")
    leave_behind(root / "step_00000300")
    (root / "step_00000300" / "_METADATA.12345678.tmp").write_bytes(b"x")
    leave_behind(root / "notes")
    (root / "step_00000500").mkdir()
    mine = leave_behind(root / "step_00000600").parent / "mine.txt"
    mine.write_text("keep")
    (root / "link_target").mkdir()
    leave_behind(root / "link_target")
    os.symlink(root / "link_target", root / "700")
    result = run("gc", root, "--yes")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"removed from {root}\n")
    assert "a checkpoint, which stays" in result.stdout
    assert not (root / "step_00000400").exists()
    assert not (root / "step_00000300" / LEFT).exists()
    assert not (root / "step_00000300" / "_METADATA.12345678.tmp").exists()
    assert (root / "notes" / LEFT).exists()
    assert (root / "link_target" / LEFT).exists()
    assert (root / "step_00000500").exists()
    assert mine.read_text() == "keep"
    assert not (mine.parent / LEFT).exists()
    assert run("verify", root).exit_code == 0
    assert run("gc", root).stdout == f"{root}: nothing was left behind\n"
    left = leave_behind(root / "step_00000200")  # It looks at one checkpoint, too.
    assert run("gc", left.parent, "--yes").exit_code == 0
    assert not left.exists()


@pytest.mark.parametrize("option", ["--dry-run", "--yes"])
def test_gc_leaves_a_live_save_alone(root: Path, option: str):
    live = leave_behind(root / "step_00000400")
    dead = leave_behind(root / "step_00000500")
    with claimed(LocalStore(str(live.parent))):
        result = run("gc", root, option)
        document = as_json("gc", root, option)
    assert result.exit_code == 0
    assert f"{live.parent}: a save is under way; left alone" in result.stdout
    assert document["in_use"] == [str(live.parent)]
    assert live.exists()
    assert dead.exists() == (option == "--dry-run")


def test_gc_beside_a_real_save(root: Path):
    writing, go_on = threading.Event(), threading.Event()

    def before(verb: str, name: str) -> None:
        if verb == "finish":
            writing.set()
            assert go_on.wait(120)

    store = FaultyStore(root / "step_00000400", before=before)
    handle = ostraka.save_async(store, {"x": np.ones(1000)})
    try:
        assert writing.wait(120)
        assert "a save is under way; left alone" in run("gc", root, "--yes").stdout
    finally:
        go_on.set()
    handle.wait()
    assert run("verify", root / "step_00000400").exit_code == 0


def test_gc_after_a_save_that_was_killed(root: Path):
    program = (
        "import os, signal, sys\n"
        "import numpy as np, ostraka\n"
        "from ostraka.testing import FaultyStore\n"
        "def die(verb, name):\n"
        "    if verb == 'finish':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "ostraka.save(FaultyStore(sys.argv[1], before=die), {'x': np.ones(1000)})\n"
    )
    for step in ("step_00000300", "step_00000400"):  # over an older one, and a new one
        killed = subprocess.run([sys.executable, "-c", program, root / step], check=False)
        assert killed.returncode == -signal.SIGKILL
    document = as_json("gc", root, "--yes")
    assert [
        (Path(left["directory"]).name, left["beside_a_checkpoint"], left["bytes"] > 0)
        for left in document["leftovers"]
    ] == [("step_00000300", True, True), ("step_00000400", False, True)]
    assert names(root) == ["step_00000100", "step_00000200", "step_00000300"]
    assert run("verify", root).exit_code == 0


def test_gc_keeps_the_shards_of_a_checkpoint_that_can_not_be_read(root: Path):
    path = root / "step_00000200"
    (path / "_METADATA").write_bytes(b'{"format":"ostraka"')
    assert run("gc", root, "--yes").stdout == f"{root}: nothing was left behind\n"
    assert list(path.glob("shards-*/*.safetensors"))


def test_gc_keeps_what_another_program_wrote(tmp_path: Path):
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "_METADATA").write_text("orbax")
    left = leave_behind(tmp_path / "5")
    assert run("gc", tmp_path, "--yes").exit_code == 0
    assert left.exists()
