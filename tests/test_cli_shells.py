"""What a shell offers when TAB is pressed, in real shells: the names of leaves, and never code."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostraka
from cli_runs import run
from ostraka.cli._shells import quote_for_bash
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
    program = "from ostraka.cli import main; main()"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n')
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
def test_a_leaf_that_is_code_is_offered_as_a_name(shell: str, home: Path):
    have(shell)
    (home / "script").write_text(run("completion", shell).stdout)
    with Terminal([shell, *START[shell]], env=environment(home), cwd=home) as terminal:
        terminal.type(f"{PROMPT[shell]}\n")
        terminal.wait_for("ready> ")
        terminal.type(f"source {home}/script; stty columns 1000\n")
        for number, name in enumerate(HOSTILE[::2]):
            path = home / f"c{number}"
            ostraka.save(path, {name: np.arange(3), "other": np.arange(3)})
            terminal.type(
                f"ostraka show --json c{number} x\t > out{number} 2>&1; echo do''ne{number}\n"
            )
            terminal.wait_for(f"done{number}")
            assert not (home / "F").exists(), name
            assert shown_leaf(home / f"out{number}") == name
    assert not (home / "F").exists()


@pytest.mark.parametrize("opened", ["'", '"'])
def test_an_offer_in_quotes_that_are_open(opened: str, home: Path):
    have("bash")
    (home / "script").write_text(run("completion", "bash").stdout)
    with Terminal(["bash", *START["bash"]], env=environment(home), cwd=home) as terminal:
        terminal.type(f"{PROMPT['bash']}; source {home}/script; set +o histexpand\n")
        terminal.wait_for("ready> ")
        for number, name in enumerate(HOSTILE[::2]):
            if opened in name or "!" in name:
                continue  # which is not offered, or what no quotes hold off in every bash
            path = home / f"c{number}"
            ostraka.save(path, {name: np.arange(3)})
            terminal.type(
                f"ostraka show --json c{number} {opened}x\t > out{number}; echo do''ne{number}\n"
            )
            terminal.wait_for(f"done{number}")
            assert not (home / "F").exists(), name
            assert shown_leaf(home / f"out{number}") == name


def test_names_that_cannot_be_typed_are_not_offered(home: Path):
    names = ["x\n$(touch F)", "x\x1b[2J", "x\x07", "x\u202ey", "xy"]
    ostraka.save(home / "c", {name: np.arange(2) for name in names})
    for shell, words in (("bash", "2"), ("zsh", "2"), ("fish", "x")):
        result = run(
            _OSTRAKA_COMPLETE=f"{shell}_complete",
            COMP_WORDS=f"ostraka show {home}/c x",
            COMP_CWORD="3" if words == "2" else words,
        )
        assert [line for line in result.stdout.splitlines() if "x" in line] in (
            ["plain,xy"],
            ["xy"],
        )


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_what_is_quoted_for_bash_is_one_word_for_a_shell(text: str):
    assert shlex.split(quote_for_bash(text)) == [text]


def test_what_is_quoted_for_bash_means_itself_to_bash():
    have("bash")
    characters = [chr(c) for c in range(32, 127)]
    texts = [*HOSTILE, *characters, *(f"a{c}b" for c in characters), "".join(characters)]
    # Within double quotes a backslash before `!` stays, and history is not looked at in a script.
    quotable = [text for text in texts if not {'"', "!"} & set(text)]
    words = [quote_for_bash(text) for text in texts]
    words += [f'"{quote_for_bash(text, opened=chr(34))}"' for text in quotable]
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], capture_output=True, check=True
    )
    assert done.stdout.decode().split("\0")[:-1] == texts + quotable
