"""Long output on a terminal goes through a pager."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ostraka
from cli_runs import PROGRAM, run_on_terminal

PAGER = "sed s/^/paged:/"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "c"
    ostraka.save(path, {f"leaf{n}": {"w": np.ones(2)} for n in range(60)})
    return path


def on_terminal(*arguments: object, **environment: str) -> list[str]:
    """The lines on a terminal of 80 columns and 24 lines."""
    code, shown = run_on_terminal(*arguments, **environment)
    assert code == 0
    return shown.splitlines()


def is_paged(lines: list[str]) -> bool:
    """True if all lines went through the pager, False if none did."""
    (found,) = {line.startswith("paged:") for line in lines}
    return found


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (("show", "--all"), {"OSTRAKA_PAGER": PAGER, "PAGER": "cat"}),
        (("show", "--all"), {"PAGER": PAGER, "NO_COLOR": "1"}),
        (("show", "--json"), {"PAGER": PAGER}),
        (("plan",), {"OSTRAKA_PAGER": PAGER}),
    ],
    ids=["own variable", "no colours", "json", "plan"],
)
def test_long_output_is_paged_and_keeps_its_colours(
    checkpoint: Path, command: tuple[str, ...], environment: dict[str, str]
):
    name, *options = command
    lines = on_terminal(name, checkpoint, *options, **environment)
    assert is_paged(lines)
    assert len(lines) > 23
    is_plain = "NO_COLOR" in environment or "--json" in options
    assert any("\x1b" in line for line in lines) is not is_plain


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["show", "--all", "--no-pager"], {"PAGER": PAGER}),
        (["--no-pager", "show", "--all"], {"PAGER": PAGER}),
        (["show", "--all"], {"OSTRAKA_PAGER": "cat", "PAGER": PAGER}),
        (["show", "--all"], {"PAGER": "cat"}),
        (["show", "--all"], {"OSTRAKA_PAGER": "", "PAGER": PAGER}),
        (["show"], {"PAGER": PAGER}),
        (["ls"], {"PAGER": PAGER}),
    ],
    ids=["option", "option before", "own cat", "cat", "empty", "show fits", "short"],
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
