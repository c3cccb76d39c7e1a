"""Metrics and pins that another process adds to committed steps."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import ostraka
from ostraka import Best, Manager
from ostraka.errors import CheckpointNotFound, PathInTheWay
from places import Place, names_of
from programs import run_quietly
from runs import fill, tree_of


def test_best_by_evaluation(place: Place):
    """The evaluator says that step 2 is the best. The loss of the training says 1."""
    fill(place, 1, 2, 3)
    for step, loss in {1: 0.5, 2: 0.1, 3: 0.9}.items():
        ostraka.annotate(place / str(step), metrics={"eval": loss})
    manager = Manager(place, read_only=True)
    assert manager.best(Best("eval")) == 2
    assert manager.best(Best("loss")) == 1
    assert manager.metrics(2) == {"loss": 2.0, "eval": 0.1}
    assert ostraka.verify(place / "2").notes == ()
    # They are added and replaced, also those of the newest step, until it is saved again.
    ostraka.annotate(place / "3", metrics={"a": 1, "b": float("nan")})
    ostraka.annotate(place, metrics={"a": 2.5, "eval": 0.0})
    found = manager.metrics(3)
    assert math.isnan(found.pop("b"))
    assert found == {"loss": 3.0, "eval": 0.0, "a": 2.5}
    fill(place, 3)
    assert manager.metrics(3) == {"loss": 3.0}


def test_retention_keeps_the_best_by_evaluation(tmp_path: Path):
    with Manager(tmp_path, keep=1, keep_best=Best("loss"), asynchronous=False) as manager:
        for step, loss in {1: 0.3, 2: 0.2}.items():
            manager.save(step, tree_of(step), metrics={"loss": loss})
        assert manager.steps() == [2]
        ostraka.annotate(tmp_path / "2", metrics={"loss": 7.0})  # worse than it looked
        manager.save(3, tree_of(3), metrics={"loss": 0.4})
        manager.save(4, tree_of(4), metrics={"loss": 0.5})
        assert manager.steps() == [3, 4]


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

    with Manager(tmp_path, keep=1, keep_best=Best("eval"), asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        monkeypatch.setattr(retain, "Claim", Late)
        manager.save(2, tree_of(2))
        assert manager.steps() == [1, 2]


def test_pins_from_another_process(tmp_path: Path):
    """Neither `annotate` nor `latest` needs JAX."""
    fill(tmp_path, 1)
    code = "import ostraka, sys; ostraka.annotate(sys.argv[1] + '/1', pinned=True)"
    code += "; print(ostraka.latest(sys.argv[1]), 'jax' in sys.modules)"
    assert run_quietly(code, tmp_path) == "1 False\n"
    fill(tmp_path, 2, 3, keep=1)
    reader = Manager(tmp_path, read_only=True)
    assert reader.steps() == [1, 3]
    ostraka.annotate(tmp_path / "1", pinned=False)
    fill(tmp_path, 4, keep=1)
    assert reader.steps() == [4]
    ostraka.annotate(tmp_path / "4", metrics={"eval": 0.1}, pinned=True)
    with Manager(tmp_path) as manager:
        manager.delete(4)
    assert names_of(tmp_path) == []


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"save": "x", "metrics": {"a": 1}}', b"{}"], ids=str
)
def test_notes_of_others_do_not_count(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
):
    """Those that can't be read keep the step."""
    fill(tmp_path, 2)
    (tmp_path / "step_00000002" / "_METRICS").write_bytes(content)
    assert Manager(tmp_path, read_only=True).metrics(2) == {"loss": 2.0}
    fill(tmp_path, 3, keep=1)
    is_unreadable = content == b"{"
    assert Manager(tmp_path, read_only=True).steps() == ([2, 3] if is_unreadable else [3])
    assert ("_METRICS: it is no JSON" in caplog.text) == is_unreadable


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, ValueError, "nothing to do; pass metrics= or pinned="),
    ({"metrics": 3}, TypeError, "metrics must be a dict, such as {'loss': 0.5}, not 3"),
    ({"metrics": {"a": "high"}}, TypeError, "metric 'a' must be a number, not 'high'"),
    ({"pinned": 1}, TypeError, "pinned must be True, False or None, not 1"),
]


def test_refusals(tmp_path: Path):
    fill(tmp_path, 1)
    for given, kind, message in WRONG:
        with pytest.raises(kind, match=message):
            ostraka.annotate(tmp_path / "1", **given)
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at .*/7"):
        ostraka.annotate(tmp_path / "7", metrics={"a": 1})
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises((PathInTheWay, CheckpointNotFound), match="not written by Ostraka"):
        ostraka.annotate(other, metrics={"a": 1})
    assert sorted(path.name for path in other.iterdir()) == ["config.json"]
