"""`Manager.resume`: the newest intact step in place, or a new run."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import ostraka
from ostraka import Manager
from ostraka.errors import Damaged, InvalidTree, Mismatch, PartialRestore
from ostraka.testing import run_processes
from places import remove_tree
from runs import damage


def tree_of(value: float) -> dict[str, Any]:
    return {"w": jnp.full(4, value), "opt": (jnp.full(2, value),), "step": int(value)}


def fill(root: Any, *steps: int, **options: Any) -> None:
    with Manager(root, asynchronous=False, **options) as manager:
        for step in steps:
            manager.save(step, tree_of(step))


def lines_of(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    found = [r for r in caplog.records if any(word in r.getMessage() for word in words)]
    assert all(record.levelno == logging.INFO for record in found)
    return [record.getMessage() for record in found]


def test_a_loop_goes_on_where_it_was_interrupted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "ostraka")
    said = ("resumed from", "from scratch")

    def run(until: int) -> tuple[list[int], dict[str, Any]]:
        state, done = tree_of(0), []
        with Manager(tmp_path, every=2) as manager:
            for step in range(manager.resume(state) + 1, until):
                state["w"] = state["w"] + 1
                state["step"] = step
                manager.save(step, state)
                done.append(step)
            assert manager.restored == (done[0] - 1 or None)
            where = manager.root
        assert lines_of(caplog, *said)[-1] == (
            f"no step in {where}: starting from scratch"
            if done[0] == 1
            else f"resumed from step {done[0] - 1} of {where}"
        )
        return done, state

    assert run(6)[0] == [1, 2, 3, 4, 5]
    done, state = run(9)
    assert done == [5, 6, 7, 8]
    assert state["w"].tolist() == [8] * 4
    assert len(lines_of(caplog, *said)) == 2


def test_it_updates_the_objects_of_the_caller(tmp_path: Path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with Manager(tmp_path) as manager:
        manager.save(3, {"model": model, "extra": {"n": [7]}})
    other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    state: dict[str, Any] = {"model": other, "extra": {"n": [0]}}
    inner = state["extra"]["n"]
    with Manager(tmp_path) as manager:
        assert manager.resume(state) == 3
    assert state["model"] is other
    assert jnp.array_equal(other.kernel[...], model.kernel[...])
    assert state["extra"]["n"] is inner
    assert inner == [7]


@pytest.mark.parametrize("steps", [(), (1,)])
def test_a_state_that_cannot_change_is_refused_on_the_first_day(
    tmp_path: Path, steps: tuple[int, ...]
):
    fill(tmp_path, *steps)
    with Manager(tmp_path) as manager:
        with pytest.raises(InvalidTree, match=r"into= can't change leaf '0' .*like=state"):
            manager.resume((jnp.zeros(2),))
        assert manager.restored is None
        assert manager.steps() == list(steps)


def test_damaged_steps_are_passed_over_with_a_warning(tmp_path: Path):
    fill(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    state = tree_of(0)
    with Manager(tmp_path, asynchronous=False) as manager:
        with pytest.warns(UserWarning, match="step 3 can't be restored, so step 2 is"):
            assert manager.resume(state) == 2
        assert (state["w"].tolist(), state["step"]) == ([2] * 4, 2)
        assert state["opt"][0].tolist() == [2, 2]
        manager.save(3, tree_of(3))  # which replaces the damaged one
        assert manager.resume(state) == state["step"] == 3
        for step in (2, 3):
            remove_tree(tmp_path / f"step_{step:08d}")
        damage(tmp_path, 1)
        with pytest.raises(Damaged, match="has no intact step before it"):
            manager.resume(state)
    assert state["step"] == 3


def restore_in_place(manager: Manager, state: Any, **options: Any) -> int | None:
    manager.restore(into=state, fallback=True, **options)
    return manager.restored


@pytest.mark.parametrize("resume", [Manager.resume, restore_in_place])
def test_falling_back_in_place_mixes_nothing(tmp_path: Path, resume: Callable[..., Any]):
    """With strict=False an older step may lack what the damaged one had brought."""
    with Manager(tmp_path, asynchronous=False) as manager:
        manager.save(1, {"a": jnp.full(2, 1.0)})
        manager.save(2, {"a": jnp.full(2, 2.0), "b": jnp.full(2, 2.0)})
        damage(tmp_path, 2)
        state = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
        with pytest.warns(UserWarning, match="step 2 can't be restored|'b'|missing") as said:
            assert resume(manager, state, strict=False) == 1
    assert "step 2 can't be restored" in str(said[0].message)
    assert {type(warning.message) for warning in said} == {UserWarning, PartialRestore}
    assert (state["a"].tolist(), state["b"].tolist()) == ([1, 1], [0, 0])


def test_options_mean_what_they_mean_in_restore(tmp_path: Path):
    with Manager(tmp_path) as manager:
        manager.save(5, {"old": {"w": jnp.ones((8, 2))}, "n": 5})
    state: dict[str, Any] = {"new": {"w": jnp.zeros((8, 2), jnp.bfloat16)}, "n": 0}
    with Manager(tmp_path, read_only=True) as manager:
        with pytest.raises(Mismatch, match="'new/w' is not in the checkpoint"):
            manager.resume(state)
        options: dict[str, Any] = {"rename": {"old": "new"}, "only": "!n", "dtype": "like"}
        found = manager.resume(state, mesh={"x": 8}, specs={"new": jax.P("x")}, **options)
    assert found == 5
    assert state["n"] == 0
    assert (state["new"]["w"].dtype, state["new"]["w"].sharding.spec) == (jnp.bfloat16, jax.P("x"))
    assert state["new"]["w"].sum() == 16


def resume_twice(root: str) -> tuple[list[Any], int]:
    """What a new run and the next one resume from, and how many lines they log about it."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("ostraka")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    mesh = ostraka.sharding.make_mesh({"x": jax.device_count()})
    found: list[Any] = []
    for _ in range(2):
        sharded = ostraka.sharding.place(jnp.zeros(8), mesh, jax.P("x"))
        state: dict[str, Any] = {"w": sharded, "step": 0}
        with Manager(root, asynchronous=False) as manager:
            step = manager.resume(state)
            total = float(jax.jit(jnp.sum)(state["w"]))
            found.append((step, state["step"], total))
            manager.save(4, {"w": sharded + 1, "step": 4}, force=step == 4)
    return found, sum("resumed from" in text or "from scratch" in text for text in messages)


def test_all_processes_get_the_same_step_and_one_logs_it(tmp_path: Path):
    results = run_processes(resume_twice, str(tmp_path / "run"), processes=2)
    expected = [(0, 0, 0.0), (4, 4, 8.0)]
    assert [result.value for result in results] == [(expected, 2), (expected, 0)]
