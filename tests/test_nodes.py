"""Trees as branches and leaves: walked, taken apart, put together, pruned; names in paths."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka._nodes import (
    branches_of,
    check_unique,
    escape,
    join,
    leaves_of,
    prune,
    rebuild,
)
from ostraka._tree import parse
from ostraka.errors import InvalidTree

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


def test_paths_are_joined():
    assert [join("", "a"), join("a", "b"), join("", ""), join("a", "")] == ["a", "a/b", "~", "a/"]


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(InvalidTree, match="two leaves have the path '0'"):
        check_unique(list(leaves_of(parse({0: np.ones(1), "0": np.ones(1)}))))
