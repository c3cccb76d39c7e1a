"""The command as a whole: errors, exit codes, colours, help, and what it does not import."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from cli_runs import (
    PROGRAM,
    as_json,
    assert_fails,
    closed,
    flip,
    run,
    run_on_terminal,
    run_without,
    save_model,
)
from ostraka import integrity
from ostraka.cli import main

COMMANDS = (
    *("show", "ls", "diff", "verify", "du", "which", "audit", "watch", "doctor"),
    *("report", "board", "top"),
    *("copy", "convert", "merge", "repair", "pin", "unpin", "rm", "gc"),
    *("plan", "completion"),
)


# verify


def test_verify(model: Path, checkpoint: Path):
    result = run("verify", model)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{model}: intact (3 ")
    assert result.stdout.count("\n") == 1
    intact = as_json("verify", model)
    assert (intact["ok"], intact["leaves"], intact["problems"]) == (True, 3, [])
    shard = flip(checkpoint)
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    first, problem = result.stdout.splitlines()
    assert first.startswith(f"{checkpoint}: 1 problem")
    assert shard.name in problem
    assert "(leaf 'kernel'" in problem
    result = run("verify", checkpoint, "--json")
    assert result.exit_code == 1
    damaged = json.loads(result.stdout)
    assert damaged["ok"] is False
    (problem,) = damaged["problems"]
    assert problem["file"].endswith(shard.name)
    assert "kernel" in problem["leaves"]
    assert "not as they were written" in problem["found"]
    result = run("verify", model, checkpoint)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{model}: intact")
    assert lines[1].startswith(f"{checkpoint}: 1 problem")
    assert lines[-1] == "2 checkpoints, 1 of them damaged"
    both = as_json("verify", model, checkpoint)
    assert (both["ok"], [one["ok"] for one in both["checkpoints"]]) == (False, [True, False])


def test_damaged_metadata_is_a_result_of_verify(checkpoint: Path):
    metadata = checkpoint / "_METADATA"
    metadata.write_bytes(metadata.read_bytes().replace(b'"kernel"', b'"kernal"'))
    result = run("verify", checkpoint)
    assert (result.exit_code, result.stdout.splitlines()) == (
        1,
        [
            f"{checkpoint}: 1 problem: _METADATA",
            "  _METADATA: its digest is not the one that was written",
        ],
    )
    result = run("verify", checkpoint, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"][0]["file"] == "_METADATA"


def test_a_file_is_verified_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It tells of its progress, and of problems in order and once."""
    monkeypatch.setattr("ostraka.integrity._verify._TASK_BYTES", 1 << 20)
    monkeypatch.setattr("ostraka.layout.shard_file.BLOCK_BYTES", 1 << 18)
    monkeypatch.setattr("ostraka.layout.shard_file.GATHER_BYTES", 1 << 18)
    ostraka.save(tmp_path / "c", {"x": jnp.zeros((64, 1 << 16), jnp.uint8)})
    seen: list[tuple[int, int]] = []
    report = integrity.verify(tmp_path / "c", on_bytes=lambda *bytes_: seen.append(bytes_))
    assert len(seen) >= 4
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes_read, report.bytes_read)
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
    assert_fails(result, "damaged", code=1)
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
    assert_fails(run(*arguments), message)


def test_a_real_lack_of_permission(model: Path):
    for command in ("show", "verify"):
        assert run(command, model).exit_code == 0
    for name in ("_METADATA", "."):
        with closed(model, name) as path:
            results = [run(command, path) for command in ("show", "verify")]
        for result in results:
            assert (result.exit_code, result.stdout) == (2, "")
            assert re.fullmatch(
                f"ostraka: can't (read|list) {path}(/_METADATA)?: Permission denied; "
                "look at its permissions, or ask its owner\n",
                result.stderr,
            )


def test_an_error_that_nobody_thought_of_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("out of\ncheese")

    monkeypatch.setattr("ostraka.cli._tree.rows_of", fail)
    result = run("show", model)
    assert result.exit_code == 2
    assert result.stderr == "ostraka: RuntimeError: out of cheese; -v shows where it comes from\n"


@pytest.mark.parametrize("arguments", [["-v", "show", "nowhere"], ["show", "nowhere", "-v"]])
def test_verbose_adds_the_traceback(arguments: list[str]):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("ostraka: there is no checkpoint at ")


# Colours, bars, signals: a real process, on a real terminal where it matters


