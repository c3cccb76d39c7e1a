"""The command as a whole: errors, exit codes, colours, help, and what it does not import."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from cli_runs import PROGRAM, flip, run, run_on_terminal, run_without, save_model
from ostraka import integrity
from ostraka.cli import main

COMMANDS = (
    *("show", "ls", "diff", "verify", "du", "which", "audit", "watch", "doctor"),
    *("report", "board", "top"),
    *("copy", "convert", "merge", "repair", "pin", "unpin", "rm", "gc"),
    *("plan", "completion"),
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_model(tmp_path / "checkpoint")


# verify


def test_verify_says_intact_in_one_line(checkpoint: Path):
    result = run("verify", checkpoint)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{checkpoint}: intact (3 ")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_verify_lists_damage_and_ends_with_1(checkpoint: Path):
    shard = flip(checkpoint)
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    first, *problems = result.stdout.splitlines()
    assert first.startswith(f"{checkpoint}: 1 problem")
    assert len(problems) == 1
    assert shard.name in problems[0]
    assert "(leaf 'kernel'" in problems[0]


def test_verify_as_json(checkpoint: Path):
    intact = json.loads(run("verify", checkpoint, "--json").stdout)
    assert (intact["ok"], intact["leaves"], intact["problems"]) == (True, 3, [])
    shard = flip(checkpoint)
    result = run("verify", checkpoint, "--json")
    assert result.exit_code == 1
    damaged = json.loads(result.stdout)
    assert damaged["ok"] is False
    (problem,) = damaged["problems"]
    assert problem["file"].endswith(shard.name)
    assert "kernel" in problem["leaves"]
    assert "not as they were written" in problem["found"]


@pytest.mark.parametrize("as_json", [False, True])
def test_damaged_metadata_is_a_result_of_verify(checkpoint: Path, as_json: bool):
    metadata = checkpoint / "_METADATA"
    metadata.write_bytes(metadata.read_bytes().replace(b'"kernel"', b'"kernal"'))
    result = run("verify", checkpoint, *["--json"] * as_json)
    assert result.exit_code == 1
    if as_json:
        assert json.loads(result.stdout)["problems"][0]["file"] == "_METADATA"
    else:
        assert result.stdout.splitlines() == [
            f"{checkpoint}: 1 problem: _METADATA",
            "  _METADATA: its digest is not the one that was written",
        ]


def test_verify_of_several(checkpoint: Path, tmp_path: Path):
    other = save_model(tmp_path / "other")
    flip(other)
    result = run("verify", checkpoint, other)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{checkpoint}: intact")
    assert lines[1].startswith(f"{other}: 1 problem")
    assert lines[-1] == "2 checkpoints, 1 of them damaged"
    document = json.loads(run("verify", checkpoint, other, "--json").stdout)
    assert document["ok"] is False
    assert [one["ok"] for one in document["checkpoints"]] == [True, False]


def test_verify_tells_of_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.integrity._verify._TASK_BYTES", 1 << 20)
    monkeypatch.setattr("ostraka.layout.shard_file.BLOCK_BYTES", 1 << 18)
    monkeypatch.setattr("ostraka.layout.shard_file.GATHER_BYTES", 1 << 18)
    ostraka.save(tmp_path / "c", {"x": np.zeros((64, 1 << 16), np.uint8)})
    seen: list[tuple[int, int]] = []
    report = integrity.verify(tmp_path / "c", on_bytes=lambda *bytes_: seen.append(bytes_))
    assert len(seen) >= 4
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes_read, report.bytes_read)


def test_problems_of_a_file_in_several_parts_are_told_in_order_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ostraka.integrity._verify._TASK_BYTES", 1 << 20)
    monkeypatch.setattr("ostraka.layout.shard_file.BLOCK_BYTES", 1 << 18)
    ostraka.save(tmp_path / "c", {"x": jnp.zeros((64, 1 << 16), jnp.uint8)})
    shard = min((tmp_path / "c").glob("shards-*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    for offset in (1 << 19, 3 << 20, 100):
        data[offset] ^= 1
    shard.write_bytes(data)
    found = [problem.found for problem in integrity.verify(tmp_path / "c", raises=False).problems]
    assert found[0] == "its header is not as it was written"
    assert [text.split()[1] for text in found[1:]] == ["266,240", "2,887,680"]
    shard.write_bytes(data[:-1])
    (problem,) = integrity.verify(tmp_path / "c", raises=False).problems
    assert "bytes where" in problem.found


# Errors


def test_show_of_damaged_metadata_ends_with_1(checkpoint: Path):
    (checkpoint / "_METADATA").write_bytes(b'{"format":"ostraka"')
    result = run("show", checkpoint)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "damaged" in result.stderr
    remedy = "; ostraka verify lists all damage, ostraka repair repairs what it can\n"
    assert result.stderr.endswith(remedy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "Missing argument 'PATH' (see ostraka show --help)"),
        (["convert", "a", "b"], "Missing option '--to'. Choose from: ostraka, orbax, safetensors"),
        (["verify", "--wrong", "x"], "(see ostraka verify --help)"),
        (["shew", "x"], "there is no command 'shew' (did you mean 'show'?) (see ostraka --help)"),
        (["show", "nowhere"], "there is no checkpoint at "),
        (["show", ""], "the path is empty; give that of a checkpoint"),
        (["verify", "nowhere"], "there is no checkpoint at "),
        (["verify", ""], "the path is empty"),
        (["diff", "nowhere", "nowhere"], "there is no checkpoint at "),
        (["diff", "nowhere"], "Missing argument 'B' (see ostraka diff --help)"),
        (["ls", "nowhere"], "there is no directory "),
        (["rm", "nowhere", "1"], "there is no directory "),
        (["rm", "nowhere"], "Missing argument 'STEP...' (see ostraka rm --help)"),
        (["gc", "nowhere"], "there is no directory "),
        (["gc", __file__], "is a file; ostraka gc needs a directory"),
        (["gc", "memory://x"], "there is no directory memory://x"),
        (["show", __file__], "is a file, not a checkpoint directory"),
        (["show", "gopher://x"], "has no store for gopher://"),
        (["completion", "tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    ],
)
def test_an_error_is_one_line_on_stderr(arguments: list[str], message: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("ostraka: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


AS_NOBODY = """
import os, sys
from contextlib import redirect_stdout, suppress
from ostraka.cli import main
command, path = sys.argv[1:]
with suppress(SystemExit), redirect_stdout(open(os.devnull, "w")):
    main([command, path])  # loads what it needs, which nobody else may be allowed to read
