"""The journal of a run: bounded, crash-safe, harmless to others, and read by the command."""

import json
from pathlib import Path
from typing import Any

import pytest

import ostraka
from audit_loops import REACHED, loop_of, run
from cli_runs import run as command
from ostraka.audit import journal
from ostraka.audit.explain import find_divergence
from ostraka.audit.journal import JournalWriter, compact, make_line, read_journal
from ostraka.audit.marks import Mark
from ostraka.storage import open_store


def table(value: float, key: str = "a") -> dict[str, Mark]:
    numbers = (abs(value), value, -value)
    return {
        "params/w": Mark("float32", (1,), str(value), numbers, value),
        "rng": Mark("key", (), key),
    }


def write(directory: Path, *steps: int, begin: Any = None, in_files: bool = False) -> None:
    """Write a line for each step, or a file."""
    writer = JournalWriter(open_store(directory))
    if begin is not None:
        writer.append(begin)
    for step in steps:
        line = make_line(step, "one", table(step), {"batch": table(step)["rng"]})
        writer.append(line.to_json())
        if in_files:
            writer.flush()
    writer.close()


def test_damaged_lines_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write(tmp_path, 1, 2, begin={"kind": "run", "run": "one", "resumed_from": None})
    (file,) = (tmp_path / "_AUDIT").iterdir()
    lines = file.read_text().splitlines()
    file.write_text(
        "\n".join([lines[0], "{", '{"kind": "step", "run": 3}', lines[1], lines[2][:40]])
    )
    history = read_journal(open_store(tmp_path))
    assert [line.step for line in history.lines()] == [1]
    assert history.unreadable == 3
    assert "3 lines of the audit journal" in caplog.text


def test_old_fingerprints_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, *range(1, 21))
    history = read_journal(open_store(tmp_path))
    monkeypatch.setattr(journal, "_MOST_BYTES", 1000)
    found = [json.loads(line) for line in compact(history)]
    full = [line["step"] for line in found if line["leaves"] is not None]
    assert full[0] == 1
    assert full[1:] == list(range(21 - len(full) + 1, 21))
    assert len(full) < 8
    assert all(line["user"]["batch"] for line in found)
    assert [line["step"] for line in found] == list(range(1, 21))


def test_many_files_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "_MOST_FILES", 4)
    write(tmp_path, *range(1, 12), in_files=True)
    assert len(list((tmp_path / "_AUDIT").iterdir())) <= 5
    history = read_journal(open_store(tmp_path))
    assert sorted(line.step for line in history.lines()) == list(range(1, 12))


def test_a_tolerance_compares_numbers():
    then, near, far = (make_line(7, "one", table(v), {}) for v in (1.0, 1.0005, 1.1))
    assert find_divergence(then, near, history=None, rtol=1e-3) is None
    found = find_divergence(then, far, history=None, rtol=1e-3)
    assert found is not None
    assert found.leaves == ("params/w",)
    other = make_line(7, "b", table(1.0, "z"), {})
    only_key = find_divergence(then, other, history=None, rtol=1e-3)
    assert only_key is not None
    assert only_key.cause == "only 'rng' differs: the RNG was not restored"


def test_the_command_tells_the_history(tmp_path: Path):
    loop = loop_of("adam")
    run(loop, tmp_path / "a", REACHED)
    run(loop, tmp_path / "a", REACHED)
    fault, _ = loop.faults["data replayed"]
    with pytest.warns(UserWarning, match="data iterator started over"):
        run(loop, tmp_path / "a", REACHED, fault, on_divergence="warn")
    result = command("audit", tmp_path / "a", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)["runs"]
    assert [one["resumed_from"] for one in found] == [None, 6, 6]
    assert [one["same"] for one in found] == [None, True, False]
    assert found[2]["step"] == 7
    shown = command("audit", tmp_path / "a")
    assert "resumed from step 6" in shown.stdout
    assert "the same run (3 steps compared)" in shown.stdout
    assert "the data iterator started over" in shown.stdout

    run(loop, tmp_path / "b", 4)
    same = command("audit", tmp_path / "a", tmp_path / "b")
    assert (same.exit_code, same.stdout.strip()) == (0, "4 steps compared: the same run")
    none = command("audit", tmp_path)
    assert none.exit_code == 2
    assert "audit_every=" in none.stderr

    # The journal is no step, and verify, ls and gc leave it alone.
    assert ostraka.Manager(tmp_path / "a", read_only=True).steps() == [6]
    for name in ("ls", "verify", "du", "gc"):
        assert command(name, tmp_path / "a").exit_code == 0
    assert (tmp_path / "a" / "_AUDIT").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_divergence": "ignore"}, 'must be "raise", "warn" or a function'),
        ({"audit_rtol": 2}, "audit_rtol must be between 0 and 1"),
        ({"audit_every": 0}, "audit_every must be more than 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        ostraka.Manager(tmp_path, **options)  # type: ignore[arg-type]
