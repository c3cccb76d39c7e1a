"""README.md and docs/ keep their word: all Python runs, output is real, links lead somewhere.

The Python blocks of a page run in order, in one namespace and an empty directory. A block that
begins with a comment such as `# train.py` is a program: it is written to that file and run in a
process of its own, `# test_….py` by pytest. What a block has saved is copied; at the end of the
page a new process restores every copy and passes all its arrays through one `jax.jit`. A `text`
block is what one of the Python blocks of the page printed.
"""

import builtins
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

import ostraka
from ostraka import errors
from ostraka.processes import operation
from ostraka.testing import free_port
from programs import run_quietly

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
ERRORS = (ROOT / "docs/reference/errors.md").read_text("utf-8")
PAGES = [
    "README.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]
GUIDES = [
    *("docs/start/shard.md", "docs/howto/another-mesh.md", "docs/howto/training-loop.md"),
    *("docs/howto/preemption.md", "docs/howto/audit.md", "docs/howto/logging.md", "docs/faq.md"),
    *("docs/howto/convert-and-merge.md", "docs/howto/evaluate.md", "docs/howto/finetune.md"),
    *("docs/howto/hugging-face.md", "docs/howto/lora.md"),
    *("docs/from/orbax.md", "docs/from/flax-training.md", "docs/from/pytorch.md"),
]
TOGETHER = "docs/howto/evaluate.md"
"""Its programs run at the same time, in a test of their own."""
KILLED = "docs/start/resume.md"
"""Its program is killed and runs again, in a test of its own."""
HOSTS = "docs/howto/multi-host.md"
"""Its program runs in two processes, in a test of its own."""
MESHES = "docs/howto/another-mesh.md"
PROGRAM_TIMEOUT_S = 400

RESTORE_AND_JIT = r"""
import sys
from pathlib import Path

import jax

import ostraka


def jit_all(tree):
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    numbers = [jax.dtypes.issubdtype(a.dtype, jax.numpy.number) for a in arrays]

    @jax.jit
    def same_and_sum(arrays):
        return arrays, sum(a.sum() for a, is_number in zip(arrays, numbers) if is_number)

    same, _ = jax.block_until_ready(same_and_sum(arrays))
    for one, other in zip(arrays, same, strict=True):
        assert (one == other).all(), "jit changed a value"
    return len(arrays)


for metadata in sorted(Path(sys.argv[1]).rglob("_METADATA")):
    if b'"ostraka"' not in metadata.read_bytes():
        continue  # Orbax calls its own so, too
    path = metadata.parent
    restored = ostraka.restore(path)
    count = jit_all(restored)
    assert jit_all(ostraka.restore(path, like=restored)) == count
    print(path.relative_to(sys.argv[1]), count)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    text: str

    @property
    def program(self) -> str | None:
        """The file name that its first line names."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"


def find_blocks(page: str, language: str) -> list[Block]:
    """The fenced blocks in a language, in order."""
    text = (ROOT / page).read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if found[1] == language
    ]


def checkpoints(folder: Path) -> dict[Path, bytes]:
    """What is saved there; Orbax has files of the same name."""
    contents = {path: path.read_bytes() for path in folder.rglob("_METADATA")}
    return {path: content for path, content in contents.items() if b'"ostraka"' in content}


def run_block(block: Block, module: ModuleType, folder: Path) -> str:
    """Run it, as a program or in the namespace of its page; returns what it printed."""
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


