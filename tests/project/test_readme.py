"""README.md and docs/ keep their word: all code runs, output is real, links lead somewhere.

The blocks of a page run in order, in an empty directory, Python in one namespace. A Python block
that begins with a comment such as `# train.py` is a program: it is written to that file and run in
a process of its own, `# test_….py` by pytest. Blocks that import PyTorch run in `.venv-torch`. A
shell block runs in bash; if its last line is `python`, the Python block after it is the input. A
`json` block is the file that the text before it names. What a block has saved is copied; at the end
of the page a new process restores every copy and passes all its arrays through one `jax.jit`. A
`text` block is what one of the blocks of the page printed. `test_blocks.py` shows that no block is
left out.
"""

import builtins
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

import manual_readers
import ostraka
from hf_python import TORCH_PYTHON
from manual import (
    PAGES,
    PROGRAM_TIMEOUT_S,
    ROOT,
    Block,
    Shell,
    TorchSession,
    blocks_to_run,
    find_blocks,
    run_python,
    write_file,
)
from ostraka import errors
from ostraka.processes import operation
from ostraka.testing import free_port, run_processes
from servers import Server

README = (ROOT / "README.md").read_text("utf-8")
ERRORS = (ROOT / "docs/reference/errors.md").read_text("utf-8")
GUIDES = [
    *("docs/start/shard.md", "docs/howto/another-mesh.md", "docs/howto/training-loop.md"),
    *("docs/howto/preemption.md", "docs/howto/audit.md", "docs/howto/logging.md", "docs/faq.md"),
    *("docs/howto/convert-and-merge.md", "docs/howto/evaluate.md", "docs/howto/finetune.md"),
    *(
        "docs/howto/hugging-face.md",
        "docs/howto/lora.md",
        "docs/howto/data.md",
        "docs/howto/look.md",
    ),
    *("docs/from/orbax.md", "docs/from/flax-training.md", "docs/from/pytorch.md"),
    "docs/from/equinox.md",
]
TOGETHER = "docs/howto/evaluate.md"
"""Its programs run at the same time, in a test of their own."""
KILLED = "docs/start/resume.md"
"""Its program is killed and runs again, in a test of its own."""
HOSTS = "docs/howto/multi-host.md"
"""Its program runs in two processes, in a test of its own."""
MESHES = "docs/howto/another-mesh.md"


