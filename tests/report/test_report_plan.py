"""The page of a plan: the numbers of `ostraka plan --json`, and sliders that recompute them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

import ostraka
from browser import (
    WIDTHS_PX,
    click,
    complaints,
    hover,
    is_wider_than_screen,
    open_page,
    wait_until,
)
from cli_runs import assert_fails, planned
from cli_runs import run as run_command
from ostraka.planner.report import describe_plan
from ostraka.planner.time import Bandwidths
from ostraka.report import page as pages
from ostraka.report import plan as plans

RATES = ("--write-bandwidth", "3GB/s", "--read-bandwidth", "5GB/s", "--device-bandwidth", "30GB/s")


def run(*arguments: object) -> Result:
    return run_command("plan", *arguments)


def data_of(file: Path) -> dict[str, Any]:
    """The document of a page."""
    found = re.search(r'id="data">(.*?)</script>', file.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])["documents"][0]


@pytest.fixture(scope="module")
def largest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of Llama 3.1 405B on two meshes, with a few choices."""
    file = tmp_path_factory.mktemp("page") / "plan.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "_MOST_CHOICES", 2)
        variant = "--mesh data=64,model=16 --parity 1"
        result = run(
            *("llama-3.1-405b", "--mesh", "data=128,model=8", "--optimizer", "adamw"),
            *("--compare", variant, "--report", file),
        )
    assert result.exit_code == 0, result.output
    return file


# Numbers

CASES = [
    (Bandwidths(), None),
    (Bandwidths(host_write=2e9), None),
    (Bandwidths(host_write=2e9, host_read=7e8, device=2e10), 3600.0),
    (Bandwidths(storage=1e8), 600.0),
    (Bandwidths(host_write=1e6, host_read=1e6, storage=3e6, device=1e7), 60.0),
    (Bandwidths(host_write=1e9, storage=5e8, device=1e5), 30 * 86400.0),
    (Bandwidths(host_read=123456789.0, device=1.0), None),
]


def times_in(document: dict[str, Any]) -> dict[str, Any]:
    """The times of `ostraka plan --json`, under the names of the page."""
    recovery, interval = document["recovery"], document["interval"] or {}
    return {
        "save_s": document["save"]["duration_s"],
        "restore_s": document["restore"]["duration_s"],
        "save_async_blocked_s": document["save"]["save_async_blocked_s"],
        "onto_s": [onto["duration_s"] for onto in document["onto"]],
        "lost_shard_s": recovery["lost_shard"]["duration_s"],
        "lost_host_s": recovery["lost_host"]["duration_s"],
        "lost_disk_s": recovery["lost_disk"]["duration_s"],
        "save_every": interval.get("save"),
        "save_async_every": interval.get("save_async"),
    }


def flat(times: dict[str, Any]) -> dict[str, Any]:
    """All numbers of some times by one name each. Unknown times have no number."""
    named = {name: v if isinstance(v, dict) else {"": v} for name, v in times.items()}
    named["onto_s"] = dict(enumerate(times["onto_s"]))
    return {
        f"{name} {part}": value
        for name, parts in named.items()
        for part, value in parts.items()
        if value is not None
    }


def test_the_page_computes_as_the_planner(browser: Any):
    made = ostraka.plan("gpt2", mesh={"data": 8}, processes=4, optimizer="adamw")
    onto = [plans.mesh_of_sizes({"data": 4})]
    wanted = [
        describe_plan(made, rates, onto=onto, onto_hosts=2, mtbf_s=mtbf) for rates, mtbf in CASES
    ]
    cases = [
        {"plan": document, "rates": plans.asdict(rates), "mtbf": mtbf}
        for document, (rates, mtbf) in zip(wanted, CASES, strict=True)
    ]
    browser.open("about:blank")
    source = (Path(pages.__file__).parent / "assets" / "plan.js").read_text("utf-8")
    formulas = re.sub(r"^import .*\n", "", source.replace("export ", ""), flags=re.MULTILINE)
    formulas = formulas[: formulas.index("// The settings of the page")]
    script = "return arguments[0].map((c) => planTimes(c.plan, c.rates, c.mtbf))"
    found = browser.run(f"{formulas}\n{script}", cases)
    for times, document in zip(found, wanted, strict=True):
        assert flat(times) == pytest.approx(flat(times_in(document)), rel=1e-12)


def test_a_page_has_the_document_of_the_command(tmp_path: Path):
    asked = ("gpt2", "--mesh", "data=8,model=2", *RATES, "--mtbf", "4h", "--keep", "5")
    assert run(*asked, "--report", tmp_path / "p.html").exit_code == 0
    (variant,) = data_of(tmp_path / "p.html")["variants"]
    wanted = planned(*asked)
    assert variant["numbers"]["plan"] == {k: v for k, v in wanted.items() if k != "title"}
    assert variant["inputs"]["mtbf_s"] == 4 * 3600
    meshes = [{"data": 8, "model": 2}, {"data": 4, "model": 2}, {"data": 16, "model": 2}]
    assert variant["meshes"] == [*meshes, {"data": 8, "model": 1}, {"data": 8, "model": 4}]
    assert variant["dtypes"] == ["float32", "bfloat16"]
    for choice in variant["choices"]:
        mesh = ",".join(f"{a}={n}" for a, n in variant["meshes"][choice["mesh"]].items())
        dtype = variant["dtypes"][choice["dtype"]]
        if choice["mesh"] and choice["dtype"] == 0 and choice["mesh"] != 2:
            continue  # one of each kind is enough
        own = planned(*asked, "--mesh", mesh, "--dtype", dtype)
        assert choice["numbers"]["plan"]["total_bytes"] == own["total_bytes"]
        assert choice["numbers"]["plan"]["save"] == own["save"]


