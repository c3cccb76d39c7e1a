"""No block of the manual is left out: tests run it, compare it, or a list says why they can't."""

import re
from pathlib import Path

import numpy as np
import pytest

import ostraka
from manual import ELSEWHERE, NOT_RUN, PAGES, ROOT, find_block, find_blocks, parse_blocks

RUN = {"python", "sh", "json"}
"""The languages that `test_readme.py` runs, or writes to the files of a page."""


def left_out(page: str, text: str) -> list[str]:
    """The blocks of a page that no test runs or compares, and fences that tests do not see."""
    blocks = parse_blocks(page, text)
    fences = len(re.findall(r"^[ >]*(?:```|~~~)", text, re.MULTILINE))
    found = [] if fences == 2 * len(blocks) else [f"{page}: a fence that is none for the tests"]
    has_output = any(block.language in RUN and not block.listed_in(NOT_RUN) for block in blocks)
    for block in blocks:
        is_run = block.language in RUN or (block.language == "text" and has_output)
        if not is_run and not block.listed_in(NOT_RUN) and not block.listed_in(ELSEWHERE):
            found.append(f"{block}: no test runs this block")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_left_out(page: str):
    assert left_out(page, (ROOT / page).read_text("utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "```\nostraka.save(path, tree)\n```\n",
        "```py\nimport torch\n```\n",
        "```bash\nostraka ls\n```\n",
        "```text\nprinted by nobody\n```\n",
        "- a list\n\n  ```python\n  1 / 0\n  ```\n",
        "~~~python\n1 / 0\n~~~\n",
        '```python title="train.py"\n1 / 0\n```\n',
    ],
)
def test_a_block_that_is_left_out_is_found(text: str):
    assert len(left_out("docs/new.md", text)) == 1


@pytest.mark.parametrize("table", [NOT_RUN, ELSEWHERE], ids=["not run", "elsewhere"])
def test_the_lists_have_no_old_lines(table: dict[tuple[str, str], str]):
    for page, start in table:
        found = [block for block in find_blocks(page) if block.text.startswith(start)]
        assert found, f"{page} has no block that begins with {start!r}"
        assert start == "" or table is ELSEWHERE or len(found) == 1, f"{page}: {start!r} is short"


def test_blocks_of_other_tests_are_read_there():
    for (page, _), test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text("utf-8"), f"{test} does not read {page}"


def test_the_targets_of_make_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        text = "".join(block.text for block in find_blocks(page))
        named = set(re.findall(r"^make (\w+)", text, re.MULTILINE))
        assert named
        assert named <= targets


def test_the_imports_of_orbax_md():
    """Both lines of each change import the same name."""
    for block in find_blocks("docs/from/orbax.md", "diff"):
        removed, added = block.text.splitlines()
        assert (removed[0], added[0]) == ("-", "+")
        scopes: list[dict[str, object]] = [{}, {}]
        exec(removed[1:], scopes[0])
        exec(added[1:], scopes[1])
        assert scopes[0].keys() == scopes[1].keys()


def generic(name: str) -> str:
    """The name without numbers and the id of the save."""
    return re.sub(r"\d{5,}", "N", re.sub("shards-[0-9a-f]{16}", "shards-ID", name))


@pytest.fixture(scope="module")
def every_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every kind of file."""
    root = tmp_path_factory.mktemp("every_file")
    ostraka.save(root / "100", {"w": np.ones((64, 1024))}, parity=2, max_file_bytes="64KiB")
    ostraka.annotate(root / "100", metrics={"loss": 0.5}, pinned=True)
    return root / "100"


@pytest.mark.parametrize(
    ("page", "start", "details"),
    [
        ("docs/explanation/layout.md", "runs/step_", {"shard_N-N", "parity_N-N"}),
        ("docs/reference/format.md", "step_100/", set[str]()),
    ],
)
def test_the_tree_of_files(page: str, start: str, details: set[str], every_file: Path):
    """It has every file of a checkpoint, and no others; `details` are for the other page."""
    lines = find_block(page, start).splitlines()[1:]
    drawn = {generic(name) for line in lines for name in re.findall(r"[\w./-]+", line[:37])}
    files = {generic(file.name) + "/" * file.is_dir() for file in every_file.rglob("*")}
    assert drawn == files - {f"{name}.safetensors" for name in details}


def test_the_frame_of_metadata(every_file: Path):
    """What format.md shows of it."""
    start, end = find_block("docs/reference/format.md", '{"format":').rstrip("⏎\n").split(" … ")
    text = (every_file / "_METADATA").read_text()
    assert text.startswith(start)
    assert re.fullmatch(re.sub("[0-9a-f]{32}", "[0-9a-f]{32}", re.escape(end)) + "\n", text[-46:])
