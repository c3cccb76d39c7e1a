"""Metrics and pins that another process adds to committed steps."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import ostraka
from ostraka import Best, Manager
from ostraka.errors import CheckpointNotFound, PathInTheWay
from ostraka.manager import annotate as module
from places import Place, names_of


def save_steps(place: Place, *steps: int, **options) -> None:
    with Manager(place, **options) as manager:
        for step in steps:
            manager.save(step, {"w": jnp.full(4, step)}, metrics={"loss": 1 / step})


def test_best_by_evaluation(place: Place):
    """The evaluator says that step 2 is the best. The loss of the training says 3."""
    save_steps(place, 1, 2, 3)
    for step, loss in {1: 0.5, 2: 0.1, 3: 0.9}.items():
        ostraka.annotate(place / str(step), metrics={"eval": loss})
    manager = Manager(place, read_only=True)
    assert manager.best(Best("eval")) == 2
    assert manager.best(Best("loss")) == 3
    assert manager.metrics(2) == {"loss": 0.5, "eval": 0.1}
    assert ostraka.verify(place / "2").notes == ()


def test_retention_keeps_the_best_by_evaluation(place: Place):
    with Manager(place, keep=1, keep_best=Best("loss")) as manager:
        for step, loss in {1: 0.3, 2: 0.2}.items():
            manager.save(step, {"w": jnp.ones(4)}, metrics={"loss": loss})
            manager.wait()
        assert manager.steps() == [2]
        ostraka.annotate(place / "2", metrics={"loss": 7.0})  # worse than it looked
        manager.save(3, {"w": jnp.ones(4)}, metrics={"loss": 0.4})
        manager.save(4, {"w": jnp.ones(4)}, metrics={"loss": 0.5})
        manager.wait()
        assert manager.steps() == [3, 4]


def test_metrics_are_added_and_replaced(tmp_path: Path):
    save_steps(tmp_path, 1)
    ostraka.annotate(tmp_path / "1", metrics={"a": 1, "b": float("nan")})
    ostraka.annotate(tmp_path, metrics={"a": 2.5})  # the newest step
    found = Manager(tmp_path, read_only=True).metrics(1)
    assert (found["a"], found["b"] != found["b"], found["loss"]) == (2.5, True, 1.0)


def test_a_step_that_is_saved_again_loses_them(tmp_path: Path):
    save_steps(tmp_path, 1)
    ostraka.annotate(tmp_path / "1", metrics={"eval": 0.1})
    save_steps(tmp_path, 1)
    assert Manager(tmp_path, read_only=True).metrics(1) == {"loss": 1.0}


def test_a_deleted_step_leaves_nothing(tmp_path: Path):
    save_steps(tmp_path, 1, 2)
    ostraka.annotate(tmp_path / "1", metrics={"eval": 0.1}, pinned=True)
    with Manager(tmp_path) as manager:
        manager.delete(1)
    assert names_of(tmp_path) == ["step_00000002"]


def test_a_step_that_is_annotated_while_retention_looks_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The evaluator is done just after retention has chosen the step."""
    from ostraka.manager import retain

    claim = retain.Claim

    class Late(claim):
        def take(self, **options) -> None:
            monkeypatch.setattr(retain, "Claim", claim)
            ostraka.annotate(tmp_path / "1", metrics={"eval": 0.1})
            super().take(**options)

    with Manager(tmp_path, keep=1, keep_best=Best("eval")) as manager:
        manager.save(1, {"w": jnp.ones(4)})
        manager.wait()
        monkeypatch.setattr(retain, "Claim", Late)
        manager.save(2, {"w": jnp.ones(4)})
        manager.wait()
        assert manager.steps() == [1, 2]


def test_pins_from_another_process(tmp_path: Path):
    save_steps(tmp_path, 1)
    code = "import ostraka, sys; ostraka.annotate(sys.argv[1], pinned=True)"
    code += "; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "1")], check=True)
    save_steps(tmp_path, 2, 3, keep=1)
    assert Manager(tmp_path, read_only=True).steps() == [1, 3]
    ostraka.annotate(tmp_path / "1", pinned=False)
    save_steps(tmp_path, 4, keep=1)
    assert Manager(tmp_path, read_only=True).steps() == [4]


def test_notes_that_cannot_be_read_keep_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_steps(tmp_path, 1)
    (tmp_path / "step_00000001" / "_METRICS").write_bytes(b"{")
    save_steps(tmp_path, 2, keep=1, keep_best="loss")
    assert Manager(tmp_path, read_only=True).steps() == [1, 2]
    assert "_METRICS: it is no JSON" in caplog.text


@pytest.mark.parametrize("content", [b"[]", b'{"save": "x", "metrics": {"a": 1}}', b"{}"])
def test_notes_of_others_do_not_count(tmp_path: Path, content: bytes):
    save_steps(tmp_path, 1)
    (tmp_path / "step_00000001" / "_METRICS").write_bytes(content)
    assert Manager(tmp_path, read_only=True).metrics(1) == {"loss": 1.0}


def test_refusals(tmp_path: Path):
    save_steps(tmp_path, 1)
    step = tmp_path / "1"
    with pytest.raises(ValueError, match="nothing to do; pass metrics= or pinned="):
        ostraka.annotate(step)
    with pytest.raises(TypeError, match="metrics must be a dict, such as {'loss': 0.5}, not 3"):
        ostraka.annotate(step, metrics=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="metric 'a' must be a number, not 'high'"):
        ostraka.annotate(step, metrics={"a": "high"})
    with pytest.raises(TypeError, match="pinned must be True, False or None, not 1"):
        ostraka.annotate(step, pinned=1)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at .*/7"):
        ostraka.annotate(tmp_path / "7", metrics={"a": 1})
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises((PathInTheWay, CheckpointNotFound), match="not written by Ostraka"):
        ostraka.annotate(other, metrics={"a": 1})
    assert sorted(path.name for path in other.iterdir()) == ["config.json"]
    assert module.__name__ == "ostraka.manager.annotate"
