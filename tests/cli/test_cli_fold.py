"""`ostraka show` on one screen: folded blocks and subtrees, names that can be pasted."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import ostraka
from cli_models import save_transformer
from cli_runs import as_json, run
from ostraka.cli._fold import fold, numbered_pattern
from ostraka.cli._tree import LeafRow
from ostraka.common.units import human_bytes

SCREEN = {"COLUMNS": "80", "LINES": "40"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    path = tmp_path_factory.mktemp("large") / "checkpoint"
    return path, save_transformer(path)


def lines_of(*arguments: object, **environment: str) -> list[str]:
    result = run("show", *arguments, **(SCREEN | environment))
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "height"), [((), 24), (("--stats",), 40), ((), 60)], ids=["24", "stats", "60"]
)
def test_a_large_model_with_its_optimizer_fits_the_screen(
    large: tuple[Path, int], options: tuple[str, ...], height: int
):
    path, parameters = large
    lines = lines_of(path, *options, LINES=str(height))
    assert len(lines) <= height - 1
    assert max(map(len, lines)) <= 80
    summary = next(line for line in lines if "parameters" in line)
    assert summary.startswith(f"{parameters:,} parameters of float32, ")
    top = next(line for line in lines if line.startswith("model/"))
    assert lines.index(summary) < lines.index(top)
    assert any(line.startswith("optimizer/") for line in lines)
    assert "  blocks/0..23/" in [line[:15] for line in lines]


def test_a_folded_block_has_its_count_its_leaves_and_its_bytes(large: tuple[Path, int]):
    path, _ = large
    (row,) = (line.split() for line in lines_of(path) if line.startswith("  blocks/"))
    leaves = as_json("show", path, "model/blocks")["leaves"]
    assert len(leaves) == 24 * 16
    size = human_bytes(sum(leaf["bytes"] for leaf in leaves)).split()
    assert row == ["blocks/0..23/", "float32,", "…", "24", "×", "16", "leaves", *size]
    lines = lines_of(path, LINES="60")
    (kernel,) = (
        line.split() for line in lines if line.startswith("      kernel") and "64 × 16" in line
    )
    assert kernel[-4:] == ["24", "×", "4.0", "KiB"]


def test_all_unfolds_and_fits_80_columns(large: tuple[Path, int]):
    assert max(map(len, lines_of(large[0], "--stats", "--all"))) <= 80
    paths = [line.split()[0] for line in lines_of(large[0], "--all") if line]
    assert "model/blocks/17/attention/query/kernel" in paths
    assert sum(path.startswith("model/blocks/") for path in paths) == 24 * 16


def test_statistics_of_a_folded_block_are_those_of_all_its_leaves(tmp_path: Path):
    blocks = {str(number): {"w": np.full(4, number, np.float32)} for number in range(60)}
    ostraka.save(tmp_path / "c", {"blocks": blocks})
    (row,) = (line for line in lines_of(tmp_path / "c", "--stats") if "0..59" in line)
    assert row.split()[-6:] == ["0", "59", "29.5", "17.3181", "0", "0"]


def test_a_small_tree_is_not_folded(tmp_path: Path):
    blocks = {str(number): {"w": np.ones(2), "b": np.ones(3)} for number in range(3)}
    ostraka.save(tmp_path / "c", {"blocks": blocks, "step": 1})
    lines = lines_of(tmp_path / "c")
    start = next(n for n, line in enumerate(lines) if line.startswith("leaf"))
    labels = [
        line[: len(line) - len(line.lstrip())] + line.split()[0] for line in lines[start + 1 :][:11]
    ]
    block = ["    w", "    b"]
    assert labels == ["blocks/", "  0/", *block, "  1/", *block, "  2/", *block, "step"]


def leaf(path: str, *, dtype: str = "float32", nbytes: int = 4) -> LeafRow:
    return LeafRow(path, (path, dtype, "4", "P()", f"{nbytes} B"), nbytes, number=hash(path))


def folded(rows: list[LeafRow], most: int, separator: str = "/") -> list[str]:
    lines, cut = fold(rows, most, separator=separator, is_last=lambda row: "mu" in row.path)
    assert len(lines) + bool(cut) <= most
    return [line.path for line in lines] + [f"+{len(cut)}"] * bool(cut)


FOLDED: dict[str, tuple[list[LeafRow], int, list[str]]] = {
    "only equal blocks together": (
        [leaf(f"l/{n}/w", dtype="int8" if n in (3, 7) else "float32") for n in range(10)],
        5,
        ["l", "l/0..2,4..6,8..9/w", "l/3,7/w"],
    ),
    "in the order of the numbers": (
        [leaf(f"l/layer_{n:02d}/{name}") for n in sorted(range(12), key=str) for name in "ab"],
        5,
        ["l/layer_00..11", "l/layer_00..11/a", "l/layer_00..11/b"],
    ),
    "blocks in blocks": (
        [leaf(f"l/{n}/experts/{e}/{k}") for n in range(6) for e in range(4) for k in "wb"],
        4,
        ["l/0..5/experts/0..3", "l/0..5/experts/0..3/w", "l/0..5/experts/0..3/b"],
    ),
    "blocks in blocks of other dtypes stay apart": (
        [
            leaf(f"l/{n}/experts/{e}", dtype="int8" if n > 2 else "float32")
            for n in range(6)
            for e in range(4)
        ],
        5,
        ["l", "l/0..2/experts/0..3", "l/3..5/experts/0..3"],
    ),
    "what comes last stays closed": (
        [leaf(f"{top}/{name}{k}") for top in ("mu", "model") for name in "abc" for k in "xy"],
        8,
        ["mu", "model"],
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_blocks_fold(name: str):
    rows, most, expected = FOLDED[name]
    assert folded(rows, most)[: len(expected)] == expected


def test_names_with_dots_are_whole():
    rows = [leaf(f"model.layers.{n}.{k}.weight") for n in range(40) for k in ("up", "down")]
    assert folded(rows, 9, ".") == [
        "model.layers.0..39.up.weight",
        "model.layers.0..39.down.weight",
    ]


def test_very_many_names_at_the_top_are_cut():
    rows = [leaf("abcdefghijklmnopqrst"[n % 20] * (n // 20 + 1)) for n in range(60)]
    found = folded(rows, 10)
    assert (len(found), found[-1]) == (10, "+51")


def test_a_folded_name_is_read_back():
    for text, path, expected in (
        ("b/0..23/w", "b/7/w", True),
        ("b/0..23/w", "b/24/w", False),
        ("b/0..23/", "b/7/w/x", True),
        ("b/0..2,4..6/w", "b/3/w", False),
        ("b/0..2,4..6,9/w", "b/9/w", True),
        ("m.0..3.up", "m.2.up", True),
        ("m.0..3.up", "m.2.down", False),
        ("**/0..3/k*", "a/b/1/kernel", True),
        ("ln1..2", "ln2/scale", True),
        (f"b/0..{10**30}", "b/7", True),
        ("b/0..3", f"b/{'1' * 5000}", False),
    ):
        matches = numbered_pattern(text)
        assert matches is not None
        assert matches(path) is expected, (text, path[:20])
    assert numbered_pattern("model/**/kernel") is None


# Names of exported files


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    tensors = {
        f"model.layers.{n}.{name}.weight": np.ones((2, 4), np.float32)
        for n in range(50)
        for name in ("mlp.up_proj", "self_attn.q_proj")
    }
    tensors |= {"odd/name~x": np.ones(3, np.float32), "norm.weight": np.ones(3, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_every_printed_name_of_a_file_can_be_pasted(exported: Path):
    lines = lines_of(exported)
    names = [line.split("  ")[0] for line in lines[lines.index("") + 2 :] if line][:4]
    assert names == [
        "model.layers.0..49.mlp.up_proj.weight",
        "model.layers.0..49.self_attn.q_proj.weight",
        "norm.weight",
        "odd/name~x",
    ]
    for name, leaves in zip(names, (50, 50, None, None), strict=True):
        shown = lines_of(exported, name)
        if leaves is None:
            assert shown[0] == f"{name} of {exported}"
        else:
            assert f"{leaves} leaves of {name!r}, " in "\n".join(shown)
    every = [line.split("  ")[0] for line in lines_of(exported, "--all")]
    assert {"odd/name~x", "model.layers.31.mlp.up_proj.weight"} <= set(every)
    assert lines_of(exported, "model.layers.31.mlp.up_proj.weight")[1].startswith("float32")


def test_parameters_without_nnx_leave_out_the_optimizer(tmp_path: Path):
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    state = {"params": params, "opt": optax.adam(0.1).init(params), "count": jnp.int32(1)}
    ostraka.save(tmp_path / "c", state)
    assert "36 parameters of float32, 440 B (optimizer 292 B, other 4 B)" in lines_of(
        tmp_path / "c"
    )


def test_a_tree_that_is_one_leaf_has_its_path(tmp_path: Path):
    ostraka.save(tmp_path / "c", np.ones(3))
    lines = lines_of(tmp_path / "c")
    (row,) = (line.split() for line in lines if "float64  3" in line)
    assert row[0] == "."
    assert lines_of(tmp_path / "c", ".")[0].startswith(". of ")


def test_names_of_very_many_dots_and_trees_of_many_levels(tmp_path: Path):
    tensors = {f"{'a.' * 5000}{n}": np.ones(1, np.float32) for n in range(60)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert any("60 ×" in line for line in lines_of(tmp_path))
    tree: object = np.ones(2)
    for level in range(190):
        tree = {"0": tree, "1": np.ones(3), "2": np.ones(3)} if level % 2 else {"x": tree}
    path = tmp_path / "deep"
    ostraka.save(path, {"a": tree, "b": tree})
    assert len(lines_of(path)) < 40
    assert run("diff", path, tmp_path).exit_code == 1
