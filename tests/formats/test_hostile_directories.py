"""Links, pipes, devices and files without end in the place of a checkpoint's own.

Nothing hangs, nothing outside is read or changed, no memory is filled, and one bad step leaves the
others of its root as they were. `hostile_directories.py` has the kinds and what is done with them.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hostile_directories
from mounts import in_memory

WITHIN_S = 800.0
"""For all of it, which takes half a minute: a busy machine, or a hang."""


def run_all(folder: Path, every: int) -> tuple[list[str], str]:
    """What went wrong, and the last line."""
    program = [sys.executable, hostile_directories.__file__, str(folder), str(every)]
    try:
        run = subprocess.run(program, capture_output=True, timeout=WITHIN_S, check=False)
        printed, said = run.stdout, run.stderr
    except subprocess.TimeoutExpired as late:
        printed, said = late.stdout or b"", late.stderr or b""
    wrong: list[str] = []
    doing = last = ""
    for last in printed.decode("utf-8", "replace").splitlines():
        kind, *words = last.split("\t")
        if kind == "begin":
            doing = words[0]
        elif kind == "end" and (what := ast.literal_eval(words[0])):
            wrong.append(f"{doing}: {what}")
    if not last.startswith("done"):
        ended = said.decode("utf-8", "replace")
        wrong.append(f"{doing}: it hangs, or has ended the program: {ended}")
    return wrong, last


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_hostile_directories(tmp_path: Path, every: int):
    with in_memory(tmp_path) as folder:
        wrong, last = run_all(folder, every)
    assert not wrong, "\n".join(wrong)
    _, kinds, functions = last.split("\t")
    assert int(kinds) > 100
    assert int(functions) > 30
