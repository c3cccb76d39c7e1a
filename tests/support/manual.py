"""README.md and docs/, block by block: which blocks there are, and how tests run them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cli_runs import run
from servers import free_port

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]
PROGRAM_TIMEOUT_S = 400

NOT_RUN = {
    ("README.md", "pip install"): "installs from the network; the targets of make are compared",
    ("docs/start/install.md", "pip install"): "installs from the network",
    ("docs/howto/buckets.md", "pip install"): "installs from the network",
    ("docs/howto/compress.md", "pip install"): "installs from the network",
    ("docs/howto/hugging-face.md", "pip install"): "downloads 16 GB",
    ("docs/howto/multi-host.md", "gcloud"): "needs TPU machines",
    ("docs/howto/multi-host.md", "apiVersion"): "needs a Kubernetes cluster with TPUs",
    ("docs/howto/multi-host.md", "#!/bin/bash"): "needs Slurm; `make slurm` runs examples/slurm",
    ("docs/howto/preemption.md", "#!/bin/bash"): "needs Slurm; `make slurm` runs examples/slurm",
    ("docs/reference/format.md", "[n*i // k"): "a formula; test_format_doc.py computes with it",
    ("docs/reference/format.md", "sum 0"): "a formula; test_format_doc.py computes with it",
}
"""Blocks that no test runs, by page and beginning, each with the reason."""
ELSEWHERE = {
    ("docs/reference/cli.md", "Usage: ostraka"): "tests/cli/test_cli_reference.py",
    ("docs/troubleshooting.md", ""): "tests/project/test_troubleshooting.py",
    ("docs/from/orbax.md", "-"): "tests/project/test_blocks.py",
    ("docs/explanation/checksums.md", "shards-"): "tests/formats/test_damage_matrix.py",
    ("docs/maintainers/durability.md", "runs/7: "): "tests/formats/test_damage_matrix.py",
    ("docs/explanation/layout.md", "runs/step_"): "tests/project/test_blocks.py",
    ("docs/reference/format.md", "step_100/"): "tests/project/test_blocks.py",
    ("docs/reference/format.md", '{"format":'): "tests/project/test_blocks.py",
    ("docs/maintainers/architecture.md", "cli "): "tests/project/test_layering.py",
    ("docs/maintainers/architecture.md", "ostraka.save("): "tests/project/test_layering.py",
}
"""Blocks that a test of their own compares, by page and beginning."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    above: str
    """The paragraph before it."""

    @property
    def program(self) -> str | None:
        """The file name that its first line names."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else None

    @property
    def needs_torch(self) -> bool:
        return re.search(r"^(import|from) [\w.]*torch\b", self.text, re.MULTILINE) is not None

    def listed_in(self, table: Mapping[tuple[str, str], str]) -> str | None:
        """What a table has about it."""
        found = [
            said
            for (page, start), said in table.items()
            if page == self.page and self.text.startswith(start)
        ]
        return found[0] if found else None

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"


def find_blocks(page: str, *languages: str) -> list[Block]:
    """The fenced blocks of a page in order, in some languages or in all."""
    return parse_blocks(page, (ROOT / page).read_text("utf-8"), *languages)


def find_block(page: str, start: str) -> str:
    """The text of the only block that begins so."""
    (found,) = [block.text for block in find_blocks(page) if block.text.startswith(start)]
    return found


def parse_blocks(page: str, text: str, *languages: str) -> list[Block]:
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found[1],
            found[2],
            text[: found.start()].rstrip().rpartition("\n\n")[2],
        )
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if not languages or found[1] in languages
    ]


def blocks_to_run(page: str) -> list[Block]:
    """All blocks of a page but those that can't run here, and those of other tests."""
    return [
        block
        for block in find_blocks(page)
        if block.listed_in(NOT_RUN) is None and block.listed_in(ELSEWHERE) is None
    ]


def run_python(block: Block, module: ModuleType, folder: Path) -> str:
    """Run it, as a program or in the namespace of its page; returns what a program printed."""
    if block.program is None:
        exec(compile(block.text, str(block), "exec"), vars(module))
        return ""
    path = folder / block.program
    path.write_text(block.text)
    is_test = path.name.startswith("test_")
    done = subprocess.run(
        [sys.executable, *(("-m", "pytest", "-q") if is_test else ()), path.name],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=PROGRAM_TIMEOUT_S,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{block}: {done.stderr}"
    return done.stdout


def write_file(block: Block, folder: Path) -> None:
    """Write a block to the file that the paragraph above names."""
    names = re.findall(r"`([\w.]+)`", block.above)
    assert names, f"{block}: the paragraph above names no file for it"
    (folder / names[-1]).write_text(block.text)


@dataclass(frozen=True)
class Shell:
    """The shell blocks of a page: what one exports, the next ones and Python see."""

    folder: Path
    started: list[subprocess.Popen[str]]
    """The shells, each with a process group that `end` kills."""

    def run(self, block: Block, session: str = "") -> str:
        """What it printed. The last command may be `python`, with `session` for its input."""
        lines = block.text.replace("\\\n", " ").splitlines()
        if all(re.fullmatch(r"ostraka [^|&;<>]*", line) for line in lines):
            return "".join(self._command(block, line) for line in lines)
        with tempfile.TemporaryFile("w+") as output, tempfile.NamedTemporaryFile("r+") as exported:
            process = subprocess.Popen(
                ["bash", "-euc", f"{_on_free_port(block.text)}\nenv -0 > {exported.name}"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env=os.environ | _with_our_python(),
                start_new_session=True,
            )
            self.started.append(process)
            assert process.stdin
            process.stdin.write(session)
            process.stdin.close()
            # Not reaped until `end`: no other group can get its number.
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            output.seek(0)
            printed = output.read()
            assert ended
            assert ended.si_status == 0, f"{block}: {printed}"
            variables = (entry.partition("=") for entry in exported.read().split("\0"))
            os.environ.update({k: v for k, _, v in variables if k and f"{k}=" in block.text})
        return printed

    def end(self) -> None:
        """Kill all that still runs, such as a server."""
        for process in self.started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _command(self, block: Block, line: str) -> str:
        done = run(*shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, f"{block}: {line}: {done.output}"
        return done.output


def _with_our_python() -> dict[str, str]:
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _on_free_port(text: str) -> str:
    """Let a server have a port of its own, and wait for it instead of a fixed time."""
    port = free_port()
    wait = f"until (echo > /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do sleep 0.05; done"
    return text.replace("5000", f"{port}").replace("sleep 5 ", f"{wait} ")


_TORCH_LOOP = r"""
import json, sys

names = {"__name__": "page"}
for line in sys.stdin:
    exec(compile(json.loads(line), "block", "exec"), names)
    print("\0", flush=True)
"""


class TorchSession:
    """A Python with PyTorch that runs one block after the other; ends with its `with`."""

    def __init__(self, python: Path, folder: Path):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-c", _TORCH_LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=folder,
        )

    def run(self, text: str) -> str:
        """What it printed."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(text), file=self._process.stdin, flush=True)
        printed = ""
        for line in self._process.stdout:
            if line == "\0\n":
                return printed
            printed += line
        self._log.seek(0)
        raise AssertionError(f"{printed}{self._log.read()}")

    def __enter__(self) -> "TorchSession":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
