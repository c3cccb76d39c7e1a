"""The document and the page of a run directory, and the file `_RUN` that its Manager writes."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from browser import WIDTHS_PX, complaints, hover, is_wider_than_screen, open_page
from browser import wait_until as wait_in_page
from cli_runs import as_json, assert_fails, run
from ostraka import Best, Manager
from ostraka.cli._output import human_size
from ostraka.errors import CheckpointNotFound
from ostraka.manager.run_file import decode_run_file, read_run_file
from ostraka.report.run import RunReader, describe_run
from ostraka.report.steps import is_run
from ostraka.storage import open_store
from proxies import proxied
from runs import damage, fill, tree_of, wait_until
from servers import Server

STEPS = list(range(100, 5001, 100))
DAMAGED, PINNED, EVALUATED = 2000, 300, 4000


def tree(step: int) -> dict[str, Any]:
    params = {"w": np.full((16, 8), step, np.float32), "b": np.zeros(8, np.float32)}
    return {
        "params": params,
        "opt_state": {"mu": params["w"] + 1},
        "count": np.arange(4),
        "step": step,
    }


def loss_at(step: int) -> float:
    return float("nan") if step == 900 else 100 / step


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 50 steps: one pinned, one damaged, one evaluated later, and one that goes next."""
    root = tmp_path_factory.mktemp("runs") / "fifty"
    with Manager(root, every=100, keep=49, keep_best="loss", asynchronous=False) as manager:
        for step in STEPS:
            manager.save(step, tree(step), metrics={"loss": loss_at(step), "gain": step % 700})
            if step == PINNED:
                manager.pin(PINNED)
    # 100 is gone: 49 are kept beside the pinned step.
    with Manager(root, every=100, keep=49, keep_best="loss") as manager:
        assert manager.steps() == STEPS[1:]
    shutil.rmtree(next((root / f"step_{DAMAGED:08d}").glob("shards-*")))
    ostraka.annotate(f"{root}/{EVALUATED}", metrics={"accuracy": 0.5})
    return root


def row_of(document: Any, step: int) -> Any:
    return next(row for row in document["steps"] if row["step"] == step)


# The numbers


def test_report_top_and_ls_agree(fifty: Path):
    (reported,) = as_json("report", fifty)["documents"]
    shown = as_json("top", fifty)
    listed = as_json("ls", fifty)
    for document in (reported, shown):
        document.pop("at")
        document["space"] = None
    assert reported == shown
    assert [row["step"] for row in reported["steps"]] == [row["step"] for row in listed["steps"]]
    for row, other in zip(reported["steps"], listed["steps"], strict=True):
        for name in ("path", "saved_at", "bytes", "metrics", "format", "pinned", "problems"):
            assert row[name] == other[name], name
    assert reported["bytes"] == sum(row["bytes"] for row in listed["steps"])


def test_what_is_said_of_steps(fifty: Path):
    found = describe_run(fifty)
    by_state = {row["step"]: row["state"] for row in found["steps"]}
    assert by_state.pop(DAMAGED) == "damaged"
    assert set(by_state.values()) == {"committed"}
    assert "missing" in row_of(found, DAMAGED)["problems"][0]
    assert [row["step"] for row in found["steps"] if row["pinned"]] == [PINNED]
    assert row_of(found, EVALUATED)["metrics"]["accuracy"] == 0.5
    assert row_of(found, 900)["metrics"]["loss"] == "nan"
    assert row_of(found, 5000)["groups"] == {"parameters": 544, "optimizer": 512, "other": 32}
    assert row_of(found, 5000)["blocked_s"] > 0
    assert found["metrics"]["loss"] == {"better": "low", "best_step": 5000, "latest": 0.02}
    assert found["metrics"]["gain"]["better"] is None
    assert found["metrics"]["accuracy"]["best_step"] == EVALUATED
    assert row_of(found, 5000)["best"] == ["loss"]
    assert found["rules"] is not None
    assert found["rules"]["saves"] == "every 100 steps"
    assert found["rules"]["keeps"] == "the last 49, the best by loss (min)"
    assert found["space"] is not None
    free, size = found["space"]["free_bytes"], found["steps"][-1]["bytes"]
    assert found["space"]["saves_left"] == free // (size or 1)
    assert any("1 step can't be used" in note for note in found["notes"])