def start_program(
    block: Block, folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Write it to its file, and start it with more environment variables."""
    assert block.program is not None
    (folder / block.program).write_text(block.text)
    return subprocess.Popen(
        [sys.executable, block.program],
        cwd=folder,
        env=os.environ | dict(env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A namespace that classes can be found in."""
    made = ModuleType("page")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.mark.parametrize("page", [page for page in PAGES if page not in (TOGETHER, KILLED, HOSTS)])
def test_python_blocks_run_in_order(
    page: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    known: dict[Path, bytes] = {}
    copies = tmp_path_factory.mktemp("copies")
    copied = 0
    for block in find_blocks(page, "python"):
        output = run_block(block, module, tmp_path) + capsys.readouterr().out
        printed.append(output.replace(str(tmp_path), "/home/me"))
        before, known = known, checkpoints(tmp_path)
        for path in known:
            if before.get(path) != known[path]:
                shutil.copytree(path.parent, copies / str(copied))
                copied += 1
    if copied:
        assert len(run_quietly(RESTORE_AND_JIT, copies).splitlines()) == copied
    for block in find_blocks(page, "text") if printed else []:
        assert block.text in printed, f"{block} is not what a block printed: {printed}"
    if page in ("README.md", *GUIDES):
        assert printed
        assert copied >= len(known) > 0


def test_an_evaluator_follows_a_run(tmp_path: Path):
    """Both programs of the page, at the same time."""
    train, evaluate = find_blocks(TOGETHER, "python")
    (expected,) = find_blocks(TOGETHER, "text")
    # The evaluator first: it waits for steps.
    processes = [start_program(block, tmp_path) for block in (evaluate, train)]
    try:
        told, error = processes[0].communicate(timeout=PROGRAM_TIMEOUT_S)
        _, training_error = processes[1].communicate(timeout=PROGRAM_TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert (error, training_error) == ("", "")
    assert [process.returncode for process in processes] == [0, 0]
    assert told == expected.text
    assert run_quietly(RESTORE_AND_JIT, tmp_path)


def test_a_run_that_is_killed_resumes(tmp_path: Path):
    (program,) = find_blocks(KILLED, "python")
    (expected,) = find_blocks(KILLED, "text")
    killed = start_program(program, tmp_path)
    try:
        while killed.poll() is None and not list(tmp_path.glob("runs/first/*/_METADATA")):
            time.sleep(0.01)
    finally:
        killed.kill()
        told, error = killed.communicate(timeout=PROGRAM_TIMEOUT_S)
    assert (killed.returncode, told, error) == (-9, "begin with step 1\n", "")
    newest = ostraka.latest(tmp_path / "runs/first")
    assert newest is not None
    again = start_program(replace(program, text=program.text.replace("0.1)", "0)")), tmp_path)
    told, error = again.communicate(timeout=PROGRAM_TIMEOUT_S)
    assert (again.returncode, error) == (0, "")
    assert told == expected.text.replace("31", str(newest + 1))
    assert ostraka.latest(tmp_path / "runs/first") == 60


def test_every_process_runs_the_same_program(tmp_path: Path):
    (program,) = find_blocks(HOSTS, "python")
    (expected,) = find_blocks(HOSTS, "text")
    common = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "NUM_PROCESSES": "2",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    processes = [
        start_program(program, tmp_path, common | {"PROCESS_ID": str(index)}) for index in range(2)
    ]
    try:
        told = [process.communicate(timeout=PROGRAM_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], told
    own = [re.sub(r"^\[Gloo\].*\n", "", output, flags=re.MULTILINE) for output, _ in told]
    assert own == [expected.text, ""]


def test_python_blocks_show_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
):
    monkeypatch.chdir(tmp_path)
    for block in find_blocks(MESHES, "python")[:2]:
        exec(block.text, vars(module))
    made = vars(module)
    assert list(made["params"]) == ["params"]
    assert made["as_saved"].keys() == made["state"].keys()
    assert made["corner"].shape == (16, 16)
    assert made["state"]["step"] == made["same"]["step"] == 101
    assert (made["state"]["params"]["kernel"] == made["same"]["params"]["kernel"]).all()
    assert not made["as_saved"]["rng"].committed


def test_the_table_of_errors_is_complete():
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*?\|", ERRORS, re.MULTILINE))))
    unlisted = set(errors.__all__) - listed
    assert unlisted == {"InvalidSharding", "LostBox", "OstrakaError", "Problem"}
    for name, builtin in re.findall(r"^\| `(\w+)`.*\| `(\w+)` \|$", ERRORS, re.MULTILINE):
        assert issubclass(getattr(errors, name), getattr(builtins, builtin))


def test_times_are_those_of_the_code():
    text = " ".join((ROOT / HOSTS).read_text("utf-8").split())
    assert f"after {operation.DEAD_AFTER_S:g} s without a sign of life" in text
    assert f"for {operation.ARRIVE_WITHIN_S:g} s (`ARRIVE_WITHIN_S`)" in text


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(name: str):
    document = ROOT / name
    text = document.read_text("utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        if "://" in target:
            continue
        page, _, anchor = target.partition("#")
        path = document.parent / page if page else document
        assert path.exists(), target
        if anchor:
            assert anchor in anchors_of(path.read_text("utf-8")), target


def test_the_readme_is_short():
    """A screen and a half, besides code and the table."""
    prose = re.sub(r"^```.*?^```$|^\|.*?$|^!.*?$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 400


def anchors_of(text: str) -> set[str]:
    """The anchors that the headings of a page get."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
