"""Links, pipes, devices and files without end in the place of a checkpoint's own.

Nothing hangs, nothing outside is read or changed, no memory is filled, and one bad step leaves the
others of its root as they were. `hostile_directories.py` has the kinds and what is done with them.
"""

import ast
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostile_directories
from mounts import in_memory

WITHIN_S = 60.0
"""For what takes milliseconds: a busy machine, or a hang."""


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """What a program prints, line by line; ends early if it takes too long for one."""
    assert process.stdout is not None
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    kept = b""
    while selector.select(WITHIN_S):
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            return
        *lines, kept = (kept + data).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines)


def run_all(folder: Path, every: int) -> tuple[list[str], str]:
    """What went wrong, and the last line."""
    program = [sys.executable, hostile_directories.__file__, str(folder), str(every)]
    wrong: list[str] = []
    doing = last = ""
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for last in lines_of(process):
            kind, *words = last.split("\t")
            if kind == "begin":
                doing = words[0]
            elif kind == "end" and (what := ast.literal_eval(words[0])):
                wrong.append(f"{doing}: {what}")
        process.kill()
        assert process.stderr is not None
        said = process.stderr.read().decode("utf-8", "replace")
    if not last.startswith("done"):
        wrong.append(f"{doing}: it hangs, or has ended the program: {said}")
    return wrong, last


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_hostile_directories(tmp_path: Path, every: int):
    with in_memory(tmp_path) as folder:
        wrong, last = run_all(folder, every)
    assert not wrong, "\n".join(wrong)
    _, kinds, functions = last.split("\t")
    assert int(kinds) > 100
    assert int(functions) > 30
