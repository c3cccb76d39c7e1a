"""README.md and docs/ keep their word: all Python runs, output is real, links lead somewhere.

The Python blocks of a page run in order, in one namespace and an empty directory. A block that
begins with a comment such as `# train.py` is a program: it is written to that file and run in a
process of its own. What a block has saved is copied; at the end of the page a new process restores
every copy and passes all its arrays through one `jax.jit`. A `text` block is what one of the Python
blocks of the page printed.
"""

import builtins
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from bench.bars import median
from bench.rounds import Row

from ostraka import errors
from ostraka.processes import operation
from programs import run_quietly

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
GUIDE = (ROOT / "docs/start/guide.md").read_text("utf-8")
PAGES = [
    "README.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]
GUIDES = [
    *("docs/howto/convert-and-merge.md", "docs/howto/evaluate.md", "docs/howto/finetune.md"),
    *("docs/howto/hugging-face.md", "docs/howto/lora.md"),
    *("docs/from/orbax.md", "docs/maintainers/orbax-scenarios.md"),
]
TOGETHER = "docs/howto/evaluate.md"
"""Its programs run at the same time, in a test of their own."""
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
    done = subprocess.run(
        [sys.executable, path.name],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=PROGRAM_TIMEOUT_S,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{block}: {done.stderr}"
    return done.stdout


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A namespace that classes can be found in."""
    made = ModuleType("page")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


@pytest.mark.parametrize("page", [page for page in PAGES if page != TOGETHER])
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
    if page in ("README.md", "docs/start/guide.md", *GUIDES):
        assert printed
        assert copied >= len(known) > 0


def test_an_evaluator_follows_a_run(tmp_path: Path):
    """Both programs of the page, at the same time."""
    train, evaluate = find_blocks(TOGETHER, "python")
    (expected,) = find_blocks(TOGETHER, "text")
    processes: list[subprocess.Popen[str]] = []
    for block in (evaluate, train):  # the evaluator first: it waits for steps
        assert block.program is not None
        (tmp_path / block.program).write_text(block.text)
        processes.append(
            subprocess.Popen(
                [sys.executable, block.program],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
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


ORBAX = r"""
import sys
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp

import ostraka

here = Path(sys.argv[1])
tree = {"w": jnp.ones((4, 2)), "pair": (jnp.zeros(2), jnp.ones(2)), "by": {1: jnp.ones(3)}}
other = {**tree, "w": jnp.ones((4, 2), jnp.bfloat16)}


def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__


with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(here / "theirs", tree)
    checkpointer.wait_until_finished()
    plain = checkpointer.restore(here / "theirs")
    print("theirs", type(plain["pair"]).__name__, list(plain["by"]))
    print("theirs", checkpointer.restore(here / "theirs", other)["w"].dtype)
    print("theirs", error_of(checkpointer.save, here / "theirs", tree))
options = ocp.CheckpointManagerOptions(save_interval_steps=2)
with ocp.CheckpointManager(here / "steps", options=options) as manager:
    saved = [manager.save(s, args=ocp.args.StandardSave(tree)) for s in (1, 2, 3, 4, 4, 2)]
    print("theirs", saved)
options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda m: m["loss"], best_mode="min")
with ocp.CheckpointManager(here / "best", options=options) as manager:
    for s in (1, 2):
        manager.save(s, args=ocp.args.StandardSave(tree), metrics={"loss": float(s)})
    manager.wait_until_finished()
    print("theirs", manager.all_steps())

ostraka.save(here / "ours", tree)
ostraka.save(here / "ours", tree)
plain = ostraka.restore(here / "ours")
print("ours", type(plain["pair"]).__name__, list(plain["by"]))
print("ours", error_of(ostraka.restore, here / "ours", like=other))
print("ours", ostraka.restore(here / "ours", like=other, dtype="like")["w"].dtype)
with ostraka.Manager(here / "our-steps", every=2) as manager:
    print("ours", [manager.save(s, tree) for s in (1, 2, 3, 4, 4)])
    print("ours", error_of(manager.save, 2, tree), manager.save(2, tree, force=True))
with ostraka.Manager(here / "our-best", keep=1, keep_best=ostraka.Best("loss")) as manager:
    for s in (1, 2, 3):
        manager.save(s, tree, metrics={"loss": float(s)})
    manager.wait()
    print("ours", manager.steps())
"""


def test_orbax_and_ostraka_differ_as_told(tmp_path: Path):
    """What docs/from/orbax.md says of both, seen in both."""
    assert run_quietly(ORBAX, tmp_path).splitlines() == [
        "theirs list ['1']",
        "theirs bfloat16",
        "theirs ValueError",
        "theirs [True, True, False, True, False, False]",
        "theirs [1]",
        "ours tuple [1]",
        "ours Mismatch",
        "ours bfloat16",
        "ours [False, True, False, True, True]",
        "ours ValueError True",
        "ours [1, 3]",
    ]


def test_python_blocks_show_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
):
    monkeypatch.chdir(tmp_path)
    exec(find_blocks("docs/start/guide.md", "python")[0].text, vars(module))
    made = vars(module)
    assert list(made["params"]) == ["params"]
    assert made["as_saved"].keys() == made["state"].keys()
    assert made["corner"].shape == (16, 16)
    assert made["state"]["step"] == made["same"]["step"] == 101
    assert (made["state"]["params"]["kernel"] == made["same"]["params"]["kernel"]).all()
    assert not made["as_saved"]["rng"].committed


def test_speeds_are_those_of_the_results():
    """Every number of the paragraph is one of the last run; none is written by hand."""
    paragraph = README.partition("<!-- speed -->")[2].partition("<!-- /speed -->")[0]
    document = json.loads((ROOT / "bench/results/results.json").read_text("utf-8"))
    seconds: set[str] = set()
    ratios: set[str] = set()
    for row in (Row(**row) for row in document["rows"]):
        medians = {name: median(row, name) or 0.0 for name in row.values}
        seconds |= {f"{value:.3f}" for value in medians.values()}
        for rival in medians.keys() & {"orbax", "orbax_best"}:
            ratio = medians[rival] / medians["ostraka"]
            ratios |= {f"{ratio:.1f}", f"{ratio:.0f}"}
    told_seconds = re.findall(r"(\d+\.\d+)\s+s\b", paragraph)
    told_ratios = re.findall(r"(\d+(?:\.\d+)?)\s+times", paragraph)
    assert len(told_seconds) >= 5
    assert len(told_ratios) >= 3
    assert set(told_seconds) <= seconds
    assert set(told_ratios) <= ratios


def test_the_refusal_that_is_shown_is_the_one_of_the_guide():
    shown = re.search(r"```\n(`like` does not fit.*?)```", README, re.DOTALL)
    assert shown is not None
    assert f"```text\n{shown[1]}```" in GUIDE  # where it is what a block prints


def test_the_table_of_errors_is_complete():
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*?\|", GUIDE, re.MULTILINE))))
    unlisted = set(errors.__all__) - listed
    assert unlisted == {"InvalidSharding", "LostBox", "OstrakaError", "Problem"}
    for name, builtin in re.findall(r"^\| `(\w+)`.*\| `(\w+)` \|$", GUIDE, re.MULTILINE):
        assert issubclass(getattr(errors, name), getattr(builtins, builtin))


def test_times_are_those_of_the_code():
    text = " ".join(GUIDE.split())
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


def test_the_readme_fits_on_two_screens():
    assert len(README.splitlines()) <= 120


def anchors_of(text: str) -> set[str]:
    """The anchors that the headings of a page get."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
