"""What becomes of the command's output: readers that have gone, few characters, dumb terminals."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import PROGRAM, flip, run
from ostraka import cli


def start(*arguments: object, stdout: int, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("command", ["verify", "plan", "--help", ""])
def test_a_reader_that_has_gone_is_not_taken_for_damage(model: Path, command: str):
    reader, writer = os.pipe()
    os.close(reader)
    if command:
        process = start(command, model, stdout=writer)
    else:  # A shell that has gone while it completes.
        asked = {"COMP_WORDS": "ostraka sh", "COMP_CWORD": "1"}
        process = start(stdout=writer, _OSTRAKA_COMPLETE="bash_complete", **asked)
    os.close(writer)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (141, b"")


@pytest.mark.parametrize(
    ("encoding", "words", "shown"),
    [
        # Lines of the picture, which latin-1 does not have, and bars.
        ("latin-1", ("show", "{model}", "kernel"), ("64 × 32", "???")),
        ("ascii", ("plan", "gpt2", "--mesh", "data=8"), ("#" * 24,)),
    ],
)
def test_an_output_with_few_characters(
    model: Path, encoding: str, words: tuple[str, ...], shown: tuple[str, ...]
):
    """A terminal or a pipe that is not of UTF-8."""
    given = [word.format(model=model) for word in words]
    process = start(*given, stdout=subprocess.PIPE, PYTHONIOENCODING=encoding)
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, b"")
    for text in shown:
        assert text.encode(encoding) in stdout


def test_of_very_many_reasons_a_line_has_a_few(tmp_path: Path):
    rules = tmp_path / "rules.json"
    rules.write_text('{"**": ["nope"]}')
    arguments = ["plan", "gpt2", "--mesh", "data=4", "--rules", rules]
    result = run(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.count("has no axis 'nope'") == 3
    assert result.stderr.endswith("; and more, which -v shows\n")
    assert run(*arguments, "-v").stderr.count("has no axis 'nope'") > 20


def test_all_sizes_are_printed_by_one_function(model: Path):
    """Others may print them with other units, or count in thousands."""
    folder = Path(cli.__file__).parent
    users = {file.name for file in folder.glob("*.py") if "human_bytes" in file.read_text()}
    assert users == {"_output.py"}
    assert not any("DownloadColumn" in file.read_text() for file in folder.glob("*.py"))
    shown = run("verify", model).stdout
    assert " KiB, " in shown
    assert " bytes" not in shown


def test_long_sentences_are_broken_between_words(checkpoint: Path):
    flip(checkpoint)
    whole = run("verify", checkpoint).stdout
    broken = run("verify", checkpoint, COLUMNS="60").stdout
    lines = broken.splitlines()
    assert len(lines) > len(whole.splitlines())
    assert all(len(line) <= 60 or " " not in line.strip() for line in lines)
    seconds = re.compile(r"[\d.]+ s\)")
    assert seconds.sub("", " ".join(broken.split())) == seconds.sub("", " ".join(whole.split()))
