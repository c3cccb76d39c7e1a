"""Trees as branches and leaves: walked, taken apart, put together, pruned; names in paths."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka.errors import InvalidTree
from ostraka.live.parse import parse
from ostraka.tree.nodes import (
    branches_of,
    check_unique,
    escape,
    join,
    leaves_of,
    natural_order,
    nest,
    nested_tree,
    prune,
    rebuild,
    split,
    unescape,
)

NAMES = st.text(st.sampled_from("ab/~*0"), max_size=3) | st.just("__metadata__")
TREES = st.recursive(
    st.integers(-9, 9),
    lambda children: (
        st.dictionaries(NAMES, children, max_size=3)
        | st.lists(children, max_size=3)
        | st.tuples(children, children)
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_tree_is_put_together_as_it_was(tree: Any):
    parsed = parse(tree)
    leaves = list(leaves_of(parsed))
    check_unique(leaves)
    assert rebuild(parsed, {leaf.path: leaf.value for leaf in leaves}) == tree


@given(TREES)
def test_a_pruned_tree_has_the_wanted_leaves(tree: Any):
    parsed = parse(tree)
    pruned = prune(parsed, lambda leaf: leaf.value > 0)
    expected = {leaf.path: leaf.value for leaf in leaves_of(parsed) if leaf.value > 0}
    found = {} if pruned is None else {leaf.path: leaf.value for leaf in leaves_of(pruned)}
    assert found == expected
    if pruned is not None and expected:
        again = parse(rebuild(pruned, expected))
        assert sorted(leaf.value for leaf in leaves_of(again)) == sorted(expected.values())


def test_branches_come_before_those_below():
    paths = [branch.path for branch in branches_of(parse({"a": {"b": [1]}, "c": 2}))]
    assert paths == ["", "a", "a/b"]


def test_a_sequence_that_loses_items_becomes_a_dict():
    pruned = prune(parse([1, -1, 1]), lambda leaf: leaf.value > 0)
    assert pruned is not None
    assert rebuild(pruned, {leaf.path: leaf.value for leaf in leaves_of(pruned)}) == {0: 1, 2: 1}


@given(st.lists(NAMES, unique=True))
def test_escaped_names_are_different_and_one_segment(names: list[str]):
    escaped = [escape(name) for name in names]
    assert len(set(escaped)) == len(names)
    assert not any("/" in name or name == "__metadata__" for name in escaped)


@given(NAMES, NAMES)
def test_keys_are_found_again_in_paths(top: str, below: str):
    path = join(join("", escape(top)), escape(below))
    assert split(path) == [top, below]
    assert unescape(join("", escape(top))) == top


def test_the_empty_key_is_found_again():
    assert [unescape("~"), unescape("~0"), unescape("")] == ["", "~", ""]
    assert [split("~"), split("~/a/"), split("~0")] == [[""], ["", "a", ""], ["~"]]


def test_paths_are_joined():
    assert [join("", "a"), join("a", "b"), join("", ""), join("a", "")] == ["a", "a/b", "~", "a/"]


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(InvalidTree, match="two leaves have the path '0'"):
        check_unique(list(leaves_of(parse({0: np.ones(1), "0": np.ones(1)}))))


def test_nested_dicts_from_paths():
    assert nest([(["a", "b"], 1), (["c"], 2), (["a", "d"], 3)]) == {"a": {"b": 1, "d": 3}, "c": 2}
    assert nest([([], 1)]) == 1
    assert nest([]) == {}


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b", "a"), ("a/b", "a/b/c/d"), ("a", "a")])
def test_a_leaf_above_another_is_refused(paths: tuple[str, str]):
    with pytest.raises(InvalidTree, match=f"a leaf at '{paths[1]}' and another at, above or below"):
        nest((path.split("/"), 0) for path in paths)
    if paths[0] != paths[1]:
        with pytest.raises(InvalidTree, match="another at, above or below"):
            nested_tree({path: (path, 0) for path in paths})


def test_names_are_in_natural_order():
    names = ["Dense_10", "Dense_2", "layers", "²", "10", "9", "Dense_1", "007", "7", "1" * 30]
    ordered = ["007", "7", "9", "10", "1" * 30, "Dense_1", "Dense_2", "Dense_10", "layers", "²"]
    assert sorted(names, key=natural_order) == ordered


def test_a_nested_tree_has_natural_order_and_numbers_for_keys():
    tree = nested_tree({f"layer_{n}/{n}": ("", n) for n in (10, 2)} | {"~1": ("", 0)})
    assert [leaf.path for leaf in leaves_of(tree)] == ["layer_2/2", "layer_10/10", "~1"]
    assert rebuild(tree, {leaf.path: leaf.value for leaf in leaves_of(tree)}) == {
        "layer_2": {2: 2},
        "layer_10": {10: 10},
        "/": 0,
    }
