"""progress=True: a bar on a terminal, lines in the log elsewhere."""

import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import ostraka
from ostraka.common import progress
from ostraka.common.progress import shown

PROGRAM = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax.numpy as jnp, ostraka
here = sys.argv[1]
tree = {"w": jnp.ones((1024, 1024))}
ostraka.save(here + "/a", tree, progress=True, parity=1)
ostraka.restore(here + "/a", progress=True)
ostraka.restore(here + "/a", like=tree, progress=True)
ostraka.verify(here + "/a", progress=True)
ostraka.copy(here + "/a", here + "/b", progress=True)
ostraka.convert(here + "/a", here + "/c.safetensors", to="safetensors", progress=True)
ostraka.repair(here + "/a", progress=True)
"""
VERBS = ["save", "restore", "verify", "copy", "convert", "repair"]


def test_bars_on_a_terminal(tmp_path: Path):
    """All bars end full, whatever was read or written."""
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stderr=other, env=environment
    )
    os.close(other)
    text = b""
    while True:
        try:
            text += (read := os.read(main, 1 << 16))
        except OSError:  # so Linux says that the other end is closed
            break
        if not read:
            break
    assert process.wait() == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text.decode()))
    for verb in VERBS:
        last = [line for line in lines if line.startswith(f"{verb} {tmp_path}")][-1]
        assert re.search(r" (\d+\.\d)/\1 MiB", last), lines


def test_lines_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "ostraka")
    now_s = iter([0.0, 10.0, 30.0, 45.0, 61.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now_s))
    seen: list[int] = []
    with shown("save x", True, lambda done, total: seen.append(done)) as tell:
        assert tell is not None
        for done in (1 << 20, 3 << 20, 4 << 20, 5 << 20):
            tell(done, 10 << 20)
    assert caplog.messages == [
        "save x: 3.0 MiB of 10.0 MiB (30 %), 102.4 KiB/s",
        "save x: 5.0 MiB of 10.0 MiB (50 %), 83.9 KiB/s",
    ]
    assert seen == [1 << 20, 3 << 20, 4 << 20, 5 << 20]


def test_nothing_is_shown_unless_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with shown("save x", False) as tell:
        assert tell is None
    ostraka.save(tmp_path / "a", {"w": jnp.ones(8)})
    assert capfd.readouterr() == ("", "")
    with pytest.raises(TypeError, match="progress must be True or False, not 'yes'"):
        ostraka.verify(tmp_path / "a", progress="yes")  # type: ignore[arg-type]
