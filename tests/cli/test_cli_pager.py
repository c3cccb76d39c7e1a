"""Long output on a terminal goes through a pager."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ostraka
from cli_runs import PROGRAM, run_on_terminal

PAGER = "sed s/^/paged:/"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ostraka.save(tmp_path / "c", {f"leaf{n}": {"w": np.ones(2)} for n in range(60)})
    return tmp_path / "c"


def on_terminal(*arguments: object, **environment: str) -> list[str]:
    """The lines on a terminal of 80 columns and 24 lines."""
    code, shown = run_on_terminal(*arguments, **environment)
    assert code == 0
    return shown.splitlines()


def is_paged(lines: list[str]) -> bool:
    """True if all lines went through the pager, False if none did."""
    (found,) = {line.startswith("paged:") for line in lines}
    return found


@pytest.mark.parametrize("variable", ["OSTRAKA_PAGER", "PAGER"])
@pytest.mark.parametrize("command", [("show", "--all"), ("show", "--json"), ("plan",)])
def test_long_output_is_paged_and_keeps_its_colours(
    checkpoint: Path, variable: str, command: tuple[str, ...]
):
    name, *options = command
    lines = on_terminal(name, checkpoint, *options, **{variable: PAGER})
    assert is_paged(lines)
    assert len(lines) > 23
    assert any("\x1b[" in line for line in lines) or "--json" in options


def test_the_own_variable_comes_first(checkpoint: Path):
    assert is_paged(on_terminal("show", checkpoint, "--all", OSTRAKA_PAGER=PAGER, PAGER="cat"))
    assert not is_paged(on_terminal("show", checkpoint, "--all", OSTRAKA_PAGER="cat", PAGER=PAGER))


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["show", "--all", "--no-pager"], {"PAGER": PAGER}),
        (["--no-pager", "show", "--all"], {"PAGER": PAGER}),
        (["show", "--all"], {"PAGER": "cat"}),
        (["show", "--all"], {"OSTRAKA_PAGER": "", "PAGER": PAGER}),
        (["show"], {"PAGER": PAGER}),
        (["ls"], {"PAGER": PAGER}),
    ],
    ids=["option", "option before", "cat", "empty", "show fits", "short"],
)
def test_without_a_pager(checkpoint: Path, words: list[str], environment: dict[str, str]):
    path = checkpoint.parent if "ls" in words else checkpoint
    lines = on_terminal(*words, path, **environment)
    assert not is_paged(lines)
    assert any("\x1b[" in line for line in lines)


def test_no_pager_in_a_pipe(checkpoint: Path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "show", str(checkpoint), "--all"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PAGER": PAGER},
    )
    assert not is_paged(done.stdout.splitlines())


def test_a_pager_without_colours(checkpoint: Path):
    lines = on_terminal("show", checkpoint, "--all", PAGER=PAGER, NO_COLOR="1")
    assert is_paged(lines)
    assert not re.search("\x1b", "".join(lines))
