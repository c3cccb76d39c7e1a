"""Paths as a tree with repeated blocks."""

from hypothesis import given
from hypothesis import strategies as st

from ostraka.tree.blocks import Block, fold_blocks


def shown(block: Block) -> object:
    """Names, with the number of leaves that each stands for."""
    if block.leaf is not None:
        return len(block.leaves)
    return {child.name: shown(child) for child in block.children}


def test_blocks_that_differ_in_a_number_are_one():
    paths = [f"layers/{n}/{name}" for n in range(12) for name in ("kernel", "bias")]
    root = fold_blocks(["embed", *paths], ["a", *["b", "c"] * 12])
    assert shown(root) == {"embed": 1, "layers/0..11": {"kernel": 12, "bias": 12}}
    assert root.children[1].repeats == 12
    assert root.leaves == list(range(25))


def test_a_block_of_another_kind_stays_apart():
    paths = [f"layers/{n}/kernel" for n in range(6)]
    root = fold_blocks(paths, ["a", "a", "b", "a", "a", "a"])
    assert shown(root) == {"layers": {"0..1,3..5/kernel": 5, "2/kernel": 1}}


def test_blocks_in_blocks_are_one():
    paths = [f"stage{s}/block_{b}/w" for s in range(3) for b in range(4)]
    root = fold_blocks([*paths, "head"], ["a"] * 13)
    assert shown(root) == {"stage0..2/block_0..3/w": 12, "head": 1}


def test_blocks_in_any_order_begin_with_the_lowest_number():
    root = fold_blocks(["layers/1", "layers/0", "head"], ["a"] * 3)
    assert [(child.leaf, child.leaves) for child in root.children] == [(1, [1, 0]), (2, [2])]


def test_very_long_numbers_stay_apart():
    paths = ["9" * 10_000 + f"{n}" for n in range(3)] + [f"{10**12 + n}" for n in range(3)]
    root = fold_blocks(paths, ["a"] * 6)
    assert shown(root) == dict.fromkeys(paths[:3], 1) | {"1000000000000..1000000000002": 3}


def test_names_of_tensors_are_split_at_dots():
    paths = [f"model.layers.{n}.mlp.weight" for n in range(3)] + ["lm_head.weight"]
    root = fold_blocks(paths, ["a"] * 4)
    assert shown(root) == {"model.layers.0..2.mlp.weight": 3, "lm_head.weight": 1}


def test_a_leaf_may_have_the_name_of_a_block():
    root = fold_blocks(["a", "b", "a.x", "a.y"], [0, 1, 2, 3])
    assert [child.name for child in root.children] == ["a", "b", "a"]
    assert shown(root.children[2]) == {"x": 1, "y": 1}


def test_paths_of_any_depth_are_folded():
    path = "/".join(["a"] * 100_000)
    assert shown(fold_blocks([path, "b"], [0, 0])) == {path: 1, "b": 1}


segments = st.text("ab01.", max_size=3)


@given(st.lists(st.lists(segments, min_size=1, max_size=4).map("/".join), unique=True))
def test_each_leaf_is_in_one_block(paths: list[str]):
    def leaves(block: Block) -> list[int]:
        if block.leaf is not None:
            assert block.leaf == block.leaves[0]
            return block.leaves
        below = [leaf for child in block.children for leaf in leaves(child)]
        assert sorted(below) == sorted(block.leaves)
        return below

    root = fold_blocks(paths, [len(path) % 2 for path in paths])
    assert sorted(leaves(root)) == list(range(len(paths)))
