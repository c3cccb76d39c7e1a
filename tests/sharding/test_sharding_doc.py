"""docs/howto/sharding.md keeps its word."""

from pathlib import Path

import pytest

from documents import run_blocks


def test_every_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run_blocks("docs/howto/sharding.md", capsys) == (9, 2)
