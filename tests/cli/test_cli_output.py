"""What becomes of the command's output: readers that have gone, few characters, dumb terminals."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import PROGRAM, flip, read_screen, run, save_model
from ostraka import cli


def start(*arguments: object, stdout: int, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("command", ["verify", "plan", "--help"])
def test_a_reader_that_has_gone_is_not_taken_for_damage(tmp_path: Path, command: str):
    checkpoint = save_model(tmp_path / "c")
    reader, writer = os.pipe()
    os.close(reader)
    process = start(command, checkpoint, stdout=writer)
    os.close(writer)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (141, b"")


def test_a_shell_that_has_gone_while_it_completes():
    reader, writer = os.pipe()
    os.close(reader)
    asked = {"_OSTRAKA_COMPLETE": "bash_complete", "COMP_WORDS": "ostraka sh", "COMP_CWORD": "1"}
    process = start(stdout=writer, **asked)
    os.close(writer)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (141, b"")


def test_show_where_the_output_has_few_characters(tmp_path: Path):
    checkpoint = save_model(tmp_path / "c")
    process = start(
        "show", checkpoint, "kernel", stdout=subprocess.PIPE, PYTHONIOENCODING="latin-1"
    )
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, b"")
    assert "64 × 32".encode("latin-1") in stdout
    assert b"???" in stdout  # the lines of the picture


@pytest.mark.parametrize(("term", "colours"), [("xterm", True), ("dumb", False)])
def test_a_terminal_without_colours(tmp_path: Path, term: str, colours: bool):
    checkpoint = save_model(tmp_path / "c")
    terminal, end = pty.openpty()
    process = start("show", checkpoint, stdout=end, TERM=term, NO_COLOR="", FORCE_COLOR="")
    os.close(end)
    seen = read_screen(terminal)
    assert process.communicate()[1] == b""
    assert "kernel" in seen
    assert ("\x1b[" in seen) == colours


def test_of_very_many_reasons_a_line_has_a_few(tmp_path: Path):
    rules = tmp_path / "rules.json"
    rules.write_text('{"**": ["nope"]}')
    arguments = ["plan", "gpt2", "--mesh", "data=4", "--rules", rules]
    result = run(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.count("has no axis 'nope'") == 3
    assert result.stderr.endswith("; and more, which -v shows\n")
    assert run(*arguments, "-v").stderr.count("has no axis 'nope'") > 20


def test_all_sizes_are_printed_by_one_function(tmp_path: Path):
    """Others may print them with other units, or count in thousands."""
    folder = Path(cli.__file__).parent
    users = {file.name for file in folder.glob("*.py") if "human_bytes" in file.read_text()}
    assert users == {"_output.py"}
    assert not any("DownloadColumn" in file.read_text() for file in folder.glob("*.py"))
    checkpoint = save_model(tmp_path / "c")
    assert " KiB, " in run("verify", checkpoint).stdout
    assert " bytes" not in run("verify", checkpoint).stdout


def test_long_sentences_are_broken_between_words(tmp_path: Path):
    checkpoint = save_model(tmp_path / "c")
    flip(checkpoint)
    whole = run("verify", checkpoint).stdout
    broken = run("verify", checkpoint, COLUMNS="60").stdout
    lines = broken.splitlines()
    assert len(lines) > len(whole.splitlines())
    assert all(len(line) <= 60 or " " not in line.strip() for line in lines)
    seconds = re.compile(r"[\d.]+ s\)")
    assert seconds.sub("", " ".join(broken.split())) == seconds.sub("", " ".join(whole.split()))