@pytest.mark.parametrize(
    ("environment", "colours"),
    [
        ({"NO_COLOR": "", "FORCE_COLOR": ""}, True),
        ({"NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
    ids=["terminal", "NO_COLOR", "dumb"],
)
def test_colours_are_for_terminals_only(model: Path, environment: dict[str, str], colours: bool):
    code, shown = run_on_terminal("show", model, **environment)
    assert code == 0
    assert "kernel" in shown
    assert ("\x1b[" in shown) is colours
    assert "\x1b[" not in run("show", model).stdout
    assert "\x1b[" in run("show", model, FORCE_COLOR="1").stdout


def test_a_bar_is_drawn_on_a_terminal_and_goes_away(model: Path):
    code, shown = run_on_terminal("verify", model)
    assert code == 0
    assert f"verifying {model}"[:20] in shown
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


def test_a_reader_that_goes_away_is_no_error(model: Path):
    program = f"{sys.executable} -c '{PROGRAM}' show {model} --json | head -c 1"
    result = subprocess.run(program, shell=True, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("{", "")


# Help


def test_help():
    """An overview in groups, also without arguments. Each command has an example."""
    overview = run("--help").stdout
    result = run()
    assert (result.exit_code, result.stdout) == (0, overview)
    titles = re.findall(r"^\w+:$", overview, re.MULTILINE)
    assert titles == ["Options:", "Inspect:", "Look:", "Change:", "Plan:", "Shell:"]
    for code in ("0", "1", "2", "3", "130"):
        assert f"\n    {code}  " in overview
    context = main.make_context("ostraka", [])
    assert tuple(main.list_commands(context)) == COMMANDS
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        sentence = command.get_short_help_str(limit=200).rstrip(".")
        assert f"\n  {name:10}  {sentence}\n" in overview
        result = run(name, "--help")
        assert result.exit_code == 0, name
        assert f"ostraka {name} " in result.stdout.partition("Examples:\n")[2]
        assert "--json" in result.stdout or name in ("completion", "board"), name
        assert "--verbose" in result.stdout, name


def test_version():
    assert run("--version").stdout == f"ostraka {ostraka.__version__}\n"


def test_completion_scripts():
    for shell in ("bash", "zsh", "fish"):
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


# What is not imported


def test_what_commands_do_not_import(tmp_path: Path):
    """Nobody waits for what a command does not need."""
    runs, made = tmp_path / "runs", tmp_path / "made"
    step = save_model(runs / "100")
    save_model(runs / "200")
    made.mkdir()
    config = {"model_type": "gpt2", "n_embd": 128, "n_layer": 1, "vocab_size": 512}
    (made / "config.json").write_text(json.dumps(config))
    rules = made / "rules.json"
    rules.write_text(json.dumps({"**/kernel": [["fsdp", "tp"]], "**": None}))
    light = "jax numpy rich"
    reading = "jax ostraka.manager._manager ostraka.saving.save"
    no_jax = "jax jaxlib flax"
    plans = (
        ("llama-3.1-8b", "--mesh", "data=8,model=4", "--onto", "data=4,model=4"),
        ("gpt2", "--mesh", "data=8", "--compare", "--rules dp", "--compare", "--dtype bfloat16"),
        (made / "config.json", "--mesh", "tp=4", "--rules", "tp", "--optimizer", "adafactor"),
        (made / "config.json", "--mesh", "fsdp=4,tp=2", "--rules", rules),
        (step, "--onto", "fsdp=2,tp=2", "--json"),
        (step, "--mesh", "fsdp=4,tp=2", "--rules", rules),
    )
    run_without(
        (f"{light} ostraka.cli._show ostraka.manager.steps", ("--help",)),
        *((light, words) for words in [("which", runs), ("du", runs), ("show", step)]),
        *((reading, words) for words in [("top", runs, "--once"), ("report", runs, "--json")]),
        (no_jax, ("show", runs)),
        (no_jax, ("show", step, "kernel", "--stats", "--slice", "0")),
        (no_jax, ("report", step, "--verify", "-o", made / "page.html")),
        (no_jax, ("report", "--compare", runs, "--json")),
        (no_jax, ("verify", step)),
        (no_jax, ("repair", step, "--from", runs / "200")),
        (no_jax, ("diff", step, step)),
        (no_jax, ("ls", runs, "--verify")),
        (no_jax, ("watch", runs, "--timeout", 0)),
        (no_jax, ("copy", step, made / "copy")),
        *((no_jax, ("plan", *words)) for words in plans),
        (no_jax, ("rm", runs, 100, "--yes")),
        (no_jax, ("gc", runs, "--yes")),
    )