def test_all_bytes_are_read_if_asked_for(tmp_path: Path):
    fill(tmp_path, 1, 2)
    damage(tmp_path, 1)
    assert [row["state"] for row in describe_run(tmp_path)["steps"]] == ["committed"] * 2
    found = describe_run(tmp_path, verified=True)
    assert [row["state"] for row in found["steps"]] == ["damaged", "verified"]


def test_what_is_a_run(tmp_path: Path):
    fill(tmp_path / "run", 7)
    ostraka.save(tmp_path / "one", tree_of(1))
    (tmp_path / "empty").mkdir()
    assert is_run(tmp_path / "run")
    assert not is_run(tmp_path / "run" / "step_00000007")
    assert not is_run(tmp_path / "run" / "7")
    assert not is_run(tmp_path / "one")
    assert not is_run(tmp_path / "empty")
    with pytest.raises(CheckpointNotFound, match="is a checkpoint, not a directory of steps"):
        describe_run(tmp_path / "one")
    with pytest.raises(CheckpointNotFound, match="there is no directory"):
        describe_run(tmp_path / "nothing")


# What goes next


@pytest.mark.parametrize(
    ("rules", "going"),
    [
        ({"keep": 3}, {6}),
        ({"keep": 1, "keep_every": 3}, {8}),
        ({"keep": 2, "keep_best": "loss"}, {7}),
        ({"keep_every_s": 1e6}, {8}),
        ({}, set()),
    ],
)
def test_the_next_save_deletes_what_was_foretold(
    tmp_path: Path, rules: dict[str, Any], going: set[int]
):
    fill(tmp_path, *range(1, 9), **rules)
    before = describe_run(tmp_path)["steps"]
    assert {row["step"] for row in before if row["goes_next"]} == going
    with Manager(tmp_path, asynchronous=False, **rules) as manager:
        manager.save(9, tree_of(9))  # Without metrics: it is not among the best.
    after = {row["step"] for row in describe_run(tmp_path)["steps"]}
    assert {row["step"] for row in before} - after == going


def test_a_function_can_not_be_foretold(tmp_path: Path):
    fill(tmp_path, 1, 2, keep=1, keep_if=lambda step: True)
    found = describe_run(tmp_path)
    assert not any(row["goes_next"] for row in found["steps"])
    assert any("keep_if, a function" in note for note in found["notes"])


def test_a_step_that_is_held_stays(tmp_path: Path):
    fill(tmp_path, 1, 2, 3)
    fill(tmp_path, keep=3)
    assert [row["goes_next"] for row in describe_run(tmp_path)["steps"]] == [True, False, False]
    with Manager(tmp_path, read_only=True) as reader:
        watched = reader.watch(backlog=0)
        assert next(watched) == 1
        found = describe_run(tmp_path)
        assert [row["held"] for row in found["steps"]] == [1, 0, 0]
        assert not any(row["goes_next"] for row in found["steps"])
        watched.close()
    assert [row["held"] for row in describe_run(tmp_path)["steps"]] == [0, 0, 0]


def test_the_mirror(tmp_path: Path):
    root, mirror = tmp_path / "run", tmp_path / "mirror"
    fill(root, 1, 2, 3, 4, mirror=mirror, mirror_every=2)
    found = describe_run(root)
    assert [row["mirrored"] for row in found["steps"]] == [None, True, None, True]
    assert found["mirror"] is not None
    assert (found["mirror"]["newest"], found["mirror"]["waiting"]) == (4, [])
    assert found["mirror"]["lag_s"] == 0
    (mirror / "step_00000006").write_text("in the way")
    with pytest.raises(ostraka.errors.StoreError, match="lacks step 6"):
        fill(root, 6, mirror=mirror, mirror_every=2)
    found = describe_run(root)
    assert found["mirror"] is not None
    assert found["mirror"]["waiting"] == [6]
    assert found["mirror"]["lag_s"] > 0
    assert "step_00000006" in found["mirror"]["problem"]


# The file of the Manager


