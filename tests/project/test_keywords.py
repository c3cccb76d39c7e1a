"""Keywords of Orbax are answered with Ostraka's own."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ostraka

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("Manager", {"max_to_keep": 3}, "Ostraka calls it keep="),
    ("Manager", {"save_interval_steps": 10}, "Ostraka calls it every="),
    ("Manager", {"keep_period": 10}, "Ostraka calls it keep_every="),
    ("Manager", {"keep_time_interval": 1}, "Ostraka calls it keep_every_s=, in seconds"),
    ("Manager", {"best_fn": max}, r'name the metric: keep_best=ostraka.Best\("loss", "min"\)'),
    ("Manager", {"best_mode": "max"}, "it belongs to the metric"),
    ("Manager", {"should_save_fn": max}, "Ostraka calls it when="),
    ("Manager", {"save_on_steps": [1]}, "Ostraka calls it at="),
    ("Manager", {"enable_async_checkpointing": True}, "Ostraka calls it asynchronous="),
    ("Manager", {"create": True}, "leave it out, Ostraka always does this"),
    ("Manager", {"options": None}, "pass its fields as arguments"),
    ("Manager", {"item_names": ("a",)}, "pass one tree with everything in it"),
    ("Manager.save", {"args": None}, r"pass the tree: save\(step, tree\)"),
    ("Manager.save", {"custom_metadata": {}}, "Ostraka calls it metadata="),
    ("Manager.restore", {"args": None}, "pass the template as like="),
    ("save", {"force": True}, "leave it out, a save replaces the checkpoint at its path"),
    ("save_async", {"custom_metadata": {}}, "Ostraka calls it metadata="),
    ("restore", {"restore_args": None}, "pass like= with shardings and dtypes"),
    ("restore", {"transforms": {}}, "pass rename= for leaves that have moved"),
]


@pytest.mark.parametrize(("name", "wrong", "remedy"), CASES)
def test_the_remedy_is_named(tmp_path: Path, name: str, wrong: dict[str, Any], remedy: str):
    tree = {"w": jnp.ones(4)}
    ostraka.save(tmp_path / "a", tree)
    (keyword,) = wrong
    expected = rf"{name}\(\) got an unexpected argument '{keyword}'; {remedy}"
    with ostraka.Manager(tmp_path / "runs") as manager:
        calls: dict[str, Any] = {
            "Manager": lambda **given: ostraka.Manager(tmp_path / "other", **given),
            "Manager.save": lambda **given: manager.save(1, tree, **given),
            "Manager.restore": lambda **given: manager.restore(1, **given),
            "save": lambda **given: ostraka.save(tmp_path / "b", tree, **given),
            "save_async": lambda **given: ostraka.save_async(tmp_path / "b", tree, **given),
            "restore": lambda **given: ostraka.restore(tmp_path / "a", **given),
        }
        with pytest.raises(TypeError, match=expected):
            calls[name](**wrong)


def test_any_other_keyword_is_python_s(tmp_path: Path):
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'evry'"):
        ostraka.Manager(tmp_path, evry=3)  # type: ignore[call-arg]
