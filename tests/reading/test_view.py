"""A source under other names: what is read of it, piece by piece."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from ostraka.errors import Mismatch
from ostraka.formats.source import Source
from ostraka.layout import box as _box
from ostraka.layout.spec import Target
from ostraka.reading.locate import open_at
from ostraka.reading.names.given import NamesLike
from ostraka.reading.view import renamed
from ostraka.tree.nodes import leaves_of

RULES = {
    "emb": "embed/embedding",
    "l.{n}.q": {"path": "layers/{n}/q/kernel", "transpose": True, "split": {"1": [3, -1]}},
    "l.{n}.o": {"path": "layers/{n}/o/kernel", "transpose": True, "split": {0: [3, 4]}},
    "l.{n}.e.{i}.w": {"path": "layers/{n}/e/kernel", "transpose": True, "stack": "i"},
    "l.{n}.merged": {"path": "layers/{n}/m", "transpose": [2, 0, 1], "merge": {1: [2, 3]}},
    "buffer": None,
}


def tensors() -> dict[str, Any]:
    random = np.random.default_rng(0)
    made: dict[str, Any] = {"emb": random.normal(size=(11, 5)).astype(np.float32)}
    for n in range(2):
        made[f"l.{n}.q"] = random.normal(size=(12, 5)).astype(jnp.bfloat16)
        made[f"l.{n}.o"] = random.normal(size=(5, 12)).astype(np.float16)
        made[f"l.{n}.merged"] = random.integers(0, 99, (2, 3, 7)).astype(np.int32)
        for i in range(3):
            made[f"l.{n}.e.{i}.w"] = random.normal(size=(6, 4)).astype(np.float32)
    return {**made, "buffer": np.arange(3, dtype=np.int32)}


def leaves(given: dict[str, Any]) -> dict[str, Any]:
    """What numpy says that they become."""
    return {
        "embed": {"embedding": given["emb"]},
        "layers": {
            n: {
                "q": {"kernel": given[f"l.{n}.q"].T.reshape(5, 3, 4)},
                "o": {"kernel": given[f"l.{n}.o"].T.reshape(3, 4, 5)},
                "e": {"kernel": np.stack([given[f"l.{n}.e.{i}.w"].T for i in range(3)])},
                "m": given[f"l.{n}.merged"].transpose(2, 0, 1).reshape(7, 6),
            }
            for n in range(2)
        },
    }


def opened(path: Path, tree: Any, names: NamesLike, *, back: bool = False) -> Source:
    ostraka.save(path, tree)
    return renamed(open_at(path), names, back=back)


def everything(source: Source) -> dict[str, Any]:
    by_number = {leaf.value.number: leaf.path for leaf in leaves_of(source.tree)}
    targets = [Target(n, _box.full(source.saved.leaves[n].shape)) for n in by_number]
    found = dict(source.read(targets))
    return {path: found[at] for at, path in enumerate(by_number.values())}


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {above: tree}
    found: dict[str, Any] = {}
    for name, child in tree.items():
        found |= flat(child, f"{above}/{name}" if above else str(name))
    return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
        assert found[name].flags.c_contiguous, name
        assert not found[name].ctypes.data % 64, name


def test_tensors_become_leaves_and_tensors_again(tmp_path: Path):
    given = tensors()
    source = opened(tmp_path / "c", given, RULES)
    wanted = flat(leaves(given))
    assert_same(everything(source), wanted)
    assert_any_box_is_its_own(source, wanted)
    back = opened(tmp_path / "d", leaves(given), RULES, back=True)
    del given["buffer"]
    for again in (back, renamed(source, RULES, back=True)):
        assert_same(everything(again), given)


def assert_any_box_is_its_own(source: Source, whole: dict[str, Any]) -> None:
    random = np.random.default_rng(1)
    for leaf in leaves_of(source.tree):
        targets: list[Target] = []
        for _ in range(30):
            shape = whole[leaf.path].shape
            ends = [sorted(random.integers(0, n + 1, 2).tolist()) for n in shape]
            targets.append(Target(leaf.value.number, tuple((a, b) for a, b in ends)))
        for number, array in source.read(targets):
            wanted = whole[leaf.path][tuple(slice(*span) for span in targets[number].box)]
            assert array.shape == wanted.shape
            assert array.tobytes() == wanted.tobytes()


def test_a_large_leaf_is_rearranged_in_pieces(tmp_path: Path):
    """More than one piece; and the same elements as numpy's."""
    large = np.arange(6 * 1024 * 1024, dtype=np.float32).reshape(3072, 2048)
    rules = {"w": {"path": "kernel", "transpose": True}}
    source = opened(tmp_path / "c", {"w": large}, rules)
    ((_, array),) = source.read([Target(0, ((0, 2048), (0, 3072)))])
    assert (array == large.T).all()
    grid = source.grid_of(0)
    assert grid[0] == 1
    assert grid[1] > 1
    assert len(source.files_of(0)) == grid[1]


def test_where_boxes_lie(tmp_path: Path):
    source = opened(tmp_path / "c", tensors(), RULES)
    tree: Any = source.tree
    (layers,) = [child for child in tree.children if child.path == "layers"]
    assert layers.keys == [0, 1]  # numbers in paths are keys of lists
    paths = [leaf.path for leaf in source.saved.leaves]
    kernel = paths.index("layers/0/e/kernel")
    boxes = source.boxes_of(kernel)
    assert {box.box[0] for box in boxes} == {(0, 1), (1, 2), (2, 3)}
    assert sum(_box.count(box.box) for box in boxes) == 3 * 6 * 4
    assert sum(box.nbytes for box in boxes) == 3 * 6 * 4 * 4
    assert source.grid_of(kernel) == (3, 1, 1)
    assert sorted(source.order()) == list(range(len(paths)))


def test_values_that_are_no_arrays(tmp_path: Path):
    tree = {"w": np.ones((2, 3)), "step": 7}
    rules = {"w": {"path": "a/kernel", "transpose": True}, "step": "a/step"}
    source = opened(tmp_path / "c", tree, rules)
    assert {leaf.path: leaf.value for leaf in leaves_of(source.tree)}["a/step"] == 7
    with pytest.raises(Mismatch, match="'step' would be made of what is no array"):
        renamed(open_at(tmp_path / "c"), lambda name, shape: {"path": name, "stack": 0})


def test_parts_of_several_dtypes_are_not_stacked(tmp_path: Path):
    tree = {"w.0": np.ones(2, np.float32), "w.1": np.ones(2, np.float16)}
    with pytest.raises(Mismatch, match="'w' would be stacked of float16 and float32"):
        opened(tmp_path / "c", tree, {"w.{n}": {"path": "w", "stack": "n"}})