def test_the_file_says_who_writes(tmp_path: Path):
    with Manager(tmp_path, keep=2, mtbf_s=3600) as manager:
        manager.save(1, tree_of(1))
        manager.wait()
        wait_until(lambda: (describe_run(tmp_path)["advice"] or {}).get("saves") == 1)
        writer = describe_run(tmp_path)["writer"]
        assert writer is not None
        assert writer["is_running"]
        assert writer["since"] <= time.time()
    found = describe_run(tmp_path)
    assert found["writer"] is None
    assert found["advice"] is not None
    assert found["advice"]["text"].startswith("a save costs the loop")
    assert found["advice"]["interval_s"] > 0


def test_an_automatic_interval(tmp_path: Path):
    fill(tmp_path, 1, every="auto", overhead=0.01)
    found = describe_run(tmp_path)
    assert found["rules"] is not None
    assert (found["rules"]["every"], found["rules"]["saves"]) == (
        "auto",
        "as often as the advice says",
    )
    assert found["advice"] is not None
    assert "of the time for saves" in found["advice"]["text"]


def test_readers_write_no_file(tmp_path: Path):
    fill(tmp_path, 1)
    (tmp_path / "_RUN").unlink()
    with Manager(tmp_path, read_only=True) as manager:
        assert manager.restore()["step"] == 1
    assert not (tmp_path / "_RUN").exists()
    found = describe_run(tmp_path)
    assert found["rules"] is None
    assert any("No Manager says what it keeps" in note for note in found["notes"])


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def spoil(data: bytes) -> bytes:
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: b"[]",
        lambda data: b"\xff",
        lambda data: b"[" * 100_000,
        lambda data: data + b" " * (1 << 20),
        changed(lambda document: document.update(format=2)),
        changed(lambda document: document.update(since=float("nan"))),
        changed(lambda document: document.update(since=1e300)),
        changed(lambda document: document.update(pid=0)),
        changed(lambda document: document.update(host=["x"])),
        changed(lambda document: document["rules"].update(keep=-1)),
        changed(lambda document: document["rules"].update(at=7)),
        changed(lambda document: document["rules"].update(mirror=7)),
        changed(lambda document: document["rules"].update(keep_best={"metric": 1})),
        changed(lambda document: document["rules"].update(keep_best={"metric": "x", "mode": []})),
        changed(lambda document: document.update(advice={"saves": "many"})),
        changed(lambda document: document.update(advice={"saves": 1, "interval_s": 5})),
        changed(lambda document: document["rules"].update(every="often")),
        changed(lambda document: document.update(mirror={"waiting": ["x"]})),
    ],
)
def test_a_file_that_no_manager_wrote_is_left_out(tmp_path: Path, spoil: Callable[[bytes], bytes]):
    fill(tmp_path, 1, keep=1, keep_best=Best("loss"))
    file = tmp_path / "_RUN"
    assert decode_run_file(file.read_bytes()).rules.keep == 1
    file.write_bytes(spoil(file.read_bytes()))
    found = describe_run(tmp_path)
    assert found["rules"] is found["writer"] is found["advice"] is found["mirror"] is None
    assert found["notes"][0].startswith("_RUN is left out")
    json.dumps(found, allow_nan=False)
    # The next Manager writes its own.
    fill(tmp_path, 2, keep=1)
    assert read_run_file(open_store(tmp_path))[0] is not None


def test_nothing_else_minds_the_file(tmp_path: Path):
    root = tmp_path / "run"
    fill(root, 1, 2)
    (root / "_RUN.0123.tmp").write_text("of a process that was killed")
    assert "nothing was left behind" in run("gc", root, "--yes").stdout
    assert [row["step"] for row in as_json("ls", root)["steps"]] == [1, 2]
    assert run("verify", root).exit_code == 0
    assert ostraka.latest(root) == 2
    ostraka.copy(root / "1", tmp_path / "copy")
    fill(root, 3, mirror=tmp_path / "mirror")
    assert not (root / "_RUN.0123.tmp").exists()
    assert sorted(path.name for path in (tmp_path / "mirror").iterdir()) == [
        f"step_{step:08d}" for step in (1, 2, 3)
    ]
    # A directory with nothing else in it is a run that has not begun.
    (tmp_path / "begun").mkdir()
    shutil.copy(root / "_RUN", tmp_path / "begun")
    assert ostraka.latest(tmp_path / "begun") is None
    assert describe_run(tmp_path / "begun")["steps"] == []


