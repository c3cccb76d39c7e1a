"""Programs of one process that tests run to their end."""

import subprocess
import sys

from places import Place


def run_quietly(program: str, root: Place) -> str:
    """What it prints; it must end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        check=False,
        capture_output=True,
        text=True,
        timeout=700,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout
