"""`ostraka top`: a run in the terminal."""

import os
import sys
from pathlib import Path

import pytest

from cli_runs import PROGRAM, run
from ostraka import Manager
from ostraka.cli._top import sparkline
from runs import damage, fill, tree_of
from terminals import Terminal


def test_one_look(tmp_path: Path):
    root = tmp_path / "run"
    fill(root, *range(1, 9), keep=4, keep_best="loss", mirror=tmp_path / "mirror", mtbf_s=3600)
    damage(root, 6, name="_METADATA")
    result = run("top", root, "--once", COLUMNS="80")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == str(root) if len(str(root)) <= 80 else "…" in lines[0]
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("5 steps, ")
    assert "no Manager writes" in lines[1]
    (loss,) = (line for line in lines if line.startswith("loss "))
    assert loss.rstrip().endswith("best at 1")
    table = [line.split(maxsplit=1) for line in lines[3:] if line]
    rows = {words[0]: words[-1] for words in table if words[0].isdigit() and "B " in words[-1]}
    assert list(rows) == ["8", "7", "5", "1"]
    assert any(line.split()[:2] == ["6", "damaged"] for line in lines)
    assert "committed, best" in rows["1"]
    assert "ms" in rows["8"] or " s" in rows["8"]
    facts = {line[:9].strip(): line[11:] for line in lines}
    assert facts["keeps"] == "the last 4, the best by loss (min)"
    # The damaged step does not count, so there is room for one more.
    assert facts["goes next"] == "none"
    assert facts["mirror"].endswith("up to date") or "mirror" in facts["mirror"]
    assert "enough for" in facts["free"]
    assert facts["advice"].startswith("a save costs the loop")


def test_a_directory_without_steps(tmp_path: Path):
    assert "there is no directory" in run("top", tmp_path / "none", "--once").stderr
    assert "No step is here yet." in run("top", tmp_path, "--once").stdout


def test_names_cannot_write_to_the_terminal(tmp_path: Path):
    with Manager(tmp_path, asynchronous=False) as manager:
        manager.save(1, tree_of(1), metrics={"a\x1b[2J\nb": 1.0})
    shown = run("top", tmp_path, "--once").stdout
    assert "\x1b" not in shown
    assert "a\\x1b" in shown


@pytest.mark.parametrize("leave", ["q", "\x03"])
def test_it_follows_a_run_until_a_key(tmp_path: Path, leave: str):
    fill(tmp_path, 1)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    command = [sys.executable, "-c", PROGRAM, "top", str(tmp_path), "--every", "0.1"]
    with Terminal(command, env=environment, cwd=tmp_path) as terminal:
        terminal.wait_for("1 step, ")
        fill(tmp_path, 2, 3)
        terminal.wait_for("3 steps, ")
        terminal.type(leave)
        terminal.wait_for("\x1b[?1049l")  # The screen is as it was before.
        assert terminal.wait() == 0


def test_a_sparkline():
    assert sparkline([0, 1, 2, 7], 6) == "  ▁▂▃█"
    assert sparkline([0, "nan", None, 1], 4) == "▁× █"
    assert sparkline([5, 5], 2) == "▄▄"
    assert sparkline(range(100), 3) == "▁▄█"
    assert sparkline([], 3) == "   "
