"""Names of steps: which directory means which step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka.layout.file_names import name_of, names_of_step, prefixed_steps, step_of, steps_among


@given(st.integers(0, 10**20))
def test_the_name_of_a_step_means_that_step(step: int):
    assert step_of(name_of(step)) == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_00000100", 100),
        ("step_100", 100),
        ("0100", 100),
        ("100", 100),
        ("0", 0),
        ("step_", None),
        ("", None),
        ("-1", None),
        ("1.0", None),
        ("7\n", None),
        ("٧", None),
        ("step_7.tmp", None),
        ("Step_7", None),
        ("model", None),
        ("1_000", None),
        ("9" * 5000, None),
    ],
)
def test_which_names_mean_a_step(name: str, step: int | None):
    assert step_of(name) == step


def test_steps_among_the_names_of_a_directory():
    names = ["100", "step_2", "logs", "step_00000002", "2", "step_00000010", "_METADATA"]
    assert steps_among(names) == {
        2: ["step_00000002", "2", "step_2"],
        10: ["step_00000010"],
        100: ["100"],
    }
    assert list(steps_among(names)) == [2, 10, 100]


@pytest.mark.parametrize("wanted", [7, "7", "007", "step_7", "step_00000007"])
def test_a_number_finds_the_name_of_its_step(wanted: str | int):
    assert names_of_step(wanted, ["8", "step_00000007", "logs"]) == ["step_00000007"]
    assert names_of_step(wanted, ["7", "step_00000007"]) == ["step_00000007", "7"]
    assert names_of_step(wanted, ["step_00000070"]) == []


def test_text_that_is_no_step_finds_nothing():
    assert names_of_step("model", ["model", "7"]) == []


def test_names_with_any_prefix():
    names = ["ckpt_10", "ckpt_9", "step_7", "8", "a_b_003", "_4", "ckpt_", "ckpt_1.tmp", "x3"]
    assert prefixed_steps(names) == {3: ["a_b_003"], 9: ["ckpt_9"], 10: ["ckpt_10"]}