os.chmod(os.path.join(path, CLOSED), 0)
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)  # root may read everything
main([command, path])
"""


@pytest.mark.parametrize("command", ["show", "verify"])
@pytest.mark.parametrize("closed", ["_METADATA", "."])
def test_a_real_lack_of_permission(tmp_path: Path, command: str, closed: str):
    checkpoint = save_model(tmp_path / "c")
    for parent in checkpoint.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    result = subprocess.run(
        [sys.executable, "-c", AS_NOBODY.replace("CLOSED", repr(closed)), command, checkpoint],
        capture_output=True,
        text=True,
        check=False,
    )
    checkpoint.chmod(0o700)
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(
        f"ostraka: can't (read|list) {checkpoint}(/_METADATA)?: Permission denied; "
        "look at its permissions, or ask its owner\n",
        result.stderr,
    )


def test_an_error_that_nobody_thought_of_is_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise RuntimeError("out of\ncheese")

    monkeypatch.setattr("ostraka.cli._tree.rows_of", fail)
    result = run("show", checkpoint)
    assert result.exit_code == 2
    assert result.stderr == "ostraka: RuntimeError: out of cheese; -v shows where it comes from\n"


@pytest.mark.parametrize("arguments", [["-v", "show", "nowhere"], ["show", "nowhere", "-v"]])
def test_verbose_adds_the_traceback(arguments: list[str]):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("ostraka: there is no checkpoint at ")


# Colours, bars, signals: a real process, on a real terminal where it matters


def test_colours_are_for_terminals_only(checkpoint: Path):
    code, shown = run_on_terminal("show", checkpoint)
    assert code == 0
    assert "\x1b[" in shown
    _, shown = run_on_terminal("show", checkpoint, NO_COLOR="1")
    assert "\x1b[" not in shown
    assert "\x1b[" not in run("show", checkpoint).stdout
    assert "\x1b[" in run("show", checkpoint, FORCE_COLOR="1").stdout


def test_a_bar_is_drawn_on_a_terminal_and_goes_away(checkpoint: Path):
    code, shown = run_on_terminal("verify", checkpoint)
    assert code == 0
    assert f"verifying {checkpoint}"[:20] in shown
    assert "intact" in shown.rpartition("verifying")[2]  # perhaps broken into two lines


def test_an_interrupt_ends_with_130_and_without_a_traceback(tmp_path: Path):
    """While it reads from a file system that does not answer: a pipe that nobody writes to."""
    fifo = tmp_path / "checkpoint" / "_METADATA"
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    waits = (
        "import os; from ostraka.storage import file; "
        "file.open_file = lambda name, above, path: (os.open(path, os.O_RDONLY), 1)"
    )
    # Whoever runs the tests in the background has interrupts ignored, and so would this program.
    program = f"import signal; signal.signal(2, signal.default_int_handler); {waits}; {PROGRAM}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "show", fifo.parent],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Opened once the command waits for what it reads.
    writer = os.open(fifo, os.O_WRONLY)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    os.close(writer)
    assert (process.returncode, output) == (130, "")
    assert errors.strip() == "ostraka: interrupted"


def test_a_reader_that_goes_away_is_no_error(checkpoint: Path):
    program = f"{sys.executable} -c '{PROGRAM}' show {checkpoint} --json | head -c 1"
    result = subprocess.run(program, shell=True, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("{", "")


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str):
    result = run(command, "--help")
    assert result.exit_code == 0
    examples = result.stdout.partition("Examples:\n")[2]
    assert f"ostraka {command} " in examples
    assert "--json" in result.stdout or command in ("completion", "board")
    assert "--verbose" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_has_the_first_sentence_of_each(command: str):
    context = main.make_context("ostraka", [])
    found = main.get_command(context, command)
    assert found is not None
    sentence = found.get_short_help_str(limit=200).rstrip(".")
    assert f"\n  {command:10}  {sentence}\n" in run("--help").stdout


def test_help_is_grouped_and_imports_no_command():
    lines = run("--help").stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", "Inspect:", "Look:", "Change:", "Plan:", "Shell:"]
    run_without({"numpy", "ostraka.cli._show", "ostraka.manager.steps"}, "--help")


def test_without_arguments_it_helps():
    result = run()
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout
    for code in ("0", "1", "2", "3", "130"):
        assert f"\n    {code}  " in result.stdout


def test_version():
    assert run("--version").stdout == f"ostraka {ostraka.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str):
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"_OSTRAKA_COMPLETE={shell}_complete" in result.stdout


def complete(*words: object) -> list[str]:
    """What bash would be offered for the last of the words."""
    line = " ".join(["ostraka", *map(str, words)])
    environment = {
        "_OSTRAKA_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
    }
    result = run(**environment)
    return [offer.partition(",")[2] for offer in result.stdout.splitlines() if offer]


def test_completions(tmp_path: Path):
    tree = {"model": {"kernel": np.ones(2), "bias": np.ones(2)}, "other": np.ones(1)}
    ostraka.save(tmp_path / "runs" / "5", tree)
    assert complete("sh") == ["show"]
    assert complete("completion", "f") == ["fish"]
    assert complete("show", tmp_path / "runs" / "5", "mo") == ["model/"]
    assert complete("show", tmp_path / "runs" / "5", "model/") == ["model/kernel", "model/bias"]
    assert complete("show", tmp_path / "nowhere", "mo") == []
    assert complete("rm", tmp_path / "runs", "") == ["5"]
    assert "--json" in complete("diff", "--")
    assert complete("plan", "llama-3.1-")[:3] == ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]
    assert complete("plan", "gpt2", "--rules", "fs")[:2] == ["fsdp", "fsdp+tp"]
    assert complete("plan", "gpt2", "--optimizer", "ada") == ["adam", "adamw", "adafactor"]


@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [
        ("bash", "complete -p ostraka", "_ostraka_completion ostraka"),
        ("fish", "complete -C 'ostraka sh'", "show"),
        ("zsh", "echo $_comps[ostraka]", "_ostraka_completion"),
    ],
    ids=["bash", "fish", "zsh"],
)
def test_a_shell_takes_its_script(tmp_path: Path, shell: str, line: str, expected: str):
    if shutil.which(shell) is None:
        pytest.skip(f"NOT TESTED HERE: completion in {shell}, which is not installed")
    (tmp_path / "script").write_text(run("completion", shell).stdout)
    before = "autoload -U compinit; compinit -u;" if shell == "zsh" else ""
    scripts = str(Path(sys.executable).parent)
    result = subprocess.run(
        [shell, "-c", f"{before} source {tmp_path}/script; {line}"],
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expected in result.stdout, result.stderr


def test_repair_without_another_copy_says_what_to_pass(checkpoint: Path):
    shard = next(checkpoint.glob("shards-*/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    result = run("repair", checkpoint)
    assert result.exit_code == 1
    assert "pass --from OTHER_COPY, or call ostraka.repair(path, tree) in" in result.stdout


# What is not imported


@pytest.mark.parametrize(
    "command", ["show", "leaf", "verify", "repair", "diff", "ls", "rm", "gc", "root"]
)
def test_jax_is_not_imported(tmp_path: Path, command: str):
    path = save_model(tmp_path / "100")
    save_model(tmp_path / "200")
    arguments = {
        "show": ["show", path],
        "leaf": ["show", path, "kernel", "--stats", "--slice", "0"],
        "verify": ["verify", path],
        "repair": ["repair", path, "--from", tmp_path / "200"],
        "diff": ["diff", path, path],
        "ls": ["ls", tmp_path, "--verify"],
        "rm": ["rm", tmp_path, 100, "--yes"],
        "gc": ["gc", tmp_path, "--yes"],
        "root": ["show", tmp_path],
    }[command]
    run_without({"jax", "jaxlib", "flax"}, *arguments)


def test_showing_a_tree_does_not_wait_for_numpy_or_rich(checkpoint: Path):
    run_without({"numpy", "rich"}, "show", checkpoint)


def test_every_command_is_here():
    context = main.make_context("ostraka", [])
    assert tuple(main.list_commands(context)) == COMMANDS
