"""`rm`, `gc` and `repair` ask before they change anything: `--dry-run`, `--yes`, a terminal."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import ostraka
from cli_runs import assert_fails, run, run_on_terminal

LEFT = "shards-0123456789abcdef"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, of which the first has a lost shard, and what a killed save left."""
    path = tmp_path_factory.mktemp("made") / "runs"
    for step in (1, 2):
        tree = {"x": np.arange(4000), "y": np.ones(4000)}
        ostraka.save(path / str(step), tree, parity=1, max_file_bytes=8192)
    min((path / "1").glob("shards-*/shard_*.safetensors")).unlink()
    (path / "3" / LEFT).mkdir(parents=True)
    (path / "3" / LEFT / "shard_00000.safetensors").write_bytes(b"x" * 2048)
    return path


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


CASES = {
    "rm": (("{root}", "1"), "remove 1 step from {root}", "would go from {root}"),
    "gc": (("{root}",), "remove 1 leftover from {root}", "would go from {root}"),
    "repair": (("{root}/1",), "rewrite 1 file in {root}/1", "1 file would be repaired"),
}


def words(command: str, root: Path) -> list[str]:
    return [command, *(word.format(root=root) for word in CASES[command][0])]


@pytest.mark.parametrize("command", CASES)
def test_a_change_is_shown_refused_or_made(root: Path, command: str):
    """Without a terminal nobody can be asked."""
    before = files(root)
    asked, shown = (text.format(root=root) for text in CASES[command][1:])
    result = run(*words(command, root), "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert shown in result.stdout
    assert files(root) == before
    would = f"would {asked}, but nobody can be asked here; --yes does it, --dry-run shows it"
    assert_fails(run(*words(command, root)), would)
    both = run(*words(command, root), "--yes", "--dry-run")
    assert_fails(both, "--dry-run and --yes contradict each other; give one")
    assert files(root) == before
    result = run(*words(command, root), "--yes")
    assert (result.exit_code, result.stderr) == (0, "")
    assert files(root) != before


@pytest.mark.parametrize("text", ["y\n", "n\n"], ids=["yes", "no"])
@pytest.mark.parametrize("command", CASES)
def test_on_a_terminal_it_asks(root: Path, command: str, text: str):
    before = files(root)
    code, shown = run_on_terminal(*words(command, root), keys=text, NO_COLOR="1")
    # A damaged checkpoint that is left as it is, is a damaged checkpoint.
    assert code == (1 if (command, text) == ("repair", "n\n") else 0)
    asked = CASES[command][1].format(root=root)
    assert f"{asked[0].upper()}{asked[1:]}? [y/N]" in shown
    assert CASES[command][2].format(root=root) in " ".join(shown.split())  # Lines are broken.
    assert (files(root) != before) is (text == "y\n")
    assert ("nothing was " in shown.splitlines()[-1]) is (text == "n\n")


def test_nothing_is_asked_if_there_is_nothing_to_do(root: Path):
    assert "nothing to repair" in run("repair", root / "2").stdout
    assert run("gc", root, "--yes").exit_code == 0
    assert run("gc", root).stdout == f"{root}: nothing was left behind\n"


# merge


def test_merge_refuses_to_overwrite(tmp_path: Path):
    for name, value in (("a", 1.0), ("b", 3.0), ("target", 7.0)):
        ostraka.save(tmp_path / name, {"w": np.full(4, value)})
    arguments = ["merge", tmp_path / "a", tmp_path / "b", tmp_path / "target"]
    said = f"{tmp_path / 'target'} exists already; merge to another path, or give --overwrite"
    assert_fails(run(*arguments), said)
    assert np.asarray(ostraka.open(tmp_path / "target")["w"])[0] == 7.0
    assert run(*arguments, "--overwrite").exit_code == 0
    assert np.asarray(ostraka.open(tmp_path / "target")["w"])[0] == 2.0
    (tmp_path / "file").write_text("mine")
    assert run(*arguments[:-1], tmp_path / "file").exit_code == 2
    (tmp_path / "empty").mkdir()
    assert run(*arguments[:-1], tmp_path / "empty").exit_code == 0