# The cost in a bucket


def test_a_look_takes_one_request_for_each_new_step(
    bucket: str, servers: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
):
    server = servers("google" if bucket.startswith("gs:") else "moto")
    fill(bucket, *range(1, 21))
    with proxied(int(server.endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv(server.variable, f"http://127.0.0.1:{proxy.port}")
        reader = RunReader(bucket)

        def requests_of_a_look() -> int:
            proxy.requests.clear()
            assert all(row["state"] == "committed" for row in reader.look()["steps"])
            return proxy.requests.total()

        # The listing and `_RUN`, and one for each step.
        assert requests_of_a_look() == 20 + 2
        assert requests_of_a_look() == 2
        fill(bucket, 21, 22, 23)
        ostraka.annotate(f"{bucket}/21", pinned=True)
        assert requests_of_a_look() == 3 + 2
        assert [row["step"] for row in reader.look()["steps"] if row["pinned"]] == [21]
        assert requests_of_a_look() == 2


# The page


def test_the_page(fifty: Path, browser: Any, tmp_path: Path):
    page = tmp_path / "page.html"
    assert run("report", fifty, "-o", page).exit_code == 0
    assert page.stat().st_size < 200_000
    url = page.as_uri()
    for width_px in reversed(WIDTHS_PX):
        browser.set_size(width_px, 900)
        open_page(browser, url)
        wait_in_page(browser, "document.querySelectorAll('.plot svg').length === 6")
        assert not is_wider_than_screen(browser)
    found = describe_run(fifty)
    text = browser.run("return document.getElementById('page').textContent")
    newest = found["steps"][-1]
    cells = "[...document.querySelectorAll('#table tbody tr td:first-child')]"
    shown_steps = browser.run(f"return {cells}.map((cell) => cell.textContent)")
    assert shown_steps == [f"{row['step']:,}" for row in reversed(found["steps"])]
    first = "return [...document.querySelectorAll('#table tbody tr:first-child td')]"
    cells = browser.run(f"{first}.map((cell) => cell.textContent)")
    assert f"{newest['metrics']['loss']}" in cells
    assert human_size(newest["bytes"]) in cells
    assert "goes next" in text
    marks = "return document.querySelectorAll('#steps .plot .mark.' + arguments[0]).length"
    states = [(row["state"], row["goes_next"]) for row in found["steps"]]
    assert browser.run(marks, "committed") == sum(state == "committed" for state, _ in states)
    assert browser.run(marks, "damaged") == 1
    assert browser.run(marks, "going") == sum(going for _, going in states) == 1
    assert browser.run(marks, "pinned") == 1
    assert browser.run("return document.querySelectorAll('.mark.nan').length") == 1
    hover(browser, "#steps .plot svg")
    tip = wait_in_page(browser, "document.getElementById('tip')?.textContent")
    assert tip.startswith("step ")
    assert "committed" in tip or f"step {DAMAGED:,} damaged" in tip
    assert browser.run("return document.querySelectorAll('.cross:not([visibility])').length") == 6
    browser.run("document.querySelector('#sizes .area').focus()")
    key = {"type": "keyDown", "key": "End", "code": "End"}
    browser.command("Input.dispatchKeyEvent", key)
    wait_in_page(browser, "document.getElementById('tip').textContent.startsWith('step 5,000')")
    background = "return getComputedStyle(document.body).backgroundColor"
    colours = set[str]()
    for _ in range(3):
        browser.run("document.getElementById('theme').click()")
        colours.add(browser.run(background))
    assert len(colours) == 2
    assert complaints(browser, own=url) == []


def test_marks_have_a_row_each(browser: Any, tmp_path: Path):
    root = tmp_path / "run"
    fill(root, *range(1, 7), mirror=tmp_path / "mirror", mirror_every=2, keep=9, keep_best="loss")
    with Manager(root, read_only=True) as reader:
        held = next(watched := reader.watch(backlog=0))
        ostraka.annotate(f"{root}/3", pinned=True)
        page = tmp_path / "page.html"
        assert run("report", root, "-o", page).exit_code == 0
        watched.close()
    open_page(browser, page.as_uri())
    count = "return document.querySelectorAll('#steps .plot .mark.' + arguments[0]).length"
    wait_in_page(browser, "document.querySelector('#steps .plot .mark')")
    marks = {"committed": 6, "pinned": 1, "best": 1, "mirrored": 3, "held": 1}
    assert {name: browser.run(count, name) for name in marks} == marks
    lanes = "[...document.querySelectorAll('#steps .plot .label')].map((one) => one.textContent)"
    assert sorted(browser.run(f"return {lanes}")) == ["best", "held", "mirrored", "pinned", "saved"]
    assert held in range(1, 7)
    assert complaints(browser, own=page.as_uri()) == []


def test_metrics_of_any_size_are_drawn(browser: Any, tmp_path: Path):
    inf, nan = float("inf"), float("nan")
    metrics = {
        "none": [nan, inf, -inf],
        "huge": [1.7e308, -1.7e308, 0.0],
        "tiny": [5e-324, 1e-323, 5e-320],
        "same": [1e-300] * 3,
        "large": [10.0**15, 10.0**15 + 1, 10.0**15 + 2],
        "some": [nan, 1.0, 2.0],
    }
    with Manager(tmp_path / "run", asynchronous=False) as manager:
        for step in range(3):
            manager.save(step, tree_of(step), metrics={k: v[step] for k, v in metrics.items()})
    page = tmp_path / "page.html"
    assert run("report", tmp_path / "run", "-o", page).exit_code == 0
    open_page(browser, page.as_uri())
    for name, values in metrics.items():
        card = f"document.querySelector('[data-metric={name}]')"
        wait_in_page(browser, f"{card}.querySelector('svg')")
        odd = sum(not np.isfinite(value) for value in values)
        assert browser.run(f"return {card}.querySelectorAll('.mark.nan').length") == odd
        assert browser.run(f"return {card}.querySelectorAll('circle:not(.mark)').length") == 3 - odd
        said = browser.run(f"return {card}.querySelector('.badge')?.textContent ?? ''")
        assert said == (f"{odd} value{'s' if odd > 1 else ''} not finite" if odd else "")
    assert complaints(browser, own=page.as_uri()) == []


@pytest.mark.parametrize(
    ("output", "why"),
    [("", "is a directory; name the page"), ("no/page.html", "there is no directory .*/no for")],
)
def test_a_page_that_can_not_be_written_is_refused_at_once(tmp_path: Path, output: str, why: str):
    for command in (("report", tmp_path, "-o"), ("plan", "gpt2", "--report")):
        result = run(*command, tmp_path / output)
        assert_fails(result)
        assert re.search(why, result.stderr)


def test_names_in_a_run_are_no_markup(browser: Any, tmp_path: Path):
    name = "<img src=x onerror=alert(1)>\u202e"
    with Manager(tmp_path / "run", asynchronous=False) as manager:
        for step in range(2):
            manager.save(step, tree_of(step), metrics={name: float(step)})
    page = tmp_path / "page.html"
    run("report", tmp_path / "run", "-o", page)
    open_page(browser, page.as_uri())
    wait_in_page(browser, "document.querySelectorAll('.plot svg').length > 2")
    assert browser.run("return document.querySelectorAll('img').length") == 0
    shown = browser.run("return document.querySelector('[data-metric] h2').textContent")
    assert shown == "<img src=x onerror=alert(1)>\\u202e"
    assert complaints(browser, own=page.as_uri()) == []


def test_a_run_of_many_steps_is_read_once(tmp_path: Path):
    fill(tmp_path, *range(1, 6))
    reader = RunReader(tmp_path)
    first = reader.look()
    for step in (1, 2, 3, 4, 5):
        metadata = tmp_path / f"step_{step:08d}" / "_METADATA"
        # Another text in the same file: only a reader that reads again notices.
        at = metadata.stat()
        data = metadata.read_bytes()
        with metadata.open("r+b") as file:
            file.write(b" " * len(data))
        os.utime(metadata, ns=(at.st_atime_ns, at.st_mtime_ns))
    again = reader.look()
    assert again["steps"] == first["steps"]
    assert describe_run(tmp_path)["steps"] != first["steps"]
