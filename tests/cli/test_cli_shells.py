"""What a shell offers when TAB is pressed, in real shells: the names of leaves, and never code."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import ostraka
from cli_runs import PROGRAM, run
from terminals import Terminal

HOSTILE = [
    "x$(touch${IFS}F)",
    "x`touch${IFS}F`",
    "x;touch F",
    "x|touch F",
    "x&touch F&",
    "x'$(touch F)'",
    'x"$(touch F)"',
    "x\\$(touch F)",
    "x>F",
    "x F *",
    "x*",
    "x{a,b}",
    "x!!",
    "x#y",
    "x~",
    "x,y,z",
    "xé$(touch F)",
]
START = {
    "bash": ["--norc", "--noprofile", "-i"],
    "zsh": ["-f", "-i"],
    "fish": ["--no-config", "-i"],
}
PROMPT = {
    "bash": "PS1='rea''dy> '",
    "zsh": "PROMPT='rea''dy> '; autoload -U compinit; compinit -u -D; setopt no_beep",
    "fish": "function fish_prompt; echo 'rea''dy> '; end",
}


def have(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"NOT TESTED HERE: completion in {shell}, which is not installed")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with files that a star would find, and the command as `ostraka`."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ostraka"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PROGRAM}" "$@"\n')
    command.chmod(0o755)
    (tmp_path / "xa").touch()
    (tmp_path / "plain,xb").touch()
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{home}/bin:{os.environ['PATH']}",
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "HISTFILE": "/dev/null",
    }


def shown_leaf(output: Path) -> str:
    text = output.read_text()
    assert text.startswith("{"), text
    return json.loads(text)["path"].replace("~0", "~")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_leaf_is_offered_unless_it_is_code(shell: str, home: Path):
    have(shell)
    (home / "script").write_text(run("completion", shell).stdout)
    ostraka.save(
        home / "c", {"xyz": np.arange(3), "other": np.arange(3)} | dict.fromkeys(HOSTILE, 1)
    )
    with Terminal([shell, *START[shell]], env=environment(home), cwd=home) as terminal:
        terminal.type(f"{PROMPT[shell]}\n")
        terminal.wait_for("ready> ")
        terminal.type(f"source {home}/script; stty columns 1000\n")
        terminal.type("ostraka show --json c x\t > out 2>&1; echo do''ne\n")
        terminal.wait_for("done")
    assert not (home / "F").exists()
    assert shown_leaf(home / "out") == "xyz"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_only_names_that_mean_themselves_are_offered(shell: str, home: Path):
    names = ["x\n$(touch F)", "x\x1b[2J", "x\x07", "x\u202ey", "xy", "x-1.0:a=b@c%+", *HOSTILE]
    tree = {"xs": {"é": np.arange(2), "$(F)": 1}, **{name: np.arange(2) for name in names}}
    ostraka.save(home / "c", tree)
    result = run(
        _OSTRAKA_COMPLETE=f"{shell}_complete",
        COMP_WORDS=f"ostraka show {home}/c x",
        COMP_CWORD="x" if shell == "fish" else "3",
    )
    offered = [line.removeprefix("plain,") for line in result.stdout.splitlines() if "x" in line]
    assert offered == ["xs/", "xy", "x-1.0:a=b@c%+"]
