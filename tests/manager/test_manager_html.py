"""A Manager in a notebook."""

from pathlib import Path

import ostraka
from html_pages import texts_in
from ostraka import Manager
from runs import tree_of


def test_a_manager_shows_its_steps_the_newest_first(tmp_path: Path):
    name = "<b>x</b>"
    with Manager(tmp_path, asynchronous=False) as manager:
        assert texts_in(manager._repr_html_()) == ["Manager", str(tmp_path), "state", "open"]
        for step in (1000, 2000, 3000):
            manager.save(step, tree_of(step), metrics={"loss": 1e-5 / step, name: 0.5})
        (tmp_path / "step_00002000" / "_METADATA").write_text("{")
        ostraka.annotate(f"{tmp_path}/1000", pinned=True)
    texts = texts_in(manager._repr_html_())
    assert texts[:4] == ["Manager", str(tmp_path), "state", "closed"]
    assert "3 steps" in texts
    steps = [text for text in texts if text in ("1,000", "2,000", "3,000")]
    assert steps == ["3,000", "2,000", "1,000"]
    assert {name, "pinned", "3.33333e-09"} <= {*texts}
    assert any("_METADATA" in text for text in texts)