def restore_and_jit(folder: str) -> int:
    """Restore each checkpoint, and pass all its arrays through one `jax.jit`. Returns how many."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", errors.PartialRestore)  # functions of Equinox
    found = sorted(checkpoints(Path(folder)).items())
    for metadata, content in found:
        restored = ostraka.restore(metadata.parent)
        count = jit_all(restored)
        if b'"states"' not in content:  # They need an object to go into.
            assert jit_all(ostraka.restore(metadata.parent, like=restored)) == count
    return len(found)


def jit_all(tree: Any) -> int:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    numbers = [jax.numpy.issubdtype(array.dtype, jax.numpy.number) for array in arrays]

    @jax.jit
    def same_and_sum(arrays: list[Any]) -> Any:
        return arrays, sum(
            a.sum() for a, is_number in zip(arrays, numbers, strict=True) if is_number
        )

    same, _ = jax.block_until_ready(same_and_sum(arrays))
    for one, other in zip(arrays, same, strict=True):
        assert (one == other).all(), "jit changed a value"
    return len(arrays)


def restored_anew(folder: Path) -> int:
    """How many checkpoints another process has restored."""
    (result,) = run_processes(restore_and_jit, str(folder), devices_per_process=8, processes=1)
    return result.value


def checkpoints(folder: Path) -> dict[Path, bytes]:
    """What is saved there; Orbax has files of the same name."""
    contents = {path: path.read_bytes() for path in folder.rglob("_METADATA")}
    return {path: content for path, content in contents.items() if b'"ostraka"' in content}


def write_program(block: Block, folder: Path) -> str:
    """Write it to the file that it names, and return the name."""
    assert block.program is not None
    (folder / block.program).write_text(block.text)
    return block.program


def start(
    command: list[str], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command with more environment variables, and our Python as `python`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path} | dict(env or {}),
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


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Ends all that it started, and takes back what it exported."""
    before = dict(os.environ)
    made = Shell(tmp_path, [])
    yield made
    made.end()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def page_bucket(
    page: str, servers: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket `s3://bucket`, empty, if the page has one and starts no server itself."""
    text = "".join(block.text for block in blocks_to_run(page))
    if "s3://bucket" not in text or "moto_server" in text:
        return
    server = servers("moto")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    client = server.client()
    client.create_bucket(Bucket="bucket")
    for entry in client.list_objects_v2(Bucket="bucket").get("Contents", ()):
        client.delete_object(Bucket="bucket", Key=entry["Key"])


@pytest.mark.usefixtures("page_bucket")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in (TOGETHER, KILLED, HOSTS)])
def test_blocks_run_in_order(
    page: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    module: ModuleType,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_to_run(page)
    if prepare := manual_readers.HAS.get(page):
        prepare(vars(module))
    printed: list[str] = []
    known: dict[Path, bytes] = checkpoints(tmp_path)
    copies = tmp_path_factory.mktemp("copies")
    copied = 0
    with ExitStack() as running:
        torch = start_torch(blocks, tmp_path, running)
        for block, session in with_sessions(blocks):
            output = ""
            if block.needs_torch:
                output = torch.run(block.text) if torch else ""
            elif block.language == "python":
                output = run_python(block, module, tmp_path) + capsys.readouterr().out
            elif block.language == "sh":
                output = shell.run(block, session)
            elif block.language == "json":
                write_file(block, tmp_path)
            printed.append(output.replace(str(tmp_path), "/home/me"))
            before, known = known, checkpoints(tmp_path)
            for path in known:
                if before.get(path) != known[path]:
                    shutil.copytree(path.parent, copies / str(copied))
                    copied += 1
    if copied:
        assert restored_anew(copies) == copied
    for block in blocks:
        if block.language == "text":
            assert block.text in printed, f"{block} is not what a block printed: {printed}"
    if page in ("README.md", *GUIDES):
        assert printed
        assert copied >= len(known) > 0
    if torch is None and any(block.needs_torch for block in blocks):
        pytest.skip(f"NOT TESTED HERE: {page} with PyTorch. `make torch` installs it")


def start_torch(blocks: list[Block], folder: Path, running: ExitStack) -> TorchSession | None:
    """For a page that needs it, if it is installed."""
    if not TORCH_PYTHON.exists() or not any(block.needs_torch for block in blocks):
        return None
    session = running.enter_context(TorchSession(TORCH_PYTHON, folder))
    session.run(manual_readers.IN_TORCH)
    return session


def with_sessions(blocks: list[Block]) -> Iterator[tuple[Block, str]]:
    """Each block, and the input of an interpreter that it starts: the block after it."""
    following = iter(blocks)
    for block in following:
        starts = block.language == "sh" and block.text.endswith("\npython\n")
        yield block, next(following).text if starts else ""


def test_an_evaluator_follows_a_run(tmp_path: Path):
    """Both programs of the page, at the same time."""
    train, evaluate, expected = blocks_to_run(TOGETHER)
    # The evaluator first: it waits for steps.
    processes = [
        start([sys.executable, write_program(block, tmp_path)], tmp_path)
        for block in (evaluate, train)
    ]
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
    assert restored_anew(tmp_path)


def test_a_run_that_is_killed_resumes(tmp_path: Path, shell: Shell):
    program, killing, again, expected = blocks_to_run(KILLED)
    write_program(program, tmp_path)
    # As soon as a step is committed, not after a fixed time.
    committed = "until ls runs/first/*/_METADATA > /dev/null 2>&1; do sleep 0.05; done"
    assert "\nsleep 7\n" in killing.text
    killing = replace(killing, text=killing.text.replace("sleep 7", committed))
    assert shell.run(killing) == "begin with step 1\n"
    newest = ostraka.latest(tmp_path / "runs/first")
    assert newest is not None
    write_program(replace(program, text=program.text.replace("0.1)", "0)")), tmp_path)
    assert shell.run(again) == expected.text.replace("31", str(newest + 1))
    assert ostraka.latest(tmp_path / "runs/first") == 60


def test_every_process_runs_the_same_program(tmp_path: Path):
    """Both lines of the block for plain hosts, on one host."""
    program, expected, commands = blocks_to_run(HOSTS)
    write_program(program, tmp_path)
    here = {"node0:1234": f"127.0.0.1:{free_port()}", "/shared/": f"{tmp_path}/"}
    text = re.sub("|".join(here), lambda found: here[found[0]], commands.text)
    exports, *lines = text.splitlines()
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    processes = [start(["bash", "-c", f"{exports}\n{line}"], tmp_path, devices) for line in lines]
    try:
        told = [process.communicate(timeout=PROGRAM_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], told
    # Gloo's threads print before that, at times into each other's lines.
    assert told[0][0].endswith(expected.text)
    assert "processes" not in told[1][0]
    assert len(processes) == 2
    assert ostraka.latest(tmp_path / "runs/a") == 10


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
    values = {"LostBox", "Problem", "Replica", "ReplicaDifference"}
    assert unlisted == {"InvalidSharding", "OstrakaError", *values}
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
