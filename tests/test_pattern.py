"""Patterns over leaf paths."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka._pattern import lookup, matches, rename_with

PATHS = ["kernel", "a/kernel", "a/b/kernel", "a/b/bias", "ab/kernel", "a/kernels"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("kernel", ["kernel"]),
        ("**/kernel", ["kernel", "a/kernel", "a/b/kernel", "ab/kernel"]),
        ("a/**/kernel", ["a/kernel", "a/b/kernel"]),
        ("**/b/**", ["a/b/kernel", "a/b/bias"]),
        ("**/a/**/kernel", ["a/kernel", "a/b/kernel"]),
        ("**/**/kernel", ["kernel", "a/kernel", "a/b/kernel", "ab/kernel"]),
        ("*/kernel", ["a/kernel", "ab/kernel"]),
        ("a/*", ["a/kernel", "a/b/kernel", "a/b/bias", "a/kernels"]),
        ("a*/kernel", ["a/kernel", "ab/kernel"]),
        ("a**kernel", ["a/kernel", "a/b/kernel", "ab/kernel"]),
        ("a**/kernel", ["a/kernel", "a/b/kernel", "ab/kernel"]),
        ("?/kernel", ["a/kernel"]),
        ("a", ["a/kernel", "a/b/kernel", "a/b/bias", "a/kernels"]),
        ("a/**", ["a/kernel", "a/b/kernel", "a/b/bias", "a/kernels"]),
        ("a/b", ["a/b/kernel", "a/b/bias"]),
        ("**", PATHS),
        ("*", PATHS),
        ("b", []),
        ("", []),
    ],
)
def test_which_paths_a_pattern_matches(pattern: str, expected: list[str]):
    assert [path for path in PATHS if matches(pattern, path)] == expected


def test_other_characters_stand_for_themselves():
    assert matches("a.b/[c]", "a.b/[c]")
    assert not matches("a.b", "axb")
    assert matches("**/line\nbreak", "x\ny/line\nbreak")


def by_names(pattern: list[str], path: list[str]) -> bool:
    """What a pattern of whole names means, said otherwise."""
    if not pattern:
        return True
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path)
        return any(by_names(pattern[1:], path[skipped:]) for skipped in range(len(path) + 1))
    return (
        bool(path)
        and re.fullmatch(pattern[0].replace("*", ".*"), path[0]) is not None
        and (by_names(pattern[1:], path[1:]))
    )


@given(st.lists(st.sampled_from(["**", "*", "a", "b", "a*"]), min_size=1, max_size=4))
def test_patterns_of_whole_names(pattern: list[str]):
    for length in range(1, 4):
        for path in product(["a", "b", "ab"], repeat=length):
            found = matches("/".join(pattern), "/".join(path))
            assert found == by_names(pattern, list(path)), (pattern, path)


def test_several_patterns():
    assert matches(["b", "**/kernel"], "kernel")
    assert not matches([], "kernel")


def test_the_first_that_matches_counts():
    table = {"a/b/**": 1, "**/kernel": 2, "**": 3}
    assert [lookup(table, path) for path in PATHS] == [2, 2, 1, 1, 2, 3]
    assert lookup({"b": 1}, "a") is None


def test_rename():
    rename = rename_with({"a": "x", "a/b": "y/z"})
    assert [rename(path) for path in ("a", "a/c", "a/b", "a/b/c", "ab")] == [
        "x",
        "x/c",
        "y/z",
        "y/z/c",
        "ab",
    ]
