"""Programs that tests run in a terminal, as a user would: keys in, what is shown out."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

DEADLINE_S = 120
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A program with a terminal of its own; ends it when the block ends."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], cwd: Path):
        self._own, theirs = pty.openpty()
        self._shown = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._own)

    def wait(self) -> int:
        """The exit code of the program, which ends by itself."""
        return self._process.wait(DEADLINE_S)

    def type(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def wait_for(self, text: str) -> str:
        """All that was shown since the last time, up to this text and with it."""
        deadline = time.monotonic() + DEADLINE_S
        while text.encode() not in self._shown:
            assert time.monotonic() < deadline, self._shown.decode(errors="replace")
            if select.select([self._own], [], [], 1.0)[0]:
                try:
                    self._shown += os.read(self._own, 1 << 16)
                except OSError as error:  # it has ended
                    raise AssertionError(self._shown.decode(errors="replace")) from error
        end = self._shown.index(text.encode()) + len(text)
        found, self._shown = self._shown[:end], self._shown[end:]
        return found.decode(errors="replace")