def test_hosts_and_files_are_counted(tmp_path: Path):
    made = ostraka.plan("gpt2", mesh={"data": 128}, processes=128)
    question = plans.PlanQuestion("gpt2", plans.PlanOptions(), Bandwidths())
    answer = plans.PlanAnswer(question, made, {"groups": {}})
    found = plans._numbers_of(answer)
    assert (len(found["hosts"]), found["hosts"][0], found["hosts"][-1]) == (64, 0, 127)
    assert found["host_bytes"][-1] == made.bytes_by_process[127]
    edges, counts = found["file_bytes"]["edges"], found["file_bytes"]["counts"]
    sizes = np.array([*made.files.values()])
    assert counts == np.histogram(sizes, [*edges[:-1], edges[-1] + 0.5])[0].tolist()


def test_a_plan_of_a_checkpoint_has_no_choices(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"w": np.ones((4, 4))})
    result = run(tmp_path / "c", "--max-file", "1MB", "--report", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    (variant,) = data_of(tmp_path / "p.html")["variants"]
    assert variant["choices"] == []
    result = run(tmp_path / "c", "--max-file", "10B", "--report", tmp_path / "p.html")
    assert result.exit_code == 3


def test_a_variant_has_no_page_of_its_own(tmp_path: Path):
    result = run("gpt2", "--compare", "--report x.html")
    assert_fails(result, "can't have options of the whole command")


# The page


def figure(browser: Any, name: str, n: int = 0) -> str:
    """A large number of the overview."""
    script = (
        "return [...document.querySelectorAll('.figure')].filter(e => e.querySelector('span')"
        ".innerText === arguments[0])[arguments[1]].querySelector('b').innerText"
    )
    return browser.run(script, name, n)


def move(browser: Any, name: str, place: int) -> None:
    script = (
        "const e = document.getElementById(`plan-${arguments[0]}`); e.value = arguments[1];"
        "e.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    browser.run(script, name, place)


def test_the_largest_plan_is_small_and_marks_the_better(browser: Any, largest: Path):
    assert largest.stat().st_size < 5 << 20
    open_page(browser, largest.as_uri())
    document = data_of(largest)
    assert figure(browser, "parameters") == "405,853,388,800"
    rows = browser.run(
        "return [...document.querySelectorAll('.contest tbody tr')].map(r => ["
        "r.cells[0].firstChild.data, [...r.cells].slice(1, 3).map(c => c.matches('.best'))])"
    )
    names = [variant["name"] for variant in document["variants"]]
    wanted = {
        row["title"]: [name in row["best"] for name in names] for row in document["comparison"]
    }
    assert {title: best for title, best in rows if title in wanted} == wanted
    assert any(sum(best) == 1 for best in wanted.values())
    for width in WIDTHS_PX:
        browser.set_size(width, 900)
        assert not is_wider_than_screen(browser)
    browser.set_size(WIDTHS_PX[0], 900)
    assert complaints(browser, own="file://") == []


def test_sliders_choices_and_theme(browser: Any, tmp_path: Path):
    asked = ("gpt2", "--mesh", "data=8", "--optimizer", "adamw")
    assert run(*asked, "--report", tmp_path / "p.html").exit_code == 0
    open_page(browser, (tmp_path / "p.html").as_uri())
    assert "Times use assumed numbers" in browser.run("return document.body.innerText")
    kinds = "return [...document.querySelectorAll('.slider .badge')].map(e => e.innerText)"
    assert browser.run(kinds) == [*["assumed"] * 2, "not given", *["assumed"] * 3]
    before, size = figure(browser, "to save"), figure(browser, "in all")
    move(browser, "host_write", 400)  # 100 GB/s
    assert browser.run("return document.querySelector('.slider output').innerText") == "100 GB/s"
    assert browser.run(kinds)[0] == "moved"
    fast = planned(*asked, "--write-bandwidth", "100GB/s")
    assert figure(browser, "to save") == f"{fast['save']['duration_s'] * 1000:.0f} ms" != before
    buttons = "[...document.querySelectorAll('.choice button')]"
    browser.run(f"{buttons}.find(e => e.innerText === 'bfloat16').click()")
    assert figure(browser, "in all") != size
    browser.run(f"{buttons}.find(e => e.innerText === 'data=16').click()")
    assert "data=16, 16 devices on 2 hosts" in browser.run("return document.body.innerText")
    browser.run(
        "[...document.querySelectorAll('button')].find(e => e.innerText === 'Reset').click()"
    )
    assert (figure(browser, "to save"), figure(browser, "in all")) == (before, size)
    hover(browser, "rect.bar")
    assert "written by a host" in wait_until(browser, "document.querySelector('#tip')?.innerText")
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = browser.run(colour)
    for _ in range(2):
        click(browser, "#theme")
    assert browser.run(colour) != light
    click(browser, "#theme")
    assert complaints(browser, own="file://") == []


def test_hostile_names_are_text(browser: Any, tmp_path: Path):
    path = tmp_path / "<img src=x onerror=alert(1)>"
    ostraka.save(path, {"<script>alert(1)<": np.ones((4, 4))})
    assert run(path, "--report", tmp_path / "p.html").exit_code == 0
    open_page(browser, (tmp_path / "p.html").as_uri())
    assert browser.run("return document.querySelectorAll('img, main script').length") == 0
    shown = browser.run("return document.body.innerText")
    assert "<img src=x onerror=alert(1)>" in shown
    assert "<script>alert(1)<" in shown
    assert complaints(browser, own="file://") == []
