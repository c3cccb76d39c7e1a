"""Rules that cut one tensor into several leaves, and put them together again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraka.errors import Mismatch
from ostraka.reading.names.given import read_names
from ostraka.reading.names.rules import Composition
from test_names import Shapes, shapes_of

QKV = {"q/kernel": 6, "k/kernel": 2, "v/kernel": -1}


def tensors_of(leaves: list[Composition]) -> Shapes:
    return {name: leaf.form.shape_before for leaf in leaves for name in leaf.tensors}


# What rules can say: tensors as programs write them, and the leaves of models


CASES: dict[str, tuple[dict[str, Any], Shapes, Shapes]] = {
    "Phi-3 with heads": (
        {
            "qkv.weight": {
                "transpose": True,
                "split": {1: [-1, 2]},
                "cut": {"axis": 1, "into": {"q": 3, "k": 1, "v": 1}},
            }
        },
        {"qkv.weight": (10, 4)},
        {"q": (4, 3, 2), "k": (4, 1, 2), "v": (4, 1, 2)},
    ),
    "DeepSeek, parts of each head": (
        {
            "kv_b_proj.weight": {
                "transpose": True,
                "split": {1: [3, -1]},
                "cut": {"axis": 2, "into": {"k_nope": 4, "v": 2}},
            }
        },
        {"kv_b_proj.weight": (18, 5)},
        {"k_nope": (5, 3, 4), "v": (5, 3, 2)},
    ),
    "layers that are scanned over": (
        {
            "l.{n}.qkv": {
                "transpose": True,
                "cut": {"axis": 1, "into": {"q": 6, "k": 2, "v": 2}},
                "stack": "n",
            }
        },
        {f"l.{n}.qkv": (10, 4) for n in range(3)},
        {"q": (3, 4, 6), "k": (3, 4, 2), "v": (3, 4, 2)},
    ),
    "an axis of one that is gone": (
        {"conv.weight": {"cut": {"axis": 1, "into": ["conv/kernel"]}, "transpose": [2, 1, 0]}},
        {"conv.weight": (6, 1, 4)},
        {"conv/kernel": (4, 6)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tensors_become_leaves_and_leaves_tensors(name: str):
    rules, tensors, leaves = CASES[name]
    for same in (rules, json.loads(json.dumps(rules))):
        names = read_names(same)
        made = names.compose(tensors)
        assert shapes_of(made) == leaves
        again = names.decompose(leaves)
        assert tensors_of(again) == tensors
        assert sorted(again, key=lambda leaf: leaf.path) == sorted(made, key=lambda leaf: leaf.path)


# Functions


def test_a_function_cuts():
    def names(name: str, shape: tuple[int, ...]) -> Any:
        above = name.removesuffix("qkv")
        into = [f"{above}{part}" for part in "qkv"]
        return {"split": {0: [3, -1]}, "cut": {"axis": 0, "into": into}}

    found = shapes_of(read_names(names).compose({"a.qkv": (6, 4), "b.qkv": (9,)}))
    assert found == {
        **{f"a.{part}": (2, 4) for part in "qkv"},
        **{f"b.{part}": (3,) for part in "qkv"},
    }


def fuse(path: str, shape: tuple[int, ...]) -> Any:
    """Given leaves: the tensor that each is a part of, and how that is cut."""
    if path == "norm":
        return "ln.weight"
    into = {"q/kernel": 6, "k/kernel": 2, "v/kernel": 2}
    return {"tensor": "qkv.weight", "transpose": True, "cut": {"axis": 1, "into": into}}


LEAVES: Shapes = {"q/kernel": (4, 6), "k/kernel": (4, 2), "v/kernel": (4, 2), "norm": (4,)}


def test_a_function_puts_together():
    assert tensors_of(read_names(fuse).decompose(LEAVES)) == {
        "qkv.weight": (10, 4),
        "ln.weight": (4,),
    }


def test_a_function_cuts_a_leaf_into_tensors():
    def names(path: str, shape: tuple[int, ...]) -> Any:
        return {"transpose": True, "cut": {"axis": 0, "into": {"q.weight": 6, "kv.weight": -1}}}

    found = read_names(names).decompose({"qkv/kernel": (4, 10)})
    assert tensors_of(found) == {"q.weight": (6, 4), "kv.weight": (4, 4)}
    assert shapes_of(found) == {"qkv/kernel": (4, 10)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor": 3, "cut": {"axis": 0, "into": ["a"]}}, "tensor must be the name of a tensor"),
        ({"tensor": "x{n}", "cut": {"axis": 0, "into": ["a"]}}, "tensor must be the name"),
        ({"tensor": "x", "path": "y"}, "tensor goes with cut, which has 'a' in its into, alone"),
        (
            {"tensor": "x", "cut": {"axis": 0, "into": ["b"]}},
            "its cut has 'b' in its into, and not",
        ),
        ({"tensor": "x", "cut": {"axis": 0, "into": ["a"]}, "stack": 1}, "tensor goes with cut"),
    ],
)
def test_what_a_function_can_not_say(given: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_names(lambda path, shape: given).decompose({"a": (2, 2)})


def test_functions_that_contradict_themselves():
    def two_ways(path: str, shape: tuple[int, ...]) -> Any:
        size = {"a": 1, "b": 2}[path]
        return {"tensor": "t", "cut": {"axis": 0, "into": {"a": size, "b": 2}}}

    def both(path: str, shape: tuple[int, ...]) -> Any:
        return "t" if path == "a" else {"tensor": "t", "cut": {"axis": 0, "into": {"b": -1}}}

    for names, message in (
        (two_ways, "'t' is cut in one way for leaf 'a', and in another"),
        (both, "leaves 'a' and 'b' would both be tensor 't'"),
    ):
        with pytest.raises(Mismatch, match=message):
            read_names(names).decompose({"a": (1,), "b": (2,)})
    with pytest.raises(Mismatch, match="'qkv.weight' is put together of 3 leaves, of which there"):
        read_names(fuse).decompose({"q/kernel": (4, 6)})
    with pytest.raises(Mismatch, match="tensor 'q/kernel' is given a 'tensor', which is for"):
        read_names(fuse).compose({"q/kernel": (4, 6)})


# What can't be understood


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"cut": 3}, "cut must have an axis and what it is cut into, such as"),
        ({"cut": {"axis": 0}}, "cut must have an axis and what it is cut into, such as"),
        ({"cut": {"axis": 0, "into": QKV, "size": 1}}, "cut must have an axis and what it is"),
        ({"cut": {"axis": -1, "into": QKV}}, "the axis of cut must be a number such as 0 or 1"),
        ({"cut": {"axis": True, "into": QKV}}, "the axis of cut must be a number such as 0 or 1"),
        ({"cut": {"axis": "0", "into": QKV}}, "the axis of cut must be a number such as 0 or 1"),
        ({"cut": {"axis": 0, "into": {}}}, "the into of cut must have leaves and their sizes"),
        ({"cut": {"axis": 0, "into": "q/kernel"}}, "or be a list of leaves that get one position"),
        ({"cut": {"axis": 0, "into": 3}}, "the into of cut must have leaves and their sizes"),
        ({"cut": {"axis": 0, "into": ["a", "a"]}}, "cut has 'a' twice in its into"),
        ({"cut": {"axis": 0, "into": ["a", 3]}}, "its path must be one such as"),
        ({"cut": {"axis": 0, "into": {"a//b": 3}}}, "its path must be one such as"),
        ({"cut": {"axis": 0, "into": {"a": 0}}}, "cut has 0 for 'a', which must be its size"),
        ({"cut": {"axis": 0, "into": {"a": 1.5}}}, "cut has 1.5 for 'a', which must be its size"),
        ({"cut": {"axis": 0, "into": {"a": True}}}, "cut has True for 'a', which must be its size"),
        ({"cut": {"axis": 0, "into": {"a": -1, "b": -1}}}, "the size -1 for more than one leaf"),
        ({"cut": {"axis": 0, "into": QKV}, "path": "x"}, "it has both path and cut"),
        ({"cut": {"axis": 0, "into": {"a/{e}": 1}}}, "the path has {e}, which the name has not"),
        ({"cuts": {"axis": 0, "into": QKV}}, "it has 'cuts' (did you mean 'cut'?)"),
        ({"cut": None}, "cut must have an axis and what it is cut into"),
        ({"path": "a", "tensor": "b"}, "it has 'tensor'; it may have path, transpose, split, cut"),
        ({"path": "a", "stack": 3}, "stack has 3, which must be placeholders of the name"),
        (
            {"l.{n}": {"cut": {"axis": 0, "into": {"l/{n}/q": 1, "l/k": 1}}}},
            "{n} is not in the path",
        ),
    ],
)
def test_what_can_not_be_understood(rule: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_names(rule if "l.{n}" in rule else {"w": rule})
    assert "\n" not in str(caught.value)


SMALL = st.sampled_from([-2, -1, 0, 1, 2, 3, 6, True, None, "1", "a", 1.5, 10**40, [], {}])
SIZES = st.dictionaries(
    st.sampled_from([0, 1, 2, "0", "1", -1, 10**40]), st.lists(SMALL, max_size=3), max_size=2
)
INTO = st.one_of(
    st.dictionaries(st.sampled_from(["a", "b", "a/b", "c/{n}"]), SMALL, max_size=3),
    st.lists(st.sampled_from(["a", "b", "c", "", 3]), max_size=3),
    SMALL,
)
ANY_RULE = st.fixed_dictionaries(
    {},
    optional={
        "path": st.sampled_from(["a", "a/b", "", 3]),
        "transpose": st.one_of(st.booleans(), st.lists(SMALL, max_size=3), SMALL),
        "split": st.one_of(SIZES, SMALL),
        "merge": st.one_of(SIZES, SMALL),
        "stack": st.one_of(SMALL, st.lists(SMALL, max_size=2)),
        "cut": st.one_of(st.fixed_dictionaries({"axis": SMALL, "into": INTO}), SMALL),
    },
)


@settings(max_examples=500)
@given(ANY_RULE, st.lists(st.integers(0, 6), max_size=3), st.booleans())
def test_any_rule_is_understood_or_refused(rule: Any, shape: list[int], from_function: bool):
    """Never another error; and what it makes of a tensor, it makes a tensor of again."""
    names: Any = (lambda name, shape: rule) if from_function else {"w": rule}
    try:
        leaves = read_names(names).compose({"w": tuple(shape)})
    except (ValueError, Mismatch):
        return
    if from_function:
        return
    again = read_names(names).decompose(shapes_of(leaves))
    assert tensors_of(again) == {"w": tuple(shape)}


def test_the_rules_of_the_guide():
    """Each of those in docs/howto/name-rules.md, with tensors as the comment says."""
    text = (Path(__file__).parents[2] / "docs" / "howto" / "name-rules.md").read_text("utf-8")
    code = text[text.index("fused = {") :]
    scope: dict[str, Any] = {}
    exec(code[: code.index("```")], scope)
    tensors = {
        "layers.0.qkv_proj.weight": (96, 64),
        "h.0.c_attn.weight": (64, 192),
        "h.0.c_attn.bias": (192,),
        "layers.0.query_key_value.weight": (192, 64),
        "layers.0.wqkv.weight": (8 * 6 * 4, 64),
        **{f"model.{n}.experts.gate_up_proj": (4, 16, 64) for n in range(2)},
        "model.0.mlp.gate_up_proj": (4, 16, 64),
    }
    leaves = shapes_of(read_names(scope["fused"]).compose(tensors))
    assert leaves == {
        "l/0/q/kernel": (64, 64),
        "l/0/k/kernel": (64, 16),
        "l/0/v/kernel": (64, 16),
        **{f"{at}/0/{x}/kernel": (64, 8, 8) for at in "hx" for x in ("query", "key", "value")},
        **{f"h/0/{x}/bias": (8, 8) for x in ("query", "key", "value")},
        "i/0/q": (64, 32, 4),
        "i/0/k": (64, 8, 4),
        "i/0/v": (64, 8, 4),
        **{f"experts/{x}": (2, 4, 16, 32) for x in ("gate", "up")},
        **{f"mlp/0/{x}": (4, 16, 32) for x in ("gate", "up")},
    }
    assert tensors_of(read_names(scope["fused"]).decompose(leaves)) == tensors


# What does not correspond


@pytest.mark.parametrize(
    ("rule", "shape", "message"),
    [
        ({"into": QKV}, (8, 4), "tensor 'w' has 8 elements along axis 0, which can't be cut into"),
        ({"into": {"a": 3, "b": 4}}, (8,), "has 8 elements along axis 0, which can't be cut into"),
        ({"into": {"a": 10**30, "b": 4}}, (8,), "which can't be cut into [1000000000000"),
        (
            {"into": ["a", "b"]},
            (6,),
            "has 6 elements along axis 0 to cut, and 2 leaves are to have",
        ),
        ({"into": QKV}, (), "has 0 axes when it is to be cut, of which none is number 0"),
    ],
)
def test_tensors_that_do_not_fit(rule: Any, shape: Any, message: str):
    names = read_names({"w": {"cut": {"axis": 0, **rule}}})
    with pytest.raises(Mismatch, match=re.escape(message)) as caught:
        names.compose({"w": shape})
    assert len(caught.value.differences) == 1


def test_different_parts_are_not_stacked():
    """The first part of one tensor and the second of another, under one path."""
    rule = {"cut": {"axis": 0, "into": {"{a}/x": 1, "y/{a}": 1}}, "stack": "n"}
    with pytest.raises(Mismatch, match="leaf 'y/x' is stacked of tensors that are not alike"):
        read_names({"{a}.{n}": rule}).compose({"y.0": (2,), "x.1": (2,)})


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (
            {"l/3/q": (6, 4), "l/3/v": (2, 4)},
            "tensor 'l.3.qkv' is put together of 3 leaves, of which there is no 'l/3/k'",
        ),
        (
            {"l/3/k": (2, 4)},
            "tensor 'l.3.qkv' is put together of 3 leaves, of which there is no 'l/3/q', 'l/3/v'",
        ),
        (
            {"l/3/q": (6, 4), "l/3/k": (3, 4), "l/3/v": (2, 4)},
            "leaf 'l/3/k' has 3 elements along axis 0, where its rule cuts off 2",
        ),
        (
            {"l/3/q": (6, 4), "l/3/k": (2, 5), "l/3/v": (2, 4)},
            "'l/3/q' and 'l/3/k' can't be put together: they have the shapes (6, 4) and (2, 5)",
        ),
        (
            {"l/3/q": (6, 4), "l/3/k": (), "l/3/v": (2, 4)},
            "leaf 'l/3/k' has the shape (), which has no axis 0",
        ),
    ],
)
def test_leaves_that_do_not_fit(leaves: Any, message: str):
    into = {"l/{n}/q": 6, "l/{n}/k": 2, "l/{n}/v": -1}
    names = read_names({"l.{n}.qkv": {"cut": {"axis": 0, "into": into}}})
    with pytest.raises(Mismatch, match=re.escape(message)):
        names.decompose(leaves)


STACKED = {"l.{n}.w": {"cut": {"axis": 0, "into": {"q": 6, "k": 2}}, "stack": "n"}}
SPLIT = {"w": {"split": {0: [5, 2]}, "cut": {"axis": 0, "into": {"a": -1, "b": 2}}}}


@pytest.mark.parametrize(
    ("rules", "leaves", "message"),
    [
        (STACKED, {"q": (3, 6), "k": (2, 2)}, "they are stacks of (3,) and (2,)"),
        (STACKED, {"q": (3, 6)}, "tensor 'l.{n}.w' is put together of 2 leaves"),
        (STACKED, {"q": (), "k": (2, 2)}, "has the shape (), which has no 1 axis to unstack"),
        (STACKED, {"q": (0, 6), "k": (0, 2)}, "which is a stack of nothing"),
        (
            SPLIT,
            {"a": (4, 2), "b": (2, 2)},
            "leaf 'a' has 12 elements along axis 0, which can't be",
        ),
    ],
)
def test_stacks_that_do_not_fit(rules: Any, leaves: Any, message: str):
    with pytest.raises(Mismatch, match=re.escape(message)):
        read_names(rules).decompose(leaves)
