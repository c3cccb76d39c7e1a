"""Patterns over leaf paths."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostraka
from ostraka.tree.patterns import (
    Wildcard,
    find_spans,
    lookup,
    matches,
    refuse_unmatched,
    rename_with,
    unmatched,
)

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


def test_patterns_that_match_nothing_are_named():
    found = unmatched("only", ["a/**", "kernl", "!kernle", "zzz"], PATHS, "leaf of x")
    assert found == {
        "kernl": "only='kernl' matches no leaf of x (did you mean 'kernel'?)",
        "!kernle": "only='!kernle' matches no leaf of x (did you mean 'kernel'?)",
        "zzz": "only='zzz' matches no leaf of x; top-level names are 'kernel', 'a', 'ab'",
    }
    assert unmatched("only", "zzz", [], "leaf") == {"zzz": "only='zzz' matches no leaf"}
    with pytest.raises(ValueError, match=r"dtype=\{'zzz': …\} matches no array; top-level"):
        refuse_unmatched("dtype", {"a": 1, "zzz": 2}, PATHS, "array")
    refuse_unmatched("only", "!a", PATHS, "leaf")


def test_every_call_says_it_alike(tmp_path: Path):
    """Before, there were seven sentences, and the nearest name came from names or whole paths."""
    path, other = tmp_path / "a", tmp_path / "b"
    tree = {"model": {"kernel": np.ones((512, 512), np.float32)}, "step": 1}
    ostraka.save(path, tree)
    calls: dict[str, Callable[[], object]] = {
        "save dtype": lambda: ostraka.save(other, tree, dtype={"modle": "bfloat16"}),
        "save compress": lambda: ostraka.save(other, tree, compress={"modle": "zstd"}),
        "restore only": lambda: ostraka.restore(path, only="modle"),
        "restore not": lambda: ostraka.restore(path, only="!modle"),
        "restore dtype": lambda: ostraka.restore(path, dtype={"modle": "bfloat16"}),
        "restore specs": lambda: ostraka.restore(path, mesh={"x": 1}, specs={"modle/*": None}),
        "convert only": lambda: ostraka.convert(path, other, to="npz", only="modle"),
        "merge only": lambda: ostraka.merge([path, path], other, only="modle"),
        "merge take": lambda: ostraka.merge([path, path], other, take={"modle": 0}),
        "plan only": lambda: ostraka.plan(path).restore(only="modle"),
    }
    expected = re.compile(
        r"(\w+)=\{?'!?modle(/\*)?'(: …\})? matches no .*\(did you mean 'model'\?\)"
    )
    for name, call in calls.items():
        with pytest.raises(ValueError, match=expected) as raised:
            call()
        assert len(str(raised.value).splitlines()) == 1, name


def test_rename():
    rename = rename_with({"a": "x", "a/b": "y/z"})
    assert [rename(path) for path in ("a", "a/c", "a/b", "a/b/c", "ab")] == [
        "x",
        "x/c",
        "y/z",
        "y/z/c",
        "ab",
    ]


# Without backtracking

EXPRESSIONS = {
    Wildcard(): "(.*)",
    Wildcard("", 1): "(.+)",
    Wildcard("/"): "([^/]*)",
    Wildcard("/", 1, 1): "([^/])",
    Wildcard("./", 1): "([^./]+)",
    Wildcard(ends_in="/"): "((?:.*/)?)",
}
PARTS = st.sampled_from(["a", "b", "ab", "/", ".", "aa", *EXPRESSIONS])


@given(st.lists(PARTS, max_size=6), st.text("ab./\n", max_size=14))
def test_spans_are_those_of_a_regular_expression(parts: list[str | Wildcard], text: str):
    expression = "".join(
        EXPRESSIONS[part] if isinstance(part, Wildcard) else f"({re.escape(part)})"
        for part in parts
    )
    wanted = re.fullmatch(expression, text, re.DOTALL)
    spans = None if wanted is None else [wanted.span(n + 1) for n in range(len(parts))]
    assert find_spans(parts, text) == spans


LONG = 100_000


@pytest.mark.parametrize("part", ["a", "a/", "/", "ab", "a."])
@pytest.mark.parametrize(
    "pattern",
    ["*a*a*a*a*c", "**a**a**a**c", "**/a/**/a/**/c", "***a*c", "**?a**/*c", "a*/*c*", "*/*/*/c"],
)
def test_a_hostile_path_takes_no_time(pattern: str, part: str):
    path = part * (LONG // len(part))
    assert not matches(pattern, path)
    assert matches("**?**/*a*c", f"{path}/bab/aabac/below")
